"""Ways to divide a data set among clients, by name: rules for one array of labels, the protocols of papers, and generators."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_meta import checks
from fedjax_meta.data import npz, partition, protocols, samples, sources, synthetic, targets
from fedjax_meta.data.natural import LEAST, LEAST_OF_SPLIT, decoded, left_out
from fedjax_meta.data.partition import Partition
from fedjax_meta.data.protocols import Protocol
from fedjax_meta.data.sources import Source
from fedjax_meta.data.targets import Targets


def _shards(labels: np.ndarray, num_clients: int, *, per_client: int = 2, seed: int) -> Partition:
    """Shards of samples sorted by class, some for each client (McMahan et al. 2017).

    Args:
      per_client: shards of a client.
    """
    assignment = partition.shard_assignment(num_clients, per_client=per_client, seed=seed)
    return partition.shards(labels, assignment, uneven=True)


def _classes(labels: np.ndarray, num_clients: int, *, per_client: int = 2, seed: int) -> Partition:
    """A few classes for each client, each class cut evenly among its clients.

    Args:
      per_client: classes of a client.
    """
    classes = np.unique(labels)  # some sets count from 1, and some classes may have no sample
    count = len(classes)
    checks.count("per_client", per_client)
    if per_client > count:
        raise ValueError(f"per_client={per_client} is more than the K={count} classes")
    rng = np.random.default_rng(seed)
    # Every class is dealt out before one comes again, so that all classes have clients.
    deck = np.concatenate([rng.permutation(count) for _ in range(-(-num_clients * per_client // count) + per_client)])
    held: list[list[int]] = []
    first = 0
    for _ in range(num_clients):
        mine: list[int] = []
        while first < len(deck) and deck[first] < 0:
            first += 1
        for card in range(first, len(deck)):
            if deck[card] >= 0 and deck[card] not in mine:
                mine.append(int(deck[card]))
                deck[card] = -1
                if len(mine) == per_client:
                    break
        held.append(mine)
    parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for number, label in enumerate(classes.tolist()):
        owners = [i for i, mine in enumerate(held) if number in mine]
        if owners:
            have = int(np.sum(labels == label))
            if have < len(owners):
                raise ValueError(
                    f"class {label} has {have} samples for {len(owners)} clients: take fewer clients or a smaller per_client"
                )
            samples = rng.permutation(np.flatnonzero(labels == label))
            for owner, piece in zip(owners, np.array_split(samples, len(owners)), strict=True):
                parts[owner].append(piece)
    order = [np.concatenate(pieces) for pieces in parts]
    return Partition(np.concatenate(order), np.array([len(piece) for piece in order]))


PARTITIONS: dict[str, Callable[..., Partition]] = {
    "iid": partition.iid,
    "shards": _shards,
    "classes": _classes,
    "dirichlet_classes": partition.dirichlet_classes,
    "dirichlet_clients": partition.dirichlet_clients,
    "quantity_skew": partition.quantity_skew,
}
"""Rules for the samples of both splits together: `(labels, num_clients, *, seed, ...) -> Partition`."""


def _iid(source: Source, *, seed: int = 1, num_clients: int = 50, train: float = 0.75, scaling: str | None = None) -> Protocol:
    """FedMeta-Per's control: IID clients of equal size; one client with `train=0.8` is its centralised training.

    Args:
      train: share of a client's samples in the view "train"; the others are its tests.
      scaling: of pixels, see `pixel_scaling`; if not given, `"half"` for CIFAR-10 and `"pixel"` otherwise.
    """
    data = protocols.fedmeta_per_iid_clients(source, seed=seed, num_clients=num_clients, train=train, scaling=scaling)
    return Protocol(data, None, f"{'IID clients' if num_clients > 1 else 'One client'} on {source.name}", source.note)


PAPERS: dict[str, Callable[..., Protocol]] = {
    "fedmeta_per": protocols.fedmeta_per_clients,
    "fedmeta_per_iid": _iid,
    "fl_imaml": protocols.fl_imaml_clients,
    "fedpac": protocols.fedpac_clients,
    "perfedavg_reptile": protocols.perfedavg_reptile_clients,
    "mtfl": protocols.mtfl_clients,
    "dealt_tests": protocols.dealt_tests_clients,
}
"""Clients as a paper draws them, with tests and new clients of their own: `(source, *, seed, num_clients, ...) -> Protocol`."""


def _synthetic(
    *, model_spread: float = 1.0, data_spread: float = 1.0, spread: str = "variance", num_clients: int = 30, seed: int = 1
) -> Protocol:
    """synthetic(δ, θ): by θ, how much the clients' inputs differ; δ changes nothing, see `synthetic.synthetic`."""
    share = protocols.REPTILE_SUPPORT
    data = synthetic.synthetic(model_spread, data_spread, seed=seed, num_clients=num_clients, spread=spread, support=share)
    return Protocol(protocols.on_device(data), None, f"synthetic({model_spread:g}, {data_spread:g})", support=share)


def _sinusoids(*, size: int = 40, noise: float = 0.0, num_clients: int = 100, seed: int = 1) -> Protocol:
    """A sine of its own for each client: few-shot regression (Finn, Abbeel, Levine 2017); no data set is needed."""
    data, _, _ = synthetic.sinusoids(num_clients, seed=seed, size=size, noise=noise)
    one_column = dataclasses.replace(data, y=data.y[:, None])
    return Protocol(protocols.on_device(one_column), None, f"sinusoids, {size} points each", support=0.5)


GENERATED: dict[str, Callable[..., Protocol]] = {"synthetic": _synthetic, "sinusoids": _sinusoids}
"""Clients that are generated, `(*, seed, num_clients, ...) -> Protocol`, by the name of the data set."""


def _all_finite(what: str, values: np.ndarray, owner: np.ndarray, shown: str) -> None:
    """Raises `ValueError` that names the first row of a file that is not finite, its client, and how many there are."""
    bad, kind = samples.lost(values) if values.dtype.kind == "f" else (None, "")
    if bad is None:
        return
    rows = np.flatnonzero(bad.reshape(len(values), -1).any(1))
    count, clients = int(bad.sum()), len(np.unique(owner[rows]))
    raise ValueError(
        f"{what} of client {owner[rows[0]]} in {shown} hold {kind}, first in row {rows[0]} of the file "
        f"(from 0); in all {count} value{'s' * (count > 1)} of {clients} client{'s' * (clients > 1)}"
    )


class Named(NamedTuple):
    """The clients that a file names.

    Attributes:
      source: all samples, in the order of the file.
      held: which of them each client has.
      clients: N names.
      note: how many clients were left out, and the first of their names; empty if none were.
      tests: bool `[M]`, which samples the file says are for tests; `None` if it does not.
    """

    source: Source | Targets
    held: Partition
    clients: tuple[str, ...]
    note: str
    tests: np.ndarray | None = None


def natural(path: str | os.PathLike, *, by: str = "client", min_samples: int = LEAST) -> Named:
    """The clients that an .npz file itself names, in a third array beside x and y.

    Args:
      path: of the file. Its array `split`, where it has one, says of each sample whether it is for "train" or for "test".
      by: the array with the client of each sample.
      min_samples: clients with fewer are left out; where the file has a split, so are those with one sample in a part of it.

    Raises:
      ValueError: another kind of data set, no such array, arrays of different length, another split, and whatever
        `partition.natural` refuses.
    """
    shown = repr(os.fspath(path))
    if not os.fspath(path).endswith(".npz"):
        raise ValueError(f"partition 'natural' needs an .npz that names the client of each sample, not the data set {shown}")
    arrays = npz.read(path)
    if not {"x", "y", by} <= set(arrays):
        raise ValueError(f"{shown} holds {', '.join(arrays)}; by={by!r} needs x, y and {by}")
    x, y, owner = arrays["x"], arrays["y"], arrays[by]
    if not x.ndim or not y.ndim:
        raise ValueError(f"x and y in {shown} must hold one entry a sample, not {list(x.shape)} and {list(y.shape)}")
    if owner.dtype.kind not in partition.IDS:
        hint = f"; {by}.astype(int) makes integers"
        if owner.dtype.kind == "f" and (owner != np.round(owner)).any():  # NaN differs from itself
            sample = int(np.argmax(owner.ravel() != np.round(owner.ravel())))
            hint = f": sample {sample} has {owner.ravel()[sample]}, which names no client"
        raise ValueError(f"{by} in {shown} must hold integers or strings, not {owner.dtype}{hint}")
    if owner.shape != y.shape[:1]:
        odd, least, others = ("y", y, f"x and {by} have") if owner.shape == x.shape[:1] else (by, owner, "y has")
        raise ValueError(
            f"{odd} has shape {list(least.shape)} in {shown}, but {others} {list(x.shape[:1] if odd == 'y' else y.shape)}: it "
            "needs one entry a sample"
        )
    _all_finite("inputs", x[: len(owner)], owner, shown)
    _all_finite("targets", y, owner, shown)
    source: Source | Targets | None = targets.read(path, arrays)
    if source is None:
        source = sources.in_order(x, y, name=Path(path).stem)
    tests = _tests(arrays["split"], len(owner), shown) if "split" in arrays else None
    held = partition.natural(owner, min_samples=min_samples)
    names, client, sizes = np.unique(owner, return_inverse=True, return_counts=True)
    kept = sizes >= min_samples
    if tests is not None:
        many = np.bincount(client, tests)
        kept &= np.minimum(many, sizes - many) >= LEAST_OF_SPLIT
        if not kept.any():
            raise ValueError(f"no client of {shown} has {min_samples} samples and {LEAST_OF_SPLIT} in each part of its split")
        held = Partition(held.order[kept[client[held.order]]], sizes[kept])
    shown_names = np.array([decoded(name) for name in names], object)
    out = left_out(shown_names[~kept].tolist(), len(names), min_samples, split=tests is not None)
    return Named(source, held, tuple(shown_names[kept]), out, tests)


def _tests(split: np.ndarray, samples: int, shown: str) -> np.ndarray:
    """Whether each sample is for tests, bool `[samples]`."""
    if split.shape != (samples,):
        raise ValueError(f"split has shape {list(split.shape)} in {shown}, but there are {samples} samples")
    words = {decoded(word) for word in np.unique(split).tolist()} if split.dtype.kind in "SU" else set[str]()
    odd = sorted(words - {"train", "test"})
    if odd or not words:
        found = f"holds {odd[0]!r}" if odd else f"is {split.dtype}"
        raise ValueError(f'split in {shown} must say "train" or "test" of each sample, but it {found}')
    return split == split.dtype.type("test" if split.dtype.kind == "U" else b"test")
