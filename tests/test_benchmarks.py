"""Benchmarks: names of workloads, comparison with committed rows, figures and clocks."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # the benchmarks import each other from their folder

import check
import roofline
import scaling
import start
import systems
from _measure import compiled, read_rows
from _workloads import WORKLOADS, Workload, workload

import fedjax_meta as fm
from fedjax_meta import models

COMMITTED = Path(check.__file__).parent / "results" / "cpu.jsonl"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Workloads.


def test_workload_with_another_cohort_size():
    assert workload("W1-500") == Workload("mlp", 500, 1400, 500, 32)
    assert workload("W2-500") == Workload("lenet", 500, 1050, 500, 32)
    assert workload("W4-50") == Workload("mlp", 1000, 100, 50, 20)
    assert workload("W3a-lenet-exact-50").cohort_size == workload("W3a-lenet-exact-50").num_clients == 50
    assert workload("W1-5") == workload("W1")
    assert {name: workload(name) for name in WORKLOADS} == WORKLOADS


@pytest.mark.parametrize("name", ["W2", "W9", "W9-5", "W1-", "W1-0", "W1-x", "W1--5", ""])
def test_unknown_workloads_are_refused(name):
    with pytest.raises(ValueError, match="is unknown.*; allowed are W1"):
        workload(name)


@pytest.mark.parametrize(("case", "method"), [("A", "_blazefl"), ("B", "_flute"), ("D", "_pfllib")])
def test_published_workloads_are_the_same_for_all_simulators(monkeypatch, case, method):
    torch = pytest.importorskip("torch")
    peers, published = pytest.importorskip("_published_peers"), pytest.importorskip("published")
    work, seen = peers.WORK[case], {}

    def simulate(method, data, rounds, on_round, *, cohort, **options):
        seen.update(method=method, data=data, cohort=cohort)

    monkeypatch.setattr(published, "_simulate", simulate)
    getattr(published, method)(1, print)
    data, task = seen["data"], seen["method"].task
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    net = torch.nn.Sequential(*work.layers())
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == sum(leaf.numel() for leaf in net.parameters())
    assert (data.num_clients, seen["cohort"]) == (work.clients, work.cohort)
    assert data.x.shape[1:] == (*work.shape[1:], work.shape[0])
    assert set(np.asarray(data.sizes("train")).tolist()) == {work.train}
    options = seen["method"].config
    assert [options[name] for name in ("lr", "epochs", "batch_size")] == [work.lr, work.epochs, work.batch_size]


# The roofline.


def test_intensity_by_hand():
    """MTFL: 20 samples per step, 879,200 FLOPs per sample; 200 x 784 + 200 + 400 + 200 x 200 + 200 + 2,010 parameters."""
    parameters = 200 * 784 + 200 + 400 + 200 * 200 + 200 + 2010
    assert roofline.intensity("MTFL") == pytest.approx(20 * 879_200 / (3 * 4 * parameters + 20 * 784))


def test_cases_of_old_rows_get_their_current_names(tmp_path):
    old = write(tmp_path / "rows.jsonl", [peer("torch", 1.0, "S4"), peer("torch", 1.0), point("cohort", "64", 1.0)])
    assert [row["case"] for row in read_rows([old])] == ["MTFL", "W1", "64"]


def test_every_workload_can_be_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(roofline, "copy_rate", lambda: 10.0)
    row = {"benchmark": "peers", "peer": "fedjax_meta", "seconds": 1.0, "gflops": 50.0, "ceiling_gflops": 100.0}
    rows = write(tmp_path / "rows.jsonl", [{**row, "case": name} for name in [*WORKLOADS, "W1-500"]])
    for file in (rows, COMMITTED):
        figure = tmp_path / f"{file.stem}.png"
        roofline.main(file, figure)
        assert figure.stat().st_size > 10_000


# The arithmetic of a round.


def test_every_method_has_a_formula():
    assert {name.partition(" ")[0] for name in systems.SYSTEMS} == set(fm.METHODS)


def test_work_of_a_network_by_hand():
    """Products of matrices: 784 -> 100 (a) and 100 -> 10 (b), each two FLOPs a weight and sample.

    A gradient has those of the forward pass, of both weights' gradients, and of the one hidden layer's. Its forward derivative
    has, of each product of two things that both change, one for each of them.
    """
    found = systems.costs(models.mlp(), "mlp", clients=2, samples=100, batch_size=50, epochs=1)
    a, b = 100 * 2 * 784 * 100, 100 * 2 * 100 * 10
    by_hand = {"forward": a + b, "gradient": 2 * a + 3 * b, "head": a + 2 * b, "body": 2 * a + 2 * b, "product": 2 * a + 6 * b}
    assert {name: getattr(found, name) for name in by_hand} == pytest.approx(by_hand, rel=0.05)
    # Nothing moves but the second layer: the change of its output, that of the hidden layer's gradient, and both weights'.
    assert found.mixed == pytest.approx(a + 4 * b, rel=0.05)
    # Without the weights' gradients.
    assert found.curvature == pytest.approx(found.product + a + 2 * b, rel=0.05)


# Comparing with committed rows.


def peer(name, seconds, case="W1"):
    return {"benchmark": "peers", "case": case, "peer": name, "seconds": seconds, "platform": "cpu"}


def point(axis, case, seconds):
    return {"benchmark": "scaling", "axis": axis, "case": case, "seconds": seconds, "platform": "cpu"}


def gradient(estimator, seconds, k=1):
    row = {"benchmark": "second_order", "model": "mlp", "support": 32, "query": 32, "k": k}
    return {**row, "estimator": estimator, "seconds": seconds, "platform": "cpu"}


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_flops_are_those_of_a_program_for_a_cpu(monkeypatch, platform):
    """Of a GPU's program XLA would not count what cuBLAS computes."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    found = compiled(lambda a, b: a @ b, np.ones((16, 32), np.float32), np.ones((32, 8), np.float32))
    assert found.flops == 2 * 16 * 32 * 8


def test_fastest_other_simulator_is_in_both_files():
    old = [peer("fedjax_meta", 1.0), peer("torch", 4.0), peer("Flower", 2.0), peer("FedJAX", 0.1)]
    new = [peer("fedjax_meta", 1.0), peer("torch", 3.0), peer("FedJAX", 0.5, "W4"), {"benchmark": "peers"}]
    assert check.compare(old, new) == {"W1: fedjax_meta / fastest other": (1 / 4, 1 / 3)}
    assert check.compare(old, [peer("fedjax_meta", 1.0)]) == {}


def test_each_case_is_compared_with_its_base():
    rows = [
        *(point("population", n, s) for n, s in (("1000", 2.0), ("1000000", 3.0))),
        *(point("store", n, s) for n, s in (("device, 1000", 1.0), ("files, 1000", 5.0), ("files, 9", 7.0))),
        *(point("skew", n, s) for n, s in (("equal", 1.0), ("skewed", 1.5))),
        *(point("skew", f"{n}, 1 device", s) for n, s in (("equal", 2.0), ("skewed", 2.5))),
        *(point("devices", n, s) for n, s in (("1", 1.0), ("2", 0.625))),
        point("cohort", "64", 1.0),
        gradient("first order", 4.0),
        gradient("exact", 5.0),
        gradient("torch.func, exact", 9.0),
        gradient("exact", 5.0, k=2),
    ]
    assert check.ratios(check.times(rows)) == {
        "population: 1000000 / 1000": 1.5,
        "store: files, 1000 / device, 1000": 5.0,
        "skew: skewed / equal": 1.5,
        "skew: skewed, 1 device / equal, 1 device": 1.25,
        "devices: 2 / 1": 0.625,
        "mlp 32 32 1: exact / first order": 1.25,
    }


def test_committed_rows_have_every_kind_of_ratio():
    rows = read_rows([COMMITTED])
    both = check.compare(rows, rows)
    kinds = ("W1: ", "MTFL: ", "population: ", "store: ", "skew: ", "devices: ", "mlp 32 32 1: exact", ": ditto / fedavg")
    assert all(any(kind in name for name in both) for kind in kinds)
    assert all(old == new for old, new in both.values())


def test_a_larger_ratio_fails(tmp_path):
    committed = tmp_path / "results"
    committed.mkdir()
    write(committed / "cpu.jsonl", [gradient("first order", 1.0), gradient("exact", 1.5)])
    new = write(tmp_path / "new.jsonl", [gradient("first order", 2.0), gradient("exact", 3.6)])
    check.main(new, committed, "cpu", 1.25)
    with pytest.raises(typer.Exit) as stopped:
        check.main(new, committed, "cpu", 1.15)
    assert stopped.value.exit_code == 1
    with pytest.raises(typer.BadParameter, match="no ratio of platform='gpu' in common"):
        check.main(new, committed, "gpu", 1.3)


def test_a_static_number_may_hardly_grow_and_no_loop_may_begin_to_wait(tmp_path):
    committed = tmp_path / "results"
    committed.mkdir()
    row = {"benchmark": "static", "target": "h200", "case": "W1", "cohort": 5, "kernels": 18, "waits": 0, "step_bytes": 100.0}
    row["temp_bytes"] = 200.0
    write(committed / "static.jsonl", [row])
    check.main(write(tmp_path / "same.jsonl", [{**row, "step_bytes": 104.0}]), committed, "cpu", 1.3)
    for worse in ({"waits": 1}, {"kernels": 20}, {"temp_bytes": 211.0}):
        with pytest.raises(typer.Exit):
            check.main(write(tmp_path / "worse.jsonl", [{**row, **worse}]), committed, "cpu", 1.3)


# Scaling.


def test_skewed_clients_are_compared_on_the_same_devices():
    names = list(scaling.skew_cases())
    assert names == ["equal", "skewed", "equal, 1 device", "skewed, 1 device"]
    assert [scaling.base("skew", name, "equal") for name in names] == ["equal", "equal", "equal", "equal, 1 device"]
    assert scaling.base("population", "1000", "100") == "100"


# Starts.


def experiment(folder, body):
    """Writes a module that `python -m experiments.mine` runs in `folder`."""
    (folder / "experiments").mkdir()
    (folder / "experiments" / "__init__.py").touch()
    (folder / "experiments" / "mine.py").write_text("import os, pathlib, sys, time\n" + body)


def test_start_is_timed_to_the_first_saved_round(tmp_path, monkeypatch):
    experiment(
        tmp_path,
        "assert sys.argv[1:4] == ['--dataset', 'mnist', '--out']\n"
        "pathlib.Path(os.environ['FEDJAX_META_CACHE'], 'seen').touch()\n"
        "time.sleep(0.2)\n"
        "pathlib.Path(sys.argv[4], 'state', 'run').mkdir(parents=True)\n"
        "pathlib.Path(sys.argv[4], 'state', 'run', '1.ckpt').touch()\n"
        "time.sleep(100)\n",
    )
    monkeypatch.setattr(start, "ROOT", tmp_path)
    assert 0.2 < start.first_round("mine --dataset mnist", tmp_path / "run", tmp_path) < 30
    assert (tmp_path / "seen").exists()


def test_failed_start_shows_its_output(tmp_path, monkeypatch):
    experiment(tmp_path, "sys.exit('no such data')\n")
    monkeypatch.setattr(start, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match="no such data"):
        start.first_round("mine", tmp_path / "run", tmp_path)


def test_host_share_includes_saving(monkeypatch):
    """Each save takes half a second, much more than any program."""
    monkeypatch.setitem(WORKLOADS, "tiny", Workload("mlp", 4, 20, 2, 10))
    monkeypatch.setattr(start.checkpoint, "save", lambda *arguments: start.time.sleep(0.5))
    row = start.host_share("tiny", blocks=2, rounds=2, save=True)
    assert row["seconds"] > row["host_seconds"] >= 1.0  # saves after rounds 2 and 4; round 1 is not counted
    assert row["host_seconds"] < 2
    assert np.isclose(row["host_share"], row["host_seconds"] / row["seconds"])
    assert start.host_share("tiny", blocks=2, rounds=2, save=False)["host_seconds"] < 0.5
