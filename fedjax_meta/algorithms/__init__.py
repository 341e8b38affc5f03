"""One file a paper; each builder takes a task first and its hyper-parameters by name, and returns an `Algorithm`."""

from collections.abc import Callable
from functools import partial

from fedjax_meta.algorithm import Algorithm
from fedjax_meta.algorithms.fedavg import fedavg, fedper, local_only
from fedjax_meta.algorithms.fedmeta import fedmeta, fedmeta_per
from fedjax_meta.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedopt, fedyogi
from fedjax_meta.algorithms.fedprox import fedprox
from fedjax_meta.algorithms.mtfl import fedavg_adam, fedbn, mtfl

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "fedavg_meta": partial(fedavg, finetune_epochs=1),
    "fedper": fedper,
    "fedper_meta": partial(fedper, finetune_epochs=1),
    "local_only": local_only,
    "fedprox": fedprox,
    "fedmeta_maml": fedmeta,
    "fedmeta_metasgd": partial(fedmeta, learned_rates=True),
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
    "fedopt",
    "fedper",
    "fedprox",
    "fedyogi",
    "local_only",
    "mtfl",
]
