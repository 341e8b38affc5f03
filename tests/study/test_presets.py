"""Presets: what a run's grids found, used by name."""

import pytest
import yaml

from fedjax_meta.methods import METHODS
from fedjax_meta.study import System, from_tree, presets, run, to_tree
from tests.study.common import TREE, Silent, study, tree


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, run.run(study(), folder, watcher=Silent(), command="fedjax-meta run it")


@pytest.fixture
def saved(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return presets.save(finished[0], presets.HERE)


def test_a_preset_has_the_chosen_values_and_where_they_come_from(finished, saved):
    assert [path.name for path in saved] == ["digits-pairs.yaml"]
    preset, (fedavg, _) = presets.find("digits-pairs/fedavg"), finished[1]
    assert preset.chosen == fedavg.chosen and preset.options == {"epochs": 1, "batch_size": 20}
    scores = [trial.rows[-1]["tests"]["validation"]["scores"]["accuracy_mean"] for trial in fedavg.tuning]
    assert preset.score == pytest.approx(100 * max(scores), abs=0.01)
    facts = preset.facts
    assert facts["study"] == TREE["title"] and facts["tuning"]["seeds"] == [0] and facts["tuning"]["rounds"] == 3
    assert facts["scenario"]["dataset"] == "digits" and facts["command"] == "fedjax-meta run it"
    assert len(facts["git"]["package"]["commit"]) == 40 and facts["at the end of its grid"] == ["lr"]
    assert "digits-pairs/local" not in presets.known()  # it had no grid


def test_a_study_uses_a_preset_by_name(finished, saved):
    chosen = finished[1][0].chosen["lr"]
    system = System(method="fedavg", preset="digits-pairs/fedavg")
    assert system.options == {"epochs": 1, "batch_size": 20, "lr": chosen}
    assert System(method="fedavg", preset="digits-pairs/fedavg", options={"epochs": 3}).options["epochs"] == 3
    grid = System(method="fedavg", preset="digits-pairs/fedavg", grid={"lr": [1.0, 2.0]})
    assert "lr" not in grid.options
    made = from_tree(tree(systems={"a": {"method": "fedavg", "preset": "digits-pairs/fedavg"}}))
    assert to_tree(from_tree(to_tree(made))) == to_tree(made)
    (outcome,) = run.run(from_tree({**to_tree(made), "rounds": 1, "seeds": [1]}), presets.HERE / "with", watcher=Silent())
    assert outcome.chosen == {}


def test_the_path_of_a_runs_own_presets_is_a_name_too(finished):
    assert presets.find(f"{finished[0]}/presets/pairs/fedavg").method == "fedavg"


@pytest.mark.parametrize("content", [b"a: [b", b"\xff", b"1", b"systems: 3", b""], ids=str)
def test_a_run_does_not_end_at_a_damaged_file_of_presets(content, finished, tmp_path, caplog):
    path = tmp_path / "pairs.yaml"
    path.write_bytes(content)
    tree = yaml.safe_load((finished[0] / "presets/pairs.yaml").read_text())
    presets.write(path, tree, keep=True)
    assert f"{path} is no file of presets and is written anew" in caplog.text
    assert presets.read(path, "pairs") == presets.read(finished[0] / "presets/pairs.yaml", "pairs")


def test_presets_are_read_as_studies_are(tmp_path, monkeypatch):
    """`1e-3` is a number, as nobody writes 1.0e-3, and a field that stands there twice is refused."""
    monkeypatch.chdir(tmp_path)
    text = """systems: {fedavg: {method: fedavg, options: {epochs: 1}, chosen: {lr: 1e-3}, score: 9e1, federation: {},
               at the end of its grid: []}}"""
    (tmp_path / "mine.yaml").write_text(text)
    assert (presets.find("mine/fedavg").chosen, presets.find("mine/fedavg").score) == ({"lr": 1e-3}, 90.0)
    (tmp_path / "mine.yaml").write_text(text.replace("epochs: 1", "epochs: 1, epochs: 2"))
    with pytest.raises(ValueError, match="mine.yaml is no file of presets: .*'epochs' stands there twice"):
        presets.find("mine/fedavg")


def test_every_preset_of_the_package_builds():
    found = {name: preset for name, preset in presets.known().items() if name.startswith("mnist_small-")}
    assert len(found) >= 8
    for name, preset in found.items():
        System(method=preset.method, preset=name)
        assert preset.method in METHODS and 0 < preset.score <= 100 and preset.chosen
        assert len(preset.facts["git"]["package"]["commit"]) == 40 and not preset.facts["git"]["package"]["dirty"]


def test_bad_input_gets_one_line(finished, saved, tmp_path):
    with pytest.raises(
        ValueError, match="preset='digits-pairs/fedavgg' is unknown|'fedavgg' is unknown .did you mean 'fedavg'"
    ):
        presets.find("digits-pairs/fedavgg")
    with pytest.raises(ValueError, match="preset='digit-pairs/fedavg' is unknown .did you mean 'digits-pairs/fedavg'"):
        presets.find("digit-pairs/fedavg")
    with pytest.raises(ValueError, match="preset digits-pairs/fedavg is of method fedavg, not ditto"):
        System(method="ditto", preset="digits-pairs/fedavg")
    with pytest.raises(ValueError, match="holds no tuned values"):
        presets.save(tmp_path / "presets", tmp_path)
    (tmp_path / "odd.yaml").write_text("[1]")
    with pytest.raises(ValueError, match="odd.yaml is no file of presets"):
        presets.find("odd/x")


def test_a_run_of_some_systems_keeps_the_presets_of_the_others(tmp_path):
    grid = {"method": "fedavg", "options": {"batch_size": 20}, "grid": {"lr": [0.02, 0.2]}}
    both = study(systems={"a": grid, "b": {**grid, "title": "b"}}, rounds=1, seeds=[1], tuning={"rounds": 1})
    run.run(both, tmp_path, watcher=Silent())
    path = tmp_path / "presets" / "pairs.yaml"
    before = presets.read(path, "pairs")
    run.run(
        study(systems={"b": {**grid, "title": "b"}}, rounds=1, seeds=[1], tuning={"rounds": 1}), tmp_path, watcher=Silent()
    )
    after = presets.read(path, "pairs")
    assert list(after) == ["a", "b"] and {name: one.chosen for name, one in after.items()} == {
        name: one.chosen for name, one in before.items()
    }
