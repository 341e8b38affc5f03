"""Clients and samples that are kept out of training, for tests on new clients and for the choice of hyper-parameters."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from fedjax_meta import checks
from fedjax_meta.data.builders import bounds, nested_views
from fedjax_meta.data.federated import FederatedData

Runs = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""(first sample, number of samples) of each view, `[N]` each."""


def with_views(data: FederatedData, views: Runs) -> FederatedData:
    """The same clients with other views `[N]`; no sample is copied."""
    return dataclasses.replace(
        data,
        start={name: start.astype(np.int32) for name, (start, _) in views.items()},
        size={name: size.astype(np.int32) for name, (_, size) in views.items()},
        **bounds({name: size for name, (_, size) in views.items()}),
    )


def as_population(data: FederatedData, clients: np.ndarray) -> FederatedData:
    """Some clients as a population of their own, with ids from 0; no sample is copied.

    Args:
      data: clients.
      clients: int `[N']`, positions.
    """
    views = {name: (np.asarray(data.start[name])[clients], np.asarray(data.size[name])[clients]) for name in data.views}
    return dataclasses.replace(with_views(data, views), ids=None, population=None)


def held_out(num_clients: int, share: float, seed: int | np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(the clients that `new_clients` holds out, those that train), int `[...]` each, in their order."""
    rng = np.random.default_rng(seed)
    if num_clients < 20 and not isinstance(seed, np.random.Generator):
        # Partitions draw from the same seed, and a deck of as few cards would be dealt in the same order.
        rng = np.random.default_rng([seed, num_clients])
    order = rng.permutation(num_clients)
    count = round(share * num_clients)
    return np.sort(order[:count]), np.sort(order[count:])


def new_clients(
    data: FederatedData, share: float, *, support: float = 0.2, seed: int | np.random.Generator
) -> tuple[FederatedData, FederatedData | None]:
    """Holds out a random share of the clients, who never train.

    Args:
      data: clients with the views of `train_test_views`.
      share: of the clients, in [0, 1), rounded to a whole number.
      support: share of a new client's samples to adapt on.
      seed: of the draw, or a NumPy generator.

    Returns:
      (the clients that train, the new ones with the views "support" and "query"; `None` if there are none).

    Raises:
      ValueError: a share out of range, no client left to train, a client whose test samples do not follow its training samples.
    """
    checks.share("share", share)
    checks.fraction("support", support)
    checks.seed("seed", seed)
    count = round(share * data.num_clients)
    if count == 0:
        return data, None
    if count == data.num_clients:
        raise ValueError(
            f"{share:g} of N={data.num_clients} clients held out as new ones (share, or new of a scenario) leaves none"
        )
    # A new client's samples are one run, which must not reach into those of others.
    end = np.asarray(data.sizes("train")) + np.asarray(data.start["train"])
    gap = (np.asarray(data.sizes("test")) > 0) & (end != np.asarray(data.start["test"]))
    if gap.any():
        raise ValueError(
            f"the test samples of client {int(np.argmax(gap))} do not follow its training samples, as those of "
            "train_test_views do: new clients cannot be made of them"
        )
    held, rest = held_out(data.num_clients, share, seed)
    new = as_population(data, held)
    start, size = new.start["train"], np.asarray(new.size["train"]) + np.asarray(new.size["test"])
    first = np.clip((size * support + 1e-9).astype(np.int32), 1, np.maximum(size - 1, 1))
    views = {"support": (np.asarray(start), first), "query": (np.asarray(start) + first, size - first)}
    return as_population(data, rest), with_views(new, views)


def validation_samples(data: FederatedData, share: float, *, support: float = 0.2, scored: str = "test") -> FederatedData:
    """The same clients without their test samples: the last `share` of each train view is what they are tested on.

    Where a client has a single one of these, there are no views "test_support" and "test_query"; where a single sample is left
    for its training, there are no views "support" and "query".

    Args:
      data: clients with the view "train".
      share: of a client's train samples, in (0, 1); at least one sample, and at least one stays for training, two if there are
        enough.
      support: share of each part for adaptation.
      scored: the view that clients are scored on: "test", or "test_query", for which at least two samples are held back.

    Raises:
      ValueError: a share out of range, a client with too few train samples.
    """
    checks.fraction("share", share)
    checks.one_of("scored", scored, ("test", "test_query"))
    size, start = np.asarray(data.sizes("train")), np.asarray(data.start["train"])
    least = 2 if scored == "test_query" else 1
    if size.min() <= least:
        raise ValueError(
            f"client {int(size.argmin())} has {size.min()} train samples: validation on {scored!r} needs at least {least + 1}"
        )
    held = np.clip((size * share + 1e-9).astype(np.int64), least, np.maximum(size - 2, least))
    left = (size - held).astype(np.int64)
    bounds = nested_views(left, held, support=support)
    # A single sample cannot be adapted to and scored.
    for count, halves in ((held, ("test_support", "test_query")), (left, ("support", "query"))):
        if count.min() < 2:
            bounds = {name: ends for name, ends in bounds.items() if name not in halves}
    return with_views(data, {name: (start + begin, end - begin) for name, (begin, end) in bounds.items()})
