"""The examples of docs/studies.md run as they stand."""

import itertools
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import fedjax_meta as fm
from fedjax_meta import export
from fedjax_meta.cli import app
from fedjax_meta.study import from_tree, load
from tests.study.common import TREE

PAGE = (Path(__file__).parents[2] / "docs" / "studies.md").read_text(encoding="utf-8")


def block(kind, number=0):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.DOTALL)[number]


def test_the_study_of_the_page_builds():
    chosen = from_tree(yaml.safe_load(block("yaml")))
    assert chosen.scenarios["pairs"].build().train.num_clients == 20
    assert [chosen.title_of(name) for name in chosen.systems] == ["fedavg", "fine_tuned", "local"]


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tree = yaml.safe_load(block("yaml")) | {"rounds": 1, "seeds": [1], "tuning": {"rounds": 1}}
    tree["scenarios"]["pairs"] |= {"dataset": "digits", "model": "logistic"}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    exec(block("python", -1), {})
    assert "fine_tuned {'lr':" in capsys.readouterr().out


ROOT = Path(__file__).parents[2]
RUNS = [
    (page, line)
    for page in ("README.md", "docs/studies.md", "docs/results.md", "docs/results_older.md")
    for line in re.findall(r"fedjax-meta run (\w[^`#\n\\]*)", (ROOT / page).read_text(encoding="utf-8"))
    if ".yaml" not in line and line.strip() != "STUDY"
]


@pytest.mark.parametrize(("page", "line"), RUNS)
def test_the_studies_that_the_pages_run_are_in_the_package(page, line):
    name, *words = shlex.split(line)
    given = dict(itertools.pairwise(words))
    overrides = [words[i + 1] for i, word in enumerate(words) if word == "--set" and words[i + 1] != "..."]
    variants = ["quick"] * ("--quick" in words) + ([given["--variant"]] if "--variant" in given else [])
    assert load(name, overrides, variants=variants).systems, page


@pytest.mark.parametrize("command", re.findall(r"^fedjax-meta (\w+)", PAGE, flags=re.MULTILINE))
def test_commands_of_the_page_exist(command):
    assert command in {(one.name or one.callback.__name__) for one in app.registered_commands}


def blocks(name):
    text = (Path(__file__).parents[2] / "docs" / name).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_the_logger_of_the_page_logs(capsys):
    (code,) = blocks("reports.md")
    names: dict = {}
    exec(code, names)
    clients = from_tree(TREE).scenarios["pairs"].build()
    names["train"](fm.fedavg(clients.task, batch_size=20), clients.train)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "fedavg" and said[1].startswith("1 {'train/loss'") and said[-1] == "finished"


def test_the_code_of_the_page_on_deployment(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    loader, module, newcomer, apps = blocks("deployment.md")
    monkeypatch.chdir(tmp_path)
    kernel = np.arange(640, dtype=np.float32).reshape(64, 10)
    export.save("client3.safetensors", {"params": {"head": {"kernel": kernel, "bias": np.zeros(10, np.float32)}}})
    names: dict = {}
    exec(loader + module, names)
    x = np.ones((2, 8, 8, 1), np.float32)
    np.testing.assert_allclose(names["LogisticRegression"]().apply(names["variables"], x), x.reshape(2, -1) @ kernel)
    exec(newcomer, names)
    clients = from_tree(TREE).scenarios["pairs"].build()
    method = fm.fedavg(clients.task, lr=0.1, finetune_epochs=50)
    x, y = np.random.default_rng(0).random((5, 8, 8, 1), np.float32), np.array([0, 1, 0, 1, 1])
    state = fm.federate(method).init(jax.random.key(0), clients.train)
    variables = names["model_of_new_client"](method, state, x, y, 10)
    assert np.argmax(method.predict(variables, x), -1).tolist() == y.tolist()  # it has adapted on all five
    exec(apps, names)
    pytest.importorskip("flwr")
    assert len(names["apps"](clients.task, clients.train)) == 2


@pytest.mark.parametrize("name", ["reports.md", "deployment.md"])
def test_commands_and_flags_of_the_pages_exist(name):
    text = (Path(__file__).parents[2] / "docs" / name).read_text(encoding="utf-8")
    lines = re.findall(r"^fedjax-meta (\w+)(.*)$", text, flags=re.MULTILINE)
    assert lines
    for command, rest in lines:
        said = CliRunner().invoke(app, [command, "--help"], terminal_width=200).output
        assert all(flag in said for flag in re.findall(r"--[a-z-]+", rest))
