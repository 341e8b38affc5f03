"""What clients and the server keep where an upload does not arrive."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_meta import uploads
from fedjax_meta.participation import Participation
from tests import problems
from tests.methods.common import FULL, KEY, build


def late(*clients):
    """These clients always come back too late."""
    return lambda key, client: Participation(returned=~jnp.isin(client, jnp.array(clients)))


def rounds(algorithm, number=3):
    """The state after some rounds."""
    state, data = algorithm.init(KEY, problems.data()), problems.data()
    for i in range(number):
        state, _ = jax.jit(algorithm.round)(jax.random.fold_in(KEY, i), state, data)
    return state


CHAINS = {
    "as they are": (),
    "clipped": (uploads.clip(0.05),),
    "clipped, with noise of 0": (uploads.clip(0.05), uploads.noise(0.0, reproducible=True)),
    "quantised": (uploads.quantize(2),),
    "sparse": (uploads.sparsify(0.2),),
    "sparse, without feedback": (uploads.sparsify(0.2, feedback=False),),
}


@pytest.mark.parametrize(
    ("name", "chain"),
    [(name, chain) for name in ("scaffold", "feddyn") for chain in CHAINS if (name, chain) != ("feddyn", "sparse")],
)
def test_the_server_keeps_the_mean_of_the_memories(name, chain):
    """Whatever happens to uploads on their way: a memory follows what was sent."""
    state = rounds(build(name, lr=0.2, participation=late(0), uploads=CHAINS[chain], **FULL))
    of_clients = jax.tree.map(lambda leaf: jnp.mean(leaf, 0), state.memory)
    assert problems.distance(of_clients, jax.tree.map(jnp.zeros_like, of_clients)) > 0.01
    assert problems.distance(state.extra, of_clients) < 1e-12


def test_embeddings_stay_where_nothing_comes_back():
    """They are those that clients began with: drawn, not the zeros of an empty row."""
    algorithm = build("pfedhn", participation=late(*range(7)), cohort_size=7, devices=1)
    first, third = (rounds(algorithm, number).memory for number in (1, 3))
    assert problems.leaves_equal(first, third)
    assert 0.3 < np.std(jax.tree.leaves(first)[0]) < 2


def test_a_client_whose_first_upload_is_lost_has_its_memory_by_the_second_round():
    """The steps of MOCHA, which would be 0, and learn nothing."""
    algorithm = build("mocha", participation=late(0), cohort_size=7, devices=1)
    memory = rounds(algorithm, 1).memory
    assert (np.asarray(memory.step) > 0).all()


TAKES_OVER = {
    "mocha": {"relation_every": 1},
    "pfedsim": {"warmup": 0},
    "fedcac": {},
    "fedamp": {},
    "heur_fedamp": {},
    "fedfomo": {},
    "fedpac": {},
}


@pytest.mark.parametrize("name", TAKES_OVER)
def test_what_clients_take_over_does_not_depend_on_uploads_that_never_came(name):
    """Client 0 is late from the first round on, on its own data and on others."""
    algorithm = build(name, participation=late(0), cohort_size=7, devices=1, **TAKES_OVER[name])
    data, round_ = problems.data(), jax.jit(algorithm.round)
    x = np.array(data.x)
    begin, size = int(data.start["train"][0]), int(data.size["train"][0])
    x[begin : begin + size] += 1.0
    found = []
    for some in (data, data.__class__(**{**vars(data), "x": x})):
        state = algorithm.init(KEY, some)
        for i in range(3):
            state, _ = round_(jax.random.fold_in(KEY, i), state, some)
        found.append((state.model, state.extra, jax.tree.map(lambda leaf: leaf[1:], (state.personal, state.memory))))
    assert problems.distance(*found) == 0


def test_the_mean_model_of_afl_counts_the_rounds_in_which_somebody_returned():
    coming = build("afl", **FULL | {"batch_size": 32})
    nobody = build("afl", participation=late(*range(7)), **FULL | {"batch_size": 32})
    state, data, models = coming.init(KEY, problems.data()), problems.data(), []
    for i, algorithm in enumerate([coming, nobody, nobody, coming]):
        state, _ = jax.jit(algorithm.round)(jax.random.fold_in(KEY, i), state, data)
        if algorithm is coming:
            models.append(state.model)
    expected = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *models)
    assert problems.distance(state.extra.model, expected) < 1e-12 and state.extra.rounds == 2


def test_weights_of_afl_stay_a_distribution():
    state = rounds(build("afl", lr=0.2, weight_lr=0.5, participation=late(0, 3), **FULL | {"batch_size": 32}))
    assert float(np.sum(state.memory)) == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(np.asarray(state.memory)[[0, 3]], 1 / 7)
