"""The papers' studies: their numbers, their systems, and runs from start to end with little data."""

import re

import numpy as np
import pytest

from fedjax_meta import report
from fedjax_meta.study import files, load

typer_testing = pytest.importorskip("typer.testing", reason="the command line needs typer")
round_costs = pytest.importorskip("experiments.round_costs", reason="the command line needs typer, rich and matplotlib")
fedmeta_per = pytest.importorskip("experiments.fedmeta_per")
imaml = pytest.importorskip("experiments.imaml")
quickstart = pytest.importorskip("experiments.quickstart")

PAPERS = ["fedmeta_per", "fedmeta_per_cifar10", "imaml", "imaml_cifar10"]


def scores_of(name):
    """{(system, clients): {score: value}} of a study's published numbers."""
    found = {}
    for row in load(name).published:
        found.setdefault((row.system, row.clients), {})[row.score] = row.value
    return found


@pytest.mark.parametrize("name", PAPERS)
def test_published_numbers_are_percentages_in_a_sensible_order(name):
    """Finds typing errors: means must be near accuracies, F1 at most a little above, and no spread wider than it can be."""
    rows = scores_of(name)
    assert len(rows) > 15
    for scores in rows.values():
        mean = scores.get("accuracy_mean", scores.get("accuracy"))
        assert 0 < mean < 100
        assert abs(mean - scores.get("accuracy", mean)) < 3.5
        assert scores.get("f1_mean", 0) < mean + 0.5
        assert scores.get("accuracy_std", 0) <= np.sqrt(mean * (100 - mean))


def test_the_rates_of_fedmeta_per_are_those_of_the_logs():
    """By system, for MNIST and CIFAR-10: (inner or only rate, outer rate)."""
    rates = {
        "fedavg": ((1e-5,), (1e-4,)),
        "fedper_averaged": ((5e-6,), (1e-4,)),
        "fedmeta": ((0.001, 0.001), (0.01, 0.001)),
        "fedmeta_metasgd": ((0.001, 2e-4), (0.001, 0.001)),
        "fedmeta_per": ((0.001, 0.001), (0.001, 0.003)),
        "fedmeta_per_new": ((0.001, 3e-4), (0.01, 7e-4)),
        "fedmeta_per_metasgd": ((0.001, 5e-4), (0.01, 0.01)),
        "fedmeta_per_metasgd_new": ((0.001, 2e-4), (0.01, 0.001)),
    }
    mnist, cifar = load("fedmeta_per"), load("fedmeta_per_cifar10")
    assert (mnist.rounds, cifar.rounds) == (300, 600)
    for name, wanted in rates.items():
        for study, values in zip((mnist, cifar), wanted, strict=True):
            options = study.systems[name].options
            assert tuple(options[key] for key in ("lr", "inner_lr", "outer_lr") if key in options) == values
    tested = {(row.system, row.clients) for row in mnist.published}
    assert ("fedmeta_per", "new") not in tested and ("fedmeta_per_new", "new") in tested


def test_every_logged_row_of_imaml_is_a_system_with_a_cost():
    rows = {row.system for row in load("imaml").published}
    assert rows == {name for name in load("imaml").systems if name.startswith("logged_")}
    assert len(rows) == 16
    for (dataset, name), (gibibytes, seconds) in round_costs.LOGGED.items():
        assert dataset in ("mnist", "cifar10") and f"logged_{name}" in rows
        assert 1 < gibibytes < 3 and 0.2 < seconds < 5
    assert round_costs.LOGGED["mnist", "maml-15"] == (1.806, 2.22)
    assert round_costs.LOGGED["cifar10", "imaml-5-10"] == (1.667, 2.79)


def invoke(app, *words):
    return typer_testing.CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200", "TERM": "dumb"})


def test_fedmeta_per_from_start_to_end(tmp_path):
    """One system, two orders of new clients; the folder has the published numbers' place, and the same command goes on."""
    words = ["--quick", "--systems", "fedper,fedavg_iid", "--rounds", 1, "--out", tmp_path / "run"]
    words += ["--set", "scenarios.pairs.options.orders=2"]
    done = invoke(fedmeta_per.app, *words)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "FedPer, own heads" in said and re.search(r"new ±\d+\.\d\d over 2 orders", said)
    assert "Rows marked (ours)" not in (tmp_path / "run" / "report.md").read_text()
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert invoke(fedmeta_per.app, *words).exit_code == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_row_as_logged_adapts_an_untrained_network(tmp_path):
    """Its model does not move from round to round, so that the same clients score the same, up to the order of batches."""
    words = ["--quick", "--systems", "logged_maml-1", "--rounds", 2, "--set", "eval_every=1", "--out", tmp_path / "run"]
    done = invoke(imaml.app, *words)
    assert done.exit_code == 0, done.output

    frame = report.load(tmp_path / "run")
    losses = frame[frame["clients"] == "new"].sort_values("round")
    assert len(losses) == 2 and losses["accuracy_mean"].iloc[0] == pytest.approx(losses["accuracy_mean"].iloc[1], abs=0.03)


def test_the_quick_start_tunes_all_systems_with_the_same_number_of_trials():
    study = load("quickstart")
    sizes = {name: np.prod([len(values) for values in system.grid.values()]) for name, system in study.systems.items()}
    assert set(sizes.values()) == {9} and len(sizes) == 7
    assert "quickstart" in files.packaged()
    done = invoke(quickstart.app, "--quick", "--dry-run", "--systems", "fedavg,fedmeta_per_metasgd")
    assert done.exit_code == 0 and "FedMeta-Per(Meta-SGD)" in done.output


def test_round_costs_prints_time_memory_and_what_was_logged(tmp_path):
    words = [
        "imaml",
        "--variant",
        "quick",
        "--systems",
        "logged_imaml-5-1,fomaml-1",
        "--repeats",
        1,
        "--out",
        tmp_path / "costs.md",
    ]
    done = invoke(round_costs.app, *words)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "costs.md").read_text()
    assert re.search(r"\| pairs \| FOMAML, E = 1 \| \d+ \| \d+\.\d \|", text) and "logged" not in text.split("\n")[2]
    bad = invoke(round_costs.app, "imaml", "--systems", "imamll")
    assert bad.exit_code == 1 and "system='imamll' is unknown" in bad.stderr
