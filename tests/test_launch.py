"""The scripts of docs/launch: two processes train, end when one of them is told to, go on, and find what one process finds."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedjax_meta import disk

LAUNCH = Path(__file__).parent.parent / "docs" / "launch"


def begin(folder: Path, processes: int, rounds: int) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    command = [sys.executable, str(LAUNCH / "run.py"), "--out", str(folder), "--rounds", str(rounds), "--save-every", "200"]
    places = {"PYTHONPATH": str(LAUNCH.parent.parent)}
    environment = {**os.environ, **places, "JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    started = []
    for i in range(processes):
        several = ["--distributed", "--address", address, "--processes", str(processes), "--process", str(i)]
        arguments = [*command, *(several if processes > 1 else [])]
        started.append(
            subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    return started


def ended(processes: list[subprocess.Popen]) -> list[str]:
    try:
        outputs = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return outputs


def test_one_process_that_is_told_to_end_ends_all_and_the_run_goes_on(tmp_path):
    both = begin(tmp_path / "two", 2, rounds=200)
    while "round 1:" not in both[0].stdout.readline():
        assert both[0].poll() is None
    time.sleep(0.5)
    both[1].send_signal(signal.SIGTERM)
    stopped = int(re.search(r"stopped after round (\d+)", ended(both)[0])[1])
    assert 1 < stopped < 200  # between two evaluations
    assert not (tmp_path / "two" / "finished").exists()
    lost = tmp_path / "two" / "metrics.jsonl"
    lost.unlink()  # as if it had been killed between saving its state and writing the file
    assert f"going on after round {stopped}" in ended(begin(tmp_path / "two", 2, rounds=200))[0]
    ended(begin(tmp_path / "one", 1, rounds=200))
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("two", "one")]
    assert [json.loads(line)["round"] for line in lines[0]] == [json.loads(line)["round"] for line in lines[1]]
    two, one = (json.loads(of_run[-1]) for of_run in lines)
    assert two["round"] == one["round"] == 200
    np.testing.assert_allclose(two["accuracy"], one["accuracy"], atol=1e-6)
    assert (tmp_path / "two" / "finished").exists()


def test_an_error_of_one_process_ends_all(tmp_path):
    """The first one cannot have the folder; the second one, which could go on, notices that it is gone."""
    disk.lock(tmp_path / "run")
    begun = time.monotonic()
    processes = begin(tmp_path / "run", 2, rounds=200)
    try:
        outputs = [process.communicate(timeout=250)[0] for process in processes]
        assert all(process.returncode for process in processes), outputs
    finally:
        for process in processes:
            process.kill()
    assert "BlockingIOError" in outputs[0] or "in use" in outputs[0], outputs[0]
    assert time.monotonic() - begun < 200  # JAX waits for 300 seconds


@pytest.mark.parametrize("name", ["slurm.sbatch", "tpu.sh"])
def test_the_scripts_are_shell_and_give_options_that_there_are(name):
    script = LAUNCH / name
    subprocess.run(["bash", "-n", str(script)], check=True)
    known = set(re.findall(r'"(--[a-z-]+)"', (LAUNCH / "run.py").read_text()))
    called = (
        script.read_text().partition("run.py")[2] if name == "slurm.sbatch" else script.read_text().rpartition("run.py")[2]
    )
    given = set(re.findall(r"(--[a-z-]+)", called.splitlines()[0]))
    assert "--out" in given
    assert given <= known


def test_a_slice_installs_the_wheel_that_it_was_sent(tmp_path):
    """gcloud is a script that writes down what it was asked."""
    gcloud, calls = tmp_path / "gcloud", tmp_path / "calls"
    gcloud.write_text(f"#!/bin/bash\necho \"$@\" >> '{calls}'\n")
    gcloud.chmod(0o755)
    given = {"NAME": "slice", "ZONE": "zone", "OUT": "/mnt/run", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", str(LAUNCH / "tpu.sh")]
    refused = subprocess.run(script, env=given, capture_output=True, text=True, check=False)
    assert refused.returncode != 0 and "a wheel of fedjax_meta" in refused.stderr and not calls.exists()
    subprocess.run(script, env={**given, "WHEEL": "dist/fedjax_meta-1.whl"}, check=True)
    sent, run = calls.read_text().splitlines()
    assert "scp run.py dist/fedjax_meta-1.whl slice: " in sent
    assert "pip install -q './fedjax_meta-1.whl[tpu]' && python run.py --distributed --out '/mnt/run' --rounds 1000" in run
