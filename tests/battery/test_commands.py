"""Bad inputs of command lines: one line, an exit status, and no traceback."""

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

typer_testing = pytest.importorskip("typer.testing", reason="the command line needs typer")
from fedjax_meta import cli  # noqa: E402
from tests.battery import commands  # noqa: E402
from tests.programs import module_of  # noqa: E402

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PEER = {"benchmark": "peers", "case": "W1", "peer": "torch", "seconds": 1.0}
ROW_FILES = {
    "rows_no_json": json.dumps(PEER) + "\nthis is no row\n",
    "rows_list": "[1, 2]\n",
    "rows_binary": "\0\1\2\n",
    "rows_deep": "[" * 100_000 + "\n",
    "rows_zero": json.dumps({**PEER, "seconds": 0}),
    "rows_nan": '{"benchmark": "peers", "seconds": NaN}',
    "rows_text": json.dumps({**PEER, "seconds": "fast"}),
    "rows_keys": json.dumps({"benchmark": "systems", "seconds": 1.0, "ratio": 1.0, "platform": "cpu"}),
    "rows_values": json.dumps({**PEER, "case": ["W1"], "platform": "cpu"}),
    "rows_benchmark": json.dumps({"benchmark": 3, "seconds": 1.0}),
    "rows_empty": "\n",
}
STUDY = """title: own data
rounds: 2
seeds: [1]
federation: {cohort_size: 3}
scenarios: {own: {dataset: OWN, partition: iid, clients: 10}}
systems: {fedavg: {method: fedavg, options: {lr: 0.1}}}
"""
STUDY_FILES = {
    "study_list": "[1, 2]",
    "study_extends": "extends: 3",
    "study_deep": "[" * 5000,
    "study_twice": STUDY + "rounds: 3\n",
    "study_itself": "extends: ITSELF\n",
    "study_long": STUDY.replace("systems: {fedavg:", f"systems: {{{'a' * 101}:"),
    "study_python": "!!python/object/apply:os.getcwd []",
    "study_bomb": "a: &a [0, 0]\n"
    + "".join(f"{new}: &{new} [*{old}, *{old}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Files and folders that the rows name."""
    folder = tmp_path_factory.mktemp("battery")
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (1000, 8, 8, 1), dtype=np.uint8), np.arange(1000) % 10
    np.savez(folder / "own.npz", x=images, y=labels)
    np.savez(folder / "labels.npz", x=images, y=labels - 1)
    (folder / "taken.npz").write_text("a file")
    (folder / "full").mkdir()
    (folder / "full" / "config.json").write_text("{}")
    (folder / "blocked").mkdir()
    (folder / "blocked").chmod(0o500)
    (folder / "tmp").mkdir()
    for name, text in {**ROW_FILES, **STUDY_FILES, "study": STUDY}.items():
        (folder / name).write_text(
            text.replace("OWN", str(folder / "own.npz")).replace("ITSELF", str(folder / "study_itself"))
        )
    (folder / "presets" / "presets").mkdir(parents=True)
    (folder / "presets" / "presets" / "a.yaml").write_text("- 1\n")
    torn = {"trials": {"a": {"numbers": {}, "seed": 1, "rows": [], "diverged": None}}, "config": {"data": ""}}
    for name, text in {"cut": '{"fixed": "', "odd": "[]", "torn": '{"fixed": {}, "command": ""}'}.items():
        (folder / name / "results" / "own").mkdir(parents=True)
        (folder / name / "run.json").write_text(text)
        (folder / name / "study.yaml").write_text(STUDY.replace("OWN", str(folder / "own.npz")))
        (folder / name / "results" / "own" / "fedavg.final.json").write_text(json.dumps(torn))
    (folder / "study_binary").write_bytes(b"\0\1\xff")
    yield {
        "own": folder / "own.npz",
        "labels": folder / "labels.npz",
        "taken": folder / "taken.npz",
        "tmp": folder / "tmp",
        # Root may write into any folder but those of the kernel.
        "blocked": folder / "blocked" if os.geteuid() else Path("/proc/blocked"),
        **{
            name: folder / name
            for name in ("full", "presets", "cut", "odd", "torn", "study", "study_binary", *ROW_FILES, *STUDY_FILES)
        },
    }
    (folder / "blocked").chmod(0o700)


@pytest.fixture(autouse=True)
def as_users_run_it():
    with jax.numpy_rank_promotion("allow"), jax.enable_x64(False):
        yield


META = ("study", "command", "call", "flags", "clients")
"""Tables of `fedjax-meta`."""


def _app(program):
    if program in META:
        return cli.app
    if not program.startswith("/"):
        return importlib.import_module(module_of(program)).app
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    module = importlib.import_module(program[1:])
    measure = importlib.import_module("_measure")
    return measure.as_program(module.bench if program == "/second_order" else module.main)


def _flat(text):
    """Output without the frame of a usage error, and without line breaks."""
    return " ".join(re.sub("[│╭╰─╮╯]", " ", text).split())


@pytest.mark.parametrize("name", commands.ROWS)
def test_one_line_says_what_is_wrong(name, places, monkeypatch):
    program, arguments, words = commands.ROWS[name]
    monkeypatch.chdir(places["tmp"])
    before = sorted(places["tmp"].rglob("*"))
    arguments = [argument.format(**places) for argument in arguments]
    with contextlib.ExitStack() as stack:
        # `use_all_cores` changes JAX's settings, which other tests have set.
        stack.callback(jax.config.update, "jax_enable_compilation_cache", jax.config.jax_enable_compilation_cache)
        result = typer_testing.CliRunner().invoke(_app(program), arguments, env={"COLUMNS": "1000", "TERM": "dumb"})
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (1, 2)
    assert "Traceback" not in result.output
    if result.exit_code == 1:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        assert len(lines) == 1 and lines[0].startswith("error: ")
    for word in words:
        assert word.format(**places) in _flat(result.output)
    # A run that is refused leaves no folder.
    assert sorted(places["tmp"].rglob("*")) == before


@pytest.mark.parametrize("name", commands.AS_PROCESSES)
def test_the_same_as_a_process(name, places):
    program, arguments, words = commands.ROWS[name]
    module = "fedjax_meta" if program in META else f"experiments.{program}"
    script = [str(BENCHMARKS / f"{program[1:]}.py")] if program.startswith("/") else ["-m", module]
    command = [sys.executable, *script, *(argument.format(**places) for argument in arguments)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    for word in words:
        assert word.format(**places) in done.stderr


@pytest.mark.parametrize(
    ("variables", "arguments", "code", "words"),
    [
        ({"PYTHONIOENCODING": "ascii"}, ("list", "partitions"), 0, "dirichlet_clients"),
        ({"JAX_PLATFORMS": "abacus"}, ("run", "quickstart", "--quick"), 1, "error: Unable to initialize backend 'abacus'"),
        (
            {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""},
            ("run", "quickstart", "--quick"),
            1,
            "error: Unable to initialize backend",
        ),
    ],
    ids=["a terminal without Greek letters", "a platform that is not there", "a GPU that is not there"],
)
def test_odd_surroundings_end_in_no_traceback(variables, arguments, code, words, tmp_path):
    given = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", "fedjax_meta", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr and "Traceback" not in done.stderr and done.stderr.count("\n") == code
    assert not list(tmp_path.iterdir())
