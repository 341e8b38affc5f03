"""Bad inputs: tasks, metrics, adapters, timetables, sweeps, exports, Flower apps, robust rules, attacks, privacy, loggers."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_meta as fm
from fedjax_meta import (
    aggregate,
    attacks,
    export,
    flower,
    loggers,
    lora,
    measures,
    multistep,
    privacy,
    schedules,
    sweeps,
    tasks,
)
from fedjax_meta.study.export import of_run
from tests import problems
from tests.battery.table import ALGORITHM, DATA, KEY, STATE, TASK, Late, Row, algorithm, rows, state

NAN = float("nan")
INIT, PREDICT = {"init": lambda key: {"w": jnp.zeros(3)}}, {"predict": lambda v, x: x @ v["w"]}
MODEL = INIT | PREDICT


def _start(task):
    """Traces the first state, where a task and data meet."""
    started = fm.federate(fm.fedavg(task), fm.Federation(cohort_size=3, devices=1))
    return jax.eval_shape(started.init, jax.random.key(0), problems.data())


def _round(**federation):
    """Traces a round, where rules, attacks and schedules meet the number of clients and classes."""
    run = fm.federate(fm.fedavg(problems.task()), fm.Federation(**{"cohort_size": 3, "devices": 1, **federation}))
    first = jax.eval_shape(run.init, jax.random.key(0), problems.data())
    return jax.eval_shape(run.round, jax.random.key(0), first, problems.data())


def _evaluated(metrics):
    def measure(key, state, data):
        return fm.evaluate(algorithm(), key, state, data, support="train", query="test", metrics=metrics)

    return jax.eval_shape(measure, jax.random.key(0), state(), problems.data())


def _of_loss(loss):
    return Late(lambda: fm.from_loss(problems.task().init, loss))


def _changed(change):
    """Variables of the test task with another value at every leaf."""
    return Late(lambda: jax.tree.map(change, problems.task().init(jax.random.key(0))))


VARIABLES = _changed(lambda leaf: leaf)
TASKS = {
    **rows(fm.regression, MODEL, [
        ("loss", "hubber", "loss='hubber' is unknown (did you mean 'huber'?)"),
        ("loss", 3, "loss=3 must be a function (logits, batch)"),
        ("delta", NAN, "delta=nan must be finite and above 0"),
        ("init", None, "init=None must be a function (key)"),
        ("predict", lambda x: x, "predict must be a function (parameters, x), but <lambda> takes (x)"),
        ("features", lambda v, x: x, "features and head are the model in two parts: give both or none"),
        ("layers", "w", "layers='w' must be a tuple of different names"),
    ]),
    **rows(tasks.huber, {}, [("delta", -1, "delta=-1 must be finite and above 0")]),
    **rows(fm.multi_label, MODEL, [("loss", "sigmoid", "loss='sigmoid' must be a function (logits, batch)")]),
    **rows(fm.next_token, MODEL, [("loss", [], "loss=[] must be a function (logits, batch)")]),
    **rows(fm.from_loss, INIT, [
        ("loss", lambda v, b: 0.0, "loss must be a function (variables, batch, key), but <lambda> takes (v, b)"),
        ("loss", None, "loss=None must be a function (variables, batch, key)"),
    ]),
    **rows(fm.from_loss, {**INIT, "loss": lambda v, b, k: 0.0}, [
        ("metrics", ("mae",), "metrics score what predict gives: give predict too"),
    ]),
    **rows(fm.from_loss, {**MODEL, "loss": lambda v, b, k: 0.0}, [
        ("metrics", "mae", "metrics='mae' must be a tuple of metrics or their names"),
    ]),
    **rows(_start, {}, [
        ("task", _of_loss(lambda v, b, k: b.weight), "the task's loss must be one number, the mean over a batch, not float"),
        ("task", _of_loss(lambda v, b, k: (0.0, v)), "loss must return one number, not an object of tuple"),
        ("task", _of_loss(lambda v, b, k: None), "loss must return one number, not an object of NoneType"),
        ("task", _of_loss(lambda v, b, k: jnp.int32(1)), "the task's loss is int32, which has no gradient"),
    ]),
    **rows(tasks.starting_from, {"task": TASK, "variables": VARIABLES}, [
        ("task", None, "starting_from's first argument must be a Task"),
        ("variables", None, "variables must have a value at every leaf of the task, but it has none at ['body']['b']"),
        ("variables", _changed(lambda leaf: "x"), "variables['body']['b'] must be an array of numbers, not 'x'"),
        ("variables", _changed(lambda leaf: leaf * NAN), "variables['body']['b'] holds NaN or infinite values"),
        ("variables", _changed(lambda leaf: leaf[None]), "variables do not fit the task: ['body']['b'] is", "[1, 4]"),
        ("part", "bodi", "part='bodi' is unknown (did you mean 'body'?)"),
    ]),
    **rows(tasks.mixed_precision, {"task": TASK}, [
        ("dtype", jnp.int8, "must be a floating-point type such as jnp.bfloat16"),
        ("dtype", "bf16", "dtype='bf16' must be a floating-point type"),
        ("dtype", 3, "dtype=3 must be a floating-point type"),
        ("task", _of_loss(lambda v, b, k: 0.0), "mixed_precision needs to know what the task's loss is made of"),
    ]),
    **rows(lora.lora, {"task": TASK, "base": VARIABLES, "rank": 1}, [
        ("task", None, "lora's first argument must be a Task"),
        ("rank", 0, "rank=0 must be an integer of at least 1"),
        ("rank", 99, "there is no matrix to adapt whose smaller side is above rank=99"),
        ("alpha", NAN, "alpha=nan must be finite and above 0"),
        ("base", None, "base must have the form of the task's variables, but ['body']['b'] is missing"),
        ("base", "base", "base must be an array of numbers, not 'base'"),
        ("base", _changed(lambda leaf: leaf * np.inf), "base['body']['b'] holds NaN or infinite values"),
        ("targets", "haed", "targets='haed' is unknown (did you mean 'head'?)"),
        ("targets", "path:b", "targets selects body/b, which is no matrix but", "train such leaves whole"),
        ("inputs", "frist", "inputs='frist' is unknown (did you mean 'first'?)"),
        ("frozen_a", -1, "frozen_a=-1 must be an integer of at least 0"),
    ]),
    **rows(multistep.annealed, {}, [("rounds", 0, "rounds=0 must be an integer"), ("rounds", 1.5, "rounds=1.5 must be an int")]),
}  # fmt: skip

CONSTANT = fm.Metric(name="v", init=lambda: jnp.zeros(2), update=lambda s, o, b: s, result=lambda s: s)
GROWING = fm.Metric(name="g", init=lambda: jnp.zeros(2), update=lambda s, o, b: jnp.zeros(3), result=jnp.sum)
METRICS = {
    **rows(measures.top_k, {}, [("k", 0, "k=0 must be an integer"), ("k", "5", "k='5' must be an integer")]),
    **rows(measures.confusion, {}, [("classes", 0, "classes=0 must be an integer of at least 1")]),
    **rows(measures.f1, {}, [("classes", None, "classes=None must be an integer")]),
    **rows(measures.auroc, {"classes": 3}, [("bins", 1, "bins=1 must be an integer of at least 2")]),
    **rows(measures.calibration_error, {}, [("bins", 0, "bins=0 must be an integer")]),
    **rows(measures.mean, {"name": "x", "values": lambda outputs, y: y}, [
        ("name", 3, "name=3 must be a word"),
        ("name", "", "name='' must be a word"),
        ("values", lambda y: y, "values must be a function (outputs, targets), but <lambda> takes (y)"),
        ("of_mean", 3, "of_mean=3 must be a function (mean)"),
        ("share", "no", "share='no' must be True or False"),
    ]),
    **rows(fm.Metric, {"name": "x", "init": lambda: 0.0, "update": lambda s, o, b: s, "result": lambda s: s}, [
        ("init", 3, "init=3 must be a function ()"),
        ("update", lambda s: s, "update must be a function"),
    ]),
    **rows(_evaluated, {}, [
        ("metrics", "accuracy", "metrics='accuracy' must be a tuple of metrics or their names"),
        ("metrics", ("accurracy",), "metric='accurracy' is unknown (did you mean 'accuracy'?)"),
        ("metrics", ("accuracy", "accuracy"), "two metrics have the name 'accuracy'"),
        ("metrics", (measures.accuracy,), "metric=<function accuracy at", "is unknown; allowed are accuracy"),
        ("metrics", ("mae",), "mae takes outputs and targets of one shape"),
        ("metrics", ("top_9",), "top_9 of K=3 outputs counts every sample as right"),
        ("metrics", ("top_0",), "k=0 must be an integer"),
        ("metrics", ("top_",), "metric='top_' is unknown (did you mean 'top_5'?)"),
        ("metrics", ("top_" + "9" * 5000,), "metric='top_999", "is unknown"),
        ("metrics", (CONSTANT,), "metric 'v': result must give one number, a scalar, for each client, not an array [2]"),
        ("metrics", (GROWING,), "metric 'g': init gives statistics of shapes [2], but update gives [3]"),
    ]),
}  # fmt: skip


def _buffered(cohort_size, clients):
    timetable = schedules.fedbuff([1.0] * clients, rounds=3, buffer_size=2, concurrency=4, most_stale=9)
    return _round(cohort_size=cohort_size, schedule=timetable)


TIMES = {"seconds": [1.0, 9.0], "rounds": 3, "buffer_size": 1, "concurrency": 2, "most_stale": 30}
TIMETABLES = {
    **rows(schedules.fedbuff, TIMES, [
        ("seconds", [1.0, -1.0], "seconds=[1.0, -1.0] must be finite and above 0"),
        ("seconds", [1.0, NAN], "seconds=[1.0, nan] must be finite"),
        ("seconds", "fast", "seconds='fast' must be finite"),
        ("seconds", [[1.0, 2.0]], "seconds must have one time for each client, [N], not the shape [1, 2]"),
        ("seconds", [], "seconds must have one time for each client, [N], not the shape [0]"),
        ("rounds", 0, "rounds=0 must be an integer"),
        ("concurrency", 9, "concurrency=9 is more than the N=2 clients there are"),
        ("most_stale", -1, "most_stale=-1 must be an integer of at least 0"),
        ("staleness_weight", "hing", "staleness_weight='hing' is unknown (did you mean 'hinge'?)"),
        ("exponent", 0, "exponent=0 must be finite and above 0"),
        ("grace", -1, "grace=-1 must be an integer of at least 0"),
        ("seed", -1, "seed=-1 must be an integer of at least 0"),
    ]),
    "a buffer of another size": Row(lambda: _buffered(3, 7), ("fedbuff was made for N=7 clients and a buffer of 2",)),
    "a timetable of other clients": Row(lambda: _buffered(2, 5), ("fedbuff was made for N=5 clients", "but there are N=7")),
}  # fmt: skip

RATE = lambda lr: fm.fedavg(problems.task(), lr=lr)  # noqa: E731

SWEEPS = {
    "a grid of a number": Row(lambda: sweeps.grid(lr=0.1), ("lr=0.1 must be a list of numbers, e.g. lr=[0.1, 0.3]",)),
    "a grid of text": Row(lambda: sweeps.grid(lr="0.1"), ("lr='0.1' must be a list of numbers",)),
    **rows(sweeps.members, {"points": [{"lr": 0.1}], "seeds": [1]}, [
        ("seeds", ["a"], "seed='a' must be an integer of at least 0"),
        ("seeds", [1.5], "seed=1.5 must be an integer of at least 0"),
        ("seeds", [-1], "seed=-1 must be an integer of at least 0"),
        ("seeds", [1, 1], "a sweep has the member lr=0.1, seed 1 twice"),
        ("seeds", [], "a sweep needs at least one point and one seed"),
        ("points", ["lr"], "points must be numbers by name", "not 'lr'"),
        ("points", [{"lr": "x"}], "lr='x' must be a finite number"),
        ("points", [{"lr": NAN}], "lr=nan must be a finite number"),
        ("points", 3, "points=3 must be a list, e.g. members(sweeps.grid(lr=[0.1, 0.3]), seeds=[1, 2])"),
        ("seeds", 3, "seeds=3 must be a list"),
        ("points", [{"lr": 0.1}, {"mu": 0.1}], "all members must name the same numbers", "but one has mu=0.1, seed 1"),
    ]),
    **rows(fm.sweep, {"members": sweeps.members([{"lr": 0.1}], [1]), "data": DATA, "rounds": 1}, [
        ("build", lambda lr: None, "federate takes a method such as fm.fedavg(task), not NoneType"),
        ("build", lambda rate: None, "build must take the numbers of the members, lr: missing a required argument: 'rate'"),
        ("build", lambda lr: (fm.fedavg(problems.task(), lr=lr), None), "federation must be a Federation"),
    ]),
    **rows(fm.sweep, {"build": RATE, "members": sweeps.members([{"lr": 0.1}], [1]), "data": DATA, "rounds": 1}, [
        ("federation", {"cohort_size": 2}, "federation must be a Federation, e.g. fm.Federation(cohort_size=5)"),
        ("eval_every", None, "eval_every=None must be an integer, or the rounds after which to evaluate"),
        ("eval_every", 1.5, "eval_every=1.5 must be an integer"),
        ("active", 3, "active=3 must say for each member whether it goes on"),
        ("programs", 3, "programs must be a Programs"),
        ("members", [sweeps.Member(0.1, 1)], "a member has numbers by name, e.g. Member({'lr': 0.1}, 1), not 0.1"),
        ("members", [sweeps.Member({"lr": "a"}, 1)], "lr='a' must be a finite number"),
        ("members", [sweeps.Member({"lr": 0.1}, "1")], "seed='1' must be an integer"),
        ("evaluators", {1: sweeps.MemberEvaluator(lambda *given: 0.0, DATA)}, "the name of an evaluator=1 must be a word"),
    ]),
}  # fmt: skip


def _file(content):
    """Reads a file of these bytes, or of these variables."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        path.write_bytes(content)
        return export.load(path)


def _other(saved, like):
    with tempfile.TemporaryDirectory() as folder:
        export.save(Path(folder, "model.safetensors"), saved)
        return export.load(Path(folder, "model.safetensors"), like)


ONE = np.ones(1)
EXPORTS = {
    **rows(export.save, {"path": "never.safetensors", "variables": {"a": ONE}}, [
        ("variables", {}, "there is nothing to export: the model has no leaves"),
        ("variables", {"a": "x"}, "the leaf a is <U1, which an export cannot hold"),
        ("variables", {"a": np.array([None])}, "the leaf a is object, which an export cannot hold"),
        ("variables", {"a": ONE * 1j}, "the leaf a is complex128, which an export cannot hold"),
        ("variables", Late(lambda: {"a": jax.random.key(0)}), "the leaf a is a random key"),
        ("variables", {"a/b": ONE, "a": {"b": ONE}}, "two leaves have the name a/b"),
        ("variables", {"a": ONE, "a/b": ONE}, "the leaf a has the name of the branch that holds a/b"),
        ("about", {"x": print}, "about must hold JSON values by name"),
        ("path", "/proc/model.safetensors", "could not write /proc/model.safetensors: "),
        ("path", "model.npz", "model.npz must end with .safetensors"),
    ]),
    "no such export": Row(lambda: export.load("/no/such/file"), ("/no/such/file",)),
    "an export that is something else": Row(lambda: _file(b"not a file"), ("is no safetensors file, or is damaged",)),
    "an empty export": Row(lambda: _file(b""), ("is no safetensors file, or is damaged",)),
    "an export with a header of 2^64 bytes": Row(lambda: _file(b"\xff" * 8 + b"{}"), ("is no safetensors file",)),
    "an export of another shape": Row(lambda: _other({"a": ONE}, {"a": np.ones(2)}), ("holds other leaves: ['a'] is", "[2]")),
    "an export of other leaves": Row(lambda: _other({"a": ONE}, {"b": ONE}), ("holds other leaves: a is not wanted",)),
    **rows(export.personal, {"method": ALGORITHM, "key": KEY, "state": STATE, "data": DATA, "client": 0, "support": "train"}, [
        ("method", None, "takes a method such as fm.fedavg(task), not NoneType"),
        ("state", None, "state must be a State"),
        ("key", 0, "key=0 must be a JAX PRNG key"),
        ("client", 99, "client=99 must be an integer in [0, 7)"),
        ("support", "trian", "the data have no view 'trian' (did you mean 'train'?)"),
    ]),
    **rows(of_run, {"system": "fedavg"}, [("folder", "/no/run", "/no/run holds no run (no study.yaml)")]),
    **rows(flower.server_app, {"method": Late(lambda: fm.fedavg(problems.task())), "data": DATA, "rounds": 1, "key": KEY}, [
        ("method", None, "method must be a Method, e.g. fm.fedavg(task)"),
        ("method", Late(lambda: fm.fedpac(problems.task())), "fedpac cannot run on Flower"),
        ("data", None, "data must be a FederatedData"),
        ("rounds", 0, "rounds=0 must be an integer"),
        ("key", 0, "key=0 must be a JAX PRNG key"),
        ("wait", -1, "wait=-1 must be finite and above 0"),
    ]),
    **rows(flower.client_app, {"method": Late(lambda: fm.fedavg(problems.task()))}, [
        ("data", 3, "data=3 must be a function (client)"),
    ]),
    **rows(loggers.made, {}, [
        ("names", "tensorbord", "logger='tensorbord' is unknown (did you mean 'tensorboard'?)"),
        ("names", "no_such_module:Name", "logger no_such_module:Name: No module named"),
        ("names", "os:nothing", "logger os:nothing: module 'os' has no attribute 'nothing'"),
        ("names", 3, "names of loggers=3 must be a word"),
    ]),
}  # fmt: skip

RULES = {
    **rows(aggregate.krum, {}, [("f", -1, "f=-1 must be an integer of at least 0"), ("f", "1", "f='1' must be an integer")]),
    **rows(aggregate.multi_krum, {"f": 1}, [("m", 0, "m=0 must be an integer")]),
    **rows(aggregate.geometric_median, {}, [("iterations", 0, "iterations=0 must be"), ("smoothing", 0, "smoothing=0 must be")]),
    **rows(aggregate.norm_bounding, {}, [("bound", NAN, "bound=nan must be finite and above 0")]),
    **rows(aggregate.centered_clipping, {}, [("radius", -1, "radius=-1 must be finite and above 0")]),
    **rows(aggregate.fltrust, {}, [("root", None, "root must be the data of the server, e.g. data.client(0), not NoneType")]),
    **rows(aggregate.nearest_neighbours, {"rule": aggregate.median, "f": 1}, [
        ("f", -1, "f=-1 must be an integer of at least 0"),
        ("rule", None, "rule=None must be a function (stacked, weights)"),
        ("rule", "median", "rule='median' must be a function (stacked, weights)"),
        ("rule", aggregate.krum, "rule must be a function (stacked, weights), but krum takes (f)"),
    ]),
    **rows(aggregate.bucketing, {"rule": aggregate.median}, [("size", 0, "size=0 must be an integer")]),
    **rows(aggregate.parse, {}, [
        ("text", 3, "aggregator=3 must be a word"),
        ("text", "", "aggregator='' must be a word"),
        ("text", "+krum", "krum needs f: krum:f=VALUE"),
        ("text", "median+krum:f=1", "wrapper of an aggregator='median' is unknown"),
        ("text", "krum:f=__import__('os')", "must read NAME or NAME:OPTION=VALUE"),
    ]),
    "Krum with too many attackers": Row(lambda: _round(aggregator=aggregate.krum(1)), ("f=1 is too many for krum",)),
    "a bucket larger than the cohort": Row(
        lambda: _round(aggregator=aggregate.bucketing(aggregate.median, 9)), ("size=9 of a bucket is more than the C=", "clients")
    ),
    "a rule that returns a number": Row(
        lambda: _round(aggregator=lambda stacked, weights: 3.0), ("aggregator rule must give a tree like one client's upload",)
    ),
    "a rule that returns all uploads": Row(
        lambda: _round(aggregator=lambda stacked, weights: stacked),
        ("aggregator rule must give a tree like one client's upload", "['body']['b'] is", "[3, 4], not float"),
    ),
    "a rule that returns nothing": Row(
        lambda: _round(aggregator=lambda stacked, weights: None), ("must give a tree like one client's upload", "is missing")
    ),
    "samples of the server of another shape": Row(
        lambda: _round(aggregator=aggregate.fltrust(fm.from_clients([(np.ones((20, 9)), np.arange(20) % 3)]).client(0))),
        ("fltrust: samples of the server have the shape (9,), but those of clients (5,)",),
    ),
    "a share of the clients that is nobody": Row(
        lambda: _round(attack=attacks.sign_flip(0.01)), ("attackers=0.01 of the N=7 clients is nobody: give a larger share",)
    ),
    "a backdoor larger than the image": Row(
        lambda: attacks.stamped(fm.from_clients([(np.ones((20, 8, 6, 1)), np.arange(20) % 3)]), "test", size=7),
        ("size=7 of the pattern is more than an image of shape (8, 6, 1) has rows or columns",),
    ),
    "labels flipped to halves": Row(
        lambda: _round(attack=attacks.label_flip(0.5, mapping=(0.5, 0, 1))), ("must give a class for each of the K=3 classes",)
    ),
    "NNM with too many attackers": Row(
        lambda: _round(aggregator=aggregate.nearest_neighbours(aggregate.median, 2)), ("f=2 is too many for nearest_neighbours",)
    ),
    **rows(attacks.sign_flip, {"attackers": 0.2}, [
        ("attackers", (-1,), "attackers=(-1,) must be distinct client ids"),
        ("attackers", (1, 1), "attackers=(1, 1) must be distinct client ids"),
        ("attackers", NAN, "attackers=nan must lie between 0 and 1"),
        ("attackers", "all", "attackers='all' must be distinct client ids"),
        ("scale", "x", "scale='x' must be finite and above 0"),
    ]),
    **rows(attacks.backdoor, {"attackers": 0.2}, [
        ("boost", 0, "boost=0 must be finite and above 0"),
        ("share", 2, "share=2 must lie between 0 and 1"),
        ("size", 0, "size=0 must be an integer"),
    ]),
    **rows(attacks.alie, {"attackers": 0.2}, [("z", NAN, "z=nan must be finite and at least 0")]),
    **rows(attacks.backdoor_success, {"confusion": np.ones((2, 3, 3)), "target": 0}, [
        ("target", 9, "target=9 must be an integer in [0, 3)"),
        ("confusion", np.ones((3, 3)), "confusion must be matrices [N, K, K], not of shape [3, 3]"),
    ]),
    **rows(attacks.stamped, {"data": DATA}, [("view", "tset", "the data have no view 'tset' (did you mean 'test'?)")]),
    "attackers who are not there": Row(
        lambda: _round(attack=attacks.sign_flip((9,))), ("attackers=(9,) must be ids of the N=7 clients, from 0 on",)
    ),
    "a backdoor to no class": Row(
        lambda: _round(attack=attacks.backdoor(0.5, target=9)), ("target=9 must be one of the K=3 classes",)
    ),
    "labels flipped to no class": Row(
        lambda: _round(attack=attacks.label_flip(0.5, mapping=(0, 9, 1))), ("must give a class for each of the K=3 classes",)
    ),
}  # fmt: skip

POISSON = privacy.Poisson(0.1, 100, 50)
PRIVACY = {
    **rows(privacy.epsilon, {"noise": 1.0, "rounds": 10, "delta": 1e-5, "sampling": POISSON}, [
        ("noise", -1.0, "noise=-1.0 must be finite and at least 0"),
        ("rounds", -1, "rounds=-1 must be an integer of at least 0"),
        ("delta", 0, "delta=0 must lie strictly between 0 and 1"),
        ("sampling", None, "sampling=None must be a Poisson, FixedSize, Everyone or Trees"),
        ("sampling", privacy.Poisson(0.5, 100, 50), "overflow with probability", "give more slots"),
        ("accountant", "pdl", "accountant='pdl' is unknown (did you mean 'pld'?)"),
    ]),
    **rows(privacy.noise_for, {"target": 1.0, "rounds": 10, "delta": 1e-5, "sampling": POISSON}, [
        ("target", 0, "target=0 must be finite and above 0"),
        ("target", NAN, "target=nan must be finite"),
        ("target", 1e-300, "target=1e-300 must lie between 1e-6 and 1e12"),
        ("target", 1e300, "target=1e+300 must lie between 1e-6 and 1e12"),
        ("target", float("inf"), "target=inf must be finite"),
    ]),
    **rows(fm.uploads.noise, {"multiplier": 1.0}, [
        ("reproducible", "no", "reproducible='no' must be True or False"),
        ("tree", 1.5, "tree=1.5 must be an integer"),
    ]),
    **rows(fm.uploads.adaptive_clip, {"norm": 1.0}, [("reproducible", 1, "reproducible=1 must be True or False")]),
    **rows(privacy.Poisson, {"rate": 0.1}, [
        ("rate", 2, "rate=2 must lie between 0 and 1"),
        ("capacity", 5, "num_clients and capacity of Poisson sampling go together"),
    ]),
    **rows(privacy.FixedSize, {"num_clients": 5, "cohort_size": 3}, [("cohort_size", 9, "cohort_size=9 is more than the N=5")]),
    **rows(privacy.spent, {"config": fm.Federation().config, "rounds": 1, "num_clients": 10, "delta": 1e-5}, [
        ("config", None, "config=None must be that of an algorithm or a federation"),
        ("config", {}, "it names no uploads"),
    ]),
    **rows(privacy.private_task, {"task": TASK, "clip": 1.0, "noise": 1.0}, [
        ("task", None, "private_task's first argument must be a Task"),
        ("clip", 0, "clip=0 must be finite and above 0"),
        ("noise", -1, "noise=-1 must be finite and at least 0"),
    ]),
    **rows(privacy.largest_advantage, {"epsilon": 1.0, "delta": 1e-5}, [("epsilon", -1.0, "epsilon=-1.0 must be at least 0")]),
    "three scores to attack": Row(
        lambda: privacy.membership_attack(np.ones(3), np.ones(9)), ("must be at least 4 scores [n] without NaN, not [3]",)
    ),
    **rows(schedules.poisson, {}, [("rate", 2, "rate=2 must lie between 0 and 1")]),
}  # fmt: skip

ROWS = {**TASKS, **METRICS, **TIMETABLES, **SWEEPS, **EXPORTS, **RULES, **PRIVACY}
