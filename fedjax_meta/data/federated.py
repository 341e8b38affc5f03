"""Many clients' samples in flat arrays, and what one client sees of them.

The samples of all clients stand one after the other in `x [S, ...]` and `y [S]`, each client's own in one run, so memory holds
every sample once and nothing is padded to the largest client. A view is a named run inside each client's run ("train", "test",
"support", "query"): one start and one size a client. Axis letters: N clients, S samples, B batch, K classes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks
from fedjax_meta.data.shuffle import permuted, round_keys
from fedjax_meta.task import Batch, Key

CHUNK = 96
"""Samples that go through a model at once, at most, where no batch size is prescribed. On a CPU the activations of more of them
fall out of the cache: a LeNet's gradient takes 5 % longer in chunks of 128 and twice as long in chunks of 512."""


def _real_samples(batch: Any) -> jax.Array:
    return jnp.sum(batch.weight)


def _one(batch: Any) -> jax.Array:
    del batch
    return jnp.ones(())


@dataclasses.dataclass(frozen=True)
class Batches:
    """The batches that one client goes through, as a pure function of the step.

    A step may be too large for one batch (a full-batch gradient of a large client); it is then a sum over chunks.

    Attributes:
      get: `(step, chunk) -> batch`.
      steps: number of steps, a Python int or a traced int32 scalar.
      max_steps: static upper bound of `steps`, for whoever has to remember something of each step.
      chunks: batches that make up one step, a Python int or a traced int32 scalar.
      samples: `batch -> how many real samples it holds`: how much a chunk counts in the mean of its step.
    """

    get: Callable[[Any, Any], Any]
    steps: Any
    max_steps: int
    chunks: Any = 1
    samples: Callable[[Any], jax.Array] = _real_samples

    def keyed(self, key: Key) -> "Batches":
        """The same batches as pairs (batch, key), a key of its own for each; the key is consumed."""

        def get(step: Any, chunk: Any = 0) -> Any:
            return self.get(step, chunk), jax.random.fold_in(jax.random.fold_in(key, step), chunk)

        def samples(pair: Any) -> jax.Array:
            return self.samples(pair[0])

        return dataclasses.replace(self, get=get, samples=samples)

    def as_one_step(self, steps: int = 1, *, alike: bool = False) -> "Batches":
        """All the batches together as one step, and that `steps` times.

        Chunks count by their real samples, or, with `alike`, a partial last batch like a full one (S0's reference code).
        """

        def get(step: Any, chunk: Any = 0) -> Any:
            del step
            return self.get(chunk, 0)

        return Batches(
            get=get,
            steps=steps,
            max_steps=steps,
            chunks=1 if self.max_steps == 1 else self.steps,
            samples=_one if alike else self.samples,
        )

    def only_if(self, condition: Any) -> "Batches":
        """The same batches where the condition, a bool that may be traced, holds; no steps where it does not."""
        return dataclasses.replace(self, steps=jnp.where(condition, self.steps, 0))

    def mean(self, function: Callable[[Any], Any], step: Any) -> Any:
        """Mean of `function(batch)`, a pytree of floating-point arrays, over the chunks of one step."""
        if isinstance(self.chunks, int) and self.chunks == 1:
            return function(self.get(step, 0))

        def term(chunk: Any) -> tuple[Any, jax.Array]:
            batch = self.get(step, chunk)
            weight = self.samples(batch)
            return jax.tree.map(lambda leaf: weight.astype(leaf.dtype) * leaf, function(batch)), weight

        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(term, 0))
        total, weight = jax.lax.fori_loop(0, self.chunks, lambda c, acc: jax.tree.map(jnp.add, acc, term(c)), zero)
        return jax.tree.map(lambda leaf: leaf / jnp.maximum(weight, 1e-30).astype(leaf.dtype), total)


@dataclasses.dataclass(frozen=True)
class ClientView:
    """One named view of one client: `size` samples from `start` on in the flat arrays. `size` and `start` may be traced.

    With `work`, a share in [0, 1] that may be traced, training stops early: `epochs`, `wrapped` and `full` give that share of
    their steps, rounded up. Going through the view `in_order` is not training and is always whole.
    """

    x: Any
    y: jax.Array
    offset: Any
    scale: Any
    start: Any
    size: Any
    max_size: int
    work: Any = None

    def _done(self, steps: Any) -> Any:
        # A third of nine steps is three, whatever binary makes of a third.
        return steps if self.work is None else jnp.ceil(self.work * steps - 1e-3).astype(jnp.int32)

    def take(self, index: jax.Array, weight: jax.Array) -> Batch:
        """The samples `index [B]`, counted inside the view, decoded to the numbers that a model reads.

        Rows of weight 0 may have any index; what stands in them is some sample of the data set.
        """
        where = self.start + index
        x = jnp.asarray(self.x).at[where].get(mode="clip")
        if self.scale is not None:
            x = (x.astype(jnp.result_type(float)) - self.offset) * self.scale
        return Batch(x, jnp.asarray(self.y).at[where].get(mode="clip"), weight.astype(jnp.result_type(float)))

    def epochs(self, key: Key, batch_size: int, epochs: int = 1) -> Batches:
        """Shuffled passes over the view, `ceil(size / batch_size)` steps each; the last batch of a pass may be partial.

        Every sample is seen exactly once a pass; the key is consumed.
        """
        size = jnp.asarray(self.size, jnp.int32)
        a_pass = (size + batch_size - 1) // batch_size
        max_pass = -(-self.max_size // batch_size)
        keys = round_keys(key, (epochs,))

        def get(step: Any, chunk: Any = 0) -> Batch:
            del chunk
            # With one epoch the keys do not depend on the step, and XLA takes their arithmetic out of the loop.
            epoch, position = (0, step) if epochs == 1 else (step // a_pass, step % a_pass)
            index = position * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
            return self.take(permuted(keys[epoch], index, size), index < size)

        return Batches(get, self._done(a_pass * epochs), max_pass * epochs)

    def wrapped(self, key: Key, batch_size: int, steps: int, first: Any = 0) -> Batches:
        """`steps` full batches from an endless run of shuffled passes, beginning `first` samples into it.

        A batch may hold the tail of one pass and the head of the next (dossier of MTFL: a cyclic feeder); a client that keeps
        `first` and its key from round to round goes on where it stopped.
        """
        size = jnp.maximum(jnp.asarray(self.size, jnp.int32), 1)

        def get(step: Any, chunk: Any = 0) -> Batch:
            del chunk
            position = first + step * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
            keys = jax.vmap(lambda epoch: round_keys(jax.random.fold_in(key, epoch)))(position // size)
            return self.take(permuted(keys, position % size, size), jnp.ones(batch_size))

        return Batches(get, self._done(steps), steps)

    def in_order(self, batch_size: int) -> Batches:
        """One pass in storage order, as steps of at most `batch_size` samples: for evaluation and statistics."""
        size = jnp.asarray(self.size, jnp.int32)

        def get(step: Any, chunk: Any = 0) -> Batch:
            del chunk
            index = step * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
            return self.take(index, index < size)

        return Batches(get, (size + batch_size - 1) // batch_size, -(-self.max_size // batch_size))

    def in_chunks(self, most: int = CHUNK) -> Batches:
        """`in_order` by at most `most` samples, and no more of them than fill the chunks of the largest client evenly."""
        checks.count("most", most)
        largest = max(self.max_size, 1)
        return self.in_order(-(-largest // -(-largest // most)))

    def full(self, steps: int = 1, chunk_size: int = CHUNK) -> Batches:
        """`steps` steps over the whole view, each summed over chunks of at most `chunk_size` samples."""
        batches = self.in_chunks(chunk_size).as_one_step(steps)
        return dataclasses.replace(batches, steps=self._done(steps))


@dataclasses.dataclass(frozen=True)
class ClientData:
    """What one client holds; `data["support"]` is its view of that name."""

    views: dict[str, ClientView]

    def __getitem__(self, name: str) -> ClientView:
        if name not in self.views:
            raise ValueError(f"the data have no view {name!r}; they have {', '.join(self.views)}")
        return self.views[name]

    def working(self, share: Any) -> "ClientData":
        """The same samples for a client that does this share of its training steps."""
        return ClientData({name: dataclasses.replace(view, work=share) for name, view in self.views.items()})


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "y", "offset", "scale", "start", "size", "ids"],
    meta_fields=["max_size", "num_classes", "population"],
)
@dataclasses.dataclass(frozen=True)
class FederatedData:
    """All clients' samples. Build it with `federate` or `from_clients`, which check what goes in.

    Attributes:
      x: inputs of all clients `[S, ...]`, as stored (images stay uint8).
      y: int32 labels `[S]`, or real targets `[S, ...]`.
      offset, scale: arrays that broadcast against one sample; a batch holds `(x - offset) * scale`. `None`: as stored.
      start, size: for each view, int32 `[N]`.
      max_size: for each view the largest client's size, as static (name, size) pairs.
      num_classes: K; 0 for real targets.
      ids: int32 `[N]`, who the clients are where these are a part of a larger population (see `select`); `None`: client i is i.
      population: how many clients that population has.
    """

    x: Any
    y: Any
    offset: Any
    scale: Any
    start: dict[str, Any]
    size: dict[str, Any]
    max_size: tuple[tuple[str, int], ...]
    num_classes: int
    ids: Any = None
    population: int | None = None

    @property
    def num_clients(self) -> int:
        """N."""
        return next(iter(self.size.values())).shape[0]

    @property
    def total_clients(self) -> int:
        """Clients of the whole population: N, unless these are a part of it."""
        return self.num_clients if self.population is None else self.population

    def select(self, clients: Any) -> "FederatedData":
        """Some of the clients, int `[N']` (may be traced), as data of their own; no sample is copied.

        They stay who they are: what hangs on a client's id, such as its key in a round, is as among all.
        """
        start, size = ({name: _rows(values, clients) for name, values in of.items()} for of in (self.start, self.size))
        return dataclasses.replace(self, start=start, size=size, ids=self.who(clients), population=self.total_clients)

    def extract(self, clients: np.ndarray, room: int) -> "FederatedData":
        """`select` by NumPy, with a copy of these clients' samples alone: for data that stay where they are.

        Args:
          clients: int `[N']`, distinct.
          room: samples that the copy has place for, `room(N')`, so that whoever is extracted the shapes are the same.

        Raises:
          ValueError: more samples than there is room for.
        """
        start = {name: np.asarray(values)[clients] for name, values in self.start.items()}
        size = {name: np.asarray(values)[clients] for name, values in self.size.items()}
        begin, length = self._runs(start, size)
        first = np.cumsum(length) - length
        if length.sum() > room:
            raise ValueError(f"room={room}, but these clients hold {length.sum()} samples")
        where = np.concatenate([np.arange(b, b + n) for b, n in zip(begin, length, strict=True)])

        def packed(values: Any) -> np.ndarray:
            # Nothing may stand in the rest that is no number: samples of weight 0 are read too.
            array = np.zeros((room, *values.shape[1:]), values.dtype)
            np.take(values, where, 0, out=array[: len(where)], mode="clip")  # which needs no copy in between
            return array

        return dataclasses.replace(
            self,
            x=packed(self.x),
            y=packed(self.y),
            start={name: (values - begin + first).astype(np.int32) for name, values in start.items()},
            size=size,
            ids=self.who(np.asarray(clients)),
            population=self.total_clients,
        )

    def room(self, count: int) -> int:
        """Samples that any `count` clients hold at most."""
        _, length = self._runs(self.start, self.size)
        return int(np.sort(length)[-count:].sum())

    @staticmethod
    def _runs(start: Mapping[str, Any], size: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """(where each client's samples begin, how many there are), `[N]`: all of its views stand in one run."""
        begin = np.min([np.asarray(values) for values in start.values()], 0)
        end = np.max([np.asarray(start[name]) + np.asarray(size[name]) for name in size], 0)
        return begin, end - begin

    def who(self, clients: Any) -> Any:
        """Ids in the whole population, int32, of clients (int `[...]`) of these data; in NumPy where these are."""
        clients = clients.astype(np.int32) if isinstance(clients, np.ndarray) else jnp.asarray(clients, jnp.int32)
        return clients if self.ids is None else _rows(self.ids, clients)

    @property
    def views(self) -> tuple[str, ...]:
        """Names of the views."""
        return tuple(name for name, _ in self.max_size)

    def client(self, index: Any) -> ClientData:
        """What client `index` (may be traced) sees; a negative index is nobody, a client without samples.

        Raises:
          ValueError: an index that is not traced and beyond the last client.
        """
        if isinstance(index, (int, np.integer)) and index >= self.num_clients:
            raise ValueError(f"index={index}, but there are N={self.num_clients} clients, counted from 0")
        real, bound = index >= 0, dict(self.max_size)

        def view(name: str) -> ClientView:
            start, size = jnp.asarray(self.start[name])[index], jnp.asarray(self.size[name])[index]
            size = jnp.where(real, size, 0)
            return ClientView(self.x, self.y, self.offset, self.scale, start, size, bound[name])

        return ClientData({name: view(name) for name in self.views})

    def sizes(self, view: str) -> Any:
        """int32 `[N]`: samples of each client in a view."""
        if view not in self.size:
            raise ValueError(f"the data have no view {view!r}; they have {', '.join(self.size)}")
        return self.size[view]


def federate(
    x: Any,
    y: Any,
    order: Any,
    sizes: Any,
    *,
    num_classes: int | None = None,
    views: Mapping[str, tuple[Any, Any]] | None = None,
    offset: Any = None,
    scale: Any = None,
) -> FederatedData:
    """Lays samples out by client.

    Args:
      x: inputs `[M, ...]`, numeric. Images may stay uint8. A mapped file (`np.memmap`) stays one where `order` is 0, 1, 2, ...
      y: integer labels `[M]` in `[0, num_classes)`, or real targets `[M, ...]` when `num_classes` is 0.
      order: int `[S]`, which samples the clients hold: those of client 0, then those of client 1, and so on.
      sizes: int `[N]`, how many each client holds, all at least 1; they sum to S.
      num_classes: K; `max(y) + 1` when not given, 0 for regression.
      views: for each name the relative (begin, end), int `[N]` each, of the view inside each client's run, e.g. from
        `train_test_views`; one view "train" of everything when not given. No client's view may be empty.
      offset, scale: a batch holds `(x - offset) * scale`; uint8 inputs are scaled by 1/255 when neither is given.

    Raises:
      ValueError: shapes that do not fit, non-numeric or non-finite inputs, labels out of range, a client without samples,
        a view that is empty or reaches beyond its client.
    """
    x, y = _array("x", x), _array("y", y)
    order, sizes = _integers("order", order), _integers("sizes", sizes)
    regression = num_classes == 0
    _check_samples(x, y, regression=regression)
    if sizes.ndim != 1 or sizes.size == 0 or sizes.min() < 1:
        empty = int(np.argmin(sizes)) if sizes.size else None
        raise ValueError(f"every client needs at least 1 sample, but client {empty} has none (sizes is {sizes.shape})")
    if order.shape != (sizes.sum(),):
        raise ValueError(f"order has shape {order.shape}, but the sizes sum to S={sizes.sum()}")
    if order.min() < 0 or order.max() >= len(y):
        raise ValueError(f"order names samples {order.min()} to {order.max()}, but there are M={len(y)}")
    if num_classes is not None:
        checks.count("num_classes", num_classes, least=0)
    num_classes = int(y.max()) + 1 if num_classes is None else num_classes
    if not regression and (y.min() < 0 or y.max() >= num_classes):
        raise ValueError(f"labels run from {y.min()} to {y.max()}, but must lie in [0, num_classes={num_classes})")
    if offset is None and scale is None and x.dtype == np.uint8:
        scale = 1 / 255
    if (offset is not None) or (scale is not None):
        offset = np.float32(0 if offset is None else offset)
        scale = np.float32(1 if scale is None else scale)
        _check_scaling(offset, scale, x.shape[1:])
    if views is None:
        views = {"train": (np.zeros_like(sizes), sizes)}
    if not views:
        raise ValueError("views is empty; name at least one")
    base = np.cumsum(sizes) - sizes
    start, size = {}, {}
    for name, (begin, end) in views.items():
        first, stop = _integers(f"begin of view {name!r}", begin), _integers(f"end of view {name!r}", end)
        if not first.shape == stop.shape == sizes.shape:
            raise ValueError(
                f"view {name!r} has begin {first.shape} and end {stop.shape}, but there are N={sizes.size} clients"
            )
        if first.min() < 0 or (stop > sizes).any():
            raise ValueError(f"view {name!r} reaches beyond its client's samples")
        if (stop <= first).any():
            bad = int(np.argmax(stop <= first))
            raise ValueError(f"view {name!r} of client {bad} is empty: its {sizes[bad]} samples are too few for the views")
        start[name], size[name] = (base + first).astype(np.int32), (stop - first).astype(np.int32)
    # Samples that stand in order already need not be copied: those of a mapped file stay in it.
    stands = isinstance(x, np.memmap) and len(order) == len(x) and bool((np.diff(order) == 1).all())
    return FederatedData(
        x=x if stands else x[order],
        y=y[order].astype(np.result_type(y, np.float32) if regression else np.int32),
        offset=offset,
        scale=scale,
        start=start,
        size=size,
        max_size=tuple((name, int(size[name].max())) for name in size),
        num_classes=num_classes,
    )


def from_clients(clients: Sequence[tuple[Any, Any]], **options: Any) -> FederatedData:
    """Lays out a user's own arrays, one `(x [n, ...], y [n])` pair a client; `options` are those of `federate`.

    Without `views`, each client gets those of `train_test_views`: 75 % train (of it 20 % support), 25 % test.

    Raises:
      ValueError: as `federate`, and inputs of different shape among clients.

    Example:
      >>> import numpy as np
      >>> data = from_clients([(np.zeros((20, 3)), np.arange(20) % 2), (np.ones((40, 3)), np.arange(40) % 2)])
      >>> data.num_clients, data.sizes("support").tolist(), data.sizes("test").tolist()
      (2, [3, 6], [5, 10])
    """
    if not clients:
        raise ValueError("clients is empty; give one (x, y) pair a client")
    pairs = [(_array("x", x), _array("y", y)) for x, y in clients]
    shapes = {x.shape[1:] for x, _ in pairs}
    if len(shapes) > 1:
        raise ValueError(f"clients' inputs differ in shape: {', '.join(map(str, sorted(shapes)))}")
    if len({x.dtype == np.uint8 for x, _ in pairs}) > 1:
        raise ValueError(
            "some clients' inputs are uint8, which are scaled to [0, 1], and others are not: bring them to one type"
        )
    for i, (x, y) in enumerate(pairs):
        if len(x) != len(y):
            raise ValueError(f"client {i} has {len(x)} inputs and {len(y)} labels")
    sizes = np.array([len(y) for _, y in pairs])
    options.setdefault("views", train_test_views(sizes))
    x, y = np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])
    return federate(x, y, np.arange(len(y)), sizes, **options)


def train_test_views(sizes: Any, *, train: float = 0.75, support: float = 0.2) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Cuts each client's run into train and test, and each of them into support and query (S0: 75/25 and 20/80).

    Counts round down, but a support view has at least 1 sample. The runs are cut in storage order: shuffle before.

    Args:
      sizes: int `[N]`.
      train: share of a client's samples for training.
      support: share of each part that adaptation may see.

    Returns:
      (begin, end) `[N]` for "train", "support", "query", "test", "test_support", "test_query".
    """
    checks.fraction("train", train)
    checks.fraction("support", support)
    sizes = np.asarray(sizes, np.int64)
    cut = _share(sizes, train)
    inner = np.maximum(_share(cut, support), 1)
    outer = cut + np.maximum(_share(sizes - cut, support), 1)
    zero = np.zeros_like(sizes)
    return {
        "train": (zero, cut),
        "support": (zero, inner),
        "query": (inner, cut),
        "test": (cut, sizes),
        "test_support": (cut, outer),
        "test_query": (outer, sizes),
    }


def _rows(values: Any, index: Any) -> Any:
    """`values[index]`, by NumPy where both are its arrays."""
    return values[index] if isinstance(values, np.ndarray) and isinstance(index, np.ndarray) else jnp.asarray(values)[index]


def _share(sizes: np.ndarray, share: float) -> np.ndarray:
    # 29 % of 100 is 28.999999999999996 in binary, and must not round down to 28.
    return np.floor(sizes * share + 1e-9).astype(np.int64)


def _array(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} is not one array [M, ...]; samples must be brought to one shape first") from None


def _integers(name: str, values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must hold integers, not dtype {array.dtype}")
    return array.astype(np.int64)


def _check_scaling(offset: np.ndarray, scale: np.ndarray, sample: tuple[int, ...]) -> None:
    for name, value in (("offset", offset), ("scale", scale)):
        if not np.isfinite(value).all():
            raise ValueError(f"{name} holds NaN or infinite values")
        # Without this, an offset per channel would silently give a sample without channels some.
        fits = value.ndim <= len(sample) and all(n in (1, m) for n, m in zip(value.shape[::-1], sample[::-1], strict=False))
        if not fits:
            raise ValueError(f"{name} has shape {value.shape}, which does not broadcast against one sample {sample}")


def _check_samples(x: np.ndarray, y: np.ndarray, *, regression: bool) -> None:
    if x.dtype == object or not (np.issubdtype(x.dtype, np.number) or x.dtype == bool):
        raise ValueError(f"inputs must be one numeric array [M, ...], not dtype {x.dtype} (images of mixed shape?)")
    if not np.issubdtype(y.dtype, np.number if regression else np.integer):
        raise ValueError(f"{'targets must be numbers' if regression else 'labels must be integers'}, not dtype {y.dtype}")
    if y.ndim < 1 or (y.ndim > 1 and not regression) or x.ndim < 2 or len(x) != len(y) or len(y) == 0:
        raise ValueError(f"inputs must be [M, ...] and labels [M] with M >= 1, not {x.shape} and {y.shape}")
    if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
        raise ValueError("inputs hold NaN or infinite values")
    if regression and not np.isfinite(y).all():
        raise ValueError("targets hold NaN or infinite values")
