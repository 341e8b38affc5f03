"""Meta-gradients of one client: the gradient of the loss after adaptation with respect to the start of adaptation.

Every estimator is a function `(loss, meta, support, query) -> MetaGradient` with

    F(meta) = loss(phi_k; query),   phi_0 = start(meta),   phi_{t+1} = inner(phi_t, grad loss(phi_t; support_t)).

Estimators differ only in how they compute or approximate the gradient of F. `loss(params, batch)` is any scalar function.
`meta` is a pytree of parameters, or a `MetaSGD` if inner rates are learned too. `support` and `query` are a batch (used in
every step) or `Batches`; the support may also be a `WithHessian`.

No estimator uses reverse-mode differentiation through the inner loop; see `trajectory`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, loops, masks
from fedjax_meta.data import Batches
from fedjax_meta.numerics.roots import finite_at_zero
from fedjax_meta.task import FIRST_ORDER_ONLY
from fedjax_meta.trajectory import (
    InnerOptimizer,
    Losses,
    Product,
    ScalarLoss,
    difference_product,
    exact_product,
    first_order_vjp,
    run_inner,
    second_order_vjp,
    value_and_gradient,
)
from fedjax_meta.types import Mask, Params, PyTree, Rate, Scalar, Updates

# ---------------------------------------------------------------------------------------------------------- problem and result


class MetaSGD(NamedTuple):
    """Parameters with a learned inner rate for each entry (Meta-SGD; Li et al. 2017, arXiv 1707.09835).

    Attributes:
      params: the initialisation, any pytree.
      rates: inner learning rates, a tree like `params`, of any sign; with `learned_sgd(per_step=True)` each leaf has `[S]`, a
        rate for each step.
    """

    params: Params
    rates: Params


class WithHessian(NamedTuple):
    """A support with separate samples for its Hessians (the third independent batch of Per-FedAvg).

    `hessian_free` and `implicit_gradient` use both; the other estimators use `support` alone.

    Attributes:
      support: a batch or `Batches` for the inner steps.
      hessian: a batch, or `Batches` with as many steps, for the Hessian-vector products.
    """

    support: PyTree
    hessian: PyTree


class Info(NamedTuple):
    """Diagnostics of one meta-gradient, scalars.

    Attributes:
      support_loss: mean support loss over the inner steps, each taken before its update.
      query_loss: query loss at the adapted parameters.
      first_support_loss: support loss of the first step, at the start of adaptation.
      last_support_loss: support loss of the last step, before its update; far above the first if the inner loop diverges.
    """

    support_loss: jax.Array
    query_loss: jax.Array
    first_support_loss: jax.Array
    last_support_loss: jax.Array

    @classmethod
    def of(cls, losses: Losses, query_loss: jax.Array, steps: Scalar) -> "Info":
        """The diagnostics from the losses of `steps` inner steps."""
        return cls(losses.total / jnp.maximum(steps, 1), query_loss, losses.first, losses.last)


class MetaGradient(NamedTuple):
    """The result of an estimator.

    Attributes:
      adapted: phi_k, the parameters after the inner steps.
      gradient: a tree like `meta`, the (approximate) gradient of the query loss with respect to it.
      info: diagnostics, scalars: an `Info`, or a named tuple with at least its fields. In a round of FedMeta, the other fields
        become metrics of their own names.
    """

    adapted: Params
    gradient: Params
    info: Any


class Estimator(Protocol):
    """The signature of all meta-gradients."""

    def __call__(self, loss: ScalarLoss, meta: Params, support: PyTree, query: PyTree) -> MetaGradient:
        """The meta-gradient of one client."""


# ------------------------------------------------------------------------------------------------------------ inner optimisers


def sgd(rate: Rate | PyTree, *, mask: Mask | None = None) -> InnerOptimizer:
    """Inner gradient descent, phi - rate * g (MAML; Finn et al. 2017, arXiv 1703.03400).

    Args:
      rate: a scalar, or a tree like the parameters with one rate per leaf or per entry; fixed, not learned.
      mask: boolean tree of the leaves that adapt (ANIL: the head); all by default.

    Raises:
      ValueError: a negative rate, a mask that is a word; from the estimator: the meta-parameters are a `MetaSGD`, the mask has
        other leaves than they.
    """
    masks.check(mask)
    if not jax.tree.leaves(rate):
        raise ValueError(f"rate={rate} must be a number, or a tree of rates like the parameters")
    for leaf in jax.tree.leaves(rate):
        checks.not_negative("rate", leaf, each=True)

    def update(meta: Params, gradient: Updates, state: PyTree, phi: Params) -> tuple[Params, PyTree]:
        del meta
        gradient = _masked(gradient, mask)
        scaled = jax.tree.map(lambda r, part: jax.tree.map(lambda g: r * g, part), rate, gradient)
        return jax.tree.map(lambda p, g: p - g.astype(p.dtype), phi, scaled), state

    def start(meta: Params) -> Params:
        params = _start_fixed("sgd(rate)", meta)
        try:
            jax.tree.broadcast(rate, params)
        except ValueError:
            raise ValueError("rate must be a number, or a tree of rates like the parameters: it has other branches") from None
        jax.tree.map(lambda r, part: jax.tree.map(partial(_check_rate, "rate", r), part), rate, params)
        return params

    return InnerOptimizer(start, lambda meta, phi: (), update, mask=mask)


def learned_sgd(*, mask: Mask | None = None, per_step: bool = False) -> InnerOptimizer:
    """Inner gradient descent with the rates of a `MetaSGD`, phi - rates * g, differentiated with respect to both.

    Args:
      mask: boolean tree of the leaves that adapt; all by default.
      per_step: whether each leaf has one rate for each step, `[S]`, in place of one for each entry (MAML++); steps beyond S take
        the last one.

    Raises:
      ValueError: from the estimator: the meta-parameters are not a `MetaSGD`, or its rates do not match its parameters.
    """

    masks.check(mask)

    def start(meta: MetaSGD) -> Params:
        if not isinstance(meta, MetaSGD):
            raise ValueError(
                f"learned_sgd() needs a MetaSGD, not an object of type {type(meta).__name__}: "
                "wrap the parameters, fm.meta.MetaSGD(params, rates)"
            )
        structures = [str(jax.tree.structure(tree)) for tree in meta]
        if structures[0] != structures[1]:
            raise ValueError(
                "MetaSGD.rates must be a tree like MetaSGD.params, e.g. jax.tree.map(lambda p: jnp.full_like(p, 0.01), params)"
            )
        if not per_step:
            jax.tree.map(partial(_check_rate, "MetaSGD.rates"), meta.rates, meta.params)
        elif any(jnp.ndim(rates) != 1 or not jnp.size(rates) for rates in jax.tree.leaves(meta.rates)):
            raise ValueError("learned_sgd(per_step=True) needs rates [S] for each leaf, one for each step")
        return meta.params

    def update(meta: MetaSGD, gradient: Updates, state: PyTree, phi: Params) -> tuple[Params, PyTree]:
        gradient = _masked(gradient, mask)
        return jax.tree.map(lambda p, r, g: p - (r * g).astype(p.dtype), phi, meta.rates, gradient), state

    def update_by_step(meta: MetaSGD, gradient: Updates, step: jax.Array, phi: Params) -> tuple[Params, jax.Array]:
        rates = jax.tree.map(lambda r: r.at[step].get(mode="clip"), meta.rates)
        return update(MetaSGD(meta.params, rates), gradient, (), phi)[0], step + 1

    if per_step:
        return InnerOptimizer(start, lambda meta, phi: jnp.zeros((), jnp.int32), update_by_step, learned=True, mask=mask)
    return InnerOptimizer(start, lambda meta, phi: (), update, learned=True, mask=mask)


def optimizer(
    factory: Callable[[Rate], optax.GradientTransformation], rate: Rate | None = None, *, mask: Mask | None = None
) -> InnerOptimizer:
    """Any optax optimiser for the inner steps (momentum, Adam, ...).

    Its state starts fresh in every inner loop and is differentiated through. At 0 the derivatives of a square root and of a
    quotient count as 0: Adam takes the root of squares, clipping divides by a norm, and the gradient of a parameter on which the
    loss does not depend is exactly 0.

    Args:
      factory: `rate -> optax.GradientTransformation`, e.g. `optax.adam`. Bind other arguments with `functools.partial` or a
        lambda; a schedule belongs inside the factory.
      rate: the learning rate; required.
      mask: boolean tree of the leaves that adapt; all by default.

    Raises:
      ValueError: `factory` is not such a function, its optimiser needs more than gradients and parameters in a step (a line
        search needs the loss), `rate` is missing or negative; from the estimator: the meta-parameters are a `MetaSGD`.

    Example:
      >>> import jax.numpy as jnp
      >>> loss = lambda w, batch: jnp.sum((w - batch) ** 2)
      >>> inner = optimizer(lambda rate: optax.sgd(rate, momentum=0.9), 0.1)
      >>> adapt(loss, jnp.array([1.0]), jnp.array([0.0]), inner, steps=2)[0].round(2).tolist()
      [0.46]
    """
    if isinstance(factory, optax.GradientTransformation) or not callable(factory):
        raise ValueError(
            f"factory must be a function rate -> optax.GradientTransformation, not {_kind(factory)}: "
            "write optimizer(optax.adam, 0.1), not optimizer(optax.adam(0.1))"
        )
    if rate is None:
        name = getattr(factory, "__name__", "factory")
        raise ValueError(f"optimizer({name}) has no rate: write optimizer({name}, 0.1)")
    checks.not_negative("rate", rate)
    masks.check(mask)
    transformation = factory(rate)
    if not isinstance(transformation, optax.GradientTransformation):
        raise ValueError(f"factory(rate) must return an optax.GradientTransformation, not {_kind(transformation)}")
    checks.gradients_suffice("factory", getattr(factory, "__name__", "factory"), transformation)

    @finite_at_zero
    def moved(gradient: Updates, state: PyTree, phi: Params) -> tuple[Params, PyTree]:
        updates, after = transformation.update(_masked(gradient, mask), state, phi)
        # Mask the updates too: weight decay moves parameters even if their gradient is 0.
        return optax.apply_updates(phi, _masked(updates, mask)), loops.like(after, state)

    def update(meta: Params, gradient: Updates, state: PyTree, phi: Params) -> tuple[Params, PyTree]:
        del meta
        return moved(gradient, state, phi)

    start = partial(_start_fixed, "optimizer(factory, rate)")
    return InnerOptimizer(start, lambda meta, phi: transformation.init(phi), update, mask=mask)


def require_inner(name: str, inner: object) -> None:
    """Checks the first argument of an estimator builder.

    Args:
      name: the builder's name, for the error message.
      inner: the argument.

    Raises:
      ValueError: `inner` is not an `InnerOptimizer`.

    Example:
      >>> require_inner("exact", 0.1)
      Traceback (most recent call last):
      ...
      ValueError: exact: inner must be an InnerOptimizer, not the number 0.1; write exact(fm.meta.sgd(0.1))
    """
    if isinstance(inner, InnerOptimizer):
        return
    if isinstance(inner, optax.GradientTransformation):
        instead = "fm.meta.optimizer(optax.adam, 0.1)"
    elif callable(inner) and str(getattr(inner, "__module__", "")).startswith("optax"):
        instead = f"fm.meta.optimizer(optax.{getattr(inner, '__name__', 'adam')}, 0.1)"
    elif inner is learned_sgd:
        instead = "fm.meta.learned_sgd()"
    elif inner is optimizer:
        instead = "fm.meta.optimizer(optax.adam, 0.1)"
    else:
        instead = f"fm.meta.sgd({inner if isinstance(inner, (int, float)) else 0.1})"
    raise ValueError(f"{name}: inner must be an InnerOptimizer, not {_kind(inner)}; write {name}({instead})")


def require_fixed_rates(name: str, inner: InnerOptimizer) -> None:
    """Raises `ValueError` for an inner optimiser with learned rates, if the estimator has no gradient for them."""
    if inner.learned:
        raise ValueError(f"{name} has no gradient for learned rates: inner must not be learned_sgd()")


def _kind(value: object) -> str:
    """What a wrong argument is, for an error message."""
    if isinstance(value, optax.GradientTransformation):
        return "an optax.GradientTransformation"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if callable(value):
        return f"the function {getattr(value, '__name__', type(value).__name__)}"
    return f"an object of type {type(value).__name__}"


def _start_fixed(name: str, meta: Params) -> Params:
    if isinstance(meta, MetaSGD):
        raise ValueError(f"{name} does not learn rates, but the meta-parameters are a MetaSGD: write learned_sgd() instead")
    return meta


def _check_rate(what: str, rate: Any, leaf: Any) -> None:
    """Refuses a rate that is neither one for its leaf nor one for each entry: a row of them would be broadcast."""
    if jnp.ndim(rate) and jnp.shape(rate) != jnp.shape(leaf):
        raise ValueError(f"{what} has a leaf of shape {jnp.shape(rate)} for a parameter of shape {jnp.shape(leaf)}")


def _masked(gradient: Updates, mask: Mask | None) -> Updates:
    return gradient if mask is None else jax.tree.map(lambda keep, g: g if keep else jnp.zeros_like(g), mask, gradient)


# ------------------------------------------------------------------------------------------------------------------ estimators


def exact(
    inner: InnerOptimizer,
    *,
    steps: int = 1,
    keep: str = "smaller",
    checkpoint_every: int | None = None,
) -> Estimator:
    """The exact (second-order) meta-gradient through any number of inner steps.

    Args:
      inner: the inner optimiser, e.g. `sgd(0.01)`.
      steps: k, if `support` is one batch; `Batches` have their own number of steps.
      keep: what is stored of each step if there are several. "parameters" stores the parameters (and optimiser state), and
        the backward pass linearises the gradient again. "linearisation" saves that time and stores activations. "smaller"
        takes the one with fewer bytes. A step of several chunks always stores parameters.
      checkpoint_every: store only the parameters of every c-th step, and run each segment of c steps a second time in the
        backward pass: k/c + c trees in place of k (fewest at c = sqrt(k)), for k more gradients.

    Cost: k gradients, k Hessian-vector products and one query gradient, plus about half a gradient per step if parameters are
    stored. Memory: at most k trees of the leaves that adapt with `keep="smaller"`. A single step (a Python 1) stores its
    linearisation.

    Raises:
      ValueError: `inner` is not an `InnerOptimizer`, or an option is out of range. From the estimator, when traced: parameters
        that are not floating-point, a loss that is not a real scalar, support and query of different structure, a query with
        several steps, an optimiser whose integer state depends on parameters or gradients (quantised moments), because the
        derivative of that state would be 0.

    Example:
      >>> import jax.numpy as jnp
      >>> loss = lambda w, batch: jnp.sum((w - batch) ** 2)
      >>> result = exact(sgd(0.1), steps=2)(loss, jnp.array([1.0]), jnp.array([0.0]), jnp.array([2.0]))
      >>> f"{result.gradient[0]:.4f}"  # 2 * 0.64 * (0.64 - 2)
      '-1.7408'
    """
    require_inner("exact", inner)
    checks.one_of("keep", keep, ("smaller", "parameters", "linearisation"))
    linearise = partial(exact_product, mask=inner.mask)
    return _second_order(
        inner, steps=steps, keep=keep, checkpoint_every=checkpoint_every, linearise=linearise, own_hessian=False
    )


def hessian_free(
    inner: InnerOptimizer,
    *,
    steps: int = 1,
    delta: Rate = 1e-3,
    normalise: bool = False,
    method: str = "difference",
    checkpoint_every: int | None = None,
) -> Estimator:
    """The Hessian-free meta-gradient of Per-FedAvg (Fallah et al. 2020, arXiv 2002.07948), or its exact-product variant.

    One step, with support b0, query b1 and Hessian batch b2 (`WithHessian(b0, b2)`; b2 = b0 for a plain support):

        g = grad f(w - alpha grad f(w; b0); b1),   gradient = g - alpha h,
        h = [grad f(w + delta g; b2) - grad f(w - delta g; b2)] / (2 delta),   or   h = Hessian f(w; b2) g.

    For k steps this is `exact` with each Hessian-vector product of the backward pass replaced: it is taken at phi_t, on the
    t-th Hessian batch, along the outer gradient at that step. If the Hessian batches are the support batches and the loss is
    smooth, the result tends to `exact` as delta -> 0. A difference includes every kink of a ReLU or max-pool between its two
    points, and the Hessian does not; over many steps, little of the exact direction may remain.

    For other inner optimisers than SGD with one rate, the direction of each product is the optimiser's own. The difference
    step still has the length delta times the norm of the outer gradient.

    Args:
      inner, steps, checkpoint_every: as in `exact`; the parameters of each step are stored.
      delta: step of the difference, relative to the norm of the outer gradient. The error falls as delta^2 until round-off,
        which grows as 1/delta, dominates: 1e-3 suits float32 and gradients of norm about 1.
      normalise: use `delta` as the length of the step itself, whatever the norm of the gradient.
      method: "difference", or "product" for exact Hessian-vector products (which cost less than two gradients).

    Raises:
      ValueError: as in `exact`; parameters of 16 bits, or a loss that rounds to 16 bits what follows from them or multiplies with
        fewer digits than float32: these are too coarse for differences.
    """
    require_inner("hessian_free", inner)
    checks.positive("delta", delta)
    checks.one_of("method", method, ("difference", "product"))
    if method == "product":
        linearise = partial(exact_product, mask=inner.mask)
    else:
        linearise = partial(difference_product, delta=delta, normalise=normalise)
    return _second_order(
        inner, steps=steps, keep="parameters", checkpoint_every=checkpoint_every, linearise=linearise, own_hessian=True
    )


def _second_order(
    inner: InnerOptimizer,
    *,
    steps: int,
    keep: str,
    checkpoint_every: int | None,
    linearise: Callable[..., tuple[jax.Array, Updates, Product]],
    own_hessian: bool,
) -> Estimator:
    checks.count("steps", steps)
    steps = int(steps)  # of NumPy's integers, loops have no reverse derivative
    if checkpoint_every is not None:
        checks.count("checkpoint_every", checkpoint_every)
        checkpoint_every = int(checkpoint_every)

    def estimate(loss: ScalarLoss, meta: Params, support: PyTree, query: PyTree) -> MetaGradient:
        require_query(query)
        require_second_order(loss)
        meta, support, query, hessian = prepared(inner, loss, meta, support, query, steps)
        hessian = as_batches(hessian, support.max_steps) if own_hessian and hessian is not None else None
        if hessian is not None and hessian.max_steps < support.max_steps:
            raise ValueError(
                f"{support.max_steps} inner steps need as many Hessian batches, but there are {hessian.max_steps}"
            )
        adapted, losses, pull_back = second_order_vjp(
            loss,
            meta,
            support,
            inner,
            linearise=partial(linearise, loss, hessian),
            keep=keep,
            checkpoint_every=checkpoint_every,
        )
        query_loss, outer = value_and_gradient(loss, adapted, query, 0)
        return MetaGradient(adapted, pull_back(outer), Info.of(losses, query_loss, support.steps))

    return estimate


def first_order(inner: InnerOptimizer, *, steps: int = 1) -> Estimator:
    """The first-order meta-gradient (FOMAML): the query gradient at the adapted parameters, with constant inner gradients.

    Learned rates still get their gradient, which needs no Hessian. What else moves parameters, such as weight decay, counts where
    `InnerOptimizer` says so (`learned`). Arguments and errors as in `exact`.
    """
    require_inner("first_order", inner)
    checks.count("steps", steps)

    def estimate(loss: ScalarLoss, meta: Params, support: PyTree, query: PyTree) -> MetaGradient:
        require_query(query)
        meta, support, query, _ = prepared(inner, loss, meta, support, query, steps)
        adapted, losses, pull_back = first_order_vjp(loss, meta, support, inner)
        query_loss, outer = value_and_gradient(loss, adapted, query, 0)
        return MetaGradient(adapted, pull_back(outer), Info.of(losses, query_loss, support.steps))

    return estimate


def reptile_gradient(inner: InnerOptimizer, *, steps: int = 1, scale: Rate = 1.0) -> Estimator:
    """The Reptile direction (Nichol et al. 2018, arXiv 1803.02999), `(theta - phi_k) / scale`.

    Descent along it moves theta towards the adapted parameters: `theta - epsilon * gradient` is `theta + epsilon (phi_k -
    theta)`. (Nguyen et al., "Improving federated learning by meta-learning", print the step with the opposite sign, which
    moves away from them.) The query serves only for `info.query_loss`, which is NaN if `query` is `None`.

    Args:
      inner, steps: as in `exact`; learned rates have no Reptile gradient.
      scale: divisor of the displacement: 1 as published; the inner rate times k gives the mean inner gradient.

    Raises:
      ValueError: learned rates, an `inner` that starts elsewhere than at theta, and as in `exact`.

    Example:
      >>> import jax.numpy as jnp
      >>> loss = lambda w, batch: jnp.sum((w - batch) ** 2)
      >>> reptile_gradient(sgd(0.25))(loss, jnp.array([1.0]), jnp.array([0.0]), None).gradient.tolist()
      [0.5]
    """
    require_inner("reptile_gradient", inner)
    checks.count("steps", steps)
    checks.positive("scale", scale)
    require_fixed_rates("reptile_gradient", inner)

    def estimate(loss: ScalarLoss, meta: Params, support: PyTree, query: PyTree) -> MetaGradient:
        meta, support, query, _ = prepared(inner, loss, meta, support, query, steps)
        theta = inner.start(meta)
        moved = checks.misplaced_leaf(theta, meta) is not None
        if moved or any(one is not other for one, other in zip(*map(jax.tree.leaves, (theta, meta)), strict=True)):
            raise ValueError("reptile_gradient needs an inner optimiser that starts at the meta-parameters themselves")
        adapted, losses = run_inner(loss, meta, support, inner)
        query_loss = jnp.full((), jnp.nan)
        if query is not None:
            query_loss = query.mean(lambda batch: loss(adapted, batch), 0)
        gradient = jax.tree.map(lambda p, a: (p - a) / jnp.asarray(scale, a.dtype), theta, adapted)
        return MetaGradient(adapted, gradient, Info.of(losses, query_loss, support.steps))

    return estimate


def adapt(
    loss: ScalarLoss, meta: Params, support: PyTree, inner: InnerOptimizer, *, steps: int = 1
) -> tuple[Params, jax.Array]:
    """The inner loop alone, as a test client runs it.

    Args:
      loss, meta, support: as for an estimator.
      inner, steps: as in `exact`.

    Returns:
      (adapted parameters, mean loss over the steps, each taken before its update).

    Raises:
      ValueError: as in `exact`.
    """
    require_inner("adapt", inner)
    checks.count("steps", steps)
    meta, support, _, _ = prepared(inner, loss, meta, support, None, steps)
    adapted, losses = run_inner(loss, meta, support, inner)
    return adapted, losses.total / jnp.maximum(support.steps, 1)


# ----------------------------------------------------------------------------------------------- shared by all estimators


def as_batches(batch: PyTree, steps: int) -> Batches:
    """`Batches` unchanged; a single batch, any pytree, as `steps` steps over that batch."""
    if not isinstance(batch, Batches):
        return Batches(lambda step, chunk: batch, steps, steps)
    if batch.max_steps < 1 or (isinstance(batch.steps, int) and batch.steps < 1):
        raise ValueError(f"steps={batch.steps} of the support must be at least 1 (max_steps={batch.max_steps})")
    if isinstance(batch.steps, int):
        return batch
    return dataclasses.replace(batch, steps=jnp.minimum(batch.steps, batch.max_steps))  # room for a step's parameters


def prepared(
    inner: InnerOptimizer, loss: ScalarLoss, meta: Params, support: PyTree, query: PyTree, steps: int
) -> tuple[Params, Batches, Any, PyTree | None]:
    """What an estimator begins with: (meta-parameters, support, query, Hessian batches or `None`), see `check_problem`."""
    support, hessian = split_support(support)
    if hessian is not None:
        _check_alike("support and hessian", as_batches(support, steps), as_batches(hessian, steps))
    checks.floats(meta)
    _check_mask(inner, meta)
    meta = _own_copy(inner, loss, meta, support, query, steps)
    return meta, *check_problem(loss, inner.start(meta), support, query, steps), hessian


def _check_mask(inner: InnerOptimizer, meta: Params) -> None:
    if inner.mask is not None:
        masks.check(inner.mask, inner.start(meta))


def _own_copy(inner: InnerOptimizer, loss: ScalarLoss, meta: Params, support: PyTree, query: PyTree, steps: int) -> Params:
    """The meta-parameters as a value of each device's own, see `loops.device_local`."""

    def losses(meta: Params) -> list[Any]:
        batches = [as_batches(batch, steps) for batch in (support, query) if batch is not None]
        return [loss(inner.start(meta), batch.get(0, 0)) for batch in batches]

    return loops.device_local(meta, losses)


def check_loss(loss: ScalarLoss, params: Params, batches: Batches) -> None:
    """Raises `ValueError` unless the loss of the first batch is one real scalar and all parameters are floating-point."""
    checks.floats(params)
    value = jax.eval_shape(lambda params: loss(params, batches.get(0, 0)), params)
    if not (hasattr(value, "shape") and value.shape == () and jnp.issubdtype(value.dtype, jnp.floating)):
        raise ValueError(f"loss(params, batch) must return one real scalar, but returns {value}")


def check_problem(loss: ScalarLoss, params: Params, support: PyTree, query: PyTree, steps: int) -> tuple[Batches, Any]:
    """Support and query as `Batches`, checked against the loss and each other; a query of `None` stays `None`."""
    support = as_batches(support, steps)
    check_loss(loss, params, support)
    if query is None:
        return support, None
    query = as_batches(query, 1)
    if query.max_steps != 1:
        raise ValueError(f"the query has up to {query.max_steps} steps, but must have one: write query.as_one_step()")
    _check_alike("support and query", support, query)
    return support, query


def _check_alike(what: str, *both: Batches) -> None:
    ours, theirs = (str(jax.tree.structure(jax.eval_shape(partial(batches.get, 0, 0)))) for batches in both)
    if ours != theirs:
        raise ValueError(f"{what} must have the same structure, but have {ours} and {theirs}")


def require_query(query: PyTree) -> None:
    """Raises `ValueError` if there is no query; `reptile_gradient` alone works without one."""
    if query is None:
        raise ValueError("query is None, but this meta-gradient is that of the query loss: give it a query batch")


def require_second_order(loss: ScalarLoss) -> None:
    """Raises `ValueError` if the loss is that of a private task: a difference of two noised gradients is no curvature."""
    if getattr(loss, "private", False):
        raise ValueError(FIRST_ORDER_ONLY)


def split_support(support: PyTree) -> tuple[PyTree, PyTree | None]:
    """(support, Hessian batches or `None`)."""
    return support if isinstance(support, WithHessian) else (support, None)
