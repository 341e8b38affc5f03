"""`FederatedData`: the samples of all clients in flat arrays.

The samples of all clients are stored one client after the other in `x [S, ...]` and `y [S, ...]`, arrays or pytrees of arrays.
Memory holds every sample once, and nothing is padded to the size of the largest client. A view ("train", "test", "support",
"query") is a contiguous part of each client's samples, stored as one start and one size per client. Axis letters: N clients, S
samples, K classes.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import overload

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks, runtime
from fedjax_meta.data.views import ClientData, ClientView, check_view
from fedjax_meta.types import PyTree, Scalar


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "y", "offset", "scale", "start", "size", "ids"],
    meta_fields=["max_size", "num_classes", "population", "same_size", "shapes", "drawn"],
)
@dataclasses.dataclass(frozen=True)
class FederatedData:
    """The samples of all clients. Build it with `from_partition` or `from_clients`, which check their input.

    Attributes:
      x: inputs of all clients `[S, ...]`, as stored (images stay uint8): an array or a pytree of arrays.
      y: int32 labels `[S]`, or of the parts of a sample `[S, T]`; real targets `[S, ...]`; a `task.Weighted` of one of these; or
        another pytree of arrays.
      offset, scale: arrays that broadcast against one sample; a batch holds `(x - offset) * scale`. `None`: as stored. Where `x`
        is a pytree, trees like it with `None` for a leaf that is as stored.
      start, size: for each view, int32 `[N]`.
      max_size: for each view the size of the largest client, as static (name, size) pairs.
      num_classes: K; 0 for real targets, and for a pytree of targets.
      ids: int32 `[N]`, the clients' ids in a larger population (see `select`); `None` if client i has id i.
      population: number of clients of that population; `None` if it is N.
      same_size: names of the views in which all clients have `max_size` samples, static. An accelerator then knows the number of
        steps of a client when it compiles, and does not wait for the host after each.
      shapes: of one sample, for each leaf of `x`, static, where `x` holds samples as rows of numbers (see `flat`); `None` where
        it holds them in their shapes.
      drawn: where a host store has picked these clients, such as a cohort, and the state's rows are theirs in this order: the
        number of clients that it drew from, static; else `None`.
    """

    x: PyTree
    y: PyTree
    offset: PyTree
    scale: PyTree
    start: Mapping[str, jax.Array | np.ndarray]
    size: Mapping[str, jax.Array | np.ndarray]
    max_size: tuple[tuple[str, int], ...]
    num_classes: int
    ids: jax.Array | np.ndarray | None = None
    population: int | None = None
    same_size: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] | None = None
    drawn: int | None = None

    @property
    def num_clients(self) -> int:
        """N."""
        return next(iter(self.size.values())).shape[0]

    @property
    def total_clients(self) -> int:
        """Number of clients of the whole population: N, unless these data are a subset of it."""
        return self.num_clients if self.population is None else self.population

    @property
    def drawn_from(self) -> int:
        """Number of clients from which a round draws its cohort."""
        return self.num_clients if self.drawn is None else self.drawn

    @property
    def labelled(self) -> bool:
        """Whether each sample has one class label: `y` is int32 `[S]`, one of K classes."""
        return self.num_classes > 0 and getattr(self.y, "ndim", 0) == 1

    @property
    def views(self) -> tuple[str, ...]:
        """Names of the views."""
        return tuple(name for name, _ in self.max_size)

    def sizes(self, view: str) -> jax.Array | np.ndarray:
        """Int32 `[N]`: number of samples of each client in a view."""
        check_view(view, self.size)
        return self.size[view]

    @overload
    def ids_of(self, clients: jax.Array) -> jax.Array: ...
    @overload
    def ids_of(self, clients: np.ndarray) -> jax.Array | np.ndarray: ...
    def ids_of(self, clients: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
        """Ids in the whole population, int32 `[...]`, of the clients at positions `clients`, int `[...]`, of these data.

        The result is a NumPy array if `clients` and `ids` are. A negative position, an empty place, gives -1.
        """
        clients = clients.astype(np.int32) if isinstance(clients, np.ndarray) else jnp.asarray(clients, jnp.int32)
        if self.ids is None:
            return clients
        ids = _rows(self.ids, clients)
        return (np if isinstance(ids, np.ndarray) else jnp).where(clients < 0, -1, ids).astype(np.int32)

    def select(self, clients: jax.Array | np.ndarray) -> "FederatedData":
        """A subset of the clients as data of its own; no sample is copied.

        The clients keep their ids. Everything that depends on an id, such as a client's key in a round, stays the same.

        Args:
          clients: int `[N']`, positions; may be traced.
        """
        checks.indices("clients", clients, self.num_clients)
        clients = np.asarray(clients, int) if isinstance(clients, (list, tuple)) else clients
        start, size = ({name: _rows(values, clients) for name, values in of.items()} for of in (self.start, self.size))
        return dataclasses.replace(self, start=start, size=size, ids=self.ids_of(clients), population=self.total_clients)

    def limited(self, view: str, most: int) -> "FederatedData":
        """The same clients with at most the first `most` samples of a view; no sample is copied.

        Raises:
          ValueError: a view that the data do not have, a count below 1.
        """
        checks.count("most", most)
        xp = np if isinstance(self.sizes(view), np.ndarray) else jnp
        bounds = tuple((name, min(bound, most) if name == view else bound) for name, bound in self.max_size)
        return dataclasses.replace(self, size={**self.size, view: xp.minimum(self.sizes(view), most)}, max_size=bounds)

    @property
    def sample_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of one sample for each leaf of `x`, however it is stored."""
        return tuple(leaf.shape[1:] for leaf in jax.tree.leaves(self.x)) if self.shapes is None else self.shapes

    def flat(self) -> "FederatedData":
        """The same samples, each a row of numbers until it stands in a batch.

        A TPU pads the last two axes of an array to tiles: an image `[28, 28, 1]` of bytes takes 146 times its size there, and a
        row of 784 of them 1.14 times. `simulate` and `sweep` do this for a TPU by themselves.
        """
        if self.shapes is not None:
            return self
        x = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], -1) if leaf.ndim > 2 else leaf, self.x)
        return dataclasses.replace(self, x=x, shapes=self.sample_shapes)

    def client(self, index: Scalar) -> ClientData:
        """The data of the client at position `index`.

        Args:
          index: an integer, may be traced. A negative index gives a client that pads a cohort: it has no samples, or, on an
            accelerator where all have the same number, as many as all.

        Raises:
          ValueError: an `index` that is not traced and is N or more.
        """
        if isinstance(index, (int, np.integer)) and index >= self.num_clients:
            raise ValueError(f"index={index}, but there are N={self.num_clients} clients, counted from 0")
        form = (getattr(index, "shape", None), getattr(index, "dtype", np.dtype(bool)))
        if isinstance(index, bool) or not (isinstance(index, int) or (form[0] == () and np.issubdtype(form[1], np.integer))):
            raise ValueError(f"index={checks.shown(index)} must be one integer, the position of a client")
        real, bound = index >= 0, dict(self.max_size)

        def view(name: str) -> ClientView:
            start = jnp.asarray(self.start[name])[index]
            if name in self.same_size and not runtime.on_cpu():
                size: Scalar = bound[name]
            else:
                # On a CPU a loop costs the same either way, and a client that pads a cohort should cost nothing.
                size = jnp.where(real, jnp.asarray(self.size[name])[index], 0)
            return ClientView(self.x, self.y, self.offset, self.scale, start, size, bound[name], shapes=self.shapes)

        return ClientData({name: view(name) for name in self.views})


def _rows(values: jax.Array | np.ndarray, index: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """`values[index]`, computed by NumPy if both are NumPy arrays."""
    return values[index] if isinstance(values, np.ndarray) and isinstance(index, np.ndarray) else jnp.asarray(values)[index]
