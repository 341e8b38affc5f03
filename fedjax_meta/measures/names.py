"""Metrics by name."""

import re
from collections.abc import Callable, Mapping, Sequence

from fedjax_meta import checks
from fedjax_meta.imports import imported
from fedjax_meta.measures.metric import CONFUSION, Metric
from fedjax_meta.measures.of_classes import (
    accuracy,
    auroc,
    calibration_error,
    confusion,
    f1,
    label_accuracy,
    perplexity,
    token_accuracy,
    top_k,
)
from fedjax_meta.measures.of_numbers import mae, r2, rmse

METRICS: Mapping[str, Callable[[int], Metric]] = {
    "accuracy": lambda classes: accuracy(),
    "token_accuracy": lambda classes: token_accuracy(),
    "label_accuracy": lambda classes: label_accuracy(),
    "perplexity": lambda classes: perplexity(),
    "f1": f1,
    "auroc": auroc,
    "calibration_error": lambda classes: calibration_error(),
    CONFUSION: confusion,
    "mae": lambda classes: mae(),
    "rmse": lambda classes: rmse(),
    "r2": lambda classes: r2(),
}
"""Metrics by name, made from the number of classes, or of labels a sample, of the data; beside these `top_5` and the like."""

_PER_CLASS = ("f1", "auroc", CONFUSION)


def resolve(given: Sequence[Metric | str], classes: int) -> tuple[Metric, ...]:
    """Metrics by their names or as they are.

    Args:
      given: names of `METRICS`, `top_` and a number, metrics, or where a metric is: "module:name".
      classes: K, or the number of labels a sample; 0 where there is neither.

    Raises:
      ValueError: an unknown name, two metrics of one name, a metric of classes where there are none, a module that cannot be
        imported or holds no such metric.
    """
    if isinstance(given, (str, Metric)) or not isinstance(given, Sequence):
        raise ValueError(
            f"metrics={checks.shown(given)} must be a tuple of metrics or their names, e.g. ('accuracy', 'top_5')"
        )
    found = []
    for one in given:
        if isinstance(one, Metric):
            found.append(one)
            continue
        if isinstance(one, str) and ":" in one:
            found.append(_imported(one))
            continue
        top = re.fullmatch(r"top_(\d{1,9})", one) if isinstance(one, str) else None
        if top is not None:
            found.append(top_k(int(top[1])))
            continue
        checks.one_of("metric", one, [*METRICS, "top_5"])
        if one in _PER_CLASS and classes == 0:
            raise ValueError(f"metric {one!r} needs classes, but the data have none (num_classes is 0): leave it out")
        found.append(METRICS[one](classes))
    names = [metric.name for metric in found]
    if len(set(names)) < len(names):
        raise ValueError(f"two metrics have the name {max(names, key=names.count)!r}: give one of them another name")
    return tuple(found)


def _imported(place: str) -> Metric:
    """The metric at "module:name"."""
    found = imported("metric", place)
    if not isinstance(found, Metric):
        raise ValueError(f"metric {place} must be a fm.Metric, not {checks.shown(found)}")
    return found
