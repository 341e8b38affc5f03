"""What the implicit gradient buys in federated learning: MAML, FOMAML, Reptile and iMAML by number of inner epochs (S1).

Nguyen, "Improving FL by meta-learning". `python -m experiments.imaml --help` says what is run and how long it takes.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer

import fedjax_meta as fm
from experiments import _runner as runner
from fedjax_meta import checkpoint, checks, models, report
from fedjax_meta.algorithms.imaml import FL_IMAML
from fedjax_meta.data import protocols, sources

DATASETS = ("mnist", "cifar10", "mnist_small")
NEW_CLIENTS = 30

# Of the published code: inner SGD 1e-3, a fresh Adam of 1e-4 as the outer step, lambda 2, batches of 32.
RATES = {"inner_lr": 0.001, "outer_lr": 1e-4, "batch_size": 32}


class System(NamedTuple):
    """One row of the tables: a name of the registry, its options, and what its argument for the inner epochs is called."""

    title: str
    algorithm: str
    epochs: str
    options: Mapping[str, Any]


SYSTEMS = {
    "maml": System("MAML", "fedmeta_maml", "inner_steps", RATES),
    "fomaml": System("FOMAML", "fedmeta_fomaml", "inner_steps", RATES),
    "reptile": System("Reptile", "reptile", "inner_epochs", {**RATES, "outer_lr": 0.5}),
    **{f"imaml_cg{k}": System(f"iMAML, CG {k}", "imaml", "inner_epochs", {**RATES, "cg_steps": k}) for k in (1, 5, 10)},
    **{
        f"published_cg{k}": System(
            f"iMAML as published, CG {k}", "imaml", "inner_epochs", {**RATES, **FL_IMAML, "cg_steps": k}
        )
        for k in (1, 5, 10)
    },
}
DEFAULT = tuple(name for name in SYSTEMS if not name.startswith("published"))

# Logged by the published code: mean of the new clients' accuracies after round 200, in percent, by inner epochs.
_COLUMNS = ("maml", "imaml_cg1", "imaml_cg5", "imaml_cg10")
LOGGED: dict[str, dict[int, dict[str, float]]] = {
    dataset: {epochs: dict(zip(_COLUMNS, row, strict=True)) for epochs, row in rows.items()}
    for dataset, rows in {
        "mnist": {
            1: (81.4, 61.9, 77.4, 67.0),
            5: (90.9, 80.8, 79.5, 80.9),
            10: (95.2, 84.8, 79.5, 81.8),
            15: (96.3, 84.9, 81.3, 83.6),
        },
        "cifar10": {
            1: (52.6, 47.5, 49.2, 19.1),
            5: (64.7, 67.3, 62.5, 66.9),
            10: (66.0, 66.2, 66.1, 67.0),
            15: (68.7, 67.6, 67.3, 67.0),
        },
    }.items()
}
NOTES = (
    "The logged numbers of iMAML are those of a code whose gradient is another one: it takes the Hessian on the n query "
    "batches, with the proximal term inside, so that the system it solves is (1 + n) v + sum_b H_b v / lambda, and its right "
    "side is the gradient of the last query batch alone, proximal term included. The rows `published_cg*` solve that system.",
    "S1 prints Reptile with the sign reversed; here the server moves towards the adapted models, half of the way.",
    "Rates are those of the published code for all systems; its step for MAML is not logged, and is taken to be the same.",
    "Peak memory is what XLA plans for one round of one client at a time on one device, beside data, model and state.",
)


class Cost(NamedTuple):
    """What one round takes, clients one after the other on one device.

    Attributes:
      seconds: median over the rounds timed.
      temp_bytes: peak of temporary memory.
    """

    seconds: float
    temp_bytes: int


def options_of(system: System, epochs: int) -> dict[str, Any]:
    """The options with which a system adapts for so many passes over a support set."""
    return {**system.options, system.epochs: epochs}


def measure_cost(algorithm: fm.Algorithm, data: fm.FederatedData, *, repeats: int = 5) -> Cost:
    """Times the round of an algorithm built with `lanes=1, devices=1`; the same clients take part for every system."""
    key = jax.random.key(0)
    state = jax.jit(algorithm.init)(key, data)
    program = jax.jit(algorithm.round).lower(key, state, data).compile()
    memory = program.memory_analysis()
    seconds = []
    for number in range(repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(program(jax.random.fold_in(key, number), state, data))
        seconds.append(time.perf_counter() - begin)
    return Cost(float(np.median(seconds[1:])), memory.temp_size_in_bytes if memory else 0)


def make_plans(
    systems: Sequence[str],
    task: fm.Task,
    data: protocols.Protocol,
    *,
    epochs: Sequence[int],
    seeds: Sequence[int],
    rounds: int,
    eval_every: int,
    clients_per_round: int,
    devices: int | None,
    config: Mapping[str, Any],
) -> list[runner.Plan]:
    """One training run for every system, number of inner epochs and seed."""
    plans = []
    for count in epochs:
        for key in systems:
            system = SYSTEMS[key]
            options = options_of(system, count)
            build = fm.ALGORITHMS[system.algorithm]
            algorithm = build(task, cohort_size=clients_per_round, devices=devices, **options)
            unseen = jnp.arange(min(NEW_CLIENTS, data.new.num_clients))
            tests = {
                "local": runner.evaluator(algorithm, data.train, devices=devices),
                "new": runner.evaluator(
                    algorithm, data.new, devices=devices, support="support", query="query", known=False, ids=unseen
                ),
            }
            title = f"{system.title}, E = {count}"
            plans += [
                runner.Plan(
                    name=f"{key}_E{count}_seed{seed}",
                    title=title,
                    algorithm=algorithm,
                    data=data.train,
                    tests={f"{key}_E{count}/{who}": runner.Test(title, who, test) for who, test in tests.items()},
                    rounds=rounds,
                    eval_every=eval_every,
                    seed=seed,
                    config={
                        **config,
                        "system": key,
                        "options": options,
                        "rounds": rounds,
                        "eval_every": eval_every,
                        "seed": seed,
                        "clients_per_round": clients_per_round,
                        "devices": devices,
                    },
                )
                for seed in seeds
            ]
    return plans


HEADINGS = ("system", "E", "new clients", "logged", "local clients", "ms a round", "peak MB")


class Point(NamedTuple):
    """One system at one number of inner epochs; accuracies are means over clients, in percent, over the seeds."""

    system: str
    epochs: int
    new: tuple[float, float]
    local: tuple[float, float]
    cost: Cost


def table_rows(dataset: str, points: Sequence[Point], seeds: int) -> list[list[str]]:
    """Rows under `HEADINGS`."""
    return [
        [
            SYSTEMS[p.system].title,
            str(p.epochs),
            report.with_spread(p.new, seeds),
            _logged(dataset, p.epochs, p.system),
            report.with_spread(p.local, seeds),
            f"{1000 * p.cost.seconds:.0f}",
            f"{p.cost.temp_bytes / 1e6:.1f}",
        ]
        for p in points
    ]


def _logged(dataset: str, epochs: int, system: str) -> str:
    """The logged number; that of iMAML also stands beside the row that solves the logged system."""
    row = LOGGED.get(dataset, {}).get(epochs, {})
    value = row.get(system.replace("published", "imaml"))
    return "" if value is None else f"{value:.1f}"


def draw(path: Path, points: Sequence[Point], *, title: str, dataset: str) -> None:
    """New clients' accuracy, time and peak memory of a round by inner epochs, a line a system; logged values are hollow."""
    from matplotlib.figure import Figure

    systems = list(dict.fromkeys(p.system for p in points))
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels = figure.subplots(1, 3)
    values = (
        ("mean accuracy of new clients, %", lambda p: p.new[0]),
        ("time of a round, ms", lambda p: 1000 * p.cost.seconds),
        ("peak temporary memory of a round, MB", lambda p: p.cost.temp_bytes / 1e6),
    )
    for axis, (label, value) in zip(panels, values, strict=True):
        for number, system in enumerate(systems):
            mine = [p for p in points if p.system == system]
            color = report.COLORS[number % len(report.COLORS)]
            axis.plot([p.epochs for p in mine], [value(p) for p in mine], "o-", color=color, label=SYSTEMS[system].title)
            if axis is panels[0]:
                logged = [(p.epochs, float(text)) for p in mine if (text := _logged(dataset, p.epochs, system))]
                if logged:
                    axis.plot(
                        *zip(*logged, strict=True), "D--", color=color, markerfacecolor="white", linewidth=0.8, alpha=0.8
                    )
        axis.set_xlabel("inner epochs E")
        axis.set_ylabel(label)
        axis.grid(axis="y", color=report.GRID)
        axis.spines[["top", "right"]].set_visible(False)
    panels[1].set_ylim(bottom=0)
    panels[2].set_ylim(bottom=0)
    panels[0].legend(fontsize=8, frameon=False)
    figure.suptitle(title + (" (diamonds: logged by the published code)" if dataset in LOGGED else ""), x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def main(
    dataset: Annotated[
        str, typer.Option(help="`mnist`, `cifar10` (tensorflow-datasets), or `mnist_small`, which a package ships.")
    ] = "mnist",
    systems: Annotated[str, typer.Option(help="Rows, with commas between: " + ", ".join(SYSTEMS) + ".")] = ",".join(DEFAULT),
    epochs: Annotated[str, typer.Option(help="Inner epochs E.")] = "1,5,10,15",
    rounds: Annotated[int, typer.Option(min=1)] = 200,
    seeds: Annotated[str, typer.Option(help="Seeds of training.")] = "1",
    eval_every: Annotated[int, typer.Option(min=1, help="Rounds between evaluations; the first and the last are added.")] = 20,
    clients_per_round: Annotated[int, typer.Option(min=1, max=50)] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that are timed.")] = 5,
    data_seed: Annotated[int, typer.Option(help="Fixes clients and their samples.")] = 1,
    out: runner.OutOption = None,
    data_dir: runner.DataDirOption = None,
    resume: runner.ResumeOption = False,
    devices: runner.DevicesOption = None,
    compile_cache: runner.CacheOption = True,
    debug: runner.DebugOption = False,
) -> None:
    """Trains every system at every number of inner epochs, and prints accuracy, time a round and peak memory.

    50 clients with two classes each train, 5 a round, for 200 rounds; 30 clients with other pairs of classes, never seen,
    adapt for E epochs and are tested. iMAML pulls them back to the model that they received, as in training.

    The folder --out gets report.md, figure.png, metrics.json, costs.json and the last states of every run.

    Examples:

    `python -m experiments.imaml --dataset mnist_small --rounds 10 --epochs 1,5` (a few minutes)

    `python -m experiments.imaml --dataset mnist --data-dir DIR --out runs/imaml-mnist`

    `python -m experiments.imaml --dataset cifar10 --data-dir DIR --out runs/imaml-cifar10`
    """
    with runner.one_line_errors(debug):
        checks.one_of("--dataset", dataset, DATASETS)
        chosen = runner.names(systems, "--systems", SYSTEMS)
        epoch_list, seed_list = runner.numbers(epochs, "--epochs"), runner.numbers(seeds, "--seeds")
        shared = runner.prepare(devices, compile_cache, cohort_size=clients_per_round)
        with runner.console.status(f"loading {dataset}"):
            data = protocols.fedmeta_per(sources.load(dataset, data_dir=data_dir), seed=data_seed)
        task = models.lenet() if dataset == "cifar10" else models.mlp()
        config = {"experiment": "imaml", "dataset": dataset, "data_seed": data_seed}
        plans = make_plans(
            chosen,
            task,
            data,
            epochs=epoch_list,
            seeds=seed_list,
            rounds=rounds,
            eval_every=eval_every,
            clients_per_round=clients_per_round,
            devices=shared,
            config=config,
        )
        options = {**config, "systems": chosen, "epochs": epoch_list, "seeds": seed_list, "rounds": rounds}
        folder = runner.open_folder(out, f"imaml-{dataset}", resume=resume, options=options)
        results = runner.run_all(plans, folder, resume=resume)
        points = []
        for count in epoch_list:
            for name in chosen:
                system = SYSTEMS[name]
                alone = fm.ALGORITHMS[system.algorithm](
                    task, cohort_size=clients_per_round, devices=1, lanes=1, **options_of(system, count)
                )
                with runner.console.status(f"timing {system.title}, E = {count}"):
                    cost = measure_cost(alone, data.train, repeats=repeats)
                scores = {
                    who: report.over_seeds(
                        [
                            report.series(
                                system.title, who, seed, results[f"{name}_E{count}_seed{seed}"], f"{name}_E{count}/{who}"
                            )
                            for seed in seed_list
                        ]
                    )["accuracy_mean"]
                    for who in ("new", "local")
                }
                points.append(Point(name, count, scores["new"], scores["local"], cost))
        write_report(folder, dataset, data.name, points, rounds=rounds, seeds=len(seed_list))


def write_report(folder: Path, dataset: str, name: str, points: Sequence[Point], *, rounds: int, seeds: int) -> None:
    """Prints the table, and writes it as `report.md` with `figure.png` and `costs.json`."""
    title = f"{name}: round {rounds}, {seeds} seed{'s' if seeds > 1 else ''}"
    rows = table_rows(dataset, points, seeds)
    runner.console.print(report.rich_table(f"{title} (percent, mean over clients)", HEADINGS, rows))
    for note in NOTES:
        runner.console.print(f" - {note}", style="dim", markup=False)
    draw(folder / "figure.png", points, title=title, dataset=dataset)
    lines = [f"# {title}", "", "Accuracy in percent, mean over clients.", "", report.markdown_table(HEADINGS, rows), ""]
    lines += [f"- {note}" for note in NOTES]
    lines += ["", "![Accuracy, time and memory by inner epochs](figure.png)", "", f"    {runner.command_line(folder)}", ""]
    checkpoint.write_text(folder / "report.md", "\n".join(lines))
    costs = [
        {"system": p.system, "epochs": p.epochs, "device": jax.devices()[0].device_kind, **p.cost._asdict()} for p in points
    ]
    checkpoint.write_text(folder / "costs.json", json.dumps(costs, indent=1) + "\n")
    runner.console.print(f"\nreport, figure, metrics and states: {folder}", soft_wrap=True)


if __name__ == "__main__":
    app()
