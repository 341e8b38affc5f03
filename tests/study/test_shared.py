"""Processes that share a run: each takes systems that no other one has; numbers are those of one process alone."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fedjax_meta import disk
from fedjax_meta.study import folder as folders
from fedjax_meta.study import run
from tests.study.common import Silent, study

TIMES = ("seconds", "compile_seconds")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, run.run(study(), folder, watcher=Silent())


def trained(folder):
    """Everything that was found, but for how long it took."""
    found = {}
    for path in (folder / "results").glob("*/*.json"):
        trials, _ = folders.read_trials(path)
        rows = {label: [{k: v for k, v in row.items() if k not in TIMES} for row in one.rows] for label, one in trials.items()}
        found[path.name] = rows
    return json.dumps(found, sort_keys=True)


def lines(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in found]


def test_what_others_have_is_waited_for_and_the_rest_is_trained(alone, tmp_path):
    place, whole = alone
    with disk.held(folders.part(tmp_path, "pairs", "fedavg")) as mine:
        assert mine
        watcher = Silent()
        with pytest.raises(run.Stopped, match="waiting for 1 systems that other processes train"):
            run.run_shared(study(), tmp_path, watcher=watcher, should_stop=lambda: bool(watcher.waited))
    assert watcher.waited == [("pairs", "fedavg")] and [one.system for one in watcher.ended] == ["local"]
    assert not (tmp_path / "results" / "pairs" / "fedavg.final.json").exists()
    # The one that had it died, and this process goes on.
    watcher = Silent()
    outcomes = run.run_shared(study(), tmp_path, watcher=watcher)
    assert watcher.waited == [] and [one.system for one in watcher.ended] == ["fedavg", "local"]
    assert trained(tmp_path) == trained(place) and lines(tmp_path) == lines(place)
    assert [one.chosen for one in outcomes] == [one.chosen for one in whole]
    assert folders.read_run(tmp_path)["finished"] and (tmp_path / "presets" / "pairs.yaml").is_file()
    with disk.held(tmp_path / folders.PARTS) as free:
        assert not free  # until this process ends
    # Alone, the same study finds everything done.
    watcher = Silent()
    run.run(study(), tmp_path, watcher=watcher)
    assert watcher.records == 0


def test_one_process_alone_reports(tmp_path):
    chosen = study(systems={"local": {"method": "local_only", "options": {"lr": 0.1}}}, rounds=1, seeds=[1])
    with disk.held(tmp_path / folders.PARTS) as mine:
        assert mine and run.run_shared(chosen, tmp_path, watcher=Silent()) is None
    assert folders.read_run(tmp_path)["finished"] is None


def test_those_who_share_run_the_same_study(tmp_path):
    folders.open_run(study(), tmp_path, study_clients := run.build(study()), "", shared=True)
    for changed, words in (
        ({"rounds": 5}, r"rounds \(other processes are at work\) was 4 and is 5 now"),
        ({"federation": {"cohort_size": 3}}, "cohort_size was 4 and is 3 now"),
    ):
        with pytest.raises(ValueError, match=words):
            run.run_shared(study(**changed), tmp_path, watcher=Silent(), clients=study_clients)


@pytest.mark.long
def test_three_processes_of_which_one_is_killed_find_what_one_finds_alone(tmp_path):
    systems = "fedavg(lr=[0.03,0.1]), fedper(lr=0.1), local_only(lr=0.1), fedprox(lr=0.1), ditto(lr=0.1)"
    command = [sys.executable, "-m", "fedjax_meta", "run", "--systems", systems, "--dataset", "digits", "--clients", "10"]
    command += ["--rounds", "30", "--seeds", "1,2", "--set", "eval_every=3"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([*command, "--out", str(tmp_path / "alone")], check=True, env=environment, capture_output=True)
    shared = [*command, "--out", str(tmp_path / "shared"), "--shared"]
    started = [subprocess.Popen(shared, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    while not list((tmp_path / "shared" / "state").glob("*/*/*.ckpt")):
        time.sleep(0.05)
        assert all(one.poll() is None for one in started)
    started[0].send_signal(signal.SIGKILL)
    said = [one.communicate()[0] for one in started]
    assert [one.returncode for one in started] == [-signal.SIGKILL, 0, 0]
    assert sorted("report.html; metrics" in one for one in said[1:]) == [False, True]
    assert sorted("another process writes" in one for one in said[1:]) == [False, True]
    assert trained(tmp_path / "shared") == trained(tmp_path / "alone")
    assert lines(tmp_path / "shared") == lines(tmp_path / "alone")
