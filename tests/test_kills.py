"""Real processes that are killed and stopped at any moment, and go on: the run that results is the run that was left alone.

The long tests kill FEDJAX_META_KILLS processes (50 when not set) and stop FEDJAX_META_STOPS (20) by signals.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedjax_meta import checkpoint
from tests.runs import PLANS

ROOT = Path(__file__).parents[1]
CALLS = 16
"""About the number of calls of a save that touch the disk."""


def start(folder, devices, *words):
    command = [sys.executable, "-m", "tests.runs", str(folder), "--devices", str(devices), *words]
    # Shells' background jobs ignore Ctrl-C, and so would what they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)


def finish(folder, devices, *words):
    """Runs to the end: (seconds of training, everything that must not depend on how often the run was broken off)."""
    process = start(folder, devices, *words)
    process.stdout.readline()
    begun = time.monotonic()
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return time.monotonic() - begun, content(folder)


def content(folder):
    """The numbers of metrics.json but for times, and every byte of every array of the last states."""
    runs = json.loads((folder / "metrics.json").read_text(), parse_constant=pytest.fail)["runs"]
    for run in runs:
        for row in run["result"]:
            assert row.pop("seconds") >= 0
            assert row.pop("compile_seconds") >= 0
    states = {
        run["name"]: arrays_of(max(folder.glob(f"state/{run['name']}/*.ckpt"), key=lambda p: int(p.stem))) for run in runs
    }
    return runs, states


def arrays_of(path):
    """Every array of a checkpoint as (path of the leaf, dtype and shape, bytes); the file is read without the library's help."""
    whole = path.read_bytes()
    length = int(whole[-21:-1])
    run = json.loads(whole[-86 - length : -86])
    places = [
        leaf["pieces"][0][0] if leaf["pieces"] else 0 for leaf in run["leaves"]
    ]  # a small state's pieces follow each other
    return [
        (leaf["path"], leaf["form"], whole[at : at + leaf["bytes"]]) for at, leaf in zip(places, run["leaves"], strict=True)
    ]


class Broken:
    """Runs in one folder after another that are killed and stopped; each that reaches its end is compared with `whole`."""

    def __init__(self, folder, devices, seed, words=()):
        self.folder, self.devices, self.words, self.rng = folder, devices, words, np.random.default_rng(seed)
        self.seconds, self.whole = finish(folder / "whole", devices, *words)
        self.number, self.completed = 0, 0

    @property
    def here(self):
        return self.folder / str(self.number)

    def compare(self):
        assert content(self.here) == self.whole
        self.completed += 1
        self.number += 1

    def kill(self, *, while_saving):
        """Kills a run once; whether it was not over before."""
        die = ["--die", *map(str, (self.rng.integers(1, 12), self.rng.integers(1, CALLS + 1)))] if while_saving else []
        process = start(self.here, self.devices, *self.words, *die)
        process.stdout.readline()
        if not while_saving:
            time.sleep(self.rng.uniform(0, self.seconds))
            process.kill()
        _, said = process.communicate(timeout=600)
        assert process.returncode in (0, -signal.SIGKILL), said
        if process.returncode == 0:
            self.compare()
        return process.returncode != 0

    def stop(self, number, *, within=1.0):
        """Stops a run once by a signal; whether it was not over before."""
        process = start(self.here, self.devices, *self.words)
        process.stdout.readline()
        time.sleep(self.rng.uniform(0, within * self.seconds))
        process.send_signal(number)
        _, said = process.communicate(timeout=600)
        over = (
            len(json.loads((self.here / "metrics.json").read_text())["runs"]) if (self.here / "metrics.json").exists() else 0
        )
        if over == len(self.whole[0]):  # the signal came too late
            self.compare()
            return False
        assert process.returncode == 128 + number, said
        (line,) = said.splitlines()
        assert line.startswith("stopped")
        return True

    def end(self):
        finish(self.here, self.devices, *self.words)
        self.compare()


def test_a_run_that_is_killed_and_stopped_goes_on_bit_for_bit(tmp_path):
    """A sample of the long tests: killed while it saves, stopped, killed at any time, with a host store and two devices."""
    broken = Broken(tmp_path, 2, seed=0, words=("--names", "fedper", "--rounds", "60"))
    assert broken.kill(while_saving=True)
    broken.stop(signal.SIGTERM, within=0.5)
    broken.kill(while_saving=False)
    broken.end()


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_kills(devices, tmp_path):
    """`kill -9` at random moments, every third in the middle of a save, over algorithms with and without a host store."""
    broken, kills, saving = Broken(tmp_path, devices, seed=devices), 0, 0
    while kills < int(os.environ.get("FEDJAX_META_KILLS", "50")) / 2:
        while_saving = kills % 3 == 0
        if broken.kill(while_saving=while_saving):
            kills, saving = kills + 1, saving + while_saving
    broken.end()
    print(f"{kills} kills, {saving} of them while saving; {broken.completed} runs equal the whole one")


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_signals(devices, tmp_path):
    """SIGTERM and SIGINT at random moments: one line, exit code 143 or 130, and nothing is lost."""
    broken, stops = Broken(tmp_path, devices, seed=10 + devices), 0
    while stops < int(os.environ.get("FEDJAX_META_STOPS", "20")) / 2:
        stops += broken.stop((signal.SIGTERM, signal.SIGINT)[stops % 2])
    broken.end()
    print(f"{stops} signals; {broken.completed} runs equal the whole one")


@pytest.mark.long
def test_two_processes_in_one_folder(tmp_path):
    """The second one is told in one line who has the folder, changes nothing, and goes on after the first was killed."""
    first = start(tmp_path / "run", 1, "--rounds", "4000", "--every", "50", "--names", "fedavg")
    first.stdout.readline()
    until = time.monotonic() + 120
    while not checkpoint.saved_rounds(tmp_path / "run" / "state" / "fedavg"):
        assert time.monotonic() < until
        time.sleep(0.05)
    first.send_signal(signal.SIGSTOP)  # what changes now, the second has changed
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    second = start(tmp_path / "run", 1, "--rounds", "100", "--every", "50", "--names", "fedavg")
    _, said = second.communicate(timeout=120)
    assert second.returncode == 1
    assert said.count("\n") == 1
    assert f"run is in use by process {first.pid}" in said
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    first.kill()
    first.communicate()
    finish(tmp_path / "run", 1, "--rounds", "4000", "--every", "50", "--names", "fedavg")


def test_all_kinds_of_runs_are_killed():
    assert set(PLANS.values()) == {None, "memory", "files"}
    assert len(PLANS) == 4
