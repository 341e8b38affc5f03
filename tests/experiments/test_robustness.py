"""The experiment on robustness: its clients, its combinations, and a run as a user starts it."""

import json

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import robustness
from fedjax_meta.data import sources


@pytest.fixture(autouse=True)
def as_users_run_it():
    with jax.numpy_rank_promotion("allow"), jax.enable_x64(False):
        yield


@pytest.mark.parametrize("split", ["iid", "0.3"])
def test_clients_new_clients_and_the_server_share_no_sample(split):
    source = sources.load("digits")
    clients = robustness.make_clients(source, split, num_clients=6, num_new=2, seed=1)
    assert (clients.train.num_clients, clients.new.num_clients, clients.root.num_clients) == (6, 2, 1)
    total = sum(len(part.y) for part in clients)
    assert total == len(source.pooled()[1]) and len(clients.root.y) == robustness.ROOT
    together = np.concatenate([np.asarray(part.x).reshape(len(part.y), -1) for part in clients])
    everything = source.pooled()[0].reshape(total, -1)
    np.testing.assert_array_equal(np.unique(together, axis=0), np.unique(everything, axis=0))


def test_every_combination_can_be_built_and_rules_that_allow_fewer_attackers_are_left_out():
    cut = {"0.3": robustness.make_clients(sources.load("digits"), "0.3", num_clients=10, num_new=2, seed=1)}
    how = {"lr": 0.1, "epochs": 1, "batch_size": 10, "assumed": 0.2, "devices": 1}
    cells = robustness.make_cells(["0.3"], robustness.SETS["all"], [0.2, 0.4], cut.__getitem__, **how)
    assert len({cell.name for cell in cells}) == len(cells)
    by_rule = {rule: {cell.share for cell in cells if cell.rule == rule} for rule in robustness.RULES}
    assert {rule for rule, shares in by_rule.items() if shares == {0.0, 0.2}} == {"krum", "multi_krum"}
    assert {rule for rule, shares in by_rule.items() if not shares} == {"bulyan"}
    assert {cell.system for cell in cells} == set(robustness.SYSTEMS)
    for cell in cells:
        if (cell.attack, cell.share, cell.rule) == ("alie", 0.2, "krum"):
            jax.eval_shape(cell.algorithm.init, jax.random.key(0), cut["0.3"].train)
    for names in (*robustness.SETS["quick"], *robustness.SETS["default"]):
        assert set(names) <= {*robustness.SYSTEMS, *robustness.RULES, *robustness.ATTACKS}


def test_a_run_writes_its_report_and_resumes_without_training_again(tmp_path):
    options = ["--dataset", "digits", "--splits", "0.5", "--systems", "fedavg", "--rules", "mean,multi_krum"]
    options += ["--attack", "backdoor", "--rounds", "1", "--seeds", "1,2", "--num-clients", "8", "--new-clients", "2"]
    options += ["--devices", "1", "--no-compile-cache", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(robustness.app, options)
    assert done.exit_code == 0, done.output
    runs = json.loads((tmp_path / "run" / "metrics.json").read_text())["runs"]
    assert [run["name"] for run in runs] == [f"0.5_fedavg_{rule}_backdoor_0.2" for rule in ("mean", "multi_krum")]
    for run in runs:
        assert {len(run["result"][field]) for field in ("known", "new", "success")} == {2}
        assert all(0 <= value <= 100 for value in run["result"]["known"])
        assert run["config"]["algorithm"]["federation"]["attack"]["attackers"] == 0.2
    text = (tmp_path / "run" / "report.md").read_text()
    assert "| FedAvg | Multi-Krum |" in text and "success of the backdoor" in text and "figure.png" in text
    assert (tmp_path / "run" / "figure.png").stat().st_size > 5000
    before = (tmp_path / "run" / "metrics.json").read_bytes()
    again = CliRunner().invoke(robustness.app, [*options, "--resume"])
    assert again.exit_code == 0 and (tmp_path / "run" / "metrics.json").read_bytes() == before


def test_a_run_that_diverged_is_no_number():
    assert robustness.spread([80.0, None]) == "diverged"
    assert robustness.spread([80.0, 82.0]) == "81.0 ±1.4"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--systems", "fedavg,x"], "--systems='x' is unknown; allowed are fedavg,"),
        (["--rules", "mode"], "--rules='mode' is unknown"),
        (["--attack", "storm"], "--attack='storm' is unknown"),
        (["--shares", "1.5"], "--shares=1.5 must lie strictly between 0 and 1"),
        (["--shares", "few"], "--shares 'few' must be numbers"),
        (["--splits", "-1"], "--splits=-1.0 must be finite and above 0"),
        (["--rules", "bulyan", "--shares", "0.4", "--attack", "ipm"], "no rule allows so many attackers"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, message):
    failed = CliRunner().invoke(robustness.app, ["--dataset", "digits", "--devices", "1", "--splits", "0.5", *options])
    assert failed.exit_code == 1
    assert message in failed.output.replace("\n", " ") and "Traceback" not in failed.output
