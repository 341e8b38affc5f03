"""Loggers: what they are told, what TensorBoard reads back, and what is said when a package is missing."""

import functools
import json
import sys
import time

import jax
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import fedjax_meta as fm
from fedjax_meta import evaluation, loggers, process, report
from fedjax_meta.cli import app
from fedjax_meta.simulation import Evaluator, Record
from fedjax_meta.study import folder as folders
from fedjax_meta.study import run
from fedjax_meta.study.loggers import logged
from tests.study.common import TREE, Silent, study

SMALL = {**TREE, "rounds": 3, "systems": {"fedavg": TREE["systems"]["fedavg"]}, "tuning": {"rounds": 2, "seeds": [0]}}


class Memory:
    """A logger that keeps what it is told."""

    def __init__(self, folder=None, name=""):
        self.name, self.steps = name, {}

    def start(self, config):
        self.config = config

    def log(self, step, values):
        assert all(step >= before for before in self.steps)
        self.steps.setdefault(step, {}).update(values)

    def finish(self, status):
        self.status = status


def scalars(folder):
    """What TensorBoard reads: {tag: {step: value}}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: {event.step: event.value for event in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


@pytest.fixture(scope="module")
def problem():
    clients = study().scenarios["pairs"].build()
    return fm.fedavg(clients.task, lr=0.1, batch_size=20), clients.train


def simulated(problem, logger, **options):
    method, data = problem

    def measure(key, state, data):
        return evaluation.evaluate(method, key, state, data, support="train", query="test")

    tests = {
        "known": Evaluator(measure, data),
        "norm": Evaluator(lambda key, state, data: {"all": sum(abs(x).sum() for x in jax.tree.leaves(state.model))}, ()),
    }
    with loggers.logged(logger, method.config) as on_record:
        return fm.simulate(
            method, data, key=jax.random.key(1), rounds=5, eval_every=2, evaluators=tests, on_record=on_record, **options
        )[1]


def test_simulate_logs_every_round_and_every_score(problem):
    memory = Memory()
    records = simulated(problem, memory)
    assert memory.status == "finished" and memory.config["lr"] == 0.1 and list(memory.steps) == [1, 2, 3, 4, 5]
    losses = np.concatenate([record.metrics["loss"] for record in records])
    np.testing.assert_array_equal([memory.steps[r]["train/loss"] for r in range(1, 6)], losses)
    assert set(memory.steps[3]) == {"train/loss"}
    for record in records:
        scores = record.evaluations["known"].summary()
        assert {f"known/{name}": value for name, value in scores.items()}.items() <= memory.steps[record.round].items()
        assert memory.steps[record.round]["norm/all"] == float(record.evaluations["norm"]["all"])


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "stopped"), (ZeroDivisionError, "failed")])
def test_a_run_that_breaks_says_so(error, status):
    memory = Memory()
    with pytest.raises(error), loggers.logged(memory):
        raise error
    assert memory.status == status and memory.config == {}


def test_a_logger_that_cannot_end_hides_no_error_of_the_run():
    class Broken(Memory):
        def finish(self, status):
            raise ConnectionError("no network")

    with pytest.raises(ZeroDivisionError) as caught, loggers.logged(Broken()):
        raise ZeroDivisionError
    assert caught.value.__notes__ == ["A logger could not end its run either: ConnectionError: no network"]
    with pytest.raises(ConnectionError), loggers.logged(Broken()):
        pass


@pytest.mark.parametrize(("done", "status"), [(4, "finished"), (2, "stopped")])
def test_a_run_that_ends_before_its_rounds_was_stopped(done, status):
    memory = Memory()
    with loggers.logged(memory, rounds=4) as on_record:
        on_record(None, Record(done, {"loss": np.ones(done)}, {}, 0.0, 0.0, ()))
    assert memory.status == status


def test_a_run_that_was_complete_when_it_went_on_is_finished():
    memory = Memory()
    with loggers.logged(memory, rounds=4, done=4):
        pass
    assert memory.status == "finished"


def test_tensorboard_reads_what_was_logged_also_while_the_run_goes_on(tmp_path):
    logger = loggers.TensorBoard(tmp_path, "a/b")
    logger.start({"lr": 0.1})
    logger.log(1, {"loss": 2.5, "known/accuracy": 0.25})
    # The file of a run that would be killed now holds all but the last second.
    late = time.time() + 20
    while len(scalars(tmp_path / "a/b")) < 2 and time.time() < late:
        time.sleep(0.2)
    assert scalars(tmp_path / "a/b") == {"loss": {1: 2.5}, "known/accuracy": {1: 0.25}}
    logger.log(2, {"loss": float("nan")})
    logger.finish("finished")
    found = scalars(tmp_path / "a/b")["loss"]
    assert list(found) == [1, 2] and np.isnan(found[2])


def lines(folder):
    return [report.numbers_again(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_study_gives_tensorboard_what_it_saves(tmp_path):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(SMALL))
    out = tmp_path / "run"
    result = CliRunner().invoke(app, ["run", str(tmp_path / "study.yaml"), "--out", str(out), "--log", "tensorboard"])
    assert result.exit_code == 0, result.output
    runs = {path.parent.relative_to(out / "logs/tensorboard").as_posix() for path in out.rglob("events.out.tfevents.*")}
    tuning = {f"pairs/fedavg/tuning/lr={lr},seed=0" for lr in (0.02, 0.2)}
    chosen = lines(out)[-1]["numbers"]["lr"]
    assert runs == tuning | {f"pairs/fedavg/final/lr={chosen:g},seed={seed}" for seed in (1, 2)}
    found = scalars(out / f"logs/tensorboard/pairs/fedavg/final/lr={chosen:g},seed=2")
    for line in lines(out):
        if line["phase"] == "final" and line["seed"] == 2:
            for group, test in line["tests"].items():
                for name, value in test["scores"].items():
                    assert found[f"{group}/{name}"][line["round"]] == np.float32(value)
    assert list(found["train/loss"]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("error", "status"),
    [(process.Stopped("stopped", 2), "stopped"), (run.Stopped("in round 3"), "stopped"), (ValueError("no"), "failed")],
)
def test_a_study_that_is_stopped_has_not_failed(error, status, tmp_path):
    made = []

    class Ends(Silent):
        def record(self, done, records):
            raise error

    def make(folder, name):
        made.append(Memory(folder, name))
        return made[-1]

    configs = {"fedavg": {}}
    with pytest.raises(type(error)), logged(Ends(), tmp_path, {"m": make}, configs) as watcher:
        run.run(study(rounds=2, tuning={"rounds": 1}), tmp_path, watcher=watcher)
    assert made and {one.status for one in made} == {status}


def test_a_run_whose_rounds_diverged_has_not_finished(tmp_path):
    """Its scores are those of the initial model, which are finite."""
    made = []

    def make(folder, name):
        made.append(Memory(folder, name))
        return made[-1]

    systems = {"fedavg": {"method": "fedavg", "options": {"lr": 1.7e308, "epochs": 5, "batch_size": 10}}}
    chosen = study(rounds=1, systems=systems, seeds=[1])
    with logged(Silent(), tmp_path, {"m": make}, {"fedavg": {}}) as watcher:
        run.run(chosen, tmp_path, watcher=watcher)
    (line,) = lines(tmp_path)
    assert line["faults"][0]["diverged"] and np.isfinite(list(line["tests"]["known"]["scores"].values())).all()
    assert [one.status for one in made] == ["diverged"]


@pytest.mark.parametrize("breaks", ["start", "finish"])
def test_the_first_error_of_a_logger_is_the_one_that_is_told(breaks, tmp_path):
    """A logger that could not start is not ended; one that cannot end leaves no other open, and hides no error before it."""
    made = []

    class Broken(Memory):
        def start(self, config):
            if breaks == "start":
                raise ConnectionError("no network")
            super().start(config)

        def log(self, step, values):
            raise ConnectionError("no network")

        def finish(self, status):
            raise AttributeError("there is no run")

    def make(kind, folder, name):
        made.append(kind(folder, name))
        return made[-1]

    kinds = {name: functools.partial(make, kind) for name, kind in (("a", Memory), ("b", Broken), ("c", Memory))}
    with pytest.raises(ConnectionError, match="no network"), logged(Silent(), tmp_path, kinds, {"fedavg": {}}) as watcher:
        run.run(study(rounds=1), tmp_path, watcher=watcher)
    assert [one.status for one in made if type(one) is Memory] == ["failed"] * (1 if breaks == "start" else 2)


def test_a_study_that_goes_on_logs_each_evaluation_once(tmp_path):
    chosen, made = study(**{k: v for k, v in SMALL.items() if k not in TREE or TREE[k] != v}), []

    def make(folder, name):
        made.append(Memory(folder, name))
        return made[-1]

    configs = {"fedavg": {"method": "fedavg"}}
    with pytest.raises(KeyboardInterrupt), logged(Silent(stop_at=2), tmp_path, {"m": make}, configs) as watcher:
        run.run(chosen, tmp_path, watcher=watcher)
    assert {one.status for one in made} == {"stopped"} and made[0].config["options"] == {"method": "fedavg"}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"scenario": "pai')  # as a process leaves it that is killed while it writes; the run removes it
    with logged(Silent(), tmp_path, {"m": make}, configs) as watcher:
        run.run(chosen, tmp_path, watcher=watcher)
    assert {one.status for one in made[2:]} == {"finished"}
    seen = [(one.name, step) for one in made for step, values in one.steps.items() if "seconds" in values]
    saved = [(line["phase"], line["seed"], line["round"]) for line in lines(tmp_path)]
    assert len(seen) == len(set(seen)) == len(saved)
    inner = Silent()
    with logged(inner, tmp_path, {}, configs) as watcher:
        assert watcher is inner


def test_processes_that_share_a_run_log_what_they_train(tmp_path):
    chosen, made = study(**{k: v for k, v in SMALL.items() if k not in TREE or TREE[k] != v}), []

    def make(folder, name):
        made.append(Memory(folder, name))
        return made[-1]

    configs, folder_of = {"fedavg": {"method": "fedavg"}}, functools.partial(folders.part, tmp_path)
    with (
        logged(Silent(), tmp_path, {"m": make}, configs, folder_of=folder_of) as watcher,
        run.shared(chosen, tmp_path, watcher=watcher),
    ):
        pass
    assert {one.status for one in made} == {"finished"}
    seen = [(one.name, step) for one in made for step, values in one.steps.items() if "seconds" in values]
    assert len(seen) == len(set(seen)) == len(lines(tmp_path))


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("mlflow", "mlflow"), ("tensorboard", "tensorboardX")])
def test_a_missing_package_is_named_before_anything_runs(name, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(SMALL))
    result = CliRunner().invoke(app, ["run", str(tmp_path / "study.yaml"), "--out", str(tmp_path / "x"), "--log", name])
    assert result.exit_code == 1 and f"pip install {package}" in " ".join(result.stderr.split())
    assert not (tmp_path / "x").exists()


class OnlyStarts:
    """A logger that gets no numbers."""

    def __init__(self, folder, name):
        pass

    def start(self, config):
        pass


def test_a_function_that_makes_no_logger_is_named(tmp_path):
    systems = {"fedavg": {"method": "fedavg", "options": {"lr": 0.1}}}
    made = {"mine:make": OnlyStarts}
    with (
        pytest.raises(ValueError, match=r"logger mine:make has no log\(step, values\) and no finish"),
        logged(Silent(), tmp_path, made, {"fedavg": {}}) as watcher,
    ):
        run.run(study(rounds=1, systems=systems, seeds=[1]), tmp_path, watcher=watcher)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("board", "logger='board' is unknown"),
        ("json:Nothing", "has no attribute 'Nothing'"),
        ("no_x:Y", "no_x"),
        ("", "names of loggers='' must be a word"),
        ("threading:Event", r"logger threading:Event must be a function \(folder, name\), but Event takes \(\)"),
        ("logging:Formatter", r"logging:Formatter has no start\(config\) and no log\(step, values\) and no finish\(status\)"),
    ],
)
def test_unknown_loggers_get_one_line(names, message):
    with pytest.raises(ValueError, match=message):
        loggers.made(names)


def test_a_logger_of_ones_own_is_named_by_its_module(tmp_path, monkeypatch):
    (tmp_path / "whole_logger.py").write_text(
        "class Mine:\n"
        "    def __init__(self, folder, name): ...\n"
        "    def start(self, config): ...\n"
        "    def log(self, step, values): ...\n"
        "    def finish(self, status): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = loggers.made("whole_logger:Mine, tensorboard")
    assert list(found) == ["whole_logger:Mine", "tensorboard"]
    assert found["whole_logger:Mine"].__name__ == "Mine" and found["tensorboard"] is loggers.TensorBoard


@pytest.mark.long
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_the_other_loggers_keep_what_they_are_told(name, tmp_path, monkeypatch):
    package = pytest.importorskip(name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for variable in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    make = loggers.made(name)[name]
    # Two runs are open at once, as those of a study are.
    both = [make(tmp_path / "logs" / name, f"pairs/final/seed={seed}") for seed in (1, 2)]
    for logger in both:
        logger.start({"lr": 0.1, "options": {"epochs": 2}})
    for step in (1, 2):
        for number, logger in enumerate(both):
            logger.log(step, {"train/loss": 10.0 * step + number, "new clients (5%)/recall@5": 0.5})
    for logger in both:
        logger.finish("finished")
    if name == "mlflow":
        client = package.MlflowClient(tracking_uri=(tmp_path / "logs/mlflow/mlruns").as_uri())
        found = client.search_runs([client.get_experiment_by_name("fedjax_meta").experiment_id])
        history = {one.info.run_name: client.get_metric_history(one.info.run_id, "train/loss") for one in found}
        assert [(m.step, m.value) for m in history["pairs/final/seed=2"]] == [(1, 11.0), (2, 21.0)]
        assert found[0].data.params["options.epochs"] == "2" and found[0].info.status == "FINISHED"
    elif name == "wandb":
        files = sorted((tmp_path / "logs").rglob("*.wandb"))
        late = time.time() + 20
        while min(path.stat().st_size for path in files) < 500 and time.time() < late:
            time.sleep(0.2)
        assert len(files) == 2 and all(path.stat().st_size > 500 for path in files)
    else:
        runs = {one.name: one for one in package.Api().runs(tmp_path.name)}
        assert set(runs) == {"pairs-final-seed=1", "pairs-final-seed=2"}


def test_an_array_of_one_number_is_logged_as_this_number():
    told = []

    class Own:
        def start(self, config):
            del config

        def log(self, step, values):
            told.append((step, values))

        def finish(self, status):
            told.append(status)

    with loggers.logged(Own()) as on_record:
        on_record(None, Record(1, {}, {"mine": {"score": np.ones(1), "others": np.ones(2)}}, 0.0, 0.0))
    assert told[0][1]["mine/score"] == 1.0 and "mine/others" not in told[0][1]
