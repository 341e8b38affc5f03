"""FedMeta and FedMeta-Per: clients send meta-gradients, or the models that these lead to, and may keep personal layers.

Where FedAvg averages models that are good on average, FedMeta averages starting points that adapt well: each client adapts
on its support set and steps along the gradient of its query loss after adaptation. FedMeta-Per keeps some leaves, and their
inner learning rates, with their client.

FedMeta: Chen, Luo, Dong, Li, He, arXiv 1802.07876. FedMeta-Per: Nguyen, Cao, "Meta-learning and personalization layer in
federated learning" (S0), equations and algorithms of its §3. MAML: arXiv 1703.03400; Meta-SGD: arXiv 1707.09835.

| paper | here | shape |
|---|---|---|
| w = w_B + w_P | model, leaves outside and inside `personal` | |
| alpha | `inner_lr`, or `MetaSGD.rates` when `learned_rates` | scalar or like w |
| beta | `outer_lr` | scalar |
| A_i, B_i | views "support", "query" | |
| n_i = size of B_i | `weighting="query"` | `[C]` |

Differs from the paper's text, to agree with the code behind its numbers: adaptation is one epoch of batches (the equations
have one full-batch step: `batch_size=None`), and the outer step is one step of a fresh Adam (the text has SGD:
`outer_optimizer=optax.sgd`).
"""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, local, masks, meta
from fedjax_meta.aggregate import WEIGHTINGS, client_weight
from fedjax_meta.algorithm import Algorithm, FederationOptions, Received, State, Trained, federated
from fedjax_meta.data.federated import Batches, ClientData, ClientView
from fedjax_meta.engine import map_lanes
from fedjax_meta.task import Key, Task, Variables


def fedmeta(
    task: Task,
    *,
    inner_lr: Any = 0.001,
    outer_lr: Any = 0.001,
    learned_rates: bool = False,
    estimator: Callable[[meta.Inner], meta.Estimator] = meta.exact,
    outer_optimizer: Callable[[Any], optax.GradientTransformation] = optax.adam,
    outer_at: str = "client",
    batch_size: int | None = 32,
    inner_steps: int = 1,
    adapts: masks.MaskSpec = "all",
    personal: masks.MaskSpec = "none",
    personal_rates: masks.MaskSpec | None = None,
    score: str = "online",
    weighting: str = "query",
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """Federated meta-learning with any meta-gradient and any personal leaves.

    Args:
      task: what is learned.
      inner_lr: alpha, the rate of adaptation; with `learned_rates` its initial value for every parameter.
      outer_lr: beta, the rate of the meta-update.
      learned_rates: learn one inner rate a parameter (Meta-SGD); else MAML.
      estimator: how the meta-gradient is found, a function of the inner rule: `meta.exact`, `meta.first_order`, ...
      outer_optimizer: `outer_lr -> optax transformation`, started fresh in every round, one step of which is the meta-update.
      outer_at: "client" (S0: the client steps and sends its model) or "server" (the client sends the gradient, which the
        `server_optimizer` descends; personal leaves still step at the client).
      batch_size: adaptation goes through batches of this size; `None` takes full-batch steps.
      inner_steps: passes over the support view, or full-batch steps when `batch_size` is `None`.
      adapts: mask of the leaves that adaptation moves ("head" is ANIL).
      personal: mask of the leaves that stay with their client: "none" is FedMeta, "head" FedMeta-Per.
      personal_rates: mask of the learned rates that stay; those of the personal leaves when not given.
      score: how a new client chooses among the personal parts of the others: by the mean loss of its adaptation's steps, each
        before its update ("online", S0's code), or by the loss after it ("fitted").
      weighting: "query", "samples" or "uniform".
      **options: those of `federated`.

    Raises:
      ValueError: a rate, size or count out of range, an unknown mask, score or place.
    """
    checks.not_negative("inner_lr", inner_lr)
    checks.positive("outer_lr", outer_lr)
    checks.count("inner_steps", inner_steps)
    if batch_size is not None:
        checks.count("batch_size", batch_size)
    checks.one_of("outer_at", outer_at, ("client", "server"))
    checks.one_of("score", score, ("online", "fitted"))
    checks.one_of("weighting", weighting, WEIGHTINGS)
    if personal_rates is not None and not learned_rates:
        raise ValueError("personal_rates needs learned_rates=True: there are no rates to keep otherwise")
    trainable = task.trainable(masks.variables_shape(task))
    has_buffers = not all(jax.tree.leaves(trainable))
    own = masks.resolve(personal, task, name="personal")
    adapted_leaves = masks.split(masks.resolve(adapts, task, name="adapts"), trainable)[0]
    own_rates = own if personal_rates is None else masks.resolve(personal_rates, task, name="personal_rates")

    inner = meta.learned_sgd(mask=adapted_leaves) if learned_rates else meta.sgd(inner_lr, mask=adapted_leaves)
    meta_gradient = estimator(inner)

    # The model is the task's variables, and beside them, where they are learned, the rates of the trainable ones.
    def with_rates(variables: Any, rates: Any) -> Any:
        return meta.MetaSGD(variables, masks.split(rates, trainable)[0]) if learned_rates else variables

    def variables_of(model: Any) -> Variables:
        return model.params if learned_rates else model

    def init(key: Key) -> Any:
        variables = task.init(key)
        return with_rates(variables, jax.tree.map(lambda leaf: jnp.full_like(leaf, inner_lr), variables))

    trainable_model = with_rates(trainable, trainable)

    def inner_batches(key: Key, support: ClientView) -> Batches:
        order_key, key = jax.random.split(key)
        batches = support.full(inner_steps) if batch_size is None else support.epochs(order_key, batch_size, inner_steps)
        return batches.keyed(key)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        model = received.model
        support_key, query_key, order_key, buffer_key = jax.random.split(key, 4)
        support = inner_batches(support_key, data["support"])
        query = data["query"].in_order(batch_size or 256).as_one_step(alike=batch_size is not None).keyed(query_key)
        parameters, buffers = masks.split(model, trainable_model)
        result = meta_gradient(local.parameter_loss(task, variables_of(buffers)), parameters, support, query)
        optimizer = outer_optimizer(outer_lr)
        updates, _ = optimizer.update(result.gradient, optimizer.init(parameters), parameters)
        trained = masks.merge(optax.apply_updates(parameters, updates), buffers)
        if has_buffers:
            # Running statistics stood still while the meta-gradient was taken. They are for predictions, which the adapted model
            # makes of samples it has not seen: one pass of it over the query view moves them on.
            adapted = masks.merge(result.adapted, variables_of(buffers))
            batches = data["query"].epochs(order_key, batch_size or 256)
            moved_on, _ = local.train(buffer_key, task.loss, adapted, batches, optax.set_to_zero(), trainable)
            variables = masks.merge(*(masks.split(v, trainable)[i] for i, v in enumerate((variables_of(trained), moved_on))))
            trained = trained._replace(params=variables) if learned_rates else variables
        gradient = masks.merge(result.gradient, buffers) if outer_at == "server" else None
        metrics = {"loss": result.info.query_loss, "support_loss": result.info.support_loss}
        return Trained(trained, client_weight(weighting, data), metrics, pseudo_gradient=gradient)

    def adapt(key: Key, model: Any, support: ClientView) -> tuple[Variables, jax.Array]:
        """(adapted variables, score); what a test client does, and what a new client tries on every personal part."""
        parameters, buffers = masks.split(model, trainable_model)
        loss = local.parameter_loss(task, variables_of(buffers))
        key, score_key = jax.random.split(key)
        adapted, online = meta.adapt(loss, parameters, inner_batches(key, support), inner)
        if score == "fitted":
            fitted = support.in_order(batch_size or 256).as_one_step().keyed(score_key)
            online = fitted.mean(lambda pair: loss(adapted, pair), 0)
        return masks.merge(adapted, variables_of(buffers)), online

    def new_client(key: Key, state: State, support: ClientView) -> Variables:
        """S0's rule: every personal part that was trained is tried with the shared leaves; the lowest support loss wins.

        All are tried with the same key, hence on the same batches, and the winner is adapted just as it was tried.
        """
        shared = masks.split(state.model, personal_model)[1]
        scores = map_lanes(lambda part: adapt(key, masks.merge(part, shared), support)[1], state.personal)
        # Not a number is the least of all to `argmin`, but a part that diverged must not be the choice of everybody.
        best = jnp.argmin(jnp.where(state.seen & ~jnp.isnan(scores), scores, jnp.inf))
        part = jax.tree.map(
            lambda pool, initial: jnp.where(jnp.any(state.seen), pool[best], initial),
            state.personal,
            masks.split(state.model, personal_model)[0],
        )
        return adapt(key, masks.merge(part, shared), support)[0]

    personal_model = with_rates(own, own_rates)
    return federated(
        init=init,
        client=client,
        personalize=lambda key, received, support: adapt(key, received.model, support)[0],
        predict=task.predict,
        personal=personal_model,
        trainable=trainable_model,
        new_client=new_client if any(jax.tree.leaves(personal_model)) else None,
        **options,
    )


def fedmeta_per(task: Task, *, personal: masks.MaskSpec = "head", **options: Any) -> Algorithm:
    """FedMeta-Per: FedMeta whose last layers stay with their client (S0). `options` are those of `fedmeta`."""
    return fedmeta(task, personal=personal, **options)
