"""A study: what its file may say, what it runs, and what it reports."""

import contextlib
import json

import jax
import numpy as np
import pytest
import yaml

import fedjax_meta as fm
from fedjax_meta import report
from fedjax_meta.blocks import run_keys
from fedjax_meta.data.holdout import held_out
from fedjax_meta.study import Scenario, System, baselines, from_tree, load, results, run, to_tree, to_yaml
from fedjax_meta.study.check import check
from fedjax_meta.study.job import Job
from fedjax_meta.study.tuning import VALIDATION, VALIDATION_CLIENTS
from tests.study.common import TREE, Silent, study, tree
from tests.test_kills import arrays_of


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, run.run(study(), folder, watcher=Silent())


def without_clocks(outcomes):
    def clean(trial):
        rows = [{key: value for key, value in row.items() if "seconds" not in key} for row in trial.rows]
        return trial._replace(rows=rows)

    return [one._replace(tuning=list(map(clean, one.tuning)), final=list(map(clean, one.final))) for one in outcomes]


def test_a_study_survives_its_file(tmp_path):
    (tmp_path / "study.yaml").write_text(to_yaml(study()), encoding="utf-8")
    assert to_tree(load(tmp_path / "study.yaml")) == to_tree(study())
    assert to_tree(load(tmp_path / "study.yaml", ["rounds=7"])) == to_tree(study(rounds=7))


def test_every_member_is_the_run_that_simulate_makes(finished):
    _, outcomes = finished
    clients = study().scenarios["pairs"].build()
    algorithm = study().system("fedavg").build(clients.task, **outcomes[0].chosen)
    one_device = fm.federate(
        fm.fedavg(clients.task, epochs=1, batch_size=20, **outcomes[0].chosen), fm.Federation(cohort_size=4, devices=1)
    )
    assert algorithm.config["lr"] == one_device.config["lr"]
    state, _ = fm.simulate(one_device, clients.train, key=jax.random.key(2), rounds=4, eval_every=2)
    found = fm.evaluate(one_device, jax.random.key(0), state, clients.train, support="train", query="test")
    mine = outcomes[0].final[1]
    assert mine.seed == 2
    np.testing.assert_allclose(mine.rows[-1]["tests"]["known"]["accuracy"], fm.metrics.accuracy(found.confusion), atol=0.03)


def test_the_point_is_chosen_on_held_back_samples_alone(finished):
    _, (fedavg, local) = finished
    scores = {trial.numbers["lr"]: trial.rows[-1]["tests"]["validation"]["scores"]["accuracy_mean"] for trial in fedavg.tuning}
    assert set(scores) == {0.02, 0.2} and fedavg.chosen == {"lr": max(scores, key=scores.get)}
    assert all(set(row["tests"]) == {"validation"} for trial in fedavg.tuning for row in trial.rows)
    assert fedavg.at_edge == ["lr"] and local.tuning == [] and local.chosen == {}
    clients = study().scenarios["pairs"].build()
    for i in range(clients.train.num_clients):
        whole, cut = (
            range(int(data.start[view][i]), int(data.start[view][i]) + int(data.size[view][i]))
            for data, view in ((clients.train, "train"), (clients.tuning, "train"))
        )
        asked = range(
            int(clients.tuning.start["test"][i]), int(clients.tuning.start["test"][i] + clients.tuning.size["test"][i])
        )
        assert set(cut) | set(asked) == set(whole) and not set(cut) & set(asked)


def test_new_clients_share_no_sample_with_those_that_train():
    clients = study().scenarios["pairs"].build()
    assert clients.train.num_clients == 8 and clients.new.num_clients == 2

    def samples(data):
        return {
            position
            for view in data.views
            for start, size in zip(data.start[view], data.size[view], strict=True)
            for position in range(int(start), int(start + size))
        }

    assert not samples(clients.train) & samples(clients.new)
    assert len(samples(clients.train)) + len(samples(clients.new)) == len(clients.train.y) == 1797


def test_a_stopped_study_goes_on_to_the_same_end(finished, tmp_path):
    _, expected = finished
    for stop in (2, 3):
        with pytest.raises(KeyboardInterrupt):
            run.run(study(), tmp_path, watcher=Silent(stop_at=stop))
    again = run.run(study(), tmp_path, watcher=Silent())
    assert without_clocks(again) == without_clocks(expected)
    frame, whole = report.load(tmp_path), report.load(finished[0])
    order = ["scenario", "system", "phase", "seed", "round", "lr", "clients"]
    first, second = (table.sort_values(order, ignore_index=True).drop(columns="seconds") for table in (frame, whole))
    assert first.equals(second)


class Killed(Silent):
    """Ends at a round of the final runs, with whatever is saved by then."""

    def __init__(self, round_):
        super().__init__()
        self.round = round_

    def progress(self, done, metrics):
        if self.phase[2] == "final" and done == self.round:
            raise KeyboardInterrupt


@pytest.mark.parametrize("store", ["device", "disk"])
def test_a_long_stretch_without_evaluations_is_saved_in_between(store, tmp_path, monkeypatch):
    """Saved after every piece of work, it ends as without, and a kill loses what came after the last piece alone."""
    one = {"scaffold": {"method": "scaffold", "options": {"epochs": 1, "batch_size": 20, "lr": 0.1}}}
    chosen = study(systems=one, eval_every=5, rounds=5, **({} if store == "device" else {"store": store, "seeds": [1]}))
    expected = run.run(chosen, tmp_path / "whole", watcher=Silent())
    monkeypatch.setattr("fedjax_meta.study.train.SAVE_EVERY", -1)
    with pytest.raises(KeyboardInterrupt):
        run.run(chosen, tmp_path / "killed", watcher=Killed(4))
    (saved,) = (tmp_path / "killed" / "state").glob("*/*/*.ckpt")
    assert saved.stem == "3"
    again = run.run(chosen, tmp_path / "killed", watcher=Silent())
    assert without_clocks(again) == without_clocks(expected)
    states = [arrays_of(path) for name in ("whole", "killed") for path in (tmp_path / name / "state").glob("*/*/5.ckpt")]
    assert len(states) == 2 and states[0] == states[1]


def test_a_finished_study_takes_more_seeds_rounds_and_systems(finished, tmp_path):
    run.run(study(), tmp_path, watcher=Silent())
    watcher = Silent()
    tuned = {"method": "fedavg_ft", "options": {"epochs": 1, "batch_size": 20, "lr": 0.1}}
    more = run.run(study(seeds=[1, 2, 3], systems={**TREE["systems"], "tuned": tuned}), tmp_path, watcher=watcher)
    assert [len(one.final) for one in more] == [3, 3, 3]
    # Three records of seed 3 for two systems, and three of the third: nothing that was finished is trained again.
    assert watcher.records == 9
    assert without_clocks(more)[0].final[:2] == without_clocks(finished[1])[0].final
    watcher = Silent()
    longer = run.run(study(seeds=[1, 2, 3], rounds=6), tmp_path, watcher=watcher)
    assert [row["round"] for row in longer[1].final[0].rows][-1] == 6
    # Seeds that were added later train on from where they are, as the others do.
    assert {done for (*_, phase), _, done in watcher.begun if phase == "final"} == {4}
    whole = run.run(study(seeds=[1, 2, 3], rounds=6), tmp_path / "whole", watcher=Silent())
    assert without_clocks(longer)[1].final == without_clocks(whole)[1].final


def test_seeds_that_are_added_to_a_stopped_run_cost_nothing_of_what_it_trained(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run.run(study(seeds=[1, 2], systems={"local": TREE["systems"]["local"]}), tmp_path, watcher=Silent(stop_at=1))
    watcher = Silent()
    run.run(study(seeds=[2, 3, 1], systems={"local": TREE["systems"]["local"]}), tmp_path, watcher=watcher)
    assert [(members, done) for _, members, done in watcher.begun] == [(2, 1), (1, 0)]


def test_a_folder_of_another_study_is_refused_before_anything_is_written(finished):
    folder, _ = finished
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    other = tree(systems={**TREE["systems"], "fedavg": {**TREE["systems"]["fedavg"], "options": {"epochs": 3}}})
    with pytest.raises(ValueError, match=r"systems.fedavg.options.batch_size was 20 and is not set now"):
        run.run(from_tree(other), folder, watcher=Silent())
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_the_table_says_who_lost_and_what_was_not_tuned(finished):
    _, outcomes = finished
    clients = study().scenarios["pairs"].build()
    fedavg, local, majority, *_ = results.lines(study(), "pairs", clients, outcomes)
    assert fedavg.remark == "best lr at the end of its grid" and local.remark == "new clients do not train; not tuned"
    assert np.isnan(local.new[0]) and np.isfinite(fedavg.new[0])  # its new clients have the untrained model
    assert np.isnan(local.behind) and local.title == "Local only" and majority.title == "majority class"
    known = np.array([trial.rows[-1]["tests"]["known"]["accuracy"] for trial in outcomes[0].final])
    assert fedavg.known == pytest.approx((100 * known.mean(), 100 * known.mean(1).std(ddof=1)))
    text = results.markdown(study(), {"pairs": clients}, outcomes, "fedjax-meta run x")
    assert "Local only" in text and "2 seeds" in text


def test_metrics_are_strict_json_and_a_data_frame(finished):
    folder, _ = finished

    def refuse(word):
        raise AssertionError(word)

    for line in (folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    frame = report.load(folder)
    assert set(frame["clients"]) == {"known", "new", "validation"}
    assert len(frame[(frame.system == "fedavg") & (frame.phase == "final") & (frame.clients == "known")]) == 2 * 3


BUFFER = {
    "name": "fedbuff",
    "seconds": [1, 2, 3, 4, 5, 6, 7, 30],  # of the eight known clients
    "rounds": 6,
    "buffer_size": 2,
    "concurrency": 4,
    "most_stale": 8,
}
BAD = {
    "no systems": (tree(systems={}), "systems must be a mapping of names"),
    "a scenario without a system": (
        tree(
            scenarios={name: TREE["scenarios"]["pairs"] for name in ("pairs", "empty")},
            systems={"a": {"method": "fedavg", "scenarios": ["pairs"]}},
        ),
        "scenarios.empty: no system is run on it",
    ),
    "a title that is no text beside each": (
        tree(systems={"a": {"method": "fedavg", "title": 5, "each": {"options.lr": [0.1, 0.2]}}}),
        "systems.a: title=5 must be text",
    ),
    "a number in place of an option": (
        tree(systems={"a": {"method": "fedavg", "grid": {5: [1, 2]}}}),
        "systems.a: option in the grid=5 must be a word",
    ),
    "a part that is a number": (
        tree(scenarios={"pairs": {**TREE["scenarios"]["pairs"], "federation": {"attack": 5}}}),
        "a part must be a name, or a mapping with a name and options, not 5",
    ),
    "an unknown field": (tree(round=3), "study has no field 'round' .did you mean 'rounds'"),
    "an unknown method": (tree(systems={"a": {"method": "fedavgg"}}), "systems.a: method='fedavgg' is unknown"),
    "an unknown option": (
        tree(systems={"a": {"method": "fedavg", "options": {"epoch": 1}}}),
        "systems.a: fedavg takes no 'epoch' .did you mean 'epochs'",
    ),
    "an option of the federation": (
        tree(systems={"a": {"method": "fedavg", "options": {"cohort_size": 1}}}),
        "systems.a: fedavg takes no 'cohort_size', which belongs to federation",
    ),
    "a value and a grid": (
        tree(systems={"a": {"method": "fedavg", "options": {"lr": 0.1}, "grid": {"lr": [0.1, 0.2]}}}),
        "systems.a: lr has a value and a grid",
    ),
    "an empty grid": (tree(systems={"a": {"method": "fedavg", "grid": {"lr": []}}}), "grid of lr must be a list of different"),
    "words in a grid": (
        tree(systems={"a": {"method": "fedavg", "grid": {"lr": ["x"]}}}),
        "grid of lr must be a list of different numbers, not .*; `each` tries other values",
    ),
    "an unknown part": (
        tree(systems={"a": {"method": "fedmeta", "options": {"estimator": "exakt"}}}),
        "systems.a: estimator='exakt' is unknown",
    ),
    "an option of a part": (
        tree(systems={"a": {"method": "fedmeta", "options": {"estimator": {"name": "implicit", "cg_step": 3}}}}),
        "systems.a: estimator implicit takes no 'cg_step' .did you mean 'cg_steps'",
    ),
    "a buffer of more clients than there are": (
        tree(systems={"a": {"method": "fedavg", "federation": {"schedule": {**BUFFER, "buffer_size": 9}}}}),
        "systems.a: buffer_size=9 is more than the N=8 clients",
    ),
    "an update older than the buffer's models": (
        tree(systems={"a": {"method": "fedavg", "federation": {"schedule": {**BUFFER, "most_stale": 0}}}}),
        "systems.a: most_stale=0 is too few",
    ),
    "a schedule without its options": (
        tree(systems={"a": {"method": "fedavg", "federation": {"schedule": "fedbuff"}}}),
        "systems.a: schedule fedbuff needs seconds, rounds, buffer_size, concurrency, most_stale",
    ),
    "an unknown partition": (tree(scenarios={"a": {"partition": "iiid"}}), "scenarios.a: partition='iiid' is unknown"),
    "an option of a partition": (
        tree(scenarios={"a": {"partition": "iid", "options": {"concentration": 1}}}),
        "scenarios.a: partition iid takes no 'concentration'",
    ),
    "no clients": (tree(scenarios={"a": {"clients": 0}}), "scenarios.a: clients=0 must be an integer of at least 1"),
    "no seeds": (tree(seeds=[]), "seeds=.* must be a list of at least one seed"),
    "a seed twice": (tree(seeds=[1, 1]), "names a seed twice"),
    "a seed of more than 32 bits": (tree(seeds=[2**40]), "must be an integer of at least 0 and below 2..32"),
    "no rounds": (tree(rounds=0), "rounds=0 must be an integer of at least 1"),
    "two systems of one title": (
        tree(systems={name: {"method": "fedavg", "title": "A"} for name in "ab"}),
        "two systems have the title 'A'",
    ),
    "a published number of nobody": (
        tree(published=[{"system": "x", "scenario": "pairs", "value": 1.0}]),
        "published.*system='x' is unknown",
    ),
    "user accuracy of nobody": (tree(user_accuracy={"x": "train"}), "system in user_accuracy=.x. is unknown"),
    "an unknown metric": (tree(metrics=["acuracy"]), "metric='acuracy' is unknown .did you mean 'accuracy'"),
    "metrics that are no list": (tree(metrics="rmse"), "metrics='rmse' must be a list of names"),
    "a main score that is not measured": (tree(metrics=["rmse"], main="mae"), "main: score='mae' is unknown"),
    "a main score that nothing measures": (tree(main="acuracy"), "main: score='acuracy' is unknown .did you mean 'accuracy'"),
    "a score of trials that nothing measures": (tree(tuning={"metric": "acc_mean"}), "tuning.metric: score='acc' is unknown"),
    "an option of no federation": (tree(federation={"cohort": 3}), "federation takes no 'cohort' .did you mean 'cohort_size'"),
    "a metric that cannot be imported": (tree(metrics=["no.such:thing"]), "metric no.such:thing: .*No module named"),
    "what is no metric": (tree(metrics=["math:pi"]), "metric math:pi must be a fm.Metric"),
    "delta of 1": (tree(delta=1.0), "delta=1.0"),
}


@pytest.mark.parametrize(("given", "words"), BAD.values(), ids=BAD)
def test_bad_input_gets_one_line_that_names_the_field(given, words):
    with pytest.raises(ValueError, match=words) as error:
        from_tree(given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("draws", [[], [1, 2]])
@pytest.mark.parametrize(
    ("new", "row", "words"),
    [
        (0.2, {"score": "rmse"}, "the score 'rmse' is not measured"),
        (0.0, {"clients": "new"}, "is of new clients, but there are none"),
    ],
)
def test_published_numbers_of_what_is_not_measured_are_refused(draws, new, row, words):
    place = {**TREE["scenarios"]["pairs"], "new": new}
    rows = [{"system": "fedavg", "scenario": "pairs", "value": 1.0, **row}]
    chosen = study(scenarios={"pairs": place}, data_seeds=draws, published=rows)
    with pytest.raises(ValueError, match=f"scenario pairs{'@1' if draws else ''}: .*{words}"):
        check(chosen, run.build(chosen))


def test_a_measured_number_beside_a_published_one_says_what_it_is_taken_over(finished):
    _, outcomes = finished
    scores = ("accuracy", "accuracy_mean", "accuracy_std", "f1", "raw_f1_mean", "auroc")
    asked = [{"system": "fedavg", "scenario": "pairs", "value": 50.0, "score": score} for score in scores]
    rows = results.published(study(published=asked), outcomes)
    matrices = np.array([trial.rows[-1]["tests"]["known"]["confusion"] for trial in outcomes[0].final])  # [seeds, N, K, K]
    right, size = np.trace(matrices, axis1=2, axis2=3), matrices.sum((2, 3))
    share = right / size
    expected = [100 * right.sum(1) / size.sum(1), 100 * share.mean(1), 100 * share.std(1)]
    assert np.ptp(size) > 0
    for row, numbers in zip(rows[:3], expected, strict=True):
        mean, deviation = map(float, row[5].split(" ±"))
        assert (mean, deviation) == (pytest.approx(numbers.mean(), abs=0.006), pytest.approx(numbers.std(ddof=1), abs=0.006))
        assert float(row[6]) == pytest.approx(numbers.mean() - 50, abs=0.006)
    assert [row[3] for row in rows] == [
        "accuracy (over all samples)",
        "accuracy (mean over clients)",
        "accuracy (deviation over clients)",
        "f1 (mean over clients)",
        "raw_f1 (mean over clients)",
        "auroc (mean over clients)",
    ]
    assert rows[3][5] != "not measured" and rows[5][5] == "not measured"


def test_accuracy_over_all_samples_needs_confusion_matrices():
    """It is never replaced by the mean over clients."""
    rows = [{"system": "fedavg", "scenario": "pairs", "value": 1.0}]
    for metrics, row, words in (
        (["accuracy", "auroc"], {}, "published asks for accuracy, which is over all samples"),
        (["accuracy", "auroc"], {"score": "accuracy_mean"}, ""),
        (["accuracy", "auroc", "confusion"], {}, ""),
        ([], {}, ""),
    ):
        chosen = study(metrics=metrics, published=[{**rows[0], **row}])
        with pytest.raises(ValueError, match=words) if words else contextlib.nullcontext():
            check(chosen, run.build(chosen))


@pytest.mark.parametrize(
    ("text", "words"),
    [("[1, 2]", "must hold a mapping"), ("a: [", "is no YAML"), ("", "must hold a mapping")],
)
def test_a_file_that_is_no_study_gets_one_line(tmp_path, text, words):
    (tmp_path / "bad.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words) as error:
        load(tmp_path / "bad.yaml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("override", ["rounds", "=3", "a..b=1", "rounds.x=2"])
def test_an_override_that_names_no_field_is_refused(tmp_path, override):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(TREE), encoding="utf-8")
    with pytest.raises(ValueError, match="must read field.field=value|is no mapping"):
        load(tmp_path / "study.yaml", [override])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("scenarios.other.test=0.5", "scenarios has no 'other'; --set scenarios.other.dataset=... makes one"),
        ("scenarios.pair.dataset=digits", "scenarios has no 'pair' .did you mean 'pairs'"),
        ("systems.other.options.lr=0.5", "systems has no 'other'; --set systems.other.method=... makes one"),
    ],
)
def test_an_override_makes_no_entry_by_a_slip(tmp_path, override, words):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(TREE), encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        load(tmp_path / "study.yaml", [override])


def test_an_override_makes_an_entry_that_the_next_ones_change(tmp_path):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(TREE), encoding="utf-8")
    found = load(tmp_path / "study.yaml", ["systems.mine.method=fedavg", "systems.mine.options.lr=0.5"])
    assert found.systems["mine"].options["lr"] == 0.5


def test_an_entry_that_is_overridden_by_null_is_left_out(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({**TREE, "scenarios": {**TREE["scenarios"], "more": {}}}), encoding="utf-8")
    first = next(iter(TREE["systems"]))
    found = load(path, ["scenarios.more=null", f"systems.{first}=null"])
    assert list(found.scenarios) == list(TREE["scenarios"]) and list(found.systems) == list(TREE["systems"])[1:]
    with pytest.raises(ValueError, match=f"systems='{first}x' is unknown .did you mean '{first}'"):
        load(path, [f"systems.{first}x=null"])


@pytest.mark.parametrize("partition", ["iid", "shards", "classes", "dirichlet_classes", "dirichlet_clients", "quantity_skew"])
def test_every_partition_yields_clients_with_all_views(partition):
    options = {"concentration": 1.0} if partition in ("dirichlet_classes", "dirichlet_clients", "quantity_skew") else {}
    if partition in ("dirichlet_classes", "quantity_skew"):
        options["min_samples"] = 16  # 12 to train with, of which 2 are held back
    scenario = Scenario(dataset="digits", partition=partition, clients=12, options=options)
    clients, again = scenario.build(), scenario.build()
    assert (
        clients.fingerprint == again.fingerprint != Scenario(dataset="digits", partition="iid", clients=11).build().fingerprint
    )
    assert set(clients.train.views) == set(clients.tuning.views) == {
        "train", "support", "query", "test", "test_support", "test_query",
    }  # fmt: skip
    assert clients.train.num_clients + clients.new.num_clients == 12
    assert all(np.min(clients.train.size[view]) > 0 for view in ("train", "test"))


def test_too_few_samples_for_so_many_clients_are_refused():
    with pytest.raises(ValueError, match="client .* has .* samples of digits"):
        Scenario(dataset="digits", partition="iid", clients=900).build()


def test_a_system_takes_its_parts_by_name():
    task = study().scenarios["pairs"].build().task
    system = System(
        method="fedmeta",
        options={"estimator": {"name": "implicit", "prox_weight": 2.0}, "outer_optimizer": "adam"},
        federation={"uploads": [{"name": "clip", "norm": 1.0}, {"name": "noise", "multiplier": 0.5}], "cohort_size": 3},
    )
    config = system.build(task, outer_lr=0.01).config
    assert config["outer_lr"] == 0.01 and config["federation"]["cohort_size"] == 3
    robust = {"aggregator": "nearest_neighbours:f=1+median", "attack": {"name": "sign_flip", "attackers": 0.2}}
    shared = System(method="fedavg", federation={**robust, "schedule": {"name": "poisson", "rate": 0.3}}).build(task).config
    assert shared["federation"]["schedule"] == {"name": "poisson", "rate": 0.3}
    assert "nearest_neighbours" in json.dumps(shared["federation"]["aggregator"])
    assert "implicit" in json.dumps(config["estimator"]) and "clip" in json.dumps(config["federation"]["uploads"])


def test_asynchronous_schedules_run_in_a_study(tmp_path):
    plain = {"method": "fedavg", "options": {"lr": 0.1, "epochs": 1, "batch_size": 20}}
    alone = {key: value for key, value in BUFFER.items() if key != "buffer_size"} | {"name": "fedasync"}
    systems = {
        "buffered": {**plain, "federation": {"cohort_size": 2, "schedule": BUFFER}},
        "alone": {**plain, "federation": {"cohort_size": 1, "server_lr": 0.6, "schedule": alone}, "title": "FedAsync"},
    }
    outcomes = run.run(study(systems=systems, seeds=[1]), tmp_path / "run", watcher=Silent())
    for outcome in outcomes:
        (last,) = (trial.rows[-1] for trial in outcome.final)
        assert last["round"] == 4 and np.all(np.isfinite(last["tests"]["known"]["loss"]))


def test_noisy_clients_judge_no_point_of_a_grid():
    noisy = {**TREE["scenarios"]["pairs"], "partition": "mtfl", "options": {"noisy": 0.3}, "clients": 20}
    system = {"method": "fedavg", "options": {"epochs": 1, "batch_size": 20}, "grid": {"lr": [0.1, 0.2]}}
    tuning = {"validation": "both", "clients": 0.25}
    chosen = study(scenarios={"pairs": noisy}, systems={"fedavg": system}, tuning=tuning)
    clients = run.build(chosen)["pairs"]
    held, rest = held_out(20, 0.25, chosen.scenarios["pairs"].seed)
    assert clients.noisy.size == 6 and 0 < np.isin(held, clients.noisy).sum() < 5
    tests = Job(chosen, "pairs", "fedavg", clients).tuning().tests
    for name, those in ((VALIDATION, rest), (VALIDATION_CLIENTS, held)):
        scored = those[tests[name].measure.keywords["ids"]]
        np.testing.assert_array_equal(scored, np.setdiff1d(those, clients.noisy))


def test_user_accuracy_is_that_of_the_round_s_clients_before_they_train(tmp_path):
    fedper = {"method": "fedper", "options": {"epochs": 1, "batch_size": 20, "lr": 0.1}}
    noisy = {**TREE["scenarios"]["pairs"], "partition": "mtfl", "options": {"noisy": 0.25}, "clients": 8}
    chosen = study(
        scenarios={"pairs": noisy}, systems={"fedper": fedper, "other": {**fedper, "title": "Other"}}, seeds=[3], rounds=3
    )
    chosen = from_tree({**to_tree(chosen), "user_accuracy": {"fedper": "support"}})
    built = run.build(chosen)
    one, other = run.run(chosen, tmp_path, watcher=Silent(), clients=built)
    mine = [value for row in one.final[0].rows for value in row["train"]["user_accuracy"]]
    clients = built["pairs"]
    # Rows without training are of the clients that the systems' rows are of.
    scored = np.setdiff1d(np.arange(8), clients.noisy)
    accuracy = one.final[0].rows[-1]["tests"]["known"]["accuracy"]
    untrained = results.lines(chosen, "pairs", clients, [one, other])[-1]
    plain = baselines.untrained(clients)
    fresh = plain.init(run_keys(jax.random.key(3))[0], clients.train)
    alone = fm.evaluate(plain, jax.random.key(0), fresh, clients.train, known=False, support="train", query="test")
    expected = 100 * np.asarray(fm.metrics.accuracy(alone.confusion))[scored].mean()
    assert untrained.title == baselines.UNTRAINED and len(accuracy) == 6 and untrained.known[0] == pytest.approx(expected)
    assert clients.noisy.size == 2 and "user_accuracy" not in other.final[0].rows[0]["train"]
    algorithm = fm.federate(fm.fedper(clients.task, epochs=1, batch_size=20, lr=0.1), fm.Federation(cohort_size=4, devices=1))
    init, rounds, _ = run_keys(jax.random.key(3))
    state, expected = algorithm.init(init, clients.train), []
    for number in range(3):
        after, info = algorithm.round(jax.random.fold_in(rounds, number), state, clients.train)
        found = fm.evaluate(algorithm, jax.random.key(0), state, clients.train, support="support", query="test")
        counted = np.setdiff1d(np.asarray(info.ids), clients.noisy)
        expected.append(np.asarray(fm.metrics.accuracy(found.confusion))[counted].mean())
        state = after
    np.testing.assert_allclose(mine, expected, atol=0.02)
    frame = report.load(tmp_path)
    known = frame[(frame.system == "fedper") & (frame.clients == "known")]
    np.testing.assert_allclose(known["user_accuracy"], [mine[0], mine[1], mine[2]])
    with pytest.raises(ValueError, match="user_accuracy was 'support' when .* and is 'train' now"):
        run.run(from_tree({**to_tree(chosen), "user_accuracy": {"fedper": "train"}}), tmp_path, watcher=Silent())
    with pytest.raises(ValueError, match="no view 'suport'"):
        run.run(from_tree({**to_tree(chosen), "user_accuracy": "suport"}), tmp_path / "other", watcher=Silent())
    assert not (tmp_path / "other").exists()
