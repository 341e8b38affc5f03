"""Times a round of each method, relative to FedAvg and to the arithmetic that the method needs.

All clients take part, with the same number of samples, batches and epochs. Clients that adapt on a support view do so as often
as others train. The arithmetic follows the papers. It counts the gradients, head gradients, Hessian-vector products and forward
passes of a client, each in XLA's FLOPs of one batch, and products with matrices of parameters. Elementwise work on parameters
(optimisers, proximal terms, control variates) is not counted.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from _measure import Spread, as_program, check_outputs, compile_anew, compiled, environment, interleaved, write_row
from rich.console import Console
from rich.table import Table
from scaling import Run

import fedjax_meta as fm
from fedjax_meta import checks, masks, models
from fedjax_meta.types import Mask, PyTree, Variables

SHAPES = {"mlp": (28, 28, 1), "lenet": (32, 32, 3), "fedpac_cnn": (32, 32, 3)}
VALIDATION = 0.2
INNER_STEPS, SOLVER_STEPS, COMPONENTS, WIDTH = 5, 5, 3, 100
CLASSES, DRAWS, SWEEPS = 10, 4, 2


class Costs(NamedTuple):
    """The terms of the formulas in `SYSTEMS`.

    Attributes:
      gradient, head, body: FLOPs of the gradient of all leaves, the head or the body in one pass over a client's samples.
      product: FLOPs of a pass's Hessian-vector products, beyond those of its gradients.
      mixed: FLOPs of the same of the head's gradient: of its products with the derivatives by all leaves.
      curvature: FLOPs of a pass's Hessian-vector products alone, where nothing reads the gradients.
      forward: FLOPs of one pass without gradients.
      steps: batches in a pass.
      epochs: E.
      size, head_size: parameters of the model, and of its head.
      cohort: C, which is all clients.
      samples: S of a client.
    """

    gradient: float
    head: float
    body: float
    product: float
    mixed: float
    curvature: float
    forward: float
    steps: int
    epochs: int
    size: int
    head_size: int
    cohort: int
    samples: int


class System(NamedTuple):
    """One row.

    Attributes:
      flops: FLOPs of a client in a round.
      options: options of the method, apart from the batch size.
    """

    flops: Callable[[Costs], float]
    options: Callable[[Costs], Mapping[str, Any]] = lambda c: {"epochs": c.epochs}


def _epochs(**options: Any) -> Callable[[Costs], Mapping[str, Any]]:
    return lambda c: {"epochs": c.epochs, **options}


def _fedavg(c: Costs) -> float:
    return c.epochs * c.gradient


def _meta(inner: Callable[[Costs], float], *, queries: Callable[[Costs], int] = lambda c: 1) -> Callable[[Costs], float]:
    """Steps that cost `inner` in a pass over all samples on the support view, and gradients of the query view."""
    return lambda c: VALIDATION * c.epochs * inner(c) + (1 - VALIDATION) * queries(c) * c.gradient


def _exact(c: Costs) -> float:
    return c.gradient + c.product


def _adapting(**options: Any) -> Callable[[Costs], Mapping[str, Any]]:
    return lambda c: {"inner_steps": c.epochs, **options}


def _matrix(c: Costs) -> float:
    """FLOPs of the Gram matrix of all models and of each client's mixture of them."""
    return 4 * c.cohort * c.size


def _processes(c: Costs) -> float:
    """FLOPs of FedGP's processes in a step: those of the nodes of a balanced tree of classes, each of its own samples.

    A node of m samples that it learns from and m that it predicts: a Cholesky factor of m^3 / 3 in each sweep and one more, two
    triangular solves of m^3 for the predictions and their slopes, a product of 2 m^3 for those of the kernel.
    """
    levels = range(math.ceil(math.log2(CLASSES)))
    return sum(2**level * DRAWS * ((SWEEPS + 1) / 3 + 4) * (c.samples / 2 ** (level + 1)) ** 3 for level in levels)


SYSTEMS = {
    "fedavg": System(_fedavg),
    "fedavg_ft": System(_fedavg),
    "fedavg_meta": System(_fedavg),
    "fedavg_one_step": System(_fedavg),
    "local_only": System(_fedavg),
    "fedprox": System(_fedavg),
    "fedavgm": System(_fedavg),
    "fedadagrad": System(_fedavg),
    "fedadam": System(_fedavg),
    "fedyogi": System(_fedavg),
    "scaffold": System(_fedavg),
    "scaffold (option I)": System(lambda c: (c.epochs + 1) * c.gradient, _epochs(control="gradient")),
    "moon": System(lambda c: c.epochs * (c.gradient + 2 * c.forward)),
    "fedper": System(_fedavg),
    "fedper_meta": System(_fedavg),
    "lg_fedavg": System(_fedavg),
    "fedrep": System(
        lambda c: c.epochs * (c.head + c.body), lambda c: {"head_epochs": c.epochs, "body_epochs": c.epochs, "lr": 0.01}
    ),
    "fedbabu": System(lambda c: c.epochs * c.body),
    "fedrod": System(lambda c: c.epochs * (c.gradient + c.samples * 6 * c.head_size)),
    "knn_per": System(lambda c: (1 - VALIDATION) * _fedavg(c)),
    "fedfomo": System(
        lambda c: (1 - VALIDATION) * c.epochs * c.gradient + c.cohort * (VALIDATION * c.forward + 2 * c.size), _epochs(lr=0.01)
    ),
    "fedamp": System(lambda c: _fedavg(c) + _matrix(c)),
    "heur_fedamp": System(lambda c: _fedavg(c) + _matrix(c)),
    "apfl": System(lambda c: (2 * c.epochs + 1 / c.steps) * c.gradient),
    "apfl_outputs": System(lambda c: 2 * c.epochs * c.gradient + 2 / c.steps * c.forward),
    "ditto": System(lambda c: 2 * c.epochs * c.gradient),
    "pfedme": System(
        lambda c: INNER_STEPS * c.epochs * c.gradient,
        lambda c: {"local_rounds": c.epochs * c.steps, "inner_steps": INNER_STEPS},
    ),
    # With this probability nearly all rounds train; the other rounds cost almost nothing.
    "l2gd": System(_fedavg, _epochs(probability=0.001, pull=0.01)),
    "fedem": System(lambda c: COMPONENTS * (c.epochs * c.gradient + c.forward), _epochs(components=COMPONENTS)),
    "pfedhn": System(lambda c: _fedavg(c) + 6 * WIDTH * c.size, lambda c: {"local_steps": c.epochs * c.steps, "width": WIDTH}),
    "pfedhn_pc": System(
        lambda c: _fedavg(c) + 6 * WIDTH * (c.size - c.head_size),
        lambda c: {"local_steps": c.epochs * c.steps, "width": WIDTH},
    ),
    "fedpac": System(lambda c: c.head + c.epochs * c.body + 2 * c.forward + 2 * c.cohort * c.head_size),
    # A local step is a gradient and a meta-gradient, and for HF the difference of two more gradients.
    "perfedavg": System(lambda c: 4 * _fedavg(c), lambda c: {"local_steps": c.epochs * c.steps}),
    "perfedavg_fo": System(lambda c: 2 * _fedavg(c), lambda c: {"local_steps": c.epochs * c.steps}),
    "perfedavg_exact": System(
        lambda c: c.epochs * (2 * c.gradient + c.curvature), lambda c: {"local_steps": c.epochs * c.steps}
    ),
    # A round is one pass.
    "perfedavg_reptile": System(lambda c: c.gradient, lambda c: {"outer_batches": 1, "inner_batches": c.steps}),
    "reptile": System(_fedavg, lambda c: {"inner_epochs": c.epochs}),
    "fedmeta": System(_meta(_exact), _adapting()),
    "fedmeta_metasgd": System(_meta(_exact), _adapting()),
    "fedmeta_fomaml": System(_meta(lambda c: c.gradient), _adapting()),
    "fedmeta_server": System(_meta(_exact), _adapting()),
    "fedmeta_per": System(_meta(_exact), _adapting()),
    "fedmeta_per_metasgd": System(_meta(_exact), _adapting()),
    "anil": System(_meta(lambda c: c.head + c.mixed), _adapting()),
    # Every inner step has a query loss of its own.
    "mamlpp": System(_meta(_exact, queries=lambda c: c.epochs), _adapting(batch_size=None)),
    # The gradient at the adapted model is linearised once for all products of the solver.
    "imaml": System(
        lambda c: _meta(lambda c: c.gradient)(c) + VALIDATION * (c.curvature + (SOLVER_STEPS - 1) * c.product),
        lambda c: {"inner_epochs": c.epochs, "cg_steps": SOLVER_STEPS, "tolerance": 0.0},
    ),
    # The networks here have no batch norm: as private patches, the head.
    "mtfl": System(_fedavg, _epochs(private="head")),
    "mtfl_fedavg_adam": System(_fedavg, _epochs(private="head")),
    "fedavg_adam": System(_fedavg),
    "fedbn": System(_fedavg, _epochs(private="head")),
    # From the round after the weights have converged on, one pass of the head's gradient over their samples.
    "fedala": System(lambda c: _fedavg(c) + 0.8 * c.head, _epochs(sample_share=0.8)),
    "feddyn": System(_fedavg),
    "fednova": System(_fedavg),
    "qfedavg": System(lambda c: _fedavg(c) + c.forward),
    "afl": System(_fedavg, lambda c: {"local_steps": c.epochs * c.steps}),
    "ifca": System(lambda c: _fedavg(c) + COMPONENTS * c.forward, _epochs(clusters=COMPONENTS)),
    "cfl": System(lambda c: _fedavg(c) + 2 * c.cohort * c.size, _epochs(clusters=COMPONENTS)),
    "fedproto": System(lambda c: _fedavg(c) + c.forward),
    "feddbe": System(_fedavg),
    "gpfl": System(_fedavg),
    "fedas": System(lambda c: (c.epochs + 1) * c.gradient + c.body + c.forward),
    "pfedsim": System(lambda c: _fedavg(c) + 2 * c.cohort * c.size, _epochs(warmup=0)),
    "fedcac": System(lambda c: _fedavg(c) + _matrix(c)),
    "fedgp": System(
        lambda c: c.epochs * (c.body + _processes(c)) + c.forward,
        lambda c: {"inner_steps": c.epochs, "gibbs_steps": SWEEPS, "draws": DRAWS},
    ),
    # Features of all samples once; a step of the ascent reads and writes a sample's entries of the linear models.
    "mocha": System(
        lambda c: c.forward + c.epochs * c.samples * 4 * c.head_size, lambda c: {"epochs": c.epochs, "capacity": c.samples}
    ),
}
"""All methods. Text in brackets is no part of a name."""


def client_data(model: str, clients: int, samples: int) -> fm.FederatedData:
    """Clients of equal size with random images; cost does not depend on values."""
    rng = np.random.default_rng(0)
    held = int(samples * VALIDATION)
    views = {"train": (0, samples), "support": (0, held), "query": (held, samples)}
    pools = [(rng.integers(0, 256, (samples, *SHAPES[model]), np.uint8), rng.integers(0, 10, samples)) for _ in range(clients)]
    bounds = {name: (np.full(clients, begin), np.full(clients, end)) for name, (begin, end) in views.items()}
    return fm.from_clients(pools, num_classes=10, views=bounds)


def costs(task: fm.Task, model: str, *, clients: int, samples: int, batch_size: int, epochs: int) -> Costs:
    """The terms of the formulas, from XLA's count of one batch."""
    key = jax.random.key(0)
    variables = task.init(key)
    batch = fm.Batch(jnp.zeros((batch_size, *SHAPES[model])), jnp.zeros(batch_size, jnp.int32), jnp.ones(batch_size))
    head = masks.resolve("head", task)
    steps = -(-samples // batch_size)

    def gradient(mask: Mask) -> float:
        # Every leaf is an argument: XLA would fold computations on constants.
        def loss(moving: Variables, fixed: Variables, batch: fm.Batch) -> jax.Array:
            return task.loss(masks.merge(moving, fixed), batch, key)[0]

        return steps * compiled(jax.value_and_grad(loss), *masks.split(variables, mask), batch).flops

    def product(mask: Mask, *, alone: bool = False) -> float:
        """Of the gradient of the leaves in the mask: a product with its derivatives by all leaves, with and without itself."""

        def pulled(variables: Variables, vector: Variables, batch: fm.Batch) -> PyTree:
            def slope(variables: Variables) -> Variables:
                moving, fixed = masks.split(variables, mask)
                return jax.grad(lambda moving: task.loss(masks.merge(moving, fixed), batch, key)[0])(moving)

            value, pull_back = jax.vjp(slope, variables)
            found = pull_back(masks.split(vector, mask)[0])
            return found if alone else (value, found)

        return steps * compiled(pulled, variables, variables, batch).flops

    def size(tree: PyTree) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(tree))

    everything = masks.everything(task)
    return Costs(
        gradient=gradient(everything),
        head=gradient(head),
        body=gradient(masks.complement(head)),
        product=product(everything) - gradient(everything),
        mixed=product(head) - gradient(head),
        curvature=product(everything, alone=True),
        forward=steps * compiled(task.predict, variables, batch.x).flops,
        steps=steps,
        epochs=epochs,
        size=size(variables),
        head_size=size(masks.split(variables, head)[0]),
        cohort=clients,
        samples=samples,
    )


def method(name: str, task: fm.Task, parts: Costs, batch_size: int) -> fm.Method:
    """The method of a row of `SYSTEMS`."""
    builder = fm.METHODS[name.partition(" ")[0]]
    given = {"batch_size": batch_size} if "batch_size" in inspect.signature(builder).parameters else {}
    return builder(task, **given | SYSTEMS[name].options(parts))


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "lenet",
    clients: Annotated[int, typer.Option(min=2, help="Number of clients N; all take part in every round.")] = 10,
    samples: Annotated[int, typer.Option(min=5, help="Samples per client; a client adapts on a fifth of them.")] = 250,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 50,
    epochs: Annotated[int, typer.Option(min=1, help="Local epochs E.")] = 5,
    systems: Annotated[str, typer.Option(help="Comma-separated names; all by default.")] = "",
    repeats: Annotated[int, typer.Option(min=3, help="Number of times that each system is timed.")] = 10,
    output: Annotated[Path | None, typer.Option(help="File to append the rows to, as JSON lines.")] = None,
) -> None:
    """Times a round of every method relative to FedAvg, in turns.

    \b
    Examples:
      python benchmarks/systems.py --output rows.jsonl
      python benchmarks/systems.py --model fedpac_cnn --systems ditto,fedpac

    \b
    /FedAvg     median and quartiles of the ratio to FedAvg in the same turn
    arithmetic  ratio of the FLOPs that the papers' rules need
    excess      median / arithmetic
    """
    checks.one_of("--model", model, SHAPES)
    chosen = [name.strip() for name in systems.split(",") if name.strip()] or list(SYSTEMS)
    for name in chosen:
        checks.one_of("--systems", name, SYSTEMS)
    check_outputs(output)
    chosen = ["fedavg", *(name for name in chosen if name != "fedavg")]
    compile_anew()
    fm.use_all_cores()
    console, about = Console(width=120), environment()
    task, data = models.MODELS[model](), client_data(model, clients, samples)
    case = {"model": model, "clients": clients, "samples": samples, "batch_size": batch_size, "epochs": epochs}
    parts = costs(task, **case)
    runs = {}
    for name in chosen:
        with console.status(f"compiling {name}"):
            run = fm.federate(method(name, task, parts, batch_size), fm.Federation(cohort_size=clients))
            runs[name] = Run(run, data)
    with console.status("timing"):
        times = interleaved(runs, repeats=repeats)
    title = f"{model}: {clients} clients of {samples} samples, {epochs} epochs in batches of {batch_size}, {about['device']}"
    table = Table("system", "round (s)", "/FedAvg", "arithmetic", "excess", "compile (s)", "memory (MB)", title=title)
    base, reference = times["fedavg"], SYSTEMS["fedavg"].flops(parts)
    for name, run in runs.items():
        row, ratio = run.row(times[name]), Spread.of(times[name] / base)
        arithmetic = SYSTEMS[name].flops(parts) / reference
        row |= {"ratio": ratio.median, "ratio_quartiles": ratio[1:], "arithmetic": arithmetic}
        write_row(output, {"benchmark": "systems", **case, "case": name, **row, **about})
        cells = [f"{row['seconds']:.4f}", f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"]
        cells += [f"{arithmetic:.2f}", f"{ratio.median / arithmetic:.2f}", f"{row['compile_seconds']:.1f}"]
        table.add_row(name, *cells, f"{(row['temp_bytes'] + row['state_bytes']) / 1e6:.1f}")
    console.print(table)


if __name__ == "__main__":
    as_program(main)()
