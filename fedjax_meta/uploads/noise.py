"""Central noise: the server adds Gaussian noise to the average of clipped uploads, for differential privacy of clients.

DP-FedAvg: McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language models", ICLR 2018, arXiv
1710.06963, with cohorts of fixed size and clients that count alike.
"""

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.types import Key, PyTree, Scalar
from fedjax_meta.uploads.transform import ServerContext, UploadTransform, per_leaf


def noise(multiplier: Scalar) -> UploadTransform:
    """Adds noise of deviation `multiplier * S / C` to each number of the average; S is the norm of the `clip` before it.

    The sum is divided by C even if some clients do not return, and all clients count equally, so that one client moves the
    average by at most S / C.

    The guarantee (epsilon, delta) covers the server's state, which all clients see. It does not cover personal leaves and
    memories, which stay with their client, nor metrics, which a deployment would not send. Nor does it cover new-client rules
    that hand personal leaves of trained clients to new ones (FedMeta-Per, LG-FedAvg, FedFomo). Buffers and averaged optimiser
    slots that must be positive (a variance) may turn negative under noise: let clients keep these.

    Args:
      multiplier: z, at least 0; may be traced.

    Raises:
      ValueError: a negative multiplier.
    """
    checks.not_negative("multiplier", multiplier)

    def server(key: Key, average: PyTree, context: ServerContext, kept: PyTree, measured: PyTree) -> tuple[PyTree, PyTree]:
        del measured
        deviation = multiplier * context.clip_norm / context.cohort_size

        def noisy(key: Key, leaf: jax.Array) -> jax.Array:
            wide = jnp.promote_types(leaf.dtype, jnp.float32)
            return (leaf.astype(wide) + deviation * jax.random.normal(key, leaf.shape, wide)).astype(leaf.dtype)

        return per_leaf(noisy, key, average), kept

    return UploadTransform(name="noise", server=server, fixed_divisor=True, config={"multiplier": multiplier})
