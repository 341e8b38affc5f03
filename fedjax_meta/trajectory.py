"""The inner loop of one client, and its transposed derivative (the backward pass of a meta-gradient).

Reverse-mode differentiation through the loop is never used. The backward pass multiplies a cotangent v by the transposed
Jacobian of each step, `v <- v - alpha * H(phi_t) v` for SGD. The Hessian-vector product is a forward derivative of the
gradient, or a difference of two gradients. For each step, either its parameters or its linearisation are stored, whichever is
smaller. The number of steps may be a traced value.
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import Partial

from fedjax_meta import checks, loops, masks, runtime
from fedjax_meta.data import Batches
from fedjax_meta.dependence import marks_of, operations
from fedjax_meta.numerics.roots import finite_at_zero
from fedjax_meta.types import Mask, Params, PyTree, Rate, Scalar, Updates

ScalarLoss = Callable[[Params, PyTree], jax.Array]
"""`(params, batch) -> scalar loss`."""

PullBack = Callable[[Params], Params]
"""Cotangent of the adapted parameters -> cotangent of the meta-parameters."""

Product = Callable[[Updates, Updates], Updates]
"""`(direction, outer) -> H @ direction`, exact or approximate; `outer` is the outer gradient at that step."""

Linearise = Callable[[Batches, Scalar, Params], tuple[jax.Array, Updates, Product]]
"""`(support, t, phi) -> (loss, gradient, product)` of an inner step."""

Tape = Callable[[Batches, Scalar, Params, PyTree], tuple[jax.Array, PyTree, PyTree]]
"""`(support, t, phi, state) -> (loss, (phi, state) after the step, product with its transposed Jacobian)`."""


class InnerOptimizer(NamedTuple):
    """The update rule of the inner steps, as pure functions; `meta.exact` differentiates through all of them.

    Attributes:
      start: `meta -> phi_0`.
      init: `(meta, phi_0) -> state`. Integers in the state (step counts) are carried but not differentiated.
      update: `(meta, gradient, state, phi) -> (phi, state)`.
      learned: whether `update` reads `meta`. If so, a first-order gradient visits the inner steps, as it does where `init` reads
        `meta` or phi_0; otherwise it counts a step as the identity, e.g. also one of `adamw`, whose weight decay pulls.
      mask: boolean tree of the leaves that adapt; `None` for all. `update` leaves the others as they are and reads no gradient of
        them.
    """

    start: Callable[[Params], Params]
    init: Callable[[Params, Params], PyTree]
    update: Callable[[Params, Updates, PyTree, Params], tuple[Params, PyTree]]
    learned: bool = False
    mask: Mask | None = None


class Losses(NamedTuple):
    """Running support losses of an inner loop, scalars.

    Attributes:
      total: sum over the steps so far.
      first: loss of step 0.
      last: loss of the latest step.
    """

    total: jax.Array
    first: jax.Array
    last: jax.Array

    @classmethod
    def none(cls) -> "Losses":
        """The value before the first step."""
        return cls(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()))

    def add(self, t: Scalar, value: jax.Array) -> "Losses":
        """The losses with that of step t added."""
        value = jnp.asarray(value, self.total.dtype)
        return Losses(self.total + value, jnp.where(t == 0, value, self.first), value)


def run_inner(loss: ScalarLoss, meta: Params, support: Batches, inner: InnerOptimizer) -> tuple[Params, Losses]:
    """Runs the inner loop and stores nothing for a backward pass; returns (adapted parameters, losses)."""
    phi = inner.start(meta)
    start = (phi, inner.init(meta, phi))
    (adapted, _), losses = _walk(loss, meta, support, inner, start, losses=Losses.none(), count=support.steps)
    return adapted, losses


def _walk(
    loss: ScalarLoss,
    meta: Params,
    support: Batches,
    inner: InnerOptimizer,
    start: PyTree,
    *,
    losses: Losses,
    first: Scalar = 0,
    count: Scalar,
) -> tuple[PyTree, Losses]:
    """Runs `count` inner steps, starting at step `first`, and stores nothing; returns ((phi, state), losses)."""

    def step(i: Scalar, carry: PyTree) -> PyTree:
        (phi, state), losses = carry
        value, gradient = value_and_gradient(loss, phi, support, first + i)
        return inner.update(meta, gradient, state, phi), losses.add(first + i, value)

    return loops.fori_loop(count, step, (start, losses))


def value_and_gradient(loss: ScalarLoss, params: Params, batches: Batches, step: Scalar) -> tuple[jax.Array, Updates]:
    """Loss and gradient of one step, averaged over the chunks of the step."""
    return batches.mean(lambda batch: jax.value_and_grad(loss)(params, batch), step)


# ------------------------------------------------------------------------------------- one step and its Hessian-vector product


def hessian_product(
    loss: ScalarLoss, params: Params, batches: Batches, step: Scalar, mask: Mask | None = None
) -> tuple[jax.Array, Updates, Callable[[Updates], Updates]]:
    """(loss, gradient, `v -> H v`) of one step; H is transposed where it is not symmetric.

    A loss whose backward pass is its gradient has a symmetric H: then H v is the forward derivative of the gradient. Where a loss
    has rules of its own (`jax.custom_vjp`, `jax.custom_jvp`; a reversed gradient), it is the transposed one, which costs more.

    A step of one chunk is linearised once and serves any number of products; its product is a pytree of the residuals. For a
    step of several chunks, every product goes through the chunks again, so that only one chunk's activations are in memory.

    Where a mask is given, v counts as 0 outside it: the layers before the first leaf of the mask then have no forward derivative,
    and the compiler leaves out what only they would need.
    """

    adapts = masks.everything_like(params) if mask is None else mask
    # Not `stop_gradient` of the others: it would cut a user's derivative of the result, too.
    moving, fixed = masks.split(params, adapts)

    def gradient_and_value(moving: Params, batch: PyTree) -> tuple[Updates, jax.Array]:
        return _gradient_and_value(loss, batch, masks.merge(moving, fixed))

    symmetric = not has_own_backward_pass(loss, params, batches.get(step, 0))
    if isinstance(batches.chunks, int) and batches.chunks == 1:
        batch = batches.get(step, 0)
        if not symmetric:
            gradient, pull_back, value = jax.vjp(partial(_gradient_and_value, loss, batch), params, has_aux=True)
            return value, gradient, Partial(partial(_pulled_back, adapts), pull_back)
        gradient, linear, value = jax.linearize(lambda moving: gradient_and_value(moving, batch), moving, has_aux=True)
        return value, gradient, Partial(partial(_of_moving, adapts), linear)
    value, gradient = value_and_gradient(loss, params, batches, step)

    def product(vector: Updates) -> Updates:
        def of_chunk(batch: PyTree) -> Updates:
            if not symmetric:
                return _pulled_back(adapts, jax.vjp(lambda params: jax.grad(loss)(params, batch), params)[1], vector)
            along = masks.split(vector, adapts)[0]
            return jax.jvp(lambda moving: gradient_and_value(moving, batch)[0], (moving,), (along,))[1]

        return batches.mean(of_chunk, step)

    return value, gradient, product


def has_own_backward_pass(loss: ScalarLoss, params: Params, batch: PyTree) -> bool:
    """Whether a loss has rules of a user's own in it, so that its gradient need not be the derivative of anything.

    Rules are `jax.custom_vjp` and `jax.custom_jvp`. Of the latter, those of JAX itself (relu, logsumexp) and of this package are
    true derivatives.
    """
    program = jax.make_jaxpr(loss)(params, batch).jaxpr
    return any(_has_own_rule(one) for one in operations(program))


TRUE = tuple(f" at {Path(file).parent}{os.sep}" for file in (jax.__file__, __file__))
"""Where functions are whose own rules are true derivatives, as JAX writes it."""


def _has_own_rule(operation: Any) -> bool:
    name = operation.primitive.name
    if not name.startswith("custom_jvp_call"):
        return bool(name.startswith("custom_vjp_call"))
    function = _place(getattr(operation.params.get("call_jaxpr"), "jaxpr", None))
    rule = _place(operation.params.get("jvp_jaxpr_fun"))
    if not all(any(folder in place for folder in TRUE) for place in (function, rule)):
        return True
    # `defjvps` makes one rule of several, at a place of JAX's own.
    return rule.startswith("jvp at ") and not _has_rule_in_its_module(function)


def _place(function: Any) -> str:
    """`name at file:line` of a traced function; empty if JAX does not say, so that in doubt a rule is a user's."""
    return getattr(getattr(function, "debug_info", None), "func_src_info", None) or ""


@lru_cache
def _has_rule_in_its_module(place: str) -> bool:
    """Whether the module of a function gave it a rule: a user may give one to a function of JAX, too."""
    name, _, where = place.partition(" at ")
    file = where.rpartition(":")[0]
    modules = [module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == file]
    return any(isinstance(vars(module).get(name), jax.custom_jvp) for module in modules)


def _gradient_and_value(loss: ScalarLoss, batch: PyTree, params: Params) -> tuple[Updates, jax.Array]:
    value, gradient = jax.value_and_grad(loss)(params, batch)
    return gradient, value


def _pulled_back(adapts: Mask, pull_back: Callable[[Updates], tuple[Updates]], vector: Updates) -> Updates:
    """The transposed product with a vector that counts as 0 where nothing adapts."""
    return pull_back(jax.tree.map(lambda move, v: v if move else jnp.zeros_like(v), adapts, vector))[0]


def _of_moving(adapts: Mask, linear: Callable[[Params], Updates], vector: Updates) -> Updates:
    return linear(masks.split(vector, adapts)[0])


def exact_product(
    loss: ScalarLoss, hessian: Batches | None, support: Batches, t: Scalar, phi: Params, *, mask: Mask | None = None
) -> tuple[jax.Array, Updates, Product]:
    """(loss, gradient, product) of an inner step; `product(direction, outer)` is the Hessian times the direction.

    The Hessian is taken on step t of `hessian`, or on step t of the support if `hessian` is `None`. The direction counts as 0
    outside the mask, if there is one: an optimiser that adapts these leaves alone reads no other gradient.
    """
    value, gradient, product = hessian_product(loss, phi, support, t, mask)
    if hessian is not None:
        product = hessian_product(loss, phi, hessian, t, mask)[2]
    return value, gradient, Partial(_along_direction, product)


def _along_direction(product: Callable[[Updates], Updates], direction: Updates, outer: Updates) -> Updates:
    del outer
    return product(direction)


def difference_product(
    loss: ScalarLoss, hessian: Batches | None, support: Batches, t: Scalar, phi: Params, *, delta: Rate, normalise: bool
) -> tuple[jax.Array, Updates, Product]:
    """Like `exact_product`, with the product by central differences of the gradient.

    The difference step has length `delta * |outer|`, or `delta` if `normalise`.
    """
    coarse = [leaf.dtype.name for leaf in jax.tree.leaves(phi) if leaf.dtype.itemsize < 4]
    coarse = coarse or _coarse_types(loss, phi, support)
    if coarse:
        raise ValueError(
            f"a difference of gradients moves parameters by less than {coarse[0]} can tell, in which they are held or computed "
            'with: compute in float32, or take Hessian products (hessian_free(method="product"), the method perfedavg_exact)'
        )
    value, gradient = value_and_gradient(loss, phi, support, t)
    batches = support if hessian is None else hessian

    def product(direction: Updates, outer: Updates) -> Updates:
        norm = optax.tree.norm(direction)
        length = delta if normalise else delta * optax.tree.norm(outer)
        step = length / jnp.where(norm > 0, norm, 1)

        def shifted(sign: int) -> Updates:
            moved = jax.tree.map(lambda p, d: p + (sign * step * d).astype(p.dtype), phi, direction)
            return value_and_gradient(loss, moved, batches, t)[1]

        scale = jnp.where((norm > 0) & (step > 0), 0.5 / jnp.where(step > 0, step, 1), 0)
        return jax.tree.map(lambda a, b: ((a - b) * scale).astype(a.dtype), shifted(1), shifted(-1))

    return value, gradient, product


COARSE_PRODUCTS = ("TF32_TF32_F32", "BF16_BF16_F32")
"""What JAX calls products whose factors are rounded to TF32 or bfloat16."""


def _coarse_types(loss: ScalarLoss, phi: Params, support: Batches) -> list[str]:
    """The types of fewer digits than float32 to which a loss rounds what follows from its parameters, also in its products."""
    found: list[str] = []

    def note(equation: Any, given: list[bool]) -> None:
        del given
        types = [getattr(var.aval, "dtype", jnp.dtype(bool)) for var in equation.outvars]
        found.extend(one.name for one in types if jnp.issubdtype(one, jnp.floating) and one.itemsize < 4)
        algorithm = getattr(equation.params.get("precision"), "name", "")
        found.extend([algorithm] if algorithm in COARSE_PRODUCTS else [])

    marks_of(lambda params: loss(params, support.get(0, 0)), jax.tree.map(lambda _: True, phi), phi, rule=note)
    return found


# ---------------------------------------------------------------------------------------- the whole loop and its backward pass


def first_order_vjp(
    loss: ScalarLoss, meta: Params, support: Batches, inner: InnerOptimizer
) -> tuple[Params, Losses, PullBack]:
    """Like `second_order_vjp`, with the gradients of the inner steps held constant, so that no Hessian is needed.

    What moves parameters beside a gradient counts where `inner` is `learned` or its state begins with numbers of `meta`, e.g. a
    pull towards `meta`. Otherwise a step counts as the identity: weight decay has no part in the derivative.
    """
    _check_update(inner, meta)
    visits = inner.learned or _starts_from(inner, meta)
    if not visits:
        adapted, losses = run_inner(loss, meta, support, inner)
    else:
        phi = inner.start(meta)
        start = (phi, inner.init(meta, phi))

        def step(t: Scalar, carry: PyTree) -> tuple[PyTree, PyTree]:
            (phi, state), losses = carry
            value, gradient = value_and_gradient(loss, phi, support, t)
            return (inner.update(meta, gradient, state, phi), losses.add(t, value)), (phi, state, gradient)

        shapes = jax.eval_shape(lambda: (*start, phi))
        carry = (start, Losses.none())
        ((adapted, _), losses), read = loops.recorded_loop(support.steps, step, carry, shapes, support.max_steps)

    def pull_back(outer: Params) -> Params:
        if not visits:
            return jax.vjp(inner.start, meta)[1](outer)[0]

        def back(t: Scalar, carry: PyTree) -> PyTree:
            phi, state, gradient = read(t)
            outer, state_outer, total = carry
            to_meta, _, to_state, to_phi = _pull_update(inner, meta, gradient, state, phi)[1]((outer, state_outer))
            return to_phi, to_state, jax.tree.map(jnp.add, total, to_meta)

        nothing = jax.tree.map(jnp.zeros_like, _partition(start[1])[0])
        carry = loops.backward_loop(support.steps, back, (outer, nothing, jax.tree.map(jnp.zeros_like, meta)))
        return _to_meta(inner, meta, *carry)

    return adapted, losses, pull_back


def second_order_vjp(
    loss: ScalarLoss,
    meta: Params,
    support: Batches,
    inner: InnerOptimizer,
    *,
    linearise: Linearise,
    keep: str,
    checkpoint_every: int | None,
) -> tuple[Params, Losses, PullBack]:
    """The inner loop and its transposed derivative, like `jax.vjp` of the loop with respect to `meta`.

    Args:
      loss, meta, support, inner: the problem.
      linearise: `exact_product` or `difference_product` with its loss and Hessian batches already bound.
      keep, checkpoint_every: as in `meta.exact`.

    Returns:
      (adapted parameters, losses, `pull_back`: cotangent of the adapted parameters -> cotangent of `meta`).

    Raises:
      ValueError: the integer state of the optimiser depends on parameters or gradients; an update that reads `meta`, but is not
        `learned`.
    """
    _check_update(inner, meta)
    _check_state(inner, meta)
    # A weak type lasts for one step: what is stored of the first one would have another form than that of later ones.
    meta = loops.strongly_typed(meta)

    def tape(support: Batches, t: Scalar, phi: Params, state: PyTree) -> tuple[jax.Array, PyTree, PyTree]:
        """One inner step: (loss, (phi, state) after it, product with its transposed Jacobian as a pytree)."""
        value, gradient, product = linearise(support, t, phi)
        after, pull_update = _pull_update(inner, meta, gradient, state, phi)
        return value, after, Partial(partial(_pull, inner.learned), product, pull_update)

    phi = inner.start(meta)
    start = (phi, inner.init(meta, phi))
    if isinstance(support.steps, int) and support.steps == 1:
        value, (adapted, _), pull = tape(support, 0, *start)
        losses = Losses.none().add(0, value)
        unwind: Callable[[PyTree], PyTree] = pull
    else:
        (adapted, _), losses, unwind = _through_time(
            loss, meta, support, inner, start, tape=tape, keep=keep, checkpoint_every=checkpoint_every
        )

    def pull_back(outer: Params) -> Params:
        nothing = jax.tree.map(jnp.zeros_like, _partition(start[1])[0])
        outer, state_outer, total = unwind((outer, nothing, jax.tree.map(jnp.zeros_like, meta)))
        return _to_meta(inner, meta, outer, state_outer, total)

    return adapted, losses, pull_back


def _pull_update(inner: InnerOptimizer, meta: Params, gradient: Updates, state: PyTree, phi: Params) -> tuple[PyTree, PyTree]:
    """((phi, state) after one update, transposed derivative of the update)."""
    floats, integers = _partition(state)

    def update(meta: Params, gradient: Updates, floats: PyTree, phi: Params) -> PyTree:
        phi, state = inner.update(meta, gradient, masks.merge(floats, integers), phi)
        floats, moved_on = _partition(state)
        return (phi, floats), moved_on

    (after, floats_after), pull_update, integers = jax.vjp(finite_at_zero(update), meta, gradient, floats, phi, has_aux=True)
    return (after, masks.merge(floats_after, integers)), pull_update


def _pull(learned: bool, product: Callable[..., Updates], pull_update: Callable[..., PyTree], carry: PyTree) -> PyTree:
    """One backward step: takes cotangents of phi_{t+1} and its optimiser state back to step t, and adds to that of meta."""
    outer, state_outer, total = carry
    to_meta, to_gradient, to_state, to_phi = pull_update((outer, state_outer))
    before = jax.tree.map(jnp.add, to_phi, product(to_gradient, outer))
    return before, to_state, jax.tree.map(jnp.add, total, to_meta) if learned else total


def _to_meta(inner: InnerOptimizer, meta: Params, outer: Params, state_outer: PyTree, total: Params) -> PyTree:
    """Pulls the cotangents at the start of the inner loop back to meta, and adds the contributions of the steps."""

    def start(meta: Params) -> PyTree:
        phi = inner.start(meta)
        return phi, _partition(inner.init(meta, phi))[0]

    _, pull_back = jax.vjp(start, meta)
    return jax.tree.map(jnp.add, total, pull_back((outer, state_outer))[0])


def _through_time(
    loss: ScalarLoss,
    meta: Params,
    support: Batches,
    inner: InnerOptimizer,
    start: PyTree,
    *,
    tape: Tape,
    keep: str,
    checkpoint_every: int | None,
) -> tuple[PyTree, Losses, Callable[[PyTree], PyTree]]:
    """Several inner steps: (state after them, losses, function that takes cotangents back through all of them)."""
    record, replay, kept = _memory(loss, meta, support, inner, start, tape=tape, keep=keep)

    def forward(first: Scalar, count: Scalar, slots: int, after: PyTree) -> PyTree:
        def step(i: Scalar, carry: PyTree) -> tuple[PyTree, PyTree]:
            after, losses = carry
            value, after, kept = record(first + i, *after)
            return (after, losses.add(first + i, value)), kept

        (after, losses), read = loops.recorded_loop(count, step, (after, Losses.none()), kept, slots)
        return after, losses, read

    def backward(first: Scalar, count: Scalar, read: Callable[[Scalar], PyTree], carry: PyTree) -> PyTree:
        return loops.backward_loop(count, lambda t, carry: replay(first + t, read(t))(carry), carry)

    if checkpoint_every is None:
        after, losses, read = forward(0, support.steps, support.max_steps, start)
        return after, losses, lambda carry: backward(0, support.steps, read, carry)

    every = min(checkpoint_every, support.max_steps)
    if isinstance(support.steps, int):
        # Loops of static lengths can be differentiated in their turn.
        whole, rest = divmod(support.steps, every)
    else:
        whole, rest = (support.steps + every - 1) // every, 0

    def length(segment: Scalar) -> Scalar:
        return every if isinstance(support.steps, int) else jnp.minimum(every, support.steps - segment * every)

    def pass_segment(segment: Scalar, carry: PyTree, count: Scalar) -> tuple[PyTree, PyTree]:
        after, losses = carry
        return _walk(loss, meta, support, inner, after, losses=losses, first=segment * every, count=count), after

    def back_segment(segment: Scalar, carry: PyTree, count: Scalar, begin: PyTree) -> PyTree:
        first = segment * every
        return backward(first, count, forward(first, count, every, begin)[2], carry)

    carry, begin_of = loops.recorded_loop(
        whole,
        lambda segment, carry: pass_segment(segment, carry, length(segment)),
        (start, Losses.none()),
        jax.eval_shape(lambda: start),
        -(-support.max_steps // every),
    )
    last: PyTree = None
    if rest:
        carry, last = pass_segment(whole, carry, rest)
    after, losses = carry

    def unwind(carry: PyTree) -> PyTree:
        def back(segment: Scalar, carry: PyTree) -> PyTree:
            return back_segment(segment, carry, length(segment), begin_of(segment))

        return loops.backward_loop(whole, back, back_segment(whole, carry, rest, last) if rest else carry)

    return after, losses, unwind


def _memory(
    loss: ScalarLoss, meta: Params, support: Batches, inner: InnerOptimizer, start: PyTree, *, tape: Tape, keep: str
) -> tuple[Callable[..., PyTree], Callable[..., PyTree], PyTree]:
    """What is stored for each step.

    Returns:
      (`record`, `replay`, shapes of the stored values). `record` runs a step and returns (loss, (phi, state) after it, stored
      values); `replay` turns the stored values into the product with the step's transposed Jacobian.
    """

    # Leaves that do not adapt are the same in all steps.
    adapts = masks.everything_like(start[0]) if inner.mask is None else inner.mask
    _, fixed = masks.split(start[0], adapts)

    def record_parameters(t: Scalar, phi: Params, state: PyTree) -> PyTree:
        value, gradient = value_and_gradient(loss, phi, support, t)
        return value, inner.update(meta, gradient, state, phi), (masks.split(phi, adapts)[0], state)

    def replay_parameters(t: Scalar, kept: PyTree) -> PyTree:
        phi, state = kept
        return tape(support, t, masks.merge(phi, fixed), state)[2]

    parameters = jax.eval_shape(lambda: (masks.split(start[0], adapts)[0], start[1]))
    if keep == "parameters" or not (isinstance(support.chunks, int) and support.chunks == 1):
        return record_parameters, replay_parameters, parameters

    layout: list[PyTree] = []

    def record_linearisation(t: Scalar, phi: Params, state: PyTree) -> tuple[jax.Array, PyTree, list[PyTree]]:
        batch = support.get(t, 0)
        value, after, pull = tape(dataclasses.replace(support, get=lambda step, chunk: batch), t, phi, state)
        residuals, structure = jax.tree.flatten(pull)
        # A residual that is a leaf of meta or of the batch is that same tracer object, and a constant is not a tracer. Both
        # are available in the backward pass, so only the other residuals are stored.
        constants = [leaf for leaf in residuals if not isinstance(leaf, jax.core.Tracer)]
        at_hand = [*jax.tree.leaves((meta, batch)), *constants]
        found = [next((i for i, have in enumerate(at_hand) if have is leaf), None) for leaf in residuals]
        layout[:] = structure, found, constants
        return value, after, [leaf for leaf, where in zip(residuals, found, strict=True) if where is None]

    def replay_linearisation(t: Scalar, kept: PyTree) -> PyTree:
        structure, found, constants = layout
        at_hand, rest = [*jax.tree.leaves((meta, support.get(t, 0))), *constants], iter(kept)
        return jax.tree.unflatten(structure, [next(rest) if where is None else at_hand[where] for where in found])

    # Trace phi and the step as separate values, as in the loop: phi_0 is meta itself, but later phi are not.
    linearisation = jax.eval_shape(record_linearisation, jnp.zeros((), jnp.int32), *start)[2]
    if keep == "smaller" and runtime.size_in_bytes(linearisation) > runtime.size_in_bytes(parameters):
        return record_parameters, replay_parameters, parameters
    return record_linearisation, replay_linearisation, linearisation


# --------------------------------------------------------------------------------------------------- the state of an optimiser


def _check_update(inner: InnerOptimizer, meta: Params) -> None:
    """Raises `ValueError` if an update does not return what a loop can go on with, moves leaves that do not adapt, or reads
    `meta` although it does not say so: derivatives would be left out.
    """
    phi = jax.eval_shape(inner.start, meta)
    given = (meta, phi, jax.eval_shape(inner.init, meta, phi), phi)
    found = jax.eval_shape(inner.update, *given)
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(f"the inner optimiser's update must return (phi, state), not {checks.shown(found)}")
    for what, new, old in (("phi", found[0], phi), ("state", found[1], given[2])):
        odd = checks.mismatch(new, old)
        if odd is not None:
            raise ValueError(f"the inner optimiser's update must keep the form of its {what}: {odd}")
    if inner.mask is not None and _reads_beyond_mask(inner, given):
        raise ValueError("the inner optimiser's update reads or follows the gradient of leaves that its mask leaves out")
    if inner.learned:
        return
    marks = (jax.tree.map(lambda _: True, meta), *jax.tree.map(lambda _: False, given[1:]))
    if any(jax.tree.leaves(marks_of(inner.update, marks, *given))):
        raise ValueError("the inner optimiser's update reads meta: make it InnerOptimizer(..., learned=True)")


def _reads_beyond_mask(inner: InnerOptimizer, given: tuple[PyTree, ...]) -> bool:
    """Whether gradients of leaves that do not adapt reach anything, or any gradient reaches these leaves."""
    nothing = jax.tree.map(lambda _: False, given)

    def reached(gradient: Mask) -> tuple[PyTree, PyTree]:
        return marks_of(inner.update, (nothing[0], gradient, *nothing[2:]), *given)

    fixed = jax.tree.map(lambda adapts: not adapts, inner.mask)
    moved, _ = reached(jax.tree.map(lambda _: True, fixed))
    return any(jax.tree.leaves((reached(fixed), jax.tree.map(lambda move, still: move and still, moved, fixed))))


def _starts_from(inner: InnerOptimizer, meta: Params) -> bool:
    """Whether the first state has numbers that follow from those of `meta` or phi_0, rather than from their shapes."""
    phi = jax.eval_shape(inner.start, meta)
    marks = jax.tree.map(lambda _: True, (meta, phi))
    return any(jax.tree.leaves(marks_of(inner.init, marks, meta, phi)))


def _check_state(inner: InnerOptimizer, meta: Params) -> None:
    """Raises `ValueError` if integers in the optimiser state depend on gradients other than through a comparison."""
    phi = jax.eval_shape(inner.start, meta)
    floats, integers = _partition(jax.eval_shape(inner.init, meta, phi))
    if not jax.tree.leaves(integers):
        return

    def integers_after(differentiable: PyTree, integers: PyTree) -> PyTree:
        meta, gradient, floats, phi = differentiable
        return _partition(inner.update(meta, gradient, masks.merge(floats, integers), phi)[1])[1]

    differentiable = (meta, phi, floats, phi)
    marks = (jax.tree.map(lambda _: True, differentiable), jax.tree.map(lambda _: False, integers))
    if any(jax.tree.leaves(marks_of(integers_after, marks, differentiable, integers, rule=_end_at_comparisons))):
        raise ValueError(
            "the inner optimiser's state has integers that depend on gradients, so it has no exact derivative: use first_order"
        )


def _end_at_comparisons(equation: Any, given: list[bool]) -> list[bool] | None:
    del given
    return [False] if [getattr(var.aval, "dtype", None) for var in equation.outvars] == [jnp.bool_] else None


def _partition(tree: PyTree) -> tuple[PyTree, PyTree]:
    """(floating-point leaves, other leaves), each with `None` in place of the missing leaves."""
    return masks.split(tree, jax.tree.map(lambda leaf: bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)), tree))
