"""Processes that share a run: each takes systems that no other one has; numbers are those of one process alone."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures

import pytest

from fedjax_meta import disk
from fedjax_meta.study import folder as folders
from fedjax_meta.study import result_files, run
from tests.study.common import TREE, Silent, study

TIMES = ("seconds", "compile_seconds")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return folder, run.run(study(), folder, watcher=Silent())


def trained(folder):
    """Everything that was found, but for how long it took."""
    found = {}
    for path in (folder / "results").glob("*/*.json"):
        trials, _ = result_files.read_trials(path)
        rows = {label: [{k: v for k, v in row.items() if k not in TIMES} for row in one.rows] for label, one in trials.items()}
        found[path.name] = rows
    return json.dumps(found, sort_keys=True)


def lines(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in found]


def take_part(folder, watcher=None, **changes):
    """Shares in a run; the outcomes, or `None` where another process reported them."""
    with run.shared(study(**changes), folder, watcher=watcher or Silent()) as outcomes:
        return outcomes


def test_what_others_have_is_waited_for_and_the_rest_is_trained(alone, tmp_path):
    place, whole = alone
    with disk.held(folders.part(tmp_path, "pairs", "fedavg")) as mine:
        assert mine
        watcher = Silent()
        with (
            pytest.raises(run.Stopped, match="waiting for 1 of 2 systems, which other processes train"),
            run.shared(study(), tmp_path, watcher=watcher, should_stop=lambda: bool(watcher.waited)),
        ):
            pass
    assert watcher.waited == [("pairs", "fedavg")] and [one.system for one in watcher.ended] == ["local"]
    assert not (tmp_path / "results" / "pairs" / "fedavg.final.json").exists()
    # The one that had it died, and this process goes on.
    watcher = Silent()
    outcomes = take_part(tmp_path, watcher)
    assert watcher.waited == [] and [one.system for one in watcher.ended] == ["fedavg", "local"]
    assert trained(tmp_path) == trained(place) and lines(tmp_path) == lines(place)
    assert [one.chosen for one in outcomes] == [one.chosen for one in whole]
    assert folders.read_run(tmp_path)["finished"] and (tmp_path / "presets" / "pairs.yaml").is_file()
    # Alone, the same study finds everything done.
    watcher = Silent()
    run.run(study(), tmp_path, watcher=watcher)
    assert watcher.records == 0


SMALL = {"systems": {"local": {"method": "local_only", "options": {"lr": 0.1}}}, "rounds": 1, "seeds": [1]}


def test_processes_that_begin_or_go_on_together_all_end_and_one_reports(tmp_path):
    """Locks are of open files, so that threads stand for processes."""
    together = threading.Barrier(3)

    def one_of_three(changes):
        together.wait()
        return take_part(tmp_path, **changes)

    for changes in (SMALL, {**SMALL, "rounds": 2}):
        with futures.ThreadPoolExecutor(3) as threads:
            found = list(threads.map(one_of_three, [changes] * 3))
        assert sorted(one is not None for one in found) == [False, False, True]
        assert folders.read_run(tmp_path)["finished"] and not disk.locked(tmp_path)
    (outcome,) = next(one for one in found if one)
    assert outcome.final[0].rows[-1]["round"] == 2


@pytest.mark.parametrize("fails", [True, False])
def test_who_comes_while_a_report_is_written_waits_for_it(tmp_path, fails):
    """Where it fails, nothing is finished, and the other one reports."""
    waits = threading.Event()

    def late():
        with pytest.raises(run.Stopped, match="waiting for another process, which opens the run or reports it"):
            run.shared(study(**SMALL), tmp_path, watcher=Silent(), should_stop=lambda: True).__enter__()
        with run.shared(study(**SMALL), tmp_path, watcher=Silent(), should_stop=waits.set) as outcomes:
            return outcomes

    with (
        futures.ThreadPoolExecutor(1) as threads,
        contextlib.suppress(ZeroDivisionError),
        run.shared(study(**SMALL), tmp_path, watcher=Silent()) as outcomes,
    ):
        assert outcomes is not None and folders.read_run(tmp_path)["finished"] is None
        second = threads.submit(late)
        assert waits.wait(60) and second.running() and folders.read_run(tmp_path)["finished"] is None
        if fails:
            raise ZeroDivisionError
    assert (second.result() is not None) == fails
    assert folders.read_run(tmp_path)["finished"]


def test_a_run_that_began_and_ended_while_a_process_prepared_itself_is_not_reported_twice(tmp_path, monkeypatch):
    """Short runs of warm programs take less than another process needs to look at its study."""
    check, first = run._check_start, []

    def slow(study, built):
        check(study, built)
        if not first:
            first.append(study)
            assert take_part(tmp_path, **SMALL) is not None

    monkeypatch.setattr(run, "_check_start", slow)
    assert take_part(tmp_path, **SMALL) is None
    assert take_part(tmp_path, **SMALL) is not None, "who begins after the end reports once more"


def test_those_who_share_run_the_same_study(tmp_path):
    built = run.build(study())
    with run.shared(study(**SMALL), tmp_path, watcher=Silent()):
        before = folders.read_run(tmp_path)
        for changes, words in (
            ({"rounds": 5}, "rounds was 1 and is 5 now"),
            ({"federation": {"cohort_size": 3}}, "federation.cohort_size was 4 and is 3 now"),
            ({"seeds": [1, 2]}, r"seeds was \[1\] and is \[1, 2\] now"),
            ({"systems": TREE["systems"]}, "systems.fedavg.method was not set and is 'fedavg' now"),
            ({"eval_every": 1}, "eval_every was 2 and is 1 now"),
        ):
            with pytest.raises(ValueError, match=f"all that share it must say the same: .*{words}"):
                folders.join_run(study(**{**SMALL, **changes}), tmp_path, built)
        folders.join_run(study(**SMALL, devices=1), tmp_path, built)
        assert folders.read_run(tmp_path) == before


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
    assert sorted("another process wrote" in one for one in said[1:]) == [False, True]
    assert trained(tmp_path / "shared") == trained(tmp_path / "alone")
    assert lines(tmp_path / "shared") == lines(tmp_path / "alone")
