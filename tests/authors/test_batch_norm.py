"""What FedAvg does with batch norms in the repositories that users compare, FedBN, and MTFL with its four settings.

All train a client's model in training mode and average its parameters; they differ in what becomes of scale and shift
(parameters) and of the running mean and variance (buffers) of a batch norm.
"""

import jax
import numpy as np
import pytest

import fedjax_meta as fm
from tests.authors.normed import AFFINE, BATCH_NORM, NONE, STATISTICS, descend, normed_task, step
from tests.authors.source import differs, written_from
from tests.whole_rounds.world import COHORTS, KNOWN, TRAIN, Library, N, agree, epochs, flat, near, order_key, two_rounds

RATE, BATCH = 0.2, 6
"""No client has a last batch of one sample: PyTorch refuses it, FL-bench and FedTorch skip it, here its variance is 0."""
OPTIONS = {"lr": RATE, "epochs": 2, "batch_size": BATCH}


def order(round_, i):
    return epochs(order_key(round_, i), i, "train", BATCH, 2)


def client(round_, i, w, memory):
    return descend(w, RATE, order(round_, i)), None


@pytest.mark.parametrize(("weighting", "weight"), [("samples", TRAIN), ("uniform", [1] * N)])
@written_from("KarhouTam/FL-bench", "06e658b", "src/utils/models.py:50-64", "src/client/fedavg.py:205-220")
@written_from("KarhouTam/FL-bench", "06e658b", "src/server/fedavg.py:677-701")
@written_from("med-air/FedBN", "2fa38ad", "federated/fed_digits.py:176-189")
def test_fedavg_averages_running_statistics(weighting, weight):
    """FL-bench with `buffers: global`, its default since issue 110, by samples; mode fedavg of FedBN's code, equally."""
    library = Library(fm.fedavg(normed_task(), **OPTIONS, weighting=weighting))
    agree(library, two_rounds(library.w, client, weight, personal=NONE), personal=NONE)


@written_from("KarhouTam/FL-bench", "06e658b", "src/client/fedavg.py:38-41", "src/client/fedavg.py:143-144")
@written_from(
    "TsingZ0/PFLlib", "d832e76", "system/flcore/servers/serverbase.py:138-150", "system/flcore/clients/clientbase.py:67-69"
)
def test_running_statistics_that_nobody_averages():
    """FL-bench with `buffers: local`, and PFLlib (its issue 260), which goes through `parameters()`: private statistics."""
    library = Library(fm.mtfl(normed_task(), **OPTIONS, private="bn_stats"))
    after = two_rounds(library.w, client, TRAIN, personal=STATISTICS)
    agree(library, after, personal=STATISTICS)
    averaged = two_rounds(library.w, client, TRAIN, personal=NONE)
    near(after[-1][0][~STATISTICS], averaged[-1][0][~STATISTICS])
    differs(after[-1][1][KNOWN][STATISTICS], averaged[-1][0][STATISTICS], 0.05)


@written_from("KarhouTam/FL-bench", "06e658b", "src/client/fedavg.py:42-43", "src/client/fedavg.py:145-146")
def test_running_statistics_that_are_dropped_are_never_estimated():
    """`buffers: drop` tests with the initial mean 0 and variance 1; training, which reads no running statistics, is the same."""
    library = Library(fm.fedavg(normed_task(), **OPTIONS))
    dropped = two_rounds(
        library.w, lambda r, i, w, m: (np.where(STATISTICS, library.w, client(r, i, w, m)[0]), None), TRAIN, personal=NONE
    )
    near(flat(library.last.model)[~STATISTICS], dropped[-1][0][~STATISTICS])
    differs(flat(library.last.model)[STATISTICS], dropped[-1][0][STATISTICS], 0.1)


@written_from("med-air/FedBN", "2fa38ad", "federated/fed_digits.py:164-175", "federated/fed_digits.py:246-247")
def test_fedbn():
    """Nothing of a key with "bn" in it is averaged or sent back; clients count equally; a fresh SGD in each round."""
    library = Library(fm.fedbn(normed_task(), **OPTIONS))
    agree(library, two_rounds(library.w, client, [1] * N, personal=BATCH_NORM), personal=BATCH_NORM)


@pytest.mark.parametrize(
    ("private", "personal"), [("bn", BATCH_NORM), ("bn_affine", AFFINE), ("bn_stats", STATISTICS), ("none", NONE)]
)
@written_from("JedMills/MTFL-For-Personalised-DNNs", "b466822", "fl_algs.py:130-190", "models.py:55-119", "models.py:167-185")
def test_mtfl(private, personal):
    """Settings usyb, yb, us, none: what is private is put back after the download and kept after training."""
    library = Library(fm.mtfl(normed_task(), **OPTIONS, private=private))
    agree(library, two_rounds(library.w, client, TRAIN, personal=personal), personal=personal)


@written_from(
    "JedMills/MTFL-For-Personalised-DNNs", "b466822", "fl_algs.py:138-190", "optimisers.py:231-331", "models.py:36-42"
)
def test_mtfl_with_fedavg_adam():
    """m, v and the step count go up and down with the model, weighted by samples; those of private scale and shift stay.

    They start from one step of Adam on samples of zeros, which moves the model too; here the slots start at 0.
    """
    rate = 0.01
    library = Library(fm.mtfl_fedavg_adam(normed_task(), **OPTIONS | {"lr": rate}, private="bn"))
    start = flat(library.start.model.variables)
    first = {"w": start, "m": 0 * start, "v": 0 * start, "t": np.zeros(1)}
    server, own = first, {}
    for number, cohort in enumerate(COHORTS):
        trained = {}
        for i in cohort:
            mine = own.get(i, first)
            w, m, v = (np.where(BATCH_NORM, mine[k], server[k]) for k in "wmv")
            t = server["t"]
            for batch in order(number, i):
                g, w = step(w, batch)
                t, m, v = t + 1, 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
                w = w - rate * np.where(STATISTICS, 0, m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-7))
            trained[i] = own[i] = {"w": w, "m": m, "v": v, "t": t}
        weight = [TRAIN[i] for i in cohort]
        server = {key: np.average([trained[i][key] for i in cohort], 0, weight) for key in server}
        state = (library.first, library.last)[number]
        near(flat(state.model.variables)[~BATCH_NORM], server["w"][~BATCH_NORM])
        for i in cohort:
            mine = np.concatenate([np.asarray(leaf)[i].ravel() for leaf in jax.tree.leaves(state.personal.variables)])
            near(mine, own[i]["w"][BATCH_NORM])
