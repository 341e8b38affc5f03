"""Several devices, and two processes over loopback, are one run: the same numbers, and a way on when a process is lost."""

import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import fedjax_meta as fm
from tests import problems
from tests.process import federation

ROOT = Path(__file__).parent.parent


def begin(folder: Path, *arguments: str) -> list[subprocess.Popen]:
    """Starts both processes."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.process", str(i), "2", address, str(folder), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]


def start(folder: Path, *arguments: str) -> list[tuple[int, str]]:
    """Runs both processes to their end; (exit code, output) of each."""
    processes = begin(folder, *arguments)
    try:
        outputs = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def saved(folder: Path) -> tuple[fm.State, dict[str, np.ndarray]]:
    algorithm, data = federation()
    structure = jax.tree.structure(jax.eval_shape(algorithm.init, jax.random.key(0), data))
    with np.load(folder / "state.npz") as file:
        state = jax.tree.unflatten(structure, [file[f"arr_{i}"] for i in range(structure.num_leaves)])
        return state, {name: file[name] for name in ("train_loss", "confusion", "loss")}


@pytest.fixture(scope="module")
def alone():
    """The same run by one process."""
    algorithm, data = federation()
    state, records = fm.simulate(algorithm, data, key=jax.random.key(3), rounds=7, eval_every=3)
    return jax.tree.map(np.asarray, state), records


def test_two_processes_run_what_one_runs(tmp_path, alone):
    for code, output in start(tmp_path, "7"):
        assert code == 0, output
    state, found = saved(tmp_path)
    assert np.array_equal(state.seen, alone[0].seen)
    assert state.round == 7
    assert problems.distance(state, alone[0]) < 1e-12
    np.testing.assert_allclose(found["train_loss"], alone[1][-1].metrics["loss"], rtol=1e-12)
    algorithm, data = federation()
    test = jax.jit(partial(fm.evaluate, algorithm, support="train", query="train", devices=1))
    expected = test(jax.random.key(0), alone[0], data)  # this algorithm does nothing at random in a test
    np.testing.assert_array_equal(found["confusion"], expected.confusion)
    np.testing.assert_allclose(found["loss"], expected.loss, rtol=1e-12)


def test_any_number_of_devices_runs_the_same():
    code = """
from tests.process import federation
import jax, numpy as np, fedjax_meta as fm
from tests import problems
jax.config.update("jax_enable_x64", True)
assert jax.device_count() == 8
found = {}
for devices in (1, 2, 4, 8):
    algorithm, data = federation(devices=devices)
    state, records = fm.simulate(algorithm, data, key=jax.random.key(3), rounds=3, eval_every=3)
    assert len(state.personal["head"]["w"].sharding.device_set) == devices
    found[devices] = jax.tree.map(np.asarray, (state, records[-1].metrics))
for devices in (2, 4, 8):
    assert np.array_equal(found[1][0].seen, found[devices][0].seen)
    assert problems.distance(found[1], found[devices]) < 1e-12
"""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    run = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr


def test_two_processes_go_on_from_a_checkpoint_of_two(tmp_path):
    for folder, stops in ((tmp_path / "whole", ["7"]), (tmp_path / "broken", ["3", "7"])):
        folder.mkdir()
        for stop in stops:
            for code, output in start(folder, stop):
                assert code == 0, output
    same(tmp_path / "whole", tmp_path / "broken")


def same(whole: Path, broken: Path) -> None:
    """Fails unless the last states of two folders agree bit for bit."""
    (state, found), (other, others) = saved(whole), saved(broken)
    jax.tree.map(np.testing.assert_array_equal, state, other)
    np.testing.assert_array_equal(found["confusion"], others["confusion"])
    np.testing.assert_array_equal(found["loss"], others["loss"])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_one_of_two_processes_is_killed_at_any_moment(tmp_path, seed):
    """Each time either process is killed, both start again; the run that results is the one that was left alone."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    rounds = "60"
    begun = time.monotonic()
    assert all(code == 0 for code, _ in start(tmp_path / "whole", rounds))
    whole = time.monotonic() - begun
    rng, killed = np.random.default_rng(seed), 0
    for _ in range(8):
        processes = begin(tmp_path / "broken", rounds)
        while processes[0].stdout.readline().strip() not in ("training", ""):
            continue
        time.sleep(rng.uniform(0, whole / 3))
        victim = int(rng.integers(2))
        processes[victim].kill()
        outputs = [process.communicate(timeout=180)[0] for process in processes]
        killed += processes[victim].returncode < 0
        assert processes[victim].returncode <= 0, outputs
    assert all(code == 0 for code, _ in start(tmp_path / "broken", rounds))
    assert killed > 0
    same(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.long
def test_a_lost_process_ends_the_run_with_a_message_and_a_state_to_go_on_from(tmp_path, alone):
    (code, output), (lost, _) = start(tmp_path, "7", "3")
    assert lost < 0 != code, output
    assert "another process of this run was lost after round 3" in output
    state, _ = saved(tmp_path)
    assert state.round == 3
    algorithm, data = federation()
    resumed, _ = fm.simulate(algorithm, data, key=jax.random.key(3), rounds=7, eval_every=3, state=state)
    assert problems.distance(jax.tree.map(np.asarray, resumed), alone[0]) < 1e-12
