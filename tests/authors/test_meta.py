"""Meta-learning: MAML and its first-order form, Reptile, iMAML."""

import jax
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta.methods.fedopt import adaptive
from tests.authors.source import differs, written_from
from tests.whole_rounds.world import (
    COHORTS,
    Library,
    descend,
    epochs,
    flat,
    gradient,
    hessian,
    hessian_times,
    near,
    order_key,
    task,
    view,
)

ALPHA, BETA, BATCH = 0.3, 0.2, 4
STEPS = 3


def adapted(w, samples):
    path = [w]
    for _ in range(STEPS):
        path.append(path[-1] - ALPHA * gradient(path[-1], samples))
    return path


def task_gradient(w, i, first_order):
    """The gradient of the query loss after STEPS steps on ALL support samples, by the chain rule or without the Hessians."""
    support, path = view(i, "support"), adapted(w, view(i, "support"))
    v = gradient(path[-1], view(i, "query"))
    for phi in reversed(path[:-1]):
        v = v if first_order else v - ALPHA * hessian_times(phi, v, support)
    return v


def tensorflow_adam(rate):
    return adaptive("adam", rate, b2=0.999, tau=1e-8, initial=0.0, bias_correction=True)


@pytest.mark.parametrize("first_order", [False, True], ids=["MAML", "stop_grad"])
@written_from(
    "cbfinn/maml",
    "a7f45f1",
    "maml.py:79-108",
    "maml.py:134-149",
)
def test_maml(first_order):
    """A meta-batch is a cohort: K full steps on samples a, the loss on samples b, its mean over the tasks, and Adam.

    TensorFlow's Adam multiplies the rate by sqrt(1 - b2^t) / (1 - b1^t) and adds its epsilon to the root of v as it is, where
    optax adds it to the root of the corrected v.
    """
    options = {"inner_lr": ALPHA, "outer_lr": 0.05, "batch_size": None, "inner_steps": STEPS, "outer_at": "server"}
    build = fm.fedmeta_fomaml if first_order else fm.fedmeta
    library = Library(build(task(), **options, outer_optimizer=tensorflow_adam, weighting="uniform"))
    w, m, v = library.w, 0.0, 0.0
    for t, state in enumerate((library.first, library.last), 1):
        g = np.mean([task_gradient(w, i, first_order) for i in COHORTS[t - 1]], 0)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        w = w - 0.05 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-8)
        near(flat(state.model), w)


@written_from(
    "openai/supervised-reptile",
    "8f2b71c",
    "supervised_reptile/reptile.py:62-74",
    "supervised_reptile/variables.py:8-21",
)
def test_reptile():
    """old + epsilon (mean of the adapted - old). The published runs adapt by Adam with beta_1 = 0, which never starts afresh."""
    epsilon = 0.7
    library = Library(fm.reptile(task(), inner_lr=ALPHA, outer_lr=epsilon, inner_epochs=2, batch_size=BATCH))
    w = library.w
    for number, state in enumerate((library.first, library.last)):
        new = []
        for i in COHORTS[number]:
            batches = epochs(jax.random.fold_in(order_key(number, i), 0), i, "train", BATCH, 2)
            new.append(descend(w, ALPHA, batches))
        w = w + epsilon * (np.mean(new, 0) - w)
        near(flat(state.model), w)


def conjugate_gradient(product, b, steps, tolerance):
    x, r = 0 * b, b.copy()
    p = r.copy()
    for _ in range(steps):
        ap, rr = product(p), r @ r
        x, r = x + rr / (p @ ap) * p, r - rr / (p @ ap) * ap
        if r @ r < tolerance:
            break
        p = r + (r @ r) / rr * p
    return x


@written_from(
    "aravindr93/imaml_dev",
    "6a2a669",
    "examples/omniglot_implicit_maml.py:97-127",
    "examples/omniglot_implicit_maml.py:143-143",
    "implicit_maml/learner_model.py:84-103",
    "implicit_maml/learner_model.py:118-154",
    "implicit_maml/utils.py:45-98",
)
def test_imaml():
    """K plain steps, ONE step on the proximal term, and CG on (1 + damping) v + H v / (lambda + 10): not the paper's system.

    `args.cg_damping` is passed where the evaluator takes `regu_coef`, and `lam_damping` keeps its default of 10.
    """
    pull, damping, solver_steps = 2.0, 1.0, 5
    options = {"inner_lr": ALPHA, "outer_lr": BETA, "prox_weight": pull, "inner_epochs": STEPS, "batch_size": None}
    code = {"operator": "imaml_dev", "proximal": "last", "damping": damping, "cg_steps": solver_steps, "tolerance": 1e-12}
    build = lambda **more: fm.imaml(  # noqa: E731
        task(), **options, **more, outer_optimizer=optax.sgd, outer_at="server", weighting="uniform"
    )
    library, w = Library(build(**code)), None
    for number, state in enumerate((library.first, library.last)):
        w, grads = library.w if w is None else w, []
        for i in COHORTS[number]:
            support = view(i, "support")
            phi = adapted(w, support)[-1]
            phi = phi - ALPHA * pull * (phi - w)
            h = hessian(phi, support)
            product = lambda v, h=h: (1 + damping) * v + h @ v / (pull + 10)  # noqa: E731
            grads.append(conjugate_gradient(product, gradient(phi, view(i, "query")), solver_steps, 1e-10))
        w = w - BETA * np.mean(grads, 0)
        near(flat(state.model), w, 1e-7)
    differs(flat(Library(build()).last.model), w, 0.02)
