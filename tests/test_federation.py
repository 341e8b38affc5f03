"""A federation refuses at once what cannot work, by name."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta import masks
from tests import problems

BAD = {
    "cohort": ({"cohort_size": 0}, "cohort_size=0 must be an integer of at least 1"),
    "lanes": ({"lanes": 1.5}, "lanes=1.5 must be an integer of at least 1"),
    "precision": ({"precision": "half"}, "precision='half' is unknown; allowed are float32, tf32, bfloat16"),
    "weighting": ({"weighting": "size"}, "weighting='size' is unknown; allowed are samples, query, uniform"),
    "participation": ({"participation": 0.5}, "participation=0.5 must be a function"),
    "a built optimiser": ({"server_optimizer": optax.adam(0.1), "server_lr": 0.1}, "server_optimizer must be a factory"),
    "an optimiser without rate": ({"server_optimizer": optax.adam}, "server_optimizer needs server_lr, its rate"),
    "a rate of 0": ({"server_lr": 0.0}, "server_lr=0.0 must be finite and above 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_refused(case):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        fm.Federation(**options)


def test_a_rate_alone_does_not_silently_replace_a_methods_own_server_optimiser():
    with pytest.raises(ValueError, match="fedadam has a server optimiser of its own: server_lr=0.1 alone would replace it"):
        fm.federate(fm.fedadam(problems.task()), fm.Federation(server_lr=0.1))
    fm.federate(fm.fedadam(problems.task()), fm.Federation(server_optimizer=partial(optax.sgd, momentum=0.9), server_lr=0.1))


REFUSED = [
    ("fednova", {"uploads": (fm.uploads.clip(1.0),)}, "fednova cannot go with clip: it would shrink changes and the numbers"),
    ("fednova", {"uploads": (fm.uploads.adaptive_clip(1.0),)}, "fednova cannot go with adaptive_clip"),
    ("feddyn", {"weighting": "samples"}, "feddyn cannot go with weighting: its extra state is the mean"),
    ("feddyn", {"uploads": (fm.uploads.sparsify(0.5),)}, "feddyn cannot go with feedback: h_i follows what was sent"),
    ("feddbe", {"uploads": (fm.uploads.sparsify(0.5),)}, "feddbe cannot go with sparsify: the mean of features is sent once"),
    ("feddbe", {"uploads": (fm.uploads.clip(1.0),)}, "feddbe cannot go with clip without noise: it would shrink the mean of"),
    ("feddbe", {"aggregator": fm.aggregate.norm_bounding(1.0)}, "feddbe cannot go with an aggregator of changes"),
    (
        "fednova",
        {"aggregator": fm.aggregate.centered_clipping(1.0)},
        "fednova cannot go with centered_clipping: it would bound",
    ),
    (
        "pfedsim",
        {"server_optimizer": optax.sgd, "server_lr": 1.0},
        "pfedsim cannot go with server_optimizer: after the warm-up",
    ),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_what_a_methods_equations_do_not_bear_is_refused_by_name(name, options, message):
    with pytest.raises(ValueError, match=message):
        fm.federate(fm.METHODS[name](problems.task()), fm.Federation(**options))


@pytest.mark.parametrize("name", ["fedpac", "fedproto"])
def test_means_are_no_changes_that_a_rule_could_bound(name):
    for rule in (fm.aggregate.norm_bounding(1.0), fm.aggregate.bucketing(fm.aggregate.centered_clipping())):
        algorithm = fm.federate(fm.METHODS[name](problems.task()), fm.Federation(aggregator=rule))
        with pytest.raises(ValueError, match=f"{name} sends means, which are no changes: .* would bound how large they are"):
            jax.eval_shape(algorithm.init, jax.random.key(0), problems.data())


def test_feddbe_may_clip_where_noise_follows():
    fm.federate(fm.feddbe(problems.task()), fm.Federation(uploads=(fm.uploads.clip(1.0), fm.uploads.noise(1.0))))


def test_the_weighting_that_a_method_has_by_itself_is_not_refused():
    fm.federate(fm.feddyn(problems.task()), fm.Federation(weighting="uniform"))


def test_the_weighting_of_a_federation_says_which_view_the_data_must_have():
    """Not that of the method, where both are given: FedAvg counts train samples, FedMeta those of its query view."""
    x, y, none = np.ones((9, 5)), np.arange(9) % 3, np.zeros(3, int)
    views = {"train": (none, none + 5), "support": (none, none + 5)}
    data = fm.from_clients([(x, y)] * 3, num_classes=3, views=views)
    federation = fm.Federation(cohort_size=2, weighting="query")
    with pytest.raises(ValueError, match="weighted by the samples of their view 'query', which the data lack"):
        fm.federate(fm.fedavg(problems.task()), federation).init(jax.random.key(0), data)
    federation = fm.Federation(cohort_size=2, weighting="uniform")
    fm.federate(fm.fedavg(problems.task(), weighting="query"), federation).init(jax.random.key(0), data)


@pytest.mark.parametrize("name", ["fedpac", "fedproto"])
def test_sums_are_not_sent_without_their_numbers(name):
    algorithm = fm.federate(fm.METHODS[name](problems.task()), fm.Federation(uploads=(fm.uploads.sparsify(0.5),)))
    with pytest.raises(ValueError, match=f"{name} sends each sum together with the number of its terms; sparsify could"):
        algorithm.init(jax.random.key(0), problems.data())


def test_relations_need_all_clients():
    algorithm, some = problems.build("mocha", cohort_size=3), problems.data().select([2, 4, 6])
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="mocha relates all 7 clients, but the state has rows of 3 of them"):
        algorithm.round(key, algorithm.init(key, some), some)


def test_only_a_method_and_a_federation_are_put_together():
    with pytest.raises(TypeError, match=r"federate takes a method such as fm.fedavg\(task\), not fedavg"):
        fm.federate(fm.fedavg)
    with pytest.raises(TypeError, match="federate takes a Federation, not dict"):
        fm.federate(fm.fedavg(problems.task()), {"cohort_size": 3})


def test_roles_must_be_those_of_the_whole_model():
    method = fm.Method(
        init=problems.task().init,
        client=lambda key, received, data: fm.Trained(received.model, {}),
        personalize=fm.received_model,
        predict=problems.task().predict,
        roles={"body": fm.masks.Role.SHARED, "head": fm.masks.Role.SHARED},
    )
    with pytest.raises(ValueError, match=r"the roles of method must have one at every leaf .* one value at \['body'\]"):
        fm.federate(method).init(jax.random.key(0), problems.data())


@pytest.mark.parametrize("role", ["shared", "buffer", "personal", "frozen"])
def test_what_is_averaged_must_be_floating_point(role):
    """A flag or a counter may stay with its client, or never move."""
    method = fm.Method(
        init=lambda key: {"w": jnp.ones(2), "count": jnp.zeros((), jnp.int32)},
        client=lambda key, received, data: fm.Trained(received.model, {}),
        personalize=fm.received_model,
        predict=lambda variables, x: x,
        roles={"w": fm.masks.Role.SHARED, "count": fm.masks.Role(role)},
    )
    start = fm.federate(method, fm.Federation(cohort_size=3, devices=1)).init
    if role in ("shared", "buffer"):
        with pytest.raises(ValueError, match=r"\['count'\] of the model is int32\[\], which cannot be averaged"):
            start(jax.random.key(0), problems.data())
    else:
        assert start(jax.random.key(0), problems.data()).model["count"] == 0


def test_separate_models_need_their_shares_and_heirs_need_separate_models():
    method = fm.cfl(problems.task())
    with pytest.raises(ValueError, match="separate_models of cfl need divides_by_statistics=True"):
        fm.federate(replace(method, divides_by_statistics=False), fm.Federation())
    for lacking in ("separate_models", "whole_population"):
        with pytest.raises(ValueError, match="inherit of cfl needs separate_models=True and whole_population=True"):
            fm.federate(replace(method, **{lacking: False}), fm.Federation())
    roles = jax.tree.map(lambda _: masks.Role.BUFFER, method.roles)
    with pytest.raises(ValueError, match="separate_models of cfl must be shared leaves"):
        fm.federate(replace(method, roles=roles), fm.Federation())


@pytest.mark.parametrize("given", [1, [1], [0.0, 1.0, 2.0, 3.0]])
def test_heirs_are_a_number_of_each_model(given):
    method = replace(fm.cfl(problems.task()), inherit=lambda before, after: jnp.asarray(given))
    algorithm = fm.federate(method, fm.Federation(cohort_size=3))
    state = algorithm.init(jax.random.key(0), problems.data())
    with pytest.raises(ValueError, match=r"what inherit of cfl returns must be an array \[4\] of integer type"):
        jax.eval_shape(algorithm.round, jax.random.key(0), state, problems.data())


def test_separate_models_have_a_share_each():
    method = fm.ifca(problems.task(), clusters=2)

    def client(*given):
        return method.client(*given)._replace(statistics=jnp.ones(()))

    algorithm = fm.federate(replace(method, client=client), fm.Federation(cohort_size=3))
    state = algorithm.init(jax.random.key(0), problems.data())
    with pytest.raises(ValueError, match=r"the statistics of ifca, .* must be an array \[2\] of inexact type"):
        jax.eval_shape(algorithm.round, jax.random.key(0), state, problems.data())
