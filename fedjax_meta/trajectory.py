"""The inner loop of one client, walked forwards by an update rule and back again, step by step, with the query's gradient.

Nothing here is differentiated in reverse through the loop. The way back multiplies a cotangent v by each step's transposed
Jacobian, `v <- v - alpha * H(phi_t) v` for SGD, where the Hessian-vector product is a forward derivative of the gradient, or a
difference of two gradients. Of each step its parameters or its linearisation are kept, whichever is smaller, and the number of
steps may be known only at run time.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal
from jax.tree_util import Partial

from fedjax_meta.data.federated import Batches

ScalarLoss = Callable[[Any, Any], jax.Array]


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


def run_inner(loss: ScalarLoss, meta: Any, support: Batches, inner: Inner) -> tuple[Any, Losses]:
    """The inner loop, of which nothing is remembered: (adapted parameters, losses)."""
    phi = inner.start(meta)
    start = (phi, inner.init(meta, phi))
    (adapted, _), losses = _walk(loss, meta, support, inner, start, losses=Losses.none(), count=support.steps)
    return adapted, losses


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


def value_and_gradient(loss: ScalarLoss, params: Any, batches: Batches, step: Any) -> tuple[Any, Any]:
    """Loss of one step and its gradient, over the chunks of the step."""
    return batches.mean(lambda batch: jax.value_and_grad(loss)(params, batch), step)


# --------------------------------------------------------------------------------------- one step, and its Hessian's products


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


def exact_product(loss: ScalarLoss, hessian: Batches | None, support: Batches, t: Any, phi: Any) -> tuple[Any, Any, Any]:
    """(loss, gradient, product) of an inner step; `product(direction, outer)` is the Hessian times the direction.

    The Hessian is that of step t of `hessian` where that is given, and of the support's otherwise.
    """
    value, gradient, product = hessian_product(loss, phi, support, t)
    if hessian is not None:
        product = hessian_product(loss, phi, hessian, t)[2]
    return value, gradient, Partial(_along_direction, product)


def _along_direction(product: Any, direction: Any, outer: Any) -> Any:
    del outer
    return product(direction)


def difference_product(
    loss: ScalarLoss, hessian: Batches | None, support: Batches, t: Any, phi: Any, *, delta: Any, normalise: bool
) -> tuple[Any, Any, Any]:
    """As `exact_product`, by central differences of the gradient, of length `delta` (times the norm of `outer`)."""
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


# ------------------------------------------------------------------------------------------- the whole loop, and its way back


def first_order_vjp(loss: ScalarLoss, meta: Any, support: Batches, inner: Inner) -> tuple[Any, Losses, Callable[[Any], Any]]:
    """As `second_order_vjp`, with the gradients of the inner steps held constant: no Hessian is needed."""
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

    def pull_back(outer: Any) -> Any:
        total = jax.tree.map(jnp.zeros_like, meta)
        if inner.learned:

            def back(t: Any, total: Any) -> Any:
                phi, state, gradient = _read(memory, t)
                _, pull_update = jax.vjp(lambda meta: inner.update(meta, gradient, state, phi)[0], meta)
                return jax.tree.map(jnp.add, total, pull_update(outer)[0])

            total = _loop(support.steps, back, total)
        _, pull_start = jax.vjp(inner.start, meta)
        return jax.tree.map(jnp.add, total, pull_start(outer)[0])

    return adapted, losses, pull_back


def second_order_vjp(
    loss: ScalarLoss,
    meta: Any,
    support: Batches,
    inner: Inner,
    *,
    linearise: Callable[[Batches, Any, Any], tuple[Any, Any, Any]],
    keep: str,
    checkpoint_every: int | None,
) -> tuple[Any, Losses, Callable[[Any], Any]]:
    """The inner loop and its transposed derivative, as `jax.vjp` of the loop in `meta` would give them.

    Args:
      loss, meta, support, inner: the problem.
      linearise: `(support, t, phi) -> (loss, gradient, product)` of a step: what is left of `exact_product` or
        `difference_product` when loss and Hessian batches are given.
      keep, checkpoint_every: as in `meta.exact`.

    Returns:
      (adapted parameters, losses, `pull_back`: cotangent of the adapted parameters -> cotangent of `meta`).

    Raises:
      ValueError: an optimiser whose integer state depends on parameters or gradients.
    """
    _check_state(inner, meta)

    def tape(support: Batches, t: Any, phi: Any, state: Any) -> tuple[jax.Array, Any, Any]:
        """One inner step: (its loss, (phi, state) after it, the product with its transposed Jacobian as a pytree)."""
        value, gradient, product = linearise(support, t, phi)
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

    def pull_back(outer: Any) -> Any:
        nothing = jax.tree.map(jnp.zeros_like, _partition(start[1])[0])
        outer, state_outer, total = unwind((outer, nothing, jax.tree.map(jnp.zeros_like, meta)))
        return _to_meta(inner, meta, outer, state_outer, total)

    return adapted, losses, pull_back


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


def _to_meta(inner: Inner, meta: Any, outer: Any, state_outer: Any, total: Any) -> Any:
    """The cotangents at the start of the inner loop, pulled back to the meta-parameters and added to those of the steps."""

    def start(meta: Any) -> Any:
        phi = inner.start(meta)
        return phi, _partition(inner.init(meta, phi))[0]

    _, pull_back = jax.vjp(start, meta)
    return jax.tree.map(jnp.add, total, pull_back((outer, state_outer))[0])


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


# -------------------------------------------------------------------------------------------------- the state of an optimiser


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
