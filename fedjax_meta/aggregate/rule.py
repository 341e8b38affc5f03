"""What an aggregator is: a plain function of the stacked uploads, or a `Rule` with a key, a memory or a reference."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fedjax_meta import checks
from fedjax_meta.data import ClientData
from fedjax_meta.types import Key, PyTree

Aggregator = Callable[[PyTree, jax.Array], PyTree]
"""`(stacked uploads, leaves [C, ...], weights [C]) -> one tree`. A client whose weight is not above 0 must have no effect."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Rule:
    """An aggregator that needs more than the uploads of this round.

    It is applied to each part of an upload that has a weight of its own: the model's part, and each such part of the statistics.
    The rows of clients that did not return are 0.

    Attributes:
      combine: `(key, stacked [C, ...], weights [C], memory, reference) -> (tree, memory)`. A client whose weight is not above 0
        must have no effect.
      init: `upload -> memory`, from the shapes of a part of an upload.
      root: samples of the server, on which it runs the method's client rule; the resulting upload is the `reference`, which is
        `None` without root samples, and for what upload transformations measure.
      differences: whether the rule is about how much an upload changes, so that clients send by how much buffers moved instead of
        their values. Asynchronous schedules, which weigh changes by their staleness first, refuse such a rule.
      name: for messages and records.
      config: hyper-parameters, for the record of a run.
    """

    combine: Callable[[Key, PyTree, jax.Array, PyTree, PyTree], tuple[PyTree, PyTree]]
    init: Callable[[PyTree], PyTree] = lambda upload: ()
    root: ClientData | None = None
    differences: bool = False
    name: str = "rule"
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def plain(cls, function: Aggregator) -> "Rule":
        """A rule that needs no key, memory or reference."""
        name = getattr(getattr(function, "func", function), "__name__", "rule").replace("<lambda>", "rule")
        return cls(combine=lambda key, stacked, weight, memory, reference: (function(stacked, weight), memory), name=name)


def as_rule(aggregator: Aggregator | Rule) -> Rule:
    """A rule as it is, or one that calls a plain function.

    Raises:
      ValueError: neither.
    """
    if not isinstance(aggregator, Rule):
        checks.function("rule", aggregator, ("stacked", "weights"), "aggregate.median, or aggregate.trimmed_mean(0.1)")
    return aggregator if isinstance(aggregator, Rule) else Rule.plain(aggregator)
