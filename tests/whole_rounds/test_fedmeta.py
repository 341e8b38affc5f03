"""Two rounds of FedMeta and FedMeta-Per (Nguyen and Cao, "Meta-learning and personalization layer in federated learning").

Client i adapts phi_{t+1} = phi_t - alpha grad f(phi_t; batch t of A_i), phi_0 = w, and steps along the gradient of F(w) =
mean over the batches of B_i of f(phi_k; batch). By the chain rule, with v = dF/dphi_k,

    v_t = (I - alpha H(phi_t; batch t)) v_{t+1},     dF/dalpha = - sum_t grad f(phi_t; batch t) * v_{t+1}.

With learned rates (Meta-SGD), alpha is a vector of w's shape. The server takes the mean of the clients' models, weighted by
the size of B_i. Personal entries, and their rates, stay with their client. A new client tries the personal part of every
trained one and keeps that of the lowest mean loss of its steps.
"""

import importlib
import inspect

import jax
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta.keys import tagged
from tests.whole_rounds.world import (
    HEAD,
    KNOWN,
    LATE,
    NEW,
    NOTHING,
    QUERY_SIZES,
    Library,
    N,
    check,
    cut,
    epochs,
    gradient,
    hessian_times,
    loss,
    near,
    order_key,
    rows,
    task,
    test_key,
    two_rounds,
    view,
)

ALPHA, BETA, BATCH, PASSES, SERVER = 0.3, 0.2, 4, 2, 0.7


def adapted(w, alpha, batches):
    """(phi_k, [(phi_t, batch t)]). An entry whose alpha is 0 does not adapt."""
    path = []
    for batch in batches:
        path.append((w, batch))
        w = w - alpha * gradient(w, batch)
    return w, path


def meta_gradient(w, alpha, support, query):
    """(dF/dw, dF/dalpha)."""
    phi, path = adapted(w, alpha, support)
    v, slope = np.mean([gradient(phi, batch) for batch in query], 0), np.zeros_like(w)
    for phi, batch in reversed(path):
        slope = slope - gradient(phi, batch) * v
        v = v - hessian_times(phi, alpha * v, batch)
    return v, slope


def support_of(round_, i, step=0, passes=PASSES):
    return epochs(jax.random.fold_in(order_key(round_, i), step), i, "support", BATCH, passes)


def test_batches(i):
    return epochs(tagged(test_key(), "order"), i, "test_support", BATCH, PASSES)


test_batches.__test__ = False


def maml_client(round_, i, w, memory):
    return w - BETA * meta_gradient(w, ALPHA, support_of(round_, i), cut(view(i, "query"), BATCH))[0], None


def metasgd_client(round_, i, both, memory):
    w, alpha = np.split(both, 2)
    steps = meta_gradient(w, alpha, support_of(round_, i), cut(view(i, "query"), BATCH))
    return both - BETA * np.concatenate(steps), None


def maml_test(w, i):
    phi, path = adapted(w, ALPHA, test_batches(i))
    return phi, np.mean([loss(*step) for step in path])


def metasgd_test(both, i):
    w, alpha = np.split(both, 2)
    phi, path = adapted(w, alpha, test_batches(i))
    return phi, np.mean([loss(*step) for step in path])


MAML, METASGD = (HEAD, maml_client, maml_test), (np.r_[HEAD, HEAD], metasgd_client, metasgd_test)


def test_the_meta_gradient_is_the_slope_of_the_loss_after_adaptation():
    support, query = support_of(0, 0), cut(view(0, "query"), BATCH)
    w, alpha = np.sin(np.arange(27.0)), 0.2 + 0.1 * np.cos(np.arange(27.0))

    def after(both):
        phi, _ = adapted(*np.split(both, 2), support)
        return np.mean([loss(phi, batch) for batch in query])

    both, step = np.r_[w, alpha], 1e-5
    slope = [(after(both + step * e) - after(both - step * e)) / (2 * step) for e in np.eye(54)]
    near(np.concatenate(meta_gradient(w, alpha, support, query)), slope, 1e-8)


@pytest.mark.parametrize(
    ("build", "kept", "rules"),
    [
        (fm.fedmeta, False, MAML),
        (fm.fedmeta_metasgd, False, METASGD),
        (fm.fedmeta_per, True, MAML),
        (fm.fedmeta_per_metasgd, True, METASGD),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_two_rounds_and_their_tests(build, kept, rules):
    head, client, tested = rules
    method = build(task(), inner_lr=ALPHA, outer_lr=BETA, batch_size=BATCH, inner_steps=PASSES, outer_optimizer=optax.sgd)
    library, personal = Library(method, server_lr=SERVER), head if kept else np.zeros_like(head)
    w = library.w
    if client is metasgd_client:
        assert np.array_equal(w[27:], np.full(27, ALPHA))
    after = two_rounds(w, client, QUERY_SIZES, personal=personal, server_lr=SERVER)
    for number, state in enumerate((library.first, library.last)):
        model, own, _ = after[number]
        check(state, number + 1, model=model, personal=rows(own, w)[:, personal])
    model, own, _ = after[-1]
    for i in (KNOWN, LATE):
        near(library.tested(i), tested(np.where(personal, own[i], model), i)[0])
    tries = [tested(np.where(personal, own[i], model), NEW) for i in sorted(own)]
    near(library.tested(NEW), min(tries, key=lambda tried: tried[1])[0])
    if kept:
        # The choice is one: neither the server's own part nor another client's gives the same.
        assert len({round(score, 6) for _, score in tries}) == len(own) < N


def test_a_client_of_several_meta_steps_with_adam():
    """The defaults of the code behind the paper: K steps of Adam, which starts afresh in each round."""
    steps, rate = 3, 0.05
    library = Library(fm.fedmeta(task(), inner_lr=ALPHA, outer_lr=rate, batch_size=BATCH, meta_steps=steps))

    def client(round_, i, w, memory):
        first, second = np.zeros_like(w), np.zeros_like(w)
        for t in range(steps):
            g, _ = meta_gradient(w, ALPHA, support_of(round_, i, t, 1), cut(view(i, "query"), BATCH))
            first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
            unbiased = first / (1 - 0.9 ** (t + 1)), second / (1 - 0.999 ** (t + 1))
            w = w - rate * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
        return w, None

    for number, (w, _, _) in enumerate(two_rounds(library.w, client, QUERY_SIZES)):
        check((library.first, library.last)[number], number + 1, model=w)


def test_the_server_form_descends_along_the_sum():
    """theta - beta sum_i g_i at the server, with full-batch steps: all samples of a view count equally."""
    library = Library(fm.fedmeta_server(task(), inner_lr=ALPHA, outer_lr=BETA, batch_size=None, inner_steps=3))

    def one_round(w, cohort):
        gradients = [meta_gradient(w, ALPHA, [view(i, "support")] * 3, [view(i, "query")])[0] for i in cohort]
        return w - BETA * np.sum(gradients, 0)

    first = one_round(library.w, (4, 0, 2))
    last = one_round(first, (2, 1, 4))
    check(library.first, 1, model=first)
    check(library.last, 2, model=last)
    near(library.tested(NEW), adapted(last, ALPHA, [view(NEW, "test_support")] * 3)[0])


def test_personal_rates_may_stay_apart_from_personal_layers():
    """The head stays with its client, its rates are averaged: not the default."""
    options = {"inner_lr": ALPHA, "outer_lr": BETA, "batch_size": BATCH, "inner_steps": PASSES, "outer_optimizer": optax.sgd}
    library, personal = Library(fm.fedmeta_per_metasgd(task(), **options, personal_rates="none")), np.r_[HEAD, NOTHING]
    w, own, _ = two_rounds(library.w, metasgd_client, QUERY_SIZES, personal=personal)[-1]
    check(library.last, 2, model=w, personal=rows(own, library.w)[:, personal])


@pytest.mark.parametrize("build", [fm.fedmeta_per, fm.fedmeta_per_metasgd], ids=lambda build: build.__name__)
def test_only_some_leaves_adapt_and_the_fitted_loss_chooses(build):
    """ANIL: the head adapts, and the body gets its gradient through that. New clients choose by the loss after adaptation."""
    options = {"inner_lr": ALPHA, "outer_lr": BETA, "batch_size": BATCH, "inner_steps": PASSES, "outer_optimizer": optax.sgd}
    library = Library(build(task(), **options, adapts="head", score="fitted"))
    learned = build is fm.fedmeta_per_metasgd
    personal = np.r_[HEAD, HEAD] if learned else HEAD

    def rates(both):
        return HEAD * (both[27:] if learned else ALPHA)

    def client(round_, i, both, memory):
        steps = meta_gradient(both[:27], rates(both), support_of(round_, i), cut(view(i, "query"), BATCH))
        return both - BETA * (np.r_[steps[0], HEAD * steps[1]] if learned else steps[0]), None

    after = two_rounds(library.w, client, QUERY_SIZES, personal=personal)
    w, own, _ = after[-1]
    check(library.last, 2, model=w, personal=rows(own, library.w)[:, personal])

    def tested(i, of):
        start = np.where(personal, own[of], w)
        phi, _ = adapted(start[:27], rates(start), test_batches(i))
        return phi, loss(phi, view(i, "test_support"))

    near(library.tested(KNOWN), tested(KNOWN, KNOWN)[0])
    near(library.tested(NEW), min((tested(NEW, of) for of in sorted(own)), key=lambda tried: tried[1])[0])


PASSED_ON = {
    "inner_lr": 0.125,
    "outer_lr": 0.375,
    "learned_rates": True,
    "inner_optimizer": optax.adam,
    "outer_optimizer": optax.rmsprop,
    "outer_slots": "kept",
    "outer_at": "server",
    "server_sum": True,
    "adapts": "head",
    "personal": "body",
    "personal_rates": "none",
    "score": "fitted",
    "weighting": "samples",
}


@pytest.mark.parametrize("name", ["imaml", "perfedavg", "reptile", "perfedavg_reptile"])
def test_methods_of_the_family_pass_their_options_on(name, monkeypatch):
    given = {}
    module = importlib.import_module(fm.METHODS[name].__module__)
    monkeypatch.setattr(module, "fedmeta", lambda task, **options: given.update(options) or fm.fedmeta(task))
    options = {key: PASSED_ON[key] for key in inspect.signature(fm.METHODS[name]).parameters if key in PASSED_ON}
    fm.METHODS[name](task(), **options)
    assert {key: given[key] for key in options} == options
