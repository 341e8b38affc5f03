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
from fedjax_meta.data.federated import CHUNK, Batches, ClientData, ClientView
from fedjax_meta.engine import map_lanes
from fedjax_meta.task import Key, Task, Variables

Draw = Callable[[Key, ClientData, Any], tuple[Any, Any]]
"""`(key, data, step) -> (support, query)`: what the meta-step of that number, of one client, adapts on and is judged by.

The key is the same in all steps of a round. Support and query are whatever the estimator takes: `Batches`, for the support
also `meta.WithHessian`, for Reptile's query `None`.
"""


def query_batches(data: ClientData, batch_size: int | None) -> Batches:
    """The whole query view as one step; with a batch size, every batch of it counts alike, as in S0's code."""
    view = data["query"]
    return view.in_chunks().as_one_step() if batch_size is None else view.in_order(batch_size).as_one_step(alike=True)


def _keyed(key: Key, support: Any, query: Any) -> tuple[Any, Any]:
    """Support and query with a key of its own for every batch."""
    support_key, hessian_key, query_key = jax.random.split(key, 3)
    if isinstance(support, meta.WithHessian):
        support = meta.WithHessian(support.support.keyed(support_key), support.hessian.keyed(hessian_key))
    else:
        support = support.keyed(support_key)
    return support, None if query is None else query.keyed(query_key)


def _pulled(loss: meta.ScalarLoss, anchor: Any, weight: Any) -> meta.ScalarLoss:
    """The loss plus `weight / 2 ||phi - anchor||^2`."""

    def regularised(phi: Any, batch: Any) -> jax.Array:
        value = loss(phi, batch)
        distance = optax.tree.norm(optax.tree.sub(phi, anchor), squared=True)
        return value + (weight / 2 * distance).astype(value.dtype)

    return regularised


def fedmeta(
    task: Task,
    *,
    inner_lr: Any = 0.001,
    outer_lr: Any = 0.001,
    learned_rates: bool = False,
    estimator: Callable[[meta.Inner], meta.Estimator] = meta.exact,
    outer_optimizer: Callable[[Any], optax.GradientTransformation] = optax.adam,
    outer_slots: str = "fresh",
    outer_at: str = "client",
    batch_size: int | None = 32,
    inner_steps: int = 1,
    meta_steps: int = 1,
    draw: Draw | None = None,
    test_prox_weight: Any = None,
    adapts: masks.MaskSpec = "all",
    personal: masks.MaskSpec = "none",
    personal_rates: masks.MaskSpec | None = None,
    score: str = "online",
    weighting: str = "query",
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """Federated meta-learning with any meta-gradient and any personal leaves.

    Every client adapts to its support set before it predicts. One that never took part begins with the server's model and,
    where leaves are personal, with those of the trained client with which its own adaptation does best (see `score`).

    Args:
      task: what is learned.
      inner_lr: alpha, the rate of adaptation; with `learned_rates` its initial value for every parameter.
      outer_lr: beta, the rate of the meta-update.
      learned_rates: learn one inner rate a parameter (Meta-SGD); else MAML.
      estimator: how the meta-gradient is found, a function of the inner rule: `meta.exact`, `meta.first_order`, ...
      outer_optimizer: `outer_lr -> optax transformation`, started fresh in every round; its step is the meta-update.
      outer_slots: "kept" lets a client keep the outer optimiser's state (Adam's moments) of its personal leaves from round to
        round, where S0 starts it afresh; with "averaged" that of the shared leaves, learned rates among them, is averaged over
        the cohort and goes on too (FedAvg-Adam).
      outer_at: "client" (S0: the client steps and sends its model) or "server": the client sends the gradient, which the
        `server_optimizer` descends, `outer_optimizer(outer_lr)` when not given; its state lasts from round to round. Personal
        leaves still step at the client.
      batch_size: adaptation goes through batches of this size; `None` takes full-batch steps.
      inner_steps: passes over the support view, or full-batch steps when `batch_size` is `None`.
      meta_steps: K, meta-updates of a client in a round (Per-FedAvg).
      draw: what a meta-step trains on, in place of the views "support" and "query"; `batch_size` and `inner_steps` then speak
        of tests alone. See `Draw`.
      test_prox_weight: pulls a test client's adaptation back to where it starts, by `test_prox_weight / 2 ||phi - theta||^2`
        in its loss (iMAML); nothing does when not given.
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
    checks.count("meta_steps", meta_steps)
    if test_prox_weight is not None:
        checks.not_negative("test_prox_weight", test_prox_weight)
    checks.one_of("outer_at", outer_at, ("client", "server"))
    if outer_at == "server" and meta_steps > 1:
        raise ValueError(
            f"meta_steps={meta_steps} needs outer_at='client': a client that sends its gradient takes one meta-step"
        )
    checks.one_of("outer_slots", outer_slots, ("fresh", "kept", "averaged"))
    if outer_at == "server" and options.get("server_optimizer") is None:
        # Not the default of `federated`: a step of rate 1 replaces a model by an average of models, and these are gradients.
        options["server_optimizer"] = outer_optimizer(outer_lr)
    if outer_slots == "averaged" and outer_at == "server":
        raise ValueError("outer_slots='averaged' needs outer_at='client': at a server, server_optimizer has the state")
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
        return support.full(inner_steps) if batch_size is None else support.epochs(key, batch_size, inner_steps)

    def views(key: Key, data: ClientData, step: Any) -> tuple[Any, Any]:
        return inner_batches(jax.random.fold_in(key, step), data["support"]), query_batches(data, batch_size)

    draws = views if draw is None else draw
    optimizer = outer_optimizer(outer_lr)

    def outer_step(gradient: Any, slots: Any, parameters: Any) -> tuple[Any, Any]:
        if outer_slots == "fresh":
            return optimizer.update(gradient, slots, parameters)
        both = [masks.split(tree, personal_model) for tree in (gradient, parameters)]
        own, own_slots = optimizer.update(both[0][0], slots[0], both[1][0])
        shared, shared_slots = optimizer.update(both[0][1], slots[1], both[1][1])
        return masks.merge(own, shared), (own_slots, shared_slots)

    def fresh_slots(model: Any) -> Any:
        parameters = masks.split(model, trainable_model)[0]
        if outer_slots == "fresh":
            return optimizer.init(parameters)
        own, shared = masks.split(parameters, personal_model)
        return optimizer.init(own), optimizer.init(shared)

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        model = received.model
        draw_key, loss_key, order_key, buffer_key = jax.random.split(key, 4)
        parameters, buffers = masks.split(model, trainable_model)
        loss = local.parameter_loss(task, variables_of(buffers))
        slots = fresh_slots(model)
        if outer_slots != "fresh":
            slots = received.memory, received.extra if outer_slots == "averaged" else slots[1]

        def meta_step(t: Any, carry: Any) -> Any:
            parameters, slots, total, _ = carry
            support, query = draws(draw_key, data, t)
            result = meta_gradient(loss, parameters, *_keyed(jax.random.fold_in(loss_key, t), support, query))
            updates, slots = outer_step(result.gradient, slots, parameters)
            # Reptile may go without a query, and is then judged by its support loss.
            losses = {
                "loss": result.info.support_loss if query is None else result.info.query_loss,
                "support_loss": result.info.support_loss,
            }
            total = jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, losses)
            return optax.apply_updates(parameters, updates), slots, total, (result.adapted, result.gradient)

        nothing = {"loss": jnp.zeros(()), "support_loss": jnp.zeros(())}
        carry = (parameters, slots, nothing, (variables_of(parameters), parameters))
        carry = meta_step(0, carry) if meta_steps == 1 else jax.lax.fori_loop(0, meta_steps, meta_step, carry)
        moved, slots, total, (adapted, sent) = carry
        trained = masks.merge(moved, buffers)
        if has_buffers:
            # Running statistics stood still while the meta-gradient was taken. They are for predictions, which the adapted
            # model makes of samples it has not seen: one pass of it over the query view moves them on.
            batches = data["query"].epochs(order_key, batch_size or CHUNK)
            moved_on, _ = local.train(
                buffer_key, task.loss, masks.merge(adapted, variables_of(buffers)), batches, optax.set_to_zero(), trainable
            )
            variables = masks.merge(*(masks.split(v, trainable)[i] for i, v in enumerate((variables_of(trained), moved_on))))
            trained = trained._replace(params=variables) if learned_rates else variables
        gradient = masks.merge(sent, buffers) if outer_at == "server" else None
        metrics = jax.tree.map(lambda line: line / meta_steps, total)
        return Trained(
            trained,
            client_weight(weighting, data),
            metrics,
            memory=() if outer_slots == "fresh" else slots[0],
            pseudo_gradient=gradient,
            # A mean of step counts is no integer: it is taken in floating point, and rounded at the server.
            statistics=jax.tree.map(lambda leaf: leaf.astype(float), slots[1]) if outer_slots == "averaged" else (),
        )

    def average_slots(state: State, mean: Any, weight: Any, _: int) -> Any:
        def like(old: jax.Array, new: jax.Array) -> jax.Array:
            rounded = new if jnp.issubdtype(old.dtype, jnp.inexact) else jnp.round(new)
            return jnp.where(weight > 0, rounded.astype(old.dtype), old)

        return jax.tree.map(like, state.extra, mean)

    def adapt(key: Key, model: Any, support: ClientView) -> tuple[Variables, jax.Array]:
        """(adapted variables, score); what a test client does, and what a new client tries on every personal part."""
        parameters, buffers = masks.split(model, trainable_model)
        loss, (order_key, key, score_key) = local.parameter_loss(task, variables_of(buffers)), jax.random.split(key, 3)
        pulled = loss if test_prox_weight is None else _pulled(loss, variables_of(parameters), test_prox_weight)
        adapted, online = meta.adapt(pulled, parameters, inner_batches(order_key, support).keyed(key), inner)
        if score == "fitted":
            fitted = support.in_chunks(batch_size or CHUNK).as_one_step().keyed(score_key)
            online = fitted.mean(lambda pair: loss(adapted, pair), 0)
        return masks.merge(adapted, variables_of(buffers)), online

    def new_client(key: Key, state: State, support: ClientView) -> Variables:
        """S0's rule: every personal part that was trained is tried with the shared leaves; the lowest support loss wins.

        All are tried with the same key, hence on the same batches, and the winner is adapted just as it was tried.
        """
        shared = masks.split(state.model, personal_model)[1]
        tried = lambda part: adapt(key, masks.merge(part, shared), support)[1]  # noqa: E731
        scores = map_lanes(tried, state.personal, lanes=options.get("lanes"))
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
        init_memory=lambda key, model, population: () if outer_slots == "fresh" else fresh_slots(model)[0],
        init_extra=lambda model, data: fresh_slots(model)[1] if outer_slots == "averaged" else (),
        update_extra=average_slots if outer_slots == "averaged" else None,
        **options,
    )


def fedmeta_per(task: Task, *, personal: masks.MaskSpec = "head", **options: Any) -> Algorithm:
    """FedMeta-Per: FedMeta whose last layers stay with their client (S0). `options` are those of `fedmeta`.

    A client that never took part tries the last layers of every client that did, each adapted to its support set together with
    the shared layers, and keeps the adapted model that does best there (see `score`).
    """
    return fedmeta(task, personal=personal, **options)


def fedmeta_server(
    task: Task,
    *,
    outer_lr: Any = 0.001,
    outer_optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    cohort_size: int = 5,
    **options: Any,
) -> Algorithm:
    """FedMeta as S1 writes it: clients send gradients, and the server takes theta - beta sum_i g_i, a sum over its cohort.

    A client that never took part adapts the server's model to its support set, as every client does before it predicts; where
    leaves are personal, see `fedmeta`.

    `outer_optimizer(outer_lr)` lives at the server, so that its state lasts from round to round; other options are those of
    `fedmeta`, whose mean over the cohort is turned into the sum.
    """
    server = optax.chain(optax.scale(cohort_size), outer_optimizer(outer_lr))
    return fedmeta(
        task,
        **{"weighting": "uniform"} | options,
        outer_at="server",
        outer_lr=outer_lr,
        outer_optimizer=outer_optimizer,
        server_optimizer=server,
        cohort_size=cohort_size,
    )
