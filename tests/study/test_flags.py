"""A study from the words of a command line, and fields of all scenarios."""

import jax
import pytest

from fedjax_meta import masks, models
from fedjax_meta.study import files, flags, from_tree, load
from tests import problems

typer_testing = pytest.importorskip("typer.testing", reason="the command line needs typer")
cli = pytest.importorskip("fedjax_meta.cli", reason="the command line needs typer, rich and matplotlib")


def invoke(*words):
    return typer_testing.CliRunner().invoke(cli.app, list(words), env={"COLUMNS": "200"})


def test_methods_with_their_options_make_a_study():
    study = load(
        None,
        ["seeds=[1, 2]", "systems.fedavg-2.options.epochs=3"],
        systems="fedmeta_per(estimator={name: implicit, prox_weight: 2.0}, batch_size=null), fedavg(lr=[0.1, 0.3]), "
        "fedavg(aggregator=krum:f=1, cohort_size=7)",
        scenario_fields=flags.scenario(
            dataset="digits", partition="dirichlet_classes(concentration=0.5)", clients=12, model="mtfl_mlp(norm=before)"
        ),
    )
    titles = [study.title_of(name) for name in study.systems]
    assert list(study.systems) == ["fedmeta_per", "fedavg", "fedavg-2"]
    assert titles == [
        "fedmeta_per(estimator=implicit(prox_weight=2.0), batch_size=null)",
        "fedavg",
        "fedavg(aggregator=krum:f=1, cohort_size=7)",
    ]
    assert study.systems["fedmeta_per"].options == {"estimator": {"name": "implicit", "prox_weight": 2.0}, "batch_size": None}
    assert study.systems["fedavg"].grid == {"lr": [0.1, 0.3]}
    assert study.systems["fedavg-2"].federation == {"aggregator": "krum:f=1", "cohort_size": 7}
    assert study.systems["fedavg-2"].options == {"epochs": 3}
    (scenario,) = study.scenarios.values()
    assert (scenario.dataset, scenario.clients, scenario.model) == ("digits", 12, "mtfl_mlp")
    assert (scenario.options, scenario.model_options) == ({"concentration": 0.5}, {"norm": "before"})
    assert (study.rounds, list(study.seeds)) == (flags.ROUNDS, [1, 2])


def test_fields_are_those_of_all_scenarios_of_a_study():
    study = load(
        "robustness",
        variants=["quick"],
        scenario_fields=flags.scenario(dataset="digits", clients=15),
        systems="fedavg-mean,fedrep",
    )
    assert {(one.dataset, one.clients, one.attackers) for one in study.scenarios.values()} == {("digits", 15, 0.2)}
    assert len(study.scenarios) == 3 and len(study.systems) == 4


def test_another_data_set_is_not_augmented_as_the_images_of_the_study():
    augments = {
        dataset: {one.augment for one in load("fedpac", scenario_fields=flags.scenario(dataset=dataset)).scenarios.values()}
        for dataset in ("cifar10", "fashion_mnist", "emnist/byclass")
    }
    assert augments == {"cifar10": {"crop_and_flip"}, "fashion_mnist": {None}, "emnist/byclass": {None}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show"], "give a study, or --systems with methods to compare"),
        (["show", "--systems", "fedper2"], "--systems='fedper2' is unknown (did you mean 'fedper'?)"),
        (["show", "--systems", "fedper(lr)"], "--systems fedper: 'lr' must read KEY=VALUE, each key once"),
        (["show", "--systems", "fedper(lr=1, lr=2)"], "'lr=2' must read KEY=VALUE, each key once"),
        (["show", "--systems", "fedper(lr=[1)"], "--systems fedper: lr='[1' is no YAML"),
        (["show", "--systems", "fedper(lr=1"], "must read NAME or NAME(KEY=VALUE, KEY=VALUE)"),
        (["show", "--systems", "fedper(rate=1)"], "takes no 'rate'"),
        (["show", "--systems", "fedper, fedper"], "two systems have the title 'fedper'"),
        (["show", "--systems", "fedavg(aggregator=krum:g=1)"], "krum"),
        (["show", "--systems", "fedavg(aggregator=krum(g=1))"], "krum takes no 'g'"),
        (
            ["show", "--systems", "fedavg(schedule=poisson(0.5))"],
            "--systems fedavg: schedule poisson: '0.5' must read KEY=VALUE",
        ),
        (
            ["show", "quickstart", "--set", "systems.fedavg.federation.aggregator=krum(f=1)"],
            "'krum(f=1)': write {name: krum, OPTION: VALUE}",
        ),
        (["show", "--systems", "fedavg", "--partition", "dirichlet_classes(alpha=1)"], "takes no 'alpha'"),
        (["show", "--systems", "fedavg", "--partition", "pie"], "partition='pie' is unknown"),
        (["show", "--systems", "fedavg", "--model", "lenet5"], "model='lenet5' is unknown"),
        (["show", "--systems", "fedavg", "--clients", "0"], "--clients"),
        (["run", "--systems", "fedavg(cohort_size=51)", "--dataset", "digits"], "cohort_size=51 is more than the N=16"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words, message):
    failed = invoke(*words)
    assert failed.exit_code != 0 and message in failed.output, failed.output
    assert "Traceback" not in failed.output


@pytest.mark.parametrize(
    ("call", "mapping"),
    [
        ("aggregator=krum(f=2)", "aggregator={name: krum, f: 2}"),
        ("attack=sign_flip(attackers=[1, 4], scale=3)", "attack={name: sign_flip, attackers: [1, 4], scale: 3}"),
        ("aggregator=my_rules:near(limit=2)", "aggregator={name: 'my_rules:near', limit: 2}"),
        ("uploads=[clip(norm=1.0), mask]", "uploads=[{name: clip, norm: 1.0}, mask]"),
        ("server_optimizer=adam()", "server_optimizer={name: adam}"),
        ("rates={lr: cosine}", "rates={'lr': 'cosine'}"),
        ("tested_with={optimizer: sgd(momentum=0.9)}", "tested_with={optimizer: {name: sgd, momentum: 0.9}}"),
        (
            "rates={lr: steps(after=[2, 3], factor=0.5), server_lr: linear}",
            "rates={lr: {name: steps, after: [2, 3], factor: 0.5}, server_lr: linear}",
        ),
    ],
)
def test_a_part_may_be_a_call_as_a_system_is(call, mapping):
    assert flags.study(f"fedavg({call})") == flags.study(f"fedavg({mapping})")


def test_fields_of_a_system_are_no_options():
    words = "rates={lr: cosine(end=0.1)}, tested_with={finetune_epochs: 1}, pooled=false"
    (fedavg,) = flags.study(f"fedavg({words}, lr=[0.1, 0.2])")["systems"].values()
    assert fedavg["rates"] == {"lr": {"name": "cosine", "end": 0.1}} and fedavg["tested_with"] == {"finetune_epochs": 1}
    assert fedavg["pooled"] is False and fedavg["options"] == {} and fedavg["title"] == f"fedavg({words})"


def test_only_options_that_name_a_part_are_read_as_calls():
    (mask,) = flags.study("fedavg(personal=path:block(1|2))")["systems"].values()
    assert mask["options"] == {"personal": "path:block(1|2)"}


@pytest.mark.long
def test_a_comparison_without_a_file_runs_and_goes_on(tmp_path):
    words = [
        "run",
        "--systems",
        "local_only(lr=0.1), fedavg(lr=0.1)",
        "--dataset",
        "digits",
        "--partition",
        "iid",
        "--clients",
        "8",
    ]
    words += ["--rounds", "1", "--model", "logistic", "--out", str(tmp_path / "run")]
    first = invoke(*words)
    assert first.exit_code == 0, first.output
    assert "iid on digits, 8 clients" in " ".join(first.output.split()) and "local_only(lr=0.1)" in first.output
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    again = invoke(*words)
    assert again.exit_code == 0 and (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    other = invoke(*[word.replace("fedavg(lr=0.1)", "fedavg(lr=0.2)") for word in words])
    assert (other.exit_code, "fedavg.options.lr was 0.1 and is 0.2 now" in other.output) == (1, True)


def test_a_place_in_a_list_and_names_of_values():
    tree = {"a": [{"b": 1}, {"b": 2}]}
    files.put(tree, "a.1.b", 5)
    assert tree == {"a": [{"b": 1}, {"b": 5}]}
    with pytest.raises(ValueError, match=r"'a\.2\.b': 2 must be a place in a list, from 0 to 1"):
        files.put(tree, "a.2.b", 5)
    made = files.expanded(
        "systems", {"s": {"each": {"federation.attack": [{"no one": None}, {"x10": {"name": "ipm", "scale": 10}}]}}}
    )
    assert list(made) == ["s-no_one", "s-x10"] and made["s-no_one"]["federation"] == {"attack": None}
    assert made["s-x10"] == {"federation": {"attack": {"name": "ipm", "scale": 10}}, "title": "s, attack x10"}


NORMED = models.mtfl_mlp(inputs=5, classes=3)
COMPOSITIONS = {
    "fedmeta_per(estimator={name: implicit, prox_weight: 2.0}, batch_size=null)": (problems.task(), "head"),
    "fedmeta_per(estimator=first_order)": (problems.task(), "head"),
    "fedmeta_per(estimator=hessian_free)": (problems.task(), "head"),
    "fedmeta_metasgd(personal=head+bn_affine)": (NORMED, "head+bn_affine"),
    "fedmeta_metasgd(personal_rates=all)": (problems.task(), "none"),
    "fedmeta_per_metasgd(server_optimizer=adam, server_lr=0.01)": (problems.task(), "head"),
    "fedper(weighting=uniform, participation={name: unreliable, late: 0.1, crashed: 0.1}, "
    "uploads=[{name: quantize, bits: 8}, {name: clip, norm: 1.0}, {name: noise, multiplier: 0.5}, mask])": (
        problems.task(),
        "head",
    ),
    "fedper(aggregator=trimmed_mean:share=0.2, participation={name: stragglers, share: 0.5, epochs: 5})": (
        problems.task(),
        "head",
    ),
    "fedper(participation={name: deadline, seconds: [2, 2, 2, 2, 2, 2, 2], limit: 1, partial: true})": (
        problems.task(),
        "head",
    ),
    "reptile(personal=bn, weighting=samples, server_optimizer=momentum, server_lr=0.1)": (NORMED, "bn"),
    "perfedavg_exact(learned_rates=true, personal=head, personal_rates=all)": (problems.task(), "head"),
    "imaml(personal=head)": (problems.task(), "head"),
    "mamlpp(step_weights={name: annealed, rounds: 20}, inner_steps=2, personal=head)": (problems.task(), "head"),
}


@pytest.mark.parametrize("text", COMPOSITIONS)
def test_a_composition_keeps_the_form_of_its_state_and_has_the_wanted_personal_leaves(text):
    # Traced, not compiled: the tests of the parts check what a round computes.
    task, personal = COMPOSITIONS[text]
    study = load(None, ["federation.cohort_size=3"], systems=text)
    (name,) = study.systems
    algorithm, key, data = study.system(name).build(task), jax.random.key(0), problems.data()
    before = jax.eval_shape(algorithm.init, key, data)
    after, _ = jax.eval_shape(algorithm.round, key, before, data)
    assert problems.forms(before) == problems.forms(after)
    own = before.personal if "rates" not in getattr(before.personal, "_fields", ()) else before.personal[0]
    wanted = masks.split(masks.variables_shape(task), masks.resolve(personal, task))[0]
    assert jax.tree.structure(own) == jax.tree.structure(wanted)


def test_systems_that_differ_in_their_grids_alone_are_told_apart():
    made = flags.study("fedavg(lr=[0.03, 0.1]), fedavg, fedavg(lr=[0.3]), fedper")
    titles = [one["title"] for one in made["systems"].values()]
    assert titles == ["fedavg", "fedavg (2)", "fedavg (3)", "fedper"] and len(from_tree(made).systems) == 4
