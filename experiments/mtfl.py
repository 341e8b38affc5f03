"""MTFL (Mills, Hu, Min, arXiv 2007.09236): rounds to a target user accuracy, its Figure 5, and how aggregation moves activations.

`python -m experiments.mtfl --help` says what is run and how long it takes.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import typer

import fedjax_meta as fm
from experiments import _mtfl_shift
from experiments import _runner as runner
from fedjax_meta import checkpoint, checks, costs, metrics, models, report
from fedjax_meta.data import protocols, sources
from fedjax_meta.methods.fedopt import adaptive
from fedjax_meta.methods.mtfl import adam

KINDS = ("compare", "baselines", "shift", "testbed")
DATASETS = ("mnist", "cifar10", "fashion_mnist", "mnist_small")
PRIVATE = {"none": "FL", "bn_stats": "MTFL μσ", "bn_affine": "MTFL γβ", "bn": "MTFL both"}
# Not in the paper: with private means alone, or private variances alone.
PARTS = {"bn_affine_mean": "MTFL γβμ", "bn_affine_var": "MTFL γβσ"}
MASKS = {f"bn_affine_{part}": f"bn_affine+path:^batch_stats/.*/{part}$" for part in ("mean", "var")}
OPTIMIZERS = {"fedavg": "FedAvg", "fedadam": "FedAdam", "fedavg_adam": "FedAvg-Adam"}
# The authors' rates for SGD clients (their settings of Figure 5), FedAdam (their example on MNIST), and FedAvg-Adam on CIFAR-10
# (their example). FedAdam on CIFAR-10 and FedAvg-Adam on MNIST have rates of ours.
RATES = {
    "mnist": {"fedavg": 0.3, "fedadam": 0.3, "fedavg_adam": 0.003},
    "cifar10": {"fedavg": 0.1, "fedadam": 0.1, "fedavg_adam": 0.003},
}
SERVER_RATE = 0.01
# The authors' settings of Figure 5: data set, W, C -> pFedMe's eta and lambda, Per-FedAvg's alpha and beta.
FIGURE_5 = {
    ("mnist", 200, 0.5): (0.1, 1.0, 0.1, 0.3),
    ("mnist", 200, 1.0): (0.03, 3.0, 0.03, 0.3),
    ("mnist", 400, 0.5): (0.03, 3.0, 0.1, 0.3),
    ("mnist", 400, 1.0): (0.03, 3.0, 0.03, 0.3),
    ("cifar10", 200, 0.5): (0.1, 1.0, 0.1, 0.1),
    ("cifar10", 200, 1.0): (0.1, 1.0, 0.1, 0.1),
    ("cifar10", 400, 0.5): (0.1, 3.0, 0.1, 0.3),
    ("cifar10", 400, 1.0): (0.1, 3.0, 0.1, 0.1),
}
TARGETS = {"mnist": (0.95, 0.97), "cifar10": (0.6, 0.65)}


class Setting(NamedTuple):
    """One data set divided among W clients, a share C of which takes part in a round.

    Attributes:
      family: "mnist" or "cifar10", for networks, rates and targets.
      clients, share: W and C.
      protocol, net, task: the clients, the paper's network, and the network as a task.
      steps: local steps of a round.
      cohort_size: C W.
      devices: how many devices share a cohort.
    """

    family: str
    clients: int
    share: float
    protocol: protocols.Protocol
    net: models.Network
    task: fm.Task
    steps: int
    cohort_size: int
    devices: int | None

    @property
    def name(self) -> str:
        """For files and folders."""
        return f"W{self.clients}_C{self.share:g}"

    @property
    def title(self) -> str:
        """For tables and figures."""
        return f"W = {self.clients}, C = {self.share:g}, {self.steps} steps a round"


class System(NamedTuple):
    """One row of the tables.

    Attributes:
      title: in tables and figures.
      algorithm: what trains, in one setting.
      trained: tests clients after local training: the same system after an epoch on the train view, or as the method adapts.
      work: gradients in a local step.
      support: the view that clients adapt to before user accuracy is measured.
      look: colour and line in figures.
      without: the systems that the table compares it with, by column of the factors.
    """

    title: str
    algorithm: fm.Algorithm
    trained: fm.Algorithm
    work: float = 1.0
    support: str = "support"
    look: tuple[int, str] = (0, "-")
    without: Mapping[str, str] = {}


class Outcome(NamedTuple):
    """The results of a system in a setting.

    Attributes:
      user_accuracy: `[seeds, R]`, of the cohort in each round.
      trained: `[seeds]`, accuracy of all clients after local training, at the end of the run.
      traffic: bytes that a client sends and receives in a round.
      time: a round on the modelled testbed.
      mark: what follows the title of a system that diverged.
      spread: standard deviation of the user accuracy over the cohort of the last round, mean over seeds.
    """

    user_accuracy: np.ndarray
    trained: np.ndarray
    traffic: costs.Traffic
    time: costs.RoundTime
    mark: str = ""
    spread: float = float("nan")


def network(family: str, norm: str, momentum: float) -> models.Network:
    """The paper's network with batch norms "before" or "after" the activations."""
    options: dict[str, Any] = {"norm": norm, "momentum": momentum}
    if family == "mnist":
        return models.Network((784,), 10, hidden=(200, 200), normed=("fc1",), **options)
    convs = ((32, 3, 0), (64, 3, 0))
    return models.Network((32, 32, 3), 10, convs=convs, hidden=(512,), normed=("conv1", "conv2"), **options)


def check_sizes(clients: Sequence[int], shares: Sequence[float]) -> int:
    """The size of the smallest cohort.

    Raises:
      ValueError: a share so small that no client takes part, or above 1.
    """
    for count in clients:
        checks.count("--clients", count)
        for share in shares:
            if not 0 < share <= 1 or round(share * count) < 1:
                raise ValueError(f"--share {share:g} of --clients {count} must be at least one client and at most all")
    return min(round(share * count) for count in clients for share in shares)


def make_settings(
    source: sources.Source, *, clients: int, shares: Sequence[float], noisy: float, data_seed: int, norm: str, momentum: float
) -> list[Setting]:
    """Divides a data set among W clients as the paper does; a setting for each share of the clients.

    Raises:
      ValueError: no client without noise, an unknown placement of batch norms, a momentum outside [0, 1].
    """
    checks.one_of("--norm", norm, models.NORMS)
    checks.share("--momentum", momentum)
    protocol = protocols.mtfl_clients(source, seed=data_seed, num_clients=clients, noisy=noisy)
    if len(protocol.noisy) == clients:
        raise ValueError(f"--noisy {noisy:g} makes all {clients} clients noisy: no client is left whose accuracy counts")
    family = "cifar10" if source.x_train.shape[-1] == 3 else "mnist"
    net = network(family, norm, momentum)
    task = models.flax_task(net, net.sample_shape, layers=net.layers, features="features", head="head")
    steps = protocols.local_steps(len(source.y_train), clients)
    return [Setting(family, clients, share, protocol, net, task, steps, round(share * clients), None) for share in shares]


def build(here: Setting, private: str, optimizer: str, lr: float | None = None, **options: Any) -> fm.Algorithm:
    """MTFL with a private set and a federated optimiser; `private="all"` is independent learning."""
    rate = RATES[here.family][optimizer] if lr is None else lr
    options = {"steps": here.steps, "cohort_size": here.cohort_size, "devices": here.devices} | options
    if optimizer == "fedavg_adam":
        options |= {"optimizer": adam, "federated_slots": True}
    if optimizer == "fedadam":
        rule = partial(adaptive, "adam", b2=0.999, tau=1e-4, initial=0.0)
        options |= {"server_optimizer": rule, "server_lr": SERVER_RATE}
    return runner.build("mtfl", here.task, lr=rate, private=MASKS.get(private, private), **options)


def mtfl_system(
    here: Setting, title: str, private: str, optimizer: str, *, lr: float | None = None, statistics_epochs: int = 0
) -> System:
    """One of the paper's systems.

    Args:
      here, private, optimizer, lr: as in `build`.
      title: in tables and figures.
      statistics_epochs: passes over the train view before each test that recompute running statistics.
    """
    make = partial(build, here, private, optimizer, lr, statistics_epochs=statistics_epochs)
    look = [*PRIVATE, "all", *PARTS].index(private), ("-", ":", "--")[list(OPTIMIZERS).index(optimizer)]
    return System(title, make(), make(finetune_epochs=1), support="train", look=look)


def comparison(
    here: Setting, private: Sequence[str], optimizers: Sequence[str], *, lr: float | None, statistics_epochs: int
) -> dict[str, System]:
    """The systems of the paper's tables by "optimiser/private set"."""
    systems = {}
    for optimizer in optimizers:
        for which in private:
            title = f"{(PRIVATE | PARTS)[which]}, {OPTIMIZERS[optimizer]}"
            system = mtfl_system(here, title, which, optimizer, lr=lr, statistics_epochs=statistics_epochs)
            without = {"FL": f"{optimizer}/none", "FedAvg": f"fedavg/{which}"}
            systems[f"{optimizer}/{which}"] = system._replace(without=without)
    return systems


BASELINES = {
    "fl": "FL",
    "mtfl_affine": "MTFL γβ",
    "mtfl_both": "MTFL both",
    "perfedavg": "Per-FedAvg (first-order)",
    "perfedavg_port": "Per-FedAvg, authors' code",
    "pfedme": "pFedMe",
    "pfedme_port": "pFedMe, authors' port",
    "independent": "Independent",
}


def baseline(here: Setting, name: str) -> System:
    """A system of the paper's Figure 5, with the authors' settings for the nearest W and C."""
    title = BASELINES[name]
    private = {"fl": "none", "mtfl_affine": "bn_affine", "mtfl_both": "bn", "independent": "all"}
    if name in private:
        return mtfl_system(here, title, private[name], "fedavg")._replace(without={"FL": "fl"})
    nearest = (here.family, 200 if here.clients < 300 else 400, 0.5 if here.share < 0.75 else 1.0)
    eta, prox_weight, alpha, beta = FIGURE_5[nearest]
    common: dict[str, Any] = {"batch_size": 20, "weighting": "samples"}
    common |= {"cohort_size": here.cohort_size, "devices": here.devices}
    if name in ("perfedavg", "perfedavg_port"):
        rates: dict[str, Any] = {"inner_lr": alpha, "outer_lr": beta, "local_steps": here.steps}
        if name == "perfedavg_port":
            rates |= {"statistics": "reset", "test_batch_size": 20}
        algorithm, work = runner.build("perfedavg_fo", here.task, **rates, **common), 2.0
    else:
        port = name == "pfedme_port"
        inner = {"inner_steps": 1, "weight_decay": 1e-3} if port else {"inner_steps": 5}
        rates = {"lr": eta, "outer_lr": eta, "prox_weight": prox_weight, "local_rounds": here.steps}
        algorithm = runner.build("pfedme", here.task, keep_local=port, **inner, **rates, **common)
        work = float(inner["inner_steps"])
    look = (7 + list(BASELINES).index(name), "-")
    # The authors' test takes its step on a batch of all training samples.
    support = "train" if name == "perfedavg_port" else "support"
    return System(title, algorithm, algorithm, work, support=support, look=look, without={"FL": "fl"})


def make_plans(
    here: Setting,
    systems: Mapping[str, System],
    *,
    rounds: int,
    eval_every: int,
    seeds: Sequence[int],
    config: Mapping[str, Any],
) -> dict[str, list[runner.Plan]]:
    """The training runs of one setting by system, one for each seed."""

    def plan(name: str, system: System, seed: int) -> runner.Plan:
        excluded, data = here.protocol.noisy, here.protocol.train
        options = {"support": system.support, "excluded": excluded, "devices": here.devices}
        after = runner.evaluator(system.trained, data, devices=here.devices, support="train", query="test")
        run = {"clients": here.clients, "share": here.share, "user_accuracy_support": system.support}
        return runner.Plan(
            name=f"{here.name}_{name.replace('/', '_')}_seed{seed}",
            title=f"{system.title}, {here.name}, seed {seed}",
            algorithm=fm.with_user_accuracy(system.algorithm, **options),
            data=data,
            tests={"after": runner.Test(system.title, "after training", after)},
            rounds=rounds,
            eval_every=eval_every,
            seed=seed,
            config={**config, **run},
        )

    return {name: [plan(name, system, seed) for seed in seeds] for name, system in systems.items()}


def outcome(here: Setting, system: System, runs: Sequence[Sequence[Mapping[str, Any]]]) -> Outcome:
    """The results in the rows (see `report.compact`) of a system's runs; noisy clients do not count."""
    data = here.protocol.train
    traffic = costs.traffic(system.algorithm, data)
    flops = system.work * here.steps * costs.gradient_flops(here.task, data, 20)
    counted = np.setdiff1d(np.arange(here.clients), here.protocol.noisy)
    series = [report.series("", "", seed, rows, "after") for seed, rows in enumerate(runs)]
    lines = [[value for row in rows for value in row["train"]["user_accuracy"]] for rows in runs]
    return Outcome(
        # A run that was stopped because it diverged has fewer rounds.
        np.array([line + [np.nan] * (max(map(len, lines)) - len(line)) for line in lines]),
        np.array([np.mean(np.array(rows[-1]["tests"]["after"]["accuracy"])[counted]) for rows in runs]),
        traffic,
        costs.round_time(traffic, flops, costs.RASPBERRY_PIS, cohort_size=here.cohort_size),
        report.marked(series),
        float(np.mean([rows[-1]["train"].get("user_accuracy_std", [np.nan])[-1] for rows in runs])),
    )


def factor(reference: metrics.ToTarget, own: metrics.ToTarget) -> str:
    """How many times fewer rounds `own` needs; a lower bound if the reference never reaches the target, "-" if `own` does not."""
    if not np.isfinite(own.mean):
        return "-"
    return f"{reference.mean / own.mean:.1f}" if np.isfinite(reference.mean) else f"> {reference.budget / own.mean:.1f}"


def table(
    systems: Mapping[str, System], outcomes: Mapping[str, Outcome], targets: Sequence[float]
) -> tuple[list[str], list[list[str]]]:
    """(headings, a row for each system)."""
    factors = list(dict.fromkeys(column for system in systems.values() for column in system.without))
    headings = ["system"]
    for target in targets:
        headings += [f"rounds\nto {target:g}", *(f"{column} /\nthis" for column in factors)]
    headings += [
        "UA, %\nlast",
        "\nbest",
        "std over\nclients",
        "all, after\ntraining",
        "MB a\nround",
        f"minutes\nto {targets[-1]:g}",
        "↓/train/↑/mean\n%",
    ]
    rows = []
    for name, system in systems.items():
        one, row = outcomes[name], [system.title + outcomes[name].mark]
        for target in targets:
            reached = metrics.rounds_to_target(one.user_accuracy, target)
            missed = sum(first is None for first in reached.rounds)
            some = "never" if missed == len(reached.rounds) else f"never in {missed} of {len(reached.rounds)}"
            row.append(some if missed else str(reached))
            for column in factors:
                other = system.without.get(column)
                known = other in outcomes and other != name
                found = metrics.rounds_to_target(outcomes[other].user_accuracy, target) if known else None
                row.append("" if found is None else factor(found, reached))
        minutes = reached.mean * one.time.total / 60
        row += [f"{100 * value:.2f}" for value in (one.user_accuracy[:, -1].mean(), one.user_accuracy.max(1).mean())]
        row += [f"{100 * one.spread:.2f}"]
        row += [f"{100 * one.trained.mean():.2f}", f"{sum(one.traffic) / 1e6:.2f}"]
        row += [f"{minutes:.1f}" if np.isfinite(minutes) else "never"]
        rows.append([*row, "/".join(f"{100 * share:.0f}" for share in one.time.shares.values())])
    return headings, rows


def draw(
    path: Path, title: str, systems: Mapping[str, System], outcomes: Mapping[str, Outcome], targets: Sequence[float]
) -> None:
    """User accuracy over rounds and over minutes on the testbed: mean and range over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for name, one in outcomes.items():
        (color, line), curves = systems[name].look, 100 * one.user_accuracy
        for axis, unit in zip(axes, (1.0, one.time.total / 60), strict=True):
            at = unit * np.arange(1, curves.shape[1] + 1)
            axis.plot(at, curves.mean(0), line, color=report.COLORS[color], label=systems[name].title, linewidth=1.6)
            axis.fill_between(at, curves.min(0), curves.max(0), color=report.COLORS[color], alpha=0.15, linewidth=0)
    last = np.concatenate([one.user_accuracy[:, -1] for one in outcomes.values()])
    low = 100 * float(min(last[np.isfinite(last)], default=0.0))
    for axis, label in zip(axes, ("round", "minutes on the testbed"), strict=True):
        for target in targets:
            axis.axhline(100 * target, color=report.MUTED, linewidth=0.6)
        axis.set(xlabel=label, ylim=(max(low - 10, 0), 101))
    axes[0].set_ylabel("user accuracy before training, %")
    axes[1].legend(fontsize=8, loc="lower right")
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    figure.savefig(path, dpi=130)


def shift(here: Setting, rounds: int, folder: Path, config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows of inequality (10) along a run of FL and a run of MTFL whose batch norms are private; saved run by run."""
    rows: list[Mapping[str, Any]] = []
    for private in ("none", "bn"):
        algorithm = build(here, private, "fedavg")
        full = {**config, "clients": here.clients, "rounds": rounds, "algorithm": algorithm.config}
        compute = partial(_shift_of_run, here, private, algorithm, rounds)
        rows += runner.remembered(folder, f"{here.name}_{private}", full, compute)
    return rows


def _shift_of_run(here: Setting, private: str, algorithm: fm.Algorithm, rounds: int) -> list[Mapping[str, Any]]:
    trained = build(here, private, "fedavg", finetune_epochs=1)
    measure = jax.jit(partial(_mtfl_shift.moved_by_aggregation, here.net, here.task, trained))
    rows: list[Mapping[str, Any]] = []
    state = None
    for stop in sorted({1, max(rounds // 4, 1), rounds}):
        with runner.console.status(f"{PRIVATE[private]}: to round {stop} of {rounds}"):
            data, key = here.protocol.train, jax.random.key(0)
            state, _ = fm.simulate(algorithm, data, key=key, rounds=stop, eval_every=stop, state=state)
            found = jax.tree.map(float, measure(jax.device_put(state, jax.devices()[0]), data))
        rows += [{"training": PRIVATE[private], "round": stop, "layer": layer, **both} for layer, both in found.items()]
        runner.console.print(f"{PRIVATE[private]}: round {stop} measured", style="dim")
    return rows


def testbed(here: Setting) -> tuple[list[str], list[list[str]]]:
    """(headings, rows): what a round costs on the modelled testbed, by system; nothing is trained."""
    rows = []
    systems = {
        "Independent": ("all", "fedavg"),
        "FL": ("none", None),
        "MTFL γβ": ("bn_affine", None),
        "MTFL both": ("bn", None),
    }
    flops = here.steps * costs.gradient_flops(here.task, here.protocol.train, 20)
    for title, (private, only) in systems.items():
        for optimizer in (only,) if only else ("fedavg", "fedavg_adam"):
            traffic = costs.traffic(build(here, private, optimizer), here.protocol.train)
            time = costs.round_time(traffic, flops, costs.RASPBERRY_PIS, cohort_size=here.cohort_size)
            shares = [f"{100 * share:.1f}" for share in time.shares.values()]
            name = title if only else f"{title}, {OPTIMIZERS[optimizer]}"
            rows.append([name, f"{traffic.down / 1e6:.2f}", f"{traffic.up / 1e6:.2f}", f"{time.total:.2f}", *shares])
    return ["system", "MB down", "MB up", "seconds\na round", "download\n%", "train\n%", "upload\n%", "aggregate\n%"], rows


Section = tuple[str, list[str], list[list[str]], str]
"""One table of a report: title, headings, rows, name of the figure."""


def finish(folder: Path, title: str, note: str, sections: Sequence[Section]) -> None:
    """Prints the tables and writes them as report.md."""
    lines = [f"# {title}", "", *([note, ""] if note else [])]
    for heading, headings, rows, figure in sections:
        runner.console.print()
        runner.show_table(heading, headings, rows)
        lines += [f"## {heading}", "", report.markdown_table(headings, rows), "", f"![{heading}]({figure})", ""]
    lines += ["Command:", "", f"    {runner.command_line(folder)}", ""]
    checkpoint.write_text(folder / "report.md", "\n".join(lines))
    runner.console.print(f"\nreport, figures and metrics: {folder}", soft_wrap=True, markup=False)


TESTBED = (
    "Modelled, not measured: half the clients are Raspberry Pi 2B, half 3B, at speeds that this library assumes; the optimiser's "
    "own arithmetic is not counted."
)
"""What a reader of the table of the testbed needs to know."""

NOTES = {
    "compare": "Which running statistics are private matters only in tests: runs with the same private γ and β train alike, "
    "bit for bit. The paper has `both` about level with `γβ`. Its authors' own code does not, and agrees with this library: with "
    "W = 200, C = 0.5, rate 0.3 and seed 0 it reaches 0.97 in round 32 with γβ, 74 with both and 93 with FL, and at round 60 has "
    "98.8, 94.7 and 96.9; runs of fewer rounds end before both has overtaken FL. Stale private statistics are not the reason for "
    "its delay: recomputed with the received model on all training samples of a client (--statistics-epochs 2) they give 90.2 in "
    "place of 90.1 (round 40, seed 1).",
    "baselines": "Per-FedAvg and pFedMe adapt to a fifth of a client's training samples before their user accuracy is measured; "
    "the other systems do not adapt. The pFedMe of the paper's Figure 5 is `pfedme_port`: a client's model stays with the client "
    "and is never reset to the server's, one inner step is taken, and that model is tested. `perfedavg_port` is Per-FedAvg as "
    "the authors' code runs it: running statistics are put back after every step, and a test takes its step on one batch of 20 "
    "training samples; in `perfedavg` statistics follow the adapted model, and the step reads a fifth of the training samples.",
}
"""What a reader of a table needs to know, by command."""

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def main(  # long because every option brings its help text
    what: Annotated[str, typer.Argument(help="One of " + ", ".join(KINDS) + ".")] = "compare",
    dataset: Annotated[
        str, typer.Option(help="One of " + ", ".join(DATASETS) + "; mnist_small comes with a package.")
    ] = "mnist",
    clients: Annotated[str, typer.Option(help="Number of clients W; several values make a sweep, e.g. 200,400.")] = "200",
    share: Annotated[str, typer.Option(help="Share C of them in a round; several values make a sweep, e.g. 0.5,1.0.")] = "0.5",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds R; the paper has 500, in Figure 5 200.")] = 150,
    seeds: Annotated[str, typer.Option(help="Seeds of training, e.g. 1,2,3; clients and their samples stay the same.")] = "1",
    targets: Annotated[
        str | None,
        typer.Option(
            help="User accuracies to reach; when not given 0.95,0.97 (CIFAR-10: 0.6,0.65); those of the paper are not known.",
            show_default=False,
        ),
    ] = None,
    private: Annotated[str, typer.Option(help="compare: private sets " + ", ".join(PRIVATE | PARTS) + ".")] = ",".join(
        PRIVATE
    ),
    optimizers: Annotated[str, typer.Option(help="compare: federated optimisers " + ", ".join(OPTIMIZERS) + ".")] = ",".join(
        OPTIMIZERS
    ),
    systems: Annotated[str, typer.Option(help="baselines: rows " + ", ".join(BASELINES) + ".")] = ",".join(
        name for name in BASELINES if not name.endswith("_port")
    ),
    lr: Annotated[
        float | None,
        typer.Option(help="compare: learning rate of the clients; the authors' when not given.", show_default=False),
    ] = None,
    noisy: Annotated[float, typer.Option(help="Share of clients with noisy training images; they do not count.")] = 0.0,
    norm: Annotated[
        str, typer.Option(help="Batch norms `before` the activations (the paper's text) or `after` them (the authors' code).")
    ] = "after",
    momentum: Annotated[float, typer.Option(help="Weight of a batch in the running statistics.")] = 0.1,
    statistics_epochs: Annotated[
        int,
        typer.Option(min=0, help="compare: passes over training samples that recompute a client's statistics before a test."),
    ] = 0,
    eval_every: Annotated[
        int, typer.Option(min=1, help="Rounds between tests after local training, and between checkpoints.")
    ] = 20,
    data_seed: Annotated[int, typer.Option(help="Fixes clients and their samples.")] = 1,
    out: runner.OutOption = None,
    data_dir: runner.DataDirOption = None,
    resume: runner.ResumeOption = False,
    download: Annotated[bool, typer.Option("--download", help="Download and prepare the set if needed (TensorFlow).")] = False,
    devices: runner.DevicesOption = None,
    compile_cache: runner.CacheOption = True,
    on_divergence: runner.DivergenceOption = "continue",
    debug: runner.DebugOption = False,
) -> None:
    """Repeats the experiments of MTFL: private batch norms, federated optimisers, and rounds to a target user accuracy.

    Examples:

    `python -m experiments.mtfl compare --dataset mnist_small --clients 50 --rounds 20` (no data set needed, two minutes)

    `python -m experiments.mtfl compare --data-dir DIR --clients 200,400 --share 0.5,1.0 --seeds 1,2,3`

    `python -m experiments.mtfl compare --data-dir DIR --private none,bn_affine --optimizers fedavg --noisy 0.2`

    `python -m experiments.mtfl compare --data-dir DIR --private bn_affine,bn_affine_mean,bn_affine_var,bn`

    `python -m experiments.mtfl compare --data-dir DIR --private bn_affine,bn --statistics-epochs 2`

    `python -m experiments.mtfl baselines --data-dir DIR --systems fl,mtfl_affine,pfedme,pfedme_port`

    `python -m experiments.mtfl shift --data-dir DIR --rounds 20`

    `compare`: every private set with every federated optimiser (the paper's tables; its noise experiment with --noisy 0.2).

    `baselines`: its Figure 5. FL, MTFL, Per-FedAvg, pFedMe and independent learning, with SGD clients and the authors' rates.

    `shift`: its inequality (10). How far aggregation moves activations, with federated and with private batch norms.

    `testbed`: what a round costs on a modelled testbed of Raspberry Pis, by system; nothing is trained.

    Each of W clients holds two shards of one class each; a share C of them takes part in a round of one epoch. User accuracy
    (UA) is the accuracy of a round's clients on their own test samples before they train, with the server's model and their own
    private leaves. Noisy clients do not count. `all, after training` is the accuracy of all clients after an epoch on their own
    samples. A target that a run does not reach is `never`. MB is what a client receives and sends in a round; minutes are those
    of a modelled testbed of Raspberry Pis.

    The folder --out gets report.md, figures and metrics.json. A run may be stopped at any time; --resume continues it and gives
    the same numbers, bit for bit (a `shift` with its first unfinished training). The paper's sizes are for an accelerator: on two
    cores a round of MNIST with W=200, C=0.5 takes about a second, a round of CIFAR-10 about ten.
    """
    with runner.one_line_errors(debug):
        checks.one_of("--on-divergence", on_divergence, runner.ON_DIVERGENCE)
        checks.one_of("command", what, KINDS)
        checks.one_of("--dataset", dataset, DATASETS)
        sets, rules = runner.names(private, "--private", PRIVATE | PARTS), runner.names(optimizers, "--optimizers", OPTIMIZERS)
        chosen = runner.names(systems, "--systems", BASELINES)
        counts, shares = runner.numbers(clients, "--clients"), runner.numbers(share, "--share", float)
        seed_list = runner.numbers(seeds, "--seeds")
        goals = TARGETS["cifar10" if dataset == "cifar10" else "mnist"]
        goals = goals if targets is None else tuple(runner.numbers(targets, "--targets", float))
        for goal in goals:
            checks.share("--targets", goal)
        if lr is not None:
            checks.positive("--lr", lr)
        shares = [1.0] if what == "shift" else shares
        smallest = check_sizes(counts, shares)
        shared = runner.prepare(devices, compile_cache, cohort_size=smallest)
        with runner.loading(dataset):
            source = sources.load(dataset, data_dir=data_dir, download=download)
            division: dict[str, Any] = {"noisy": noisy, "data_seed": data_seed, "norm": norm, "momentum": momentum}
            settings = [here for count in counts for here in make_settings(source, clients=count, shares=shares, **division)]
        settings = [here._replace(devices=shared) for here in settings]
        config = {"experiment": f"mtfl {what}", "dataset": dataset, **division}
        options = {**config, "clients": counts, "share": shares, "rounds": rounds, "seeds": seed_list}
        open_run = partial(runner.open_folder, out, f"mtfl_{what}-{dataset}", resume=resume, options=options)
        title, sections = f"MTFL on {dataset}: {what}", []
        if what == "testbed":
            runner.console.print(TESTBED, soft_wrap=True)
            for here in settings:
                runner.show_table(here.title, *testbed(here))
            return
        if what == "shift":
            folder = open_run(algorithms={here.name: build(here, "bn", "fedavg").config for here in settings})
            for here in settings:
                rows = shift(here, rounds, folder, config)
                _mtfl_shift.draw(folder / f"{here.name}.png", f"{here.protocol.name}: moved by aggregation", rows)
                sections.append((here.title, *_mtfl_shift.table(rows), f"{here.name}.png"))
            finish(folder, title, source.note, sections)
            return
        groups = [
            comparison(here, sets, rules, lr=lr, statistics_epochs=statistics_epochs)
            if what == "compare"
            else {name: baseline(here, name) for name in chosen}
            for here in settings
        ]
        plans = [
            make_plans(here, group, rounds=rounds, eval_every=eval_every, seeds=seed_list, config=config)
            for here, group in zip(settings, groups, strict=True)
        ]
        # All systems with one seed before the next seed, so that a run that is stopped early has comparable results.
        order = sorted((plan for group in plans for runs in group.values() for plan in runs), key=lambda plan: plan.seed)
        folder = open_run(algorithms=runner.configs(order))
        results = runner.run_all(order, folder, on_divergence=on_divergence)
        for here, group, runs in zip(settings, groups, plans, strict=True):
            outcomes = {name: outcome(here, group[name], [results[plan.name] for plan in line]) for name, line in runs.items()}
            draw(folder / f"{here.name}.png", f"{here.protocol.name}: {here.title}", group, outcomes, goals)
            sections.append((here.title, *table(group, outcomes, goals), f"{here.name}.png"))
        how = f"{rounds} rounds, seeds {seeds}" + (f", {noisy:.0%} of the clients noisy" if noisy else "")
        how += ". Rounds to a target are means over seeds ± half the width of their 95 % confidence interval."
        finish(folder, title, f"{how} {NOTES.get(what, '')} {source.note}".strip(), sections)
        runner.exit_if_all_diverged(order, results)


if __name__ == "__main__":
    app()
