"""What methods of personalised federated learning do with new clients, and with clients that lack classes."""

import inspect
import re
import sys

import jax
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import features, masks
from tests import problems
from tests.methods.common import FULL, KEY, build, gradient, of, personalized, run, start, step

OPTIONS = {"cohort_size": 3, "devices": 1, "batch_size": 8, "lr": 0.1}


@pytest.mark.parametrize("name", fm.METHODS)
def test_its_documentation_says_what_a_new_client_does(name):
    text = inspect.getdoc(fm.METHODS[name])
    # A variant refers to the method that it varies.
    base = re.search(r"errors: as in `(\w+)`", text)
    if base:
        text += inspect.getdoc(getattr(sys.modules[fm.METHODS[name].__module__], base[1]))
    assert re.search(r"\b(new client|new one|never took part|every client|known or new|one that did not)", text, re.I)


def test_a_new_client_of_fedper_fits_the_servers_head_on_the_shared_body():
    algorithm = build("fedper", **FULL, lr=0.1, new_client_epochs=1, finetune="head")
    state, head = run(algorithm, 2), masks.resolve("head", problems.task())
    slope = jax.tree.map(lambda mine, leaf: leaf if mine else 0 * leaf, head, gradient(state.model, 3, "test_support"))
    assert problems.distance(personalized(algorithm, state, None, of_client=3), step(state.model, 0.1, slope)) < 1e-12
    assert problems.leaves_equal(masks.split(personalized(algorithm, state, 3), head)[0], of(state.personal, 3))


def test_a_new_client_of_local_training_starts_at_the_initial_model_and_a_known_one_continues():
    algorithm = build("local_only", **FULL, lr=0.1, new_client_epochs=1)
    first, state = start(algorithm).model, run(algorithm, 2)
    expected = step(first, 0.1, gradient(first, 3, "test_support"))
    assert problems.distance(personalized(algorithm, state, None, of_client=3), expected) < 1e-12
    expected = step(first, 0.1, gradient(first, 3))
    expected = step(expected, 0.1, gradient(expected, 3))
    assert problems.distance(personalized(algorithm, state, 3), expected) < 1e-12


LACKING = {
    "features": "{name} looks at features, but the task has no features and head",
    "head": "{name} looks at features, but the task has no features and head",
    "layers": "='(head|body)': this task names no layers",
}
"""How a builder refuses a task that does not say what the method needs."""


@pytest.mark.parametrize("name", fm.METHODS)
def test_a_task_without_features_or_layers_is_refused_or_serves(name):
    task, options = problems.task_of(name), problems.TRIED_WITH.get(name, {})
    missing = {"features": None, "head": None, "layers": ()}
    refused = []
    for what, nothing in missing.items():
        try:
            fm.METHODS[name](task._replace(**{what: nothing}), **options)
        except ValueError as error:
            assert re.search(LACKING[what].format(name=name), str(error))
            refused.append(what)
    assert ("features" in refused) == ("head" in refused)
    # A mask of a layer that nobody names must not become no mask.
    defaults = {
        option.default for option in inspect.signature(fm.METHODS[name]).parameters.values() if type(option.default) is str
    }
    assert "layers" in refused or not defaults & {"head", "body"}
    needless = {what: nothing for what, nothing in missing.items() if what not in refused}
    algorithm = fm.federate(fm.METHODS[name](task._replace(**needless), **options), fm.Federation(cohort_size=3, devices=1))
    state, view = jax.eval_shape(algorithm.init, KEY, problems.data()), problems.data().client(0)["test_support"]
    jax.eval_shape(algorithm.round, KEY, state, problems.data())
    jax.eval_shape(lambda state: algorithm.personalize(KEY, state, view, None), state)


def test_a_projection_needs_features():
    with pytest.raises(ValueError, match="with_projection looks at features"):
        features.with_projection(problems.task()._replace(features=None), 4, 3)


def lacking():
    """Client 0 has one class, client 1 two, and no client has class 2."""
    rng = np.random.default_rng(0)
    labels = (np.zeros(20, int), np.arange(30) % 2, np.arange(25) % 2)
    return fm.from_clients([(rng.normal(size=(len(y), 5)), y) for y in labels], num_classes=3)


@pytest.mark.parametrize(
    "name",
    [
        "fedpac",
        "fedrod",
        "moon",
        "knn_per",
        "fedem",
        "fedproto",
        "feddbe",
        "fedas",
        "gpfl",
        "ifca",
        "cfl",
        "afl",
        "qfedavg",
        "fedgp",
        "mocha",
    ],
)
def test_a_client_of_one_class_and_a_class_without_clients_leave_everything_finite(name):
    own = {"cfl": {"clusters": 3}, "fedgp": {"capacity": 16}, "mocha": {"capacity": 64}}.get(name, {})
    options = {key: value for key, value in OPTIONS.items() if key in inspect.signature(fm.METHODS[name]).parameters}
    federation = {key: OPTIONS[key] for key in ("cohort_size", "devices")}
    algorithm, data = build(name, **{**federation, **options, **own}), lacking()
    state = run(algorithm, 3, data=data)
    assert problems.finite(state)
    result = jax.jit(lambda state: fm.evaluate(algorithm, KEY, state, data, support="train", query="test"))(state)
    assert problems.finite(result.loss)
    if name in (
        "fedpac",
        "fedrod",
        "knn_per",
        "fedgp",
        "mocha",
    ):  # These give client 0 a predictor of its own, which needs to know one class only.
        assert float(fm.metrics.accuracy(result.confusion)[0]) == 1


def test_a_cohort_larger_than_the_population_names_both_numbers():
    for name in ("fedpac", "fedfomo", "fedamp", "pfedhn"):
        algorithm = build(name, cohort_size=8)
        with pytest.raises(ValueError, match="cohort_size=8 is more than the N=7"):
            algorithm.round(KEY, jax.eval_shape(algorithm.init, KEY, problems.data()), problems.data())
