"""What systems of personalised federated learning do with a client never seen, and with clients that lack classes."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import features, masks
from tests import problems
from tests.algorithms.common import FULL, KEY, build, gradient, of, personalized, run, start, step

SYSTEMS = [
    *(
        "apfl",
        "apfl_outputs",
        "ditto",
        "fedamp",
        "heur_fedamp",
        "fedavg",
        "fedavg_ft",
        "fedbabu",
        "fedem",
        "fedfomo",
        "fedpac",
    ),
    *("fedper", "fedprox", "fedrep", "fedrod", "knn_per", "l2gd", "lg_fedavg", "local_only", "moon", "pfedhn", "pfedhn_pc"),
    *("pfedme", "scaffold"),
]
OPTIONS = {"cohort_size": 3, "devices": 1, "batch_size": 8, "lr": 0.1}


@pytest.mark.parametrize("name", SYSTEMS)
def test_its_documentation_says_what_a_client_never_seen_does(name):
    builder = getattr(fm.ALGORITHMS[name], "func", fm.ALGORITHMS[name])
    assert re.search(r"\b(new client|new one|never took part|never seen|every client)", inspect.getdoc(builder), re.I)


def test_a_new_client_of_fedper_fits_the_servers_head_on_the_shared_body():
    algorithm = build("fedper", **FULL, lr=0.1, new_client_epochs=1, finetune="head")
    state, head = run(algorithm, 2), masks.resolve("head", problems.task())
    slope = jax.tree.map(lambda mine, leaf: leaf if mine else 0 * leaf, head, gradient(state.model, 3, "test_support"))
    assert problems.distance(personalized(algorithm, state, None, of_client=3), step(state.model, 0.1, slope)) < 1e-12
    assert problems.leaves_equal(masks.split(personalized(algorithm, state, 3), head)[0], of(state.personal, 3))


def test_a_new_client_of_local_training_begins_at_the_initial_model_and_a_known_one_goes_on():
    algorithm = build("local_only", **FULL, lr=0.1, new_client_epochs=1)
    first, state = start(algorithm).model, run(algorithm, 2)
    expected = step(first, 0.1, gradient(first, 3, "test_support"))
    assert problems.distance(personalized(algorithm, state, None, of_client=3), expected) < 1e-12
    expected = step(first, 0.1, gradient(first, 3))
    expected = step(expected, 0.1, gradient(expected, 3))
    assert problems.distance(personalized(algorithm, state, 3), expected) < 1e-12


@pytest.mark.parametrize("name", ["fedpac", "moon", "fedrod", "knn_per"])
def test_a_task_without_features_is_refused_by_name(name):
    for without in ({"features": None}, {"head": None}):
        with pytest.raises(ValueError, match=f"{name} looks at features, but the task has no features and head"):
            fm.ALGORITHMS[name](problems.task()._replace(**without))
    with pytest.raises(ValueError, match="with_projection looks at features"):
        features.with_projection(problems.task()._replace(features=None), 4, 3)


@pytest.mark.parametrize("name", ["fedper", "lg_fedavg", "fedrep", "fedbabu", "fedpac", "pfedhn_pc", "fedavg_ft"])
def test_a_task_that_does_not_name_its_layers_has_no_head_to_keep(name):
    with pytest.raises(ValueError, match="layers"):
        fm.ALGORITHMS[name](problems.task()._replace(layers=()))


def lacking():
    """Client 0 has one class, client 1 two, and nobody has class 2."""
    rng = np.random.default_rng(0)
    labels = (np.zeros(20, int), np.arange(30) % 2, np.arange(25) % 2)
    return fm.from_clients([(rng.normal(size=(len(y), 5)), y) for y in labels], num_classes=3)


@pytest.mark.parametrize("name", ["fedpac", "fedrod", "moon", "knn_per", "fedem"])
def test_a_client_of_one_class_and_a_class_of_nobody_leave_everything_finite(name):
    algorithm, data = build(name, **OPTIONS), lacking()
    state = run(algorithm, 3, data=data)
    assert all(
        bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)
    )
    result = jax.jit(lambda state: fm.evaluate.evaluate(algorithm, KEY, state, data, support="train", query="test"))(state)
    assert bool(jnp.all(jnp.isfinite(result.loss)))
    if name in ("fedpac", "fedrod", "knn_per"):  # These give client 0 a predictor of its own, and it needs to know one class.
        assert float(fm.evaluate.accuracy(result.confusion)[0]) == 1


def test_a_cohort_larger_than_the_population_names_both_numbers():
    for name in ("fedpac", "fedfomo", "fedamp", "pfedhn"):
        algorithm = fm.ALGORITHMS[name](problems.task(), cohort_size=8)
        with pytest.raises(ValueError, match="cohort_size=8 is more than the N=7"):
            algorithm.round(KEY, jax.eval_shape(algorithm.init, KEY, problems.data()), problems.data())


def test_every_system_of_the_comparison_is_among_them():
    from experiments.fedpac import SYSTEMS as COMPARED

    assert {system.algorithm for system in COMPARED.values()} <= set(SYSTEMS)
