"""Accuracy against epsilon: client-level differential privacy on a federation of many small clients.

FedAvg with clipped uploads and central noise, cohorts by Poisson sampling, a fixed norm and one that follows a quantile (Andrew
et al., "Differentially private learning with adaptive clipping", NeurIPS 2021, arXiv 1905.03871).
`python -m experiments.privacy` (1,000 clients of 4 MNIST images, 5 epsilons, 3 seeds) takes 8 minutes on two busy cores, most of
it compilation, and gives 87.5 % at epsilon 4, 84 % at epsilon 1 and 89.7 % without privacy.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

import fedjax_meta as fm
from experiments import _runner as runner
from fedjax_meta import checkpoint, models, privacy, report, schedules, uploads
from fedjax_meta.data import partition, sources

CLIPS = ("fixed", "adaptive")


class Setting(NamedTuple):
    """What all systems of an experiment share.

    Attributes:
      num_clients, rate, capacity, rounds: N, q, C and R.
      delta: of every guarantee.
      norm: S, at the start where it is adaptive.
      quantile: of the adaptive norm.
      lr, epochs, batch_size, server_lr: of FedAvg.
    """

    num_clients: int
    rate: float
    capacity: int
    rounds: int
    delta: float
    norm: float
    quantile: float
    lr: float
    epochs: int
    batch_size: int
    server_lr: float

    @property
    def sampling(self) -> privacy.Poisson:
        """How cohorts are drawn, for the accountant."""
        return privacy.Poisson(self.rate, self.num_clients, self.capacity)


class System(NamedTuple):
    """A point of the curve.

    Attributes:
      clip: of `CLIPS`, or "none".
      epsilon: what was asked for; `None` without noise.
      noise: the multiplier z.
    """

    clip: str
    epsilon: float | None
    noise: float

    @property
    def name(self) -> str:
        """Of its runs."""
        return f"{self.clip}_{'no_noise' if self.epsilon is None else f'epsilon{self.epsilon:g}'}"

    @property
    def title(self) -> str:
        """In tables and figures."""
        clip = {"none": "no clipping", "fixed": "fixed norm", "adaptive": "adaptive norm"}[self.clip]
        return f"{clip}, {'no noise' if self.epsilon is None else f'epsilon {self.epsilon:g}'}"


def clients_of(source: sources.Source, num_clients: int, *, concentration: float, seed: int) -> fm.FederatedData:
    """The training split, dealt to clients whose class mixes follow a Dirichlet distribution; all samples are for training."""
    parts = partition.dirichlet_clients(source.y_train, num_clients, concentration=concentration, seed=seed)
    views = {"train": (np.zeros(num_clients, int), parts.sizes)}
    return fm.from_partition(
        source.x_train, source.y_train, parts.order, parts.sizes, num_classes=source.num_classes, views=views, **_scale(source)
    )


def test_of(source: sources.Source) -> fm.FederatedData:
    """The test split as one client."""
    size = np.array([len(source.y_test)])
    begin = np.zeros(1, int)
    views = {"support": (begin, np.ones(1, int)), "query": (begin, size)}
    return fm.from_partition(
        source.x_test, source.y_test, np.arange(size[0]), size, num_classes=source.num_classes, views=views, **_scale(source)
    )


def _scale(source: sources.Source) -> dict[str, float]:
    return {"offset": 0.0, "scale": 1 / 255} if source.x_train.dtype == np.uint8 else {}


def algorithm_of(task: fm.Task, system: System, setting: Setting, *, devices: int | None) -> fm.Algorithm:
    """FedAvg with the system's clipping and noise."""
    chain: tuple[uploads.UploadTransform, ...] = ()
    # A twentieth of the expected cohort, as in the paper of adaptive clipping; the noise of a study follows from its seed.
    bits = setting.rate * setting.num_clients / 20 if system.noise > 0 else 0.0
    if system.clip == "fixed":
        chain = (uploads.clip(setting.norm),)
    elif system.clip == "adaptive":
        chain = (uploads.adaptive_clip(setting.norm, quantile=setting.quantile, bit_noise=bits, reproducible=True),)
    if system.epsilon is not None:
        chain = (*chain, uploads.noise(system.noise, reproducible=True))
    federation = fm.Federation(
        cohort_size=setting.capacity,
        schedule=schedules.poisson(setting.rate),
        uploads=chain,
        weighting="uniform",
        server_lr=setting.server_lr,
        devices=devices,
    )
    method = fm.fedavg(task, lr=setting.lr, epochs=setting.epochs, batch_size=setting.batch_size)
    return fm.federate(method, federation)


def make_plans(
    task: fm.Task,
    systems: Sequence[System],
    setting: Setting,
    data: fm.FederatedData,
    test: fm.FederatedData,
    *,
    eval_every: int,
    seeds: Sequence[int],
    devices: int | None,
    config: Mapping[str, Any],
) -> list[runner.Plan]:
    """One training run for every system and seed."""
    plans = []
    for system in systems:
        algorithm = algorithm_of(task, system, setting, devices=devices)
        measure = runner.evaluator(algorithm, test, devices=devices, support="support", query="query", known=False)
        spent = privacy.spent(algorithm.config, setting.rounds, setting.num_clients, setting.delta)
        guarantee = None if spent is None else spent.config
        plans += [
            runner.Plan(
                name=f"{system.name}_seed{seed}",
                title=system.title,
                algorithm=algorithm,
                data=data,
                tests={system.name: runner.Test(system.title, "test split", measure)},
                rounds=setting.rounds,
                eval_every=eval_every,
                seed=seed,
                config={**config, "guarantee": guarantee},
            )
            for seed in seeds
        ]
    return plans


def write_report(
    folder: Path, title: str, systems: Sequence[System], setting: Setting, series: Sequence[report.Series], note: str
) -> None:
    """Prints the table, and writes it as `report.md` with `figure.png`."""
    headings = ("clipping", "epsilon", "noise z", "accuracy")
    rows, points = [], {}
    for system in systems:
        runs = [one for one in series if one.title == system.title]
        value = report.over_seeds(runs)["accuracy"]
        points[system] = value
        asked = "no noise" if system.epsilon is None else f"{system.epsilon:g}"
        rows.append([system.clip, asked, f"{system.noise:.3g}", report.with_spread(value, len(runs))])
    runner.show_table(f"{title} (percent)", headings, rows)
    guarantee = (
        f"Epsilon at delta {setting.delta:.3g}; {setting.sampling.relation}; {setting.sampling}; {setting.rounds} rounds. It "
        "covers the server's model, not what is measured during a run."
    )
    runner.console.print(f"{guarantee} {note}", style="dim", markup=False)
    save_figure(folder / "figure.png", points, title=title)
    lines = [f"# {title}", "", report.markdown_table(headings, rows), "", f"Percent of the test split. {guarantee} {note}", ""]
    lines += ["![Accuracy against epsilon](figure.png)", ""]
    checkpoint.write_text(folder / "report.md", "\n".join([*lines, f"    {runner.command_line(folder)}", ""]))
    runner.console.print(f"\nreport, figure, metrics and states: {folder}", soft_wrap=True)


def save_figure(path: Path, points: Mapping[System, tuple[float, float]], *, title: str) -> None:
    """Accuracy against epsilon, one line for each way of clipping; without noise, a line across."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axis = figure.subplots()
    for clip, color in zip(("none", *CLIPS), report.COLORS, strict=False):
        mine = [(system, value) for system, value in points.items() if system.clip == clip]
        private = sorted((s.epsilon, *value) for s, value in mine if s.epsilon is not None)
        for system, value in mine:
            if system.epsilon is None:
                axis.axhline(value[0], color=color, linestyle=":", linewidth=1.2, label=system.title)
        if private:
            epsilon, mean, deviation = np.array(private).T
            axis.errorbar(epsilon, mean, deviation, color=color, marker="o", capsize=3, label=f"{clip} norm")
    axis.set_xscale("log")
    values = sorted({system.epsilon for system in points if system.epsilon is not None})
    axis.set_xticks(values, [f"{value:g}" for value in values])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("epsilon")
    axis.set_ylabel("accuracy (percent)")
    axis.set_title(title, loc="left")
    axis.legend(frameon=False)
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def main(
    dataset: Annotated[
        str, typer.Option(help="`mnist_small`, `digits`, an .npz, or a set of tensorflow-datasets.")
    ] = "mnist_small",
    clients: Annotated[int, typer.Option(min=2, help="Number of clients N.")] = 1000,
    concentration: Annotated[float, typer.Option(help="Of the Dirichlet distribution of class mixes.")] = 1.0,
    epsilons: Annotated[str, typer.Option(help="Wanted epsilons, each a point of the curve.")] = "0.5,1,2,4,8",
    delta: Annotated[
        float | None, typer.Option(help="Delta; N to the power of -1.1 when not given.", show_default=False)
    ] = None,
    clips: Annotated[str, typer.Option(help="Ways of clipping: " + ", ".join(CLIPS) + ".")] = "fixed,adaptive",
    norm: Annotated[float, typer.Option(help="Norm of clipped uploads; the first one where it is adaptive.")] = 0.5,
    quantile: Annotated[float, typer.Option(help="Share of uploads that an adaptive norm does not clip.")] = 0.5,
    rate: Annotated[float, typer.Option(help="Probability q that a client takes part in a round.")] = 0.1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds R.")] = 150,
    eval_every: Annotated[int, typer.Option(min=1, help="Rounds between evaluations; the first and the last are added.")] = 50,
    model: Annotated[str, typer.Option(help="`logistic` or `mlp`.")] = "logistic",
    lr: Annotated[float, typer.Option(help="Learning rate of clients.")] = 0.3,
    epochs: Annotated[int, typer.Option(min=1, help="Passes of a client over its samples in a round.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a batch.")] = 8,
    server_lr: Annotated[float, typer.Option(help="Learning rate of the server.")] = 1.0,
    seeds: Annotated[str, typer.Option(help="Seeds of training, e.g. 1,2,3.")] = "1,2,3",
    data_seed: Annotated[int, typer.Option(help="Fixes clients and their samples.")] = 1,
    out: runner.OutOption = None,
    data_dir: runner.DataDirOption = None,
    resume: runner.ResumeOption = False,
    devices: runner.DevicesOption = None,
    compile_cache: runner.CacheOption = True,
    debug: runner.DebugOption = False,
) -> None:
    """Trains FedAvg for every epsilon and way of clipping, and without noise and clipping to compare; writes table and figure.

    `python -m experiments.privacy --epsilons 1,8 --seeds 1`

    `python -m experiments.privacy --out runs/privacy`
    """
    with runner.one_line_errors(debug):
        wanted = runner.numbers(epsilons, "--epsilons", float)
        ways, seed_list = runner.names(clips, "--clips", CLIPS), runner.numbers(seeds, "--seeds")
        delta = clients**-1.1 if delta is None else delta
        capacity = schedules.poisson_capacity(rate, clients, rounds, delta / 1000)
        setting = Setting(clients, rate, capacity, rounds, delta, norm, quantile, lr, epochs, batch_size, server_lr)
        shared = runner.prepare(devices, compile_cache, cohort_size=capacity)
        with runner.console.status("finding the noise"):
            noises = {value: privacy.noise_for(value, rounds, delta, setting.sampling) for value in wanted}
        systems = [System("none", None, 0.0)]
        systems += [System(way, value, noises[value]) for way in ways for value in wanted]
        with runner.loading(dataset):
            source = sources.load(dataset, data_dir=data_dir)
            data, test = clients_of(source, clients, concentration=concentration, seed=data_seed), test_of(source)
        inputs = int(np.prod(source.x_train.shape[1:]))
        fm.checks.one_of("--model", model, ("logistic", "mlp"))
        task = models.MODELS[model](inputs=inputs, classes=source.num_classes)
        config = {"experiment": "privacy", "dataset": dataset, "data_seed": data_seed, "concentration": concentration}
        config |= {"clients": clients, "model": model, "setting": setting._asdict()}
        plans = make_plans(
            task, systems, setting, data, test, eval_every=eval_every, seeds=seed_list, devices=shared, config=config
        )
        options = {**config, "epsilons": wanted, "clips": ways, "eval_every": eval_every, "seeds": seed_list}
        folder = runner.open_folder(out, "privacy", resume=resume, options=options, algorithms=runner.configs(plans))
        results = runner.run_all(plans, folder)
        title = f"FedAvg on {dataset}, {clients} clients"
        write_report(folder, title, systems, setting, runner.all_series(plans, results), source.note)


if __name__ == "__main__":
    app()
