"""Accelerators that are not at hand: what is read in compiled programs, how rows are compared, what a first one is asked."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # the benchmarks import each other from their folder

import _agreement
import _hlo
import accelerator
import check
import peers
import static
import systems
from _measure import read_rows

import fedjax_meta as fm
from fedjax_meta import hardware
from tests.test_benchmarks import write

PROGRAM = """HloModule round, entry_computation_layout={(f32[4,8]{1,0})->f32[4,8]{1,0}}

%products (a: f32[4,8], b: f32[8,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%graph (x: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  ROOT %copy.1 = f32[4,8]{1,0} copy(%x)
}

%body (carry: (s32[], f32[4,8], f32[8,8])) -> (s32[], f32[4,8], f32[8,8]) {
  %carry = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%carry), index=1
  %w = f32[8,8]{1,0} get-tuple-element(%carry), index=2
  %next = s32[] add(%i, %i)
  %product = f32[4,8]{1,0} fusion(%x, %w), kind=kOutput, calls=%products
  %called = f32[4,8]{1,0} call(%product), to_apply=%graph
  ROOT %out = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) tuple(%next, %called, %w)
}

%condition (carry: (s32[], f32[4,8], f32[8,8])) -> pred[] {
  %carry = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %w = f32[8,8]{1,0} broadcast(%x), dimensions={}
  %start = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) tuple(%zero, %x, %w)
  %loop = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) while(%start), condition=%condition, body=%body
  ROOT %result = f32[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_kernels_bytes_and_flops_of_a_loop_are_counted_by_hand():
    program, loop = _hlo.Program(PROGRAM).loops()
    assert (program.depth, loop.depth, program.cost.kernels, loop.name) == (0, 1, 1, "loop")
    # An addition, a product in a fusion, and the copy inside a called graph.
    assert loop.cost.kernels == 3
    assert loop.cost.flops == 2 * 4 * 8 * 8
    assert loop.cost.bytes == (4 + 4 + 4) + (128 + 128 + 256) + (128 + 128)
    assert loop.cost.seconds(1e3, 1e12) == 0.512 and loop.cost.seconds(1e12, 896.0) == 780 / 896
    assert _hlo.size("(f32[2,3]{1,0}, pred[5], s32[], u8[7], bf16[3])") == 24 + 5 + 4 + 7 + 6


PARTS = """HloModule parts

%pick (rows: f32[1000,8], i: s32[]) -> f32[1,8] {
  %rows = f32[1000,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %flat = f32[1000,8]{1,0} bitcast(%rows)
  ROOT %row = f32[1,8]{1,0} dynamic-slice(%flat, %i, %zero), dynamic_slice_sizes={1,8}
}

%put (rows: f32[1000,8], row: f32[1,8], i: s32[]) -> f32[1000,8] {
  %rows = f32[1000,8]{1,0} parameter(0)
  %row = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %twice = f32[1,8]{1,0} add(%row, %row)
  ROOT %new = f32[1000,8]{1,0} dynamic-update-slice(%rows, %twice, %i, %i)
}

ENTRY %main (rows: f32[1000,8], i: s32[]) -> f32[1000,8] {
  %rows = f32[1000,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,8]{1,0} fusion(%rows, %i), kind=kLoop, calls=%pick
  ROOT %new = f32[1000,8]{1,0} fusion(%rows, %row, %i), kind=kLoop, calls=%put
}
"""


CUBLAS = """HloModule product

ENTRY %main (x: f32[5,4,8], w: f32[5,8,2]) -> f32[5,4,2] {
  %x = f32[5,4,8]{2,1,0} parameter(0)
  %w = f32[5,8,2]{2,1,0} parameter(1)
  %both = (f32[5,4,2]{2,1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_batch_dimensions":["0"]}}}
  ROOT %out = f32[5,4,2]{2,1,0} get-tuple-element(%both), index=0
}
"""


def test_the_workspace_of_a_product_is_no_traffic():
    (program,) = _hlo.Program(CUBLAS).loops()
    assert program.cost == (1, 2 * 5 * 4 * 8 * 2, 4 * (5 * 4 * 8 + 5 * 8 * 2 + 5 * 4 * 2))


def test_rows_that_are_picked_from_an_array_and_put_in_place_count_alone():
    (program,) = _hlo.Program(PARTS).loops()
    # A row read and written, with the index; a row and the index read, a row written.
    assert program.cost == _hlo.Cost(2, 0.0, (32 + 32 + 4) + (32 + 4 + 32))


def test_a_program_of_this_machine_has_the_flops_of_its_products():
    def steps(x, w):
        return jax.lax.fori_loop(0, 9, lambda i, x: jnp.tanh(x @ w), x)

    of = jax.ShapeDtypeStruct
    text = jax.jit(steps).lower(of((16, 32), "float32"), of((32, 32), "float32")).compile().as_text()
    assert max(loop.cost.flops for loop in _hlo.Program(text).loops()) == 2 * 16 * 32 * 32


def test_the_number_of_steps_is_read_where_the_compiler_knows_it():
    def steps(x, count):
        return jax.lax.fori_loop(0, count, lambda i, x: jnp.sin(x + i), x)

    x, count = jax.ShapeDtypeStruct((16,), "float32"), jax.ShapeDtypeStruct((), "int32")
    known = jax.jit(lambda x: steps(x, 900)).lower(x).compile().as_text()
    asked = jax.jit(steps).lower(x, count).compile().as_text()
    assert [loop.steps for loop in _hlo.Program(known).loops()] == [1, 900]
    assert [loop.steps for loop in _hlo.Program(asked).loops()] == [1, None]


def test_every_case_has_an_algorithm_for_its_data():
    for name in (*static.WORKLOADS, *static.METHODS):
        algorithm, data = static.problem(name, 5, fm.Federation(cohort_size=5, lanes=1, devices=1))
        assert data.num_clients >= 5 and algorithm.lanes == 1
    with pytest.raises(ValueError, match="'W9-5' is unknown"):
        static.problem("W9", 5, fm.Federation())


def row(case, **numbers):
    return {"benchmark": "static", "target": "h200", "case": case, "cohort": 50, "platform": "cuda"} | {
        "kernels": 40, "waits": 0, "step_bytes": 1e9, "temp_bytes": 2e8, **numbers
    }  # fmt: skip


def test_more_kernels_fail_and_rows_of_other_benchmarks_are_passed_over(tmp_path):
    committed = tmp_path / "results"
    committed.mkdir()
    published = {"benchmark": "published", "case": "A", "rounds": 5, "seconds": 66.0, "platform": "cpu"}
    write(committed / "static.jsonl", [row("W1", kernels=99), row("W1"), row("W2"), published])
    check.main(write(tmp_path / "same.jsonl", [row("W1"), published]), committed, 1.1)
    with pytest.raises(typer.Exit):
        check.main(write(tmp_path / "more.jsonl", [row("W1", kernels=45)]), committed, 1.1)
    with pytest.raises(ValueError, match="kernels=0 must be finite and above 0"):
        check.main(write(tmp_path / "odd.jsonl", [{**row("W1"), "kernels": 0}]), committed, 1.1)


def test_cohorts_of_500_fit_the_memory_of_a_device():
    committed = read_rows([Path(check.__file__).parent / "results" / "static.jsonl"])
    largest = [row for row in committed if row["benchmark"] == "static" and row["cohort"] == 500]
    cases = {"h200": {*static.WORKLOADS, *static.METHODS}}
    cases["v5e"] = cases["h200"] - {"FedMeta-Per", "iMAML"}  # which docs/benchmarks.md says were not compiled
    for target, needed in cases.items():
        assert {row["case"] for row in largest if row["target"] == target} >= needed
    for row in largest:
        platform = {"cuda": "gpu"}.get(row["platform"], row["platform"])
        device = SimpleNamespace(platform=platform, device_kind=row["device"], memory_stats=lambda: None)
        assert row["temp_bytes"] + row["argument_bytes"] < hardware.free_bytes(device)


# A first accelerator.


def test_measurements_stop_at_the_time_limit_and_one_that_fails_keeps_none_from_being_made(tmp_path, monkeypatch, capsys):
    clock = []

    def broken():
        raise NotImplementedError("no such kernel\nand more")

    def slow():
        time.sleep(1.1)
        return {"seconds": 1.1}

    def plan(asked, given, platform):
        clock.append(given)
        assert platform == "cpu"
        assert (asked.cases, asked.cohorts, asked.simulators, asked.parts) == (
            ["W1"],
            [2],
            ["fedjax_meta"],
            [*accelerator.PARTS],
        )
        assert (asked.repeats, asked.rows, asked.seconds, asked.precision) == (3, 4, 5.0, "float32")
        for name, measure in (("a", broken), ("b", lambda: {"x": 0.5}), ("c", slow), ("d", slow)):
            yield accelerator.Measurement({"part": "numbers", "model": name}, lambda measure=measure: measure)

    monkeypatch.setattr(accelerator, "in_process", lambda clock, prepare, *arguments: prepare(*arguments))
    monkeypatch.setattr(accelerator, "plan", plan)
    rows = tmp_path / "rows.jsonl"
    chosen = {"case": ["W1"], "cohort": [2], "peer": ["fedjax_meta"], "part": None}
    accelerator.main(**chosen, limit=1.0, repeats=3, rows=4, output=rows)
    found = read_rows([rows])
    assert [row["model"] for row in found] == ["a", "b", "c"]
    assert found[0]["error"] == "NotImplementedError: no such kernel and more" and found[1]["x"] == 0.5
    assert all(row["platform"] == "cpu" for row in found)
    assert "time is up after 3 measurements; the first that is missing: part numbers, model d" in capsys.readouterr().out
    assert clock[0].left < 0


@pytest.mark.parametrize("side_by_side", [1, 2])
def test_what_runs_at_the_time_limit_is_stopped_and_what_was_measured_is_kept(side_by_side, tmp_path, monkeypatch, capsys):
    in_process, rows = accelerator.in_process, tmp_path / "rows.jsonl"

    def plan(asked, clock, platform):
        yield accelerator.Measurement({"part": "numbers", "model": "a"}, lambda: lambda: {"x": 0.5})
        yield accelerator.Measurement({"part": "forms", "model": "b"}, partial(in_process, clock, time.sleep, 100))

    monkeypatch.setattr(accelerator, "in_process", lambda clock, prepare, *arguments: prepare(*arguments))
    monkeypatch.setattr(accelerator, "plan", plan)
    begin = time.monotonic()
    accelerator.main(limit=1.0, repeats=1, rows=1, side_by_side=side_by_side, output=rows)
    assert time.monotonic() - begin < 50
    assert not multiprocessing.active_children()
    assert [row["model"] for row in read_rows([rows])] == ["a"]
    assert "time is up after 1 measurements; the first that is missing: part forms, model b" in capsys.readouterr().out


def test_what_gets_ready_side_by_side_is_timed_one_after_the_other():
    alone, busy, ready = threading.Lock(), threading.Barrier(3, timeout=60), []

    def prepare(name):
        busy.wait()  # all three are on their way
        ready.append(name)

        def measure():
            assert len(ready) == 3 and alone.acquire(blocking=False)
            time.sleep(0.01)
            alone.release()
            return {"x": name}

        return measure

    planned = [accelerator.Measurement({"model": name}, partial(prepare, name)) for name in "abc"]
    found = list(accelerator.measured(planned, 3, accelerator.Clock(100)))
    assert found == [({"model": name}, {"x": name}) for name in "abc"]


def test_a_measurement_that_fails_in_its_process_says_why():
    with pytest.raises(RuntimeError, match="ValueError: invalid literal for int"):
        accelerator.in_process(accelerator.Clock(100), int, "x")
    with pytest.raises(RuntimeError, match="ended with exit status 3"):
        accelerator.in_process(accelerator.Clock(100), os._exit, 3)
    ready = accelerator.in_process(accelerator.Clock(100), accelerator.at_once, int, "7")
    assert ready() == 7


def asked(**given):
    """What `main` asks without options, for simulators that are all here."""
    found = dict.fromkeys(("methods", "cases", "cohorts", "flags"), ())
    found |= {"parts": [*accelerator.PARTS], "simulators": ["fedjax_meta", "torch", "torch.func.vmap"], "precision": "float32"}
    return accelerator.Asked(**found | {"repeats": 1, "seconds": 3.0, "rows": 2, "profiles": None} | given)


def planned(platform, **given):
    return [one.about for one in accelerator.plan(asked(**given), accelerator.Clock(9), platform)]


def test_every_part_is_planned_and_flags_only_where_they_are():
    on_gpu = planned("gpu")
    assert {about["part"] for about in on_gpu} == set(accelerator.PARTS)
    assert {about["part"] for about in planned("cpu")} == {*accelerator.PARTS} - {"flags", "kernels"}
    assert {about["flags"] for about in on_gpu if about["part"] == "flags"} == {*accelerator.FLAGS}
    assert {about["method"].partition(" ")[0] for about in on_gpu if about["part"] == "methods"} == {*fm.METHODS}
    timed = [(about["case"], about["peer"]) for about in on_gpu if about["part"] == "rounds"]
    every = {
        (f"{case}-{cohort}", name)
        for case in accelerator.CASES
        for cohort in accelerator.COHORTS
        for name in asked().simulators
        if not (name == "torch" and cohort == 500)
    }
    assert len(timed) == len({*timed}) and {*timed} == every
    few = [about for about in planned("gpu", cases=["W4"], cohorts=[5, 7]) if about["part"] in ("rounds", "bits")]
    assert {about["case"] for about in few if "case" in about} == {"W4-5", "W4-7"}


def test_a_short_run_times_rounds_and_bits_are_of_a_few_methods():
    plan = planned("gpu")
    first = [about for about in plan if about["part"] != "numbers"][:9]
    assert {about["part"] for about in first} == {"rounds"}
    assert {about["case"] for about in first} == {"W1-50", "W2-50", "W3a-lenet-exact-50"}
    assert {about["peer"] for about in first} == {*asked().simulators}
    repeated = [about for about in plan if about["part"] == "bits"]
    assert {about["flags"] for about in repeated} == {"default"}
    assert {about["method"] for about in repeated if "method" in about} == {*accelerator.BITS_METHODS} <= {*systems.SYSTEMS}
    assert {about["case"] for about in repeated if "case" in about} == {f"{case}-50" for case in accelerator.CASES}
    of_all = [about for about in planned("gpu", methods=[*systems.SYSTEMS]) if about["part"] == "bits" and "method" in about]
    assert {about["method"].partition(" ")[0] for about in of_all} == {*fm.METHODS}


def test_bits_that_differ_in_the_same_or_another_process_are_seen(monkeypatch):
    one, other = np.array([1.0, np.nan]), np.array([1.5, np.nan])

    def row(*processes):
        answers = iter(processes)
        monkeypatch.setattr(_agreement, "in_process", lambda *_: lambda: {"found": next(answers)})
        return _agreement.bits(accelerator.Clock(9), "method", "fedavg", 2, "")()

    assert row(((one,), (one,)), ((one,), (one,))) == {"repeated": True, "other_process": True}
    found = row(((one,), (one,)), ((other,), (other,)))
    assert (found["repeated"], found["other_process"]) == (True, False)
    assert "repeated_difference" not in found and "other_process_difference" in found
    assert not row(((one,), (other,)), ((one,), (one,)))["repeated"]


@pytest.mark.long
def test_two_trainings_of_a_method_and_of_a_network_are_compared():
    for part, name in (("method", "fedper"), ("network", "char_lstm")):
        first, second = _agreement.twice(part, name, 2, "")
        assert jax.tree.all(jax.tree.map(np.array_equal, first, second))


def test_a_network_agrees_with_itself_and_a_wrong_number_is_seen():
    found = _agreement.numbers("mlp", 4)
    assert set(found) == {"loss_difference", "gradient_difference", "product_difference"}
    assert max(found.values()) < 1e-6
    expected = {"a": np.array([2.0, -4.0]), "b": np.zeros(3)}
    assert _agreement._difference(expected, {"a": np.array([2.0, -3.0]), "b": np.zeros(3)}) == 0.25


def test_the_kernels_of_a_profile_are_those_of_its_device():
    def line(name, *events):
        return SimpleNamespace(name=name, events=[SimpleNamespace(name=n, duration_ns=t) for n, t in events])

    host = SimpleNamespace(name="/host:CPU", lines=[line("python", ("call", 9e9))])
    streams = [line("Stream #1(Compute)", ("gemm", 1e6), ("add", 2e3), ("gemm", 3e6)), line("Stream #2", ("add", 1e3))]
    gpu = SimpleNamespace(name="/device:GPU:0", lines=[*streams, line("XLA Modules", ("jit_block", 9e9))])
    found = accelerator._device_events(SimpleNamespace(planes=[host, gpu]))
    assert found == {"gemm": [1e-3, 3e-3], "add": [2e-6, 1e-6]}
    with pytest.raises(ValueError, match="the profile has no device, only /host:CPU"):
        accelerator._device_events(SimpleNamespace(planes=[host]))


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"case": ["W9"]}, "is unknown .*allowed are W1"),
        ({"case": ["W1"], "cohort": [0]}, "--cohort=0 must be an integer of at least 1"),
        ({"limit": float("inf")}, "--limit=inf must be finite and above 0"),
        ({"seconds": float("nan")}, "--seconds=nan must be finite and above 0"),
        ({"seconds": -1.0}, "--seconds=-1.0 must be finite and above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(chosen, words, monkeypatch):
    monkeypatch.setattr(accelerator, "in_process", None)
    with pytest.raises(ValueError, match=words):
        accelerator.main(**chosen)


def test_a_simulator_that_is_named_and_cannot_run_is_refused(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda package: None if package == "flwr" else "here")
    with pytest.raises(ValueError, match="--peer 'Flower' cannot run: the package flwr is not installed"):
        peers.present(["fedjax_meta", "Flower"], peers.MODULES, "cpu")
    with pytest.raises(ValueError, match="cannot run: there is no NVIDIA GPU"):
        peers.present([peers.GRAPHS], peers.TORCH, "cpu")
    assert peers.present([peers.GRAPHS], peers.TORCH, "gpu") == ([peers.GRAPHS], {})
    there, missing = peers.present(None, peers.MODULES, "cpu")
    assert {*there} == {*peers.MODULES} - {"Flower", peers.GRAPHS} and {*missing} == {"Flower", peers.GRAPHS}


def test_a_method_agrees_with_itself():
    found = _agreement.method("fedper", 4, rounds=1)
    assert found == {"state_difference": 0.0, "measures_difference": 0.0}


def test_it_needs_no_data_set_packages():
    code = "import sys; sys.modules['tensorflow_datasets'] = None; import accelerator, static"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(accelerator.__file__).parent, timeout=120)
