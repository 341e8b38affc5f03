"""Central noise: the server adds Gaussian noise to the average of clipped uploads, for differential privacy of clients.

DP-FedAvg: McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language models", ICLR 2018, arXiv
1710.06963, with a fixed divisor (their estimator f_f) and clients that count alike.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.types import Key, PyTree, Scalar
from fedjax_meta.uploads.secret import init_secret, with_secret
from fedjax_meta.uploads.transform import ServerContext, UploadTransform, per_leaf


def noise(multiplier: Scalar, *, reproducible: bool = False) -> UploadTransform:
    """Adds noise of deviation `multiplier * S / m` to each number of the average; S is the norm of the `clip` before it.

    The divisor m is fixed: the cohort size C, or q N under `schedules.poisson`, even if some clients do not return; all clients
    count equally. One client moves the sum by at most S, or by 2 S where it is replaced. What that guarantees depends on how
    cohorts are drawn: `privacy.epsilon`, and docs/privacy.md.

    The guarantee covers the server's state, which all clients see. It does not cover personal leaves and memories, which stay
    with their client (a method whose new clients read those of others is refused), nor metrics and faults, which a deployment
    would not send. Buffers and averaged optimiser slots that must be positive (a variance) may turn negative under noise: let
    clients keep these.

    Args:
      multiplier: z, at least 0; may be traced.
      reproducible: whether the noise follows from the run's seed, for studies. Otherwise its key also holds 64 bits of the
        operating system's randomness, drawn once at `init` and kept in `State.aggregation`. A run that is resumed from a
        checkpoint goes on exactly; the checkpoint is a secret as long as the guarantee is to hold.

    Raises:
      ValueError: a negative multiplier; on `init`, several processes without `reproducible`.
    """
    checks.not_negative("multiplier", multiplier)

    def server(key: Key, average: PyTree, context: ServerContext, kept: PyTree, measured: PyTree) -> tuple[PyTree, PyTree]:
        del measured
        key = key if reproducible else with_secret(key, kept)
        # 1 / z^2 is what all releases together may spend, 1 / deviation^2 each.
        effective: Any = jnp.where(multiplier > 0, multiplier / jnp.sqrt(1 - multiplier**2 * context.spent), 0)
        deviation = effective * context.clip_norm / context.divisor

        def noisy(key: Key, leaf: jax.Array) -> jax.Array:
            wide = jnp.promote_types(leaf.dtype, jnp.float32)
            return (leaf.astype(wide) + deviation * jax.random.normal(key, leaf.shape, wide)).astype(leaf.dtype)

        return per_leaf(noisy, key, average), kept

    return UploadTransform(
        name="noise",
        server=server,
        init_server=(lambda key, upload: ()) if reproducible else init_secret,
        fixed_divisor=True,
        config={"multiplier": multiplier, "reproducible": reproducible},
    )
