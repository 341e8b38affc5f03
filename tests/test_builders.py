"""Builders: arguments are checked at the call under the builder's own name, and recorded."""

import functools
import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta.config import plain
from fedjax_meta.federation import OPTIONS
from tests import problems


def test_the_config_holds_name_and_every_option_as_json():
    algorithm = fm.federate(fm.fedadam(problems.task(), lr=np.float32(0.1)), fm.Federation(cohort_size=3))
    config = json.loads(json.dumps(algorithm.config))
    assert config["method"] == "fedadam" and config["rule"] == "adam" and config["lr"] == 0.1
    assert config["optimizer"] == "optax._src.alias.sgd"
    assert config["federation"]["cohort_size"] == 3 and set(config["federation"]) == set(OPTIONS)


def test_a_traced_rate_is_recorded_as_traced():
    found = []

    def build(rate):
        found.append(fm.fedavg(problems.task(), lr=rate).config["lr"])
        return rate

    jax.make_jaxpr(build)(0.1)
    assert found == ["traced"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (np.int64(3), 3),
        (jnp.float32(0.1), 0.1),
        (jnp.arange(3), [0, 1, 2]),
        ((1, "a"), [1, "a"]),
        (fm.masks.Role.SHARED, "shared"),
        ({"a": (1.5,)}, {"a": [1.5]}),
        (optax.adam, "optax._src.alias.adam"),
        (functools.partial(optax.sgd, momentum=0.9), "optax._src.alias.sgd(momentum=0.9)"),
        (fm.uploads.clip(2.0), {"name": "clip", "norm": 2.0}),
        (jax.random.key(7), [0, 7]),
        (
            fm.participation.unreliable(late=0.1),
            "fedjax_meta.participation._unreliable(late=0.1, crashed=0.0)",
        ),
        (
            fm.aggregate.trimmed_mean(0.1),
            "fedjax_meta.aggregate.ranks._by_rank(fedjax_meta.aggregate.ranks._inner_mean(0.1))",
        ),
        (fm.schedules.given([[0, 1]]), "fedjax_meta.schedules._given([[0, 1]])"),
    ],
)
def test_plain_values(value, expected):
    assert plain(value) == expected
    json.dumps(plain(value))


def test_functions_that_differ_in_what_they_hold_are_recorded_as_different():
    def scheduled(start, **more):
        def schedule(round, power=2):
            return start / (1 + round) ** power

        return functools.partial(schedule, **more) if more else schedule

    different = [
        scheduled(0.1),
        scheduled(0.2),
        scheduled(0.1, power=3),
        optax.exponential_decay(0.1, 10, 0.5),
        optax.exponential_decay(1.0, 3, 0.9),
        optax.join_schedules([optax.constant_schedule(1.0), optax.constant_schedule(2.0)], [10]),
        optax.join_schedules([optax.constant_schedule(1.0), optax.constant_schedule(3.0)], [10]),
        lambda rate: optax.sgd(rate, momentum=0.9),
        lambda rate: optax.sgd(rate, momentum=0.1),
        lambda rate: optax.sgd(rate, nesterov=0.1),
        jax.jit(lambda x: x + 1),
        jax.jit(lambda x: x + 2),
    ]
    assert len({plain(one) for one in different}) == len(different)
    assert plain(scheduled(0.1)) == plain(scheduled(0.1)) and plain(scheduled(0.1)).endswith("schedule(start=0.1, power=2)")

    def descent(m):
        return lambda rate: optax.sgd(rate, momentum=m)

    assert plain(descent(0.5)) == plain(descent(0.5)) != plain(descent(0.6)) and plain(descent(0.5)).endswith("(m=0.5)")


def test_what_a_function_holds_is_told_shortly_and_only_once_where_it_holds_itself():
    def made(held):
        return lambda: held

    def again(n):
        return again(n - 1)

    for value, words in (
        (np.arange(3), "held=[0, 1, 2]"),
        (np.zeros((50, 2)), "held=float64[50, 2]"),
        ({"a": [1, None]}, "held={a: [1, None]}"),
        (np.random.default_rng(0), "held=Generator"),
        (list(range(99)), "held=list"),
    ):
        assert plain(made(value)).endswith(f"({words})")
    name = f"{again.__module__}.{again.__qualname__}"
    assert plain(again) == f"{name}(again={name})"


def test_a_variant_shows_its_own_name_docstring_and_defaults():
    signature = inspect.signature(fm.fedper)
    assert signature.parameters["personal"].default == "head"
    assert signature.parameters["lr"].default == inspect.signature(fm.fedavg).parameters["lr"].default
    assert fm.fedper.__name__ == "fedper" and fm.fedper.__module__ == "fedjax_meta.methods.fedavg"
    assert fm.fedper.__doc__.startswith("FedPer: ") and "as in `fedavg`, with personal='head'" in fm.fedper.__doc__
    assert "partial" not in repr(fm.fedadam)


def test_a_variant_of_an_option_that_its_base_does_not_take_is_refused():
    with pytest.raises(TypeError, match=r"fedavg\(\) takes no 'personel' \(did you mean 'personal'\?\)"):
        fm.variant(fm.fedavg, personel="head")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda task: fm.reptile(task, lrr=0.1), TypeError, r"reptile\(\) takes no 'lrr'.*allowed are inner_lr, outer_lr"),
        (lambda task: fm.fedavg(task, lanes=2), TypeError, r"fedavg\(\) takes no 'lanes', which belongs to Federation"),
        (lambda task: fm.fedavg(task, new_client=print), TypeError, r"fedavg\(\) takes no 'new_client', which belongs to Fed"),
        (
            lambda task: fm.fedavg(task, 0.1),
            TypeError,
            r"fedavg takes a task and, by name, lr, .*write fedavg\(task, lr=...\)",
        ),
        (
            lambda task: fm.fedavg(task.predict),
            ValueError,
            r"fedavg's first argument must be a Task, e.g. fm.classification\(",
        ),
        (
            lambda task: fm.fedmeta(task, estimator=fm.meta.exact(fm.meta.sgd(0.1))),
            ValueError,
            "estimator must be a function of",
        ),
        (lambda task: fm.fedmeta(task, estimator="exact"), ValueError, "estimator must be a function of the inner optimiser"),
        (
            lambda task: fm.Federation(cohortsize=3),
            TypeError,
            r"Federation\(\) takes no 'cohortsize' \(did you mean 'cohort_size'",
        ),
        (lambda task: fm.fedavg(), ValueError, "fedavg's first argument must be a Task"),
        (
            lambda task: fm.fedavg(task, optimizer=optax.sgd(0.1)),
            ValueError,
            "optimizer must be a factory `rate -> optax.GradientTransformation`",
        ),
        (
            lambda task: fm.fedavg(task, personal={"head": True}),
            ValueError,
            r"personal .*one value at \['head'\], where there",
        ),
        (
            lambda task: fm.fedavg(task, personal={"head": {"w": True}}),
            ValueError,
            r"personal .*it has none at \['body'\]\['b'\]",
        ),
    ],
)
def test_likely_mistakes_get_one_clear_line(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call(problems.task())
    assert "\n" not in str(caught.value)


def own(text, name="own"):
    """A builder from a text, as a file would have it."""
    body = (
        "    return fm.Method(init=task.init, client=None or task.loss, personalize=fm.received_model, predict=task.predict,"
    )
    body += " roles=fm.masks.roles(fm.masks.nothing(task), fm.masks.everything(task)))"
    space = {"fm": fm}
    exec(f"from __future__ import annotations\n@fm.method_builder\ndef {name}{text}:\n{body}\n", space)
    return space[name]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(task, lr=0.1)", r"own: options are given by name: write def own\(task, \*, lr, ...\)"),
        ("(task, *, participation=0.3)", "own: participation is the name of an option of Federation"),
    ],
)
def test_a_builder_that_a_study_could_not_call_is_refused(text, message):
    with pytest.raises(TypeError, match=message):
        own(text)


def test_an_option_that_is_missing_is_named_with_its_builder():
    with pytest.raises(TypeError, match=r"own: missing a required (keyword-only )?argument: 'lr'"):
        own("(task, *, lr)")(problems.task())


def test_annotations_may_be_text():
    """`from __future__ import annotations` makes them so."""
    build = own("(task, *, batch_size: int | None = 32, flag: bool = False)")
    assert build(problems.task(), batch_size=None).config["batch_size"] is None
    with pytest.raises(ValueError, match="flag=3 must be True or False"):
        build(problems.task(), flag=3)
    assert inspect.signature(build).parameters["batch_size"].annotation == int | None
    # A type that is imported for type checkers alone stays text.
    assert inspect.signature(own("(task, *, lr: Nowhere = 0.1)")).parameters["lr"].annotation == "Nowhere"
