"""The examples of docs/studies.md run as they stand."""

import re
from pathlib import Path

import pytest
import yaml

from fedjax_meta.cli import app
from fedjax_meta.study import from_tree

PAGE = (Path(__file__).parents[2] / "docs" / "studies.md").read_text(encoding="utf-8")


def block(kind):
    (found,) = re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.DOTALL)
    return found


def test_the_study_of_the_page_builds():
    chosen = from_tree(yaml.safe_load(block("yaml")))
    assert chosen.scenarios["pairs"].build().train.num_clients == 20
    assert [chosen.title_of(name) for name in chosen.systems] == ["fedavg", "fine_tuned", "local"]


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tree = yaml.safe_load(block("yaml")) | {"rounds": 1, "seeds": [1], "tuning": {"rounds": 1}}
    tree["scenarios"]["pairs"] |= {"dataset": "digits", "model": "logistic"}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    exec(block("python"), {})
    assert "fine_tuned {'lr':" in capsys.readouterr().out


@pytest.mark.parametrize("command", re.findall(r"^fedjax-meta (\w+)", PAGE, flags=re.MULTILINE))
def test_commands_of_the_page_exist(command):
    assert command in {(one.name or one.callback.__name__) for one in app.registered_commands}
