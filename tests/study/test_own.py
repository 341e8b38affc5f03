"""Methods, models, partitions, rules and attacks of a user's own, which a study names as "module:name"."""

import dataclasses
import importlib
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from fedjax_meta import imports, loggers, measures
from fedjax_meta.study import System, from_tree, made, own_code, run, to_yaml
from fedjax_meta.study.scenario import Scenario
from fedjax_meta.study.tuning import points_of, shaping
from tests.study.common import Silent, study, tree
from tests.test_commands import own_modules

typer_testing = pytest.importorskip("typer.testing", reason="the command line needs typer")
cli = pytest.importorskip("fedjax_meta.cli", reason="the command line needs typer, rich and matplotlib")

RUN = ["run", "--systems", "my_methods:fading(lr=0.1), fedper(lr=0.1)", "--dataset", "digits", "--clients", "6"]
RUN += ["--model", "my_models:small(width=4)", "--partition", "my_partitions:odd_and_even(mixed=0.5)", "--out", "run"]
CUT = ["--systems", "fedavg", "--dataset", "digits", "--partition"]
BY = ["--dataset", "digits", "--systems"]
METHOD = """import jax.numpy as jnp
import fedjax_meta as fm
from fedjax_meta import masks


@fm.method_builder
def wrong(task, *, lr: float = 0.1):
    {builder}

    def client(key, received, data):
        {client}

    everything = masks.everything(task)
    return fm.Method(
        init=task.init, client=client, personalize=fm.received_model, predict=task.predict,
        roles=masks.roles(masks.nothing(task), everything),
    )
"""
"""A method with an error in line 8, 11 or 15."""
RIGHT = {"builder": "pass", "client": "return fm.Trained(received.model, {})"}
BROKEN = {
    "shapes": METHOD.format(**RIGHT | {"client": "return jnp.broadcast_arrays(jnp.zeros(2), jnp.zeros(3))"}),
    "adds": METHOD.format(**RIGHT | {"client": "return jnp.zeros(2) + jnp.zeros(3)"}),
    "looks": METHOD.format(**RIGHT | {"client": "return {}['my bug']"}),
    "reads": METHOD.format(**RIGHT | {"builder": "open('weights.npz')"}),
    "returns": METHOD.format(**RIGHT | {"client": "return received.model"}),
    "elsewhere": METHOD.format(**RIGHT | {"client": "from helper import fails; fails()"}),
    "counts": METHOD.format(**RIGHT | {"client": "return fm.Trained(received.model, {'left_out': jnp.zeros(())})"}),
    "helper": "def fails():\n    assert False\n",
    "adapts": METHOD.format(**RIGHT).replace("fm.received_model", "lambda *given: {}['adapts']"),
    "fragile": "def small(inputs, classes):\n    raise KeyError('oops')\n",
    "fails": "1 / 0\n",
    "unreadable": "def (\n",
    "needs": "import no_such_package\n",
    "other": "import fedjax_meta as fm\n\n\ndef narrow(x):\n    return x\n\n\ndef nothing(inputs, classes):\n    return 1\n",
    "alike": """import fedjax_meta as fm


def trimmed(*, share: float):
    return fm.aggregate.trimmed_mean(share)


def nearest(*, f):
    return fm.aggregate.nearest_neighbours(fm.aggregate.median, f)


def flips(attackers, *, scale=1.0, seed=0):
    return fm.attacks.sign_flip(attackers, scale=scale, seed=seed)


def needy(stacked, weights, *, size):
    return stacked


def positional(a, b, c):
    return a


def one(stacked, weights):
    return 1.0


def honest(attackers):
    return 3


def lies(attackers):
    return fm.attacks.Attack(name="lies", attackers=attackers, lie=lambda key, change: 0.0)
""",
    "cuts": """import numpy as np


def cut(labels, num_clients, *, seed, returns):
    order, sizes = np.arange(num_clients), np.ones(num_clients, int)
    found = {
        "one": order, "far": (order + len(labels) - 1, sizes), "many": (order, sizes + 1), "few": (order[1:], sizes[1:]),
        "floats": (order / 2, sizes), "below": (order - 1, sizes), "twice": (np.repeat(order, 2), sizes * 2),
    }
    return found[returns]


def without_seed(labels, num_clients):
    return 1


def positional(labels, num_clients, seed):
    return 1
""",
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with the modules of the pages, from which commands start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in {**own_modules(), **BROKEN}.items():
        monkeypatch.delitem(sys.modules, name, raising=False)
        Path(f"{name}.py").write_text(code, encoding="utf-8")
    importlib.invalidate_caches()
    yield tmp_path
    for name in (*own_modules(), *BROKEN):
        sys.modules.pop(name, None)


def said(*words):
    done = typer_testing.CliRunner().invoke(cli.app, list(words), env={"COLUMNS": "200"})
    return done.exit_code, " ".join(done.output.split())


def change(old, new):
    """Edits the method between two starts of the command."""
    path = Path("my_methods.py")
    code = path.read_text(encoding="utf-8")
    assert old in code
    path.write_text(code.replace(old, new) + "# of another size, so that no old byte code is taken\n", encoding="utf-8")
    forget()


def forget():
    """Makes the next command import and read all files again, as one in another process does."""
    for name in own_modules():
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    made._digests.cache_clear()
    made._package.cache_clear()


def makers():
    return json.loads(Path("run/results/clients/fading.final.json").read_text(encoding="utf-8"))["made"]


def test_a_run_is_recorded_goes_on_and_is_read_by_the_other_commands():
    assert said(*RUN, "--rounds", "1")[0] == 0
    recorded = Path("run/study.yaml").read_text(encoding="utf-8")
    assert "method: my_methods:fading" in recorded and "model: my_models:small" in recorded
    assert said("show", "run/study.yaml") == (0, " ".join(recorded.split()))
    assert said(*RUN, "--rounds", "2")[0] == 0 and len(makers()) == 1
    code, text = said("compare", "run")
    assert code == 0 and "fading(lr=0.1)" in text
    assert said("export", "run", "--system", "fading", "--client", "1", "--out", "c.safetensors")[0] == 0
    assert Path("run/report.html").is_file()
    code, text = said("list", "methods", "my_methods:fading")
    assert code == 0 and text.startswith("my_methods:fading: FedProx with an own head") and "decay: 0.9" in text
    assert said("list", "models", "my_models:small") == (0, "my_models:small: One hidden layer width: 32")
    assert "changed" not in Path("run/report.md").read_text(encoding="utf-8")
    # Other code goes on, and is recorded beside the first.
    change("decay=0.9", "decay=0.8")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, text = said(*RUN, "--rounds", "3")
    assert code == 0 and "note: the code of my_methods:fading has changed since this run was begun" in text
    assert len({one["method"] for one in makers()}) == 2
    code, text = said(*RUN, "--rounds", "3")
    assert code == 0 and "note: the code" not in text  # it was said once, and stays in the table
    rows = {line.split(" | ")[0]: line for line in Path("run/report.md").read_text(encoding="utf-8").splitlines()}
    assert "its code changed during the run" in rows["| fading(lr=0.1)"]
    assert "its code" not in rows["| fedper(lr=0.1)"]
    # Code that keeps something else cannot take the state over.
    change("return fm.Trained(model, {", "return fm.Trained(model, memory=received.memory, metrics={")
    change("init=task.init,", "init=task.init, init_memory=lambda key, model, num_clients: jnp.zeros(3),")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, text = said(*RUN, "--rounds", "4")
    assert code == 1 and "cannot resume" in text and "memory" in text
    Path("my_methods.py").unlink()
    forget()
    code, text = said("compare", "run")
    assert code == 1 and "No module named 'my_methods'; start in the folder that has it, or install it" in text


def test_a_system_in_python_and_in_a_file_is_the_same():
    written = tree(systems={"mine": {"method": "my_methods:fading", "grid": {"lr": [0.1, 0.2]}}})
    study = from_tree(written)
    assert study.systems["mine"] == System(method="my_methods:fading", grid={"lr": [0.1, 0.2]})
    assert "method: my_methods:fading" in to_yaml(study)


def test_a_default_may_be_anything():
    options = "one=object, other=(1, {2}), third=slice(3)"
    code = f"import fedjax_meta as fm\n\n\n@fm.method_builder\ndef odd(task, *, {options}):\n    ...\n"
    Path("other.py").write_text(code, encoding="utf-8")
    code, text = said("list", "methods", "other:odd")
    assert (code, text) == (0, 'other:odd: one: object other: [1, "{2}"] third: "slice(None, 3, None)"')


def test_names_and_titles_tell_systems_apart():
    Path("fedper_of_mine.py").write_text("from my_methods import fading as fedper\n", encoding="utf-8")
    code, text = said("show", "--systems", "my_methods:fading, my_methods:fading(decay=0.5), fedper, fedper_of_mine:fedper")
    del sys.modules["fedper_of_mine"]
    assert code == 0
    for title in ("fading", "fading(decay=0.5)", "fedper", "fedper_of_mine:fedper"):
        assert f"title: {title} " in text
    for name in ("fading", "fading-2", "fedper", "fedper-2"):
        assert f"{name}: method: " in text


def test_whole_numbers_of_an_option_without_annotation_shape_programs():
    """A traced float would be refused as a number of epochs."""
    system = System(method="my_methods:fading", grid={"epochs": [1, 2], "lr": [1, 2], "prox_weight": [0.1, 1]})
    assert shaping(system) == ("epochs",)
    assert all(type(point["epochs"]) is int and type(point["lr"]) is float for point in points_of(system))


def test_digests_are_of_the_files_of_the_method_and_of_the_model():
    place, other = (Scenario(dataset="digits", model=name) for name in ("my_models:small", "mlp"))
    before = made.digests("my_methods:fading", place)["method"], made.digests("my_methods:fading", other)["method"]
    Path("my_models.py").write_text(own_modules()["my_models"].replace("32", "16"), encoding="utf-8")
    forget()
    after = made.digests("my_methods:fading", place)["method"], made.digests("my_methods:fading", other)["method"]
    assert before[0] != after[0] and before[1] == after[1]


def test_a_partition_of_ones_own_divides_the_samples_and_belongs_to_the_digests():
    place = Scenario(dataset="digits", partition="my_partitions:odd_and_even", clients=6, new=0.0, server=100)
    clients = place.build()
    held = np.asarray(clients.train.sizes("train")) + np.asarray(clients.train.sizes("test"))
    assert held.sum() == 1797 - 100 and len(held) == 6
    for i in range(6):
        labels = np.asarray(clients.train.y[clients.train.start["train"][i] :][: held[i]])
        assert set((labels % 2).tolist()) == {i % 2}
    other = dataclasses.replace(place, seed=2).build()
    assert clients.fingerprint == place.build().fingerprint != other.fingerprint
    before = made.digests("fedavg", place)["method"]
    Path("my_partitions.py").write_text(own_modules()["my_partitions"].replace("0.0", "0.1"), encoding="utf-8")
    forget()
    assert made.digests("fedavg", place)["method"] != before


def test_a_partition_of_ones_own_gets_targets_as_they_are():
    np.savez("prices.npz", x=np.zeros((60, 2)), y=np.linspace(-1, 1, 60))
    Path("dear.py").write_text(
        "import numpy as np\n\n\ndef dear(targets, num_clients, *, seed):\n"
        "    order = np.argsort(targets.ravel())\n    return order, [len(order) // num_clients] * num_clients\n"
    )
    clients = Scenario(dataset="prices.npz", partition="dear:dear", clients=3, new=0.0, model="mlp").build()
    starts = np.asarray(clients.train.start["train"])
    lowest = [float(np.min(clients.train.y[start : start + 20])) for start in starts]
    assert np.allclose(lowest, np.linspace(-1, 1, 60)[[0, 20, 40]])


def test_rules_and_attacks_of_ones_own_act_as_the_same_ones_of_the_package(tmp_path):
    """Their options may have grids, and say "attackers"."""
    trained = []
    for rule, neighbours, attack in (
        ({"name": "alike:trimmed"}, {"name": "alike:nearest", "f": "attackers"}, {"name": "alike:flips"}),
        ({"name": "trimmed_mean"}, "nearest_neighbours:f=attackers+median", {"name": "sign_flip"}),
    ):
        one = from_tree(
            tree(
                systems={
                    "grid": {"method": "fedavg", "grid": {"aggregator.share": [0.2, 0.4]}, "federation": {"aggregator": rule}},
                    "rule": {"method": "fedper", "options": {"lr": 0.1}, "federation": {"aggregator": neighbours}},
                },
                scenarios={
                    "clients": {"dataset": "digits", "clients": 10, "attackers": 0.2, "federation": {"attack": attack}}
                },
                federation={"cohort_size": 5},
                rounds=2,
                seeds=[1],
            )
        )
        outcomes = run.run(one, tmp_path / f"{len(trained)}", watcher=Silent())
        trained.append([(outcome.chosen, [trial.rows[-1]["tests"] for trial in outcome.final]) for outcome in outcomes])
    assert trained[0] == trained[1]


def test_rules_and_attacks_of_ones_own_belong_to_the_digests():
    federation = {"aggregator": {"name": "my_rules:near_median", "share": 0.5}}
    attack = {"attack": {"name": "my_rules:free_riders", "attackers": 0.2}}
    system = {"fedavg": {"method": "fedavg", "federation": attack}}
    assert list(own_code.digests(from_tree(tree(systems=system, federation=federation)))) == [
        "my_rules:near_median",
        "my_rules:free_riders",
    ]
    before = made.digests("fedavg", rules=["my_rules:near_median"])["method"]
    assert before != made.digests("fedavg")["method"]
    Path("my_rules.py").write_text(own_modules()["my_rules"].replace("0.01", "0.1"), encoding="utf-8")
    forget()
    assert made.digests("fedavg", rules=["my_rules:near_median"])["method"] != before


def test_a_rule_of_ones_own_that_changes_during_a_run_is_told_of():
    words = ["run", "--systems", "fedavg(aggregator=my_rules:near_median)", "--dataset", "digits", "--out", "run"]
    assert said(*words, "--rounds", "1")[0] == 0
    Path("my_rules.py").write_text(own_modules()["my_rules"].replace("0.5", "0.25"), encoding="utf-8")
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, text = said(*words, "--rounds", "2")
    assert code == 0 and "note: the code of my_rules:near_median has changed since this run was begun" in text
    assert "its code changed during the run" in Path("run/report.md").read_text(encoding="utf-8")
    assert "share: 0.25" in said("list", "parts", "my_rules:near_median")[1]
    assert "deviation: 0.01" in said("list", "parts", "my_rules:free_riders")[1]


def test_the_note_says_which_samples_a_partition_of_ones_own_uses():
    Path("part.py").write_text(
        "import numpy as np\n\n\ndef half(labels, num_clients, *, seed, common=0):\n"
        "    own = np.arange(common, 600).reshape(num_clients, -1)\n"
        "    held = [np.concatenate([np.arange(common), mine]) for mine in own]\n"
        "    return np.concatenate(held), [len(mine) for mine in held]\n"
    )
    note = Scenario(dataset="digits", partition="part:half", clients=6).build().note
    assert "gives clients 600 of 1,797 samples" in note and "several" not in note
    note = Scenario(dataset="digits", partition="part:half", options={"common": 60}, clients=6).build().note
    assert "gives clients 600 of 1,797 samples, 60 of them to several clients" in note


def test_files_that_the_code_imports_from_its_folder_count():
    text = "import helper, json\nfrom fedjax_meta import measures\n\n"
    text += "score = measures.mean('score', lambda outputs, y: outputs[:, 0])\n"
    Path("mine.py").write_text(text, encoding="utf-8")
    imports.imported("a metric", "mine:score")
    assert [path.name for path in own_code.files("mine")] == ["mine.py", "helper.py"]
    chosen = dataclasses.replace(study(), metrics=("mine:score",))
    before = own_code.digests(chosen)
    assert list(before) == ["mine:score"]
    Path("helper.py").write_text(Path("helper.py").read_text(encoding="utf-8") + "# a comment\n", encoding="utf-8")
    assert own_code.digests(chosen) == before
    Path("helper.py").write_text("def fails():\n    return 1\n", encoding="utf-8")
    assert own_code.digests(chosen) != before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--systems", "my_method:fading"], "my_method:fading: No module named 'my_method'; start in the folder"),
        (["--systems", "needs:x"], "needs:x: No module named 'no_such_package'"),
        (["--systems", "my_methods:fadin"], "module 'my_methods' has no attribute 'fadin' (did you mean 'fading'?)"),
        (["--systems", "my_models:small"], "my_models:small must be a builder, made with @fm.method_builder, not <function"),
        (["--systems", "my_methods:fading(decai=1)"], "takes no 'decai' (did you mean 'decay'?)"),
        (["--systems", "my/methods.py:fading"], "'my/methods.py:fading' must read module:name"),
        (["--systems", "fails:x"], "importing fails raises ZeroDivisionError: division by zero"),
        (["--systems", "unreadable:x"], "importing unreadable raises SyntaxError: invalid syntax"),
        (["--systems", "fading"], "--systems='fading' is unknown"),
        ([*BY, "fedavg(aggregator=my_rules:near_medium)"], "has no attribute 'near_medium' (did you mean 'near_median'?)"),
        ([*BY, "fedavg(aggregator={name: 'my_rules:near_median', shares: 1})"], "takes no 'shares' (did you mean 'share'?)"),
        (
            [*BY, "fedavg(aggregator=alike:positional)"],
            "(stacked, weights, *, ...), or (*, ...) that returns a rule, but it takes a, b, c",
        ),
        (
            [*BY, "fedavg(aggregator=alike:fm)"],
            "aggregator alike:fm must be a function (stacked, weights, *, ...), or (*, ...)",
        ),
        ([*BY, "fedavg(aggregator=alike:needy)"], "aggregator alike:needy needs size: {name: alike:needy, size: VALUE}"),
        ([*BY, "fedavg(aggregator=alike:one)"], "aggregator one must give a tree like one client's upload"),
        (
            [*BY, "fedavg(attack=my_rules:free_riders)"],
            "attack my_rules:free_riders needs attackers: give it, or the scenario, a share",
        ),
        ([*BY, "fedavg(attack={name: 'alike:honest', attackers: 0.2})"], "attack alike:honest must return an Attack, not 3"),
        (
            [*BY, "fedavg(attack=my_rules:near_median)"],
            "a function (attackers, ...) that returns an Attack, but it takes stacked, weights",
        ),
        (["--systems", "fedavg", "--model", "my_models:smal"], "has no attribute 'smal' (did you mean 'small'?)"),
        (["--systems", "fedavg", "--model", "my_models:small(widht=3)"], "takes no 'widht' (did you mean 'width'?)"),
        (["--systems", "fedavg", "--model", "my_models:fm"], "model my_models:fm must be a function that returns a Task"),
        (["--systems", "fedavg", "--model", "other:narrow"], "must take classes and one of inputs, image, window, or"),
        (["--systems", "fedavg", "--dataset", "digits", "--model", "other:nothing"], "other:nothing must return a Task"),
        ([*CUT, "my_partitions:odd_and_evn"], "has no attribute 'odd_and_evn' (did you mean 'odd_and_even'?)"),
        ([*CUT, "my_partitions:odd_and_even(mixt=1)"], "takes no 'mixt' (did you mean 'mixed'?)"),
        (
            [*CUT, "cuts:without_seed"],
            "cuts:without_seed must be a function (labels, num_clients, *, seed, ...), but it takes labels, num_clients",
        ),
        (
            [*CUT, "cuts:positional"],
            "must be a function (labels, num_clients, *, seed, ...), but it takes labels, num_clients",
        ),
        ([*CUT, "cuts:np"], "cuts:np must be a function (labels, num_clients, *, seed, ...), not <module"),
        ([*CUT, "cuts:cut(returns=one)"], "cuts:cut must return (order, sizes), e.g. a Partition, not [ 0 1 2 3"),
        ([*CUT, "cuts:cut(returns=far)"], "must be integers in [0, 1797)"),
        ([*CUT, "cuts:cut(returns=below)"], "must be integers in [0, 1797)"),
        ([*CUT, "cuts:cut(returns=floats)"], "order of partition cuts:cut"),
        ([*CUT, "cuts:cut(returns=twice)"], "gives client 0 sample 0 2 times: it would train on samples of its own test"),
        (
            [*CUT, "iid", "--set", "scenarios.clients.server=5000"],
            "server=5000 leaves no sample of digits for clients",
        ),
        (
            [*CUT, "cuts:cut(returns=many)"],
            "sizes [20] with the sum S, not [20] and [20] with the sum 40",
        ),
        (
            [*CUT, "cuts:cut(returns=few)"],
            "sizes [20] with the sum S, not [19] and [19] with the sum 19",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words, message):
    code, text = said("run", *words)
    assert code == 1 and message in text and "Traceback" not in text, text
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "message", "place"),
    [
        (["--systems", "shapes:wrong"], "clients, wrong: Incompatible shapes for broadcasting", "shapes.py, line 11"),
        (["--systems", "adds:wrong, fedavg"], "clients, wrong: TypeError: add got incompatible shapes", "adds.py, line 11"),
        (["--systems", "looks:wrong"], "clients, wrong: KeyError: 'my bug'", "looks.py, line 11"),
        (["--systems", "reads:wrong"], "clients, wrong: FileNotFoundError: [Errno 2] No such file", "reads.py, line 8"),
        (["--systems", "elsewhere:wrong"], "clients, wrong: AssertionError (helper.py, line 2;", "helper.py, line 2"),
        (["--systems", "adapts:wrong"], "clients, wrong: KeyError: 'adapts'", "adapts.py, line 15"),
        (["--systems", "fails:x"], "--systems fails:x: importing fails raises ZeroDivisionError", "fails.py, line 1"),
        (["--systems", "fedavg", "--model", "fragile:small"], "model fragile:small: KeyError: 'oops'", "fragile.py, line 2"),
        ([*CUT[:2], "--partition", "cuts:cut(returns=oops)"], "partition cuts:cut: KeyError: 'oops'", "cuts.py, line 10"),
    ],
)
def test_an_error_in_own_code_names_what_it_is_of_and_its_line(words, message, place):
    words = ["run", *words, "--dataset", "digits", "--rounds", "1"]
    code, text = said(*words)
    assert code == 1 and f"error: {message}" in text and "Traceback" not in text, text
    assert f"({place}; --debug shows the traceback)" in text
    with pytest.raises(ValueError) as error:
        cli.app([*words, "--debug"], standalone_mode=False)
    assert imports.place_of(error.value) == place


@pytest.mark.parametrize(
    ("method", "federation", "words"),
    [
        ("adds:wrong", {}, "TypeError: add got incompatible shapes"),
        ("counts:wrong", {"schedule": {"name": "poisson", "rate": 0.5}}, "'left_out'"),
        ("fedavg", {"attack": {"name": "alike:lies", "attackers": [0]}}, "the lie of an attack must be like"),
        ("adds:wrong", None, "TypeError: add got incompatible shapes"),
    ],
)
def test_own_code_that_fails_in_a_round_is_refused_before_other_systems_train(tmp_path, method, federation, words):
    central = {"pooled": True} if federation is None else {"federation": {"cohort_size": 4, **federation}}
    systems = {"good": tree()["systems"]["local"], "bad": {"method": method, "options": {"lr": 0.1}, **central}}
    chosen = study(systems=systems)
    watcher = Silent()
    with pytest.raises(ValueError, match=f"pairs, bad: .*{words}"):
        run.run(chosen, tmp_path, watcher=watcher)
    assert watcher.records == 0


def test_a_client_that_returns_a_model_alone_is_told_what_to_return():
    code, text = said("run", "--systems", "returns:wrong", "--dataset", "digits", "--rounds", "1")
    assert code == 1 and "client of wrong must return fm.Trained(model, metrics), not {" in text and "Traceback" not in text


def test_a_model_that_takes_no_loss_refuses_targets_that_are_no_classes():
    with pytest.raises(ValueError, match="model my_models:small: got an unexpected keyword argument 'loss'"):
        Scenario(dataset="sinusoids", model="my_models:small").build()


def test_metrics_and_loggers_are_found_in_the_same_way():
    for find in (lambda place: measures.resolve([place], 2), loggers.made):
        with pytest.raises(ValueError, match=r"fails:x: importing fails raises ZeroDivisionError: division by zero"):
            find("fails:x")
        with pytest.raises(ValueError, match="did you mean 'narrow'"):
            find("other:narow")
