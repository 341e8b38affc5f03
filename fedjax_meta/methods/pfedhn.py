"""pFedHN: the server has a network that makes each client's model from the client's embedding, and learns from how it moved.

Shamsian, Navon, Fetaya, Chechik: "Personalized federated learning using hypernetworks", ICML 2021, arXiv
2103.04628, Algorithm 1.

| paper | here | shape |
|---|---|---|
| phi | `Model.hyper` | |
| v_i | `Embedding.value`, a client's memory | `[e]` |
| theta_i = h(v_i; phi) | `generate` | the task's variables |
| Delta theta | received less trained | |
| alpha, eta | `lr`, `embedding_lr` and the server optimiser | scalars |

With `cohort_size=1` this is the paper's algorithm, one client a step. With more, the vector-Jacobian products of a cohort are
averaged into one step. Differs from the paper: an embedding has its own momentum, which rests while its client does.
"""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, masks
from fedjax_meta.algorithm import Algorithm, FederationOptions, Received, Trained, federated
from fedjax_meta.data.federated import ClientData, ClientView
from fedjax_meta.task import Batch, Key, Task, Variables


class Model(NamedTuple):
    """The server's hypernetwork, and the leaves that it does not make (pFedHN-PC), which stay with their client."""

    hyper: Any
    own: Any


class Embedding(NamedTuple):
    """A client's memory: its embedding `[e]` and the slots of its optimiser."""

    value: jax.Array
    slots: Any


def _sgd(rate: Any, decay: float) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, momentum=0.9))


def _outputs(hyper: Any, embedding: jax.Array) -> list[jax.Array]:
    """A trunk of dense layers with ReLU between them, and a dense layer for each leaf."""
    first, *rest = hyper["trunk"]
    h = first["kernel"] @ embedding + first["bias"]
    for dense in rest:
        h = dense["kernel"] @ jax.nn.relu(h) + dense["bias"]
    return [dense["kernel"] @ h + dense["bias"] for dense in hyper["leaves"]]


def pfedhn(
    task: Task,
    *,
    lr: Any = 5e-3,
    server_lr: Any = 0.01,
    embedding_size: int = 13,
    width: int = 100,
    hidden: int = 3,
    local_steps: int = 50,
    batch_size: int = 64,
    personal: masks.MaskSpec = "none",
    clip: float = 50.0,
    new_client_steps: int = 50,
    new_client_lr: Any = 0.1,
    **options: Unpack[FederationOptions],
) -> Algorithm:
    """pFedHN. For a client that never took part a new embedding is fitted to its support set, with the hypernetwork held.

    Args:
      task: what is learned, without buffers.
      lr: learning rate of local training (momentum 0.9, weight decay 5e-5); may be traced, as the other rates.
      server_lr: of hypernetwork and embeddings (momentum 0.9, weight decay 1e-3).
      embedding_size: e; the paper's is 1 + N // 4.
      width, hidden: units, and layers after the first, of the hypernetwork.
      local_steps: K, batches a round.
      batch_size: samples a step.
      personal: mask of the leaves that the hypernetwork does not make; "head" is pFedHN-PC.
      clip: largest norm of a local gradient, and of what a client sends.
      new_client_steps, new_client_lr: full gradient steps (Adam) that fit a new embedding, and their rate.
      **options: those of `federated`; a `server_optimizer` replaces the hypernetwork's.

    Raises:
      ValueError: a task with buffers, everything personal, a rate or count out of range.
    """
    features.require_plain(task, "pfedhn")
    for name, rate in (("lr", lr), ("server_lr", server_lr), ("clip", clip), ("new_client_lr", new_client_lr)):
        checks.positive(name, rate)
    counts = {"embedding_size": embedding_size, "width": width, "hidden": hidden}
    for name, value in {**counts, "local_steps": local_steps, "batch_size": batch_size}.items():
        checks.count(name, value)
    checks.count("new_client_steps", new_client_steps, least=0)
    shape = masks.variables_shape(task)
    in_own = masks.resolve(personal, task, name="personal")
    made, structure = jax.tree.flatten(masks.split(shape, in_own)[1])
    if not made:
        raise ValueError(f"personal={personal!r} leaves nothing for the hypernetwork to make")
    everything = jax.tree.map(lambda _: True, shape)

    def init(key: Key) -> Model:
        own_key, *keys = jax.random.split(key, 2 + hidden + len(made))
        sizes = [(embedding_size, width)] + [(width, width)] * hidden + [(width, leaf.size) for leaf in made]
        layers = [features.dense_layer(key, *size) for key, size in zip(keys, sizes, strict=True)]
        hyper = {"trunk": layers[: 1 + hidden], "leaves": layers[1 + hidden :]}
        return Model(hyper, masks.split(task.init(own_key), in_own)[0])

    def generate(hyper: Any, embedding: jax.Array) -> Any:
        """h(v; φ): the leaves that the hypernetwork makes."""
        leaves = _outputs(hyper, embedding)
        return jax.tree.unflatten(structure, [leaf.reshape(like.shape) for leaf, like in zip(leaves, made, strict=True)])

    embedding_optimizer = _sgd(server_lr, 1e-3)
    local_optimizer = optax.chain(optax.clip_by_global_norm(clip), _sgd(lr, 5e-5))

    def init_memory(key: Key, model: Model, num_clients: int) -> Embedding:
        value = jax.random.normal(key, (embedding_size,))
        return Embedding(value, embedding_optimizer.init(value))

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        order_key, key = jax.random.split(key)
        model, embedding = received.model, received.memory
        generated, pull_back = jax.vjp(generate, model.hyper, embedding.value)
        batches = data["train"].wrapped(order_key, batch_size, local_steps)
        start = masks.merge(model.own, generated)
        trained, loss = local.train(key, task.loss, start, batches, local_optimizer, everything)
        own, moved = masks.split(trained, in_own)
        # ∇φ, ∇v = (∂θ/∂(φ, v))ᵀ Δθ, with Δθ = received - trained so that the server descends.
        gradient = pull_back(optax.tree.sub(generated, moved))
        norm = optax.tree.norm(gradient)
        gradient = optax.tree.scale(jnp.minimum(1, clip / jnp.maximum(norm, 1e-12)), gradient)
        update, slots = embedding_optimizer.update(gradient[1], embedding.slots, embedding.value)
        memory = Embedding(embedding.value + update, slots)
        weight = jnp.where(data["train"].size > 0, 1.0, 0.0)
        # Nothing descends along the leaves that stay with their client.
        descent = Model(gradient[0], optax.tree.zeros_like(own))
        return Trained(Model(model.hyper, own), weight, {"loss": loss}, memory=memory, pseudo_gradient=descent)

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        hyper, own = received.model
        value = received.memory.value
        if new_client_steps:
            batches = support.full(new_client_steps).only_if(~received.seen)

            def fit(pair: Any, batch: Batch, key: Key) -> tuple[jax.Array, Any]:
                return task.loss(masks.merge(pair[1], generate(hyper, pair[0])), batch, key)[0], pair

            moving = (True, jax.tree.map(lambda _: True, own))
            (value, own), _ = local.train(key, fit, (value, own), batches, optax.adam(new_client_lr), moving)
        return masks.merge(own, generate(hyper, value))

    model_shape = jax.eval_shape(init, jax.random.key(0))
    trainable = jax.tree.map(lambda _: True, model_shape)
    options.setdefault("server_optimizer", _sgd(server_lr, 1e-3))
    return federated(
        init=init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        personal=Model(jax.tree.map(lambda _: False, model_shape.hyper), jax.tree.map(lambda _: True, model_shape.own)),
        trainable=trainable,
        init_memory=init_memory,
        **options,
    )
