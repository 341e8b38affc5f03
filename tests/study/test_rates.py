"""Rates that change over the rounds of a study."""

import dataclasses
import json
import re
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta.study import from_tree, presets, results, run, to_tree
from fedjax_meta.study.parts import RATES, made
from fedjax_meta.study.rates import times
from fedjax_meta.study.system import System
from tests.study.common import Silent, study

PLAIN = {"epochs": 1, "batch_size": 20}


def factors(name, **options):
    return np.array([times(1.0, made("rates", RATES, {"name": name, **options}))(r) for r in range(12)])


@pytest.mark.parametrize(
    ("name", "options", "formula"),
    [
        ("cosine", {"rounds": 10, "end": 0.2}, lambda r: 0.2 + 0.8 * (1 + np.cos(np.pi * min(r, 10) / 10)) / 2),
        ("cosine", {"rounds": 10, "warmup": 4}, lambda r: (r + 1) / 4 if r < 4 else _cosine(min(r - 4, 6) / 6)),
        ("linear", {"rounds": 10, "end": 0.1}, lambda r: 1 - 0.9 * min(r, 10) / 10),
        ("linear", {"rounds": 9, "end": 0.5, "warmup": 1}, lambda r: 1 if r == 0 else 1 - 0.5 * min(r - 1, 8) / 8),
        ("exponential", {"factor": 0.9}, lambda r: 0.9**r),
        ("exponential", {"factor": 0.5, "every": 3}, lambda r: 0.5 ** (r // 3)),
        ("steps", {"after": [3, 7]}, lambda r: 1 if r < 3 else 0.1 if r < 7 else 0.01),
        ("inverse", {}, lambda r: 1 / (1 + r)),
        ("inverse", {"power": 0.5, "half": 4}, lambda r: (1 + r / 4) ** -0.5),
    ],
)
def test_factors_are_those_of_their_formulas(name, options, formula):
    np.testing.assert_allclose(factors(name, **options), [formula(r) for r in range(12)], rtol=1e-6)


def _cosine(share):
    return 0.01 + 0.99 * (1 + np.cos(np.pi * share)) / 2


def rounds_of(algorithm_of, clients, rounds=3):
    """The states of rounds, each of which may have an algorithm of its own."""
    key, state = jax.random.key(3), algorithm_of(0).init(jax.random.key(2), clients.train)
    for r in range(rounds):
        state, _ = jax.jit(algorithm_of(r).round)(jax.random.fold_in(key, r), state, clients.train)
        yield state


def test_each_round_and_each_test_has_its_own_rate():
    chosen = study(rounds=4)
    clients = chosen.scenarios["pairs"].build()
    system = System(method="fedavg", options={**PLAIN, "lr": 0.2}, rates={"lr": {"name": "exponential", "factor": 0.5}})
    halved = [System(method="fedavg", options={**PLAIN, "lr": 0.2 * 0.5**r}).build(clients) for r in range(4)]
    falling = system.build(clients)
    states = list(rounds_of(lambda r: falling, clients))
    for mine, theirs in zip(states, rounds_of(lambda r: halved[r], clients), strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine.model, theirs.model)
    tests = [fm.evaluate(one, jax.random.key(5), states[-1], clients.train, support="train") for one in (falling, halved[3])]
    np.testing.assert_array_equal(tests[0].loss, tests[1].loss)
    fixed = System(**{**vars(system), "tested_with": {"lr": 0.3}}).tested()
    assert fixed.rates == {} and fixed.options["lr"] == 0.3


def test_tests_may_have_a_rate_of_their_own_where_a_grid_has_that_of_rounds(tmp_path):
    plain = {"method": "fedavg_ft", "options": {**PLAIN, "lr": 0.1}, "rates": {"lr": "inverse"}, "tested_with": {"lr": 0.3}}
    grid = {**plain, "options": PLAIN, "grid": {"lr": [0.1]}}
    outcomes = run.run(study(systems={"plain": plain, "grid": grid}, rounds=1, seeds=[1]), tmp_path, watcher=Silent())
    alone, of_grid = ([trial.rows[-1]["tests"]["known"]["loss"] for trial in one.final] for one in outcomes)
    np.testing.assert_allclose(of_grid, alone, rtol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "yogi", "adagrad", "adamw", "fedadam", "fedyogi"])
def test_the_servers_rate_is_that_of_a_schedule_of_optax(optimizer):
    clients = study().scenarios["pairs"].build()
    own = {"server_optimizer": optimizer, "server_lr": 0.1, "cohort_size": 4}
    rates = {"server_lr": {"name": "linear", "rounds": 3, "end": 0.1}}
    system = System(method="fedavg", options={**PLAIN, "lr": 0.1}, federation=own, rates=rates)
    falling, factor = system.build(clients), made("rates", RATES, rates["server_lr"])
    maker = System(method="fedavg", federation=own).parts(clients)[1].server_optimizer

    def scheduled(rate):
        if not optimizer.startswith("fed"):
            return maker(lambda count: rate * factor(1.0 * count))
        # These take no schedule: one optimiser for each round, on the same state.
        return optax.GradientTransformation(
            lambda params: (maker(rate).init(params), 0),
            lambda g, state, params: (
                (made_ := maker(rate * factor(1.0 * state[1])).update(g, state[0], params))[0],
                (made_[1], state[1] + 1),
            ),
        )

    task = clients.task
    by_hand = fm.federate(
        fm.fedavg(task, **PLAIN, lr=0.1), fm.Federation(cohort_size=4, server_optimizer=scheduled, server_lr=0.1)
    )
    for mine, theirs in zip(rounds_of(lambda r: falling, clients), rounds_of(lambda r: by_hand, clients), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), mine.model, theirs.model)


def test_a_servers_rate_that_is_not_given_falls_from_1():
    clients = study().scenarios["pairs"].build()
    system = {"method": "fedavg", "options": {**PLAIN, "lr": 0.1}, "rates": {"server_lr": "inverse"}}
    plain, given = (System(**system, federation={"cohort_size": 4, **own}).build(clients) for own in ({}, {"server_lr": 1.0}))
    for mine, theirs in zip(rounds_of(lambda r: plain, clients, 2), rounds_of(lambda r: given, clients, 2), strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine.model, theirs.model)


def test_a_study_tells_the_rounds_and_a_grid_multiplies_the_factor(tmp_path):
    rates = {"lr": "cosine"}
    of_grid = {"a": {"method": "fedavg", "options": PLAIN, "grid": {"lr": [0.002, 0.2]}, "rates": rates}}
    (outcome,) = run.run(study(systems=of_grid), tmp_path / "grid", watcher=Silent())
    assert outcome.chosen == {"lr": 0.2}
    alone = {"a": {"method": "fedavg", "options": {**PLAIN, "lr": 0.2}, "rates": {"lr": {"name": "cosine", "rounds": 4}}}}
    (same,) = run.run(study(systems=alone), tmp_path / "alone", watcher=Silent())
    last = [[trial.rows[-1]["tests"]["known"]["loss"] for trial in one.final] for one in (outcome, same)]
    np.testing.assert_allclose(*last, rtol=1e-6)
    (flat,) = run.run(study(systems={"a": {**alone["a"], "rates": {}}}), tmp_path / "flat", watcher=Silent())
    assert not np.allclose(last[0], [trial.rows[-1]["tests"]["known"]["loss"] for trial in flat.final], rtol=1e-3)

    with pytest.raises(ValueError, match="systems.a.rates.lr.rounds was 4 and is 6 now"):
        run.run(study(systems=of_grid, rounds=6), tmp_path / "grid", watcher=Silent())
    config = json.loads((tmp_path / "grid" / "run.json").read_text())
    assert "decay_steps=4" in json.dumps(config)
    preset = presets.read(tmp_path / "grid" / "presets" / "pairs.yaml", "pairs")["a"]
    assert preset.rates == rates
    again = System(method="fedavg", preset=f"{tmp_path}/grid/presets/pairs/a")
    assert again.rates == rates and again.options["lr"] == 0.2
    assert System(method="fedavg", preset=f"{tmp_path}/grid/presets/pairs/a", rates={"lr": "linear"}).rates == {"lr": "linear"}
    of_preset = partial(System, method="fedavg", preset=f"{tmp_path}/grid/presets/pairs/a")
    for own in ({"options": {"lr": 0.05}}, {"grid": {"lr": [0.1, 0.2]}}, {"rates": {"lr": None}}):
        assert of_preset(**own).changing == study(systems={"b": {**vars(of_preset(**own))}}).system("b").changing == {}, own
    assert "lr changes over the rounds" in str(preset)
    chosen = study(systems=of_grid)
    assert (
        "lr changes over the rounds: cosine" in results.lines(chosen, "pairs", run.build(chosen)["pairs"], [outcome])[0].remark
    )
    tested = System(method="fedavg", preset=f"{tmp_path}/grid/presets/pairs/a", tested_with={"lr": 0.3}).tested()
    assert tested.rates == {} and tested.options["lr"] == 0.3


def test_a_run_with_rates_goes_on_where_it_was_stopped_and_takes_more_rounds_where_rates_do_not_span_them(tmp_path):
    one = {
        "a": {
            "method": "fedper",
            "options": {**PLAIN, "lr": 0.1},
            "federation": {"server_optimizer": "adam", "server_lr": 0.05},
        }
    }
    one["a"]["rates"] = {"lr": {"name": "steps", "after": [1, 3]}, "server_lr": {"name": "inverse"}}
    (whole,) = run.run(study(systems=one), tmp_path / "whole", watcher=Silent())
    with pytest.raises(KeyboardInterrupt):
        run.run(study(systems=one), tmp_path / "stopped", watcher=Silent(stop_at=2))
    run.run(study(systems=one), tmp_path / "stopped", watcher=Silent())
    run.run(study(systems=one, rounds=2), tmp_path / "longer", watcher=Silent())
    for name in ("stopped", "longer"):
        again = run.run(study(systems=one), tmp_path / name, watcher=Silent())[0]
        assert [t.rows[-1]["tests"] for t in again.final] == [t.rows[-1]["tests"] for t in whole.final]


@pytest.mark.parametrize(
    ("system", "words"),
    [
        ({"rates": "cosine"}, "rates='cosine' must be a mapping of names and values"),
        ({"rates": {"lr": 0.9}}, "rates: lr must be a name, or a mapping with a name and options, not 0.9"),
        ({"rates": {"lr": {"cosine": {"end": 0.1}}}}, "; write {name: cosine, OPTION: VALUE}"),
        ({"options": {"lr": {"name": ["a"]}}, "rates": {"lr:cosine": None}}, "rates of fedavg takes no 'lr:cosine'"),
        ({"rates": {"lr": "cosin"}}, "rates: lr='cosin' is unknown (did you mean 'cosine'?)"),
        ({"rates": {"lr": {"name": "cosine", "end": 0}}}, "end=0 must be finite and above 0"),
        ({"rates": {"lr": {"name": "linear", "rounds": 3, "warmup": 3}}}, "warmup=3 must be below rounds=3"),
        ({"rates": {"lr": {"name": "exponential", "factor": 2}}}, "factor=2 must lie between 0 and 1"),
        ({"rates": {"lr": {"name": "steps", "after": [3, 3]}}}, "after=[3, 3] must increase"),
        ({"rates": {"lr": {"name": "steps", "after": 3}}}, "after=3 must be a list of numbers of rounds, e.g. [50, 75]"),
        ({"rates": {"epochs": "cosine"}}, "rates of fedavg takes no 'epochs'; allowed are lr, finetune_lr, server_lr"),
        ({"options": {"lr": "cosine(end=0.1)"}}, "give lr a number, and beside it rates: {lr: cosine}"),
        ({"options": {"lr": {"name": "cosine"}}}, "give lr a number, and beside it rates: {lr: cosine}"),
        ({"method": "fedadam", "rates": {"server_lr": "cosine"}}, "rates: fedadam has server_lr of its own"),
        ({"pooled": True, "rates": {"lr": "cosine"}}, "pooled and rates, which change over the rounds of a federation"),
    ],
)
def test_rates_that_cannot_be_are_refused(system, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        System(**{"method": "fedavg", **system})


@pytest.mark.parametrize(
    ("system", "words"),
    [
        ({"method": "fedavg", "rates": {"finetune_lr": "inverse"}}, "rates: finetune_lr has no value that could change"),
        ({"method": "fedadam", "rates": {"server_lr": "inverse"}, "federation": {}}, "server_lr of its own"),
        ({"method": "fedmeta_server", "rates": {"server_lr": "inverse"}}, "fedmeta_server has a server optimiser of its own"),
        ({"method": "fedmeta_server", "rates": {"outer_lr": "inverse"}}, "gives outer_lr to its own server optimiser"),
        (
            {"method": "pfedsim", "rates": {"server_lr": "inverse"}},
            "rates: server_lr of pfedsim cannot change: after the warm-up",
        ),
        ({"method": "fedavg", "options": {"lr": True}, "rates": {"lr": "inverse"}}, "lr=True must be a finite number"),
        ({"method": "fedavg", "options": {"lr": "a"}, "rates": {"lr": "inverse"}}, "lr='a' must be a finite number: a number"),
        (
            {
                "method": "fedavg",
                "rates": {"server_lr": "inverse"},
                "federation": {
                    "cohort_size": 1,
                    "schedule": {"name": "fedasync", "seconds": [1.0] * 10, "rounds": 9, "concurrency": 2, "most_stale": 3},
                },
            },
            "in fedasync, server_lr is a share of models that are mixed: leave server_lr out of rates",
        ),
    ],
)
def test_rates_that_a_method_or_a_federation_cannot_change_are_refused(system, words):
    clients = study().scenarios["pairs"].build()
    with pytest.raises(ValueError, match=re.escape(words)):
        System(**system).build(clients)


def test_a_preset_says_how_its_own_values_change_and_no_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = {"method": "fedprox", "options": {"epochs": 1}, "chosen": {"prox_weight": 0.1}, "score": 90.0}
    entry |= {
        "rates": {"lr": "cosine", "server_lr": "inverse"},
        "federation": {"server_lr": 0.5},
        "at the end of its grid": [],
    }
    presets.write(presets.HERE / "mine.yaml", {"systems": {"x": entry}})
    one = {"method": "fedprox", "preset": "mine/x"}
    assert System(**one).changing == {"lr": "cosine"} and System(**one, pooled=True).changing == {}
    constant = from_tree(to_tree(study(systems={"x": {**one, "rates": {"lr": None}}})))
    assert constant.system("x").changing == {}
    with pytest.raises(ValueError, match="rates of fedprox takes no 'Lr'"):
        System(**one, rates={"Lr": None})


def test_an_error_of_ones_own_rule_is_not_put_down_to_a_rate():
    @fm.method_builder
    def own(task, *, lr=0.1):
        base = fm.fedavg(task, lr=lr)

        def client(key, received, data):
            return base.client(key, received, data) if received.round > 3 else None

        return dataclasses.replace(base, client=client)

    method = fm.rates.scheduled(own, study().scenarios["pairs"].build().task, rates={"lr": times(0.1, lambda r: 0.9**r)})
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.eval_shape(lambda round_: method.client(None, SimpleNamespace(round=round_), None), np.int32(0))


def test_the_record_of_a_rate_says_how_it_changes():
    factor = made("rates", RATES, {"name": "exponential", "factor": 0.9})
    assert "start=0.1" in (said := fm.config.plain(times(0.1, factor))) and "decay_rate=0.9" in said
