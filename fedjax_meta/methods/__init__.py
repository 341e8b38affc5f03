"""One file a paper. Each builder takes a task first, its hyper-parameters by name, and returns a `Method`."""

import importlib
from collections.abc import Callable

from fedjax_meta.method import Method, Reduction
from fedjax_meta.methods.fedavg import fedavg, fedavg_ft, fedavg_meta, fedavg_one_step, fedper, fedper_meta, local_only
from fedjax_meta.methods.fedmeta import (
    fedmeta,
    fedmeta_fomaml,
    fedmeta_metasgd,
    fedmeta_per,
    fedmeta_per_metasgd,
    fedmeta_server,
)
from fedjax_meta.methods.fedprox import fedprox

_BUILDERS: tuple[Callable[..., Method], ...] = (
    fedavg,
    fedavg_ft,
    fedavg_meta,
    fedavg_one_step,
    fedper,
    fedper_meta,
    local_only,
    fedmeta,
    fedmeta_fomaml,
    fedmeta_metasgd,
    fedmeta_per,
    fedmeta_per_metasgd,
    fedmeta_server,
    fedprox,
)

METHODS: dict[str, Callable[..., Method]] = {builder.__name__: builder for builder in _BUILDERS}
"""Every method by the name of its builder. The tests of `tests/test_contract.py` run over all of them."""

REDUCTIONS: tuple[Reduction, ...] = tuple(
    reduction
    for module in dict.fromkeys(builder.__module__ for builder in _BUILDERS)
    for reduction in getattr(importlib.import_module(module), "REDUCES_TO", ())
)
"""What the files of methods declare in `REDUCES_TO`."""

__all__ = [
    "METHODS",
    "REDUCTIONS",
    "fedavg",
    "fedavg_ft",
    "fedavg_meta",
    "fedavg_one_step",
    "fedmeta",
    "fedmeta_fomaml",
    "fedmeta_metasgd",
    "fedmeta_per",
    "fedmeta_per_metasgd",
    "fedmeta_server",
    "fedper",
    "fedper_meta",
    "fedprox",
    "local_only",
]
