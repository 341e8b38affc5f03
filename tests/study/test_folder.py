"""The folder of a run: facts, metrics after a kill, clients, contradictions, the index."""

import json
import shutil
import subprocess

import numpy as np
import pytest
import yaml

from fedjax_meta import disk, report
from fedjax_meta.study import compare, environment, from_tree, index, result_files, run
from fedjax_meta.study import folder as folders
from fedjax_meta.study.study import to_yaml
from tests.study.common import TREE, Silent, study, tree


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "first"
    return place, run.run(study(), place, watcher=Silent(), command="fedjax-meta run it")


def test_run_json_says_what_was_run_and_where(finished):
    folder, _ = finished
    content = folders.read_run(folder)
    assert content["systems"]["fedavg"]["grid"] == {"lr": [0.02, 0.2]}
    # Nobody typed these: they are defaults of the methods and of the federation.
    assert content["systems"]["local"]["finetune_epochs"] == 0 and "weighting" in content["systems"]["fedavg"]
    assert content["systems"]["fedavg"]["federation"]["cohort_size"] == 4
    assert set(content["versions"]) >= {"python", "jax", "jaxlib", "flax", "optax", "numpy", "fedjax_meta"}
    assert content["started"] <= content["finished"] and content["command"] == "fedjax-meta run it"
    assert len(content["git"]["package"]["commit"]) == 40 and content["git"]["package"]["dirty"] in (True, False)
    assert content["clients"]["pairs"]["clients"] == 8 and content["environment"]["XLA_FLAGS"]
    assert content["traffic"]["pairs"]["local"] >= 0


def test_a_folder_outside_of_git_has_no_commit(tmp_path):
    assert environment.commit(tmp_path) is None


def test_a_commit_is_dirty_where_tracked_files_differ_but_those_that_may(tmp_path):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for name in ("docs/a.md", "code/b.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("1", encoding="utf-8")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "it"]):
        subprocess.run([*git, *words], check=True)

    def dirty(*but):
        return [environment.commit(folder, *but)["dirty"] for folder in (tmp_path, tmp_path / "code")]

    but = ":(top,exclude)docs"
    assert dirty() == dirty(but) == [False, False]
    (tmp_path / "docs/a.md").write_text("2", encoding="utf-8")
    (tmp_path / "code/new.py").write_text("2", encoding="utf-8")  # not tracked
    assert dirty() == [True, True] and dirty(but) == [False, False]
    (tmp_path / "code/b.py").write_text("2", encoding="utf-8")
    assert dirty() == dirty(but) == [True, True]


def test_every_client_is_in_npz_and_in_a_data_frame(finished):
    folder, (fedavg, _) = finished
    with np.load(folder / "results" / "pairs" / "fedavg.clients.npz") as found:
        assert found["known_accuracy"].shape == (2, 8) and found["new_loss"].shape == (2, 2)
        mine = np.array([trial.rows[-1]["tests"]["known"]["accuracy"] for trial in fedavg.final], np.float32)
        np.testing.assert_allclose(found["known_accuracy"], mine, rtol=1e-6)
        sizes = study().scenarios["pairs"].build().train.size["test"]
        np.testing.assert_array_equal(found["known_samples"], sizes)
    table = report.load_clients(folder)
    # New clients of local training have no model of their own that they trained.
    assert len(table) == 2 * (8 + 2) + 2 * 8 and set(table.columns) >= {
        "scenario",
        "client",
        "samples",
        "accuracy",
        "f1",
        "loss",
    }
    mean = table[(table.system == "fedavg") & (table.clients == "known") & (table.seed == 2)].accuracy.mean()
    assert mean == pytest.approx(fedavg.final[1].rows[-1]["tests"]["known"]["scores"]["accuracy_mean"])
    with pytest.raises(OSError, match="no finished results"):
        report.load_clients(folder.parent)


def test_two_changes_that_contradict_a_run_are_refused_with_both_values_of_each(finished):
    folder, _ = finished
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    other = tree(scenarios={"pairs": {**TREE["scenarios"]["pairs"], "clients": 12}}, tuning={"rounds": 3, "halving": 2})
    with pytest.raises(ValueError, match="holds another study") as error:
        run.run(from_tree(other), folder, watcher=Silent())
    for words in ("scenarios.pairs.clients was 10 and is 12 now", "tuning.halving was None and is 2 now"):
        assert words in str(error.value)
    assert "fingerprint" not in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"rounds \(a run takes more, not fewer\) was 4 and is 3 now"):
        run.run(study(rounds=3), folder, watcher=Silent())
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


CHANGED = {
    "metrics": ["calibration_error"],
    "user_accuracy": "train",
    "on_divergence": "stop",
    "store": "host",
    "stop_at": 99,
}


@pytest.mark.parametrize("field", CHANGED)
def test_a_refused_option_of_results_leaves_the_record_as_it_was(finished, tmp_path, field):
    """Also where there are checkpoints alone."""
    folder, _ = finished
    with pytest.raises(KeyboardInterrupt):
        run.run(study(systems={"local": TREE["systems"]["local"]}), tmp_path, watcher=Silent(stop_at=1))
    assert not list((tmp_path / "results").rglob("*.json")) and list((tmp_path / "state").glob("*/*/*"))
    message = f"cannot resume: {field} was not set when .* and is .* now"
    for place, systems in ((folder, TREE["systems"]), (tmp_path, {"local": TREE["systems"]["local"]})):
        before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
        other = study(systems=systems, **{field: CHANGED[field]})
        with pytest.raises(ValueError, match=message):
            run.run(other, place, watcher=Silent())
        with pytest.raises(ValueError, match=message):
            run.check_folder(other, place, run.build(other))
        assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_other_attackers_are_other_clients_that_are_scored(tmp_path):
    liar = {"method": "fedavg", "options": {"lr": 0.1}, "federation": {"attack": {"name": "sign_flip", "attackers": 0.25}}}
    both = {"local": TREE["systems"]["local"], "liar": liar}
    run.run(study(systems={"local": both["local"]}, rounds=1, seeds=[1]), tmp_path, watcher=Silent())
    with pytest.raises(ValueError, match="other systems of scenario pairs attack than when .* other clients are scored; give"):
        run.run(study(systems=both, rounds=1, seeds=[1]), tmp_path, watcher=Silent())


def test_a_folder_with_results_of_other_scenarios_is_refused(finished):
    folder, _ = finished
    other = tree(scenarios={"triples": TREE["scenarios"]["pairs"]})
    with pytest.raises(ValueError, match="holds another study, of pairs; give another folder"):
        run.run(from_tree(other), folder, watcher=Silent())


def test_a_study_file_that_no_run_wrote_is_not_overwritten(tmp_path):
    """`run study.yaml --out .` would replace the user's file; what a start left that was killed before `run.json` goes on."""
    chosen, path = study(systems={"local": TREE["systems"]["local"]}, rounds=1, seeds=[1]), tmp_path / "study.yaml"
    path.write_text(f"# my notes\n{to_yaml(chosen)}")
    before = path.read_bytes()
    for start in (lambda: run.check_folder(chosen, tmp_path, run.build(chosen)), lambda: run.run(chosen, tmp_path)):
        with pytest.raises(
            ValueError, match=r"study\.yaml is no file of a run, and would be overwritten: give another folder"
        ):
            start()
    assert path.read_bytes() == before
    path.write_text(to_yaml(chosen))
    run.run(chosen, tmp_path)
    assert (tmp_path / "run.json").is_file()


def test_a_start_without_results_leaves_nothing_that_refuses_the_next_one(tmp_path):
    class Fails(Silent):
        def begin(self, *facts):
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        run.run(study(), tmp_path, watcher=Fails())
    other = tree(scenarios={"pairs": {**TREE["scenarios"]["pairs"], "clients": 12}}, rounds=1, seeds=[1])
    run.run(from_tree(other), tmp_path, watcher=Silent())


def test_another_interval_and_more_rounds_are_taken_up(finished, tmp_path):
    _, (whole, _) = finished
    run.run(study(rounds=3, eval_every=1), tmp_path, watcher=Silent())
    again = run.run(study(eval_every=3), tmp_path, watcher=Silent())
    mine, its = (one.final[0].rows[-1]["tests"]["known"] for one in (again[0], whole))
    assert mine["accuracy"] == its["accuracy"] and mine["loss"] == its["loss"]
    assert [row["round"] for row in again[0].final[0].rows] == [1, 2, 3, 4]


def test_values_that_are_taken_out_of_a_grid_stay_and_do_not_count(tmp_path):
    def searched(*rates):
        system = {**TREE["systems"]["fedavg"], "grid": {"lr": list(rates)}}
        run.run(study(systems={"fedavg": system}, rounds=1, seeds=[1], tuning={"rounds": 1}), tmp_path, watcher=Silent())
        path = tmp_path / "results/pairs/fedavg.tuning.json"
        return [point["lr"] for point in result_files.read_points(path)], len(result_files.read_trials(path)[0])

    assert searched(0.02, 0.2, 0.1) == ([0.02, 0.2, 0.1], 3) and searched(0.02, 0.1) == ([0.02, 0.1], 3)
    assert searched(0.02, 0.1, 0.2) == ([0.02, 0.1, 0.2], 3)  # nothing was trained for it


def test_metrics_of_a_killed_run_become_those_of_its_checkpoints(finished, tmp_path):
    folder, (fedavg, _) = finished
    text = (folder / "metrics.jsonl").read_text()
    where, trials = ("pairs", "fedavg", "final"), fedavg.final
    damaged = {
        "half a line": text + '{"scenario": "pairs", "sys',
        "lines too few": "".join(line for line in text.splitlines(True) if not ('"fedavg"' in line and '"final"' in line)),
        "lines of a round that was not saved": text + text.splitlines(True)[-1],
        "a line of another kind": "123\n" + text,
        "numbers of another kind": text.replace('"numbers": {', '"numbers": [{', 1).replace("}", "}]", 1),
        "bytes that are no text": text.encode()[:100] + b"\xff" + text.encode()[100:],
    }
    for name, content in damaged.items():
        (tmp_path / "metrics.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
        result_files.Metrics(tmp_path).align(where, trials)
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        mine = [line for line in lines if (line["system"], line["phase"]) == ("fedavg", "final")]
        assert [(line["seed"], line["round"]) for line in mine] == [(s, r) for r in (1, 2, 4) for s in (1, 2)], name
    shorter = [trial._replace(rows=trial.rows[:1]) for trial in trials]
    result_files.Metrics(tmp_path).align(where, shorter)
    result_files.Metrics(tmp_path).keep_numbers(where, {"lr": 7.0})
    assert '"final"' in text and not any(
        '"fedavg"' in line and '"final"' in line for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    )


def test_what_was_taken_out_of_a_study_is_in_no_comparison_index_or_data_frame(finished, tmp_path):
    """A seed and a system, whose results stay in the folder."""
    folder, (fedavg, _) = finished
    place = tmp_path / "run"
    shutil.copytree(folder, place)
    less = study(seeds=[2], systems={"fedavg": TREE["systems"]["fedavg"]})
    (place / "study.yaml").write_text(to_yaml(less))
    (one,) = compare.finished([place])
    assert (one.title, [trial.seed for trial in one.trials]) == ("fedavg", [2])
    assert one.trials[0].rows == fedavg.final[1].rows
    (run_,) = index.runs_in(place)
    score = 100 * fedavg.final[1].rows[-1]["tests"]["known"]["scores"]["accuracy_mean"]
    assert run_.best == [("pairs", "fedavg", f"accuracy {score:.2f} %")]
    clients, rounds = report.load_clients(place), report.load(place)
    assert set(clients.seed) == set(rounds[rounds.phase == "final"].seed) == {2}
    assert set(clients.system) == set(rounds.system) == {"fedavg"} and set(rounds.phase) == {"tuning", "final"}
    (place / "study.yaml").write_text(to_yaml(study(seeds=[3])))
    with pytest.raises(ValueError, match="has no finished results yet"):
        compare.finished([place])
    with pytest.raises(OSError, match="no finished results"):
        report.load_clients(place)


def test_the_index_says_what_each_folder_holds(finished, tmp_path):
    folder, outcomes = finished
    found = {one.folder.name: one for one in index.runs_in(folder.parent)}
    scores = {
        one.system: np.mean([t.rows[-1]["tests"]["known"]["scores"]["accuracy_mean"] for t in one.final]) for one in outcomes
    }
    ((scenario, system, value),) = found["first"].best
    assert (scenario, system) == ("pairs", {"fedavg": "fedavg", "local": "Local only"}[max(scores, key=scores.get)])
    assert value == f"accuracy {100 * max(scores.values()):.2f} %" and found["first"].state == "finished"
    with pytest.raises(KeyboardInterrupt):
        run.run(study(), tmp_path / "second", watcher=Silent(stop_at=1))
    (second,) = index.runs_in(tmp_path)
    assert second.state == "running" and second.best == []  # this process has its lock
    assert disk.locked(tmp_path / "second") and not disk.locked(tmp_path)
    with pytest.raises(OSError, match="there is no folder"):
        index.runs_in(tmp_path / "third")
    assert yaml.safe_load((folder / "study.yaml").read_text())["title"] == TREE["title"]


def test_the_index_goes_on_after_a_folder_that_cannot_be_read(finished, tmp_path):
    for name in ("good", "no_study", "no_json", "own_method"):
        shutil.copytree(finished[0], tmp_path / name)
    (tmp_path / "no_study" / "study.yaml").unlink()
    (tmp_path / "no_json" / "run.json").write_text("{")
    own = tree(systems={"mine": {"method": "no_such_module:method"}})
    (tmp_path / "own_method" / "study.yaml").write_text(yaml.safe_dump(own))
    found = {one.folder.name: one.state for one in index.runs_in(tmp_path)}
    assert found.pop("good") == "finished" and set(found) == {"no_study", "no_json", "own_method"}
    assert all(state.startswith("cannot be read: ") for state in found.values()), found


def test_an_error_that_ends_a_run_is_kept_until_the_run_goes_on(tmp_path):
    class Failing(Silent):
        def record(self, *args):
            raise ZeroDivisionError("a logger of mine")

    folder, later = tmp_path / "first", tmp_path / "later"
    with pytest.raises(ZeroDivisionError):
        run.run(study(), folder, watcher=Failing())
    shutil.copytree(folder, later)  # which no process has
    (one,) = (one for one in index.runs_in(tmp_path) if one.folder == later)
    assert one.state == "failed: ZeroDivisionError: a logger of mine"
    assert 'raise ZeroDivisionError("a logger of mine")' in (later / folders.ERROR).read_text()
    with pytest.raises(KeyboardInterrupt):
        run.run(study(), folder, watcher=Silent(stop_at=1))
    assert not (folder / folders.ERROR).exists()
