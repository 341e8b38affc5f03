"""Two rounds of SCAFFOLD (Karimireddy et al., arXiv 1910.06378, algorithm 1), both options for the control variates.

K steps y = y - eta_l (g(y) + c - c_i); then c_i+ is grad f_i(x) (option I) or c_i - c + (x - y) / (K eta_l) (option II);
x = x + eta_g mean(y_i - x), c = c + 1/N sum(c_i+ - c_i), the sum over the cohort.
"""

import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.keys import tagged
from tests.whole_rounds.world import (
    COHORTS,
    HEAD,
    KNOWN,
    LATE,
    NEW,
    Library,
    N,
    check,
    descend,
    epochs,
    gradient,
    near,
    order_key,
    rows,
    task,
    test_key,
    view,
)

RATE, BATCH, SERVER = 0.15, 4, 0.7


@pytest.mark.parametrize("control", ["path", "gradient"])
def test_two_rounds(control):
    options = {"lr": RATE, "epochs": 2, "batch_size": BATCH, "finetune_epochs": 1, "finetune": "head"}
    library = Library(fm.scaffold(task(), **options, control=control), server_lr=SERVER)
    x, c, own = library.w, np.zeros(27), {}
    for number, cohort in enumerate(COHORTS):
        models, changes = [], []
        for i in cohort:
            y, c_i = x, own.get(i, np.zeros(27))
            batches = epochs(order_key(number, i), i, "train", BATCH, 2)
            for batch in batches:
                y = y - RATE * (gradient(y, batch) + c - c_i)
            new = gradient(x, view(i, "train")) if control == "gradient" else c_i - c + (x - y) / (len(batches) * RATE)
            changes.append(new - c_i)
            models.append(y)
            own[i] = new
        x, c = x + SERVER * (np.mean(models, 0) - x), c + np.sum(changes, 0) / N
        check((library.first, library.last)[number], number + 1, model=x, memory=rows(own, 0 * x), extra=c)
    for i in (KNOWN, LATE, NEW):
        batches = epochs(tagged(test_key(), "order"), i, "test_support", BATCH)
        near(library.tested(i), descend(x, RATE, batches, HEAD))
