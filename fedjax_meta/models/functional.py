"""`from_functions`: a `Task` from plain functions, with buffers and randomness; what all other `from_...` builders end in."""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.typing import DTypeLike

from fedjax_meta import checks
from fedjax_meta.dependence import dependent
from fedjax_meta.keys import is_key
from fedjax_meta.task import Batch, LogitsLoss, Task, check_layer_names, check_layers, cross_entropy
from fedjax_meta.tasks import METRICS, criterion
from fedjax_meta.types import Key, Mask, PyTree, Variables

Criterion = Callable[[jax.Array, Batch], jax.Array]
"""`(outputs [B, ...], batch) -> scalar`, a mean over the real samples."""


class Apply(Protocol):
    """A model in one function.

    `key` and `weight [B]` (1 for a real row, 0 for padding) are `None` in evaluation mode. The second result is the variables
    with new buffers.
    """

    def __call__(  # noqa: D102
        self, variables: Variables, x: PyTree, *, train: bool, key: Key | None, weight: jax.Array | None
    ) -> tuple[jax.Array, Variables]: ...


def everything_trainable(variables: Variables) -> Mask:
    """True at every leaf."""
    return jax.tree.map(lambda _: True, variables)


def params_trainable(variables: Variables) -> Mask:
    """True at the leaves of the collection `"params"`; the other collections are buffers."""
    return {name: jax.tree.map(lambda _, name=name: name == "params", tree) for name, tree in variables.items()}


def from_functions(
    init: Callable[[Key], Variables],
    apply: Apply,
    sample_shape: Any,
    *,
    trainable: Callable[[Variables], Mask] = everything_trainable,
    features: Callable[[Variables, PyTree], jax.Array] | None = None,
    head: Callable[[Variables, jax.Array], jax.Array] | None = None,
    layers: tuple[str, ...] = (),
    loss: str | Criterion = cross_entropy,
    metrics: tuple[Any, ...] | None = None,
    sample_dtype: DTypeLike | None = None,
) -> Task:
    """A task from a hand-written model with buffers, dropout or both. (`fm.classification` is enough for one with neither.)

    Args:
      init: `key -> variables`, any pytree of arrays. Leaves that are not floating-point are kept as floating-point numbers,
        because a server averages buffers; `apply` gets them back in their own type, rounded.
      apply: `(variables, x [B, ...], *, train, key, weight) -> (outputs [B, ...], variables)`, see `Apply`.
      sample_shape: shape of one input, or one input as a pytree of arrays or `jax.ShapeDtypeStruct`.
      trainable: `variables -> mask` of the leaves that gradients update, all by default; the others are buffers. Only buffers may
        be integers, and `apply` may renew only them.
      features, head: `(variables, x) -> [B, d]` and `(variables, features) -> outputs`, in evaluation mode; both or neither.
      layers: layer names from input to output, as they appear in the paths of the variables, for masks such as `"last:2"`.
      loss: `(outputs, batch) -> scalar`, over rows with weight only, or for real targets "squared" or "huber"; softmax
        cross-entropy by default.
      metrics: what `evaluate` measures by default, see `Task`; MAE, RMSE and R² with a loss by its name.
      sample_dtype: dtype of the inputs where `sample_shape` is a shape; JAX's default float type if `None`.

    Raises:
      ValueError: arguments that are no such functions, a layer that no variable has, variables that `apply` does not return in
        their form, a leaf that gradients would update and cannot, or that `apply` renews.

    Example:
      >>> init = lambda key: {"head": {"w": jnp.zeros((4, 3))}, "steps": jnp.zeros((), int)}
      >>> def apply(variables, x, *, train, key, weight):
      ...     kept = jax.random.bernoulli(key, 0.5, x.shape) if train else 0.5
      ...     return (kept * x) @ variables["head"]["w"], {**variables, "steps": variables["steps"] + int(train)}
      >>> moves = lambda variables: {"head": {"w": True}, "steps": False}
      >>> task = from_functions(init, apply, (4,), trainable=moves, layers=("head",))
      >>> task.predict(task.init(jax.random.key(0)), jnp.ones((2, 4))).shape
      (2, 3)
    """
    checks.function("init", init, ("key",), "lambda key: variables")
    checks.function("trainable", trainable, ("variables",), "lambda variables: mask")
    if not callable(apply):
        raise ValueError(f"apply={checks.shown(apply)} must be a function (variables, x, *, train, key, weight)")
    lacks = _not_taken(apply, ("train", "key", "weight"))
    if lacks:
        raise ValueError(f"apply must be a function (variables, x, *, train, key, weight), but it takes no {', '.join(lacks)}")
    if (features is None) != (head is None):
        raise ValueError("features and head must be given together")
    metrics = METRICS if isinstance(loss, str) and metrics is None else metrics
    of_batch = check_criterion(loss)
    check_layers(layers)
    model = _Model(init, apply)
    variables = jax.eval_shape(model.init, jax.random.key(0))
    check_layer_names(layers, variables)
    x = samples(sample_shape, 2, sample_dtype)
    model.check(x, trainable(variables))
    return Task(
        init=model.init,
        loss=LogitsLoss(model.logits, of_batch, as_predicted=_as_predicted(model, variables, x)),
        predict=model.predict,
        features=None if features is None else partial(model.evaluated, features),
        head=None if head is None else partial(model.evaluated, head),
        layers=tuple(layers),
        trainable=trainable,
        metrics=None if metrics is None else tuple(metrics),
    )


def _not_taken(function: Callable[..., Any], names: Sequence[str]) -> list[str]:
    """Those of the names that are no keyword arguments of a function."""
    try:
        taken = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions have no signature
        return []
    known = names if any(one.kind is one.VAR_KEYWORD for one in taken) else [one.name for one in taken]
    return [name for name in names if name not in known]


class Run(Protocol):
    """One method of a module, by name, with its variables: `(outputs, variables with new buffers)`; see `Apply`."""

    def __call__(  # noqa: D102
        self, method: str, variables: Variables, x: PyTree, train: bool, key: Key | None, weight: jax.Array | None
    ) -> tuple[Any, Variables]: ...


def from_methods(
    init: Callable[[Key], Variables], run: Run, sample_shape: Any, *, features: str | None, head: str | None, **options: Any
) -> Task:
    """`from_functions` for a module whose methods are called by name: `__call__`, `features` and `head`."""

    def apply(
        variables: Variables, x: PyTree, *, train: bool, key: Key | None, weight: jax.Array | None
    ) -> tuple[jax.Array, Variables]:
        outputs, updated = run("__call__", variables, x, train, key, weight)
        return outputs, updated if train else variables

    def evaluated(method: str | None) -> Callable[[Variables, PyTree], jax.Array] | None:
        return None if method is None else lambda variables, x: run(method, variables, x, False, None, None)[0]

    return from_functions(
        init,
        apply,
        sample_shape,
        trainable=params_trainable,
        features=evaluated(features),
        head=evaluated(head),
        **options,
    )


class _Model:
    """The functions of a `Task`, around `apply`, with leaves of every type stored as floating-point numbers."""

    def __init__(self, init: Callable[[Key], Variables], apply: Apply) -> None:
        self._init, self._apply = init, apply
        self._forms = jax.eval_shape(init, jax.random.key(0))
        # A model of floating-point leaves alone is called with the very trees that it returned.
        self._all_real = all(_is_real(leaf.dtype) for leaf in jax.tree.leaves(self._forms))

    def init(self, key: Key) -> Variables:
        return self._stored(self._init(key))

    def logits(self, variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
        outputs, updated = self._apply(self._own(variables), batch.x, train=True, key=key, weight=batch.weight)
        return outputs, self._stored(updated)

    def predict(self, variables: Variables, x: PyTree) -> jax.Array:
        return jnp.asarray(self._apply(self._own(variables), x, train=False, key=None, weight=None)[0])

    def evaluated(self, function: Callable[[Variables, Any], jax.Array], variables: Variables, x: PyTree) -> jax.Array:
        return jnp.asarray(function(self._own(variables), x))

    def _stored(self, variables: Variables) -> Variables:
        # A batch norm whose statistics are float32 returns float64 ones of float64 inputs.
        return jax.tree.map(
            lambda leaf, form: leaf.astype(form.dtype if _is_real(form.dtype) else jnp.result_type(float)),
            variables,
            self._forms,
        )

    def _own(self, variables: Variables) -> Variables:
        if self._all_real:
            return variables
        return jax.tree.map(
            lambda leaf, form: leaf if _is_real(form.dtype) else jnp.round(leaf).astype(form.dtype), variables, self._forms
        )

    def check(self, x: PyTree, trainable: Mask) -> None:
        """Raises `ValueError` unless `apply` returns variables like those that it gets, and renews buffers alone."""
        rows = jax.ShapeDtypeStruct(jax.tree.leaves(x)[0].shape[:1], jnp.result_type(float))

        def apply(variables: Variables, x: PyTree, key: Key, weight: jax.Array) -> Variables:
            returned = self._apply(variables, x, train=True, key=key, weight=weight)
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise ValueError(f"apply must return (outputs, variables), not {checks.shown(returned)}")
            return returned[1]

        given = self._forms, x, jax.eval_shape(jax.random.key, 0), rows
        traced, updated = jax.make_jaxpr(apply, return_shape=True)(*given)
        shapes = [jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, bool), tree) for tree in (updated, self._forms)]
        odd = checks.mismatch(*shapes)
        if odd is not None:
            raise ValueError(f"the variables that apply returns must have the form of those that it gets, but {odd}")
        if checks.mismatch(trainable, everything_trainable(self._forms)) is not None:
            return  # the mask is checked where it is used
        leaves = jax.tree_util.tree_leaves_with_path(self._forms)
        of_samples = dependent(traced, [*[False] * len(leaves), *[True] * (len(traced.jaxpr.invars) - len(leaves))])
        for (path, form), trained, renewed in zip(leaves, jax.tree.leaves(trainable), of_samples, strict=True):
            if trained and (renewed or not _is_real(form.dtype)):
                what = "is renewed by apply" if renewed else f"is {form.dtype}, which has no gradient"
                raise ValueError(
                    f"the model's leaf {jax.tree_util.keystr(path)} {what}: make it a buffer, with trainable=lambda variables: a "
                    "mask that is False there"
                )


def _is_real(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _as_predicted(model: _Model, variables: Variables, x: PyTree) -> bool:
    """Whether a model computes the same in training as in evaluation and has no buffers: no dropout in particular."""

    def program(function: Callable[..., Any]) -> tuple[str, list[Any]]:
        rows = jax.tree.leaves(x)[0].shape[:1]
        weight, key = jax.ShapeDtypeStruct(rows, jnp.result_type(float)), jax.eval_shape(jax.random.key, 0)
        traced = jax.make_jaxpr(function)(variables, x, weight, key)
        kept = _without_unused(traced.jaxpr)
        read = {id(var) for step in kept.eqns for var in step.invars} | set(map(id, kept.outvars))
        constants = [value for var, value in zip(traced.jaxpr.constvars, traced.consts, strict=True) if id(var) in read]
        constants += _inner_constants(kept)
        # Two traces of one function differ in the addresses of its helpers.
        return re.sub(r"0x[0-9a-f]+", "", str(kept)), constants

    def trained(variables: Variables, x: PyTree, weight: jax.Array, key: Key) -> Any:
        return model.logits(variables, Batch(x, weight, weight), key)

    def evaluated(variables: Variables, x: PyTree, weight: jax.Array, key: Key) -> Any:
        del weight, key
        return model.predict(variables, x), variables

    (first, constants), (second, others) = program(trained), program(evaluated)
    return first == second and len(constants) == len(others) and all(map(_same, constants, others))


def _inner_constants(program: Jaxpr) -> list[Any]:
    """Arrays that stand in the operations of a program, and in the programs that these hold; numbers stand in its text."""
    found: list[Any] = []
    for step in program.eqns:
        found += [var.val for var in step.invars if isinstance(var, Literal) and np.ndim(var.val)]
        for inner in jax.tree.leaves(list(step.params.values())):
            if isinstance(inner, ClosedJaxpr):
                found += inner.consts
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                found += _inner_constants(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)
    return found


def _same(one: Any, other: Any) -> bool:
    """Whether two constants of a program are the same; in doubt they are not."""
    if one is other:
        return True
    if isinstance(one, jax.core.Tracer) or isinstance(other, jax.core.Tracer):
        return False
    one, other = (jax.random.key_data(array) if is_key(array) else array for array in (one, other))
    return one.dtype == other.dtype and bool(np.array_equal(one, other))


def _without_unused(jaxpr: Any) -> Any:
    """The program without the steps whose results nobody reads, e.g. keys of a model that has no dropout."""
    needed, kept = set(map(id, jaxpr.outvars)), []
    for step in reversed(jaxpr.eqns):
        if step.effects or needed & set(map(id, step.outvars)):
            needed |= set(map(id, step.invars))
            kept.append(step)
    return jaxpr.replace(eqns=kept[::-1])


# ---------------------------------------------------------------------------------------------- shared by the from_... builders


def samples(sample: Any, rows: int, dtype: DTypeLike | None = None) -> PyTree:
    """Shapes of a batch of inputs.

    Args:
      sample: a shape (a tuple or list of sizes), or a pytree of arrays or `jax.ShapeDtypeStruct` without the batch axis.
      rows: B.
      dtype: of a shape; JAX's default float type if `None`.

    Raises:
      ValueError: neither of the two, or a size below 1.

    Example:
      >>> samples((28, 28), 2, jnp.int32)
      ShapeDtypeStruct(shape=(2, 28, 28), dtype=int32)
    """
    # A NumPy integer has a shape and a type, but alone or among integers it is a size.
    if isinstance(sample, (tuple, list)) and all(
        isinstance(leaf, np.integer) or not _is_form(leaf) for leaf in jax.tree.leaves(sample)
    ):
        for extent in sample:
            checks.count("sample_shape", extent)
        return jax.ShapeDtypeStruct((rows, *map(int, sample)), dtype or jnp.result_type(float))
    leaves = jax.tree.leaves(sample)
    if not leaves or not all(_is_form(leaf) for leaf in leaves):
        raise ValueError(
            f"sample_shape={checks.shown(sample)} must be a tuple of sizes, or one input as a pytree of arrays or "
            "jax.ShapeDtypeStruct"
        )
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype)), sample
    )


def _is_form(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def zeros(shapes: PyTree) -> PyTree:
    """Arrays of zeros of these shapes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def check_criterion(loss: Any) -> Criterion:
    """A loss that can be called, also by its name; raises `ValueError` otherwise."""
    found: Criterion = criterion(loss)
    if not callable(found):
        raise ValueError(f"loss={checks.shown(loss)} must be a function (logits, batch)")
    return found


def check_split(owner: str, has: Callable[[str], bool], features: str | None, head: str | None) -> None:
    """Raises `ValueError` unless `features` and `head` are both `None` or both names that the model has."""
    for option, name in (("features", features), ("head", head)):
        if name is not None:
            checks.word(option, name)
    if (features is None) != (head is None):
        raise ValueError(f"features={features!r} and head={head!r} must be given together")
    for option, name in (("features", features), ("head", head)):
        if name is not None and not has(name):
            raise ValueError(f"{option}={name!r} is not a method of {owner}")


_SET = ("train", "training", "deterministic", "weight")
"""What a module's method may take besides its input."""

_MODE = re.compile("train|determin|infer|eval|dropout")


def flags(method: Callable[..., Any]) -> Callable[[bool, jax.Array | None], dict[str, Any]]:
    """`(train, weight) -> keyword arguments`, reduced to those in the signature of a module's method.

    Raises:
      ValueError: an argument that nobody sets although it must be, or that seems to say whether the module trains.
    """
    accepted = inspect.signature(method).parameters
    for name, parameter in list(accepted.items())[1 + ("self" in accepted) :]:
        if name in _SET or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty or (isinstance(parameter.default, bool) and _MODE.search(name)):
            left = "has no value" if parameter.default is parameter.empty else f"would always be {parameter.default}"
            raise ValueError(f"{method.__qualname__} takes {name}, which {left}: only {', '.join(_SET)} are set; rename it")

    def arguments(train: bool, weight: jax.Array | None) -> dict[str, Any]:
        values = {"train": train, "training": train, "deterministic": not train, "weight": weight}
        return {name: value for name, value in values.items() if name in accepted}

    return arguments
