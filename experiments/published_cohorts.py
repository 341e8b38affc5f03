"""Cohorts and clients of the runs behind Tables 3 and 4 of FedMeta-Per (Nguyen, Cao) on MNIST, from the authors' logs.

client_worker/base_worker.py of baolongnguyenmac/fl-ml (commit af97090) seeds Python's generator with 42 when it is imported, and
Flower 0.17 draws cohorts by that generator: one client for the initial model, then in each round 5 that train and 50 that test.
Before that, something takes 6 numbers of 32 bits. Only this count was found by search.

The logs prove it. A round's training accuracy is the number of right answers over the query samples of its cohort. So eight runs
with the same cohorts have accuracies with a common denominator. With the right cohorts, the 300 denominators are sums of five of
50 sizes.

The difficulty of a client's cohorts shows its classes: the classes of client u depend on u mod 10, not on u mod 5.

The runs of FedAvg train on support and query samples, so their logs give the number of all training samples of a client. These
numbers are exactly those of parts by stick-breaking that are given to the slots in turn. The first image of the test set (a 7)
is missing, as if pandas took the first row of a file for its heading. Every slot except the first one of its class has one
sample less.

Centralised training has no logs, but a figure of an older commit contains its accuracies. They are from 300 passes over 1641
batches of 32, which is the number of batches of three quarters of 70,000 images.
"""

import json
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from fedjax_meta import report
from fedjax_meta.data import slots
from fedjax_meta.process import console, one_line_errors
from fedjax_meta.study.result_files import read_trials
from fedjax_meta.study.tuning import Trial

CLIENTS, COHORT, SKIPPED, SEED = 50, 5, 6, 42
LOGS = "experiments/non-iid/mnist/"
TESTED = {
    "fedavg": "meta_old/json/[Test][mnist, FedAvg]:",
    "fedmeta": "meta_old/json/[Test][mnist, FedMetaMAML]:",
    "fedmeta_metasgd": "meta_old/json/[Test][mnist, FedMetaSGD]:",
    "fedmeta_per": "per_old/json/[Test][mnist, FedMetaMAML]:",
    "fedmeta_per_metasgd": "per_old/json/[Test][mnist, FedMetaSGD]:",
}
"""By system, how the name of the log of its tests of known clients begins."""
CENTRAL = "cd4a092:experiments/centralized/mnist/[ACC, 0.9707] [MNIST]_ Learning rate_ 1e-05 - Batch size_ 32.html"
PASSES = (10, 100, 200, 300)
LAST = 100
"""Rounds at the end over which training losses are compared."""
MNIST = np.array([6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958])
"""Images of each digit, training and test."""

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def main(
    clone: Annotated[Path | None, typer.Argument(help="A clone of baolongnguyenmac/fl-ml, to compare with its logs.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds to print.")] = 300,
    run: Annotated[
        Path | None,
        typer.Option(help="Folder of a run of fedmeta_per_published_cohorts, to compare its losses with the logs."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Prints the cohorts, or what the authors' logs show about them.

    `python -m experiments.published_cohorts --rounds 20`

    `python -m experiments.published_cohorts fl-ml`

    `python -m experiments.published_cohorts fl-ml --run runs/fedmeta_per_published_cohorts`

    `git clone https://github.com/baolongnguyenmac/fl-ml` makes the folder `fl-ml`.
    """
    with one_line_errors(debug):
        if clone is None:
            console.print(json.dumps(cohorts(rounds)), soft_wrap=True, markup=False)
            return
        if run is not None:
            headings = ["system", "log", "by samples", "mean over clients", "seeds"]
            console.print(report.rich_table("Loss of the last test, known clients", headings, test_losses(clone, run)))
            headings = ["system", "log", "run, by seed", "correlation of changes, by seed"]
            rows = training_losses(clone, run)
            console.print(report.rich_table(f"Loss of training, mean of the last {LAST} rounds", headings, rows))
            return
        accuracies = np.array(list(logs(clone, "FedMeta", "acc", 8).values()))
        sums, agree = denominators(accuracies)
        sizes = query_sizes(sums, cohorts(len(sums)))
        fedavg = logs(clone, "meta_old/json/[Train][mnist, FedAvg]", "loss", 1)
        whole, _ = denominators(np.array(list(logs(clone, "FedAvg", "acc", 8).values())), most=16_000)
        training = query_sizes(whole, cohorts(len(whole)))
        said = (*compare(sums, agree, sizes), *splits(np.round(training), np.round(sizes)), *periods(fedavg, np.round(sizes)))
        for line in (*said, pair(clone), *central(clone)):
            console.print(line, soft_wrap=True, markup=False)


def cohorts(rounds: int) -> list[list[int]]:
    """The clients that train in each round `[rounds, 5]`."""
    draw = random.Random(SEED)
    for _ in range(SKIPPED):
        draw.getrandbits(32)
    draw.sample(range(CLIENTS), 1)
    found = []
    for _ in range(rounds):
        found.append(draw.sample(range(CLIENTS), COHORT))
        draw.sample(range(CLIENTS), CLIENTS)
    return found


def logs(clone: Path, name: str, score: str, wanted: int) -> dict[str, np.ndarray]:
    """A score of each training round `[300]`, of the runs on MNIST whose log has `name` in its path, by that path.

    Raises:
      ValueError: the folder is no clone with these logs.
    """
    listed = _git(clone, "ls-tree", "-r", "--name-only", "HEAD", LOGS).splitlines()
    names = [path for path in listed if "[Train]" in path and name in path]
    found = {path.removeprefix(LOGS): np.array(json.loads(_git(clone, "show", f"HEAD:{path}"))[score]) for path in names}
    found = {path: values for path, values in found.items() if values.shape == (300,)}
    if len(found) != wanted:
        raise ValueError(f"{clone} has {len(found)} logs of {name} on MNIST with 300 rounds in {LOGS}, not {wanted}")
    return found


def _finished(run: Path) -> Iterator[tuple[str, str, Path, list[Trial]]]:
    """(system, how its log begins, file of its results, trials) of the systems of a run that are finished."""
    for system, begins in TESTED.items():
        path = run / "results" / "pairs" / f"{system}.final.json"
        if path.is_file():
            yield system, begins, path, list(read_trials(path)[0].values())


def test_losses(clone: Path, run: Path) -> list[list[str]]:
    """A row for each finished system: the loss of the log's last test, which is averaged by samples, and the run's in both ways.

    Raises:
      ValueError: the folder is no clone with these logs.
      OSError: there is no such run.
    """
    found = []
    for system, begins, path, trials in _finished(run):
        logged = _losses(clone, begins)[-1]
        with np.load(path.with_name(f"{system}.clients.npz")) as saved:
            samples = saved["known_samples"]
        losses = np.array([trial.rows[-1]["tests"]["known"]["loss"] for trial in trials], float)
        ways = (np.average(losses, axis=1, weights=samples), losses.mean(1))
        spreads = [f"{one.mean():.3f}" + (f" ±{one.std(ddof=1):.3f}" if len(one) > 1 else "") for one in ways]
        found.append([system, f"{logged:.3f}", *spreads, str(len(losses))])
    return found


def training_losses(clone: Path, run: Path) -> list[list[str]]:
    """A row for each finished system: means of the last training losses of the log and of each seed, and how they vary together.

    Raises:
      ValueError: the folder is no clone with these logs.
      OSError: there is no such run.
    """
    found = []
    for system, begins, _, trials in _finished(run):
        logged = _losses(clone, begins.replace("[Test]", "[Train]"))
        curves = [np.concatenate([row["train"]["loss"] for row in trial.rows]) for trial in trials]
        means = ", ".join(f"{curve[-LAST:].mean():.3f}" for curve in curves)
        found.append(
            [system, f"{logged[-LAST:].mean():.3f}", means, ", ".join(f"{together(logged, one):.2f}" for one in curves)]
        )
    return found


def together(one: np.ndarray, other: np.ndarray) -> float:
    """The correlation of the changes of two courses `[rounds]` from round to round, over the last of them."""
    return float(np.corrcoef(np.diff(one)[-LAST:], np.diff(other)[-LAST:])[0, 1])


def pair(clone: Path) -> str:
    """How the training losses of both runs of FedMeta(MAML) vary together, in words."""
    known, new = (_losses(clone, f"meta_{clients}/json/[Train][mnist, FedMetaMAML]:") for clients in ("old", "new"))
    share = together(known, new)
    return f"correlation of the changes of training loss in the last {LAST} rounds, both runs of FedMeta(MAML): {share:.2f}"


def central(clone: Path) -> list[str]:
    """What the figure of centralised training holds, in words.

    Raises:
      ValueError: the folder is no clone with its commit.
    """
    drawn = _git(clone, "show", CENTRAL).rpartition("Plotly.newPlot(")[2]
    training, tests = (np.array(json.loads(values)) for values in re.findall(r'"y":(\[[^\]]*\])', drawn))
    trained, tested = (int(denominators(curve[::10, None], 10_000, 60_000)[0][0]) for curve in (training, tests))
    return [
        f"centralised training: {len(tests)} passes; accuracies are shares of {trained} training and {tested} test samples",
        f"its accuracy in tests after {', '.join(f'{passes} passes: {100 * tests[passes - 1]:.2f}' for passes in PASSES)}",
    ]


def _losses(clone: Path, begins: str) -> np.ndarray:
    """The losses of the one log whose path begins so."""
    listed = _git(clone, "ls-tree", "-r", "--name-only", "HEAD", LOGS).splitlines()
    names = [name for name in listed if name.startswith(LOGS + begins)]
    if len(names) != 1:
        raise ValueError(f"{clone} has {len(names)} logs that begin with {LOGS + begins}, not 1")
    return np.array(json.loads(_git(clone, "show", f"HEAD:{names[0]}"))["loss"])


def _git(clone: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(clone), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git {words[0]} in {clone}: {(done.stderr or 'failed').splitlines()[0]}")
    return done.stdout


def compare(sums: np.ndarray, agree: np.ndarray, sizes: np.ndarray) -> list[str]:
    """What the denominators `[rounds]` and the sizes `[N]` that follow from them say, in words."""
    member = membership(cohorts(len(sums)))
    exact = np.isclose(np.remainder(member @ np.round(sizes) / sums, 1), 0, atol=1e-9)  # fractions may have been cancelled
    return [
        f"rounds in which all 8 runs have a common denominator: {int((agree == 8).sum())} of {len(sums)}",
        f"rounds whose denominator is the sum of the cohort's sizes: {int(exact.sum())} of {len(sums)}",
        f"largest distance of a client's size from a whole number: {np.abs(sizes - np.round(sizes)).max():.1e}",
        f"query samples of the clients: {', '.join(str(int(size)) for size in np.round(sizes))}",
    ]


def splits(training: np.ndarray, query: np.ndarray) -> list[str]:
    """How many clients have as many samples for training, and for support of these, as the rules give, in words."""
    missing = MNIST - (np.arange(10) == 7)  # the first image of the test set
    parts = slots.class_slots(CLIENTS, 10, stride=1)
    held = slots.stick_breaking(np.repeat(np.arange(10), missing), parts, seed=1, in_turn=True).sizes
    first = np.zeros(parts.size, bool)
    first[np.unique(parts.ravel(), return_index=True)[1]] = True
    held -= (~first).reshape(parts.shape).sum(1)
    shares = ((0.75 * held).astype(int), (1 - 0.8) * training)
    found = (int((training == shares[0]).sum()), int((training - query == shares[1].astype(int)).sum()))
    return [
        f"clients whose training samples are 75 % of the parts dealt in turn, one less for a later slot: {found[0]} of {CLIENTS}",
        f"clients whose support is int((1 - 0.8) n) of their n training samples: {found[1]} of {CLIENTS}",
    ]


def periods(losses: dict[str, np.ndarray], sizes: np.ndarray) -> list[str]:
    """By which period of the clients' numbers the training loss of a round varies, in words."""
    said = []
    for name, loss in losses.items():
        shares = [f"{100 * explained(loss, cohorts(len(loss)), sizes, period):.0f} % by u mod {period}" for period in (5, 10)]
        said.append(f"variance of the log loss that is explained, {name.partition(':')[0]}: {', '.join(shares)}")
    return said


def explained(loss: np.ndarray, drawn: list[list[int]], sizes: np.ndarray, period: int, first: int = 20) -> float:
    """R^2 of log loss `[rounds]`, less its course (a polynomial), on the shares of a round's samples by u mod `period`."""
    rounds = np.arange(first, len(loss))
    course = np.log(loss[first:])
    rest = course - np.polyval(np.polyfit(rounds, course, 4), rounds)
    samples = membership(drawn)[first:] * sizes
    groups = samples.reshape(len(rounds), -1, period).sum(1) / samples.sum(1, keepdims=True)
    fitted = groups @ np.linalg.lstsq(groups, rest, rcond=None)[0]
    return float(1 - np.sum((rest - fitted) ** 2) / np.sum(rest**2))


def denominators(accuracies: np.ndarray, least: int = 200, most: int = 12_000) -> tuple[np.ndarray, np.ndarray]:
    """(the number of samples that makes the most runs' accuracies `[runs, rounds]` whole numbers `[rounds]`, how many runs)."""
    tried = np.arange(least, most)
    found, agree = [], []
    for column in accuracies.T:
        right = column[:, None] * tried
        whole = (np.abs(right - np.round(right)) < 2.5e-7 * tried).sum(0)  # each accuracy is rounded to float32
        found.append(tried[whole.argmax()])
        agree.append(whole.max())
    return np.array(found), np.array(agree)


def membership(drawn: list[list[int]]) -> np.ndarray:
    """Who trains in which round, 0 or 1, `[rounds, N]`."""
    member = np.zeros((len(drawn), CLIENTS))
    for row, ids in zip(member, drawn, strict=True):
        row[ids] = 1
    return member


def query_sizes(sums: np.ndarray, drawn: list[list[int]]) -> np.ndarray:
    """The clients' sizes `[N]` by least squares, without the rounds that contradict the others."""
    member, kept = membership(drawn), np.ones(len(sums), bool)
    for _ in range(30):
        sizes = np.linalg.lstsq(member[kept], sums[kept].astype(float), rcond=None)[0]
        error = np.abs(member @ sizes - sums)
        kept = error < max(3 * float(np.median(error[kept])), 0.6)
    return sizes


if __name__ == "__main__":
    app()
