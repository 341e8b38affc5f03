"""Known data sets with natural clients, by name; a set that is not there gets one line that says how to get it."""

import argparse
import csv
import inspect
import io
import math
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_meta import checks, disk
from fedjax_meta.data import npz, text
from fedjax_meta.data.engines import read_fedjax_sqlite, read_pfllib, read_tff_hdf5
from fedjax_meta.data.leaf import read_leaf
from fedjax_meta.data.natural import Natural, class_labels, of_clients
from fedjax_meta.data.prepared import load_text
from fedjax_meta.data.sources import data_folder

UCI_HAR_PAGE = "https://archive.ics.uci.edu/dataset/240/human+activity+recognition+using+smartphones"
"""Where the archive of UCI HAR is."""
_SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")


def tiny_shakespeare(
    *, length: int = 80, least: int = 1000, data_dir: str | os.PathLike | None = None, download: bool = False
) -> Natural:
    """Next characters of Shakespeare's speakers, from tensorflow-datasets' `tiny_shakespeare`; a speaker is a client.

    A speaker's speeches are joined in the order of the plays and cut into sequences of `length` characters, with the same
    shifted by one as targets. The plays are an excerpt of Shakespeare's works, so that there are fewer speakers than in LEAF's
    data and in TensorFlow Federated's, whose numbers stand in `published`.

    Args:
      length: T.
      least: fewest characters of a speaker; at least T + 1.
      data_dir, download: see `sources.load`.

    Raises:
      ValueError: a set that is not prepared (the message says how to get it), counts out of range.
    """
    checks.count("length", length)
    checks.count("least", least)
    checks.flag("download", download)
    play = load_text("tiny_shakespeare", data_folder(data_dir), download=download)
    spoken = text.speakers(play)
    vocabulary = text.characters([play])
    # A client needs a sample in each of four views.
    least = max(least, 4 * length + 1)
    enough = {name: words for name, words in spoken.items() if len(words) >= least}
    if not enough:
        raise ValueError(f"no speaker of tiny_shakespeare has {least} characters")
    clients = {name: text.shifted_by_one(text.encode(words, vocabulary), length) for name, words in enough.items()}
    return of_clients(
        clients,
        where="tiny_shakespeare",
        num_classes=len(vocabulary),
        name="tiny_shakespeare",
        note=f"speakers with at least {least} characters, {len(enough)} of {len(spoken)}; an excerpt of Shakespeare's works",
        published="TensorFlow Federated has 715 speakers, papers on LEAF's data 1,129, of all his works",
        ordered=True,
        vocabulary=vocabulary,
    )


def uci_har(*, data_dir: str | os.PathLike | None = None) -> Natural:
    """UCI HAR (Anguita et al. 2013): windows of 128 values of 9 inertial signals, 6 activities; a subject is a client.

    Inputs are float32 `[S, 128, 9]`. The file is `uci_har/uci_har.npz` (or `uci_har.npz`) of the data folder, with `x`, `y`
    from 0 to 5 and `subject`; `python -m fedjax_meta.data.natural_sets uci_har ARCHIVE OUT` makes it of the archive.

    Raises:
      ValueError: no such file (the message says how to get it), or one of other content.
    """
    folder = data_folder(data_dir)
    paths = [folder / "uci_har" / "uci_har.npz", folder / "uci_har.npz"]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise ValueError(
            f"there is no {paths[0]}: download the archive from {UCI_HAR_PAGE} and run "
            f"python -m fedjax_meta.data.natural_sets uci_har ARCHIVE.zip {paths[0]}"
        )
    arrays = npz.read(path)
    if not {"x", "y", "subject"} <= arrays.keys():
        raise ValueError(f"{str(path)!r} holds {', '.join(arrays) or 'nothing'}; it needs x, y and subject")
    x, y, subject = arrays["x"].astype(np.float32), class_labels(arrays["y"], str(path)), arrays["subject"]
    if x.ndim != 3 or not len(x) == len(y) == len(subject):
        raise ValueError(
            f"{str(path)!r} must have x [S, 128, 9], y [S] and subject [S], not {x.shape}, {y.shape}, {subject.shape}"
        )
    return of_clients(
        {f"subject {person}": (x[subject == person], y[subject == person]) for person in np.unique(subject)},
        where=str(path),
        num_classes=6,
        name="uci_har",
        note="windows overlap by half, so that a test window may share values with training windows of the same subject",
        published="the data set has 30 subjects",
    )


def convert_uci_har(archive: str | os.PathLike, out: str | os.PathLike) -> None:
    """Writes the `.npz` of `uci_har` from the archive of the UCI Machine Learning Repository.

    The archive of the page holds another, `UCI HAR Dataset.zip`; either is taken. Windows stand in the order of the files, those
    of the training subjects first.

    Raises:
      ValueError: no such file, no such archive, or one without the inertial signals.
    """
    checks.writable("out", out, endings=(".npz",))
    shown = repr(os.fspath(archive))
    try:
        with zipfile.ZipFile(archive) as outer:
            inner = next((name for name in outer.namelist() if name.endswith("UCI HAR Dataset.zip")), None)
            if inner is None:
                arrays = _har_arrays(outer)
            else:
                with zipfile.ZipFile(io.BytesIO(outer.read(inner))) as nested:
                    arrays = _har_arrays(nested)
    except FileNotFoundError:
        raise ValueError(f"there is no file {shown}: download it from {UCI_HAR_PAGE}") from None
    except zipfile.BadZipFile:
        raise ValueError(f"{shown} is no zip archive, or it was cut off: download it again from {UCI_HAR_PAGE}") from None
    except KeyError as error:
        raise ValueError(f"{shown} is not the archive of UCI HAR: {checks.first_line(error)}") from None
    file = io.BytesIO()
    named: dict[str, Any] = dict(arrays)
    np.savez_compressed(file, **named)
    disk.replace(Path(out), [file.getbuffer()])


def _har_arrays(archive: zipfile.ZipFile) -> dict[str, np.ndarray]:
    root = "UCI HAR Dataset"

    def table(name: str) -> np.ndarray:
        return np.loadtxt(io.BytesIO(archive.read(f"{root}/{name}")), ndmin=2)

    parts = []
    for part in ("train", "test"):
        signals = [table(f"{part}/Inertial Signals/{signal}_{part}.txt") for signal in _SIGNALS]
        x = np.stack(signals, -1).astype(np.float32)
        y, subject = (table(f"{part}/{name}_{part}.txt")[:, 0].astype(np.int32) - 1 for name in ("y", "subject"))
        parts.append((x, y, subject))
    return {name: np.concatenate(values) for name, values in zip(("x", "y", "subject"), zip(*parts, strict=True), strict=True)}


def ratings(path: str | os.PathLike, *, least: int = 20) -> Natural:
    """Ratings of items by users, e.g. of MovieLens (`ratings.csv`, `u.data`, `ratings.dat`); a user is a client.

    Inputs are a dict with `item`, int32 `[S]`, places in `vocabulary`; targets are the ratings, float32 `[S]`. Samples are in
    the order of time where the file has a fourth column.

    Args:
      path: lines of user, item, rating and maybe a time, separated by commas, tabs or `::`, with or without a line of names.
      least: fewest ratings of a user; other users are left out.

    Raises:
      ValueError: no such file, a line that is cut off or has no numbers (with its number), no user with so many ratings.
    """
    checks.count("least", least, least=4)
    shown = repr(os.fspath(path))
    if not os.path.isfile(path):
        raise ValueError(
            f"there is no file {shown}: download a MovieLens archive from https://grouplens.org/datasets/movielens/"
        )
    users: dict[str, list[tuple[float, str, float]]] = {}
    try:
        for number, fields in enumerate(_table(path), 1):
            if not any(fields) or (number == 1 and not any(map(_is_number, fields))):
                continue
            if len(fields) < 3 or not all(_is_number(field) and math.isfinite(float(field)) for field in fields[2:4]):
                raise ValueError(
                    f"line {number} of {shown} must be user, item, rating and maybe a time, not {checks.shown(fields)}"
                )
            time = float(fields[3]) if len(fields) > 3 else float(number)
            users.setdefault(fields[0], []).append((time, fields[1], float(fields[2])))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{shown} is no table in UTF-8: {checks.first_line(error)}") from None
    kept = {user: sorted(rows, key=lambda row: row[0]) for user, rows in users.items() if len(rows) >= least}
    if not kept:
        raise ValueError(f"no user of {shown} has {least} ratings")
    items = sorted({item for rows in kept.values() for _, item, _ in rows}, key=lambda item: (len(item), item))
    place = {item: i for i, item in enumerate(items)}
    clients = {
        f"user {user}": (
            {"item": np.array([place[item] for _, item, _ in rows], np.int32)},
            np.array([rating for _, _, rating in rows], np.float32),
        )
        for user, rows in kept.items()
    }
    return of_clients(
        clients,
        where=shown,
        num_classes=0,
        name=Path(path).stem,
        note=f"users with at least {least} ratings, {len(kept)} of {len(users)}; {len(items)} items",
        published="MovieLens 100K has 943 users, 1M has 6,040",
        ordered=True,
        vocabulary=tuple(items),
    )


def _table(path: str | os.PathLike) -> Iterator[list[str]]:
    """The fields of each line, between commas, tabs or `::`."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        file.seek(0)
        if "::" in first:
            yield from (line.rstrip("\r\n").split("::") for line in file)
        else:
            yield from csv.reader(file, delimiter="\t" if "\t" in first else ",")


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


class Known(NamedTuple):
    """A data set that is known by name.

    Attributes:
      read: its reader; keyword arguments are options.
      place: the file or folder in the data folder that is the reader's first argument; a reader with none takes `data_dir`.
    """

    read: Callable[..., Natural]
    place: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """What a caller may choose."""
        parameters = inspect.signature(self.read).parameters.values()
        hidden = ("data_dir", "download", "published", "kind")
        return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in hidden)

    def load(self, data_dir: str | os.PathLike | None = None, **options: Any) -> Natural:
        """Reads it from a data folder."""
        if not self.place:
            return self.read(data_dir=data_dir, **options)
        return self.read(data_folder(data_dir) / self.place, **options)


NATURAL: dict[str, Known] = {
    "tiny_shakespeare": Known(tiny_shakespeare),
    "uci_har": Known(uci_har),
    "movielens": Known(ratings, "movielens/ratings.csv"),
    "leaf_femnist": Known(partial(read_leaf, kind="femnist"), "leaf/femnist"),
    "leaf_shakespeare": Known(partial(read_leaf, kind="shakespeare"), "leaf/shakespeare"),
    "leaf_sent140": Known(partial(read_leaf, kind="sent140"), "leaf/sent140"),
    "leaf_synthetic": Known(partial(read_leaf, kind="synthetic"), "leaf/synthetic"),
    "fedjax_shakespeare": Known(read_fedjax_sqlite, "fedjax/shakespeare_train.sqlite"),
    "tff_shakespeare": Known(read_tff_hdf5, "tff/shakespeare_train.h5"),
    "pfllib": Known(read_pfllib, "pfllib"),
}
"""Data sets with natural clients, by name; each says how to get it if it is not there."""


def load_natural(name: str, *, data_dir: str | os.PathLike | None = None, **options: Any) -> Natural:
    """Loads a data set with natural clients by name, one of `NATURAL`.

    Args:
      name: of the set.
      data_dir: see `sources.load`.
      **options: of its reader.

    Raises:
      ValueError: an unknown name or option, data that are not there, and what the reader refuses.
    """
    checks.one_of("name", name, NATURAL)
    check_options(name, options)
    return NATURAL[name].load(data_dir, **options)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises `ValueError` for an option that the reader of a data set does not take."""
    for option in options:
        checks.one_of(f"option of {name}", option, NATURAL[name].options)


HELP = """\
Writes a set whose clients are people in the form in which it is read.

Examples:
  python -m fedjax_meta.data.natural_sets uci_har har.zip uci_har/uci_har.npz
  python -m fedjax_meta.data.natural_sets uci_har --help
"""
"""What `python -m fedjax_meta.data.natural_sets --help` begins with."""


def main(arguments: list[str]) -> None:
    """The command `python -m fedjax_meta.data.natural_sets`."""
    prog, shape = "python -m fedjax_meta.data.natural_sets", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=HELP, formatter_class=shape, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    har = commands.add_parser("uci_har", help="write the .npz of UCI HAR from its archive")
    har.add_argument("archive", help="the .zip of the UCI repository")
    har.add_argument("out", help="the .npz to write")
    given = parser.parse_args(arguments)
    try:
        convert_uci_har(given.archive, given.out)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
