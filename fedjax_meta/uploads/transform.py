"""The contract of upload transformations, and which orders of them are legal.

An upload is everything that a client sends to be averaged: its part of the model (or its gradient) and statistics. A chain of
transformations changes it on its way: client halves in the order of the chain, then the sum over the cohort, then server
halves in reverse order.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks
from fedjax_meta.keys import tagged
from fedjax_meta.types import Key, PyTree, Scalar


class ServerContext(NamedTuple):
    """What the server half of a transformation may use.

    Attributes:
      divisor: what a fixed divisor is: the cohort size C, or the expected number of clients under Poisson sampling.
      clip_norm: the norm to which the chain clips in this round, if it clips.
      ids: int32 `[C]`, the cohort.
      returned: bool `[C]`, whose upload reached the server.
      spent: what other noisy releases of the chain take of the noise's budget, see `UploadTransform.spends`.
    """

    divisor: float
    clip_norm: Scalar | None
    ids: jax.Array
    returned: jax.Array
    spent: Scalar = 0.0


class Message(NamedTuple):
    """The size of one leaf of an upload on the wire.

    Attributes:
      numbers: how many numbers are sent.
      bits: of each number.
      extra_bits: everything else (ranges, indices).
    """

    numbers: int
    bits: int
    extra_bits: int = 0

    @property
    def bytes(self) -> int:
        """Rounded up."""
        return -(-(self.numbers * self.bits + self.extra_bits) // 8)


def _unchanged_client(key: Key, upload: PyTree, memory: PyTree, kept: PyTree) -> tuple[PyTree, PyTree]:
    del key, kept
    return upload, memory


def _unchanged_server(
    key: Key, average: PyTree, context: ServerContext, kept: PyTree, measured: PyTree
) -> tuple[PyTree, PyTree]:
    del key, context, measured
    return average, kept


def _unchanged_message(message: Message, leaf: Any) -> Message:
    del leaf
    return message


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class UploadTransform:
    """One transformation of uploads; build it with a function of this package, or with these fields.

    Attributes:
      name: for messages and records.
      client: `(key, upload, memory, kept) -> (upload, memory)`, on one client; `kept` is what the transformation keeps at the
        server.
      lost: `(upload, memory) -> memory`, what a client keeps when its upload does not reach the server.
      measure: `(upload, kept) -> scalars`, what else the server gets to know of a client, as a plain mean over those that
        returned.
      server: `(key, average, context, kept, measured) -> (average, kept)`, on the average of the uploads.
      init_server: `(key, upload) -> kept`, what the transformation keeps at the server, in `State.aggregation`.
      init_memory: `upload -> memory`, a client's first memory of this transformation, e.g. a residual of zeros.
      message: `(message, leaf) -> message`, how the size of a floating-point leaf changes.
      encode: `(key, weighted sum of one upload, bounds, id, ids, shrinks) -> integers`, for secure aggregation: what one client
        sends. `bounds` are the largest weights that a client can have, Python numbers, a prefix tree of the weights; `shrinks`
        says that no number may become larger in magnitude, because noise is scaled to the norm that uploads were clipped to.
      decode: `(key, sum of the integers, ids, returned) -> weighted sum`, its inverse at the server.
      clip_norm: the bound on an upload's norm that this transformation guarantees, if it does: a number, or `kept -> number`.
      spends: for a transformation that releases a noisy measurement of its own, 1 / (its deviation over its sensitivity)^2.
        `noise` then adds so much more that both together are as private as its multiplier says.
      has_feedback: whether `memory`, a tree like the upload, carries what was left out of one upload into the next. It does so
        for increments. Of what is sent as a value (buffers, renewed statistics), the next upload has it anyway: it is set to 0.
      leaves_out: whether only some numbers of an upload are sent.
      on_grid: whether numbers are rounded to a few levels.
      sends_differences: whether clients then send by how much buffers moved instead of their values.
      fixed_divisor: whether the sum is divided by `ServerContext.divisor` even if some clients do not return, and all count
        equally.
      config: hyper-parameters, for the record of a run.
    """

    name: str
    client: Callable[[Key, PyTree, PyTree, PyTree], tuple[PyTree, PyTree]] = _unchanged_client
    lost: Callable[[PyTree, PyTree], PyTree] = lambda upload, memory: memory
    measure: Callable[[PyTree, PyTree], PyTree] = lambda upload, kept: ()
    server: Callable[[Key, PyTree, ServerContext, PyTree, PyTree], tuple[PyTree, PyTree]] = _unchanged_server
    init_server: Callable[[Key, PyTree], PyTree] = lambda key, upload: ()
    init_memory: Callable[[PyTree], PyTree] = lambda upload: ()
    message: Callable[[Message, Any], Message] = _unchanged_message
    encode: Callable[..., PyTree] | None = None
    decode: Callable[..., PyTree] | None = None
    clip_norm: Scalar | Callable[[PyTree], Scalar] | None = None
    spends: Scalar = 0.0
    has_feedback: bool = False
    leaves_out: bool = False
    on_grid: bool = False
    sends_differences: bool = False
    fixed_divisor: bool = False
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def check_order(transforms: Sequence[UploadTransform]) -> None:
    """Raises `ValueError` for a chain of transformations in an order that does not keep what they promise.

    - clip comes before noise: the noise is scaled to the clip norm.
    - Nothing but noise and mask comes between or after clip and noise: it could raise the norm again.
    - Error feedback does not come after clip: the residual would enter the next upload unclipped.
    - sparsify comes before quantize: its residual would leave the grid of levels.
    - sparsify and mask exclude each other: masks cancel only over the same coordinates.
    - mask comes last: nothing can read a masked upload.
    - clip, noise, mask and sparsify come at most once, and adaptive_clip counts as clip.

    What a transformation does decides, not its name.
    """
    for transform in transforms:
        if not isinstance(transform, UploadTransform):
            raise ValueError(f"uploads must hold upload transformations such as fm.uploads.clip(1.0), not {transform!r}")
    names = [transform.name for transform in transforms]
    where = f"uploads=({', '.join(names)})"
    clips = [i for i, transform in enumerate(transforms) if transform.clip_norm is not None]
    noises = [i for i, transform in enumerate(transforms) if transform.fixed_divisor]
    masks = [i for i, transform in enumerate(transforms) if transform.encode is not None]
    sparse = [i for i, transform in enumerate(transforms) if transform.leaves_out]
    for places in (clips, noises, masks, sparse):
        if len(places) > 1:
            raise ValueError(f"{where}: {names[places[0]]} may stand there once")
    if masks and masks[0] != len(transforms) - 1:
        raise ValueError(f"{where}: mask must come last, because nothing can read a masked upload")
    if sparse and masks:
        raise ValueError(
            f"{where}: {names[sparse[0]]} and mask exclude each other, because masks cancel only over the same coordinates"
        )
    grids = [i for i, transform in enumerate(transforms) if transform.on_grid]
    if sparse and grids and grids[0] < sparse[0]:
        raise ValueError(
            f"{where}: {names[sparse[0]]} must come before {names[grids[0]]}, because its residual would leave the grid of levels"
        )
    for transform in transforms[clips[0] + 1 :] if clips else ():
        if transform.has_feedback:
            raise ValueError(
                f"{where}: {transform.name} with error feedback must come before clip, because its residual would enter the "
                "next upload unclipped"
            )
    if not noises:
        return
    if not clips or clips[0] > noises[0]:
        raise ValueError(f"{where}: noise needs a clip before it, because it is scaled to the clip norm")
    for i in range(clips[0] + 1, len(transforms)):
        if i not in noises + masks:
            raise ValueError(f"{where}: {names[i]} must come before clip, because it could raise the norm again")
    if "tree" in transforms[noises[0]].config and callable(transforms[clips[0]].clip_norm):
        raise ValueError(f"{where}: a tree of noise needs one norm for all rounds, which {names[clips[0]]} changes")
    multiplier, spent = transforms[noises[0]].config.get("multiplier", 0.0), sum(step.spends for step in transforms)
    if any(isinstance(value, jax.core.Tracer) for value in (multiplier, spent)):
        return
    multiplier, spent = np.asarray(multiplier), np.asarray(spent)
    # A multiplier of 0 promises nothing, and 0 times infinity is no number.
    if np.any(np.where(multiplier > 0, spent, 0) * multiplier**2 >= 1):
        raise ValueError(
            f"{where}: bit_noise must be above half the noise multiplier {multiplier}: the bits alone are less private than it "
            "says"
        )


def kinds(transforms: Sequence[UploadTransform]) -> set[str]:
    """The names of transformations, and with one of a user's own the names of the package's that do the same.

    Example:
      >>> hidden = UploadTransform(name="mine", fixed_divisor=True)
      >>> sorted(kinds([hidden]))
      ['mine', 'noise']
    """
    found = {transform.name for transform in transforms}
    for one in transforms:
        acts_as = {
            "clip": one.clip_norm is not None and not callable(one.clip_norm),
            "adaptive_clip": callable(one.clip_norm),
            "noise": one.fixed_divisor,
            "mask": one.encode is not None,
            "sparsify": one.leaves_out,
            "quantize": one.on_grid,
        }
        found |= {name for name, is_so in acts_as.items() if is_so}
    return found


class Chain:
    """Several transformations as one; an empty chain changes nothing."""

    def __init__(self, transforms: Sequence[UploadTransform]) -> None:
        check_order(transforms)
        self.transforms = tuple(transforms)
        # A key depends on the name, and on how many of this name came before: other transformations change no draw.
        names = [transform.name for transform in transforms]
        self._numbers = [names[:i].count(name) for i, name in enumerate(names)]
        self.spent = sum(transform.spends for transform in transforms)
        self.sends_differences = any(transform.sends_differences for transform in transforms)
        self.fixed_divisor = any(transform.fixed_divisor for transform in transforms)
        self.masks_uploads = any(transform.encode is not None for transform in transforms)

    def clip_norm(self, kept: tuple[PyTree, ...]) -> Scalar | None:
        """The norm to which the chain clips in a round in which its transformations keep `kept`, if it clips."""
        for transform, its in zip(self.transforms, kept, strict=True):
            if transform.clip_norm is not None:
                return transform.clip_norm(its) if callable(transform.clip_norm) else transform.clip_norm
        return None

    def init_memory(self, upload: PyTree) -> tuple[PyTree, ...]:
        """A client's first memory of each transformation."""
        return tuple(transform.init_memory(upload) for transform in self.transforms)

    def init_server(self, key: Key, upload: PyTree) -> tuple[PyTree, ...]:
        """What each transformation keeps at the server."""
        named = zip(self.transforms, self._numbers, strict=True)
        return tuple(transform.init_server(tagged(key, transform.name, number), upload) for transform, number in named)

    def client(
        self, key: Key, upload: PyTree, memory: tuple[PyTree, ...], kept: tuple[PyTree, ...], carries: PyTree = None
    ) -> tuple[PyTree, tuple[PyTree, ...], tuple[PyTree, ...], tuple[PyTree, ...]]:
        """All client halves, first to last: (upload, what was measured, memory, memory if the upload is lost).

        `carries` is like `upload`: of which leaves error feedback carries over what was left out; all when not given.
        """
        sent, lost, measured, is_kept = [], [], [], False

        def carried(transform: UploadTransform, memory: PyTree) -> PyTree:
            if carries is None or not transform.has_feedback or not jax.tree.leaves(memory):
                return memory
            return jax.tree.map(lambda leaf, on: leaf if on else jnp.zeros_like(leaf), memory, carries)

        for transform, number, mine, its in zip(self.transforms, self._numbers, memory, kept, strict=True):
            # The first one with error feedback keeps a lost upload as a whole: what it passes on is a part of it.
            lost.append(mine if is_kept else carried(transform, transform.lost(upload, mine)))
            is_kept |= transform.has_feedback
            measured.append(transform.measure(upload, its))
            told = transform.client(tagged(key, transform.name, number), upload, mine, its)
            _check_pair(transform, "client", "(upload, memory)", told, (upload, mine))
            upload, renewed = told
            sent.append(carried(transform, renewed))
        return upload, tuple(measured), tuple(sent), tuple(lost)

    def server(
        self, key: Key, average: PyTree, context: ServerContext, kept: tuple[PyTree, ...], measured: tuple[PyTree, ...]
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """All server halves, last to first: (average, what each keeps)."""
        renewed = list(kept)
        for i in reversed(range(len(self.transforms))):
            transform = self.transforms[i]
            its_key = tagged(key, transform.name, self._numbers[i])
            told = transform.server(its_key, average, context, kept[i], measured[i])
            _check_pair(transform, "server", "(average, what it keeps)", told, (average, kept[i]))
            average, renewed[i] = told
        return average, tuple(renewed)

    def encode(self, key: Key, sums: PyTree, bounds: PyTree, id_: jax.Array, ids: jax.Array) -> PyTree:
        """What client `id_` sends in place of its weighted sum, see `UploadTransform.encode`."""
        for transform in self.transforms:
            if transform.encode is not None:
                sums = transform.encode(key, sums, bounds, id_, ids, self.fixed_divisor)
        return sums

    def decode(self, key: Key, total: PyTree, ids: jax.Array, returned: jax.Array) -> PyTree:
        """The weighted sum of the uploads that returned, see `UploadTransform.decode`."""
        for transform in self.transforms:
            if transform.decode is not None:
                total = transform.decode(key, total, ids, returned)
        return total

    def message(self, leaf: Any) -> Message:
        """The size of a leaf (an array or its shape) on the wire; integers are sent as they are."""
        message = Message(leaf.size, 8 * leaf.dtype.itemsize)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            for transform in self.transforms:
                message = transform.message(message, leaf)
        return message


def _check_pair(transform: UploadTransform, part: str, wanted: str, told: Any, given: tuple[PyTree, PyTree]) -> None:
    """Raises `ValueError` unless a part of a transformation returns two trees like those that it gets."""
    pair = isinstance(told, tuple) and len(told) == 2
    odd = checks.mismatch(told, given) if pair else f"it gives {type(told).__name__}"
    if odd is not None:
        raise ValueError(f"{part} of the upload {transform.name} must give {wanted} like what it gets: {odd}")


def per_leaf(function: Callable[[Key, jax.Array], jax.Array], key: Key, tree: PyTree) -> PyTree:
    """`function(key, leaf)` with a key of its own for each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [function(jax.random.fold_in(key, i), leaf) for i, leaf in enumerate(leaves)])
