"""Meta-gradients of one client: how the loss after adaptation changes with what adaptation starts from.

Every estimator is one function `(loss, meta, support, query) -> MetaGradient` with

    F(meta) = loss(phi_k; query),   phi_0 = start(meta),   phi_{t+1} = inner(phi_t, grad loss(phi_t; support_t)),

and they differ only in how they get, or approximate, the gradient of F. `loss(params, batch)` is any scalar function; `meta`
is a pytree of parameters, or `MetaSGD` when inner rates are learned too; `support` and `query` are a batch (used in every
step), `Batches`, or, for the support, `WithHessian`.

No estimator differentiates through the inner loop in reverse. `exact` and `hessian_free` walk it backwards and multiply the
outer gradient v by each step's transposed Jacobian, `v <- v - alpha * H(phi_t) v` for SGD, where the Hessian-vector product is
a forward derivative of the gradient, or a difference of two gradients. Of each step they keep its parameters or its
linearisation, whichever is smaller, and the number of steps may be known only at run time.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal
from jax.tree_util import Partial

from fedjax_meta import checks
from fedjax_meta.data.federated import Batches

ScalarLoss = Callable[[Any, Any], jax.Array]


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


class Inner(NamedTuple):
    """One inner update rule, as pure functions that the exact estimator differentiates.

    Attributes:
      start: `meta -> phi_0`.
      init: `(meta, phi_0) -> state`; integers in the state (step counts) are carried, not differentiated.
      update: `(meta, gradient, state, phi) -> (phi, state)`.
      learned: whether `update` reads `meta`, so that even a first-order gradient has to look at the inner steps.
      mask: boolean tree of the leaves that adapt; all when `None`.
    """

    start: Callable[[Any], Any]
    init: Callable[[Any, Any], Any]
    update: Callable[[Any, Any, Any, Any], tuple[Any, Any]]
    learned: bool = False
    mask: Any = None


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
        inner, steps=steps, keep=keep, checkpoint_every=checkpoint_every, linearise=_linearise, own_hessian=False
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
    linearise = _linearise if method == "product" else partial(_difference, delta=delta, normalise=normalise)
    return _second_order(
        inner, steps=steps, keep="parameters", checkpoint_every=checkpoint_every, linearise=linearise, own_hessian=True
    )


def first_order(inner: Inner, *, steps: int = 1) -> Estimator:
    """The first-order meta-gradient (FOMAML): the query gradient at the adapted parameters, inner gradients held constant.

    Learned rates still get their gradient, which needs no Hessian. Arguments and errors as in `exact`.
    """
    checks.count("steps", steps)

    def estimate(loss: ScalarLoss, meta: Any, support: Any, query: Any) -> MetaGradient:
        support, _ = split_support(support)
        support, query = check_problem(loss, inner.start(meta), support, query, steps)
        if not inner.learned:
            adapted, losses = run_inner(loss, meta, support, inner)
        else:
            phi = inner.start(meta)
            start = (phi, inner.init(meta, phi))

            def step(t: Any, carry: Any) -> Any:
                (phi, state), losses, memory = carry
                value, gradient = value_and_gradient(loss, phi, support, t)
                memory = _write(memory, t, (phi, state, gradient))
                return inner.update(meta, gradient, state, phi), losses.seen(t, value), memory

            memory = _slots(support.max_steps, (*start, phi))
            (adapted, _), losses, memory = _loop(support.steps, step, (start, Losses.none(), memory))
        query_loss, outer = value_and_gradient(loss, adapted, query, 0)
        total = jax.tree.map(jnp.zeros_like, meta)
        if inner.learned:

            def back(t: Any, total: Any) -> Any:
                phi, state, gradient = _read(memory, t)
                _, pull_back = jax.vjp(lambda meta: inner.update(meta, gradient, state, phi)[0], meta)
                return jax.tree.map(jnp.add, total, pull_back(outer)[0])

            total = _loop(support.steps, back, total)
        _, pull_back = jax.vjp(inner.start, meta)
        gradient = jax.tree.map(jnp.add, total, pull_back(outer)[0])
        return MetaGradient(adapted, gradient, losses.info(query_loss, support.steps))

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
        return MetaGradient(adapted, gradient, losses.info(query_loss, support.steps))

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


class Losses(NamedTuple):
    """Support losses of an inner loop, as it goes."""

    total: jax.Array
    first: jax.Array
    last: jax.Array

    @classmethod
    def none(cls) -> "Losses":
        """Before the first step."""
        return cls(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()))

    def seen(self, t: Any, value: jax.Array) -> "Losses":
        """With the loss of step t."""
        value = value.astype(self.total.dtype)
        return Losses(self.total + value, jnp.where(t == 0, value, self.first), value)

    def info(self, query_loss: jax.Array, steps: Any) -> Info:
        """The diagnostics that all estimators share."""
        return Info(self.total / jnp.maximum(steps, 1), query_loss, self.first, self.last)


def run_inner(loss: ScalarLoss, meta: Any, support: Batches, inner: Inner) -> tuple[Any, Losses]:
    """The inner loop, of which nothing is remembered: (adapted parameters, losses)."""
    phi = inner.start(meta)
    start = (phi, inner.init(meta, phi))
    (adapted, _), losses = _walk(loss, meta, support, inner, start, losses=Losses.none(), count=support.steps)
    return adapted, losses


def value_and_gradient(loss: ScalarLoss, params: Any, batches: Batches, step: Any) -> tuple[Any, Any]:
    """Loss of one step and its gradient, over the chunks of the step."""
    return batches.mean(lambda batch: jax.value_and_grad(loss)(params, batch), step)


def hessian_product(loss: ScalarLoss, params: Any, batches: Batches, step: Any) -> Any:
    """(loss, gradient, `v -> H v`) of one step.

    A step of one chunk is linearised once, for any number of products, and the product is a pytree of its residuals; several
    chunks are gone through again in every product, so that the activations of one at a time are held.
    """
    if isinstance(batches.chunks, int) and batches.chunks == 1:
        return _linearised(loss, params, batches.get(step, 0))
    value, gradient = value_and_gradient(loss, params, batches, step)

    def product(vector: Any) -> Any:
        def of_chunk(batch: Any) -> Any:
            return jax.jvp(lambda params: jax.grad(loss)(params, batch), (params,), (vector,))[1]

        return batches.mean(of_chunk, step)

    return value, gradient, product


def _linearised(loss: ScalarLoss, params: Any, batch: Any) -> tuple[jax.Array, Any, Any]:
    def gradient_and_value(params: Any) -> tuple[Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        return gradient, value

    # The Hessian is symmetric: its product with a cotangent is the forward derivative of the gradient.
    gradient, product, value = jax.linearize(gradient_and_value, params, has_aux=True)
    return value, gradient, product


def _linearise(loss: ScalarLoss, support: Batches, hessian: Batches | None, t: Any, phi: Any) -> tuple[Any, Any, Any]:
    """(loss, gradient, product) of an inner step, with exact products; `product(direction, outer)`."""
    value, gradient, product = hessian_product(loss, phi, support, t)
    if hessian is not None:
        product = hessian_product(loss, phi, hessian, t)[2]
    return value, gradient, Partial(_along_direction, product)


def _along_direction(product: Any, direction: Any, outer: Any) -> Any:
    del outer
    return product(direction)


def _difference(
    loss: ScalarLoss, support: Batches, hessian: Any, t: Any, phi: Any, *, delta: Any, normalise: bool
) -> tuple[Any, Any, Any]:
    """As `_linearise`, with central differences of the gradient."""
    value, gradient = value_and_gradient(loss, phi, support, t)
    batches = support if hessian is None else hessian

    def product(direction: Any, outer: Any) -> Any:
        norm = optax.tree.norm(direction)
        length = delta if normalise else delta * optax.tree.norm(outer)
        step = length / jnp.where(norm > 0, norm, 1)

        def shifted(sign: int) -> Any:
            moved = jax.tree.map(lambda p, d: p + (sign * step * d).astype(p.dtype), phi, direction)
            return value_and_gradient(loss, moved, batches, t)[1]

        scale = jnp.where((norm > 0) & (step > 0), 0.5 / jnp.where(step > 0, step, 1), 0)
        return jax.tree.map(lambda a, b: ((a - b) * scale).astype(a.dtype), shifted(1), shifted(-1))

    return value, gradient, product


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
        _check_state(inner, meta)

        def tape(support: Batches, t: Any, phi: Any, state: Any) -> tuple[jax.Array, Any, Any]:
            """One inner step: (its loss, (phi, state) after it, the product with its transposed Jacobian as a pytree)."""
            value, gradient, product = linearise(loss, support, hessian, t, phi)
            after, pull_update = _pull_update(inner, meta, gradient, state, phi)
            return value, after, Partial(partial(_pull, inner.learned), product, pull_update)

        phi = inner.start(meta)
        start = (phi, inner.init(meta, phi))
        if isinstance(support.steps, int) and support.steps == 1:
            value, (adapted, _), pull = tape(support, 0, *start)
            losses = Losses.none().seen(0, value)
            unwind: Callable[[Any], Any] = pull
        else:
            (adapted, _), losses, unwind = _through_time(
                loss, meta, support, inner, start, tape=tape, keep=keep, checkpoint_every=checkpoint_every
            )
        query_loss, outer = value_and_gradient(loss, adapted, query, 0)
        nothing = jax.tree.map(jnp.zeros_like, _partition(start[1])[0])
        outer, state_outer, total = unwind((outer, nothing, jax.tree.map(jnp.zeros_like, meta)))
        gradient = _to_meta(inner, meta, outer, state_outer, total)
        return MetaGradient(adapted, gradient, losses.info(query_loss, support.steps))

    return estimate


def _pull_update(inner: Inner, meta: Any, gradient: Any, state: Any, phi: Any) -> tuple[Any, Any]:
    """((phi, state) after one update, the transposed derivative of the update)."""
    floats, integers = _partition(state)

    def update(meta: Any, gradient: Any, floats: Any, phi: Any) -> Any:
        phi, state = inner.update(meta, gradient, _combine(floats, integers), phi)
        floats, moved_on = _partition(state)
        return (phi, floats), moved_on

    (phi, floats), pull_update, integers = jax.vjp(update, meta, gradient, floats, phi, has_aux=True)
    return (phi, _combine(floats, integers)), pull_update


def _pull(learned: bool, product: Any, pull_update: Any, carry: Any) -> Any:
    """Cotangents of (phi_{t+1}, its optimiser state), and what meta has collected, taken back to step t."""
    outer, state_outer, total = carry
    to_meta, to_gradient, to_state, to_phi = pull_update((outer, state_outer))
    before = jax.tree.map(jnp.add, to_phi, product(to_gradient, outer))
    return before, to_state, jax.tree.map(jnp.add, total, to_meta) if learned else total


def _through_time(
    loss: ScalarLoss,
    meta: Any,
    support: Batches,
    inner: Inner,
    start: Any,
    *,
    tape: Callable[..., tuple[jax.Array, Any, Any]],
    keep: str,
    checkpoint_every: int | None,
) -> tuple[Any, Losses, Callable[[Any], Any]]:
    """Several inner steps, and the function that takes cotangents back through all of them."""
    record, replay, kept = _memory(loss, meta, support, inner, start, tape=tape, keep=keep)

    def forward(first: Any, count: Any, slots: int, after: Any) -> Any:
        def step(i: Any, carry: Any) -> Any:
            after, losses, memory = carry
            value, after, kept = record(first + i, *after)
            return after, losses.seen(first + i, value), _write(memory, i, kept)

        return jax.lax.fori_loop(0, count, step, (after, Losses.none(), _slots(slots, kept)))

    def backward(first: Any, count: Any, memory: Any, carry: Any) -> Any:
        def step(i: Any, carry: Any) -> Any:
            t = count - 1 - i
            return replay(first + t, _read(memory, t))(carry)

        return jax.lax.fori_loop(0, count, step, carry)

    if checkpoint_every is None:
        after, losses, memory = forward(0, support.steps, support.max_steps, start)
        return after, losses, lambda carry: backward(0, support.steps, memory, carry)

    every = min(checkpoint_every, support.max_steps)
    segments = (support.steps + every - 1) // every

    def length(segment: Any) -> Any:
        return jnp.minimum(every, support.steps - segment * every)

    def pass_segment(segment: Any, carry: Any) -> Any:
        after, losses, memory = carry
        memory = _write(memory, segment, after)
        first, count = segment * every, length(segment)
        after, losses = _walk(loss, meta, support, inner, after, losses=losses, first=first, count=count)
        return after, losses, memory

    memory = _slots(-(-support.max_steps // every), start)
    after, losses, memory = jax.lax.fori_loop(0, segments, pass_segment, (start, Losses.none(), memory))

    def back_segment(i: Any, carry: Any) -> Any:
        segment = segments - 1 - i
        first, count = segment * every, length(segment)
        _, _, inside = forward(first, count, every, _read(memory, segment))
        return backward(first, count, inside, carry)

    return after, losses, lambda carry: jax.lax.fori_loop(0, segments, back_segment, carry)


def _memory(
    loss: ScalarLoss, meta: Any, support: Batches, inner: Inner, start: Any, *, tape: Callable[..., Any], keep: str
) -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    """How to keep a step, how to get its transposed Jacobian out of what is kept, and the shapes of that."""

    def record_parameters(t: Any, phi: Any, state: Any) -> Any:
        value, gradient = value_and_gradient(loss, phi, support, t)
        return value, inner.update(meta, gradient, state, phi), (phi, state)

    def replay_parameters(t: Any, kept: Any) -> Any:
        return tape(support, t, *kept)[2]

    parameters = jax.eval_shape(lambda: start)
    if keep == "parameters" or not (isinstance(support.chunks, int) and support.chunks == 1):
        return record_parameters, replay_parameters, parameters

    layout: list[Any] = []

    def record_linearisation(t: Any, phi: Any, state: Any) -> tuple[Any, Any, list[Any]]:
        batch = support.get(t, 0)
        value, after, pull = tape(dataclasses.replace(support, get=lambda step, chunk: batch), t, phi, state)
        residuals, structure = jax.tree.flatten(pull)
        # A residual that is a leaf of meta or of the batch is the very same tracer, and a constant is none: they are at hand
        # on the way back, and only the others are kept.
        constants = [leaf for leaf in residuals if not isinstance(leaf, jax.core.Tracer)]
        at_hand = [*jax.tree.leaves((meta, batch)), *constants]
        found = [next((i for i, have in enumerate(at_hand) if have is leaf), None) for leaf in residuals]
        layout[:] = structure, found, constants
        return value, after, [leaf for leaf, where in zip(residuals, found, strict=True) if where is None]

    def replay_linearisation(t: Any, kept: Any) -> Any:
        structure, found, constants = layout
        at_hand, rest = [*jax.tree.leaves((meta, support.get(t, 0))), *constants], iter(kept)
        return jax.tree.unflatten(structure, [next(rest) if where is None else at_hand[where] for where in found])

    # Parameters and step must be tracers here as they are in the loop: at first phi is meta, but does not remain it.
    linearisation = jax.eval_shape(record_linearisation, jnp.zeros((), jnp.int32), *start)[2]
    if keep == "smaller" and _bytes(linearisation) > _bytes(parameters):
        return record_parameters, replay_parameters, parameters
    return record_linearisation, replay_linearisation, linearisation


def _bytes(shapes: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def _slots(count: int, shapes: Any) -> Any:
    """Room for `count` trees of these shapes."""
    return jax.tree.map(lambda leaf: jax.lax.empty((count, *leaf.shape), leaf.dtype), shapes)


def _write(slots: Any, i: Any, tree: Any) -> Any:
    return jax.tree.map(lambda slot, leaf: slot.at[i].set(leaf), slots, tree)


def _read(slots: Any, i: Any) -> Any:
    return jax.tree.map(lambda slot: slot[i], slots)


def _loop(count: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`fori_loop`, without the loop where there is one step only."""
    return body(0, carry) if isinstance(count, int) and count == 1 else jax.lax.fori_loop(0, count, body, carry)


def _walk(
    loss: ScalarLoss,
    meta: Any,
    support: Batches,
    inner: Inner,
    start: Any,
    *,
    losses: Losses,
    first: Any = 0,
    count: Any,
) -> tuple[Any, Losses]:
    """`count` inner steps from step `first` on, of which nothing is remembered."""

    def step(i: Any, carry: Any) -> Any:
        (phi, state), losses = carry
        value, gradient = value_and_gradient(loss, phi, support, first + i)
        return inner.update(meta, gradient, state, phi), losses.seen(first + i, value)

    return _loop(count, step, (start, losses))


def _to_meta(inner: Inner, meta: Any, outer: Any, state_outer: Any, total: Any) -> Any:
    """The cotangents at the start of the inner loop, pulled back to the meta-parameters and added to those of the steps."""

    def start(meta: Any) -> Any:
        phi = inner.start(meta)
        return phi, _partition(inner.init(meta, phi))[0]

    _, pull_back = jax.vjp(start, meta)
    return jax.tree.map(jnp.add, total, pull_back((outer, state_outer))[0])


def _check_state(inner: Inner, meta: Any) -> None:
    """Raises `ValueError` when integers in the optimiser state depend on gradients, other than by a comparison."""
    phi = jax.eval_shape(inner.start, meta)
    floats, integers = _partition(jax.eval_shape(inner.init, meta, phi))
    if not jax.tree.leaves(integers):
        return

    def integers_after(differentiable: Any, integers: Any) -> Any:
        meta, gradient, floats, phi = differentiable
        return _partition(inner.update(meta, gradient, _combine(floats, integers), phi)[1])[1]

    differentiable = (meta, phi, floats, phi)
    jaxpr = jax.make_jaxpr(integers_after)(differentiable, integers).jaxpr
    needed = {var for var in jaxpr.outvars if _carries_numbers(var)}
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            needed.update(var for var in equation.invars if _carries_numbers(var))
    if not needed.isdisjoint(jaxpr.invars[: len(jax.tree.leaves(differentiable))]):
        raise ValueError(
            "the inner optimiser's state holds integers that depend on gradients: it cannot be differentiated exactly"
        )


def _carries_numbers(var: Any) -> bool:
    return not isinstance(var, Literal) and getattr(var.aval, "dtype", None) != jnp.bool_


def _partition(tree: Any) -> tuple[Any, Any]:
    """(floating-point leaves, the others), each with `None` for the missing ones."""

    def is_float(leaf: Any) -> bool:
        return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))

    return (
        jax.tree.map(lambda leaf: leaf if is_float(leaf) else None, tree),
        jax.tree.map(lambda leaf: None if is_float(leaf) else leaf, tree),
    )


def _combine(floats: Any, integers: Any) -> Any:
    return jax.tree.map(lambda a, b: b if a is None else a, floats, integers, is_leaf=lambda leaf: leaf is None)


def _masked(gradient: Any, mask: Any) -> Any:
    return gradient if mask is None else jax.tree.map(lambda keep, g: g if keep else jnp.zeros_like(g), mask, gradient)
