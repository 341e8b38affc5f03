"""The leaderboard: equal grids for all, raw results as they are in run folders, the page, rows that code has changed since."""

import importlib.util
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from fedjax_meta import metrics, report
from fedjax_meta.methods import METHODS
from fedjax_meta.study import depends as depends_on
from fedjax_meta.study import load, made, run, tuning
from fedjax_meta.study.environment import processor
from fedjax_meta.study.parts import part
from fedjax_meta.study.system import keywords
from fedjax_meta.study.tuning import points_of
from tests.study.common import Silent, tree

pytest.importorskip("typer", reason="the command line needs typer")
board = pytest.importorskip("experiments.leaderboard.board", reason="the list needs the experiments' packages")
again = pytest.importorskip("experiments.leaderboard.again")
rows = pytest.importorskip("experiments.leaderboard.changed")
newcomers = pytest.importorskip("experiments.leaderboard.newcomers")
beside = pytest.importorskip("experiments.leaderboard.beside")
overview = pytest.importorskip("experiments.leaderboard.overview")
adapting = pytest.importorskip("experiments.leaderboard.adapting")
flops = pytest.importorskip("experiments.leaderboard.flops")
gaps = pytest.importorskip("experiments.leaderboard.gaps")
missing = pytest.importorskip("experiments.leaderboard.missing")
same_programs = pytest.importorskip("experiments.leaderboard.same_programs")
lessons = pytest.importorskip("experiments.leaderboard.lessons")
pages = pytest.importorskip("experiments.leaderboard.page")
run_list = pytest.importorskip("experiments.reproduce.run_list")
results = pytest.importorskip("experiments.reproduce.page")

LISTED = run_list.read_list(board.LIST)
ROOT = Path(__file__).parents[2]


# The study.


@pytest.mark.parametrize("listed", LISTED, ids=lambda listed: listed.name)
def test_every_system_has_a_grid_of_the_same_size(listed):
    study = listed.load()
    assert {len(points_of(system)) for system in study.systems.values()} == {6}
    assert len(study.seeds) == 3 and not set(study.seeds) & set(study.tuning.seeds)
    assert study.tuning.rounds in (None, study.rounds) and study.tuning.eval_every >= study.rounds > study.eval_every
    assert study.tuning.validation == "both"
    assert "local_longer" in study.systems  # the target, and who would do better alone


def test_every_scenario_has_the_simple_systems():
    """The entries of one scenario together: a later one does not repeat what the first has."""
    found: dict[str, set[str]] = {}
    for listed in LISTED:
        study = listed.load()
        for scenario in study.scenarios:
            found.setdefault(scenario, set()).update(study.systems)
    assert set(found) == set(TRAIN_SAMPLES)
    for scenario, systems in found.items():
        assert {"local_only", "centralised", "fedavg", "fedavg_ft"} <= systems, scenario


TRAIN_SAMPLES = {
    "mnist_small": 75,
    "mnist_small_bn": 75,
    "mnist": 261.6,
    "fashion_mnist": 533.7,
    "cifar10": 461.1,
    "uci_har": 261.2,
}
TRAIN_SAMPLES["shakespeare"] = 139.7
"""Of the mean known client, from the data sets; a test has those of the first alone."""


def test_the_mean_client_has_so_many_samples():
    clients = load(LISTED[0].study).scenarios["mnist_small"].build()
    assert np.mean(np.asarray(clients.train.sizes("train"))) == TRAIN_SAMPLES["mnist_small"]


@pytest.mark.parametrize("listed", LISTED, ids=lambda listed: listed.name)
def test_methods_that_count_steps_make_two_passes_of_the_mean_client(listed):
    study = listed.load()
    (samples,) = {TRAIN_SAMPLES[scenario] for scenario in study.scenarios}
    for system in study.systems.values():
        if "local_steps" in system.options:
            batches = 1 if system.method == "afl" else 3
            a_step = batches * system.options["batch_size"]
            assert abs(system.options["local_steps"] * a_step - 2 * samples) <= a_step / 2, system


@pytest.mark.parametrize("listed", LISTED, ids=lambda listed: listed.name)
def test_schedules_end_at_half_of_the_rounds(listed):
    study = listed.load()
    found = {name: system.options for name, system in study.systems.items() if name in ("mamlpp", "fedcac", "pfedsim")}
    ends = [options.get("patience", options.get("warmup", options.get("step_weights"))) for options in found.values()]
    assert [end["rounds"] if isinstance(end, dict) else end for end in ends] == [study.rounds // 2] * len(found)


def test_methods_that_no_run_has_are_named():
    known = board.unlisted(LISTED)
    without = [replace(one, systems=["local_only", "fedavg"]) for one in LISTED if not one.variants]
    assert set(board.unlisted(without)) == set(METHODS) - {"local_only", "fedavg"}
    assert len(known) < len(METHODS) / 10  # all but the newest


def test_families_share_their_rates():
    """Of one family, no method gets rates of its own: there are few different lists."""
    for listed in LISTED:
        systems = listed.load().systems.values()
        assert len({tuple(system.grid["lr"]) for system in systems if "lr" in system.grid}) <= 5
        assert len({tuple(system.grid["inner_lr"]) for system in systems if "inner_lr" in system.grid}) <= 4


@cache
def _systems():
    """Every system of the list by name; all variants describe it alike, up to its grid."""
    return {name: system for listed in LISTED for name, system in listed.load().systems.items()}


ADAM = {"fedavg_adam", "mtfl_fedavg_adam"}
"""Systems whose clients' optimiser is what they are."""

OPTIMISER_OF_ITS_OWN = {"scaffold", "pfedme", "fednova", "gpfl", "mocha", "pfedhn", "pfedhn_pc"}
"""Methods without the option: steps of plain gradient descent, MOCHA's dual coordinates, momentum 0.9 in pFedHN."""


def test_local_training_is_plain_gradient_descent():
    """Two steps of each resolved optimiser along one gradient: neither momentum, nor decay, nor scales."""
    held = {}
    for name, system in _systems().items():
        resolved = {**newcomers.defaults(system.method), **system.options}
        given = resolved.get("optimizer")
        factory = given if callable(given) else part("optimizer", given)
        if factory is None:
            held[name] = {option: resolved.get(option) for option in ("inner_optimizer", "momentum")}
            continue
        optimizer, params, gradient = factory(0.1), np.array([3.0, -2.0]), np.array([1.0, 200.0])
        state, plain = optimizer.init(params), []
        for _ in range(2):
            update, state = optimizer.update(gradient, state, params)
            plain.append(np.allclose(update, -0.1 * gradient))
        assert all(plain) != (name in ADAM), name
    assert all(set(found.values()) == {None} for found in held.values())
    meta = {name for name in held if "inner_lr" in keywords(METHODS[_systems()[name].method])}
    assert set(held) - meta == OPTIMISER_OF_ITS_OWN


NO_PASSES = {
    "centralised",
    "fedavg",
    "fedprox",
    "scaffold",
    "fedavgm",
    "fedadam",
    "fedyogi",
    "fedadagrad",
    "fedavg_adam",
    "feddyn",
}
NO_PASSES |= {
    "fednova",
    "moon",
    "qfedavg",
    "afl",
    "ifca",
    "cfl",
    "fedala",
    "fedrod",
    "knn_per",
    "fedfomo",
    "lg_fedavg",
    "fedcac",
}
NO_PASSES |= {"centralised", "feddbe", "pfedsim", "fedgp", "fedbn", "mtfl", "mtfl_fedavg_adam"}
"""New clients of these make no passes of gradient steps: they take a model, mix some, or find neighbours."""


def test_all_that_adapt_before_a_test_make_as_many_passes():
    """Ten gradients of each sample; one where a method is that one pass or step."""
    found = {name: newcomers.adapts_by(system) for name, system in _systems().items()}
    assert {name for name, (option, _) in found.items() if not option} == NO_PASSES
    passes = {name: number for name, (option, number) in found.items() if option}
    passes["pfedme"] *= _systems()["pfedme"].options["inner_steps"]
    assert {name for name, number in passes.items() if number != 10} == {"fedavg_meta", "fedavg_one_step"}
    assert passes["fedavg_meta"] == passes["fedavg_one_step"] == 1


# Raw results and the page.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """(an entry of a list, the folder of its runs)."""
    root = tmp_path_factory.mktemp("leaderboard")
    content = tree(rounds=2, tuning={"rounds": 1, "seeds": [0]})
    content["systems"] = {
        "local_only": {
            "method": "local_only",
            "options": {"epochs": 1, "batch_size": 20, "new_client_epochs": 1},
            "grid": {"lr": [0.02, 0.2, 0.5]},
        },
        "fedavg_ft": {"method": "fedavg_ft", "options": {"epochs": 1, "batch_size": 20}, "grid": {"lr": [0.02, 0.2, 0.5]}},
    }
    path = root / "digits.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    listed = run_list.Run(name="digits", title="Digits", study=str(path), hours=0.1, cost="this test")
    run.run(load(path), root / "digits", watcher=Silent())
    return listed, root


@pytest.fixture(scope="module")
def lines(folder):
    listed, root = folder
    return board.extract([listed], root)["pairs"]


def of(lines, system):
    return [line for line in lines if line.system == system]


def test_lines_have_the_scores_of_the_folder(folder, lines):
    _, root = folder
    for system in ("local_only", "fedavg_ft"):
        content = json.loads((root / f"digits/results/pairs/{system}.final.json").read_text())
        for line in of(lines, system):
            trial = next(one for one in content["trials"].values() if one["seed"] == line.seed)
            tests = trial["rows"][-1]["tests"]
            assert line.known == pytest.approx(100 * np.mean(tests["known"]["accuracy"]))
            assert line.worst == pytest.approx(100 * np.min(tests["known"]["accuracy"]))  # a tenth of 8 clients is one
            assert line.new == pytest.approx(100 * np.mean(tests["new"]["accuracy"]))
            lr = trial["numbers"]["lr"]
            assert line.chosen == f"lr={lr:g}" and line.edge == ("" if lr == 0.2 else "lr") and line.tried == 3


def test_a_grid_that_moves_on_says_so(tmp_path):
    """The row has the points that were added, and is the same study's: how often a grid may move on changes no other number."""
    content = tree(rounds=1, tuning={"rounds": 1, "seeds": [0]})
    content["systems"] = {"local_only": {"method": "local_only", "grid": {"lr": [0.001, 0.003, 0.01]}}}
    path, found = tmp_path / "digits.yaml", []
    for most in (0, 2):
        path.write_text(yaml.safe_dump({**content, "tuning": {**content["tuning"], "extend": most}}), encoding="utf-8")
        listed = run_list.Run(name="digits", title="Digits", study=str(path), hours=0.1, cost="this test")
        run.run(load(path), tmp_path / "digits", watcher=Silent())
        found.append(board.extract([listed], tmp_path)["pairs"][0])
    first, second = found
    assert (first.chosen, first.edge, first.tried) == ("lr=0.01", "lr", 3)
    assert (first.extend, second.extend) == (0, 2)
    assert second.tried == 5 and second.chosen in ("lr=0.0333", "lr=0.111") and second.said == first.said


def test_who_would_do_better_alone(folder, lines):
    _, root = folder
    by_system = {}
    for system in ("local_only", "fedavg_ft"):
        content = json.loads((root / f"digits/results/pairs/{system}.final.json").read_text())
        found = [one["rows"][-1]["tests"]["known"]["accuracy"] for one in content["trials"].values()]
        by_system[system] = np.mean(found, 0)
    wanted = 100 * np.mean(by_system["fedavg_ft"] < by_system["local_only"])
    assert [line.behind for line in of(lines, "fedavg_ft")] == pytest.approx([wanted, wanted])
    assert all(math.isnan(line.behind) for line in of(lines, "local_only"))


def test_the_target_is_what_local_training_reaches(folder, lines):
    _, root = folder
    wanted = np.mean([line.known for line in of(lines, "local_only")])
    assert [line.target for line in lines if line.method] == pytest.approx([wanted] * 4)
    content = json.loads((root / "digits/results/pairs/fedavg_ft.final.json").read_text())
    for line in of(lines, "fedavg_ft"):
        rows = next(one["rows"] for one in content["trials"].values() if one["seed"] == line.seed)
        means = {row["round"]: 100 * np.mean(row["tests"]["known"]["accuracy"]) for row in rows}
        assert line.reached == min((number for number, mean in means.items() if mean >= wanted), default=math.inf)


def test_rows_without_training_are_there(lines):
    untrained, majority = of(lines, "untrained model"), of(lines, "majority class")
    assert len(untrained) == len(majority) == 1
    assert 0 <= untrained[0].known < majority[0].known <= 100


def test_lines_say_by_which_code_they_were_made(folder, lines):
    place = folder[0].load().scenarios["pairs"]
    for line in lines:
        if line.method:
            now = made.digests(line.method, place)
            assert (line.made, line.runner) == (now["method"], now["runner"])
            assert line.commit and "jax=" in line.versions
            assert line.command.endswith(f"--systems {line.system} --out runs/digits-{line.system}")


def test_rows_of_this_code_and_study_have_not_changed(folder, lines):
    listed, _ = folder
    assert rows.in_words([listed], {"pairs": lines}) == []


@pytest.mark.parametrize("change", ["systems.fedavg_ft.options.epochs=2", "systems.fedavg_ft.grid.lr=[0.1, 0.2, 0.3]"])
def test_rows_of_another_study_are_named(folder, lines, change):
    """A system that the study now describes otherwise, and no other."""
    listed, _ = folder
    other = replace(listed, settings=[change])
    (told,) = rows.in_words([other], {"pairs": lines})
    assert told.startswith("pairs, fedavg_ft: the study changed since")
    assert len(rows.in_words([replace(listed, settings=["rounds=3"])], {"pairs": lines})) == 2
    assert rows.in_words([replace(listed, settings=["systems.fedavg_ft.title=x"])], {"pairs": lines}) == []


def test_a_file_of_lines_is_read_as_it_was_written(lines):
    again = board.from_csv(board.to_csv(lines))
    assert board.to_csv(again) == board.to_csv(lines)
    for one, other in zip(again, lines, strict=True):
        for mine, wanted in zip(one, other, strict=True):
            assert mine == pytest.approx(wanted, rel=1e-5, nan_ok=True) if isinstance(wanted, float) else mine == wanted


def test_the_section_has_paired_differences(folder, lines):
    listed, _ = folder
    text = pages.page([listed], {"pairs": lines})
    gaps = [a.known - b.known for a, b in zip(of(lines, "local_only"), of(lines, "fedavg_ft"), strict=True)]
    mean, margin = np.mean(gaps), metrics.confidence_margin(gaps)
    (row,) = [line for line in text.splitlines() if line.startswith("| local\\_only |") and "[" in line]
    assert (
        f"{mean:+.2f} \\[{mean - margin:+.2f}, {mean + margin:+.2f}\\]" in row or f"{mean:+.2f} [{mean - margin:+.2f}" in row
    )
    assert "Measurements that rows lack" in text and "in this order" not in text


def test_the_points_that_were_tried_stand_beside_the_scores(folder, lines):
    listed, _ = folder
    other = [line._replace(tried=9, edge="lr") if line.system == "local_only" else line._replace(edge="") for line in lines]
    rows = pages.page([listed], {"pairs": other}).splitlines()
    assert next(row for row in rows if row.startswith("| system | known")).endswith("| points |")
    assert next(row for row in rows if row.startswith("| local\\_only |")).endswith("| 9 ‡ |")
    assert next(row for row in rows if row.startswith("| fedavg\\_ft |")).endswith("| 3 |")
    assert next(row for row in rows if row.startswith("| majority class |")).endswith("|  |")


def test_measurements_that_are_missing_are_listed(folder, lines, tested):
    """By scenario, and a column of which nothing was counted is left out."""
    listed, _ = folder
    counted = [line._replace(flops=1e6) if line.method else line for line in lines]
    assert "## Not run yet" not in pages.page([listed], {"pairs": counted}, {"pairs": tested})
    text = pages.page([listed], {"pairs": lines}, {"pairs": tested})
    assert "| pairs | FLOPs | all | digits | 2 of 2 |" in text and "| pairs | new clients |" not in text
    assert "MFLOP" not in text and "FLOPs were not counted" in text
    some = [line._replace(flops=math.nan) if line.system == "fedavg_ft" else line for line in counted]
    text = pages.page([listed], {"pairs": some}, {"pairs": [one for one in tested if one.system == "fedavg_ft"]})
    assert "| pairs | FLOPs | fedavg\\_ft | digits | 1 of 2 |" in text and "counted for 1 of 2 systems" in text
    assert "| pairs | new clients | local\\_only | digits | 1 of 2 |" in text and "1 of 2 systems were tested so" in text
    assert "| not counted |" in text


@pytest.fixture
def docs(tmp_path, monkeypatch):
    """Raw results and pages of an empty leaderboard."""
    for module, name, at in (
        (board, "RAW", "raw"),
        (pages, "NEW", "raw/new_clients"),
        (pages, "PAGE", "page.md"),
        (lessons, "PAGE", "lessons.md"),
    ):
        monkeypatch.setattr(module, name, tmp_path / at)
    for page in ("page.md", "lessons.md"):
        (tmp_path / page).write_text(f"{results.BEGIN}\n{results.END}\n", encoding="utf-8")
    return tmp_path


def test_rows_whose_folder_is_gone_stay(folder, lines, tested, docs):
    """A second run of the same scenario adds its systems, with the report of its own folder."""
    listed, root = folder
    mine = replace(listed, systems=["local_only"])
    others = replace(listed, name="others")
    lost = [line._replace(run="digits") for line in of(lines, "local_only")]
    (docs / "raw").mkdir()
    (docs / "raw/pairs.csv").write_text(board.to_csv([*lost, *of(lines, "untrained model")]), encoding="utf-8")
    (docs / "raw/new_clients").mkdir()
    kept = [one for one in tested if one.system == "local_only"]
    (docs / "raw/new_clients/pairs.csv").write_text(newcomers.to_csv(kept), encoding="utf-8")
    shutil.copytree(root / "digits", docs / "others", ignore=shutil.ignore_patterns("new_clients.csv"))
    # A run that has begun, and has nothing to show yet.
    begun = replace(listed, name="begun")
    shutil.copytree(root / "digits", docs / "begun", ignore=shutil.ignore_patterns("*.final.json", "new_clients.csv"))
    said = pages.write([mine, begun, others], [mine, begun, others], docs)
    assert said[0] == "pairs: 4 rows, 3 of them new"
    found = board.read_lines(docs / "raw")["pairs"]
    assert [(line.system, line.run) for line in found if line.seed == 1 and line.method] == [
        ("local_only", "digits"),
        ("fedavg_ft", "others"),
    ]
    assert pages.read_tested(docs / "raw/new_clients")["pairs"] == newcomers.from_csv(newcomers.to_csv(kept))
    text = (docs / "page.md").read_text(encoding="utf-8")
    assert "[others.html](leaderboard/others.html)" in text and "digits.html" not in text
    assert (docs / "raw/others.html").is_file() and not (docs / "raw/digits.html").exists()
    assert missing.rows_there(listed, {"pairs": found}) == "2 of 2"


# A run of one's own.


@pytest.fixture(scope="module")
def own(folder, tmp_path_factory):
    """A run with a system of its own, whose study extends that of the list."""
    place = tmp_path_factory.mktemp("own")
    systems = {"mine": {"method": "fedper", "options": {"epochs": 1, "batch_size": 20}}}
    (place / "mine.yaml").write_text(yaml.safe_dump({"extends": folder[0].study, "systems": systems}), encoding="utf-8")
    run.run(load(place / "mine.yaml", systems=["local_only", "mine"]), place / "run", watcher=Silent())
    return place / "run"


def commit_rows(docs, lines):
    (docs / "raw").mkdir()
    (docs / "raw/pairs.csv").write_text(board.to_csv(lines), encoding="utf-8")


def test_a_run_of_ones_own_stands_among_the_rows(folder, lines, own, docs):
    commit_rows(docs, lines)
    ((table,), path) = beside.write(own, [folder[0]])
    assert (table.title, path) == ("pairs", own / "leaderboard.md")
    rows = {row[0]: dict(zip(table.headings, row, strict=True)) for row in table.rows}
    assert set(rows) == {"mine (yours)", "local_only (yours)", *(line.system for line in lines)}
    scores = {}
    for name, place, system in (("mine (yours)", own, "mine"), ("fedavg_ft", folder[1] / "digits", "fedavg_ft")):
        content = json.loads((place / f"results/pairs/{system}.final.json").read_text())
        trials = sorted(content["trials"].values(), key=lambda one: one["seed"])
        scores[name] = np.array([100 * np.mean(one["rows"][-1]["tests"]["known"]["accuracy"]) for one in trials])
        assert rows[name]["known"] == f"{scores[name].mean():.2f} ±{scores[name].std(ddof=1):.2f}"
    gap = (scores["fedavg_ft"] - scores["mine (yours)"]).mean()
    assert rows["fedavg_ft"]["known, minus mine (yours)"].startswith(f"{gap:+.2f} [")
    assert rows["mine (yours)"].get("known, minus mine (yours)") == ""
    ranked = sorted((name for name in rows if rows[name]["place"]), key=lambda name: int(rows[name]["place"]))
    known = [float(rows[name]["known"].split()[0]) for name in ranked]
    assert known == sorted(known, reverse=True) and len(known) == 4
    # The same training again gives the committed row.
    assert list(rows["local_only (yours)"].values())[2:] == list(rows["local_only"].values())[2:]
    text = path.read_text(encoding="utf-8")
    assert all(f"| {name.replace('_', chr(92) + '_')} |" in text for name in rows)


def test_differences_are_to_fine_tuning_where_nothing_is_new(folder, lines, docs):
    commit_rows(docs, lines)
    (table,) = beside.tables(folder[1] / "digits", [folder[0]])
    assert "known, minus fedavg_ft" in table.headings


@pytest.mark.parametrize(
    ("changes", "data", "said"),
    [
        ({"settings": ["rounds=3"]}, None, "rounds differs"),
        ({"seeds": [1, 2, 3]}, None, "seeds differs"),
        ({"settings": ["systems.local_only.options.epochs=3"]}, None, "system local_only differs"),
        ({}, "0123456789abcdef", "the clients of pairs are not those of the leaderboard"),
    ],
)
def test_a_run_under_other_conditions_is_refused(changes, data, said, folder, lines, own, docs):
    commit_rows(docs, [line._replace(data=data or line.data) for line in lines])
    with pytest.raises(ValueError, match=said):
        beside.tables(own, [replace(folder[0], **changes)])


def test_a_run_of_other_scenarios_is_refused(folder, own, docs, tmp_path):
    with pytest.raises(ValueError, match="none of the leaderboard's scenarios"):
        beside.tables(own, [folder[0]])
    with pytest.raises(ValueError, match="holds no run"):
        beside.tables(tmp_path, [folder[0]])


def test_flops_are_counted_by_rows_whose_folder_is_gone(folder, lines, docs, capsys):
    """What a row says is enough. A gradient of a linear model takes four FLOPs of products for each weight and sample."""
    listed, root = folder
    (docs / "raw").mkdir()
    changed = [line._replace(said="another study") for line in of(lines, "fedavg_ft")]
    (docs / "raw/pairs.csv").write_text(board.to_csv([*of(lines, "local_only"), *changed]), encoding="utf-8")
    flops.count(listed)
    local, other = (of(board.read_lines(docs / "raw")["pairs"], name) for name in ("local_only", "fedavg_ft"))
    study = listed.load()
    clients, options = study.scenarios["pairs"].build(), study.systems["local_only"].options
    steps = np.ceil(np.asarray(clients.train.sizes("train")) / options["batch_size"])
    expected = options["epochs"] * options["batch_size"] * steps * 4 * 64 * 10
    (found,) = {line.flops for line in local}
    assert expected.min() <= found <= expected.max()
    assert all(math.isnan(line.flops) for line in other) and "the study has changed" in capsys.readouterr().out
    flops.count(listed)
    assert "local_only" not in capsys.readouterr().out  # counted already
    pages.write([listed], [listed], root)
    assert [line.flops for line in of(board.read_lines(docs / "raw")["pairs"], "local_only")] == [line.flops for line in local]


def test_new_clients_are_tested_of_rows_whose_folder_is_gone(folder, lines, tested, docs, capsys):
    listed, root = folder
    (docs / "raw").mkdir()
    changed = [line._replace(said="another study") for line in of(lines, "local_only")]
    (docs / "raw/pairs.csv").write_text(board.to_csv([*of(lines, "fedavg_ft"), *changed]), encoding="utf-8")
    newcomers.measure_rows(listed, ["fedavg_ft"])  # the folder has these
    assert newcomers.committed("pairs") == []
    newcomers.measure_rows(replace(listed, systems=["local_only"]), [])  # of the others it does not know how
    assert newcomers.committed("pairs") == []
    newcomers.measure_rows(listed, [])
    said = capsys.readouterr().out
    assert "pairs, local_only: not measured, the study has changed since" in said
    new = np.mean([line.new for line in of(lines, "fedavg_ft")])
    assert f"{new:.2f} with all samples, {new:.2f} in the row" in said
    # The same code gives the same numbers again.
    expected = newcomers.from_csv(newcomers.to_csv([one for one in tested if one.system == "fedavg_ft"]))
    assert len(expected) > 5 and newcomers.committed("pairs") == expected
    newcomers.measure_rows(listed, [])
    assert "fedavg_ft" not in capsys.readouterr().out  # tested already
    pages.write([], [listed], root)
    assert pages.read_tested(docs / "raw/new_clients")["pairs"] == expected


def test_missing_systems_in_words():
    assert board.in_words(["a", "b"], ["a", "b"]) == "all"
    assert board.in_words(["a", "b"], ["c", "a", "b"]) == "all but c"
    assert board.in_words(["b"], ["a", "b"]) == "b"


def test_rows_that_the_list_no_longer_has_go(folder, lines, docs):
    listed, root = folder
    (docs / "raw").mkdir()
    gone = [line._replace(run="gone") for line in lines]
    (docs / "raw/pairs.csv").write_text(board.to_csv(gone), encoding="utf-8")
    pages.write([listed], [listed], root)
    assert {line.run for line in board.read_lines(docs / "raw")["pairs"]} == {"digits"}


def test_runs_of_other_clients_are_not_joined(lines):
    other = [line._replace(run="others", data="0") for line in of(lines, "fedavg_ft")]
    with pytest.raises(ValueError, match="the runs of pairs have different clients: digits, others"):
        board.joined([*other, *of(lines, "local_only")], ["digits", "others"])


def test_what_was_not_run_is_listed(folder, lines):
    listed, _ = folder
    other = replace(listed, name="other", settings=["scenarios.pairs.clients=12"])
    text = pages.page([listed, other], {"pairs": of(lines, "local_only")})
    waiting = text.partition("## Not run yet")[2].partition("Measurements")[0]
    assert "fedavg\\_ft" in waiting and "local\\_only" not in waiting
    assert "| all |" in pages.page([listed], {}).partition("## Not run yet")[2]


def test_only_systems_without_a_current_row_are_run(folder, lines):
    """The local training that they are measured by is run beside them; rows at an end of their grid wait until it may move on."""
    listed, _ = folder
    moves, at_end = replace(listed, settings=["tuning.extend=2"]), [line._replace(edge="lr") for line in lines]
    (narrowed,) = missing.lacking([listed], {"pairs": of(lines, "local_only")})
    assert narrowed.systems == ["fedavg_ft", "local_only"] and narrowed.hours == listed.hours
    (narrowed,) = missing.lacking([listed], {"pairs": of(lines, "fedavg_ft")})
    assert narrowed.systems == ["local_only"] and narrowed.hours == listed.hours / 2
    for run_, some in ((listed, lines), (listed, at_end), (moves, [line._replace(edge="") for line in lines])):
        assert missing.lacking([run_], {"pairs": some}) == []
    assert [one.systems for one in missing.lacking([moves], {"pairs": at_end})] == [["fedavg_ft", "local_only"]]
    assert missing.lacking([moves], {"pairs": [line._replace(extend=2) for line in at_end]}) == []  # it could not
    other = replace(listed, settings=["systems.fedavg_ft.options.epochs=2"])
    assert [one.systems for one in missing.lacking([other], {"pairs": lines})] == [["fedavg_ft", "local_only"]]
    # A row of another run is a row.
    assert missing.lacking([replace(listed, name="others")], {"pairs": lines}) == []


def test_systems_that_the_list_asks_for_elsewhere_alone_are_listed():
    """With the systems of the scenario's own runs, they make up all systems."""
    lines = {scenario: {line.system for line in some} for scenario, some in board.read_lines().items()}
    text = "\n".join(missing.section(LISTED, {}, {})).splitlines()
    rows = [row.replace("\\", "").strip("| ").split(" | ") for row in text if row.startswith("| cifar10 |")]
    (_, names, count) = rows[-1]
    others = set(names.split(", "))
    assert {"moon", "fedbn"} <= others and not others & lines["cifar10"]
    asked = {name for listed in LISTED if listed.name.startswith("cifar10") for name in listed.load().systems}
    assert lines["mnist"] - {"majority class", "untrained model"} <= others | asked and not others & asked
    assert count.startswith(f"{len(others)} of ")


def test_a_seed_that_diverged_is_no_number(folder, lines):
    listed, _ = folder
    bad = [
        line._replace(known=math.nan, worst=math.nan, diverged="1") if line.seed == 1 else line
        for line in of(lines, "fedavg_ft")
    ]
    text = pages.page([listed], {"pairs": [*of(lines, "local_only"), *bad]})
    assert "1 of 2 seeds diverged" in text
    (row,) = [
        line
        for line in text.splitlines()
        if line.startswith("| fedavg\\_ft |") and "diverged |" in line and "seeds" not in line
    ]
    assert "nan" not in row


def test_the_page_says_how_few_clients_had_no_finite_loss(folder, lines):
    """Unless all had none in one of the diverged seeds."""
    listed, _ = folder

    def said(*diverged):
        bad = [line._replace(diverged=words) for line, words in zip(of(lines, "fedavg_ft"), diverged, strict=True)]
        text = pages.page([listed], {"pairs": [*of(lines, "local_only"), *bad]})
        (cell,) = (line.split("|")[-2].strip() for line in text.splitlines() if "seeds diverged" in line)
        return cell.partition(";")[0]

    one, two = (f"60: {number} of 80 known clients had no finite loss" for number in (1, 2))
    assert said(one, "") == "1 of 2 seeds diverged: 1 of 80 known clients had no finite loss"
    assert said(one, one) == "2 of 2 seeds diverged: 1 of 80 known clients had no finite loss"
    assert said(one, two).endswith("1 of 80 known clients had no finite loss or 2 of 80 known clients had no finite loss")
    assert said(one, "40") == "2 of 2 seeds diverged"


def test_committed_grids_moved_on_while_their_best_value_was_at_an_end():
    """The page says that one rule tuned all rows."""
    found, runs = board.read_lines(), {run.name: run for run in LISTED}
    stopped = [line for some in found.values() for line in some if line.edge]
    assert stopped and [line for line in stopped if line.extend < runs[line.run].load().tuning.extend] == []


def test_the_committed_page_is_what_the_raw_results_give():
    """`python -m experiments.leaderboard --write-docs` writes it; nobody types its numbers."""
    text = pages.PAGE.read_text(encoding="utf-8")
    assert text == results.with_generated(text, pages.page(LISTED, board.read_lines(), pages.read_tested()))
    text = lessons.PAGE.read_text(encoding="utf-8")
    assert text == results.with_generated(text, lessons.page(LISTED, board.read_lines(), pages.read_tested()))


# New clients.


@pytest.fixture(scope="module")
def tested(folder):
    listed, root = folder
    newcomers.measure(listed, root / "digits")
    return newcomers.read(root / "digits")


def test_new_clients_with_all_their_samples_are_those_of_the_run(lines, tested):
    for line in lines:
        if line.method:
            (same,) = [one for one in tested if one[:5] == (line.system, line.seed, 0, "", 0)]
            assert same.score == pytest.approx(line.new, abs=1e-3)


def test_as_many_epochs_as_in_the_run_change_nothing(lines, tested, folder, monkeypatch):
    """They are taken from the test as in the run; a program with this number of epochs finds the same."""
    taken = [one.score for one in tested if one.system == "fedavg_ft" and one.option and one.steps == 5]
    assert taken[0] == pytest.approx(of(lines, "fedavg_ft")[0].new, abs=1e-3)
    listed, root = folder
    (cell,) = [cell for cell in board.cells_of(listed, root / "digits") if cell.system == "fedavg_ft"]
    assert newcomers.adapts_by(cell.study.systems["fedavg_ft"]) == ("finetune_epochs", 5)
    monkeypatch.setattr(newcomers, "adapts_by", lambda system: ("finetune_epochs", 4))
    monkeypatch.setattr(newcomers, "STEPS", (5,))
    monkeypatch.setattr(newcomers, "SAMPLES", ())
    found = newcomers.tests(cell, cell.study.scenarios[cell.found.scenario].build())
    assert [one.score for one in found if one.option] == pytest.approx(taken, abs=1e-3)


def test_fewer_samples_are_the_first_ones(folder):
    listed, _ = folder
    new = next(iter(listed.load().scenarios.values())).build().new
    few = newcomers.fewer(new, 2)
    assert np.asarray(few.sizes("support")).max() == 2
    np.testing.assert_array_equal(few.start["support"], new.start["support"])
    np.testing.assert_array_equal(few.sizes("query"), new.sizes("query"))
    assert newcomers.fewer(new, 0) is new


def test_a_mean_that_is_not_finite_is_neither_the_best_nor_better_than_local_training():
    kind, seeds = report.Kind("accuracy", True, True), lambda means: {n: {1: mean, 2: mean} for n, mean in means.items()}
    passes = {"a": seeds({1: math.nan, 2: 90.0, 5: 95.0, 10: 96.0, 20: 96.1})}
    samples = {"local_only": seeds({5: 50.0, 10: 60.0, 20: 70.0}), "a": seeds({5: 60.0, 10: math.nan, 20: 80.0})}
    assert adapting._own_best("s", passes, kind) == [("s", {10: 1})]
    # It is better from 20 samples on: with 10 it diverged.
    assert [*adapting._enough("s", samples, passes, kind)][1] == ["s", "a", "10", "20", "20"]
    assert [*adapting._enough("s", {**samples, "a": seeds({5: math.nan})}, {}, kind)][1:] == []


def test_the_page_has_new_clients_by_samples(folder, lines, tested):
    listed, _ = folder
    text = pages.page([listed], {"pairs": lines}, {"pairs": tested})
    values = [one.score for one in tested if (one.system, one.samples, one.option) == ("fedavg_ft", 2, "")]
    rows = text.partition("by the number of samples")[2].splitlines()
    (row,) = [line for line in rows if line.startswith("| fedavg\\_ft |") and "finetune" not in line]
    headings = next(line for line in rows if line.startswith("| system")).split(" | ")
    assert row.strip("| ").split(" | ")[headings.index("2")] == f"{np.mean(values):.2f}"


# Rows that code has changed.


def test_a_row_that_other_code_made_is_marked(folder, lines, monkeypatch):
    listed, _ = folder
    monkeypatch.setattr(rows, "source", lambda commit: None)
    changed = [line._replace(made="0" * 16) if line.system == "fedavg_ft" else line for line in lines]
    (said,) = rows.in_words([listed], {"pairs": changed})
    assert said.startswith("pairs, fedavg_ft: the method's files changed since")
    (said, _) = rows.in_words([listed], {"pairs": [line._replace(runner="0" * 16) for line in lines]})
    assert "the runner changed since" in said
    text = pages.page([listed], {"pairs": lines}, marks=[("pairs", "fedavg_ft")])
    assert "fedavg\\_ft †" in text and "local\\_only †" not in text


@pytest.fixture
def history(tmp_path, monkeypatch):
    """A repository with the package at three commits: as it is, with another client rule, and with other partitions too."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    package, commits = tmp_path / "fedjax_meta", []
    shutil.copytree(made.ROOT, package, ignore=shutil.ignore_patterns("__pycache__", "presets"))
    subprocess.run([*git, "init", "-q"], check=True)
    for path in ("__init__.py", "methods/fedavg.py", "data/partition.py"):
        with open(package / path, "a", encoding="utf-8") as file:
            file.write("\n_MORE = 1\n")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", path], check=True)
        commits.append(subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip())
    real = subprocess.run
    monkeypatch.setattr(rows.subprocess, "run", lambda words, **how: real([*words[:2], str(tmp_path), *words[3:]], **how))
    rows.source.cache_clear()
    yield commits
    rows.source.cache_clear()


def test_an_older_digest_is_no_change_where_the_source_shows_that(folder, lines, history):
    """The rule that makes digests may be what changed since; the row's commit has the source that made it."""
    listed, _ = folder
    same, method, data = history

    def told(**fields):
        mine = [line._replace(made="0" * 16, runner="0" * 16, **fields) for line in of(lines, "fedavg_ft")]
        return [line.partition(": ")[2].partition(" since")[0] for line in rows.in_words([listed], {"pairs": mine})]

    both = "the method's files and the runner changed"
    assert told(commit=same) == []
    assert told(commit=method) == told(commit=data) == told(commit=f"{same}+{data}") == ["the method's files changed"]
    assert told(commit=data, again=same) == [] and told(commit=same, again=method) == ["the method's files changed"]
    # Nothing is shown by a commit from which the files differed, or that is not there.
    assert told(commit=f"{same}*") == told(commit="0" * 40) == told(commit="unknown") == [both]
    assert told(commit=f"{same}+{'0' * 40}") == [both]


def test_the_last_commit_at_which_a_row_was_current(folder, lines, history, monkeypatch):
    """It is newer than the row's own where later code left its files as they were."""
    same, method, data = history
    (row, _), place = of(lines, "fedavg_ft"), folder[0].load().scenario("pairs")
    mine = row._replace(made="0" * 16)
    assert rows.last_commit(mine._replace(commit=same), place) == same
    assert rows.last_commit(mine._replace(commit=method), place) == method
    assert rows.last_commit(mine._replace(commit=same, again=data), place) == data
    assert rows.last_commit(mine._replace(commit="unknown"), place) is None
    assert rows.last_commit(row._replace(commit="unknown"), place) == same  # the digest alone
    monkeypatch.setattr(rows, "OLDEST", 1)  # those that made the row are older
    assert rows.last_commit(mine._replace(commit=same), place) == same
    assert rows.last_commit(mine._replace(commit=f"{same}+{method}"), place) is None
    assert rows.last_commit(mine._replace(commit="0" * 40), place) is None


def test_a_row_whose_programs_stayed_is_current_again(folder, lines, docs, monkeypatch, capsys):
    listed, _ = folder
    (docs / "raw").mkdir()
    commit([line._replace(made="0" * 16, commit="unknown") for line in lines])
    monkeypatch.setattr(rows, "last_commit", lambda row, place: None if row.system == "fedavg_ft" else "c" * 40)
    monkeypatch.setattr(rows, "source", lambda commit: made.ROOT if commit == "c" * 40 else None)
    monkeypatch.setattr(same_programs, "_digests", lambda package, commands: ["d"] * len(commands))
    same_programs.clear(listed)
    assert "pairs, local_only: the same programs as at cccccccccccc" in (said := capsys.readouterr().out)
    assert "pairs, fedavg_ft: OTHER PROGRAMS, or none to compare, than at no commit" in said
    now = [row.system for row, _ in rows.rows([listed], board.read_lines())]
    assert now == ["fedavg_ft"]


PROGRAMS = {
    "": "fedavg(lr=0.1)",
    "the same": "fedavg(lr=0.1)",
    "another number": "fedavg(lr=0.2)",
    "another program": "fedavg(lr=0.1, batch_size=7)",
    "another seed": "fedavg(lr=0.1)",
    "none": "fedsgd(lr=0.1)",
}


def test_programs_are_compared_with_what_they_are_given(tmp_path):
    seeds = {"another seed": "2"}
    commands = [
        ["--systems", text, "--dataset", "digits", "--rounds", "2", "--seeds", seeds.get(name, "1")]
        for name, text in PROGRAMS.items()
    ]
    first, again_, *others, none = same_programs._digests(made.ROOT, commands)
    assert first == again_ and len({first, *others}) == 4 and not none
    # Another source: a comment changes nothing, a number does.
    package = tmp_path / "fedjax_meta"
    shutil.copytree(made.ROOT, package, ignore=shutil.ignore_patterns("__pycache__", "presets"))
    path = package / "methods" / "fedavg.py"
    path.write_text(path.read_text(encoding="utf-8") + "\n# More.\n", encoding="utf-8")
    assert same_programs._digests(package, commands[:1]) == [first]
    path = package / "local.py"
    before = path.read_text(encoding="utf-8")
    other = "def train_epochs(key, *rest, **how):\n    return _fit(jax.random.fold_in(key, 1), *rest, **how)\n"
    path.write_text(f"{before}\n_fit = train_epochs\n\n\n{other}", encoding="utf-8")
    assert same_programs._digests(package, commands[:1]) != [first]


@pytest.mark.parametrize(
    ("before", "now", "holds"), [(1, 1, True), (1, 1 + 1e-6, True), (1, 1.01, False), (None, 1, False), (1, None, False)]
)
def test_a_row_whose_first_rounds_stayed_is_current_again(
    before, now, holds, folder, lines, docs, tmp_path, monkeypatch, capsys
):
    listed, _ = folder
    (docs / "raw").mkdir()
    commit([line._replace(made="0" * 16, commit="unknown") for line in lines if line.system == "fedavg_ft"])
    monkeypatch.setattr(rows, "last_commit", lambda *_: "c" * 40)
    monkeypatch.setattr(rows, "source", lambda _: tmp_path / "fedjax_meta")
    asked = []

    def by_code(whose, code, row, words, float64):
        asked.append((code, words))
        assert (whose, row.system) == ("its commit" if code == tmp_path else "this code", "fedavg_ft")
        assert float64
        by = before if code == tmp_path else now
        tests = {"known": {"loss": [1.0] if by is None else [by], "scores": {}}}
        return None if by is None else tuning.Trial({}, 1, [{"round": 1, "tests": tests}], None)

    monkeypatch.setattr(again, "by_code", by_code)
    same_programs.clear(listed, start=True)
    words = "the same first rounds as at" if holds else "OTHER FIRST ROUNDS, or none to compare, than at"
    gaps = "" if None in (before, now) else f"; losses apart {again.Again(False, [now - before]).gaps}"
    assert f"pairs, fedavg_ft: {words} cccccccccccc{gaps}\n" in capsys.readouterr().out
    assert [row.system for row, _ in rows.rows([listed], board.read_lines())] == ([] if holds else ["fedavg_ft"])
    assert [code for code, _ in asked] == [tmp_path, made.ROOT.parent]
    study = listed.load()
    assert all(words[-4:] == ["--set", "rounds=2", "--set", "eval_every=1"] for _, words in asked) and study.rounds < 40


# Rows that still hold.


@pytest.fixture
def later(folder, lines, docs, monkeypatch):
    """The committed rows of the folder, seen by code with other digests than those of the code that made them."""
    listed, _ = folder
    (docs / "raw").mkdir()
    monkeypatch.setattr(made, "made", lambda *_: {"commit": "c" * 40, "dirty": False, "method": "m" * 16, "runner": "r" * 16})
    monkeypatch.setattr(again, "by_its_own_code", lambda *_: None)
    commit([line._replace(made="0" * 16, runner="0" * 16, commit="unknown") for line in lines])
    return listed


def commit(lines):
    (board.RAW / "pairs.csv").write_text(board.to_csv(lines), encoding="utf-8")


def tamper(by):
    """Moves the committed scores of fedavg_ft."""
    found = board.read_lines()["pairs"]
    commit([line._replace(known=line.known + by) if line.system == "fedavg_ft" else line for line in found])


def committed(system):
    return of(board.read_lines()["pairs"], system)


@pytest.mark.long
def test_a_training_again_with_the_same_numbers_makes_a_row_current(later, lines, monkeypatch, capsys):
    before = board.read_lines()["pairs"]
    again.confirm(later)
    assert capsys.readouterr().out.count(": the same; ") == 2
    found = board.read_lines()["pairs"]
    for line, old in zip(found, before, strict=True):
        if line.method:
            assert (line.again, line.made, line.runner) == ("c" * 40, "m" * 16, "r" * 16)
            assert math.isnan(line.moved)
            assert (line.known, line.commit) == (old.known, old.commit)
    assert (
        "the first seed of 2 systems, newer code gives the same on one machine, up to rounding: `cccccccccccc`"
        in pages.page([later], {"pairs": found})
    )
    monkeypatch.setattr(made, "digests", lambda *_: {"method": "m" * 16, "runner": "r" * 16})
    again.confirm(later)  # nothing is left to do
    assert not capsys.readouterr().out


def test_a_row_with_other_numbers_stays_marked(later, capsys):
    tamper(-1.0)
    again.confirm(later)
    assert "pairs, fedavg_ft: OTHER NUMBERS, and nothing to hold them against; " in capsys.readouterr().out
    assert [line.again for line in committed("fedavg_ft")] == ["", ""] and committed("local_only")[0].again == "c" * 40


@pytest.mark.long
@pytest.mark.parametrize(
    ("loss", "accuracy", "said"),
    [
        (1, 1, "as by its own commit on this machine; "),
        (1 + 1e-6, 1, "as by its own commit on this machine, up to rounding; "),
        (1.1, 1, "CHANGED by the code; losses apart "),
        (1, 0.5, "CHANGED by the code; losses apart 0e+00"),
    ],
)
def test_what_the_row_does_not_give_is_held_against_its_own_commit(loss, accuracy, said, later, monkeypatch, capsys):
    """On another kind of processor the row comes out by neither code; its own commit shows what the code has changed."""
    tamper(-1.0)

    def by_its_own_code(row, point, data_dir):
        _, trial = again._trained(later.load(), row, point, later.load().scenarios["pairs"].build())
        for line in trial.rows:
            for test in line["tests"].values():
                test["loss"] = [loss * one for one in test["loss"]]
                test["accuracy"] = [accuracy * one for one in test["accuracy"]]
        return trial

    monkeypatch.setattr(again, "by_its_own_code", by_its_own_code)
    again.confirm(later)
    assert f"pairs, fedavg_ft: {said}" in capsys.readouterr().out
    (first, _) = committed("fedavg_ft")
    if "CHANGED" in said:
        assert (first.again, first.made) == ("", "0" * 16)
    else:
        assert (first.again, first.made) == ("c" * 40, "m" * 16)
        assert first.moved == pytest.approx(1, abs=1e-4)


@pytest.mark.long
def test_a_trial_by_the_commit_that_made_it(folder, lines, tmp_path, monkeypatch, capsys):
    """In a process of its own, from a repository whose last commit is another one."""
    listed, _ = folder
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    shutil.copytree(made.ROOT, tmp_path / "fedjax_meta", ignore=shutil.ignore_patterns("__pycache__"))
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"], ["rm", "-rq", "."], ["commit", "-qm", "two"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD~"], check=True, capture_output=True, text=True).stdout.strip()
    (row, _), study = of(lines, "fedavg_ft"), listed.load()
    point = board.chosen(row, study.systems["fedavg_ft"])
    _, now = again._trained(study, row, point, study.scenarios["pairs"].build())
    monkeypatch.setattr(made, "ROOT", tmp_path / "fedjax_meta")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")  # as in these tests

    def found(by):
        return again.by_its_own_code(row._replace(commit=by), point)

    assert again.compared(found(commit), now).same
    assert found(f"{commit}*") is found(f"{commit}+{commit}") is found("unknown") is found("0" * 40) is None
    said = capsys.readouterr().out
    assert said.count("fedavg_ft: no single commit made it") == 3 and "fedavg_ft: its commit cannot train it: " in said


def test_what_was_found_out_later_stays_when_a_folder_is_read_again(folder, lines, docs):
    """As long as the training is the same one."""
    listed, root = folder
    (docs / "raw").mkdir()
    later = {"again": "c" * 40, "made": "m" * 16, "runner": "r" * 16, "moved": 0.5}
    commit([line._replace(flops=7.0, **later) if line.method else line for line in lines])
    tamper(-1.0)
    pages.write([listed], [listed], root)
    for line in committed("local_only"):
        assert {name: getattr(line, name) for name in ("flops", *later)} == {"flops": 7.0, **later}
    for line, fresh in zip(committed("fedavg_ft"), of(lines, "fedavg_ft"), strict=True):
        assert math.isnan(line.flops) and (line.again, line.made, line.runner) == ("", fresh.made, fresh.runner)


def test_a_row_that_other_code_trains_alike_stays(folder, lines, tested, docs):
    """It is confirmed by that code, and keeps its FLOPs and tests of new clients. One with other results is replaced."""
    listed, root = folder
    shutil.copytree(root / "digits", docs / "digits", ignore=shutil.ignore_patterns("new_clients.csv"))
    (docs / "raw/new_clients").mkdir(parents=True)
    (docs / "raw/new_clients/pairs.csv").write_text(newcomers.to_csv(tested), encoding="utf-8")
    older = {"commit": "c" * 40, "made": "m" * 16, "runner": "r" * 16, "flops": 7.0}
    commit([line._replace(**older) if line.method else line for line in lines])
    tamper(-1.0)
    pages.write([listed], [listed], docs)
    for line, fresh in zip(committed("local_only"), of(lines, "local_only"), strict=True):
        assert (line.commit, line.again, line.made, line.runner, line.flops) == (
            "c" * 40,
            fresh.commit,
            fresh.made,
            fresh.runner,
            7,
        )
        assert math.isnan(line.moved)
    for line, fresh in zip(committed("fedavg_ft"), of(lines, "fedavg_ft"), strict=True):
        assert (line.commit, line.again) == (fresh.commit, "") and math.isnan(line.flops)
    kept = pages.read_tested(docs / "raw/new_clients")["pairs"]
    assert kept == newcomers.from_csv(newcomers.to_csv([one for one in tested if one.system == "local_only"]))


def test_a_row_that_stays_is_held_against_local_training_as_today(lines):
    """How ties count, say, may have changed since. A folder without local training says nothing of that."""
    fresh = of(lines, "fedavg_ft")
    old = [line._replace(commit="c" * 40, behind=77.0, reached=9.0, target=1.0) for line in fresh]
    alone = [line._replace(behind=math.nan) for line in fresh]
    for made_again, held in ((fresh, fresh), (alone, old)):
        found = board.kept(made_again, old)
        assert {line.commit for line in found} == {"c" * 40}
        assert all(
            (a.behind, a.reached, a.target) == (b.behind, b.reached, b.target) for a, b in zip(found, held, strict=True)
        )
    assert not any(math.isnan(line.behind) for line in fresh)


def test_a_folder_of_some_systems_has_a_report_of_its_own(folder, docs):
    listed, root = folder
    shutil.copytree(root / "digits", docs / "digits", ignore=shutil.ignore_patterns("fedavg_ft.final.json"))
    pages.write([listed], [listed], root)
    whole = (docs / "raw/digits.html").read_text(encoding="utf-8")
    pages.write([listed], [listed], docs)
    assert (docs / "raw/digits.html").read_text(encoding="utf-8") == whole and (docs / "raw/digits_more.html").is_file()
    text = (docs / "page.md").read_text(encoding="utf-8")
    assert "[digits.html](leaderboard/digits.html), [digits_more.html](leaderboard/digits_more.html)" in text


def result(apart, *, same=False, scored_alike=True):
    return again.Again(same, apart, scored_alike)


def test_what_counts_as_rounding():
    """Small where losses first differ, and not large at the next test; other scores may not change by themselves."""
    assert result([0.0, 0.0], same=True).alike and result([1e-6, 1e-3, 0.5]).alike and result([0.0, 0.0, 1e-5, 1e-3]).alike
    assert not any(result(apart).alike for apart in ([1e-3, 1e-3], [1e-6, 0.1], [0.0, 0.0, 0.5, 3.0], [math.inf]))
    assert not result([0.0, 1e-6], scored_alike=False).alike


def test_losses_apart():
    """Relative to the loss where that is above 1; two that are not finite are alike, one of two is infinitely apart."""
    old, nan = np.array([0.5, 10.0]), math.nan
    assert again._gap(old, np.array([0.6, 10.5])) == pytest.approx(0.1)
    assert again._gap(old, np.array([0.5, 12.0])) == pytest.approx(0.2)
    assert again._gap(np.array([nan, math.inf]), np.array([nan, nan])) == 0
    assert again._gap(np.array([nan, 1.0]), np.array([1.0, 1.0])) == again._gap(old, np.array([0.5, nan])) == math.inf


def test_the_lesson_on_rounding_counts_what_moved():
    listed = run_list.Run(name="digits", title="Digits", study="experiments/leaderboard.yaml", hours=0.1, cost="this test")
    said = partial(board.said, listed.load(), "mnist_small")
    moves = {"fedavg": -0.25, "fedavg_ft": math.nan, "fedprox": 1.5, "ditto": math.nan}
    lines = [
        line._replace(scenario="mnist_small", said=said(name), moved=move, again="c" * (name != "ditto"))
        for name, move in moves.items()
        for line in three(name, [90.0, 91.0, 92.0])
    ]
    text = lessons.page([listed], {"mnist_small": lines})
    assert "| mnist\\_small | 3 | 1 | 0.88 | 1.00 | 1.50 (fedprox) |" in text


# Lessons.


def row(scenario, system, seed, known, new=math.nan, said="", **fields):
    return board.Line(scenario, system, system, seed, known=known, new=new, said=said, **fields)


def three(system, known, new=(math.nan,) * 3, **fields):
    return [row("pairs", system, seed + 1, *scores, **fields) for seed, scores in enumerate(zip(known, new, strict=True))]


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [([2.0, 2.1, 1.9], "better"), ([-2.0, -2.1, -1.9], "worse"), ([2.0, -1.0, 3.0], "undecided"), ([2.0], "undecided")],
)
def test_a_gap_is_decided_by_its_interval(differences, verdict):
    """Student's t with two degrees of freedom: 4.303 standard errors to each side."""
    first, second = (
        [row("pairs", name, i, 50 + up * gap) for i, gap in enumerate(differences)] for name, up in (("a", 1), ("b", 0))
    )
    found = gaps.of_lines(first, second[::-1], "known")  # paired by their seeds, in any order
    assert found.verdict == verdict
    if len(differences) == 3:
        margin = 4.302653 * np.std(differences, ddof=1) / math.sqrt(3)
        mean = np.mean(differences)
        assert found.words == f"{mean:+.2f} [{mean - margin:+.2f}, {mean + margin:+.2f}]"
    lower = [line._replace(higher=False, share=False, score="perplexity") for line in first]
    assert gaps.of_lines(lower, second, "known").verdict == {"better": "worse", "worse": "better"}.get(verdict, verdict)
    assert gaps.of_lines(first, [line._replace(known=math.nan) for line in second], "known") is None


def test_lessons_count_what_their_intervals_say():
    listed = run_list.Run(name="digits", title="Digits", study="experiments/leaderboard.yaml", hours=0.1, cost="this test")
    study = listed.load()
    said = partial(board.said, study, "mnist_small")
    scores = {
        "fedmeta": ([96.0, 96.1, 96.2], [90.0, 95.0, 85.0]),
        "fedmeta_fomaml": ([94.0, 94.2, 94.1], [91.0, 90.0, 90.0]),
        "fedavg_ft": ([97.0, 97.1, 97.2], [98.0, 98.1, 97.9]),
        "fedpac": ([96.0, 96.1, 96.2], [97.0, 97.1, 97.2]),
        "fedavg": ([88.0, 88.5, 89.0], [87.0, 86.0, 88.0]),
        "local_only": ([96.0, 95.0, 96.0], [94.0, 94.0, 95.0]),
    }
    lines = [
        line._replace(scenario="mnist_small", said=said(name))
        for name, found in scores.items()
        for line in three(name, *found)
    ]
    lines = [line._replace(edge="inner_lr" * (line.system == "fedmeta_fomaml")) for line in lines]
    text = lessons.page([listed], {"mnist_small": lines})
    assert "Of 2 intervals between the second-order and the first-order gradient of one method, 1 say that the second" in text
    assert "0 that it is worse, and 1 contain 0. Of sound pairs, 0 of 0 say" in text
    assert "| FedMeta(MAML) | 1 | 1 | 0 | 0 | 0 | 0 |  |" in text and "| +2.00 \\[+1.75, +2.25\\] ‡ |" in text
    # Both meta-learners are below fine-tuned FedAvg on known clients, and one of them on new ones; the other way round as it is.
    # Of four pairs, the two of fedmeta alone are of systems neither of which stands at an end.
    assert "| mnist\\_small | fedavg\\_ft | 0 | 1 | 3 | 0 | 1 | 1 |" in text
    assert "| mnist\\_small | fedavg | 3 | 1 | 0 | 1 | 1 | 0 |" in text
    assert "against fedavg_ft: 0 of 4 intervals say better, 3 worse, and 1 contain 0; of sound pairs, 0 of 2" in text
    # Who adapts and is not above the majority class on one group of clients is as if at an end; FedAvg's one model is not.
    constant = three("majority class", [88.6] * 3, [90.3] * 3)
    flat = [line._replace(scenario="mnist_small", method="") for line in constant] + [line._replace(edge="") for line in lines]
    text_of_flat = lessons.page([listed], {"mnist_small": flat})
    assert "| mnist\\_small | new | 90.30 | fedmeta |" in text_of_flat and "| mnist\\_small | known |" not in text_of_flat
    assert "| FedMeta(MAML) | 1 | 1 | 0 | 0 | 0 | 0 |  |" in text_of_flat
    assert "| mnist\\_small | fedavg | 3 | 1 | 0 | 2 | 0 | 0 |" in text_of_flat
    assert "new clients not above the majority class" in pages.page([listed], {"mnist_small": flat})
    # The order that the paper prints is turned here: fedavg_ft lies above fedpac.
    turned = text.partition("What is turned")[2]
    assert "fedpac above fedavg\\_ft" in turned and turned.count("FedPAC") == 1
    # A row of another study is none of this one.
    older = [line._replace(said="0" * 16) if line.system == "fedmeta" else line for line in lines]
    text = lessons.page([listed], {"mnist_small": older})
    assert "of one method" not in text
    missing = next(line for line in text.partition("## What was not run")[2].splitlines() if "digits" in line)
    assert missing.endswith("| all but local\\_only, fedavg, fedavg\\_ft, fedpac, fedmeta\\_fomaml | 1 |")


def test_the_lesson_on_implicit_gradients_says_how_often_their_operator_was_not_positive():
    listed = run_list.Run(name="digits", title="Digits", study="experiments/leaderboard.yaml", hours=0.1, cost="this test")
    said = partial(board.said, listed.load(), "mnist_small")

    def text(shares):
        others = [(name, [94.0, 94.2, 94.1], [math.nan] * 3) for name in ("fedmeta", "fedmeta_fomaml")]
        lines = [
            line._replace(scenario="mnist_small", said=said(name), negative_curvature=share)
            for name, scores, found in [("imaml", [90.0, 91.0, 92.0], shares), *others]
            for line, share in zip(three(name, scores), found, strict=True)
        ]
        return lessons.page([listed], {"mnist_small": board.from_csv(board.to_csv(lines))})

    words = "Conjugate gradients need a positive operator. That of its linear systems was not"
    assert f"{words}, in 40 % of those of imaml on mnist_small." in text([20.0, 60.0, 40.0])
    assert words not in text([math.nan] * 3)


def test_all_scenarios_at_a_glance():
    """The places are those among the systems that all scenarios have; equal scores share one."""
    numbers = {
        "one": {"fedavg_ft": (80, 81, 82), "ditto": (90, 91, 92), "fedper": (80, 81, 82), "afl": (99, 99, 99)},
        "two": {"fedavg_ft": (70, 70, 70), "ditto": (60, 70, 80.3), "fedper": (50, 51, 52)},
    }
    lines = {
        scenario: [
            line for system, known in of.items() for line in three(system, known, known, edge="lr" * (system == "ditto"))
        ]
        for scenario, of in numbers.items()
    }
    lines["two"] = [line._replace(new=math.nan) if line.system == "fedper" else line for line in lines["two"]]
    lines["three"] = three("ditto", (1, 2, 3))
    assert overview.section(lines, "fedavg_ft") == []  # none has enough systems
    for scenario in ("one", "two"):  # systems that have no name in the other
        lines[scenario] += [line for i in range(20) for line in three(f"{scenario}-{i}", (99,) * 3)]
    text = "\n".join(overview.section(lines, "fedavg_ft"))
    known, new = (part.splitlines() for part in text.partition("New clients:")[::2])
    assert "The 3 systems that one, two all have" in text
    assert [line for line in known if line.startswith("| ")][1:] == [
        "| ditto | 1.0 | 1 better, 1 undecided, 0 worse | 91.00 ‡ (1) | 70.10 ‡ (1) |",
        "| fedavg\\_ft | 2.0 |  | 81.00 (2) | 70.00 (2) |",
        "| fedper | 2.5 | 0 better, 1 undecided, 1 worse | 81.00 (2) | 51.00 (3) |",
    ]
    assert [line.split()[1] for line in new if line.startswith("| ")][1:] == ["ditto", "fedavg\\_ft"]


def test_a_system_that_diverged_has_the_last_place():
    systems = {**{f"system-{i}": (i,) * 3 for i in range(20)}, "fedavg_ft": (50,) * 3, "ditto": (math.nan,) * 3}
    some = [line for name, known in systems.items() for line in three(name, known, diverged="7" * (name == "ditto"))]
    lines = {"one": some, "two": some}
    text = "\n".join(overview.section(lines, "fedavg_ft"))
    assert "| ditto | 22.0 | 0 better, 0 undecided, 0 worse | diverged (22) | diverged (22) |" in text
    assert "diverged: in at least one seed, a known client" in text


def test_the_last_bit_of_a_mean_makes_no_place():
    one, other = (97.4, 97.4, 97.9), (97.3, 97.4, 98.0)
    assert np.mean(one) != np.mean(other)
    scores = {"a": one, "b": other, **{f"system-{i}": (i,) * 3 for i in range(20)}, "fedavg_ft": (50,) * 3}
    some = [line for name, known in scores.items() for line in three(name, known)]
    text = "\n".join(overview.section({"one": some, "two": some}, "fedavg_ft"))
    assert all(f"| {name} | 1.0 |" in text for name in ("a", "b"))


def test_published_orders_are_those_of_the_studies():
    pairs = lessons.orderings()
    assert not [one for one in pairs if "_new" in one.best + one.worst]
    names = {"fedmeta_per_new": "fedmeta_per", "fedmeta_per_metasgd_new": "fedmeta_per_metasgd"}
    numbers = {
        names.get(one.system, one.system): one.value
        for one in next(run for run in run_list.read_list() if run.name == "fedmeta_per").load().published
        if one.score == "accuracy" and one.clients == "new"
    }
    mine = [pair for pair in pairs if pair.source == "FedMeta-Per, MNIST" and pair.clients == "new"]
    assert len(mine) == math.comb(len(numbers), 2) - sum(a == b for a, b in itertools.combinations(numbers.values(), 2))
    assert all(numbers[one.best] - numbers[one.worst] == pytest.approx(one.by) and one.by > 0 for one in mine)
    systems = set(_systems())
    assert all({one.best, one.worst} <= systems for one in pairs if "FedMeta-Per" not in one.source)
    assert {"fedmeta_per", "fedmeta_per_metasgd"} <= {one.best for one in mine} & systems
    # FedPer with heads of its own is from another report, and centralised training from another protocol.
    of_paper = [one[1:3] for one in pairs if one.source == "FedMeta-Per, MNIST" and one.clients == "known"]
    assert [pair for pair in of_paper if {"fedper", "fedper_meta", "centralised"} & {*pair}] == [("fedper_meta", "fedper")]
    (fedem,) = (one for one in pairs if (one.best, one.worst) == ("fedem", "fedavg"))
    assert "shakespeare" in fedem.but


def test_what_new_clients_need():
    listed = run_list.Run(name="digits", title="Digits", study="experiments/leaderboard.yaml", hours=0.1, cost="this test")
    said = partial(board.said, listed.load(), "mnist_small")
    scores = {
        ("local_only", ""): {1: 50, 2: 60, 5: 80, 0: 90},
        ("fedavg", ""): {1: 75, 2: 75, 5: 75, 0: 75},
        ("scaffold", ""): {1: 76, 2: 76, 5: 76, 0: 76},
        ("centralised", ""): {1: 99, 2: 99, 5: 99, 0: 99},
        ("fedavg_ft", ""): {1: 55, 2: 59, 5: 89.5, 0: 90.5},
        ("ditto", ""): {1: 75, 2: 79, 5: 70, 0: 70},
        ("local_only", "new_client_epochs"): {10: 90, 50: 93, 100: 91},
        ("fedavg_ft", "finetune_epochs"): {1: 70, 2: 88, 5: 90, 10: 90.5, 20: 89.0},
        ("ditto", "personal_epochs"): {1: 70, 2: 70, 5: 70, 10: 70, 20: 70},
    }
    lines = [
        line._replace(scenario="mnist_small", said=said(name))
        for name in dict.fromkeys(name for name, _ in scores)
        for line in three(name, [90.0] * 3, [90.0] * 3)
    ]
    tested = [
        newcomers.Tested(system, seed, number * (not option), option, number * bool(option), value + seed / 100)
        for (system, option), values in scores.items()
        for number, value in values.items()
        for seed in (1, 2, 3)
    ]
    text = lessons.page([listed], {"mnist_small": lines}, {"mnist_small": tested})
    # Central training is none of the systems without a gradient, local training none of those that adapt. Ditto equals FedAvg.
    assert "| mnist\\_small | 1 | scaffold 76.02 | ditto 75.02 | 0 | 1 | 1 | 0 | 1 | 1 | 50.02 |" in text
    assert "| mnist\\_small | all | scaffold 76.02 | fedavg\\_ft 90.52 | 1 | 0 | 1 | 1 | 0 | 1 | 90.02 |" in text
    at_end = [line._replace(edge="lr" * (line.system == "fedavg_ft")) for line in lines]
    other = lessons.page([listed], {"mnist_small": at_end}, {"mnist_small": tested})
    assert "| mnist\\_small | all | scaffold 76.02 | fedavg\\_ft ‡ 90.52 | 1 | 0 | 1 | 0 | 0 | 1 | 90.02 |" in other
    assert "| mnist\\_small ‡ | 1, 2 |" in other and "| mnist\\_small | fedavg\\_ft ‡ |" in other
    assert "Not all systems were tested" not in text
    few = [one for one in tested if one.system != "ditto"]
    assert "Not all systems were tested: 5 of 6 on mnist_small." in lessons.page(
        [listed], {"mnist_small": lines}, {"mnist_small": few}
    )
    assert "| mnist\\_small | 1, 2 |  | 5, all |" in text
    assert "| mnist\\_small | 1 | 1 | 0 |".replace(" 0 |", "") in text.partition("How many passes")[2]
    # By 2 samples fine-tuning is worse than local training once more; FedAvg's model as it is has no row.
    assert (
        "| mnist\\_small | fedavg\\_ft | 2 | 5 | 5 |" not in text
        and "| mnist\\_small | fedavg |" not in text.partition("The table")[2]
    )
    assert "| mnist\\_small | fedavg\\_ft | 5 | 5 | 5 |" in text and "| mnist\\_small | local\\_only | 50 | all |  |" in text
    assert "clients that train alone reach: mnist_small 93.02 (local_only, 50 passes)." in text
    # The tests with all samples are not the rows' own.
    assert "Means differ by at most: mnist_small 19.98 (ditto)." in text
    assert "| mnist\\_small | ditto | 1 | 2 | never |" in text


@pytest.fixture
def package(tmp_path):
    """Writes files of a small package, and asks which of them one depends on."""
    root = tmp_path / "small"

    def depends(files, on="one.py", cut=()):
        shutil.rmtree(root, ignore_errors=True)
        for name, text in {"__init__.py": "", **files}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        known = depends_on.Package(root, cut)
        parts = known.parts([depends_on.Part(root / on)])
        return {path.relative_to(root).as_posix() for path, name in parts if name is None}, made._digest(known, parts)

    return depends


FILES = {
    "one.py": '"""One."""\nfrom small import two\n\n# what it says\nVALUE = 1\n',
    "two.py": '"""Two."""\nimport os\n',
    "three.py": '"""Three."""\n',
}


@pytest.mark.parametrize(
    ("name", "before", "after", "same"),
    [
        ("one.py", "VALUE = 1", "VALUE = 2", False),
        ("two.py", "import os", "import sys", False),  # by what it imports
        ("three.py", "Three", "3", True),
        ("three.py", '"""Three."""', "VALUE = 3", True),  # nothing of it is imported
        ("one.py", "One.", "The first.", True),
        ("one.py", "# what it says", "# what\n\n# it holds", True),
    ],
)
def test_what_changes_a_digest(package, name, before, after, same):
    assert before in FILES[name]
    other = {**FILES, name: FILES[name].replace(before, after)}
    assert (package(FILES)[1] == package(other)[1]) is same


GATHERED = {
    "parts/__init__.py": "from small.parts.first import one\nfrom small.parts.second import two as second\nfrom . import third\n",
    "parts/first.py": "one = 1\n",
    "parts/second.py": "from ..deep import value\ntwo = value\n",
    "parts/third.py": "three = 3\n",
    "deep.py": "value = 2\n",
    "__init__.py": "from small import parts\nfrom small.parts import one\n",
}
FIRST, SECOND, THIRD = {"parts/first.py"}, {"parts/second.py", "deep.py"}, {"parts/third.py"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("from small.parts import one", FIRST),
        ("from small.parts import second as other", SECOND),
        ("from .parts import one, third", FIRST | THIRD),
        ("from . import parts\nparts.second", SECOND),
        ("import small as s\ns.one", FIRST),
        ("import small as s\ndef f():\n    return s.parts.second + s.parts.third.three", SECOND | THIRD),
        ("import small.parts\nsmall.parts.one", FIRST),
        ("import small.parts.third as t", THIRD),
        ("import small", set()),
        ("def f():\n    from small.parts import one", FIRST),
        ("import importlib\ndef f():\n    return importlib.import_module('small.parts.third')", THIRD),
        ("from small.parts import *", FIRST | SECOND | THIRD | {"parts/__init__.py"}),
        ("from small import parts\ngetattr(parts, 'one')", FIRST | SECOND | THIRD | {"parts/__init__.py"}),
        ("from small.parts import hidden", FIRST | SECOND | THIRD | {"parts/__init__.py"}),  # by its `__getattr__`, say
        ("from small.between import one", FIRST | {"between.py"}),
        ("from small.between import parts\nparts.third", FIRST | THIRD | {"between.py"}),
    ],
)
def test_names_are_followed_to_the_module_that_defines_them(package, text, wanted):
    files = {**GATHERED, "between.py": "from small import parts\nfrom small.parts import one\n", "one.py": text + "\n"}
    assert package(files)[0] == {"one.py"} | wanted


def test_a_name_that_moves_is_another(package):
    files = {**GATHERED, "one.py": "from small.parts import one\n"}
    moved = {
        **files,
        "parts/__init__.py": GATHERED["parts/__init__.py"].replace(
            "parts.first import one", "parts.third import three as one"
        ),
    }
    assert package(moved)[0] == {"one.py"} | THIRD and package(moved)[1] != package(files)[1]
    more = {**files, "parts/__init__.py": GATHERED["parts/__init__.py"] + "from small.deep import value\n"}
    assert package(more) == package(files)


def test_code_of_a_package_counts(package):
    """What it runs whenever it is imported always; a definition, and what that reads, where it is used."""
    begin = GATHERED["parts/__init__.py"]
    files = {**GATHERED, "one.py": "from small.parts import one\n"}

    def with_code(code, text="from small.parts import one\n"):
        return package({**files, "parts/__init__.py": begin + code, "one.py": text})

    assert with_code('"""Words."""\nTABLE = {1: second}\ndef f():\n    return third\n') == package(files)
    assert with_code("TABLE = {1: second}\n", "from small.parts import TABLE\n")[0] == {"one.py"} | SECOND
    assert (
        with_code("def f():\n    return g()\ndef g():\n    return third\n", "import small.parts as p\np.f\n")[0]
        == {"one.py"} | THIRD
    )
    for effect in ("second.x = 1\n", "print(second)\n", "for i in second:\n    pass\n"):
        found = with_code(effect)
        assert found[0] == {"one.py"} | FIRST | SECOND and found[1] != package(files)[1], effect
        # Also for what is imported from a module of the package.
        assert with_code(effect, "import small.parts.third\n")[0] == {"one.py"} | SECOND | THIRD


def test_of_a_table_the_entries_count_that_are_asked_for(package, tmp_path):
    table = "from small.parts import one, second, third\nMODELS = {'a': one, 'b': partial(second), **more}\nmore = third\n"
    files = {**GATHERED, "models/__init__.py": table, "one.py": "from small.models import MODELS\n"}
    assert package(files)[0] == {"one.py"} | FIRST | SECOND | THIRD
    assert package(files, cut=["MODELS"])[0] == {"one.py"}
    known = depends_on.Package(tmp_path / "small", ["MODELS"])
    for name, wanted in {"a": FIRST, "b": SECOND, "c": FIRST | SECOND | THIRD}.items():
        parts = known.parts([known.entry("MODELS", name)])
        assert {path.relative_to(tmp_path / "small").as_posix() for path, whole in parts if whole is None} == wanted


PLACES = {scenario: place for listed in LISTED for scenario, place in listed.load().scenarios.items()}


def test_a_row_depends_on_the_data_sets_and_models_of_its_scenario(tmp_path):
    """A change of each of these files, and whose rows it marks."""
    root = tmp_path / "fedjax_meta"
    shutil.copytree(made.ROOT, root, ignore=shutil.ignore_patterns("__pycache__", "presets"))

    def digests():
        made._digests.cache_clear()
        made._package.cache_clear()
        return {scenario: made.digests("fedrep", place, root) for scenario, place in PLACES.items()}

    before, everywhere = digests(), set(PLACES)
    assert before == {scenario: made.digests("fedrep", place) for scenario, place in PLACES.items()}
    for path, wanted in {
        "data/leaf.py": set(),
        "data/engines.py": set(),
        "data/episodes.py": set(),
        "data/text.py": {"shakespeare"},
        "models/recurrent.py": {"shakespeare"},
        "models/convolutional.py": {"uci_har"},
        "models/transformer.py": set(),
        "data/partition.py": everywhere,
        "data/federated.py": everywhere,
        "methods/fedpac.py": set(),
        "methods/fedrep.py": everywhere,
    }.items():
        text = (root / path).read_text(encoding="utf-8")
        (root / path).write_text(f"{text}\n_MORE = 1\n", encoding="utf-8")
        after = digests()
        (root / path).write_text(text, encoding="utf-8")
        assert {scenario for scenario in PLACES if after[scenario] != before[scenario]} == wanted, path


def test_a_method_depends_on_its_own_file_alone():
    known = depends_on.Package(made.ROOT, ["METHODS"])
    files = {part.path.name for part in known.parts(map(depends_on.Part, made._files(METHODS["fedrep"])))}
    assert "fedrep.py" in files and "local.py" in files
    assert not files & {"fedpac.py", "pfedme.py", "run.py", "partition.py"}
    digests = made.digests("fedrep"), made.digests("fedpac")
    assert digests[0]["method"] != digests[1]["method"]


def test_methods_from_elsewhere_have_digests(tmp_path, monkeypatch):
    """A file of a user's own, an option that is filled in, and a function without a file."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from fedjax_meta.methods.fedavg import fedavg\n\n\ndef mine(task, *, lr=0.1):\n    return fedavg(task, lr=lr)\n"
    )
    spec = importlib.util.spec_from_file_location("mine_of_a_test", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mine_of_a_test", module)
    spec.loader.exec_module(module)
    known = depends_on.Package(made.ROOT, ["METHODS"])
    found = known.parts(map(depends_on.Part, made._files(partial(module.mine, lr=0.2))))
    assert {part.path.name for part in found} > {"mine.py", "fedavg.py"}
    monkeypatch.setitem(METHODS, "mine_of_a_test", module.mine)
    first = made.digests("mine_of_a_test")
    assert first["method"] != made.digests("fedavg")["method"]
    module.mine.__module__ = "no_such_module"
    assert made._files(module.mine) == []


# One cell again.

TRAIN = """
import dataclasses, pathlib, sys
from fedjax_meta.study import load, run
study, system, out, *settings = sys.argv[1:]
study = load(study, settings)
alone = dataclasses.replace(study, systems={system: study.systems[system]})
run.run(alone, pathlib.Path(out), watcher=type("Silent", (run.Watcher,), {})())
"""
"""What the command of a row does, without its report."""


def trained_again(system, out, words, code=ROOT):
    """(the first seed of a committed row, the content of the results of a command that trains it anew by some code)."""
    wanted = of(board.read_lines()["mnist_small"], system)[0]
    listed = next(one for one in LISTED if one.name == wanted.run)
    name, value = wanted.chosen.split("=")
    settings = [f"systems.{system}.grid={{{name}: [{value}]}}", f"seeds=[{wanted.seed}]"]
    # As a user's shell has it: the tests' own flags and 64 bits are for tests.
    environment = {key: text for key, text in os.environ.items() if key not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    study = ROOT / listed.study
    if code != ROOT:  # options of other systems came later
        shown = subprocess.run(
            ["git", "-C", ROOT, "show", f"{wanted.commit}:{listed.study}"], check=True, capture_output=True, timeout=60
        )
        study = out.with_suffix(".yaml")
        study.write_bytes(shown.stdout)
    command = [sys.executable, *words(str(study), system, str(out), settings)]
    environment["PYTHONPATH"] = str(code)
    subprocess.run(command, check=True, env=environment, cwd=code, capture_output=True, timeout=1200)
    return wanted, json.loads((out / f"results/mnist_small/{system}.final.json").read_text())


def by_the_runner(study, system, out, settings):
    return ["-c", TRAIN, study, system, out, *settings]


def by_the_command(study, system, out, settings):
    sets = itertools.chain.from_iterable(("--set", one) for one in settings)
    return ["-m", "fedjax_meta", "run", study, "--systems", system, *sets, "--out", out]


def check_same(wanted, content, *, moved=math.nan, nearly=False):
    """The numbers of a row: equal on the same kind of processor with the same JAX, unless the code is known to round otherwise.

    Elsewhere, and where `nearly` will do, within two test samples of each: one is 0.1 % of the known clients' and 0.125 % of the
    new ones'.
    """
    (trial,) = content["trials"].values()
    known, new = (100 * np.mean(trial["rows"][-1]["tests"][group]["accuracy"]) for group in ("known", "new"))
    alike = wanted.device == processor() and f"jax={jax.__version__}" in wanted.versions.split()
    if alike and math.isnan(moved) and not nearly:
        assert (f"{known:.6g}", f"{new:.6g}") == (f"{wanted.known:.6g}", f"{wanted.new:.6g}")
    else:
        assert known == pytest.approx(wanted.known, abs=0.21) and new == pytest.approx(wanted.new, abs=0.26)
    assert wanted.rounds == trial["rows"][-1]["round"] and content["config"]["system"]["options"]["epochs"] == 2
    assert content["config"]["data"] == wanted.data


def test_a_committed_cell_comes_out_again(tmp_path):
    """12 seconds of one core. Virtual machines of several generations name their processor alike: equality is for long tests."""
    wanted, content = trained_again("local_only", tmp_path / "cell", by_the_runner)
    check_same(wanted, content, nearly=True)


@pytest.mark.long
def test_the_command_of_a_row_gives_its_numbers(tmp_path):
    wanted, content = trained_again("local_only", tmp_path / "cell", by_the_command)
    check_same(wanted, content, moved=wanted.moved)


@pytest.mark.long
def test_a_cell_comes_out_by_its_own_commit(tmp_path):
    """Later code adds up in another order for FedAvg: 0.2 % fewer samples of the known clients are right at the end."""
    source = rows.source(of(board.read_lines()["mnist_small"], "fedavg")[0].commit)
    if source is None:
        pytest.skip("the repository does not have the commit")
    check_same(*trained_again("fedavg", tmp_path / "cell", by_the_runner, source.parent))


@pytest.mark.parametrize(
    "listed", [one for one in LISTED if one.name.startswith("mnist_small")], ids=lambda listed: listed.name
)
@pytest.mark.long
def test_every_grid_can_be_swept(listed):
    """Numbers of a grid are traced, but for those that decide what a program is."""
    chosen = listed.load()
    (scenario,) = chosen.scenarios
    clients = chosen.scenarios[scenario].build()
    for name in chosen.systems_on(scenario):
        system = chosen.system(name, scenario)
        point = points_of(system)[0]
        fixed = {one: value for one, value in point.items() if one in tuning.shaping(system)}

        def one_round(rates, system=system, fixed=fixed):
            algorithm = system.build(clients, **fixed, **rates)
            key = jax.random.key(0)
            return algorithm.round(key, algorithm.init(key, clients.train), clients.train)[0].round

        jax.eval_shape(one_round, {one: value for one, value in point.items() if one not in fixed})
