"""The list of the papers' runs, extracts of run folders, verdicts, and docs/results.md, which is made from them."""

import copy
import json
import math
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from fedjax_meta.data import slots
from fedjax_meta.study import load, run
from tests.study.common import Silent, study, tree

testing = pytest.importorskip("typer.testing", reason="the command line needs typer")
reproduce = pytest.importorskip("experiments.reproduce.__main__", reason="the command line needs typer, rich and matplotlib")
extracts = pytest.importorskip("experiments.reproduce.extracts")
run_list = pytest.importorskip("experiments.reproduce.run_list")
running = pytest.importorskip("experiments.reproduce.running")
results = pytest.importorskip("experiments.reproduce.page")
users = pytest.importorskip("experiments.reproduce.users")
verdicts = pytest.importorskip("experiments.reproduce.verdicts")
published_cohorts = pytest.importorskip("experiments.published_cohorts")
published_samples = pytest.importorskip("experiments.published_samples")

ROOT = Path(__file__).parents[2]

LISTED = run_list.read_list()


def test_the_page_is_what_the_extracts_give():
    """`python -m experiments.reproduce --write-docs FOLDER` writes it; nobody types its numbers."""
    text = results.PAGE.read_text(encoding="utf-8")
    assert text == results.with_generated(text, results.page(LISTED, extracts.read_extracts()))


def test_a_changed_number_is_noticed():
    found = extracts.read_extracts()
    before = results.page(LISTED, found)
    row = next(iter(found.values()))["rows"][0]
    row["known"] = {name: [value + 0.5 for value in values] for name, values in row["known"].items()}
    assert results.page(LISTED, found) != before


@pytest.mark.parametrize("listed", LISTED, ids=lambda listed: listed.name)
def test_every_run_of_the_list_is_a_study_with_these_systems(listed):
    study = listed.load()
    assert 0 < listed.hours < 100
    assert set(listed.causes) <= set(study.systems)
    scenarios = {name.partition(extracts.DRAW)[0] for name in study.scenarios}
    for claim in listed.claims:
        assert set(claim.systems) <= set(study.systems) and set(claim.scenarios) <= scenarios
    if listed.systems:
        assert set(listed.systems) == set(study.systems)


@pytest.mark.parametrize(("name", "found"), extracts.read_extracts().items())
def test_an_extract_has_the_run_of_the_list(name, found):
    listed = next(one for one in LISTED if one.name == name)
    study = listed.load()
    assert shlex.split(found["command"]) == ["fedjax-meta", "run", *listed.arguments()]
    assert (found["rounds"], found["seeds"]) == (study.rounds, list(study.seeds))
    for row in found["rows"]:
        assert row["system"] in study.systems_on(row["scenario"])
        runs = len(found["seeds"]) * len(found.get("draws", [0]))
        assert all(len(values) == runs for values in row["known"].values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """(an entry of a list, the folder with its run)."""
    root = tmp_path_factory.mktemp("reproduce")
    content = tree(tuning={"rounds": 1, "seeds": [0]}, rounds=2)
    content["published"] = [{"scenario": "pairs", "rows": {"fedavg": 50.0, "local": 60.0}}]
    path = root / "digits.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    listed = run_list.Run(name="digits", title="Digits", study=str(path), hours=0.1, cost="this test")
    run.run(load(path), root / "digits", watcher=Silent())
    return listed, root


def test_an_extract_has_the_scores_of_its_folder(folder):
    listed, root = folder
    found = extracts.extract(listed, root / "digits")
    for row in found["rows"]:
        content = json.loads((root / "digits/results/pairs" / f"{row['system']}.final.json").read_text())
        trials = sorted(content["trials"].values(), key=lambda trial: trial["seed"])
        for clients in ("known", "new"):
            for score in extracts.SCORES:
                wanted = [100 * trial["rows"][-1]["tests"][clients]["scores"][score] for trial in trials]
                np.testing.assert_allclose(row[clients][score], wanted, atol=1e-3)
    assert [row["points"] for row in found["rows"]] == [2, 0]
    assert found["seeds"] == [1, 2] and found["rounds"] == 2
    extracts.write_extract(found, root / "extracts/digits.json")
    assert extracts.read_extracts(root / "extracts") == {"digits": found}


def test_a_folder_of_another_study_is_refused(folder):
    listed, root = folder
    with pytest.raises(ValueError, match="holds another study than digits of the list: rounds differs"):
        extracts.extract(replace(listed, settings=["rounds=3"]), root / "digits")
    with pytest.raises(ValueError, match="system local differs"):
        extracts.extract(replace(listed, settings=["systems.local.options.lr=0.3"]), root / "digits")


def test_the_section_of_a_run_has_its_numbers_and_a_verdict(folder):
    listed, root = folder
    found = extracts.extract(listed, root / "digits")
    page = results.page([listed], {"digits": found})
    first = found["rows"][0]["known"]["accuracy"]
    assert f"{np.mean(first):.2f} ±{np.std(first, ddof=1):.2f} (50.00) |" in page
    assert found["commit"][:12] in page and found["config"] in page
    (total,) = [line for line in page.splitlines() if line.startswith("| Digits |")]
    assert "2 seeds" in total


def test_the_draws_of_the_clients_are_one_row_which_the_published_numbers_are_held_against(tmp_path):
    content = tree(tuning={"rounds": 1, "seeds": [0]}, rounds=1)
    content |= {"seeds": [1, 2], "data_seeds": [3, 4], "published": [{"scenario": "pairs", "rows": {"fedavg": 50.0}}]}
    content["systems"] = {"fedavg": content["systems"]["fedavg"] | {"grid": {}}}
    path = tmp_path / "digits.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    listed = run_list.Run(name="digits", title="Digits", study=str(path), hours=0.1, cost="this test")
    run.run(load(path), tmp_path / "digits", watcher=Silent())
    found = extracts.extract(listed, tmp_path / "digits")
    (row,) = found["rows"]
    assert (row["scenario"], row["system"], found["draws"]) == ("pairs", "fedavg", [3, 4])
    wanted = []
    for draw in (3, 4):
        trials = json.loads((tmp_path / f"digits/results/pairs@{draw}/fedavg.final.json").read_text())["trials"].values()
        by_seed = sorted(trials, key=lambda trial: trial["seed"])
        wanted += [100 * trial["rows"][-1]["tests"]["known"]["scores"]["accuracy"] for trial in by_seed]
    np.testing.assert_allclose(row["known"]["accuracy"], wanted, atol=1e-3)
    page = results.page([listed], {"digits": found})
    assert f"{np.mean(wanted):.2f} ±{np.std(wanted, ddof=1):.2f} (50.00) |" in page
    assert "| Digits | 2 seeds of 2 draws |" in page and "seeds 1, 2, of each draw of the clients (3, 4)" in page
    (tmp_path / "digits/results/pairs@4/fedavg.final.json").unlink()
    assert extracts.extract(listed, tmp_path / "digits")["rows"] == []


def test_rows_of_several_folders_make_one_extract(folder):
    listed, root = folder
    found = extracts.extract(listed, root / "digits")
    first, second = found["rows"]
    before = {**found, "commit": "b" * 40, "hours": 1.5, "rows": [second, first]}
    newest = {**found, "rows": [first]}
    both = extracts.joined(listed, newest, before)
    assert both["rows"] == [first, second] and both["commit"] == found["commit"]
    place = [second["scenario"], second["system"]]
    assert [(part["rows"], part["commit"], part["hours"]) for part in both["before"]] == [([place], "b" * 40, 1.5)]
    assert f" {second['system']}: commit `{'b' * 12}`;" in results.page([listed], {"digits": both})
    assert extracts.missing(listed, both) == [] and extracts.missing(listed, newest) == [("pairs", second["system"])]
    assert extracts.missing(listed, None) == [("pairs", first["system"]), ("pairs", second["system"])]
    # A third folder: rows keep where they are from, and a folder without rows is not named.
    again = extracts.joined(listed, {**found, "commit": "c" * 40, "rows": [first]}, both)
    assert [(part["rows"], part["commit"]) for part in again["before"]] == [([place], "b" * 40)]
    assert extracts.hours_of(both) == extracts.hours_of(again) == found["hours"] + 1.5
    assert "before" not in extracts.joined(listed, found, both)


def test_rows_of_other_settings_or_data_are_not_joined(folder):
    listed, root = folder
    found = extracts.extract(listed, root / "digits")
    first, second = found["rows"]
    newest = {**found, "rows": [first]}
    other = replace(listed, settings=[f"systems.{second['system']}.options.lr=0.3"])
    assert extracts.joined(other, newest, found)["rows"] == [first] and extracts.missing(other, found) == [
        ("pairs", second["system"])
    ]
    assert extracts.joined(listed, newest, {**found, "data": {"pairs": "other"}})["rows"] == [first]
    every = [("pairs", first["system"]), ("pairs", second["system"])]
    assert extracts.missing(replace(listed, settings=["rounds=3"]), found) == every
    # How far a grid may move on changes no row. An older row does not tell its settings, and counts by the command.
    assert extracts.missing(replace(listed, settings=["tuning.extend=2"]), found) == []
    old = {**found, "rows": [{name: value for name, value in row.items() if name != "settings"} for row in found["rows"]]}
    assert extracts.missing(listed, old) == [] and extracts.joined(listed, newest, old)["rows"] == [first, old["rows"][1]]
    assert extracts.missing(other, old) == every
    assert extracts.joined(other, newest, old)["rows"] == [first]


def test_rows_of_several_scenarios_keep_where_they_are_from():
    listed = next(one for one in LISTED if one.name == "fedpac_concepts")
    study = listed.load()
    scenarios, (one, other, *_) = list(study.scenarios), study.systems

    def extract(commit, *places):
        rows = [{"scenario": s, "system": name, "settings": extracts.settings_of(study, s, name)} for s, name in places]
        about = {"versions": {}, "device": "cpu", "config": "", "hours": 1.0, "command": "", "rounds": 0, "seeds": [1]}
        return {**about, "commit": commit, "data": {}, "rows": rows}

    first = extract("a", (scenarios[1], one))
    second = extracts.joined(listed, extract("b", (scenarios[0], one)), first)
    third = extracts.joined(listed, extract("c", (scenarios[0], other)), second)
    told = [(part["commit"], part["rows"]) for part in third["before"]]
    assert told == [("a", [[scenarios[1], one]]), ("b", [[scenarios[0], one]])]
    places = [(row["scenario"], row["system"]) for row in third["rows"]]
    assert places == [(scenarios[0], one), (scenarios[0], other), (scenarios[1], one)]


def test_settings_are_those_of_a_system_whatever_the_others_are():
    for name in ("mtfl_figure5", "fedmeta_per_cifar10"):
        listed = next(one for one in LISTED if one.name == name)
        whole = listed.load()
        for scenario, systems in extracts.places_of(whole).items():
            alone = replace(listed, systems=[systems[0]]).load()
            assert extracts.settings_of(alone, scenario, systems[0]) == extracts.settings_of(whole, scenario, systems[0])


def test_only_what_the_docs_lack_is_run(folder, monkeypatch):
    listed, root = folder
    found = extracts.extract(listed, root / "digits")
    second = found["rows"][1]["system"]
    monkeypatch.setattr(extracts, "read_extracts", lambda: {"digits": {**found, "rows": found["rows"][:1]}})
    (narrowed,) = reproduce.lacking([listed])
    assert narrowed.systems == [second] and list(narrowed.load().systems) == [second]
    monkeypatch.setattr(extracts, "read_extracts", lambda: {"digits": found})
    assert reproduce.lacking([listed]) == []


def test_only_scenarios_that_the_docs_lack_are_run(monkeypatch):
    listed = next(one for one in LISTED if one.name == "fedpac_samples")
    study = listed.load()
    first, *others = study.scenarios
    rows = [
        {"scenario": first, "system": name, "settings": extracts.settings_of(study, first, name)} for name in study.systems
    ]
    found = {"command": listed.command, "rounds": study.rounds, "seeds": study.seeds, "rows": rows}
    monkeypatch.setattr(extracts, "read_extracts", lambda: {listed.name: found})
    (narrowed,) = reproduce.lacking([listed])
    assert list(narrowed.load().scenarios) == narrowed.scenarios == others and narrowed.hours < listed.hours
    assert f"--scenarios {','.join(others)} --seeds" in narrowed.command and narrowed.systems == list(study.systems)
    rows.pop()  # its last system is to be run on all
    (narrowed,) = reproduce.lacking([listed])
    assert narrowed.scenarios == listed.scenarios and narrowed.hours == listed.hours


def test_a_folder_of_some_systems_goes_on_with_the_others(tmp_path):
    """As `--missing` does: the folder's study is of the last systems, the results of the first ones are still there."""
    content = copy.deepcopy(tree(tuning={"rounds": 1, "seeds": [0]}, rounds=1))
    content["scenarios"]["others"] = {**content["scenarios"]["pairs"], "seed": 5}
    names = list(content["systems"])
    content["systems"][names[1]]["scenarios"] = ["others"]
    path = tmp_path / "digits.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    listed, before = run_list.Run(name="digits", title="Digits", study=str(path), hours=0.1, cost="this test"), None
    for name, places in [(names[1], []), (names[0], ["pairs", "others"])]:
        run.run(replace(listed, systems=[name], scenarios=places).load(), tmp_path / "digits", watcher=Silent())
        before = extracts.joined(listed, extracts.extract(listed, tmp_path / "digits"), before)
    assert extracts.missing(listed, before) == [] and {row["system"] for row in before["rows"]} == set(names)


def test_states_of_the_list(folder, capsys):
    listed, root = folder
    assert running.state(listed, root) == "done"
    assert running.state(replace(listed, name="other"), root) == "not run"
    assert running.state(replace(listed, settings=["tuning.extend=2"]), root) == "done, but grids may move on"
    (root / "digits/results/pairs/local.final.json").rename(root / "kept")
    try:
        assert running.state(listed, root) == "partly (1 of 2)"
    finally:
        (root / "kept").rename(root / "digits/results/pairs/local.final.json")


def test_the_list_has_measured_hours_and_what_is_in_the_docs(folder):
    listed, root = folder
    name, *rest = listed.name, "0.1", "estimated", "done", "not run", "Digits"
    assert reproduce.line(listed, root, None) == [name, *rest]
    found = {"hours": 1.234, "seeds": [1], "rows": [{}]}
    assert reproduce.line(listed, root, found) == [name, "1.23", "measured", "done", "1 of 2 rows, 1 seed", "Digits"]


def test_what_lacks_seeds_or_rounds_is_not_done(folder, tmp_path):
    """A run that was extended, and stopped after its first system: the second has the old seeds."""
    listed, root = folder
    shutil.copytree(root / "digits", tmp_path / "digits")
    path = tmp_path / "digits/results/pairs/local.final.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    for changed in (
        {**whole, "trials": {name: trial for name, trial in whole["trials"].items() if trial["seed"] == 1}},
        {**whole, "rounds": 1},
    ):
        path.write_text(json.dumps(changed), encoding="utf-8")
        found = extracts.extract(listed, tmp_path / "digits")
        assert [row["system"] for row in found["rows"]] == ["fedavg"] and extracts.missing(listed, found) == [
            ("pairs", "local")
        ]
        assert running.state(listed, tmp_path) == "partly (1 of 2)"
    for more in (replace(listed, seeds=[1, 2, 3]), replace(listed, settings=["rounds=3"])):
        assert running.state(more, root) == "partly (0 of 2)"


def test_results_of_a_system_that_the_folders_study_lacks_are_not_taken(folder, tmp_path):
    """They may be of other settings: `--missing` ran other systems in this folder."""
    listed, root = folder
    shutil.copytree(root / "digits", tmp_path / "digits")
    run.run(replace(listed, systems=["fedavg"]).load(), tmp_path / "digits", watcher=Silent())
    other = replace(listed, settings=["systems.local.options.lr=0.3"])
    assert [row["system"] for row in extracts.extract(other, tmp_path / "digits")["rows"]] == ["fedavg"]


def test_rows_of_a_scenario_whose_data_changed_are_dropped_and_others_stay():
    listed = next(one for one in LISTED if one.name == "fedpac_concepts")
    study = listed.load()
    (first, second, *_), name = study.scenarios, next(iter(study.systems))

    def extract(data, *scenarios):
        rows = [{"scenario": s, "system": name, "settings": extracts.settings_of(study, s, name)} for s in scenarios]
        about = {"versions": {}, "device": "cpu", "config": "", "hours": 1.0, "command": "", "rounds": 0, "seeds": [1]}
        return {**about, "commit": "a", "data": data, "rows": rows}

    before = extract({first: "x", second: "y"}, first, second)
    found = extracts.joined(listed, extract({first: "z"}, first), before)
    assert [row["scenario"] for row in found["rows"]] == [first, second] and found["data"] == {first: "z", second: "y"}
    without = extracts.joined(listed, {**extract({first: "z"}), "rows": []}, before)
    assert [row["scenario"] for row in without["rows"]] == [second]


def test_scores_of_orders_are_those_of_each_part():
    """Two orders of three clients; hits of 2 classes."""
    rng = np.random.default_rng(0)
    confusion = rng.integers(1, 9, (6, 2, 2))
    accuracy = confusion[:, [0, 1], [0, 1]].sum(1) / confusion.sum((1, 2))
    test = {"accuracy": accuracy, "f1": accuracy**2, "confusion": confusion}
    found = extracts._scores(test, 2)
    for order, part in enumerate((slice(0, 3), slice(3, 6))):
        micro = confusion[part][:, [0, 1], [0, 1]].sum() / confusion[part].sum()
        one = accuracy[part]
        wanted = [micro, one.mean(), one.std(), (one**2).mean(), (one**2).std()]
        np.testing.assert_allclose([found[name][order] for name in extracts.SCORES], wanted)


def test_scores_of_a_study_without_classes_are_the_shares_that_it_measures():
    values = [0.5, 0.7, 0.1, 0.3]
    test = {"metrics": {"token_accuracy": {"values": values, "share": True}, "perplexity": {"values": values, "share": False}}}
    found = extracts._scores(test, 2)
    assert set(found) == {"token_accuracy_mean", "token_accuracy_std"}
    np.testing.assert_allclose(found["token_accuracy_mean"], [0.6, 0.2])
    np.testing.assert_allclose(found["token_accuracy_std"], [0.1, 0.1])
    row = {"known": {name: [10.0] for name in found}}
    assert results._mean_and_deviation(row) == ("token_accuracy_mean", "token_accuracy_std")


def measured(mean, seeds=math.nan, orders=math.nan):
    return verdicts.Measured(mean, seeds, orders)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ({"a": measured(90.9, 0.5), "b": measured(70.0, 0.5)}, {"a": "within the spread", "b": "in order"}),
        ({"a": measured(91.1, 0.5), "b": measured(80.0, 0.5)}, {"a": "in order", "b": "within the spread"}),
        ({"a": measured(91.1, 0.5, 0.5), "b": measured(80.0)}, {"a": "within the spread", "b": "one run, no spread"}),
        ({"a": measured(70.0, 0.5), "b": measured(75.0, 0.5)}, {"a": "not reproduced", "b": "not reproduced"}),
        ({"a": measured(85.0, 0.5), "b": measured(75.0, 0.5)}, {"a": "in order", "b": "in order"}),
        ({"a": measured(math.nan), "b": measured(75.0, 0.5)}, {"a": "not reproduced", "b": "not reproduced"}),
        ({"a": measured(90.0), "b": measured(80.0)}, {"a": "one run, no spread", "b": "one run, no spread"}),
        # Orders of the labels say nothing of another seed.
        ({"a": measured(90.0, orders=0.5), "b": measured(70.0, orders=0.5)}, dict.fromkeys("ab", "one run, no spread")),
        ({"b": measured(79.0, 0.1)}, {"a": "not run", "b": "not reproduced"}),
    ],
)
def test_verdicts(found, wanted):
    assert verdicts.verdicts({"a": 90.0, "b": 80.0}, found) == wanted


def test_a_diverged_system_has_no_place_in_an_order():
    published, found = {"a": 80.0, "b": 90.0, "c": 70.0}, {"a": measured(85.0, 1.0), "b": measured(95.0, 1.0)}
    wanted = {"a": "in order", "b": "in order"}
    assert verdicts.verdicts(published, found | {"c": measured(75.0, 1.0)}) == wanted | {"c": "in order"}
    assert verdicts.verdicts(published, found | {"c": measured(math.nan)}) == wanted | {"c": "not reproduced"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["within the spread"], "within the spread"),
        (["in order"], "in order, +1.00 points"),
        (["within the spread", "not reproduced", "in order"], "first score within the spread; 1 of 3 numbers"),
        (["in order", "within the spread"], "first score in order, +1.00 points; 1 of 2 numbers within the spread"),
        (["within the spread"] * 2, "both numbers within the spread"),
        (["within the spread"] * 5, "all 5 numbers within the spread"),
        (["one run, no spread"] * 5, "one run, no spread, +1.00 points"),
        (["not run"] * 5, "not run"),
    ],
)
def test_the_verdict_on_a_row_counts_all_of_its_scores(words, said):
    assert results._in_words(words, "" if words[0] in ("within the spread", "not run") else ", +1.00 points") == said


def test_totals_count_every_score_that_can_be_judged():
    words = ["within the spread", "in order", "not run", "one run, no spread", "within the spread"]
    assert results._share("within the spread", words) == "2 of 3"
    assert results._share("within the spread", words[2:4]) == ""
    found = extracts.read_extracts()["fedmeta_per"]
    section = results._section(next(one for one in LISTED if one.name == "fedmeta_per"), found)
    assert len(section.scores) > len(section.numbers)
    (total,) = [
        line for line in results.page(LISTED, {"fedmeta_per": found}).splitlines() if line.startswith("| FedMeta-Per, MNIST |")
    ]
    assert results._share("within the spread", section.scores) in total


def test_the_smaller_deviation_is_the_better_one():
    means = {"a": [1.0, 1.1, 0.9], "b": [3.0, 3.1, 2.9]}
    rows = {("s", name): {"known": {"accuracy_std": values}} for name, values in means.items()}
    claim = run_list.Claim("first", ["a", "b"], ["s"], score="accuracy_std")
    assert results._claim(claim, "s", rows) == (" (a 1.00 ±0.10, b 3.00 ±0.10)", "in order")


def test_the_spread_joins_seeds_and_orders():
    row = {"new": {"accuracy": [90.0, 92.0]}, "orders": {"accuracy": [88.0, 91.0, 94.0]}}
    found = verdicts.measured(row, "new", "accuracy")
    assert found == (91.0, pytest.approx(2**0.5), pytest.approx(3.0))
    assert found.spread == pytest.approx(11**0.5) and str(found) == "91.00 ±1.41 ±3.00"


def test_a_claim_holds_only_in_its_order():
    means = {"a": [3.0, 4.0, 5.0], "b": [2.0, 3.1, 3.9], "c": [1.0, 2.0, 3.0], "like b": [2.1, 2.8, 4.1]}
    means["lost"] = [9.0, 9.0, None]
    rows = {("s", name): {"known": {"accuracy_mean": values}} for name, values in means.items()}
    rows |= {("one", name): {"known": {"accuracy_mean": values[:1]}} for name, values in means.items()}

    def verdict(*systems, scenario="s"):
        return results._claim(run_list.Claim("first", list(systems), [scenario]), scenario, rows)[1]

    assert verdict("a", "b", "c") == verdict("a", "c") == "in order"
    assert verdict("a", "c", "b") == verdict("c", "b") == "not reproduced"
    # Paired differences -0.1, 0.3, -0.2: their interval holds 0. A run that diverged in one seed of three decides nothing.
    assert (
        verdict("b", "like b") == verdict("like b", "b") == verdict("a", "b", "like b") == verdict("lost", "a") == "undecided"
    )
    assert verdict("a", "b", scenario="one") == verdict("b", "a", scenario="one") == "one run, no spread"
    assert results._claim(run_list.Claim("first", ["a", "b"], ["other"]), "other", rows) == ("", "not run")


def test_a_diverged_run_has_no_scores(tmp_path):
    test = {"accuracy": [0.5, 1.0], "f1": [0.5, 1.0], "confusion": [[[1, 1], [0, 0]], [[2, 0], [0, 0]]]}
    row = {"round": 4, "seconds": 0.0, "compile_seconds": 0.0, "train": {}, "tests": {"known": test, "new": None}}
    trials = {
        f"seed {seed}": {"seed": seed, "numbers": {}, "rows": [row], "diverged": diverged}
        for seed, diverged in ((1, None), (2, 3))
    }
    path = tmp_path / "a.final.json"
    path.write_text(json.dumps({"trials": trials}))
    found, _ = extracts._row(path, study(seeds=[1, 2]), 1, [])
    assert found["known"]["accuracy_mean"] == [75.0, None] and found["known"]["f1_std"] == [25.0, None]
    # A seed that was taken out of the study, whose results stay in the folder.
    assert extracts._row(path, study(seeds=[1]), 1, [])[0]["known"]["accuracy_mean"] == [75.0]


def watched(curve, deviation=0.1, diverged=None):
    """A trial whose user accuracy is recorded in rows of two rounds."""
    rows = [
        {"train": {"user_accuracy": curve[i : i + 2], "user_accuracy_std": [deviation] * 2}} for i in range(0, len(curve), 2)
    ]
    return {"rows": rows, "diverged": diverged}


def test_rounds_to_a_target_are_those_of_each_seed():
    trials = [watched([0.5, 0.96, 0.94, 0.98]), watched([0.96, 0.5, 0.5, 0.97], 0.2)]
    found = users.extract(trials, [95, 97.5])
    assert found == {
        "user_accuracy": [98.0, 97.0],
        "user_accuracy_std": [10.0, 20.0],
        "rounds to 95": [2, 1],
        "rounds to 97.5": [4, None],
    }
    headings, (line,) = users.table([("FL", found)])
    assert headings[-1] == "rounds to 97.5 %"
    assert line == ["FL", "97.50 ±0.71", "15.00 ±7.07", "1.5 ±0.7", "never in 1 of 2 seeds"]
    assert users.extract([{"rows": [{"train": {"loss": [1.0]}}], "diverged": None}], [95]) == {}
    # A mean of shares in single precision that is the target but for rounding.
    assert 100 * np.float32(0.95).item() < 95 and users.extract([watched([0.5, np.float32(0.95).item()])], [95])[
        "rounds to 95"
    ] == [2]
    # From round 2 on, nothing counts.
    found = users.extract([watched([0.96, 0.98, 0.99, 0.99], diverged=2)], [95, 97.5])
    assert found == {"user_accuracy": [None], "user_accuracy_std": [None], "rounds to 95": [1], "rounds to 97.5": [None]}
    assert users.extract([watched([0.96, 0.98], diverged=1)], [95])["rounds to 95"] == [None]


def test_fewer_rounds_are_better_and_never_is_worst():
    scores = {"a": [3, 5], "b": [4, 6], "c": [4, None], "d": [None, None]}
    undecided = (("b", "c"), ("c", "d"), ("d", "d"))
    rows = {("s", name): {"users": {"rounds to 95": values}} for name, values in scores.items()}
    claim = run_list.Claim("first", [], ["s"], score="rounds to 95")
    words = {"in order": (("a", "b"), ("b", "d")), "not reproduced": (("b", "a"), ("d", "a")), "undecided": undecided}
    for wanted, pairs in words.items():
        for first, second in pairs:
            assert results._claim(claim._replace(systems=[first, second]), "s", rows)[1] == wanted
    assert "d never" in results._claim(claim._replace(systems=["a", "d"]), "s", rows)[0]


def test_a_run_with_user_accuracy_has_its_table(tmp_path):
    content = tree(systems={"fedavg": {"method": "fedavg", "options": {"lr": 0.1}}}, rounds=2, user_accuracy="train")
    path = tmp_path / "digits.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    listed = run_list.Run(name="digits", title="Digits", study=str(path), hours=0.1, cost="this test", targets=[1.0])
    run.run(load(path), tmp_path / "digits", watcher=Silent())
    found = extracts.extract(listed, tmp_path / "digits")
    (row,) = found["rows"]
    assert row["users"]["rounds to 1"] == [1, 1]
    content = json.loads((tmp_path / "digits/results/pairs/fedavg.final.json").read_text())
    last = [trial["rows"][-1]["train"]["user_accuracy"][-1] for trial in content["trials"].values()]
    np.testing.assert_allclose(row["users"]["user_accuracy"], 100 * np.array(last), atol=1e-3)
    assert "### User accuracy" in results.page([listed], {"digits": found})


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="must hold the lines <!-- generated: begin -->"):
        results.with_generated("nothing", "text")


def invoke(*arguments):
    return testing.CliRunner().invoke(reproduce.app, [str(argument) for argument in arguments])


def test_mistakes_are_met_with_one_line(tmp_path):
    found = invoke("--only", "nothing", "--list")
    assert found.exit_code == 1 and "error: run='nothing' is unknown; allowed are fedmeta_per" in found.output
    found = invoke("--write-docs", tmp_path)
    assert found.exit_code == 1 and "holds no results of fedmeta_per" in found.output.replace("\n", " ")


def test_a_run_is_stopped_when_the_time_is_over_and_the_next_is_not_begun(folder, tmp_path, monkeypatch):
    listed, _ = folder
    begun = []
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(
        running.subprocess, "Popen", lambda command, kind=running.subprocess.Popen: begun.append(command) or kind(sleeper)
    )
    began = time.monotonic()
    assert running.run_all([listed, replace(listed, name="later")], tmp_path, "data", 1 / 3600) == 0
    assert time.monotonic() - began < 30
    (command,) = begun
    assert command[1:] == ["-m", "fedjax_meta", "run", listed.study, "--out", str(tmp_path / "digits"), "--data-dir", "data"]


HEARS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saves itself", flush=True), sys.exit(143)))
print("begins", flush=True)
time.sleep(60)
"""


def test_a_scheduler_s_sigterm_reaches_the_run():
    """It is sent to the process of the list alone, as `kill` does."""
    program = "; ".join(
        [
            "import sys",
            "from experiments.reproduce import running",
            "from fedjax_meta.process import one_line_errors",
            "running.BY_ITSELF = 0.2",
            "exec('with one_line_errors(False): running._call(sys.argv[1:], None)')",
        ]
    )
    command = [sys.executable, "-c", program, sys.executable, "-c", HEARS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout.readline() == "begins\n"
        process.terminate()
        assert process.communicate(timeout=50)[0] == "saves itself\n"


def test_a_failure_ends_the_list(folder, tmp_path, monkeypatch):
    listed, _ = folder
    monkeypatch.setattr(running, "_call", lambda command, until: 3)
    assert running.run_all([listed, replace(listed, name="later")], tmp_path, None, None) == 3


def test_what_is_done_is_not_run_again(folder, monkeypatch):
    listed, root = folder
    monkeypatch.setattr(running, "_call", lambda command, until: pytest.fail("nothing is to be run"))
    assert running.run_all([listed], root, None, None) == 0


@pytest.mark.parametrize("name", ["fedmeta_per_published_cohorts", "fedmeta_per_cifar10_published_cohorts"])
def test_the_published_cohorts_are_in_the_study(name):
    study = load(name)
    assert study.federation["schedule"]["cohorts"] == published_cohorts.cohorts(study.rounds)


def test_the_published_samples_are_dealt_in_two_passes_and_divided_as_the_logs_say():
    """Client u holds classes u and u + 1 (mod 10): the next ten samples of each and, when all have ten, more of the others."""
    labels = np.random.default_rng(2).permutation(np.repeat(np.arange(10), 6000))
    held, views = published_samples.drawn(labels), published_samples.drawn(labels).views()
    sizes = held.train_sizes + held.test_sizes
    np.testing.assert_array_equal(sizes, slots.lognormal_classes(labels, slots.class_slots(50, 10, stride=1), seed=1).sizes)
    np.testing.assert_array_equal(held.train_sizes, (0.75 * sizes).astype(int))
    # Query samples by the authors' logs: `python -m experiments.published_cohorts fl-ml --dataset cifar`.
    assert (views["query"][1] - views["query"][0])[:8].tolist() == [833, 499, 562, 895, 554, 553, 560, 512]
    assert len(set(held.order.tolist())) == len(held.order)
    place = np.empty(60_000, int)
    for label in range(10):
        place[labels == label] = np.arange(6000)
    ends, more = np.cumsum(sizes), np.full(10, 100)
    turns = np.zeros(10, int)
    for user, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        mine = held.order[end - size : end]
        train = mine[: held.train_sizes[user]]
        assert set(labels[mine].tolist()) == {user % 10, (user + 1) % 10}
        for label in (user % 10, (user + 1) % 10):
            of_label = mine[labels[mine] == label]
            ten = np.arange(10 * turns[label], 10 * turns[label] + 10)
            others = np.arange(more[label], more[label] + len(of_label) - 10)
            assert sorted(place[of_label].tolist()) == [*ten, *others]
            assert abs(np.sum(labels[train] == label) - 0.75 * len(of_label)) < 1  # stratified
            turns[label] += 1
            more[label] += len(others)


def test_a_file_of_samples_in_another_order_is_refused(monkeypatch, tmp_path):
    """Builders shuffle when they write. Their ids give the order back; without ids it is lost."""
    tfds = pytest.importorskip("tensorflow_datasets")
    labels = np.array([*published_samples.BEGIN, 0, 1])
    images = np.arange(12, dtype=np.uint8).reshape(12, 1, 1, 1)
    mixed = np.random.default_rng(0).permutation(12)

    def records(name, split, **_):
        named = [{"image": images[i], "label": labels[i], "id": b"%s_%05d" % (split.encode(), i)} for i in mixed]
        return named if with_ids else [{**one, "id": None} for one in named]

    monkeypatch.setattr(tfds, "data_source", records)
    with_ids = True
    x, y = published_samples.in_order_of_files(tmp_path)
    np.testing.assert_array_equal(x, np.concatenate([images, images]))
    np.testing.assert_array_equal(y, np.concatenate([labels, labels]))
    with_ids = False
    with pytest.raises(ValueError, match="not in the order of its files, and have no ids"):
        published_samples.in_order_of_files(tmp_path)


def test_cohorts_and_sizes_are_found_from_training_accuracies():
    """Accuracies of eight runs with the same cohorts, in float32, give back each client's samples; other cohorts do not."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(80, 2500, published_cohorts.CLIENTS)
    member = published_cohorts.membership(published_cohorts.cohorts(300))
    totals = (member @ sizes).astype(int)
    accuracies = np.float32(rng.integers(1, totals, (8, 300)) / totals).astype(float)
    sums, agree = published_cohorts.denominators(accuracies)
    said = published_cohorts.compare(sums, agree, published_cohorts.query_sizes(sums, published_cohorts.cohorts(300)))
    assert "denominator is the sum of the cohort's sizes: 300 of 300" in said[1]
    assert said[3].endswith(", ".join(map(str, sizes)))
    others = rng.permuted(np.tile(np.arange(50), (300, 1)), axis=1)[:, :5].tolist()
    found = published_cohorts.query_sizes(sums, others)
    assert np.abs(published_cohorts.membership(others) @ found - sums).mean() > 100


def test_courses_are_compared_by_their_changes():
    rng = np.random.default_rng(3)
    changes = rng.normal(size=300)
    course, trend = np.cumsum(changes), np.linspace(5, 0, 301)[1:]
    assert published_cohorts.together(course, 2 * course + trend) == pytest.approx(1)
    other = np.concatenate([changes[:150], rng.normal(size=150)])
    assert abs(published_cohorts.together(course, np.cumsum(other))) < 0.3


def test_the_figure_of_centralised_training_is_read(monkeypatch):
    rng = np.random.default_rng(4)
    curves = [np.float32(np.sort(rng.integers(1, size, 300)) / size).astype(float).tolist() for size in (52_512, 17_488)]
    drawn = (
        "Plotly.newPlot(old)"
        + "Plotly.newPlot("
        + "".join(json.dumps({"x": [0], "y": curve}).replace(": ", ":") for curve in curves)
    )
    monkeypatch.setattr(published_cohorts, "_git", lambda clone, *words: drawn)
    said = published_cohorts.central(Path("clone"))
    assert said[0].startswith("centralised training: 300 passes") and "52512 training and 17488 test samples" in said[0]
    assert f"300 passes: {100 * curves[1][-1]:.2f}" in said[1]


def test_losses_of_a_run_stand_beside_the_logs_in_both_ways(folder, tmp_path, monkeypatch):
    _, root = folder
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for place, name in published_cohorts.TESTED.values():
        path = tmp_path / f"experiments/non-iid/cifar/{place}/json/[Test][cifar, {name}]: Epochs: 1.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"loss": [2.5, 0.125], "acc": [0.1, 0.9]}))
        path.with_name(path.name.replace("[Test]", "[Train]")).write_text(json.dumps({"loss": [3.0, 2.0]}))
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "logs"]):
        subprocess.run([*git, *words], check=True)
    ((system, logged, by_samples, over_clients, seeds),) = published_cohorts.test_losses(
        published_cohorts.Logs(tmp_path, "cifar"), root / "digits"
    )
    assert (system, logged, seeds) == ("fedavg", "0.125", "2")
    content = json.loads((root / "digits/results/pairs/fedavg.final.json").read_text())
    samples = np.load(root / "digits/results/pairs/fedavg.clients.npz")["known_samples"]
    losses = [trial["rows"][-1]["tests"]["known"]["loss"] for trial in content["trials"].values()]
    means = [sum(n * value for n, value in zip(samples, one, strict=True)) / sum(samples) for one in losses]
    assert by_samples == f"{sum(means) / 2:.3f} ±{abs(means[0] - means[1]) / math.sqrt(2):.3f}"
    assert over_clients.startswith(f"{sum(map(sum, losses)) / 2 / len(samples):.3f} ±")
    monkeypatch.setattr(published_cohorts, "together", lambda one, other: len(one) / len(other))  # two rounds have one change
    ((system, logged, by_seed, shares),) = published_cohorts.training_losses(
        published_cohorts.Logs(tmp_path, "cifar"), root / "digits"
    )
    assert shares == "1.00, 1.00"
    curves = [[loss for row in trial["rows"] for loss in row["train"]["loss"]] for trial in content["trials"].values()]
    assert (system, logged, by_seed) == ("fedavg", "2.500", ", ".join(f"{sum(curve) / 2:.3f}" for curve in curves))
    with pytest.raises(ValueError, match="has 0 logs of FedAvg on cifar in meta_old"):
        subprocess.run([*git, "rm", "-qr", "."], check=True)
        subprocess.run([*git, "commit", "-qm", "none", "--allow-empty"], check=True)
        published_cohorts.test_losses(published_cohorts.Logs(tmp_path, "cifar"), root / "digits")


@pytest.mark.parametrize("period", [5, 10])
def test_the_period_of_the_classes_shows_in_the_losses(period):
    rng = np.random.default_rng(2)
    drawn = published_cohorts.cohorts(300)
    hard = rng.normal(size=period)
    loss = np.exp(
        -np.arange(300) / 100 + [np.mean([hard[u % period] for u in ids]) for ids in drawn] + 0.1 * rng.normal(size=300)
    )
    five, ten = (published_cohorts.explained(loss, drawn, np.ones(50), found) for found in (5, 10))
    assert ten > 0.85 and (five > 0.85) == (period == 5)
