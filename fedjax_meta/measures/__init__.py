"""What `evaluate` measures of each client: pure functions over its batches, from which one number a client follows.

A `Metric` starts from statistics of no sample, takes in batch after batch on the device, and ends with a score. Padding has
weight 0 and never counts. Letters: B batch, K classes or outputs; targets and outputs as in `task.Batch` and `Task.predict`.
"""

from fedjax_meta.measures.metric import CONFUSION, Metric, Score, begin, mean, update
from fedjax_meta.measures.names import METRICS, resolve
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

__all__ = [
    "CONFUSION",
    "METRICS",
    "Metric",
    "Score",
    "accuracy",
    "auroc",
    "begin",
    "calibration_error",
    "confusion",
    "f1",
    "label_accuracy",
    "mae",
    "mean",
    "perplexity",
    "r2",
    "resolve",
    "rmse",
    "token_accuracy",
    "top_k",
    "update",
]
