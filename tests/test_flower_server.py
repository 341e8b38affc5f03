"""A round of the Flower app's server, on uploads that come without Flower: that of the simulation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import flower
from fedjax_meta.keys import tagged
from fedjax_meta.rounds import client as clients
from fedjax_meta.rounds.setting import CohortClient, Context, rows_of
from tests import problems
from tests.test_contract import method_of

KEY = jax.random.key(5)
FEDERATION = fm.Federation(cohort_size=4)


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "scaffold", "feddyn", "fednova", "feddbe", "qfedavg"])
def test_the_server_counts_the_clients_that_have_no_rows_there(name):
    """SCAFFOLD's c and FedDyn's h are means over all N clients."""
    method, data = method_of(name), problems.data()
    assert flower.why_not(method, FEDERATION, data) is None
    expected, _ = fm.simulate(method, data, key=KEY, rounds=1, federation=FEDERATION)
    serving = flower._Server(method, FEDERATION, data.select(np.array([2])), KEY)
    state, key = serving._state, jax.random.fold_in(serving._round_key, 0)
    ids = serving._algorithm.cohort(key, 0, data.num_clients)
    context = Context(flower._bare(state), data, ids, key)
    kept = jax.tree.map(lambda leaf: leaf[0], rows_of(state))

    def upload(id_):
        member = CohortClient(id_, jnp.asarray(False))
        return clients.client_round(
            serving._setting, jax.random.fold_in(tagged(key, "clients"), id_), id_, member, kept, context
        )

    sent = jax.jit(jax.vmap(upload))(ids)
    total = jax.tree.map(lambda leaf: leaf.sum(0), sent.sums)
    found = serving._step(key, state, total, sent.outputs, ids, serving._data)
    for part in ("model", "optimizer", "extra"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), getattr(found, part), getattr(expected, part)
        )
