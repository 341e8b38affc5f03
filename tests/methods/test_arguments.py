"""Wrong hyper-parameters are refused when a method is built, not in the middle of its first round."""

import inspect

import optax
import pytest

import fedjax_meta as fm
from tests import problems

BAD = [
    (fm.fedavg, {"lr": 0}, "lr=0 must be finite and above 0"),
    (fm.fedavg, {"epochs": 0}, "epochs=0 must be an integer of at least 1"),
    (fm.fedavg, {"batch_size": 0}, "batch_size=0 must be an integer"),
    (fm.fedavg, {"finetune_epochs": -1}, "finetune_epochs=-1 must be an integer of at least 0"),
    (fm.fedavg, {"weighting": "size"}, "weighting='size' is unknown; allowed are samples, query, uniform"),
    (fm.fedavg, {"personal": "tail"}, "personal='tail' is unknown"),
    (fm.fedavg, {"finetune": "tail"}, "finetune='tail' is unknown"),
    (fm.fedprox, {"prox_weight": -1}, "prox_weight=-1 must be finite and at least 0"),
    (fm.fedprox, {"lr": "fast"}, "lr='fast' must be finite and above 0"),
    (fm.fedprox, {"epochs": 0}, "epochs=0 must be an integer of at least 1"),
    (fm.fedprox, {"batch_size": 2.5}, "batch_size=2.5 must be an integer of at least 1"),
    (fm.fedmeta, {"inner_lr": -0.1}, "inner_lr=-0.1 must be finite and at least 0"),
    (fm.fedmeta, {"outer_lr": 0}, "outer_lr=0 must be finite and above 0"),
    (fm.fedmeta, {"inner_steps": 0}, "inner_steps=0 must be an integer of at least 1"),
    (fm.fedmeta, {"batch_size": 0}, "batch_size=0 must be an integer of at least 1"),
    (fm.fedmeta, {"weighting": "size"}, "weighting='size' is unknown"),
    (fm.fedmeta, {"score": "best"}, "score='best' is unknown; allowed are online, fitted"),
    (fm.fedmeta, {"outer_at": "cloud"}, "outer_at='cloud' is unknown; allowed are client, server"),
    (fm.fedmeta, {"personal_rates": "head"}, "personal_rates needs learned_rates=True"),
    (fm.Federation, {"cohort_size": 0}, "cohort_size=0 must be an integer of at least 1"),
]


@pytest.mark.parametrize(
    ("builder", "options", "message"), BAD, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_refused_when_built(builder, options, message):
    task = () if builder is fm.Federation else (problems.task(),)
    with pytest.raises(ValueError, match=message):
        builder(*task, **options)


WRONG = {
    "lr": 0,
    "head_lr": 0,
    "personal_lr": -1.0,
    "finetune_lr": 0.0,
    "inner_lr": -0.1,
    "outer_lr": 0,
    "server_lr": 0,
    "share_lr": -1,
    "prox_weight": -1,
    "epochs": 0,
    "head_epochs": -1,
    "body_epochs": -1,
    "inner_epochs": 0,
    "finetune_epochs": -1,
    "new_client_epochs": -1,
    "inner_steps": 0,
    "meta_steps": 0,
    "local_steps": 0,
    "test_steps": 0,
    "test_epochs": 0,
    "estimator": "exact",
    "test_lr": -0.1,
    "batch_size": 0,
    "optimizer": optax.sgd(0.1),
    "outer_optimizer": optax.sgd(0.1),
    "inner_optimizer": optax.sgd(0.1),
    "weighting": "size",
    "personal": "tail",
    "private": "tail",
    "head": "tail",
    "finetune": "tail",
    "adapts": "tail",
    "score": "best",
    "mix": "both",
}
"""A wrong value of every option that several methods have."""

ALL = [
    (name, option)
    for name, builder in fm.METHODS.items()
    for option in inspect.signature(builder).parameters
    if option in WRONG
]


@pytest.mark.parametrize(("name", "option"), ALL, ids=[".".join(pair) for pair in ALL])
def test_every_method_names_its_wrong_option(name, option):
    with pytest.raises(ValueError, match=rf"^{option}\b"):
        fm.METHODS[name](problems.task_of(name), **{option: WRONG[option]})


@pytest.mark.parametrize("name", [name for name, option in ALL if option == "weighting"])
def test_clients_count_as_was_asked_for(name):
    for weighting in ("samples", "query", "uniform"):
        assert fm.METHODS[name](problems.task_of(name), weighting=weighting).weighting == weighting


@pytest.mark.parametrize("name", fm.METHODS)
def test_an_option_that_no_method_has_is_refused_under_the_builders_name(name):
    for option in ("cohort_size", "upload_bits", "no_such_option"):
        with pytest.raises(TypeError, match=rf"^{name}\(\) takes no '{option}'"):
            fm.METHODS[name](problems.task_of(name), **{option: 1})


@pytest.mark.parametrize("name", fm.METHODS)
def test_the_record_of_a_method_holds_its_name_and_every_option(name):
    method = fm.METHODS[name](problems.task_of(name))
    options = [p.name for p in inspect.signature(fm.METHODS[name]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert method.config["method"] == method.name == name
    assert sorted(method.config) == sorted(["method", *options])


def test_the_result_of_an_estimator_is_none():
    with pytest.raises(ValueError, match=r"^estimator must be a function of the inner optimiser"):
        fm.fedmeta(problems.task(), estimator=fm.meta.exact(fm.meta.sgd(0.1)))


def test_a_near_name_is_suggested():
    with pytest.raises(TypeError, match=r"fedavg\(\) takes no 'epoch' \(did you mean 'epochs'\?\)"):
        fm.fedavg(problems.task(), epoch=1)


def test_the_first_argument_is_a_task():
    with pytest.raises(ValueError, match="fedavg's first argument must be a Task"):
        fm.fedavg(lambda x: x)
    with pytest.raises(TypeError, match="fedavg takes a task and, by name, lr"):
        fm.fedavg(problems.task(), 0.1)
