"""Few-shot episodes as clients: N classes, K samples of each to adapt on, more of each to be judged by.

Axis letters: M samples of the data set.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from fedjax_meta import checks
from fedjax_meta.data import samples
from fedjax_meta.data.builders import from_partition
from fedjax_meta.data.federated import FederatedData
from fedjax_meta.data.partition import check_labels


def episodes(
    x: Any,
    y: ArrayLike,
    num_clients: int,
    *,
    ways: int = 5,
    shots: int = 1,
    queries: int = 15,
    classes: Sequence[int] | None = None,
    seed: int | np.random.Generator,
    **options: Any,
) -> FederatedData:
    """N-way K-shot episodes from any labelled samples, each a client (Vinyals et al. 2016; Finn, Abbeel, Levine 2017).

    A client draws `ways` classes, called 0, 1, ... in the order drawn, and `shots + queries` samples of each. Clients that
    train and new ones have nothing in common where their `classes` do not. The same sample may be in several episodes.

    Args:
      x: inputs `[M, ...]`, an array or a tree of arrays.
      y: int `[M]`, labels.
      num_clients: number of episodes.
      ways: classes of an episode.
      shots: samples of a class in the view "support". They alternate by class, so that the first `s * ways` are s shots.
      queries: samples of a class in the view "query"; the view "train" has both.
      classes: labels to draw from; all when not given.
      seed: an integer or a NumPy generator.
      **options: `offset`, `scale` and `num_ids` of `from_partition`.

    Raises:
      ValueError: fewer classes than `ways`, a class of too few samples.

    Example:
      >>> x, y = np.arange(60.0)[:, None], np.arange(60) % 6
      >>> data = episodes(x, y, 4, ways=3, shots=2, queries=5, seed=0)
      >>> data.num_clients, data.num_classes, data.sizes("support").tolist(), data.y[:6].tolist()
      (4, 3, [6, 6, 6, 6], [0, 1, 2, 0, 1, 2])
    """
    checks.options("episodes", options, ["offset", "scale", "num_ids"], {})
    for name, value in (("num_clients", num_clients), ("shots", shots), ("queries", queries)):
        checks.count(name, value)
    checks.count("ways", ways, least=2)
    checks.seed("seed", seed)
    x, labels = samples.to_arrays("x", x), check_labels(y)
    if samples.length(x) != len(labels):
        raise ValueError(f"there are {samples.length(x)} inputs and {len(labels)} labels")
    known = np.unique(labels)
    chosen = known if classes is None else np.unique(checks.numeric("classes", list(classes), integers=True))
    missing = np.setdiff1d(chosen, known)
    if missing.size:
        raise ValueError(f"classes name class {missing[0]}, which has no samples")
    if len(chosen) < ways:
        raise ValueError(f"ways={ways} is more than the {len(chosen)} classes to draw from")
    each = shots + queries
    members = {label: np.flatnonzero(labels == label) for label in chosen}
    for label, where in members.items():
        if len(where) < each:
            raise ValueError(f"class {label} has {len(where)} samples, fewer than the {shots} shots and {queries} queries")
    rng = np.random.default_rng(seed)
    order = np.empty((num_clients, each, ways), np.int64)
    for client in range(num_clients):
        for way, label in enumerate(rng.choice(chosen, ways, replace=False)):
            order[client, :, way] = rng.choice(members[label], each, replace=False)
    sizes = np.full(num_clients, each * ways)
    cut = np.full(num_clients, shots * ways)
    views = {"train": (0 * cut, sizes), "support": (0 * cut, cut), "query": (cut, sizes)}
    taken = jax.tree.map(lambda leaf: leaf[order.ravel()], x)
    own = np.tile(np.arange(ways), num_clients * each)
    return from_partition(taken, own, np.arange(order.size), sizes, num_classes=ways, views=views, **options)
