"""APFL: FedAvg for the global model, and beside it a personal one that is trained as part of a mixture of both.

Deng, Kamani, Mahdavi: "Adaptive personalized federated learning", arXiv 2003.13461, Algorithm 1.

| paper | here | shape |
|---|---|---|
| w_i, v_i | client's model, `Own.model` | |
| alpha_i | `Own.share` | scalar |
| v bar = alpha v + (1 - alpha) w | `_Mixing.mixture` | like the model |
| eta | `lr`, `share_lr` (for alpha) | |
| 1 / size of U_t, the clients of a round | `weighting="uniform"` | |

Differs from the paper: alpha adapts once a round, at its first batch. v_i starts from the server's model at the time when
client i first takes part, which is w^0 in the first round only. `mix="outputs"` mixes the logits of both models instead of
their weights, as the authors' code does; for models that are linear in their weights it is the same. `steps="in_turn"` is the
rest of that code: v takes its step at the w that has just moved, and alpha follows after the first batch, along
<v - w, alpha dF/dv + (1 - alpha) dF/dw> + 0.02 alpha, F the loss of the mixture before v's step. That code tests before the
server averages, so that the mixture has the client's own w; here it has the server's.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, loops, masks
from fedjax_meta.builders import described, method_builder, variant
from fedjax_meta.contract import Method, Received, Reduction, Trained
from fedjax_meta.data import Batches, ClientData, ClientView
from fedjax_meta.keys import tagged
from fedjax_meta.task import Batch, Task, require_parts
from fedjax_meta.types import Key, Mask, Params, PyTree, Rate, Scalar, Variables


class Own(NamedTuple):
    """A client's memory: its personal model v and alpha, the share of v in the mixture."""

    model: Variables
    share: jax.Array


class Mixture(NamedTuple):
    """What a client predicts with when outputs are mixed."""

    own: Variables
    shared: Variables
    share: Scalar


@dataclasses.dataclass(frozen=True, eq=False)
class _Mixing:
    """How the personal and the global model are mixed, and the losses of the mixture."""

    task: Task
    trainable: Mask
    outputs: bool

    def mixture(self, own: Variables, shared: Variables, share: Scalar) -> Variables:
        """v̄ = α v + (1 - α) w, as variables to predict with. Buffers are those of v, which are updated with v̄."""
        if self.outputs:
            return Mixture(own, shared, share)
        return jax.tree.map(lambda moves, v, w: share * v + (1 - share) * w if moves else v, self.trainable, own, shared)

    def predict(self, variables: Variables, x: Any) -> jax.Array:
        if not isinstance(variables, Mixture):
            return self.task.predict(variables, x)
        own, shared, share = variables
        return share * self.task.predict(own, x) + (1 - share) * self.task.predict(shared, x)

    def loss(self, own: Variables, shared: Variables, share: Scalar, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
        """(f(v̄), v with its buffers updated)."""
        if self.outputs:
            parts = require_parts(self.task, "apfl with mix='outputs'")
            batch, key = parts.prepare(batch, key)
            mine, theirs = (parts.logits(variables, batch, key)[0] for variables in (own, shared))
            return parts.criterion(share * mine + (1 - share) * theirs, batch), own
        value, moved_on = self.task.loss(self.mixture(own, shared, share), batch, key)
        return value, masks.merge(masks.split(own, self.trainable)[0], masks.split(moved_on, self.trainable)[1])

    def joint(self, share: Scalar) -> local.Loss:
        """f(w) + f(v̄) of a pair (w, v), where v̄ gives w no gradient: one step is the paper's step of w and of v."""

        def loss(pair: Any, batch: Batch, key: Key) -> tuple[jax.Array, Any]:
            shared, own = pair
            value, shared_on = self.task.loss(shared, batch, key)
            mixed, own_on = self.loss(own, jax.lax.stop_gradient(shared), share, batch, key)
            return value + mixed, (shared_on, own_on)

        return loss

    def in_turn(self, received: Received, batches: Batches, step: optax.GradientTransformation, share_lr: Rate) -> Trained:
        """A client's round as in the authors' code, on batches that come with keys."""

        def parts(model: Variables) -> tuple[Params, Variables]:
            return masks.split(model, self.trainable)

        def moved(gradient: Params, slots: PyTree, model: Variables, after: Variables) -> tuple[Variables, PyTree]:
            """(`model` after a step, with the buffers of `after`; slots)."""
            updates, slots = step.update(gradient, slots, parts(model)[0])
            return masks.merge(optax.apply_updates(parts(model)[0], updates), parts(after)[1]), slots

        def on_batch(t: Any, carry: Any) -> Any:
            w, v, share, slots_w, slots_v, total = carry
            batch, key = batches.get(t, 0)

            def alone(theirs: Params) -> tuple[jax.Array, Variables]:
                return self.task.loss(masks.merge(theirs, parts(w)[1]), batch, key)

            gradient, after = jax.grad(alone, has_aux=True)(parts(w)[0])
            w, slots_w = moved(gradient, slots_w, w, after)

            def mixed(mine: Params, theirs: Params) -> tuple[jax.Array, Variables]:
                return self.loss(masks.merge(mine, parts(v)[1]), masks.merge(theirs, parts(w)[1]), share, batch, key)

            (value, after), (of_v, of_w) = jax.value_and_grad(mixed, (0, 1), has_aux=True)(parts(v)[0], parts(w)[0])
            v, slots_v = moved(of_v, slots_v, v, after)
            both = jax.tree.map(lambda dv, dw: share * dv + (1 - share) * dw, of_v, of_w)
            slope = optax.tree.vdot(optax.tree.sub(parts(v)[0], parts(w)[0]), both) + 0.02 * share
            share = jnp.where(t == 0, jnp.clip(share - share_lr * slope, 0, 1), share)
            return w, v, share, slots_w, slots_v, total + value

        shared, own = received.model, received.memory
        slots = step.init(parts(shared)[0])
        start = (shared, own.model, own.share, slots, slots, jnp.zeros(()))
        shared, model, share, _, _, total = loops.fori_loop(batches.steps, on_batch, start)
        return Trained(shared, {"loss": total / jnp.maximum(batches.steps, 1), "share": share}, memory=Own(model, share))


@described("a mixture of two models", "Deng et al. 2003.13461")
@method_builder
def apfl(
    task: Task,
    *,
    lr: Rate = 0.01,
    share: Rate = 0.5,
    share_lr: Rate | None = None,
    mix: str = "weights",
    steps: str = "together",
    epochs: int = 1,
    batch_size: int = 32,
    new_client_epochs: int = 1,
    optimizer: Callable[[Any], optax.GradientTransformation] = optax.sgd,
    weighting: str = "uniform",
) -> Method:
    """APFL. A client that never took part trains a v from the global model on its support set, at the initial share.

    The metric "loss" of a round is f(w) + f(v̄) with steps "together", and f(v̄) with steps "in_turn".

    Args:
      task, epochs, batch_size, new_client_epochs: as in `fedavg`.
      lr: learning rate of both models.
      share: alpha before a client's first round, from 0 (the global model) to 1 (a personal one).
      share_lr: learning rate of alpha, 0 keeps it; `lr` when not given.
      mix: "weights" (as APFL is commonly given) or "outputs" (authors' code).
      steps: of w and v on a batch, "together" from the w and v before (paper) or "in_turn" (authors' code).
      optimizer: as in `fedavg`, for w and v each.
      weighting: as in `fedavg`; "uniform" is the paper's, w being a plain mean over the clients of a round.

    Raises:
      ValueError: an option out of range, mixed outputs of a model with buffers or of a task with an opaque loss.
    """
    share_lr = lr if share_lr is None else share_lr
    checks.not_negative("share_lr", share_lr)
    checks.between("share", share, 0, 1)
    checks.one_of("mix", mix, ("weights", "outputs"))
    checks.one_of("steps", steps, ("together", "in_turn"))
    if mix == "outputs":
        features.require_no_buffers(task, "apfl with mix='outputs'")
        require_parts(task, "apfl with mix='outputs'")
    fixed = isinstance(share_lr, int | float) and share_lr == 0
    trainable = task.trainable(masks.variables_shape(task))
    mixing = _Mixing(task, trainable, mix == "outputs")

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        own, shared, loss_key = received.memory, received.model, tagged(key, "loss")
        batches = data["train"].epochs(tagged(key, "order"), batch_size, epochs)
        if steps == "in_turn":
            return mixing.in_turn(received, batches.keyed(loss_key), optimizer(lr), share_lr)
        share = own.share
        if not fixed:
            # α ← clip(α - η ⟨v - w, ∇f(v̄)⟩), and that product is df(v̄)/dα, on the batch and with the dropout of the first step.
            batch, batch_key = batches.keyed(loss_key).get(0, 0)
            slope = jax.grad(lambda share: mixing.loss(own.model, shared, share, batch, batch_key)[0])(share)
            share = jnp.clip(share - share_lr * slope, 0, 1)
        moving = (trainable, trainable)
        each = local.separately(optimizer(lr))
        (shared, model), loss = local.train(loss_key, mixing.joint(share), (shared, own.model), batches, each, moving)
        return Trained(shared, {"loss": loss, "share": share}, memory=Own(model, share))

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        shared, (model, share) = received.model, received.memory
        moving = (masks.nothing_like(trainable), trainable)
        passes = {"epochs": new_client_epochs, "batch_size": batch_size, "needed": ~received.seen}
        each = local.separately(optimizer(lr))
        pair, _ = local.train_epochs(key, mixing.joint(share), (shared, model), support, each, moving, **passes)
        return mixing.mixture(pair[1], shared, share)

    return Method(
        init=task.init,
        client=client,
        personalize=personalize,
        predict=mixing.predict,
        roles=masks.roles(masks.nothing(task), trainable),
        weighting=weighting,
        init_memory=lambda key, model, num_clients: Own(model, jnp.asarray(share, jnp.result_type(float))),
        needs_classes=mix == "outputs",
    )


@described("APFL that mixes outputs")
@variant(apfl, mix="outputs")
def apfl_outputs(task: Task) -> Method:
    """APFL that mixes the outputs of both models, as the authors' code does."""


REDUCES_TO = (
    Reduction(
        "the global model of APFL is that of FedAvg with equal weights, whatever alpha is",
        "apfl",
        {"share": 0.3},
        "fedavg",
        {"weighting": "uniform"},
        tests_alike=False,
    ),
    Reduction(
        "mixing outputs changes the personal models alone",
        "apfl_outputs",
        {"share": 0.3},
        "fedavg",
        {"weighting": "uniform"},
        tests_alike=False,
    ),
)
