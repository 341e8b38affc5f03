"""The experiments as a user runs them: tables of systems, errors, stopping, killing and resuming."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

import fedjax_meta as fm
from experiments import _runner, fedmeta_per, quickstart
from experiments.published import FEDMETA_PER, FEDMETA_PER_OWN_HEADS
from fedjax_meta import checkpoint, models
from fedjax_meta.data import sources

ROOT = Path(__file__).parent.parent
HERE = ["--devices", "2", "--no-compile-cache"]


@pytest.fixture(autouse=True)
def as_users_run_it():
    """The experiments run as from a shell, without the stricter settings of the other tests."""
    with jax.numpy_rank_promotion("allow"), jax.enable_x64(False):
        yield


# The tables of systems.


def test_every_row_of_the_published_tables_is_a_system():
    for (dataset, clients), rows in FEDMETA_PER.items():
        assert dataset in fedmeta_per.DATASETS
        for name in rows:
            assert clients in fedmeta_per.SYSTEMS[name].clients
    assert {name for rows in FEDMETA_PER_OWN_HEADS.values() for name in rows} <= set(fedmeta_per.SYSTEMS)


def test_published_numbers_are_percentages_in_a_sensible_order():
    """Finds typing errors: means must be near accuracies, and F1 at most a little above."""
    for rows in FEDMETA_PER.values():
        for row in rows.values():
            assert 0 < row.f1 < row.accuracy + 0.5 < 100.5
            assert row.mean is None or abs(row.mean - row.accuracy) < 3.5


def test_every_training_has_step_sizes():
    for table in (fedmeta_per.USED, fedmeta_per.PRINTED):
        for step_sizes in table.values():
            assert set(step_sizes) == set(fedmeta_per.TRAININGS)
    assert set(quickstart.STEP_SIZES) == set(quickstart.TRAININGS)
    for systems, trainings in ((fedmeta_per.SYSTEMS, fedmeta_per.TRAININGS), (quickstart.SYSTEMS, quickstart.TRAININGS)):
        assert {system.training for system in systems.values()} == set(trainings)
        assert {training.method for training in trainings.values()} <= set(fm.METHODS)


@pytest.fixture(scope="module")
def small():
    return fedmeta_per.load(sources.load("mnist_small"), list(fedmeta_per.SYSTEMS), seed=1, pairing=None)


def plans(small, names, step_sizes="mnist", **options):
    systems = {name: fedmeta_per.SYSTEMS[name] for name in names}
    options = {"rounds": 2, "eval_every": 2, "seeds": [1], "config": {}, **options}
    return fedmeta_per.make_plans(systems, models.mlp(), small, fedmeta_per.USED[step_sizes], **options)


def test_one_training_serves_systems_that_differ_at_test_time(small):
    own, averaged = plans(small, ["fedper", "fedper_averaged", "fedper_meta", "fedper_meta_averaged"])
    assert set(own.tests) == {"fedper/local", "fedper_meta/local"}
    names = ("fedper_averaged", "fedper_meta_averaged")
    assert set(averaged.tests) == {f"{name}/{clients}" for name in names for clients in ("local", "new")}


def test_local_and_new_clients_have_trainings_of_their_own_where_step_sizes_differ(small):
    local, new = plans(small, ["fedmeta_per"])
    assert (list(local.tests), list(new.tests)) == (["fedmeta_per/local"], ["fedmeta_per/new"])
    assert [plan.algorithm.config["outer_lr"] for plan in (local, new)] == [0.001, 0.0003]
    (both,) = plans(small, ["fedmeta"])
    assert set(both.tests) == {"fedmeta/local", "fedmeta/new"}


def test_all_plans_have_names_of_their_own(small):
    names = [plan.name for plan in plans(small, list(fedmeta_per.SYSTEMS), seeds=[1, 2], step_sizes="cifar10")]
    assert len(set(names)) == len(names)


def test_controls_hold_all_samples(small):
    """The IID clients and the pooled client hold the samples of both splits; 75 and 80 % train."""
    assert small.iid.num_clients == small.federated.train.num_clients == 50
    assert small.pooled.num_clients == 1
    assert int(small.pooled.sizes("train")[0]) == 0.8 * 5000
    assert int(small.pooled.sizes("test")[0]) == 0.2 * 5000


# A run, start to end.


def invoke(app, *words):
    return CliRunner().invoke(app, list(words))


def numbers_of(folder):
    """Everything in metrics.json but the times."""
    runs = json.loads((folder / "metrics.json").read_text())["runs"]
    for run in runs:
        for row in run["result"]:
            assert row.pop("seconds") >= 0
            assert row.pop("compile_seconds") >= 0
    return runs


def test_a_whole_run_and_what_may_be_resumed(tmp_path):
    """Table, report, figure and metrics; a second run is refused, --resume keeps the numbers, other options are refused."""
    out = tmp_path / "run"
    words = ["--dataset", "mnist_small", "--systems", "fedavg", "--rounds", "2", "--eval-every", "1", *HERE]
    words += ["--out", str(out)]
    first = invoke(fedmeta_per.app, *words)
    assert first.exit_code == 0, first.output
    assert re.search(r"FedAvg +\d+\.\d\d ", first.output)
    assert "no published numbers" in first.output
    assert {path.name for path in out.iterdir()} == {"config.json", "metrics.json", "figure.png", "report.md", "state"}
    assert "| FedAvg |" in (out / "report.md").read_text()
    runs = numbers_of(out)
    assert [row["round"] for row in runs[0]["result"]] == [1, 2]
    assert ["confusion" in row["tests"]["fedavg/local"] for row in runs[0]["result"]] == [False, True]
    assert len(runs[0]["result"][0]["tests"]["fedavg/new"]["accuracy"]) == 50

    again = invoke(fedmeta_per.app, *words)
    assert (again.exit_code, "add --resume" in again.stderr) == (1, True)
    resumed = invoke(fedmeta_per.app, *words, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert numbers_of(out) == runs
    words[words.index("--eval-every") + 1] = "2"
    other = invoke(fedmeta_per.app, *words, "--resume")
    assert (other.exit_code, "eval_every was 1" in other.stderr.replace("\n", " ")) == (1, True)
    assert numbers_of(out) == runs


def test_quickstart(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart, "SYSTEMS", {"fedper": quickstart.SYSTEMS["fedper"]})
    done = invoke(quickstart.app, "--rounds", "2", "--out", str(tmp_path / "run"), *HERE)
    assert done.exit_code == 0, done.output
    assert re.search(r"FedPer( +\d+\.\d +\d+\.\d ±\d+\.\d +\d+\.\d){2}", done.output)
    assert "| FedPer |" in (tmp_path / "run" / "report.md").read_text()


# Errors.


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--dataset", "imagenet"], "--dataset='imagenet' is unknown; allowed are mnist, cifar10"),
        (
            ["--systems", "fedavg,fedsgd"],
            "--systems='fedsgd' is unknown (did you mean 'fedavg_sgd'?); allowed are all, centralised",
        ),
        (["--seeds", "1,x"], "--seeds '1,x' must be numbers"),
        (["--seeds", "1,1"], "none twice"),
        (["--score", "best"], "--score='best' is unknown; allowed are online, fitted"),
        (["--personal-layers", "3"], "asks for the last 3 layers, but the task names 2"),
        (["--pairing", "3u"], "pairing='3u' is unknown; allowed are 2u+j, u+j"),
        (["--resume"], "--resume needs --out"),
        (["--resume", "--out", "nothing_here"], "there is no run to resume in nothing_here"),
        (["--devices", "64"], "JAX sees 2"),
        (["--dataset", "mnist", "--data-dir", "nothing_here"], "'mnist' is not prepared in nothing_here"),
        (["--out", "/dev/null/run"], "could not write /dev/null/run/config.json"),
    ],
)
def test_errors_are_one_line(words, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")  # JAX has started, so that no more devices can be made
    given = ["--dataset", "mnist_small", "--no-compile-cache", "--devices", "2", *words]
    result = invoke(fedmeta_per.app, *given)
    assert result.exit_code == 1
    assert expected in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback():
    result = invoke(fedmeta_per.app, "--dataset", "imagenet", "--debug")
    assert isinstance(result.exception, ValueError)


def test_no_space_stops_in_one_line(tmp_path, monkeypatch):
    """A full disk while a state is saved: one line, and the folder can be resumed."""

    def full(*_):
        raise OSError(28, "No space left on device")

    words = ["--dataset", "mnist_small", "--systems", "fedavg", "--rounds", "1", *HERE, "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        result = invoke(fedmeta_per.app, *words)
    assert result.exit_code == 1
    assert re.search(r"^error: could not save round 1 to .*: No space left on device; .* intact$", result.stderr.strip())
    assert invoke(fedmeta_per.app, *words, "--resume").exit_code == 0


# Shared by the experiments.


def test_a_result_is_computed_once_and_belongs_to_its_config(tmp_path):
    config = {"rounds": 3, "rates": (0.1, 0.2)}
    assert _runner.remembered(tmp_path, "one", config, lambda: {"accuracy": [1.5]}) == {"accuracy": [1.5]}
    assert _runner.remembered(tmp_path, "two", config, lambda: [2]) == [2]
    assert _runner.remembered(tmp_path, "one", config, lambda: pytest.fail("computed again")) == {"accuracy": [1.5]}
    with pytest.raises(ValueError, match=r"rounds was 3 when one in .*metrics.json was written and is 4 now"):
        _runner.remembered(tmp_path, "one", {**config, "rounds": 4}, lambda: pytest.fail("computed again"))
    parts = json.loads((tmp_path / "metrics.json").read_text())["runs"]
    assert [(part["name"], part["config"]["rates"]) for part in parts] == [("one", [0.1, 0.2]), ("two", [0.1, 0.2])]


def test_a_part_that_is_stopped_says_how_to_continue(tmp_path):
    def stopped():
        raise KeyboardInterrupt

    _runner.remembered(tmp_path, "one", {}, lambda: 1)
    with pytest.raises(_runner.Stopped, match=r"stopped in two; finished results saved: 1. Continue with:\n.*--resume"):
        _runner.remembered(tmp_path, "two", {}, stopped)
    assert _runner.remembered(tmp_path, "two", {}, lambda: 2) == 2


def test_options_go_to_the_method_or_to_the_federation():
    options = {"lr": 0.5, "server_lr": 0.2, "weighting": "uniform", "cohort_size": 3, "own_at_test": False}
    config = _runner.build("fedavgm", models.mlp(), **options).config
    assert (config["lr"], config["server_lr"], config["weighting"]) == (0.5, 0.2, "uniform")
    federation = config["federation"]
    assert (federation["cohort_size"], federation["own_at_test"], federation["server_lr"]) == (3, False, None)
    with pytest.raises(
        TypeError, match=r"fedavgm\(\) takes no 'cohort' \(did you mean 'cohort_size', which belongs to Federation"
    ):
        _runner.build("fedavgm", models.mlp(), cohort=3)


def test_a_sweep_is_recorded_with_all_its_rates():
    algorithms = [_runner.build("perfedavg", models.mlp(), inner_lr=rate, cohort_size=3) for rate in (0.1, 0.2)]
    config = _runner.swept(algorithms)
    assert (config["inner_lr"], config["outer_lr"], config["federation"]["cohort_size"]) == ([0.1, 0.2], 0.001, 3)


def test_numbers():
    assert _runner.numbers("3, 1", "--seeds") == [3, 1]
    with pytest.raises(ValueError, match="at least one"):
        _runner.numbers(",", "--seeds")


# A real process, stopped and killed.


def start(out, cache, *words):
    command = [sys.executable, "-m", "experiments.fedmeta_per", "--dataset", "mnist_small", "--systems"]
    command += ["fedper,fedper_meta", "--rounds", "400", "--eval-every", "20", "--out", str(out), *words]
    environment = {**os.environ, "FEDJAX_META_CACHE": str(cache), "XLA_FLAGS": ""}
    # A shell's background jobs ignore Ctrl-C, and so would what they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)


def until_round(process, folder, done):
    limit = time.monotonic() + 240
    while (checkpoint.latest_round(folder) or 0) < done:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.long
def test_a_run_that_is_stopped_killed_and_resumed_is_the_run_that_was_not(tmp_path):
    """Ctrl-C, then kill -9, then to the end: every number and every array equal those of a run left alone, bit for bit."""
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    state = broken / "state" / "fedper_seed1"

    process = start(broken, tmp_path / "cache")
    until_round(process, state, 20)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert f"--out {broken} --resume" in said
    assert not (broken / "metrics.json").exists()

    stopped_at = checkpoint.latest_round(state)
    process = start(broken, tmp_path / "cache", "--resume")
    until_round(process, state, stopped_at + 40)
    process.kill()
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert checkpoint.latest_round(state) < 400

    for folder, words in ((broken, ["--resume"]), (whole, [])):
        process = start(folder, tmp_path / "cache", *words)
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said
    assert numbers_of(broken) == numbers_of(whole)
    arrays = [dict(_arrays(folder / "state" / "fedper_seed1" / "400" / "state")) for folder in (broken, whole)]
    assert arrays[0].keys() == arrays[1].keys()
    assert len(arrays[0]) > 5
    for name in arrays[0]:
        assert arrays[0][name].tobytes() == arrays[1][name].tobytes()


def _arrays(folder):
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointer().restore(folder).items()


def test_every_experiment_explains_itself():
    for app, word in product((fedmeta_per.app, quickstart.app), ("--out", "--resume", "--devices")):
        shown = invoke(app, "--help")
        assert shown.exit_code == 0
        assert word in shown.output
