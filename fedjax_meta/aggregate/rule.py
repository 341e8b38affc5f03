"""What an aggregator is: a plain function of the stacked uploads, or a `Rule` with a key, a memory or a reference."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fedjax_meta.data import ClientData
from fedjax_meta.types import Key, PyTree

Aggregator = Callable[[PyTree, jax.Array], PyTree]
"""`(stacked uploads, leaves [C, ...], weights [C]) -> one tree`. A client whose weight is not above 0 must have no effect."""


def nothing(upload: PyTree) -> PyTree:
    """The memory of a rule that keeps nothing."""
    del upload
    return ()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Rule:
    """An aggregator that needs a key, a memory or a reference.

    Attributes:
      name: for messages and records.
      combine: `(key, stacked uploads [C, ...], weights [C], memory, reference) -> (tree, memory)`. A client whose weight is not
        above 0 must have no effect.
      init: `upload -> memory`, the first memory, from one upload or its shapes.
      root: samples of the server's own. The server trains on them by the method's client rule in every round, and what it would
        upload is the `reference`; `None` without.
      differences: whether the rule is about how much an upload changes, so that buffers and statistics must be sent as
        differences from what the server has.
      config: hyper-parameters, for the record of a run.
    """

    name: str
    combine: Callable[[Key, PyTree, jax.Array, PyTree, PyTree], tuple[PyTree, PyTree]]
    init: Callable[[PyTree], PyTree] = nothing
    root: ClientData | None = None
    differences: bool = False
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @staticmethod
    def plain(aggregator: Aggregator) -> "Rule":
        """The rule that calls a plain function."""
        name = getattr(aggregator, "__name__", type(aggregator).__name__)
        return Rule(name=name, combine=lambda key, stacked, weight, memory, reference: (aggregator(stacked, weight), memory))


def as_rule(aggregator: Aggregator | Rule) -> Rule:
    """A rule as it is, or one that calls a plain function."""
    return aggregator if isinstance(aggregator, Rule) else Rule.plain(aggregator)
