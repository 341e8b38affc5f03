"""The runner of the experiments, through the composer: errors, stopping, killing and resuming."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import fedjax_meta as fm
from experiments import _runner, compose
from fedjax_meta import checkpoint, models, report
from tests import problems
from tests.test_kills import arrays_of

ROOT = Path(__file__).parent.parent
HERE = ["--devices", "2", "--no-compile-cache"]


@pytest.fixture(autouse=True)
def as_users_run_it():
    """The experiments run as from a shell, without the stricter settings of the other tests."""
    with jax.numpy_rank_promotion("allow"), jax.enable_x64(False):
        yield


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
    words = ["--algorithm", "fedavg", "--rounds", "2", "--eval-every", "1", *HERE, "--out", str(out)]
    first = invoke(compose.app, *words)
    assert first.exit_code == 0, first.output
    assert re.search(r"fedavg +local +\d+\.\d\d ", first.output)
    made = {"config.json", "metrics.json", "figure.png", "report.md", "state", checkpoint.LOCK}
    assert {path.name for path in out.iterdir()} == made
    assert "| fedavg |" in (out / "report.md").read_text()
    runs = numbers_of(out)
    assert [row["round"] for row in runs[0]["result"]] == [1, 2]
    assert ["confusion" in row["tests"]["composition/local"] for row in runs[0]["result"]] == [False, True]
    assert len(runs[0]["result"][0]["tests"]["composition/new"]["accuracy"]) == 50

    again = invoke(compose.app, *words)
    assert (again.exit_code, "add --resume" in again.stderr) == (1, True)
    resumed = invoke(compose.app, *words, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert numbers_of(out) == runs
    words[words.index("--eval-every") + 1] = "2"
    other = invoke(compose.app, *words, "--resume")
    assert (other.exit_code, "eval_every was 1" in other.stderr.replace("\n", " ")) == (1, True)
    assert numbers_of(out) == runs


# Errors.


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--dataset", "imagenet"], "data set 'imagenet' is unknown"),
        (["--seeds", "1,x"], "--seeds '1,x' must be numbers"),
        (["--seeds", "1,1"], "none twice"),
        (["--resume"], "--resume needs --out"),
        (["--resume", "--out", "nothing_here"], "there is no run to resume in nothing_here"),
        (["--devices", "64"], "JAX sees 2"),
        (["--dataset", "mnist", "--data-dir", "nothing_here"], "'mnist' is not prepared in nothing_here"),
        (["--out", "/dev/null/run"], "could not write /dev/null/run/.lock: Not a directory"),
    ],
)
def test_errors_are_one_line(words, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")  # JAX has started, so that no more devices can be made
    result = invoke(compose.app, "--no-compile-cache", "--devices", "2", *words)
    assert result.exit_code == 1
    assert expected in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback():
    result = invoke(compose.app, "--dataset", "imagenet", "--debug")
    assert isinstance(result.exception, ValueError)


def test_no_space_stops_in_one_line(tmp_path, monkeypatch):
    """A full disk while a state is saved: one line, and the folder can be resumed."""

    whole = os.replace

    def full(source, target):
        if str(target).endswith(".ckpt"):
            raise OSError(28, "No space left on device")
        whole(source, target)

    words = ["--algorithm", "fedavg", "--rounds", "1", *HERE, "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        result = invoke(compose.app, *words)
    assert result.exit_code == 1
    assert re.search(r"^error: could not save round 1 to .*: No space left on device; .* intact$", result.stderr.strip())
    assert invoke(compose.app, *words, "--resume").exit_code == 0


# Folders.


def opened(out=None, *, resume=False):
    return _runner.open_folder(out, "test", resume=resume, options={"rate": float("inf")}, algorithms={})


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [opened() for _ in range(40)]
    assert len(set(folders)) == 40
    for folder in folders:
        config = json.loads((folder / "config.json").read_text(), parse_constant=pytest.fail)
        assert config["options"] == {"rate": "Infinity"}


@pytest.mark.parametrize("out", [None, "out", "deep/er/out"])
def test_a_start_that_fails_leaves_nothing(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for error in (ValueError("bad"), OSError("no room")):
        with pytest.raises(typer.Exit), _runner.one_line_errors(debug=False):
            assert (opened(None if out is None else Path(out)) / "config.json").is_file()
            raise error
        assert not list(tmp_path.iterdir())


def test_a_failure_leaves_what_there_was_before(tmp_path):
    """The user's own files, and results: only a run that had nothing to save goes."""
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(typer.Exit), _runner.one_line_errors(debug=False):
        opened(tmp_path)
        raise ValueError("bad")
    assert (tmp_path / "notes").read_text() == "mine"
    out = tmp_path / "run"
    with pytest.raises(typer.Exit), _runner.one_line_errors(debug=False):
        _runner.remembered(opened(out), "one", {}, lambda: 1)
        raise ValueError("bad")
    assert json.loads((out / "metrics.json").read_text())["runs"][0]["result"] == 1
    assert opened(out, resume=True) == out


def test_a_run_that_is_refused_has_no_folder(tmp_path):
    """Two systems of one title; a store that cannot be made, which is found when the run starts."""
    words = ["--rounds", "1", *HERE, "--out", str(tmp_path / "run")]
    result = invoke(compose.app, "--algorithm", "fedavg", "--compare", "fedavg", *words)
    assert (result.exit_code, "two systems have the title 'fedavg'" in result.stderr) == (1, True)
    result = invoke(compose.app, "--algorithm", "fedper", "--store", "/dev/null/rows", *words)
    assert (result.exit_code, "/dev/null/rows" in result.stderr) == (1, True)
    assert not (tmp_path / "run").exists()


# Divergence.


@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_a_run_that_diverges_is_marked_and_no_success(policy, tmp_path):
    """Exit code 3, a warning at once, marks, strict JSON with NaN and never the accuracy of class 0; --resume agrees."""
    out = tmp_path / "run"
    words = ["--algorithm", "fedavg", "--set", "lr=1e30", "--rounds", "3", "--eval-every", "1", *HERE, "--out", str(out)]
    for extra in ([], ["--resume"]):
        result = invoke(compose.app, *words, "--on-divergence", policy, *extra)
        assert result.exit_code == 3, result.output
        assert "fedavg\\* (diverged at round 1)" in (out / "report.md").read_text()
        assert result.stderr.splitlines()[-1].startswith("all systems diverged")
    if policy == "continue":
        first = invoke(compose.app, *words[:-1], str(tmp_path / "again"))
        assert "warning: round 1: clients left out" in first.stderr
        assert "warning: fedavg* has diverged at round 1" in first.stderr
    json.loads((out / "metrics.json").read_text(), parse_constant=pytest.fail)
    (run,) = report.load(out / "metrics.json")
    assert [row["round"] for row in run["result"]] == ([1] if policy == "stop" else [1, 2, 3])
    for row in run["result"]:
        assert row["faults"][0]["diverged"]
        for test in row["tests"].values():
            finite = [math.isfinite(loss) for loss in test["loss"]]
            assert [math.isfinite(accuracy) for accuracy in test["accuracy"]] == finite
            assert math.isfinite(test["scores"]["accuracy"]) == all(finite)
    assert (out / "figure.png").stat().st_size > 1000


def test_one_system_that_diverges_does_not_fail_the_others(tmp_path):
    out = tmp_path / "run"
    words = ["--algorithm", "fedavg", "--set", "lr=1e30", "--compare", "fedper", "--rounds", "2", *HERE, "--out", str(out)]
    result = invoke(compose.app, *words, "--on-divergence", "stop")
    assert result.exit_code == 0, result.output
    lines = (out / "report.md").read_text().splitlines()
    assert any(line.startswith("| fedavg\\* (diverged at round 1) | local |") for line in lines)
    assert any(re.match(r"\| fedper \| local \| \d+\.\d\d \|", line) for line in lines)


def test_policies_are_checked():
    result = invoke(compose.app, "--on-divergence", "explode")
    assert (result.exit_code, "--on-divergence='explode' is unknown; allowed are continue, stop" in result.stderr) == (1, True)


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
    with pytest.raises(_runner.Stopped, match=r"stopped in two; finished results saved: 1. Continue with: .*--resume$"):
        _runner.remembered(tmp_path, "two", {}, stopped)
    assert _runner.remembered(tmp_path, "two", {}, lambda: 2) == 2


def small_plan(rounds=12, eval_every=6, store=None):
    algorithm, data = problems.build("fedper", cohort_size=3), jax.tree.map(np.asarray, problems.data())
    tests = {
        "a/local": _runner.Test("A", "local", _runner.evaluator(algorithm, data, devices=1, support="train", query="train"))
    }
    options = {"rounds": rounds, "eval_every": eval_every, "seed": 1, "config": {}, "store": store}
    return _runner.Plan("one", "A", algorithm, data, tests, **options)


@pytest.mark.parametrize("store", [None, "memory"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_between_evaluations(number, store, tmp_path, monkeypatch):
    """What was reached is saved at once, also twice within one block, and the run that goes on is the run left alone."""
    plan = small_plan(store=store)
    whole = _runner.run_all([plan], tmp_path / "whole")
    progress = _runner._Display.progress
    for at in (8, 10):

        def stopped(display, done, metrics, at=at):
            progress(display, done, metrics)
            if done == at:
                os.kill(os.getpid(), number)

        with monkeypatch.context() as patch, pytest.raises(typer.Exit) as ended, _runner.one_line_errors(debug=False):
            patch.setattr(_runner._Display, "progress", stopped)
            patch.setattr(fm.simulation.np, "clip", lambda *_: 1)  # a round is a piece, however fast this machine is
            _runner.run_all([plan], tmp_path / "run")
        assert ended.value.exit_code == 128 + number
        assert checkpoint.latest_round(tmp_path / "run" / "state" / "one") == at
        assert not (tmp_path / "run" / "metrics.json").exists()
    again = _runner.run_all([plan], tmp_path / "run")
    assert [row["round"] for row in again["one"]] == [1, 6, 12]
    assert len(again["one"][-1]["train"]["loss"]) == 6
    assert numbers_of(tmp_path / "run") == numbers_of(tmp_path / "whole")
    assert [row["tests"] for row in again["one"]] == [row["tests"] for row in whole["one"]]
    states = [arrays_of(tmp_path / name / "state" / "one" / "12.ckpt") for name in ("run", "whole")]
    assert states[0] == states[1]


def test_the_second_signal_stops_at_once(tmp_path, monkeypatch):
    def progress(display, done, metrics):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("went on")

    monkeypatch.setattr(_runner._Display, "progress", progress)
    with pytest.raises(typer.Exit) as ended, _runner.one_line_errors(debug=False):
        _runner.run_all([small_plan()], tmp_path)
    assert ended.value.exit_code == 130


def test_signals_that_were_ignored_stay_so():
    """As under `nohup`."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with _runner.one_line_errors(debug=False):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


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
    command = [sys.executable, "-m", "experiments.compose", "--algorithm", "fedper", "--rounds", "400", "--eval-every", "20"]
    command += ["--out", str(out), *words]
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
    state = broken / "state" / "composition_seed1"

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
    arrays = [arrays_of(folder / "state" / "composition_seed1" / "400.ckpt") for folder in (broken, whole)]
    assert len(arrays[0]) > 5
    assert arrays[0] == arrays[1]


def test_the_composer_explains_itself():
    shown = invoke(compose.app, "--help")
    assert shown.exit_code == 0 and all(word in shown.output for word in ("--out", "--resume", "--devices"))
