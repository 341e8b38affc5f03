"""Models with buffers: which methods average them, leave them with their client or refuse them, and how one sample moves them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.masks import Role, path_names
from tests import problems

KEY = jax.random.key(3)
REFUSED = {"apfl_outputs", "cfl", "feddbe", "fedem", "fedgp", "fedrod", "gpfl", "ifca", "mocha", "pfedhn", "pfedhn_pc"}
OWN = {"fedbn", "mtfl", "mtfl_fedavg_adam", "fedamp", "heur_fedamp", "fedcac", "fedfomo", "fedproto", "l2gd"}
OWN |= {"lg_fedavg", "local_only"}
"""Methods in which a client keeps its running statistics; all others average them."""
FAST = {"afl", "anil", "fedas", "fedcac", "feddyn", "fednova", "fedproto", "mamlpp", "pfedsim", "qfedavg"}


def of_statistics(tree) -> dict:
    """The leaves that are running statistics, by their paths."""
    found = {path_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    return {"/".join(names[-3:]): leaf for names, leaf in found.items() if "batch_stats" in names and "slots" not in names}


@pytest.mark.parametrize("name", fm.METHODS)
def test_running_statistics_are_averaged_or_a_clients_own_or_refused(name):
    task = problems.normed_task()
    if name in REFUSED:
        with pytest.raises(ValueError, match="is for models without buffers"):
            fm.METHODS[name](task)
        return
    found = of_statistics(fm.METHODS[name](task).roles)
    assert len(found) == 2 and set(found.values()) == {Role.PERSONAL if name in OWN else Role.BUFFER}


def tiny():
    """Client 0 has one sample in each view, client 1 two, client 2 nine."""
    rng = np.random.default_rng(0)
    sizes = {"train": (1, 2, 9), "support": (1, 1, 5), "query": (1, 1, 4), "test_support": (1, 1, 3)}
    pools = [(rng.normal(size=(12, 5)), rng.integers(0, 3, 12)) for _ in range(3)]
    return fm.from_clients(pools, num_classes=3, views={name: (np.zeros(3, int), np.array(n)) for name, n in sizes.items()})


@pytest.mark.parametrize("name", problems.sampled(FAST, without=REFUSED))
def test_running_statistics_move_by_one_sample_too(name):
    method, data = fm.METHODS[name](problems.normed_task()), tiny()
    algorithm = fm.federate(method, fm.Federation(cohort_size=3, devices=1, lanes=1))
    step = jax.jit(algorithm.round)
    start = state = algorithm.init(KEY, data)
    for _ in range(2):
        state, info = step(jax.random.fold_in(KEY, state.round), state, data)
        assert problems.finite(state) and np.all(info.returned)
    # Those of client 0 where they are its own.
    before, after = (of_statistics((one.model, jax.tree.map(lambda leaf: leaf[0], one.personal))) for one in (start, state))
    own = of_statistics(jax.tree.map(lambda leaf: leaf[0], state.personal))
    assert set(own) == (set(before) if name in OWN else set())
    assert all(problems.distance(before[leaf], after[leaf]) > 1e-6 for leaf in before)
    for client in (0, None):
        variables = algorithm.personalize(KEY, state, data.client(0)["test_support"], client)
        assert problems.finite(variables) and problems.finite(algorithm.predict(variables, jnp.ones((2, 5))))


@pytest.mark.parametrize("name", ["qfedavg", "fedas", "heur_fedamp", "fedcac"])
def test_running_statistics_weigh_nothing(name):
    """Training reads none, so that in two rounds other ones change no parameter: neither weights nor mixtures look at them."""
    task, options = problems.normed_task(), {"fedas": {"align_epochs": 0}}.get(name, {})

    def shifted(key):
        variables = task.init(key)
        return {**variables, "batch_stats": jax.tree.map(lambda leaf: 3 * leaf + 5, variables["batch_stats"])}

    found = []
    for one in (task, task._replace(init=shifted)):
        method = fm.METHODS[name](one, batch_size=16, epochs=1, **options)
        algorithm = fm.federate(method, fm.Federation(cohort_size=3, devices=1, lanes=1))
        step, state = jax.jit(algorithm.round), algorithm.init(KEY, problems.data())
        for _ in range(2):
            state, _ = step(jax.random.fold_in(KEY, state.round), state, problems.data())
        leaves = jax.tree_util.tree_leaves_with_path((state.model, state.personal, state.memory))
        found.append([leaf for path, leaf in leaves if "batch_stats" not in path_names(path)])
    assert problems.distance(*found) < 1e-12


def test_running_statistics_are_never_critical_parameters():
    """FedCAC's clients train and test with the global ones, though theirs changed as much as any parameter."""
    algorithm = fm.federate(fm.fedcac(problems.normed_task(), share=1.0), fm.Federation(cohort_size=3, devices=1, lanes=1))
    state, _ = jax.jit(algorithm.round)(KEY, algorithm.init(KEY, problems.data()), problems.data())
    client = int(np.argmax(state.seen))
    variables = algorithm.personalize(KEY, state, problems.data().client(client)["test_support"], client)
    own = jax.tree.map(lambda leaf: leaf[client], state.personal)
    assert problems.leaves_equal(variables["batch_stats"], state.extra["batch_stats"])
    assert problems.distance(own["batch_stats"], state.extra["batch_stats"]) > 1e-3


def test_learned_rates_move_running_statistics_as_fixed_ones_do():
    """In the first round both adapt with the same rate, so that the query pass sees the same model."""
    rounds = []
    for builder in (fm.fedmeta, fm.fedmeta_metasgd):
        method = builder(problems.normed_task(), inner_lr=0.1, batch_size=None)
        algorithm = fm.federate(method, fm.Federation(cohort_size=3, devices=1, lanes=1))
        start = algorithm.init(KEY, tiny())
        rounds.append([of_statistics(state.model) for state in (start, jax.jit(algorithm.round)(KEY, start, tiny())[0])])
    (before, fixed), (_, learned) = rounds
    assert len(fixed) == 2 and all(problems.distance(before[leaf], fixed[leaf]) > 1e-3 for leaf in fixed)
    assert all(problems.distance(fixed[leaf], learned[leaf]) < 1e-12 for leaf in fixed)


@pytest.mark.parametrize("name", ["fedrep", "fedpac", "fedper", "fedmeta_per"])
def test_buffers_of_an_own_head_stay_with_its_client(name):
    task = problems.task()
    trainable = {"body": {"w": True, "b": False}, "head": {"w": True, "b": False}}
    roles = fm.METHODS[name](task._replace(trainable=lambda variables: trainable)).roles
    assert roles["head"] == {"w": Role.PERSONAL, "b": Role.PERSONAL}
    assert roles["body"] == {"w": Role.SHARED, "b": Role.BUFFER}


def test_fedala_blends_no_running_statistics():
    """Also where all layers are the higher ones, a client starts and tests with those of the server."""
    method = fm.fedala(problems.normed_task(), adapts="all", most_passes=1, lr=0.1)
    algorithm = fm.federate(method, fm.Federation(cohort_size=3, devices=1, lanes=1))
    state, _ = jax.jit(algorithm.round)(KEY, algorithm.init(KEY, problems.data()), problems.data())
    client = int(np.argmax(state.seen))
    assert not of_statistics(state.memory.weights) and not of_statistics(state.memory.model)
    view = problems.data().client(client)["test_support"]
    variables = jax.jit(lambda state: algorithm.personalize(KEY, state, view, client))(state)
    assert problems.leaves_equal(variables["batch_stats"], state.model["batch_stats"])
    assert problems.distance(variables["params"], state.model["params"]) > 1e-4
