"""Methods that differ from FedAvg in what is averaged and how: their local steps are PyTorch's or TensorFlow's SGD.

PyTorch's SGD with momentum m and weight decay d is b = m b + (g + d w), w = w - rate b, b started afresh with the optimiser.
"""

import jax
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta.keys import tagged
from fedjax_meta.methods.fedpac import paper_sgd
from tests.authors.source import differs, written_from
from tests.whole_rounds.world import (
    BODY,
    COHORTS,
    HEAD,
    KNOWN,
    NEW,
    NOTHING,
    TRAIN,
    Library,
    N,
    agree,
    client_key,
    descend,
    epochs,
    flat,
    gradient,
    momentum_sgd,
    near,
    order_key,
    pack,
    task,
    test_key,
    two_rounds,
)

RATE, BATCH, EPOCHS = 0.15, 4, 2
ALL = ~NOTHING
WEIGHTS = pack(np.ones((3, 4)), np.zeros(3), np.ones((4, 3))) > 0
"""The entries that are no bias."""


def order(round_, i, count=EPOCHS):
    return epochs(order_key(round_, i), i, "train", BATCH, count)


def torch_sgd(where=ALL, **options):
    """A client that takes PyTorch's steps on the entries of a mask."""
    return lambda round_, i, w, memory: (momentum_sgd(w, RATE, order(round_, i), where, **options), None)


@written_from(
    "litian96/FedProx",
    "d2a4501",
    "flearn/optimizer/pgd.py:29-36",
    "flearn/models/synthetic/mclr.py:76-85",
    "flearn/trainers/fedprox.py:49-77",
    "flearn/trainers/fedbase.py:115-125",
)
def test_fedprox():
    """w = w - rate (g + mu (w - w*)), w* the server's model; the mean of the clients is weighted by their samples."""
    pull = 1.5
    library = Library(fm.fedprox(task(), lr=RATE, prox_weight=pull, epochs=EPOCHS, batch_size=BATCH))

    def client(round_, i, w, memory):
        return descend(w, RATE, order(round_, i), pull=pull, anchor=w), None

    agree(library, two_rounds(library.w, client, TRAIN))


@written_from(
    "JianXu95/FedPAC",
    "5770f4f",
    "methods/fedavg.py:59-75",
    "methods/fedavg.py:96-127",
    "running.py:70-85",
    "tools.py:61-73",
)
def test_fedavg_and_its_fine_tuning():
    """Momentum 0.5 and decay 5e-4, biases too; fine-tuning moves the head alone, at the same rate."""
    options = {"lr": RATE, "epochs": EPOCHS, "batch_size": BATCH, "finetune_epochs": 3, "optimizer": paper_sgd}
    library = Library(fm.fedavg_ft(task(), **options))
    after = two_rounds(library.w, torch_sgd(momentum=0.5, decay=5e-4), TRAIN)
    agree(library, after)
    for i in (KNOWN, NEW):
        batches = epochs(tagged(test_key(), "order"), i, "test_support", BATCH, 3)
        near(library.tested(i), momentum_sgd(after[-1][0], RATE, batches, HEAD, momentum=0.5, decay=5e-4))


@written_from("JianXu95/FedPAC", "5770f4f", "methods/fedper.py:41-47", "methods/fedper.py:59-74", "running.py:150-167")
def test_fedper():
    """Their optimiser moves head and body at once; only the body is taken from the server."""
    library = Library(fm.fedper(task(), lr=RATE, epochs=EPOCHS, batch_size=BATCH, optimizer=paper_sgd))
    agree(library, two_rounds(library.w, torch_sgd(momentum=0.5, decay=5e-4), TRAIN, personal=HEAD), personal=HEAD)


def decayed_weights(rate):
    """SGD with momentum 0.5, and decay 1e-4 of every leaf that is no bias, as the code of FedRep has it."""

    def no_bias(parameters):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "b", parameters)

    return optax.chain(optax.add_decayed_weights(1e-4, mask=no_bias), optax.sgd(rate, momentum=0.5))


@pytest.mark.parametrize(("weighting", "weight"), [("uniform", [1] * N), ("samples", TRAIN)], ids=["images", "femnist"])
@written_from(
    "lgcollins/FedRep",
    "d82e629",
    "models/Update.py:552-565",
    "models/Update.py:593-642",
    "main_fedrep.py:29-48",
    "main_fedrep.py:149-182",
)
def test_fedrep(weighting, weight):
    """First the head, then the body; weights decay and biases do not; clients count equally but for FEMNIST and Sent140."""
    passes = {"head_epochs": 2, "body_epochs": 3, "batch_size": BATCH}
    library = Library(fm.fedrep(task(), lr=RATE, **passes, optimizer=decayed_weights, weighting=weighting))

    def slope(w, batch):
        return gradient(w, batch) + 1e-4 * np.where(WEIGHTS, w, 0)

    def client(round_, i, w, memory):
        head_order = epochs(tagged(tagged(client_key(round_, i), "head"), "order"), i, "train", BATCH, 2)
        w = momentum_sgd(w, RATE, head_order, HEAD, slope)
        return momentum_sgd(w, RATE, order(round_, i, 3), BODY, slope), None

    agree(library, two_rounds(library.w, client, weight, personal=HEAD), personal=HEAD)


@written_from(
    "jhoon-oh/FedBABU",
    "e34c15b",
    "models/Update.py:52-78",
    "main_fed.py:95-103",
    "main_fed.py:112-125",
)
def test_fedbabu():
    """With --local_upt_part body and --aggr_part body the head has rate 0 and stays; clients count equally."""
    decay = 1e-3
    sgd = lambda rate: optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, momentum=0.9))  # noqa: E731
    library = Library(fm.fedbabu(task(), lr=RATE, epochs=EPOCHS, batch_size=BATCH, optimizer=sgd))
    agree(library, two_rounds(library.w, torch_sgd(BODY, momentum=0.9, decay=decay), [1] * N))


@written_from("pliang279/LG-FedAvg", "7af0568", "main_lg.py:45-47", "main_lg.py:91-117", "models/Update.py:33-58")
def test_lg_fedavg():
    """The last layers are averaged with equal weights, whatever the sizes of the clients; momentum 0.5, no decay."""
    sgd = lambda rate: optax.sgd(rate, momentum=0.5)  # noqa: E731
    options = {"lr": RATE, "epochs": EPOCHS, "batch_size": BATCH, "optimizer": sgd}
    library = Library(fm.lg_fedavg(task(), **options, weighting="uniform"))
    after = two_rounds(library.w, torch_sgd(momentum=0.5), [1] * N, personal=BODY)
    agree(library, after, personal=BODY)
    by_samples = two_rounds(library.w, torch_sgd(momentum=0.5), TRAIN, personal=BODY)
    differs(by_samples[0][0], after[0][0], 0.005)


# ----------------------------------------------------------------------------------------------------------------- SCAFFOLD


def scaffold_round(number, x, c, own, in_turn):
    """One round of option II; with `in_turn`, each client of the round moves c before the next one reads it."""
    models, changes = [], np.zeros_like(c)
    for i in COHORTS[number]:
        y, c_i, steps = x, own.get(i, np.zeros_like(c)), order(number, i)
        for batch in steps:
            y = y - RATE * (gradient(y, batch) + c - c_i)
        models.append(y)
    start = c
    for y, i in zip(models, COHORTS[number], strict=True):
        c_i = own.get(i, np.zeros_like(c))
        own[i] = c_i - (c if in_turn else start) + (x - y) / (len(order(number, i)) * RATE)
        changes = changes + own[i] - c_i
        c = start + changes / N
    return np.mean(models, 0), c


@written_from("lgcollins/FedRep", "d82e629", "models/Update.py:266-292", "main_scaffold.py:108-130")
@written_from("MLOPTPSU/FedTorch", "ab8068d", "fedtorch/comms/trainings/federated/centered/main.py:135-137")
def test_scaffold():
    """Option II with equal weights. FedRep's code adds momentum 0.5, decay and clipping, with which c_i is no mean gradient."""
    library = Library(fm.scaffold(task(), lr=RATE, epochs=EPOCHS, batch_size=BATCH))
    x, c, own = library.w, np.zeros(27), {}
    for number, state in enumerate((library.first, library.last)):
        x, c = scaffold_round(number, x, c, own, in_turn=False)
        near(flat(state.model), x)
        near(flat(state.extra), c)


@written_from("MLOPTPSU/FedTorch", "ab8068d", "fedtorch/comms/algorithms/federated/centered/scaffold.py:16-36")
def test_a_server_variate_that_moves_between_clients_is_another_method():
    """FedTorch's loop renews c inside the loop over clients, so that c_i of a client depends on those before it."""
    w, own, others = np.sin(np.arange(27.0)), {}, {}
    _, c = scaffold_round(0, w, np.zeros(27), own, in_turn=False)
    _, moved = scaffold_round(0, w, np.zeros(27), others, in_turn=True)
    near(others[COHORTS[0][0]], own[COHORTS[0][0]])
    differs(others[COHORTS[0][2]], own[COHORTS[0][2]], 0.1)
    differs(moved, c, 0.02)


# ------------------------------------------------------------------------------------------------------- server optimisers


def served(build, step, slots, **options):
    """Two rounds whose server moves by `step(w, mean of w - w_i weighted by samples, t, *slots) -> (w, *slots)`."""
    library = Library(build(task(), lr=RATE, epochs=EPOCHS, batch_size=BATCH, **options))
    w = library.w
    for number, state in enumerate((library.first, library.last)):
        cohort = COHORTS[number]
        descent = np.average([w - descend(w, RATE, order(number, i)) for i in cohort], 0, [TRAIN[i] for i in cohort])
        w, *slots = step(w, descent, number + 1, *slots)
        near(flat(state.model), w)


def corrected(t, b1=0.9, b2=0.99):
    return np.sqrt(1 - b2**t) / (1 - b1**t)


KERAS_SERVER = written_from(
    "google-research/federated",
    "a5af8c4",
    "optimization/trainer.py:103-118",
    "utils/optimizers/optimizer_utils.py:35-42",
    "optimization/README.md:89-93",
)


@KERAS_SERVER
@written_from(
    "google-research/federated", "a5af8c4", "utils/optimizers/yogi.py:119-200", "optimization/docs/hyperparameters.md:103"
)
def test_fedyogi():
    """Their Yogi corrects the bias; the paper's has none. v starts at 0, as they recommend."""
    eta, tau = 0.05, 1e-3

    def step(w, g, t, m, v):
        m, v = 0.9 * m + 0.1 * g, v + 0.01 * np.sign(g**2 - v) * g**2
        return w - eta * corrected(t) * m / (np.sqrt(v) + tau), m, v

    options = {"server_lr": eta, "tau": tau, "initial": 0.0}
    served(fm.fedyogi, step, [0.0, 0.0], **options, bias_correction=True)


@KERAS_SERVER
@written_from(
    "keras-team/keras", "253dc46", "keras/optimizers/optimizer_v2/adam.py (class Adam: _prepare_local, _resource_apply_sparse)"
)
@pytest.mark.parametrize("bias_correction", [True, False])
def test_fedadam(bias_correction):
    """Keras multiplies the rate by sqrt(1 - b2^t) / (1 - b1^t). MTFL's server has no correction, as the paper."""
    eta, tau = 0.05, 1e-3

    def step(w, g, t, m, v):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        return w - eta * (corrected(t) if bias_correction else 1) * m / (np.sqrt(v) + tau), m, v

    options = {"server_lr": eta, "tau": tau, "initial": 0.0, "bias_correction": bias_correction}
    served(fm.fedadam, step, [0.0, 0.0], **options)


@KERAS_SERVER
@written_from("keras-team/keras", "19754b7", "keras/optimizers/optimizer_v2/gradient_descent.py (class SGD)")
def test_fedavgm():
    """velocity = momentum velocity - rate g, w = w + velocity: at a constant rate the same as optax's and the paper's."""

    def step(w, g, t, velocity):
        velocity = 0.8 * velocity - 0.7 * g
        return w + velocity, velocity

    served(fm.fedavgm, step, [0.0], server_lr=0.7, momentum=0.8)


@KERAS_SERVER
@written_from("keras-team/keras", "1a35747", "keras/optimizers/optimizer_v2/adagrad.py (class Adagrad)")
def test_fedadagrad():
    """v += g^2, w -= eta g / (sqrt(v) + eps); they start v at 0, by --server_adagrad_initial_accumulator_value."""

    def step(w, g, t, v):
        v = v + g**2
        return w - 0.05 * g / (np.sqrt(v) + 1e-3), v

    served(fm.fedadagrad, step, [0.0], server_lr=0.05, tau=1e-3, initial=0.0)
