"""The experiments on natural clients: central training, and the bookkeeping of Shakespeare's."""

import jax
import numpy as np
import pytest

import fedjax_meta as fm
from experiments import central, shakespeare
from fedjax_meta.data import holdout
from fedjax_meta.study.scenario import Clients


def test_central_training_learns_from_all_clients_together():
    rng = np.random.default_rng(0)
    slope = rng.normal(size=(4, 3))
    inputs = [rng.normal(size=(16, 4)) for _ in range(6)]
    data = fm.from_clients([(x, np.argmax(x @ slope, 1)) for x in inputs], num_classes=3)
    train, new = holdout.new_clients(data, 0.34, seed=0)
    task = fm.models.logistic(4, 3)
    clients = Clients(task, train, holdout.validation_samples(train, 0.25), new, "title", "", "")
    result = central.central(clients, rates=(1e-4, 0.5), batch=8, passes=40, seeds=(1, 2))
    assert result["rate"] == 0.5
    assert len(result["known"]) == len(result["new"]) == 2
    assert np.mean([row["accuracy_mean"] for row in result["new"]]) > 0.8


def test_a_finished_run_is_read_and_another_is_added(tmp_path):
    calls = []

    def run():
        calls.append(1)
        return {"rounds": 3, "known": {"of_all": 0.5, "mean": 0.4, "worst_tenth": 0.1}, "new": {"of_all": 0.3}, "seconds": 1.0}

    what = {"phase": "final", "system": "fedavg", "rate": 1.0, "seed": 1, "size": [1, None]}
    first = shakespeare._run(tmp_path / "r.jsonl", what, run)
    assert shakespeare._run(tmp_path / "r.jsonl", what, run) == first
    shakespeare._run(tmp_path / "r.jsonl", {**what, "seed": 2}, run)
    assert len(calls) == 2
    rows = shakespeare._read(tmp_path / "r.jsonl")
    assert shakespeare.table(rows, ["fedavg", "maml"]).splitlines()[2:] == [
        "| FedAvg | 1 | 50.00 ± 0.00 | 40.00 ± 0.00 | 10.00 ± 0.00 | 30.00 ± 0.00 | 2 |"
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", shakespeare.SYSTEMS)
def test_every_system_of_shakespeare_trains_an_lstm(name):
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 7, (12, 9)).astype(np.int32) for _ in range(6)]
    data = fm.from_clients([(own[:, :-1], own[:, 1:]) for own in tokens], num_classes=7)
    train, new = holdout.new_clients(data, 0.34, seed=0)
    train, new = (jax.tree.map(jax.numpy.asarray, part) for part in (train, new))
    task = fm.models.char_lstm(7, 8, hidden=4, depth=1)
    setting = shakespeare.Setting(train, train, new, task, 2, 4, 1)
    row = shakespeare._train(setting, name, shakespeare.SYSTEMS[name].rates[0], 1, 2, train)
    assert 0 <= row["known"]["of_all"] <= 1
    assert 0 <= row["new"]["mean"] <= 1
