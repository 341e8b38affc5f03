"""The studies of FedPAC and Per-FedAvg-Reptile: every system fits its clients, budgets are equal, and other data sets load."""

import math

import jax
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from experiments import fedpac_figures
from fedjax_meta import cli
from fedjax_meta.data import protocols, sources
from fedjax_meta.study import Scenario, load, to_tree
from fedjax_meta.study.tuning import points_of

SMALL = [
    *(f"scenarios.clients.{field}" for field in ("dataset=mnist_small", "augment=null", "options.size=30", "clients=10")),
    "federation.cohort_size=8",
]
"""5,000 images are too few for all clients."""


@pytest.fixture(scope="module")
def fedpac():
    return load("fedpac", SMALL)


@pytest.fixture(scope="module")
def clients(fedpac):
    return fedpac.scenarios["clients"].build()


def test_a_fifth_of_the_clients_of_fedpac_never_train(clients):
    whole = load("fedpac")
    assert (whole.scenarios["clients"].clients, whole.scenarios["clients"].new, whole.federation["cohort_size"]) == (
        25,
        0.2,
        20,
    )
    assert (clients.train.num_clients, clients.new.num_clients) == (8, 2)
    theirs = {int(i) for i in clients.train.start["train"]}
    assert not theirs & {int(i) for i in clients.new.start["support"]}
    assert set(np.asarray(clients.train.size["train"])) == {30}
    assert set(np.asarray(clients.tuning.size["train"])) == {24}


def test_every_system_of_fedpac_fits_the_clients(fedpac, clients):
    for name in fedpac.systems:
        system = fedpac.system(name)
        algorithm = system.build(clients.task, **points_of(system)[0])
        assert jax.eval_shape(algorithm.init, jax.random.key(0), clients.train).seen.shape == (8,), name


def test_systems_are_tuned_over_as_many_rates_and_take_as_many_passes(fedpac):
    for name, system in fedpac.systems.items():
        options = system.options
        passes = options.get("epochs", 0) + options.get("head_epochs", 0) + options.get("body_epochs", 0)
        assert passes * options.get("inner_steps", 1) == 5, name
        assert options["batch_size"] == 50 and len(points_of(system)) == 4, name


def test_models_that_all_clients_share_are_fine_tuned_alike(fedpac):
    assert fedpac.systems["fedprox"].options["finetune_epochs"] == fedpac.systems["fedavg_ft"].options["finetune_epochs"] == 5
    assert fedpac.systems["fedprox"].options["finetune"] == "head"


def test_variants_of_fedpac():
    assert [one.options["uniform"] for one in load("fedpac", variants=["share"]).scenarios.values()] == [0, 0.2, 0.4, 0.6, 0.8]
    sizes = load("fedpac", variants=["samples"], systems=["fedpac"])
    assert [one.options["size"] for one in sizes.scenarios.values()] == [100, 200, 400, 600]
    assert load("fedpac", variants=["emnist"]).scenarios["clients"].dataset == "emnist/byclass"
    few = load("fedpac", variants=["batches_of_10"])
    assert {one.options["batch_size"] for one in few.systems.values()} == {10}  # or an ablation differs by its batches, too


def test_cinic10_is_read_from_a_file(tmp_path):
    """tensorflow-datasets has none; a file of colour images named cinic10.npz gets the paper's 300 tests a client."""
    rng = np.random.default_rng(0)
    parts = {
        f"x_{part}": rng.integers(0, 256, (count, 32, 32, 3), np.uint8) for part, count in (("train", 2000), ("test", 6000))
    }
    labels = {f"y_{part}": np.arange(count) % 10 for part, count in (("train", 2000), ("test", 6000))}
    np.savez(tmp_path / "cinic10.npz", **parts, **labels)
    study = load("fedpac", variants=["cinic10"])
    assert study.scenarios["clients"].dataset == "cinic10.npz"
    given = {
        "dataset": str(tmp_path / "cinic10.npz"),
        "partition": "fedpac",
        "model": "fedpac_cnn",
        "augment": "crop_and_flip",
    }
    made = Scenario(**given, clients=10, new=0.2, options={"size": 60}).build()
    assert set(np.asarray(made.train.size["train"])) == {60} and set(np.asarray(made.train.size["test"])) == {300}
    assert "cinic10" in made.title


def test_emnist_has_the_authors_sizes():
    x, y = np.zeros((62 * 700, 2, 2, 1), np.uint8), np.arange(62 * 700) % 62
    source = sources.Source(x, y, x, y, 62, "emnist/byclass")
    train = protocols.fedpac_clients(source, num_clients=3).train
    assert set(np.asarray(train.size["train"])) == {1000} and set(np.asarray(train.size["test"])) == {600}


def test_both_readings_of_reptile():
    study = load("reptile")
    fixed = {name: one.options for name, one in study.systems.items() if not one.grid}
    assert list(fixed) == ["reptile", "fedavg", "perfedavg", "fedavg_16", "perfedavg_16"]
    assert fixed["reptile"]["interpolation"] == 1.0
    rates = {
        name: {value for key, value in options.items() if key.endswith("lr") and value} for name, options in fixed.items()
    }
    assert set(map(frozenset, rates.values())) == {frozenset({0.01})}
    steps = {name: options.get("local_steps") or options["outer_batches"] for name, options in fixed.items()}
    assert steps == {"reptile": 4, "fedavg": 4, "perfedavg": 4, "fedavg_16": 16, "perfedavg_16": 16}
    for variant in ("mnist", "cifar10"):  # 16 steps are a pass there, too
        sizes = {
            one.options.get("batch_size") for name, one in load("reptile", variants=[variant]).systems.items() if "16" in name
        }
        assert sizes == {61}
    tuned = {name: one for name, one in study.systems.items() if one.grid}
    assert {len(points_of(one)) for one in tuned.values()} == {20}
    assert "guesses" in study.notes[0]


def test_the_published_numbers_of_reptile_stand_beside_the_first_reading():
    rows = {row.system: row.value for row in load("reptile", variants=["cifar10"]).published}
    assert rows == {"reptile": 50.09, "fedavg": 46.13, "perfedavg": 43.77}


def test_reptile_is_tuned_on_samples_that_its_trials_are_not_trained_on():
    made = load("reptile").scenarios["synthetic_1"].build()
    train, tuning = made.train, made.tuning
    for i in range(train.num_clients):
        whole, kept, asked = (
            set(range(int(data.start[view][i]), int(data.start[view][i] + data.size[view][i])))
            for data, view in ((train, "train"), (tuning, "train"), (tuning, "test"))
        )
        assert kept | asked == whole and not kept & asked
    assert math.isclose(made.train.size["test_support"].sum() / made.train.size["test"].sum(), 0.3, abs_tol=0.02)


@pytest.mark.long
def test_figures_of_a_run_and_of_the_mixtures(tmp_path):
    """Two scenarios that differ in the share of uniform samples, two systems; and FedPAC's matrix, whose groups share heads."""
    runner = CliRunner()
    fields = ["dataset=mnist_small", "augment=null", "options.size=30", "clients=7", "new=0.3"]
    scenarios = [f"scenarios.{name}.{field}" for name in ("clients-0_0", "clients-0_4") for field in fields]
    small = ["rounds=1", "seeds=[1]", "federation.cohort_size=5"]
    study = load("fedpac", variants=["share"], systems=["local_only", "fedpac"])
    chosen = {name: to_tree(study)["scenarios"][name] for name in ("clients-0_0", "clients-0_4")}
    grids = {name: {**one, "grid": {"lr": [0.1]}} for name, one in to_tree(study)["systems"].items()}
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({**to_tree(study), "scenarios": chosen, "systems": grids}), encoding="utf-8")
    words = [word for field in (*scenarios, *small) for word in ("--set", field)]
    ran = runner.invoke(cli.app, ["run", str(path), "--out", str(tmp_path / "run"), *words])
    assert ran.exit_code == 0, ran.output
    assert runner.invoke(fedpac_figures.app, ["curves", str(tmp_path / "run")]).exit_code == 0
    assert (tmp_path / "run" / "scenarios.png").stat().st_size > 10_000
    words = [word for field in fields for word in ("--set", f"scenarios.clients.{field}")] + [
        "--set",
        "federation.cohort_size=5",
    ]
    drawn = runner.invoke(fedpac_figures.app, ["mixing", "--rounds", "2", "--out", str(tmp_path / "map.png"), *words])
    assert drawn.exit_code == 0, drawn.output
    assert (tmp_path / "map.png").stat().st_size > 10_000


def test_scenarios_of_a_figure_must_differ_in_one_option():
    assert fedpac_figures.differing({"a": {"uniform": 0.0}, "b": {"uniform": 0.5}}) == ("uniform", {"a": 0.0, "b": 0.5})
    with pytest.raises(ValueError, match="must differ in one of uniform, size, concept_groups, not in none"):
        fedpac_figures.differing({"a": {"uniform": 0.0}})


def test_clients_of_a_group_are_drawn_side_by_side(clients):
    groups = fedpac_figures.groups_of(clients.train)
    of_client = sorted(np.bincount(np.unique(groups, return_inverse=True)[1]).tolist())
    assert len(of_client) <= 5 and sum(of_client) == 8
