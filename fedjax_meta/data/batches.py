"""`Batches`: the batches that one client goes through, as a pure function of the step."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import loops, runtime
from fedjax_meta.task import Weighted, entry_weights
from fedjax_meta.types import Key, PyTree, Scalar

CHUNK = 96
"""Most samples that go through a model at once on a CPU where no batch size is prescribed.

The activations of larger chunks do not fit in its cache: the gradient of a LeNet takes 5 % longer in chunks of 128 and twice as
long in chunks of 512.
"""
ACCELERATOR_CHUNK = 512
"""The same on accelerators, where every chunk is a turn of a loop whose kernels leave much of the device idle."""


def chunk_length() -> int:
    """The most samples of a chunk on the platform of the program that is being traced."""
    return CHUNK if runtime.on_cpu() else ACCELERATOR_CHUNK


def real_samples(batch: PyTree) -> jax.Array:
    """How much a batch counts in a mean over batches: its samples without padding, or its real entries (tokens)."""
    if isinstance(getattr(batch, "y", None), Weighted):
        # A mean over entries: a chunk with few real tokens counts little in the mean of its step.
        return jnp.sum(entry_weights(batch, batch.y.weight))
    if not hasattr(batch, "weight"):
        raise ValueError(
            f"a mean over several batches weighs each by its samples, but {type(batch).__name__} has no weight to count them by: "
            "write Batches(..., samples=lambda batch: number)"
        )
    return jnp.sum(batch.weight)


def _one(batch: PyTree) -> jax.Array:
    del batch
    return jnp.ones(())


@dataclasses.dataclass(frozen=True)
class Batches:
    """The batches that one client goes through, as a pure function of the step.

    A step whose samples do not fit in one batch (a full-batch gradient of a large client) is a sum over several chunks.

    Attributes:
      get: `(step, chunk) -> batch`.
      steps: number of steps, an integer or a traced int32 scalar.
      max_steps: static upper bound of `steps`, for code that stores something for each step; meta-gradients take no more steps.
      chunks: number of batches that make up one step, an integer or a traced int32 scalar.
      samples: `batch -> number of real samples`, the weight of a chunk in the mean over its step; by default that of a `Batch`,
        which is the sum of the weights of its targets where they have their own (`Weighted`).

    Raises:
      ValueError: more steps than `max_steps`; on use, a mean over batches of another kind without `samples`.
    """

    get: Callable[[Scalar, Scalar], PyTree]
    steps: Scalar
    max_steps: int
    chunks: Scalar = 1
    samples: Callable[[PyTree], jax.Array] = real_samples

    def __post_init__(self) -> None:
        for name in ("steps", "chunks"):
            if isinstance(getattr(self, name), np.integer):
                object.__setattr__(self, name, int(getattr(self, name)))
        if isinstance(self.steps, int) and self.steps > self.max_steps:
            raise ValueError(f"steps={self.steps} must be at most max_steps={self.max_steps}")

    def keyed(self, key: Key) -> "Batches":
        """The same batches as pairs (batch, key), with a separate key for each batch.

        Args:
          key: consumed.
        """

        def get(step: Scalar, chunk: Scalar = 0) -> tuple[PyTree, Key]:
            return self.get(step, chunk), jax.random.fold_in(jax.random.fold_in(key, step), chunk)

        def samples(pair: tuple[PyTree, Key]) -> jax.Array:
            return self.samples(pair[0])

        return dataclasses.replace(self, get=get, samples=samples)

    def numbered(self) -> "Batches":
        """The same batches as pairs (batch, step), for a loss that changes from step to step; the first step is 0."""

        def get(step: Scalar, chunk: Scalar = 0) -> tuple[PyTree, Scalar]:
            return self.get(step, chunk), step

        def samples(pair: tuple[PyTree, Scalar]) -> jax.Array:
            return self.samples(pair[0])

        return dataclasses.replace(self, get=get, samples=samples)

    def as_one_step(self, steps: int = 1, *, equal_weights: bool = False) -> "Batches":
        """All batches together as one step, repeated `steps` times.

        Args:
          steps: number of repetitions.
          equal_weights: whether all batches count equally, so that a partial last batch weighs as much as a full one (the
            reference code of FedMeta-Per). Otherwise each batch is weighted by its real samples.

        Raises:
          ValueError: equal weights of batches that come in chunks.
        """
        inner = self.chunks
        whole = isinstance(inner, int) and inner == 1
        chunks = self.steps if whole else self.steps * inner
        if equal_weights and not whole:
            raise ValueError("equal_weights=True counts batches, but a step of these has several chunks")

        def get(step: Scalar, chunk: Scalar = 0) -> PyTree:
            del step
            return self.get(chunk, 0) if whole else self.get(chunk // inner, chunk % inner)

        return Batches(
            get=get,
            steps=steps,
            max_steps=steps,
            chunks=inner if self.max_steps == 1 else chunks,
            samples=_one if equal_weights else self.samples,
        )

    def only_if(self, condition: Scalar) -> "Batches":
        """The same batches if `condition` (a bool, may be traced) holds, and no steps otherwise."""
        return dataclasses.replace(self, steps=jnp.where(condition, self.steps, 0))

    def mean(self, function: Callable[[PyTree], PyTree], step: Scalar) -> PyTree:
        """Mean of `function(batch)` over the chunks of one step, whatever it is for a chunk without samples.

        Leaves of 16 bits are added up in float32. Of leaves that are no floats, such as counters, the last chunk with samples
        counts.
        """
        if isinstance(self.chunks, int) and self.chunks == 1:
            return function(self.get(step, 0))

        def term(chunk: Scalar) -> tuple[PyTree, jax.Array]:
            batch = self.get(step, chunk)
            return function(batch), jnp.asarray(self.samples(batch))

        def add(chunk: Scalar, sums: tuple[PyTree, jax.Array]) -> tuple[PyTree, jax.Array]:
            (values, weight), (total, weights) = term(chunk), sums
            counts = weight > 0  # the mean over no sample may be NaN

            def more(leaf: jax.Array, one: jax.Array) -> jax.Array:
                if not jnp.issubdtype(one.dtype, jnp.inexact):
                    return jnp.where(counts, one, leaf)
                return leaf + weight.astype(leaf.dtype) * jnp.where(counts, one, 0).astype(leaf.dtype)

            return jax.tree.map(more, total, values), weights + weight

        shapes, whole = jax.eval_shape(term, 0)
        zero = jax.tree.map(_empty_sum, shapes)
        total, weight = loops.fori_loop(self.chunks, add, (zero, jnp.zeros(whole.shape, whole.dtype)))
        weight = jnp.where(weight > 0, weight, 1)

        def mean(leaf: jax.Array, one: jax.ShapeDtypeStruct) -> jax.Array:
            return (leaf / weight.astype(leaf.dtype)).astype(one.dtype) if jnp.issubdtype(one.dtype, jnp.inexact) else leaf

        return jax.tree.map(mean, total, shapes)


def _empty_sum(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    wide = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32) if wide else leaf.dtype)
