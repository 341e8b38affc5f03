"""Answers questions about an accelerator: are results right and the same each time, how fast are rounds, do our choices hold.

The parts, the most important first. Each part writes its rows as soon as it has them:

- numbers: loss, gradient and Hessian-vector product of every network, compared with the CPU of the same process.
- methods: two rounds of every method, and its evaluations, compared with the CPU of the same process.
- bits: whether the same program, and another process that compiles it anew, give the same bits. For two rounds of every method
  and of FedAvg with networks of each kind, and three rounds of the workloads.
- rounds: the workloads at several cohort sizes, beside PyTorch's loop, `torch.func.vmap` and its compiled form; exact compared
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

import contextlib
import itertools
import logging
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from _measure import Spread, as_program, check_outputs, environment, interleaved, write_row
from _workloads import Job, parameters, workload
from rich.console import Console

import fedjax_meta as fm
from fedjax_meta import checks, layers, masks, models, runtime
from fedjax_meta.task import Batch, Task
from fedjax_meta.types import PyTree

CASES = ("W1", "W2", "W3a-lenet-first", "W3a-lenet-exact", "W3b-mlp-exact", "W4")
COHORTS = (5, 50, 500)
LOOP_COHORT = 50
"""The largest cohort of PyTorch's loop, whose time grows with the clients."""
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
IMAGES = ("lenet", "fedpac_cnn", "mtfl_cnn")
NETWORKS = (*IMAGES, "char_lstm", "transformer")
"""Networks of which two rounds of FedAvg are repeated."""

Row = dict[str, Any]
Ready = Callable[[], Row]
"""A measurement that has started and compiled; a call makes it."""


class Measurement(NamedTuple):
    """What is measured, and how to get ready for it."""

    about: Row
    prepare: Callable[[], Ready]


class Clock:
    """The time that is left."""

    def __init__(self, limit: float) -> None:
        self._end = time.monotonic() + limit

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()


def in_process(clock: Clock, prepare: Callable[..., Ready], *arguments: Any) -> Ready:
    """`prepare(*arguments)` in a process of its own, which ends at the time limit. A call has it make the measurement.

    Raises (here and in the call):
      TimeoutError: the limit came first.
      RuntimeError: the measurement failed; the message has its error.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, prepare, arguments), daemon=True)
    process.start()
    theirs.close()  # the process has its own, so that its end is seen here

    def answer() -> Row | None:
        error: str | None = None
        try:
            if not ours.poll(max(clock.left, 0)):
                raise TimeoutError(f"{prepare.__name__} ran into the time limit")
            found, error = ours.recv()
        except EOFError:
            process.join()
            error = f"ended with exit status {process.exitcode}"
        except TimeoutError:
            end()
            raise
        if error is not None:
            end()
            raise RuntimeError(error)
        return found

    def end() -> None:
        process.kill()
        process.join()

    def measure() -> Row:
        ours.send(None)
        found = answer()
        end()
        assert found is not None
        return found

    answer()
    return measure


def _serve(pipe: Any, prepare: Callable[..., Ready], arguments: tuple[Any, ...]) -> None:
    """Sends (`None`, `None`) when it is ready and (row, `None`) when it was asked to measure, or (`None`, its error)."""
    logging.getLogger("fedjax_meta").setLevel(logging.ERROR)  # here a CPU beside the accelerator is one device, on purpose
    try:
        measure = prepare(*arguments)
        pipe.send((None, None))
        try:
            pipe.recv()
        except EOFError:
            return  # the time limit came: nobody asks any more
        pipe.send((measure(), None))
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):
            pipe.send((None, f"{type(error).__name__}: {error}"))


def at_once(measure: Callable[..., Row], *arguments: Any) -> Ready:
    """A measurement that is no time, so that others may run beside it: it is made here."""
    found = measure(*arguments)
    return lambda: found


# Is it right?


def numbers(name: str, rows: int) -> Row:
    """The largest relative difference between accelerator and CPU of an image network's loss, gradient and product."""
    task = models.MODELS[name]()
    batch = _image_batch(name, rows)
    key = jax.random.key(0)

    def all_three(key: jax.Array, batch: Batch) -> Any:
        variables = task.init(key)
        moving, fixed = masks.split(variables, task.trainable(variables))

        def loss(moving: Any) -> jax.Array:
            return task.loss(masks.merge(moving, fixed), batch, key)[0]

        gradient, product = jax.jvp(jax.grad(loss), (moving,), (moving,))
        return {"loss": loss(moving), "gradient": gradient, "product": product}

    found = []
    for device in _both():
        with runtime.compiling_for(device.platform), jax.default_device(device), jax.default_matmul_precision("float32"):
            given = (key, jax.device_put(batch, device))
            # As a run compiles it: XLA's own search takes a minute for a network.
            found.append(jax.device_get(runtime.compiled(jax.jit(partial(all_three)).lower(*given))(*given)))
    return {f"{part}_difference": _difference(found[0][part], found[1][part]) for part in found[0]}


CLIENTS = 4


def method(name: str, rows: int, rounds: int = 2) -> Row:
    """The largest relative difference between accelerator and CPU of a method's state and measures after some rounds.

    Four clients of five batches take part in each round.
    """
    built, data = _method(name, rows)
    found = [trained(built, data, rounds, CLIENTS, device) for device in _both()]
    return {
        "state_difference": _difference(found[0][0], found[1][0]),
        "measures_difference": _difference(found[0][1], found[1][1]),
    }


def _method(name: str, rows: int) -> tuple[fm.Method, fm.FederatedData]:
    samples = 5 * rows
    size = {"epochs": 2, "steps": 5, "cohort": CLIENTS, "samples": samples}
    parts = systems.Costs(**dict.fromkeys(systems.Costs._fields, 0) | size)
    return systems.method(name, models.MODELS["mlp"](), parts, rows), systems.client_data("mlp", CLIENTS, samples)


def trained(method: fm.Method, data: fm.FederatedData, rounds: int, cohort: int, device: jax.Device) -> tuple[PyTree, PyTree]:
    """(state, measures of known and new clients) after some rounds on a device."""
    with runtime.compiling_for(device.platform), jax.default_device(device):
        run = fm.federate(method, fm.Federation(cohort_size=cohort, devices=[device]))
        tests = {}
        for known in (True, False) if "support" in data.start else ():
            test = partial(fm.evaluate, run, support="support", query="query", known=known)
            tests[f"known {known}"] = fm.Evaluator(test, data, known=known)
        state, records = fm.simulate(run, data, key=jax.random.key(0), rounds=rounds, eval_every=rounds, evaluators=tests)
        return jax.device_get((jax.tree.map(_plain, state), records[-1].evaluations))


# Is it the same each time?


def twice(part: str, name: str, rows: int, flags: str) -> tuple[PyTree, PyTree]:
    """What training comes to on the accelerator, two times in this process, which compiles its programs once.

    Args:
      part: "method" (with an MLP, four clients), "network" (FedAvg, four clients) or "case" (of the workloads).
      name: its name.
      rows: samples of a batch.
      flags: of XLA's.
    """
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    rounds, cohort = 2, CLIENTS
    if part == "method":
        method, data = _method(name, rows)
    elif part == "network":
        method = fm.fedavg(models.MODELS[name](), lr=0.1, batch_size=rows)
        data = _tokens(rows) if name in ("char_lstm", "transformer") else systems.client_data("lenet", CLIENTS, 5 * rows)
    else:
        work = workload(name)
        job = Job(work, *work.arrays(), parameters(work.model), shuffle=True, threads=1)
        method, data, rounds, cohort = _fedjax_meta_peer.method(work), _fedjax_meta_peer.client_data(job), 3, work.cohort_size
    device = runtime.default_devices()[0]
    first, second = (trained(method, data, rounds, cohort, device) for _ in range(2))
    return first, second


def _tokens(rows: int) -> fm.FederatedData:
    rng = np.random.default_rng(0)
    pools = [tuple(rng.integers(0, 80, (2, 5 * rows, 40), dtype=np.int32)) for _ in range(CLIENTS)]
    return fm.from_clients(pools, num_classes=80)


def bits(clock: Clock, *arguments: Any) -> Ready:
    """Whether `twice(*arguments)` gives the same bits, and the same in another process; otherwise the largest difference."""
    (one, again), (other, _) = (in_process(clock, _sent, *arguments)()["found"] for _ in range(2))
    found: Row = {}
    for name, compared in (("repeated", again), ("other_process", other)):
        equal = jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f"), one, compared)
        found[name] = all(jax.tree.leaves(equal))
        if not found[name]:
            found[f"{name}_difference"] = _difference(one, compared)
    return lambda: found


def _sent(*arguments: Any) -> Ready:
    """`twice`, whose trees become what a pipe can carry."""
    found = jax.tree.map(np.asarray, tuple(tuple(jax.tree.leaves(tree)) for tree in twice(*arguments)))
    return lambda: {"found": found}


def _both() -> tuple[jax.Device, jax.Device]:
    return jax.devices("cpu")[0], runtime.default_devices()[0]


def _plain(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _image_batch(name: str, rows: int) -> Batch:
    rng = np.random.default_rng(0)
    shape = (28, 28, 1) if "mlp" in name else (32, 32, 3)
    x = rng.random((rows, *shape)).astype(np.float32)
    return Batch(x, rng.integers(0, 10, rows, dtype=np.int32), np.ones(rows, np.float32))


def _difference(expected: Any, found: Any) -> float:
    """The largest difference over all leaves, relative to the largest number of the leaf."""

    def gap(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return np.max(np.abs(a - b), initial=0.0) / max(np.max(np.abs(a), initial=0.0), 1e-30)

    return float(max(jax.tree.leaves(jax.tree.map(gap, expected, found)), default=0.0))


# How fast is it?


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
        except (RuntimeError, BrokenPipeError) as error:
            stop.cancel()
            if clock.left <= 0:
                raise TimeoutError(f"{case} of {peer} ran into the time limit") from error
            worker.kill()
            raise RuntimeError(str(error)) from error

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


# Which choices hold?


def forms(name: str, lanes: int, rows: int, repeats: int) -> Ready:
    """Seconds of the gradients of `lanes` clients with each form of convolution."""
    batch = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (lanes, *leaf.shape)), _image_batch(name, rows))
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
            gradient = jax.jit(jax.vmap(jax.grad(loss))).lower(many, batch).compile()
        cases[form] = lambda gradient=gradient, many=many: jax.block_until_ready(gradient(many, batch))
    for case in cases.values():
        case()
    return lambda: {f"{form}_seconds": Spread.of(times).median for form, times in interleaved(cases, repeats=repeats).items()}


class Asked(NamedTuple):
    """What to measure; the options of `main`. Empty `cases` and `flags` are the defaults of each part."""

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
    if "numbers" in asked.parts:
        for name in ("mlp", "mtfl_mlp", *IMAGES):
            yield Measurement(
                {"part": "numbers", "model": name}, partial(in_process, clock, at_once, numbers, name, asked.rows)
            )
    if "methods" in asked.parts:
        for name in asked.methods:
            yield Measurement(
                {"part": "methods", "method": name}, partial(in_process, clock, at_once, method, name, asked.rows)
            )
    if "bits" in asked.parts:
        wanted = [("case", f"{case}-{cohort}") for cohort in asked.cohorts for case in asked.cases or CASES]
        wanted += [("network", name) for name in NETWORKS] + [("method", name) for name in asked.methods]
        for flags, (kind, name) in itertools.product(asked.flags or ["default"], wanted):
            about = {"part": "bits", kind: name, "flags": flags}
            yield Measurement(about, partial(bits, clock, kind, name, asked.rows, FLAGS[flags]))
    if "rounds" in asked.parts:
        # What takes long to compile is side by side with its like.
        for cohort in asked.cohorts:
            for peer in asked.simulators:
                for case in asked.cases or CASES:
                    if peers.installed(peer) and not (peer == "torch" and cohort > LOOP_COHORT):
                        about = {"part": "rounds", "case": f"{case}-{cohort}", "peer": peer, "precision": asked.precision}
                        yield Measurement(about, partial(rounds, about["case"], peer, *timed, precision=asked.precision))
    if "flags" in asked.parts and platform == "gpu":
        for cohort, case, name in itertools.product(asked.cohorts, asked.cases or ["W2"], asked.flags or FLAGS):
            about = {"part": "flags", "case": f"{case}-{cohort}", "flags": name}
            yield Measurement(about, partial(rounds, about["case"], "fedjax_meta", *timed, flags=FLAGS[name]))
    if "kernels" in asked.parts and platform != "cpu":  # whose threads record whole loops
        for case in asked.cases or CASES:
            about = {"part": "kernels", "case": f"{case}-50"}
            yield Measurement(about, partial(in_process, clock, kernels, about["case"], asked.profiles))
    if "forms" in asked.parts:
        for cohort in asked.cohorts:
            for name in IMAGES:
                about = {"part": "forms", "model": name, "lanes": cohort, "batch_size": asked.rows}
                yield Measurement(about, partial(in_process, clock, forms, name, cohort, asked.rows, asked.repeats))


def measured(planned: Iterable[Measurement], at_a_time: int, clock: Clock) -> Iterator[tuple[Row, Row | None]]:
    """(what was measured, what was found) of each measurement; `None` of the one that the time limit stopped, the last.

    So many get ready side by side; then they are timed one after the other.
    """
    planned = iter(planned)
    while batch := list(itertools.islice(planned, at_a_time)):
        if clock.left <= 0:
            yield batch[0].about, None
            return
        with ThreadPoolExecutor(len(batch)) as pool:
            waiting = [pool.submit(one.prepare) for one in batch]
        for one, ready in zip(batch, waiting, strict=True):
            try:
                found = ready.result()()
            except TimeoutError:
                yield one.about, None
                return
            # One network or simulator that fails says something too, and does not keep the others from being measured.
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            yield one.about, found


PARTS = ("numbers", "methods", "bits", "rounds", "flags", "kernels", "forms")


def main(
    limit: Annotated[float, typer.Option(help="Time limit in seconds; running measurements are then stopped.")] = 600.0,
    part: Annotated[list[str] | None, typer.Option(help=f"{', '.join(PARTS)}; by default all.", show_default=False)] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help=f"Cases; by default {', '.join(CASES)}, and in the part flags W2.", show_default=False),
    ] = None,
    cohort: Annotated[
        list[int] | None, typer.Option(help="Clients per round; by default 5, 50, 500.", show_default=False)
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help=f"Simulators in the part rounds; by default {', '.join(peers.TORCH)}.", show_default=False),
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
        int, typer.Option(min=1, help="Number of measurements that start and compile at the same time.")
    ] = 1,
    method: Annotated[
        list[str] | None, typer.Option(help="Methods of the parts methods and bits; by default all.", show_default=False)
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
    check_outputs(output)
    if profiles is not None:
        profiles.mkdir(parents=True, exist_ok=True)
    for name in part or ():
        checks.one_of("--part", name, PARTS)
    for name in peer or ():
        checks.one_of("--peer", name, peers.TORCH)
    for name in method or ():
        checks.one_of("--method", name, systems.SYSTEMS)
    checks.one_of("--precision", precision, PRECISIONS)
    for name in flag or ():
        checks.one_of("--flag", name, FLAGS)
    chosen = (
        part or [*PARTS],
        method or [*systems.SYSTEMS],
        case or [],
        cohort or [*COHORTS],
        peer or [*peers.TORCH],
        flag or [],
    )
    asked = Asked(*chosen, precision, repeats, seconds, rows, profiles)
    for name, count in itertools.product(asked.cases or CASES, asked.cohorts):
        workload(f"{name}-{count}")
    clock, console = Clock(limit), Console()
    try:
        about = in_process(clock, at_once, environment)()
    except TimeoutError:
        console.print("time is up before the devices were found")
        return
    console.print(f"{about['device']} x {about['devices']}, {limit:.0f} s", soft_wrap=True)
    about["side_by_side"] = side_by_side  # first rounds, which compile, take longer side by side
    if about["platform"] == "cpu" and precision != "float32":
        raise ValueError(f"--precision {precision} is none of a CPU's, which has float32")
    done = 0
    for what, found in measured(plan(asked, clock, about["platform"]), side_by_side, clock):
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
