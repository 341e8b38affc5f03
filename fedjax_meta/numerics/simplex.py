"""Small quadratic programs on the probability simplex, one per client.

FedPAC gives each client i the mixture of all clients' heads that minimises a bound on its error, a' P a over the simplex with
P_jl = [j = l] v_j + <h_j - h_i, h_l - h_i>. A program is solved in three parts. C pairwise steps (Fan, Chen and Lin, "Working set
selection using second order information for training SVMs", JMLR 2005), which cost little, find most of the support. Block
pivoting (Kim and Park, "Fast nonnegative matrix factorization: an active-set-like method and comparisons", SIAM J. Sci. Comput.
2011) exchanges all coordinates at once that are on the wrong side. It takes few steps, but may go round in circles; pairwise
steps then go on, and Wolfe's active-set method ("Finding the nearest point in a polytope", Mathematical Programming 1976), which
is exact from any start, finishes: it minimises over the affine hull of the support, goes towards that minimum as far as the
simplex allows, and lets the most violated coordinate in.

All programs come from one matrix of squared distances d_jl = |h_j - h_l|^2, since 2 <h_j - h_i, h_l - h_i> = d_ij + d_il - d_jl.
They run side by side, so that a batch takes as many steps as its slowest program.

Everything runs in float64, whatever the precision of the run: in float32 the matrices above lose their small eigenvalues, which
decide where the v_j are small.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from fedjax_meta import checks
from fedjax_meta.numerics import linalg
from fedjax_meta.types import PyTree

BLOCK_STEPS = 16
"""Most steps of block pivoting; where they help at all, fewer than ten do."""

MATRIX_ENTRIES = 4_000_000
"""Programs are solved side by side as long as their matrices have at most so many entries together (32 MB)."""


class Mixtures(NamedTuple):
    """The solutions of all clients' programs.

    Attributes:
      weights: `[C, C]`, row i for client i; rows sum to 1.
      gap: `[C]`, how far an objective may lie above its minimum at most, relative to itself (a duality gap); at most 1. An
        objective below 1e-8 v_i, which is nothing beside that of the own head alone, counts as that much: the slopes, of which
        the gap is made, have no more digits.
    """

    weights: jax.Array
    gap: jax.Array


class _Program(NamedTuple):
    """One client's program: minimise a' `matrix` a over those a of the simplex that are 0 where not `allowed`."""

    matrix: jax.Array
    allowed: jax.Array


def mixtures(
    profile: jax.Array,
    variance: jax.Array,
    valid: jax.Array | None = None,
    *,
    tolerance: float | None = None,
    pair_steps: int | None = None,
    max_steps: int | None = None,
) -> Mixtures:
    """For each client i, the weights a on the simplex that minimise `sum_j a_j^2 v_j + |h_i - sum_j a_j h_j|^2`.

    A result is never worse than the client's own head alone.

    Args:
      profile: `[C, d]`, the h_j.
      variance: `[C]`, the v_j; negative entries count as 0.
      valid: bool `[C]`, the clients that may receive weight from others; all by default. A client that is not valid, or whose
        statistics are not finite, gets no weight from others and all weight on itself.
      tolerance: a program ends when its objective is within this share of its minimum; by default 1e-12 or 10 machine epsilons of
        `profile`, whichever is larger. Rounding may leave more, about 1e-8 where the v_j span 12 decades.
      pair_steps: upper bound on the number of pairwise steps where block pivoting fails; 10 C + 100 by default.
      max_steps: upper bound on the number of active-set steps; 4 C + 20 by default. `gap` says where it was too low.

    Returns:
      `Mixtures`, in the dtype of `profile`.

    Raises:
      ValueError: shapes do not match, or the tolerance is not positive.

    Example:
      >>> import jax.numpy as jnp
      >>> h = jnp.array([[0.0], [0.0], [90.0]])
      >>> print(mixtures(h, jnp.array([1.0, 3.0, 1.0])).weights[0].round(2))
      [0.75 0.25 0.  ]
    """
    if tolerance is None:
        tolerance = max(1e-12, 10 * float(jnp.finfo(profile.dtype).eps))
    checks.positive("tolerance", tolerance)
    count, dtype = profile.shape[0], profile.dtype
    if profile.ndim != 2 or variance.shape != (count,):
        raise ValueError(f"profile must be [C, d] and variance [C], not {profile.shape} and {variance.shape}")
    pair_steps = 10 * count + 100 if pair_steps is None else pair_steps
    max_steps = 4 * count + 20 if max_steps is None else max_steps

    def solve(profile: jax.Array, variance: jax.Array, valid: jax.Array, batch: int) -> Mixtures:
        points, v, usable = _usable(profile, variance, valid)
        points = _reduced(points)
        apart = jax.lax.map(lambda point: jnp.sum((points - point) ** 2, 1), points)
        one = partial(_mixture, points, apart, v, usable, tolerance, pair_steps, max_steps)
        side_by_side = max(1, min(count, MATRIX_ENTRIES // (batch * count**2)))
        weights, gap = jax.lax.map(one, jnp.arange(count, dtype=jnp.int32), batch_size=side_by_side)
        return Mixtures(weights.astype(dtype), gap.astype(dtype))

    return _in_float64(solve, profile, variance, jnp.ones(count, bool) if valid is None else valid)


def bounds(weights: jax.Array, profile: jax.Array, variance: jax.Array) -> jax.Array:
    """The objectives of `mixtures` at any weights `[C, C]` whose rows sum to 1: `[C]`. With weight on itself alone it is v_i.

    Clients whose statistics are not finite count as if their h_j and v_j were 0.
    """

    def objectives(weights: jax.Array, profile: jax.Array, variance: jax.Array, batch: int) -> jax.Array:
        del batch
        points, v, _ = _usable(profile, variance, None)
        weights = weights.astype(points.dtype)
        return (weights**2 @ v + jnp.sum((points - weights @ points) ** 2, 1)).astype(profile.dtype)

    return _in_float64(objectives, weights, profile, variance)


def _in_float64(function: Callable[..., PyTree], *arguments: jax.Array) -> PyTree:
    """`function(*arguments, batch=1)` with float64 at hand, also where a caller maps it over an axis (`vmap`).

    `vmap` of a loop traces the body of the loop again, which fails where JAX rounds new arrays to float32. Here the function is
    mapped inside, and learns over how many elements (`batch`).
    """

    def mapped(batch: int) -> Callable[..., PyTree]:
        """For arguments with a leading axis `[batch, ...]`."""

        @custom_vmap
        def run(*arguments: jax.Array) -> PyTree:
            with jax.enable_x64(True):
                if batch == 1:
                    results = function(*(argument[0] for argument in arguments), batch=1)
                    return jax.tree.map(lambda leaf: leaf[None], results)
                return jax.vmap(partial(function, batch=batch))(*arguments)

        @run.def_vmap
        def of_more(size: int, is_mapped: list[bool], *arguments: jax.Array) -> tuple[PyTree, PyTree]:
            wide = [
                argument if each else jnp.broadcast_to(argument, (size, *argument.shape))
                for argument, each in zip(arguments, is_mapped, strict=True)
            ]
            results = mapped(size * batch)(*(leaf.reshape(size * batch, *leaf.shape[2:]) for leaf in wide))
            results = jax.tree.map(lambda leaf: leaf.reshape(size, batch, *leaf.shape[1:]), results)
            return results, jax.tree.map(lambda _: True, results)

        return run

    return jax.tree.map(lambda leaf: leaf[0], mapped(1)(*(argument[None] for argument in arguments)))


def _usable(profile: jax.Array, variance: jax.Array, valid: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(h less their mean, v, whose statistics count), with 0 for clients whose statistics do not."""
    profile, variance = profile.astype(jnp.float64), jnp.maximum(variance.astype(jnp.float64), 0)
    usable = jnp.isfinite(variance) & jnp.all(jnp.isfinite(profile), 1)
    usable = usable if valid is None else usable & valid
    profile = jnp.where(usable[:, None], profile, 0)
    # A common offset changes no objective on the simplex, but it costs digits.
    mean = jnp.sum(profile, 0) / jnp.maximum(jnp.sum(usable), 1)
    return jnp.where(usable[:, None], profile - mean, 0), jnp.where(usable, variance, 0), usable


def _reduced(points: jax.Array) -> jax.Array:
    """Points with the same differences in at most C dimensions."""
    linalg.one_thread()
    return points if points.shape[1] <= points.shape[0] else jnp.linalg.qr(points.T, mode="r").T


def _mixture(
    points: jax.Array,
    apart: jax.Array,
    variance: jax.Array,
    usable: jax.Array,
    tolerance: float,
    pair_steps: int,
    max_steps: int,
    i: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(weights, relative gap) of client i; `apart` `[C, C]` are the squared distances of the points."""
    own = jnp.arange(len(variance), dtype=jnp.int32) == i
    allowed = own | (usable & usable[i])
    both = allowed[:, None] & allowed[None, :]
    inner = jnp.where(both, (apart[i][:, None] + apart[i][None, :] - apart) / 2, 0)
    program = _Program(inner + jnp.diag(jnp.where(allowed, variance, 0)), allowed)
    alone = own.astype(points.dtype)
    start = _pairwise(program, alone, tolerance, min(pair_steps, len(variance)))
    start, solved = _block_pivoting(program, start, tolerance, min(max_steps, BLOCK_STEPS))
    start = _pairwise(program, start, tolerance, jnp.where(solved, 0, pair_steps))
    weights = _active_set(program, start, solved, tolerance, max_steps)

    def status(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(objective, gap) from the points themselves, which have no rounding of distances."""
        towards = jnp.where(allowed[:, None], points - points[i], 0)
        slope = towards @ (weights @ towards) + jnp.where(allowed, variance, 0) * weights
        return _status(allowed, weights, slope, 1e-8 * variance[i])

    value, gap = status(weights)
    better = (value <= variance[i]) & jnp.all(jnp.isfinite(weights))
    return jnp.where(better, weights, alone), jnp.where(better, gap, status(alone)[1])


def _status(
    allowed: jax.Array, weights: jax.Array, slope: jax.Array, least: jax.Array | float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """(objective, duality gap relative to it or to `least`), from half its gradient.

    By convexity no point is lower than objective (1 - gap), and none is below 0.
    """
    value = weights @ slope
    lowest = jnp.min(jnp.where(allowed, slope, jnp.inf))
    gap = 2 * jnp.maximum(value - lowest, 0)
    unit = jnp.maximum(value, least)
    return value, jnp.where(gap > 0, jnp.minimum(gap / jnp.where(unit > 0, unit, 1), 1), 0)


def _first(mask: jax.Array) -> jax.Array:
    """Index of the first true entry; XLA's own argmin is several times slower on a CPU."""
    count = mask.shape[0]
    return jnp.minimum(jnp.min(jnp.where(mask, jnp.arange(count, dtype=jnp.int32), count)), count - 1)


def _pairwise(program: _Program, start: jax.Array, tolerance: float, max_steps: Any) -> jax.Array:
    """Weights after exact steps between pairs of coordinates, each to that of least slope from that of the largest gain."""
    matrix, allowed = program
    diagonal = jnp.diagonal(matrix)

    def unfinished(carry: PyTree) -> jax.Array:
        step, weights, slope = carry
        value = weights @ slope
        return (step < max_steps) & (2 * (value - jnp.min(jnp.where(allowed, slope, jnp.inf))) > tolerance * value)

    def move(carry: PyTree) -> PyTree:
        step, weights, slope = carry
        open_slope = jnp.where(allowed, slope, jnp.inf)
        least = jnp.min(open_slope)
        to = _first(open_slope == least)
        curvature = jnp.maximum(diagonal + diagonal[to] - 2 * matrix[to], jnp.finfo(slope.dtype).tiny)
        descent = jnp.where(weights > 0, slope - least, 0)
        gain = descent**2 / curvature
        source = _first(gain == jnp.max(gain))
        amount = jnp.minimum(descent[source] / curvature[source], weights[source])
        weights = weights.at[source].add(-amount).at[to].add(amount)
        return step + 1, weights, slope + amount * (matrix[to] - matrix[source])

    return jax.lax.while_loop(unfinished, move, (jnp.zeros((), jnp.int32), start, matrix @ start))[1]


def _affine_minimum(program: _Program, support: jax.Array) -> jax.Array:
    """The minimum over the affine hull of the support: P a = c on it for some number c, a = 0 elsewhere, and sum a = 1."""
    matrix = program.matrix
    diagonal, count = jnp.diagonal(matrix), matrix.shape[0]
    floor = jnp.finfo(matrix.dtype).eps ** 2 * jnp.max(diagonal)
    scale = jnp.where(support, jax.lax.rsqrt(jnp.maximum(diagonal, jnp.where(floor > 0, floor, 1))), 0)
    # With ones on its diagonal the matrix is as well conditioned as scaling can make it. The ridge keeps the factor real; two
    # steps of refinement take its effect out again.
    ridge = 4 * count * jnp.finfo(matrix.dtype).eps
    scaled = matrix * scale[:, None] * scale[None, :] + jnp.diag(jnp.where(support, ridge, 1))
    factor = jnp.linalg.cholesky(scaled, symmetrize_input=False)

    def solve(right: jax.Array) -> jax.Array:
        return scale * jax.scipy.linalg.cho_solve((factor, True), scale * right)

    ones = support.astype(matrix.dtype)
    direction = solve(ones)
    weights = direction / jnp.sum(direction)
    for _ in range(2):
        slope = matrix @ weights
        correction = solve(ones * (weights @ slope - slope))
        weights = weights + correction - jnp.sum(correction) * weights
    return weights


def _block_pivoting(program: _Program, start: jax.Array, tolerance: float, max_steps: int) -> tuple[jax.Array, jax.Array]:
    """(weights on the support that block pivoting finds, true), or (`start`, false) if it finds none.

    A step minimises over the affine hull of the support, and moves every coordinate that is negative out of it and every one of
    too small a slope into it. After three steps without progress it moves one coordinate only, the last.
    """
    matrix, allowed = program
    count = len(start)
    places = jnp.arange(count, dtype=jnp.int32)

    def unfinished(carry: PyTree) -> jax.Array:
        step, _, _, wrong, _, _ = carry
        return (step < max_steps) & (wrong > 0)

    def exchange(carry: PyTree) -> PyTree:
        step, support, _, _, least, patience = carry
        weights = _affine_minimum(program, support)
        slope = matrix @ weights
        value = weights @ slope
        wrong = jnp.where(support, ~(weights >= 0), slope < value * (1 - tolerance / 2)) & allowed
        number = jnp.sum(wrong, dtype=jnp.int32)
        progress = number < least
        patience = jnp.where(progress, 3, patience - 1)
        last = places == jnp.max(jnp.where(wrong, places, -1))
        changed = support ^ jnp.where(patience >= 0, wrong, wrong & last)
        changed = jnp.where(jnp.any(changed), changed, allowed)
        support = jnp.where(number > 0, changed, support)
        return step + 1, support, weights, number, jnp.minimum(least, number), patience

    begin = (jnp.int32(0), start > 0, start, jnp.int32(count + 1), jnp.int32(count + 1), jnp.int32(3))
    _, support, weights, wrong, _, _ = jax.lax.while_loop(unfinished, exchange, begin)
    solved = (wrong == 0) & jnp.all(jnp.isfinite(weights))
    found = jnp.where(support, weights, 0)
    return jnp.where(solved, found / jnp.sum(found), start), solved


def _active_set(program: _Program, start: jax.Array, solved: jax.Array, tolerance: float, max_steps: int) -> jax.Array:
    """Wolfe's method from feasible weights; no step where they are `solved`.

    It ends at the minimum, or where rounding lets no step lower the objective.
    """

    def unfinished(carry: PyTree) -> jax.Array:
        step, _, _, _, done = carry
        return (step < max_steps) & ~done

    def step(carry: PyTree) -> PyTree:
        count, weights, support, added, _ = carry
        target = _affine_minimum(program, support)
        leaving = support & ~(target > 0)
        share = jnp.where(leaving, weights / jnp.where(leaving, weights - target, 1), jnp.inf)
        length = jnp.minimum(jnp.min(share), 1)
        blocked = leaving & (share <= length)
        moved = jnp.where(support & ~blocked, jnp.maximum(weights + length * (target - weights), 0), 0)
        moved = moved / jnp.sum(moved)
        slope = program.matrix @ moved
        gap = _status(program.allowed, moved, slope)[1]
        inside = ~jnp.any(leaving)
        to = _first(program.allowed & (slope == jnp.min(jnp.where(program.allowed, slope, jnp.inf))))
        # Rounding alone can send back at once what was just let in, or find the lowest slope inside the support.
        stuck = jnp.where(inside, support[to], blocked[added] & (length == 0)) | ~jnp.all(jnp.isfinite(moved))
        entering = jnp.where(inside, support.at[to].set(True), support & ~blocked)
        done = (inside & (gap <= tolerance)) | stuck
        weights = jnp.where(jnp.all(jnp.isfinite(moved)), moved, weights)
        return count + 1, weights, entering, jnp.where(inside, to, added), done

    # Where it is needed one step is always taken: it makes the weights, and not only the objective, exact.
    carry = (jnp.zeros((), jnp.int32), start, start > 0, jnp.zeros((), jnp.int32), solved)
    return jax.lax.while_loop(unfinished, step, carry)[1]
