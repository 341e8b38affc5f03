"""The studies of MTFL: tests after local training, what is private, the table of rounds to a target, and inequality (10)."""

import csv
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import costs, masks, models
from fedjax_meta.blocks import run_keys
from fedjax_meta.study import from_tree, load, run
from fedjax_meta.study.tuning import Trial, points_of
from tests import problems
from tests.study.common import Silent

testing = pytest.importorskip("typer.testing", reason="the command line needs typer")
tables = pytest.importorskip("experiments.mtfl_tables", reason="the command line needs typer, rich and matplotlib")
_mtfl_shift = pytest.importorskip("experiments._mtfl_shift")


def row(title, *curves):
    return tables.Row(title, np.array(curves), 0.1, 0.9, costs.Traffic(4, 4), costs.RoundTime(10.0, 30.0, 10.0, 10.0))


def test_a_target_that_is_not_reached_is_never():
    rows = {
        "fedavg-FL": row("FL", [0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]),
        "fedavg-own": row("own", [0.1, 0.5, 0.5, 0.6], [0.1, 0.5, 0.5, 0.7]),
        "fedavg-late": row("late", [0.1, 0.1, 0.1, 0.5], [0.1, 0.1, 0.1, 0.2]),
        "adam-own": row("lost", [0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1]),
    }
    headings, lines = tables.table(rows, (0.3, 0.5))
    assert headings[1:4] == ["rounds to 0.3", "first patch / this", "first optimiser / this"]
    cells = {line[0]: line[1:7] for line in lines}
    assert cells["FL"] == ["3.0 ± 0.0", "", "", "never", "", ""]
    # FL reaches the lower target in 3 rounds, this system in 2; FL does not reach the higher target in 4.
    assert cells["own"] == ["2.0 ± 0.0", "1.5", "", "2.0 ± 0.0", "> 2.0", ""]
    assert cells["late"] == ["never in 1 of 2", "-", "", "never in 1 of 2", "-", ""]
    assert cells["lost"] == ["never", "", "-", "never", "", "-"]
    minutes = headings.index("minutes to 0.5")
    assert [line[minutes] for line in lines] == ["never", "2.0", "never", "never"]


def trial(scores):
    rows = [
        {
            "round": at,
            "train": {"user_accuracy": [score], "user_accuracy_std": [0.1]},
            "tests": {"known": {"scores": {"accuracy_mean": score}}},
        }
        for at, score in enumerate(scores, 1)
    ]
    return Trial({}, 1, rows, None)


def test_a_run_that_ended_early_has_no_number_that_a_target_could_mistake():
    made = tables.row(
        "own", [trial([0.1, 0.2, 0.9]), trial([0.1, np.nan])], costs.Traffic(4, 4), costs.RoundTime(1.0, 1.0, 1.0, 1.0)
    )
    np.testing.assert_array_equal(made.user_accuracy, [[0.1, 0.2, 0.9], [0.1, np.nan, np.nan]])
    headings, (line,) = tables.table({"own": made}, [0.5])
    assert line[headings.index("rounds to 0.5")] == "never in 1 of 2"
    with pytest.raises(ValueError, match="no user_accuracy was recorded"):
        row = {**trial([0.1]).rows[0], "train": {}}
        tables.row("own", [Trial({}, 1, [row], None)], made.traffic, made.time)


SMALL = ["scenarios.clients.clients=10", "scenarios.clients.options={noisy: 0.2}", "rounds=2", "federation.cohort_size=5"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    study = load("mtfl", SMALL, variants=["quick"], systems=["fedavg-FL", "fedavg-MTFL_both"])
    folder = tmp_path_factory.mktemp("mtfl") / "run"
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
        clients = run.build(study)
        outcomes = run.run(study, folder, watcher=Silent(), clients=clients)
    return study, clients["clients"], {one.system: one for one in outcomes}, folder


def test_clients_are_tested_after_an_epoch_and_noisy_ones_do_not_count(finished):
    """Against `simulate` and `evaluate` with the method put together by hand."""
    _, clients, outcomes, _ = finished
    assert len(clients.noisy) == 2
    kept = np.setdiff1d(np.arange(10), clients.noisy)
    federation = fm.Federation(cohort_size=5, devices=1)
    how = {"lr": 0.3, "steps": 4, "private": "bn"}
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
        plain, after = (fm.federate(fm.mtfl(clients.task, **how, finetune_epochs=n), federation) for n in (0, 1))
        watched = fm.with_user_accuracy(plain, support="train", excluded=clients.noisy, devices=1)
        state, records = fm.simulate(watched, clients.train, key=jax.random.key(1), rounds=2, eval_every=2)
        key = fm.keys.tagged(run_keys(jax.random.key(1))[2], "known", state.round)
        tested = fm.evaluate(after, key, state, clients.train, support="train", query="test", ids=kept)
    (last,) = [one.rows[-1] for one in outcomes["fedavg-MTFL_both"].final]
    np.testing.assert_array_equal(np.array(last["tests"]["known"]["confusion"]), np.asarray(tested.confusion))
    found = [value for one in outcomes["fedavg-MTFL_both"].final[0].rows for value in one["train"]["user_accuracy"]]
    np.testing.assert_allclose(found, np.concatenate([one.metrics["user_accuracy"] for one in records]), rtol=1e-6)


def test_the_table_and_the_figure_are_made_of_the_folder(finished):
    *_, folder = finished
    done = testing.CliRunner().invoke(tables.app, ["targets", str(folder), "--at", "0.05,0.99"], env={"COLUMNS": "250"})
    assert done.exit_code == 0, done.output
    text = (folder / "targets.md").read_text(encoding="utf-8")
    assert "| FL, FedAvg |" in text and "| MTFL both, FedAvg |" in text and "Modelled, not measured" in text
    assert (folder / "targets.png").stat().st_size > 5000
    wrong = testing.CliRunner().invoke(tables.app, ["targets", str(folder), "--at", "97"], env={"COLUMNS": "250"})
    assert (wrong.exit_code, "--at=97.0 must lie between 0 and 1" in wrong.output) == (1, True)


def test_the_curves_are_those_of_the_rounds(finished):
    *_, outcomes, folder = finished
    done = testing.CliRunner().invoke(tables.app, ["curves", str(folder)], env={"COLUMNS": "250"})
    assert done.exit_code == 0, done.output
    with (folder / "curves.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [(line["system"], line["round"]) for line in lines] == [
        (title, str(number)) for title in ("FL, FedAvg", "MTFL both, FedAvg") for number in (1, 2)
    ]
    for number, line in enumerate(lines[2:]):
        train = outcomes["fedavg-MTFL_both"].final[0].rows[number]["train"]
        ((loss,), (mean,), (deviation,)) = (train[name] for name in ("loss", "user_accuracy", "user_accuracy_std"))
        wanted = [loss, 100 * mean, (100 * deviation) ** 2]
        np.testing.assert_allclose([float(line[name]) for name in tables.CURVES], wanted, rtol=1e-5)
    assert (folder / "curves.png").stat().st_size > 5000


def test_a_seed_that_ended_at_its_target_counts_with_its_last_round():
    made = tables.row(
        "own", [trial([0.1, 0.2, 0.4]), trial([0.1, 0.6])], costs.Traffic(4, 4), costs.RoundTime(1.0, 1.0, 1.0, 1.0)
    )
    headings, (line,) = tables.table({"own": made}, [0.3])
    assert [line[headings.index(name)] for name in ("UA, % last", "best")] == ["50.00", "50.00"]


def test_rates_are_tuned_by_user_accuracy_with_grids_of_one_size():
    """Tests come before local training, all systems have four points, and w400 keeps its steps."""
    study = load("mtfl", variants=["w400", "tuned"])
    for name, system in study.systems.items():
        assert len(points_of(system)) == 4 and not system.tested_with, name
        assert study.system(name, "clients").build(models.mtfl_mlp(), **points_of(system)[0]).config["steps"] == 8
    assert load("mtfl", variants=["curves"]).rounds == 600
    assert {system.options["steps"] for system in load("mtfl", variants=["curves"]).systems.values()} == {10}


def test_bytes_and_work_follow_from_the_method(finished):
    study, clients, *_ = finished
    traffic, time = tables.cost(study, "fedavg-MTFL_both", clients)
    # 199,610 parameters without 200 scales and 200 shifts, each way; no running statistics.
    assert traffic == (4 * 199_210, 4 * 199_210)
    five = load("mtfl_figure5", SMALL, variants=["quick"])
    times = {name: tables.cost(five, name, clients)[1].train for name in five.systems}
    assert times["perfedavg"] == pytest.approx(2 * times["fl"]) and times["pfedme"] == pytest.approx(5 * times["fl"])
    assert times["pfedme_port"] == times["fl"] == pytest.approx(time.train)


def test_every_system_of_both_studies_runs_and_user_accuracy_is_taken(finished):
    _, clients, *_ = finished
    for name in ("mtfl", "mtfl_figure5"):
        study = load(name, SMALL, variants=["quick"])
        for system in study.systems:
            made = study.system(system, "clients").build(clients)
            view = study.user_accuracy_of(system)
            watched = fm.with_user_accuracy(made, support=view, excluded=clients.noisy, devices=1)
            before = jax.eval_shape(watched.init, jax.random.key(0), clients.train)
            after, info = jax.eval_shape(watched.round, jax.random.key(0), before, clients.train)
            assert problems.forms(before) == problems.forms(after) and "user_accuracy" in info.metrics


def test_variants_change_what_they_say():
    assert [load("mtfl", variants=[name]).systems["fedavg-FL"].options["steps"] for name in ("w400", "cifar10")] == [8, 12]
    assert load("mtfl", variants=["w400"]).federation["cohort_size"] == 200
    study = load("mtfl", variants=["parts"])
    task = models.mtfl_mlp()
    for name, part in (("fedavg-MTFL_affine_means", "mean"), ("fedavg-MTFL_affine_variances", "var")):
        (system,) = [one for label, one in study.systems.items() if label.startswith(name)]
        leaves = jax.tree_util.tree_leaves_with_path(masks.resolve(system.options["private"], task))
        chosen = {"/".join(masks.path_names(path)) for path, there in leaves if there}
        assert chosen == {"params/bn1/scale", "params/bn1/bias", f"batch_stats/bn1/{part}"}


def test_the_optimiser_of_fedadam_is_the_authors():
    config = load("mtfl").system("fedadam-FL", "clients").build(models.mtfl_mlp()).config
    assert config["federation"]["server_lr"] == 0.01
    text = str(config["federation"]["server_optimizer"])
    assert all(word in text for word in ("adaptive", "0.999", "0.0001"))


@pytest.mark.parametrize("variants", [["quick"], ["quick", "tuned"]], ids=" ".join)
def test_the_testbed_has_a_row_for_each_system(variants):
    options = [word for name in variants for word in ("--variant", name)]
    shown = testing.CliRunner().invoke(tables.app, ["testbed", *options], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("MTFL both") == 3 and "Modelled, not measured" in shown.output
    rows = [re.split(r"\s{2,}", line.strip()) for line in shown.output.splitlines()]
    (alone,) = [cells[1:] for cells in rows if cells[0] == "Independent"]
    # It sends nothing and only trains.
    assert alone[:2] == ["0.00", "0.00"] and [float(cell) for cell in alone[3:]] == [0.0, 100.0, 0.0, 0.0]


def test_options_for_tests_belong_to_the_method():
    tree = {
        "title": "x",
        "scenarios": {"a": {"dataset": "digits"}},
        "systems": {"own": {"method": "mtfl", "tested_with": {"pace": 1}}},
    }
    with pytest.raises(ValueError, match=r"systems\.own: mtfl takes no 'pace'"):
        from_tree(tree)


def test_aggregation_moves_batch_norms_by_the_affine_leaves():
    """With own statistics the outputs of a batch norm have mean beta: federated norms move it by |mean of betas - beta|."""
    net = models.Network((5,), 3, hidden=(4,), normed=("fc1",))
    task = models.from_linen(net, (5,), layers=("fc1", "head"), features="features", head="head")
    data, key = problems.data(), jax.random.key(0)
    method = fm.mtfl(task, lr=0.3, private="none", batch_size=16, finetune_epochs=2)
    trained = fm.federate(method, fm.Federation(devices=1))
    state = jax.jit(trained.init)(key, data)
    found = jax.jit(lambda state: _mtfl_shift.moved_by_aggregation(net, task, trained, state, data))(state)

    def beta(i):
        return trained.personalize(jax.random.fold_in(key, i), state, data.client(i)["train"], i)["params"]["bn1"]["bias"]

    betas = np.asarray(jax.jit(lambda ids: jax.lax.map(beta, ids))(jnp.arange(7)))
    sizes = np.asarray(data.sizes("train"))
    center = sizes @ betas / sizes.sum()
    mean = found["bn1, by own statistics"]["mean"]
    assert float(mean["federated"]) == pytest.approx(np.mean(np.abs(center - betas)), rel=1e-9)
    assert float(mean["γβ private"]) < 1e-12 and float(mean["all private"]) < 1e-12
    assert float(mean[_mtfl_shift.LESS]) == 1
    # Running statistics are not used in training mode.
    logits = found["logits, by own statistics"]["mean"]
    assert float(logits["γβ private"]) == pytest.approx(float(logits["all private"]), rel=1e-12)
    assert {name.split(",")[0] for name in found} == {"bn1", "logits"}


def test_the_network_of_the_shift_is_that_of_the_study():
    for task, shape, norm in (
        (models.mtfl_mlp(norm="before"), (28, 28, 1), "before"),
        (models.mtfl_cnn(), (32, 32, 3), "after"),
    ):
        net = tables.network(shape, 10, norm)
        variables = jax.jit(task.init)(jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (2, *shape))
        np.testing.assert_allclose(net.apply(variables, x), task.predict(variables, x), rtol=1e-6, atol=1e-6)
