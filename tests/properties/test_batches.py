"""Batches: every sample of a view once an epoch, weights that mark the real rows, and means that do not depend on the chunks.

The samples of a view are numbers in a row, so that a batch shows which of them it holds. Sizes and keys are traced: each batch
size is compiled once.
"""

import math
from functools import cache
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedjax_meta.data import ClientView

S, MOST = 40, 17
SAMPLES = np.arange(S, dtype=np.float32)[:, None]
BATCH_SIZES = st.sampled_from([1, 4, 17, 20])
STARTS, SIZES = st.integers(0, S - MOST), st.integers(1, MOST)
SEEDS = st.integers(0, 2**31 - 1)


def _view(start, size, work=None):
    return ClientView(SAMPLES, np.zeros(S, np.int32), None, None, start, size, MOST, work)


@cache
def _passes(make, batch_size, epochs=1):
    """`(seed, start, size, number) -> (sample numbers [steps, B], weights [steps, B], steps)` of all steps up to the bound."""

    def run(seed, start, size, number):
        batches = make(_view(start, size), jax.random.key(seed), batch_size, epochs, number)
        taken = jax.vmap(lambda step: batches.get(step, 0))(jnp.arange(batches.max_steps))
        return taken.x[..., 0].astype(int), taken.weight, batches.steps

    return jax.jit(run)


def _real(found):
    """The samples of each real step, padding left out; checks that weights are 0 and 1 and that no step is empty."""
    samples, weight, steps = map(np.asarray, found)
    assert set(np.unique(weight)) <= {0.0, 1.0}
    rows = [list(row[w > 0]) for row, w in zip(samples[:steps], weight[:steps], strict=True)]
    assert all(rows)
    return rows


def _epochs(view, key, batch_size, epochs, number):
    del number
    return view.epochs(key, batch_size, epochs)


def _share(view, key, batch_size, epochs, number):
    return view.epochs(key, batch_size, epochs, share=number / 8)


def _endless(view, key, batch_size, epochs, number):
    return view.endless(key, batch_size, 12, first=number)


def _in_order(view, key, batch_size, epochs, number):
    return view.in_order(batch_size)


@given(seed=SEEDS, start=STARTS, size=SIZES, batch_size=BATCH_SIZES, epochs=st.sampled_from([1, 3]))
def test_every_pass_has_each_sample_once(seed, start, size, batch_size, epochs):
    rows = _real(_passes(_epochs, batch_size, epochs)(seed, start, size, 0))
    a_pass = math.ceil(size / batch_size)
    assert len(rows) == a_pass * epochs
    for epoch in range(epochs):
        mine = rows[epoch * a_pass : (epoch + 1) * a_pass]
        assert sorted(chain(*mine)) == list(range(start, start + size))
        assert all(len(row) == batch_size for row in mine[:-1])


@given(seed=SEEDS, start=STARTS, size=SIZES, batch_size=BATCH_SIZES, eighths=st.integers(0, 8))
def test_a_pass_over_a_share_has_that_many_different_samples(seed, start, size, batch_size, eighths):
    taken = list(chain(*_real(_passes(_share, batch_size)(seed, start, size, eighths))))
    assert len(taken) == len(set(taken)) == math.ceil(eighths * size / 8)
    assert set(taken) <= set(range(start, start + size))


@given(seed=SEEDS, start=STARTS, size=SIZES, batch_size=BATCH_SIZES, first=st.integers(0, 100))
def test_an_endless_sequence_is_pass_after_pass_and_continues_anywhere(seed, start, size, batch_size, first):
    whole = list(chain(*_real(_passes(_endless, batch_size)(seed, start, size, 0))))
    for begin in range(0, len(whole) - size + 1, size):
        assert sorted(whole[begin : begin + size]) == list(range(start, start + size))
    later = list(chain(*_real(_passes(_endless, batch_size)(seed, start, size, first))))
    both = min(len(whole), first + len(later)) - first
    assert both <= 0 or whole[first : first + both] == later[:both]


@given(start=STARTS, size=SIZES, batch_size=BATCH_SIZES)
def test_storage_order_is_kept(start, size, batch_size):
    rows = _real(_passes(_in_order, batch_size)(0, start, size, 0))
    assert list(chain(*rows)) == list(range(start, start + size)) and len(rows) == math.ceil(size / batch_size)


@cache
def _full(chunk_size):
    def run(start, size):
        batches = _view(start, size).full(1, chunk_size)
        return batches.mean(lambda batch: jnp.sum(batch.x[:, 0] * batch.weight) / jnp.maximum(batch.weight.sum(), 1), 0)

    return jax.jit(run)


@given(start=STARTS, size=SIZES, chunk_size=st.sampled_from([1, 3, 17, 96]))
def test_a_mean_over_chunks_is_the_mean_over_samples(start, size, chunk_size):
    assert np.isclose(_full(chunk_size)(start, size), np.mean(np.arange(start, start + size)), rtol=1e-6)


@jax.jit
def _performed(size, work):
    return _view(0, size, work).epochs(jax.random.key(0), 4).steps


@given(size=SIZES, eighths=st.integers(0, 8))
def test_a_client_that_stops_early_does_its_share_rounded_up(size, eighths):
    assert int(_performed(size, eighths / 8)) == math.ceil(eighths * math.ceil(size / 4) / 8)
