"""Tables and figures for the studies of MTFL: rounds to a user accuracy, costs on a testbed, and inequality (10).

`python -m experiments.mtfl_tables --help` lists them.
"""

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import typer

import fedjax_meta as fm
from experiments import _mtfl_shift
from experiments.round_costs import write_table
from fedjax_meta import checks, costs, metrics, models, process, report
from fedjax_meta.report.frames import USER_ACCURACY
from fedjax_meta.study import Study, compare, load
from fedjax_meta.study.scenario import Clients
from fedjax_meta.study.system import System
from fedjax_meta.study.targets import curve
from fedjax_meta.study.tuning import Trial, points_of

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False, no_args_is_help=True)

TESTBED = (
    "Modelled, not measured: half the clients are Raspberry Pi 2B, half 3B, at speeds that this library assumes; the optimiser's "
    "own arithmetic is not counted."
)
"""What a reader of times needs to know."""

STEPS = {"mtfl": "steps", "perfedavg_fo": "local_steps", "pfedme": "local_rounds"}
"""The option of each method that says how many local steps a round has."""

DataDirOption = Annotated[
    str | None, typer.Option(help="Folder of prepared data sets of tensorflow-datasets.", show_default=False)
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]


TRAINED = ("loss", "user_accuracy", "user_accuracy_std")
"""What each round of a run says of its cohort."""

CURVES = {
    "loss": "training loss of the cohort",
    "user_accuracy": "user accuracy before training, %",
    "variance": "variance of user accuracy over the cohort, %²",
}
"""The curves of `curves_of`, in words."""


class Row(NamedTuple):
    """A system's results.

    Attributes:
      title: of the system.
      user_accuracy: `[seeds, R]`, of the cohort in each round, NaN where a run ended early or had diverged.
      spread: deviation of user accuracy over the cohort of the last round, mean over seeds.
      trained: mean accuracy over clients after local training, mean over seeds.
      traffic: bytes that a client sends and receives in a round.
      time: a round on the modelled testbed.
      ends: rounds of each seed; all of them when not given.
    """

    title: str
    user_accuracy: np.ndarray
    spread: float
    trained: float
    traffic: costs.Traffic
    time: costs.RoundTime
    ends: Sequence[int] = ()

    @property
    def last(self) -> np.ndarray:
        """User accuracy in the last round of each seed `[seeds]`."""
        ends = self.ends or [self.user_accuracy.shape[1]] * len(self.user_accuracy)
        return self.user_accuracy[np.arange(len(ends)), np.array(ends) - 1]


def row(title: str, trials: Sequence[Trial], traffic: costs.Traffic, time: costs.RoundTime) -> Row:
    """The results of a system's final runs.

    Raises:
      ValueError: they have no user accuracy.
    """
    lines = [list(curve(trial.rows, USER_ACCURACY)[1] / 100) for trial in trials]
    curves = np.array([line + [np.nan] * (max(map(len, lines)) - len(line)) for line in lines])
    last = [trial.rows[-1] for trial in trials]
    # What a diverged run scores is no result.
    there = np.array([np.nan if trial.diverged is not None else 1.0 for trial in trials])
    spread = float(np.mean(there * [one["train"]["user_accuracy_std"][-1] for one in last]))
    trained = float(np.mean(there * [one["tests"]["known"]["scores"]["accuracy_mean"] for one in last]))
    return Row(title, curves, spread, trained, traffic, time, [len(line) for line in lines])


def cost(
    study: Study, name: str, clients: Clients, point: Mapping[str, float] | None = None
) -> tuple[costs.Traffic, costs.RoundTime]:
    """Bytes of a client in a round, and a round on the testbed, at this point of the system's grid or the first one.

    Raises:
      ValueError: a method of which it is not known how many gradients a round takes.
    """
    system = study.system(name, next(iter(study.scenarios)))
    return cost_of(system, name, clients, points_of(system)[0] if point is None else point)


def cost_of(system: System, name: str, clients: Clients, point: Mapping[str, float]) -> tuple[costs.Traffic, costs.RoundTime]:
    """`cost` of a system by itself."""
    checks.one_of("method with a known number of local steps", system.method, STEPS)
    algorithm = system.build(clients, **point)
    steps = algorithm.config[STEPS[system.method]]
    if steps is None:
        raise ValueError(f"{name}: give it {STEPS[system.method]}, the local steps of a round")
    gradients = {"perfedavg_fo": 2}.get(system.method, algorithm.config.get("inner_steps", 1))
    traffic = costs.traffic(algorithm, clients.train)
    flops = gradients * steps * costs.gradient_flops(clients.task, clients.train, 20)
    cohort = algorithm.config["federation"]["cohort_size"]
    return traffic, costs.round_time(traffic, flops, costs.RASPBERRY_PIS, cohort_size=cohort)


def references(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """The systems that each is compared with, by column: the first of the same optimiser, and the same patch with the first one.

    Example:
      >>> references(["fedavg-FL", "fedavg-bn", "adam-FL", "adam-bn"])["adam-bn"]
      {'first patch': 'adam-FL', 'first optimiser': 'fedavg-bn'}
    """
    found: dict[str, dict[str, str]] = {}
    for name in names:
        base, dash, part = name.partition("-")
        if dash:
            first = next(one for one in names if one.partition("-")[0] == base)
            other = next(one for one in names if one.partition("-")[2] == part)
            found[name] = {"first patch": first, "first optimiser": other}
        else:
            found[name] = {"first": names[0]}
    return found


def factor(reference: metrics.ToTarget, own: metrics.ToTarget) -> str:
    """How many times fewer rounds `own` needs; a lower bound if the reference never reaches the target, "-" if `own` does not."""
    if not np.isfinite(own.mean):
        return "-"
    return f"{reference.mean / own.mean:.1f}" if np.isfinite(reference.mean) else f"> {reference.budget / own.mean:.1f}"


def table(rows: Mapping[str, Row], targets: Sequence[float]) -> tuple[list[str], list[list[str]]]:
    """(headings, a line for each system)."""
    held = references(list(rows))
    columns = list(dict.fromkeys(column for one in held.values() for column in one))
    headings = ["system"]
    for target in targets:
        headings += [f"rounds to {target:g}", *(f"{column} / this" for column in columns)]
    headings += ["UA, % last", "best", "std over clients", "after training", "MB a round", f"minutes to {targets[-1]:g}"]
    lines = []
    for name, one in rows.items():
        line = [one.title]
        for target in targets:
            reached = metrics.rounds_to_target(one.user_accuracy, target)
            missed = sum(first is None for first in reached.rounds)
            some = "never" if missed == len(reached.rounds) else f"never in {missed} of {len(reached.rounds)}"
            line.append(some if missed else str(reached))
            for column in columns:
                other = held[name].get(column, name)
                line.append(
                    "" if other == name else factor(metrics.rounds_to_target(rows[other].user_accuracy, target), reached)
                )
        minutes = reached.mean * one.time.total / 60
        line += [f"{100 * value:.2f}" for value in (one.last.mean(), np.nanmax(one.user_accuracy, 1).mean())]
        line += [f"{100 * one.spread:.2f}", f"{100 * one.trained:.2f}", f"{sum(one.traffic) / 1e6:.2f}"]
        lines.append([*line, f"{minutes:.1f}" if np.isfinite(minutes) else "never"])
    return headings, lines


@app.callback()
def main() -> None:
    """Tables of MTFL that are special to its paper, from runs of the studies `mtfl` and `mtfl_figure5`.

    `python -m experiments.mtfl_tables targets runs/mtfl --at 0.95,0.97`

    `python -m experiments.mtfl_tables testbed`
    """


@app.command()
def targets(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of `mtfl` or `mtfl_figure5`.")],
    at: Annotated[str, typer.Option(help="User accuracies to reach; those of the paper are not known.")] = "0.95,0.97",
    data_dir: DataDirOption = None,
    debug: DebugOption = False,
) -> None:
    """Writes RUN/targets.md and RUN/targets.png: rounds to a user accuracy, and MB and minutes on a modelled testbed.

    `python -m experiments.mtfl_tables targets runs/mtfl`

    `python -m experiments.mtfl_tables targets runs/mtfl --at 0.8,0.9`
    """
    with process.one_line_errors(debug):
        goals = numbers("--at", at)
        study, found = load(run / "study.yaml"), compare.finished([run])
        (place,) = study.scenarios.values()
        clients = place.build(data_dir)
        names = {study.title_of(name): name for name in study.systems}
        rows = {}
        for one in found:
            of_round = cost(study, names[one.title], clients, one.trials[0].numbers)
            rows[names[one.title]] = row(one.title, one.trials, *of_round)
        headings, lines = table(rows, goals)
        process.console.print(report.rich_table(f"{study.title}: {clients.title}", headings, lines))
        many = len(study.seeds) > 1
        words = f"After {study.rounds} rounds, {len(study.seeds)} seed{'s' * many}. UA: user accuracy, before local training. "
        words += "Rounds to a target: ± is half the width of the 95 % confidence interval. " * many + TESTBED
        process.console.print(words, style="dim", markup=False)
        text = f"# {study.title}\n\n{report.markdown_table(headings, lines)}\n\n{words}\n\n![User accuracy](targets.png)\n"
        (run / "targets.md").write_text(text, encoding="utf-8")
        draw(run / "targets.png", clients.title, rows, goals)
        process.console.print(f"table and figure: {run / 'targets.md'}", soft_wrap=True, markup=False)


def numbers(flag: str, text: str) -> list[float]:
    """Shares between commas.

    Raises:
      ValueError: what is no number in [0, 1], or none at all.
    """
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{flag} {text!r} must be numbers separated by commas, e.g. 0.95,0.97") from None
    if not values:
        raise ValueError(f"{flag} {text!r} must name at least one number")
    for value in values:
        checks.share(flag, value)
    return values


def draw(path: Path, title: str, rows: Mapping[str, Row], goals: Sequence[float]) -> None:
    """User accuracy over rounds and over minutes on the testbed: mean and range over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for number, one in enumerate(rows.values()):
        color, curves = report.COLORS[number % len(report.COLORS)], 100 * one.user_accuracy
        for axis, unit in zip(axes, (1.0, one.time.total / 60), strict=True):
            at = unit * np.arange(1, curves.shape[1] + 1)
            axis.plot(at, curves.mean(0), color=color, label=one.title, linewidth=1.6)
            axis.fill_between(at, curves.min(0), curves.max(0), color=color, alpha=0.15, linewidth=0)
    for axis, label in zip(axes, ("round", "minutes on the testbed"), strict=True):
        for goal in goals:
            axis.axhline(100 * goal, color=report.MUTED, linewidth=0.6)
        axis.set(xlabel=label, ylim=(None, 101))
    axes[0].set_ylabel("user accuracy before training, %")
    axes[1].legend(fontsize=8, loc="lower right")
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    figure.savefig(path, dpi=130)


def curves_of(trial: Trial) -> dict[str, np.ndarray]:
    """The curves of a run over its rounds, each `[R]`; see `CURVES`.

    Raises:
      ValueError: it has no user accuracy.
    """
    train = {name: np.array([v for row in trial.rows for v in row["train"].get(name, ())], float) for name in TRAINED}
    if not train["user_accuracy"].size:
        raise ValueError("the run recorded no user accuracy: give the study user_accuracy")
    loss, mean, deviation = (train[name] for name in TRAINED)
    return {"loss": loss, "user_accuracy": 100 * mean, "variance": (100 * deviation) ** 2}


@app.command()
def curves(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of `mtfl` or `mtfl_figure5`.")],
    debug: DebugOption = False,
) -> None:
    """Writes RUN/curves.csv and RUN/curves.png: training loss, user accuracy and its variance over the rounds of a run.

    `python -m experiments.mtfl_tables curves runs/mtfl`

    `python -m experiments.mtfl_tables curves runs/curves`

    `fedjax-meta run mtfl --variant curves --out runs/curves` makes such a run.

    The loss is that of the samples on which the round's clients train, as a mean over their steps. User accuracy and its variance
    are measured on the clients' own test samples before they train.
    """
    with process.one_line_errors(debug):
        study, found = load(run / "study.yaml"), compare.finished([run])
        of_systems = {one.title: [curves_of(trial) for trial in one.trials] for one in found}
        with open(run / "curves.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["system", "seed", "round", *CURVES])
            for one in found:
                for trial, drawn in zip(one.trials, of_systems[one.title], strict=True):
                    for number, values in enumerate(zip(*drawn.values(), strict=True), 1):
                        writer.writerow([one.title, trial.seed, number, *(f"{value:g}" for value in values)])
        draw_curves(run / "curves.png", study.title, of_systems)
        process.console.print(f"curves: {run / 'curves.csv'} and curves.png", soft_wrap=True, markup=False)


def draw_curves(path: Path, title: str, of_systems: Mapping[str, Sequence[Mapping[str, np.ndarray]]]) -> None:
    """One axis for each of `CURVES`; a line for each system, its mean over the seeds that are still training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 5.5), layout="constrained")
    axes = figure.subplots(1, len(CURVES))
    for axis, (name, label) in zip(axes, CURVES.items(), strict=True):
        for number, (system, seeds) in enumerate(of_systems.items()):
            rounds = max(one[name].size for one in seeds)
            padded = np.array([np.pad(one[name], (0, rounds - one[name].size), constant_values=np.nan) for one in seeds])
            color = report.COLORS[number % len(report.COLORS)]
            axis.plot(np.arange(1, rounds + 1), np.nanmean(padded, 0), color=color, label=system, linewidth=1.2)
        axis.set(xlabel="round", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[2].set_yscale("log")
    axes[1].legend(fontsize=8, loc="lower right")
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    figure.savefig(path, dpi=130)


@app.command()
def testbed(
    variant: Annotated[
        list[str] | None, typer.Option("--variant", help="Variant of the study `mtfl`; can be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write the table to.", show_default=False)] = None,
    data_dir: DataDirOption = None,
    debug: DebugOption = False,
) -> None:
    """Shows the cost of a round of each system on a modelled testbed of Raspberry Pis. Nothing is trained.

    `python -m experiments.mtfl_tables testbed --variant quick`

    `python -m experiments.mtfl_tables testbed --data-dir DIR`
    """
    with process.one_line_errors(debug):
        study = load("mtfl", variants=variant or ())
        (place,) = study.scenarios.values()
        clients = place.build(data_dir)
        headings = ["system", "MB down", "MB up", "seconds a round", "download %", "train %", "upload %", "aggregate %"]
        fl = study.system("fedavg-FL", next(iter(study.scenarios)))
        # A client that keeps all of its model sends nothing: independent learning.
        alone = dataclasses.replace(fl, options={**fl.options, "private": "all"})
        found = {"Independent": cost_of(alone, "independent", clients, {})}
        found |= {study.title_of(name): cost(study, name, clients) for name in study.systems}
        lines = []
        for title, (traffic, time) in found.items():
            shares = [f"{100 * share:.1f}" for share in time.shares.values()]
            lines.append([title, f"{traffic.down / 1e6:.2f}", f"{traffic.up / 1e6:.2f}", f"{time.total:.2f}", *shares])
        process.console.print(report.rich_table(clients.title, headings, lines))
        process.console.print(TESTBED, style="dim", markup=False)
        if out is not None:
            write_table(out, f"A round of MTFL on the modelled testbed: {clients.title}", headings, lines, TESTBED)


@app.command()
def shift(
    out: Annotated[Path, typer.Option(help="File of the picture.")] = Path("shift.png"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of training.")] = 20,
    variant: Annotated[
        list[str] | None, typer.Option("--variant", help="Variant of the study `mtfl`; can be repeated.")
    ] = None,
    data_dir: DataDirOption = None,
    debug: DebugOption = False,
) -> None:
    """Inequality (10): how far aggregation moves activations, during a run of FL and a run with private batch norms.

    `python -m experiments.mtfl_tables shift --data-dir DIR`

    `python -m experiments.mtfl_tables shift --variant quick --rounds 8`

    All clients take part in a round, and every client is measured.
    """
    with process.one_line_errors(debug):
        study = load("mtfl", variants=variant or ())
        (place,) = study.scenarios.values()
        clients = place.build(data_dir)
        rows = [line for name in ("fedavg-FL", "fedavg-MTFL_both") for line in moved(study, name, clients, place, rounds)]
        process.console.print(report.rich_table(clients.title, *_mtfl_shift.table(rows)))
        _mtfl_shift.draw(out, f"{clients.title}: moved by aggregation", rows)
        process.console.print(f"figure: {out}", soft_wrap=True, markup=False)


def moved(study: Study, name: str, clients: Clients, place: Any, rounds: int) -> list[dict[str, Any]]:
    """The rows of inequality (10) at a few rounds of a run."""
    system = study.system(name, next(iter(study.scenarios)))
    everyone = {**system.federation, "cohort_size": clients.train.num_clients}
    system = fm.study.System(method=system.method, options=system.options, federation=everyone, tested_with=system.tested_with)
    algorithm, trained = system.build(clients), fm.federate(*system.tested().parts(clients))
    norm = dict(place.model_options).get("norm", "after")
    net = network(clients.train.x.shape[1:], clients.train.num_classes, norm)
    measure = jax.jit(lambda state, data: _mtfl_shift.moved_by_aggregation(net, clients.task, trained, state, data))
    rows: list[dict[str, Any]] = []
    state = None
    for stop in sorted({1, max(rounds // 4, 1), rounds}):
        with process.console.status(f"{study.title_of(name)}: to round {stop} of {rounds}"):
            state, _ = fm.simulate(algorithm, clients.train, key=jax.random.key(0), rounds=stop, eval_every=stop, state=state)
            found = jax.tree.map(float, measure(jax.device_put(state, jax.devices()[0]), clients.train))
        rows += [{"training": study.title_of(name), "round": stop, "layer": layer, **both} for layer, both in found.items()]
    return rows


def network(shape: tuple[int, ...], classes: int, norm: str) -> models.Network:
    """The paper's network, `models.mtfl_mlp` or `models.mtfl_cnn`, by the shape of an image."""
    if shape[-1] != 3:
        return models.Network((int(np.prod(shape)),), classes, hidden=(200, 200), normed=("fc1",), norm=norm)
    convs = ((32, 3, 0), (64, 3, 0))
    return models.Network(tuple(shape), classes, convs=convs, hidden=(512,), normed=("conv1", "conv2"), norm=norm)


if __name__ == "__main__":
    app()
