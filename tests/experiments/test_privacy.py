"""Noise by its epsilon in studies: its multiplier, its guarantee in the table, the clients, and the figure."""

import numpy as np
import pytest

from fedjax_meta import cli, privacy
from fedjax_meta.data import sources
from fedjax_meta.study import compare, from_tree, guarantees, load, parts, results, run
from fedjax_meta.study import folder as folders
from fedjax_meta.study.tuning import points_of
from tests.study.common import Silent

typer_testing = pytest.importorskip("typer.testing", reason="the command line needs typer")
pytest.importorskip("dp_accounting", reason="epsilon needs dp-accounting")
figures = pytest.importorskip("experiments.figures", reason="the command line needs typer, rich and matplotlib")

CLIENTS = 40


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(300, 6)).astype(np.float32), rng.integers(0, 3, 300)
    path = tmp_path_factory.mktemp("data") / "small.npz"
    np.savez(path, x_train=x[:240], y_train=y[:240], x_test=x[240:], y_test=y[240:])
    return path


def small(dataset, **changes):
    overrides = [f"scenarios.digits.dataset={dataset}", f"scenarios.digits.clients={CLIENTS}", "rounds=4", "eval_every=4"]
    overrides += ["federation.schedule.rate=0.3", "federation.cohort_size=30", "seeds=[1]"]
    return load(
        "privacy",
        [*overrides, *(f"{key}={value}" for key, value in changes.items())],
        systems=["none", "fixed-8", "adaptive-8"],
    )


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):
    study, folder = small(dataset), tmp_path_factory.mktemp("private") / "run"
    built = run.build(study)
    return study, built, run.run(study, folder, watcher=Silent(), clients=built), folder


def test_a_run_meets_its_epsilon_and_the_table_says_so(finished):
    study, built, outcomes, _ = finished
    clients, delta = built["digits"], CLIENTS**-1.1
    lines = {one.title: one for one in results.lines(study, "digits", clients, outcomes)}
    for title, name in (("fixed norm, epsilon 8", "fixed-8"), ("adaptive norm, epsilon 8", "adaptive-8")):
        *_, noise = study.system(name, "digits").build(clients).config["federation"]["uploads"]
        assert (
            noise["multiplier"] == privacy.noise_for(8.0, 4, delta, privacy.Poisson(0.3, CLIENTS, 30))
            and noise["reproducible"]
        )
        spent = privacy.epsilon(noise["multiplier"], 4, delta, privacy.Poisson(0.3, CLIENTS, 30)).epsilon
        assert 7.5 < spent <= 8
        means = "add or remove one client; Poisson sampling with rate 0.3 of N=40 clients into C=30 slots"
        assert f"epsilon {spent:.3g}, delta {delta:.2g} ({means})" in lines[title].remark
    assert "epsilon" not in lines["no clipping, no noise"].remark


def test_the_record_and_every_line_say_what_epsilon_means(finished, dataset, tmp_path):
    study, built, _, folder = finished
    promised = folders.read_run(folder)["privacy"]["digits"]
    assert set(promised) == {"fixed-8", "adaptive-8"}
    whole, multiplier = promised["fixed-8"], privacy.noise_for(8.0, 4, CLIENTS**-1.1, privacy.Poisson(0.3, CLIENTS, 30))
    by_rounds = [privacy.epsilon(multiplier, n, CLIENTS**-1.1, privacy.Poisson(0.3, CLIENTS, 30)) for n in (1, 2, 4)]
    assert (whole["epsilon of a round"], whole["epsilon"]) == (by_rounds[0].epsilon, by_rounds[2].epsilon)
    assert (whole["relation"], whole["sampling"]) == (by_rounds[0].relation, by_rounds[0].sampling)
    assert guarantees.said(study, "digits", "none", built["digits"], 2) == ""
    command = ["privacy", "--systems", "fixed-8", "--rounds", "4", "--set", "eval_every=2", "--seeds", "1"]
    command += [
        "--set",
        f"scenarios.digits.clients={CLIENTS}",
        "--set",
        f"scenarios.digits.dataset={dataset}",
        "--set",
        "federation.schedule.rate=0.3",
    ]
    command += ["--set", "federation.cohort_size=30", "--out", str(tmp_path / "run")]
    said = typer_testing.CliRunner().invoke(cli.app, ["run", *command], env={"COLUMNS": "400"}).output
    for found, where in ((by_rounds[1], "round 2/4; {}"), (by_rounds[2], "round 4/4; {}"), (by_rounds[2], "{} in 4 rounds")):
        assert where.format(guarantees.text(found)) in " ".join(said.split())


def test_delta_and_rounds_change_the_noise(dataset):
    def multiplier(**changes):
        study = small(dataset, **changes)
        return (
            study.system("fixed-8", "digits")
            .build(study.scenarios["digits"].build())
            .config["federation"]["uploads"][1]["multiplier"]
        )

    usual = multiplier()
    assert multiplier(delta=1e-5) > usual and multiplier(rounds=16) > usual


def test_more_rounds_of_the_same_epsilon_are_another_system(finished, dataset):
    *_, folder = finished
    with pytest.raises(
        ValueError, match=r"holds another study: systems\.adaptive-8\.federation\.uploads.*'rounds': 4.*'rounds': 8"
    ):
        run.run(small(dataset, rounds=8), folder, watcher=Silent())


def test_the_test_split_is_dealt_out(dataset):
    place = small(dataset).scenarios["digits"].build()
    source = sources.load(str(dataset))
    assert place.train.sizes("train").sum() == 240 and place.train.sizes("test").sum() == 60
    start, size = (np.asarray(table["test"]) for table in (place.train.start, place.train.size))
    rows = np.concatenate([np.arange(s, s + n) for s, n in zip(start, size, strict=True)])
    dealt, whole = np.asarray(place.train.x)[rows], source.x_test
    np.testing.assert_array_equal(
        dealt[np.lexsort(dealt.T)], whole.reshape(dealt.shape)[np.lexsort(whole.reshape(dealt.shape).T)]
    )


def test_the_figure_has_a_line_for_each_way_of_clipping(finished):
    study, *_, folder = finished
    lines, across = figures.curves(study, compare.finished([folder]))
    assert list(lines) == ["clip", "adaptive clip"] and list(across) == ["no clipping, no noise"]
    assert [point[0] for point in lines["clip"]] == [8.0]
    assert typer_testing.CliRunner().invoke(figures.app, ["privacy", str(folder)]).exit_code == 0
    assert (folder / "privacy.png").stat().st_size > 5000
    none = from_tree({"title": "x", "scenarios": {"a": {}}, "systems": {"fedavg": {"method": "fedavg"}}})
    with pytest.raises(ValueError, match="no system of this run has noise that is given by its epsilon"):
        figures.curves(none, [])


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        ({}, "noise takes a multiplier or an epsilon, one of them"),
        ({"epsilon": 1, "multiplier": 1}, "noise takes a multiplier or an epsilon, one of them"),
        ({"epsilon": 0}, "epsilon=0 must be finite and above 0"),
        ({"epsilon": 1, "delta": 2}, "delta=2 must lie strictly between 0 and 1"),
        ({"multiplier": 1, "delta": 0.1}, "delta belongs to an epsilon"),
    ],
)
def test_wrong_noise_is_refused(noise, message):
    with pytest.raises(ValueError, match=message):
        parts.made("uploads", parts.UPLOADS, {"name": "noise", **noise})


def test_numbers_of_parts_may_be_grids(dataset):
    tree = {"method": "fedavg", "federation": {"uploads": [{"name": "clip"}]}, "grid": {"uploads.clip.norm": [0.1, 1.0]}}
    study = from_tree({"title": "x", "scenarios": {"a": {"dataset": "digits", "model": "logistic"}}, "systems": {"own": tree}})
    config = study.system("own", "a").build(study.scenarios["a"].build(), **{"uploads.clip.norm": 0.1}).config
    assert config["federation"]["uploads"][0]["norm"] == 0.1
    tree["federation"] = {"uploads": [{"name": "clip", "norm": 1.0}]}
    for path, message in (
        ("uploads.noise.multiplier", "part='noise' is unknown"),
        ("aggregator.f", "must be OPTION.KEY of a part"),
        ("optimizer.b1", "scenarios.a, systems.own: grid: optimizer.b1 .*; `each` tries values of parts of the method"),
    ):
        with pytest.raises(ValueError, match=message):
            from_tree({"title": "x", "scenarios": {"a": {}}, "systems": {"own": {**tree, "grid": {path: [1.0]}}}})


def test_a_grid_may_be_of_a_part_of_the_study_or_of_a_scenario(dataset):
    system = {"method": "fedavg", "grid": {"uploads.clip.norm": [0.1, 1.0], "attack.scale": [1, 10]}}
    attacked = {"dataset": "digits", "model": "logistic", "federation": {"attack": {"name": "sign_flip", "attackers": 0.2}}}
    tree = {"title": "x", "scenarios": {"a": attacked}, "systems": {"own": system}, "federation": {"uploads": ["clip"]}}
    study = from_tree(tree)
    made = study.system("own", "a")
    for point in points_of(made):
        federation = made.build(study.scenarios["a"].build(), **point).config["federation"]
        assert federation["uploads"][0]["norm"] == point["uploads.clip.norm"]
        assert federation["attack"]["scale"] == point["attack.scale"]
    with pytest.raises(
        ValueError, match=r"scenarios.b, systems.own: grid: attack.scale must be OPTION.KEY of a part that the fed"
    ):
        from_tree({**tree, "scenarios": {"a": attacked, "b": {"dataset": "digits", "model": "logistic"}}})
