"""Bad inputs: models, tasks, masks, scores, costs, evaluation, runs, checkpoints, reports."""

import os
import tempfile
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import fedjax_meta as fm
from fedjax_meta import checkpoint, costs, disk, evaluation, keys, masks, metrics, models, report
from tests import problems
from tests.battery.table import ALGORITHM, DATA, KEY, STATE, TASK, Late, Row, rows

NAN = float("nan")


class Moded(nn.Module):
    """Dropout by a flag that nobody sets."""

    @nn.compact
    def __call__(self, x, is_training=False):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not is_training)(x))


class Needing(nn.Module):
    """Takes something that nobody gives."""

    @nn.compact
    def __call__(self, x, mode, scale=1.0):
        return nn.Dense(3)(x)


class Normed(nn.Module):
    """Batch statistics without the flags that they need."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=False)(x))


MODELS = {
    **rows(models.mlp, {}, [
        ("inputs", 0, "inputs=0 must be an integer of at least 1"),
        ("inputs", "784", "inputs='784' must be an integer"),
        ("inputs", 2.5, "inputs=2.5 must be an integer"),
        ("hidden", (0,), "hidden=0 must be an integer"),
        ("hidden", 100, "hidden=100 must be a tuple of sizes"),
        ("hidden", "100", "hidden='100' must be a tuple of sizes"),
        ("hidden", (1.5,), "hidden=1.5 must be an integer"),
        ("classes", 1, "classes=1 must be an integer of at least 2"),
        ("classes", None, "classes=None must be an integer"),
        ("init", "toch", "init='toch' is unknown (did you mean 'torch'?)"),
        ("dtype", "int8", "dtype='int8' must be a floating-point type"),
        ("dtype", "float99", "dtype='float99' must be a floating-point type"),
        ("dtype", complex, "must be a floating-point type"),
        ("dtype", 16, "dtype=16 must be a floating-point type"),
    ]),
    **rows(models.lenet, {}, [
        ("image", (8, 8, 1), "image=(8, 8, 1) is too small for the convolutions"),
        ("image", (32, 32), "image=(32, 32) must be (height, width, channels)"),
        ("image", 32, "image=32 must be a tuple of sizes"),
        ("image", (32, 32, 0), "image=0 must be an integer"),
        ("image", ("a", 32, 3), "image='a' must be an integer"),
        ("form", "fast", "form='fast' is unknown"),
    ]),
    **rows(models.fedpac_cnn, {}, [("image", (), "image=() must be (height, width, channels)"), ("image", None, "image=None")]),
    **rows(models.mtfl_cnn, {}, [("norm", "befor", "norm='befor' is unknown (did you mean 'before'?)")]),
    **rows(models.from_linen, {"module": models.Network((5,), 3), "sample_shape": (5,)}, [
        ("module", models.Network, "module must be a Module, e.g. models.Network((784,), 10)"),
        ("module", None, "module must be a Module"),
        ("module", Moded(), "Moded.__call__ takes is_training, which would always be False: only train, training, deterministic"),
        ("module", Needing(), "Needing.__call__ takes mode, which has no value"),
        ("module", Normed(), "has batch statistics, so its __call__ must take train (or deterministic) and weight"),
        ("sample_shape", 5, "sample_shape=5 must be a tuple of sizes"),
        ("sample_shape", (0,), "sample_shape=0 must be an integer"),
        ("layers", "head", "layers='head' must be a tuple of different names"),
        ("layers", ("tail",), "names 'tail', but the parameters are called"),
        ("layers", None, "layers=None must be a tuple of different names"),
        ("features", "features", "must be given together"),
        ("loss", 3, "loss=3 must be a function (logits, batch)"),
        ("loss", "squarred", "loss='squarred' is unknown (did you mean 'squared'?)"),
    ]),
    "features that the module lacks": Row(
        lambda: models.from_linen(models.Network((5,), 3), (5,), features="body", head="head"), ("features='body' is not a",)
    ),
    **rows(fm.classification, {"init": lambda key: {}, "predict": lambda p, x: x}, [
        ("init", {}, "init={} must be a function (key)"),
        ("init", lambda: {}, "init must be a function (key), but <lambda> takes ()"),
        ("predict", None, "predict=None must be a function (parameters, x)"),
        ("predict", lambda x: x, "predict must be a function (parameters, x), but <lambda> takes (x)"),
        ("layers", "head", "layers='head' must be a tuple of different names"),
        ("layers", ("head", "head"), "must be a tuple of different names"),
        ("layers", (1,), "must be a tuple of different names"),
    ]),
}  # fmt: skip

TREE = {"body": 1, "head": 2}
MASKS = {
    **rows(masks.resolve, {"task": TASK}, [
        ("spec", "bodi", "mask='bodi' is unknown (did you mean 'body'?)"),
        ("spec", "head+tail", "mask='tail' is unknown"),
        ("spec", "last:-1", "mask='last:-1' is unknown"),
        ("spec", "last:x", "mask='last:x' is unknown; allowed are all"),
        ("spec", "last:3", "asks for the last 3 layers, but the task names 2 (body, head)"),
        ("spec", "bn", "mask='bn' selects no leaf of this model"),
        ("spec", "path:zzz", "mask='path:zzz' selects no leaf"),
        ("spec", "path:[", "mask='path:[' is not a regular expression"),
        ("spec", None, "mask must have a Python bool at every leaf"),
        ("spec", {"body": True}, "mask must have a Python bool at every leaf of the task's variables, but it has"),
        ("spec", masks.by_path, "mask must have a Python bool"),
        ("spec", lambda a, b: a, "mask must be a function (task), but <lambda> takes (a, b)"),
    ]),
    "a mask of no task": Row(lambda: masks.resolve("head", None), ("resolve's first argument must be a Task",)),
    "an array for a mask": Row(
        lambda: masks.resolve(jax.tree.map(lambda _: np.ones((), bool), masks.everything(problems.task())), problems.task()),
        ("mask must hold Python bools, not an array: a mask is read",),
    ),
    "last(-1)": Row(lambda: masks.last(-1), ("depth=-1 must be an integer",)),
    "first('1')": Row(lambda: masks.first("1"), ("depth='1' must be an integer",)),
    "a mask of other leaves": Row(lambda: masks.split(TREE, {"body": True, "neck": False}), ("it has a value at ['neck']",)),
    "a mask of fewer leaves": Row(lambda: masks.split(TREE, {"body": True}), ("it has none at ['head']",)),
    "a union with more leaves": Row(lambda: masks.union({"a": True}, {"a": True, "b": True}), ("it has none at ['b']",)),
    "an intersection of other leaves": Row(lambda: masks.intersection({"a": True}, {"b": True}), ("it has a value at ['a']",)),
    "halves with the same leaf": Row(lambda: masks.merge(TREE, TREE), ("have the same leaf twice",)),
    "halves of other trees": Row(lambda: masks.merge({"a": 1}, {"b": None}), ("the halves must have one structure",)),
    "a leaf that is personal and frozen": Row(
        lambda: masks.roles({"a": True}, {"a": True}, {"a": True}), ("a leaf cannot be personal and frozen",)
    ),
}  # fmt: skip

PIS = costs.RASPBERRY_PIS
TRAFFIC = costs.Traffic(1, 1)
SCORES = {
    **rows(metrics.summary, {"confusion": np.ones((2, 3, 3), int), "loss": np.ones(2)}, [
        ("confusion", np.ones((3, 3)), "confusion must be matrices [N, K, K] of N >= 1 clients, not of shape [3, 3]"),
        ("confusion", np.ones((0, 3, 3)), "confusion must be matrices [N, K, K]"),
        ("confusion", np.ones((2, 3, 4)), "confusion must be matrices [N, K, K]"),
        ("confusion", "x", "confusion must be one array of real numbers"),
        ("loss", np.ones(3), "loss must be [N=2], not of shape [3]"),
    ]),
    **rows(metrics.rounds_to_target, {"scores": [0.1, 0.2], "target": 0.2}, [
        ("scores", [], "scores must be [R] or [runs, R] with at least one score"),
        ("scores", [[0.1], [0.1, 0.2]], "scores must be one array of real numbers"),
        ("scores", "high", "scores must be one array of real numbers, not 'high'"),
        ("target", NAN, "target=nan must be a finite number"),
        ("target", "x", "target='x' must be a finite number"),
        ("rounds", [1], "rounds has shape (1,), but there are R=2 scores"),
        ("rounds", [1.5, 2.5], "rounds must be one array of integers"),
    ]),
    **rows(costs.traffic, {"method": ALGORITHM, "data": DATA}, [
        ("method", "fedavg", "federate takes a method such as fm.fedavg(task), not str"),
        ("data", None, "data must be a FederatedData"),
        ("federation", fm.Federation(), "this is an algorithm, which has its federation already"),
    ]),
    **rows(costs.gradient_flops, {"task": TASK, "data": DATA, "batch_size": 4}, [
        ("batch_size", 0, "batch_size=0 must be an integer"),
        ("task", None, "gradient_flops's first argument must be a Task"),
        ("data", [], "data must be a FederatedData"),
    ]),
    **rows(costs.client_times, {"bytes_": TRAFFIC, "flops": 1.0, "testbed": PIS}, [
        ("flops", 0, "flops=0 must be finite and above 0"),
        ("flops", [1.0], "flops=[1.0] must be one number"),
        ("bytes_", 5, "bytes_ must be a Traffic"),
        ("bytes_", costs.Traffic(-1, 1), "bytes_=[-1, 1] must be finite and at least 0"),
        ("testbed", None, "testbed must be a DeviceTestbed"),
        ("testbed", costs.DeviceTestbed((), 1.0), "testbed.devices must hold at least one costs.Device"),
        ("testbed", costs.DeviceTestbed((costs.Device("a", 1, 0, 1, 1),), 1.0), "rates=[1, 0, 1, 1] must be finite and above 0"),
    ]),
    **rows(costs.round_time, {"bytes_": TRAFFIC, "flops": 1.0, "testbed": PIS}, [
        ("cohort_size", 0, "cohort_size=0 must be an integer"),
    ]),
    **rows(costs.seconds_by_client, {"bytes_": TRAFFIC, "flops": 1.0, "testbed": PIS}, [
        ("num_clients", 1.5, "num_clients=1.5 must be an integer"),
    ]),
}  # fmt: skip


def _simulate(**changed):
    given = {"data": problems.data(), "key": jax.random.key(0), "rounds": 1}
    return fm.simulate(ALGORITHM(), **{**given, **changed})


EVALUATED = {"method": ALGORITHM, "key": KEY, "state": STATE, "data": DATA}
RUNS = {
    **rows(evaluation.evaluate, EVALUATED, [
        ("method", fm.fedavg, "federate takes a method such as fm.fedavg(task), not fedavg"),
        ("key", 0, "key=0 must be a JAX PRNG key: jax.random.key(0)"),
        ("key", Late(lambda: jax.random.PRNGKey(0)), "key is a legacy uint32[2] key"),
        ("key", Late(lambda: jax.random.split(jax.random.key(0))), "key must be one JAX PRNG key, not an array of keys [2]"),
        ("state", None, "state must be a State, e.g. algorithm.init(key, data), not None"),
        ("state", Late(lambda: STATE().model), "state must be a State"),
        ("data", None, "data must be a FederatedData"),
        ("data", Late(lambda: fm.data.synthetic.linear_regression(7, seed=0)), "there are no classes to score"),
        ("data", Late(lambda: fm.from_clients([(np.ones((20, 5)), np.arange(20) % 3)] * 8)),
         "known=True, but the data have 8 clients and the training had 7"),
        ("data", Late(lambda: fm.from_clients([(np.ones((20, 5)), np.arange(20) % 4)] * 7)),
         "predict gives", "but the data have K=4 classes"),
        ("support", "suport", "the data have no view 'suport' (did you mean 'support'?)"),
        ("query", "valid", "the data have no view 'valid'"),
        ("query", None, "the data have no view None"),
        ("known", "yes", "known='yes' must be True or False"),
        ("ids", [7], "ids=[7] must be integers in [0, 7)"),
        ("ids", [], "ids=[] must name at least one client"),
        ("ids", 0, "ids=0 must name at least one client"),
        ("ids", [0.5], "ids=[0.5] must be integers in [0, 7)"),
        ("batch_size", 0, "batch_size=0 must be an integer"),
        ("lanes", 0, "lanes=0 must be an integer"),
        ("devices", 99, "devices=99, but JAX sees"),
        ("devices", "all", "devices='all' must be an integer"),
        ("federation", fm.Federation(), "this is an algorithm, which has its federation already"),
    ]),
    **rows(evaluation.with_user_accuracy, {"algorithm": ALGORITHM}, [
        ("excluded", [-1], "excluded=[-1] must hold ids of clients, from 0 on"),
        ("excluded", "all", "excluded must be one array of integers"),
        ("excluded", [0.5], "excluded must be one array of integers"),
        ("support", None, "support=None must be a word"),
        ("lanes", 0, "lanes=0 must be an integer"),
    ]),
    "simulate(rounds=0)": Row(lambda: _simulate(rounds=0), ("rounds=0 must be an integer of at least 1",)),
    "simulate(rounds='10')": Row(lambda: _simulate(rounds="10"), ("rounds='10' must be an integer",)),
    "simulate(rounds beyond 32 bits)": Row(lambda: _simulate(rounds=2**40), ("rounds=1099511627776 must be at most",)),
    "simulate(eval_every=0)": Row(lambda: _simulate(eval_every=0), ("eval_every=0 must be an integer",)),
    "simulate(key=0)": Row(lambda: _simulate(key=0), ("key=0 must be a JAX PRNG key",)),
    **{
        f"simulate({name}) {words}": Row(lambda name=name, value=value: _simulate(**{name: value}), (f"{name}{words}",))
        for name, value, words in [
            ("on_record", 3, "=3 must be a function (state, record)"),
            ("on_record", lambda state: None, " must be a function (state, record), but <lambda> takes (state)"),
            ("on_progress", "bar", "='bar' must be a function (round, metrics)"),
            ("should_stop", True, "=True must be a function ()"),
            ("evaluators", [1], "=[1] must be a mapping of names to functions"),
        ]
    },
    "simulate(a number names an evaluator)": Row(
        lambda: _simulate(evaluators={1: fm.Evaluator(lambda *given: 0.0, DATA)}), ("the name of an evaluator=1 must be a word",)
    ),
    "simulate(an evaluator that reads what is traced)": Row(
        lambda: _simulate(evaluators={"e": fm.Evaluator(lambda k, s, d: metrics.summary(d.x, None), problems.data())}),
        ("confusion must be known, but is traced",),
    ),
    "simulate(data=None)": Row(lambda: _simulate(data=None), ("data must be a FederatedData",)),
    "simulate(a name for a method)": Row(
        lambda: fm.simulate("fedavg", problems.data(), key=jax.random.key(0), rounds=1), ("federate takes a method such as",)
    ),
    "simulate(a model with too few outputs)": Row(
        lambda: _simulate(data=fm.from_clients([(np.ones((20, 5)), np.arange(20) % 4)] * 5)),
        ("the model has 3 outputs, but the data have num_classes=4",),
    ),
    "the support view of all clients": Row(
        lambda: ALGORITHM().personalize(jax.random.key(0), STATE(), problems.data(), 0), ("support must be a view of one client",)
    ),
    "a client that the state lacks": Row(
        lambda: ALGORITHM().personalize(jax.random.key(0), STATE(), problems.data().client(0)["train"], 7),
        ("client=7 must be an integer in [0, 7)",),
    ),
    "a seed for a tagged key": Row(lambda: keys.tagged(0, "cohort"), ("key=0 must be a JAX PRNG key",)),
}  # fmt: skip


def _saved(change=lambda folder: None, config=None, like=None):
    """Saves a small state, damages its folder, and restores it."""
    with tempfile.TemporaryDirectory() as folder:
        state = fm.State(jnp.ones(3), (), (), NOTHING, (), (), (), jnp.zeros(2, bool), jnp.arange(2), jnp.ones((), jnp.int32))
        checkpoint.save(folder, state, [], {"seed": 1})
        change(Path(folder))
        return checkpoint.restore(folder, state if like is None else like(state), {"seed": 1} if config is None else config)


NOTHING = fm.algorithm.Aggregation((), ())
STATE_OF_NONE = fm.State((), (), (), NOTHING, (), (), (), jnp.zeros(2, bool), jnp.arange(2), jnp.ones((), jnp.int32))
SAVED = {
    "keep=0": Row(lambda: checkpoint.save("never", STATE_OF_NONE, [], {}, keep=0), ("keep=0 must be an integer",)),
    "a config that is no JSON": Row(
        lambda: checkpoint.save("never", STATE_OF_NONE, [], {"f": print}), ("records and config must be JSON values",)
    ),
    "another config": Row(lambda: _saved(config={"seed": 2}), ("cannot resume: seed was 1", "and is 2 now")),
    "a state of another shape": Row(
        lambda: _saved(like=lambda state: state._replace(model=jnp.ones(4))), ("cannot resume", "model is", "[3]", "[4]")
    ),
    "a state of another structure": Row(
        lambda: _saved(like=lambda state: state._replace(model={"w": jnp.ones(3)})), ("cannot resume", "another structure")
    ),
    "a truncated checkpoint": Row(
        lambda: _saved(lambda folder: os.truncate(folder / "1.ckpt", 100)), ("damaged checkpoint", "1.ckpt")
    ),
    "a checkpoint that is something else": Row(
        lambda: _saved(lambda folder: (folder / "1.ckpt").write_bytes(b"\xff\xfe\n")), ("damaged checkpoint",)
    ),
    "an empty checkpoint": Row(lambda: _saved(lambda folder: (folder / "1.ckpt").write_bytes(b"")), ("damaged checkpoint",)),
    "a folder that is a file": Row(
        lambda: checkpoint.save(__file__, STATE_OF_NONE, [], {}), ("could not save round 1", "earlier checkpoints are intact")
    ),
    "text in a folder that is a file": Row(lambda: disk.write_text(Path(__file__, "a"), "b"), ("could not write", "/a: ")),
    "a series of no rows": Row(lambda: report.series("a", "local", 1, [], "test"), ("rows is empty",)),
    "a series of no such test": Row(
        lambda: report.series("a", "local", 1, [{"round": 1, "tests": {"x": {}}}], "y"),
        ("test='y' is not a test of this run",),
    ),
}

ROWS = {**MODELS, **MASKS, **SCORES, **RUNS, **SAVED}
