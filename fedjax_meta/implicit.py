"""The implicit meta-gradient (iMAML) of a proximal inner problem, taken at the solution that the inner steps found.

It solves one linear system by conjugate gradient and stores nothing of the inner steps, so its memory does not depend on their
number.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, loops, masks
from fedjax_meta.data import Batches
from fedjax_meta.local import proximal_term
from fedjax_meta.meta import (
    Estimator,
    Info,
    MetaGradient,
    as_batches,
    prepared,
    require_fixed_rates,
    require_inner,
    require_query,
    require_second_order,
    split_support,
)
from fedjax_meta.numerics.units import power_of_two
from fedjax_meta.trajectory import InnerOptimizer, Losses, ScalarLoss, hessian_product, run_inner, value_and_gradient
from fedjax_meta.types import Mask, Params, PyTree, Rate, Scalar, Updates

OPERATORS = ("implicit", "imaml_dev", "fl_imaml", "fl_imaml_march")
"""Linear systems of implicit gradients, see `implicit_gradient`."""


class ImplicitInfo(NamedTuple):
    """Diagnostics of an implicit meta-gradient, scalars. The first four fields are those of `meta.Info`.

    Attributes:
      support_loss, first_support_loss, last_support_loss: losses of the inner steps, with the proximal term.
      query_loss: query loss at the adapted parameters.
      cg_steps: number of conjugate-gradient steps taken, int32.
      residual: norm of the residual of the linear system, relative to its right side; 0 if the right side is 0. The solver
        updates it in each step; in float32, that of an ill-conditioned system is larger than it says.
      negative_curvature: whether the solver met a direction in which the operator is not positive.
    """

    support_loss: jax.Array
    query_loss: jax.Array
    first_support_loss: jax.Array
    last_support_loss: jax.Array
    cg_steps: jax.Array
    residual: jax.Array
    negative_curvature: jax.Array


class Solution(NamedTuple):
    """The result of `conjugate_gradient`.

    Attributes:
      x: a tree like the right side.
      steps, residual, negative_curvature: as `cg_steps` and the following fields of `ImplicitInfo`.
    """

    x: Updates
    steps: jax.Array
    residual: jax.Array
    negative_curvature: jax.Array


def implicit_gradient(  # over 80 lines: most of them explain the options
    inner: InnerOptimizer,
    *,
    prox_weight: Rate,
    steps: int = 1,
    cg_steps: int = 5,
    tolerance: Rate = 1e-6,
    damping: Rate = 0.0,
    warm_start: str = "zero",
    operator: str = "implicit",
    proximal: str = "each_step",
    outer: str = "query",
    negative_curvature: str = "stop",
) -> Estimator:
    """The implicit meta-gradient (iMAML; Rajeswaran et al. 2019, arXiv 1909.04630, algorithm 2).

    At the solution phi of min f(phi; support) + lambda/2 ||phi - theta||^2, with H the Hessian of f(.; support) there,

        (I + H / lambda) gradient = grad f(phi; query).

    The gradient is exact if the inner steps and the solver have converged; otherwise it is as accurate as both of them. As
    lambda -> inf it is the plain query gradient at theta. With an inner mask, only the leaves b that adapt have a proximal
    term and belong to the system; the other leaves a get grad_a f(phi; query) - H_ab gradient_b / lambda, whichever `operator`.

    Args:
      inner: any inner optimiser without learned rates; it minimises the regularised loss.
      prox_weight: lambda.
      steps: inner steps, if `support` is one batch.
      cg_steps: maximum number of conjugate-gradient steps, one Hessian-vector product each.
      tolerance: the solver stops at a residual of this size, relative to the right side.
      damping: added to the identity of the operator, for a Hessian that is not positive.
      warm_start: where the solver starts: "zero", or the query "gradient" (code of Nguyen et al., "Improving federated learning
        by meta-learning"), which takes one more product.
      operator: "implicit" as above. Other people's code: "imaml_dev", that of the iMAML authors: (1 + damping) v + H v /
        (lambda + 10); "fl_imaml", that of Nguyen et al.: (1 + n + damping) v + sum_b H_b v / lambda over the n chunks b of the
        QUERY, where their loss includes the proximal term; "fl_imaml_march", the earlier code behind their logs: the same over
        the n chunks of the support.
      proximal: "each_step": the proximal term is part of the loss; "last": one step on it alone comes last (iMAML's code).
      outer: the right side: "query", the gradient of the whole query; "last_chunk", that of its last chunk with the proximal term
        (code of Nguyen et al.); "regularised", that of the whole query with the proximal term (their earlier code).
      negative_curvature: at a direction in which the operator is not positive, the solver does "stop", or "continue" as if it
        were positive (code of Nguyen et al. and of the iMAML authors).

    H is the Hessian over the whole support: the one batch, or all its steps and chunks together, weighted by `Batches.samples`.
    `WithHessian(support,
    hessian)` takes it on other samples, which saves many passes if the support is several epochs or repeated full batches. A
    Hessian over one chunk is linearised once for all products.

    If I + H/lambda (plus damping) is not positive, there may be no minimum and no solution. The solver then stops at the first
    direction without positive curvature and returns its current iterate, which is the plain query gradient if that is the
    first direction; `info` reports this and the remaining residual. A client of few samples can have such an H; a solver that
    goes on then returns another direction, in which many signs differ.

    Raises:
      ValueError: an option out of range, an `inner` that is no `InnerOptimizer` or has learned rates; from the estimator, as
        `meta.exact`.

    Example:
      >>> from fedjax_meta.meta import sgd
      >>> loss = lambda w, batch: 0.5 * jnp.sum((w - batch) ** 2)
      >>> estimate = implicit_gradient(sgd(0.5), prox_weight=1.0, steps=20)
      >>> result = estimate(loss, jnp.array([1.0]), jnp.array([0.0]), jnp.array([2.0]))
      >>> f"{result.gradient[0]:.5f}"  # (0.5 - 2) / (1 + 1)
      '-0.75000'
    """
    require_inner("implicit_gradient", inner)
    require_fixed_rates("implicit_gradient", inner)
    checks.positive("prox_weight", prox_weight)
    checks.count("steps", steps)
    checks.count("cg_steps", cg_steps)
    checks.not_negative("tolerance", tolerance)
    checks.not_negative("damping", damping)
    checks.one_of("warm_start", warm_start, ("zero", "gradient"))
    checks.one_of("operator", operator, OPERATORS)
    checks.one_of("proximal", proximal, ("each_step", "last"))
    checks.one_of("outer", outer, ("query", "last_chunk", "regularised"))
    checks.one_of("negative_curvature", negative_curvature, ("stop", "continue"))
    solver = partial(
        conjugate_gradient,
        steps=cg_steps,
        tolerance=tolerance,
        from_right_side=warm_start == "gradient",
        stop_at_negative=negative_curvature == "stop",
    )

    def estimate(loss: ScalarLoss, meta: Params, support: PyTree, query: PyTree) -> MetaGradient:
        require_query(query)
        require_second_order(loss)
        given, hessian = split_support(support)
        whole = as_batches(given if hessian is None else hessian, 1)
        whole = whole if whole.max_steps == 1 else whole.as_one_step()
        meta, support, query, _ = prepared(inner, loss, meta, support, query, steps)
        theta = inner.start(meta)
        mask = jax.tree.map(lambda _: True, theta) if inner.mask is None else inner.mask

        def distance(phi: Params) -> jax.Array:
            return proximal_term(phi, theta, prox_weight, mask)

        def regularised(phi: Params, batch: PyTree) -> jax.Array:
            value = loss(phi, batch)
            return value + distance(phi).astype(value.dtype)

        phi, losses = _adapted(inner, meta, support, loss, regularised, distance, proximal=proximal)
        query_loss, right = value_and_gradient(loss, phi, query, 0)
        if outer == "last_chunk":
            right = jax.grad(regularised)(phi, query.get(0, query.chunks - 1))
        if outer == "regularised":
            right = jax.tree.map(lambda r, d: r + d.astype(r.dtype), right, jax.grad(distance)(phi))
        system = _system(operator, prox_weight, damping, loss, phi, whole, query, mask)
        gradient, solution = _solve(solver, system, prox_weight, phi, right, mask)
        _, pull_back = jax.vjp(inner.start, meta)
        (gradient,) = pull_back(gradient)
        shared = Info.of(losses, query_loss, support.steps)
        return MetaGradient(phi, gradient, ImplicitInfo(*shared, *solution[1:]))

    return estimate


def _adapted(
    inner: InnerOptimizer,
    meta: Params,
    support: Batches,
    loss: ScalarLoss,
    regularised: ScalarLoss,
    distance: Callable[[Params], jax.Array],
    *,
    proximal: str,
) -> tuple[Params, Losses]:
    """(parameters after the inner steps and, for proximal="last", a step on the proximal term alone; losses)."""
    phi, losses = run_inner(regularised if proximal == "each_step" else loss, meta, support, inner)
    if proximal == "last":
        phi, _ = inner.update(meta, jax.grad(distance)(phi), inner.init(meta, phi), phi)
    return phi, losses


class _System(NamedTuple):
    """The operator v -> `identity` v + `curved` H v, with `product` the Hessian-vector product."""

    identity: Scalar
    curved: Scalar
    product: Callable[[Updates], Updates]


def _system(
    operator: str,
    prox_weight: Rate,
    damping: Rate,
    loss: ScalarLoss,
    phi: Params,
    whole: Batches,
    query: Batches,
    mask: Mask,
) -> _System:
    """One of `OPERATORS` at phi."""
    if operator.startswith("fl_imaml"):
        chunked = query if operator == "fl_imaml" else whole
        equal_weights = dataclasses.replace(chunked, samples=lambda batch: jnp.ones(()))
        product = hessian_product(loss, phi, equal_weights, 0, mask)[2]
        return _System(1 + chunked.chunks + damping, chunked.chunks / prox_weight, product)
    product = hessian_product(loss, phi, whole, 0, mask)[2]
    extra = 10 if operator == "imaml_dev" else 0
    return _System(1 + damping, 1 / (prox_weight + extra), product)


def _solve(
    solver: Callable[..., Solution], system: _System, prox_weight: Rate, phi: Params, right: Updates, mask: Mask
) -> tuple[Updates, Solution]:
    """(gradient with respect to theta, solution of the linear system for the leaves that adapt)."""
    identity, curved, product = system
    right, fixed_right = masks.split(right, mask)
    fixed = jax.tree.map(jnp.zeros_like, masks.split(phi, mask)[1])

    def apply(vector: Updates) -> Updates:
        curvature = masks.split(product(masks.merge(vector, fixed)), mask)[0]
        return jax.tree.map(lambda v, h: (identity * v + curved * h).astype(v.dtype), vector, curvature)

    solution = solver(apply, right)
    if jax.tree.leaves(fixed):
        crossed = masks.split(product(masks.merge(solution.x, fixed)), mask)[1]
        fixed_right = jax.tree.map(lambda r, h: (r - h / prox_weight).astype(r.dtype), fixed_right, crossed)
    return masks.merge(solution.x, fixed_right), solution


def conjugate_gradient(
    operator: Callable[[Updates], Updates],
    right: Updates,
    *,
    steps: int,
    tolerance: Rate = 0.0,
    from_right_side: bool = False,
    stop_at_negative: bool = True,
) -> Solution:
    """Solves operator(x) = right for a symmetric operator; stops where the operator is not positive.

    `jax.scipy.sparse.linalg.cg` returns neither its number of steps nor its residual, and does not stop at negative curvature.

    Args:
      operator: a linear, symmetric function of trees like `right`: the identity plus another operator. Curvature below 10
        machine epsilons counts as not positive.
      right: the right side, any pytree of floating-point arrays.
      steps: maximum number of steps, one product each.
      tolerance: stop when the norm of the residual is at most this fraction of the norm of the right side.
      from_right_side: start at `right` in place of 0.
      stop_at_negative: whether it stops there; otherwise it goes on with a step of negative length.

    Returns:
      a `Solution`, of the dtypes of `right`; the solver itself runs in single precision at least. At a direction p with
      p.operator(p) <= 0 the solver stops and returns its current iterate. If that is the first direction, it returns `right`. If
      the right side or a product is not finite, or a solver that goes on meets a curvature of 0, `x` and the residual are NaN.
      `negative_curvature` says whether any direction had it.

    Example:
      >>> solution = conjugate_gradient(lambda v: jnp.array([1.0, 4.0]) * v, jnp.array([1.0, 2.0]), steps=2)
      >>> solution.x.round(6).tolist(), int(solution.steps)
      ([1.0, 0.5], 2)
    """
    for leaf in jax.tree.leaves(right):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(f"the right side must be of floating-point numbers, not {jnp.result_type(leaf)}")
    form = jax.tree.map(jnp.asarray, right)
    if not jax.tree.leaves(form):
        return Solution(form, jnp.zeros((), jnp.int32), jnp.zeros(()), jnp.zeros((), bool))
    # In units of a power of 2, which rounds nothing: the squares of small or large numbers have no place in float32.
    right, unit = _in_units(_wide(form))

    def product(vector: Updates) -> Updates:
        return _wide(operator(jax.tree.map(lambda v, like: v.astype(like.dtype), vector, form)))

    x = right if from_right_side else jax.tree.map(jnp.zeros_like, right)
    residual = jax.tree.map(jnp.subtract, right, product(right)) if from_right_side else right
    size = optax.tree.norm(right, squared=True)
    left = optax.tree.norm(residual, squared=True)
    smallest = 10 * jnp.finfo(size.dtype).eps

    def unfinished(carry: PyTree) -> jax.Array:
        _, _, _, left, taken, negative = carry
        return (taken < steps) & (left > tolerance**2 * size) & ~(negative & stop_at_negative)

    def step(carry: PyTree) -> PyTree:
        x, residual, direction, left, taken, before = carry
        image = product(direction)
        curvature = optax.tree.vdot(direction, image)
        broken = ~jnp.isfinite(curvature)
        negative = ~broken & (curvature <= smallest * optax.tree.norm(direction, squared=True))
        stops = negative & stop_at_negative
        at_start = stops & (taken == 0)
        length = jnp.where(stops, 0, left / jnp.where(stops, 1, curvature))
        # From x = 0 the first direction is the right side, so a step of length 1 gives x = right.
        length = jnp.where(at_start & (not from_right_side), 1, length)
        length = jnp.where(broken, jnp.nan, length)
        x = optax.tree.add_scale(x, length, direction)
        residual = optax.tree.add_scale(residual, -length, image)
        left_after = optax.tree.norm(residual, squared=True)
        direction = optax.tree.add_scale(residual, left_after / left, direction)
        return x, residual, direction, left_after, taken + jnp.where(stops | broken, 0, 1), before | negative

    start = (x, residual, residual, left, jnp.zeros((), jnp.int32), jnp.zeros((), bool))
    x, _, _, left, taken, negative = loops.while_loop(unfinished, step, start)
    # A right side that is not finite stops the loop before it starts.
    x = jax.tree.map(lambda leaf, like: jnp.where(jnp.isfinite(left), leaf * unit, jnp.nan).astype(like.dtype), x, form)
    return Solution(x, taken, jnp.sqrt(left / jnp.where(size > 0, size, 1)), negative)


def _wide(tree: PyTree) -> PyTree:
    """All leaves in the widest precision of any, single at least: the squared norm of a long vector has no place in float16."""
    widest = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in jax.tree.leaves(tree)))
    return jax.tree.map(lambda leaf: leaf.astype(widest), tree)


def _in_units(tree: PyTree) -> tuple[PyTree, jax.Array]:
    """(the tree divided by a power of 2 near its largest number, that power)."""
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf), initial=0) for leaf in jax.tree.leaves(tree)]))
    unit = power_of_two(jax.lax.stop_gradient(largest))
    return jax.tree.map(lambda leaf: leaf / unit, tree), unit
