"""What devices exchange in a round: one sum, and never inside a loop of the dealing."""

import re
from functools import partial

import jax
import pytest

import fedjax_meta as fm
from tests.problems import build, data


@pytest.mark.parametrize("name", ["fedavg", "fedper", "fedmeta_per_metasgd"])
def test_dealing_needs_no_exchange(name):
    """CPU devices may come to independent collectives in different orders, and then wait for each other for ever.

    All that a round and an evaluation need is the sum over devices: index arithmetic is done by every device for itself.
    """
    algorithm = build(name, devices=2)
    key, state = jax.random.key(0), algorithm.init(jax.random.key(1), data())
    everything = jax.device_put(data(), state.round.sharding)
    test = partial(fm.evaluate, algorithm, devices=2)
    for function in (algorithm.round, test):
        text = jax.jit(function).lower(key, state, everything).compile().as_text()
        assert "all-reduce" in text
        assert not re.search(r"all-gather|all-to-all|collective-permute", text)
