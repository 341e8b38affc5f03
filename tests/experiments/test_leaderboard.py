"""The leaderboard: equal grids for all, raw results as they are in run folders, the page, rows that code has changed since."""

import importlib.util
import json
import math
import sys
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import yaml

from fedjax_meta import metrics
from fedjax_meta.methods import METHODS
from fedjax_meta.study import load, made, run
from fedjax_meta.study.parts import part
from fedjax_meta.study.run import points_of
from fedjax_meta.study.system import keywords
from tests.study.common import Silent, tree

pytest.importorskip("typer", reason="the command line needs typer")
board = pytest.importorskip("experiments._board", reason="the list needs the experiments' packages")
newcomers = pytest.importorskip("experiments._board_new")
pages = pytest.importorskip("experiments._board_page")
standing = pytest.importorskip("experiments._standing")

LISTED = standing.read_list(board.LIST)


# The study.


@pytest.mark.parametrize("listed", LISTED, ids=lambda listed: listed.name)
def test_every_system_has_a_grid_of_the_same_size(listed):
    study = listed.load()
    assert {len(points_of(system)) for system in study.systems.values()} == {6}
    assert len(study.seeds) == 3 and not set(study.seeds) & set(study.tuning.seeds)
    assert study.tuning.rounds in (None, study.rounds) and study.tuning.eval_every >= study.rounds > study.eval_every
    assert study.tuning.validation == "both"
    assert {"local_only", "centralised", "fedavg", "fedavg_ft"} <= set(study.systems) or listed.name.endswith("_others")


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

OPTIMISER_OF_ITS_OWN = {"fedprox", "scaffold", "pfedme", "fednova", "gpfl", "mocha", "pfedhn", "pfedhn_pc"}
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
        "local_only": {"method": "local_only", "options": {"epochs": 1, "batch_size": 20}, "grid": {"lr": [0.02, 0.2, 0.5]}},
        "fedavg_ft": {"method": "fedavg_ft", "options": {"epochs": 1, "batch_size": 20}, "grid": {"lr": [0.02, 0.2, 0.5]}},
    }
    path = root / "digits.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    listed = standing.Run(name="digits", title="Digits", study=str(path), hours=0.1, cost="this test")
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


def test_lines_say_by_which_code_they_were_made(lines):
    for line in lines:
        if line.method:
            now = made.digests(line.method)
            assert (line.made, line.runner) == (now["method"], now["runner"])
            assert line.commit and "jax=" in line.versions
            assert line.command.endswith(f"--systems {line.system} --out runs/digits-{line.system}")


def test_rows_of_this_code_and_study_have_not_changed(folder, lines):
    listed, _ = folder
    assert pages.changed_rows([listed], {"pairs": lines}) == []


@pytest.mark.parametrize("change", ["systems.fedavg_ft.options.epochs=2", "systems.fedavg_ft.grid.lr=[0.1, 0.2, 0.3]"])
def test_rows_of_another_study_are_named(folder, lines, change):
    """A system that the study now describes otherwise, and no other."""
    listed, _ = folder
    other = replace(listed, settings=[change])
    (told,) = pages.changed_rows([other], {"pairs": lines})
    assert told.startswith("pairs, fedavg_ft: the study changed since")
    assert len(pages.changed_rows([replace(listed, settings=["rounds=3"])], {"pairs": lines})) == 2
    assert pages.changed_rows([replace(listed, settings=["systems.fedavg_ft.title=x"])], {"pairs": lines}) == []


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
    assert "## Not run yet" not in text


def test_what_was_not_run_is_listed(folder, lines):
    listed, _ = folder
    other = replace(listed, name="other", settings=["scenarios.pairs.clients=12"])
    text = pages.page([listed, other], {"pairs": of(lines, "local_only")})
    waiting = text.partition("## Not run yet")[2]
    assert "fedavg\\_ft" in waiting and "local\\_only" not in waiting
    assert "| all |" in pages.page([listed], {}).partition("## Not run yet")[2]


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


def test_the_committed_page_is_what_the_raw_results_give():
    """`python -m experiments.leaderboard --write-docs` writes it; nobody types its numbers."""
    text = pages.PAGE.read_text(encoding="utf-8")
    assert text == standing.with_generated(text, pages.page(LISTED, board.read_lines(), pages.read_tested()))


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


def test_as_many_epochs_as_in_the_run_change_nothing(lines, tested):
    (same,) = [one for one in tested if one[:2] == ("fedavg_ft", 1) and one.option and one.steps == 5]
    assert same.option == "finetune_epochs"
    assert same.score == pytest.approx(of(lines, "fedavg_ft")[0].new, abs=1e-3)


def test_fewer_samples_are_the_first_ones(folder):
    listed, _ = folder
    new = next(iter(listed.load().scenarios.values())).build().new
    few = newcomers.fewer(new, 2)
    assert np.asarray(few.sizes("support")).max() == 2
    np.testing.assert_array_equal(few.start["support"], new.start["support"])
    np.testing.assert_array_equal(few.sizes("query"), new.sizes("query"))
    assert newcomers.fewer(new, 0) is new


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
    changed = [line._replace(made="0" * 16) if line.system == "fedavg_ft" else line for line in lines]
    (said,) = pages.changed_rows([listed], {"pairs": changed})
    assert said.startswith("pairs, fedavg_ft: the method's files changed since")
    (said, _) = pages.changed_rows([listed], {"pairs": [line._replace(runner="0" * 16) for line in lines]})
    assert "the runner changed since" in said
    text = pages.page([listed], {"pairs": lines}, changed=[("pairs", "fedavg_ft")])
    assert "fedavg\\_ft †" in text and "local\\_only †" not in text


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A package of three files in place of this one, whose digests are asked."""
    root = tmp_path / "fedjax_meta"
    for name, text in {
        "one.py": '"""One."""\nfrom fedjax_meta import two\n\n# what it says\nVALUE = 1\n',
        "two.py": '"""Two."""\nimport os\n',
        "three.py": '"""Three."""\n',
    }.items():
        root.mkdir(exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(made, "ROOT", root)

    def digest():
        for cached in (made._tree, made._imports, made._said):
            cached.cache_clear()
        return made._digest(made.imported([root / "one.py"]))

    return root, digest


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
def test_what_changes_a_digest(copied, name, before, after, same):
    root, digest = copied
    first = digest()
    text = (root / name).read_text()
    assert before in text
    (root / name).write_text(text.replace(before, after))
    assert (digest() == first) is same


def test_a_method_depends_on_its_own_file_alone():
    files = {path.name for path in made.imported(made._files(METHODS["fedrep"]))}
    assert "fedrep.py" in files and "local.py" in files
    assert not files & {"fedpac.py", "pfedme.py", "run.py"}
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
    assert {path.name for path in made.imported(made._files(partial(module.mine, lr=0.2)))} > {"mine.py", "fedavg.py"}
    monkeypatch.setitem(METHODS, "mine_of_a_test", module.mine)
    first = made.digests("mine_of_a_test")
    assert first["method"] != made.digests("fedavg")["method"]
    module.mine.__module__ = "no_such_module"
    assert made._files(module.mine) == []


# One cell again.


@pytest.mark.long
def test_a_committed_cell_comes_out_again(tmp_path):
    """The command of a row gives its numbers, here up to rounding."""
    lines = board.read_lines()
    if not lines.get("mnist_small"):
        pytest.skip("nothing was run yet")
    wanted = of(lines["mnist_small"], "local_only")[0]
    listed = next(one for one in LISTED if one.name == wanted.run)
    name, value = wanted.chosen.split("=")
    changes = [f"seeds=[{wanted.seed}]", f"systems.local_only.grid={{{name}: [{value}]}}"]
    run.run(load(listed.study, changes, systems=["local_only"]), tmp_path / "cell", watcher=Silent())
    content = json.loads((tmp_path / "cell/results/mnist_small/local_only.final.json").read_text())
    (trial,) = content["trials"].values()
    tests = trial["rows"][-1]["tests"]
    assert 100 * np.mean(tests["known"]["accuracy"]) == pytest.approx(wanted.known, abs=0.2)
    assert 100 * np.mean(tests["new"]["accuracy"]) == pytest.approx(wanted.new, abs=0.3)
    assert content["config"]["data"] == wanted.data
