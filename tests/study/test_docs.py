"""The examples of docs/studies.md run as they stand."""

import itertools
import re
from pathlib import Path

import pytest
import yaml

from fedjax_meta.cli import app
from fedjax_meta.study import from_tree, load

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


ROOT = Path(__file__).parents[2]
RUNS = [
    (page, line)
    for page in ("README.md", "docs/studies.md", "docs/results.md", "docs/migration.md")
    for line in re.findall(r"fedjax-meta run (\w[^`#\n\\]*)", (ROOT / page).read_text(encoding="utf-8"))
    if ".yaml" not in line and line.strip() != "STUDY"
]


@pytest.mark.parametrize(("page", "line"), RUNS)
def test_the_studies_that_the_pages_run_are_in_the_package(page, line):
    name, *words = line.split()
    given = dict(itertools.pairwise(words))
    overrides = [words[i + 1] for i, word in enumerate(words) if word == "--set" and words[i + 1] != "..."]
    variants = ["quick"] * ("--quick" in words) + ([given["--variant"]] if "--variant" in given else [])
    assert load(name, overrides, variants=variants).systems, page


@pytest.mark.parametrize("command", re.findall(r"^fedjax-meta (\w+)", PAGE, flags=re.MULTILINE))
def test_commands_of_the_page_exist(command):
    assert command in {(one.name or one.callback.__name__) for one in app.registered_commands}
