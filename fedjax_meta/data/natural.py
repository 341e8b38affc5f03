"""Data sets whose clients are given: speakers, subjects, users. Each reader makes a `Natural`.

Axis letters: N clients, S samples, T tokens of a sequence, K classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_meta import checks
from fedjax_meta.data import runs
from fedjax_meta.data.builders import from_partition, nested_views
from fedjax_meta.data.federated import FederatedData
from fedjax_meta.types import PyTree

LEAST = 5
"""Fewest samples of a natural client in a study: 3 of them train and 2 are for tests, so that each view has one."""

LEAST_OF_SPLIT = 2
"""Fewest samples of a client in a part of a given split: one adapts, or is held back, and one is left."""

_NAMED = 5
"""How many of the clients that are left out are named."""


def decoded(words: Any) -> str:
    """Words, or their bytes in UTF-8, as text; bytes that are no UTF-8 as `\\xff`, so that names stay apart."""
    return words.decode(errors="backslashreplace") if isinstance(words, bytes) else str(words)


def class_labels(y: Any, where: str) -> np.ndarray:
    """Class labels as int32; whole numbers of any type.

    Raises:
      ValueError: other values, and labels below 0 or too large; int32 would make other labels of them.
    """
    y = np.asarray(y)
    if not checks.is_real(y.dtype) or (y.size and not (np.isfinite(y) & (y == np.floor(y))).all()):
        raise ValueError(f"{where} has targets that are no class labels ({y.dtype})")
    if y.size and not 0 <= y.min() <= y.max() < checks.MOST_CLASSES:
        raise ValueError(f"{where} has labels from {y.min()} to {y.max()}, but they must lie in [0, {checks.MOST_CLASSES})")
    return y.astype(np.int32)


def left_out(names: Sequence[str], of: int, samples: int, *, split: bool = False) -> str:
    """Says which clients are left out, with fewer samples, or too few in a part of a given split; empty if none are."""
    if not names:
        return ""
    one, parts = len(names) == 1, f", or than {LEAST_OF_SPLIT} in a part of their split," if split else ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"{len(names)} of {of} clients {'has' if one else 'have'} fewer than {samples} samples{parts} and "
        f"{'is' if one else 'are'} left out ({', '.join(names[:_NAMED])}{more})"
    )


class Natural(NamedTuple):
    """The samples of all clients, one client after the other.

    Attributes:
      x: inputs `[S, ...]`, an array or a pytree of arrays.
      y: targets `[S, ...]`.
      sizes: int64 `[N]`, samples of each client.
      clients: N names.
      num_classes: K; 0 for real targets.
      name: of the data set.
      train_sizes: int64 `[N]`, how many of a client's samples, the first ones, are its training part where the data set says so;
        `None` if it does not.
      note: one line that belongs next to results on these data.
      published: how many clients the papers have that use it, one line; empty if there are none.
      ordered: whether the order of a client's samples means something (time), so that they are not shuffled.
      vocabulary: what each token stands for; empty if inputs are no tokens.
    """

    x: PyTree
    y: np.ndarray
    sizes: np.ndarray
    clients: tuple[str, ...]
    num_classes: int
    name: str
    train_sizes: np.ndarray | None = None
    note: str = ""
    published: str = ""
    ordered: bool = False
    vocabulary: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line: how many clients and samples, and how many clients the papers have."""
        sizes = f"{self.sizes.min()} to {self.sizes.max()} each"
        published = f"; {self.published}" if self.published else ""
        return f"{self.name}: {len(self.sizes)} clients, {self.sizes.sum()} samples, {sizes}{published}"

    def at_least(self, samples: int, *, most_clients: int | None = None) -> "Natural":
        """The clients that have at least so many samples, the first `most_clients` of them; the note says who is left out.

        Where the data set has a split of its own, they have at least 2 in each of its parts, too, as `federated` needs.

        Raises:
          ValueError: counts below 1, or no client that has so many.
        """
        checks.count("samples", samples)
        if most_clients is not None:
            checks.count("most_clients", most_clients)
        enough = self.sizes >= samples
        if self.train_sizes is not None:
            enough &= np.minimum(self.train_sizes, self.sizes - self.train_sizes) >= LEAST_OF_SPLIT
        kept = np.flatnonzero(enough)[:most_clients]
        if not len(kept):
            parts = "" if self.train_sizes is None else f" and {LEAST_OF_SPLIT} in each part of its split"
            raise ValueError(f"no client of {self.name} has {samples} samples{parts}; the largest has {self.sizes.max()}")
        few = [self.clients[i] for i in np.flatnonzero(~enough)]
        out = left_out(few, len(enough), samples, split=self.train_sizes is not None)
        rows = runs.positions((np.cumsum(self.sizes) - self.sizes)[kept], self.sizes[kept])
        return self._replace(
            x=jax.tree.map(lambda leaf: leaf[rows], self.x),
            y=self.y[rows],
            sizes=self.sizes[kept],
            clients=tuple(self.clients[i] for i in kept),
            note="; ".join(filter(None, [self.note, out])),
            train_sizes=None if self.train_sizes is None else self.train_sizes[kept],
        )

    def federated(self, *, test: float = 0.25, support: float = 0.2, seed: int = 0) -> FederatedData:
        """The clients as federated data with the views of `train_test_views`.

        Args:
          test: share of a client's samples that test it, where the data set has no split of its own.
          support: share of the training and of the test part for adaptation.
          seed: of the shuffle of each client's samples, unless their order means something.

        Raises:
          ValueError: a client with too few samples for four views (use `at_least`), a share out of range.
        """
        checks.fraction("test", test)
        checks.fraction("support", support)
        checks.seed("seed", seed)
        given = self.train_sizes
        if self.sizes.min() < 4:
            client = int(np.argmin(self.sizes))
            raise ValueError(
                f"client {self.clients[client]!r} of {self.name} has {self.sizes[client]} samples, but 2 train and 2 are for "
                "tests: take at_least(samples)"
            )
        cut = np.clip((self.sizes * (1 - test) + 1e-9).astype(np.int64), 2, self.sizes - 2)
        train = cut if given is None else given
        short = np.minimum(train, self.sizes - train) < 2
        if short.any():
            client = int(np.argmax(short))
            raise ValueError(
                f"client {self.clients[client]!r} of {self.name} has {train[client]} training and "
                f"{self.sizes[client] - train[client]} test samples; each part needs 2: take at_least(samples)"
            )
        order = self._order(given, seed)
        views = nested_views(train, self.sizes - train, support=support)
        return from_partition(self.x, self.y, order, self.sizes, num_classes=self.num_classes, views=views)

    def _order(self, given: np.ndarray | None, seed: int) -> np.ndarray:
        """Samples in random order, each in the part in which a given split has it."""
        order = np.arange(int(self.sizes.sum()))
        if self.ordered:
            return order
        rng = np.random.default_rng(seed)
        cuts = np.zeros_like(self.sizes) if given is None else given
        for first, size, cut in zip(np.cumsum(self.sizes) - self.sizes, self.sizes, cuts, strict=True):
            for begin, end in ((first, first + cut), (first + cut, first + size)):
                order[begin:end] = begin + rng.permutation(end - begin)
        return order


def of_clients(
    clients: Mapping[str, tuple[Any, np.ndarray]] | Sequence[tuple[str, Any, np.ndarray]], *, where: str, **fields: Any
) -> Natural:
    """A `Natural` from (x, y) of each client.

    Args:
      clients: by name, or as (name, x, y).
      where: what was read, for messages.
      **fields: of `Natural`.

    Raises:
      ValueError: no client, two of one name, a client without samples, inputs and targets of different number, clients of
        different shape.
    """
    rows = [(name, *pair) for name, pair in clients.items()] if isinstance(clients, Mapping) else list(clients)
    if not rows:
        raise ValueError(f"{where} has no clients")
    wanted, seen = None, set[str]()
    for name, x, y in rows:
        if name in seen:
            raise ValueError(f"client {name!r} is in {where} twice")
        seen.add(name)
        count = {len(leaf) for leaf in jax.tree.leaves((x, y))}
        if count == {0}:
            raise ValueError(f"client {name!r} of {where} has no samples")
        if len(count) > 1:
            raise ValueError(f"client {name!r} of {where} has {len(jax.tree.leaves(x)[0])} inputs and {len(y)} targets")
        form = [leaf.shape[1:] for leaf in jax.tree.leaves((x, y))]
        wanted = form if wanted is None else wanted
        if form != wanted:
            raise ValueError(
                f"client {name!r} of {where} has samples of shape {form}, but those of {rows[0][0]!r} have {wanted}"
            )
    return Natural(
        x=jax.tree.map(lambda *leaves: np.concatenate(leaves), *[x for _, x, _ in rows]),
        y=np.concatenate([y for _, _, y in rows]),
        sizes=np.array([len(y) for _, _, y in rows], np.int64),
        clients=tuple(str(name) for name, _, _ in rows),
        **fields,
    )
