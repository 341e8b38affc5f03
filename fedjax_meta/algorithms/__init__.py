"""One file a paper; each builder takes a task first and its hyper-parameters by name, and returns an `Algorithm`."""

from collections.abc import Callable
from functools import partial

from fedjax_meta import meta
from fedjax_meta.algorithm import Algorithm
from fedjax_meta.algorithms.fedavg import fedavg, fedper, local_only
from fedjax_meta.algorithms.fedmeta import fedmeta, fedmeta_per, fedmeta_server
from fedjax_meta.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedopt, fedyogi
from fedjax_meta.algorithms.fedprox import fedprox
from fedjax_meta.algorithms.imaml import imaml
from fedjax_meta.algorithms.mtfl import fedavg_adam, fedbn, mtfl
from fedjax_meta.algorithms.perfedavg import perfedavg
from fedjax_meta.algorithms.reptile import perfedavg_reptile, reptile

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
}
"""Every algorithm by name. The tests of `tests/test_contract.py` run over all of them."""

__all__ = [
    "ALGORITHMS",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavg_adam",
    "fedavgm",
    "fedbn",
    "fedmeta",
    "fedmeta_per",
    "fedmeta_server",
    "fedopt",
    "fedper",
    "fedprox",
    "fedyogi",
    "imaml",
    "local_only",
    "mtfl",
    "perfedavg",
    "perfedavg_reptile",
    "reptile",
]
