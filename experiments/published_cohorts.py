"""Cohorts and clients of the runs behind Tables 3 and 4 of FedMeta-Per (Nguyen, Cao), from the authors' logs.

client_worker/base_worker.py of baolongnguyenmac/fl-ml (commit af97090) seeds Python's generator with 42 when it is imported, and
Flower 0.17 draws cohorts by that generator: one client for the initial model, then in each round 5 that train and 50 that test.
Before that, something takes 6 numbers of 32 bits. Only this count was found by search.

The logs prove it. A round's training accuracy is the number of right answers over the query samples of its cohort. So eight runs
with the same cohorts have accuracies with a common denominator. With the right cohorts, the denominators of all rounds (300 on
MNIST, 600 on CIFAR-10) are sums of five of 50 sizes.

The difficulty of a client's cohorts shows its classes: the classes of client u depend on u mod 10, not on u mod 5.

The runs of FedAvg train on support and query samples, so their logs give the number of all training samples of a client.

- On MNIST, these numbers are exactly those of parts by stick-breaking that are given to the slots in turn. The first image of the
  test set (a 7) is missing, as if pandas took the first row of a file for its heading. Every slot except the first one of its
  class has one sample less.
- On CIFAR-10, they are those of the authors' generator.

Centralised training has no logs, but a figure of an older commit contains its accuracies. They are from 300 passes over 1641
batches of 32, which is the number of batches of three quarters of 70,000 images.
"""

import json
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import typer

from fedjax_meta import report
from fedjax_meta.data import slots
from fedjax_meta.process import console, one_line_errors
from fedjax_meta.study.result_files import read_trials
from fedjax_meta.study.tuning import Trial

CLIENTS, COHORT, SKIPPED, SEED = 50, 5, 6, 42
TESTED = {
    "fedavg": ("meta_old", "FedAvg"),
    "fedmeta": ("meta_old", "FedMetaMAML"),
    "fedmeta_metasgd": ("meta_old", "FedMetaSGD"),
    "fedmeta_per": ("per_old", "FedMetaMAML"),
    "fedmeta_per_metasgd": ("per_old", "FedMetaSGD"),
}
"""By system, the folder of its logs with known clients, and its name there."""
ROUNDS = {"mnist": 300, "cifar": 600}
"""Rounds of the runs, by the authors' name of the data set."""
CENTRAL = "cd4a092:experiments/centralized/mnist/[ACC, 0.9707] [MNIST]_ Learning rate_ 1e-05 - Batch size_ 32.html"
PASSES = (10, 100, 200, 300)
LAST = 100
"""Rounds at the end over which training losses are compared."""
MNIST = np.array([6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958])
"""Images of each digit, training and test."""

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


class Logs(NamedTuple):
    """The authors' logs of one data set.

    Attributes:
      clone: a clone of their repository.
      dataset: a key of `ROUNDS`.
    """

    clone: Path
    dataset: str

    @property
    def rounds(self) -> int:
        """Rounds of a run."""
        return ROUNDS[self.dataset]

    def of(self, system: str, phase: str, folder: str = "") -> dict[str, dict[str, list[float]]]:
        """The logs of a phase, `"Train"` or `"Test"`, of the systems whose name begins so, by path.

        Raises:
          ValueError: the folder is no clone.
        """
        root = f"experiments/non-iid/{self.dataset}/"
        listed = _git(self.clone, "ls-tree", "-r", "--name-only", "HEAD", root).splitlines()
        begins = f"[{phase}][{self.dataset}, {system}"
        names = [path for path in listed if path.startswith(root + folder) and path.rpartition("/")[2].startswith(begins)]
        return {path.removeprefix(root): json.loads(_git(self.clone, "show", f"HEAD:{path}")) for path in names}

    def training(self, system: str, score: str, wanted: int) -> dict[str, np.ndarray]:
        """A score of each training round `[rounds]` of all runs of the systems whose name begins so, by path.

        Raises:
          ValueError: the folder is no clone with these logs.
        """
        found = {name: np.array(log[score]) for name, log in self.of(system, "Train").items()}
        found = {name: values for name, values in found.items() if values.shape == (self.rounds,)}
        if len(found) != wanted:
            raise ValueError(
                f"{self.clone} has {len(found)} logs of {system} on {self.dataset} with {self.rounds} rounds, not {wanted}"
            )
        return found

    def losses(self, system: str, phase: str, folder: str) -> np.ndarray:
        """The losses of the one run of a system in a folder.

        Raises:
          ValueError: the folder is no clone with this log.
        """
        found = list(self.of(f"{system}]", phase, folder).values())
        if len(found) != 1:
            raise ValueError(f"{self.clone} has {len(found)} logs of {system} on {self.dataset} in {folder}, not 1")
        return np.array(found[0]["loss"])


@app.command()
def main(
    clone: Annotated[Path | None, typer.Argument(help="A clone of baolongnguyenmac/fl-ml, to compare with its logs.")] = None,
    dataset: Annotated[Literal["mnist", "cifar"], typer.Option(help="Of which runs; `cifar` is CIFAR-10.")] = "mnist",
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of rounds to print.", show_default="all")] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Folder of a run with these cohorts, to compare its losses with the logs."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Prints the cohorts, or what the authors' logs show about them.

    `python -m experiments.published_cohorts --rounds 20`

    `python -m experiments.published_cohorts fl-ml`

    `python -m experiments.published_cohorts fl-ml --dataset cifar`

    `python -m experiments.published_cohorts fl-ml --run runs/fedmeta_per_published_cohorts`

    `git clone https://github.com/baolongnguyenmac/fl-ml` makes the folder `fl-ml`.
    """
    with one_line_errors(debug):
        if clone is None:
            console.print(json.dumps(cohorts(rounds or ROUNDS[dataset])), soft_wrap=True, markup=False)
            return
        if rounds is not None:
            raise ValueError("--rounds is for printing cohorts: leave CLONE out")
        logs = Logs(clone, dataset)
        if run is not None:
            headings = ["system", "log", "by samples", "mean over clients", "seeds"]
            console.print(report.rich_table("Loss of the last test, known clients", headings, test_losses(logs, run)))
            headings = ["system", "log", "run, by seed", "correlation of changes, by seed"]
            rows = training_losses(logs, run)
            console.print(report.rich_table(f"Loss of training, mean of the last {LAST} rounds", headings, rows))
            return
        drawn = cohorts(logs.rounds)
        sums, agree = denominators(np.array(list(logs.training("FedMeta", "acc", 8).values())))
        sizes = query_sizes(sums, drawn)
        whole, _ = denominators(np.array(list(logs.training("FedAvg", "acc", 8).values())), most=16_000)
        held = (np.round(query_sizes(whole, drawn)), np.round(sizes))
        said = [*compare(sums, agree, sizes), *splits(dataset, *held)]
        if dataset == "mnist":
            fedavg = {name: loss for name, loss in logs.training("FedAvg]", "loss", 4).items() if name.startswith("meta_old")}
            said += [*periods(fedavg, held[1]), pair(logs), *central(clone)]
        for line in said:
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


def _finished(run: Path) -> Iterator[tuple[str, str, str, Path, list[Trial]]]:
    """(system, folder of its log, its name there, file of its results, trials) of the systems of a run that are finished."""
    for system, (folder, name) in TESTED.items():
        path = run / "results" / "pairs" / f"{system}.final.json"
        if path.is_file():
            yield system, folder, name, path, list(read_trials(path)[0].values())


def test_losses(logs: Logs, run: Path) -> list[list[str]]:
    """A row for each finished system: the loss of the log's last test, which is averaged by samples, and the run's in both ways.

    Raises:
      ValueError: the folder is no clone with these logs.
      OSError: there is no such run.
    """
    found = []
    for system, folder, name, path, trials in _finished(run):
        logged = logs.losses(name, "Test", folder)[-1]
        with np.load(path.with_name(f"{system}.clients.npz")) as saved:
            samples = saved["known_samples"]
        losses = np.array([trial.rows[-1]["tests"]["known"]["loss"] for trial in trials], float)
        ways = (np.average(losses, axis=1, weights=samples), losses.mean(1))
        spreads = [f"{one.mean():.3f}" + (f" ±{one.std(ddof=1):.3f}" if len(one) > 1 else "") for one in ways]
        found.append([system, f"{logged:.3f}", *spreads, str(len(losses))])
    return found


def training_losses(logs: Logs, run: Path) -> list[list[str]]:
    """A row for each finished system: means of the last training losses of the log and of each seed, and how they vary together.

    Raises:
      ValueError: the folder is no clone with these logs.
      OSError: there is no such run.
    """
    found = []
    for system, folder, name, _, trials in _finished(run):
        logged = logs.losses(name, "Train", folder)
        curves = [np.concatenate([row["train"]["loss"] for row in trial.rows]) for trial in trials]
        means = ", ".join(f"{curve[-LAST:].mean():.3f}" for curve in curves)
        found.append(
            [system, f"{logged[-LAST:].mean():.3f}", means, ", ".join(f"{together(logged, one):.2f}" for one in curves)]
        )
    return found


def together(one: np.ndarray, other: np.ndarray) -> float:
    """The correlation of the changes of two courses `[rounds]` from round to round, over the last of them."""
    return float(np.corrcoef(np.diff(one)[-LAST:], np.diff(other)[-LAST:])[0, 1])


def pair(logs: Logs) -> str:
    """How the training losses of both runs of FedMeta(MAML) vary together, in words."""
    known, new = (logs.losses("FedMetaMAML", "Train", folder) for folder in ("meta_old", "meta_new"))
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


def splits(dataset: str, training: np.ndarray, query: np.ndarray) -> list[str]:
    """How many clients have as many samples for training, and for support of these, as the rules give, in words."""
    pairs = slots.class_slots(CLIENTS, 10, stride=1)
    if dataset == "mnist":
        rule = "the parts dealt in turn, one less for a later slot"
        missing = MNIST - (np.arange(10) == 7)  # the first image of the test set
        held = slots.stick_breaking(np.repeat(np.arange(10), missing), pairs, seed=1, in_turn=True).sizes
        first = np.zeros(pairs.size, bool)
        first[np.unique(pairs.ravel(), return_index=True)[1]] = True
        held -= (~first).reshape(pairs.shape).sum(1)
    else:
        rule = "those of the authors' generator with seed 1"
        held = slots.lognormal_classes(np.repeat(np.arange(10), 6000), pairs, seed=1).sizes
    shares = ((0.75 * held).astype(int), (1 - 0.8) * training)
    found = (int((training == shares[0]).sum()), int((training - query == shares[1].astype(int)).sum()))
    return [
        f"clients whose training samples are 75 % of {rule}: {found[0]} of {CLIENTS}",
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
