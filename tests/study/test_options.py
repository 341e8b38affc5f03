"""Options of a run: devices, stores, delta, what becomes of runs that diverge, and grids of numbers that shape a program."""

import json

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from fedjax_meta import privacy
from fedjax_meta.cli import app
from fedjax_meta.study import baselines, estimate, figures, from_tree, guarantees, page, results, run, tuning
from fedjax_meta.study.check import check
from fedjax_meta.study.system import System
from tests.study.common import TREE, Silent, study, tree
from tests.study.test_study import without_clocks

FEDPER = {"fedper": {"method": "fedper", "options": {"epochs": 1, "batch_size": 20, "lr": 0.1}}}


def last(outcome):
    return np.array([trial.rows[-1]["tests"]["known"]["loss"] for trial in outcome.final])


@pytest.fixture(scope="module")
def on_device(tmp_path_factory):
    return run.run(study(systems=FEDPER), tmp_path_factory.mktemp("device"), watcher=Silent())


def test_a_store_gives_the_numbers_of_the_device_and_goes_on_where_it_was(on_device, tmp_path):
    whole = {}
    for store in ("host", "disk"):
        chosen = study(systems=FEDPER, store=store, devices=1)
        (whole[store],) = run.run(chosen, tmp_path / store, watcher=Silent(), clients=run.build(chosen))
    np.testing.assert_allclose(last(whole["host"]), last(on_device[0]), rtol=1e-5)
    assert without_clocks([whole["host"]]) == without_clocks([whole["disk"]])
    stopped = study(systems=FEDPER, store="host", devices=1)
    with pytest.raises(KeyboardInterrupt):
        run.run(stopped, tmp_path / "stopped", watcher=Silent(stop_at=2))
    # On other devices, and from the memory of the host to the disk.
    (again,) = run.run(study(systems=FEDPER, store="disk", devices=2), tmp_path / "stopped", watcher=Silent())
    np.testing.assert_allclose(last(again), last(whole["host"]), rtol=1e-5)
    with pytest.raises(ValueError, match="cannot resume: store was 'host or disk' when .* and is not set now"):
        run.run(study(systems=FEDPER), tmp_path / "host", watcher=Silent())


def test_another_number_of_devices_is_taken_up(on_device, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run.run(study(systems=FEDPER, devices=2), tmp_path, watcher=Silent(stop_at=2))
    again = run.run(study(systems=FEDPER, devices=1), tmp_path, watcher=Silent())
    assert without_clocks(again) == without_clocks(on_device)


def test_delta_is_that_of_the_study():
    noisy = {"fedavg": {"method": "fedavg", "options": {"lr": 0.1}, "federation": {"uploads": ["clip", "noise"]}}}
    noisy["fedavg"]["federation"]["uploads"] = [{"name": "clip", "norm": 1.0}, {"name": "noise", "multiplier": 2.0}]
    said = {}
    for delta in (None, 1e-3, 1e-6):
        chosen = study(systems=noisy, federation={"cohort_size": 8, "schedule": {"name": "poisson", "rate": 0.1}}, delta=delta)
        algorithm = chosen.system("fedavg").build(chosen.scenarios["pairs"].build().task)
        (said[delta],) = guarantees.words(chosen, algorithm, 8)
        assert guarantees.words(chosen, algorithm, 8, tuned=True) == [f"{said[delta]}; the trials of its grid are not counted"]
    assert "delta 0.001" in said[1e-3] and "delta 1e-06" in said[1e-6] and f"delta {8**-1.1:.2g}" in said[None]
    assert float(said[1e-6].split()[1].strip(",")) > float(said[1e-3].split()[1].strip(","))


BROKEN = {
    "broken": {"method": "fedavg", "options": {"batch_size": 20}, "grid": {"lr": [1e308, 0.1]}},
    "gone": {"method": "fedavg", "options": {"batch_size": 20, "lr": 1e308}},
}


def test_noise_by_its_epsilon_is_that_of_the_cohort_of_the_point():
    pytest.importorskip("dp_accounting")
    uploads = [{"name": "clip", "norm": 1.0}, {"name": "noise", "epsilon": 2.0}]
    systems = {"fedavg": {"method": "fedavg", "grid": {"cohort_size": [2, 6]}}}
    noisy = study(systems=systems, federation={"uploads": uploads}, delta=1e-3, rounds=20)
    clients, system = noisy.scenarios["pairs"].build(), noisy.system("fedavg", "pairs")
    for point in tuning.points_of(system):
        federation = system.parts(clients, **point)[1]
        spent = privacy.spent(federation.config, 20, clients.train.num_clients, 1e-3)
        assert federation.cohort_size == point["cohort_size"] and 1.95 < spent.epsilon <= 2.0


def test_central_training_has_nothing_that_is_among_clients(tmp_path):
    """It samples, clips, hides and guarantees nothing."""
    options = {"epochs": 1, "batch_size": 20, "lr": 0.1}
    central = {"central": {"method": "fedavg", "pooled": True, "options": options}}
    uploads = [{"name": "clip", "norm": 1e-3}, {"name": "noise", "multiplier": 1e3}]
    poisson = {"cohort_size": 4, "schedule": {"name": "poisson", "rate": 0.25}, "uploads": uploads}
    # Both ask a quarter of the clients a round: 4 passes in 16 rounds.
    plain, noisy = (
        study(systems=central, federation=federation, rounds=16, eval_every=16, seeds=[1])
        for federation in ({"cohort_size": 2}, poisson)
    )
    (wanted,), (found,) = (run.run(one, tmp_path / name, watcher=Silent()) for name, one in (("a", plain), ("b", noisy)))
    assert without_clocks([found])[0].final == without_clocks([wanted])[0].final and found.final[0].rows[-1]["round"] == 4
    clients = noisy.scenarios["pairs"].build()
    assert guarantees.of_system(noisy, "pairs", "central", clients) is None
    with pytest.raises(ValueError, match="so that a grid of cohort_size changes nothing: leave it out"):
        System(method="fedavg", pooled=True, grid={"cohort_size": [5, 10]})
    with pytest.raises(ValueError, match="pooled: central training knows no uploads: leave it out"):
        study(systems={"central": {**central["central"], "federation": {"uploads": uploads}}})
    assert guarantees.words(noisy, noisy.system("central", "pairs").build(clients), 8) == []


@pytest.mark.parametrize(
    ("method", "schedule", "watched", "words"),
    [
        ("fedmeta_server", "fedasync", None, "clients of fedmeta_server send gradients, but fedasync mixes their models"),
        ("fedavg", "fedbuff", "train", "user accuracy is of the models that clients start from, which are past ones"),
    ],
)
def test_what_asynchronous_rounds_refuse_is_refused_before_anything_is_trained(tmp_path, method, schedule, watched, words):
    timetable = {"name": schedule, "seconds": [1, 2, 3, 4, 5, 6, 7, 8], "rounds": 60, "concurrency": 3, "most_stale": 12}
    timetable |= {"buffer_size": 2} if schedule == "fedbuff" else {}
    federation = {"cohort_size": 1 + (schedule == "fedbuff"), "schedule": timetable}
    systems = {"good": TREE["systems"]["local"], "bad": {"method": method, "federation": federation}}
    chosen = study(systems=systems, user_accuracy=None if watched is None else {"bad": watched})
    watcher = Silent()
    with pytest.raises(ValueError, match=f"pairs, bad: {words}"):
        run.run(chosen, tmp_path, watcher=watcher)
    assert watcher.records == 0


def test_a_number_of_attackers_does_not_follow_a_grid_of_cohorts():
    scenarios = {"pairs": {**TREE["scenarios"]["pairs"], "attackers": 0.25}}
    system = {"method": "fedavg", "federation": {"aggregator": "krum:f=attackers", "attack": "sign_flip"}}
    # A grid may be extended, so that 2 of 7 and 2 of 8 are no reason to take it.
    for sizes in ([5, 8], [7, 8]):
        with pytest.raises(ValueError, match="a number of a cohort, but the grid has several sizes: write a number"):
            study(scenarios=scenarios, systems={"krum": {**system, "grid": {"cohort_size": sizes}}}, federation={})
    trimmed = {
        "method": "fedavg",
        "federation": {"aggregator": "trimmed_mean:share=attackers"},
        "grid": {"cohort_size": [5, 8]},
    }
    alike = study(scenarios=scenarios, systems={"trimmed": trimmed}, federation={})
    assert alike.system("trimmed", "pairs").federation["aggregator"] == "trimmed_mean:share=0.25"


def test_a_run_that_diverges_is_stopped_and_the_others_go_on(tmp_path):
    chosen = study(systems=BROKEN, rounds=6, on_divergence="stop", tuning={"rounds": 4, "seeds": [0]})
    built = run.build(chosen)
    broken, gone = run.run(chosen, tmp_path, watcher=Silent(), clients=built)
    ends = {trial.numbers["lr"]: trial.rows[-1]["round"] for trial in broken.tuning}
    assert ends == {1e308: 1, 0.1: 4} and broken.chosen == {"lr": 0.1}
    assert all(trial.rows[-1]["round"] == 1 and trial.diverged for trial in gone.final)
    assert all(trial.rows[-1]["round"] == 6 for trial in broken.final)
    # What is finished is not begun again, and nothing is trained twice.
    again = Silent()
    # As text, in which NaN equals NaN.
    found = run.run(chosen, tmp_path, watcher=again, clients=built)
    assert json.dumps(without_clocks(found)) == json.dumps(without_clocks([broken, gone]))
    assert again.records == 0
    page.write_all(tmp_path, study(systems={"gone": BROKEN["gone"]}), built, [gone], "x")
    assert "diverged at round 1" in (tmp_path / "report.md").read_text(encoding="utf-8")
    # Its clients were left out, so that the first model stands, and would score.
    assert np.isfinite(gone.final[0].rows[-1]["tests"]["known"]["accuracy"]).all()
    known = {row[0]: row[1] for row in results.table(results.lines(chosen, "pairs", built["pairs"], [broken, gone])).rows}
    assert known["gone"] == "diverged" != known["broken"]
    half = gone._replace(final=[gone.final[0], gone.final[1]._replace(diverged=None)])
    assert results.lines(chosen, "pairs", built["pairs"], [half])[0].remark.startswith("diverged at round 1 in 1 of 2 seeds")
    shown = page.systems(chosen, [broken, gone])
    assert figures.by_round(shown).panels
    with pytest.raises(ValueError, match="cannot resume: on_divergence was 'stop'"):
        run.run(study(systems=BROKEN, rounds=6, tuning={"rounds": 4, "seeds": [0]}), tmp_path, watcher=Silent())


def test_a_seed_that_was_stopped_makes_its_point_the_worst():
    def trial(lr, seed, rounds, accuracy, diverged=None):
        rows = [{"round": rounds, "tests": {"validation": {"accuracy": [accuracy], "scores": {"accuracy_mean": accuracy}}}}]
        return tuning.Trial({"lr": lr}, seed, rows, diverged)

    trials = [trial(0.1, 0, 4, 0.5), trial(0.1, 1, 4, 0.5), trial(0.2, 0, 4, 0.9), trial(0.2, 1, 1, 0.9, diverged=1)]
    assert tuning.best(trials, study().tuning).point == {"lr": 0.1}
    # Halving stopped this one; it has no part in the choice.
    halved = [*trials[:2], trial(0.3, 0, 2, 0.9)]
    assert [one.point["lr"] for one in tuning.scores(halved, study().tuning)] == [0.1]


SHAPES = {"fedavg": {"method": "fedavg", "grid": {"epochs": [1, 3], "lr": [0.02, 0.2], "batch_size": [20]}}}


def test_a_grid_over_epochs_is_the_studies_of_each_of_them(tmp_path):
    chosen = study(systems=SHAPES)
    (one,) = run.run(chosen, tmp_path / "all", watcher=Silent())
    assert [tuple(trial.numbers.values()) for trial in one.tuning] == [
        (1, 0.02, 20),
        (1, 0.2, 20),
        (3, 0.02, 20),
        (3, 0.2, 20),
    ]
    for epochs in (1, 3):
        alone = {"fedavg": {"method": "fedavg", "options": {"epochs": epochs, "batch_size": 20}, "grid": {"lr": [0.02, 0.2]}}}
        (other,) = run.run(study(systems=alone), tmp_path / str(epochs), watcher=Silent())
        rows = {t.numbers["lr"]: t.rows[-1]["tests"] for t in one.tuning if t.numbers["epochs"] == epochs}
        assert rows == {t.numbers["lr"]: t.rows[-1]["tests"] for t in other.tuning}
        if one.chosen["epochs"] == epochs:
            assert last(one).tolist() == last(other).tolist()
    with pytest.raises(KeyboardInterrupt):
        run.run(chosen, tmp_path / "stopped", watcher=Silent(stop_at=4))
    assert without_clocks(run.run(chosen, tmp_path / "stopped", watcher=Silent())) == without_clocks([one])
    assert estimate.of_system(chosen, "pairs", "fedavg", run.build(chosen)["pairs"]).programs == 9


def test_whole_numbers_of_a_grid():
    system = System(method="fedavg", grid={"epochs": [2, 4.0], "lr": [1, 2]}, federation={"cohort_size": 4})
    assert tuning.shaping(system) == ("epochs",)
    points = tuning.points_of(system)
    assert points[-1] == {"epochs": 4, "lr": 2.0} and type(points[-1]["epochs"]) is int and type(points[0]["lr"]) is float
    task = study().scenarios["pairs"].build().task
    assert {point["epochs"] for point in tuning.next_points(points, {"epochs": 4, "lr": 1.0}, system, task)} >= {8}
    # A share that decides a count is no rate, but no whole number either.
    shares = System(method="fedcac", grid={"share": [0.5, 0.75], "lr": [0.1]})
    assert tuning.shaping(shares) == ("share",) and tuning.points_of(shares)[0] == {"share": 0.5, "lr": 0.1}
    halves = System(method="fedavg", grid={"epochs": [1, 1.5]})
    with pytest.raises(ValueError, match=r"grid of epochs must hold whole numbers, not 1.5"):
        tuning.points_of(halves)


BAD = {
    "an unknown store": ({"store": "tape"}, "store='tape' is unknown"),
    "no devices": ({"devices": 0}, "devices=0 must be an integer of at least 1"),
    "a store with halving": ({"store": "host", "tuning": {"halving": 2}}, "halving compares none"),
    "a store with user accuracy": ({"store": "disk", "user_accuracy": "train"}, "leave store='disk' out"),
    "an unknown way": ({"on_divergence": "pause"}, "on_divergence='pause' is unknown"),
    "a delta of 0": ({"delta": 0.0}, "delta=0.0"),
}


@pytest.mark.parametrize(("fields", "words"), BAD.values(), ids=BAD)
def test_bad_options_get_one_line(fields, words):
    with pytest.raises(ValueError, match=words) as error:
        from_tree(tree(**fields))
    assert "\n" not in str(error.value)


def test_results_are_not_taken_over_when_other_clients_are_scored(tmp_path):
    """Which clients are scored depends on the attacks of all systems of a scenario."""
    one = {"a": {"method": "fedavg", "options": {"epochs": 1, "batch_size": 20, "lr": 0.1}}}
    attacked = {"b": {**one["a"], "federation": {"attack": {"name": "sign_flip", "attackers": 0.2}}}}
    run.run(study(systems=one, seeds=[1]), tmp_path, watcher=Silent())
    with pytest.raises(ValueError, match="scored"):
        run.run(study(systems=one | attacked, seeds=[1]), tmp_path, watcher=Silent())


def test_a_store_refuses_what_it_would_end_with():
    attack = {"attack": {"name": "sign_flip", "attackers": 0.2}}
    for systems, words in (
        ({"a": {"method": "fedavg", "federation": attack}}, "store='host' tests all clients, but those that attack"),
        ({"a": {"method": "fedavg", "tested_with": {"finetune_epochs": 1}}}, "store='host' cannot go with tested_with"),
    ):
        chosen = study(systems=systems, store="host")
        with pytest.raises(ValueError, match=words):
            check(chosen, run.build(chosen))


def test_options_of_tests_may_not_make_another_model():
    plus = {"method": "mamlpp", "options": {"inner_steps": 2, "step_weights": {"name": "annealed", "rounds": 3}}}
    chosen = study(systems={"a": {**plus, "tested_with": {"inner_steps": 4}}})
    with pytest.raises(
        ValueError, match=r"tested_with={'inner_steps': 4} makes another model than is trained: .*float\d+\[2\]"
    ):
        check(chosen, run.build(chosen))
    more = study(systems={"a": {**plus, "options": {**plus["options"], "test_steps": 4}}})
    check(more, run.build(more))


def test_what_cannot_be_run_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="devices=99, but JAX sees"):
        run.run(study(devices=99), tmp_path / "a", watcher=Silent())
    pac = {"mocha": {"method": "mocha"}}
    with pytest.raises(ValueError, match="store: mocha reads what all clients keep"):
        run.run(study(systems=pac, store="host"), tmp_path / "a", watcher=Silent())
    parts = {
        "schedule": {"name": "poisson", "rate": 0.5},
        "uploads": [{"name": "clip", "norm": 1.0}, {"name": "noise", "multiplier": 1.0}],
    }
    noisy = {"fedavg": {"method": "fedavg", "federation": parts}}
    with pytest.raises(ValueError, match="which delta=1e-06 does not cover"):
        run.run(study(systems=noisy, delta=1e-6), tmp_path / "a", watcher=Silent())
    assert not (tmp_path / "a").exists()


def test_the_command_line_has_the_options(tmp_path):
    path = tmp_path / "digits.yaml"
    path.write_text(yaml.safe_dump(tree(systems={"gone": BROKEN["gone"]}, rounds=3, seeds=[1])), encoding="utf-8")
    words = ["--devices", "1", "--store", "host", "--delta", "1e-4", "--on-divergence", "stop", "--out", tmp_path / "run"]
    result = CliRunner().invoke(app, ["run", str(path), *map(str, words)])
    assert result.exit_code == 3 and "every run diverged" in result.output, result.output
    written = yaml.safe_load((tmp_path / "run" / "study.yaml").read_text())
    assert {name: written[name] for name in ("devices", "store", "delta", "on_divergence")} == {
        "devices": 1, "store": "host", "delta": 1e-4, "on_divergence": "stop",
    }  # fmt: skip
    assert written["systems"]["gone"]["method"] == TREE["systems"]["fedavg"]["method"]


PARTS = {
    "a": {
        "method": "fedavg",
        "options": {"lr": 0.1, "batch_size": 20},
        "federation": {"uploads": ["clip", "quantize"], "attack": {"name": "sign_flip", "attackers": 0.25}},
        "grid": {"uploads.clip.norm": [0.01, 5], "uploads.quantize.bits": [8], "attack.scale": [2]},
    }
}


def test_a_grid_over_options_of_parts(tmp_path):
    chosen = study(systems=PARTS, rounds=2, seeds=[1])
    system = chosen.system("a")
    assert tuning.shaping(system) == ("uploads.quantize.bits",)
    points = tuning.points_of(system)
    assert points == [{"uploads.clip.norm": n, "uploads.quantize.bits": 8, "attack.scale": 2.0} for n in (0.01, 5.0)]
    assert [type(value) for value in points[0].values()] == [float, int, float]
    (outcome,) = run.run(chosen, tmp_path / "run", watcher=Silent())
    assert outcome.chosen == points[1]  # such a small norm leaves the model almost where it was
    # A preset fills in what the system leaves open in parts that it has.
    name = f"{tmp_path}/run/presets/pairs/a"
    bare = {"uploads": [{"name": "clip"}, {"name": "quantize", "bits": 4}]}
    (clip, quantize) = System(method="fedavg", preset=name, federation=bare).federation["uploads"]
    assert (clip["norm"], quantize["bits"]) == (5.0, 4)
    assert System(method="fedavg", preset=name).federation == {}


def test_numbers_of_optax_may_have_a_grid_of_fractions():
    """Optax annotates them as what may be an array, a whole number among others."""
    adam = {"method": "fedavg", "federation": {"server_optimizer": "adam", "server_lr": 0.1}}
    system = study(systems={"a": {**adam, "grid": {"server_optimizer.b1": [0, 0.5]}}}).systems["a"]
    assert tuning.points_of(system) == [{"server_optimizer.b1": 0.0}, {"server_optimizer.b1": 0.5}]
    assert tuning.shaping(system) == ()


def test_local_training_of_new_clients_may_be_an_option_of_the_grid_or_of_tests():
    local = {"method": "local_only", "options": {"lr": 0.1}}
    for more, groups in (
        ({}, ("known",)),
        ({"grid": {"new_client_epochs": [1, 5]}}, ("known", "new")),
        ({"tested_with": {"new_client_epochs": 3}}, ("known", "new")),
        ({"grid": {"epochs": [1, 5]}}, ("known",)),
    ):
        assert baselines.alone(study(systems={"l": {**local, **more}}), "l") == groups


def test_an_empty_field_of_data_seeds_is_none():
    assert study(data_seeds=None).data_seeds == ()
