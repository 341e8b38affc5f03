"""The implicit meta-gradient (iMAML): of a proximal inner problem at its solution, however that was found.

It solves one linear system by conjugate gradient and remembers nothing of the inner steps, so its memory is the same for any
number of them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, masks
from fedjax_meta.data.federated import Batches
from fedjax_meta.meta import Estimator, Info, MetaGradient, as_batches, check_problem, not_learned, split_support
from fedjax_meta.trajectory import Inner, ScalarLoss, hessian_product, run_inner, value_and_gradient

OPERATORS = ("implicit", "imaml_dev", "fl_imaml")


class ImplicitInfo(NamedTuple):
    """Diagnostics of an implicit meta-gradient: scalars. The first four are those of `meta.Info`.

    Attributes:
      support_loss, first_support_loss, last_support_loss: of the inner steps, with the proximal term.
      query_loss: query loss at the adapted parameters.
      cg_steps: conjugate-gradient steps taken, int32.
      residual: norm of what is left of the linear system, relative to its right side; 0 when that is 0.
      negative_curvature: whether the solver met a direction along which the operator is not positive, and stopped there.
    """

    support_loss: jax.Array
    query_loss: jax.Array
    first_support_loss: jax.Array
    last_support_loss: jax.Array
    cg_steps: jax.Array
    residual: jax.Array
    negative_curvature: jax.Array


class Solution(NamedTuple):
    """What `conjugate_gradient` found.

    Attributes:
      x: like the right side.
      steps, residual, negative_curvature: as in `ImplicitInfo`.
    """

    x: Any
    steps: jax.Array
    residual: jax.Array
    negative_curvature: jax.Array


def implicit(
    inner: Inner,
    *,
    prox_weight: float | jax.Array,
    steps: int = 1,
    cg_steps: int = 5,
    tolerance: float | jax.Array = 1e-6,
    damping: float | jax.Array = 0.0,
    warm_start: str = "zero",
    operator: str = "implicit",
    proximal: str = "each_step",
    outer: str = "query",
) -> Estimator:
    """The implicit meta-gradient (iMAML; Rajeswaran et al. 2019, arXiv 1909.04630, algorithm 2).

    At the solution phi of min f(phi; support) + lambda/2 ||phi - theta||^2, with H the Hessian of f(.; support) there,

        (I + H / lambda) gradient = grad f(phi; query).

    The gradient is exact when the inner steps and the solver have converged, and otherwise as good as both of them; lambda ->
    inf gives the plain query gradient at theta. With an inner mask only the leaves b that adapt have a proximal term and stand
    in the system; the others, a, then get grad_a f(phi; query) - H_ab gradient_b / lambda.

    Args:
      inner: any rule but learned rates, on the regularised loss.
      prox_weight: lambda.
      steps: inner steps, when `support` is one batch.
      cg_steps: at most so many conjugate-gradient steps, one Hessian-vector product each.
      tolerance: it stops at a residual of this size, relative to the right side.
      damping: added to the operator's identity, against a Hessian that is not positive.
      warm_start: the solver starts at "zero" or at the query "gradient", which takes one product more.
      operator: "implicit" as above; "imaml_dev", the authors' code: (1 + damping) v + H v / (lambda + 10); "fl_imaml", S1's
        code: (1 + n + damping) v + sum_b H_b v / lambda over the n chunks b of the QUERY, whose loss holds the proximal term
        there. The last two solve another system than the one above, and are there to be compared with.
      proximal: the term is in the loss of "each_step", or one step on it alone comes "last" (authors' code).
      outer: right side: gradient of the whole "query", or of its "last_chunk" with the proximal term (S1's code).

    H is that of the whole support: of the one batch, or of all its steps and chunks together. `WithHessian(support, hessian)`
    names other samples for it, which spares many passes where the support is several epochs or repeated full batches. A
    Hessian over one chunk is linearised once for all products.

    Where I + H/lambda (plus damping) is not positive there may be no minimum, and the system no solution. The solver then
    stops at the first direction of no positive curvature and returns what it has, which is the plain query gradient if that is
    the first one; `info` says so, with the residual left.

    Raises:
      ValueError: an argument out of range, learned rates, and from the estimator what `meta.exact` raises.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_meta.meta import sgd
      >>> loss = lambda w, batch: 0.5 * jnp.sum((w - batch) ** 2)
      >>> estimate = implicit(sgd(0.5), prox_weight=1.0, steps=20)
      >>> result = estimate(loss, jnp.array([1.0]), jnp.array([0.0]), jnp.array([2.0]))
      >>> f"{result.gradient[0]:.5f}"  # (0.5 - 2) / (1 + 1)
      '-0.75000'
    """
    checks.positive("prox_weight", prox_weight)
    checks.count("steps", steps)
    checks.count("cg_steps", cg_steps)
    checks.not_negative("tolerance", tolerance)
    checks.not_negative("damping", damping)
    checks.one_of("warm_start", warm_start, ("zero", "gradient"))
    checks.one_of("operator", operator, OPERATORS)
    checks.one_of("proximal", proximal, ("each_step", "last"))
    checks.one_of("outer", outer, ("query", "last_chunk"))
    not_learned("implicit", inner)

    def estimate(loss: ScalarLoss, meta: Any, support: Any, query: Any) -> MetaGradient:
        support, hessian = split_support(support)
        if query is None:
            raise ValueError("query is None, but the implicit gradient is that of the query loss")
        theta = inner.start(meta)
        whole = _whole(as_batches(support, 1) if hessian is None else as_batches(hessian, 1))
        support, query = check_problem(loss, theta, support, query, steps)
        mask = jax.tree.map(lambda _: True, theta) if inner.mask is None else inner.mask

        def distance(phi: Any) -> jax.Array:
            moved = masks.split(jax.tree.map(jnp.subtract, phi, theta), mask)[0]
            return prox_weight / 2 * optax.tree.norm(moved, squared=True)

        def regularised(phi: Any, batch: Any) -> jax.Array:
            value = loss(phi, batch)
            return value + distance(phi).astype(value.dtype)

        phi, losses = run_inner(regularised if proximal == "each_step" else loss, meta, support, inner)
        if proximal == "last":
            phi, _ = inner.update(meta, jax.grad(distance)(phi), inner.init(meta, phi), phi)

        query_loss, right = value_and_gradient(loss, phi, query, 0)
        if outer == "last_chunk":
            right = jax.grad(regularised)(phi, query.get(0, query.chunks - 1))

        if operator == "fl_imaml":
            alike = dataclasses.replace(query, samples=lambda batch: jnp.ones(()))
            product = hessian_product(loss, phi, alike, 0)[2]
            identity, curved = 1 + query.chunks + damping, query.chunks / prox_weight
        else:
            product = hessian_product(loss, phi, whole, 0)[2]
            identity, curved = 1 + damping, 1 / (prox_weight + (10 if operator == "imaml_dev" else 0))

        def apply(vector: Any) -> Any:
            curvature = masks.split(product(masks.merge(vector, still)), mask)[0]
            return jax.tree.map(lambda v, h: (identity * v + curved * h).astype(v.dtype), vector, curvature)

        still = jax.tree.map(jnp.zeros_like, masks.split(theta, mask)[1])
        right_moving, right_still = masks.split(right, mask)
        solution = conjugate_gradient(
            apply, right_moving, steps=cg_steps, tolerance=tolerance, from_right_side=warm_start == "gradient"
        )
        if jax.tree.leaves(still):
            crossed = masks.split(product(masks.merge(solution.x, still)), mask)[1]
            right_still = jax.tree.map(lambda r, h: (r - h / prox_weight).astype(r.dtype), right_still, crossed)
        _, pull_back = jax.vjp(inner.start, meta)
        (gradient,) = pull_back(masks.merge(solution.x, right_still))
        shared = Info.of(losses, query_loss, support.steps)
        return MetaGradient(phi, gradient, ImplicitInfo(*shared, *solution[1:]))

    return estimate


def conjugate_gradient(
    operator: Callable[[Any], Any],
    right: Any,
    *,
    steps: int,
    tolerance: float | jax.Array = 0.0,
    from_right_side: bool = False,
) -> Solution:
    """Solves operator(x) = right for a symmetric operator, with a stop where that is not positive.

    `jax.scipy.sparse.linalg.cg` tells neither its steps nor its residual, and runs on through negative curvature.

    Args:
      operator: linear and symmetric, on trees like `right`; identity plus something, of which 0 is told to round-off of 1.
      right: the right side, any pytree of floating-point arrays.
      steps: at most so many; one product each.
      tolerance: stop when the residual's norm has fallen to this share of the right side's.
      from_right_side: start at `right` in place of 0.

    Returns:
      a `Solution`. At a direction p with p.operator(p) <= 0 (or not a number) it stops with what it has by then, which is
      `right` when p is the first.

    Example:
      >>> import jax.numpy as jnp
      >>> solution = conjugate_gradient(lambda v: jnp.array([1.0, 4.0]) * v, jnp.array([1.0, 2.0]), steps=2)
      >>> solution.x.round(6).tolist(), int(solution.steps)
      ([1.0, 0.5], 2)
    """
    x = right if from_right_side else jax.tree.map(jnp.zeros_like, right)
    residual = jax.tree.map(jnp.subtract, right, operator(right)) if from_right_side else right
    size = optax.tree.norm(right, squared=True)
    left = optax.tree.norm(residual, squared=True)
    smallest = 10 * jnp.finfo(size.dtype).eps

    def unfinished(carry: Any) -> jax.Array:
        _, _, _, left, taken, negative = carry
        return (taken < steps) & (left > tolerance**2 * size) & ~negative

    def step(carry: Any) -> Any:
        x, residual, direction, left, taken, _ = carry
        image = operator(direction)
        curvature = optax.tree.vdot(direction, image)
        # Negated, so that a curvature that is not a number stops it too.
        negative = ~(curvature > smallest * optax.tree.norm(direction, squared=True))
        at_start = negative & (taken == 0)
        length = jnp.where(negative, 0, left / jnp.where(negative, 1, curvature))
        # Starting from 0 the first direction is the right side itself: a whole step there is x = right.
        length = jnp.where(at_start & (not from_right_side), 1, length)
        x = optax.tree.add_scale(x, length, direction)
        residual = optax.tree.add_scale(residual, -length, image)
        left_after = optax.tree.norm(residual, squared=True)
        direction = optax.tree.add_scale(residual, left_after / left, direction)
        return x, residual, direction, left_after, taken + jnp.where(negative, 0, 1), negative

    start = (x, residual, residual, left, jnp.zeros((), jnp.int32), jnp.zeros((), bool))
    x, _, _, left, taken, negative = jax.lax.while_loop(unfinished, step, start)
    return Solution(x, taken, jnp.sqrt(left / jnp.where(size > 0, size, 1)), negative)


def _whole(batches: Batches) -> Batches:
    """All steps and chunks as the chunks of one step."""
    if batches.max_steps == 1:
        return batches
    chunks = batches.chunks
    return dataclasses.replace(
        batches,
        get=lambda step, chunk: batches.get(chunk // chunks, chunk % chunks),
        steps=1,
        max_steps=1,
        chunks=batches.steps * chunks,
    )
