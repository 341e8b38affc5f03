"""`ClientView` and `ClientData`: the part of the flat arrays that one client sees, and the batches made from it."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks, runtime
from fedjax_meta.data.batches import Batches, chunk_length
from fedjax_meta.data.shuffle import permutation_keys, permute
from fedjax_meta.task import Batch
from fedjax_meta.types import Key, PyTree, Scalar

_MOST_POSITIONS = 2**20
"""Of all steps of a client that are kept at once: 8 MB."""


@dataclasses.dataclass(frozen=True)
class ClientView:
    """One named view of one client: the samples `start, ..., start + size - 1` of the flat arrays.

    Attributes:
      x, y, offset, scale: the arrays of `FederatedData`, of all clients. `offset` and `scale` are both `None` or both given.
      start: position of the first sample; may be traced.
      size: number of samples; may be traced. If it is a Python int, the compiler knows the number of steps.
      max_size: static upper bound of `size`, the size of the largest client.
      work: share in [0, 1] of the training steps that the client performs; may be traced, `None` means all. It models a
        client that stops early: `epochs`, `endless` and `full` return `ceil(work * steps)` of their steps. `in_order` and
        `in_chunks` always cover the whole view, because evaluation and statistics are not training.
      order: `positions -> positions`, which sample stands where; as stored when `None`. With a smaller `size` it picks some.
      change: `(batch, positions) -> batch`, what becomes of samples when they are taken; nothing when `None`.
      shapes: of one sample, for each leaf of `x`, where `x` holds rows of numbers; see `FederatedData.flat`.
      once: whether a sample counts once in a batch, whatever asks for it twice: its other rows get weight 0. Training on private
        gradients needs it, whose noise covers one clipped gradient of each sample.
      beside: values of the samples of the view, in its order, leaves `[max_size, ...]`; the targets of a batch are then the pair
        (y, values). None when `None`.
    """

    x: PyTree
    y: PyTree
    offset: PyTree
    scale: PyTree
    start: Scalar
    size: Scalar
    max_size: int
    work: Scalar | None = None
    order: Callable[[jax.Array], jax.Array] | None = None
    change: Callable[[Batch, jax.Array], Batch] | None = None
    shapes: tuple[tuple[int, ...], ...] | None = None
    once: bool = False
    beside: PyTree = None

    def _size(self) -> Scalar:
        """The number of samples; a Python int, if it is one, makes numbers of steps static."""
        return self.size if isinstance(self.size, int) else jnp.asarray(self.size, jnp.int32)

    def _room(self, batch_size: int) -> int:
        """Rows of a batch: no more than the largest client has samples, because padding is computed like samples."""
        return min(batch_size, max(self.max_size, 1))

    def _performed(self, steps: Scalar) -> Scalar:
        """The number of steps that the client performs of `steps`: at least one of some, unless it does no work at all."""
        if self.work is None:
            return steps
        # Tolerance: ceil(1/3 * 9) must be 3 despite rounding.
        rounded = jnp.ceil(self.work * steps - 1e-3).astype(jnp.int32)
        return jnp.where(self.work > 0, jnp.clip(rounded, jnp.minimum(steps, 1), steps), 0)

    def take(self, index: jax.Array, weight: jax.Array) -> Batch:
        """A batch of the samples at positions `index` of the view, scaled to the numbers that a model reads.

        Args:
          index: int `[B]`, positions inside the view. A row of weight 0 may have any index; it then holds a sample of the same
            client, so that no client reads another's.
          weight: `[B]`, 1 for a real sample and 0 for padding.
        """
        position = jnp.clip(index, 0, jnp.maximum(self.size - 1, 0))
        index = position if self.order is None else self.order(position)
        if self.once:
            weight = jnp.where(_is_first(jnp.where(weight > 0, index, -1)), weight, 0)
        where = self.start + index

        def rows(values: jax.Array | np.ndarray, where: jax.Array = where) -> jax.Array:
            return jnp.asarray(values).at[where].get(mode="clip")

        def scaled(x: jax.Array, offset: Any, scale: Any) -> jax.Array:
            return x if offset is None else (x.astype(jnp.result_type(float)) - offset) * scale

        x = jax.tree.map(rows, self.x)
        if self.shapes is not None:
            shapes = jax.tree.unflatten(jax.tree.structure(x), self.shapes)
            x = jax.tree.map(lambda leaf, shape: leaf.reshape(-1, *shape), x, shapes)
        if self.offset is not None:
            x = jax.tree.map(scaled, x, self.offset, self.scale)
        batch = Batch(x, jax.tree.map(rows, self.y), weight.astype(jnp.result_type(float)))
        batch = batch if self.change is None else self.change(batch, index)
        if self.beside is None:
            return batch
        return batch._replace(y=(batch.y, jax.tree.map(lambda values: rows(values, position), self.beside)))

    def epochs(self, key: Key, batch_size: int, epochs: int = 1, *, share: Scalar | None = None) -> Batches:
        """Shuffled passes over the view, `ceil(size / batch_size)` steps each; the last batch of a pass may be partial.

        Each pass contains every sample exactly once, in a new order.

        Args:
          key: consumed.
          batch_size: samples of a full batch. Where the largest client has fewer, a batch has room for that client alone.
          epochs: number of passes.
          share: take only this random share of the samples in each pass, in [0, 1], rounded up; may be traced.
        """
        checks.count("batch_size", batch_size)
        checks.count("epochs", epochs, least=0)
        checks.prng_key("key", key)
        if share is not None:
            checks.share("share", share)
        size, batch_size = self._size(), self._room(batch_size)
        count = size
        if share is not None:  # tolerance: ceil(1/3 * 9) must be 3 despite rounding, but a small share is one sample
            count = jnp.clip(jnp.ceil(share * size - 1e-3), jnp.sign(share), size).astype(jnp.int32)
        steps_per_epoch = (count + batch_size - 1) // batch_size
        max_steps_per_epoch = -(-self.max_size // batch_size)
        keys = permutation_keys(key, (epochs,))

        def rows(step: Scalar) -> tuple[jax.Array, jax.Array]:
            # With one epoch the keys do not depend on the step, and XLA moves their arithmetic out of the loop.
            epoch, position = (0, step) if epochs == 1 else (step // steps_per_epoch, step % steps_per_epoch)
            index = position * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
            return permute(keys[epoch], index, size), index < count

        most = max_steps_per_epoch * epochs
        return Batches(self._getter(rows, most, batch_size), self._performed(steps_per_epoch * epochs), most)

    def endless(self, key: Key, batch_size: int, steps: int, first: Scalar = 0) -> Batches:
        """`steps` full batches from an endless sequence of shuffled passes.

        A batch may contain the end of one pass and the beginning of the next, like the cyclic feeder of MTFL's code. A client
        that keeps `first` and its key between rounds continues where it stopped.

        Args:
          key: fixes the sequence. Pass the same key again to continue it.
          batch_size: samples of every batch.
          steps: number of batches.
          first: number of samples of the sequence to skip, those of earlier calls.
        """
        checks.count("batch_size", batch_size)
        checks.count("steps", steps, least=0)
        checks.prng_key("key", key)
        size = jnp.maximum(self._size(), 1)

        def rows(step: Scalar) -> tuple[jax.Array, jax.Array]:
            position = first + step * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
            keys = jax.vmap(lambda epoch: permutation_keys(jax.random.fold_in(key, epoch)))(position // size)
            return permute(keys, position % size, size), jnp.ones(batch_size)

        return Batches(self._getter(rows, steps, batch_size), self._performed(steps), steps)

    def _getter(
        self, rows: Callable[[Scalar], tuple[jax.Array, jax.Array]], steps: int, batch_size: int
    ) -> Callable[..., Batch]:
        """`(step, chunk) -> batch` of the samples that `rows` names at each of `steps` steps: (positions `[B]`, weights `[B]`).

        A CPU computes positions in their step. Elsewhere every small kernel of a step costs a launch, so that those of all steps
        are computed before.
        """
        if not runtime.on_cpu() and 0 < steps * batch_size <= _MOST_POSITIONS:
            table = jax.vmap(rows)(jnp.arange(steps, dtype=jnp.int32))
            rows = lambda step: jax.tree.map(lambda leaf: leaf[step], table)  # noqa: E731

        def get(step: Scalar, chunk: Scalar = 0) -> Batch:
            del chunk
            return self.take(*rows(step))

        return get

    def in_order(self, batch_size: int) -> Batches:
        """One pass in storage order, in steps of at most `batch_size` samples, for evaluation and statistics."""
        checks.count("batch_size", batch_size)
        size, batch_size = self._size(), self._room(batch_size)

        def get(step: Scalar, chunk: Scalar = 0) -> Batch:
            del chunk
            index = step * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
            return self.take(index, index < size)

        return Batches(get, (size + batch_size - 1) // batch_size, -(-self.max_size // batch_size))

    def in_chunks(self, most: int | None = None) -> Batches:
        """`in_order` with at most `most` samples per batch, and the smallest batch size for that number of batches.

        The batches of the largest client are therefore nearly equal, with little padding. When `most` is not given, it is what
        suits the platform, see `chunk_length`.
        """
        most = chunk_length() if most is None else most
        checks.count("most", most)
        largest = max(self.max_size, 1)
        return self.in_order(-(-largest // -(-largest // most)))

    def full(self, steps: int = 1, chunk_size: int | None = None) -> Batches:
        """`steps` steps over the whole view, each summed over chunks of at most `chunk_size` samples, see `in_chunks`.

        A model with batch norm takes its statistics from each chunk. Give `chunk_size` for the same ones on every platform.
        """
        checks.count("steps", steps, least=0)
        batches = self.in_chunks(chunk_size).as_one_step(steps)
        return dataclasses.replace(batches, steps=self._performed(steps))


def _is_first(values: jax.Array) -> jax.Array:
    """Bool `[B]`: whether a value is the first of its kind, int `[B]`."""
    order = jnp.argsort(values, stable=True)
    ordered = values[order]
    return jnp.ones(values.shape, bool).at[order[1:]].set(ordered[1:] != ordered[:-1])


def check_view(name: str, views: Collection[str]) -> None:
    """Raises `ValueError` unless clients have a view of that name."""
    if not isinstance(name, str) or name not in views:
        raise ValueError(
            f"the data have no view {checks.shown(name)}{checks.nearest(name, views)}; they have {', '.join(views)}"
        )


@dataclasses.dataclass(frozen=True)
class ClientData:
    """All views of one client; `data["support"]` is the view of that name."""

    views: dict[str, ClientView]

    def __getitem__(self, name: str) -> ClientView:
        check_view(name, self.views)
        return self.views[name]

    def working(self, share: Scalar) -> "ClientData":
        """The same data for a client that performs only this share of its training steps; see `ClientView.work`."""
        return ClientData({name: dataclasses.replace(view, work=share) for name, view in self.views.items()})

    def counting_once(self) -> "ClientData":
        """The same data, of which a batch counts each sample once; see `ClientView.once`."""
        return ClientData({name: dataclasses.replace(view, once=True) for name, view in self.views.items()})
