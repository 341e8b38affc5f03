"""One file a paper; each builder takes a task first and its hyper-parameters by name, and returns an `Algorithm`."""

from collections.abc import Callable
from functools import partial

from fedjax_meta import meta
from fedjax_meta.algorithm import Algorithm
from fedjax_meta.algorithms.apfl import apfl
from fedjax_meta.algorithms.ditto import ditto
from fedjax_meta.algorithms.fedamp import fedamp
from fedjax_meta.algorithms.fedavg import fedavg, fedper, local_only
from fedjax_meta.algorithms.fedem import fedem
from fedjax_meta.algorithms.fedfomo import fedfomo
from fedjax_meta.algorithms.fedmeta import fedmeta, fedmeta_per, fedmeta_server
from fedjax_meta.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedopt, fedyogi
from fedjax_meta.algorithms.fedpac import fedpac
from fedjax_meta.algorithms.fedprox import fedprox
from fedjax_meta.algorithms.fedrep import fedbabu, fedrep
from fedjax_meta.algorithms.fedrod import fedrod
from fedjax_meta.algorithms.imaml import imaml
from fedjax_meta.algorithms.knnper import knn_per
from fedjax_meta.algorithms.l2gd import l2gd
from fedjax_meta.algorithms.lg_fedavg import lg_fedavg
from fedjax_meta.algorithms.moon import moon
from fedjax_meta.algorithms.mtfl import fedavg_adam, fedbn, mtfl
from fedjax_meta.algorithms.perfedavg import perfedavg
from fedjax_meta.algorithms.pfedhn import pfedhn
from fedjax_meta.algorithms.pfedme import pfedme
from fedjax_meta.algorithms.reptile import perfedavg_reptile, reptile
from fedjax_meta.algorithms.scaffold import scaffold

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "fedavg_meta": partial(fedavg, finetune_epochs=1),
    "fedavg_one_step": partial(fedavg, finetune_epochs=1, finetune_full_batch=True),
    "fedper": fedper,
    "fedper_meta": partial(fedper, finetune_epochs=1),
    "local_only": local_only,
    "fedprox": fedprox,
    "fedmeta_maml": fedmeta,
    "fedmeta_metasgd": partial(fedmeta, learned_rates=True),
    "fedmeta_fomaml": partial(fedmeta, estimator=meta.first_order),
    "fedmeta_server": fedmeta_server,
    "fedmeta_per_maml": fedmeta_per,
    "fedmeta_per_metasgd": partial(fedmeta_per, learned_rates=True),
    "fedavgm": fedavgm,
    "fedadagrad": fedadagrad,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "fedavg_adam": partial(fedavg_adam, private="none"),
    "mtfl": mtfl,
    "mtfl_fedavg_adam": fedavg_adam,
    "fedbn": fedbn,
    "imaml": imaml,
    "perfedavg_fo": partial(perfedavg, estimator=meta.first_order),
    "perfedavg_hf": perfedavg,
    "perfedavg_exact": partial(perfedavg, estimator=partial(meta.hessian_free, method="product")),
    "perfedavg_reptile": perfedavg_reptile,
    "reptile": reptile,
    "fedavg_ft": partial(fedavg, finetune="head", finetune_epochs=5),
    "fedpac": fedpac,
    "scaffold": scaffold,
    "moon": moon,
    "lg_fedavg": lg_fedavg,
    "fedrep": fedrep,
    "fedbabu": fedbabu,
    "fedrod": fedrod,
    "knn_per": knn_per,
    "fedfomo": fedfomo,
    "fedamp": fedamp,
    "heur_fedamp": partial(fedamp, kernel="cosine"),
    "apfl": apfl,
    "apfl_outputs": partial(apfl, mix="outputs"),
    "ditto": ditto,
    "pfedme": pfedme,
    "l2gd": l2gd,
    "fedem": fedem,
    "pfedhn": pfedhn,
    "pfedhn_pc": partial(pfedhn, personal="head"),
}
"""Every algorithm by name. The tests of `tests/test_contract.py` run over all of them."""

__all__ = [
    "ALGORITHMS",
    "apfl",
    "ditto",
    "fedadagrad",
    "fedadam",
    "fedamp",
    "fedavg",
    "fedavg_adam",
    "fedavgm",
    "fedbabu",
    "fedbn",
    "fedem",
    "fedfomo",
    "fedmeta",
    "fedmeta_per",
    "fedmeta_server",
    "fedopt",
    "fedpac",
    "fedper",
    "fedprox",
    "fedrep",
    "fedrod",
    "fedyogi",
    "imaml",
    "knn_per",
    "l2gd",
    "lg_fedavg",
    "local_only",
    "moon",
    "mtfl",
    "perfedavg",
    "perfedavg_reptile",
    "pfedhn",
    "pfedme",
    "reptile",
    "scaffold",
]
