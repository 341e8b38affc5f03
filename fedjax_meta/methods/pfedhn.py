"""pFedHN: a network at the server generates each client's model from the client's embedding, and learns from how it moved.

Shamsian, Navon, Fetaya, Chechik: "Personalized federated learning using hypernetworks", ICML 2021, arXiv
2103.04628, Algorithm 1.

| paper | here | shape |
|---|---|---|
| phi | `Model.hyper` | |
| v_i | `Embedding.value`, a client's memory | `[e]` |
| theta_i = h(v_i; phi) | `_Hypernetwork.generate` | the task's variables |
| Delta theta | received less trained | |
| alpha, eta | `lr`, `server_lr` (embeddings and hypernetwork) | scalars |

With `cohort_size=1` this is the paper's algorithm, one client per step. With more, the vector-Jacobian products of a cohort are
averaged into one step. The server of the paper holds the embeddings, sends the generated leaves and gets back by how much they
moved; it computes the products, which this simulation computes with the client.

Differs from the paper: an embedding is drawn when its client first takes part, and has its own momentum, which does not decay
in rounds in which the client does not take part.
"""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, masks
from fedjax_meta.builders import described, method_builder, variant
from fedjax_meta.contract import Method, Received, Trained
from fedjax_meta.data import ClientData, ClientView, FederatedData
from fedjax_meta.keys import tagged
from fedjax_meta.task import Batch, Task
from fedjax_meta.types import Key, Params, PyTree, Rate, Variables


class Model(NamedTuple):
    """What the server holds.

    Attributes:
      hyper: the hypernetwork.
      own: the leaves that it does not generate (pFedHN-PC), which stay with their client.
    """

    hyper: Params
    own: PyTree


class Embedding(NamedTuple):
    """A client's memory.

    Attributes:
      value: its embedding, `[e]`.
      slots: of the embedding's optimiser.
      momentum: with `keep_optimizer`, that of its own leaves.
    """

    value: jax.Array
    slots: PyTree
    momentum: PyTree


def _sgd(rate: Rate, decay: float) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, momentum=0.9))


class _Hypernetwork(NamedTuple):
    """Dense layers with ReLU between them, and on them a dense layer for each leaf that is generated.

    Attributes:
      sizes: (inputs, units) of the layers of the trunk.
      leaves: shapes of the generated leaves.
    """

    sizes: list[tuple[int, int]]
    leaves: PyTree

    def init(self, key: Key) -> Params:
        sizes = [*self.sizes, *((self.sizes[-1][1], leaf.size) for leaf in jax.tree.leaves(self.leaves))]
        layers = [features.dense_layer(tagged(key, "layer", i), *size) for i, size in enumerate(sizes)]
        return {"trunk": layers[: len(self.sizes)], "leaves": layers[len(self.sizes) :]}

    def generate(self, hyper: Params, embedding: jax.Array) -> tuple[PyTree, jax.Array]:
        """(h(v; φ), what its trunk gives)."""
        first, *rest = hyper["trunk"]
        h = first["kernel"] @ embedding + first["bias"]
        for dense in rest:
            h = dense["kernel"] @ jax.nn.relu(h) + dense["bias"]
        forms, structure = jax.tree.flatten(self.leaves)
        pairs = zip(hyper["leaves"], forms, strict=True)
        return jax.tree.unflatten(structure, [(d["kernel"] @ h + d["bias"]).reshape(form.shape) for d, form in pairs]), h


def _clipped(
    gradient: tuple[Params, jax.Array], pseudo_gradient: PyTree, h: jax.Array, clip: Rate
) -> tuple[Params, jax.Array]:
    """(∇φ, ∇v) of a norm of at most `clip`, from Δθ and what the trunk gives."""
    # The last layers have nearly all parameters. Their gradient, Δθ hᵀ and Δθ, has a norm that needs no pass over them.
    rest = optax.tree.norm((gradient[0]["trunk"], gradient[1]), squared=True)
    norm = jnp.sqrt(rest + optax.tree.norm(pseudo_gradient, squared=True) * (1 + jnp.sum(h**2)))
    scaled: tuple[Params, jax.Array] = optax.tree.scale(jnp.minimum(1, clip / jnp.maximum(norm, 1e-12)), gradient)
    return scaled


@described("models from a hypernetwork", "Shamsian et al. 2103.04628")
@method_builder
def pfedhn(  # over 80 lines: the rules share fourteen options
    task: Task,
    *,
    lr: Rate = 5e-3,
    server_lr: Rate = 0.01,
    embedding_size: int | None = None,
    num_clients: int = 50,
    width: int = 100,
    hidden: int = 3,
    local_steps: int = 50,
    epochs: int | None = None,
    batch_size: int = 64,
    personal: masks.MaskSpec = "none",
    keep_optimizer: bool = False,
    clip: Rate = 50.0,
    new_client_steps: int = 50,
    new_client_lr: Rate = 0.1,
) -> Method:
    """pFedHN. For a client that never took part, a new embedding is fitted to its support set; the hypernetwork does not move.

    Args:
      task: what is learned, a model without buffers.
      lr: learning rate of local training (momentum 0.9, weight decay 5e-5).
      server_lr: of the hypernetwork and embeddings (momentum 0.9, weight decay 1e-3). A server optimiser of the federation
        replaces that of the hypernetwork.
      embedding_size: e; when not given the paper's 1 + N // 4, for the N of `num_clients`.
      num_clients: N, read for nothing else; the paper has 50 clients. Data for which the size would be another are warned about.
      width, hidden: units, and layers after the first, of the hypernetwork.
      local_steps: K, batches per round, whatever the size of a client.
      epochs: passes over a client's train view in place of K batches, for as many gradients as `fedavg(epochs=...)`.
      batch_size: samples per step.
      personal: mask of the leaves that the hypernetwork does not generate; "head" is pFedHN-PC.
      keep_optimizer: whether the optimiser of those leaves goes on where the client's last round ended (the authors' code) or
        starts afresh. If a client's upload is late, it keeps its trained leaves, but its optimiser's state from before the round.
      clip: largest norm of a local gradient of the generated leaves, and of what moves hypernetwork and embedding.
      new_client_steps, new_client_lr: full gradient steps (Adam) that fit a new embedding, and their rate.

    Raises:
      ValueError: a task with buffers, everything personal, an option out of range.
    """
    features.require_no_buffers(task, "pfedhn")
    checks.positive("clip", clip)
    checks.positive("new_client_lr", new_client_lr)
    checks.count("num_clients", num_clients)
    checks.flag("keep_optimizer", keep_optimizer)
    follows = embedding_size is None
    embedding_size = 1 + num_clients // 4 if embedding_size is None else embedding_size
    for name, value in (("embedding_size", embedding_size), ("width", width), ("hidden", hidden)):
        checks.count(name, value)
    checks.count("new_client_steps", new_client_steps, least=0)
    own = masks.resolve(personal, task, name="personal")
    if all(jax.tree.leaves(own)):
        raise ValueError(f"personal={personal!r} leaves nothing for the hypernetwork to generate")
    trunk = [(embedding_size, width), *[(width, width)] * hidden]
    network = _Hypernetwork(trunk, masks.split(masks.variables_shape(task), own)[1])
    optimizer = optax.chain(optax.masked(optax.clip_by_global_norm(clip), masks.complement(own)), _sgd(lr, 5e-5))
    embedding_optimizer = _sgd(server_lr, 1e-3)

    def init(key: Key) -> Model:
        return Model(network.init(key), masks.split(task.init(tagged(key, "own")), own)[0])

    def init_memory(key: Key, model: Model, num_clients: int) -> Embedding:
        del num_clients
        value = jax.random.normal(key, (embedding_size,))
        return Embedding(value, embedding_optimizer.init(value), optax.tree.zeros_like(model.own) if keep_optimizer else ())

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        model, embedding = received.model, received.memory
        generated, pull_back, h = jax.vjp(network.generate, model.hyper, embedding.value, has_aux=True)
        if epochs is None:
            batches = data["train"].endless(tagged(key, "order"), batch_size, local_steps)
        else:
            batches = data["train"].epochs(tagged(key, "order"), batch_size, epochs)
        start = masks.merge(model.own, generated)
        slots = optimizer.init(start)
        if keep_optimizer:
            fresh = masks.split(optax.tree.get(slots, "trace"), own)[1]
            slots = optax.tree.set(slots, trace=masks.merge(embedding.momentum, fresh))
        everything = masks.everything_like(own)
        trained, slots, loss = local.train_on(tagged(key, "loss"), task.loss, start, slots, batches, optimizer, everything)
        kept, moved = masks.split(trained, own)
        # ∇φ, ∇v = (∂θ/∂(φ, v))ᵀ Δθ, with Δθ = received - trained so that the server descends.
        pseudo_gradient = optax.tree.sub(generated, moved)
        gradient = _clipped(pull_back(pseudo_gradient), pseudo_gradient, h, clip)
        update, moved_on = embedding_optimizer.update(gradient[1], embedding.slots, embedding.value)
        momentum = masks.split(optax.tree.get(slots, "trace"), own)[0] if keep_optimizer else ()
        memory = Embedding(embedding.value + update, moved_on, momentum)
        # The server reads no pseudo-gradient of the leaves that stay with their client.
        descent = Model(gradient[0], optax.tree.zeros_like(kept))
        return Trained(Model(model.hyper, kept), {"loss": loss}, memory=memory, pseudo_gradient=descent)

    def personalize(key: Key, received: Received, support: ClientView) -> Variables:
        """The generated model; a client that never took part first fits its embedding and its own leaves."""
        hyper, leaves = received.model
        value = received.memory.value
        if new_client_steps:
            batches = support.full(new_client_steps).only_if(~received.seen)

            def fit(pair: PyTree, batch: Batch, key: Key) -> tuple[jax.Array, PyTree]:
                return task.loss(masks.merge(pair[1], network.generate(hyper, pair[0])[0]), batch, key)[0], pair

            moving = (True, jax.tree.map(lambda _: True, leaves))
            (value, leaves), _ = local.train(key, fit, (value, leaves), batches, optax.adam(new_client_lr), moving)
        return masks.merge(leaves, network.generate(hyper, value)[0])

    def travels(model: Model) -> tuple[PyTree, PyTree]:
        """The generated leaves come down, and by how much they moved goes up."""
        generated, _ = network.generate(model.hyper, jnp.zeros(embedding_size))
        return generated, generated

    def init_extra(model: Model, data: FederatedData) -> PyTree:
        del model
        usual = 1 + data.total_clients // 4
        if follows and usual != embedding_size:
            warnings.warn(
                f"pfedhn: embedding_size={embedding_size} follows from num_clients={num_clients}, but the data have "
                f"{data.total_clients} clients, for which the paper has {usual}: give num_clients or embedding_size",
                stacklevel=1,  # one place, so that it is said once
            )
        return ()

    shape = jax.eval_shape(init, jax.random.key(0))
    personal_leaves = Model(masks.nothing_like(shape.hyper), masks.everything_like(shape.own))
    return Method(
        init=init,
        client=client,
        personalize=personalize,
        predict=task.predict,
        roles=masks.roles(personal_leaves, masks.everything_like(shape)),
        weighting="uniform",
        server_optimizer=_sgd(server_lr, 1e-3),
        init_memory=init_memory,
        memory_of_uploads=True,
        init_extra=init_extra,
        travels=travels,
    )


@described("the same with own heads")
@variant(pfedhn, personal="head")
def pfedhn_pc(task: Task) -> Method:
    """pFedHN-PC: the hypernetwork generates the body alone; each client has its own head.

    For a client that never took part, a new embedding and the initial head are fitted to its support set.

    Differs from the authors' code: there a head's momentum continues from round to round (`keep_optimizer`), every head starts at
    random by itself, and `server_lr` is 0.05.
    """
