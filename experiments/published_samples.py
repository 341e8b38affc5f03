"""FedMeta-Per on CIFAR-10 with the very clients of the runs behind Tables 3 and 4 (Nguyen, Cao): their samples and cohorts.

Two scripts of baolongnguyenmac/fl-ml (commit af97090) made the clients, with fixed seeds:

- data/cifar/gen_data_cifar_pFedMe.py pools both splits of CIFAR-10 in the order of its files. Each client takes the next samples
  of its two classes, first ten of each, and in a second pass the others. `train_test_split` of scikit-learn draws which train.
- data/split_support_query.py shuffles both parts of each client; the first fifth is the support set.

The study `fedmeta_per_cifar10_published_cohorts` has clients of these sizes with other samples, and the same cohorts.
"""

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
import yaml

from fedjax_meta import report, runtime
from fedjax_meta.data import from_partition, pixel_scaling, slots, sources
from fedjax_meta.process import command_line, console, one_line_errors
from fedjax_meta.study import load, results, run, terminal
from fedjax_meta.study.scenario import Clients, fingerprint
from fedjax_meta.study.tuning import KNOWN

CLIENTS, CLASSES, FIRST = 50, 10, 10
SUPPORT = 1 - 0.8
"""As the authors' script computes it: a little less than a fifth."""
BEGIN = [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
"""The first labels of the training split, in the order of the files."""
STUDY = "fedmeta_per_cifar10_published_cohorts"

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


class Held(NamedTuple):
    """The samples of the clients, client after client: those that train first, and in both parts the support set first.

    Attributes:
      order: int `[S]`, positions in the pooled samples.
      train_sizes, test_sizes: int `[N]`.
    """

    order: np.ndarray
    train_sizes: np.ndarray
    test_sizes: np.ndarray

    def views(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """(begin, end) `[N]` of each view."""
        train, all_ = self.train_sizes, self.train_sizes + self.test_sizes
        support, test_support = ((SUPPORT * sizes).astype(np.int64) for sizes in (train, self.test_sizes))
        return {
            "train": (np.zeros_like(train), train),
            "support": (np.zeros_like(train), support),
            "query": (support, train),
            "test": (train, all_),
            "test_support": (train, train + test_support),
            "test_query": (train + test_support, all_),
        }


def drawn(labels: np.ndarray) -> Held:
    """The clients that the authors' scripts draw from labels `[M]`, in the order of the files, training split first."""
    from sklearn.model_selection import train_test_split

    python, generator = random.Random(1), np.random.RandomState(1)
    of_class = [np.flatnonzero(labels == label) for label in range(CLASSES)]
    pairs = slots.class_slots(CLIENTS, CLASSES, stride=1)
    held: list[list[int]] = [[] for _ in range(CLIENTS)]
    taken = np.zeros(CLASSES, int)
    for user, pair in enumerate(pairs):
        for label in pair:
            held[user] += of_class[label][taken[label] : taken[label] + FIRST].tolist()
            taken[label] += FIRST
    shares = generator.lognormal(0, 2.0, (CLASSES, CLIENTS, 2))
    shares = np.array([[[len(samples) - CLIENTS]] for samples in of_class]) * shares / np.sum(shares, (1, 2), keepdims=True)
    for user, j in itertools.product(range(CLIENTS), range(2)):
        label = pairs[user, j]
        more = int(shares[label, user // (CLIENTS // 10), j]) + python.randint(300, 600)
        if taken[label] + more < len(of_class[label]):
            held[user] += of_class[label][taken[label] : taken[label] + more].tolist()
            taken[label] += more
    parts = [train_test_split(np.array(mine), train_size=0.75, stratify=labels[mine], random_state=generator) for mine in held]
    shuffle = random.Random(42)
    mixed = [[_shuffled(part, shuffle) for part in kind] for kind in zip(*parts, strict=True)]
    order = np.concatenate([part for both in zip(*mixed, strict=True) for part in both])
    train_sizes, test_sizes = (np.array([len(part) for part in kind]) for kind in mixed)
    return Held(order, train_sizes, test_sizes)


def _shuffled(samples: np.ndarray, generator: random.Random) -> np.ndarray:
    found = samples.tolist()
    generator.shuffle(found)
    return np.array(found)


def in_order_of_files(data_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images `[60000, 32, 32, 3]` and labels of CIFAR-10 in the order of its files, from tensorflow-datasets.

    Raises:
      ValueError: the folder does not have it, or the order cannot be told.
    """
    import tensorflow_datasets as tfds

    parts = []
    for split in ("train", "test"):
        try:
            records = tfds.data_source("cifar10", split=split, data_dir=str(data_dir), download=False)
        except (AssertionError, ValueError, RuntimeError, tfds.core.DatasetNotFoundError) as error:
            raise ValueError(f"cifar10 cannot be read from {data_dir}: {str(error).partition(chr(10))[0]}") from None
        # Builders shuffle when they write; an id, where there is one, ends in the number of the sample.
        numbers = [int(one["id"].rpartition(b"_")[2]) if one.get("id") else i for i, one in enumerate(records)]
        found = [one for _, one in sorted(zip(numbers, records, strict=True), key=lambda pair: pair[0])]
        parts.append([np.stack([one[name] for one in found]) for name in ("image", "label")])
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if y[: len(BEGIN)].tolist() != BEGIN:
        raise ValueError(f"the samples of cifar10 in {data_dir} are not in the order of its files, and have no ids")
    return x, y.astype(np.int32)


def with_published_samples(clients: Clients, x: np.ndarray, y: np.ndarray) -> Clients:
    """The clients of the study, with the samples that they had in the authors' runs, and no new ones."""
    held = drawn(y)
    sizes = held.train_sizes + held.test_sizes
    scale = pixel_scaling(x, "half")
    train = from_partition(x, y, held.order, sizes, num_classes=CLASSES, views=held.views(), **scale)
    return clients._replace(
        train=train,
        tuning=train,
        new=None,
        orders=1,
        title="FedMeta-Per on cifar10, the very samples of the published runs",
        note=clients.note.partition(". New clients")[0],
        fingerprint=fingerprint(train),
    )


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of the run. The same command continues it.")] = Path(
        "runs/published_samples"
    ),
    systems: Annotated[str, typer.Option(help="Systems of the study, separated by commas.")] = "fedmeta_per",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "1,2,3",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the published runs have 600.")] = 600,
    data_dir: Annotated[str | None, typer.Option(help="Folder of prepared data sets of tensorflow-datasets.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Trains on the very clients of the published runs on CIFAR-10, and compares with the published scores.

    `python -m experiments.published_samples --data-dir DIR`

    `python -m experiments.published_samples --data-dir DIR --systems fedmeta_per_metasgd --seeds 1 --out runs/metasgd`

    The option `--run` of `experiments.published_cohorts` compares the losses of the run with the authors' logs.
    """
    with one_line_errors(debug):
        runtime.use_all_cores()
        whole = load(STUDY)
        some = [name.strip() for name in systems.split(",")]
        odd = [name for name in some if name not in whole.systems]
        if odd:
            raise ValueError(f"{odd[0]!r} is no system of {STUDY}; there are {', '.join(whole.systems)}")
        study = dataclasses.replace(
            whole,
            seeds=yaml.safe_load(f"[{seeds}]"),
            rounds=rounds,
            eval_every=rounds,
            systems={name: whole.systems[name] for name in some},
            scenarios={"pairs": whole.scenarios["pairs"]},
            published=[row for row in whole.published if row.system in some and row.clients == KNOWN],
        )
        built = study.scenarios["pairs"].build(data_dir)
        clients = {"pairs": with_published_samples(built, *in_order_of_files(sources.data_folder(data_dir)))}
        with terminal.lines(study, clients) as shown:
            outcomes = run.run(study, out, watcher=shown, clients=clients, command=command_line(out))
        console.print(
            report.rich_table("Published beside measured", results.PUBLISHED_HEADINGS, results.published(study, outcomes))
        )


if __name__ == "__main__":
    app()
