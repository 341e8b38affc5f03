"""Exported models: the same numbers elsewhere, in a process that knows nothing of this library."""

import dataclasses
import inspect
import itertools
import shutil
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fedjax_meta as fm
from fedjax_meta import checkpoint, export, models, tasks
from fedjax_meta.cli import app
from fedjax_meta.study import export as of_study
from fedjax_meta.study import run
from fedjax_meta.study.export import of_run
from tests import problems
from tests.study.common import Silent, study

pytest.importorskip("safetensors")

SYSTEMS = {
    "ditto": {"method": "ditto", "options": {"epochs": 1, "batch_size": 20}, "grid": {"lr": [0.05, 0.2]}},
    "tuned": {"method": "fedavg_ft", "options": {"epochs": 1, "batch_size": 20, "lr": 0.1}, "title": "Fine-tuned"},
    "fedrod": {"method": "fedrod", "options": {"epochs": 1, "batch_size": 20, "lr": 0.1}},
    "alone": {"method": "local_only", "options": {"epochs": 1, "batch_size": 20, "lr": 0.1}},
    "wild": {"method": "fedavg", "options": {"batch_size": 20, "lr": 1e308}},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    chosen, folder = study(systems=SYSTEMS, rounds=3), tmp_path_factory.mktemp("run")
    outcomes = run.run(chosen, folder, watcher=Silent())
    # A third seed later lies in a checkpoint of its own.
    chosen = study(systems=SYSTEMS, rounds=3, seeds=[1, 2, 5])
    outcomes = run.run(chosen, folder, watcher=Silent())
    return chosen, folder, {one.system: one for one in outcomes}


ELSEWHERE = """
import sys

import flax.linen as nn
import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file


class LogisticRegression(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10, name="head")(x.reshape(len(x), -1))


class LeNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i, features in enumerate((4, 6), 1):
            x = nn.max_pool(nn.relu(nn.Conv(features, (3, 3), padding=1, name=f"conv{i}")(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(12, name="fc1")(x.reshape(len(x), -1)))
        return nn.Dense(10, name="head")(x)


variables = unflatten_dict(load_file(sys.argv[1]), sep="/")
model = LeNet() if "conv1" in variables["params"] else LogisticRegression()
logits = model.apply(variables, np.load(sys.argv[2]))
assert not any(name.startswith("fedjax_meta") for name in sys.modules)
np.save(sys.argv[3], np.asarray(logits))
"""


def elsewhere(path, samples):
    """Logits of exported variables from a process without this library."""
    x, y = path.with_suffix(".x.npy"), path.with_suffix(".y.npy")
    np.save(x, np.asarray(samples, np.float32))
    subprocess.run([sys.executable, "-c", ELSEWHERE, path, x, y], check=True)
    return np.load(y)


def test_convolutions_predict_elsewhere_too(tmp_path):
    task = models.Network((8, 8, 1), 10, convs=((4, 3, 1), (6, 3, 1)), hidden=(12,))
    x = np.random.default_rng(0).normal(size=(5, 8, 8, 1)).astype(np.float32)
    variables = task.init(jax.random.key(0), x)
    variables = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), variables)
    export.save(tmp_path / "m.safetensors", export.flax_layout(variables))
    np.testing.assert_allclose(elsewhere(tmp_path / "m.safetensors", x), task.apply(variables, x), rtol=1e-4, atol=1e-5)


class Sensors(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i, features in enumerate((4, 5), 1):
            x = nn.max_pool(nn.relu(nn.Conv(features, (3,), padding="VALID", name=f"conv{i}")(x)), (2,), (2,))
        return nn.Dense(3, name="head")(nn.relu(nn.Dense(6, name="fc1")(x.reshape(len(x), -1))))


class Residual(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x):
        def norm(i, x):
            return nn.GroupNorm(2, epsilon=1e-5, name=f"norm{i}")(x)

        z = nn.Conv(self.width, (3, 3), self.stride, padding=1, use_bias=False, name="conv1")(x)
        z = norm(2, nn.Conv(self.width, (3, 3), padding=1, use_bias=False, name="conv2")(nn.relu(norm(1, z))))
        if x.shape != z.shape:
            x = norm(3, nn.Conv(self.width, (1, 1), self.stride, use_bias=False, name="shortcut")(x))
        return nn.relu(x + z)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), padding=1, use_bias=False, name="stem")(x)
        x = nn.relu(nn.GroupNorm(2, epsilon=1e-5, name="stem_norm")(x))
        for i in range(8):
            x = Residual(4 * 2 ** (i // 2), 2 if i in (2, 4, 6) else 1, name=f"block{i + 1}")(x)
        return nn.Dense(5, name="head")(x.mean((1, 2)))


@pytest.mark.parametrize("model", ["sensors", "ResNet"])
def test_networks_of_windows_and_residual_blocks_predict_in_plain_flax(model):
    rng = np.random.default_rng(0)
    if model == "sensors":
        task, x = models.sensor_cnn((21, 2), 3, convs=((4, 3), (5, 3)), hidden=(6,)), rng.normal(size=(4, 21, 2))
        plain = Sensors()
    else:
        task, x = models.resnet18((8, 8, 3), 5, width=4, groups=2), rng.normal(size=(4, 8, 8, 3))
        plain = ResNet()
    variables = task.init(jax.random.key(0))
    found = plain.apply(export.flax_layout(variables), x)
    np.testing.assert_allclose(found, task.predict(variables, x), atol=1e-9)


def test_every_model_of_own_layers_is_listed():
    named = {name for name, build in models.MODELS.items() if inspect.getmodule(build) is models.images}
    assert named <= set(export.OWN_LAYERS) <= set(models.MODELS)


@pytest.mark.parametrize(
    ("system", "seed", "group"),
    problems.chosen(
        itertools.product(["ditto", "tuned"], [1, 5], ["known", "new"]),
        lambda system, seed, group: (seed, group) == (5, "new"),
    ),
)
def test_an_exported_client_predicts_elsewhere_as_it_was_tested(made, system, seed, group, tmp_path):
    chosen, folder, outcomes = made
    clients = chosen.scenarios["pairs"].build()
    data, view, option = (clients.train, "test", "--client") if group == "known" else (clients.new, "query", "--new-client")
    path = tmp_path / "model.safetensors"
    result = CliRunner().invoke(
        app, ["export", str(folder), "--system", system, option, "1", "--seed", str(seed), "--out", str(path)]
    )
    assert result.exit_code == 0, result.output
    start, size = int(data.start[view][1]), int(data.size[view][1])
    samples = np.asarray(data.x)[start : start + size]
    if data.offset is not None:
        samples = (samples - np.asarray(data.offset)) * np.asarray(data.scale)
    correct = elsewhere(path, samples).argmax(-1) == np.asarray(data.y)[start : start + size]
    (trial,) = [one for one in outcomes[system].final if one.seed == seed]
    assert correct.mean() == pytest.approx(trial.rows[-1]["tests"][group]["accuracy"][1], abs=1e-6)


def test_the_header_says_what_it_is_and_the_server_has_one_model(made, tmp_path):
    from safetensors import safe_open

    _, folder, outcomes = made
    found = of_run(folder, "ditto", layout="flax")
    export.save(tmp_path / "a.safetensors", found.variables, found.about)
    with safe_open(tmp_path / "a.safetensors", "np") as file:
        header = file.metadata()
    assert (
        header["layout"] == "flax"
        and header["client"] == "the server's model"
        and header["round"] == "3"
        and header["seed"] == "1"
    )
    assert header["numbers"] == f'{{"lr": {outcomes["ditto"].chosen["lr"]}}}' and header["input_shape"] == "[8, 8, 1]"
    own = of_run(folder, "ditto", client=0).variables
    other = of_run(folder, "ditto", client=1).variables
    assert not np.allclose(own["params"]["head"]["kernel"], other["params"]["head"]["kernel"])


def test_a_model_of_a_run_starts_another_run(made):
    """Its kernels are those of the task, also where they are square and a transposed one would fit; files have Flax's."""
    chosen, folder, _ = made
    task, found = chosen.scenarios["pairs"].build().task, of_run(folder, "ditto")
    start = tasks.starting_from(task, found.variables).init(jax.random.key(0))
    assert found.about["layout"] == "as trained" and problems.distance(start, found.variables) == 0
    elsewhere = of_run(folder, "ditto", layout="flax").variables
    assert elsewhere["params"]["head"]["kernel"].shape == start["params"]["head"]["kernel"].shape[::-1]
    assert problems.distance(export.own_layout(elsewhere), start) == 0
    with pytest.raises(ValueError, match="layout='Flax' is unknown"):
        of_run(folder, "ditto", layout="Flax")


@pytest.mark.parametrize("damage", ["a byte", "cut off", "deleted"])
def test_a_model_whose_checkpoint_is_damaged_says_what_trains_it_again(damage, made, tmp_path):
    chosen, folder, _ = made
    place = tmp_path / "run"
    shutil.copytree(folder, place)
    for path in (place / "state/pairs").glob("ditto.final.*/*.ckpt"):
        content = path.read_bytes()
        middle = len(content) // 2
        if damage == "deleted":
            path.unlink()
        elif damage == "cut off":
            path.write_bytes(content[:-100])
        else:
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(ValueError, match="damaged" if damage != "deleted" else "no checkpoint of ditto") as raised:
        of_run(place, "ditto")
    # What the messages say, to the letter.
    results = place / "results/pairs/ditto.final.json"
    assert f"delete {results}" in str(raised.value)
    results.unlink()
    said = str(raised.value)
    while said:
        for states in (place / "state/pairs").glob("ditto.final.*"):
            if str(states) in said:
                shutil.rmtree(states)
        try:
            run.run(chosen, place, watcher=Silent())
            said = ""
        except checkpoint.UnreadableError as error:  # seeds that were added later have a folder of their own
            said = str(error)
            assert any(str(states) in said for states in (place / "state/pairs").glob("ditto.final.*"))
    assert problems.distance(of_run(place, "ditto").variables, of_run(folder, "ditto").variables) == 0


def test_the_model_of_a_run_that_diverged_says_so(made, tmp_path):
    path = tmp_path / "a.safetensors"
    result = CliRunner().invoke(app, ["export", str(made[1]), "--system", "wild", "--out", str(path)])
    assert result.exit_code == 0 and "this run diverged at round 1" in result.stderr and path.is_file()
    found = [of_run(made[1], system).about["diverged"] for system in ("wild", "tuned")]
    assert found == [1, None]


def test_the_model_is_that_of_the_results_where_rounds_and_seeds_grew_together(tmp_path):
    systems = {"tuned": SYSTEMS["tuned"]}
    run.run(study(systems=systems, rounds=1), tmp_path, watcher=Silent())
    (states,) = (tmp_path / "state" / "pairs").iterdir()
    shutil.copytree(states, tmp_path / "after round 1")
    (outcome,) = run.run(study(systems=systems, rounds=2, seeds=[1, 2, 5]), tmp_path, watcher=Silent())
    shutil.move(tmp_path / "after round 1", states.with_name("tuned.final.0"))  # it is found first
    for seed in (1, 5):
        assert of_run(tmp_path, "tuned", seed=seed).about["round"] == outcome.final[0].rows[-1]["round"] == 2
    shutil.rmtree(states)
    with pytest.raises(ValueError, match="no checkpoint of tuned with .* after round 2, of which its results are"):
        of_run(tmp_path, "tuned", seed=1)


def test_variables_come_back_in_any_structure(made, tmp_path):
    tree = {"a": {"b": jnp.arange(6.0).reshape(2, 3), "c": jnp.int32(4)}, "half": jnp.ones(3, jnp.bfloat16)}
    export.save(tmp_path / "t.safetensors", tree)
    back = export.load(tmp_path / "t.safetensors")
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    pair = (tree["a"], [jnp.zeros(2)])
    export.save(tmp_path / "p.safetensors", pair)
    again = export.load(tmp_path / "p.safetensors", like=pair)
    assert jax.tree.structure(again) == jax.tree.structure(pair)
    with pytest.raises(ValueError, match="0/b is not wanted"):
        export.load(tmp_path / "p.safetensors", like={"z": 1.0})
    # A method whose clients predict with more than the task's variables is exported whole.
    assert of_run(made[1], "fedrod", client=0).variables


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "nothing to export"),
        ({"k": jax.random.key(0)}, "random key"),
        ({"a": {"b": 1.0}, "a/b": 2.0}, "the name a/b"),
        ({"a": jnp.zeros(2, jnp.float8_e4m3fn)}, "the leaf a is float8_e4m3fn, which an export cannot hold"),
        ({"a": jnp.zeros(2, jnp.int4)}, "the leaf a is int4, which an export cannot hold"),
        ({"__metadata__": jnp.zeros(2)}, "cannot have the name __metadata__"),
    ],
)
def test_what_cannot_be_exported(tree, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export.save(tmp_path / "x.safetensors", tree)
    assert not (tmp_path / "x.safetensors").exists()


def test_a_file_of_another_program_may_have_leaves_that_no_tree_has(tmp_path):
    pytest.importorskip("safetensors.numpy").save_file({"a": np.ones(2), "a/b": np.zeros(3)}, tmp_path / "o.safetensors")
    with pytest.raises(ValueError, match="the leaf a has the name of the branch that holds a/b"):
        export.load(tmp_path / "o.safetensors")


def test_a_file_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model.npz must end with .safetensors"):
        export.save(tmp_path / "model.npz", {"a": 1.0})


BAD = {
    "no run": (["nowhere", "--system", "ditto"], "holds no run"),
    "no such system": (["RUN", "--system", "dito"], "system='dito' is unknown"),
    "no such seed": (["RUN", "--system", "ditto", "--seed", "9"], "seed=9 is not in the study, which has the seeds 1, 2, 5"),
    "no such client": (["RUN", "--system", "ditto", "--client", "8"], "client=8"),
    "a server that has none": (["RUN", "--system", "alone"], "clients of alone share no model"),
    "both": (["RUN", "--system", "ditto", "--client", "1", "--new-client", "1"], "give one of them"),
    "no such scenario": (["RUN", "--system", "ditto", "--scenario", "x"], "scenario='x' is unknown"),
}


def test_a_client_is_found_by_its_name_first():
    names = (("3", "4", "9"), ("7",))
    assert of_study._number("client", "9", names) == 2 and of_study._number("new_client", "7", names) == 0
    with pytest.raises(ValueError, match=r"client='0' is unknown; allowed are 3, 4, 9"):
        of_study._number("client", "0", names)
    with pytest.raises(ValueError, match="client='7' is a new client: give it as the new client"):
        of_study._number("client", "7", names)
    assert of_study._number("client", 2, names) == 2  # in Python, a number is a number
    for other in ((("ada", "bob"), ()), ((), ())):
        assert of_study._number("client", "1", other) == 1


@pytest.mark.parametrize(("words", "message"), BAD.values(), ids=BAD)
def test_bad_input_gets_one_line(made, words, message, tmp_path):
    words = [str(made[1]) if word == "RUN" else word for word in words]
    result = CliRunner().invoke(app, ["export", *words, "--out", str(tmp_path / "x.safetensors")])
    assert result.exit_code == 1 and message in " ".join(result.stderr.split())
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.long
def test_a_run_with_draws_stores_and_whole_numbers_in_its_grid(tmp_path):
    systems = {
        "fedper": {"method": "fedper", "options": {"batch_size": 20}, "grid": {"epochs": [1, 2], "lr": [0.1]}},
        "central": {"method": "fedavg", "options": {"lr": 0.1}, "pooled": True},
    }
    chosen = study(systems=systems, rounds=2, tuning={"rounds": 1}, data_seeds=[3, 4], store="host", seeds=[1, 2])
    outcomes = {(one.scenario, one.system): one for one in run.run(chosen, tmp_path / "run", watcher=Silent())}
    for place in ("pairs@3", "pairs@4"):
        clients = chosen.scenarios[place].build()
        found = of_run(tmp_path / "run", "fedper", scenario=place, seed=2, client=1)
        first, size = int(clients.train.start["test"][1]), int(clients.train.size["test"][1])
        x, y = (np.asarray(part)[first : first + size] for part in (clients.train.x, clients.train.y))
        x = (x.astype(np.float32) - found.about["offset"]) * found.about["scale"]
        head = found.variables["params"]["head"]
        correct = np.argmax(x.reshape(size, -1) @ head["kernel"].T + head["bias"], 1) == y
        trial = outcomes[place, "fedper"].final[1]
        assert correct.mean() == pytest.approx(trial.rows[-1]["tests"]["known"]["accuracy"][1], abs=1e-6)
        assert found.about["numbers"] == trial.numbers and found.about["round"] == 2
        assert of_run(tmp_path / "run", "central", scenario=place, new_client=0).variables
    with pytest.raises(ValueError, match="scenario='pairs' was drawn 2 times: give one of pairs@3, pairs@4"):
        of_run(tmp_path / "run", "fedper", scenario="pairs")
    with pytest.raises(ValueError, match="central is central training, which knows no clients"):
        of_run(tmp_path / "run", "central", scenario="pairs@3", client=0)


def test_the_model_of_a_client_of_a_subset_is_its_own():
    """Clients 3 and 5 of 7: their models are those that they have among all."""
    algorithm, key, data = problems.build("fedper", lr=0.3, cohort_size=7), jax.random.key(1), problems.data()
    state = algorithm.init(key, data)
    for i in range(2):
        state, _ = jax.jit(algorithm.round)(jax.random.fold_in(key, i), state, data)
    part = data.select(np.array([3, 5], np.int32))
    for place, client in enumerate((3, 5)):
        mine = export.personal(algorithm, key, state, part, place, support="train")
        assert problems.leaves_equal(mine, export.personal(algorithm, key, state, data, client, support="train"))


def test_the_model_has_the_precision_of_the_test():
    """On a GPU, products are not exact unless a program asks for it."""
    algorithm, data = fm.federate(fm.fedmeta(fm.models.mlp(5, (4,), 3), inner_lr=0.1)), problems.data()
    state = algorithm.init(jax.random.key(0), data)
    with fm.runtime.compiling_for("gpu"):
        text = str(
            jax.make_jaxpr(lambda key: export.personal(algorithm, key, state, data, 0, support="train"))(jax.random.key(1))
        )
    assert text.count("dot_general") == text.count("precision=(Precision.HIGHEST") > 0


def test_the_model_of_one_of_many_new_clients_is_the_one_that_was_tested():
    """MOCHA's memory of a client depends on how many clients trained, which new clients do not know."""
    data, new = problems.data(), problems.data()
    train = data.select(np.arange(2))
    train = dataclasses.replace(train, ids=None, population=None)
    task = fm.models.mlp(5, (4,), 3)
    algorithm = fm.federate(fm.mocha(task, regularisation=1.0), fm.Federation(cohort_size=2, devices=1))
    key, state = jax.random.key(3), algorithm.init(jax.random.key(0), train)
    tested = fm.evaluate(algorithm, key, state, new, support="train", query="test", known=False)
    for client in (0, 5):
        model = export.personal(algorithm, key, state, new, client, support="train", known=False)
        batch = new.client(client)["test"].in_order(64).get(0, 0)
        logits = np.asarray(algorithm.predict(model, batch.x))
        each = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), np.asarray(batch.y)]
        weight = np.asarray(batch.weight)
        np.testing.assert_allclose(tested.loss[client], (each * weight).sum() / weight.sum(), rtol=1e-6)
