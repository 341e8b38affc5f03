"""The studies of natural clients: every system of Shakespeare's trains, and central training beside them."""

import jax
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.data import holdout
from fedjax_meta.study import load, run
from fedjax_meta.study.scenario import Clients
from tests.study.common import Silent


@pytest.mark.long
def test_every_system_of_shakespeare_trains_an_lstm(tmp_path):
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 7, (12, 9)).astype(np.int32) for _ in range(8)]
    data = fm.from_clients([(own[:, :-1], own[:, 1:]) for own in tokens], num_classes=7)
    train, new = holdout.new_clients(data, 0.25, seed=0)
    train, new = (jax.tree.map(np.asarray, part) for part in (train, new))
    task = fm.models.char_lstm(7, 8, hidden=4, depth=1)
    clients = Clients(task, train, holdout.validation_samples(train, 0.25), new, "speakers", "", "abc")
    chosen = load("shakespeare", ["rounds=2", "tuning.rounds=1", "federation.cohort_size=2"])
    outcomes = run.run(chosen, tmp_path, watcher=Silent(), clients={"speakers": clients})
    assert len(outcomes) == 8
    for one in outcomes:
        test = one.final[0].rows[-1]["tests"]["known"]
        assert list(test["metrics"]) == ["token_accuracy", "perplexity"]
        assert all(0 <= value <= 1 for value in test["metrics"]["token_accuracy"]["values"])
