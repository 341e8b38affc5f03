"""Scenarios of data sets whose clients are given."""

import jax
import numpy as np
import pytest

from fedjax_meta.study import from_tree, results, run
from fedjax_meta.study.scenario import Scenario
from tests.study.common import Silent


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "uci_har").mkdir()
    np.savez(
        tmp_path / "uci_har" / "uci_har.npz",
        x=rng.normal(size=(100, 128, 9)).astype(np.float16),
        y=rng.integers(0, 6, 100),
        subject=np.arange(100) % 10,
    )
    return str(tmp_path)


HAR = {"dataset": "uci_har", "partition": "natural", "model": "sensor_cnn", "new": 0.2}


def test_a_scenario_names_natural_clients_and_their_model(folder):
    clients = Scenario(**HAR).build(folder)
    assert clients.train.num_clients == 8
    assert clients.new.num_clients == 2
    assert clients.title == "uci_har, 10 natural clients"
    assert "30 subjects" in clients.note
    shapes = clients.task.predict(clients.task.init(jax.random.key(0)), clients.train.x[:2].astype(float)).shape
    assert shapes == (2, 6)
    assert Scenario(**HAR).build(folder).fingerprint == clients.fingerprint
    assert Scenario(**HAR, clients=5).build(folder).train.num_clients == 4


def test_a_scenario_of_ratings_keeps_users_apart(tmp_path):
    (tmp_path / "movielens").mkdir()
    rows = [f"{user},{item},{1 + (user + item) % 5},{item}" for user in range(6) for item in range(12)]
    (tmp_path / "movielens" / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + "\n".join(rows))
    scenario = Scenario(
        dataset="movielens", partition="natural", options={"least": 10}, model="matrix_factorisation",
        model_options={"mean": 3.0}, new=0.0,
    )  # fmt: skip
    clients = scenario.build(str(tmp_path))
    assert clients.train.num_clients == 6
    assert clients.train.num_classes == 0
    assert clients.task.init(jax.random.key(0))["items"]["bias"].shape == (12,)
    with pytest.raises(ValueError, match="model=None takes one array of inputs, but the data have item"):
        Scenario(dataset="movielens", partition="natural", options={"least": 10}).build(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "iid"}, "the clients of uci_har are given: partition='iid' must be 'natural'"),
        ({"options": {"least": 3}}, "option of uci_har='least' is unknown"),
        ({"model_options": {"window": [1, 2]}}, "window"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(options, words):
    with pytest.raises(ValueError) as error:
        Scenario(**{**HAR, **options})
    assert words in str(error.value)


def test_a_set_that_is_not_there_says_how_to_get_it(tmp_path):
    with pytest.raises(ValueError, match=r"download the archive from https://archive\.ics\.uci\.edu"):
        Scenario(**HAR).build(str(tmp_path))


def test_a_study_of_ratings_is_compared_by_errors(tmp_path):
    (tmp_path / "movielens").mkdir()
    rows = [f"{user},{item},{1 + (user + item) % 5},0" for user in range(12) for item in range(20)]
    (tmp_path / "movielens" / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + "\n".join(rows))
    scenario = {"dataset": "movielens", "partition": "natural", "options": {"least": 10}, "model": "matrix_factorisation"}
    systems = {"fedper": {"method": "fedper", "grid": {"lr": [0.1, 1e-9]}}}
    study = from_tree(
        {
            "title": "Ratings",
            "scenarios": {"users": scenario},
            "systems": systems,
            "rounds": 2,
            "tuning": {"rounds": 2},
            "main": "rmse",
        }
    )
    built = run.build(study, str(tmp_path))
    (one,) = run.run(study, tmp_path / "out", watcher=Silent(), clients=built)
    assert one.chosen == {"lr": 0.1}
    line, mean, untrained = results.lines(study, "users", built["users"], [one])
    assert line.kind.name == "rmse" and set(line.others) >= {"mae", "r2", "mae, new"}
    assert mean.title == "mean of own targets" and untrained.known[0] > line.known[0]
