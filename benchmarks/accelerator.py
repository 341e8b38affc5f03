"""Answers questions about an accelerator: are results right and the same each time, how fast are rounds, do our choices hold.

The parts, the most important first. Each part writes its rows as soon as it has them:

- numbers: loss, gradient and Hessian-vector product of every network, compared with the CPU of the same process.
- rounds of W1, W2 and the exact W3a with 50 clients, beside PyTorch.
- methods: two rounds of every method, and its evaluations, compared with the CPU of the same process.
- bits: whether the same program, and another process that compiles it anew, give the same bits. For two rounds of methods
  and of FedAvg with networks of each kind, and three rounds of the workloads. By default of some methods, and cohorts of 50.
- rounds: the workloads at several cohort sizes, beside PyTorch's loop, `torch.func.vmap` and its compiled forms; exact compared
  with first-order meta-gradients; device memory.
- flags: rounds with other settings of XLA, such as loops in CUDA graphs, no graph, or a search for the fastest form of a
  product (NVIDIA only).
- kernels: the kernels in which the rounds of a cohort of 50 spend their time. CUDA graphs are off, because each graph would be
  one event (not on a CPU).
- forms: the gradient of a cohort of each image network with each form of convolution.

Every measurement has its own process. Several processes can start and compile side by side (`--side-by-side`); then they are
timed one after the other, while the others wait. At the time limit no measurement begins, and a running one is stopped. The
process of this program does not start JAX, because a TPU belongs to one process at a time.

No data set is needed. The only packages are those of this library and, for the comparison, PyTorch.
"""

import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import _fedjax_meta_peer
import jax
import jax.numpy as jnp
import numpy as np
import peers
import systems
import typer
from _agreement import IMAGES, NETWORKS, bits, image_batch, method, numbers
from _measure import Spread, as_program, check_outputs, environment, interleaved, write_row
from _side_by_side import Clock, Measurement, Ready, Row, at_once, in_process, measured
from _workloads import Job, parameters, workload
from rich.console import Console

from fedjax_meta import checks, layers, masks, models, runtime
from fedjax_meta.task import Batch, Task

CASES = ("W1", "W2", "W3a-lenet-first", "W3a-lenet-exact", "W3b-mlp-exact", "W4")
COHORTS = (5, 50, 500)
COHORT = 50
"""That of the first rounds and of `bits`, and the largest of PyTorch's loop, whose time grows with the clients."""
FIRST_CASES = ("W1", "W2", "W3a-lenet-exact")
"""Those of the first rounds, so that a short run times some."""
BITS_METHODS = ("fedavg", "scaffold", "fedper", "fedmeta_per", "imaml", "pfedme", "fedem", "fedpac")
SIDE_BY_SIDE = {"gpu": 4}
"""A TPU belongs to one process at a time."""
_SEARCH = "--xla_gpu_autotune_level=4 --xla_gpu_deterministic_ops=false"
"""XLA's own settings, with which it times the forms of each product and takes the fastest."""
FLAGS = {
    "default": "",
    "no graphs": "--xla_gpu_enable_command_buffer=",
    "loops in graphs": "--xla_gpu_enable_command_buffer="
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
    "search": f"--xla_gpu_enable_triton_gemm=false {_SEARCH}",
    "Triton products": f"--xla_gpu_enable_triton_gemm=true {_SEARCH}",
    "Triton products, no search": "--xla_gpu_enable_triton_gemm=true",
}
"""Settings of XLA for NVIDIA's GPUs that change how long a round and its compilation take."""
PRECISIONS = ("float32", "tf32")


def rounds(
    case: str, peer: str, most: int, seconds: float, clock: Clock, *, flags: str = "", precision: str = "float32"
) -> Ready:
    """Rounds of one simulator in a process of its own, which ends at the time limit.

    Args:
      case: a workload.
      peer: a simulator.
      most: rounds to time.
      seconds: after so many no more begin, but at least three are timed.
      clock: the time limit.
      flags: more of XLA's.
      precision: of matrix products.
    """
    worker = peers.Worker(peer, case, peers.threads_of(peer), flags=flags, precision=precision)
    stop = threading.Timer(max(clock.left, 0), worker.kill)
    stop.daemon = True
    stop.start()

    def or_error(do: Callable[[], Row | None]) -> Row:
        try:
            return do() or {}
        except RuntimeError as error:
            stop.cancel()
            worker.end()
            if clock.left <= 0:
                raise TimeoutError(f"{case} of {peer} ran into the time limit") from error
            raise

    def warm() -> None:
        worker.answer()
        for _ in range(2):  # the second round may compile too
            worker.round()

    def measure() -> Row:
        end = time.monotonic() + seconds
        for done in range(most):
            if done >= 3 and time.monotonic() > end:
                break
            worker.round()
        memory = worker.stop()
        stop.cancel()
        timed = worker.seconds[2:]
        spread = Spread.of(np.array(timed))
        found = {"first_seconds": worker.seconds[0], "seconds": spread.median, "low": spread.low, "high": spread.high}
        return {**found, "rounds": len(timed), **memory}

    or_error(warm)
    return partial(or_error, measure)


def kernels(case: str, kept: Path | None, most: int = 15) -> Ready:
    """The kernels that a round takes most of its time in, from a profile of three rounds.

    Args:
      case: a workload.
      kept: a folder that keeps the profile, as CASE.xplane.pb.
      most: kernels that the row names.

    Returns:
      What gives seconds of a `round`, seconds in which a kernel ran (`busy`), `launches`, and the first `most` kernels by time,
      each as [name, calls in a round, seconds in a round].
    """
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS['no graphs']}".strip()
    work, profiled = workload(case), 3
    next_round = _fedjax_meta_peer.rounds(Job(work, *work.arrays(), parameters(work.model), shuffle=True, threads=1))
    for _ in range(2):
        next_round()

    def profile() -> Row:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                begin = time.perf_counter()
                for _ in range(profiled):
                    next_round()
                seconds = time.perf_counter() - begin
            (file,) = Path(folder).rglob("*.xplane.pb")
            if kept is not None:
                shutil.copy(file, kept / f"{case}.xplane.pb")
            calls = _device_events(jax.profiler.ProfileData.from_file(str(file)))
        by_time = sorted(((sum(times), len(times), name) for name, times in calls.items()), reverse=True)
        return {
            "round": seconds / profiled,
            "busy": sum(total for total, _, _ in by_time) / profiled,
            "launches": sum(count for _, count, _ in by_time) // profiled,
            "kernels": [[name[:80], count // profiled, total / profiled] for total, count, name in by_time[:most]],
        }

    return profile


_EVENTS = {"/device:GPU": "Stream", "/device:TPU": "XLA Ops"}
"""Where a profile has what ran on a device: the beginning of the plane's name, and that of its lines."""


def _device_events(profile: Any) -> dict[str, list[float]]:
    """Seconds of each call of what ran on the first device of a profile, by its name."""
    of_devices = [
        (plane, lines) for plane in profile.planes for device, lines in _EVENTS.items() if plane.name.startswith(device)
    ]
    if not of_devices:
        raise ValueError(f"the profile has no device, only {', '.join(plane.name for plane in profile.planes)}")
    plane, start = of_devices[0]
    calls: dict[str, list[float]] = {}
    for line in plane.lines:
        for event in line.events if line.name.startswith(start) else ():
            calls.setdefault(event.name, []).append(event.duration_ns / 1e9)
    return calls


def forms(name: str, lanes: int, rows: int, repeats: int) -> Ready:
    """Seconds of the gradients of `lanes` clients with each form of convolution."""
    batch = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (lanes, *leaf.shape)), image_batch(name, rows))
    cases: dict[str, Callable[[], Any]] = {}
    for form in layers.FORMS:
        if form == "lax" and runtime.on_cpu():
            continue  # a grouped convolution takes minutes there
        task = models.MODELS[name](form=form)
        variables = task.init(jax.random.key(0))
        moving, fixed = masks.split(variables, task.trainable(variables))

        def loss(moving: Any, batch: Batch, task: Task = task, fixed: Any = fixed) -> jax.Array:
            return task.loss(masks.merge(moving, fixed), batch, jax.random.key(0))[0]

        many = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (lanes, *leaf.shape)), moving)
        with jax.default_matmul_precision("float32"):
            gradient = runtime.compiled(jax.jit(jax.vmap(jax.grad(loss))).lower(many, batch))  # as a run compiles it
        cases[form] = lambda gradient=gradient, many=many: jax.block_until_ready(gradient(many, batch))
    for case in cases.values():
        case()
    return lambda: {f"{form}_seconds": Spread.of(times).median for form, times in interleaved(cases, repeats=repeats).items()}


class Asked(NamedTuple):
    """What to measure; the options of `main`. Empty `methods`, `cases`, `cohorts` and `flags` are the defaults of each part."""

    parts: list[str]
    methods: list[str]
    cases: list[str]
    cohorts: list[int]
    simulators: list[str]
    flags: list[str]
    precision: str
    repeats: int
    seconds: float
    rows: int
    profiles: Path | None


def plan(asked: Asked, clock: Clock, platform: str) -> Iterator[Measurement]:
    """What is measured on a platform."""
    timed = (asked.repeats, asked.seconds, clock)
    chosen = asked.cases or [*CASES]
    cohorts = asked.cohorts or [*COHORTS]

    def rounds_of(cases: list[str], cohort: int) -> Iterator[Measurement]:
        # What takes long to compile is side by side with its like.
        for peer, case in itertools.product(asked.simulators, cases):
            if not (peer == "torch" and cohort > COHORT):
                about = {"part": "rounds", "case": f"{case}-{cohort}", "peer": peer, "precision": asked.precision}
                yield Measurement(about, partial(rounds, about["case"], peer, *timed, precision=asked.precision))

    if "numbers" in asked.parts:
        for name in ("mlp", "mtfl_mlp", *IMAGES):
            yield Measurement(
                {"part": "numbers", "model": name}, partial(in_process, clock, at_once, numbers, name, asked.rows)
            )
    first = [case for case in chosen if case in FIRST_CASES] if COHORT in cohorts else []
    if "rounds" in asked.parts:
        yield from rounds_of(first, COHORT)
    if "methods" in asked.parts:
        for name in asked.methods or systems.SYSTEMS:
            yield Measurement(
                {"part": "methods", "method": name}, partial(in_process, clock, at_once, method, name, asked.rows)
            )
    if "bits" in asked.parts:
        wanted = [("case", f"{case}-{cohort}") for cohort in asked.cohorts or [COHORT] for case in chosen]
        wanted += [("network", name) for name in NETWORKS] + [("method", name) for name in asked.methods or BITS_METHODS]
        for flags, (kind, name) in itertools.product(asked.flags or ["default"], wanted):
            about = {"part": "bits", kind: name, "flags": flags}
            yield Measurement(about, partial(bits, clock, kind, name, asked.rows, FLAGS[flags]))
    if "rounds" in asked.parts:
        for cohort in cohorts:
            yield from rounds_of([case for case in chosen if cohort != COHORT or case not in first], cohort)
    if "flags" in asked.parts and platform == "gpu":
        for cohort, case, name in itertools.product(cohorts, asked.cases or ["W2"], asked.flags or FLAGS):
            about = {"part": "flags", "case": f"{case}-{cohort}", "flags": name}
            yield Measurement(about, partial(rounds, about["case"], "fedjax_meta", *timed, flags=FLAGS[name]))
    if "kernels" in asked.parts and platform != "cpu":  # whose threads record whole loops
        for case in chosen:
            about = {"part": "kernels", "case": f"{case}-{COHORT}"}
            yield Measurement(about, partial(in_process, clock, kernels, about["case"], asked.profiles))
    if "forms" in asked.parts:
        for cohort in cohorts:
            for name in IMAGES:
                about = {"part": "forms", "model": name, "lanes": cohort, "batch_size": asked.rows}
                yield Measurement(about, partial(in_process, clock, forms, name, cohort, asked.rows, asked.repeats))


PARTS = ("numbers", "methods", "bits", "rounds", "flags", "kernels", "forms")


def main(
    limit: Annotated[float, typer.Option(help="Time limit in seconds; running measurements are then stopped.")] = 600.0,
    part: Annotated[list[str] | None, typer.Option(help=f"{', '.join(PARTS)}; by default all.", show_default=False)] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help=f"Cases; by default {', '.join(CASES)}, and in the part flags W2.", show_default=False),
    ] = None,
    cohort: Annotated[
        list[int] | None,
        typer.Option(help="Clients per round; by default 5, 50, 500, and in the part bits 50.", show_default=False),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Simulators in the part rounds; by default those that can run of {', '.join(peers.TORCH)}.",
            show_default=False,
        ),
    ] = None,
    flag: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Settings of XLA: {', '.join(FLAGS)}; by default all in the part flags, and the first in bits.",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of timed rounds, and of timed calls of a gradient.")] = 10,
    seconds: Annotated[float, typer.Option(help="Seconds after which no more rounds begin; at least three are timed.")] = 5.0,
    rows: Annotated[int, typer.Option(min=1, help="Samples per batch in `numbers`, `methods` and `forms`.")] = 32,
    side_by_side: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of measurements that start and compile at the same time; by default 4 on a GPU, otherwise 1."
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Methods of the parts methods and bits; by default all, and in bits {', '.join(BITS_METHODS)}.",
            show_default=False,
        ),
    ] = None,
    precision: Annotated[str, typer.Option(help=f"Precision of products in rounds: {', '.join(PRECISIONS)}.")] = "float32",
    profiles: Annotated[Path | None, typer.Option(help="Folder for the profiles of `kernels`.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option(help="File to append the rows to, as JSON lines.", show_default=False)] = None,
) -> None:
    """Checks and times this library on an accelerator, and stops cleanly at a time limit.

    \b
    Examples:
      python benchmarks/accelerator.py --output accelerator.jsonl
      python benchmarks/accelerator.py --part rounds --case W1 --limit 300
    """
    checks.positive("--limit", limit)
    checks.positive("--seconds", seconds)
    for size in cohort or ():
        checks.count("--cohort", size)
    for name in part or ():
        checks.one_of("--part", name, PARTS)
    for name in peer or ():
        checks.one_of("--peer", name, peers.TORCH)
    for name in method or ():
        checks.one_of("--method", name, systems.SYSTEMS)
    checks.one_of("--precision", precision, PRECISIONS)
    for name in flag or ():
        checks.one_of("--flag", name, FLAGS)
    for name, count in itertools.product(case or CASES, cohort or COHORTS):
        workload(f"{name}-{count}")
    check_outputs(output)
    if profiles is not None:
        profiles.mkdir(parents=True, exist_ok=True)
    clock, console = Clock(limit), Console()
    try:
        about = in_process(clock, at_once, environment)()
    except TimeoutError:
        console.print("time is up before the devices were found")
        return
    console.print(f"{about['device']} x {about['devices']}, {limit:.0f} s", soft_wrap=True)
    simulators, missing = peers.present(peer, peers.TORCH, about["platform"])
    for name, why in missing.items():
        console.print(f"{name} is left out: {why}")
    at_a_time = side_by_side or SIDE_BY_SIDE.get(about["platform"], 1)
    about["side_by_side"] = at_a_time  # first rounds, which compile, take longer side by side
    if about["platform"] == "cpu" and precision != "float32":
        raise ValueError(f"--precision {precision} is none of a CPU's, which has float32")
    chosen = (part or [*PARTS], method or [], case or [], cohort or [], simulators, flag or [])
    asked = Asked(*chosen, precision, repeats, seconds, rows, profiles)
    done = 0
    for what, found in measured(plan(asked, clock, about["platform"]), at_a_time, clock):
        if found is None:
            console.print(f"time is up after {done} measurements; the first that is missing: {_words(what)}", soft_wrap=True)
            return
        done += 1
        write_row(output, {"benchmark": "accelerator", **what, **found, **about})
        console.print(_words(what), _words(found), soft_wrap=True)
    console.print(f"{done} measurements")


def _words(row: Row) -> str:
    return ", ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())


if __name__ == "__main__":
    as_program(main)()
