import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta import masks
from fedjax_meta.federation import Federation
from tests import problems
from tests.methods.common import KEY, buffered, build, compiled, gradient, loss, personalized, run

OPTIONS = {"width": 8, "hidden": 1, "embedding_size": 3, "lr": 0.1, "batch_size": 8}
FEDERATION = Federation(cohort_size=4, devices=1)


def pfedhn(federation=FEDERATION, **options):
    return build("pfedhn", federation=federation, **(OPTIONS | options))


def one_client():
    """A client whose batch is all of its samples, so that their order does not matter."""
    x, y = problems.data().x[:24], problems.data().y[:24]
    everything = (np.array([0]), np.array([24]))
    return fm.from_clients([(x, y)], num_classes=3, views={"train": everything})


@pytest.mark.parametrize("personal", ["none", "head"])
def test_the_server_descends_the_gradient_through_the_hypernetwork(personal):
    # After ONE local step Δθ = η (∇f(θ) + decay θ), so the product with the Jacobian is η times the gradient of f(h(v; φ)).
    data = one_client()
    federation = Federation(cohort_size=1, devices=1, server_optimizer=optax.sgd, server_lr=1.0)
    algorithm = pfedhn(federation, local_steps=1, batch_size=24, new_client_steps=0, personal=personal)
    state = algorithm.init(KEY, data)
    memory = state.memory._replace(value=jax.random.normal(KEY, (1, 3)))
    state = state._replace(memory=memory, seen=jnp.ones(1, bool))
    after = run(algorithm, 1, state, data)
    samples = data.client(0)["train"].take(jnp.arange(24), jnp.ones(24))

    def generated(hyper, embedding):
        memory = state.memory._replace(value=embedding[None])
        model = state.model._replace(hyper=hyper)
        return algorithm.personalize(KEY, state._replace(model=model, memory=memory), data.client(0)["train"], 0)

    def objective(hyper, embedding):
        theta = generated(hyper, embedding)
        made = masks.split(theta, masks.resolve(personal, problems.task()))[1]
        decay = 5e-5 / 2 * optax.tree.norm(made, squared=True)
        return 0.1 * (problems.task().loss(theta, samples, KEY)[0] + decay)

    gradients = jax.jit(jax.grad(objective, (0, 1)))(state.model.hyper, state.memory.value[0])
    expected = jax.tree.map(jnp.subtract, state.model.hyper, gradients[0])
    assert problems.distance(after.model.hyper, expected) < 1e-12
    # Embeddings have the paper's server optimiser: rate 0.01, weight decay 1e-3.
    value = state.memory.value[0] - 0.01 * (gradients[1] + 1e-3 * state.memory.value[0])
    np.testing.assert_allclose(after.memory.value[0], value, atol=1e-12)
    assert bool(jax.tree.leaves(after.personal)) == (personal == "head")


def test_clients_start_with_embeddings_of_their_own_and_only_the_sampled_ones_move():
    algorithm = pfedhn(local_steps=5, new_client_steps=40)
    state = run(algorithm, 1)
    seen = np.flatnonzero(state.seen)
    assert len(np.unique(np.asarray(state.memory.value)[seen, 0])) == len(seen) == 4
    after, info = compiled(algorithm)(KEY, state, problems.data())
    moved = np.any(np.asarray(after.memory.value != state.memory.value), 1)
    assert np.flatnonzero(moved).tolist() == sorted(info.ids.tolist())


def test_a_new_client_fits_an_embedding_to_its_support_set():
    algorithm = pfedhn(local_steps=5, new_client_steps=40)
    state = run(algorithm, 3)
    one, other = np.flatnonzero(state.seen)[:2].tolist()
    fitted = loss(personalized(algorithm, state, None, of_client=3), 3, "test_support")
    unfitted = pfedhn(local_steps=5, new_client_steps=0)
    assert fitted < loss(personalized(unfitted, state, None, of_client=3), 3, "test_support") - 1e-3
    known = personalized(algorithm, state, one)
    assert problems.leaves_equal(known, personalized(unfitted, state, one))
    assert problems.distance(known, personalized(algorithm, state, other)) > 1e-6


def test_a_new_client_of_pfedhn_pc_fits_its_head_too():
    """The first step of Adam is a rate long in every coordinate, against the sign of the gradient of the support set."""
    options = {"personal": "head", "local_steps": 5, "new_client_lr": 0.01}
    fits, stays = (pfedhn(new_client_steps=count, **options) for count in (1, 0))
    state = run(fits, 2)
    before, after = (personalized(one, state, None, of_client=3)["head"] for one in (stays, fits))
    assert problems.leaves_equal(before, state.model.own["head"])
    slope = gradient(personalized(stays, state, None, of_client=3), 3, "test_support")["head"]
    assert problems.distance(after, jax.tree.map(lambda w, g: w - 0.01 * np.sign(g), before, slope)) < 1e-6


def test_a_default_embedding_size_for_another_number_of_clients_is_warned_about():
    given = {"width": 8, "hidden": 1}
    message = r"embedding_size=13 follows from num_clients=50, but the data have 7 clients, for which the paper has 2"
    with pytest.warns(UserWarning, match=message):
        build("pfedhn", federation=FEDERATION, **given).init(KEY, problems.data())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sized in ({"num_clients": 7}, {"embedding_size": 13}):
            build("pfedhn", federation=FEDERATION, **given, **sized).init(KEY, problems.data())


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="leaves nothing for the hypernetwork"):
        pfedhn(personal="all")
    with pytest.raises(ValueError, match="clip=0"):
        pfedhn(clip=0)
    with pytest.raises(ValueError, match="models without buffers"):
        fm.METHODS["pfedhn"](buffered())


def test_the_generated_leaves_travel_and_not_the_hypernetwork():
    head = {"w": (4, 3), "b": (3,)}
    body = {"w": (5, 4), "b": (4,)}
    for personal, sent in (("none", {"body": body, "head": head}), ("head", {"body": body, "head": {"w": None, "b": None}})):
        exchange = pfedhn(personal=personal).exchange(problems.data())
        for tree in (exchange.down[0], exchange.averaged[0]):
            assert jax.tree.map(lambda leaf: leaf.shape, tree) == sent


def test_what_moves_a_hypernetwork_is_clipped_to_the_norm():
    module = importlib.import_module("fedjax_meta.methods.pfedhn")  # `fm.methods.pfedhn` is the builder
    network = module._Hypernetwork([(2, 3), (3, 3)], jax.eval_shape(problems.task().init, KEY))
    made, pull_back, h = jax.vjp(network.generate, network.init(KEY), jnp.array([0.3, -1.0]), has_aux=True)
    clipped = module._clipped(pull_back(made), made, h, 1e-3)
    assert float(optax.tree.norm(clipped)) == pytest.approx(1e-3, rel=1e-6)
