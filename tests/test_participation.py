"""Clients that crash, are late or do part of their work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import from_clients, models, participation
from fedjax_meta.blocks import run_rounds
from fedjax_meta.participation import Participation
from fedjax_meta.task import Task, weighted_mean
from tests import problems

SIZES = (4, 6, 10)


@pytest.fixture(scope="module")
def data():
    sizes = np.array(SIZES)
    x = [np.full((n, 2), i + 1, np.float32) for i, n in enumerate(SIZES)]
    views = {name: (0 * sizes, sizes) for name in ("train", "support", "query")}
    return from_clients([(one, np.arange(len(one)) % 2) for one in x], views=views)


def climber():
    """The weight goes up by the client's number at each step of rate 1."""

    def loss(variables, batch, key):
        return -jnp.sum(variables) * weighted_mean(batch.x[:, 0], batch.weight), variables

    return Task(lambda key: jnp.zeros(2), loss, lambda v, x: x + v[None])


def fate(**by_client):
    """Client i gets the i-th entry."""
    table = {name: jnp.array(values) for name, values in by_client.items()}
    return lambda key, client: Participation(**{name: values[client] for name, values in table.items()})


def one_round(build, data, **options):
    algorithm = build(cohort_size=3, **options)
    before = algorithm.init(jax.random.key(0), data)
    after, info = jax.jit(algorithm.round)(jax.random.key(1), before, data)
    return before, after, info


def climbing(**options):
    return problems.build("fedavg", climber(), lr=1.0, batch_size=2, **options)


def test_a_participation_in_which_all_finish_changes_nothing(data):
    _, plain, _ = one_round(climbing, data)
    _, same, info = one_round(climbing, data, participation=lambda key, client: Participation())
    np.testing.assert_array_equal(plain.model, same.model)
    assert np.all(info.returned) and np.all(same.seen)


def test_whoever_works_at_all_takes_a_step(data):
    """A ten-thousandth of 2, 3 and 5 steps; a client that does nothing takes no part."""
    _, after, info = one_round(climbing, data, participation=fate(work=[1e-4, 1e-4, 0.0]))
    np.testing.assert_allclose(after.model, np.full(2, (4 * 1 + 6 * 2) / 10), rtol=1e-6)
    assert info.returned.tolist() == [True, True, False]


def test_weights_are_those_of_the_clients_that_return(data):
    # Clients take 2, 3 and 5 steps up of 1, 2 and 3.
    _, after, info = one_round(climbing, data, participation=fate(returned=[True, False, True]))
    np.testing.assert_allclose(after.model, (4 * 2 * 1 + 10 * 5 * 3) / 14, rtol=1e-6)
    assert info.returned.tolist() == [True, False, True]


def test_a_transformation_of_ones_own_is_told_whose_upload_came(data):
    """A late client has taken part, but its upload is not in the average."""
    told = fm.uploads.UploadTransform(
        name="told",
        init_server=lambda key, upload: (jnp.zeros(3, jnp.int32), jnp.zeros(3, bool)),
        server=lambda key, average, context, kept, measured: (average, (context.ids, context.returned)),
    )
    _, after, info = one_round(climbing, data, participation=fate(returned=[True, False, True]), uploads=(told,))
    ids, returned = after.aggregation.uploads[0]
    np.testing.assert_array_equal(ids, info.ids)
    np.testing.assert_array_equal(returned, np.asarray(info.ids) != 1)


@pytest.mark.parametrize("lanes", [1, 3])
def test_late_keeps_what_it_trained_and_crashed_keeps_what_it_had(data, lanes):
    rule = fate(returned=[False, True, True], crashed=[False, True, False])
    before, after, info = one_round(climbing, data, participation=rule, personal="all", lanes=lanes)
    np.testing.assert_array_equal(after.personal[0], [2, 2])
    np.testing.assert_array_equal(after.personal[1], before.personal[1])
    np.testing.assert_array_equal(after.personal[2], [15, 15])
    assert after.seen.tolist() == [True, False, True] and info.returned.tolist() == [False, False, True]


def test_part_of_the_work(data):
    # 2, 3 and 5 steps an epoch; a third of three epochs is one, half of 6, 9 and 15 steps is 3, 5 and 8.
    for share, steps in ((1 / 3, (2, 3, 5)), (0.5, (3, 5, 8)), (1.0, (6, 9, 15))):
        rule = fate(work=[share] * 3)
        _, after, _ = one_round(climbing, data, participation=rule, personal="all", epochs=3)
        np.testing.assert_array_equal(after.personal[:, 0], np.array(steps) * (1, 2, 3))
    _, after, _ = one_round(
        lambda **options: problems.build("mtfl", climber(), lr=1.0, batch_size=2, steps=4, private="all", **options),
        data,
        participation=fate(work=[0.25, 0.6, 1.0]),
    )
    np.testing.assert_array_equal(after.personal.variables[:, 0], [1, 3 * 2, 4 * 3])
    np.testing.assert_array_equal(after.memory.drawn, [2, 6, 8])


def test_no_work_is_no_part(data):
    _, after, info = one_round(climbing, data, participation=fate(work=[0.0, 1.0, 1.0]))
    np.testing.assert_allclose(after.model, (6 * 3 * 2 + 10 * 5 * 3) / 16, rtol=1e-6)
    assert info.returned.tolist() == after.seen.tolist() == [False, True, True]


NETWORK = models.Network((2,), 2, hidden=(3,), normed=("fc1",))


@pytest.mark.parametrize(
    ("name", "fault", "value"),
    problems.chosen(
        (
            (name, *fault)
            for name in ("fedavg", "fedadam", "mtfl", "mtfl_fedavg_adam", "fedmeta_per")
            for fault in (("crashed", True), ("returned", False), ("work", 0.0))
        ),
        lambda name, fault, value: fault == "returned" or name == "mtfl",
    ),
)
def test_a_round_from_which_no_client_returns(data, name, fault, value):
    rule = fate(**{fault: [value] * 3})
    task = models.from_linen(NETWORK, (2,), layers=("fc1", "head"), features="features", head="head")
    before, after, info = one_round(lambda **options: problems.build(name, task, **options), data, participation=rule)
    for a, b in zip(jax.tree.leaves(before[:3]), jax.tree.leaves(after[:3]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(after.round) == 1 and not np.any(info.returned)


def test_means_of_metrics_are_over_who_returned(data):
    def mean_loss(rule):
        algorithm = climbing(cohort_size=3, participation=rule)
        state = algorithm.init(jax.random.key(0), data)
        _, log = run_rounds(algorithm, jax.random.key(1), state, data, 1, most=1)
        return float(log.metrics["loss"][0])

    # The mean loss of client i over its steps: before step t both weights are (t - 1) i, the loss is -2 (t - 1) i^2.
    losses = [-2 * (i + 1) ** 2 * np.mean(np.arange(steps)) for i, steps in enumerate((2, 3, 5))]
    assert mean_loss(fate(returned=[True, False, True])) == pytest.approx(np.mean([losses[0], losses[2]]))
    assert np.isnan(mean_loss(fate(crashed=[True] * 3)))


def outcomes(rule, count=4000, client=0):
    return jax.vmap(lambda key: jax.tree.map(jnp.asarray, rule(key, jnp.int32(client))))(
        jax.random.split(jax.random.key(0), count)
    )


def test_unreliable_rates():
    found = outcomes(participation.unreliable(late=0.3, crashed=0.1))
    # Four standard errors of a share of 4,000.
    assert np.mean(found.crashed) == pytest.approx(0.1, abs=0.02)
    assert np.mean(found.returned) == pytest.approx(0.7, abs=0.03)


def test_who_is_late_is_drawn_for_each_client_and_round_and_apart_from_its_training(data):
    """The clients report a draw of the key that they train with."""
    method = fm.Method(
        init=lambda key: jnp.zeros(2),
        client=lambda key, received, samples: fm.Trained(received.model, {"draw": jax.random.uniform(key)}),
        personalize=fm.received_model,
        predict=lambda model, x: x + model[None],
        roles=fm.masks.roles(False, True),
    )
    rule = lambda key, client: Participation(returned=jax.random.uniform(key) < 0.5)  # noqa: E731
    algorithm = fm.federate(method, fm.Federation(cohort_size=3, participation=rule))
    step, state, late, draws = jax.jit(algorithm.round), algorithm.init(jax.random.key(0), data), [], []
    for r in range(10):
        _, info = step(jax.random.fold_in(jax.random.key(1), r), state, data)
        order = np.argsort(info.ids)
        late.append(~np.asarray(info.returned)[order])
        draws.append(np.asarray(info.metrics["draw"])[order])
    late, draws = np.array(late), np.array(draws)
    assert len(np.unique(late, axis=0)) > 1 and len(np.unique(late, axis=1).T) == 3
    assert 0 < np.mean(late == (draws < 0.5)) < 1


def test_stragglers_do_whole_epochs():
    found = np.asarray(outcomes(participation.stragglers(0.6, epochs=4)).work)
    values, counts = np.unique(np.round(found * 4, 5), return_counts=True)
    assert values.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(counts / found.size, [0.2, 0.2, 0.2, 0.4], atol=0.03)


def test_deadline():
    seconds = [1.0, 4.0]
    late = participation.deadline(seconds, limit=2.0, partial=False)
    partial = participation.deadline(seconds, limit=2.0, partial=True)
    key = jax.random.key(0)
    assert [bool(late(key, i).returned) for i in (0, 1)] == [True, False]
    assert [float(partial(key, i).work) for i in (0, 1)] == [1.0, 0.5]


def test_times_are_of_all_clients_where_some_are_selected():
    """A client has the time of its own number, wherever it stands among the selected ones."""
    chosen, seconds = np.array([5, 1, 6]), np.where(np.arange(7) == 1, 9.0, 1.0)
    some = problems.data().select(chosen)
    rule = participation.deadline(seconds, limit=2.0, partial=False)
    algorithm = problems.build("fedavg", cohort_size=3, devices=1, participation=rule)
    _, info = algorithm.round(jax.random.key(1), algorithm.init(jax.random.key(0), some), some)
    assert sorted(info.ids[info.returned].tolist()) == [5, 6]
    rule = participation.deadline(seconds[chosen], limit=2.0, partial=False)
    with pytest.raises(ValueError, match="participation knows 3 clients, but the data have N=7"):
        problems.build("fedavg", cohort_size=3, participation=rule).init(jax.random.key(0), some)


def test_bad_arguments():
    with pytest.raises(ValueError, match="late=1.5"):
        participation.unreliable(late=1.5)
    with pytest.raises(ValueError, match="share=-0.1"):
        participation.stragglers(-0.1, epochs=3)
    with pytest.raises(ValueError, match="epochs=1"):
        participation.stragglers(0.5, epochs=1)
    with pytest.raises(ValueError, match="seconds"):
        participation.deadline([1.0, 0.0], limit=1.0, partial=True)


def test_clients_that_do_not_crash_are_late_as_often_as_was_said():
    rule = participation.unreliable(late=0.5, crashed=0.4)
    parts = jax.vmap(lambda key: rule(key, jnp.int32(0)))(jax.random.split(jax.random.key(0), 4000))
    crashed, there = np.asarray(parts.crashed), np.asarray(parts.returned)
    assert crashed.mean() == pytest.approx(0.4, abs=0.04) and (~there)[~crashed].mean() == pytest.approx(0.5, abs=0.05)
