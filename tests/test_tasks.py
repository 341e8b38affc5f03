"""Tasks beyond one label an image: their losses by NumPy, padding that changes no result, trees of samples in whole runs."""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import data as D
from fedjax_meta import task as T
from fedjax_meta import tasks
from fedjax_meta.data import transforms
from tests import problems

VOCABULARY, WIDTH, LENGTH = 7, 4, 5
KEY = jax.random.key(0)


def _init(key):
    table, cell, head = jax.random.split(key, 3)
    return {
        "table": jax.random.normal(table, (VOCABULARY, WIDTH)) / 2,
        "cell": jax.random.normal(cell, (2 * WIDTH, WIDTH)) / 2,
        "head": jax.random.normal(head, (WIDTH, VOCABULARY)) / 2,
    }


def _features(p, x):
    """States of a plain recurrent network after each token, `[B, T, d]`."""
    tokens = p["table"][x["tokens"].astype(int)]

    def step(state, token):
        state = jnp.tanh(jnp.concatenate([state, token], -1) @ p["cell"])
        return state, state

    start = jnp.zeros((tokens.shape[0], WIDTH))
    return jnp.swapaxes(jax.lax.scan(step, start, jnp.swapaxes(tokens, 0, 1))[1], 0, 1)


def _head(p, z):
    return z @ p["head"]


def token_task(**options):
    parts = {"features": _features, "head": _head, "layers": ("table", "cell", "head")}
    return fm.next_token(_init, lambda p, x: _head(p, _features(p, x)), **parts, **options)


def token_clients(length=LENGTH, filler=0, sizes=(9, 20, 14, 11)):
    """Ragged sequences that count upwards, each client with a step of its own; `filler` is the token of the padding."""
    rng, clients = np.random.default_rng(1), []
    for client, size in enumerate(sizes):
        lengths = rng.integers(1, LENGTH + 1, size)
        texts = [(np.arange(t + 1) * (1 + client % 3) + rng.integers(VOCABULARY)) % VOCABULARY for t in lengths]
        x, y = D.pad([text[:-1] for text in texts], length), D.pad([text[1:] for text in texts], length)
        inputs = {"tokens": np.where(x.weight, x.value, filler).astype(np.uint8), "user": np.full(size, client)}
        clients.append((inputs, T.Weighted(np.where(y.weight, y.value, filler), y.weight)))
    return fm.from_clients(clients, num_classes=VOCABULARY, scale="stored", num_ids={"tokens": VOCABULARY})


def run(name, data, task, *, rounds=2, store=None, **options):
    algorithm = problems.build(name, task, cohort_size=3, lanes=2, **options)
    state, records = fm.simulate(algorithm, data, key=KEY, rounds=rounds, store=store)
    return algorithm, state, records


# ------------------------------------------------------------------------------------------------------------- losses by NumPy


def _log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def test_losses_equal_numpy_over_the_entries_that_count():
    rng = np.random.default_rng(0)
    outputs = rng.normal(size=(4, 3, VOCABULARY))
    labels, weight = rng.integers(0, VOCABULARY, (4, 3)), np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]], bool)
    rows = np.array([1.0, 1, 1, 0])
    batch = T.Batch(None, T.Weighted(jnp.asarray(labels), jnp.asarray(weight)), jnp.asarray(rows))
    one = -np.take_along_axis(_log_softmax(outputs), labels[..., None], -1)[..., 0]
    counted = weight * rows[:, None]
    assert float(T.cross_entropy(outputs, batch)) == pytest.approx((one * counted).sum() / counted.sum(), rel=1e-12)

    real, weight = rng.normal(size=outputs.shape[:2]), rows[:, None] * np.ones((4, 3))
    batch, predicted = T.Batch(None, jnp.asarray(real), jnp.asarray(rows)), 2 * outputs[..., 0]
    gap = np.abs(predicted - real)
    assert float(tasks.squared_error()(predicted, batch)) == pytest.approx(np.average(gap**2, weights=weight), rel=1e-12)
    huber = np.where(gap <= 0.7, gap**2 / 2, 0.7 * (gap - 0.35))
    assert float(tasks.huber(0.7)(predicted, batch)) == pytest.approx(np.average(huber, weights=weight), rel=1e-12)

    several = rng.integers(0, 2, (4, 3))
    batch = T.Batch(None, jnp.asarray(several), jnp.asarray(rows))
    share = 1 / (1 + np.exp(-predicted))
    entropy = -np.where(several, np.log(share), np.log(1 - share))
    assert float(tasks.sigmoid_cross_entropy(predicted, batch)) == pytest.approx(
        np.average(entropy, weights=weight), rel=1e-12
    )


def test_the_huber_loss_of_a_regression_is_linear_beyond_its_delta():
    """Errors of 5 and 1 with delta 2: 2 (5 - 1) = 8 and 1/2."""
    task = fm.regression(lambda key: jnp.zeros(()), lambda p, x: p + 0 * x[:, 0], loss="huber", delta=2.0)
    batch = T.Batch(jnp.ones((2, 1)), jnp.array([5.0, 1.0]), jnp.ones(2))
    assert float(task.loss(jnp.zeros(()), batch, KEY)[0]) == pytest.approx((8 + 0.5) / 2)


def test_a_step_in_chunks_is_the_mean_over_all_real_tokens():
    data, task = token_clients(), token_task()
    variables, view = task.init(KEY), data.client(1)["train"]
    gradient = jax.grad(lambda v, batch: task.loss(v, batch, KEY)[0])
    whole = gradient(variables, view.full(1, chunk_size=50).get(0, 0))
    batches = view.full(1, chunk_size=4)
    in_chunks = batches.mean(lambda batch: gradient(variables, batch), 0)
    assert int(batches.chunks) > 1 and problems.distance(whole, in_chunks) < 1e-12


def test_the_loss_of_each_sample_by_itself_is_that_of_a_batch_of_one():
    data, task = token_clients(), token_task()
    variables, batch = task.init(KEY), data.client(1)["train"].in_order(4).get(0, 0)
    each = task.loss.of_samples(task.predict(variables, batch.x), batch)
    for i in range(4):
        one = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], batch)
        assert float(each[i]) == pytest.approx(float(task.loss(variables, one, KEY)[0]), rel=1e-12)


# -------------------------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("name", ["fedmeta_per", pytest.param("ditto", marks=pytest.mark.long)])
def test_no_result_depends_on_what_or_how_much_padding_there_is(name):
    task = token_task()
    results = []
    for data in (token_clients(), token_clients(length=LENGTH + 4, filler=6)):
        algorithm, state, records = run(name, data, task)
        scores = fm.evaluate(algorithm, KEY, state, data, metrics=("token_accuracy", "perplexity", "f1", "confusion", "top_2"))
        results.append((state.model, state.personal, records[-1].metrics, scores))
    assert problems.distance(results[0], results[1]) < 1e-9
    assert np.asarray(results[0][3].confusion).sum() == np.sum(token_counts(token_clients(), "test_query"))


def token_counts(data, view):
    """Real tokens of each client."""
    starts, sizes = data.start[view], data.size[view]
    return [int(data.y.weight[start : start + size].sum()) for start, size in zip(starts, sizes, strict=True)]


# --------------------------------------------------------------------------------------------- every method on every kind of task


def regression_task():
    init = lambda key: {"w": jax.random.normal(key, (3, 4)) / 2, "head": jnp.ones((4, 2))}  # noqa: E731
    features, head = lambda p, x: jnp.tanh(x @ p["w"]), lambda p, z: z @ p["head"]
    return fm.regression(init, lambda p, x: head(p, features(p, x)), features=features, head=head, layers=("w", "head"))


def regression_clients():
    rng, clients = np.random.default_rng(2), []
    for i, size in enumerate((12, 25, 18, 30)):
        x = rng.normal(size=(size, 3))
        clients.append((x, np.stack([x @ [1, i, -1], x[:, 0] ** 2], 1)))
    return fm.from_clients(clients, num_classes=0)


def label_task():
    return fm.multi_label(*_linear(3, 4), layers=("head",))


def test_labels_that_are_neither_0_nor_1_nor_between_are_refused():
    """Labels -1 and 1 have a loss without a lower bound."""
    rng = np.random.default_rng(0)
    signs = fm.from_clients([(rng.normal(size=(9, 3)), rng.choice([-1, 1], (9, 4))) for _ in range(3)], num_classes=0)
    message = "the sigmoid cross-entropy takes targets from 0 to 1, but one is -1"
    method, federation = fm.fedavg(label_task()), fm.Federation(cohort_size=2)
    with pytest.raises(ValueError, match=message):
        fm.simulate(method, signs, key=KEY, rounds=1, federation=federation)
    with pytest.raises(ValueError, match=message):
        fm.federate(method, federation).init(KEY, signs)
    with pytest.raises(ValueError, match=message):
        members = fm.sweeps.members([{"lr": 0.1}], [0])
        fm.sweep(partial(fm.fedavg, label_task()), members, signs, rounds=1, federation=federation)
    # In a program that cannot look at them, such a client is left out.
    algorithm = fm.federate(method, federation)
    _, info = jax.jit(algorithm.round)(KEY, jax.jit(algorithm.init)(KEY, signs), signs)
    assert not np.any(info.returned)
    labels = np.array([[0.0, 0.5, 1.0, -1.0]] * 9)
    unknown = fm.Weighted(labels, np.array([[1, 1, 1, 0]] * 9))
    of_samples = fm.Weighted(np.abs(labels), np.arange(1, 10))
    for y in (unknown, of_samples):
        fm.federate(method, federation).init(KEY, fm.from_clients([(np.ones((9, 3)), y)] * 3, num_classes=0))
    with pytest.raises(ValueError, match=message):
        fm.federate(method, federation).init(
            KEY, fm.from_clients([(np.ones((9, 3)), of_samples._replace(value=labels))] * 3, num_classes=0)
        )


def test_a_layer_that_no_leaf_has_is_refused_when_the_task_is_made():
    for make in (fm.classification, fm.regression):
        with pytest.raises(ValueError, match=r"layers=\('w', 'bb'\) names 'bb', but the variables are called b, w"):
            make(lambda key: {"w": jnp.zeros((4, 2)), "b": jnp.zeros(2)}, lambda p, x: x @ p["w"] + p["b"], layers=("w", "bb"))
    with pytest.raises(ValueError, match=r"layers=\('w', 'bb'\) names 'bb', but the variables are called w"):
        fm.from_loss(lambda key: {"w": jnp.zeros(2)}, lambda p, batch, key: jnp.sum(p["w"]), layers=("w", "bb"))


def test_integers_that_would_be_trained_are_named():
    def init(key):
        return {"w": jnp.zeros((5, 3)), "steps": jnp.zeros((), jnp.int32)}

    task = fm.classification(init, lambda p, x: x @ p["w"], layers=("w", "steps"))
    with pytest.raises(ValueError, match=r"the model's leaf \['steps'\] is int32\[\], which has no gradient"):
        fm.federate(fm.fedavg(task)).init(KEY, problems.data())
    # FedBABU's head is frozen, which may be of any type.
    fm.federate(fm.fedbabu(task)).init(KEY, problems.data())


def _linear(inputs, outputs):
    return (
        lambda key: {"head": jax.random.normal(key, (inputs, outputs)) / 2},
        lambda p, x: x @ p["head"],
    )


def label_clients():
    rng, clients = np.random.default_rng(3), []
    rule = rng.normal(size=(3, 4))
    for size in (12, 25, 18, 30):
        x = rng.normal(size=(size, 3))
        clients.append((x, (x @ rule > 0).astype(int)))
    return fm.from_clients(clients, num_classes=0)


def factor_task():
    """Matrix factorisation: a table of users and one of items."""
    init = lambda key: {  # noqa: E731
        "users": jax.random.normal(key, (4, 2)),
        "items": jax.random.normal(jax.random.fold_in(key, 1), (6, 2)),
    }
    predict = lambda p, x: jnp.sum(p["users"][x[0]] * p["items"][x[1]], -1)  # noqa: E731
    return fm.regression(init, predict, loss="huber", layers=("users", "items"))


def factor_clients():
    rng, sizes = np.random.default_rng(4), (12, 25, 18, 30)
    return fm.from_clients(
        [((np.full(n, i), rng.integers(0, 6, n)), rng.uniform(1, 5, n)) for i, n in enumerate(sizes)],
        num_classes=0,
        num_ids=(4, 6),
    )


KINDS = {
    "tokens": (token_task, token_clients),
    "regression": (regression_task, regression_clients),
    "several labels": (label_task, label_clients),
    "users and items": (factor_task, factor_clients),
}
REFUSALS = (
    "needs one class label a sample",
    "looks at features, but the task has no features and head",
    "balances softmax cross-entropy",
    "minimises a hinge loss of its own",
    "minimises a predictive loss of its own",
    "selects no leaf of this model",
    "leaves nothing for the hypernetwork",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", problems.sampled())
def test_every_method_trains_on_every_kind_of_task_or_says_what_it_needs(name, kind):
    task, data = KINDS[kind][0](), KINDS[kind][1]()
    try:
        algorithm = problems.build(name, task, cohort_size=3)
        state = jax.eval_shape(algorithm.init, KEY, data)
    except ValueError as error:
        assert any(words in str(error) for words in REFUSALS), error
        assert "\n" not in str(error)
        return
    moved, info = jax.eval_shape(algorithm.round, KEY, state, data)
    assert problems.forms(moved) == problems.forms(state) and info.metrics
    scores = jax.eval_shape(lambda key, state, data: fm.evaluate(algorithm, key, state, data), KEY, state, data)
    assert scores.confusion is None and len(scores.metrics) >= 2
    assert all(score.values.shape == (4,) for score in scores.metrics.values())


@pytest.mark.parametrize("name", ["feddbe", "gpfl", "mocha"])
def test_methods_that_read_the_width_of_a_head_say_that_they_need_labels(name):
    """They look for the width in the leaves of the head, of which Flax refuses some."""
    with pytest.raises(ValueError, match=f"{name} needs one class label a sample"):
        jax.eval_shape(problems.build(name, fm.models.char_lstm(20, 5, hidden=16)).init, KEY, token_clients())


@pytest.mark.parametrize(
    "kind", problems.chosen(((kind,) for kind in KINDS), lambda kind: kind in ("tokens", "users and items"))
)
def test_training_lowers_the_loss_and_a_host_store_changes_no_bit(kind):
    task, data = KINDS[kind][0](), KINDS[kind][1]()
    evaluators = {"all": fm.Evaluator(lambda k, s, d: fm.evaluate(algorithm, k, s, d), data, known=True)}
    algorithm = fm.federate(fm.fedavg(task, lr=0.3, epochs=3), fm.Federation(cohort_size=4))
    untrained = algorithm.init(KEY, data)
    before = np.mean(fm.evaluate(algorithm, KEY, untrained, data).loss)
    options = {"key": KEY, "rounds": 20, "eval_every": 19, "evaluators": evaluators}
    held, again = fm.simulate(algorithm, data, state=jax.tree.map(np.asarray, untrained), store="memory", **options)
    state, records = fm.simulate(algorithm, data, state=untrained, **options)
    assert np.mean(records[-1].evaluations["all"].loss) < 0.9 * before
    assert problems.leaves_equal(jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, held))
    assert problems.distance(records[-1].evaluations, again[-1].evaluations) < 1e-12


def test_a_mapped_file_in_a_tree_is_not_copied_and_its_client_reads_its_own_rows(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(40.0).reshape(20, 2))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    x = {"signal": mapped, "user": [3] * 10 + [5] * 10}
    data = fm.from_partition(x, np.arange(20.0), np.arange(20), [10, 10], num_classes=0)
    assert np.shares_memory(data.x["signal"], mapped)
    few = D.pack(data, np.array([1, -1]), D.capacity(data, 2))
    batch = few.client(0)["train"].in_order(10).get(0, 0)
    assert np.array_equal(batch.x["signal"], mapped[10:]) and set(np.asarray(batch.x["user"])) == {5}
    assert not np.shares_memory(
        fm.from_partition(x, np.arange(20.0), np.arange(20)[::-1], [20], num_classes=0).x["signal"], mapped
    )


def test_what_changes_images_refuses_trees():
    data = token_clients()
    for call, message in (
        (lambda: transforms.rotate(data, np.zeros(4, int)), "rotate turns inputs that are one array"),
        (lambda: transforms.add_noise(data, 0.1, seed=0), "add_noise changes inputs that are one array"),
        (lambda: transforms.concept_shift(data, num_groups=2, seed=0), "concept_shift permutes labels that are one array"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# ----------------------------------------------------------------------------------------------------------------- any other loss


def test_from_loss_trains_any_loss_and_evaluates_it():
    def distance(p, batch, key):
        return T.weighted_mean(jnp.sum((batch.x - p["centre"]) ** 2, -1), batch.weight)

    data = regression_clients()
    task = fm.from_loss(lambda key: {"centre": jnp.ones(3)}, distance)
    algorithm = fm.federate(fm.fedavg(task, lr=0.3, epochs=5), fm.Federation(cohort_size=4))
    state, _ = fm.simulate(algorithm, data, key=KEY, rounds=20)
    means = [
        np.mean(data.x[start : start + size], 0) for start, size in zip(data.start["train"], data.size["train"], strict=True)
    ]
    centre = np.average(means, axis=0, weights=data.size["train"])
    assert np.allclose(state.model["centre"], centre, atol=0.1)
    scores = fm.evaluate(algorithm, KEY, state, data)
    start, size = data.start["test_query"][2], data.size["test_query"][2]
    wanted = np.mean(np.sum((data.x[start : start + size] - np.asarray(state.model["centre"])) ** 2, -1))
    assert float(scores.loss[2]) == pytest.approx(wanted, rel=1e-12) and set(scores.summary()) == {"loss"}


def test_a_task_that_predicts_nothing_has_its_loss_alone_on_labelled_data_too():
    data = problems.data()
    task = fm.from_loss(lambda key: jnp.zeros(5), lambda p, b, k: T.weighted_mean(jnp.sum((b.x - p) ** 2, -1), b.weight))
    algorithm = fm.federate(fm.fedavg(task), fm.Federation(cohort_size=2))
    state = jax.eval_shape(algorithm.init, KEY, data)
    scores = jax.eval_shape(lambda s: fm.evaluate(algorithm, KEY, s, data), state)
    assert scores.confusion is None and not scores.metrics and scores.loss.shape == (7,)


def test_a_method_of_more_than_the_tasks_variables_has_no_loss_where_it_is_opaque():
    task, data = factor_task(), factor_clients()
    opaque = fm.from_loss(task.init, lambda p, b, k: task.loss(p, b, k)[0], predict=task.predict, metrics=("mae",))
    algorithm = fm.federate(fm.apfl(opaque), fm.Federation(cohort_size=2))
    scores = fm.evaluate(algorithm, KEY, algorithm.init(KEY, data), data)
    assert scores.loss is None and set(scores.metrics) == {"mae"}
    assert set(scores.summary()) == {"mae_mean", "mae_std"} and np.isfinite(scores.metrics["mae"].values).all()


# ------------------------------------------------------------------------------------------------------------------- bad input

BAD = {
    "targets of another length": (
        lambda: _begin(token_task(), {"tokens": np.zeros((8, 5), int)}, np.zeros((8, 4), int), num_classes=VOCABULARY),
        "takes integer labels .* targets int32\\[1, 4\\] and outputs float64\\[1, 5, 7\\]",
    ),
    "regression of another shape": (
        lambda: _begin(regression_task(), np.zeros((8, 3)), np.zeros(8), num_classes=0),
        "the squared error takes outputs and targets of one shape",
    ),
    "a loss of each sample": (
        lambda: _begin(
            fm.from_loss(lambda key: jnp.zeros(3), lambda p, b, k: b.x @ p), np.zeros((8, 3)), np.zeros(8), num_classes=0
        ),
        "the task's loss must be one number",
    ),
    "outputs of a column": (
        lambda: _begin(
            fm.regression(
                lambda key: jnp.zeros(3),
                lambda p, x: (x @ p)[:, None],
                loss=fm.task.MeanLoss("own", lambda outputs, y: (outputs - y) ** 2),
            ),
            np.zeros((8, 3)),
            np.zeros(8),
            num_classes=0,
        ),
        r"own must give \[B, ...\] of B samples, but gives \[2, 2\] of 2 and \[3, 3\] of 3, with targets",
    ),
    "a loss that counts rows of padding": (
        lambda: _begin(
            fm.regression(
                lambda key: jnp.zeros(3), lambda p, x: x @ p, loss=lambda outputs, b: jnp.mean((outputs - b.y) ** 2)
            ),
            np.zeros((8, 3)),
            np.zeros(8),
            num_classes=0,
        ),
        "the task's loss does not read batch.weight",
    ),
    "statistics that count rows of padding": (
        lambda: _begin(
            fm.from_functions(
                lambda key: {"w": jnp.ones((3, 2)), "mean": jnp.zeros(3)},
                lambda v, x, *, train, key, weight: (
                    (x - v["mean"]) @ v["w"],
                    v | ({"mean": jnp.mean(x, 0)} if train else {}),
                ),
                (3,),
                trainable=lambda v: {"w": True, "mean": False},
            ),
            np.ones((8, 3)),
            np.ones(8, int),
            num_classes=2,
        ),
        r"the model's leaf \['mean'\] is renewed from samples without their weight",
    ),
    "an integer that would be trained": (
        lambda: fm.from_functions(
            lambda key: {"w": jnp.ones((3, 2)), "steps": jnp.zeros((), int)},
            lambda v, x, *, train, key, weight: (x @ v["w"], v),
            (3,),
        ),
        r"the model's leaf \['steps'\] is int(32|64), which has no gradient: make it a buffer, with trainable=",
    ),
    "a mean that would be trained": (
        lambda: fm.from_functions(
            lambda key: {"w": jnp.ones((3, 2)), "mean": jnp.zeros(3)},
            lambda v, x, *, train, key, weight: ((x - v["mean"]) @ v["w"], v | {"mean": v["mean"] + weight @ x}),
            (3,),
        ),
        r"the model's leaf \['mean'\] is renewed by apply: make it a buffer",
    ),
    "too small a vocabulary": (
        lambda: _begin(token_task(), {"tokens": np.zeros((8, 5), int)}, np.zeros((8, 5), int), num_classes=9),
        "the model has 7 outputs, but the data have num_classes=9",
    ),
    "features alone": (lambda: fm.regression(*_linear(2, 2), features=lambda p, x: x), "give both or none"),
    "metrics of nothing": (lambda: fm.from_loss(_init, lambda v, b, k: 0.0, metrics=("mae",)), "give predict too"),
    "an unknown loss": (lambda: fm.regression(*_linear(2, 2), loss="hubert"), "did you mean 'huber'"),
}


def _begin(task, x, y, **options):
    data = fm.from_clients([(x, y), (x, y)], **options)
    return fm.federate(fm.fedavg(task), fm.Federation(cohort_size=2)).init(KEY, data)


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case):
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_the_code_of_the_page_on_tasks_runs_as_it_stands(capsys):
    page = (Path(__file__).parents[1] / "docs" / "tasks.md").read_text(encoding="utf-8")
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    assert set(names["scores"].metrics) == {"token_accuracy", "close", "largest logit"}
    assert capsys.readouterr().out.count("\n") == 5
