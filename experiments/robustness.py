"""Robust aggregation against attacks, for plain and personalised federated learning.

`python -m experiments.robustness --help` says what is run and how long it takes.
"""

import math
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
from fedjax_meta import aggregate, attacks, checkpoint, checks, metrics, models, report
from fedjax_meta.data import partition, sources
from fedjax_meta.data.builders import from_partition, train_test_views
from fedjax_meta.simulation import run_rounds

ROOT = 100
"""Samples of the server, for FLTrust."""


class System(NamedTuple):
    """A method, and its options as a function of the learning rate and the local epochs."""

    title: str
    method: str
    options: Callable[[float, int], Mapping[str, Any]] = lambda lr, epochs: {"lr": lr, "epochs": epochs}


SYSTEMS = {
    "fedavg": System("FedAvg", "fedavg"),
    "fedavg_ft": System("FedAvg-FT", "fedavg_ft"),
    "fedrep": System("FedRep", "fedrep", lambda lr, epochs: {"lr": lr, "head_epochs": epochs, "body_epochs": epochs}),
    "fedper": System("FedPer", "fedper"),
    "ditto": System("Ditto", "ditto"),
    "fedmeta_per": System("FedMeta-Per", "fedmeta_per", lambda lr, epochs: {"inner_lr": lr, "meta_steps": 5 * epochs}),
    "fedamp": System("FedAMP", "fedamp"),
}

Make = Callable[[int, int, fm.data.ClientData], Any]
"""`(f, C, the server's samples) -> aggregator`; `None` for the weighted mean."""

RULES: dict[str, tuple[str, Make]] = {
    "mean": ("mean", lambda f, c, root: None),
    "median": ("median", lambda f, c, root: aggregate.median),
    "trimmed_mean": ("trimmed mean", lambda f, c, root: aggregate.trimmed_mean(f / c)),
    "krum": ("Krum", lambda f, c, root: aggregate.krum(f)),
    "multi_krum": ("Multi-Krum", lambda f, c, root: aggregate.multi_krum(f)),
    "bulyan": ("Bulyan", lambda f, c, root: aggregate.bulyan(f)),
    "geometric_median": ("geometric median", lambda f, c, root: aggregate.geometric_median()),
    "norm_bounding": ("norm bounding", lambda f, c, root: aggregate.norm_bounding()),
    "centered_clipping": ("centred clipping", lambda f, c, root: aggregate.centered_clipping()),
    "fltrust": ("FLTrust", lambda f, c, root: aggregate.fltrust(root)),
    "bucketing_median": ("buckets + median", lambda f, c, root: aggregate.bucketing(aggregate.median, 2)),
    "nnm_median": ("NNM + median", lambda f, c, root: aggregate.nearest_neighbours(aggregate.median, f)),
    "nnm_trimmed_mean": (
        "NNM + trimmed mean",
        lambda f, c, root: aggregate.nearest_neighbours(aggregate.trimmed_mean(f / c), f),
    ),
    "nnm_geometric_median": (
        "NNM + geometric median",
        lambda f, c, root: aggregate.nearest_neighbours(aggregate.geometric_median(), f),
    ),
}

TARGET = 0
"""Class of the backdoor."""

ATTACKS: dict[str, tuple[str, Callable[[float, int], fm.attacks.Attack | None]]] = {
    "none": ("none", lambda share, c: None),
    "label_flip": ("label flip", lambda share, c: attacks.label_flip(share)),
    "sign_flip": ("sign flip", lambda share, c: attacks.sign_flip(share)),
    "sign_flip_x10": ("sign flip x10", lambda share, c: attacks.sign_flip(share, scale=10.0)),
    "gaussian": ("Gaussian", lambda share, c: attacks.gaussian(share)),
    "alie": ("ALIE", lambda share, c: attacks.alie(share)),
    "ipm": ("IPM", lambda share, c: attacks.ipm(share)),
    "min_max": ("min-max", lambda share, c: attacks.min_max(share)),
    "min_sum": ("min-sum", lambda share, c: attacks.min_sum(share)),
    "backdoor": ("backdoor", lambda share, c: attacks.backdoor(share, target=TARGET, boost=1 / share)),
}

SETS = {
    "quick": (("fedavg", "fedrep"), ("mean", "trimmed_mean", "nnm_trimmed_mean"), ("none", "sign_flip_x10", "backdoor")),
    "default": (
        ("fedavg", "fedavg_ft", "fedrep", "ditto", "fedmeta_per"),
        ("mean", "median", "trimmed_mean", "multi_krum", "geometric_median", "centered_clipping", "nnm_trimmed_mean"),
        ("none", "label_flip", "sign_flip_x10", "alie", "ipm", "min_max", "backdoor"),
    ),
    "all": (tuple(SYSTEMS), tuple(RULES), tuple(ATTACKS)),
}


class Clients(NamedTuple):
    """The clients that train, those that never do, and the server's samples (a federation of one)."""

    train: fm.FederatedData
    new: fm.FederatedData
    root: fm.FederatedData


class Cell(NamedTuple):
    """One system with one rule under one attack.

    Attributes:
      split: of the clients' data, "iid" or the concentration of a Dirichlet distribution.
      system, rule, attack: names.
      share: of the clients that attack.
      algorithm: what trains.
    """

    split: str
    system: str
    rule: str
    attack: str
    share: float
    algorithm: fm.Algorithm

    @property
    def name(self) -> str:
        """Of the result."""
        return f"{self.split}_{self.system}_{self.rule}_{self.attack}_{self.share:g}"

    @property
    def column(self) -> str:
        """In tables."""
        title = ATTACKS[self.attack][0]
        return title if self.attack == "none" else f"{title} {100 * self.share:g} %"


class Outcome(NamedTuple):
    """Results by seed, in percent; `None` where a loss was not finite.

    Attributes:
      known: mean accuracy of the honest clients that trained.
      new: of clients that never took part.
      success: of the backdoor on honest clients, else empty.
      seconds: of the whole cell, with compilation.
    """

    known: list[float | None]
    new: list[float | None]
    success: list[float]
    seconds: float


def make_clients(source: sources.Source, split: str, *, num_clients: int, num_new: int, seed: int) -> Clients:
    """Splits a data set; new clients have the same distribution, and the server's samples are a random few."""
    x, y = source.pooled()
    order = np.random.default_rng(seed).permutation(len(y))
    first, rest = order[:ROOT], np.sort(order[ROOT:])
    if split == "iid":
        held = partition.iid(y[rest], num_clients + num_new, seed=seed)
    else:
        share = {"concentration": float(split), "seed": seed, "min_samples": 20}
        held = partition.dirichlet_classes(y[rest], num_clients + num_new, **share).shuffled(seed)

    def clients(order: np.ndarray, sizes: np.ndarray) -> fm.FederatedData:
        views = train_test_views(sizes)
        return jax.tree.map(jnp.asarray, from_partition(x, y, order, sizes, num_classes=source.num_classes, views=views))

    cut = int(held.sizes[:num_clients].sum())
    return Clients(
        clients(rest[held.order[:cut]], held.sizes[:num_clients]),
        clients(rest[held.order[cut:]], held.sizes[num_clients:]),
        clients(first, np.array([ROOT])),
    )


def run_cell(cell: Cell, clients: Clients, *, rounds: int, seeds: Sequence[int], devices: int) -> Outcome:
    """Trains with every seed, one after the other in one program, and tests."""
    started = time.perf_counter()
    algorithm, attack = cell.algorithm, ATTACKS[cell.attack][1](cell.share, clients.train.num_clients)
    liars = np.zeros(clients.train.num_clients, bool) if attack is None else attack.members(clients.train.num_clients)
    honest = np.flatnonzero(~liars)
    marked = attacks.stamped(clients.train, "test") if cell.attack == "backdoor" else None

    def one(seed: jax.Array, train: fm.FederatedData, new: fm.FederatedData, marked: Any) -> Any:
        init_key, key, test_key = jax.random.split(jax.random.key(seed), 3)
        state = run_rounds(algorithm, key, algorithm.init(init_key, train), train, rounds, most=rounds)[0]

        def test(data: fm.FederatedData, **options: Any) -> Any:
            return fm.evaluate(algorithm, test_key, state, data, support="train", query="test", devices=devices, **options)

        success = () if marked is None else test(marked, ids=honest)
        return test(train, ids=honest), test(new, known=False), success

    run = jax.jit(lambda seeds, *data: jax.lax.map(lambda seed: one(seed, *data), seeds))
    known, new, success = jax.tree.map(np.asarray, run(jnp.asarray(seeds, jnp.uint32), clients.train, clients.new, marked))
    rate = [] if marked is None else [100 * attacks.backdoor_success(c, TARGET) for c in success.confusion]
    return Outcome(_means(known), _means(new), rate, round(time.perf_counter() - started, 1))


def _means(tested: fm.Evaluation) -> list[float | None]:
    """The mean accuracy over clients for each seed."""
    scores = metrics.where_finite(metrics.accuracy(tested.confusion), tested.loss).mean(-1)
    return [100 * float(score) if np.isfinite(score) else None for score in scores]


def spread(values: Sequence[float | None]) -> str:
    """Mean and deviation over seeds."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return "diverged"
    return f"{np.mean(numbers):.1f}" + (f" ±{np.std(numbers, ddof=1):.1f}" if len(numbers) > 1 else "")


def table(cells: Sequence[Cell], outcomes: Mapping[str, Outcome], field: str) -> tuple[list[str], list[list[str]]]:
    """(headings, rows): systems and rules in rows, attacks in columns; "-" where a rule does not allow so many attackers."""
    columns = list(dict.fromkeys(cell.column for cell in cells))
    found = {(cell.system, cell.rule, cell.column): spread(getattr(outcomes[cell.name], field)) for cell in cells}
    pairs = dict.fromkeys((cell.system, cell.rule) for cell in cells)
    rows = [
        [SYSTEMS[system].title, RULES[rule][0], *(found.get((system, rule, column), "-") for column in columns)]
        for system, rule in pairs
    ]
    return ["system", "rule", *columns], rows


def save_figure(path: Path, cells: Sequence[Cell], outcomes: Mapping[str, Outcome], title: str) -> None:
    """One panel for each split and system: rules in rows, attacks in columns, mean accuracy of honest known clients."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    splits, systems = ([*dict.fromkeys(getattr(cell, key) for cell in cells)] for key in ("split", "system"))
    rules, columns = [*dict.fromkeys(cell.rule for cell in cells)], [*dict.fromkeys(cell.column for cell in cells)]
    size = (2.8 + len(systems) * (0.6 * len(columns) + 0.5), 1.2 + len(splits) * (0.34 * len(rules) + 1.4))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(splits), len(systems), squeeze=False)
    scale = mpl.colormaps["viridis"]
    for i, split in enumerate(splits):
        for j, system in enumerate(systems):
            shown = np.full((len(rules), len(columns)), np.nan)
            for cell in cells:
                if (cell.split, cell.system) == (split, system):
                    values = [math.nan if v is None else v for v in outcomes[cell.name].known]
                    shown[rules.index(cell.rule), columns.index(cell.column)] = np.mean(values)
            axis = axes[i, j]
            axis.imshow(shown, vmin=0, vmax=100, cmap=scale, aspect="auto")
            for row, column in np.ndindex(shown.shape):
                value = shown[row, column]
                text, ink = ("-", "black") if np.isnan(value) else (f"{value:.0f}", "black" if value > 60 else "white")
                axis.text(column, row, text, ha="center", va="center", color=ink, fontsize=8)
            axis.set_xticks(range(len(columns)), columns, rotation=40, ha="right", fontsize=8)
            axis.set_yticks(range(len(rules)), [RULES[rule][0] for rule in rules] if j == 0 else [], fontsize=8)
            axis.set_title(f"{SYSTEMS[system].title}, {split_title(split)}", fontsize=9)
    figure.suptitle(f"{title}\naccuracy of honest clients (percent)", fontsize=9)
    figure.savefig(path, dpi=150)


def split_title(split: str) -> str:
    """In tables."""
    return "IID" if split == "iid" else f"Dirichlet({split})"


def write_report(folder: Path, title: str, how: str, cells: Sequence[Cell], outcomes: Mapping[str, Outcome]) -> None:
    """Prints the tables, and writes them as `report.md` with `figure.png`."""
    lines = [f"# {title}", "", how, ""]
    fields = {
        "known": "honest clients that trained",
        "new": "clients that never took part",
        "success": "success of the backdoor",
    }
    for split in dict.fromkeys(cell.split for cell in cells):
        for field, words in fields.items():
            some = [cell for cell in cells if cell.split == split and getattr(outcomes[cell.name], field)]
            if some:
                headings, rows = table(some, outcomes, field)
                runner.show_table(f"{split_title(split)}: {words} (percent)", headings, rows, text_columns=2)
                lines += [f"## {split_title(split)}: {words}", "", report.markdown_table(headings, rows, text_columns=2), ""]
    save_figure(folder / "figure.png", cells, outcomes, title)
    took = sum(outcomes[cell.name].seconds for cell in cells) / 60
    lines += ["![Accuracy by rule and attack](figure.png)", "", f"{len(cells)} runs, {took:.0f} minutes. Command:", ""]
    checkpoint.write_text(folder / "report.md", "\n".join([*lines, f"    {runner.command_line(folder)}", ""]))
    runner.console.print(f"\nreport, figure and metrics: {folder}", soft_wrap=True)


def make_cells(
    splits: Sequence[str],
    chosen: tuple[Sequence[str], Sequence[str], Sequence[str]],
    shares: Sequence[float],
    cut: Callable[[str], Clients],
    *,
    lr: float,
    epochs: int,
    batch_size: int,
    assumed: float,
    devices: int,
) -> list[Cell]:
    """All combinations that a rule allows; it is told of round(C * share) attackers, of `assumed` ones where nobody attacks."""
    cells = []
    for split in splits:
        clients = cut(split)
        count, root = clients.train.num_clients, clients.root.client(0)
        task = models.mlp(inputs=math.prod(clients.train.x.shape[1:]), classes=clients.train.num_classes)
        for system in chosen[0]:
            for rule in chosen[1]:
                for attack in chosen[2]:
                    for share in [0.0] if attack == "none" else shares:
                        f = round(count * (share or assumed))
                        least = {"bulyan": 4 * f + 3, "krum": 2 * f + 3, "multi_krum": 2 * f + 3}.get(rule, 2 * f + 1)
                        if count < least:
                            continue
                        options = {**SYSTEMS[system].options(lr, epochs), "batch_size": batch_size, "cohort_size": count}
                        options |= {"aggregator": RULES[rule][1](f, count, root), "attack": ATTACKS[attack][1](share, count)}
                        algorithm = runner.build(SYSTEMS[system].method, task, devices=devices, **options)
                        cells.append(Cell(split, system, rule, attack, share, algorithm))
    return cells


app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def main(  # long because every option brings its help text
    dataset: Annotated[
        str, typer.Option(help="mnist_small, digits, or e.g. mnist, fashion_mnist, cifar10 of tensorflow-datasets.")
    ] = "mnist_small",
    splits: Annotated[
        str, typer.Option(help="`iid` or concentrations of a Dirichlet split; several make a sweep.")
    ] = "iid,0.3",
    quick: Annotated[
        bool, typer.Option("--quick", help="Two systems, three rules, three attacks, 15 rounds, one seed.")
    ] = False,
    systems: Annotated[str | None, typer.Option(help="`all`, or of " + ", ".join(SYSTEMS), show_default=False)] = None,
    rules: Annotated[str | None, typer.Option(help="`all`, or of " + ", ".join(RULES), show_default=False)] = None,
    attack: Annotated[str | None, typer.Option(help="`all`, or of " + ", ".join(ATTACKS), show_default=False)] = None,
    shares: Annotated[str, typer.Option(help="Shares of the clients that attack; several make a sweep.")] = "0.2",
    assumed: Annotated[float, typer.Option(help="Share of attackers that rules are told of where nobody attacks.")] = 0.2,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds R; 40, with --quick 15.", show_default=False)] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds of training; 1,2,3, with --quick 1.", show_default=False)] = None,
    num_clients: Annotated[int, typer.Option(min=1, help="Clients N, all of them in every round.")] = 20,
    new_clients: Annotated[int, typer.Option(min=1, help="Clients that never train.")] = 5,
    lr: Annotated[float, typer.Option(help="Learning rate of all systems.")] = 0.05,
    epochs: Annotated[int, typer.Option(min=1, help="Local epochs E.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a batch.")] = 20,
    data_seed: Annotated[int, typer.Option(help="Fixes clients and their samples.")] = 1,
    out: runner.OutOption = None,
    data_dir: runner.DataDirOption = None,
    resume: runner.ResumeOption = False,
    devices: runner.DevicesOption = None,
    compile_cache: runner.CacheOption = True,
    debug: runner.DebugOption = False,
) -> None:
    """Robust aggregation rules against attacks, after Blades (Li et al., IoTDI 2024), for personalised methods too.

    Examples:

    `python -m experiments.robustness --quick`

    `python -m experiments.robustness --systems fedavg --splits 0.3 --attack none,sign_flip_x10 --rules all`

    `python -m experiments.robustness --dataset fashion_mnist --data-dir DIR --shares 0.1,0.2,0.4 --out runs/robustness`

    Every combination of split, system, rule, attack and share of attackers trains with every seed. Accuracy is the mean over
    honest clients, on their own tests; new clients, which never took part, adapt to their training samples first. A rule is told
    how many attack. Combinations that a rule refuses (Krum beyond half, Bulyan beyond a quarter of the clients) are left out.

    On two cores --quick takes some minutes and the default a few hours. A run may be stopped at any time; --resume continues with
    the first unfinished combination.
    """
    with runner.one_line_errors(debug):
        defaults = SETS["quick" if quick else "default"]
        given = ((systems, "--systems"), (rules, "--rules"), (attack, "--attack"))
        chosen = tuple(
            default if text is None else every if text == "all" else tuple(runner.names(text, flag, every))
            for (text, flag), default, every in zip(given, defaults, SETS["all"], strict=True)
        )
        split_list = [word.strip() for word in splits.split(",")]
        for word in split_list:
            if word != "iid":
                checks.positive("--splits", runner.numbers(word, "--splits", float)[0])
        share_list = runner.numbers(shares, "--shares", float)
        for share in (*share_list, assumed):
            checks.fraction("--shares", share)
        rounds = (15 if quick else 40) if rounds is None else rounds
        seed_list = runner.numbers(("1" if quick else "1,2,3") if seeds is None else seeds, "--seeds")
        shared = runner.prepare(devices, compile_cache, cohort_size=num_clients)
        with runner.loading(dataset):
            source = sources.load(dataset, data_dir=data_dir)
        size = {"num_clients": num_clients, "num_new": new_clients, "seed": data_seed}
        cut = {split: make_clients(source, split, **size) for split in split_list}
        how = {"lr": lr, "epochs": epochs, "batch_size": batch_size, "assumed": assumed, "devices": shared}
        cells = make_cells(split_list, chosen, share_list, cut.__getitem__, **how)
        if not cells:
            raise ValueError("no rule allows so many attackers: give other --rules, or fewer --shares")
        config = {
            "experiment": "robustness",
            "dataset": dataset,
            "rounds": rounds,
            "seeds": seed_list,
            "new_clients": new_clients,
        }
        config |= {"num_clients": num_clients, "data_seed": data_seed}
        configs = {cell.name: {**config, "split": cell.split, "algorithm": cell.algorithm.config} for cell in cells}
        folder = runner.open_folder(out, f"robustness-{dataset}", resume=resume, options=config, algorithms=configs)
        outcomes: dict[str, Outcome] = {}
        for number, cell in enumerate(cells, 1):

            def compute(cell: Cell = cell) -> dict[str, Any]:
                return run_cell(cell, cut[cell.split], rounds=rounds, seeds=seed_list, devices=shared)._asdict()

            title = f"{split_title(cell.split)}, {SYSTEMS[cell.system].title}, {RULES[cell.rule][0]}, {cell.column}"
            with runner.console.status(f"{number}/{len(cells)} {title}"):
                outcome = Outcome(**runner.remembered(folder, cell.name, configs[cell.name], compute))
            outcomes[cell.name] = outcome
            success = f", backdoor {spread(outcome.success)} %" if outcome.success else ""
            runner.console.print(
                f"{number}/{len(cells)} {title}: {spread(outcome.known)} %, new clients {spread(outcome.new)} %{success}  "
                f"[dim]{outcome.seconds:.0f} s[/dim]",
                soft_wrap=True,
            )
        seeds_used = ", ".join(map(str, seed_list))
        words = f"{num_clients} clients, {rounds} rounds of {epochs} epochs at rate {lr:g}, seeds {seeds_used}."
        write_report(folder, f"Robustness on {dataset}", words, cells, outcomes)


if __name__ == "__main__":
    app()
