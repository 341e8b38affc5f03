"""Few-shot clients, scores by support samples and steps, rates that change over rounds, given weights, mixed precision."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta import adaptation, rates, tasks
from fedjax_meta.data import episodes, synthetic
from tests import problems

KEY = jax.random.key(0)


def clusters(classes=8, each=12, spread=0.1):
    """Classes around centres that are far apart."""
    rng = np.random.default_rng(3)
    centres = rng.normal(size=(classes, 5))
    y = np.repeat(np.arange(classes), each)
    return centres[y] + spread * rng.normal(size=(len(y), 5)), y


# --------------------------------------------------------------------------------------------------------------------- episodes


def test_an_episode_has_its_ways_and_shots_and_the_samples_of_its_classes():
    x, y = clusters()
    marked = {"x": x, "label": y, "number": np.arange(len(y))}
    data = episodes(marked, y, 30, ways=3, shots=2, queries=4, classes=(1, 2, 4, 5, 7), seed=1)
    drawn = set()
    for start, size, cut in zip(data.start["train"], data.size["train"], data.size["support"], strict=True):
        mine = slice(start, start + size)
        numbers, labels, own = data.x["number"][mine], data.x["label"][mine], data.y[mine]
        assert len(set(numbers)) == size == 18 and cut == 6
        assert own[:6].tolist() == [0, 1, 2, 0, 1, 2] and np.bincount(own).tolist() == [6, 6, 6]
        assert len(set(zip(own, labels, strict=True))) == 3  # one class behind each way
        assert np.array_equal(data.x["x"][mine], x[numbers])
        drawn |= set(labels)
    assert drawn == {1, 2, 4, 5, 7}


BAD_EPISODES = {
    "too many ways": ({"ways": 9}, "ways=9 is more than the 8 classes"),
    "too few samples": ({"shots": 5, "queries": 8}, "class 0 has 12 samples, fewer than the 5 shots and 8 queries"),
    "an unknown class": ({"classes": (1, 2, 11)}, "classes name class 11, which has no samples"),
    "one way": ({"ways": 1}, "ways=1 must be an integer of at least 2"),
    "an unknown option": ({"num_classes": 3}, "episodes\\(\\) takes no 'num_classes'"),
}


@pytest.mark.parametrize("case", BAD_EPISODES)
def test_impossible_episodes_are_refused(case):
    options, message = BAD_EPISODES[case]
    with pytest.raises((ValueError, TypeError), match=message):
        episodes(*clusters(), 3, **{"queries": 2, "seed": 0, **options})


# ------------------------------------------------------------------------------------------------ shots and steps of new clients


def test_more_shots_and_more_steps_help_new_clients_of_new_classes():
    x, y = clusters(spread=0.5)
    new = episodes(x, y, 20, ways=3, shots=4, queries=6, classes=(4, 5, 6, 7), seed=2)
    task = fm.classification(lambda key: {"w": jnp.zeros((5, 3))}, lambda p, x: x @ p["w"])
    old = episodes(x, y, 6, ways=3, shots=4, queries=6, classes=(0, 1, 2, 3), seed=1)

    def build(steps):
        return fm.fedmeta(task, inner_lr=0.5, inner_steps=steps, batch_size=None)

    state = fm.federate(build(1)).init(KEY, old)
    found = adaptation.adaptation(build, KEY, state, new, samples=(3, None), steps=(1, 20))
    assert [(one.samples, one.steps) for one in found] == [(3, 1), (None, 1), (3, 20), (None, 20)]
    losses = [float(np.mean(one.evaluation.loss)) for one in found]
    assert losses[3] < losses[1] and losses[3] < losses[2]
    # One shot by hand: client 4 takes one step on its first 3 support samples.
    start = int(new.start["support"][4])
    one = fm.Batch(jnp.asarray(new.x[start : start + 3]), jnp.asarray(new.y[start : start + 3]), jnp.ones(3))
    moved = {"w": -0.5 * jax.grad(lambda p: task.loss(p, one, KEY)[0])({"w": jnp.zeros((5, 3))})["w"]}
    asked = slice(int(new.start["query"][4]), int(new.start["query"][4] + new.size["query"][4]))
    wanted = task.loss(moved, fm.Batch(jnp.asarray(new.x[asked]), jnp.asarray(new.y[asked]), jnp.ones(18)), KEY)[0]
    assert float(found[0].evaluation.loss[4]) == pytest.approx(float(wanted), rel=1e-6)


def test_sinusoids_are_scored_by_shots_as_a_regression():
    data, _, _ = synthetic.sinusoids(6, seed=0, size=40)
    init = lambda key: {"w": jax.random.normal(key, (1, 8)), "head": jnp.zeros(8)}  # noqa: E731
    task = fm.regression(init, lambda p, x: jnp.sin(x @ p["w"]) @ p["head"], layers=("w", "head"))
    method = fm.fedavg_ft(task, lr=0.01)
    state = fm.federate(method).init(KEY, data)
    views = {"support": "test_support", "query": "test_query"}
    found = adaptation.adaptation(method, KEY, state, data, samples=(2, 10), **views)
    assert {"mae", "rmse", "r2"} == set(found[0].evaluation.metrics)
    assert not np.allclose(found[0].evaluation.loss, found[1].evaluation.loss)


def test_steps_need_a_function_of_them():
    with pytest.raises(TypeError, match="give steps="):
        adaptation.adaptation(fm.fedavg(problems.task()), KEY, None, problems.data(), steps=(1,))


def test_known_clients_are_tested_on_samples_that_nobody_trained_on():
    """Labels are random: only those that a client learned by heart are predicted well."""
    rng = np.random.default_rng(1)
    data = fm.from_clients([(rng.normal(size=(40, 30)), rng.integers(0, 2, 40)) for _ in range(6)], num_classes=2)
    task = fm.classification(lambda key: jnp.zeros((30, 2)), lambda p, x: x @ p)
    method, key = fm.local_only(task, lr=0.5, epochs=20), jax.random.key(1)
    state, _ = fm.simulate(method, data, key=key, rounds=3, federation=fm.Federation(cohort_size=6))
    (mine,) = adaptation.adaptation(method, key, state, data, known=True)
    expected = fm.evaluate(method, key, state, data, support="test_support", query="test_query")
    np.testing.assert_array_equal(mine.evaluation.loss, expected.loss)
    assert mine.evaluation.summary()["accuracy_mean"] < 0.8


@pytest.mark.parametrize("name", ["steps", "samples"])
def test_one_number_in_place_of_several_gets_one_line(name):
    with pytest.raises(TypeError, match=f"{name}=5 must be several numbers"):
        adaptation.adaptation(fm.fedavg(problems.task()), KEY, None, problems.data(), **{name: 5})


def test_numbers_may_come_one_by_one_and_none_are_refused():
    method = fm.fedavg(problems.task())
    data = problems.data()
    state = fm.federate(method, fm.Federation(cohort_size=2)).init(KEY, data)
    found = adaptation.adaptation(method, KEY, state, data, samples=iter([1, 2]))
    assert [one.samples for one in found] == [1, 2]
    for options in ({"samples": ()}, {"steps": iter(())}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must hold a number at least"):
            adaptation.adaptation(lambda k: method, KEY, state, data, **options)


# ------------------------------------------------------------------------------------------------------------- rates over rounds


@pytest.mark.parametrize("name", ["fedavg", pytest.param("fedmeta_per", marks=pytest.mark.long)])
def test_a_rate_that_changes_equals_two_runs_with_one_rate_each(name):
    data, task = problems.data(), problems.task()
    rate = "lr" if name == "fedavg" else "outer_lr"
    schedule = optax.piecewise_constant_schedule(0.08, {2: 0.25})
    moving = rates.scheduled(fm.METHODS[name], task, rates={rate: schedule})
    setting = fm.Federation(cohort_size=3)
    state, _ = fm.simulate(moving, data, key=KEY, rounds=4, federation=setting)
    half, _ = fm.simulate(fm.METHODS[name](task, **{rate: 0.08}), data, key=KEY, rounds=2, federation=setting)
    whole, _ = fm.simulate(fm.METHODS[name](task, **{rate: 0.02}), data, key=KEY, rounds=4, federation=setting, state=half)
    assert problems.distance((state.model, state.personal), (whole.model, whole.personal)) < 1e-12
    assert not problems.leaves_equal(half.model, state.model)


@pytest.mark.parametrize("name", ["fedmeta", "fedmeta_per"])
def test_a_client_that_adapts_after_some_rounds_has_the_rate_of_that_round(name):
    """One step of rate 0.3 / 4 after two rounds, of a known client and of a new one, which takes a head of another client."""
    schedule = {"inner_lr": lambda round_: 0.3 * 0.5**round_}
    method = rates.scheduled(fm.METHODS[name], problems.task(), rates=schedule, batch_size=None)
    algorithm, data = fm.federate(method, fm.Federation(cohort_size=7, devices=1)), problems.data()
    state, _ = fm.simulate(algorithm, data, key=KEY, rounds=2)
    support = data.client(3)["test_support"].in_order(128).get(0, 0)
    heads = state.personal["head"] if name == "fedmeta_per" else jax.tree.map(lambda leaf: leaf[None], state.model["head"])
    starts = [{**state.model, "head": jax.tree.map(lambda leaf, i=i: leaf[i], heads)} for i in range(len(heads["b"]))]
    slope = jax.jit(jax.grad(lambda w: problems.task().loss(w, support, KEY)[0]))
    expected = [jax.tree.map(lambda w, g: w - 0.075 * g, start, slope(start)) for start in starts]
    known, new = (algorithm.personalize(KEY, state, data.client(3)["test_support"], client) for client in (3, None))
    assert problems.distance(known, expected[3 % len(expected)]) < 1e-12
    assert min(problems.distance(new, one) for one in expected) < 1e-12


def test_a_server_rate_follows_an_optax_schedule():
    data, task = problems.data(), problems.task()

    def run(rounds, state=None, **options):
        setting = fm.Federation(cohort_size=3, **options)
        return fm.simulate(fm.fedavg(task), data, key=KEY, rounds=rounds, federation=setting, state=state)[0]

    falling = optax.piecewise_constant_schedule(1.0, {2: 0.5})
    moved = run(3, server_optimizer=lambda rate: optax.sgd(lambda step: rate * falling(step)), server_lr=0.8)
    half = run(2, server_lr=0.8)
    assert problems.distance(moved.model, run(3, half, server_lr=0.4).model) < 1e-12


def test_a_sweep_may_be_over_the_start_of_a_schedule():
    def build(lr):
        return rates.scheduled(fm.fedavg, problems.task(), rates={"lr": optax.exponential_decay(lr, 1, 0.5)}, batch_size=5)

    data, federation = problems.data(), fm.Federation(cohort_size=3, devices=1)
    members = fm.sweeps.members(fm.sweeps.grid(lr=[0.1, 0.2]), [1])
    state, _ = fm.sweep(build, members, data, rounds=3, federation=federation)
    for number, lr in enumerate([0.1, 0.2]):
        alone, _ = fm.simulate(build(lr), data, key=jax.random.key(1), rounds=3, federation=federation)
        assert problems.distance(jax.tree.map(lambda leaf, i=number: leaf[i], state.model), alone.model) < 1e-7


def test_what_cannot_be_scheduled_is_refused():
    task = problems.task()
    for build, given, message in (
        (fm.fedavg, {"lr": 0.1}, r"rates\['lr'\]=0.1 must be a function \(round\)"),
        (fm.fedavg, {}, "rates={} must be a dict"),
        (fm.fedavg, {"lr": lambda round_: jnp.ones(3)}, r"rates\['lr'\] must give one number for a round, not"),
        (fm.fedavg, {"lr": lambda round_: "a"}, r"rates\['lr'\] must give one number for a round: "),
        (fm.fedavg, {"lr": lambda round_: None}, r"rates\['lr'\] must give one number for a round, not None"),
        (fm.fedavg, {"lr": lambda round_: 0.1 if round_ < 2 else 0.01}, r"rates\['lr'\] must take a traced round: jnp.where"),
        (fm.fedadam, {"server_lr": optax.cosine_decay_schedule(0.1, 10)}, "gives server_lr to its own server optimiser"),
    ):
        with pytest.raises(ValueError, match=message):
            rates.scheduled(build, task, rates=given)


@pytest.mark.parametrize(("name", "option"), [("fedcac", "share"), ("fedpac", "noise")])
def test_an_option_that_must_be_a_number_is_named(name, option):
    method = rates.scheduled(fm.METHODS[name], problems.task(), rates={option: lambda round_: 0.5 * 0.9**round_})
    with pytest.raises(ValueError, match=f"{name} must know {option} before the run"):
        fm.simulate(method, problems.data(), key=KEY, rounds=1, federation=fm.Federation(cohort_size=3))


@fm.method_builder
def damped(task, *, damping=1.0, of="direction"):
    """FedAvg that reads a rate in one of its rules."""
    base = fm.fedavg(task)

    def direction(state, fell, statistics, weight, num_clients):
        return jax.tree.map(lambda leaf: damping * leaf, fell), statistics

    def predict(variables, x):
        return damping * task.predict(variables, x)

    return dataclasses.replace(base, **({"direction": direction} if of == "direction" else {"predict": predict}))


def test_the_direction_of_a_server_follows_the_round_and_a_rule_that_knows_none_refuses():
    schedule, setting = lambda round_: jnp.where(round_ < 1, 1.0, 0.0), fm.Federation(cohort_size=3)
    method = rates.scheduled(damped, problems.task(), rates={"damping": schedule})
    runs = [fm.simulate(method, problems.data(), key=KEY, rounds=n, federation=setting)[0].model for n in (1, 4)]
    assert problems.leaves_equal(*runs)  # from round 1 on the server stands still
    method = rates.scheduled(damped, problems.task(), rates={"damping": schedule}, of="predict")
    with pytest.raises(ValueError, match="damped reads damping in predict, which does not know the round"):
        method.predict(problems.task().init(KEY), jnp.ones((2, 5)))


def test_every_rule_that_knows_the_round_has_its_rate():
    """The rules give their rate, where those of a method would use it."""

    @fm.method_builder
    def telling(task, *, rate=1.0):
        def told(*given):
            return rate

        names = ("client", "personalize", "new_client", "update_extra", "direction", "inherit")
        collaboration = fm.Collaboration(told, reads="personal", gives="personal")
        return dataclasses.replace(fm.fedavg(task), **dict.fromkeys(names, told), collaborate=collaboration)

    method = rates.scheduled(telling, problems.task(), rates={"rate": lambda round_: 0.5**round_})
    for done in (0, 1, 4):
        of, later = (SimpleNamespace(round=jnp.int32(number)) for number in (done, done + 1))
        by_rule = {
            "client": method.client(KEY, of, None),
            "personalize": method.personalize(KEY, of, None),
            "new_client": method.new_client(KEY, of, None),
            "update_extra": method.update_extra(of, None, None, 3),
            "direction": method.direction(of, None, None, None, 3),
            "inherit": method.inherit(of, later),
            "collaborate": method.collaborate.mix(KEY, of, None, None),
        }
        assert {name: float(rate) for name, rate in by_rule.items()} == dict.fromkeys(by_rule, 0.5**done)


# ------------------------------------------------------------------------------------------------------ given weights, precision


def test_a_run_starts_from_given_weights_whole_or_in_part():
    task, data = problems.task(), problems.data()
    given = jax.tree.map(lambda leaf: leaf + 1, task.init(jax.random.key(7)))
    whole = fm.federate(fm.fedavg(tasks.starting_from(task, given))).init(KEY, data).model
    assert problems.leaves_equal(whole, given)
    fresh = fm.federate(fm.fedavg(task)).init(KEY, data).model
    part = fm.federate(fm.fedavg(tasks.starting_from(task, given, part="body"))).init(KEY, data).model
    assert problems.leaves_equal(part["body"], given["body"]) and problems.leaves_equal(part["head"], fresh["head"])
    with pytest.raises(ValueError, match=r"a value at every leaf of the task, but it has none at \['head'\]"):
        tasks.starting_from(task, {"body": given["body"]})
    with pytest.raises(ValueError, match=r"variables do not fit the task: \['head'\]\['b'\] is float64\[2\]"):
        tasks.starting_from(task, {**given, "head": {**given["head"], "b": jnp.zeros(2)}})
    broken = {**given, "head": {**given["head"], "b": given["head"]["b"] * jnp.nan}}
    with pytest.raises(ValueError, match=r"variables\['head'\]\['b'\] holds NaN"):
        tasks.starting_from(task, broken)


def test_mixed_precision_rounds_the_passes_and_nothing_else():
    task, data = problems.task(), problems.data()
    mixed = tasks.mixed_precision(task)
    variables, batch = task.init(KEY), data.client(2)["train"].in_order(16).get(0, 0)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (variables, batch.x))
    assert np.array_equal(mixed.predict(variables, batch.x), task.predict(*narrow).astype(jnp.float64))
    gradient = jax.grad(lambda v: mixed.loss(v, batch, KEY)[0])(variables)
    full = jax.grad(lambda v: task.loss(v, batch, KEY)[0])(variables)
    assert problems.forms(gradient) == problems.forms(full)
    assert 0 < problems.distance(gradient, full) < 0.05
    state, _ = fm.simulate(fm.fedrep(mixed), data, key=KEY, rounds=2, federation=fm.Federation(cohort_size=3))
    assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(state.model))
    with pytest.raises(ValueError, match="must be a floating-point type"):
        tasks.mixed_precision(task, jnp.int8)


def _products(jaxpr):
    """The types that the products of a program read, those in its loops too."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            found |= {var.aval.dtype for var in equation.invars}
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found |= _products(inner)
    return found


NETWORKS = {
    "mlp": lambda: (fm.models.mlp(inputs=6, hidden=(5,)), (6,)),
    "lenet": lambda: (fm.models.lenet(), (32, 32, 3)),
    "mtfl_cnn": lambda: (fm.models.mtfl_cnn(), (32, 32, 3)),
    "resnet18": lambda: (fm.models.resnet18(width=4), (32, 32, 3)),
    "sensor_cnn": lambda: (fm.models.sensor_cnn(), (128, 9)),
    "lora": lambda: (_adapted(fm.models.mlp(inputs=6, hidden=(5,))), (6,)),
}


def _adapted(task):
    return fm.lora.lora(task, task.init(KEY), rank=2)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_product_of_a_mixed_network_is_narrow(name):
    task, shape = NETWORKS[name]()
    mixed = tasks.mixed_precision(task)
    variables = jax.eval_shape(mixed.init, KEY)
    batch = fm.Batch(jnp.zeros((2, *shape)), jnp.zeros(2, jnp.int32), jnp.ones(2))

    def trained(variables):
        return jax.grad(lambda v: mixed.loss(v, batch, KEY)[0])(variables)

    for function in (trained, lambda variables: mixed.predict(variables, batch.x)):
        assert _products(jax.make_jaxpr(function)(variables).jaxpr) == {jnp.dtype(jnp.bfloat16)}


def test_mixed_precision_keeps_the_buffers_of_a_batch_norm_in_their_type():
    task, data = problems.normed_task(), problems.data()
    mixed = tasks.mixed_precision(task)
    variables, batch = task.init(KEY), data.client(2)["train"].in_order(16).get(0, 0)
    _, after = mixed.loss(variables, batch, KEY)
    assert problems.forms(after) == problems.forms(variables)
    assert problems.leaves_equal(after["params"], variables["params"])
    exact = task.loss(variables, batch, KEY)[1]
    assert problems.distance(after["batch_stats"], variables["batch_stats"]) > 0
    assert problems.distance(after["batch_stats"], exact["batch_stats"]) < 0.05


def test_mixed_precision_counts_and_averages_on_over_many_steps():
    """A counter beyond 256, a table, and a mean that moves by a hundredth a step: bfloat16 has 8 bits."""

    def init(key):
        return {"w": jnp.zeros((4, 3)), "steps": jnp.zeros((), int), "table": jnp.arange(1000), "mean": jnp.zeros(4)}

    def apply(variables, x, *, train, key, weight):
        moved = variables["mean"] + 0.01 * train * (jnp.mean(x, 0) - variables["mean"])
        return x @ variables["w"], {**variables, "steps": variables["steps"] + int(train), "mean": moved}

    trainable = {"w": True, "steps": False, "table": False, "mean": False}
    mixed = tasks.mixed_precision(fm.from_functions(init, apply, (4,), trainable=lambda variables: trainable))
    batch = fm.Batch(jnp.full((2, 4), 8.0), jnp.zeros(2, int), jnp.ones(2))
    step = jax.jit(lambda _, variables: mixed.loss(variables, batch, KEY)[1])
    after = jax.lax.fori_loop(0, 1000, step, mixed.init(KEY))
    assert after["steps"] == 1000 and np.array_equal(after["table"], np.arange(1000))
    np.testing.assert_allclose(after["mean"], 8 * (1 - 0.99**1000), rtol=1e-6)


@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_mixed_precision_serves_the_batch_norm_of_equinox(mode):
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        norm: eqx.nn.BatchNorm
        head: eqx.nn.Linear

        def __init__(self, key):
            self.norm = eqx.nn.BatchNorm(5, axis_name="batch", mode=mode)
            self.head = eqx.nn.Linear(5, 3, key=key)

        def __call__(self, x, state):
            x, state = self.norm(x, state)
            return self.head(x), state

    task = fm.from_equinox(eqx.nn.make_with_state(Net), (5,))
    variables, batch = task.init(KEY), problems.data().client(2)["train"].in_order(16).get(0, 0)
    after, exact = (one.loss(variables, batch, KEY)[1] for one in (tasks.mixed_precision(task), task))
    assert problems.forms(after) == problems.forms(variables)
    assert problems.distance(after["batch_stats"], exact["batch_stats"]) < 0.05


def test_a_limited_view_keeps_the_first_samples_of_each_client():
    data = problems.data()
    some = data.limited("support", 4)
    assert np.asarray(some.sizes("support")).tolist() == [min(4, n) for n in np.asarray(data.sizes("support"))]
    assert dict(some.max_size)["support"] == 4 and some.start is data.start and some.x is data.x
