"""Every client's best mixture of what all clients hold: many small quadratic programmes on the simplex, solved side by side.

FedPAC asks each client for the mixture of all clients' heads with the least bound on its error. All these programmes share
their quadratic part, so one Gram matrix serves all of them. Pairs of weights are moved one after the other, by an exact step,
along the pair with the largest gain (sequential minimal optimisation with second-order choice: Fan, Chen, Lin, "Working set
selection using second order information for training SVMs", JMLR 2005). The step lengths know the curvature of their pair, so
the number of steps does not grow with the condition of the whole, as it does for projected gradients.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks


def mixtures(
    gram: jax.Array,
    variance: jax.Array,
    valid: jax.Array | None = None,
    *,
    tolerance: float | None = None,
    max_steps: int | None = None,
) -> jax.Array:
    """For each client i, the weights a on the simplex with the least `sum_j a_j^2 v_j + |h_i - sum_j a_j h_j|^2`.

    The search begins with all weight on the client itself and each step lowers the objective, so a result is never worse than
    keeping one's own.

    Args:
      gram: `[C, C]`, inner products of the h_j.
      variance: `[C]`, the v_j; negative ones count as 0.
      valid: bool `[C]`, who may get weight from others; all when not given. Whoever may not, and whoever has a statistic that
        is not finite, keeps to itself.
      tolerance: stop when no client's objective is further than this from its least, relative to the mean of `|h_j - mean h|^2
        + v_j`; when not given 1e-12, or 10 units of rounding where that is more.
      max_steps: bound of the number of steps; 10 C + 100 when not given.

    Returns:
      `[C, C]`, row i for client i; rows sum to 1.

    Raises:
      ValueError: shapes that do not fit, a tolerance that is not positive.

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
    max_steps = 10 * count + 100 if max_steps is None else max_steps
    variance = jnp.maximum(variance, 0)
    sound = jnp.isfinite(variance) & jnp.isfinite(jnp.diagonal(gram))
    sound = sound if valid is None else sound & valid
    alone = jnp.eye(count, dtype=bool)
    both = sound[:, None] & sound[None, :]
    gram, variance = jnp.where(both, gram, 0), jnp.where(sound, variance, 0)
    # On the simplex a shift of all h changes nothing, and without their mean less is lost to rounding.
    share = sound.astype(gram.dtype) / jnp.maximum(jnp.sum(sound), 1).astype(gram.dtype)
    to_mean = gram @ share
    gram = jnp.where(both, gram - to_mean[:, None] - to_mean[None, :] + share @ to_mean, 0)
    square = jnp.diagonal(gram)
    quadratic = gram + jnp.diag(variance)
    distance = jnp.maximum(square[:, None] + square[None, :] - 2 * gram, 0)
    curvature = distance + variance[:, None] + variance[None, :]
    scale = jnp.sum(square + variance) / jnp.maximum(jnp.sum(sound), 1).astype(gram.dtype)
    allowed = both | alone
    place = jnp.arange(count)[None]

    def first(mask: jax.Array) -> jax.Array:
        """Index of the first true entry of each row; XLA's own argmin is several times slower on a CPU."""
        return jnp.minimum(jnp.min(jnp.where(mask, place, count), 1), count - 1)

    def unfinished(carry: Any) -> jax.Array:
        step, _, _, gap = carry
        return (step < max_steps) & (gap > tolerance * scale)

    def move(carry: Any) -> Any:
        """Moves weight to the coordinate of least slope from the one that gains most by giving: t = Δslope / curvature."""
        step, weights, slope, _ = carry
        open_slope = jnp.where(allowed, slope, jnp.inf)
        least = jnp.min(open_slope, 1, keepdims=True)
        to = first(open_slope == least)
        bend = jnp.maximum(curvature[to], jnp.finfo(gram.dtype).tiny)
        descent = jnp.where(weights > 0, slope - least, 0)
        gain = descent**2 / bend
        source = first(gain == jnp.max(gain, 1, keepdims=True))
        giving = place == source[:, None]
        amount = jnp.sum(jnp.where(giving, jnp.minimum(descent / bend, weights), 0), 1, keepdims=True)
        weights = weights - jnp.where(giving, amount, 0) + jnp.where(place == to[:, None], amount, 0)
        # The Frank-Wolfe gap bounds how far an objective still is from its least, and is itself at most this.
        gap = 2 * jnp.max(descent)
        return step + 1, weights, slope + amount * (quadratic[to] - quadratic[source]), gap

    # slope = half the gradient, Q a - G_i; with a = e_i it is the variance at i and 0 elsewhere.
    start = (0, jnp.eye(count, dtype=gram.dtype), jnp.diag(variance), jnp.asarray(jnp.inf, gram.dtype))
    return jax.lax.while_loop(unfinished, move, start)[1]
