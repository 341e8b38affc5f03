"""Meta-gradients of one client: how the loss after adaptation changes with what adaptation starts from.

Every estimator is one function `(loss, meta, support, query) -> MetaGradient` with

    F(meta) = loss(phi_k; query),   phi_0 = start(meta),   phi_{t+1} = inner(phi_t, grad loss(phi_t; support_t)),

and they differ only in how they get, or approximate, the gradient of F. `loss(params, batch)` is any scalar function; `meta`
is a pytree of parameters, or `MetaSGD` when inner rates are learned too; `support` and `query` are a batch (used in every
step), `Batches`, or, for the support, `WithHessian`.

No estimator differentiates through the inner loop in reverse: `trajectory` walks it, and takes the query's gradient back.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks
from fedjax_meta.data.federated import Batches
from fedjax_meta.trajectory import (
    Inner,
    Losses,
    ScalarLoss,
    difference_product,
    exact_product,
    first_order_vjp,
    run_inner,
    second_order_vjp,
    value_and_gradient,
)


class MetaSGD(NamedTuple):
    """Parameters with a learned inner rate for each (Meta-SGD; Li et al. 2017, arXiv 1707.09835).

    Attributes:
      params: the initialisation, any pytree.
      rates: inner learning rates, one for each parameter, of any sign.
    """

    params: Any
    rates: Any


class WithHessian(NamedTuple):
    """A support whose Hessians are taken on other samples than its inner steps (Per-FedAvg's third independent batch).

    `hessian_free` and `implicit` read both; the other estimators take the support alone.

    Attributes:
      support: a batch or `Batches` for the inner steps.
      hessian: a batch, or `Batches` of as many steps, for the Hessian-vector products.
    """

    support: Any
    hessian: Any


class Info(NamedTuple):
    """Diagnostics of one meta-gradient: scalars.

    Attributes:
      support_loss: mean support loss over the inner steps, each before its update.
      query_loss: query loss at the adapted parameters.
      first_support_loss: support loss of the first step, where adaptation starts.
      last_support_loss: support loss of the last step, before its update; far above the first when the inner loop diverges.
    """

    support_loss: jax.Array
    query_loss: jax.Array
    first_support_loss: jax.Array
    last_support_loss: jax.Array

    @classmethod
    def of(cls, losses: Losses, query_loss: jax.Array, steps: Any) -> "Info":
        """From the losses of so many inner steps."""
        return cls(losses.total / jnp.maximum(steps, 1), query_loss, losses.first, losses.last)


class MetaGradient(NamedTuple):
    """What an estimator returns.

    Attributes:
      adapted: phi_k, the parameters after the inner steps.
      gradient: like `meta`, the (approximate) gradient of the query loss with respect to it.
      info: diagnostics, scalars, among them those of `Info`.
    """

    adapted: Any
    gradient: Any
    info: Any


class Estimator(Protocol):
    """The one signature of all meta-gradients."""

    def __call__(self, loss: ScalarLoss, meta: Any, support: Any, query: Any) -> MetaGradient:
        """The meta-gradient of one client."""


def sgd(rate: Any, *, mask: Any = None) -> Inner:
    """Inner gradient descent, phi - rate * g (MAML; Finn et al. 2017, arXiv 1703.03400).

    Args:
      rate: a scalar, or a tree like the parameters (one rate a leaf or a parameter); fixed, not learned.
      mask: boolean tree of the leaves that adapt (ANIL: the head); all when not given.
    """
    for leaf in jax.tree.leaves(rate):
        checks.not_negative("inner rate", leaf)

    def update(meta: Any, gradient: Any, state: Any, phi: Any) -> tuple[Any, Any]:
        del meta
        gradient = _masked(gradient, mask)
        scaled = jax.tree.map(lambda r, part: jax.tree.map(lambda g: r * g, part), rate, gradient)
        return jax.tree.map(lambda p, g: p - g.astype(p.dtype), phi, scaled), state

    return Inner(lambda meta: meta, lambda meta, phi: (), update, mask=mask)


def learned_sgd(*, mask: Any = None) -> Inner:
    """Inner gradient descent with the rates of a `MetaSGD`, phi - rates * g, differentiated with respect to both."""

    def update(meta: MetaSGD, gradient: Any, state: Any, phi: Any) -> tuple[Any, Any]:
        gradient = _masked(gradient, mask)
        return jax.tree.map(lambda p, r, g: p - (r * g).astype(p.dtype), phi, meta.rates, gradient), state

    return Inner(lambda meta: meta.params, lambda meta, phi: (), update, learned=True, mask=mask)


def optimizer(transformation: optax.GradientTransformation, *, mask: Any = None) -> Inner:
    """Any optax optimiser as the inner rule (momentum, Adam, ...); its state starts fresh and is differentiated through."""

    def update(meta: Any, gradient: Any, state: Any, phi: Any) -> tuple[Any, Any]:
        del meta
        updates, state = transformation.update(_masked(gradient, mask), state, phi)
        # Masked again, for weight decay moves a parameter that has no gradient.
        return optax.apply_updates(phi, _masked(updates, mask)), state

    return Inner(lambda meta: meta, lambda meta, phi: transformation.init(phi), update, mask=mask)


def _masked(gradient: Any, mask: Any) -> Any:
    return gradient if mask is None else jax.tree.map(lambda keep, g: g if keep else jnp.zeros_like(g), mask, gradient)


def exact(
    inner: Inner,
    *,
    steps: int = 1,
    keep: str = "smaller",
    checkpoint_every: int | None = None,
) -> Estimator:
    """The exact (second-order) meta-gradient through any number of inner steps.

    Args:
      inner: the inner update rule, e.g. `sgd(0.01)`.
      steps: k, when `support` is one batch; `Batches` bring their own number.
      keep: what is remembered of each of several steps: its "parameters" (and optimiser state), from which its gradient is
        linearised again on the way back; its "linearisation", which saves that time and holds activations; or the "smaller" of
        the two in bytes. A step of several chunks always keeps parameters.
      checkpoint_every: remember only the parameters of every c-th step, and run the c steps after it once more on the way
        back: k/c + c trees instead of k, least at c = sqrt(k), for k more gradients.

    Cost: k gradients, k Hessian-vector products and one query gradient, plus half a gradient or so a step where parameters are
    kept; memory: at most k parameter trees with `keep="smaller"`. One step (a Python 1) keeps its linearisation.

    Raises:
      ValueError: from the estimator, when traced: parameters that are not floating-point, a loss that is not a real scalar,
        support and query of different structure, a query of several steps, an optimiser whose integer state depends on
        parameters or gradients (quantised moments), for its derivative would be 0.

    Example:
      >>> import jax.numpy as jnp
      >>> loss = lambda w, batch: jnp.sum((w - batch) ** 2)
      >>> result = exact(sgd(0.1), steps=2)(loss, jnp.array([1.0]), jnp.array([0.0]), jnp.array([2.0]))
      >>> f"{result.gradient[0]:.4f}"  # 2 * 0.64 * (0.64 - 2)
      '-1.7408'
    """
    checks.one_of("keep", keep, ("smaller", "parameters", "linearisation"))
    return _second_order(
        inner, steps=steps, keep=keep, checkpoint_every=checkpoint_every, linearise=exact_product, own_hessian=False
    )


def hessian_free(
    inner: Inner,
    *,
    steps: int = 1,
    delta: float | jax.Array = 1e-3,
    normalise: bool = False,
    method: str = "difference",
    checkpoint_every: int | None = None,
) -> Estimator:
    """The Hessian-free meta-gradient of Per-FedAvg (Fallah et al. 2020, arXiv 2002.07948), and its exact-product twin.

    One step, with support b0, query b1 and Hessian batch b2 (`WithHessian(b0, b2)`; b2 = b0 when the support is plain):

        g = grad f(w - alpha grad f(w; b0); b1),   gradient = g - alpha h,
        h = [grad f(w + delta g; b2) - grad f(w - delta g; b2)] / (2 delta),   or   h = Hessian f(w; b2) g.

    For k steps this is `exact` with each Hessian-vector product on the way back replaced: at phi_t, on the t-th Hessian batch,
    along what the outer gradient has become by then. It therefore tends to `exact` as delta -> 0 when the Hessian batches are
    the support batches and the loss is smooth: a difference sees every kink of a ReLU or a max-pool between its two points,
    which the Hessian does not, and over many steps that can leave little of the direction.

    For any other inner rule than SGD of one rate the direction is the rule's own, and the length of the step delta times the
    norm of the outer gradient, as above.

    Args:
      inner, steps, checkpoint_every: as in `exact`; the parameters of each step are kept.
      delta: step of the difference, relative to the outer gradient's norm. The error falls as delta^2 until round-off, which
        grows as 1/delta, takes over: 1e-3 suits float32 and gradients of norm about 1.
      normalise: take `delta` as the length of the step itself, whatever the norm of the gradient.
      method: "difference", or "product" for exact Hessian-vector products (which cost less than two gradients).
    """
    checks.positive("delta", delta)
    checks.one_of("method", method, ("difference", "product"))
    linearise = exact_product if method == "product" else partial(difference_product, delta=delta, normalise=normalise)
    return _second_order(
        inner, steps=steps, keep="parameters", checkpoint_every=checkpoint_every, linearise=linearise, own_hessian=True
    )


def _second_order(
    inner: Inner,
    *,
    steps: int,
    keep: str,
    checkpoint_every: int | None,
    linearise: Callable[..., tuple[Any, Any, Any]],
    own_hessian: bool,
) -> Estimator:
    checks.count("steps", steps)
    if checkpoint_every is not None:
        checks.count("checkpoint_every", checkpoint_every)

    def estimate(loss: ScalarLoss, meta: Any, support: Any, query: Any) -> MetaGradient:
        support, hessian = split_support(support)
        support, query = check_problem(loss, inner.start(meta), support, query, steps)
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


def first_order(inner: Inner, *, steps: int = 1) -> Estimator:
    """The first-order meta-gradient (FOMAML): the query gradient at the adapted parameters, inner gradients held constant.

    Learned rates still get their gradient, which needs no Hessian. Arguments and errors as in `exact`.
    """
    checks.count("steps", steps)

    def estimate(loss: ScalarLoss, meta: Any, support: Any, query: Any) -> MetaGradient:
        support, _ = split_support(support)
        support, query = check_problem(loss, inner.start(meta), support, query, steps)
        adapted, losses, pull_back = first_order_vjp(loss, meta, support, inner)
        query_loss, outer = value_and_gradient(loss, adapted, query, 0)
        return MetaGradient(adapted, pull_back(outer), Info.of(losses, query_loss, support.steps))

    return estimate


def reptile(inner: Inner, *, steps: int = 1, scale: float | jax.Array = 1.0) -> Estimator:
    """The Reptile direction (Nichol et al. 2018, arXiv 1803.02999), `(theta - phi_k) / scale`.

    Descent along it moves theta towards the adapted parameters: `theta - epsilon * gradient` is `theta + epsilon (phi_k -
    theta)`. (S1 prints the step with the opposite sign, which moves away from them.) It reads the query only for
    `info.query_loss`, which is NaN when `query` is `None`; nothing else depends on it.

    Args:
      inner, steps: as in `exact`; a rule with learned rates has no Reptile gradient.
      scale: what the displacement is divided by: 1 as published; the inner rate times k for the mean inner gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> loss = lambda w, batch: jnp.sum((w - batch) ** 2)
      >>> reptile(sgd(0.25))(loss, jnp.array([1.0]), jnp.array([0.0]), None).gradient.tolist()
      [0.5]
    """
    checks.count("steps", steps)
    checks.positive("scale", scale)
    not_learned("reptile", inner)

    def estimate(loss: ScalarLoss, meta: Any, support: Any, query: Any) -> MetaGradient:
        support, _ = split_support(support)
        phi = inner.start(meta)
        support, query = check_problem(loss, phi, support, query, steps)
        adapted, losses = run_inner(loss, meta, support, inner)
        query_loss = jnp.full((), jnp.nan)
        if query is not None:
            query_loss = query.mean(lambda batch: loss(adapted, batch), 0)
        gradient = jax.tree.map(lambda p, a: (p - a) / jnp.asarray(scale, p.dtype), phi, adapted)
        return MetaGradient(adapted, gradient, Info.of(losses, query_loss, support.steps))

    return estimate


def adapt(loss: ScalarLoss, meta: Any, support: Any, inner: Inner, *, steps: int = 1) -> tuple[Any, jax.Array]:
    """The inner loop alone: (adapted parameters, mean loss of the steps before their updates); what a test client runs."""
    support = as_batches(split_support(support)[0], steps)
    adapted, losses = run_inner(loss, meta, support, inner)
    return adapted, losses.total / jnp.maximum(support.steps, 1)


def as_batches(batch: Any, steps: int) -> Batches:
    """`Batches` as they are; a single batch, any pytree, as `steps` steps over it."""
    if not isinstance(batch, Batches):
        return Batches(lambda step, chunk: batch, steps, steps)
    if batch.max_steps < 1 or (isinstance(batch.steps, int) and batch.steps < 1):
        raise ValueError(f"steps={batch.steps} of the support must be at least 1 (at most {batch.max_steps} are foreseen)")
    return batch


def check_loss(loss: ScalarLoss, params: Any, batches: Batches) -> None:
    """Raises `ValueError` unless the loss of the first batch is one real scalar and the parameters are floating-point."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            where = jax.tree_util.keystr(path) or "the tree"
            raise ValueError(f"parameters must be floating-point to be differentiated, but {where} is {jnp.result_type(leaf)}")
    value = jax.eval_shape(lambda params: loss(params, batches.get(0, 0)), params)
    if not (hasattr(value, "shape") and value.shape == () and jnp.issubdtype(value.dtype, jnp.floating)):
        raise ValueError(f"loss(params, batch) must return one real scalar, but returns {value}")


def check_problem(loss: ScalarLoss, params: Any, support: Any, query: Any, steps: int) -> tuple[Batches, Any]:
    """Support and query as `Batches`, checked against each other and against the loss; a query of `None` stays `None`."""
    support = as_batches(support, steps)
    check_loss(loss, params, support)
    if query is None:
        return support, None
    query = as_batches(query, 1)
    if query.max_steps != 1:
        raise ValueError(f"the query has up to {query.max_steps} steps, but is read as one: give it chunks (`as_one_step`)")
    ours, theirs = (str(jax.tree.structure(jax.eval_shape(partial(batches.get, 0, 0)))) for batches in (support, query))
    if ours != theirs:
        raise ValueError(f"support and query must be of one structure, but are {ours} and {theirs}")
    return support, query


def split_support(support: Any) -> tuple[Any, Any]:
    """(support, Hessian batches or `None`)."""
    return support if isinstance(support, WithHessian) else (support, None)


def not_learned(name: str, inner: Inner) -> None:
    """Raises `ValueError` for an inner rule with learned rates, where an estimator has no gradient for them."""
    if inner.learned:
        raise ValueError(f"{name} has no gradient for learned rates: inner must not be `learned_sgd`")
