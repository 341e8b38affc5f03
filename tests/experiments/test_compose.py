"""The composer: what it builds, and its error messages."""

import jax
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import models
from tests import problems

typer_testing = pytest.importorskip("typer.testing", reason="the command line needs typer")
compose = pytest.importorskip("experiments.compose", reason="the command line needs typer, rich and matplotlib")

RUNNER = typer_testing.CliRunner()
COMMON = {"federation": {"cohort_size": 3}, "devices": 1}
NORMED = models.mtfl_mlp(inputs=5, classes=3)

# (task, parts, which leaves must be personal)
COMPOSITIONS = {
    "FedMeta-Per x iMAML": (
        problems.task(),
        {"algorithm": "fedmeta_per", "estimator": "implicit", "batch_size": None},
        "head",
    ),
    "FedMeta-Per x FOMAML": (problems.task(), {"algorithm": "fedmeta_per", "estimator": "first_order"}, "head"),
    "FedMeta-Per x Reptile": (problems.task(), {"algorithm": "fedmeta_per", "estimator": "reptile"}, "head"),
    "FedMeta-Per x Hessian-free": (problems.task(), {"algorithm": "fedmeta_per", "estimator": "hessian_free"}, "head"),
    "private batch norms": (NORMED, {"algorithm": "fedmeta", "personal": "bn"}, "bn"),
    "private batch norms and head": (NORMED, {"algorithm": "fedmeta_metasgd", "personal": "head+bn_affine"}, "head+bn_affine"),
    "private rates": (problems.task(), {"algorithm": "fedmeta_metasgd", "personal_rates": "all"}, "none"),
    "shared rates": (
        problems.task(), {"algorithm": "fedmeta_metasgd", "personal": "head", "personal_rates": "none"}, "head",
    ),
    "server Adam": (problems.task(), {"algorithm": "fedmeta_per_metasgd", "server_optimizer": "adam:0.01"}, "head"),
    "robust, compressed and private": (
        problems.task(),
        {
            "algorithm": "fedper",
            "federation": {"cohort_size": 3, "weighting": "uniform"},
            "unreliable": {"late": 0.1, "crashed": 0.1},
            "uploads": {"noise": 0.5, "clip": 1.0, "quantize": 8, "mask": 16},
        },
        "head",
    ),
    "trimmed mean": (problems.task(), {"algorithm": "fedper", "aggregator": "trimmed_mean:0.2"}, "head"),
    "trimmed mean, stragglers": (
        problems.task(),
        {"algorithm": "fedper", "aggregator": "trimmed_mean:share=0.2", "participation": "stragglers:share=0.5,epochs=5"},
        "head",
    ),
    "deadline": (
        problems.task(), {"algorithm": "fedper", "participation": f"deadline:seconds={[2.0] * 7},limit=1,partial=True"}, "head",
    ),
    "Reptile, weights, momentum, batch norms": (
        NORMED,
        {"algorithm": "reptile", "weighting": "samples", "server_optimizer": "momentum:0.1", "personal": "bn"},
        "bn",
    ),
    "Per-FedAvg with private rates and head": (
        problems.task(),
        {"algorithm": "perfedavg_exact", "learned_rates": True, "personal": "head", "personal_rates": "all"},
        "head",
    ),
    "iMAML with a private head": (problems.task(), {"algorithm": "imaml", "personal": "head"}, "head"),
    "Per-FedAvg-Reptile with private batch norms": (NORMED, {"algorithm": "perfedavg_reptile", "personal": "bn"}, "bn"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_composition_keeps_the_form_of_its_state_and_has_the_wanted_personal_leaves(name):
    # Traced, not compiled: the tests of the parts check what a round computes.
    task, parts, personal = COMPOSITIONS[name]
    algorithm = compose.compose(task, **{**COMMON, **parts})
    key, data = jax.random.key(0), problems.data()
    before = jax.eval_shape(algorithm.init, key, data)
    after, _ = jax.eval_shape(algorithm.round, key, before, data)
    assert problems.forms(before) == problems.forms(after)
    own, rates = (before.personal, None) if "rates" not in getattr(before.personal, "_fields", ()) else before.personal
    wanted = fm.masks.split(fm.masks.variables_shape(task), fm.masks.resolve(personal, task))[0]
    assert jax.tree.structure(own) == jax.tree.structure(wanted)
    if parts.get("personal_rates") == "all":
        assert len(jax.tree.leaves(rates)) == len(jax.tree.leaves(fm.masks.variables_shape(task)))
    if parts.get("personal_rates") == "none":
        assert not jax.tree.leaves(rates)
    for client in (2, None):
        variables = jax.eval_shape(
            lambda state, client=client: algorithm.personalize(key, state, data.client(2)["test_support"], client), before
        )
        assert jax.tree.structure(variables) == jax.tree.structure(fm.masks.variables_shape(task))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"algorithm": "fedmetta"}, r"--algorithm='fedmetta' is unknown \(did you mean 'fedmeta'\?\); allowed are afl"),
        ({"algorithm": "fedmeta", "estimator": "magic"}, "--estimator='magic' is unknown; allowed are exact"),
        (
            {"algorithm": "fedmeta", "estimator": "exact", "estimator_options": {"step": 3}},
            r"exact\(\) takes no 'step' \(did you mean 'steps'\?\)",
        ),
        ({"algorithm": "fedmeta", "estimator_options": {"cg_steps": 3}}, "--estimator-set needs --estimator"),
        ({"algorithm": "fedmeta", "outer_optimizer": "newton"}, "--outer-optimizer='newton' is unknown"),
        (
            {"algorithm": "fedmeta", "server_optimizer": "adam:fast"},
            "--server-optimizer 'adam:fast' must read adam:RATE with a number",
        ),
        ({"algorithm": "fedavg", "epoch": 2}, r"fedavg\(\) takes no 'epoch' \(did you mean 'epochs'\?\)"),
        ({"algorithm": "fedavg", "cohort_size": 3}, r"fedavg\(\) takes no 'cohort_size', which belongs to Federation"),
        ({"algorithm": "fedavg", "federation": {"lr": 3}}, r"Federation\(\) takes no 'lr', which belongs to --set"),
        ({"algorithm": "fedavg", "federation": {"uploads": 3}}, "--federation cannot set uploads: use --sparsify"),
        (
            {"algorithm": "fedavg", "server_optimizer": "adam:-1"},
            "--server-optimizer adam: rate=-1.0 must be finite and above 0",
        ),
        ({"algorithm": "fedavg", "aggregator": "middle"}, "--aggregator='middle' is unknown; allowed are mean, median"),
        (
            {"algorithm": "fedavg", "aggregator": "trimmed_mean:shear=0.2"},
            r"takes no 'shear' \(did you mean 'share'\?\); it takes",
        ),
        ({"algorithm": "fedavg", "aggregator": "trimmed_mean:0.7"}, r"--aggregator trimmed_mean: share=0\.7 must lie in"),
        ({"algorithm": "fedavg", "aggregator": "median:0.2"}, "--aggregator median takes no options, not '0.2'"),
        ({"algorithm": "fedavg", "participation": "stragglers:share=0.5"}, "--participation stragglers needs epochs"),
        (
            {"algorithm": "fedavg", "participation": "unreliable:late=2"},
            "--participation unreliable: late=2 must lie between 0 and 1",
        ),
        (
            {"algorithm": "fedavg", "participation": "unreliable:"},
            r"must read unreliable:key=value,key=value; it takes late, crashed",
        ),
        (
            {"algorithm": "fedavg", "participation": "unreliable:late=0.1", "unreliable": {"late": 0.1}},
            "--participation replaces --late and --crashed",
        ),
        ({"algorithm": "fedavg", "uploads": {"noise": 1.0}}, "noise needs a clip before it"),
        ({"algorithm": "fedmeta_metasgd", "estimator": "implicit"}, "implicit_gradient has no gradient for learned rates"),
    ],
    ids=str,
)
def test_a_wrong_part_is_one_line(parts, message):
    with pytest.raises(ValueError, match=message):
        compose.compose(problems.task(), **parts)


@pytest.mark.parametrize("words", [["inner_lr"], ["=3"], ["a=1", "a=2"]], ids=str)
def test_options_must_read_key_value(words):
    with pytest.raises(ValueError, match="must read key=value"):
        compose.assignments(words, "--set")


def test_an_error_on_the_command_line_is_one_line(tmp_path):
    result = RUNNER.invoke(compose.app, ["--protocol", "other", "--out", str(tmp_path / "run")], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "--protocol='other' is unknown" in result.output
    assert not (tmp_path / "run").exists()


def test_a_cohort_that_is_too_large_leaves_no_folder(tmp_path):
    words = ["--federation", "cohort_size=51", "--devices", "1", "--out", str(tmp_path / "run")]
    result = RUNNER.invoke(compose.app, words, env={"COLUMNS": "200"})
    assert (result.exit_code, "cohort_size=51 is more than the N=50" in result.output) == (1, True)
    assert not (tmp_path / "run").exists()


def test_a_composition_runs_on_any_division_of_the_samples(tmp_path):
    words = ["--algorithm", "fedavg", "--dataset", "digits", "--protocol", "dirichlet_classes", "--clients", "10"]
    words += ["--protocol-set", "concentration=0.5", "--protocol-set", "min_samples=10", "--rounds", "1", "--devices", "1"]
    result = RUNNER.invoke(compose.app, [*words, "--out", str(tmp_path / "run")], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())  # the title may be wider than its table
    assert "dirichlet_classes (concentration 0.5, min_samples 10) on digits, 10 clients" in said
    assert "untrained model" in result.output and "majority class" in result.output
    bad = RUNNER.invoke(compose.app, [*words, "--protocol-set", "alpha=1"], env={"COLUMNS": "200"})
    assert bad.exit_code == 1 and "partition dirichlet_classes takes no 'alpha'" in bad.stderr


def test_text_of_the_user_is_shown_as_it_is_in_console_page_and_figure(tmp_path, capsys, monkeypatch):
    """Brackets are no styles, bars no cells, stars no emphasis and dollars no formulas."""
    monkeypatch.setattr(compose.runner, "console", compose.runner.Console(width=300))
    folder = tmp_path / "lr[red]"
    scores = dict.fromkeys(("accuracy", "accuracy_mean", "accuracy_std", "f1_mean"), 50.0)
    series = compose.report.Series("fedavg*", "local", 1, np.array([1, 2]), np.array([40.0, 50.0]), np.full(3, 50.0), scores)
    changes = "personal=path:[a-z]+|b*"
    alone = {"majority class": {"known": np.array([0.25, 0.75]), "new": np.array([0.5])}}
    compose.write_report(folder, "own[bold] $x$ | y: round 2", changes, [series], untrained=alone)
    shown = capsys.readouterr().out
    for text in ("own[bold] $x$ | y: round 2", f"* {changes}", str(folder)):
        assert text in shown
    page = (folder / "report.md").read_text()
    assert r"# own\[bold\] \$x\$ \| y: round 2" in page
    assert r"\* personal=path:\[a-z\]+\|b\*" in page
    assert "| fedavg\\* | local | 50.00 |" in page
    assert "| majority class | local |  | 50.00 ±25.00 |" in page and "No option was tuned" in page
    assert (folder / "figure.png").stat().st_size > 10_000
