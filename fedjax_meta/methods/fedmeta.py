"""FedMeta and FedMeta-Per: clients send meta-gradients, or the models that these lead to, and may keep personal layers.

Where FedAvg averages models that are good on average, FedMeta averages starting points that adapt well: each client adapts on its
support set and steps along the gradient of its query loss after adaptation. FedMeta-Per keeps some leaves, and their inner
learning rates, with their client.

FedMeta: Chen, Luo, Dong, Li, He, arXiv 1802.07876. FedMeta-Per: Nguyen, Cao, "Meta-learning and personalization layer in
federated learning", equations and algorithms of its §3. MAML: arXiv 1703.03400; Meta-SGD: arXiv 1707.09835.

| paper | here | shape |
|---|---|---|
| w = w_B + w_P | model, leaves outside and inside `personal` | |
| alpha | `inner_lr`, or `MetaSGD.rates` when `learned_rates` | scalar or like w |
| beta | `outer_lr` | scalar |
| A_i, B_i | views "support", "query" | |
| n_i = size of B_i | `weighting="query"` | `[C]` |

Differs from the paper's text, to agree with the code behind its numbers: adaptation is one epoch of batches (the equations have
one full-batch step: `batch_size=None`), and the outer step is one step of a fresh Adam (the text has SGD:
`outer_optimizer=optax.sgd`).
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_meta import checks, local, masks, meta
from fedjax_meta.algorithm import State
from fedjax_meta.builders import described, method_builder, variant
from fedjax_meta.contract import Method, Population, Received, Reduction, Trained, no_extra
from fedjax_meta.data import CHUNK, Batches, ClientData, ClientView
from fedjax_meta.engine import map_clients
from fedjax_meta.keys import tagged
from fedjax_meta.multistep import EveryStep, multi_step
from fedjax_meta.task import Task
from fedjax_meta.types import Key, Mask, Params, PyTree, Rate, Scalar, Updates, Variables

Draw = Callable[[Key, ClientData, Any], tuple[Any, Any]]
"""`(key, data, step) -> (support, query)`: what one meta-step of a client adapts on and is judged by.

The key is the same in all steps of a round. Support and query are whatever the estimator takes: `Batches`, for the support also
`meta.WithHessian`, for Reptile's query `None`.
"""


def query_batches(data: ClientData, batch_size: int | None) -> Batches:
    """The whole query view as one step; with a batch size, all its batches count equally, as in the FedMeta-Per code."""
    view = data["query"]
    return view.in_chunks().as_one_step() if batch_size is None else view.in_order(batch_size).as_one_step(equal_weights=True)


class _Layout(NamedTuple):
    """How the model is laid out: the task's variables and, where they are learned, the rates of the trainable ones."""

    learned_rates: bool
    trainable_variables: Mask
    own: Mask
    own_rates: Mask

    def model(self, variables: PyTree, rates: PyTree) -> PyTree:
        if not self.learned_rates:
            return variables
        return meta.MetaSGD(variables, masks.split(rates, self.trainable_variables)[0])

    def variables(self, model: PyTree) -> Variables:
        return model.params if self.learned_rates else model

    @property
    def trainable(self) -> Mask:
        return self.model(self.trainable_variables, self.trainable_variables)

    @property
    def personal(self) -> Mask:
        return self.model(self.own, self.own_rates)


class _Outer(NamedTuple):
    """The clients' outer optimiser, whose slots may outlive a round: see `outer_slots` of `fedmeta`."""

    optimizer: optax.GradientTransformation
    slots: str
    personal: Mask

    def init(self, parameters: Params) -> PyTree:
        if self.slots == "fresh":
            return self.optimizer.init(parameters)
        own, shared = masks.split(parameters, self.personal)
        return self.optimizer.init(own), self.optimizer.init(shared)

    def step(self, gradient: Updates, slots: PyTree, parameters: Params) -> tuple[Updates, PyTree]:
        if self.slots == "fresh":
            return self.optimizer.update(gradient, slots, parameters)
        (own_gradient, gradient), (own, shared) = (masks.split(tree, self.personal) for tree in (gradient, parameters))
        own, own_slots = self.optimizer.update(own_gradient, slots[0], own)
        shared, shared_slots = self.optimizer.update(gradient, slots[1], shared)
        return masks.merge(own, shared), (own_slots, shared_slots)


def _checked(result: Any, parameters: Params) -> meta.MetaGradient:
    """What an estimator returned.

    Raises:
      ValueError: that is no `MetaGradient`, or its parts have another form than they should.
    """
    if not isinstance(result, meta.MetaGradient):
        raise ValueError(f"an estimator must return fm.meta.MetaGradient(adapted, gradient, info), not {checks.shown(result)}")
    odd = checks.mismatch(result.gradient, parameters)
    if odd is not None:
        raise ValueError(f"the gradient of an estimator must be like the parameters: {odd}")
    missing = [name for name in ("support_loss", "query_loss") if not hasattr(result.info, name)]
    if missing or not hasattr(result.info, "_asdict"):
        raise ValueError(
            f"the info of an estimator must be fm.meta.Info or a named tuple with its fields, not {checks.shown(result.info)}"
        )
    return result


def readings(info: Any, queried: bool) -> dict[str, jax.Array]:
    """What a meta-step reports: its losses, and whatever else an estimator's `info` has, e.g. how its solver fared.

    Reptile may run without a query set, and then reports its support loss as the loss.
    """
    losses = {"loss": info.query_loss if queried else info.support_loss, "support_loss": info.support_loss}
    others = {name: value for name, value in info._asdict().items() if name not in meta.Info._fields}
    return {name: jnp.asarray(value, float) for name, value in (losses | others).items()}


@dataclasses.dataclass(frozen=True, eq=False)
class _FedMeta:
    """The rules of one FedMeta; fields that are not explained here are arguments of `fedmeta`.

    Attributes:
      inner, tested: how clients adapt in a round, and in a test.
    """

    task: Task
    layout: _Layout
    inner: meta.InnerOptimizer
    tested: meta.InnerOptimizer
    meta_gradient: meta.Estimator
    outer: _Outer
    outer_at: str
    draw: Draw | None
    batch_size: int | None
    inner_steps: int
    test_steps: int
    meta_steps: int
    test_prox_weight: Rate | None
    score: str
    step_weights: Callable[[Scalar, int], jax.Array] | None

    def fresh_slots(self, model: PyTree) -> PyTree:
        return self.outer.init(masks.split(model, self.layout.trainable)[0])

    def inner_batches(self, key: Key, support: ClientView, steps: int) -> Batches:
        return support.full(steps) if self.batch_size is None else support.epochs(key, self.batch_size, steps)

    def draw_batches(self, key: Key, data: ClientData, step: Any) -> tuple[Any, Any]:
        """Support and query of one meta-step, with a key of its own for each batch."""
        order = tagged(key, "order")
        if self.draw is None:
            support: Any = self.inner_batches(jax.random.fold_in(order, step), data["support"], self.inner_steps)
            query: Any = query_batches(data, self.batch_size)
        else:
            support, query = self.draw(order, data, step)
        keys = [tagged(key, part, step) for part in ("support", "hessian", "query")]
        if isinstance(support, meta.WithHessian):
            support = meta.WithHessian(support.support.keyed(keys[0]), support.hessian.keyed(keys[1]))
        else:
            support = support.keyed(keys[0])
        return support, None if query is None else query.keyed(keys[2])

    def client(self, key: Key, received: Received, data: ClientData) -> Trained:
        """K meta-steps of one client."""
        layout, model = self.layout, received.model
        parameters, buffers = masks.split(model, layout.trainable)
        loss = local.parameter_loss(self.task, layout.variables(buffers))
        slots = self.fresh_slots(model)
        if self.outer.slots != "fresh":
            slots = received.memory, received.extra if self.outer.slots == "averaged" else slots[1]

        def meta_step(t: Any, parameters: PyTree, slots: PyTree) -> Any:
            support, query = self.draw_batches(key, data, t)
            if self.step_weights is not None:
                query = EveryStep(query, self.step_weights(received.round, self.inner_steps))
            result = _checked(self.meta_gradient(loss, parameters, support, query), parameters)
            updates, slots = self.outer.step(result.gradient, slots, parameters)
            moved = optax.apply_updates(parameters, updates)
            return moved, slots, readings(result.info, query is not None), (result.adapted, result.gradient)

        # Jitted by itself, a step is traced once for both its shapes and the loop.
        step = jax.jit(meta_step, inline=True)

        def next_step(t: Any, carry: Any) -> Any:
            parameters, slots, total, _ = carry
            parameters, slots, read, last = step(jnp.asarray(t, jnp.int32), parameters, slots)
            return parameters, slots, jax.tree.map(jnp.add, total, read), last

        if self.meta_steps == 1:
            # One step needs no loop, and XLA then fuses it with what surrounds it.
            moved, slots, total, (adapted, gradient) = meta_step(0, parameters, slots)
        else:
            read, last = optax.tree.zeros_like(jax.eval_shape(step, np.int32(0), parameters, slots)[2:])
            carry = (parameters, slots, read, last)
            moved, slots, total, (adapted, gradient) = jax.lax.fori_loop(0, self.meta_steps, next_step, carry)
        trained = masks.merge(moved, self.moved_buffers(key, adapted, buffers, data))
        return Trained(
            trained,
            jax.tree.map(lambda line: line / self.meta_steps, total),
            memory=() if self.outer.slots == "fresh" else slots[0],
            pseudo_gradient=masks.merge(gradient, buffers) if self.outer_at == "server" else None,
            # A mean of step counts is no integer: it is taken in floating point, and rounded at the server.
            statistics=jax.tree.map(lambda leaf: leaf.astype(float), slots[1]) if self.outer.slots == "averaged" else (),
        )

    def moved_buffers(self, key: Key, adapted: Params, buffers: PyTree, data: ClientData) -> PyTree:
        """The model's buffers after a round.

        Running statistics do not move while the meta-gradient is taken. They serve predictions, which the adapted model makes of
        samples that it has not seen: one pass of it over the query view moves them.
        """
        layout, task = self.layout, self.task
        if all(jax.tree.leaves(layout.trainable_variables)):
            return buffers
        held = layout.variables(buffers)
        batches = data["query"].epochs(tagged(key, "buffer order"), self.batch_size or CHUNK)
        start, no_step = masks.merge(adapted, held), optax.set_to_zero()
        moved, _ = local.train(tagged(key, "buffers"), task.loss, start, batches, no_step, layout.trainable_variables)
        moved = masks.split(moved, layout.trainable_variables)[1]
        return buffers._replace(params=moved) if layout.learned_rates else moved

    def adapt(self, key: Key, model: PyTree, support: ClientView) -> tuple[Variables, jax.Array]:
        """(adapted variables, score): what a test client does, and what a new client tries with each personal part."""
        layout = self.layout
        parameters, buffers = masks.split(model, layout.trainable)
        held = layout.variables(buffers)
        loss, start = local.parameter_loss(self.task, held), layout.variables(parameters)

        def pulled(phi: Params, sample: Any) -> jax.Array:
            value = loss(phi, sample)
            if self.test_prox_weight is None:
                return value
            return value + local.proximal_term(phi, start, self.test_prox_weight).astype(value.dtype)

        batches = self.inner_batches(tagged(key, "order"), support, self.test_steps).keyed(tagged(key, "support"))
        adapted, score = meta.adapt(pulled, parameters, batches, self.tested)
        if self.score == "fitted":
            fitted = support.in_chunks(self.batch_size).as_one_step().keyed(tagged(key, "score"))
            score = fitted.mean(lambda pair: loss(adapted, pair), 0)
        return masks.merge(adapted, held), score

    def personalize(self, key: Key, received: Received, support: ClientView) -> Variables:
        return self.adapt(key, received.model, support)[0]

    def new_client(self, key: Key, population: Population, support: ClientView) -> Variables:
        """Tries every trained personal part with the shared leaves; the part of the lowest support loss wins (FedMeta-Per).

        All are tried with the same key, hence on the same batches, and the winner is adapted as it was tried.
        """
        initial, shared = masks.split(population.model, self.layout.personal)

        def tried(part: PyTree) -> jax.Array:
            return self.adapt(key, masks.merge(part, shared), support)[1]

        scores = map_clients(tried, population.personal, lanes=population.lanes)
        # `argmin` would choose NaN first, but a part that diverged must not be chosen, nor one that was never trained.
        usable = population.seen & jnp.isfinite(scores)
        best = jnp.argmin(jnp.where(usable, scores, jnp.inf))
        part = jax.tree.map(lambda pool, start: jnp.where(usable[best], pool[best], start), population.personal, initial)
        return self.adapt(key, masks.merge(part, shared), support)[0]


def _average_slots(state: State, average: PyTree, weight: Any, num_clients: int) -> PyTree:
    """The averaged slots of the outer optimiser; integers, which count steps, are rounded."""
    del num_clients

    def like(old: jax.Array, new: jax.Array) -> jax.Array:
        rounded = new if jnp.issubdtype(old.dtype, jnp.inexact) else jnp.round(new)
        return jnp.where(weight > 0, rounded.astype(old.dtype), old)

    return jax.tree.map(like, state.extra, average)


@described("MAML over clients", "Chen et al. 1802.07876")
@method_builder
def fedmeta(  # over 80 lines: half of them explain the arguments of the whole meta family
    task: Task,
    *,
    inner_lr: Rate = 0.001,
    outer_lr: Rate = 0.001,
    learned_rates: bool = False,
    rates_per: str = "entry",
    inner_optimizer: Callable[[Any], optax.GradientTransformation] | None = None,
    estimator: Callable[[meta.InnerOptimizer], meta.Estimator] = meta.exact,
    step_weights: Callable[[Scalar, int], jax.Array] | None = None,
    outer_optimizer: Callable[[Any], optax.GradientTransformation] = optax.adam,
    outer_slots: str = "fresh",
    outer_at: str = "client",
    server_sum: bool = False,
    batch_size: int | None = 32,
    inner_steps: int = 1,
    meta_steps: int = 1,
    draw: Draw | None = None,
    test_lr: Rate | None = None,
    test_steps: int | None = None,
    test_prox_weight: Rate | None = None,
    adapts: masks.MaskSpec = "all",
    personal: masks.MaskSpec = "none",
    personal_rates: masks.MaskSpec | None = None,
    score: str = "online",
    weighting: str = "query",
) -> Method:
    """Federated meta-learning with any meta-gradient and any personal leaves.

    Every client adapts to its support set before it predicts. One that is none of the N starts from the server's model and, where
    leaves are personal, from those of the trained client with which its own adaptation does best (see `score`); where it has no
    finite loss with any of them, from the initial ones. So does one of the N that no round has asked yet.

    Args:
      task: what is learned.
      inner_lr: alpha, the rate of adaptation; with `learned_rates` its initial value for every parameter.
      outer_lr: beta, the rate of the meta-update.
      learned_rates: learn one inner rate per parameter (Meta-SGD); else MAML.
      rates_per: what a learned rate belongs to: an "entry" of a leaf (Meta-SGD), or a whole leaf in one "step" (MAML++).
      inner_optimizer: factory `inner_lr -> optax.GradientTransformation` of adaptation, started afresh each time and
        differentiated through; gradient descent when not given.
      estimator: how the meta-gradient is found, a function of the inner optimiser: `meta.exact`, `meta.first_order`, ...
      step_weights: `(round, S) -> [S]`, how much the query counts after each inner step, for `estimator=multistep.multi_step`.
      outer_optimizer: factory `outer_lr -> optax.GradientTransformation`, started afresh in each round; its step is the
        meta-update.
      outer_slots: "kept" lets a client keep the outer optimiser's state (Adam's moments) of its personal leaves from round to
        round, where the FedMeta-Per code starts it afresh; with "averaged", the state of the shared leaves, learned rates among
        them, is averaged over the cohort and goes on too (FedAvg-Adam). Averaged second moments may turn negative under `noise`
        or `sparsify`; then a client's model is not finite, and it is left out.
      outer_at: "client" (FedMeta-Per: the client steps and sends its model) or "server": the client sends the gradient, and
        `outer_optimizer(outer_lr)` at the server descends it; its state lasts from round to round. The federation's
        `server_optimizer`, if given, replaces it. Personal leaves still step at the client, by `outer_optimizer(outer_lr)`.
      server_sum: with `outer_at="server"`, add the clients' gradients up instead of taking their mean.
      batch_size: adaptation goes through batches of this size; `None` takes full-batch steps, in which batch norm has the
        statistics of each chunk of the view, see `ClientView.full`.
      inner_steps: passes over the support view, or full-batch steps when `batch_size` is `None`.
      meta_steps: K, meta-updates of a client in a round (Per-FedAvg).
      draw: what a meta-step trains on, in place of the views "support" and "query"; `batch_size` and `inner_steps` then apply
        to tests only. See `Draw`.
      test_lr: the rate of adaptation in a test; `inner_lr` when not given.
      test_steps: passes or steps in a test; `inner_steps` when not given.
      test_prox_weight: pulls a test client's adaptation back to where it starts, by `test_prox_weight / 2 ||phi - theta||^2` in
        its loss (iMAML); no pull when not given.
      adapts: mask of the leaves that adaptation moves ("head" is ANIL).
      personal: mask of the leaves that stay with their client: "none" is FedMeta, "head" FedMeta-Per.
      personal_rates: mask of the learned rates that stay; those of the personal leaves when not given.
      score: how a new client chooses among the personal parts of the others: by the mean loss of its adaptation's steps, each
        before its update and with the pull of `test_prox_weight` ("online"), or by the loss after it ("fitted"). The
        FedMeta-Per code has the first; of several passes it takes the mean over the last alone.
      weighting: as in `fedavg`.

    Raises:
      ValueError: an option out of range, options that exclude each other.
    """
    checks.count("meta_steps", meta_steps)
    if draw is not None:
        example = "lambda key, data, step: (data['support'].full(1), data['query'].full(1))"
        checks.function("draw", draw, ("key", "data", "step"), example)
    if test_lr is not None:
        checks.not_negative("test_lr", test_lr)
        if learned_rates:
            raise ValueError(
                "test_lr and learned_rates=True exclude each other: clients test with the rates that were learned"
            )
    if test_prox_weight is not None:
        checks.not_negative("test_prox_weight", test_prox_weight)
    checks.one_of("outer_at", outer_at, ("client", "server"))
    checks.one_of("outer_slots", outer_slots, ("fresh", "kept", "averaged"))
    checks.one_of("score", score, ("online", "fitted"))
    _check_estimator(estimator)
    _check_combination(outer_at, outer_slots, meta_steps, server_sum, learned_rates, personal_rates, inner_optimizer)
    _check_steps(rates_per, learned_rates, step_weights, batch_size, estimator)
    trainable = task.trainable(masks.variables_shape(task))
    own = masks.resolve(personal, task, name="personal")
    own_rates = own if personal_rates is None else masks.resolve(personal_rates, task, name="personal_rates")
    layout = _Layout(learned_rates, trainable, own, own_rates)
    adapted_leaves = masks.split(masks.resolve(adapts, task, name="adapts"), trainable)[0]

    def adapting(rate: Rate) -> meta.InnerOptimizer:
        if learned_rates:
            return meta.learned_sgd(mask=adapted_leaves, per_step=rates_per == "step")
        if inner_optimizer is None:
            return meta.sgd(rate, mask=adapted_leaves)
        return meta.optimizer(inner_optimizer, rate, mask=adapted_leaves)

    inner = adapting(inner_lr)
    outer = _in_single_precision(outer_optimizer(outer_lr))
    rules = _FedMeta(
        task=task,
        layout=layout,
        inner=inner,
        tested=inner if test_lr is None else adapting(test_lr),
        meta_gradient=estimator(inner),
        outer=_Outer(outer, outer_slots, layout.personal),
        outer_at=outer_at,
        draw=draw,
        batch_size=batch_size,
        inner_steps=inner_steps,
        test_steps=inner_steps if test_steps is None else test_steps,
        meta_steps=meta_steps,
        test_prox_weight=test_prox_weight,
        score=score,
        step_weights=step_weights,
    )

    def init(key: Key) -> PyTree:
        variables = task.init(key)
        shape = (inner_steps,) if rates_per == "step" else None
        return layout.model(variables, jax.tree.map(lambda leaf: jnp.full_like(leaf, inner_lr, shape=shape), variables))

    def init_memory(key: Key, model: PyTree, num_clients: int) -> PyTree:
        del key, num_clients
        return () if outer_slots == "fresh" else rules.fresh_slots(model)[0]

    averaged = outer_slots == "averaged"
    return Method(
        init=init,
        client=rules.client,
        personalize=rules.personalize,
        predict=task.predict,
        roles=masks.roles(layout.personal, layout.trainable),
        weighting=weighting,
        server_optimizer=outer if outer_at == "server" else None,
        sums_pseudo_gradients=server_sum,
        init_memory=init_memory,
        init_extra=(lambda model, data: rules.fresh_slots(model)[1]) if averaged else no_extra,
        update_extra=_average_slots if averaged else None,
        statistics_renew_extra=averaged,
        new_client=rules.new_client if any(jax.tree.leaves(layout.personal)) else None,
        new_client_reads="personal",
    )


def _in_single_precision(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimiser with its arithmetic and slots in single precision at least; Adam's epsilon, 1e-8, is 0 in float16."""

    def wide(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree)

    def update(gradient: Updates, slots: PyTree, parameters: Params) -> tuple[Updates, PyTree]:
        return optimizer.update(wide(gradient), slots, wide(parameters))

    return optax.GradientTransformation(lambda parameters: optimizer.init(wide(parameters)), update)


def _check_estimator(estimator: Any) -> None:
    """Raises `ValueError` unless `estimator` is a function of the inner optimiser."""
    takes = list(inspect.signature(estimator).parameters) if callable(estimator) else []
    if not callable(estimator) or takes[:2] == ["loss", "meta"]:
        raise ValueError(
            "estimator must be a function of the inner optimiser, e.g. estimator=fm.meta.exact or partial(fm.meta.hessian_free, "
            "delta=1e-2), not its result or its name"
        )


def _check_steps(rates_per: str, learned_rates: bool, step_weights: Any, batch_size: int | None, estimator: Any) -> None:
    checks.one_of("rates_per", rates_per, ("entry", "step"))
    if rates_per == "step" and not learned_rates:
        raise ValueError("rates_per='step' needs learned_rates=True: there are no rates to learn otherwise")
    if batch_size is not None and (rates_per == "step" or step_weights is not None):
        raise ValueError(
            f"batch_size={batch_size} gives clients unlike numbers of steps: rates and weights of steps need None"
        )
    if (step_weights is None) != (estimator is not multi_step):
        raise ValueError("step_weights and estimator=multistep.multi_step need each other")
    if step_weights is not None:
        checks.function("step_weights", step_weights, ("round", "steps"), "multistep.annealed(100)")


def _check_combination(
    outer_at: str,
    outer_slots: str,
    meta_steps: int,
    server_sum: bool,
    learned_rates: bool,
    personal_rates: masks.MaskSpec | None,
    inner_optimizer: Any,
) -> None:
    if outer_at == "server" and meta_steps > 1:
        raise ValueError(
            f"meta_steps={meta_steps} needs outer_at='client': a client that sends its gradient takes one meta-step"
        )
    if outer_slots == "averaged" and outer_at == "server":
        raise ValueError("outer_slots='averaged' needs outer_at='client': at the server, the optimiser's state lasts anyway")
    if server_sum and outer_at == "client":
        raise ValueError("server_sum=True needs outer_at='server': clients that step themselves send models, not gradients")
    if personal_rates is not None and not learned_rates:
        raise ValueError("personal_rates needs learned_rates=True: there are no rates to keep otherwise")
    if inner_optimizer is not None and learned_rates:
        raise ValueError("inner_optimizer and learned_rates=True exclude each other: learned rates are those of plain SGD")


@described("Meta-SGD over clients")
@variant(fedmeta, learned_rates=True)
def fedmeta_metasgd(task: Task) -> Method:
    """FedMeta with Meta-SGD: one inner rate per parameter is learned with the model."""


@described("first-order MAML over clients")
@variant(fedmeta, estimator=meta.first_order)
def fedmeta_fomaml(task: Task) -> Method:
    """FedMeta with the first-order gradient (FOMAML), which ignores how adaptation depends on the start."""


@described("FedMeta, steps at the server")
@variant(fedmeta, outer_at="server", server_sum=True, outer_optimizer=optax.sgd, weighting="uniform")
def fedmeta_server(task: Task) -> Method:
    """FedMeta as Nguyen et al., "Improving federated learning by meta-learning", write it: theta - beta sum_i g_i at the server.

    The sum is over the cohort, and `outer_optimizer(outer_lr)` lives at the server.
    """


@described("FedMeta with own layers", "Nguyen, Cao (FedMeta-Per)")
@variant(fedmeta, personal="head")
def fedmeta_per(task: Task) -> Method:
    """FedMeta-Per: FedMeta whose last layers stay with their client (Nguyen and Cao).

    A client that is none of the N tries the last layers of every client that took part, each adapted to its support set together
    with the shared layers, and keeps the adapted model that does best there (see `score`).
    """


@described("the same with Meta-SGD")
@variant(fedmeta_per, learned_rates=True)
def fedmeta_per_metasgd(task: Task) -> Method:
    """FedMeta-Per with Meta-SGD; the inner rates of the personal layers stay with their client too."""


REDUCES_TO = (
    Reduction("FedMeta-Per with nothing personal is FedMeta", "fedmeta_per", {"personal": "none"}, "fedmeta", {}),
    Reduction(
        "a gradient step at the server is the mean of gradient steps at the clients",
        "fedmeta",
        {"outer_at": "server", "outer_optimizer": optax.sgd},
        "fedmeta",
        {"outer_optimizer": optax.sgd},
    ),
    Reduction(
        "without adaptation the first order is exact", "fedmeta_fomaml", {"inner_lr": 0.0}, "fedmeta", {"inner_lr": 0.0}
    ),
    Reduction(
        "an inner optimiser of plain SGD is MAML",
        "fedmeta",
        {"inner_optimizer": optax.sgd, "inner_lr": 0.1},
        "fedmeta",
        {"inner_lr": 0.1},
    ),
)
