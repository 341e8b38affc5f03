"""Which leaves of a model are personal: boolean pytrees, and the split and merge that they define.

A mask has the structure of the tree that it speaks of and a Python bool at every leaf, so that a split is decided when a
function is traced and costs nothing when it runs. `split` leaves `None` where a leaf is absent; JAX and optax take `None` for
an empty subtree, so both halves can be differentiated, averaged, optimised and stored like any other tree.
"""

import enum
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_meta import checks
from fedjax_meta.task import Task, layer_of, require_task
from fedjax_meta.types import Mask, PyTree, Roles

MaskSpec = str | Callable[[Task], Mask] | Any
"""A mask as a user writes it; see `resolve`."""


class Role(enum.StrEnum):
    """What a federation does with one leaf of a model.

    Attributes:
      SHARED: trained by clients and averaged; the server optimiser moves it.
      PERSONAL: stays with its client, one copy each.
      BUFFER: not trained by gradients (batch-norm statistics, optimiser slots); the server takes the plain average.
      FROZEN: never moves in training; stored once, never sent, without optimiser slots.
    """

    SHARED = "shared"
    PERSONAL = "personal"
    BUFFER = "buffer"
    FROZEN = "frozen"


def _aligned(function: Callable[..., Any], first: PyTree, *others: PyTree) -> PyTree:
    """`jax.tree.map`, with one line for trees of different structure in place of JAX's."""
    try:
        return jax.tree.map(function, first, *others)
    except (TypeError, ValueError):
        for other in others:
            odd = checks.misplaced_leaf(first, other)
            if odd is not None:
                raise ValueError(f"the first tree must have a value at every leaf of the second, but {odd}") from None
        raise


def check(mask: Mask, tree: PyTree | None = None) -> None:
    """Raises `ValueError` unless a mask has a bool at every leaf, and at the leaves of the tree that it is for.

    Example:
      >>> check("head")
      Traceback (most recent call last):
      ...
      ValueError: a mask has a Python bool at every leaf, not 'head'; write masks.resolve('head', task)
    """
    for leaf in jax.tree.leaves(mask):
        if not isinstance(leaf, (bool, np.bool_)):
            hint = f"; write masks.resolve({leaf!r}, task)" if isinstance(leaf, str) else ""
            raise ValueError(f"a mask has a Python bool at every leaf, not {checks.shown(leaf)}{hint}")
    odd = None if tree is None else checks.misplaced_leaf(mask, tree)
    if odd is not None:
        raise ValueError(f"a mask has a Python bool at every leaf of the parameters, but {odd}")


def split(tree: PyTree, mask: Mask) -> tuple[PyTree, PyTree]:
    """Splits a tree into (leaves where the mask is true, the others), each with `None` in place of the missing leaves.

    Raises:
      ValueError: see `check`.

    Example:
      >>> split({"body": 1, "head": 2}, {"body": False, "head": True})
      ({'body': None, 'head': 2}, {'body': 1, 'head': None})
    """
    check(mask)
    selected = _aligned(lambda keep, leaf: leaf if keep else None, mask, tree)
    rest = _aligned(lambda keep, leaf: None if keep else leaf, mask, tree)
    return selected, rest


def merge(selected: PyTree, rest: PyTree) -> PyTree:
    """The inverse of `split`: takes each leaf from the half that has it.

    Example:
      >>> merge({"body": None, "head": 2}, {"body": 1, "head": None})
      {'body': 1, 'head': 2}
    """
    try:
        return jax.tree.map(_given, selected, rest, is_leaf=lambda leaf: leaf is None)
    except (TypeError, ValueError) as error:
        if "twice" in str(error):
            raise
        raise ValueError(
            "the halves must have one structure, as split makes them, with None for the leaves of the other"
        ) from None


def _given(a: Any, b: Any) -> Any:
    if a is not None and b is not None:
        raise ValueError("the halves of a split have the same leaf twice: one of them must be None there")
    return b if a is None else a


def complement(mask: Mask) -> Mask:
    """True where the mask is false."""
    check(mask)
    return jax.tree.map(lambda keep: not keep, mask)


def union(a: Mask, b: Mask) -> Mask:
    """True where either mask is."""
    check((a, b))
    return _aligned(lambda x, y: x or y, a, b)


def everything_like(mask: Mask) -> Mask:
    """True at every leaf."""
    return jax.tree.map(lambda _: True, mask)


def intersection(a: Mask, b: Mask) -> Mask:
    """True where both masks are."""
    check((a, b))
    return _aligned(lambda x, y: x and y, a, b)


def roles(personal: Mask, trainable: Mask, frozen: Mask | None = None) -> Roles:
    """The role of each leaf of a model.

    Args:
      personal: the leaves that stay with their client.
      trainable: the leaves that gradients move; of the others, those that are not personal are buffers.
      frozen: the leaves that never move; none when not given. A leaf cannot be personal and frozen.

    Example:
      >>> own, moves = {"body": False, "head": True, "mean": False}, {"body": True, "head": True, "mean": False}
      >>> {name: str(role) for name, role in roles(own, moves).items()}
      {'body': 'shared', 'head': 'personal', 'mean': 'buffer'}
    """

    def role(own: bool, moves: bool, still: bool) -> Role:
        if own and still:
            raise ValueError("a leaf cannot be personal and frozen: a frozen leaf is the same for all clients")
        if still:
            return Role.FROZEN
        if own:
            return Role.PERSONAL
        return Role.SHARED if moves else Role.BUFFER

    return _aligned(role, personal, trainable, nothing_like(personal) if frozen is None else frozen)


def having(roles: Roles, *wanted: Role) -> Mask:
    """True at the leaves that have one of the wanted roles."""
    return jax.tree.map(lambda role: role in wanted, roles)


def nothing_like(mask: Mask) -> Mask:
    """False at every leaf."""
    return jax.tree.map(lambda _: False, mask)


def variables_shape(task: Task) -> PyTree:
    """The task's variables as a tree of `jax.ShapeDtypeStruct`; nothing is computed."""
    return jax.eval_shape(task.init, jax.random.key(0))


def path_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """A key path of `jax.tree_util` as plain names, e.g. `("params", "head", "kernel")`."""
    return tuple(jax.tree_util.keystr((part,), simple=True) for part in path)


def by_path(select: Callable[[tuple[str, ...]], bool]) -> Callable[[Task], Mask]:
    """The leaves whose path, a tuple of names such as `("params", "head", "kernel")`, satisfies `select`."""

    def build(task: Task) -> Mask:
        return jax.tree_util.tree_map_with_path(lambda path, _: bool(select(path_names(path))), variables_shape(task))

    return build


def everything(task: Task) -> Mask:
    """All leaves, buffers included."""
    return by_path(lambda names: True)(task)


def nothing(task: Task) -> Mask:
    """No leaf."""
    return by_path(lambda names: False)(task)


def _named_layers(task: Task) -> None:
    if not task.layers:
        raise ValueError(
            "this task names no layers, so that nothing is its head: give it layers=(...), from the input to the output"
        )


def last(depth: int) -> Callable[[Task], Mask]:
    """The leaves of the last `depth` layers, counted from the output; `last(1)` is the head."""

    return _of_layers("last", depth, slice(-depth, None))


def first(depth: int) -> Callable[[Task], Mask]:
    """The leaves of the first `depth` layers, counted from the input (LG-FedAvg keeps these)."""

    return _of_layers("first", depth, slice(depth))


def _of_layers(name: str, depth: int, chosen: slice) -> Callable[[Task], Mask]:
    checks.count("depth", depth, least=0)

    def build(task: Task) -> Mask:
        _named_layers(task)
        if not 1 <= depth <= len(task.layers):
            raise ValueError(
                f"{name}:{depth} asks for the {name} {depth} layers, but the task names {len(task.layers)} "
                f"({', '.join(task.layers)})"
            )
        layers = task.layers[chosen]
        return by_path(lambda names: layer_of(names, task.layers) in layers)(task)

    return build


def batch_norm(*, affine: bool, statistics: bool) -> Callable[[Task], Mask]:
    """Batch-norm leaves: scale and shift (gamma, beta), running mean and variance (mu, sigma), or both.

    A module is a batch norm when the collection `batch_stats` of a Flax model has an entry for it.
    """

    def build(task: Task) -> Mask:
        paths = [path_names(path) for path, _ in jax.tree_util.tree_leaves_with_path(variables_shape(task))]
        modules = {names[1:-1] for names in paths if names[:1] == ("batch_stats",)}

        def select(names: tuple[str, ...]) -> bool:
            is_statistic = names[:1] == ("batch_stats",)
            return (statistics and is_statistic) or (affine and not is_statistic and names[1:-1] in modules)

        return by_path(select)(task)

    return build


_NAMED: dict[str, Callable[[Task], Mask]] = {
    "all": everything,
    "none": nothing,
    "head": last(1),
    "body": lambda task: complement(last(1)(task)),
    "bn": batch_norm(affine=True, statistics=True),
    "bn_affine": batch_norm(affine=True, statistics=False),
    "bn_stats": batch_norm(affine=False, statistics=True),
}
ALLOWED = "all, none, head, body, last:DEPTH, first:DEPTH, bn, bn_affine, bn_stats, path:REGEX"
"""Masks in words, as messages list them."""


def resolve(spec: MaskSpec, task: Task, *, name: str = "mask") -> Mask:
    """Turns a mask as a user writes it into a boolean tree over the task's variables.

    Args:
      spec: one of the words `all`, `none`, `head`, `body`, `last:DEPTH`, `first:DEPTH`, `bn`, `bn_affine`, `bn_stats`,
        `path:REGEX` (searched in `a/b/c`); several joined by `+`, of which a `path:` is the last, because a `+` after it
        belongs to the expression; a function of the task; or a ready boolean tree.
      task: the task whose variables the mask is for.
      name: what the caller calls this argument, for the error message.

    Raises:
      ValueError: an unknown word, a word that selects nothing in this model, or a tree of another structure.
    """
    require_task("resolve", task)
    if isinstance(spec, str):
        plain, *path = re.split(r"(?:^|\+)\s*(?=path:)", spec, maxsplit=1)
        words = [*(plain.split("+") if plain or not path else []), *path]
        return functools.reduce(union, [_named(word.strip(), task, name) for word in words])
    variables = variables_shape(task)
    structure: Any = jax.tree.structure(variables)
    # A model that is itself callable, as in Equinox, has callable masks too.
    is_tree = structure == jax.tree.structure(spec) and not any(map(callable, jax.tree.leaves(spec)))
    if not is_tree and callable(spec):
        checks.function(name, spec, ("task",), "'head', 'last:2' or masks.by_path(select)")
        mask = spec(task)
    else:
        mask = spec
    odd = checks.misplaced_leaf(mask, variables)
    if odd is not None:
        raise ValueError(f"{name} must have a Python bool at every leaf of the task's variables, but {odd}")
    if structure != jax.tree.structure(mask):
        raise ValueError(f"{name} has structure {jax.tree.structure(mask)}, but the task's variables have {structure}")
    for leaf in jax.tree.leaves(mask):
        if not isinstance(leaf, (bool, np.bool_)):
            found = "an array" if isinstance(leaf, (np.ndarray, jax.Array)) else checks.shown(leaf)
            raise ValueError(f"{name} must hold Python bools, not {found}: a mask is read when a function is traced")
    return jax.tree.map(bool, mask)


def _named(word: str, task: Task, name: str) -> Mask:
    kind, _, argument = word.partition(":")
    if kind == "path" and argument:
        try:
            pattern = re.compile(argument)
        except (re.error, OverflowError, RecursionError) as error:
            reason = checks.first_line(error)
            raise ValueError(f"{name}={checks.shown(word)} is not a regular expression: {reason}") from None
        build = by_path(lambda names: pattern.search("/".join(names)) is not None)
    elif word in _NAMED:
        build = _NAMED[word]
    elif kind in ("last", "first") and argument.isdecimal() and len(argument) < 10:
        build = (last if kind == "last" else first)(int(argument))
    else:
        hint = checks.nearest(word, _NAMED)
        raise ValueError(f"{name}={checks.shown(word)} is unknown{hint}; allowed are {ALLOWED}, and several joined by +")
    try:
        mask = build(task)
    except ValueError as error:
        raise ValueError(f"{name}={checks.shown(word)}: {error}") from None
    if word != "none" and not any(jax.tree.leaves(mask)):
        raise ValueError(f"{name}={checks.shown(word)} selects no leaf of this model")
    return mask
