"""Small quadratic programs on the probability simplex, one per client, solved together.

FedPAC gives each client the mixture of all clients' heads that minimises a bound on its error. All these programs share their
quadratic part, so one Gram matrix serves all clients. The solver is sequential minimal optimisation with second-order working
set selection (Fan, Chen and Lin, "Working set selection using second order information for training SVMs", JMLR 2005): each
step moves weight between the pair of coordinates with the largest gain, by the exact minimiser along that pair. Because a step
uses the curvature of its own pair, the number of steps does not grow with the condition number, as it does for projected
gradients.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.types import PyTree


class _Programs(NamedTuple):
    """The programs of all clients, with excluded clients set to 0.

    Attributes:
      variance: `[C]`, the v_j.
      quadratic: `[C, C]`, Gram matrix of the centred h_j plus diag(v).
      curvature: `[C, C]`, curvature of the objective along each pair, |h_i - h_j|^2 + v_i + v_j.
      allowed: bool `[C, C]`, whether client i may give weight to client j.
      scale: scalar, the mean of |h_j - mean h|^2 + v_j; the tolerance is relative to it.
    """

    variance: jax.Array
    quadratic: jax.Array
    curvature: jax.Array
    allowed: jax.Array
    scale: jax.Array


def mixtures(
    gram: jax.Array,
    variance: jax.Array,
    valid: jax.Array | None = None,
    *,
    tolerance: float | None = None,
    max_steps: int | None = None,
) -> jax.Array:
    """For each client i, the weights a on the simplex that minimise `sum_j a_j^2 v_j + |h_i - sum_j a_j h_j|^2`.

    The search starts with all weight on the client itself, and each step lowers the objective. A result is therefore never
    worse than the client's own head alone.

    Args:
      gram: `[C, C]`, inner products of the h_j.
      variance: `[C]`, the v_j; negative entries count as 0.
      valid: bool `[C]`, the clients that may receive weight from others; all by default. A client that is not valid, or whose
        statistics are not finite, gets no weight from others and all weight on itself.
      tolerance: stop when every objective is within this distance of its minimum, relative to the mean of
        `|h_j - mean h|^2 + v_j`; by default 1e-12 or 10 machine epsilons, whichever is larger.
      max_steps: upper bound on the number of steps; 10 C + 100 by default.

    Returns:
      `[C, C]`, row i for client i; rows sum to 1.

    Raises:
      ValueError: shapes do not match, or the tolerance is not positive.

    Example:
      >>> import jax.numpy as jnp
      >>> h = jnp.array([[0.0], [0.0], [90.0]])
      >>> print(mixtures(h @ h.T, jnp.array([1.0, 3.0, 1.0]))[0].round(2))
      [0.75 0.25 0.  ]
    """
    if tolerance is None:
        tolerance = max(1e-12, 10 * float(jnp.finfo(gram.dtype).eps))
    checks.positive("tolerance", tolerance)
    count = gram.shape[0]
    if gram.shape != (count, count) or variance.shape != (count,):
        raise ValueError(f"gram must be [C, C] and variance [C], not {gram.shape} and {variance.shape}")
    return _minimise(_programs(gram, variance, valid), tolerance, 10 * count + 100 if max_steps is None else max_steps)


def _programs(gram: jax.Array, variance: jax.Array, valid: jax.Array | None) -> _Programs:
    variance = jnp.maximum(variance, 0)
    usable = jnp.isfinite(variance) & jnp.isfinite(jnp.diagonal(gram))
    usable = usable if valid is None else usable & valid
    both = usable[:, None] & usable[None, :]
    gram, variance = jnp.where(both, gram, 0), jnp.where(usable, variance, 0)
    # Subtracting the mean from all h changes no objective on the simplex, and it reduces rounding errors.
    share = usable.astype(gram.dtype) / jnp.maximum(jnp.sum(usable), 1).astype(gram.dtype)
    to_mean = gram @ share
    gram = jnp.where(both, gram - to_mean[:, None] - to_mean[None, :] + share @ to_mean, 0)
    square = jnp.diagonal(gram)
    distance = jnp.maximum(square[:, None] + square[None, :] - 2 * gram, 0)
    return _Programs(
        variance=variance,
        quadratic=gram + jnp.diag(variance),
        curvature=distance + variance[:, None] + variance[None, :],
        allowed=both | jnp.eye(len(variance), dtype=bool),
        scale=jnp.sum(square + variance) / jnp.maximum(jnp.sum(usable), 1).astype(gram.dtype),
    )


def _minimise(programs: _Programs, tolerance: float, max_steps: int) -> jax.Array:
    variance, quadratic, curvature, allowed, scale = programs
    count, dtype = len(variance), quadratic.dtype
    column = jnp.arange(count)[None]

    def first(mask: jax.Array) -> jax.Array:
        """Index of the first true entry of each row; XLA's own argmin is several times slower on a CPU."""
        return jnp.minimum(jnp.min(jnp.where(mask, column, count), 1), count - 1)

    def unfinished(carry: PyTree) -> jax.Array:
        step, _, _, gap = carry
        return (step < max_steps) & (gap > tolerance * scale)

    def move(carry: PyTree) -> PyTree:
        """Moves weight to the coordinate of least slope from the one with the largest gain, by Δslope / curvature."""
        step, weights, slope, _ = carry
        open_slope = jnp.where(allowed, slope, jnp.inf)
        least = jnp.min(open_slope, 1, keepdims=True)
        to = first(open_slope == least)
        bend = jnp.maximum(curvature[to], jnp.finfo(dtype).tiny)
        descent = jnp.where(weights > 0, slope - least, 0)
        gain = descent**2 / bend
        source = first(gain == jnp.max(gain, 1, keepdims=True))
        giving = column == source[:, None]
        amount = jnp.sum(jnp.where(giving, jnp.minimum(descent / bend, weights), 0), 1, keepdims=True)
        weights = weights - jnp.where(giving, amount, 0) + jnp.where(column == to[:, None], amount, 0)
        # The Frank-Wolfe gap bounds the distance of an objective from its minimum, and `gap` bounds the Frank-Wolfe gap.
        gap = 2 * jnp.max(descent)
        return step + 1, weights, slope + amount * (quadratic[to] - quadratic[source]), gap

    # slope = half the gradient, Q a - G_i; for a = e_i that is the variance at i and 0 elsewhere.
    start = (0, jnp.eye(count, dtype=dtype), jnp.diag(variance), jnp.asarray(jnp.inf, dtype))
    return jax.lax.while_loop(unfinished, move, start)[1]
