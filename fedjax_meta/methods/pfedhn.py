"""pFedHN: a network at the server generates each client's model from the client's embedding, and learns from how it moved.

Shamsian, Navon, Fetaya, Chechik: "Personalized federated learning using hypernetworks", ICML 2021, arXiv
2103.04628, Algorithm 1.

| paper | here | shape |
|---|---|---|
| phi | `Model.hyper` | |
| v_i | `Embedding.value`, a client's memory | `[e]` |
| theta_i = h(v_i; phi) | `_PFedHN.generate` | the task's variables |
| Delta theta | received less trained | |
| alpha, eta | `lr`, `server_lr` (embeddings and hypernetwork) | scalars |

With `cohort_size=1` this is the paper's algorithm, one client per step. With more, the vector-Jacobian products of a cohort are
averaged into one step. The server of the paper holds the embeddings, sends the generated leaves and gets back by how much they
moved; it computes the products, which this simulation computes with the client.

Differs from the paper: an embedding is drawn when its client first takes part, and has its own momentum, which does not decay
in rounds in which the client does not take part.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_meta import checks, features, local, masks
from fedjax_meta.builders import described, method_builder, variant
from fedjax_meta.contract import Method, Received, Trained
from fedjax_meta.data import ClientData, ClientView
from fedjax_meta.keys import tagged
from fedjax_meta.task import Batch, Task
from fedjax_meta.types import Key, Mask, Params, PyTree, Rate, Variables


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
    """

    value: jax.Array
    slots: PyTree


def _sgd(rate: Rate, decay: float) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, momentum=0.9))


@dataclasses.dataclass(frozen=True, eq=False)
class _PFedHN:
    """The rules of one pFedHN; fields that are not explained here are arguments of `pfedhn`.

    Attributes:
      own: mask of the leaves that the hypernetwork does not generate.
      optimizer: of local training.
      embedding_optimizer: of the embeddings.
    """

    task: Task
    own: Mask
    optimizer: optax.GradientTransformation
    embedding_optimizer: optax.GradientTransformation
    embedding_size: int
    width: int
    hidden: int
    local_steps: int
    epochs: int | None
    batch_size: int
    clip: Rate
    new_client_steps: int
    new_client_lr: Rate

    @property
    def generated(self) -> PyTree:
        """Shapes of the leaves that the hypernetwork generates."""
        return masks.split(masks.variables_shape(self.task), self.own)[1]

    def init(self, key: Key) -> Model:
        sizes = [(self.embedding_size, self.width)] + [(self.width, self.width)] * self.hidden
        sizes += [(self.width, leaf.size) for leaf in jax.tree.leaves(self.generated)]
        layers = [features.dense_layer(tagged(key, "layer", i), *size) for i, size in enumerate(sizes)]
        hyper = {"trunk": layers[: 1 + self.hidden], "leaves": layers[1 + self.hidden :]}
        return Model(hyper, masks.split(self.task.init(tagged(key, "own")), self.own)[0])

    def generate(self, hyper: Params, embedding: jax.Array) -> tuple[PyTree, jax.Array]:
        """(h(v; φ), what its trunk gives): dense layers with ReLU between them, and on them a dense layer for each leaf."""
        first, *rest = hyper["trunk"]
        h = first["kernel"] @ embedding + first["bias"]
        for dense in rest:
            h = dense["kernel"] @ jax.nn.relu(h) + dense["bias"]
        forms, structure = jax.tree.flatten(self.generated)
        pairs = zip(hyper["leaves"], forms, strict=True)
        return jax.tree.unflatten(structure, [(d["kernel"] @ h + d["bias"]).reshape(form.shape) for d, form in pairs]), h

    def init_memory(self, key: Key, model: Model, num_clients: int) -> Embedding:
        del model, num_clients
        value = jax.random.normal(key, (self.embedding_size,))
        return Embedding(value, self.embedding_optimizer.init(value))

    def client(self, key: Key, received: Received, data: ClientData) -> Trained:
        model, embedding = received.model, received.memory
        generated, pull_back, h = jax.vjp(self.generate, model.hyper, embedding.value, has_aux=True)
        if self.epochs is None:
            batches = data["train"].endless(tagged(key, "order"), self.batch_size, self.local_steps)
        else:
            batches = data["train"].epochs(tagged(key, "order"), self.batch_size, self.epochs)
        start = masks.merge(model.own, generated)
        everything = masks.everything_like(self.own)
        trained, loss = local.train(tagged(key, "loss"), self.task.loss, start, batches, self.optimizer, everything)
        own, moved = masks.split(trained, self.own)
        # ∇φ, ∇v = (∂θ/∂(φ, v))ᵀ Δθ, with Δθ = received - trained so that the server descends.
        fell = optax.tree.sub(generated, moved)
        gradient = pull_back(fell)
        # The last layers have nearly all parameters. Their gradient, Δθ hᵀ and Δθ, has a norm that needs no pass over them.
        rest = optax.tree.norm((gradient[0]["trunk"], gradient[1]), squared=True)
        norm = jnp.sqrt(rest + optax.tree.norm(fell, squared=True) * (1 + jnp.sum(h**2)))
        gradient = optax.tree.scale(jnp.minimum(1, self.clip / jnp.maximum(norm, 1e-12)), gradient)
        update, slots = self.embedding_optimizer.update(gradient[1], embedding.slots, embedding.value)
        memory = Embedding(embedding.value + update, slots)
        # The server reads no pseudo-gradient of the leaves that stay with their client.
        descent = Model(gradient[0], optax.tree.zeros_like(own))
        return Trained(Model(model.hyper, own), {"loss": loss}, memory=memory, pseudo_gradient=descent)

    def personalize(self, key: Key, received: Received, support: ClientView) -> Variables:
        """The generated model; a client that never took part first fits its embedding and its own leaves."""
        hyper, own = received.model
        value = received.memory.value
        if self.new_client_steps:
            batches = support.full(self.new_client_steps).only_if(~received.seen)

            def fit(pair: PyTree, batch: Batch, key: Key) -> tuple[jax.Array, PyTree]:
                return self.task.loss(masks.merge(pair[1], self.generate(hyper, pair[0])[0]), batch, key)[0], pair

            moving = (True, jax.tree.map(lambda _: True, own))
            (value, own), _ = local.train(key, fit, (value, own), batches, optax.adam(self.new_client_lr), moving)
        return masks.merge(own, self.generate(hyper, value)[0])

    def travels(self, model: Model) -> tuple[PyTree, PyTree]:
        """The generated leaves come down, and by how much they moved goes up."""
        generated, _ = self.generate(model.hyper, jnp.zeros(self.embedding_size))
        return generated, generated


@described("models from a hypernetwork", "Shamsian et al. 2103.04628")
@method_builder
def pfedhn(
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
      num_clients: N, read for nothing else; the paper has 50 clients.
      width, hidden: units, and layers after the first, of the hypernetwork.
      local_steps: K, batches per round, whatever the size of a client.
      epochs: passes over a client's train view in place of K batches, for as many gradients as `fedavg(epochs=...)`.
      batch_size: samples per step.
      personal: mask of the leaves that the hypernetwork does not generate; "head" is pFedHN-PC.
      clip: largest norm of a local gradient, and of what moves hypernetwork and embedding.
      new_client_steps, new_client_lr: full gradient steps (Adam) that fit a new embedding, and their rate.

    Raises:
      ValueError: a task with buffers, everything personal, an option out of range.
    """
    features.require_no_buffers(task, "pfedhn")
    checks.positive("clip", clip)
    checks.positive("new_client_lr", new_client_lr)
    checks.count("num_clients", num_clients)
    embedding_size = 1 + num_clients // 4 if embedding_size is None else embedding_size
    for name, value in (("embedding_size", embedding_size), ("width", width), ("hidden", hidden)):
        checks.count(name, value)
    checks.count("new_client_steps", new_client_steps, least=0)
    own = masks.resolve(personal, task, name="personal")
    if all(jax.tree.leaves(own)):
        raise ValueError(f"personal={personal!r} leaves nothing for the hypernetwork to generate")
    rules = _PFedHN(
        task=task,
        own=own,
        optimizer=optax.chain(optax.clip_by_global_norm(clip), _sgd(lr, 5e-5)),
        embedding_optimizer=_sgd(server_lr, 1e-3),
        embedding_size=embedding_size,
        width=width,
        hidden=hidden,
        local_steps=local_steps,
        epochs=epochs,
        batch_size=batch_size,
        clip=clip,
        new_client_steps=new_client_steps,
        new_client_lr=new_client_lr,
    )
    shape = jax.eval_shape(rules.init, jax.random.key(0))
    personal_leaves = Model(masks.nothing_like(shape.hyper), masks.everything_like(shape.own))
    return Method(
        init=rules.init,
        client=rules.client,
        personalize=rules.personalize,
        predict=task.predict,
        roles=masks.roles(personal_leaves, masks.everything_like(shape)),
        weighting="uniform",
        server_optimizer=_sgd(server_lr, 1e-3),
        init_memory=rules.init_memory,
        memory_of_uploads=True,
        travels=rules.travels,
    )


@described("the same with own heads")
@variant(pfedhn, personal="head")
def pfedhn_pc(task: Task) -> Method:
    """pFedHN-PC: the hypernetwork generates the body alone; each client has its own head.

    For a client that never took part, a new embedding and the initial head are fitted to its support set.
    """
