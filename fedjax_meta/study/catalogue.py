"""What a study may name, in one line each, and its options: for `fedjax-meta list`."""

import functools
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from fedjax_meta import checks
from fedjax_meta.data.registry import PAPERS, PARTITIONS, natural
from fedjax_meta.methods import METHODS
from fedjax_meta.models import MODELS
from fedjax_meta.study.parts import AGGREGATORS, ATTACKS, ESTIMATORS, OPTIMIZERS, PARTICIPATION, SCHEDULES, UPLOADS
from fedjax_meta.study.scenario import SHIFTS

WIDTH = 80

_PAPERS = {
    "afl": "Mohri et al. 1902.00146",
    "anil": "Raghu et al. 1909.09157",
    "apfl": "Deng et al. 2003.13461",
    "cfl": "Sattler et al. 1910.01991",
    "ditto": "Li et al. 2012.04221",
    "fedala": "Zhang et al. 2212.01197",
    "fedamp": "Huang et al. 2007.03797",
    "fedas": "Yang et al. (CVPR 2024)",
    "fedavg": "McMahan et al. 1602.05629",
    "fedcac": "Wu et al. 2309.11103",
    "feddbe": "Zhang et al. 2311.14975",
    "feddyn": "Acar et al. 2111.04263",
    "fedem": "Marfoq et al. 2108.10252",
    "fedfomo": "Zhang et al. 2012.08565",
    "fedgp": "Achituve et al. 2106.15482",
    "fedmeta": "Chen et al. 1802.07876",
    "fednova": "Wang et al. 2007.07481",
    "fedopt": "Reddi et al. 2003.00295",
    "fedpac": "Xu et al. 2306.11867",
    "fedproto": "Tan et al. 2105.00243",
    "fedprox": "Li et al. 1812.06127",
    "fedrep": "Collins et al. 2102.07078",
    "fedrod": "Chen, Chao 2107.00778",
    "gpfl": "Zhang et al. 2308.10279",
    "ifca": "Ghosh et al. 2006.04088",
    "imaml": "Rajeswaran et al. 1909.04630",
    "knn_per": "Marfoq et al. 2111.09360",
    "l2gd": "Hanzely et al. 2002.05516",
    "lg_fedavg": "Liang et al. 2001.01523",
    "mamlpp": "Antoniou et al. 1810.09502",
    "mocha": "Smith et al. 1705.10467",
    "moon": "Li et al. 2103.16257",
    "mtfl": "Mills et al. 2007.09236",
    "perfedavg": "Fallah et al. 2002.07948",
    "pfedhn": "Shamsian et al. 2103.04628",
    "pfedme": "Dinh et al. 2006.08848",
    "pfedsim": "Tan et al. 2305.15706",
    "qfedavg": "Li et al. 1905.10497",
    "reptile": "Nichol et al. 1803.02999",
    "scaffold": "Karimireddy et al. 1910.06378",
}
"""Of each file of methods: "AUTHOR NUMBER" with the arXiv number, as its docstring has both, or "AUTHOR (VENUE YEAR)"."""

_OTHER_PAPERS = {
    "fedper": "Arivazhagan et al. 1912.00818",
    "fedavgm": "Hsu et al. 1909.06335",
    "fedbabu": "Oh et al. 2106.06042",
    "fedbn": "Li et al. 2102.07623",
    "fedmeta_per": "Nguyen, Cao (FedMeta-Per)",
    "fedmeta_per_metasgd": "Nguyen, Cao (FedMeta-Per)",
    "fedavg_meta": "Nguyen, Cao (FedMeta-Per)",
    "fedper_meta": "Nguyen, Cao (FedMeta-Per)",
    "local_only": "",
    "perfedavg_reptile": "Xia, Cui (Per-FedAvg-Reptile)",
}
"""Of methods whose paper is not that of their file."""

_METHODS = {
    "afl": "the worst mixture of clients",
    "anil": "adapts the head alone",
    "apfl": "a mixture of two models",
    "apfl_outputs": "APFL that mixes outputs",
    "cfl": "clusters that split",
    "ditto": "own model near the shared one",
    "fedadagrad": "server steps with Adagrad",
    "fedadam": "server steps with Adam",
    "fedala": "blends own and shared model",
    "fedamp": "a mixture of models for each",
    "fedas": "body brought near, by Fisher",
    "fedavg": "the mean of all models",
    "fedavg_adam": "FedAvg with averaged Adam",
    "fedavg_ft": "FedAvg, then fine-tuning",
    "fedavg_meta": "FedAvg, then one epoch",
    "fedavg_one_step": "FedAvg, then one step",
    "fedavgm": "server steps with momentum",
    "fedbabu": "body alone, then fine-tuning",
    "fedbn": "own batch norm",
    "fedcac": "own critical parameters",
    "feddbe": "a shift of features as one's own",
    "feddyn": "losses bent by past updates",
    "fedem": "own mixture of shared models",
    "fedfomo": "takes models that help",
    "fedgp": "own Gaussian-process classifier",
    "fedmeta": "MAML over clients",
    "fedmeta_fomaml": "first-order MAML over clients",
    "fedmeta_metasgd": "Meta-SGD over clients",
    "fedmeta_per": "FedMeta with own layers",
    "fedmeta_per_metasgd": "the same with Meta-SGD",
    "fedmeta_server": "FedMeta, steps at the server",
    "fednova": "updates per local step",
    "fedpac": "aligned features, mixed heads",
    "fedper": "FedAvg with own head",
    "fedper_meta": "FedPer, then one epoch",
    "fedproto": "shares class means alone",
    "fedprox": "FedAvg with a proximal term",
    "fedrep": "own head, trained first",
    "fedrod": "shared head, own head",
    "fedyogi": "server steps with Yogi",
    "gpfl": "features for head and classes",
    "heur_fedamp": "FedAMP by cosines",
    "ifca": "the best of several models",
    "imaml": "FedMeta, implicit gradient",
    "knn_per": "FedAvg and own neighbours",
    "l2gd": "own models, sometimes a mean",
    "lg_fedavg": "shared head, own body",
    "local_only": "every client trains by itself",
    "mamlpp": "MAML, a rate for every step",
    "mocha": "own models, learned relations",
    "moon": "FedAvg, contrasted features",
    "mtfl": "own batch norm as patches",
    "mtfl_fedavg_adam": "MTFL with averaged Adam",
    "perfedavg": "MAML steps, then the mean",
    "perfedavg_exact": "with Hessian products",
    "perfedavg_fo": "with first-order steps",
    "perfedavg_reptile": "Reptile steps, then the mean",
    "pfedhn": "models from a hypernetwork",
    "pfedhn_pc": "the same with own heads",
    "pfedme": "Moreau envelopes",
    "pfedsim": "bodies mixed by like heads",
    "qfedavg": "high losses count for more",
    "reptile": "towards adapted models",
    "scaffold": "FedAvg with control variates",
}
"""Of each method: what it does, in few words, so that a line has room for the paper, see `lines`."""

MASKS = {
    "all": "every leaf",
    "none": "no leaf",
    "head": "the last layer, as the model says it",
    "body": "all but the head",
    "last:DEPTH": "the last DEPTH layers, e.g. last:2",
    "first:DEPTH": "the first DEPTH layers",
    "bn": "batch norm: scales, shifts and statistics",
    "bn_affine": "batch norm: scales and shifts",
    "bn_stats": "batch norm: statistics",
    "path:REGEX": "leaves whose path a/b/c the expression is found in",
    "A+B": "the leaves of several masks",
}


FUNCTIONS: dict[str, Mapping[str, Callable[..., Any]]] = {
    "methods": METHODS,
    "partitions": {**PARTITIONS, "natural": natural, **PAPERS},
    "models": MODELS,
    "shifts": SHIFTS,
    "parts": {
        f"{kind}: {name}": make
        for kind, registry in {
            "estimator": ESTIMATORS,
            "optimizer": OPTIMIZERS,
            "aggregator": AGGREGATORS,
            "attack": ATTACKS,
            "schedule": SCHEDULES,
            "participation": PARTICIPATION,
            "uploads": UPLOADS,
        }.items()
        for name, make in registry.items()
    },
}
"""What has options of its own, by name."""


_GIVEN: dict[str, tuple[str, ...]] = {
    "methods": ("task",),
    "partitions": ("labels", "source", "path", "num_clients", "seed"),
    "models": ("inputs", "image", "window", "vocabulary", "length", "items", "classes", "loss"),
    "shifts": ("data", "seed"),
    "parts": ("inner", "learning_rate"),
}
"""Parameters that come from elsewhere in a study."""


def options(what: str, name: str) -> list[str]:
    """What a method, a part or the like is, in a line, and its options with their defaults, one a line.

    Args:
      what: "methods", "partitions", ...
      name: of one of them; a part by its own name stands for all that have it.

    Raises:
      ValueError: no such name, or names without options.

    Example:
      >>> options("parts", "clip")
      ['uploads: clip: Clips uploads to `norm`', '  norm']
    """
    checks.one_of("what has options", what, FUNCTIONS)
    known = FUNCTIONS[what]
    found = [key for key in known if name in (key, key.rpartition(": ")[2])]
    if not found:
        checks.one_of(what.removesuffix("s"), name, known)
    made = []
    for key in found:
        made.append(f"{key}: {method(key) if what == 'methods' else summary(known[key])}")
        takes = inspect.signature(known[key]).parameters.values()
        made += [f"  {one.name}{_default(one.default)}" for one in takes if one.name not in _GIVEN[what]]
    return made


def _default(value: Any) -> str:
    """A default as a study writes it; nothing where an option must be given."""
    if value is inspect.Parameter.empty:
        return ""
    if isinstance(value, functools.partial):
        value = {"name": value.func.__name__.lstrip("_"), **value.keywords}
    return f": {value.__name__ if callable(value) else json.dumps(value)}"


def citation(method: str) -> str:
    """First author and arXiv number of a method's paper; empty where there is none."""
    if method in _OTHER_PAPERS:
        return _OTHER_PAPERS[method]
    module = inspect.getmodule(METHODS[method])
    found = re.search(r"arXiv\s+\d{4}\.\d{4,5}", (module.__doc__ if module else None) or "")
    file = METHODS[method].__module__.rpartition(".")[2]
    return _PAPERS.get(file, " ".join(found[0].split()) if found else "")


def method(name: str) -> str:
    """What a method does."""
    return _METHODS.get(name) or summary(METHODS[name])


def summary(thing: Any) -> str:
    """The first sentence of a docstring."""
    text = inspect.getdoc(getattr(thing, "func", thing)) or ""
    return re.split(r"(?:[.:;]|, )\s+(?=[A-Z`a-z])", text.split("\n\n")[0].replace("\n", " "))[0].rstrip(".")


def lines(entries: dict[str, tuple[str, str]], *, width: int = WIDTH, wrap: bool = False) -> list[str]:
    """One line for each entry, (words, citation) by name.

    Args:
      entries: what to list.
      width: of the longest line.
      wrap: whether words that do not fit go on below; else they are cut after a whole word.
    """
    first = max(map(len, entries), default=0) + 2
    made = []
    for name, (words, source) in entries.items():
        room = width - first - (len(source) + 2 if source else 0)
        fitting = textwrap.wrap(words, room) if wrap else [textwrap.shorten(words, room, placeholder=" ...")]
        made.append(f"{name:<{first}}{fitting[0]:<{room}}{f'  {source}' if source else ''}".rstrip())
        made += [f"{'':<{first}}{more}" for more in fitting[1:]]
    return made
