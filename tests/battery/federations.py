"""Bad inputs: methods, federations, schedules, participation, uploads, aggregators."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedjax_meta as fm
from fedjax_meta import aggregate, participation, schedules, uploads
from tests import problems
from tests.battery.table import Row, rows


def _method(name, words, **options):
    """A method whose builder must refuse one option."""
    return Row(lambda: fm.METHODS[name](problems.task(), **options), words)


NAN, INF = float("nan"), float("inf")
METHODS = {}
for _name, _options, *_words in [
    ("fedavg", {"lr": 0}, "lr=0 must be finite and above 0"),
    ("fedavg", {"lr": -0.1}, "lr=-0.1 must be finite and above 0"),
    ("fedavg", {"lr": NAN}, "lr=nan must be finite"),
    ("fedavg", {"lr": INF}, "lr=inf must be finite"),
    ("fedavg", {"lr": 10**400}, "lr=", "must be finite and above 0"),
    ("fedavg", {"lr": "0.1"}, "lr='0.1' must be finite"),
    ("fedavg", {"lr": None}, "lr=None must be finite"),
    ("fedavg", {"lr": [0.1, 0.2]}, "lr=[0.1, 0.2] must be one number, not a list"),
    ("fedavg", {"lr": (0.1,)}, "must be one number, not a tuple"),
    ("fedavg", {"lr": np.array([0.1, 0.2])}, "lr must be one number, not an array float64[2]"),
    ("fedavg", {"lr": jnp.ones((2, 2))}, "lr must be one number, not an array"),
    ("fedavg", {"lr": 1j}, "lr=1j must be finite"),
    ("fedavg", {"lr": True}, "lr=True must be finite"),
    ("fedavg", {"lr": {"head": 0.1}}, "lr={'head': 0.1} must be"),
    ("fedavg", {"epochs": 0}, "epochs=0 must be an integer of at least 1"),
    ("fedavg", {"epochs": 2.0}, "epochs=2.0 must be an integer"),
    ("fedavg", {"epochs": True}, "epochs=True must be an integer"),
    ("fedavg", {"epochs": 2**31}, "epochs=2147483648 must be at most 2147483647"),
    ("fedavg", {"epochs": 10**5000}, "epochs=an integer of 16610 bits must be at most"),
    ("fedavg", {"epochs": "3"}, "epochs='3' must be an integer"),
    ("fedavg", {"batch_size": -5}, "batch_size=-5 must be an integer of at least 1"),
    ("fedavg", {"batch_size": np.ones((2, 2))}, "batch_size=[[1. 1.] [1. 1.]] must be an integer"),
    ("fedavg", {"weighting": "sample"}, "weighting='sample' is unknown (did you mean 'samples'?)"),
    ("fedavg", {"weighting": ["samples"]}, "weighting=['samples'] is unknown; allowed are samples"),
    ("fedavg", {"weighting": np.array(["a", "b"])}, "weighting=", "is unknown; allowed are samples"),
    ("fedavg", {"personal": "haed"}, "personal='haed' is unknown (did you mean 'head'?); allowed are all, none"),
    ("fedavg", {"personal": "last:0"}, "personal='last:0'", "names 2"),
    ("fedavg", {"personal": "last:99999999999999999999"}, "personal='last:99999999999999999999' is unknown"),
    ("fedavg", {"personal": "first:9"}, "asks for the first 9 layers, but the task names 2"),
    ("fedavg", {"personal": "bn"}, "personal='bn' selects no leaf of this model"),
    ("fedavg", {"personal": "path:("}, "personal='path:(' is not a regular expression"),
    ("fedavg", {"personal": "path:[XYZ]"}, "personal='path:[XYZ]' selects no leaf"),
    ("fedavg", {"personal": "path:a{99999999999}"}, "is not a regular expression"),
    ("fedavg", {"personal": "head+"}, "personal='' is unknown"),
    ("fedavg", {"personal": ""}, "personal='' is unknown"),
    ("fedavg", {"personal": {"head": True}}, "personal must have a Python bool at every leaf"),
    ("fedavg", {"personal": 3}, "personal must have a Python bool"),
    ("fedavg", {"personal": int}, "personal=int must be a function (task)"),
    ("fedavg", {"personal": lambda: "head"}, "personal must be a function (task), but <lambda> takes ()"),
    ("fedavg", {"optimizer": "sgd"}, "optimizer must be a factory", "not 'sgd'"),
    ("fedavg", {"optimizer": optax.sgd(0.1)}, "its rate is an argument of its own"),
    ("fedavg", {"optimizer": float}, "but float(0.1) gives 0.1"),
    ("fedavg", {"optimizer": lambda: optax.sgd(0.1)}, "but <lambda>(0.1) raises TypeError"),
    ("fedavg", {"optimizer": lambda rate: [rate]}, "but <lambda>(0.1) gives [0.1]"),
    ("fedavg", {"learning_rate": 0.1}, "fedavg() takes no 'learning_rate'"),
    ("fedavg", {"epoch": 1}, "fedavg() takes no 'epoch' (did you mean 'epochs'?)"),
    ("fedavg", {"cohort_size": 3}, "fedavg() takes no 'cohort_size', which belongs to Federation"),
    ("fedavg", {"finetune_epochs": -1}, "finetune_epochs=-1 must be an integer of at least 0"),
    ("fedprox", {"prox_weight": -1.0}, "prox_weight=-1.0 must be finite and at least 0"),
    ("fedprox", {"prox_weight": [1.0]}, "prox_weight=[1.0] must be one number, not a list"),
    ("scaffold", {"control": "both"}, "control='both' is unknown"),
    ("fedadam", {"b1": "x"}, "b1='x' must lie between 0 and 1"),
    ("fedadam", {"b2": None}, "b2=None must lie between 0 and 1"),
    ("fedadam", {"b2": NAN}, "b2=nan must lie between 0 and 1"),
    ("fedadam", {"tau": []}, "tau=[] must be one number, not a list"),
    ("fedavgm", {"momentum": 1.5}, "momentum=1.5 must lie between 0 and 1"),
    ("apfl", {"share": "half"}, "share='half' must lie in [0, 1]"),
    ("apfl", {"share": [0.5]}, "share=[0.5] must be one number, not a list"),
    ("apfl", {"mix": np.ones((2, 2))}, "mix=[[1. 1.] [1. 1.]] is unknown"),
    ("fedala", {"sample_share": {}}, "sample_share={} must lie between 0 and 1"),
    ("fedamp", {"own_share": object}, "own_share=", "must lie in [0, 1]"),
    ("fedamp", {"width": 0}, "width=0 must be finite and above 0"),
    ("fedfomo", {"exploration": 2}, "exploration=2 must lie in [0, 1]"),
    ("fedfomo", {"train_view": 3}, "train_view=3 must be a word"),
    ("fedfomo", {"downloads": 0}, "downloads=0 must be an integer"),
    ("fedrep", {"share_head": "no"}, "share_head='no' must be True or False"),
    ("fedrep", {"head_epochs": -1}, "head_epochs=-1 must be an integer"),
    ("fedrod", {"classes": 1.5}, "classes=1.5 must be an integer"),
    ("fedpac", {"align": 0}, "align=0 must be True or False"),
    ("fedpac", {"noise": -1}, "noise=-1 must be finite and at least 0"),
    ("fedmeta", {"inner_steps": 0}, "inner_steps=0 must be an integer"),
    ("fedmeta", {"inner_lr": [0.1]}, "inner_lr=[0.1] must be one number"),
    ("fedmeta", {"learned_rates": "yes"}, "learned_rates='yes' must be True or False"),
    ("fedmeta", {"estimator": "exact"}, "estimator must be a function of the inner optimiser"),
    ("fedmeta", {"outer_at": "cloud"}, "outer_at='cloud' is unknown; allowed are client, server"),
    ("fedmeta", {"score": "onlin"}, "score='onlin' is unknown (did you mean 'online'?)"),
    ("fedmeta", {"personal_rates": "head"}, "personal_rates needs learned_rates=True"),
    ("fedmeta", {"test_prox_weight": -1}, "test_prox_weight=-1 must be finite and at least 0"),
    ("fedmeta", {"rates_per": "leaf"}, "rates_per='leaf' is unknown; allowed are entry, step"),
    ("fedmeta", {"rates_per": "step"}, "rates_per='step' needs learned_rates=True"),
    ("fedmeta", {"step_weights": fm.multistep.annealed(3)}, "batch_size=32 gives clients unlike numbers of steps"),
    ("fedmeta", {"estimator": fm.multistep.multi_step}, "step_weights and estimator=multistep.multi_step need each other"),
    ("mamlpp", {"batch_size": 8}, "batch_size=8 gives clients unlike numbers of steps"),
    ("mamlpp", {"step_weights": 3}, "step_weights=3 must be a function (round, steps)"),
    ("fedmeta", {"draw": "all"}, "draw='all' must be a function (key, data, step)"),
    ("anil", {"adapts": "haed"}, "adapts='haed' is unknown (did you mean 'head'?)"),
    ("imaml", {"prox_weight": 0}, "prox_weight=0 must be finite and above 0"),
    ("imaml", {"cg_steps": 0}, "cg_steps=0 must be an integer"),
    ("imaml", {"tolerance": "x"}, "tolerance='x' must be finite and at least 0"),
    ("imaml", {"warm_start": ["zero"]}, "warm_start=['zero'] is unknown"),
    ("knn_per", {"neighbours": 0}, "neighbours=0 must be an integer"),
    ("knn_per", {"mixing": 2}, "mixing=2 must lie in [0, 1]"),
    ("knn_per", {"grid": [0.5, 2]}, "grid=[0.5, 2] must lie in [0, 1]"),
    ("knn_per", {"grid": "all"}, "grid='all' must lie in [0, 1]"),
    ("l2gd", {"probability": 1}, "probability=1 must lie strictly between 0 and 1"),
    ("l2gd", {"pull": None}, "pull=None must be finite"),
    ("lg_fedavg", {"vote": "most"}, "vote='most' is unknown"),
    ("moon", {"temperature": 0}, "temperature=0 must be finite and above 0"),
    ("perfedavg", {"local_steps": 0}, "local_steps=0 must be an integer"),
    ("pfedhn", {"width": 10**30}, "width=1000000000000000000000000000000 must be at most"),
    ("pfedme", {"keep_local": 1}, "keep_local=1 must be True or False"),
    ("pfedme", {"outer_lr": []}, "outer_lr=[] must be one number"),
    ("perfedavg_reptile", {"interpolation": 0}, "interpolation=0 must be finite and above 0"),
    ("ditto", {"personal_epochs": 0}, "personal_epochs=0 must be an integer"),
    ("fedem", {"components": 0}, "components=0 must be an integer"),
    ("afl", {"weight_lr": -1}, "weight_lr=-1 must be finite and at least 0"),
    ("afl", {"local_steps": 0}, "local_steps=0 must be an integer of at least 1"),
    ("afl", {"average": "yes"}, "average='yes' must be True or False"),
    ("cfl", {"clusters": 0}, "clusters=0 must be an integer"),
    ("cfl", {"least_size": 2}, "least_size=2 must be an integer of at least 3"),
    ("cfl", {"first_split": -1}, "first_split=-1 must be an integer of at least 0"),
    ("cfl", {"mean_norm": -0.4}, "mean_norm=-0.4 must be finite and at least 0"),
    ("cfl", {"client_norm": None}, "client_norm=None must be finite"),
    ("fedas", {"align_lr": 0}, "align_lr=0 must be finite and above 0"),
    ("fedas", {"align_epochs": -1}, "align_epochs=-1 must be an integer of at least 0"),
    ("fedas", {"align_batch_size": 0}, "align_batch_size=0 must be an integer"),
    ("fedcac", {"share": 1.5}, "share=1.5 must lie between 0 and 1"),
    ("fedcac", {"patience": 0}, "patience=0 must lie in [1, inf]"),
    ("feddbe", {"regularisation": -1}, "regularisation=-1 must be finite and at least 0"),
    ("feddbe", {"momentum": 2}, "momentum=2 must lie between 0 and 1"),
    ("feddyn", {"alpha": 0}, "alpha=0 must be finite and above 0"),
    ("feddyn", {"lr": 0.0}, "lr=0.0 must be finite and above 0"),
    ("fednova", {"lr": 0}, "lr=0 must be finite and above 0"),
    ("fednova", {"momentum": 1.5}, "momentum=1.5 must lie between 0 and 1"),
    ("fednova", {"lr": 0.5, "prox_weight": 2.0}, "lr * prox_weight=1 must be below 1"),
    ("fedproto", {"prototype_weight": -1}, "prototype_weight=-1 must be finite and at least 0"),
    ("fedproto", {"predicts_with": "heads"}, "predicts_with='heads' is unknown (did you mean 'head'?)"),
    ("gpfl", {"embedding_weight": -1}, "embedding_weight=-1 must be finite and at least 0"),
    ("gpfl", {"decay": "x"}, "decay='x' must be finite and at least 0"),
    ("ifca", {"clusters": 1.5}, "clusters=1.5 must be an integer"),
    ("pfedsim", {"warmup": -1}, "warmup=-1 must be an integer of at least 0"),
    ("qfedavg", {"q": -1}, "q=-1 must be finite and at least 0"),
    ("qfedavg", {"lr": 0}, "lr=0 must be finite and above 0"),
]:  # fmt: skip
    METHODS[f"{_name} {len(METHODS)}: {_words[0]}"] = _method(_name, tuple(_words), **_options)

FIRST = {
    f"a task that is {name}": Row(lambda value=value: fm.fedavg(value), ("fedavg's first argument must be a Task", name))
    for name, value in {
        "an object of type NoneType": None,
        "an object of type int": 3,
        "an object of type str": "mlp",
        "an object of type list": [],
        "a function": fm.models.mlp,
        "the class Network": fm.models.Network,
        "an object of type Network": fm.models.Network((5,), 3),
    }.items()
}
FIRST |= {
    "options by position": Row(lambda: fm.fedavg(problems.task(), 0.1), ("fedavg takes a task and, by name, lr",)),
    "no task": Row(fm.fedavg, ("first argument must be a Task",)),
    "an algorithm for a method": Row(lambda: fm.federate(fm.fedavg), ("federate takes a method such as fm.fedavg(task)",)),
    "no federation": Row(lambda: fm.federate(fm.fedavg(problems.task()), 3), ("federate takes a Federation, not int",)),
    "a dict as federation": Row(
        lambda: fm.federate(fm.fedavg(problems.task()), {"cohort_size": 3}), ("federate takes a Federation, not dict",)
    ),
    "server_lr beside an own optimiser": Row(
        lambda: fm.federate(fm.fedadam(problems.task()), fm.Federation(server_lr=0.1)), ("has a server optimiser of its own",)
    ),
    "noise in FedPAC": Row(
        lambda: fm.federate(fm.fedpac(problems.task()), fm.Federation(uploads=(uploads.clip(1.0), uploads.noise(1.0)))),
        ("lets the server see what each client sends", "noise"),
    ),
    "more clusters than clients in IFCA": Row(
        lambda: fm.federate(fm.ifca(problems.task(), clusters=8)).init(jax.random.key(0), problems.data()),
        ("clusters=8 is more than the N=7 clients there are",),
    ),
    "more clusters than clients in CFL": Row(
        lambda: fm.federate(fm.cfl(problems.task(), clusters=9)).init(jax.random.key(0), problems.data()),
        ("clusters=9 is more than the N=7 clients there are",),
    ),
    "an update older than the state's models": Row(
        lambda: schedules.fedbuff([1.0, 9.0], rounds=30, buffer_size=1, concurrency=2, most_stale=3),
        ("most_stale=3 is too few: an update of round", "lags", "steps behind", "raise it, or lower concurrency"),
    ),
    "a buffer of more clients than there are": Row(
        lambda: schedules.fedbuff([1.0, 9.0], rounds=3, buffer_size=3, concurrency=2, most_stale=3),
        ("buffer_size=3 is more than the N=2 clients there are",),
    ),
    "SCAFFOLD in FedAsync": Row(
        lambda: fm.federate(
            fm.scaffold(problems.task()),
            fm.Federation(cohort_size=1, schedule=schedules.fedasync([1.0] * 7, rounds=3, concurrency=7, most_stale=9)),
        ),
        ("scaffold keeps more at the server than its model", "fedasync takes methods whose uploads are changes"),
    ),
    "compression in pFedHN": Row(
        lambda: fm.federate(fm.pfedhn(problems.task()), fm.Federation(uploads=(uploads.quantize(8),))),
        ("sends other numbers than those that the simulation averages",),
    ),
}

FEDERATION = rows(fm.Federation, {}, [
    ("cohort_size", 0, "cohort_size=0 must be an integer of at least 1"),
    ("cohort_size", "5", "cohort_size='5' must be an integer"),
    ("cohort_size", 5.0, "cohort_size=5.0 must be an integer"),
    ("cohort_size", 2**40, "cohort_size=1099511627776 must be at most"),
    ("cohort_sizes", 5, "Federation() takes no 'cohort_sizes' (did you mean 'cohort_size'?)"),
    ("lr", 0.1, "Federation() takes no 'lr'"),
    ("lanes", 0, "lanes=0 must be an integer"),
    ("devices", -1, "devices=-1 must be an integer"),
    ("devices", 1.5, "devices=1.5 must be an integer"),
    ("precision", "tf23", "precision='tf23' is unknown (did you mean 'tf32'?)"),
    ("precision", 32, "precision=32 is unknown; allowed are"),
    ("weighting", "uniforn", "weighting='uniforn' is unknown (did you mean 'uniform'?)"),
    ("weighting", 1, "weighting=1 is unknown; allowed are samples"),
    ("schedule", None, "schedule=None must be a function (key, round, num_clients, cohort_size)"),
    ("schedule", "uniform", "schedule='uniform' must be a function"),
    ("schedule", schedules.given, "schedule must be a function", "but given takes (cohorts); write e.g. schedules.uniform"),
    ("schedule", [[0, 1]], "schedule=[[0, 1]] must be a function", "schedules.given(table)"),
    ("participation", participation.unreliable, "but unreliable takes (late=..., crashed=...)", "unreliable(late=0.1)"),
    ("participation", participation.stragglers, "but stragglers takes (share, epochs=...)"),
    ("participation", participation.deadline, "but deadline takes (seconds, limit=..., partial=...)"),
    ("participation", 0.5, "participation=0.5 must be a function (key, client)"),
    ("participation", int, "participation=int must be a function"),
    ("aggregator", aggregate.trimmed_mean, "aggregator must be a function", "but trimmed_mean takes (share)"),
    ("aggregator", "median", "aggregator='median' must be a function"),
    ("aggregator", lambda uploads: uploads, "but <lambda> takes (uploads)"),
    ("new_client", lambda: 0, "new_client must be a function (key, population, support)"),
    ("new_client", 3, "new_client=3 must be a function"),
    ("uploads", [uploads.clip(1.0)], "uploads must be a tuple of upload transformations"),
    ("uploads", uploads.clip(1.0), "uploads must be a tuple"),
    ("uploads", (uploads.clip,), "uploads must hold upload transformations such as fm.uploads.clip(1.0)"),
    ("uploads", ("clip",), "uploads must hold upload transformations"),
    ("uploads", (uploads.noise(1.0),), "uploads=(noise): noise needs a clip before it"),
    ("uploads", (uploads.noise(1.0), uploads.clip(1.0)), "noise needs a clip before it"),
    ("uploads", (uploads.clip(1.0), uploads.clip(2.0)), "clip may stand there once"),
    ("uploads", (uploads.clip(1.0), uploads.noise(1.0), uploads.quantize(8)), "quantize must come before clip"),
    ("uploads", (uploads.clip(1.0), uploads.sparsify(0.1)), "sparsify with error feedback must come before clip"),
    ("uploads", (uploads.quantize(8), uploads.sparsify(0.1)), "sparsify must come before quantize"),
    ("uploads", (uploads.mask(16), uploads.clip(1.0)), "mask must come last"),
    ("uploads", (uploads.sparsify(0.1), uploads.mask(16)), "sparsify and mask exclude each other"),
    ("server_lr", 0, "server_lr=0 must be finite and above 0"),
    ("server_lr", "fast", "server_lr='fast' must be finite"),
    ("server_lr", [1.0], "server_lr=[1.0] must be one number"),
    ("server_optimizer", optax.adam, "server_optimizer needs server_lr"),
    ("server_optimizer", "adam", "server_optimizer must be a factory"),
    ("average_personal", "no", "average_personal='no' must be True or False"),
    ("own_at_test", 1, "own_at_test=1 must be True or False"),
])  # fmt: skip
FEDERATION |= {
    "Federation by position": Row(lambda: fm.Federation(3), ("Federation takes its options by name",)),
    "noise beside an aggregator": Row(
        lambda: fm.Federation(aggregator=aggregate.median, uploads=(uploads.clip(1.0), uploads.noise(1.0))),
        ("noise is scaled to the mean and says nothing of another aggregator",),
    ),
    "mask beside an aggregator": Row(
        lambda: fm.Federation(aggregator=aggregate.median, uploads=(uploads.mask(16),)),
        ("an aggregator must see every upload, which mask hides",),
    ),
}

PARTS = {
    **rows(participation.unreliable, {}, [
        ("late", 1.5, "late=1.5 must lie between 0 and 1"),
        ("late", "x", "late='x' must lie between 0 and 1"),
        ("late", [0.1, 0.2], "late=[0.1, 0.2] must be one number"),
        ("crashed", NAN, "crashed=nan must lie between 0 and 1"),
        ("crashed", None, "crashed=None must lie between 0 and 1"),
    ]),
    **rows(participation.stragglers, {"share": 0.5, "epochs": 5}, [
        ("share", -0.1, "share=-0.1 must lie between 0 and 1"),
        ("epochs", 1, "epochs=1 must be an integer of at least 2"),
        ("epochs", 5.0, "epochs=5.0 must be an integer"),
    ]),
    **rows(participation.deadline, {"seconds": [1.0, 2.0], "limit": 1.0, "partial": True}, [
        ("seconds", [1.0, 0.0], "seconds=[1.0, 0.0] must be finite and above 0"),
        ("seconds", 3.0, "seconds must have one time for each client"),
        ("seconds", [], "seconds must have one time for each client"),
        ("seconds", [[1.0], [2.0]], "seconds must have one time for each client, [N]"),
        ("seconds", "fast", "seconds='fast' must be finite"),
        ("limit", 0, "limit=0 must be finite and above 0"),
        ("limit", [1.0], "limit=[1.0] must be one number"),
        ("partial", "no", "partial='no' must be True or False"),
    ]),
    **rows(schedules.given, {}, [
        ("cohorts", [], "cohorts must be integers [rounds, C]"),
        ("cohorts", [0, 1], "cohorts must be integers [rounds, C]"),
        ("cohorts", [[0.5, 1.0]], "cohorts must be integers [rounds, C], not float64"),
        ("cohorts", [[0], [1, 2]], "cohorts must be one array of real numbers"),
        ("cohorts", [[0, 1], [2, 2]], "cohorts names a client twice in row 1"),
        ("cohorts", None, "cohorts must be one array of real numbers, not None"),
    ]),
    **rows(schedules.uniform, {"key": None, "round_": 0, "num_clients": 5, "cohort_size": 3}, [
        ("cohort_size", 6, "cohort_size=6 is more than the N=5 clients"),
        ("cohort_size", 0, "cohort_size=0 must be an integer"),
        ("num_clients", "x", "num_clients='x' must be an integer"),
    ]),
    **rows(uploads.clip, {}, [
        ("norm", 0, "norm=0 must be finite and above 0"),
        ("norm", "big", "norm='big' must be finite"),
        ("norm", [1.0, 2.0], "norm=[1.0, 2.0] must be one number"),
    ]),
    **rows(uploads.noise, {}, [("multiplier", -1, "multiplier=-1 must be finite"), ("multiplier", NAN, "multiplier=nan")]),
    **rows(uploads.quantize, {}, [
        ("bits", 0, "bits=0 must be an integer of at least 1"),
        ("bits", 25, "bits=25 must lie in [1, 24]"),
        ("bits", 8.0, "bits=8.0 must be an integer"),
    ]),
    **rows(uploads.sparsify, {}, [
        ("share", 0, "share=0 must be finite and above 0"),
        ("share", 1.1, "share=1.1 must lie between 0 and 1"),
        ("share", "few", "share='few' must lie between 0 and 1"),
    ]),
    **rows(uploads.mask, {}, [
        ("fraction_bits", 31, "fraction_bits=31 must lie in [1, 30]"),
        ("fraction_bits", 16.5, "fraction_bits=16.5 must"),
    ]),
    **rows(aggregate.trimmed_mean, {}, [
        ("share", 0.5, "share=0.5 would leave out every client"),
        ("share", 0.7, "share=0.7 must lie in [0, 0.5]"),
        ("share", "median", "share='median' must lie in [0, 0.5]"),
        ("share", None, "share=None must lie in [0, 0.5]"),
        ("share", [0.1], "share=[0.1] must be one number"),
    ]),
    "integers are averaged": Row(lambda: aggregate.weigh(jnp.ones(3, jnp.int32), 1.0), ("cannot be averaged",)),
    "a weighting of a client": Row(
        lambda: aggregate.client_weight("size", problems.data().client(0)), ("weighting='size' is unknown",)
    ),
}  # fmt: skip


def _start(method="fedavg", task=None, data=None, key=None, **federation):
    """Traces the first state, where data and method meet for the first time."""
    algorithm = fm.federate(fm.METHODS[method](task or problems.task()), fm.Federation(devices=1, **federation))
    return jax.eval_shape(algorithm.init, jax.random.key(0) if key is None else key, problems.data() if data is None else data)


def _with(task=None, **changes):
    return (task or problems.task())._replace(**changes)


def _regression():
    return fm.data.synthetic.linear_regression(3, seed=0)


def _complex(key):
    variables = problems.task().init(key)
    variables["head"]["b"] = variables["head"]["b"].astype(complex)
    return variables


def _only_train():
    sizes = np.array([20, 20])
    x, y = np.ones((40, 5)), np.arange(40) % 3
    return fm.from_partition(x, y, np.arange(40), sizes, views={"train": (np.zeros(2, int), sizes)})


MEET = {
    "fewer outputs than classes": Row(
        lambda: _start(data=fm.from_clients([(np.ones((20, 5)), np.arange(20) % 4)])),
        ("the model has 3 outputs, but the data have num_classes=4",),
    ),
    "inputs of another size": Row(
        lambda: _start(data=fm.from_clients([(np.ones((20, 6)), np.arange(20) % 3)])),
        ("the model does not take these data, inputs float64[6] and labels int32[]",),
    ),
    "images for a perceptron of another size": Row(
        lambda: _start(
            task=fm.models.mlp(inputs=784, classes=3),
            data=fm.from_clients([(np.ones((20, 8, 8, 1), np.uint8), np.arange(20) % 3)]),
        ),
        ("the model does not take these data", "[8, 8, 1]"),
    ),
    "real targets for a classifier": Row(
        lambda: _start(data=_regression()), ("the loss does not take these data", "targets float64[]", "loss='squared'")
    ),
    "real targets where classes are needed": Row(
        lambda: _start("fedpac", data=_regression()),
        ("fedpac needs one class label a sample, but the data have targets float64[], real numbers or several labels",),
    ),
    "a complex leaf": Row(
        lambda: _start(task=_with(init=_complex)), ("the model's leaf ['head']['b'] is complex128[3]: complex leaves",)
    ),
    "no query view to weigh by": Row(
        lambda: _start("fedmeta", data=_only_train(), weighting="query"), ("by the samples of their view 'query'", "train")
    ),
    "fewer times than clients": Row(
        lambda: _start(participation=participation.deadline([1.0, 2.0], limit=1.0, partial=True)),
        ("participation knows 2 clients, but the data have N=7",),
    ),
    "more times than clients": Row(
        lambda: _start(participation=participation.deadline(np.ones(8), limit=1.0, partial=False)),
        ("participation knows 8 clients, but the data have N=7",),
    ),
    "data that are a list": Row(lambda: _start(data=[(1, 2)]), ("data must be a FederatedData, e.g. fm.from_clients(...)",)),
    "a seed for a key": Row(
        lambda: fm.federate(fm.fedavg(problems.task())).init(0, problems.data()), ("key=0 must be a JAX PRNG key",)
    ),
    "keys for a key": Row(
        lambda: _start(key=jax.random.split(jax.random.key(0))), ("key must be one JAX PRNG key, not an array of keys [2]",)
    ),
    "a cohort larger than the population": Row(
        lambda: fm.federate(fm.fedavg(problems.task()), fm.Federation(cohort_size=8)).cohort(jax.random.key(0), 0, 7),
        ("cohort_size=8 is more than the N=7 clients",),
    ),
    "a schedule of another cohort size": Row(
        lambda: fm.federate(
            fm.fedavg(problems.task()), fm.Federation(cohort_size=3, schedule=schedules.given([[0, 1]]))
        ).cohort(jax.random.key(0), 0, 7),
        ("cohorts has rows of 2 clients, but cohort_size=3",),
    ),
    "a schedule of unknown clients": Row(
        lambda: fm.federate(
            fm.fedavg(problems.task()), fm.Federation(cohort_size=2, schedule=schedules.given([[0, 7]]))
        ).cohort(jax.random.key(0), 0, 7),
        ("cohorts=[[0 7]] must be integers in [0, 7)",),
    ),
}  # fmt: skip

ROWS = {**METHODS, **FIRST, **FEDERATION, **PARTS, **MEET}
