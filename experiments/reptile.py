"""Per-FedAvg-Reptile against Per-FedAvg and FedAvg with one update, on four synthetic sets and on images (S3).

Xia, Cui: "Personalized federated learning algorithm based on Reptile". `python -m experiments.reptile --help` says what is
run and how long it takes.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
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
from fedjax_meta.simulate import run_rounds, schedule

# The paper grows both spreads over four sets and prints their values in a figure only; these are ours.
SYNTHETIC = {"synthetic_0": (0.0, 0.0), "synthetic_0.25": (0.25, 0.25), "synthetic_0.5": (0.5, 0.5), "synthetic_1": (1.0, 1.0)}
ROUNDS = {**dict.fromkeys(SYNTHETIC, 400), "mnist": 1000, "cifar10": 5000, "mnist_small": 200}
TAU = 4
ROUND_SHARE = 0.2
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)

# Mean of ten runs on CIFAR-10 after 5,000 rounds, in percent; everything else in the paper is a curve.
PUBLISHED = {"cifar10": {"reptile": 50.09, "fedavg": 46.13, "perfedavg": 43.77}}


class System(NamedTuple):
    """One line of the figure: how it is built from its rate, the one that is tuned."""

    title: str
    build: Callable[..., fm.Algorithm]


def _reptile(task: fm.Task, rate: Any, *, interpolation: float, batch_size: int, **options: Any) -> fm.Algorithm:
    del batch_size
    return fm.perfedavg_reptile(
        task, inner_lr=rate, interpolation=interpolation, outer_batches=TAU, inner_batches=TAU, **options
    )


def _perfedavg(task: fm.Task, rate: Any, *, interpolation: float, batch_size: int, **options: Any) -> fm.Algorithm:
    del interpolation
    return fm.perfedavg(
        task,
        estimator=fm.meta.first_order,
        inner_lr=rate,
        outer_lr=rate,
        local_steps=TAU,
        batch_size=batch_size,
        **options,
    )


def _fedavg(task: fm.Task, rate: Any, *, interpolation: float, batch_size: int, **options: Any) -> fm.Algorithm:
    del interpolation
    return fm.fedavg(task, lr=rate, batch_size=batch_size, finetune_epochs=1, finetune_full_batch=True, **options)


SYSTEMS = {
    "reptile": System("Per-FedAvg-Reptile", _reptile),
    "fedavg": System("FedAvg with one update", _fedavg),
    "perfedavg": System("Per-FedAvg (FO)", _perfedavg),
}
NOTES = (
    "Accuracy is the mean over all users after one full-batch step on 30 % of their test samples, measured on the other 70 %.",
    "S3 gives no inner rate for Reptile. Every system's rate is tuned alike: by the accuracy, after a short run, of users "
    "that adapt on one part of their training samples and are measured on the rest; no test sample is looked at.",
    "Per-FedAvg takes as many meta-steps a round as Reptile takes outer batches, with one rate for both of its steps.",
    "Runs differ in initial model, users asked and batches; the users and their samples are the same in all of them.",
)


def load(name: str, *, data_dir: Path | None, seed: int) -> tuple[protocols.Protocol, fm.Task]:
    """The users of a set, and S3's model for it (softmax regression on synthetic ones, for which it names none)."""
    if name in SYNTHETIC:
        return protocols.reptile_synthetic(*SYNTHETIC[name], seed=seed), models.logistic()
    source = sources.load(name, data_dir=data_dir)
    protocol = protocols.reptile(source, seed=seed)
    return protocol, models.elu_mlp(inputs=int(np.prod(protocol.train.x.shape[1:])))


def mean_accuracy(algorithm: fm.Algorithm, key: Any, state: Any, data: fm.FederatedData, *, support: str, query: str) -> Any:
    """Mean of the users' accuracies, a scalar."""
    scores = fm.evaluate.evaluate(algorithm, key, state, data, support=support, query=query, devices=1)
    return jnp.mean(fm.evaluate.accuracy(scores.confusion))


def over(function: Callable[[Any], Any], xs: Any, at_once: int) -> Any:
    """The function mapped over the leading axis, so many at a time side by side."""
    count = jax.tree.leaves(xs)[0].shape[0]
    if at_once >= count:
        return jax.vmap(function)(xs)
    return jax.lax.map(function, xs, batch_size=at_once if at_once > 1 else None)


def largest_class(data: fm.FederatedData) -> float:
    """What a user scores who always names the most frequent class of the adaptation samples: mean over users, in percent."""
    y, scores = np.asarray(data.y), []
    for i in range(data.num_clients):
        seen, asked = (y[data.start[v][i] : data.start[v][i] + data.size[v][i]] for v in ("test_support", "test_query"))
        scores.append(np.mean(asked == np.bincount(seen).argmax()))
    return 100 * float(np.mean(scores))


def tune(
    build: Callable[[Any], fm.Algorithm], data: fm.FederatedData, *, rates: Sequence[float], rounds: int, at_once: int
) -> Any:
    """Accuracy on training samples of one short run a rate, `[rates]`: all rates are one program."""

    def one(rate: Any, data: fm.FederatedData) -> Any:
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
    """All runs as one axis: (rounds of the evaluations `[E]`, mean accuracy over users `[runs, E]`)."""

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
    go_on = jax.jit(lambda runs, count, data: over(lambda run: block(run, count, data), runs, at_once), donate_argnums=0)
    runs = first(jnp.asarray(seeds, jnp.uint32), data)
    done, stops, lines = 0, schedule(rounds, eval_every), []
    for stop in stops:
        runs, accuracy = go_on(runs, stop - done, data)
        done = stop
        lines.append(100 * np.asarray(accuracy))
        on_block(done, lines[-1])
    return stops, np.stack(lines, 1)


def draw(path: Path, results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """One panel a set: mean over runs with error bars of one std, one line a system."""
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
        axis.set_ylabel("mean accuracy of users, %")
        axis.grid(axis="y", color=report.GRID)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7.5, frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def restore(path: Path, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The finished systems by data set of `metrics.json`; none where there is no such file.

    Raises:
      ValueError: a run with other options, but for its data sets and systems.
    """
    if not path.exists():
        return {}
    saved = json.loads(path.read_text())
    theirs, ours = (
        {k: v for k, v in each.items() if k not in ("datasets", "systems")} for each in (saved["options"], options)
    )
    different = checkpoint.first_difference(theirs, json.loads(json.dumps(ours)))
    if different is not None:
        name, old, new = different
        raise ValueError(f"the run in {path.parent} has {name}={old}, not {new}: give the same options to go on with it")
    return saved["results"]


HEADINGS = ("system", "rate", "accuracy ± std", "published", "minutes")


def write_report(folder: Path, results: Mapping[str, Mapping[str, Mapping[str, Any]]], *, interpolation: float) -> None:
    """Prints the table, and writes it as `report.md` with `figure.png`."""
    title = f"Per-FedAvg-Reptile (α = {interpolation:g}, τ = {TAU} x {TAU}) against its rivals"
    lines = [f"# {title}", ""]
    for name, systems in results.items():
        rows = []
        for key, result in systems.items():
            last, published = np.array(result["accuracy"])[:, -1], PUBLISHED.get(name, {}).get(key)
            rows.append(
                [
                    SYSTEMS[key].title,
                    f"{result['rate']:g}",
                    f"{last.mean():.2f} ±{last.std():.2f}",
                    "" if published is None else f"{published:.2f}",
                    f"{result['seconds'] / 60:.1f}",
                ]
            )
        any_result = next(iter(systems.values()))
        what = f"{name}: round {any_result['rounds'][-1]}, {len(any_result['accuracy'])} runs"
        naive = f"Always naming the most frequent class of one's adaptation samples scores {any_result['largest_class']:.2f}."
        runner.console.print(report.rich_table(f"{what} (percent)", HEADINGS, rows))
        runner.console.print(f" - {naive}", style="dim", markup=False)
        lines += [f"## {what}", "", report.markdown_table(HEADINGS, rows), "", naive, ""]
    for note in NOTES:
        runner.console.print(f" - {note}", style="dim", markup=False)
    draw(folder / "figure.png", results)
    lines += [f"- {note}" for note in NOTES]
    lines += ["", "![Accuracy by round](figure.png)", "", f"    {runner.command_line(folder)}", ""]
    checkpoint.write_text(folder / "report.md", "\n".join(lines))
    runner.console.print(f"\nreport, figure and metrics: {folder}", soft_wrap=True)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def main(
    datasets: Annotated[str, typer.Option(help="With commas between: " + ", ".join(ROUNDS) + ".")] = ",".join(SYNTHETIC),
    systems: Annotated[str, typer.Option(help="With commas between: " + ", ".join(SYSTEMS) + ".")] = ",".join(SYSTEMS),
    runs: Annotated[int, typer.Option(min=1, help="Runs, with seeds 1, 2, ...")] = 10,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, help="R; 400 on synthetic sets, 1000 on MNIST, 5000 on CIFAR-10 when not given.", show_default=False
        ),
    ] = None,
    evaluations: Annotated[int, typer.Option(min=1, help="Points of a curve.")] = 20,
    interpolation: Annotated[float, typer.Option(help="α of Per-FedAvg-Reptile.")] = 0.01,
    batch_size: Annotated[int, typer.Option(min=1, help="Of FedAvg and Per-FedAvg.")] = 50,
    rates: Annotated[str, typer.Option(help="The rates to choose from; one alone is taken without tuning.")] = ",".join(
        map(str, RATES)
    ),
    tune_rounds: Annotated[int, typer.Option(min=1, help="Rounds of each short run that a rate is judged by.")] = 100,
    runs_at_once: Annotated[
        int | None,
        typer.Option(min=1, help="Runs side by side; all on an accelerator, one on a CPU when not given.", show_default=False),
    ] = None,
    data_seed: Annotated[int, typer.Option(help="Fixes users and their samples.")] = 1,
    out: runner.OutOption = None,
    data_dir: runner.DataDirOption = None,
    resume: runner.ResumeOption = False,
    compile_cache: runner.CacheOption = True,
    debug: runner.DebugOption = False,
) -> None:
    """Redraws S3's figure: three systems, every set, error bars over runs.

    A fifth of the users takes part in a round: 6 of 30 on synthetic sets, 10 of 50 on images. The runs of a system are one
    axis of one program. The folder --out gets report.md, figure.png and metrics.json, which is written after every system;
    --resume goes on with the systems that are not in it.

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
        seeds = range(1, runs + 1)
        at_once = runs_at_once or (1 if jax.default_backend() == "cpu" else runs)
        options = {"datasets": names, "systems": chosen, "runs": runs, "rounds": rounds, "interpolation": interpolation}
        options |= {"rates": rate_list, "tune_rounds": tune_rounds, "batch_size": batch_size, "data_seed": data_seed}
        folder = runner.open_folder(out, "reptile", resume=resume, options=options)
        saved = folder / "metrics.json"
        results = restore(saved, options) if resume else {}
        for name in names:
            results.setdefault(name, {})
            if all(key in results[name] for key in chosen):
                continue
            with runner.console.status(f"loading {name}"):
                protocol, task = load(name, data_dir=data_dir, seed=data_seed)
            data = protocol.train
            common = {
                "interpolation": interpolation,
                "batch_size": batch_size,
                "cohort_size": round(ROUND_SHARE * data.num_clients),
                "devices": 1,
            }
            total = rounds or ROUNDS[name]
            for key in chosen:
                if key in results[name]:
                    continue
                system, begin = SYSTEMS[key], time.perf_counter()
                what = f"{name}, {system.title}"

                def build(rate: Any, system: System = system, task: fm.Task = task, common: dict[str, Any] = common) -> Any:
                    return system.build(task, rate, **common)

                scores: list[float] = []
                rate = rate_list[0]
                with runner.console.status(f"{what}: choosing a rate") as status:
                    if len(rate_list) > 1:
                        scores = tune(build, data, rates=rate_list, rounds=tune_rounds, at_once=at_once).tolist()
                        rate = rate_list[int(np.nanargmax(scores))]

                    def on_block(done: int, accuracy: np.ndarray, status: Any = status, what: str = what) -> None:
                        status.update(f"{what}: round {done}, {accuracy.mean():.2f} %")

                    stops, lines = curves(
                        build(rate),
                        data,
                        seeds=seeds,
                        rounds=total,
                        eval_every=max(total // evaluations, 1),
                        at_once=at_once,
                        on_block=on_block,
                    )
                results[name][key] = {
                    "largest_class": largest_class(data),
                    "rate": rate,
                    "tuning": dict(zip(map(str, rate_list), scores, strict=False)),
                    "rounds": stops,
                    "accuracy": lines.round(4).tolist(),
                    "seconds": time.perf_counter() - begin,
                }
                checkpoint.write_text(saved, json.dumps({"options": options, "results": results}) + "\n")
                runner.console.print(
                    f"{name}, {system.title}: rate {rate:g}, {lines[:, -1].mean():.2f} ±{lines[:, -1].std():.2f} %",
                    markup=False,
                )
        write_report(
            folder, {name: {key: results[name][key] for key in chosen} for name in names}, interpolation=interpolation
        )


if __name__ == "__main__":
    app()
