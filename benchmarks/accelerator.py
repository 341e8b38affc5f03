"""What a first accelerator must answer, in one command: is it right, how fast is it, and which of our choices hold there.

Parts, the most important first; each writes its rows at once. At the time limit nothing more begins, and what runs is stopped:
every measurement has a process of its own. This one does not start JAX, because a TPU belongs to one process at a time.

- numbers: loss, gradient and Hessian-vector product of every network on the accelerator against the CPU of the same process.
- rounds: the workloads at several cohort sizes, with PyTorch's loop, `torch.func.vmap` and its compiled form beside; exact
  against first-order meta-gradients; device memory.
- graphs: rounds with XLA's loops in CUDA graphs, with its defaults, and without any graph (NVIDIA only).
- forms: the gradient of a cohort of each image network with each form of convolution.

No data set is needed, nor any package but this library's and, for the comparison, PyTorch.
"""

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import peers
import typer
from _measure import Spread, as_program, check_outputs, environment, interleaved, write_row
from rich.console import Console

from fedjax_meta import checks, layers, masks, models, runtime
from fedjax_meta.task import Batch, Task

CASES = ("W1", "W2", "W3a-lenet-first", "W3a-lenet-exact", "W3b-mlp-exact", "W4")
COHORTS = (5, 50, 500)
GRAPHS = {
    "default": "",
    "none": "--xla_gpu_enable_command_buffer=",
    "loops": "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
}
"""What XLA may put into CUDA graphs."""
IMAGES = ("lenet", "fedpac_cnn", "mtfl_cnn")

Row = dict[str, Any]


class Clock:
    """The time that is left."""

    def __init__(self, limit: float) -> None:
        self._end = time.monotonic() + limit

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()


def in_process(clock: Clock, measure: Callable[..., Row], *arguments: Any) -> Row:
    """What `measure(*arguments)` finds in a process of its own, which ends at the time limit.

    Raises:
      TimeoutError: the limit came first.
      RuntimeError: the measurement failed; the message has its error.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, measure, arguments), daemon=True)
    process.start()
    sender.close()  # the process has its own, so that its end is seen here
    try:
        if not receiver.poll(max(clock.left, 0)):
            raise TimeoutError(f"{measure.__name__} ran into the time limit")
        found, error = receiver.recv()
    except EOFError:
        process.join()
        error = f"ended with exit status {process.exitcode}"
    finally:
        process.kill()
        process.join()
    if error is not None:
        raise RuntimeError(error)
    return found


def _send(sender: Any, measure: Callable[..., Row], arguments: tuple[Any, ...]) -> None:
    """Sends (what a measurement finds, `None`), or (`None`, its error)."""
    try:
        sender.send((measure(*arguments), None))
    except Exception as error:
        sender.send((None, f"{type(error).__name__}: {error}"))


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
    for device in (jax.devices("cpu")[0], runtime.default_devices()[0]):
        with runtime.compiling_for(device.platform), jax.default_device(device), jax.default_matmul_precision("float32"):
            found.append(jax.device_get(jax.jit(partial(all_three))(key, jax.device_put(batch, device))))
    return {f"{part}_difference": _difference(found[0][part], found[1][part]) for part in found[0]}


def _image_batch(name: str, rows: int) -> Batch:
    rng = np.random.default_rng(0)
    shape = (28, 28, 1) if "mlp" in name else (32, 32, 3)
    x = rng.random((rows, *shape)).astype(np.float32)
    return Batch(x, rng.integers(0, 10, rows, dtype=np.int32), np.ones(rows, np.float32))


def _difference(expected: Any, found: Any) -> float:
    """The largest difference over all leaves, relative to the largest number of the leaf."""
    gaps = jax.tree.map(lambda a, b: np.max(np.abs(a - b)) / max(float(np.max(np.abs(a))), 1e-30), expected, found)
    return float(max(jax.tree.leaves(gaps)))


# How fast is it?


@contextlib.contextmanager
def _flags(flags: str) -> Iterator[None]:
    """More of XLA's flags for processes that begin inside."""
    before = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{before or ''} {flags}".strip()
    try:
        yield
    finally:
        if before is None:
            del os.environ["XLA_FLAGS"]
        else:
            os.environ["XLA_FLAGS"] = before


def rounds(case: str, peer: str, repeats: int, clock: Clock, flags: str = "") -> Row:
    """Seconds of rounds of one simulator in a process of its own, which ends at the time limit."""
    with _flags(flags):
        worker = peers.Worker(peer, case, peers.threads_of(peer))
    stop = threading.Timer(max(clock.left, 0), worker.kill)
    stop.daemon = True
    stop.start()
    try:
        worker.answer()
        for _ in range(repeats + 2):
            worker.round()
        memory = worker.stop()
    except (RuntimeError, BrokenPipeError) as error:
        if clock.left <= 0:
            raise TimeoutError(f"{case} of {peer} ran into the time limit") from error
        worker.kill()
        raise RuntimeError(str(error)) from error
    finally:
        stop.cancel()
    spread = Spread.of(np.array(worker.seconds[2:]))
    # The second round may compile too.
    return {"first_seconds": worker.seconds[0], "seconds": spread.median, "low": spread.low, "high": spread.high, **memory}


# Which choices hold?


def forms(name: str, lanes: int, rows: int, repeats: int) -> Row:
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
        gradient = jax.jit(jax.vmap(jax.grad(loss)))
        cases[form] = lambda gradient=gradient, many=many: jax.block_until_ready(gradient(many, batch))
    return {f"{form}_seconds": Spread.of(times).median for form, times in interleaved(cases, repeats=repeats).items()}


def plan(
    cases: list[str], cohorts: list[int], parts: list[str], repeats: int, rows: int, clock: Clock, platform: str
) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """What is measured on a platform, as (what it is, the measurement)."""
    if "numbers" in parts:
        for name in ("mlp", "mtfl_mlp", *IMAGES):
            yield {"part": "numbers", "model": name}, partial(in_process, clock, numbers, name, rows)
    if "rounds" in parts:
        for cohort in cohorts:
            for case in cases:
                name = f"{case}-{cohort}"
                for peer in peers.TORCH:
                    if peers.installed(peer):
                        yield {"part": "rounds", "case": name, "peer": peer}, partial(rounds, name, peer, repeats, clock)
    if "graphs" in parts and platform == "gpu":
        for cohort in cohorts:
            for graphs, flags in GRAPHS.items():
                about = {"part": "graphs", "case": f"W2-{cohort}", "graphs": graphs}
                yield about, partial(rounds, f"W2-{cohort}", "fedjax_meta", repeats, clock, flags)
    if "forms" in parts:
        for cohort in cohorts:
            for name in IMAGES:
                about = {"part": "forms", "model": name, "lanes": cohort, "batch_size": rows}
                yield about, partial(in_process, clock, forms, name, cohort, rows, repeats)


PARTS = ("numbers", "rounds", "graphs", "forms")


def main(
    limit: Annotated[float, typer.Option(help="Seconds after which nothing begins and what runs is stopped.")] = 600.0,
    part: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(PARTS)}; all when not given.", show_default=False)
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help=f"Of rounds; {', '.join(CASES)} when not given.", show_default=False)
    ] = None,
    cohort: Annotated[list[int] | None, typer.Option(help="Clients a round; 5, 50, 500.", show_default=False)] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, and calls of a gradient, that are timed.")] = 10,
    rows: Annotated[int, typer.Option(min=1, help="Samples of a batch in `numbers` and `forms`.")] = 32,
    output: Annotated[Path | None, typer.Option(help="JSON lines to append to.", show_default=False)] = None,
) -> None:
    """Measures what a first accelerator must answer, and stops cleanly at a time limit.

    \b
    Examples:
      python benchmarks/accelerator.py --output accelerator.jsonl
      python benchmarks/accelerator.py --part rounds --case W1 --limit 300
    """
    check_outputs(output)
    for name in part or ():
        checks.one_of("--part", name, PARTS)
    clock, console = Clock(limit), Console()
    try:
        about = in_process(clock, environment)
    except TimeoutError:
        console.print("time is up before the devices were found")
        return
    console.print(f"{about['device']} x {about['devices']}, {limit:.0f} s", soft_wrap=True)
    done = 0
    chosen = (case or [*CASES], cohort or [*COHORTS], part or [*PARTS])
    for what, measure in plan(*chosen, repeats, rows, clock, about["platform"]):
        if clock.left <= 0:
            console.print(f"time is up after {done} measurements; the first that is missing: {_words(what)}", soft_wrap=True)
            return
        try:
            found = measure()
        except TimeoutError:
            console.print(f"time is up after {done} measurements; the first that is missing: {_words(what)}", soft_wrap=True)
            return
        # One network or simulator that fails says something too, and does not keep the others from being measured.
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        done += 1
        write_row(output, {"benchmark": "accelerator", **what, **found, **about})
        console.print(_words(what), _words(found), soft_wrap=True)
    console.print(f"{done} measurements")


def _words(row: Row) -> str:
    return ", ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())


if __name__ == "__main__":
    as_program(main)()
