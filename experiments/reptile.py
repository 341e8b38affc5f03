"""Per-FedAvg-Reptile, Per-FedAvg and FedAvg with one update, on four synthetic data sets and on images.

Xia, Cui: "Personalized federated learning algorithm based on Reptile". `python -m experiments.reptile --help` says what is
run and how long it takes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from fedjax_meta.simulation import run_rounds, schedule
from fedjax_meta.types import Key, PyTree, Rate

# In the paper both spreads grow over four data sets, with values that only a figure shows; these values are ours.
SYNTHETIC = {"synthetic_0": (0.0, 0.0), "synthetic_0.25": (0.25, 0.25), "synthetic_0.5": (0.5, 0.5), "synthetic_1": (1.0, 1.0)}
ROUNDS = {**dict.fromkeys(SYNTHETIC, 400), "mnist": 1000, "cifar10": 5000, "mnist_small": 200}
TAU = 4
ROUND_SHARE = 0.2
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)

# Mean of ten runs on CIFAR-10 after 5,000 rounds, in percent; for everything else the paper has curves only.
PUBLISHED = {"cifar10": {"reptile": 50.09, "fedavg": 46.13, "perfedavg": 43.77}}


class System(NamedTuple):
    """One line of the figure.

    Attributes:
      title: in tables and figures.
      method: name in `fedjax_meta.METHODS`.
      options: `(rate, interpolation, batch_size) -> options`; the rate is the one that is tuned, and may be traced.
    """

    title: str
    method: str
    options: Callable[[Rate, float, int], dict[str, Any]]


SYSTEMS = {
    "reptile": System(
        "Per-FedAvg-Reptile",
        "perfedavg_reptile",
        lambda rate, interpolation, batch_size: {
            "inner_lr": rate, "interpolation": interpolation, "outer_batches": TAU, "inner_batches": TAU,
        },
    ),
    "fedavg": System(
        "FedAvg with one update",
        "fedavg_one_step",
        lambda rate, interpolation, batch_size: {"lr": rate, "batch_size": batch_size},
    ),
    "perfedavg": System(
        "Per-FedAvg (FO)",
        "perfedavg_fo",
        lambda rate, interpolation, batch_size: {
            "inner_lr": rate, "outer_lr": rate, "local_steps": TAU, "batch_size": batch_size,
        },
    ),
}  # fmt: skip
NOTES = (
    "Accuracy is the mean over all clients after one full-batch step on 30 % of their test samples, measured on the other 70 %.",
    "The paper gives no inner rate for Reptile. The rates of all systems are tuned alike: by the accuracy, after a short run, of "
    "clients that adapt to one part of their training samples and are measured on the rest; no test sample is used.",
    "Per-FedAvg takes as many meta-steps a round as Reptile takes outer batches, with one rate for both of its steps.",
    "Runs differ in the initial model, cohorts and batches; the clients and their samples are the same in all of them.",
)

Build = Callable[[Rate], fm.Algorithm]
"""`rate -> algorithm`; the rate may be traced."""


def builder(name: str, task: fm.Task, *, interpolation: float, batch_size: int, cohort_size: int) -> Build:
    """The algorithm of a system as a function of its rate."""
    system, federation = SYSTEMS[name], {"cohort_size": cohort_size, "devices": 1}
    return lambda rate: runner.build(system.method, task, **system.options(rate, interpolation, batch_size), **federation)


def load(name: str, *, data_dir: Path | None, seed: int) -> tuple[protocols.Protocol, fm.Task]:
    """The clients of a data set, and the paper's model for it (softmax regression on synthetic sets, where it names none)."""
    if name in SYNTHETIC:
        return protocols.perfedavg_reptile_synthetic_clients(*SYNTHETIC[name], seed=seed), models.logistic()
    source = sources.load(name, data_dir=data_dir)
    protocol = protocols.perfedavg_reptile_clients(source, seed=seed)
    return protocol, models.elu_mlp(inputs=int(np.prod(protocol.train.x.shape[1:])))


def mean_accuracy(
    algorithm: fm.Algorithm, key: Key, state: fm.State, data: fm.FederatedData, *, support: str, query: str
) -> jax.Array:
    """Mean of the clients' accuracies, a scalar; NaN if a model is not finite."""
    scores = fm.evaluate(algorithm, key, state, data, support=support, query=query, devices=1)
    return jnp.mean(fm.metrics.where_finite(fm.metrics.accuracy(scores.confusion), scores.loss))


def over(function: Callable[[Any], PyTree], xs: PyTree, at_once: int) -> PyTree:
    """The function mapped over the leading axis, `at_once` entries at a time."""
    count = jax.tree.leaves(xs)[0].shape[0]
    if at_once >= count:
        return jax.vmap(function)(xs)
    return jax.lax.map(function, xs, batch_size=at_once if at_once > 1 else None)


def largest_class(data: fm.FederatedData) -> float:
    """The accuracy of always predicting the most frequent class of the adaptation samples: mean over clients, in percent."""
    y, scores = np.asarray(data.y), []
    for i in range(data.num_clients):
        seen, asked = (y[data.start[v][i] : data.start[v][i] + data.size[v][i]] for v in ("test_support", "test_query"))
        scores.append(np.mean(asked == np.bincount(seen).argmax()))
    return 100 * float(np.mean(scores))


def tune(build: Build, data: fm.FederatedData, *, rates: Sequence[float], rounds: int, at_once: int) -> np.ndarray:
    """Accuracy on training samples after a short run with each rate, `[rates]`; all rates are one program."""

    def one(rate: Rate, data: fm.FederatedData) -> jax.Array:
        algorithm = build(rate)
        init_key, run_key, test_key = jax.random.split(jax.random.key(0), 3)
        state, _ = run_rounds(algorithm, run_key, algorithm.init(init_key, data), data, rounds, most=rounds)
        return mean_accuracy(algorithm, test_key, state, data, support="support", query="query")

    program = jax.jit(lambda rates, data: over(lambda rate: one(rate, data), rates, at_once))
    return np.asarray(program(jnp.asarray(rates, jnp.float32), data))


def curves(
    algorithm: fm.Algorithm,
    data: fm.FederatedData,
    *,
    seeds: Sequence[int],
    rounds: int,
    eval_every: int,
    at_once: int,
    on_block: Callable[[int, np.ndarray], None],
) -> tuple[list[int], np.ndarray]:
    """All runs as one axis: (rounds of the evaluations `[E]`, mean accuracy over clients `[runs, E]`, in percent)."""

    def start(seed: Any, data: fm.FederatedData) -> Any:
        init_key, run_key, test_key = jax.random.split(jax.random.key(seed), 3)
        return algorithm.init(init_key, data), run_key, test_key

    def block(run: Any, count: Any, data: fm.FederatedData) -> Any:
        state, run_key, test_key = run
        state, _ = run_rounds(algorithm, run_key, state, data, count, most=eval_every)
        key = jax.random.fold_in(test_key, state.round)
        accuracy = mean_accuracy(algorithm, key, state, data, support="test_support", query="test_query")
        return (state, run_key, test_key), accuracy

    first = jax.jit(lambda seeds, data: over(lambda seed: start(seed, data), seeds, at_once))
    proceed = jax.jit(lambda runs, count, data: over(lambda run: block(run, count, data), runs, at_once), donate_argnums=0)
    runs = first(jnp.asarray(seeds, jnp.uint32), data)
    done, stops, lines = 0, schedule(rounds, eval_every), []
    for stop in stops:
        runs, accuracy = proceed(runs, stop - done, data)
        done = stop
        lines.append(100 * np.asarray(accuracy))
        on_block(done, lines[-1])
    return stops, np.stack(lines, 1)


def draw(path: Path, results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """One panel a data set, one line a system: mean over runs with error bars of one standard deviation."""
    from matplotlib.figure import Figure

    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in panels[len(results) :]:
        axis.set_visible(False)
    for axis, (name, systems) in zip(panels, results.items(), strict=False):
        for number, (key, result) in enumerate(systems.items()):
            lines, color = np.array(result["accuracy"]), report.COLORS[(2, 1, 3)[number % 3]]
            label = f"{SYSTEMS[key].title}, rate {result['rate']:g}"
            axis.errorbar(result["rounds"], lines.mean(0), lines.std(0), color=color, capsize=2, linewidth=1.4, label=label)
            if key in PUBLISHED.get(name, {}):
                axis.scatter(
                    result["rounds"][-1], PUBLISHED[name][key], marker="D", facecolor="white", edgecolor=color, zorder=5
                )
        axis.set_title(name, loc="left", fontweight="bold")
        axis.set_xlabel("round")
        axis.set_ylabel("mean accuracy of clients, %")
        axis.grid(axis="y", color=report.GRID)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7.5, frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def diverged(result: Mapping[str, Any]) -> int | None:
    """The round of the first evaluation from which on the mean over the runs is not finite, `None` if the last one is finite."""
    finite = np.isfinite(np.array(result["accuracy"], float).mean(0))
    return None if finite[-1] else result["rounds"][max(np.flatnonzero(finite), default=-1) + 1]


HEADINGS = ("system", "rate", "accuracy ± std", "published", "minutes")


def write_report(folder: Path, results: Mapping[str, Mapping[str, Mapping[str, Any]]], *, interpolation: float) -> None:
    """Prints the table, and writes it as `report.md` with `figure.png`."""
    title = f"Per-FedAvg-Reptile (α = {interpolation:g}, τ = {TAU} x {TAU}) and other methods"
    lines = [f"# {title}", ""]
    for name, systems in results.items():
        rows = []
        for key, result in systems.items():
            last, published = np.array(result["accuracy"])[:, -1], PUBLISHED.get(name, {}).get(key)
            rows.append(
                [
                    SYSTEMS[key].title + (f" (diverged at round {since})" if (since := diverged(result)) else ""),
                    f"{result['rate']:g}",
                    f"{last.mean():.2f} ±{last.std():.2f}",
                    "" if published is None else f"{published:.2f}",
                    f"{result['seconds'] / 60:.1f}",
                ]
            )
        any_result = next(iter(systems.values()))
        what = f"{name}: round {any_result['rounds'][-1]}, {len(any_result['accuracy'])} runs"
        naive = (
            f"Always predicting the most frequent class of the adaptation samples scores {any_result['largest_class']:.2f}."
        )
        runner.console.print(report.rich_table(f"{what} (percent)", HEADINGS, rows))
        runner.console.print(f" - {naive}", style="dim", markup=False)
        lines += [f"## {what}", "", report.markdown_table(HEADINGS, rows), "", naive, ""]
    for note in NOTES:
        runner.console.print(f" - {note}", style="dim", markup=False)
    draw(folder / "figure.png", results)
    lines += [f"- {note}" for note in NOTES]
    lines += ["", "![Accuracy by round](figure.png)", "", f"    {runner.command_line(folder)}", ""]
    checkpoint.write_text(folder / "report.md", "\n".join(lines))
    runner.console.print(f"\nreport, figure and metrics: {folder}", soft_wrap=True, markup=False)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def main(  # long because every option brings its help text
    datasets: Annotated[str, typer.Option(help="Data sets, separated by commas: " + ", ".join(ROUNDS) + ".")] = ",".join(
        SYNTHETIC
    ),
    systems: Annotated[str, typer.Option(help="Systems, separated by commas: " + ", ".join(SYSTEMS) + ".")] = ",".join(
        SYSTEMS
    ),
    runs: Annotated[int, typer.Option(min=1, help="Runs, with seeds 1, 2, ...")] = 10,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, help="R; 400 on synthetic sets, 1000 on MNIST, 5000 on CIFAR-10 when not given.", show_default=False
        ),
    ] = None,
    evaluations: Annotated[int, typer.Option(min=1, help="Points of a curve.")] = 20,
    interpolation: Annotated[float, typer.Option(help="α of Per-FedAvg-Reptile.")] = 0.01,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size of FedAvg and Per-FedAvg.")] = 50,
    rates: Annotated[str, typer.Option(help="Rates to choose from; a single one is not tuned.")] = ",".join(map(str, RATES)),
    tune_rounds: Annotated[int, typer.Option(min=1, help="Rounds of the short run of each rate.")] = 100,
    runs_at_once: Annotated[
        int | None,
        typer.Option(min=1, help="Runs side by side; all on an accelerator, one on a CPU when not given.", show_default=False),
    ] = None,
    data_seed: Annotated[int, typer.Option(help="Fixes clients and their samples.")] = 1,
    out: runner.OutOption = None,
    data_dir: runner.DataDirOption = None,
    resume: runner.ResumeOption = False,
    compile_cache: runner.CacheOption = True,
    debug: runner.DebugOption = False,
) -> None:
    """Repeats the paper's figure: three systems on every data set, with error bars over runs.

    A fifth of the clients takes part in a round: 6 of 30 on synthetic sets, 10 of 50 on images. The runs of a system are one
    axis of one program. The folder --out gets report.md, figure.png and metrics.json, which is written after every system;
    --resume continues with the first unfinished system.

    Examples:

    `python -m experiments.reptile --runs 3 --rounds 60 --tune-rounds 20` (synthetic sets, some minutes)

    `python -m experiments.reptile --out runs/reptile-synthetic`

    `python -m experiments.reptile --datasets mnist,cifar10 --data-dir DIR --out runs/reptile-images`
    """
    with runner.one_line_errors(debug):
        names = runner.names(datasets, "--datasets", ROUNDS)
        chosen = runner.names(systems, "--systems", SYSTEMS)
        rate_list = runner.numbers(rates, "--rates", float)
        for rate in rate_list:
            checks.positive("--rates", rate)
        runner.prepare(1, compile_cache, cohort_size=1)
        at_once = runs_at_once or (1 if jax.default_backend() == "cpu" else runs)
        config = {"experiment": "reptile", "runs": runs, "tune_rounds": tune_rounds, "data_seed": data_seed}
        config |= {"rates": rate_list, "evaluations": evaluations}
        parts = []
        # Everything is built once with concrete rates, so that wrong values are refused before anything is trained.
        for dataset in names:
            with runner.loading(dataset):
                protocol, task = load(dataset, data_dir=data_dir, seed=data_seed)
            cohort = round(ROUND_SHARE * protocol.train.num_clients)
            for name in chosen:
                build = builder(name, task, interpolation=interpolation, batch_size=batch_size, cohort_size=cohort)
                algorithm = runner.swept([build(rate) for rate in rate_list])
                full = {**config, "dataset": dataset, "rounds": rounds or ROUNDS[dataset], "algorithm": algorithm}
                parts.append(Part(dataset, name, build, protocol.train, full))
        folder = runner.open_folder(
            out,
            "reptile",
            resume=resume,
            options={**config, "datasets": names, "systems": chosen, "rounds": rounds},
            algorithms={part.full_name: part.config["algorithm"] for part in parts},
        )
        results: dict[str, dict[str, Any]] = {name: {} for name in names}
        for part in parts:
            found = runner.remembered(folder, part.full_name, part.config, partial(measure, part, at_once=at_once))
            results[part.dataset][part.name] = found
            last = np.array(found["accuracy"])[:, -1]
            runner.console.print(f"{part.title}: rate {found['rate']:g}, {last.mean():.2f} ±{last.std():.2f} %", markup=False)
        write_report(folder, results, interpolation=interpolation)
        runner.exit_if_diverged([diverged(one) is not None for systems in results.values() for one in systems.values()])


class Part(NamedTuple):
    """One system on one data set.

    Attributes:
      dataset: its name.
      name: of the system in `SYSTEMS`.
      build: the system.
      data: the clients.
      config: everything that the results depend on; its algorithm has every rate to choose from.
    """

    dataset: str
    name: str
    build: Build
    data: fm.FederatedData
    config: Mapping[str, Any]

    @property
    def full_name(self) -> str:
        """Of the result."""
        return f"{self.dataset}_{self.name}"

    @property
    def title(self) -> str:
        """In the terminal."""
        return f"{self.dataset}, {SYSTEMS[self.name].title}"


def measure(part: Part, *, at_once: int) -> dict[str, Any]:
    """Chooses a rate and runs the system with it, all seeds at once; the result as JSON values."""
    begin, config, scores = time.perf_counter(), part.config, []
    rates, rate = config["rates"], config["rates"][0]
    with runner.console.status(f"{part.title}: choosing a rate") as status:
        if len(rates) > 1:
            scores = tune(part.build, part.data, rates=rates, rounds=config["tune_rounds"], at_once=at_once).tolist()
            # A rate with which training diverges has NaN, and is chosen only where all do.
            rate = rates[int(np.argmax(np.nan_to_num(scores, nan=-1.0)))]
        stops, lines = curves(
            part.build(rate),
            part.data,
            seeds=range(1, config["runs"] + 1),
            rounds=config["rounds"],
            eval_every=max(config["rounds"] // config["evaluations"], 1),
            at_once=at_once,
            on_block=lambda done, accuracy: status.update(f"{part.title}: round {done}, {accuracy.mean():.2f} %"),
        )
    return {
        "largest_class": largest_class(part.data),
        "rate": rate,
        "tuning": dict(zip(map(str, rates), scores, strict=False)),
        "rounds": stops,
        "accuracy": lines.round(4).tolist(),
        "seconds": time.perf_counter() - begin,
    }


if __name__ == "__main__":
    app()
