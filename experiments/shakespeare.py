"""Next characters of Shakespeare's speakers: an LSTM trained by federated systems and centrally, with the same samples.

python -m experiments.shakespeare --help. Each finished run is a line of OUT/results.jsonl, and the same command goes on where it
was stopped.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer

import fedjax_meta as fm
from fedjax_meta import checks, models
from fedjax_meta.data import FederatedData, holdout, pooled
from fedjax_meta.data.natural_sets import tiny_shakespeare


class Setting(NamedTuple):
    """What all runs share.

    Attributes:
      train: the speakers that train.
      tuning: the same, tested on training samples that are held back.
      new: speakers that never train.
      task: the model.
      cohort: C.
      batch: sequences in a batch.
      epochs: local passes in a round.
    """

    train: FederatedData
    tuning: FederatedData
    new: FederatedData
    task: fm.Task
    cohort: int
    batch: int
    epochs: int


class System(NamedTuple):
    """A method and the rates to try, `make(setting, rate)`."""

    title: str
    make: Callable[[Setting, float], fm.Method]
    rates: tuple[float, ...]


def _local(s: Setting) -> dict[str, int]:
    return {"epochs": s.epochs, "batch_size": s.batch}


SYSTEMS = {
    "central": System("central training", lambda s, rate: fm.fedavg(s.task, lr=rate, batch_size=s.batch), (0.5, 1.0, 2.0)),
    "fedavg": System("FedAvg", lambda s, rate: fm.fedavg(s.task, lr=rate, **_local(s)), (0.5, 1.0, 2.0)),
    "maml": System(
        "FedMeta(MAML), exact",
        lambda s, rate: fm.fedmeta(s.task, inner_lr=0.5, outer_lr=rate, batch_size=s.batch, meta_steps=2),
        (0.001, 0.003, 0.01),
    ),
    "fedmeta_per": System(
        "FedMeta-Per, exact",
        lambda s, rate: fm.fedmeta_per(s.task, inner_lr=0.5, outer_lr=rate, batch_size=s.batch, meta_steps=2),
        (0.001, 0.003, 0.01),
    ),
    "fedrep": System(
        "FedRep",
        lambda s, rate: fm.fedrep(s.task, lr=rate, head_epochs=s.epochs, body_epochs=s.epochs, batch_size=s.batch),
        (0.25, 0.5, 1.0),
    ),
    "ditto": System("Ditto", lambda s, rate: fm.ditto(s.task, lr=rate, prox_weight=0.1, **_local(s)), (0.5, 1.0, 2.0)),
    "pfedme": System(
        "pFedMe",
        lambda s, rate: fm.pfedme(
            s.task, lr=rate, outer_lr=0.05, prox_weight=5.0, inner_steps=3, local_rounds=8, batch_size=s.batch
        ),
        (0.05, 0.1, 0.2),
    ),
}


def _scores(algorithm: fm.Algorithm, state: Any, data: FederatedData, known: bool, views: tuple[str, str]) -> dict[str, float]:
    """Token accuracy: mean over speakers, and over all their characters."""
    found = fm.evaluate(algorithm, jax.random.key(7), state, data, known=known, support=views[0], query=views[1])
    accuracy = np.asarray(found.metrics["token_accuracy"].values)
    sizes = np.asarray(data.sizes(views[1]))
    return {
        "mean": float(accuracy.mean()),
        "of_all": float(np.sum(accuracy * sizes) / np.sum(sizes)),
        "worst_tenth": float(np.sort(accuracy)[: max(len(accuracy) // 10, 1)].mean()),
    }


def _train(setting: Setting, name: str, rate: float, seed: int, rounds: int, data: FederatedData) -> dict[str, Any]:
    """One run, and its scores on the speakers' own tests and on new speakers."""
    system = SYSTEMS[name]
    central = name == "central"
    if central:
        # As many passes over a sample as it has on average in the rounds of a cohort.
        rounds = max(round(rounds * setting.epochs * setting.cohort / data.num_clients), 1)
    trained = pooled(data) if central else data
    algorithm = fm.federate(system.make(setting, rate), fm.Federation(cohort_size=1 if central else setting.cohort))
    begin = time.perf_counter()
    state, _ = fm.simulate(algorithm, trained, key=jax.random.key(seed), rounds=rounds, eval_every=rounds)
    seconds = time.perf_counter() - begin
    own = _scores(algorithm, state, data, not central, ("train", "test"))
    new = _scores(algorithm, state, setting.new, False, ("support", "query"))
    return {"rounds": rounds, "known": own, "new": new, "seconds": seconds}


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _run(path: Path, what: dict[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The results of a run, from the file if they are there."""
    for row in _read(path):
        if all(row.get(key) == value for key, value in what.items()):
            return row
    row = {**what, **run()}
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    shown = " ".join(f"{key} {value}" for key, value in what.items() if key not in ("size", "phase"))
    typer.echo(f"{what['phase']}: {shown}: {100 * row['known']['of_all']:.2f} % of characters, {row['seconds']:.0f} s")
    return row


def table(rows: list[dict[str, Any]], names: list[str]) -> str:
    """The final runs as a Markdown table: percent of characters, mean and standard deviation over seeds."""
    lines = [
        "| system | rate | own tests: all characters | mean over speakers | worst tenth | new speakers: all characters | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        final = [row for row in rows if row["system"] == name and row["phase"] == "final"]
        if not final:
            continue

        def cell(clients: str, score: str, final: list[dict[str, Any]] = final) -> str:
            values = [100 * row[clients][score] for row in final]
            return f"{np.mean(values):.2f}" + (f" ± {np.std(values):.2f}" if len(values) > 1 else "")

        cells = [cell("known", "of_all"), cell("known", "mean"), cell("known", "worst_tenth"), cell("new", "of_all")]
        lines.append(f"| {SYSTEMS[name].title} | {final[0]['rate']:g} | {' | '.join(cells)} | {len(final)} |")
    return "\n".join(lines)


def main(
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/shakespeare"),
    data_dir: Annotated[str | None, typer.Option(help="Where tensorflow-datasets keeps prepared sets.")] = None,
    download: Annotated[bool, typer.Option(help="Download the set if it is not prepared.")] = False,
    systems: Annotated[str, typer.Option(help="Names, joined by commas.")] = ",".join(SYSTEMS),
    rounds: Annotated[int, typer.Option(min=1)] = 200,
    tuning_rounds: Annotated[int, typer.Option(min=1, help="Of each of the three rates.")] = 40,
    seeds: Annotated[int, typer.Option(min=1)] = 1,
    cohort: Annotated[int, typer.Option(min=1)] = 10,
    epochs: Annotated[int, typer.Option(min=1)] = 2,
    batch: Annotated[int, typer.Option(min=1)] = 10,
    hidden: Annotated[int, typer.Option(min=1)] = 128,
    length: Annotated[int, typer.Option(min=1)] = 80,
    least: Annotated[int, typer.Option(help="Fewest characters of a speaker.")] = 1000,
    speakers: Annotated[int | None, typer.Option(help="Only so many speakers; all when not given.")] = None,
) -> None:
    """Tunes each system's rate on held-back training samples, trains it, and prints the table.

    \b
    Examples:
      python -m experiments.shakespeare --data-dir DATA
      python -m experiments.shakespeare --data-dir DATA --systems fedavg,central
    """
    fm.use_all_cores()
    names = systems.split(",")
    for name in names:
        try:
            checks.one_of("--systems", name, SYSTEMS)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    try:
        source = tiny_shakespeare(length=length, least=least, data_dir=data_dir, download=download)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    source = source.at_least(8, most_clients=speakers)
    typer.echo(f"{source}; {source.note}")
    train, new = holdout.new_clients(source.federated(), 0.2, seed=1)
    assert new is not None
    task = models.char_lstm(source.num_classes, length, hidden=hidden, depth=1)
    tuning = holdout.validation_samples(train, 0.2)
    on_device = [jax.tree.map(jnp.asarray, data) for data in (train, tuning, new)]
    setting = Setting(*on_device, task, min(cohort, train.num_clients), batch, epochs)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.jsonl"
    size = [rounds, tuning_rounds, setting.cohort, epochs, batch, hidden, length, least, speakers]
    for name in names:
        trials = [
            _run(
                path,
                {"phase": "tuning", "system": name, "rate": rate, "seed": 100, "size": size},
                lambda name=name, rate=rate: _train(setting, name, rate, 100, tuning_rounds, setting.tuning),
            )
            for rate in SYSTEMS[name].rates
        ]
        best = max(trials, key=lambda row: np.nan_to_num(row["known"]["of_all"]))["rate"]
        for seed in range(1, seeds + 1):
            _run(
                path,
                {"phase": "final", "system": name, "rate": best, "seed": seed, "size": size},
                lambda name=name, best=best, seed=seed: _train(setting, name, best, seed, rounds, setting.train),
            )
    rows = [row for row in _read(path) if row["size"] == size]
    text = f"{source}\n\n{table(rows, names)}\n"
    (out / "table.md").write_text(text)
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
