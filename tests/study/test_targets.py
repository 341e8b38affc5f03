"""Scenarios of real targets and of several labels from a file, and the commands of docs/data.md that compare systems on them."""

import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import fedjax_meta as fm
from fedjax_meta.cli import app
from fedjax_meta.data import targets
from fedjax_meta.study import load
from fedjax_meta.study.scenario import Scenario

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


@pytest.fixture
def write(tmp_path):
    def write(**arrays):
        np.savez(tmp_path / "own.npz", **arrays)
        return str(tmp_path / "own.npz")

    return write


RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 4)).astype(np.float32)
OWNERS = np.arange(120) % 6
FORMS = {
    "one number": (X[:, 0] * 3, ("mae", "rmse", "r2"), 1),
    "two numbers": (X[:, :2].astype(np.float64), ("mae", "rmse", "r2"), 2),
    "several labels": ((X[:, :3] > 0).astype(np.int8), ("label_accuracy", "f1"), 3),
    "one label of several": (X[:, :1] > 0, ("label_accuracy", "f1"), 1),
}


@pytest.mark.parametrize("partition", ["natural", "iid"])
def test_real_targets_that_are_all_0_or_1_are_real(partition, write):
    y = (X[:, 0] > 0).astype(np.float64)
    clients = Scenario(dataset=write(x=X, y=y, client=OWNERS), partition=partition, model="mlp", new=0.0).build()
    assert clients.task.metrics == ("mae", "rmse", "r2")


@pytest.mark.parametrize("model", ["mlp", "logistic"])
@pytest.mark.parametrize("form", FORMS)
def test_the_clients_of_a_file_have_its_samples_and_a_model_for_its_targets(form, model, write):
    y, metrics, outputs = FORMS[form]
    scenario = Scenario(dataset=write(x=X, y=y, client=OWNERS), partition="natural", model=model, new=0.0)
    clients = scenario.build()
    rows = np.asarray(y, np.float32).reshape(120, -1)
    found = np.concatenate([np.asarray(clients.train.x), np.asarray(clients.train.y)], 1)
    for i in range(6):
        mine = np.concatenate([X, rows], 1)[i == OWNERS]
        assert {row.tobytes() for row in found[20 * i : 20 * (i + 1)]} == {row.tobytes() for row in mine}
    assert clients.task.metrics == metrics
    variables = clients.task.init(jax.random.key(0))
    outputs_of = np.asarray(clients.task.predict(variables, X[:5]))
    assert outputs_of.shape == (5, outputs)
    batch = fm.Batch(X[:5], rows[:5], np.ones(5, np.float32))
    loss = float(clients.task.loss(variables, batch, jax.random.key(1))[0])
    entropies = np.logaddexp(0, outputs_of) - rows[:5] * outputs_of
    expected = entropies.mean() if "f1" in metrics else ((outputs_of - rows[:5]) ** 2).mean()
    assert loss == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(("sides", "kernel"), [((16, 16), True), ((15, 40), False), ((13, 17), False)])
def test_colour_images_that_the_lenet_leaves_nothing_of_get_the_perceptron(sides, kernel, write):
    x = RNG.integers(0, 255, (60, *sides, 3), dtype=np.uint8)
    scenario = Scenario(dataset=write(x=x, y=np.arange(60) % 3, client=np.arange(60) // 10), partition="natural", new=0.0)
    variables = scenario.build().task.init(jax.random.key(0))
    assert any(leaf.ndim == 4 for leaf in jax.tree.leaves(variables)) == kernel


def test_splits_of_a_file_are_put_together_and_images_get_a_channel(write):
    images = RNG.integers(0, 255, (60, 8, 8), dtype=np.uint8)
    y = RNG.normal(size=60)
    path = write(x_train=images[:40], y_train=y[:40], x_test=images[40:], y_test=y[40:])
    found = targets.read(path)
    assert found.x.shape == (60, 8, 8, 1) and np.array_equal(found.y[:, 0], y.astype(np.float32))
    clients = Scenario(dataset=path, partition="iid", clients=5, new=0.2).build()
    assert clients.train.num_clients == 4 and clients.new.num_clients == 1
    assert "real targets, 1 a sample" in clients.note


@pytest.mark.parametrize("y", [np.arange(120) % 5, OWNERS.astype(np.int64)])
def test_classes_stay_classes(y, write):
    path = write(x=X, y=y, client=OWNERS)
    assert targets.read(path) is None
    assert Scenario(dataset=path, partition="natural").build().train.num_classes == y.max() + 1


WORDS = {
    "classes": (np.arange(120) % 2, "2 classes"),
    "classes without samples": (np.arange(120) % 2 * 3, "4 classes, 2 of them empty"),
    "one number": (X[:, 0], "1 real target"),
    "two numbers": (X[:, :2], "2 real targets"),
    "several labels": (X[:, :3] > 0, "several labels, 3 a sample"),
    "classes as floats": (
        (np.arange(120) % 4).astype(float),
        "1 real target (all whole numbers: classes must be stored as integers)",
    ),
    "one-hot floats": (
        np.eye(2)[np.arange(120) % 2],
        "2 real targets (each row has a single 1: classes must be stored as their",
    ),
    "one-hot integers": (np.eye(3, dtype=int)[np.arange(120) % 3], "several labels, 3 a sample (each row has a single 1"),
}


@pytest.mark.parametrize("case", WORDS)
def test_the_first_line_says_what_the_targets_are(case, write):
    y, words = WORDS[case]
    clients = Scenario(dataset=write(x=X, y=y, client=OWNERS), partition="natural", model="mlp").build()
    assert clients.targets.startswith(words) and (clients.targets == words or "(" in words)


def test_a_dry_run_says_targets_and_who_is_left_out(write, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    path = write(x=X, y=(np.arange(120) % 2).astype(float), client=np.where(np.arange(120) < 3, 9, OWNERS))
    options = ["run", "--systems", "fedavg", "--dataset", path, "--partition", "natural", "--rounds", "1", "--dry-run"]
    result = CliRunner().invoke(app, [*options, "--set", "federation.cohort_size=2"])
    assert result.exit_code == 0, result.output
    assert "1 real target (all whole numbers: classes must be stored as integers)" in result.output
    assert "1 of 7 clients has fewer than 5 samples and is left out (9)" in result.output
    assert "real targets, 1 a sample" not in result.output


def test_a_dry_run_says_once_that_there_are_several_labels(write):
    path = write(x=X, y=(X[:, :3] > 0).astype(np.int8))
    result = CliRunner().invoke(app, ["run", "--systems", "fedavg", "--dataset", path, "--partition", "iid", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert result.output.count("several labels") == 1


NAN = X[:, 0].copy()
NAN[7] = np.nan


@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        (
            {"y": X[:, 0]},
            {"partition": "classes"},
            "partition classes divides samples by their class, but .* has real targets",
        ),
        (
            {"y": X[:, 0]},
            {"partition": "dirichlet_classes", "options": {"concentration": 1.0}},
            "take one of iid, quantity_skew",
        ),
        ({"y": NAN}, {"partition": "iid"}, "NaN or infinite values in y, first in sample 7"),
        ({"y": X[:, 0], "x": X * np.inf}, {"partition": "iid"}, "NaN or infinite values in x, first in sample 0"),
        ({"y": np.arange(240).reshape(120, 2)}, {"partition": "iid"}, "beyond 0 and 1: real targets are floats"),
        ({"y": np.zeros((120, 2, 2))}, {"partition": "iid"}, r"must have x \[M, \.\.\.\] and y \[M\] or \[M, d\]"),
        ({"y": X[:90, 0]}, {"partition": "iid"}, r"not \[120, 4\] and \[90\]"),
        ({"y": X[:, 0], "x": X.astype(str)}, {"partition": "iid"}, "has x of type <U32: give numbers"),
        ({"y": X[:, :2].astype(str)}, {"partition": "iid"}, "has y of type <U32: give numbers"),
        (
            {"y": X[:, 0]},
            {"partition": "iid", "model": "char_lstm"},
            r"reads tokens, integers \[S, T\], but the inputs are float",
        ),
        (
            {"y": OWNERS},
            {"partition": "iid", "augment": "crop_and_flip"},
            r"crop_and_flip is for images .* not for inputs \[4\]",
        ),
        ({"y": np.zeros(120, int)}, {"partition": "iid"}, r"dataset .*npz: all samples have the label 0"),
        ({"y": X[:, :2] > 0, "client": OWNERS[:90]}, {"partition": "natural"}, r"client has shape \[90\]"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(arrays, options, words, write):
    with pytest.raises(ValueError, match=words) as error:
        Scenario(
            **{"dataset": write(**{"x": X, **arrays}), "clients": 6 if options["partition"] == "iid" else None, **options}
        ).build()
    assert "\n" not in str(error.value)


def test_a_classifier_still_needs_two_outputs():
    assert fm.models.lenet((16, 16, 1), 1, loss=fm.tasks.squared_error()).init(jax.random.key(0))
    with pytest.raises(ValueError, match="classes=1 must be an integer of at least 2"):
        fm.models.lenet((16, 16, 1), 1)
    with pytest.raises(ValueError, match="classes=0"):
        fm.models.sensor_cnn(classes=0, loss=fm.tasks.squared_error())


@pytest.mark.long
def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "prices.npz" in one]
    exec(code, {"np": np, "x": RNG.normal(size=(600, 4)).astype(np.float32)})
    commands = re.findall(r"^fedjax-meta (run --systems .*)$", PAGE, flags=re.MULTILINE)
    assert len(commands) == 2
    short = ["--rounds", "2", "--set", "federation.cohort_size=4", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, [*shlex.split(commands[1]), *short, "--dry-run"])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, [*shlex.split(commands[0]), *short])
    assert result.exit_code == 0, result.output
    assert "mean of own targets" in result.output and "searched by mae" in result.output.replace("\n", " ")


def test_the_study_of_sinusoids_is_few_shot_regression():
    chosen = load("sinusoids", variants=["quick"])
    clients = chosen.scenarios["sines"].build()
    assert clients.train.num_clients == 100 and clients.new.num_clients == 25
    assert int(clients.new.sizes("support")[0]) == 8
    # Every client is a sine of its own: y = a sin(x - p) is linear in (sin x, cos x), exactly.
    x, y = np.asarray(clients.train.x)[:, 0], np.asarray(clients.train.y)[:, 0]
    for i in range(3):
        mine = slice(40 * i, 40 * (i + 1))
        columns = np.stack([np.sin(x[mine]), np.cos(x[mine])], 1)
        _, residual, _, _ = np.linalg.lstsq(columns, y[mine], rcond=None)
        assert residual[0] < 1e-8
    assert chosen.score == "rmse" and chosen.tuning.rounds == 10
