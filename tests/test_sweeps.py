"""Rates may be traced: a sweep over hyper-parameters is one vmapped program, which gives what its runs give one by one."""

import jax
import jax.numpy as jnp
import pytest

import fedjax_meta as fm
from tests import problems

KEY = jax.random.key(6)
COMMON = {"cohort_size": 3}
SWEEPS = {
    "fedavg with fine-tuning": (
        lambda a, b, **o: problems.build("fedavg", lr=a, finetune_epochs=1, batch_size=32, **o),
        (0.05, 0.2),
        (0, 0),
    ),
    "fedprox": (
        lambda a, b, **o: problems.build("fedprox", lr=a, prox_weight=b, epochs=2, batch_size=32, **o),
        (0.05, 0.2),
        (0.0, 3.0),
    ),
    "maml": (
        lambda a, b, **o: problems.build("fedmeta", inner_lr=a, outer_lr=b, batch_size=None, **o),
        (0.05, 0.2),
        (0.01, 0.03),
    ),
    "meta-sgd with personal head": (
        lambda a, b, **o: problems.build("fedmeta_per", inner_lr=a, outer_lr=b, learned_rates=True, batch_size=None, **o),
        (0.05, 0.2),
        (0.01, 0.03),
    ),
}
ONE, TWO = {"devices": 1}, {"devices": 2, "lanes": 2}


@pytest.mark.parametrize(
    ("name", "layout"),
    problems.chosen(
        [*((name, ONE) for name in SWEEPS), ("meta-sgd with personal head", TWO)],
        lambda name, layout: layout is TWO or name == "fedavg with fine-tuning",
    ),
    ids=lambda value: value if isinstance(value, str) else f"{value['devices']} devices",
)
def test_a_vmapped_sweep_is_its_runs_one_by_one(name, layout):
    build, first, second = SWEEPS[name]
    data = problems.data()

    def whole(a, b):
        """Two rounds, then what a new client tests with."""
        algorithm = build(a, b, **COMMON, **layout)
        state = algorithm.init(KEY, data)
        state, _ = fm.simulation.run_rounds(algorithm, KEY, state, data, 2, most=2)
        support = data.client(1)["test_support"]
        return state, algorithm.personalize(KEY, state, support, None)

    together = jax.jit(jax.vmap(whole))(jnp.array(first), jnp.array(second))
    results = [jax.tree.map(lambda leaf, i=i: leaf[i], together) for i in (0, 1)]
    alone = jax.jit(whole)
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert problems.distance(results[i], alone(a, b)) < 1e-10
    assert problems.distance(results[0][0].model, results[1][0].model) > 1e-4
