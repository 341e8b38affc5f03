"""Per-FedAvg in the repositories that users take for it; its authors have published none.

All of them compute, on batches b0, b1 (and b2 for HF) of a client, from w:

    phi = w - alpha g(w; b0),   w <- w - beta g(phi; b1)                                                          (FO)
    w <- w - beta (g(phi; b1) - alpha [g(w + d v; b2) - g(w - d v; b2)] / (2 d)),   v = g(phi; b1)                 (HF)

and differ in weights, in how many steps a round has, in how a client tests, and, before users reported it, in the step itself.
"""

import pytest

import fedjax_meta as fm
from tests.authors.source import differs, written_from
from tests.whole_rounds.test_perfedavg import BATCH, STEPS, three_batches
from tests.whole_rounds.world import KNOWN, NEW, TRAIN, Library, N, agree, flat, gradient, near, task, two_rounds, view

ALPHA, BETA, DELTA = 0.3, 0.2, 1e-3
OPTIONS = {"inner_lr": ALPHA, "outer_lr": BETA, "local_steps": STEPS, "batch_size": BATCH}


def client_of(step):
    """A client's round from `step(w, b0, b1, b2) -> w`, taken STEPS times."""

    def client(round_, i, w, memory):
        for number in range(STEPS):
            w = step(w, *three_batches(round_, i, number))
        return w, None

    return client


def first_order(w, b0, b1, b2, beta=BETA):
    return w - beta * gradient(w - ALPHA * gradient(w, b0), b1)


def hessian_free(w, b0, b1, b2):
    v = gradient(w - ALPHA * gradient(w, b0), b1)
    difference = (gradient(w + DELTA * v, b2) - gradient(w - DELTA * v, b2)) / (2 * DELTA)
    return w - BETA * (v - ALPHA * difference)


@written_from(
    "CharlieDinh/pFedMe",
    "caf24b1",
    "FLAlgorithms/users/userperavg.py:42-69",
    "FLAlgorithms/optimizers/fedoptimizer.py:14-23",
    "FLAlgorithms/servers/serverbase.py:57-66",
)
@written_from("JedMills/MTFL-For-Personalised-DNNs", "b466822", "fl_algs.py:238-283", "optimisers.py:216-225")
def test_first_order_weighted_by_samples():
    """Both take `n_i / sum n` over the clients of the round."""
    library = Library(fm.perfedavg_fo(task(), **OPTIONS, weighting="samples"))
    agree(library, two_rounds(library.w, client_of(first_order), TRAIN))


@written_from(
    "TsingZ0/PFLlib",
    "d832e76",
    "system/flcore/clients/clientperavg.py:13-16",
    "system/flcore/clients/clientperavg.py:33-72",
    "system/flcore/servers/serverperavg.py:34-36",
    "system/flcore/optimizers/fedoptimizer.py:10-19",
)
def test_one_rate_and_two_calls():
    """beta is the learning rate, and a round calls `train` twice: it has 2 E floor(n / 2B) steps, each on 2B samples in half."""
    options = OPTIONS | {"outer_lr": ALPHA}
    library = Library(fm.perfedavg_fo(task(), **options, weighting="samples"))
    client = client_of(lambda w, b0, b1, b2: first_order(w, b0, b1, b2, beta=ALPHA))
    agree(library, two_rounds(library.w, client, TRAIN))


@pytest.mark.parametrize(("build", "step"), [(fm.perfedavg_fo, first_order), (fm.perfedavg, hessian_free)], ids=["FO", "HF"])
@written_from("KarhouTam/FL-bench", "06e658b", "src/client/perfedavg.py:21-24", "src/client/perfedavg.py:26-83")
@written_from("KarhouTam/Per-FedAvg", "f36580b", "perfedavg.py:80-127", "perfedavg.py:136-163")
def test_both_estimates_with_equal_weights(build, step):
    library = Library(build(task(), **OPTIONS))
    agree(library, two_rounds(library.w, client_of(step), [1] * N))


@written_from("CharlieDinh/pFedMe", "71ae947~1", "FLAlgorithms/users/userperavg.py:42-56")
def test_the_second_step_once_started_from_the_wrong_point():
    """Until 71ae947 the second step moved phi instead of w, which is SGD of two rates: w <- phi - beta g(phi; b1)."""

    def step(w, b0, b1, b2):
        phi = w - ALPHA * gradient(w, b0)
        return phi - BETA * gradient(phi, b1)

    library = Library(fm.perfedavg_fo(task(), **OPTIONS, weighting="samples"))
    differs(two_rounds(library.w, client_of(step), TRAIN)[0][0], flat(library.first.model), 0.05)


@written_from("JedMills/MTFL-For-Personalised-DNNs", "063c5db~1", "fl_algs.py:264-284")
def test_the_inner_loop_once_had_a_step_too_many():
    """Until 063c5db there were two inner steps on b0, where the paper has one: `meta.first_order` of two steps."""

    def step(w, b0, b1, b2):
        phi = w - ALPHA * gradient(w, b0)
        phi = phi - ALPHA * gradient(phi, b0)
        return w - BETA * gradient(phi, b1)

    library = Library(fm.perfedavg_fo(task(), **OPTIONS, weighting="samples"))
    differs(two_rounds(library.w, client_of(step), TRAIN)[0][0], flat(library.first.model), 0.005)


@written_from("CharlieDinh/pFedMe", "caf24b1", "FLAlgorithms/users/userperavg.py:73-88")
def test_a_client_tests_after_one_step_and_not_two():
    """They take a step of alpha and one of beta, both on test samples; the paper takes one step of alpha."""
    library = Library(fm.perfedavg_fo(task(), **OPTIONS))
    w = flat(library.last.model)
    for i in (KNOWN, NEW):
        one = w - ALPHA * gradient(w, view(i, "test_support"))
        near(library.tested(i), one)
        differs(one - BETA * gradient(one, view(i, "test_support")), one, 0.005)
