"""fedjax_meta: federated meta-learning and personalised federated learning in JAX, with clients as an array axis.

The usual way in: a task (`classification`, `models`), federated data (`from_clients`), a method (`fedmeta_per`), and `simulate`
and `evaluate`. A `Federation` says how rounds are run. Importing the package changes no setting of JAX; `use_all_cores` does.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from fedjax_meta import (
    adaptation,
    aggregate,
    algorithm,
    attacks,
    builders,
    checks,
    contract,
    costs,
    data,
    engine,
    evaluation,
    features,
    federation,
    host_store,
    implicit,
    keys,
    local,
    lora,
    masks,
    measures,
    meta,
    methods,
    metrics,
    multistep,
    participation,
    privacy,
    rates,
    rounds,
    runtime,
    schedules,
    simulation,
    sweeps,
    task,
    tasks,
    types,
    uploads,
)
from fedjax_meta.algorithm import Algorithm, RoundInfo, State
from fedjax_meta.builders import described, method_builder, variant
from fedjax_meta.contract import Cohort, Collaboration, Method, Population, Received, Reduction, Trained, received_model
from fedjax_meta.data import FederatedData, from_clients, from_partition, train_test_views
from fedjax_meta.evaluation import Evaluation, evaluate, with_user_accuracy
from fedjax_meta.federation import Federation
from fedjax_meta.measures import Metric
from fedjax_meta.methods import *  # noqa: F403
from fedjax_meta.participation import Participation
from fedjax_meta.rounds import federate
from fedjax_meta.runtime import use_all_cores
from fedjax_meta.simulation import Evaluator, Record, simulate
from fedjax_meta.sweeps import sweep
from fedjax_meta.task import Batch, Task, Weighted, classification
from fedjax_meta.tasks import from_loss, multi_label, next_token, regression

if TYPE_CHECKING:
    from fedjax_meta import checkpoint, export, layers, models, report, study
    from fedjax_meta.models import from_equinox, from_functions, from_linen, from_nnx

__version__ = "0.1.0"

_ON_DEMAND = ("checkpoint", "export", "layers", "models", "report", "study")
"""Modules that are imported when they are first used: they need Flax or an extra."""

_MODEL_BUILDERS = ("from_equinox", "from_functions", "from_linen", "from_nnx")
"""Functions of `models` that are imported when they are first used."""

__all__ = [
    "Algorithm",
    "Batch",
    "Cohort",
    "Collaboration",
    "Evaluation",
    "Evaluator",
    "FederatedData",
    "Federation",
    "Method",
    "Metric",
    "Participation",
    "Population",
    "Received",
    "Record",
    "Reduction",
    "RoundInfo",
    "State",
    "Task",
    "Trained",
    "Weighted",
    "__version__",
    "adaptation",
    "aggregate",
    "algorithm",
    "attacks",
    "builders",
    "checkpoint",
    "checks",
    "classification",
    "contract",
    "costs",
    "data",
    "engine",
    "evaluate",
    "evaluation",
    "export",
    "features",
    "federate",
    "federation",
    "from_clients",
    "from_equinox",
    "from_functions",
    "from_linen",
    "from_loss",
    "from_nnx",
    "from_partition",
    "host_store",
    "implicit",
    "keys",
    "layers",
    "local",
    "lora",
    "masks",
    "measures",
    "meta",
    "method_builder",
    "methods",
    "metrics",
    "models",
    "multi_label",
    "multistep",
    "next_token",
    "participation",
    "privacy",
    "rates",
    "received_model",
    "regression",
    "report",
    "rounds",
    "runtime",
    "schedules",
    "simulate",
    "simulation",
    "study",
    "sweep",
    "sweeps",
    "task",
    "tasks",
    "train_test_views",
    "types",
    "uploads",
    "use_all_cores",
    "variant",
    "with_user_accuracy",
]
__all__ += methods.__all__


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return importlib.import_module(f"fedjax_meta.{name}")
    if name in _MODEL_BUILDERS:
        return getattr(importlib.import_module("fedjax_meta.models"), name)
    # With these two, Python says which name may be meant.
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted(__all__)
