"""Shared measurements: compile time, interleaved run times, XLA's counts of work and memory, and rows of results."""

import functools
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import typer

from fedjax_meta import checks, runtime
from fedjax_meta.study.environment import cpu_model

# Without this, JAX takes most of an accelerator's memory, which workers and PyTorch need too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def environment() -> dict[str, Any]:
    """The machine and the versions that a number was measured with. Starts JAX."""
    versions = {}
    for name in ("jax", "jaxlib", "flax", "optax", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    devices = jax.devices()
    return {
        "device": devices[0].device_kind,
        "platform": devices[0].platform,
        "devices": len(devices),
        "processor": cpu_model(),
        "python": platform.python_version(),
        **versions,
    }


def compile_anew() -> None:
    """Turns JAX's cache of compiled programs off, also the one that `JAX_COMPILATION_CACHE_DIR` names.

    A program from a cache would hide what compiling costs. Call it before anything is compiled.
    """
    jax.config.update("jax_enable_compilation_cache", False)


class Program(NamedTuple):
    """A compiled function with XLA's analysis of it.

    Attributes:
      call: the compiled function.
      compile_seconds: seconds for tracing, lowering and compiling.
      flops: floating-point operations; a loop body counts once, however often it runs. NaN if XLA does not report it. On a
        GPU they are those of the program for a CPU, because XLA does not count what it leaves to cuBLAS.
      temp_bytes: peak bytes of temporary memory, without arguments and results.
    """

    call: Callable[..., Any]
    compile_seconds: float
    flops: float
    temp_bytes: int


def compiled(function: Callable[..., Any], *arguments: Any) -> Program:
    """Compiles `function` for these arguments, as a run compiles its programs."""
    begin = time.perf_counter()
    program = runtime.compiled(jax.jit(function).lower(*arguments))
    seconds = time.perf_counter() - begin
    memory = program.memory_analysis()
    return Program(program, seconds, _flops(program, function, arguments), memory.temp_size_in_bytes if memory else 0)


def _flops(program: jax.stages.Compiled, function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    if jax.default_backend() == "gpu":
        with runtime.compiling_for("cpu"), jax.default_device(jax.devices("cpu")[0]):
            # A function of its own: JAX would find the other program's trace.
            program = jax.jit(functools.partial(function)).lower(*jax.tree.map(_shape, arguments)).compile()
    return float((program.cost_analysis() or {}).get("flops", np.nan))


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.numpy.result_type(leaf))


Name = TypeVar("Name", bound=Hashable)


def interleaved(
    cases: Mapping[Name, Callable[[], Any]], *, repeats: int = 30, min_seconds: float = 0.005
) -> dict[Name, np.ndarray]:
    """Times all cases in turns, so that a change in the machine's speed affects all of them alike.

    Args:
      cases: functions without arguments that return only when their work is done (`block_until_ready`).
      repeats: number of times that each case is timed; every pass over the cases has another random order.
      min_seconds: a case whose call is shorter than this is called several times in a row.

    Returns:
      Seconds per call of each case, `[repeats]`.
    """
    calls = {}
    for name, case in cases.items():
        case()
        begin = time.perf_counter()
        case()
        calls[name] = max(1, int(min_seconds / max(time.perf_counter() - begin, 1e-9)))
    times: dict[Name, list[float]] = {name: [] for name in cases}
    order = list(cases)
    shuffle = np.random.default_rng(0)
    for _ in range(repeats):
        shuffle.shuffle(order)
        for name in order:
            begin = time.perf_counter()
            for _ in range(calls[name]):
                cases[name]()
            times[name].append((time.perf_counter() - begin) / calls[name])
    return {name: np.array(values) for name, values in times.items()}


class Spread(NamedTuple):
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Spread":
        """The median and quartiles of a sample."""
        low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
        return cls(float(median), float(low), float(high))


def write_row(path: Path | None, row: Mapping[str, Any]) -> None:
    """Appends a JSON line to a file; does nothing if `path` is `None`."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_rows(files: Iterable[Path]) -> list[dict[str, Any]]:
    """All rows of some files of JSON lines.

    Raises:
      ValueError: a line that is no row; the message names file and line.
      OSError: a file that cannot be read.
    """
    rows = []
    for file in files:
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            if line.strip():
                rows.append(_row(line, f"{file}:{number}"))
    return rows


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where} is no JSON: {checks.shown(line)}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no row, a JSON object with a benchmark, but {checks.shown(row)}")
    if "seconds" in row:
        checks.positive(f"{where}: seconds", row["seconds"])
        if not isinstance(row.get("benchmark"), str):
            raise ValueError(f"{where} has seconds, but benchmark={checks.shown(row.get('benchmark'))}")
    return row


def needed(row: Mapping[str, Any], keys: Iterable[str], *, numbers: Iterable[str] = ()) -> None:
    """Raises `ValueError` unless a row has these keys with plain values, and those of `numbers` with numbers above 0."""
    about = f"a row of {row.get('benchmark')} ({checks.shown(dict(row))})"
    for key in (*keys, *numbers):
        if key not in row:
            raise ValueError(f"{about} lacks {key!r}")
        if not isinstance(row[key], (str, int, float)):
            raise ValueError(f"{about} has {key}={checks.shown(row[key])}, which is no plain value")
    for key in numbers:
        checks.positive(f"{about}: {key}", row[key])


def check_outputs(output: Path | None = None, figure: Path | None = None) -> None:
    """Raises `OSError` or `ValueError` before anything is timed, and not after it, where a result cannot be written."""
    if output is not None:
        checks.writable("--output", output)
    if figure is not None:
        checks.writable("--figure", figure, endings=checks.FIGURES)


def as_program(main: Callable[..., None]) -> typer.Typer:
    """A benchmark as a program, whose errors that a user can correct are one line on stderr, with exit code 1."""

    @functools.wraps(main)
    def one_line_errors(*arguments: Any, **options: Any) -> None:
        try:
            main(*arguments, **options)
        except (typer.Exit, typer.Abort):  # which are RuntimeErrors
            raise
        except (ValueError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            # Of the output of a process that failed, the last line says why.
            typer.echo(f"error: {lines[-1] if lines else type(error).__name__}", err=True)
            raise typer.Exit(1) from None

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(one_line_errors)
    return app


def product_ceiling(size: int = 2048, repeats: int = 8) -> float:
    """GFLOP/s of a large float32 matrix product on one device, the best of `repeats` runs: the reachable peak."""
    with jax.default_matmul_precision("float32"):
        product = jax.jit(lambda a, b: a @ b)
        square = jax.device_put(np.ones((size, size), np.float32))
        jax.block_until_ready(product(square, square))
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            jax.block_until_ready(product(square, square))
            times.append(time.perf_counter() - begin)
    return 2 * size**3 / min(times) / 1e9
