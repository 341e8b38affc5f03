"""The FL-MAML/iMAML study: its systems, and a run from start to end."""

import json

import pytest

from tests import problems

typer_testing = pytest.importorskip("typer.testing", reason="the command line needs typer")
runner = pytest.importorskip("experiments._runner")
imaml = pytest.importorskip("experiments.imaml", reason="the command line needs typer, rich and matplotlib")


def test_every_system_takes_its_inner_epochs_and_every_logged_column_is_a_system():
    for system in imaml.SYSTEMS.values():
        runner.build(system.method, problems.task(), cohort_size=3, devices=1, **imaml.options_of(system, 3))
    assert {name for rows in imaml.LOGGED.values() for row in rows.values() for name in row} <= set(imaml.SYSTEMS)


def test_a_run_writes_accuracy_time_and_memory(tmp_path):
    words = ["--dataset", "mnist_small", "--systems", "fomaml", "--epochs", "1", "--rounds", "1", "--repeats", "1"]
    words += ["--no-compile-cache", "--out", str(tmp_path / "run")]
    result = typer_testing.CliRunner().invoke(imaml.app, words)
    assert result.exit_code == 0, result.output
    training, cost = json.loads((tmp_path / "run" / "metrics.json").read_text())["runs"]
    assert (training["name"], cost["name"]) == ("fomaml_E1_seed1", "fomaml_E1_cost")
    assert cost["result"]["seconds"] > 0
    again = typer_testing.CliRunner().invoke(imaml.app, [*words, "--resume"])
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["runs"] == [training, cost]
    report = (tmp_path / "run" / "report.md").read_text()
    assert "FOMAML" in report
    assert (tmp_path / "run" / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dataset", "moons"], "--dataset='moons' is unknown; allowed are mnist"),
        (["--systems", "sgd"], "--systems='sgd' is unknown; allowed are maml"),
        (["--epochs", "1,1"], "--epochs '1,1' must name at least one value, and none twice"),
    ],
)
def test_an_error_is_one_line(words, message):
    result = typer_testing.CliRunner().invoke(imaml.app, words)
    assert result.exit_code == 1
    assert message in result.stderr
