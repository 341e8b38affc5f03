"""Studies as files: by name, with variants, entries for several, tables of published numbers, draws, other kinds of clients."""

import copy
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure
from typer.testing import CliRunner

from fedjax_meta.front import program
from fedjax_meta.study import Scenario, System, draws, figures, files, flags, from_tree, load, page, results, run, to_tree
from fedjax_meta.study.check import check
from fedjax_meta.study.tuning import Trial
from fedjax_meta.task import Batch
from tests.study.common import TREE, Silent, study, tree


@pytest.mark.parametrize("name", files.packaged())
def test_every_study_of_the_package_is_valid_with_all_its_variants(name):
    whole = files.read(name)
    for variant in ([], *([one] for one in whole.get("variants", {}))):
        chosen = load(name, variants=variant)
        assert chosen.title and to_tree(from_tree(to_tree(chosen))) == to_tree(chosen)
    text = files.packaged()[name]
    assert len(text.splitlines()) <= 200


def test_a_variant_cannot_change_what_an_earlier_one_leaves_out():
    """It would bring back half of an entry."""
    study = {"systems": {"a": {"method": "fedavg"}, "b": {}}, "variants": {}}
    study["variants"] = {"other": {"systems": {"a": {"options": {"lr": 1}}}}, "without": {"systems": {"a": None}}, "b": {}}
    with pytest.raises(ValueError, match=r"variant other changes systems.a, which variant without leaves out"):
        files.variants(study, ["without", "b", "other"])
    assert files.variants(study, ["other", "without", "without", "b"])["systems"] == {"b": {}}
    assert files.variants(study, ["other", "other", "b"])["systems"]["a"]["options"] == {"lr": 1}


def test_a_name_is_a_study_of_the_package_unless_there_is_such_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("quickstart").title == files.read("quickstart")["title"]
    (tmp_path / "quickstart").write_text(yaml.safe_dump(TREE), encoding="utf-8")
    assert load("quickstart").title == TREE["title"]
    with pytest.raises(ValueError, match=r"study='quikstart' is unknown \(did you mean 'quickstart'"):
        load("quikstart")


def test_a_file_extends_the_one_beside_it_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(TREE), encoding="utf-8")
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / "study.yaml"
    path.write_text("extends: ../base.yaml\nrounds: 3\n", encoding="utf-8")
    for folder in (tmp_path, tmp_path / "mine"):
        monkeypatch.chdir(folder)
        assert load(path) == load(os.path.relpath(path)) == study(rounds=3)
    path.write_text("extends: base.yaml\nrounds: 3\n", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: base\.yaml"):
        load(path)
    monkeypatch.chdir(tmp_path)
    assert load(path) == study(rounds=3)
    path.write_text("extends: study.yaml\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine.study\.yaml extends itself"):
        load("mine/../mine/study.yaml")


def test_a_file_without_a_title_is_called_by_its_name(tmp_path):
    for text in ({key: value for key, value in TREE.items() if key != "title"}, TREE | {"title": None}):
        (tmp_path / "two_rates.yaml").write_text(yaml.safe_dump(text), encoding="utf-8")
        assert load(tmp_path / "two_rates.yaml") == study(title="two_rates")


def test_a_name_without_the_ending_of_its_file_is_told_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(TREE), encoding="utf-8")
    for name in ("mine", str(tmp_path / "mine")):
        with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*mine; there is a file .*mine\.yaml"):
            load(name)


def test_variants_are_laid_over_in_order_and_before_overrides(tmp_path):
    changes = {
        "short": {"rounds": 2, "systems": {"local": None}},
        "wide": {"federation": {"cohort_size": 6}, "systems": {"fedavg": {"grid": {"lr": [0.5]}}}, "rounds": 3},
    }
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(tree(variants=changes)), encoding="utf-8")
    assert load(path) == study()
    chosen = load(path, ["federation.cohort_size=2"], variants=["short", "wide"])
    assert (chosen.rounds, list(chosen.systems), chosen.federation["cohort_size"]) == (3, ["fedavg"], 2)
    assert chosen.systems["fedavg"].grid == {"lr": [0.5]}
    assert chosen.systems["fedavg"].options == {"epochs": 1, "batch_size": 20}
    with pytest.raises(ValueError, match="variant='long' is unknown"):
        load(path, variants=["long"])


def test_a_part_of_another_name_takes_the_place_of_the_old_one():
    """The options of the one are not those of the other; a part that keeps its name keeps its options."""
    old = {"name": "steps", "after": [2], "factor": 0.5}
    base = tree(systems={"fedavg": {"rates": {"lr": old}}})
    for new, then in (
        ({"name": "exponential", "factor": 0.9}, {"name": "exponential", "factor": 0.9}),
        ({"name": "steps", "after": [1]}, {**old, "after": [1]}),
        ({"factor": 0.1}, {**old, "factor": 0.1}),
        ("cosine", "cosine"),
    ):
        changed = {**base, "variants": {"other": {"systems": {"fedavg": {"rates": {"lr": new}}}}}}
        assert files.variants(changed, ["other"])["systems"]["fedavg"]["rates"]["lr"] == then


def test_a_system_without_a_method_is_that_of_its_name():
    each = {"each": {"options.epochs": [1, 2]}}
    chosen = study(systems={"fedavg": None, "fedper": {"title": "own"}, "ditto": each, "mine": {"method": "fedavg"}}).systems
    assert {name: system.method for name, system in chosen.items()} == {
        "fedavg": "fedavg", "fedper": "fedper", "ditto-1": "ditto", "ditto-2": "ditto", "mine": "fedavg"
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"systems\.mine needs method"):
        study(systems={"mine": {"options": {"epochs": 1}}})
    with pytest.raises(
        ValueError, match=r"systems\.fedprr needs method, because its name is that of none \(did you mean 'fedp"
    ):
        study(systems={"fedprr": None})
    with pytest.raises(ValueError, match=r"systems\.fedavg has no field 'epochs', which belongs to options"):
        study(systems={"fedavg": {"epochs": 1}})


def test_each_makes_an_entry_of_every_combination():
    system = {"method": "fedavg", "title": "E = {epochs}, C = {cohort_size}"}
    system["each"] = {"options.epochs": [1, 5], "federation.cohort_size": [2, 3]}
    rates = {"method": "fedavg", "each": {"options.lr": [0.1]}}
    chosen = study(systems={"a": system, "b": rates})
    assert list(chosen.systems) == ["a-1-2", "a-1-3", "a-5-2", "a-5-3", "b-0_1"]
    assert chosen.systems["a-5-2"] == System(
        method="fedavg", options={"epochs": 5}, federation={"cohort_size": 2}, title="E = 5, C = 2"
    )
    assert chosen.title_of("b-0_1") == "b, lr 0.1"
    scenario = {"dataset": "digits", "partition": "dirichlet_classes", "each": {"options.concentration": [0.1, 1]}}
    assert [one.options["concentration"] for one in study(scenarios={"d": scenario}).scenarios.values()] == [0.1, 1]


def test_a_table_of_published_numbers_is_a_row_for_each():
    table = {"scenario": "pairs", "scores": ["accuracy", "f1_mean"], "rows": {"fedavg": [90, None], "local": [80.5, 79]}}
    rows = study(published=[{**table, "notes": {"local": "Table 3"}}]).published
    assert [(row.system, row.score, row.value, row.note) for row in rows] == [
        ("fedavg", "accuracy", 90, ""),
        ("local", "accuracy", 80.5, "Table 3"),
        ("local", "f1_mean", 79, "Table 3"),
    ]


def test_numbers_with_an_exponent_need_no_point():
    assert files.parsed("[1e-5, -2E+3, 1e3, 1.5e2, e1, 1e]") == [1e-5, -2000.0, 1000.0, 150.0, "e1", "1e"]


def test_systems_may_be_run_on_some_scenarios_only():
    one = TREE["scenarios"]["pairs"]
    systems = {name: {**system, "scenarios": [name]} for name, system in TREE["systems"].items()}
    chosen = study(scenarios={"fedavg": one, "local": one, "both": one}, systems={**systems, "all": {"method": "fedper"}})
    assert [chosen.systems_on(name) for name in chosen.scenarios] == [["fedavg", "all"], ["local", "all"], ["all"]]
    notes = ["all", {"text": "of one", "systems": ["local"]}, {"text": "of others", "systems": ["fedavg", "all"]}]
    rows = [{"scenario": name, "rows": {name: 90.0}} for name in ("fedavg", "local")]
    given = files.only(tree(scenarios={"fedavg": one, "local": one}, systems=systems, notes=notes, published=rows), ["local"])
    less = from_tree(given)
    assert (list(less.scenarios), list(less.systems), less.notes) == (["local"], ["local"], ["all", "of one"])
    assert [row.system for row in less.published] == ["local"]
    watched = tree(systems={"a": TREE["systems"]["fedavg"], "a-2": TREE["systems"]["fedavg"]}, user_accuracy={"a-2": "train"})
    less = from_tree(files.only(watched, ["a"]))
    assert list(less.systems) == ["a"] and less.user_accuracy is None  # "a-2" is a system of its own, no part of "a"
    epochs = {"a": {"method": "fedavg", "each": {"options.epochs": [1, 5], "options.lr": [0.1, 0.2]}}, **TREE["systems"]}
    kept = [list(files.only(tree(systems=epochs), [name])["systems"]) for name in ("a", "a-5", "a-5-0_2")]
    assert kept == [["a-1-0_1", "a-1-0_2", "a-5-0_1", "a-5-0_2"], ["a-5-0_1", "a-5-0_2"], ["a-5-0_2"]]


def test_some_scenarios_of_a_study_are_run():
    one, (first, second) = TREE["scenarios"]["pairs"], TREE["systems"]
    systems = {first: {**TREE["systems"][first], "scenarios": ["a-5", "b"]}, second: TREE["systems"][second]}
    places = {"a": {**one, "each": {"clients": [5, 10]}}, "b": one, "c": one}
    rows = [{"scenario": name, "rows": {second: 90.0}} for name in ("a-5", "b")]
    given = tree(scenarios=places, systems=systems, published=rows)

    def of(*names, systems=None):
        return from_tree(files.only(copy.deepcopy(given), systems, names))

    assert list(of("b", "a").scenarios) == ["a-5", "a-10", "b"] and list(of("a-10").systems) == [second]
    less = of("a-5", "c")
    assert less.systems[first].scenarios == ["a-5"] and [row.scenario for row in less.published] == ["a-5"]
    assert less.systems_on("a-5") == [first, second] and less.systems_on("c") == [second]
    assert list(of("b", "c", systems=[first]).scenarios) == ["b"]  # no scenario without systems
    with pytest.raises(ValueError, match=f"system {first} is run on none of the scenarios c"):
        of("c", systems=[first])
    with pytest.raises(ValueError, match=r"scenario='d' is unknown.*allowed are a-5, a-10, b, c"):
        of("d")
    drawn = to_tree(from_tree({**given, "data_seeds": [3, 4]}))  # as study.yaml of a run holds it
    assert list(from_tree(files.only(drawn, scenarios=["b"])).scenarios) == ["b@3", "b@4"]
    with pytest.raises(ValueError, match="scenario b@3: give b; data_seeds says"):
        files.only(drawn, scenarios=["b@3"])


def test_draws_are_trained_each_and_shown_together(tmp_path):
    """The draws differ in their clients, and the pooled outcome holds the trials of all of them."""
    chosen = study(data_seeds=[3, 4], rounds=2, tuning={"rounds": 1})
    built = run.build(chosen)
    assert to_tree(from_tree(to_tree(chosen))) == to_tree(chosen)  # as `show` prints it
    assert list(built) == ["pairs@3", "pairs@4"] and built["pairs@3"].fingerprint != built["pairs@4"].fingerprint
    alone = Scenario(**{**TREE["scenarios"]["pairs"], "seed": 4}).build()
    assert built["pairs@4"].fingerprint == alone.fingerprint
    outcomes = run.run(chosen, tmp_path, watcher=Silent(), clients=built)
    clients, joined = draws.pooled(chosen, built, outcomes)
    assert list(clients) == ["pairs"] and "2 draws" in clients["pairs"].title
    assert [(one.scenario, one.system) for one in joined] == [("pairs", "fedavg"), ("pairs", "local")]
    assert joined[1].final == outcomes[1].final + outcomes[3].final
    assert len(joined[0].final) == 4
    # A client of one draw is another person than the client of the same number in the other.
    shown = page.systems(chosen, joined)
    (gained,) = figures.gains(shown).panels[:1]
    canvas = Figure().subplots()
    gained.draw(canvas)
    of_draws = [results.by_client(joined[i].final, "known", None).values.reshape(2, 2, -1).mean(1).ravel() for i in (0, 1)]
    np.testing.assert_allclose(canvas.lines[0].get_ydata(), np.sort(of_draws[0] - of_draws[1]), atol=1e-9)
    everyone = 2 * clients["pairs"].train.num_clients
    np.testing.assert_allclose(canvas.lines[0].get_xdata(), 100 * (np.arange(everyone) + 0.5) / everyone)


def test_other_draws_of_a_written_study_are_those_of_the_study():
    written = to_tree(study(data_seeds=[3, 4]))
    more, other = (from_tree({**written, "data_seeds": seeds}) for seeds in ([3, 4, 5], [4]))
    assert to_tree(more) == to_tree(study(data_seeds=[3, 4, 5])) and to_tree(other) == to_tree(study(data_seeds=[4]))


def test_draws_that_score_different_numbers_of_clients_are_refused():
    """`per_client` classes and a least size: whoever has too few samples is left out, in one draw more than in another."""
    chosen = study(data_seeds=[1, 2], seeds=[1])
    built = run.build(chosen)
    check(chosen, built)
    first = built["pairs@1"]
    with pytest.raises(
        ValueError, match="pairs@1 scores 7 known and 2 new clients, but pairs@2 8 and 2: draws that are shown"
    ):
        check(chosen, {**built, "pairs@1": first._replace(noisy=np.array([0]))})


def test_a_field_with_several_values_is_set_by_its_list_alone():
    entry = {"method": "fedavg", "each": {"options.epochs": [1, 5], "federation.attack": [{"none": None}, "sign_flip"]}}
    given = tree(systems={"a": entry}, scenarios={"pairs": {**TREE["scenarios"]["pairs"], "each": {"clients": [5, 10]}}})
    for text in ("systems.a.options.epochs=3", "systems.a.federation.attack.scale=3", "scenarios.pairs.clients=5"):
        with pytest.raises(
            ValueError, match=r"(systems.a|scenarios.pairs) has several values of .*, under each: --set .*=\[...\]"
        ):
            files.override(copy.deepcopy(given), text)
    with pytest.raises(ValueError, match="scenarios.pairs has several values of clients"):
        flags.everywhere(copy.deepcopy(given), {"clients": 5})
    files.override(given, "systems.a.options.lr=0.3")
    files.override(given, "systems.a.each.options.epochs=[7]")
    files.override(given, "systems.a.each.federation.attack=[null]")
    (made,) = files.expanded("systems", given["systems"]).values()
    assert made["options"] == {"lr": 0.3, "epochs": 7} and made["federation"] == {"attack": None}


def test_a_field_of_mappings_without_any_is_an_empty_one():
    blank = tree(federation=None, scenarios={"pairs": {**TREE["scenarios"]["pairs"], "model_options": None}})
    blank["systems"] = {"local": {**TREE["systems"]["local"], "grid": None, "tested_with": None}}
    made = from_tree(blank)
    assert made.federation == {} and made.scenarios["pairs"].model_options == {} and made.systems["local"].tested_with == {}


def test_a_table_of_gains_names_the_clients_of_each_draw():
    """Who is scored differs from draw to draw where some clients are noisy."""
    chosen = study(data_seeds=[3, 4], seeds=[1])

    def scored(values, ids):
        test = {"accuracy": values, "ids": ids, "scores": {"accuracy_mean": np.mean(values)}}
        return Trial({}, 1, [{"tests": {"known": test}}], None)

    outcomes = [
        run.Outcome("pairs", name, [], {}, [], [scored(values[0], [0, 1]), scored(values[1], [2, 3])])
        for name, values in {"fedavg": [[0.5, 0.7], [0.1, 0.9]], "local": [[0.5, 0.5], [0.5, 0.5]]}.items()
    ]
    (row,) = [row for row in results.gains(chosen, outcomes) if row[1] == chosen.title_of("local")]
    assert row[3:5] == ["25 %", "+10.0"]  # who loses, and the median gain
    assert row[-2:] == ["-40.0 (client 2, draw 4)", "+40.0 (client 3, draw 4)"]


def test_the_spread_over_orders_of_new_clients():
    """Two orders of three clients each, two seeds."""
    rows = [[0.1, 0.2, 0.3, 0.5, 0.6, 0.7], [0.3, 0.4, 0.5, 0.7, 0.8, 0.9]]
    final = [
        Trial({}, seed, [{"tests": {"new": {"accuracy": row, "scores": {"accuracy_mean": np.mean(row)}}}}], None)
        for seed, row in enumerate(rows)
    ]
    outcome = run.Outcome("pairs", "fedavg", [], {}, [], final)
    clients = study().scenarios["pairs"].build()
    np.testing.assert_allclose(draws.over_orders(outcome, clients._replace(orders=2)), [[20, 60], [40, 80]])
    assert draws.remarks(outcome, clients._replace(orders=2)) == ["new ±28.28 over 2 orders (30.00 to 70.00)"]
    assert draws.remarks(outcome, clients) == []
    lost = outcome._replace(final=[final[0], final[1]._replace(diverged=4)])
    assert draws.remarks(lost, clients._replace(orders=2)) == []


BAD = {
    "no list in each": (
        {"systems": {"a": {"method": "fedavg", "each": {"options.lr": 3}}}},
        "a: each must be a mapping of lists",
    ),
    "a title that names nothing": (
        {"systems": {"a": {"method": "fedavg", "title": "{rate}", "each": {"options.lr": [3]}}}},
        "title '{rate}' may name lr in braces",
    ),
    "a row that is too short": (
        {"published": [{"scenario": "pairs", "scores": ["accuracy", "f1_mean"], "rows": {"fedavg": 3}}]},
        "fedavg has 1 numbers for 2 scores",
    ),
    "a scenario that is not there": (
        {"systems": {"a": {"method": "fedavg", "scenarios": ["triples"]}}},
        "systems.a.scenarios='triples' is unknown",
    ),
    "no list of scenarios": (
        {"systems": {"a": {"method": "fedavg", "scenarios": "pairs"}}},
        "scenarios='pairs' must be a list",
    ),
    "a note of another kind": ({"notes": [{"words": "x"}]}, "notes must be lines, or mappings with text and systems"),
    "a draw twice": ({"data_seeds": [1, 1]}, "data_seeds=.1, 1. names a seed twice"),
    "a partition of generated clients": (
        {"scenarios": {"s": {"dataset": "synthetic", "partition": "iid"}}},
        "dataset synthetic generates its clients: leave partition='iid' out",
    ),
    "an option of a generator": (
        {"scenarios": {"s": {"dataset": "synthetic", "options": {"spreads": 1}}}},
        "dataset synthetic takes no 'spreads' .did you mean 'spread'",
    ),
    "an unknown change of batches": ({"scenarios": {"s": {"augment": "mixup"}}}, "augment='mixup' is unknown"),
}


@pytest.mark.parametrize(("given", "words"), BAD.values(), ids=BAD)
def test_bad_input_gets_one_line(given, words):
    with pytest.raises(ValueError, match=words) as error:
        study(**given)
    assert "\n" not in str(error.value)


def test_generated_and_named_clients(tmp_path):
    made = Scenario(dataset="synthetic", options={"model_spread": 0.5}, clients=6, model="logistic", new=0.5).build()
    assert made.title == "synthetic(0.5, 1)" and made.train.num_clients == made.new.num_clients == 3
    rng = np.random.default_rng(0)
    owner = np.repeat([7, 3, 9, 4], [20, 30, 25, 40])
    np.savez(tmp_path / "own.npz", x=rng.normal(size=(115, 4)).astype(np.float32), y=rng.integers(0, 3, 115), writer=owner)
    scenario = Scenario(dataset=str(tmp_path / "own.npz"), partition="natural", options={"by": "writer"}, new=0.25)
    clients = scenario.build()
    sizes = clients.train.sizes("train") + clients.train.sizes("test")
    assert clients.new.num_clients == 1 and set(map(int, sizes)) < {20, 25, 30, 40}


def test_papers_without_new_clients_can_hold_some_out():
    scenario = {"dataset": "mnist_small", "partition": "fedpac", "options": {"size": 50, "test_size": 20, "share": True}}
    assert Scenario(**scenario).build().new is None
    clients = Scenario(**scenario, clients=20, new=0.25).build()
    assert (clients.train.num_clients, clients.new.num_clients) == (15, 5)
    with pytest.raises(ValueError, match="draws new clients of its own"):
        Scenario(dataset="mnist_small", partition="fedmeta_per", new=0.5).build()


@pytest.mark.parametrize(
    ("given", "name"), [({"dataset": "synthetic"}, "synthetic"), ({"partition": "fedmeta_per"}, "fedmeta_per")]
)
@pytest.mark.parametrize("share", ["test", "support"])
def test_a_share_is_refused_where_it_would_say_nothing(given, name, share):
    words = f"{share}=0.4, but {name} cuts the {share} samples of its clients itself: leave {share} out"
    with pytest.raises(ValueError, match=words):
        Scenario(**given, **{share: 0.4})
    if share == "support" and given != {"partition": "fedmeta_per"}:  # which draws new clients of its own
        new = Scenario(**given, support=0.4, new=0.2).build().new
        assert np.array_equal(new.sizes("support"), np.floor(0.4 * (new.sizes("support") + new.sizes("query")) + 1e-9))
    assert Scenario(**given, test=0.25, support=0.2).test == Scenario(dataset="digits", partition="iid").test


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ({"dataset": "sinusoids"}, 0.5),
        ({"dataset": "synthetic", "adapt_on": "test_support"}, 0.3),
        ({"partition": "perfedavg_reptile"}, 0.3),
        ({"partition": "fedmeta_per"}, 0.2),
        ({"partition": "fedpac", "options": {"support": 0.4, "size": 50, "test_size": 20, "share": True}}, 0.4),
        ({"partition": "iid", "support": 0.35}, 0.35),
    ],
)
def test_trials_adapt_on_the_same_share_as_final_runs(given, share):
    clients = Scenario(**given).build()
    for data in (clients.train, clients.tuning):
        for whole, part in (("train", "support"), ("test", "test_support")):
            sizes, parts = np.asarray(data.sizes(whole)), np.asarray(data.sizes(part))
            assert np.array_equal(parts, np.maximum(np.floor(share * sizes + 1e-9), 1))


def test_a_projection_is_placed_before_the_head_and_crops_change_the_loss():
    scenario = {"dataset": "mnist_small", "partition": "iid", "clients": 4, "model": "fedpac_cnn"}
    plain, cropped = Scenario(**scenario).build(), Scenario(**scenario, augment="crop_and_flip").build()
    assert plain.fingerprint == cropped.fingerprint and plain.task.loss is not cropped.task.loss
    moon = System(method="moon", projection=64).build(plain.task)
    model = jax.eval_shape(moon.init, jax.random.key(0), plain.train).model
    assert {leaf.shape for leaf in jax.tree.leaves(model["project2"])} == {(64, 128), (64,)}
    assert {leaf.shape for leaf in jax.tree.leaves(model["head"])} == {(10, 64), (10,)}
    with pytest.raises(ValueError, match="projection=0 must be an integer"):
        System(method="moon", projection=0)


def test_images_of_real_numbers_are_cropped_with_a_border_of_0(tmp_path):
    """As stored, they have no offset that would be black."""
    path = tmp_path / "images.npz"
    np.savez(path, x=np.ones((40, 6, 5, 1), np.float32), y=np.arange(40) % 2)
    clients = Scenario(dataset=str(path), partition="iid", clients=2, model="logistic", augment="crop_and_flip").build()
    batch = Batch(jnp.ones((8, 6, 5, 1)), jnp.arange(8) % 2, jnp.ones(8))
    prepared = clients.task.loss.prepare(batch, jax.random.key(0))[0].x
    assert set(np.unique(prepared)) == {0.0, 1.0} and prepared.shape == batch.x.shape


def test_a_program_of_a_study_has_the_options_of_run():
    text = CliRunner().invoke(program("quickstart"), ["--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    assert all(word in text for word in ("--quick", "--variant", "--systems", "--seeds", "--set", "--dry-run", "quickstart"))
    done = CliRunner().invoke(program("quickstart"), ["--rounds", "0"])
    assert done.exit_code == 2
    done = CliRunner().invoke(program("quickstart"), ["--systems", "fedsgd", "--dry-run"])
    assert done.exit_code == 1 and re.match(r"error: system='fedsgd' is unknown.*\n$", done.stderr)


def test_what_is_written_is_read_again_here_and_elsewhere():
    words = ["1e-3", "1e5", "010", "1:30", "0x1f", "1_000", "12345e67", ".inf", "nan", "true", "no", "~", "a: b", "# c", ""]
    numbers = [1e-05, 1e30, 0.1, -3, 0, float("inf"), 12345678901234567890, None, True, "1.", "+.5"]
    text = files.text_of({"words": words, "numbers": numbers})
    assert files.parsed(text) == yaml.safe_load(text) == {"words": words, "numbers": numbers}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scenarios": 5}, "scenarios must be a mapping of names, not 5"),
        ({"scenarios": {"pairs": "hello"}}, "scenarios.pairs must be a mapping, not 'hello'"),
        ({"systems": ["a"]}, r"systems must be a mapping of names, not \['a'\]"),
        ({"variants": {"v": {"systems": 5}}}, "variants.v.systems must be a mapping of names, not 5"),
        ({"variants": {"v": {"scenarios": {"pairs": [1]}}}}, r"variants.v.scenarios.pairs must be a mapping, not \[1\]"),
    ],
)
def test_a_file_whose_systems_or_scenarios_are_none_is_refused_where_it_is_read(changes, words, tmp_path):
    (tmp_path / "study.yaml").write_text(files.text_of({**TREE, **changes}))
    with pytest.raises(ValueError, match=words):
        files.variants(files.read(tmp_path / "study.yaml"), ["v"] if "variants" in changes else [])


def test_published_numbers_of_what_is_left_out_are_left_out():
    tree = {**TREE, "published": [{"scenario": "pairs", "rows": {"fedavg": 80, "local": 70}}]}
    tree = copy.deepcopy(tree)
    files.override(tree, "systems.fedavg=null")
    assert [(row["system"], row["value"]) for row in tree["published"]] == [("local", 70)]
    assert [row.system for row in from_tree(tree).published] == ["local"]
