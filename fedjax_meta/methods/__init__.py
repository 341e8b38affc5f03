"""One file per paper. Each builder takes a task first, its hyper-parameters by name, and returns a `Method`."""

import importlib
from collections.abc import Callable

from fedjax_meta.contract import Method, Reduction
from fedjax_meta.methods.afl import afl
from fedjax_meta.methods.anil import anil
from fedjax_meta.methods.apfl import apfl, apfl_outputs
from fedjax_meta.methods.cfl import cfl
from fedjax_meta.methods.ditto import ditto
from fedjax_meta.methods.fedala import fedala
from fedjax_meta.methods.fedamp import fedamp, heur_fedamp
from fedjax_meta.methods.fedas import fedas
from fedjax_meta.methods.fedavg import fedavg, fedavg_ft, fedavg_meta, fedavg_one_step, fedper, fedper_meta, local_only
from fedjax_meta.methods.fedcac import fedcac
from fedjax_meta.methods.feddbe import feddbe
from fedjax_meta.methods.feddyn import feddyn
from fedjax_meta.methods.fedem import fedem
from fedjax_meta.methods.fedfomo import fedfomo
from fedjax_meta.methods.fedgp import fedgp
from fedjax_meta.methods.fedmeta import (
    fedmeta,
    fedmeta_fomaml,
    fedmeta_metasgd,
    fedmeta_per,
    fedmeta_per_metasgd,
    fedmeta_server,
)
from fedjax_meta.methods.fednova import fednova
from fedjax_meta.methods.fedopt import fedadagrad, fedadam, fedavgm, fedyogi
from fedjax_meta.methods.fedpac import fedpac
from fedjax_meta.methods.fedproto import fedproto
from fedjax_meta.methods.fedprox import fedprox
from fedjax_meta.methods.fedrep import fedbabu, fedrep
from fedjax_meta.methods.fedrod import fedrod
from fedjax_meta.methods.gpfl import gpfl
from fedjax_meta.methods.ifca import ifca
from fedjax_meta.methods.imaml import imaml
from fedjax_meta.methods.knn_per import knn_per
from fedjax_meta.methods.l2gd import l2gd
from fedjax_meta.methods.lg_fedavg import lg_fedavg
from fedjax_meta.methods.mamlpp import mamlpp
from fedjax_meta.methods.mocha import mocha
from fedjax_meta.methods.moon import moon
from fedjax_meta.methods.mtfl import fedavg_adam, fedbn, mtfl, mtfl_fedavg_adam
from fedjax_meta.methods.perfedavg import perfedavg, perfedavg_exact, perfedavg_fo
from fedjax_meta.methods.pfedhn import pfedhn, pfedhn_pc
from fedjax_meta.methods.pfedme import pfedme
from fedjax_meta.methods.pfedsim import pfedsim
from fedjax_meta.methods.qfedavg import qfedavg
from fedjax_meta.methods.reptile import perfedavg_reptile, reptile
from fedjax_meta.methods.scaffold import scaffold

__all__ = [
    "METHODS",
    "REDUCTIONS",
    "afl",
    "anil",
    "apfl",
    "apfl_outputs",
    "cfl",
    "ditto",
    "fedadagrad",
    "fedadam",
    "fedala",
    "fedamp",
    "fedas",
    "fedavg",
    "fedavg_adam",
    "fedavg_ft",
    "fedavg_meta",
    "fedavg_one_step",
    "fedavgm",
    "fedbabu",
    "fedbn",
    "fedcac",
    "feddbe",
    "feddyn",
    "fedem",
    "fedfomo",
    "fedgp",
    "fedmeta",
    "fedmeta_fomaml",
    "fedmeta_metasgd",
    "fedmeta_per",
    "fedmeta_per_metasgd",
    "fedmeta_server",
    "fednova",
    "fedpac",
    "fedper",
    "fedper_meta",
    "fedproto",
    "fedprox",
    "fedrep",
    "fedrod",
    "fedyogi",
    "gpfl",
    "heur_fedamp",
    "ifca",
    "imaml",
    "knn_per",
    "l2gd",
    "lg_fedavg",
    "local_only",
    "mamlpp",
    "mocha",
    "moon",
    "mtfl",
    "mtfl_fedavg_adam",
    "perfedavg",
    "perfedavg_exact",
    "perfedavg_fo",
    "perfedavg_reptile",
    "pfedhn",
    "pfedhn_pc",
    "pfedme",
    "pfedsim",
    "qfedavg",
    "reptile",
    "scaffold",
]

METHODS: dict[str, Callable[..., Method]] = {name: globals()[name] for name in __all__ if name.islower()}
"""Every method by the name of its builder. The tests of `tests/test_contract.py` run over all of them."""

REDUCTIONS: tuple[Reduction, ...] = tuple(
    reduction
    for module in dict.fromkeys(builder.__module__ for builder in METHODS.values())
    for reduction in getattr(importlib.import_module(module), "REDUCES_TO", ())
)
"""The identities that the files of this package declare in `REDUCES_TO`."""
