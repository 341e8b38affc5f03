"""MAML++: FedMeta with an inner rate learned for each leaf and step, judged by the query loss after every step.

Antoniou, Edwards, Storkey: "How to train your MAML", ICLR 2019, arXiv 1810.09502; the steps are those of the authors' code,
AntreasAntoniou/HowToTrainYourMAMLPytorch, few_shot_learning_system.py and inner_loop_optimizers.py.

| paper | here | shape |
|---|---|---|
| theta, alpha | `MetaSGD.params`, `MetaSGD.rates` | like the model; a leaf's are `[S]` |
| N, inner steps | `inner_steps` | S |
| v_i, importance of step i | `step_weights`, `multistep.annealed` | `[S]` |

Differs from the paper: its batch norms with statistics of each step, the cosine schedule of the outer rate and the first-order
rounds at the start are left out; clients take the place of tasks. The outer Adam starts afresh at every client, as in `fedmeta`;
with `outer_at="server"` it lasts, as in the paper. Steps beyond S in a test take the last rate.
"""

import jax
import jax.numpy as jnp

from fedjax_meta.builders import described, variant
from fedjax_meta.contract import Method, Reduction
from fedjax_meta.methods.fedmeta import fedmeta
from fedjax_meta.multistep import annealed, multi_step
from fedjax_meta.task import Task
from fedjax_meta.types import Scalar


@described("MAML, a rate for every step", "Antoniou et al. 1810.09502")
@variant(
    fedmeta,
    learned_rates=True,
    rates_per="step",
    step_weights=annealed(100),
    estimator=multi_step,
    inner_lr=0.01,
    inner_steps=5,
    batch_size=None,
)
def mamlpp(task: Task) -> Method:
    """MAML++. Every client, known or new, takes S full-batch steps on its support set with the learned rates.

    `step_weights=multistep.annealed(rounds)` says in how many rounds the last step comes to count alone.
    """


def _last(round_: Scalar, steps: int) -> jax.Array:
    del round_
    return (jnp.arange(steps) == steps - 1).astype(float)


_OPTIONS = {"learned_rates": True, "rates_per": "step", "inner_steps": 3, "batch_size": None}
REDUCES_TO = (
    Reduction(
        "MAML++ whose last step alone counts has the exact meta-gradient",
        "mamlpp",
        {"step_weights": _last, "inner_steps": 3, "batch_size": None},
        "fedmeta",
        _OPTIONS,
    ),
)
