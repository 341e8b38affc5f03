"""Runs are compared seed by seed."""

import numpy as np
import pytest
from typer.testing import CliRunner

from fedjax_meta.cli import app
from fedjax_meta.study import compare, run
from fedjax_meta.study.run import Trial
from tests.study.common import TREE, Silent, study


def trial(seed, accuracy):
    known = {"accuracy": list(accuracy), "scores": {"accuracy_mean": np.mean(accuracy)}}
    return Trial({}, seed, [{"round": 5, "tests": {"known": known}}], None)


def system(title, accuracy):
    """A finished system from accuracies `[seeds, clients]`."""
    return compare.Finished(title, "pairs", "abc", [trial(seed, row) for seed, row in enumerate(accuracy)])


def test_a_difference_is_taken_on_the_same_seeds_and_clients():
    first = system("a", [[0.5, 0.7], [0.6, 0.8], [0.1, 0.1]])
    second = system("b", [[0.6, 0.7], [0.8, 0.8]])
    found = compare.difference(second, first, "known")
    # By seed +5 and +10 points; Student's t with one degree of freedom is 12.706.
    assert found.mean == pytest.approx(7.5) and found.seeds == 2 and found.better == 50
    assert found.margin == pytest.approx(12.706 * np.std([5, 10], ddof=1) / np.sqrt(2))
    assert "*" not in found.words
    assert compare.difference(system("c", []), first, "known") is None
    assert compare.difference(first, first, "known").words == "+0.00 ±0.00"


def test_runs_of_two_folders_are_one_table(tmp_path):
    one = {"local": TREE["systems"]["local"]}
    for name, rounds in (("short", 1), ("long", 3)):
        run.run(study(systems=one, rounds=rounds), tmp_path / name, watcher=Silent())
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "short"), str(tmp_path / "long"), "--target", "50"])
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert "Local only (short)" in text and "Local only (long)" in text and "to 50 %" in text and "…" not in text


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_without_results_gets_one_line(tmp_path, made):
    if made:
        with pytest.raises(KeyboardInterrupt):
            run.run(study(), tmp_path, watcher=Silent(stop_at=1))
    result = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert result.exit_code == 1 and ("no finished results" if made else "holds no run") in " ".join(result.stderr.split())
