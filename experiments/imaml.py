"""MAML, FOMAML, Reptile and iMAML in federated learning, by number of inner epochs: accuracy, time and memory.

The FL-MAML/iMAML study: Nguyen et al., "Improving federated learning by meta-learning". `python -m experiments.imaml --help` says
what is run and how long it takes.
"""

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
from fedjax_meta.data import protocols, sources
from fedjax_meta.methods.imaml import FL_IMAML

DATASETS = ("mnist", "cifar10", "mnist_small")
NEW_CLIENTS = 30

# As in the published code: inner SGD 1e-3, a fresh Adam of 1e-4 as the outer step, lambda 2, batches of 32.
RATES = {"inner_lr": 0.001, "outer_lr": 1e-4, "batch_size": 32}


class System(NamedTuple):
    """One row of the tables: a method of the registry, the name of its argument for the inner epochs, and its other options."""

    title: str
    method: str
    epochs: str
    options: Mapping[str, Any]


SYSTEMS = {
    "maml": System("MAML", "fedmeta", "inner_steps", RATES),
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
    "The published code of iMAML takes another gradient, and the logged numbers are its: it takes the Hessian of the n query "
    "batches with the proximal term inside, so that the system that it solves is (1 + n) v + sum_b H_b v / lambda, and its right "
    "side is the gradient of the last query batch alone, proximal term included. The rows `published_cg*` solve that system.",
    "The paper prints Reptile with the opposite sign; here the server moves half of the way towards the adapted models.",
    "All systems have the rates of the published code; its rate for MAML is not logged and is assumed to be the same.",
    "Peak memory is what XLA plans for a round that processes one client at a time on one device, without data, model and state.",
)


class Cost(NamedTuple):
    """The cost of one round whose clients run one after the other on one device.

    Attributes:
      seconds: median over the timed rounds.
      temp_bytes: peak of temporary memory.
    """

    seconds: float
    temp_bytes: int


def options_of(system: System, epochs: int) -> dict[str, Any]:
    """The options of a system that adapts for `epochs` passes over a support set."""
    return {**system.options, system.epochs: epochs}


def measure_cost(algorithm: fm.Algorithm, data: fm.FederatedData, *, repeats: int = 5) -> Cost:
    """Times the round of an algorithm built with `lanes=1, devices=1`; the cohorts are the same for every system."""
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
            algorithm = runner.build(system.method, task, cohort_size=clients_per_round, devices=devices, **options)
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
                    tests={f"{key}_E{count}/{group}": runner.Test(title, group, test) for group, test in tests.items()},
                    rounds=rounds,
                    eval_every=eval_every,
                    seed=seed,
                    config=config,
                )
                for seed in seeds
            ]
    return plans


HEADINGS = ("system", "E", "new clients", "logged", "local clients", "ms a round", "peak MB")


class Point(NamedTuple):
    """One system at one number of inner epochs: mean accuracy over clients, in percent, as (mean, std) over seeds; and costs.

    `title` is that of the system, with a mark where it diverged.
    """

    system: str
    epochs: int
    new: tuple[float, float]
    local: tuple[float, float]
    cost: Cost
    title: str


def table_rows(dataset: str, points: Sequence[Point], seeds: int) -> list[list[str]]:
    """Rows under `HEADINGS`."""
    return [
        [
            p.title,
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
    """The logged number; the rows `published_cg*` have those of iMAML too."""
    row = LOGGED.get(dataset, {}).get(epochs, {})
    value = row.get(system.replace("published", "imaml"))
    return "" if value is None else f"{value:.1f}"


def draw(path: Path, points: Sequence[Point], *, title: str, dataset: str) -> None:
    """New clients' accuracy, time and peak memory of a round by inner epochs; one line a system, hollow diamonds for logs."""
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
def main(  # long because every option brings its help text
    dataset: Annotated[
        str, typer.Option(help="`mnist`, `cifar10` (tensorflow-datasets), or `mnist_small`, which comes with a package.")
    ] = "mnist",
    systems: Annotated[str, typer.Option(help="Rows, separated by commas: " + ", ".join(SYSTEMS) + ".")] = ",".join(DEFAULT),
    epochs: Annotated[str, typer.Option(help="Inner epochs E, separated by commas.")] = "1,5,10,15",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds R.")] = 200,
    seeds: Annotated[str, typer.Option(help="Seeds of training.")] = "1",
    eval_every: Annotated[int, typer.Option(min=1, help="Rounds between evaluations; the first and the last are added.")] = 20,
    clients_per_round: Annotated[int, typer.Option(min=1, max=50, help="Cohort size C.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds to time.")] = 5,
    data_seed: Annotated[int, typer.Option(help="Fixes clients and their samples.")] = 1,
    out: runner.OutOption = None,
    data_dir: runner.DataDirOption = None,
    resume: runner.ResumeOption = False,
    devices: runner.DevicesOption = None,
    compile_cache: runner.CacheOption = True,
    on_divergence: runner.DivergenceOption = "continue",
    debug: runner.DebugOption = False,
) -> None:
    """Trains every system at every number of inner epochs, and prints accuracy, time a round and peak memory.

    50 clients with two classes each train, 5 a round, for 200 rounds. 30 new clients with other pairs of classes adapt for E
    epochs and are tested; iMAML pulls them back to the received model, as in training.

    The folder --out gets report.md, figure.png, metrics.json (accuracies and costs) and the last states of every run.

    Examples:

    `python -m experiments.imaml --dataset mnist_small --rounds 10 --epochs 1,5` (a few minutes)

    `python -m experiments.imaml --dataset mnist --data-dir DIR --out runs/imaml-mnist`

    `python -m experiments.imaml --dataset cifar10 --data-dir DIR --out runs/imaml-cifar10`
    """
    with runner.one_line_errors(debug):
        checks.one_of("--on-divergence", on_divergence, runner.ON_DIVERGENCE)
        checks.one_of("--dataset", dataset, DATASETS)
        chosen = runner.names(systems, "--systems", SYSTEMS)
        epoch_list, seed_list = runner.numbers(epochs, "--epochs"), runner.numbers(seeds, "--seeds")
        shared = runner.prepare(devices, compile_cache, cohort_size=clients_per_round)
        with runner.loading(dataset):
            data = protocols.fedmeta_per_clients(sources.load(dataset, data_dir=data_dir), seed=data_seed)
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
        folder = runner.open_folder(out, f"imaml-{dataset}", resume=resume, options=options, algorithms=runner.configs(plans))
        results = runner.run_all(plans, folder, on_divergence=on_divergence)
        points = []
        for count in epoch_list:
            for name in chosen:
                cost = timed(
                    folder, name, count, task, data.train, cohort_size=clients_per_round, repeats=repeats, config=config
                )
                key = f"{name}_E{count}"
                runs = {
                    group: [
                        report.series(SYSTEMS[name].title, group, seed, results[f"{key}_seed{seed}"], f"{key}/{group}")
                        for seed in seed_list
                    ]
                    for group in ("new", "local")
                }
                new, local = (report.over_seeds(runs[group])["accuracy_mean"] for group in ("new", "local"))
                title = next((title for title in map(report.marked, runs.values()) if title != SYSTEMS[name].title), None)
                points.append(Point(name, count, new, local, cost, title or SYSTEMS[name].title))
        write_report(folder, dataset, data.name, points, rounds=rounds, seeds=len(seed_list))
        runner.exit_if_all_diverged(plans, results)


def timed(
    folder: Path,
    name: str,
    epochs: int,
    task: fm.Task,
    data: fm.FederatedData,
    *,
    cohort_size: int,
    repeats: int,
    config: Mapping[str, Any],
) -> Cost:
    """The cost of a round of one system, measured once in a run."""
    system = SYSTEMS[name]
    alone = runner.build(system.method, task, cohort_size=cohort_size, devices=1, lanes=1, **options_of(system, epochs))

    def compute() -> dict[str, Any]:
        with runner.console.status(f"timing {system.title}, E = {epochs}"):
            return measure_cost(alone, data, repeats=repeats)._asdict()

    full_config = {**config, "algorithm": alone.config, "repeats": repeats}
    return Cost(**runner.remembered(folder, f"{name}_E{epochs}_cost", full_config, compute))


def write_report(folder: Path, dataset: str, name: str, points: Sequence[Point], *, rounds: int, seeds: int) -> None:
    """Prints the table, and writes it as `report.md` with `figure.png`."""
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
    runner.console.print(f"\nreport, figure, metrics and states: {folder}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    app()
