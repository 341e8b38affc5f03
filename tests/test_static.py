"""What `benchmarks/static.py` reads in compiled programs, and how its rows are compared."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # the benchmarks import each other from their folder

import _hlo
import check
import static

import fedjax_meta as fm
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


def test_a_program_of_this_machine_has_the_flops_of_its_products():
    def steps(x, w):
        return jax.lax.fori_loop(0, 9, lambda i, x: jnp.tanh(x @ w), x)

    of = jax.ShapeDtypeStruct
    text = jax.jit(steps).lower(of((16, 32), "float32"), of((32, 32), "float32")).compile().as_text()
    assert max(loop.cost.flops for loop in _hlo.Program(text).loops()) == 2 * 16 * 32 * 32


def test_every_case_has_an_algorithm_for_its_data():
    for name in (*static.WORKLOADS, *static.METHODS):
        algorithm, data = static.problem(name, 5, fm.Federation(cohort_size=5, lanes=1, devices=1))
        assert data.num_clients >= 5 and algorithm.lanes == 1
    with pytest.raises(ValueError, match="'W9-5' is unknown"):
        static.problem("W9", 5, fm.Federation())


def row(case, **numbers):
    return {"benchmark": "static", "target": "h200", "case": case, "cohort": 50, "platform": "cuda"} | {
        "kernels": 40, "step_bytes": 1e9, "temp_bytes": 2e8, **numbers
    }  # fmt: skip


def test_more_kernels_fail_and_rows_of_other_benchmarks_are_passed_over(tmp_path):
    committed = tmp_path / "results"
    committed.mkdir()
    published = {"benchmark": "published", "case": "A", "rounds": 5, "seconds": 66.0, "platform": "cpu"}
    write(committed / "static.jsonl", [row("W1", kernels=99), row("W1"), row("W2"), published])
    check.main(write(tmp_path / "same.jsonl", [row("W1"), published]), committed, "cpu", 1.1)
    with pytest.raises(typer.Exit):
        check.main(write(tmp_path / "more.jsonl", [row("W1", kernels=45)]), committed, "cpu", 1.1)
    with pytest.raises(ValueError, match="kernels=0 must be finite and above 0"):
        check.main(write(tmp_path / "odd.jsonl", [{**row("W1"), "kernels": 0}]), committed, "cpu", 1.1)
