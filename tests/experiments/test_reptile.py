"""The experiment of Per-FedAvg-Reptile: runs as an axis, tuning, and resuming."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.simulation import run_rounds
from tests import problems

typer_testing = pytest.importorskip("typer.testing", reason="the command line needs typer")
reptile = pytest.importorskip("experiments.reptile", reason="the command line needs typer, rich and matplotlib")

COMMON = {"interpolation": 0.1, "batch_size": 4, "cohort_size": 3}
QUICK = ["--datasets", "synthetic_0", "--systems", "fedavg", "--runs", "2", "--evaluations", "1", "--no-compile-cache"]


def test_runs_as_an_axis_are_the_runs_one_by_one():
    algorithm, data = reptile.builder("reptile", problems.task(), **COMMON)(0.1), problems.data()
    stops, lines = reptile.curves(
        algorithm, data, seeds=(1, 2), rounds=3, eval_every=2, at_once=2, on_block=lambda done, accuracy: None
    )
    assert stops[-1] == 3
    for seed, line in zip((1, 2), lines, strict=True):
        init_key, run_key, test_key = jax.random.split(jax.random.key(seed), 3)
        state, _ = run_rounds(algorithm, run_key, algorithm.init(init_key, data), data, 3, most=3)
        scores = fm.evaluate(algorithm, jax.random.fold_in(test_key, 3), state, data, devices=1)
        assert line[-1] == pytest.approx(100 * float(jnp.mean(fm.metrics.accuracy(scores.confusion))))


def test_tuning_sees_no_test_sample_and_finds_a_rate_that_learns():
    data = problems.data()
    build = reptile.builder("fedavg", problems.task(), **COMMON)
    scores = reptile.tune(build, data, rates=(1e-8, 0.3), rounds=4, at_once=1)
    assert scores[1] > scores[0]
    y = np.array(data.y)
    for start, size in zip(data.start["test"], data.size["test"], strict=True):
        y[start : start + size] = 0
    relabelled = jax.tree.map(lambda leaf: leaf, data)
    object.__setattr__(relabelled, "y", y)
    np.testing.assert_array_equal(reptile.tune(build, relabelled, rates=(1e-8, 0.3), rounds=4, at_once=1), scores)


def test_the_most_frequent_class_of_the_adaptation_samples():
    data = fm.from_clients([(np.zeros((40, 2)), np.repeat([0, 1], [30, 10])), (np.zeros((40, 2)), np.ones(40, int))])
    # The last 10 samples of the first client are its test, all of class 1, and so is what it adapts on.
    assert reptile.largest_class(data) == 100


def test_a_run_writes_its_report_and_resumes_only_with_the_same_options(tmp_path):
    def run(*words):
        return typer_testing.CliRunner().invoke(reptile.app, [*QUICK, "--out", str(tmp_path / "run"), *words])

    first = run("--rounds", "2", "--rates", "0.1")
    assert first.exit_code == 0, first.output
    saved = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert [part["name"] for part in saved["runs"]] == ["synthetic_0_fedavg"]
    assert np.shape(saved["runs"][0]["result"]["accuracy"])[0] == 2
    algorithm = json.loads((tmp_path / "run" / "config.json").read_text())["algorithms"]["synthetic_0_fedavg"]
    assert (algorithm["method"], algorithm["lr"]) == ("fedavg_one_step", 0.1)
    assert "FedAvg with one update" in (tmp_path / "run" / "report.md").read_text()
    assert (tmp_path / "run" / "figure.png").stat().st_size > 10_000
    again = run("--rounds", "2", "--rates", "0.1", "--resume")
    assert again.exit_code == 0
    assert json.loads((tmp_path / "run" / "metrics.json").read_text()) == saved
    other = run("--rounds", "3", "--rates", "0.1", "--resume")
    assert other.exit_code == 1
    assert "rounds was 2 when synthetic_0_fedavg in" in other.stderr and "is 3 now" in other.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--datasets", "moons"], "--datasets='moons' is unknown; allowed are synthetic_0"),
        (["--systems", "sgd"], "--systems='sgd' is unknown; allowed are reptile"),
        (["--rates", "0"], "--rates=0.0"),
        (["--resume"], "--resume needs --out"),
    ],
)
def test_an_error_is_one_line(words, message):
    result = typer_testing.CliRunner().invoke(reptile.app, words)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("means", "expected"),
    [([1, 2, 3], None), ([1, None, None], 20), ([None, 1, 2], None), ([None, 1, None], 30), ([None] * 3, 10)],
)
def test_the_round_of_divergence(means, expected):
    runs = [[float("nan") if mean is None else mean + run for mean in means] for run in range(2)]
    assert reptile.diverged({"rounds": [10, 20, 30], "accuracy": runs}) == expected
    one_of_two = [[1.0, 2.0, 3.0], runs[0]]
    assert reptile.diverged({"rounds": [10, 20, 30], "accuracy": one_of_two}) == expected
