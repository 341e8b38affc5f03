"""Accuracy against epsilon: what is trained, its guarantee, and the report."""

import json

import numpy as np
import pytest

from fedjax_meta import privacy, schedules

typer_testing = pytest.importorskip("typer.testing", reason="the command line needs typer")
pytest.importorskip("dp_accounting", reason="epsilon needs dp-accounting")
experiment = pytest.importorskip("experiments.privacy", reason="the command line needs typer, rich and matplotlib")

RUNNER = typer_testing.CliRunner()
SMALL = ["--clients", "40", "--rate", "0.3", "--rounds", "4", "--eval-every", "4", "--seeds", "1", "--epsilons", "3"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(300, 6)).astype(np.float32), rng.integers(0, 3, 300)
    path = tmp_path_factory.mktemp("data") / "small.npz"
    np.savez(path, x_train=x[:240], y_train=y[:240], x_test=x[240:], y_test=y[240:])
    return path


def test_a_run_meets_its_epsilon_and_says_so(dataset, tmp_path):
    out = tmp_path / "run"
    arguments = ["--dataset", str(dataset), *SMALL, "--clips", "adaptive", "--no-compile-cache", "--devices", "1"]
    first = RUNNER.invoke(experiment.app, [*arguments, "--out", str(out)])
    assert first.exit_code == 0, first.output
    config = json.loads((out / "config.json").read_text())
    chain = config["algorithms"]["adaptive_epsilon3_seed1"]["federation"]["uploads"]
    delta, capacity = 40**-1.1, schedules.poisson_capacity(0.3, 40, 4, 40**-1.1 / 1000)
    assert config["algorithms"]["adaptive_epsilon3_seed1"]["federation"]["cohort_size"] == capacity
    spent = privacy.epsilon(chain[1]["multiplier"], 4, delta, privacy.Poisson(0.3, 40, capacity))
    assert 2.9 < spent.epsilon <= 3
    # The paper's noise on the bits: a twentieth of the expected cohort.
    assert [step["name"] for step in chain] == ["adaptive_clip", "noise"] and chain[0]["bit_noise"] == 40 * 0.3 / 20
    runs = json.loads((out / "metrics.json").read_text())["runs"]
    assert [run["name"] for run in runs] == ["none_no_noise_seed1", "adaptive_epsilon3_seed1"]
    assert runs[0]["config"]["guarantee"] is None
    assert runs[1]["config"]["guarantee"]["epsilon"] == pytest.approx(spent.epsilon)
    text = (out / "report.md").read_text()
    assert "| adaptive | 3 |" in text and "add or remove one client; Poisson sampling with rate 0.3 of N=40" in text
    assert (out / "figure.png").stat().st_size > 5000
    again = RUNNER.invoke(experiment.app, [*arguments, "--out", str(out), "--resume"])
    assert again.exit_code == 0, again.output
    assert (out / "report.md").read_text() == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilons", "0"], "target=0.0 must be finite and above 0"),
        (["--rate", "1.5"], "rate=1.5 must lie between 0 and 1"),
        (["--delta", "2"], "delta=2.0 must lie strictly between 0 and 1"),
        (["--clips", "round"], "--clips='round' is unknown; allowed are fixed, adaptive"),
        (["--model", "lenet"], "--model='lenet' is unknown; allowed are logistic, mlp"),
    ],
)
def test_wrong_options_are_one_line(arguments, message, dataset, tmp_path):
    options = ["--dataset", str(dataset), *SMALL, *arguments, "--out", str(tmp_path / "run"), "--no-compile-cache"]
    result = RUNNER.invoke(experiment.app, options)
    assert result.exit_code == 1 and message in result.output and result.output.count("\n") < 4
