"""Differential privacy of single samples: DP-SGD on the clients (Abadi et al., "Deep learning with differential privacy", CCS
2016, arXiv 1607.00133, algorithm 1), for every method that learns from the gradient of `task.loss`.

`private_task` changes the derivative of the loss and nothing else: the backward pass returns

    (sum_i clip(grad l_i, S) + N(0, (z S)^2)) / B

over the real samples i of a batch. What a method makes of these gradients (steps, proximal terms, control variates, first-order
meta-gradients) is post-processing.

What is protected: neighbours differ in ONE sample of one client, which is replaced; how many samples a client holds is public
(it decides about steps, weights and B). A replaced sample moves a clipped sum by at most 2 S. Batches are shuffled passes, not
Poisson samples, so that no credit is given for sampling or shuffling: the positions at which a sample is seen do not depend on
data, and n noisy gradients that see it are together one Gaussian mechanism of noise multiplier `z / (2 sqrt(n))`. A batch counts
a sample once, also where a method fills its batches with repeated samples (`ClientView.once`).

What is not: predictions, metrics, and what a client computes of its samples in another way. `rounds.leaks.refuse_leaks` finds
whatever of that reaches the server.

The noise follows from the keys of the run, so that a run can be repeated: whoever knows its seed can remove it. It is a study of
what privacy costs, not a release.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks, masks
from fedjax_meta.keys import tagged
from fedjax_meta.privacy.accounting import Guarantee, gaussian_epsilon
from fedjax_meta.task import FIRST_ORDER_ONLY, Batch, Task, require_task
from fedjax_meta.types import Key, Params, Rate, Variables
from fedjax_meta.uploads.clip import clipped
from fedjax_meta.uploads.transform import per_leaf

PRIVATE_GRADIENT = "private_gradient_of_"
"""The name of the compiled function whose results are private; `leaks` looks for it."""


@dataclasses.dataclass(frozen=True)
class SamplePrivacy:
    """How a task's gradients are made private; recorded in the config of a method.

    Attributes:
      clip: S, the largest norm of one sample's gradient.
      noise: z, the deviation of the noise on a sum of clipped gradients, over S.
      batch_size: B; the number of real samples in a batch when `None`.
    """

    clip: Rate
    noise: Rate
    batch_size: int | None = None

    name = "private_task"

    @property
    def config(self) -> Mapping[str, Any]:
        """The fields."""
        return dataclasses.asdict(self)


def private_task(task: Task, *, clip: Rate, noise: Rate, batch_size: int | None = None) -> Task:
    """The task with private gradients, see `privacy.samples`. Losses and predictions stay as they are.

    Estimators that need second derivatives, or differences of gradients, are refused by their names.

    Args:
      task: a task without buffers, which would be statistics of samples without noise; private already is refused.
      clip: S, above 0.
      noise: z, at least 0.
      batch_size: B, a fixed divisor, with which a partial last batch counts as less than a whole one; when not given, the number
        of real samples in the batch, so that `clip` -> inf and `noise` 0 give the plain gradient. Not so with `Weighted` targets:
        the plain loss is a mean over all entries that count, the private one a mean over samples.

    Raises:
      ValueError: a value out of range, a task with buffers, a private task.
    """
    require_task("private_task", task)
    checks.positive("clip", clip)
    checks.not_negative("noise", noise)
    if batch_size is not None:
        checks.count("batch_size", batch_size)
    privacy = SamplePrivacy(clip, noise, batch_size)
    if task.private is not None:
        raise ValueError("private_task: the task is private already")
    if not all(jax.tree.leaves(task.trainable(masks.variables_shape(task)))):
        raise ValueError(
            "private_task is for models without buffers: batch-norm statistics are means over samples, without noise"
        )

    def plain(variables: Variables, batch: Batch, key: Key) -> jax.Array:
        return task.loss(variables, batch, tagged(key, "loss"))[0]

    def forward(variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Any]:
        return plain(variables, batch, key), (variables, batch, key)

    def backward(kept: Any, cotangent: jax.Array) -> tuple[Params, None, None]:
        gradient = _first_order_only(private_gradient(task, privacy, *kept))
        return jax.tree.map(lambda leaf: cotangent.astype(leaf.dtype) * leaf, gradient), None, None

    value = jax.custom_vjp(plain)
    value.defvjp(forward, backward)

    def loss(variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
        return value(variables, batch, key), variables

    return task._replace(loss=loss, private=privacy)


def private_gradient(task: Task, privacy: SamplePrivacy, variables: Variables, batch: Batch, key: Key) -> Params:
    """The clipped and noised mean of the gradients of single samples, like `variables`; 0 for a batch without real samples.

    Args:
      task: with its own loss.
      privacy: S, z and B.
      variables: all leaves are parameters.
      batch: `[B, ...]`; rows of weight 0 do not count.
      key: consumed.
    """

    def of_sample(variables: Variables, clip: Rate, sample: Batch, key: Key) -> Params:
        one = jax.tree.map(lambda leaf: leaf[None], sample)
        gradient = jax.grad(lambda variables: task.loss(variables, one, key)[0])(variables)
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), gradient)
        return jax.tree.map(lambda leaf: jnp.where(sample.weight > 0, leaf, 0), clipped(wide, clip))

    def of_batch(samples: tuple[Any, Any], variables: Variables, weight: Any, clip: Rate, noise: Rate, key: Key) -> Params:
        batch = Batch(*samples, weight)
        real = jnp.sum(batch.weight > 0)
        divisor = jnp.maximum(real, 1) if privacy.batch_size is None else privacy.batch_size
        keys = jax.random.split(tagged(key, "samples"), batch.weight.shape[0])
        each = jax.vmap(of_sample, (None, None, 0, 0))(variables, clip, batch, keys)
        total = jax.tree.map(lambda leaf: jnp.sum(leaf, 0), each)

        def noisy(key: Key, leaf: jax.Array) -> jax.Array:
            noisy = (leaf + noise * clip * jax.random.normal(key, leaf.shape, leaf.dtype)) / divisor
            return jnp.where(real > 0, noisy, 0)

        # Methods may use one key for several gradients, whose noise must not cancel in a difference.
        its_key = jax.random.fold_in(tagged(key, "noise"), _digest((variables, batch.x, batch.y)))
        private = per_leaf(noisy, its_key, total)
        return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), private, variables)

    # The name tells `leaks` how many of the first arguments are samples.
    of_batch.__name__ = f"{PRIVATE_GRADIENT}{len(jax.tree.leaves((batch.x, batch.y)))}"
    return jax.jit(of_batch)((batch.x, batch.y), variables, batch.weight, privacy.clip, privacy.noise, key)


def _digest(tree: Any) -> jax.Array:
    """A number that differs for different trees, uint32."""

    def mixed(words: jax.Array) -> jax.Array:
        # The finaliser of MurmurHash3.
        words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
        words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
        return words ^ (words >> 16)

    digest = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        pattern = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
        bits = jax.lax.bitcast_convert_type(leaf, pattern) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        words = bits.reshape(-1).astype(jnp.uint32)
        places = mixed(jnp.arange(words.size, dtype=jnp.uint32) + 1)
        digest = mixed(digest + jnp.sum(mixed(words ^ places), dtype=jnp.uint32))
    return digest


@jax.custom_jvp
def _first_order_only(gradient: Params) -> Params:
    return gradient


@_first_order_only.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise ValueError(FIRST_ORDER_ONLY)


def sample_epsilon(noise: float, passes: int, delta: float) -> Guarantee:
    """What DP-SGD on the clients guarantees for one sample against all that ever leaves its client.

    Args:
      noise: z of `private_task`.
      passes: how many noisy gradients see a sample in the whole run: the number of rounds that a client takes part in, times the
        passes over its data in one (the epochs of FedAvg; those of head and body together of FedRep; 1 for each of support and
        query if these are disjoint). Where each gradient takes a full batch, whatever a client has (`ClientView.endless`,
        Per-FedAvg), no more than all gradients of the client.
      delta: in (0, 1).

    Raises:
      ValueError: a value out of range.
    """
    checks.not_negative("noise", noise)
    checks.count("passes", passes, least=0)
    checks.fraction("delta", delta)
    value = 0.0 if passes == 0 else math.inf
    if passes > 0 and noise > 0:
        value = gaussian_epsilon(delta, noise / 2 / math.sqrt(passes))
    return Guarantee(
        value,
        float(delta),
        "replace one sample of a client, the number of samples being public",
        f"each sample in {passes} noisy gradients, no credit for sampling or shuffling",
        "closed form (Balle and Wang 2018)",
        float(noise),
        int(passes),
    )
