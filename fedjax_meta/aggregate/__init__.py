"""Aggregation of the clients' uploads: weighted means, robust rules and mixtures.

Means are running sums, so that uploads are never stacked. Robust rules and mixtures need the trees of all clients at once. A rule
is a plain function of stacked uploads and weights, or a `Rule`, which may have a key, a memory and a reference.
"""

from fedjax_meta.aggregate.bounded import centered_clipping, fltrust, norm_bounding
from fedjax_meta.aggregate.distances import bulyan, geometric_median, krum, multi_krum
from fedjax_meta.aggregate.means import (
    WEIGHTINGS,
    Ratio,
    WeightedSum,
    client_weight,
    in_total,
    mean,
    of_units,
    per_unit,
    sum_clients,
    units,
    weigh,
)
from fedjax_meta.aggregate.mixtures import combine
from fedjax_meta.aggregate.pre_aggregation import bucketing, nearest_neighbours
from fedjax_meta.aggregate.ranks import median, trimmed_mean
from fedjax_meta.aggregate.registry import RULES, WRAPPERS, parse
from fedjax_meta.aggregate.rule import Aggregator, Rule, as_rule

__all__ = [
    "RULES",
    "WEIGHTINGS",
    "WRAPPERS",
    "Aggregator",
    "Ratio",
    "Rule",
    "WeightedSum",
    "as_rule",
    "bucketing",
    "bulyan",
    "centered_clipping",
    "client_weight",
    "combine",
    "fltrust",
    "geometric_median",
    "in_total",
    "krum",
    "mean",
    "median",
    "multi_krum",
    "nearest_neighbours",
    "norm_bounding",
    "of_units",
    "parse",
    "per_unit",
    "sum_clients",
    "trimmed_mean",
    "units",
    "weigh",
]
