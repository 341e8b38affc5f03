"""What compiled programs would do on accelerators that you do not have: kernels, bytes, FLOPs, memory, best time of the program.

JAX compiles for a described device with the packages of the extra `accelerator-aot`. Nothing runs, so the only times are those
of the compiler. A step is the body of the loop with the most bytes: a client's training step, for all lanes at once. The best
time of a step follows from its kernels' FLOPs and bytes and the rates of arithmetic and memory, so it is a bound of this
program and not of the task; a launch takes some microseconds more unless it is part of a graph. `waits` counts the loops whose
number of steps the compiler does not know. After each step of such a loop, a GPU waits for its host.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import _fedjax_meta_peer as peer
import _hlo
import jax
import jax.numpy as jnp
import numpy as np
import typer
from _measure import as_program, check_outputs, compile_anew, environment, write_row
from _targets import TARGETS, described
from _workloads import MODELS, Workload, workload
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

import fedjax_meta as fm
from fedjax_meta import checks, hardware, models, placement, runtime
from fedjax_meta.data import train_test_views

WORKLOADS = ("W1", "W2", "W3a-lenet-exact", "W3b-mlp-exact", "W4")
METHODS = {"FedMeta-Per": "fedmeta_per", "iMAML": "imaml", "FedPAC": "fedpac", "MTFL": "mtfl"}
"""With a LeNet on images of CIFAR's form, 1050 a client, and MTFL with its CNN."""
COHORTS = (5, 50, 500)
_SAMPLES = 1050


def abstract_data(shape: tuple[int, ...], sizes: Mapping[str, int], num_clients: int, samples: int) -> fm.FederatedData:
    """Forms of the data of clients of equal size; `sizes` of the views."""
    of = jax.ShapeDtypeStruct
    each = {name: of((num_clients,), jnp.int32) for name in sizes}
    return fm.FederatedData(
        x=of((num_clients * samples, *shape), jnp.uint8),
        y=of((num_clients * samples,), jnp.int32),
        offset=of((), jnp.float32),
        scale=of((), jnp.float32),
        start=each,
        size=each,
        max_size=tuple(sizes.items()),
        num_classes=10,
        same_size=tuple(sizes),
    )


def problem(name: str, cohort: int, federation: fm.Federation) -> tuple[fm.Algorithm, fm.FederatedData]:
    """A case by name, with the forms of its data.

    Raises:
      ValueError: an unknown case.
    """
    if name in METHODS:
        views = train_test_views(np.array([_SAMPLES]))
        sizes = {view: int((end - begin)[0]) for view, (begin, end) in views.items()}
        task = models.mtfl_cnn() if name == "MTFL" else models.lenet()
        method = fm.METHODS[METHODS[name]](task)
        return fm.federate(method, federation), abstract_data((32, 32, 3), sizes, max(50, cohort), _SAMPLES)
    case: Workload = workload(f"{name}-{cohort}")
    data = abstract_data(MODELS[case.model][0], {"train": case.samples}, case.num_clients, case.samples)
    return fm.federate(peer.method(case), federation), data


def measure(name: str, cohort: int, target: str, *, lanes: int | None = None) -> dict[str, Any]:
    """The row of a round of one case, compiled for one device of a target."""
    device = described(target)[0]
    federation = fm.Federation(cohort_size=cohort, lanes=lanes, devices=[device])
    algorithm, data = problem(name, cohort, federation)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(algorithm.init, key, data)
    place = SingleDeviceSharding(device)
    data = jax.eval_shape(lambda given: placement.laid_out(given, device.platform), data)
    arguments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), (key, state, data))
    begin = time.perf_counter()
    lowered = jax.jit(algorithm.round, donate_argnums=1).lower(*arguments)
    middle, busy = time.perf_counter(), time.process_time()
    with hardware.computing_on([device]):
        compiled = runtime.compiled(lowered)
    end, busy = time.perf_counter(), time.process_time() - busy
    memory: Any = compiled.memory_analysis()
    loops = _hlo.Program(compiled.as_text()).loops()
    step = max(loops[1:] or loops, key=lambda loop: loop.cost.bytes)
    rates = TARGETS[target]
    # For a TPU, XLA writes products of several clients as convolutions over them, most of which is zeros.
    counts = rates.platform == "cuda"
    return {
        "benchmark": "static",
        "target": target,
        "case": name,
        "cohort": cohort,
        "kernels": step.cost.kernels,
        "step_bytes": step.cost.bytes,
        "step_flops": step.cost.flops if counts else None,
        "step_roofline_seconds": step.cost.seconds(rates.flops, rates.bandwidth) if counts else None,
        "loops": [
            [loop.depth, loop.cost.kernels, loop.cost.bytes, loop.cost.flops if counts else None, loop.steps] for loop in loops
        ],
        # The loops of a TPU run without its host.
        "waits": sum(loop.steps is None for loop in loops) if rates.platform == "cuda" else 0,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "lower_seconds": round(middle - begin, 2),
        "compile_seconds": round(end - middle, 2),
        "compile_cpu_seconds": round(busy, 2),
    }


def main(
    target: Annotated[str, typer.Option(help=f"Accelerator to compile for: {', '.join(TARGETS)}.")] = "h200",
    case: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join((*WORKLOADS, *METHODS))}; by default all.", show_default=False)
    ] = None,
    cohort: Annotated[
        list[int] | None, typer.Option(min=1, help="Clients per round; by default 5, 50, 500.", show_default=False)
    ] = None,
    lanes: Annotated[int | None, typer.Option(help="Number of lanes; by default as many as fit.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option(help="File to append the rows to, as JSON lines.", show_default=False)] = None,
) -> None:
    """Compiles rounds for a described accelerator, and shows what one step launches, moves and computes.

    \b
    Examples:
      python benchmarks/static.py --target h200
      python benchmarks/static.py --target h200 --case W2 --cohort 50
    """
    check_outputs(output)
    chosen = [*WORKLOADS, *METHODS] if case is None else case
    for name in chosen:
        checks.one_of("--case", name, (*WORKLOADS, *METHODS))
    described(target)
    compile_anew()
    step = ("kernels a step", "waits", "MB a step", "GFLOP a step", "at best (us)")
    headings = ("case", "cohort", *step, "memory (MB)", "compiled (s)")
    console, table = Console(), Table(*headings, box=None)
    about = environment() | {"platform": TARGETS[target].platform, "device": described(target)[0].device_kind}
    for name in chosen:
        for count in cohort or COHORTS:
            row = measure(name, count, target, lanes=lanes)
            write_row(output, {**row, **about})
            scaled = ((row["step_bytes"], 1e-6), (row["step_flops"], 1e-9), (row["step_roofline_seconds"], 1e6))
            shown = (
                str(row["waits"]),
                *("-" if number is None else f"{number * unit:.4g}" for number, unit in scaled),
                f"{row['temp_bytes'] / 1e6:.4g}",
                f"{row['compile_seconds']:.1f}",
            )
            table.add_row(name, str(count), str(row["kernels"]), *shown)
            console.print(name, count, row["kernels"], *shown)
    console.print(table)


if __name__ == "__main__":
    as_program(main)()
