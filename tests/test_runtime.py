"""What the process may use of its machine, from files like those of Linux."""

import pytest

from fedjax_meta import runtime


@pytest.fixture
def control_group(tmp_path, monkeypatch):
    """A job's control group inside another one."""
    outer = tmp_path / "job"
    inner = outer / "step"
    inner.mkdir(parents=True)
    monkeypatch.setattr(runtime, "_control_groups", lambda: [inner, outer, tmp_path])
    return outer, inner


def test_a_jobs_share_of_the_cores_counts(control_group, monkeypatch):
    outer, inner = control_group
    monkeypatch.setattr(runtime.os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    assert runtime.cores() == 64
    (inner / "cpu.max").write_text("max 100000\n")
    assert runtime.cores() == 64
    (outer / "cpu.max").write_text("250000 100000\n")
    assert runtime.cores() == 3
    (inner / "cpu.max").write_text("20000 100000\n")
    assert runtime.cores() == 1


def test_a_jobs_memory_limit_counts(control_group):
    outer, inner = control_group
    whole = runtime.free_host_bytes()
    assert whole > 2**20
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("500\n")
    assert runtime.free_host_bytes() > 2**20
    (outer / "memory.max").write_text("10000\n")
    (outer / "memory.current").write_text("7000\n")
    assert runtime.free_host_bytes() == 3000
    (outer / "memory.stat").write_text("anon 4000\ninactive_file 1500\nactive_file 10\n")
    assert runtime.free_host_bytes() == 4500


def test_the_groups_of_a_process_are_those_above_it(monkeypatch):
    monkeypatch.setattr(runtime, "_read", lambda file: "4:memory:/x\n0::/slurm/job_7/step_0\n")
    groups = [str(group) for group in runtime._control_groups()]
    assert groups == [f"/sys/fs/cgroup{end}" for end in ("/slurm/job_7/step_0", "/slurm/job_7", "/slurm", "")]
