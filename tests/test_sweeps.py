"""Rates may be traced: a sweep over hyper-parameters is one vmapped program, which gives what its runs give one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import placement
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
        state, _ = fm.blocks.run_rounds(algorithm, KEY, state, data, 2, most=2)
        support = data.client(1)["test_support"]
        return state, algorithm.personalize(KEY, state, support, None)

    together = jax.jit(jax.vmap(whole))(jnp.array(first), jnp.array(second))
    results = [jax.tree.map(lambda leaf, i=i: leaf[i], together) for i in (0, 1)]
    alone = jax.jit(whole)
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert problems.distance(results[i], alone(a, b)) < 1e-10
    assert problems.distance(results[0][0].model, results[1][0].model) > 1e-4


@pytest.mark.parametrize("uploads", ["noise", "tree", "adaptive"])
def test_members_that_train_side_by_side_have_noise_of_their_own(uploads):
    """Two members of one seed with rates near 0 differ by their noise alone, which no other member's noise removes."""
    noise = {
        "noise": (fm.uploads.clip(1.0), fm.uploads.noise(1.0)),
        "tree": (fm.uploads.clip(1.0), fm.uploads.noise(1.0, tree=2)),
        "adaptive": (fm.uploads.adaptive_clip(0.5, bit_noise=2.0), fm.uploads.noise(1.0)),
    }[uploads]
    federation = fm.Federation(cohort_size=3, uploads=noise, schedule=fm.schedules.passes(seed=1))
    members = fm.sweeps.members(fm.sweeps.grid(lr=[1e-9, 2e-9]), seeds=[1])
    state, _ = fm.sweep(
        lambda lr: fm.fedavg(problems.task(), lr=lr),
        members,
        problems.data(),
        rounds=1,
        federation=federation,
        devices=1,
        at_once=2,
    )
    first, second = (np.concatenate([np.ravel(leaf[i]) for leaf in jax.tree.leaves(state.model)]) for i in range(2))
    assert np.abs(first - second).max() > 1e-3


def test_rows_of_all_members_must_fit(monkeypatch):
    data, federation = problems.data(), fm.Federation(cohort_size=2)
    members = fm.sweeps.members(fm.sweeps.grid(lr=[0.1, 0.2, 0.3, 0.4]), seeds=[1])
    build = lambda lr: fm.fedper(problems.task(), lr=lr)  # noqa: E731
    shapes = fm.sweeps.state_shapes(build, members, data, federation)
    rows = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((shapes.personal, shapes.memory, shapes.residual)))
    for free, fits in ((rows, True), (rows - 1, False)):
        monkeypatch.setattr(placement, "free_bytes", lambda device, free=free: free)
        if fits:
            fm.sweep(build, members, data, rounds=1, federation=federation, devices=1)
        else:
            with pytest.raises(ValueError, match="4 runs, N=7 clients"):
                fm.sweep(build, members, data, rounds=1, federation=federation, devices=1)


def test_a_seed_that_a_key_would_cut_is_refused():
    with pytest.raises(ValueError, match=r"seed=4294967297 must be an integer of at least 0 and below 2\*\*32"):
        fm.sweeps.members([{"lr": 0.1}], seeds=[2**32 + 1])
