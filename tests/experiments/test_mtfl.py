"""The experiment of MTFL: its tables, its systems, inequality (10) and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import costs, masks, models
from fedjax_meta.data import sources
from tests import problems

testing = pytest.importorskip("typer.testing", reason="the command line needs typer")
mtfl = pytest.importorskip("experiments.mtfl", reason="the command line needs typer, rich and matplotlib")
_mtfl_shift = pytest.importorskip("experiments._mtfl_shift")

FLOAT = jnp.zeros(()).dtype.itemsize
DIVISION = {"noisy": 0.0, "data_seed": 1, "norm": "after", "momentum": 0.1}


@pytest.fixture(scope="module")
def here():
    (setting,) = mtfl.make_settings(sources.load("mnist_small"), clients=10, shares=[0.5], **{**DIVISION, "noisy": 0.2})
    return setting._replace(devices=1)


def outcome(*curves):
    return mtfl.Outcome(np.array(curves), np.array([0.9]), costs.Traffic(4, 4), costs.RoundTime(10.0, 30.0, 10.0, 10.0))


def system(title, **without):
    return mtfl.System(title, None, None, without=without)


def test_a_target_that_is_not_reached_is_never():
    systems = {
        "fl": system("FL", FL="fl"),
        "own": system("own", FL="fl"),
        "late": system("late", FL="fl"),
        "lost": system("lost", FL="own"),
    }
    outcomes = {
        "fl": outcome([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]),
        "own": outcome([0.1, 0.5, 0.5, 0.6], [0.1, 0.5, 0.5, 0.7]),
        "late": outcome([0.1, 0.1, 0.1, 0.5], [0.1, 0.1, 0.1, 0.2]),
        "lost": outcome([0.1, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1]),
    }
    headings, rows = mtfl.table(systems, outcomes, (0.3, 0.5))
    assert headings[1:5] == ["rounds\nto 0.3", "FL /\nthis", "rounds\nto 0.5", "FL /\nthis"]
    cells = {row[0]: row[1:5] for row in rows}
    assert cells["FL"] == ["3.0 ± 0.0", "", "never", ""]
    # FL reaches the lower target in 3 rounds, this system in 2; FL does not reach the higher target in 4.
    assert cells["own"] == ["2.0 ± 0.0", "1.5", "2.0 ± 0.0", "> 2.0"]
    assert cells["late"] == ["never in 1 of 2", "-", "never in 1 of 2", "-"]
    assert cells["lost"] == ["never", "-", "never", "-"]
    minutes = headings.index("minutes\nto 0.5")
    assert [row[minutes] for row in rows] == ["never", "2.0", "never", "never"]


def test_noisy_clients_do_not_count_and_rounds_are_joined(here):
    own = mtfl.mtfl_system(here, "own", "bn", "fedavg")
    accuracy = np.where(np.isin(np.arange(10), here.protocol.noisy), 0.0, 0.8).tolist()
    tests = {"after": {"accuracy": accuracy, "scores": {"accuracy": 0.8, "accuracy_mean": 0.8}}}
    rows = [{"round": 1, "train": {"user_accuracy": [0.1]}, "tests": tests}]
    rows += [{"round": 3, "train": {"user_accuracy": [0.2, 0.3], "user_accuracy_std": [0.5, 0.1]}, "tests": tests}]
    found = mtfl.outcome(here, own, [rows])
    assert len(here.protocol.noisy) == 2 and found.trained.tolist() == pytest.approx([0.8])
    assert found.user_accuracy.tolist() == [[0.1, 0.2, 0.3]]
    assert found.mark == "" and found.spread == 0.1
    # 199,610 parameters without 200 scales and 200 shifts, each way; no running statistics.
    assert found.traffic == (FLOAT * 199_210, FLOAT * 199_210)


def test_a_run_that_was_stopped_because_it_diverged_is_marked(here):
    """It has fewer rounds than the others; the missing ones are NaN, which no target and no mean mistakes for a number."""
    own = mtfl.mtfl_system(here, "own", "bn", "fedavg")

    def rows(scores):
        return [
            {
                "round": at,
                "train": {"user_accuracy": [score]},
                "tests": {"after": {"accuracy": [score] * 10, "scores": {"accuracy": score, "accuracy_mean": score}}},
            }
            for at, score in enumerate(scores, 1)
        ]

    found = mtfl.outcome(here, own, [rows([0.1, 0.2, 0.9]), rows([0.1, np.nan])])
    np.testing.assert_array_equal(found.user_accuracy, [[0.1, 0.2, 0.9], [0.1, np.nan, np.nan]])
    np.testing.assert_allclose(found.trained, [0.9, np.nan])
    headings, (row,) = mtfl.table({"own": own}, {"own": found}, [0.5])
    assert row[0] == "own (1 of 2 seeds diverged at round 2)"
    assert row[headings.index("rounds\nto 0.5")] == "never in 1 of 2"
    assert row[headings.index("UA, %\nlast")] == "nan"


@pytest.mark.parametrize("name", mtfl.BASELINES)
def test_every_baseline_runs_and_user_accuracy_is_taken(here, name):
    made = mtfl.baseline(here, name)
    watched = fm.with_user_accuracy(made.algorithm, support=made.support, excluded=here.protocol.noisy, devices=1)
    data, key = here.protocol.train, jax.random.key(0)
    before = jax.eval_shape(watched.init, key, data)
    after, info = jax.eval_shape(watched.round, key, before, data)
    assert problems.forms(before) == problems.forms(after) and "user_accuracy" in info.metrics


def test_the_testbed_has_a_row_for_each_system_whose_bytes_follow_from_what_is_private(here):
    headings, rows = mtfl.testbed(here)
    by_name = {row[0]: dict(zip(headings, row, strict=True)) for row in rows}
    assert list(by_name) == [
        "Independent",
        *(f"{which}, {rule}" for which in ("FL", "MTFL γβ", "MTFL both") for rule in ("FedAvg", "FedAvg-Adam")),
    ]
    assert by_name["Independent"]["MB up"] == "0.00" and by_name["Independent"]["train\n%"] == "100.0"
    # Adam's two moments travel with the parameters: 3 x 199,610 and the statistics of 200 units.
    assert float(by_name["FL, FedAvg-Adam"]["MB up"]) == pytest.approx(FLOAT * (3 * 199_610 + 400) / 1e6, abs=0.01)
    shares = [sum(float(row[column]) for column in headings[-4:]) for row in by_name.values()]
    assert shares == pytest.approx([100] * 7, abs=0.3)


def test_the_grid_of_systems_and_what_each_is_compared_with(here):
    systems = mtfl.comparison(here, list(mtfl.PRIVATE), list(mtfl.OPTIMIZERS), lr=None, statistics_epochs=0)
    assert len(systems) == len({one.title for one in systems.values()}) == len({one.look for one in systems.values()}) == 12
    for name, one in systems.items():
        optimizer, private = name.split("/")
        assert one.without == {"FL": f"{optimizer}/none", "FedAvg": f"fedavg/{private}"}


def test_private_means_or_variances_alone(here):
    for part in ("mean", "var"):
        names = {"params/bn1/scale", "params/bn1/bias", f"batch_stats/bn1/{part}"}
        mask = masks.resolve(mtfl.MASKS[f"bn_affine_{part}"], here.task)
        leaves = jax.tree_util.tree_leaves_with_path(mask)
        assert {"/".join(masks.path_names(path)) for path, chosen in leaves if chosen} == names


def test_aggregation_moves_batch_norms_by_the_affine_leaves():
    """With own statistics the outputs of a batch norm have mean beta: federated norms move it by |mean of betas - beta|."""
    net = models.Network((5,), 3, hidden=(4,), normed=("fc1",))
    task = models.flax_task(net, (5,), layers=("fc1", "head"), features="features", head="head")
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


def test_bad_settings():
    with pytest.raises(ValueError, match="--share 0.001 of --clients 400 must be at least one client"):
        mtfl.check_sizes([400, 200], [0.01, 0.001])
    with pytest.raises(ValueError, match="--clients=0"):
        mtfl.check_sizes([0], [1.0])
    assert mtfl.check_sizes([400, 200], [1.0, 0.5]) == 100
    with pytest.raises(ValueError, match="--noisy 1 makes all 10 clients noisy"):
        mtfl.make_settings(sources.load("mnist_small"), clients=10, shares=[0.5], **{**DIVISION, "noisy": 1.0})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["compere"], "command='compere'"),
        (["compare", "--dataset", "imagenet"], "--dataset='imagenet'"),
        (["compare", "--private", "none,gamma"], "--private='gamma'"),
        (["compare", "--optimizers", "adam"], "--optimizers='adam'"),
        (["baselines", "--systems", "fedprox"], "--systems='fedprox'"),
        (["compare", "--clients", "10", "--share", "0.04"], "--share 0.04 of --clients 10"),
        (["compare", "--targets", "97"], "--targets=97"),
        (["compare", "--lr", "0"], "--lr=0"),
        (["compare", "--seeds", "1,1"], "--seeds '1,1'"),
    ],
    ids=str,
)
def test_wrong_options_are_one_line(options, text):
    result = testing.CliRunner().invoke(mtfl.app, options, env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert text in result.output and len(result.output.strip().splitlines()) == 1
