"""Benchmarks: names of workloads, comparison with committed rows, figures and clocks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # the benchmarks import each other from their folder

import _agreement
import accelerator
import check
import model_forms
import peers
import scaling
import start
import systems
from _measure import compiled, read_rows
from _workloads import WORKLOADS, Workload, workload

import fedjax_meta as fm
from fedjax_meta import models, runtime


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


def test_a_published_workload_is_trained_and_tested():
    published, rounds = pytest.importorskip("published"), []
    published.CASES["B"].run(2, rounds.append)
    assert rounds[-1] == 2


@pytest.mark.parametrize("name", ["W1", "W2-50", "MTFL", "W3a-lenet-exact"])
def test_operations_of_a_round_by_hand(name):
    """Two for each weight and position: forward, the kernel's gradient, and the layer's input's, but for the images."""
    layers = {
        "mlp": ((784 * 100, 2), (100 * 10, 3)),
        "mtfl_mlp": ((784 * 200, 2), (200 * 200, 3), (200 * 10, 3)),
        "lenet": ((28**2 * 75 * 6, 2), (100 * 150 * 16, 3), (400 * 120, 3), (120 * 84, 3), (84 * 10, 3)),
    }
    case = workload(name)
    sample = sum(2 * weights * passes for weights, passes in layers[case.model])
    passes = {"W1": 1400, "W2-50": 1050, "MTFL": 300, "W3a-lenet-exact": 26 * (32 + 32 + 32)}[name]  # a product of the support
    assert case.flops == case.cohort_size * passes * sample


# Other simulators.

WORKER = """import json, os, sys
peer, name = sys.argv[1:3]
def say(**words):
    print(json.dumps(words), flush=True)
if peer == "no start":
    sys.exit("no such module")
say(ready=True)
for number, line in enumerate(sys.stdin):
    if line.startswith("stop"):
        say(memory=7, device_bytes=None)
        break
    if peer == "dies" and number == 4:
        sys.exit("out of memory")
    if peer == "dies at the end" and number == 6:
        say(seconds=1.0)
        os._exit(3)
    say(seconds=1.0 + number)
"""


def test_a_simulator_that_dies_gets_a_row_with_its_error_and_the_others_are_timed(tmp_path, monkeypatch):
    (tmp_path / "_worker.py").write_text(WORKER)
    monkeypatch.setattr(peers, "__file__", str(tmp_path / "peers.py"))
    names = ["no start", "dies", "dies at the end", "good"]
    results = peers.timed_rounds("W1", names, 5, 60, lambda line: None)
    rows = {name: peers.row_of("W1", name, results[name], 1.0) for name in names}
    assert rows["good"]["rounds"] == 5 and rows["good"]["first_seconds"] == 1.0 and rows["good"]["memory_bytes"] == 7
    assert {name: rows[name]["error"] for name in names[:3]} == {
        "no start": "no such module",
        "dies": "out of memory",
        "dies at the end": "ended with exit status 3",
    }
    assert all((row["benchmark"], row["case"], row["peer"]) == ("peers", "W1", name) for name, row in rows.items())


def test_a_simulator_that_is_asked_after_its_end_says_why(tmp_path, monkeypatch):
    (tmp_path / "_worker.py").write_text("import sys\nsys.exit('out of memory')")
    monkeypatch.setattr(peers, "__file__", str(tmp_path / "peers.py"))
    worker = peers.Worker("torch", "W1", 1)
    worker._process.wait()
    for ask in (worker.round, worker.stop):
        with pytest.raises(RuntimeError, match="out of memory"):
            ask()
    worker.end()


# Forms of layers.


def test_rows_of_forms_are_appended_and_a_name_that_is_none_is_refused(tmp_path, monkeypatch):
    made = {("dense step, batch 32", form): (lambda: None) for form in ("a", "b")} | {("pool", "c"): lambda: None}
    monkeypatch.setattr(model_forms, "PARTS", {"few": lambda: made})
    rows = tmp_path / "rows.jsonl"
    for _ in range(2):
        model_forms.main(["few"], "dense", repeats=2, output=rows)
    found = read_rows([rows])
    assert sorted(row["form"] for row in found) == ["a", "a", "b", "b"]
    assert {row["case"] for row in found} == {"dense step, batch 32"}
    assert all(row["benchmark"] == "model_forms" and row["platform"] == "cpu" and row["processor"] for row in found)
    with pytest.raises(ValueError, match=r"--only='dens step' is unknown \(did you mean 'dense step'\?\)"):
        model_forms.main(["few"], "dens step", repeats=2, output=rows)
    assert len(read_rows([rows])) == 4


# The arithmetic of a round.


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_flops_are_those_of_a_program_for_a_cpu(monkeypatch, platform):
    """Of a GPU's program XLA would not count what cuBLAS computes."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    found = compiled(lambda a, b: a @ b, np.ones((16, 32), np.float32), np.ones((32, 8), np.float32))
    assert found.flops == 2 * 16 * 32 * 8


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


def test_the_second_head_of_fedrod_learns_from_every_sample():
    """A forward pass and both gradients, each two operations a weight, on the features that the first head's step has."""
    parts = systems.Costs(
        **dict.fromkeys(systems.Costs._fields, 0) | {"samples": 100, "steps": 2, "epochs": 3, "head_size": 7}
    )
    assert systems.SYSTEMS["fedrod"].flops(parts) == 3 * 100 * 3 * 2 * 7


def test_the_table_of_costs_is_that_of_the_rows():
    """docs/results.md: what a round costs, in FedAvg's."""
    text = (Path(__file__).parents[1] / "docs" / "results.md").read_text(encoding="utf-8")
    table = text.partition("**Cost of a round relative to FedAvg's**")[2].partition("\n\n")[2].splitlines()[2:]
    shown = {
        cells[1].strip(" ").partition(",")[0].lower(): [*map(float, cells[2:4])]
        for line in table
        if (cells := line.split("|"))[1:]
    }
    rows = {row["case"]: row for row in read_rows([check.RESULTS / "cpu.jsonl"]) if row["benchmark"] == "systems"}
    assert len(shown) >= 7
    for name, numbers in shown.items():
        assert numbers == [round(rows[name]["ratio"], 2), round(rows[name]["arithmetic"], 2)], name


@pytest.mark.parametrize("place", ["a", "b"])
def test_a_comparison_of_numbers_sees_what_is_not_finite(place):
    """Python's `max` drops a NaN that is not the first."""
    one = {"a": np.ones(2), "b": np.ones(2)}
    assert _agreement._difference(one, {**one, "b": np.array([1.0, 0.5])}) == 0.5
    assert np.isnan(_agreement._difference(one, one | {place: np.array([1.0, np.nan])}))
    assert not np.isfinite(_agreement._difference(one | {place: np.array([1.0, np.inf])}, one))


# Compiling.


@pytest.mark.parametrize("anew", [True, False])
def test_what_is_compiled_anew_comes_from_no_cache(anew, tmp_path):
    code = (
        "import jax, _measure, numpy as np\n"
        + anew * "_measure.compile_anew()\n"
        + "_measure.compiled(lambda x: x + 1, np.ones(3))"
    )
    variables = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    folder = Path(check.__file__).parent
    given = {**os.environ, **variables, "PYTHONPATH": str(folder.parent), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder, env=given)
    assert any((tmp_path / "cache").glob("*")) != anew


class AskedError(Exception):
    """The compiler of runs was asked for a program."""


@pytest.mark.parametrize(
    "program",
    [
        lambda: scaling.Run(scaling.mlp_rounds(1), scaling.client_data([20, 20])),
        lambda: compiled(lambda x: x + 1, np.ones(3)),
        model_forms._case(lambda x: x + 1, np.ones(3)),
        lambda: accelerator.forms("lenet", 2, 2, 1),
    ],
    ids=["scaling, systems", "second_order", "model_forms", "accelerator forms"],
)
def test_what_is_timed_is_compiled_as_a_run_compiles_it(program, monkeypatch):
    """Plain `jax.jit` has other options, and on a GPU a search that takes minutes."""

    def asked(lowered):
        raise AskedError

    monkeypatch.setattr(runtime, "compiled", asked)
    with pytest.raises(AskedError):
        program()


# Comparing with committed rows.


def peer(name, seconds, case="W1"):
    return {"benchmark": "peers", "case": case, "peer": name, "seconds": seconds, "platform": "cpu"}


def point(axis, case, seconds):
    return {"benchmark": "scaling", "axis": axis, "case": case, "seconds": seconds, "platform": "cpu"}


def gradient(estimator, seconds, k=1, ratio=1.0):
    row = {"benchmark": "second_order", "model": "mlp", "support": 32, "query": 32, "k": k}
    return {**row, "estimator": estimator, "seconds": seconds, "ratio": ratio, "platform": "cpu"}


def system(name, ratio, samples=250):
    row = {"benchmark": "systems", "model": "lenet", "clients": 10, "samples": samples, "batch_size": 50, "epochs": 5}
    return {**row, "case": name, "seconds": 1.0, "ratio": ratio, "platform": "cpu"}


def on_gpu(case, name, seconds, commit=None, **more):
    row = {"benchmark": "accelerator", "part": "rounds", "case": case, "peer": name, "seconds": seconds, "platform": "gpu"}
    return {**row, **({"commit": commit} if commit else {}), **more}


def compared(old, new):
    """By name, the committed and the new number."""
    return {name: one[:2] for name, one in check.compare(old, new, 1.3)[0].items()}


def worse(old, new):
    return [name for name, one in check.compare(old, new, 1.3)[0].items() if one.worse]


def test_fastest_other_simulator_is_in_both_files():
    old = [peer("fedjax_meta", 1.0), peer("torch", 4.0), peer("Flower", 2.0), peer("FedJAX", 0.1)]
    new = [peer("fedjax_meta", 1.0), peer("torch", 3.0), peer("FedJAX", 0.5, "W4"), {"benchmark": "peers", "platform": "cpu"}]
    assert compared(old, new) == {"peers cpu W1 fedjax_meta: seconds / fastest other": (1 / 4, 1 / 3)}
    assert compared(old, [peer("fedjax_meta", 1.0)]) == {}


def test_first_rounds_and_the_results_of_others_are_compared():
    def row(name, first, difference=None):
        return {**peer(name, 1.0), "first_seconds": first, "difference": difference}

    old = [row("fedjax_meta", 2.0), row("torch", 1.0, 1e-8), row("Flower", 5.0, 3e-4)]
    first = "peers cpu W1 fedjax_meta: first_seconds / fastest other"
    assert worse(old, [row("fedjax_meta", 3.9), row("torch", 1.0, 9e-5), row("Flower", 5.0, 2e-3)]) == []
    assert worse(old, [row("fedjax_meta", 4.1), *old[1:]]) == [first]
    for bad in (1.1e-4, float("nan")):
        assert worse(old, [old[0], row("torch", 1.0, bad), old[2]]) == ["peers cpu W1 torch: difference"]
    assert worse(old, [*old[:2], row("Flower", 5.0, 3.1e-3)]) == ["peers cpu W1 Flower: difference"]
    assert (
        compared(old, [*old[:2], row("Flower", 5.0, "no such module")]).keys().isdisjoint({"peers cpu W1 Flower: difference"})
    )


def test_each_point_of_an_axis_is_compared_with_its_base():
    rows = [
        *(point("cohort", n, s) for n, s in (("1", 1.0), ("64", 16.0))),
        *(point("population", n, s) for n, s in (("100", 2.0), ("1000000", 3.0))),
        *(point("store", n, s) for n, s in (("device, 1000", 1.0), ("files, 1000", 5.0), ("files, 9", 7.0))),
        *(point("skew", n, s) for n, s in (("equal", 1.0), ("skewed", 1.5))),
        *(point("skew", f"{n}, 1 device", s) for n, s in (("equal", 2.0), ("skewed", 2.5))),
        *(point("devices", n, s) for n, s in (("1", 1.0), ("2", 0.625))),
        *(point("checkpoint", n, s) for n, s in (("save, 1000", 1.0), ("save, 100000", 50.0))),
    ]
    found = {
        "cohort 64: seconds / 1": 16.0,
        "population 1000000: seconds / 100": 1.5,
        "store files, 1000: seconds / device, 1000": 5.0,
        "skew skewed: seconds / equal": 1.5,
        "skew skewed, 1 device: seconds / equal, 1 device": 1.25,
        "devices 2: seconds / 1": 0.625,
    }
    assert compared(rows, rows) == {f"scaling cpu {name}": (value, value) for name, value in found.items()}
    # Rows of two runs are one in the file: what a row says of its own run counts.
    own = [point("cohort", "1", 9.0), {**point("cohort", "64", 16.0), "against": "1", "ratio": 20.0}]
    assert compared(rows, own) == {"scaling cpu cohort 64: seconds / 1": (16.0, 20.0)}


def test_what_rows_say_of_their_own_run_is_compared():
    """Systems and estimators were timed in several runs, whose seconds cannot be divided by each other."""
    names = ("first order", "exact", "implicit, 5 CG", "reptile", "reverse over reverse", "torch.func, exact")
    old = [gradient(name, 7.0, ratio=2.0) for name in names] + [gradient("exact", 1.0, k=2, ratio=2.0)]
    new = [gradient(name, 1.0, ratio=2.7) for name in names]
    assert worse(old, new) == [
        f"second_order cpu mlp 32 32 1 {name}: ratio" for name in ("exact", "implicit, 5 CG", "reptile")
    ]
    old = [system("fedavg", 1.0), system("ditto", 2.0), system("apfl", 2.0, samples=100)]
    assert worse(old, [system("fedavg", 1.0), system("ditto", 2.5)]) == []
    assert worse(old, [system("ditto", 2.7), system("apfl", 9.0)]) == ["systems cpu lenet 10 250 50 5 ditto: ratio"]


def test_rounds_of_a_gpu_are_compared_with_pytorch_of_the_same_run_or_with_one_case():
    old = [
        on_gpu("W1-50", "torch.func.vmap", 1.0, "day1"),
        on_gpu("W1-50", "fedjax_meta", 9.0, "day1"),
        on_gpu("W2-50", "fedjax_meta", 4.0, "day2", precision="float32"),
        on_gpu("W1-50", "fedjax_meta", 2.0, "day2", precision="float32"),
        on_gpu("W1-50", "fedjax_meta", 1.0, "day2", precision="tf32"),
        on_gpu("W2-50", "torch", 40.0, "day2"),
    ]
    new = [on_gpu("W2-50", "fedjax_meta", 4.0), on_gpu("W2-50", "torch", 20.0)]
    new += [on_gpu("W1-50", "fedjax_meta", 3.0), on_gpu("W1-50", "torch.func.vmap", 6.0)]
    start = "accelerator rounds gpu float32"
    assert compared(old, new) == {
        f"{start} W2-50 fedjax_meta: seconds / fastest other": (0.1, 0.2),
        f"{start} W1-50 fedjax_meta: seconds / W2-50 fedjax_meta": (0.5, 0.75),
    }


def test_other_platforms_are_not_compared():
    old = [gradient("exact", 1.0, ratio=1.5), {**gradient("exact", 1.0, ratio=2.0), "platform": "gpu"}]
    assert compared(old, old[1:]) == {"second_order gpu mlp 32 32 1 exact: ratio": (2.0, 2.0)}
    assert check.compare(old, old[1:], 1.3)[1] == {}


@pytest.mark.parametrize("name", check.FILES)
def test_committed_rows_equal_themselves(name, capsys):
    """Rows of a slow hour in a file beside them change nothing."""
    check.main(check.RESULTS / name)
    said = capsys.readouterr().out
    assert "not compared" not in said
    rows = read_rows([check.RESULTS / name])
    both, lacking = check.compare(read_rows(check.RESULTS / one for one in check.FILES), rows, 1.3)
    assert not lacking and all(one.old == one.new for one in both.values())
    kinds = {
        "cpu.jsonl": (
            "peers cpu W1 ",
            "peers cpu MTFL ",
            "cohort 64: ",
            "population 1000: ",
            "store files",
            "skew skewed",
            "devices 2",
            "mlp 32 32 1 exact: ",
            "lenet 32 32 4 implicit, 5 CG: ",
            " 250 50 5 mocha: ",
            " 250 50 5 ditto: ",
        ),
        "accelerator.jsonl": ("W1-5 fedjax_meta: ", "W2-50 fedjax_meta: ", "tf32 W4-50 ", "lenet 32 32 5 exact: "),
        "static.jsonl": ("static cuda h200 5 W1: kernels", "static tpu v5e 5 MTFL: temp_bytes"),
    }
    assert all(any(kind in one for one in both) for kind in kinds[name])


def test_a_round_that_takes_half_as_long_again_fails(tmp_path, capsys):
    rows = read_rows([check.RESULTS / "cpu.jsonl"])
    slower = [
        {**row, "seconds": 1.5 * row["seconds"]} if row.get("peer") == "fedjax_meta" and row["case"] == "W1" else row
        for row in rows
    ]
    with pytest.raises(typer.Exit) as stopped:
        check.main(write(tmp_path / "new.jsonl", slower))
    assert stopped.value.exit_code == 1
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("grew too much")]
    assert said == ["grew too much: peers cpu W1 fedjax_meta: seconds / fastest other"]


@pytest.mark.parametrize(
    "failed",
    [
        {"benchmark": "peers", "case": "W4", "peer": "fedjax_meta", "error": "it broke", "platform": "cpu"},
        {"benchmark": "systems", "case": "ditto", "error": "it broke", "platform": "cpu"},
        {"benchmark": "accelerator", "part": "methods", "method": "ditto", "error": "it broke", "platform": "gpu"},
    ],
    ids=lambda row: row["benchmark"],
)
def test_what_fails_of_this_library_is_named_and_what_is_lacking_counted(failed, tmp_path, capsys):
    (tmp_path / "results").mkdir()
    old = [peer("fedjax_meta", 1.0), peer("torch", 2.0), peer("fedjax_meta", 1.0, "W4"), peer("torch", 2.0, "W4")]
    write(tmp_path / "results" / "cpu.jsonl", [*old, system("ditto", 2.0), system("apfl", 2.0)])
    other = {"benchmark": "peers", "case": "W4", "peer": "Flower", "error": "it broke", "platform": "cpu"}
    good = [*old[:2], system("apfl", 2.0), other]
    check.main(write(tmp_path / "good.jsonl", good), tmp_path / "results")
    assert "not compared, because the new rows lack it: 1 of peers, 1 of systems" in capsys.readouterr().out
    for rows in ([*good, failed], [failed]):
        with pytest.raises(typer.Exit):
            check.main(write(tmp_path / "bad.jsonl", rows), tmp_path / "results")
        said = capsys.readouterr().out
        assert f"failed: {failed['benchmark']}" in said and "it broke" in said


def test_a_larger_ratio_fails(tmp_path):
    committed = tmp_path / "results"
    committed.mkdir()
    write(committed / "cpu.jsonl", [gradient("exact", 1.0, ratio=1.5)])
    new = write(tmp_path / "new.jsonl", [gradient("exact", 1.0, ratio=1.8)])
    check.main(new, committed, 1.25)
    with pytest.raises(typer.Exit) as stopped:
        check.main(new, committed, 1.15)
    assert stopped.value.exit_code == 1
    with pytest.raises(typer.BadParameter, match="have nothing in common"):
        check.main(write(tmp_path / "gpu.jsonl", [{**gradient("exact", 1.0, ratio=1.8), "platform": "gpu"}]), committed, 1.3)


def test_a_static_number_may_hardly_grow_and_no_loop_may_begin_to_wait(tmp_path):
    committed = tmp_path / "results"
    committed.mkdir()
    row = {"benchmark": "static", "target": "h200", "case": "W1", "cohort": 5, "kernels": 18, "waits": 0, "step_bytes": 100.0}
    row |= {"temp_bytes": 200.0, "platform": "cuda"}
    write(committed / "static.jsonl", [row])
    check.main(write(tmp_path / "same.jsonl", [{**row, "step_bytes": 104.0}]), committed, 1.3)
    for worse in ({"waits": 1}, {"kernels": 20}, {"temp_bytes": 211.0}):
        with pytest.raises(typer.Exit):
            check.main(write(tmp_path / "worse.jsonl", [{**row, **worse}]), committed, 1.3)


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
