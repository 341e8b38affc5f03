"""Defaults are those that were published, in a paper or in its authors' code; only values with such a source stand here."""

import inspect

import pytest

import fedjax_meta as fm
from fedjax_meta import implicit, meta

FEDAVG = {"epochs": 1, "batch_size": 32, "finetune_epochs": 0}
ADAPTIVE = {"server_lr": 0.1, "b2": 0.99, "tau": 1e-3}
PERFEDAVG = {"inner_lr": 0.01, "outer_lr": 1e-3, "batch_size": 20, "test_steps": 1, "weighting": "uniform"}
PFEDHN = {"lr": 5e-3, "server_lr": 0.01, "width": 100, "hidden": 3, "local_steps": 50, "batch_size": 64, "clip": 50.0}
FEDMETA = {"batch_size": 32, "inner_steps": 1, "meta_steps": 1, "outer_at": "client", "score": "online", "weighting": "query"}

PUBLISHED = {
    # Nguyen and Cao, "Meta-learning and personalization layer in federated learning", and its code; 5 clients a round.
    "fedavg": {**FEDAVG, "weighting": "samples"},
    "fedavg_meta": FEDAVG | {"finetune_epochs": 1, "finetune": "all"},
    "fedper": FEDAVG | {"personal": "head"},
    "fedper_meta": FEDAVG | {"finetune_epochs": 1, "personal": "head"},
    "fedmeta": {**FEDMETA, "learned_rates": False, "outer_slots": "fresh", "personal": "none", "adapts": "all"},
    "fedmeta_metasgd": {**FEDMETA, "learned_rates": True, "personal": "none"},
    "fedmeta_per": {**FEDMETA, "learned_rates": False, "personal": "head"},
    "fedmeta_per_metasgd": {**FEDMETA, "learned_rates": True, "personal": "head", "personal_rates": None},
    # Nguyen et al., "Improving federated learning by meta-learning", and its code.
    "fedmeta_server": {"outer_at": "server", "server_sum": True},
    "reptile": {"batch_size": 32},
    "imaml": {"inner_lr": 1e-3, "outer_lr": 1e-4, "prox_weight": 2.0, "batch_size": 32, "weighting": "query"},
    # Xia and Cui, "Personalized federated learning algorithm based on Reptile".
    "fedavg_one_step": {"finetune_epochs": 1, "finetune_full_batch": True},
    "perfedavg_reptile": {"outer_batches": 4, "inner_batches": 4, "test_steps": 1, "weighting": "uniform"},
    # The authors' code of each method.
    "fedprox": {"prox_weight": 1.0, "lr": 0.01, "epochs": 20, "batch_size": 10},
    "moon": {"temperature": 0.5, "contrast_weight": 5.0, "lr": 0.01, "epochs": 10, "batch_size": 64, "weighting": "samples"},
    "fedrep": {"lr": 0.01, "head_lr": None, "head_epochs": 10, "body_epochs": 1, "batch_size": 10, "new_client_epochs": 10},
    "fedbabu": {"lr": 0.1, "batch_size": 50, "finetune_epochs": 5, "weighting": "uniform"},
    "fedpac": {
        "head_lr": 0.1,
        "alignment": 1.0,
        "epochs": 5,
        "head_epochs": 1,
        "batch_size": 50,
        "align": True,
        "collaborate": True,
    },
    "fedem": {"components": 3, "lr": 0.03, "batch_size": 128, "weighting": "samples"},
    "cfl": {"mean_norm": 0.4, "client_norm": 1.6, "first_split": 20},
    "fedproto": {"by_samples": True},
    # jichan3751/ifca, mnist/config.json: tau = 10 steps on all samples.
    "ifca": {"lr": 0.1, "epochs": 10},
    # The first arguments of main.py and run_me.sh of TsingZ0/DBE, TsingZ0/GPFL and xiyuanyang45/FedAS.
    "feddbe": {"lr": 0.005, "epochs": 1, "batch_size": 10, "momentum": 1.0, "regularisation": 50.0},
    "gpfl": {"lr": 0.005, "epochs": 1, "batch_size": 10, "embedding_weight": 0.01, "decay": 0.1},
    "fedas": {"lr": 0.005, "epochs": 1, "batch_size": 10},
    # TsingZ0/FedALA, main.py and utils/ALA.py; alpemreacar/FedDyn, example_cifar_10.py; TsingZ0/PFLlib, main.py.
    "fedala": {
        "lr": 0.005,
        "weight_lr": 1.0,
        "sample_share": 0.8,
        "window": 10,
        "tolerance": 0.1,
        "epochs": 1,
        "batch_size": 10,
        "weighting": "samples",
    },
    "feddyn": {"lr": 0.1, "alpha": 0.01, "epochs": 5, "batch_size": 50},
    "fedamp": {"prox_weight": 1.0, "width": 1.0},
    "apfl": {"share": 0.5, "mix": "weights", "weighting": "uniform"},
    "apfl_outputs": {"share": 0.5, "mix": "outputs"},
    "ditto": {"prox_weight": 1.0, "lr": 0.05, "batch_size": 16},
    "pfedme": {"lr": 0.09, "outer_lr": 5e-3, "prox_weight": 15.0, "inner_steps": 5, "local_rounds": 20, "batch_size": 20},
    "perfedavg": PERFEDAVG,
    "perfedavg_fo": PERFEDAVG,
    "perfedavg_exact": PERFEDAVG,
    "fedfomo": {"lr": 0.1, "epochs": 5, "batch_size": 50, "exploration": 0.3, "exploration_decay": 0.05},
    "pfedhn": {**PFEDHN, "personal": "none"},
    "pfedhn_pc": {**PFEDHN, "personal": "head"},
    "knn_per": {"neighbours": 10, "scale": 1.0},
    "fedgp": {
        "lr": 0.05,
        "output_scale": 8.0,
        "length_scale": 1.0,
        "held_out": 0.5,
        "gibbs_steps": 5,
        "draws": 20,
        "test_draws": 30,
        "inner_steps": 1,
        "weighting": "uniform",
    },
    "mtfl": {"epochs": 1, "batch_size": 20, "private": "bn"},
    "mtfl_fedavg_adam": {"lr": 3e-3, "epochs": 1, "batch_size": 20, "private": "bn", "federated_slots": True},
    # Reddi et al., arXiv 2003.00295, as in Flower; Hsu, Qi, Brown, arXiv 1909.06335.
    "fedadam": {**ADAPTIVE, "b1": 0.9},
    "fedyogi": {**ADAPTIVE, "b1": 0.9},
    "fedadagrad": {**ADAPTIVE, "b1": 0.0},
    "fedavgm": {"momentum": 0.9, "server_lr": 1.0},
}


def defaults(function):
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


UNPUBLISHED = {"afl", "anil", "fedavg_adam", "fedcac", "fedmeta_fomaml", "fednova", "fedrod", "heur_fedamp", "mamlpp", "mocha"}
UNPUBLISHED |= {"pfedsim", "qfedavg"}
"""Methods whose own options have no one published value, or one that follows the data: FedCAC's patience, q-FedAvg's q."""


def test_every_method_says_where_its_defaults_are_from():
    like_fedavg = {*LIKE_FEDAVG, "fedavgm", "local_only", "fedavg_ft"}
    assert not UNPUBLISHED & ({*PUBLISHED} | like_fedavg)
    assert {*fm.METHODS} == {*PUBLISHED} | like_fedavg | UNPUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_the_published_ones(name):
    given = defaults(fm.METHODS[name])
    assert {option: given[option] for option in PUBLISHED[name]} == PUBLISHED[name]


def test_meta_gradients_are_those_of_their_papers_by_default():
    # Per-FedAvg in FL-bench; iMAML, arXiv 1909.04630, with the solver from 0 and the Hessian of the support.
    assert defaults(meta.hessian_free)["delta"] == 1e-3
    assert defaults(meta.hessian_free)["method"] == "difference"
    wanted = {"cg_steps": 5, "damping": 0.0, "warm_start": "zero", "operator": "implicit", "outer": "query"}
    assert {name: defaults(implicit.implicit_gradient)[name] for name in wanted} == wanted
    assert all(defaults(estimator)["steps"] == 1 for estimator in (meta.exact, meta.hessian_free, meta.first_order))


LIKE_FEDAVG = ("apfl", "apfl_outputs", "scaffold", "lg_fedavg", "l2gd", "knn_per", "fedbn", "fedadam", "fedyogi", "fedadagrad")


@pytest.mark.parametrize("name", [*LIKE_FEDAVG, "fedavgm", "local_only", "fedavg_ft"])
def test_local_training_without_published_values_is_that_of_fedavg(name):
    usual, given = defaults(fm.fedavg), defaults(fm.METHODS[name])
    assert all(given[option] == usual[option] for option in ("lr", "epochs", "batch_size", "optimizer") if option in given)
