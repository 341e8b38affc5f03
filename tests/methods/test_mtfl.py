"""MTFL: what is private, what is averaged, and the federated Adam against a NumPy reference."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_meta as fm
from fedjax_meta import local, masks, meta, models
from fedjax_meta.data import from_clients
from fedjax_meta.keys import tagged
from fedjax_meta.masks import Role
from fedjax_meta.methods.mtfl import adam
from fedjax_meta.task import Task, classification

SIZES = (12, 20, 33)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    clients = []
    for i, n in enumerate(SIZES):
        y = rng.integers(0, 3, n)
        # Clients differ in scale and offset, so that their batch norms do.
        x = (1 + i) * rng.normal(size=(n, 6)) + 2 * np.eye(6)[y] + i
        clients.append((x.astype(np.float32), y))
    sizes = np.array(SIZES)
    return from_clients(
        clients, views={name: (0 * sizes, sizes) for name in ("train", "support", "query", "test", "test_support")}
    )


@pytest.fixture(scope="module")
def task():
    return models.from_linen(
        models.Network((6,), 3, hidden=(5, 4), normed=("fc1",)),
        (6,),
        layers=("fc1", "fc2", "head"),
        features="features",
        head="head",
    )


def build(name, task, cohort_size=2, **options):
    """A method in a federation on one device."""
    return fm.federate(fm.METHODS[name](task, **options), fm.Federation(cohort_size=cohort_size, devices=1))


def run(algorithm, data, rounds=3):
    state = jax.jit(algorithm.init)(jax.random.key(1), data)
    step = jax.jit(algorithm.round)
    for r in range(rounds):
        state, _ = step(jax.random.fold_in(jax.random.key(2), r), state, data)
    return state


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_nothing_private_is_federated_averaging(task, data):
    options = {"lr": 0.1, "batch_size": 8}
    state = run(build("mtfl", task, private="none", **options), data)
    same(state.model.variables, run(build("fedavg", task, **options), data).model)


@pytest.mark.parametrize(("federated", "private"), [("none", "bn_stats"), ("bn_affine", "bn")])
def test_private_statistics_train_bit_for_bit_like_federated_ones(task, data, federated, private):
    """Training normalises by batches, so that it does not matter there who keeps the running statistics."""
    plain, private = (build("mtfl", task, private=mask, lr=0.1, batch_size=8) for mask in (federated, private))
    a, b = run(plain, data), run(private, data)
    same(a.model.variables["params"], b.model.variables["params"])
    # Only the test differs: there each client normalises by its own statistics.
    i = int(np.argmax(np.asarray(b.seen)))
    mine, shared = (
        algorithm.personalize(jax.random.key(0), state, data.client(i)["test"], i)
        for algorithm, state in ((private, b), (plain, a))
    )
    same(mine["params"], shared["params"])
    assert not np.allclose(mine["batch_stats"]["bn1"]["mean"], shared["batch_stats"]["bn1"]["mean"])


def test_fedbn_is_both_private_and_uniform(task, data):
    fedbn_state = run(build("fedbn", task, cohort_size=3), data)
    options = {"private": "bn", "lr": 0.01, "batch_size": 32, "weighting": "uniform"}
    same(fedbn_state, run(build("mtfl", task, cohort_size=3, **options), data))
    # The server's batch norm is never averaged, and the clients' own ones differ.
    assert np.all(np.asarray(fedbn_state.model.variables["params"]["bn1"]["scale"]) == 1)
    scale = np.asarray(fedbn_state.personal.variables["params"]["bn1"]["scale"])
    assert scale.shape == (3, 5) and not np.allclose(scale[0], scale[1])


@pytest.mark.parametrize("mask", ["none", "bn_affine", "bn_stats", "bn"])
@pytest.mark.parametrize("name", ["mtfl", "mtfl_fedavg_adam"])
def test_private_leaves_stay_and_the_rest_is_averaged(task, data, mask, name):
    algorithm = build(name, task, private=mask, **({"lr": 0.1} if name == "mtfl" else {}))
    before = algorithm.init(jax.random.key(1), data)
    after = run(algorithm, data)
    own = masks.resolve(mask, task)
    for keep, old, new in zip(jax.tree.leaves(own), *map(jax.tree.leaves, (before.model[0], after.model[0])), strict=True):
        assert np.array_equal(old, new) == keep
    kept = sum(jax.tree.leaves(own))
    slots = sum(jax.tree.leaves(masks.intersection(own, task.trainable(masks.variables_shape(task)))))
    federated = name == "mtfl_fedavg_adam"
    assert len(jax.tree.leaves(after.personal)) == kept + 2 * slots * federated


def test_statistics_never_go_through_an_adaptive_server(task, data):
    # From one start all clients do the same, so the averaged statistics must not depend on the server's optimiser.
    plain = run(build("fedavg", task, cohort_size=3, lr=0.1), data, rounds=1)
    adaptive = run(build("fedadam", task, cohort_size=3, lr=0.1, server_lr=1.0), data, rounds=1)
    same(plain.model["batch_stats"], adaptive.model["batch_stats"])
    assert not np.allclose(plain.model["params"]["head"]["kernel"], adaptive.model["params"]["head"]["kernel"])


@pytest.mark.parametrize(("name", "options"), [("fedadam", {"server_lr": 1.0}), ("fedavg_adam", {})])
def test_variances_stay_positive(task, data, name, options):
    """An average of the values is above 0; the old value less an average of differences may be rounded below it."""
    shrunk = task.init

    def init(key):
        variables = shrunk(key)
        return {**variables, "batch_stats": jax.tree.map(lambda leaf: leaf + 1e6, variables["batch_stats"])}

    state = run(build(name, task._replace(init=init), cohort_size=3, lr=0.1, epochs=20, **options), data, rounds=5)
    variables = state.model if isinstance(state.model, dict) else state.model.variables
    assert np.all(np.asarray(variables["batch_stats"]["bn1"]["var"]) > 0)


def test_slots_of_shared_leaves_are_buffers_and_those_of_private_leaves_are_personal(task):
    method = fm.mtfl_fedavg_adam(task)
    roles = {"/".join(masks.path_names(path)): role for path, role in jax.tree.leaves_with_path(method.roles)}
    for name, role in roles.items():
        own = "bn1" in name
        if name.startswith("slots"):
            assert role == (Role.PERSONAL if own else Role.BUFFER), name
        else:
            assert role == (Role.PERSONAL if own else Role.SHARED), name
    assert sum(role == Role.PERSONAL for role in roles.values()) == 2 + 2 + 2 * 2
    assert fm.mtfl_fedavg_adam(task, optimizer=adam).config == method.config


def softmax_gradient(body, head, x, y):
    """Mean cross-entropy gradient of the two-layer linear model, in float64."""
    h = x @ body
    z = h @ head
    p = np.exp(z - z.max(1, keepdims=True))
    p = (p / p.sum(1, keepdims=True) - np.eye(3)[y]) / len(y)
    return {"body": x.T @ (p @ head.T), "head": h.T @ p}


@pytest.mark.parametrize("private", ["none", "head"])
def test_federated_adam_against_numpy(data, private):
    """Three rounds of MTFL (FedAvg-Adam) by the formulas: full batches, unequal clients, all of which take part."""
    lr, epochs, rounds, b1, b2, eps = 0.05, 4, 3, 0.9, 0.999, 1e-7
    rng = np.random.default_rng(3)
    start = {"body": rng.normal(size=(6, 4)), "head": rng.normal(size=(4, 3))}
    linear = classification(
        lambda key: jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(float)), start),
        lambda p, x: x @ p["body"] @ p["head"],
        layers=("body", "head"),
    )
    with jax.enable_x64(True):
        options = {"lr": lr, "private": private, "epochs": epochs, "batch_size": 64}
        algorithm = build("mtfl_fedavg_adam", linear, cohort_size=3, **options)
        state = run(algorithm, data, rounds)
        seen_by = [algorithm.personalize(jax.random.key(0), state, data.client(i)["test"], i) for i in range(3)]

    server = {name: (leaf, 0 * leaf, 0 * leaf) for name, leaf in start.items()}
    count = 0
    own = [{name: server[name] for name in server if name == private} for _ in SIZES]
    begin = np.cumsum(SIZES) - SIZES
    for _ in range(rounds):
        results = []
        for i, n in enumerate(SIZES):
            x, y = data.x[begin[i] : begin[i] + n].astype(float), data.y[begin[i] : begin[i] + n]
            leaves, k = {**server, **own[i]}, count
            for _ in range(epochs):
                k += 1
                gradient = softmax_gradient(leaves["body"][0], leaves["head"][0], x, y)
                new = {}
                for name, (w, m, v) in leaves.items():
                    m2 = b1 * m + (1 - b1) * gradient[name]
                    v2 = b2 * v + (1 - b2) * gradient[name] ** 2
                    new[name] = (w - lr * (m2 / (1 - b1**k)) / (np.sqrt(v2 / (1 - b2**k)) + eps), m2, v2)
                leaves = new
            results.append((leaves, k))
            own[i] = {name: leaves[name] for name in own[i]}
        share = np.array(SIZES) / sum(SIZES)
        server = {
            name: tuple(sum(p * leaves[name][j] for p, (leaves, _) in zip(share, results, strict=True)) for j in range(3))
            for name in server
        }
        count = sum(p * k for p, (_, k) in zip(share, results, strict=True))
    assert count == pytest.approx(epochs * rounds)
    adam = state.model.slots[0]
    assert float(adam.count) == pytest.approx(epochs * rounds)
    for i in range(3):
        for name in start:
            w, m, v = own[i].get(name, server[name])
            np.testing.assert_allclose(seen_by[i][name], w, rtol=1e-7)
            slots = (state.personal.slots[0].mu[name][i], state.personal.slots[0].nu[name][i]) if name in own[i] else None
            found = slots or (adam.mu[name], adam.nu[name])
            np.testing.assert_allclose(found, (m, v), rtol=1e-6, atol=1e-12)


def test_identical_clients_are_like_one(task):
    rng = np.random.default_rng(0)
    one = (rng.normal(size=(16, 6)).astype(np.float32), rng.integers(0, 3, 16))

    def views(n):
        return {"train": (np.zeros(n, int), np.full(n, 16))}

    alone, many = from_clients([one], views=views(1)), from_clients([one] * 4, views=views(4))
    options = {"lr": 0.01, "batch_size": 16}
    states = [run(build("fedavg_adam", task, cohort_size=len(d.size["train"]), **options), d) for d in (alone, many)]
    for a, b in zip(*(jax.tree.leaves(state.model) for state in states), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def counting_task(samples):
    """The gradient of the loss counts visits: after SGD with rate 1, the weights are visits by batch size."""

    def loss(variables, batch, key):
        named = jnp.where(batch.x == jnp.arange(samples)[None], variables[None], 0)
        return -jnp.sum(batch.weight @ named) / batch.weight.shape[0], variables

    return Task(lambda key: jnp.zeros(samples), loss, lambda v, x: jnp.zeros((x.shape[0], 1)))


def test_the_feeder_continues_where_it_stopped():
    sizes = np.array([7, 10, 13])
    x = np.arange(30, dtype=np.float32)[:, None]
    parts = [(x[end - n : end], np.zeros(n, int)) for n, end in zip(sizes, np.cumsum(sizes), strict=True)]
    data = from_clients(parts, views={"train": (0 * sizes, sizes)}, num_classes=1)
    algorithm = build("mtfl", counting_task(30), lr=1.0, private="all", steps=2, batch_size=3)
    state = algorithm.init(jax.random.key(0), data)
    visits = np.zeros(3, int)
    step = jax.jit(algorithm.round)
    for r in range(9):
        state, info = step(jax.random.key(r), state, data)
        visits[np.asarray(info.ids)] += 6
        counts = np.rint(3 * np.asarray(state.personal.variables)).astype(int)
        for i, (n, end) in enumerate(zip(sizes, np.cumsum(sizes), strict=True)):
            mine = counts[i, end - n : end]
            assert counts[i].sum() == mine.sum() == visits[i]
            # Whole passes: no sample is ever more than one visit ahead of another.
            assert mine.max() - mine.min() <= 1
    np.testing.assert_array_equal(state.memory.drawn, visits)


def test_user_accuracy_is_of_the_received_model_with_own_patches(task, data):
    algorithm = build("mtfl", task, lr=0.1)
    watched = fm.with_user_accuracy(algorithm, devices=1)
    state = run(algorithm, data)
    key = jax.random.key(9)
    plain, _ = jax.jit(algorithm.round)(key, state, data)
    after, info = jax.jit(watched.round)(key, state, data)
    # The same round within another program: equal up to rounding.
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    scores = []
    for i in np.asarray(info.ids):
        variables = state.model.variables
        if state.seen[i]:
            mine = jax.tree.map(lambda leaf, i=i: leaf[i], state.personal.variables)
            variables = masks.merge(mine, masks.split(variables, masks.resolve("bn", task))[1])
        start = sum(SIZES[:i])
        x, y = data.x[start : start + SIZES[i]], data.y[start : start + SIZES[i]]
        scores.append(np.mean(np.argmax(task.predict(variables, x), 1) == y))
    assert float(info.metrics["user_accuracy"]) == pytest.approx(np.mean(scores))


@pytest.fixture(scope="module")
def statistics_by_hand(task, data):
    """Each client's running mean and variance after one full-batch meta-round with inner rate 0.3, written out."""

    def loss(moving, params, x, y):
        h = jax.nn.relu(x @ moving["kernel"].T + moving["bias"][None])
        centred = (h - h.mean(0)[None]) / jnp.sqrt(h.var(0)[None] + 1e-5)
        h = centred * params["bn1"]["scale"][None] + params["bn1"]["bias"][None]
        h = jax.nn.relu(h @ params["fc2"]["kernel"].T + params["fc2"]["bias"][None])
        logits = h @ params["head"]["kernel"].T + params["head"]["bias"][None]
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    gradient_of = jax.jit(jax.grad(loss))
    params = jax.jit(task.init)(tagged(jax.random.key(1), "model"))["params"]
    found = []
    for i in range(len(SIZES)):
        x, y = (np.asarray(part[sum(SIZES[:i]) : sum(SIZES[: i + 1])]) for part in (data.x, data.y))
        gradient = gradient_of(params["fc1"], params, x, y)
        kernel, bias = (np.asarray(params["fc1"][name] - 0.3 * gradient[name]) for name in ("kernel", "bias"))
        h = np.maximum(x @ kernel.T + bias[None], 0)
        found.append((0.1 * h.mean(0), 0.9 + 0.1 * h.var(0, ddof=1)))
    return found


@pytest.mark.parametrize("personal", ["bn", "head+bn"])
def test_meta_learning_with_private_batch_norm(task, data, statistics_by_hand, personal):
    """In a round a client adapts, and the statistics move once, by the adapted model on the query view."""
    algorithm = build("fedmeta", task, personal=personal, inner_lr=0.3, batch_size=None, cohort_size=3)
    state = run(algorithm, data, rounds=1)
    for i, (mean, variance) in enumerate(statistics_by_hand):
        mine = jax.tree.map(lambda leaf, i=i: leaf[i], state.personal)["batch_stats"]["bn1"]
        np.testing.assert_allclose(mine["mean"], mean, rtol=2e-4, atol=1e-6)
        np.testing.assert_allclose(mine["var"], variance, rtol=2e-4)
    assert np.all(np.asarray(state.model["batch_stats"]["bn1"]["var"]) == 1)


def test_meta_gradient_through_batch_norm(data):
    """Exact to finite differences in float64, with padded rows in the batches."""
    with jax.enable_x64(True):
        # ELU is smooth enough for finite differences.
        network = models.Network((6,), 3, hidden=(5,), normed=("fc1",), activation="elu", norm="before")
        task = models.from_linen(network, (6,), layers=("fc1", "head"))
        variables = jax.jit(task.init)(jax.random.key(0))
        parameters, buffers = masks.split(variables, task.trainable(variables))
        loss = local.parameter_loss(task, buffers)
        view = data.client(1)["train"]
        support = view.epochs(jax.random.key(1), 16).keyed(jax.random.key(2))
        query = view.in_order(32).as_one_step().keyed(jax.random.key(3))
        inner = meta.sgd(0.2)

        def after(parameters):
            adapted, _ = meta.adapt(loss, parameters, support, inner)
            return loss(adapted, query.get(0, 0))

        gradient = jax.jit(lambda p: meta.exact(inner)(loss, p, support, query).gradient)(parameters)
        after = jax.jit(after)
        rng = np.random.default_rng(0)
        for _ in range(3):
            direction = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), parameters)
            ahead, behind = (after(jax.tree.map(lambda p, d, h=h: p + h * d, parameters, direction)) for h in (1e-5, -1e-5))
            expected = sum(map(jnp.vdot, jax.tree.leaves(gradient), jax.tree.leaves(direction)))
            assert float((ahead - behind) / 2e-5) == pytest.approx(float(expected), rel=1e-6)


def test_renewed_statistics_are_those_of_the_model_that_is_tested(task, data):
    """After many passes they are the batch statistics of the received model, whose parameters have not moved."""
    algorithm = build("mtfl", task, lr=0.1, cohort_size=3, batch_size=33, statistics_epochs=200)
    state = run(algorithm, data)
    got = jax.jit(lambda state: algorithm.personalize(jax.random.key(0), state, data.client(2)["train"], 2))(state)
    own = masks.merge(
        jax.tree.map(lambda leaf: leaf[2], state.personal.variables),
        masks.split(state.model.variables, masks.resolve("bn", task))[1],
    )
    same(got["params"], own["params"])
    layer = jax.tree.map(np.asarray, own["params"]["fc1"])
    h = np.maximum(data.x[sum(SIZES[:2]) :] @ layer["kernel"].T + layer["bias"][None], 0)
    np.testing.assert_allclose(got["batch_stats"]["bn1"]["mean"], h.mean(0), rtol=1e-5)
    np.testing.assert_allclose(got["batch_stats"]["bn1"]["var"], h.var(0, ddof=1), rtol=1e-5)
    assert not np.allclose(own["batch_stats"]["bn1"]["mean"], h.mean(0), rtol=1e-2)


@pytest.mark.parametrize("name", ["mtfl", "mtfl_fedavg_adam"])
def test_fine_tuned_on_its_train_view_a_client_is_tested_after_its_local_training(task, data, name):
    """With the optimiser that it downloads, and its own slots, where these are federated."""
    options = {"lr": 0.05, "batch_size": 64, "epochs": 2}
    alone, tested = build(name, task, cohort_size=1, **options), build(name, task, finetune_epochs=2, **options)
    state = run(build(name, task, **options), data)
    after, info = jax.jit(alone.round)(jax.random.key(3), state, data)
    (client,) = np.asarray(info.ids)
    found = jax.jit(lambda state: tested.personalize(jax.random.key(0), state, data.client(client)["train"], client))(state)
    mine = jax.tree.map(lambda leaf: leaf[client], after.personal.variables)
    expected = masks.merge(mine, masks.split(after.model.variables, masks.resolve("bn", task))[1])
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_fine_tuning_goes_on_with_the_renewed_statistics(task, data):
    both, first, second = (
        build("mtfl", task, lr=0.05, batch_size=64, statistics_epochs=statistics, finetune_epochs=steps)
        for statistics, steps in ((3, 2), (3, 0), (0, 2))
    )
    state = run(first, data)
    support = data.client(1)["train"]
    expected = first.personalize(jax.random.key(0), state, support, 1)
    own = masks.split(expected, masks.resolve("bn", task))[0]
    rows = jax.tree.map(lambda kept, mine: kept.at[1].set(mine), state.personal.variables, own)
    moved = state._replace(personal=state.personal._replace(variables=rows))
    expected = second.personalize(jax.random.key(0), moved, support, 1)
    found = both.personalize(jax.random.key(0), state, support, 1)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_bad_arguments(task):
    without = models.mlp(inputs=6, hidden=(4,), classes=3)
    for mask in ("bn", "bn_affine", "bn_stats"):
        with pytest.raises(ValueError, match=f"private='{mask}'.* selects no leaf|no batch"):
            fm.mtfl(without, private=mask)
    with pytest.raises(ValueError, match="epochs=2 and steps=3"):
        fm.mtfl(task, epochs=2, steps=3)
    with pytest.raises(ValueError, match="steps=0"):
        fm.mtfl(task, steps=0)
    with pytest.raises(ValueError, match="lr=0"):
        fm.mtfl(task, lr=0.0)
    with pytest.raises(ValueError, match="statistics_epochs=-1"):
        fm.mtfl(task, statistics_epochs=-1)
    with pytest.raises(ValueError, match="finetune_epochs=-1"):
        fm.mtfl(task, finetune_epochs=-1)
    # C x W below 1 would be an empty cohort.
    with pytest.raises(ValueError, match="cohort_size=0"):
        build("mtfl", task, cohort_size=0)
