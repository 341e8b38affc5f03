"""FedAMP: no global model; the server keeps a mixture of all models for each client, and the client is pulled towards it.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: "Personalized cross-silo federated learning on non-IID data", AAAI 2021, arXiv
2007.03797, Algorithm 1. HeurFedAMP is as it is commonly given.

| paper | here | shape |
|---|---|---|
| w_i | personal leaves (all) | |
| u_i | a client's memory | like the model |
| alpha_k, lambda, sigma | `step`, `prox_weight`, `width` | scalars |
| xi | `attention`, `cosine_attention` | `[C, C]` |

Differs from the paper: the kernel's squared distances are taken relative to their mean unless `relative=False`, because those
of networks make it underflow otherwise. By default alpha_k is sigma / C in the mixtures of a cohort of C, so that a client's own
model has a share of at least 1 / C. A row whose weights exceed 1, for a larger alpha_k, is normalised, which leaves no weight for
the client itself.
Clients are sampled, and a mixture is over the models of its cohort.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_meta import checks, local, masks
from fedjax_meta.aggregate import combine
from fedjax_meta.algorithm import State
from fedjax_meta.builders import described, method_builder, variant
from fedjax_meta.contract import Cohort, Collaboration, Method, Received, Reduction, Trained, keep_mean
from fedjax_meta.data import ClientData, ClientView, FederatedData
from fedjax_meta.task import Task
from fedjax_meta.types import Key, PyTree, Rate, Scalar, Variables


def attention(gram: jax.Array, valid: jax.Array, *, step: Scalar | None, width: Scalar, relative: bool) -> jax.Array:
    """ξ_ij = step * exp(-|w_i - w_j|² / width) / width for j ≠ i, and the rest for i itself.

    Args:
      gram: `[C, C]`, inner products of the models.
      valid: bool `[C]`, whose models take part.
      step, width: alpha_k and sigma; a step of `None` is `width` by the number of valid models.
      relative: whether squared distances are divided by their mean.

    Returns:
      `[C, C]`, rows sum to 1.
    """
    square = jnp.diagonal(gram)
    pairs = valid[:, None] & valid[None, :] & ~jnp.eye(len(square), dtype=bool)
    distance = jnp.where(pairs, jnp.maximum(square[:, None] + square[None, :] - 2 * gram, 0), 0)
    if relative:
        mean = jnp.sum(distance) / jnp.maximum(jnp.sum(pairs), 1)
        distance = distance / jnp.where(mean > 0, mean, 1)
    height = 1 / jnp.maximum(jnp.sum(valid), 1) if step is None else step / width
    weights = jnp.where(pairs, height * jnp.exp(-distance / width), 0)
    weights = weights / jnp.maximum(jnp.sum(weights, 1, keepdims=True), 1)
    return weights + jnp.diag(jnp.maximum(1 - jnp.sum(weights, 1), 0))


def cosine_attention(gram: jax.Array, valid: jax.Array, *, width: Scalar, own_share: Scalar) -> jax.Array:
    """HeurFedAMP: a fixed share for oneself, the rest by softmax(width * cosine) over the others; `[C, C]`."""
    norm = jnp.sqrt(jnp.maximum(jnp.diagonal(gram), jnp.finfo(gram.dtype).tiny))
    pairs = valid[:, None] & valid[None, :] & ~jnp.eye(len(norm), dtype=bool)
    score = jnp.where(pairs, width * gram / (norm[:, None] * norm[None, :]), -jnp.inf)
    any_other = jnp.any(pairs, 1, keepdims=True)
    others = jnp.where(any_other, jax.nn.softmax(jnp.where(any_other, score, 0), -1), 0)
    return (1 - own_share) * others + jnp.diag(jnp.where(any_other[:, 0], own_share, 1))


def warn_if_capped(step: Scalar | None, width: Scalar, count: int) -> None:
    """Warns if alpha_k is so large that rows of `attention` with relative distances must exceed 1 in a cohort of this size.

    Relative distances have mean 1, so that by convexity a row's weights on the others sum on average to at least
    step / width (C - 1) exp(-1 / width). Traced values pass.
    """
    if step is None or isinstance(step, jax.core.Tracer) or isinstance(width, jax.core.Tracer):
        return
    least = float(step / width * (count - 1) * np.exp(-1 / width))
    if least > 1:
        warnings.warn(
            f"fedamp: with step={step} and width={width} the weights on the others sum to {least:.2f} or more in a cohort of "
            f"{count}; they are capped at 1, where a client's own model gets no share. step=None adapts to the cohort",
            stacklevel=2,
        )


@described("a mixture of models for each", "Huang et al. 2007.03797")
@method_builder
def fedamp(  # over 80 lines: signature and explanation of eleven options are half of it
    task: Task,
    *,
    lr: Rate = 0.01,
    step: Rate | None = None,
    prox_weight: Rate = 1.0,
    width: Rate = 1.0,
    relative: bool = True,
    kernel: str = "exponential",
    own_share: Rate = 0.1,
    epochs: int = 10,
    batch_size: int = 32,
    new_client_epochs: int = 10,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
) -> Method:
    """FedAMP.

    The paper has no rule for new clients: a client that never took part trains on its support set from the mean of the last
    cohort's models, weighted by samples (from the initial model before there are any), and is pulled towards that mean.

    A round reports `own_share`, the share of a client's own model in its mixture; 0 where the cap acts.

    Args:
      task, lr, epochs, batch_size, new_client_epochs, optimizer: as in `fedavg`.
      step: alpha_k; when not given, sigma / C in the mixtures of a cohort of C, and 1 in the proximal term. A round warns if a
        given one is so large that mixtures are capped for sure.
      prox_weight: lambda; the proximal term has weight lambda / alpha_k.
      width: sigma of the kernel; for "cosine", the factor of the cosines.
      relative: with "exponential", whether the kernel's distances are taken relative to their mean.
      kernel: "exponential" (FedAMP) or "cosine" (HeurFedAMP).
      own_share: weight of a client's own model with "cosine".

    Raises:
      ValueError: an option out of range.
    """
    if step is not None:
        checks.positive("step", step)
    checks.positive("width", width)
    checks.one_of("kernel", kernel, ("exponential", "cosine"))
    checks.between("own_share", own_share, 0, 1)
    pull = prox_weight if step is None else prox_weight / step
    trainable = task.trainable(masks.variables_shape(task))

    def train(
        key: Key, start: Variables, cloud: Variables, view: ClientView, passes: int, needed: Any = True
    ) -> tuple[Variables, jax.Array]:
        loss, how = local.proximal(task.loss, cloud, pull), {"batch_size": batch_size, "needed": needed}
        return local.train_epochs(key, loss, start, view, optimizer(lr), trainable, epochs=passes, **how)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        model, loss = train(key, received.model, received.memory, data["train"], epochs)
        return Trained(model, {"loss": loss}, memory=received.memory, statistics=model)

    def mix(key: Key, state: State, cohort: Cohort, data: FederatedData) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
        """Gives each client its mixture of the cohort's models, as its memory, and reports its own share of it."""
        del key, state, data
        parameters = jax.tree.leaves(masks.split(cohort.personal, trainable)[0])
        flat = jnp.concatenate([leaf.reshape(leaf.shape[0], -1) for leaf in parameters], 1)
        if kernel == "cosine":
            weights = cosine_attention(flat @ flat.T, cohort.returned, width=width, own_share=own_share)
        else:
            if relative:
                warn_if_capped(step, width, len(flat))
            # A common shift changes no distance, but it costs digits. One that follows a model that never came could cost all.
            came = cohort.returned[:, None]
            centre = jnp.sum(jnp.where(came, flat, 0), 0, keepdims=True) / jnp.maximum(jnp.sum(came), 1)
            flat = jnp.where(came, flat - centre, 0)
            weights = attention(flat @ flat.T, cohort.returned, step=step, width=width, relative=relative)
        return cohort.personal, combine(weights, cohort.personal), {"own_share": jnp.diagonal(weights)}

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        seen, mean = received.seen, received.extra
        start = jax.tree.map(lambda own, common: jnp.where(seen, own, common), received.model, mean)
        return train(key, start, mean, support, new_client_epochs, ~seen)[0]

    return Method(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        roles=masks.roles(masks.everything(task), trainable),
        init_memory=lambda key, model, num_clients: model,
        init_extra=lambda model, data: model,
        update_extra=keep_mean,
        statistics_renew_extra=True,
        collaborate=Collaboration(mix, reads="personal", gives="memory"),
        # The mean is for new clients only, and the server computes it from the models that it reads anyway.
        sends_extra=False,
        sends_statistics=False,
    )


@described("FedAMP by cosines")
@variant(fedamp, kernel="cosine")
def heur_fedamp(task: Task) -> Method:
    """HeurFedAMP: FedAMP whose mixtures follow the cosines between models, with a fixed share for the client itself.

    A client that never took part trains on its support set from the weighted mean of the last cohort's models.
    """


REDUCES_TO = (
    Reduction("FedAMP without the pull is local-only training", "fedamp", {"prox_weight": 0.0}, "local_only", {}),
    Reduction(
        "HeurFedAMP with all weight on the own model is FedProx with everything personal",
        "heur_fedamp",
        {"own_share": 1.0, "prox_weight": 0.5},
        "fedprox",
        {"personal": "all", "prox_weight": 0.5},
    ),
)
