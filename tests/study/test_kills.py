"""`fedjax-meta run` is killed and stopped at any moment, and goes on: the run that results is the run that was left alone.

The long test has three parts, which kill FEDJAX_META_KILLS processes together (51 when not set) and stop every fifth by a signal.
"""

import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.study.common import TREE
from tests.test_kills import arrays_of

ROOT = Path(__file__).parents[2]
PARTS = 3
STUDY = {
    **TREE,
    "systems": {
        "fedavg": {"method": "fedavg", "options": {"epochs": 1, "batch_size": 5}, "grid": {"lr": [0.001, 0.01, 0.03, 0.1]}},
        "ditto": {"method": "ditto", "options": {"epochs": 2, "batch_size": 5}, "grid": {"prox_weight": [0.1, 1.0]}},
    },
    "rounds": 90,
    "eval_every": 15,
    "tuning": {"rounds": 60, "seeds": [0, 1], "halving": 2, "validation": "both", "extend": 1},
}


def start(file, folder, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE):
    # Shells' background jobs ignore Ctrl-C, and `nohup` SIGHUP, and so would what they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    before_hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "fedjax_meta", "run", str(file), "--out", str(folder), *words],
            cwd=ROOT,
            env={**os.environ, "JAX_NUM_CPU_DEVICES": "2", "COLUMNS": "200"},
            text=True,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGHUP, before_hangup)


def wait_for(condition):
    until = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def without_clocks(value):
    if isinstance(value, dict):
        return {name: without_clocks(part) for name, part in value.items() if "seconds" not in name}
    return [without_clocks(part) for part in value] if isinstance(value, list) else value


def content(folder):
    """All that a run leaves but times: results, lines of metrics in their order, clients, and every array of the last states."""
    results = {
        str(path.relative_to(folder)): without_clocks(json.loads(path.read_text(), parse_constant=pytest.fail))
        for path in sorted(folder.glob("results/*/*.json"))
    }
    lines = [without_clocks(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clients = {}
    for path in sorted(folder.glob("results/*/*.npz")):
        with np.load(path) as arrays:
            clients[path.name] = {name: arrays[name].tolist() for name in arrays.files}
    states = {str(path.relative_to(folder)): arrays_of(path) for path in sorted(folder.glob("state/*/*/*.ckpt"))}
    assert results and lines and clients and states
    return results, lines, clients, states


class Broken:
    """Runs that are killed and stopped; each that reaches its end is compared with one that was left alone."""

    def __init__(self, folder, seed, **changes):
        self.file, self.folder, self.rng = folder / "digits.yaml", folder, np.random.default_rng(seed)
        self.file.write_text(yaml.safe_dump({**STUDY, **changes}), encoding="utf-8")
        self.number, self.completed = 0, 0
        assert self.finish(folder / "whole") == 0
        self.whole = content(folder / "whole")
        # Times one with a full compilation cache, as those have that are hit; the first may have compiled.
        begun = time.monotonic()
        self.finish(self.here)
        self.seconds = time.monotonic() - begun
        self.compare()

    @property
    def here(self):
        return self.folder / str(self.number)

    def finish(self, folder):
        process = start(self.file, folder)
        _, said = process.communicate(timeout=600)
        assert process.returncode == 0, said
        return process.returncode

    def compare(self):
        for mine, its in zip(content(self.here), self.whole, strict=True):
            assert mine == its
        self.completed += 1
        self.number += 1

    def hit(self, number):
        """Sends a signal at a random moment after the run was opened; whether it was not over before."""
        process = start(self.file, self.here)
        opened = self.here / "run.json"
        before = opened.stat().st_mtime if opened.exists() else None
        wait_for(lambda: process.poll() is not None or (opened.exists() and opened.stat().st_mtime != before))
        time.sleep(self.rng.uniform(0, self.seconds))
        process.send_signal(number)
        _, said = process.communicate(timeout=600)
        # A signal may come when all is over and the interpreter takes itself apart.
        finished = number != signal.SIGKILL and json.loads(opened.read_text())["finished"] is not None
        if process.returncode == 0 or (finished and process.returncode == -number):
            self.compare()
            return False
        if number == signal.SIGKILL:
            assert process.returncode == -number, said
        else:
            assert process.returncode == 128 + number, said
            (line,) = said.splitlines()
            assert line.startswith("stopped")
        return True


def test_a_study_that_is_killed_and_stopped_goes_on_bit_for_bit(tmp_path):
    """A sample of the long test."""
    systems = {"fedavg": STUDY["systems"]["fedavg"]}
    tuning = {**STUDY["tuning"], "rounds": 30, "seeds": [0], "extend": 0}
    broken = Broken(tmp_path, seed=0, systems=systems, tuning=tuning, rounds=40)
    broken.seconds *= 0.4
    hits = [broken.hit(number) for number in (signal.SIGKILL, signal.SIGTERM)]
    assert any(hits)
    if broken.number == 0 or broken.here.exists():
        broken.finish(broken.here)
        broken.compare()


def test_a_signal_between_two_evaluations_saves_at_once_and_names_the_command(tmp_path):
    file, folder = tmp_path / "slow.yaml", tmp_path / "run"
    slow = {**STUDY, "systems": {"fedavg": {"method": "fedavg", "options": {"batch_size": 5}}}, "rounds": 100_000}
    file.write_text(yaml.safe_dump({**slow, "eval_every": 50_000}), encoding="utf-8")
    first = start(file, folder)
    wait_for((folder / "metrics.jsonl").exists)  # round 1 was evaluated, and round 50,000 is far
    second = start(file, folder)
    _, said = second.communicate(timeout=120)
    assert (
        second.returncode == 1
        and said
        == f"error: {folder} is in use by process {first.pid} on {platform.node()}: wait until it ends, or use another folder\n"
    )
    time.sleep(2)
    first.send_signal(signal.SIGTERM)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 143
    assert said.startswith("stopped in pairs, fedavg, final: round ") and said.count("\n") == 1
    assert f"Continue with: python -m fedjax_meta run {file} --out {folder}" in said
    (state,) = folder.glob("state/pairs/fedavg.final.*/*.ckpt")
    assert 1 < int(state.stem) < 50_000
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2  # round 1 of two seeds


def test_a_run_whose_terminal_is_closed_is_saved(tmp_path):
    """The kernel sends SIGHUP, and so does the shell; nothing can be written to the terminal any more."""
    file, folder = tmp_path / "slow.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump({**STUDY, "rounds": 100_000}), encoding="utf-8")
    ours, theirs = os.openpty()
    process = start(file, folder, stdout=theirs, stderr=theirs)
    os.close(theirs)
    wait_for(lambda: any(folder.glob("state/pairs/*.final.*/1.ckpt")))  # round 1 was evaluated, and round 50,000 is far
    time.sleep(2)
    os.close(ours)
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=120) == 128 + signal.SIGHUP
    (state,) = folder.glob("state/pairs/*.final.*/*.ckpt")
    assert 1 < int(state.stem) < 100_000


def test_a_run_whose_output_nobody_reads_any_more_is_saved(tmp_path):
    """As in `fedjax-meta run ... | head`."""
    file, folder = tmp_path / "slow.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump({**STUDY, "rounds": 100_000}), encoding="utf-8")
    process = start(file, folder)
    while ": round " not in process.stdout.readline():
        pass
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) == 143 and "everything is saved. Continue with: " in said and said.count("\n") == 1
    words = f"{sys.executable} -m fedjax_meta list methods | head -1"
    listed = subprocess.run(words, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert listed.stdout.startswith("afl") and listed.stderr == ""


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_kills(part, tmp_path):
    """`kill -9` at random moments of a study with grids, halving and held-out clients; every fifth is a signal instead."""
    broken, kills, tries = Broken(tmp_path, seed=1 + part), 0, 0
    while kills < math.ceil(int(os.environ.get("FEDJAX_META_KILLS", "51")) / PARTS):
        tries += 1
        number = (signal.SIGTERM, signal.SIGINT)[tries % 2] if tries % 5 == 0 else signal.SIGKILL
        kills += broken.hit(number) and number == signal.SIGKILL
        print(f"{tries} signals, {kills} kills, {broken.completed} whole runs", flush=True)
    broken.finish(broken.here)
    broken.compare()
    print(f"{kills} kills; {broken.completed} runs equal the whole one")
