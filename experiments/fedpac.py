"""FedPAC and other methods of personalised federated learning: the comparison of Xu, Tong and Huang (ICLR 2023).

`python -m experiments.fedpac --help` says what is run and how long it takes.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer

import fedjax_meta as fm
from experiments import _runner as runner
from fedjax_meta import checkpoint, checks, metrics, models, report
from fedjax_meta.data import protocols, sources, transforms
from fedjax_meta.features import with_projection
from fedjax_meta.simulation import run_rounds
from fedjax_meta.types import PyTree, Rate

DATASETS = ("cifar10", "fashion_mnist", "emnist", "cinic10")


class System(NamedTuple):
    """One row of the tables.

    Attributes:
      title: in tables.
      method: name in `fedjax_meta.METHODS`.
      options: of the method, beyond those that all methods share; a function of the local epochs.
      plain: whether the method is defined with plain SGD, so that it has no option `optimizer`.
    """

    title: str
    method: str
    options: Callable[[int], Mapping[str, Any]] = lambda epochs: {"epochs": epochs}
    plain: bool = False


def _epochs(**options: Any) -> Callable[[int], Mapping[str, Any]]:
    return lambda epochs: {"epochs": epochs, **options}


def _fedpac(**options: Any) -> System:
    left_out = ", ".join(f"no {what}" for key, what in PARTS.items() if key in options)
    return System(f"FedPAC ({left_out})" if left_out else "FedPAC", "fedpac", _epochs(**options))


PARTS = {"align": "alignment", "collaborate": "collaboration"}

SYSTEMS = {
    "local_only": System("Local only", "local_only", lambda epochs: {"epochs": epochs, "new_client_epochs": epochs}),
    "fedavg": System("FedAvg", "fedavg"),
    "fedavg_ft": System("FedAvg-FT", "fedavg_ft", lambda epochs: {"epochs": epochs, "finetune_epochs": epochs}),
    "fedprox": System("FedProx", "fedprox", _epochs(prox_weight=0.1), plain=True),
    "scaffold": System("SCAFFOLD", "scaffold", plain=True),
    "moon": System("MOON", "moon", _epochs(contrast_weight=1.0)),
    "fedper": System("FedPer", "fedper", lambda epochs: {"epochs": epochs, "new_client_epochs": epochs, "finetune": "head"}),
    "lg_fedavg": System("LG-FedAvg", "lg_fedavg"),
    "fedrep": System("FedRep", "fedrep", lambda epochs: {"head_epochs": epochs, "body_epochs": epochs}),
    "fedbabu": System("FedBABU", "fedbabu", lambda epochs: {"epochs": epochs, "finetune_epochs": epochs}),
    "fedrod": System("Fed-RoD", "fedrod"),
    "knn_per": System("kNN-Per", "knn_per"),
    "fedfomo": System("FedFomo", "fedfomo"),
    "fedamp": System("FedAMP", "fedamp"),
    "heur_fedamp": System("HeurFedAMP", "heur_fedamp"),
    "apfl": System("APFL", "apfl"),
    "ditto": System("Ditto", "ditto"),
    "pfedme": System("pFedMe", "pfedme", lambda epochs: {"local_rounds": 12 * epochs, "test_epochs": epochs}, plain=True),
    "l2gd": System("L2GD", "l2gd", _epochs(probability=0.2)),
    "fedem": System("FedEM", "fedem"),
    "pfedhn": System("pFedHN", "pfedhn", lambda epochs: {"local_steps": 12 * epochs, "server_lr": 0.1}, plain=True),
    "fedpac": _fedpac(),
    "fedpac_no_alignment": _fedpac(align=False),
    "fedpac_no_collaboration": _fedpac(collaborate=False),
    "fedpac_neither": _fedpac(align=False, collaborate=False),
}
ABLATION = ("fedpac", "fedpac_no_alignment", "fedpac_no_collaboration", "fedpac_neither")


NOTES = {
    "cifar10": (
        ("fedpac", "fedavg_ft", "fedrep", "fedper", "local_only"),
        "Measured with 10 clients of 50 samples, 20 rounds of 5 epochs in batches of 10, rates 0.01, 0.03, 0.1 (8 rounds), seeds "
        "1 and 2, no crops and flips: FedPAC 52.5 ±0.6, FedAvg-FT 48.6 ±1.6, FedRep 43.9 ±1.0, FedPer 43.9 ±2.5, Local only 42.5 "
        "±0.2; new clients 48.4, 46.0, 40.2, 43.5, 35.9.",
    ),
    "fashion_mnist": (
        ("fedpac", "fedavg_ft"),
        "Measured with 20 clients of 100 samples and 5 epochs (one seed), FedPAC and FedAvg-FT are level, and FedPAC needs many "
        "rounds to get ahead: at rate 0.03 it has 76.1, 80.2, 82.7, 83.8 after 10, 20, 30, 40 rounds, where FedAvg-FT has 76.5, "
        "79.7, 82.1, 83.1; at rate 0.1 it has 80.5, 84.2, 86.1, 86.9, where FedAvg-FT has 81.9, 85.0, 86.3, 86.7. FedAvg-FT owes "
        "this to the epochs of its head in the test (FedAvg alone has 77.0). The same epochs do not improve FedPAC (86.9), whose "
        "clients have heads of their own already.",
    ),
}
"""For a data set: the systems that a finding is about, and the finding. Reports that have all these systems repeat it."""


class Setting(NamedTuple):
    """The clients' data: samples of a client, the share of them that is uniform over the classes, and the number of concepts."""

    size: int
    uniform: float
    concepts: int

    @property
    def name(self) -> str:
        """In the names of results."""
        return f"size{self.size}_uniform{self.uniform:g}_concepts{self.concepts}"

    @property
    def title(self) -> str:
        """In tables."""
        shift = f", {self.concepts} concepts" if self.concepts > 1 else ""
        return f"{self.size} samples a client, s = {100 * self.uniform:g} %{shift}"


class Outcome(NamedTuple):
    """The results of one system in one setting; accuracies are means over clients, in percent.

    Attributes:
      rates: the grid.
      validation: accuracy at each rate on samples that were held back from training.
      rate: the best rate.
      known: accuracy on the training clients' tests, mean over the last rounds, for each seed.
      new: on clients that never took part, after the last round, for each seed.
      seconds: wall-clock of the final runs, without compilation.
    """

    rates: list[float]
    validation: list[float]
    rate: float
    known: list[float]
    new: list[float]
    seconds: float


def sgd(rate: Rate) -> optax.GradientTransformation:
    """The optimiser of all systems that define none of their own: momentum 0.5, weight decay 5e-4."""
    return optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(rate, momentum=0.5))


Build = Callable[[Rate], fm.Algorithm]
"""`learning rate -> algorithm`; the rate may be traced."""


def builder(system: System, task: fm.Task, *, epochs: int, batch_size: int, cohort: int, devices: int | None) -> Build:
    """The algorithm of a system as a function of its learning rate."""
    options = {**system.options(epochs), "batch_size": batch_size, "cohort_size": cohort, "devices": devices}
    if not system.plain:
        options["optimizer"] = sgd
    return lambda rate: runner.build(system.method, task, lr=rate, **options)


def clients(data: fm.FederatedData, chosen: slice) -> fm.FederatedData:
    """Some of the clients as a population of their own; no sample is copied."""
    cut = {"start": {k: v[chosen] for k, v in data.start.items()}, "size": {k: v[chosen] for k, v in data.size.items()}}
    return dataclasses.replace(data, **cut)


def validation_cut(data: fm.FederatedData, share: float = 0.2) -> fm.FederatedData:
    """The same clients without their test samples: the last `share` of each train view becomes the view "test"."""
    start, size = np.asarray(data.start["train"]), np.asarray(data.sizes("train"))
    train = size - np.maximum((size * share).astype(np.int32), 1)
    support = np.maximum((train * share).astype(np.int32), 1)
    runs = {
        "train": (start, train),
        "support": (start, support),
        "query": (start + support, train - support),
        "test": (start + train, size - train),
    }
    return protocols.on_device(
        dataclasses.replace(
            data,
            start={name: begin.astype(np.int32) for name, (begin, _) in runs.items()},
            size={name: count.astype(np.int32) for name, (_, count) in runs.items()},
            max_size=tuple((name, int(count.max())) for name, (_, count) in runs.items()),
        )
    )


def train_and_test(
    build: Build,
    run: tuple[jax.Array, Rate],
    data: fm.FederatedData,
    new: fm.FederatedData | None,
    *,
    rounds: int,
    last: int,
    devices: int | None,
) -> tuple[jax.Array, jax.Array]:
    """One run: a pure function of seed, rate and data.

    A client is tested with the model that it has after a round. Methods that adapt in the test do so on the client's train view.

    Args:
      build: the system.
      run: seed and learning rate, may be traced.
      data: the training clients.
      new: clients that never take part; none when `None`.
      rounds: R.
      last: rounds at the end after which the training clients are tested.
      devices: how many devices share the clients.

    Returns:
      (mean accuracy of the training clients in each of the last rounds, in percent `[last]`, that of the new clients, a scalar).
    """
    seed, rate = run
    algorithm = build(rate)
    init_key, key, test_key = jax.random.split(jax.random.key(seed), 3)

    def accuracy(state: fm.State, data: fm.FederatedData, known: bool) -> jax.Array:
        result = fm.evaluate(algorithm, test_key, state, data, support="train", query="test", known=known, devices=devices)
        return 100 * jnp.mean(metrics.where_finite(metrics.accuracy(result.confusion), result.loss))

    state = run_rounds(algorithm, key, algorithm.init(init_key, data), data, rounds - last, most=max(rounds - last, 1))[0]

    def one(state: fm.State, _: Any) -> tuple[fm.State, jax.Array]:
        state, _ = algorithm.round(jax.random.fold_in(key, state.round), state, data)
        return state, accuracy(state, data, True)

    state, known = jax.lax.scan(one, state, None, length=last)
    return known, jnp.zeros(()) if new is None else accuracy(state, new, False)


def wait(values: PyTree) -> PyTree:
    """The values as NumPy arrays. Waits in Python, because Python handles Ctrl-C only after a call of JAX has returned."""
    while not all(leaf.is_ready() for leaf in jax.tree.leaves(values)):
        time.sleep(0.02)
    return jax.tree.map(np.asarray, values)


def compare(
    build: Build,
    train: fm.FederatedData,
    new: fm.FederatedData,
    *,
    rates: Sequence[float],
    seeds: Sequence[int],
    tune_rounds: int,
    rounds: int,
    last: int,
    devices: int | None,
) -> Outcome:
    """Tunes the learning rate on held-back training samples, with the grid as one program; runs the best rate with all seeds."""

    def grid(runs: Any, data: fm.FederatedData) -> jax.Array:
        # One run after the other, so that each has all memory of an accelerator.
        return jax.lax.map(
            lambda run: train_and_test(build, run, data, None, rounds=tune_rounds, last=1, devices=devices)[0][0], runs
        )

    held_back = validation_cut(train)
    runs = (jnp.full(len(rates), seeds[0], jnp.uint32), jnp.asarray(rates, jnp.result_type(float)))
    validation = wait(jax.jit(grid)(runs, held_back))
    # A rate with which training diverges has NaN, and is chosen only where all do.
    rate = float(rates[int(np.argmax(np.nan_to_num(validation, nan=-1.0)))])

    def final(runs: Any, train: fm.FederatedData, new: fm.FederatedData) -> Any:
        return jax.lax.map(lambda run: train_and_test(build, run, train, new, rounds=rounds, last=last, devices=devices), runs)

    runs = (jnp.asarray(seeds, jnp.uint32), jnp.full(len(seeds), rate, jnp.result_type(float)))
    program = jax.jit(final).lower(runs, train, new).compile()
    started = time.perf_counter()
    known, unseen = wait(program(runs, train, new))
    seconds = time.perf_counter() - started
    return Outcome(list(rates), validation.tolist(), rate, known.mean(1).tolist(), unseen.tolist(), round(seconds, 2))


def load(
    source: sources.Source, setting: Setting, *, num_clients: int, num_new: int, seed: int, share: bool
) -> tuple[fm.FederatedData, fm.FederatedData]:
    """(training clients, new clients) of one setting; both have the same distribution."""
    together = num_clients + num_new
    data = protocols.fedpac_clients(
        source,
        seed=seed,
        num_clients=together,
        size=setting.size,
        uniform=setting.uniform,
        concept_groups=setting.concepts,
        share=share,
    ).train
    return clients(data, slice(0, num_clients)), clients(data, slice(num_clients, together))


def make_task(dataset: str, classes: int, system: System, train: fm.FederatedData, *, augment: bool) -> fm.Task:
    """The paper's network; for MOON with its projection head, with `augment` with random crops and flips of colour images."""
    image = tuple(train.x.shape[1:])
    task = models.fedpac_cnn(image, classes)
    if system.method == "moon":
        task = with_projection(task, 128, classes)
    if augment and image[-1] == 3:
        black = -jnp.asarray(train.offset) * jnp.asarray(train.scale)
        task = transforms.augmented(task, partial(transforms.crop_and_flip, fill=black))
    return task


EDGE = "* the best rate is at an end of the grid: other --rates may be better"
HEADINGS = ("system", "rate", "accuracy", "new clients", "on validation", "minutes")


def table(outcomes: Mapping[str, Outcome]) -> list[list[str]]:
    """Rows under `HEADINGS`, in the order of `SYSTEMS`; a rate at an end of its grid has a star."""
    rows = []
    for name in [name for name in SYSTEMS if name in outcomes]:
        o = outcomes[name]
        rows.append(
            [
                SYSTEMS[name].title + (" (diverged)" if diverged(o) else ""),
                f"{o.rate:g}" + ("*" if at_edge(o) else ""),
                _spread(o.known),
                _spread(o.new),
                f"{max(o.validation, key=lambda score: (np.isfinite(score), score)):.2f}",
                f"{o.seconds / 60:.1f}",
            ]
        )
    return rows


def diverged(outcome: Outcome) -> bool:
    """Whether the final run of a seed has an accuracy that is not finite."""
    return not np.isfinite([*outcome.known, *outcome.new]).all()


def at_edge(outcome: Outcome) -> bool:
    """Whether the best rate is at an end of the grid, so that a wider grid could have a better one."""
    return len(outcome.rates) > 1 and outcome.rate in (min(outcome.rates), max(outcome.rates))


def _spread(values: Sequence[float]) -> str:
    spread = f" ±{np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread}"


def write_report(folder: Path, title: str, note: str, results: Mapping[Setting, Mapping[str, Outcome]], how: str) -> None:
    """Prints one table a setting and writes them as `report.md`."""
    lines = [f"# {title}", "", *([note, ""] if note else []), how, ""]
    for setting, outcomes in results.items():
        rows = table(outcomes)
        runner.console.print(report.rich_table(f"{title}: {setting.title} (percent)", HEADINGS, rows))
        lines += [f"## {setting.title}", "", report.markdown_table(HEADINGS, rows), ""]
        if any(map(at_edge, outcomes.values())):
            lines += [EDGE, ""]
            runner.console.print(EDGE, soft_wrap=True)
    lines += ["Command:", "", f"    {runner.command_line(folder)}", ""]
    checkpoint.write_text(folder / "report.md", "\n".join(lines))
    runner.console.print(f"\nreport and metrics: {folder}", soft_wrap=True, markup=False)


class Part(NamedTuple):
    """One system in one setting.

    Attributes:
      setting: the clients.
      name: of the system in `SYSTEMS`.
      build: the system.
      config: everything that the outcome depends on; its algorithm has every rate of the grid.
    """

    setting: Setting
    name: str
    build: Build
    config: Mapping[str, Any]

    @property
    def full_name(self) -> str:
        """Of the result."""
        return f"{self.setting.name}_{self.name}"


app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def main(  # long because every option brings its help text
    dataset: Annotated[str, typer.Option(help="One of " + ", ".join(DATASETS) + ", from tensorflow-datasets.")] = "cifar10",
    systems: Annotated[
        str, typer.Option(help="`all`, `ablation`, or names separated by commas: " + ", ".join(SYSTEMS))
    ] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds R of the final runs.")] = 200,
    tune_rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of tuning; --rounds when not given.")] = None,
    last: Annotated[int, typer.Option(min=1, help="Rounds at the end over which accuracy is averaged.")] = 5,
    rates: Annotated[str, typer.Option(help="Learning rates that every system is tuned over.")] = "0.003,0.01,0.03,0.1",
    seeds: Annotated[str, typer.Option(help="Seeds of training; clients and their samples stay the same.")] = "1,2,3",
    num_clients: Annotated[int, typer.Option(min=1, help="Clients N that train.")] = 20,
    clients_per_round: Annotated[int | None, typer.Option(min=1, help="Cohort C; all clients when not given.")] = None,
    new_clients: Annotated[int, typer.Option(min=1, help="Clients that never train, drawn like those that do.")] = 5,
    sizes: Annotated[str, typer.Option(help="Training samples of a client; several make a sweep.")] = "600",
    uniform: Annotated[str, typer.Option(help="Share s of samples uniform over classes; several make a sweep.")] = "0.2",
    concepts: Annotated[str, typer.Option(help="Groups of clients with different labels; 1 is no concept shift.")] = "1",
    epochs: Annotated[int, typer.Option(min=1, help="Local epochs E.")] = 5,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a batch.")] = 50,
    augment: Annotated[bool, typer.Option("--augment/--no-augment", help="Random crops and flips of colour images.")] = True,
    share: Annotated[
        bool, typer.Option("--share", help="Clients may share samples when a class runs out, as in the authors' code.")
    ] = False,
    data_seed: Annotated[int, typer.Option(help="Fixes clients and their samples; 2022 as in the authors' code.")] = 2022,
    out: runner.OutOption = None,
    data_dir: runner.DataDirOption = None,
    resume: runner.ResumeOption = False,
    download: Annotated[bool, typer.Option("--download", help="Download and prepare the set if needed (TensorFlow).")] = False,
    devices: runner.DevicesOption = None,
    compile_cache: runner.CacheOption = True,
    debug: runner.DebugOption = False,
) -> None:
    """Compares FedPAC with the other methods of its paper, all tuned with the same effort.

    All clients have the same number of samples; a share of these is uniform over the classes, and the rest is from a group of
    dominant classes. For each system and setting all learning rates of the grid are tried on samples that are held back from
    training. The best rate is then trained on all training samples, with every seed, and tested on the clients' own test samples
    in each of the last rounds. New clients, which never took part, are tested after the last round, once the system has adapted
    to them. Systems that adapt in the test do so on the client's training samples.

    The paper's 200 rounds of all systems are for an accelerator; on a CPU take fewer clients, rounds and systems. A run may be
    stopped at any time; --resume continues with the first unfinished system.

    Examples:

    `python -m experiments.fedpac --dataset fashion_mnist --systems ablation --rounds 20 --sizes 100 --seeds 1,2`

    `python -m experiments.fedpac --data-dir DIR --out runs/fedpac`

    `python -m experiments.fedpac --data-dir DIR --uniform 0,0.2,0.5 --systems local_only,fedavg_ft,fedper,fedrep,fedpac`

    `python -m experiments.fedpac --data-dir DIR --concepts 2 --systems fedavg,fedper,fedpac`
    """
    with runner.one_line_errors(debug):
        checks.one_of("--dataset", dataset, DATASETS)
        named = {"all": list(SYSTEMS), "ablation": list(ABLATION)}
        chosen = named.get(systems) or runner.names(systems, "--systems", (*named, *SYSTEMS))
        grid, seed_list = runner.numbers(rates, "--rates", float), runner.numbers(seeds, "--seeds")
        for rate in grid:
            checks.positive("--rates", rate)
        settings = [
            Setting(size, s, groups)
            for size in runner.numbers(sizes, "--sizes")
            for s in runner.numbers(uniform, "--uniform", float)
            for groups in runner.numbers(concepts, "--concepts")
        ]
        for setting in settings:
            checks.count("--sizes", setting.size)
            checks.share("--uniform", setting.uniform)
            checks.count("--concepts", setting.concepts)
        if last > rounds:
            raise ValueError(f"--last {last} must be at most --rounds {rounds}")
        cohort = num_clients if clients_per_round is None else clients_per_round
        if cohort > num_clients:
            raise ValueError(f"--clients-per-round {cohort} is more than the --num-clients {num_clients} there are")
        shared = runner.prepare(devices, compile_cache, cohort_size=cohort)
        with runner.loading(dataset):
            source = sources.load(dataset, data_dir=data_dir, download=download)
        config = {
            "experiment": "fedpac",
            "dataset": dataset,
            "rounds": rounds,
            "tune_rounds": tune_rounds or rounds,
            "last": last,
            "rates": grid,
            "seeds": seed_list,
            "num_clients": num_clients,
            "new_clients": new_clients,
            "augment": augment,
            "share": share,
            "data_seed": data_seed,
        }
        cut = partial(load, source, num_clients=num_clients, num_new=new_clients, seed=data_seed, share=share)
        parts = []
        # Everything is built once with concrete rates, so that wrong values are refused before anything is trained.
        for setting in settings:
            train, _ = cut(setting)
            for name in chosen:
                task = make_task(dataset, source.num_classes, SYSTEMS[name], train, augment=augment)
                build = builder(SYSTEMS[name], task, epochs=epochs, batch_size=batch_size, cohort=cohort, devices=shared)
                algorithm = runner.swept([build(rate) for rate in grid])
                parts.append(Part(setting, name, build, {**config, **setting._asdict(), "algorithm": algorithm}))
        folder = runner.open_folder(
            out,
            f"fedpac-{dataset}",
            resume=resume,
            options={**config, "systems": chosen, "settings": [setting._asdict() for setting in settings]},
            algorithms={part.full_name: part.config["algorithm"] for part in parts},
        )
        results: dict[Setting, dict[str, Outcome]] = {}
        for part in parts:
            title = SYSTEMS[part.name].title

            def compute(part: Part = part) -> dict[str, Any]:
                train, new = cut(part.setting)
                budget = {"tune_rounds": tune_rounds or rounds, "rounds": rounds, "last": last}
                return compare(part.build, train, new, rates=grid, seeds=seed_list, devices=shared, **budget)._asdict()

            with runner.console.status(f"{title}: {part.setting.title}"):
                outcome = Outcome(**runner.remembered(folder, part.full_name, part.config, compute))
            results.setdefault(part.setting, {})[part.name] = outcome
            runner.console.print(
                f"{title}: {_spread(outcome.known)} %, new clients {_spread(outcome.new)} %  "
                f"[dim]rate {outcome.rate:g}, {part.setting.title}[/dim]",
                soft_wrap=True,
            )
        how = (
            f"{num_clients} clients, {cohort} a round, {rounds} rounds, {epochs} epochs, batches of {batch_size}. Accuracy: "
            f"mean over clients and the last {last} rounds{', ± std over seeds' if len(seed_list) > 1 else ''}. Every system "
            f"was tuned over the rates {', '.join(f'{rate:g}' for rate in grid)} on 20 % of its training samples "
            f"({tune_rounds or rounds} rounds)."
        )
        about, found = NOTES.get(dataset, ((), ""))
        note = f"{source.note}\n\n{found}" if found and set(about) <= set(chosen) else source.note
        write_report(folder, f"FedPAC and other methods on {dataset}", note, results, how)
        runner.exit_if_diverged([diverged(one) for outcomes in results.values() for one in outcomes.values()])


if __name__ == "__main__":
    try:
        app()
    except SystemExit as ended:
        if ended.code in (130, 143):  # Otherwise Python waits for the running program, perhaps for hours.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ended.code)
        raise
