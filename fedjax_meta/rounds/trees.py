"""Trees in a round: parts of them, choices between two, and what of them is not finite."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks, runtime
from fedjax_meta.algorithm import ROWS, State
from fedjax_meta.numerics.axes import leading
from fedjax_meta.types import PyTree

_SMALL = 1024
"""Number of entries up to which it costs more to start a loop over a leaf than to run it."""


def parts(kept: Mapping[str, PyTree], names: str) -> tuple[PyTree, ...]:
    """The parts that a `Collaboration` names, e.g. "personal+memory"."""
    chosen = [name for name in names.split("+") if name]
    for name in chosen:
        checks.one_of("what a collaboration reads or gives", name, kept)
    return tuple(kept[name] for name in chosen)


def without_rows(state: State) -> State:
    """The state without what clients keep."""
    nothing: dict[str, Any] = dict.fromkeys(ROWS)
    return state._replace(**nothing)


def must_fit(what: str, given: PyTree, wanted: PyTree) -> None:
    """Raises `ValueError` unless two trees have the same structure, shapes and types."""
    odd = checks.mismatch(given, wanted)
    if odd is not None:
        raise ValueError(f"{what}: {odd}")


def where(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`new` where the condition, whose axes are the leading ones of every leaf, holds."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(leading(condition, a), a, b)

    return jax.tree.map(choose, new, old)


def zeros_unless(condition: jax.Array, tree: PyTree) -> PyTree:
    """The tree, its floating-point leaves 0 unless the condition holds: NaN times a weight of 0 would stay NaN."""

    def choose(leaf: Any) -> Any:
        return where(condition, leaf, jnp.zeros_like(leaf)) if _is_float(leaf) else leaf

    return jax.tree.map(choose, tree)


def first_broken(tree: PyTree) -> jax.Array:
    """Which leaf of a tree, counted as by `leaf_names`, is the first that holds NaN or infinity; -1 if there is none. int32."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if _is_float(leaf)]

    def exact() -> jax.Array:
        flags = jnp.stack([jnp.any(~jnp.isfinite(leaf)) for leaf in leaves])
        return jnp.where(jnp.any(flags), jnp.argmax(flags), -1).astype(jnp.int32)

    def none() -> jax.Array:
        return jnp.full((), -1, jnp.int32)

    if not leaves:
        return none()
    if not runtime.on_cpu() or sum(leaf.size for leaf in leaves) < _SMALL:
        return exact()
    # XLA's product of vectors is faster on a CPU than its reductions, and one number says it of all leaves. Only where it is not
    # finite, which an overflow may be, too, each leaf is looked at.
    return jax.lax.cond(jnp.isfinite(_sum_of_squares(leaves)), none, exact)


def _sum_of_squares(leaves: Sequence[jax.Array]) -> jax.Array:
    """Of all entries; small leaves are put together first, so that they cost one product."""
    wide = [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)).reshape(-1) for leaf in leaves]
    small = [leaf for leaf in wide if leaf.size < _SMALL]
    vectors = [leaf for leaf in wide if leaf.size >= _SMALL] + ([jnp.concatenate(small)] if small else [])
    return sum((jnp.vdot(vector, vector).real for vector in vectors), jnp.zeros(()))


def leaf_names(tree: PyTree) -> list[str]:
    """Paths of the floating-point leaves of a tree, e.g. `model['head']['kernel']`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path) for path, leaf in leaves if _is_float(leaf)]


def _is_float(leaf: Any) -> bool:
    return bool(jnp.issubdtype(jax.dtypes.result_type(leaf), jnp.inexact))
