"""The runner of compositions: what it builds, and how it says what it cannot."""

import jax
import pytest

import fedjax_meta as fm
from fedjax_meta import models
from tests import problems

typer_testing = pytest.importorskip("typer.testing", reason="the command line needs typer")
compose = pytest.importorskip("experiments.compose", reason="the command line needs typer, rich and matplotlib")

RUNNER = typer_testing.CliRunner()
COMMON = {"cohort_size": 3, "devices": 1}
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
def test_a_composition_keeps_its_state_and_has_the_personal_leaves_that_were_asked_for(name):
    # Traced and not compiled: what a round computes is tested for the parts.
    task, parts, personal = COMPOSITIONS[name]
    algorithm = compose.compose(task, **COMMON, **parts)
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
        ({"algorithm": "fedmetta"}, "--algorithm='fedmetta' is unknown; allowed are fedavg"),
        ({"algorithm": "fedmeta", "estimator": "magic"}, "--estimator='magic' is unknown; allowed are exact"),
        (
            {"algorithm": "fedmeta", "estimator": "exact", "estimator_options": {"cg_steps": 3}},
            "the estimator exact takes no option 'cg_steps'; it takes steps",
        ),
        ({"algorithm": "fedmeta", "estimator_options": {"cg_steps": 3}}, "--estimator-set needs --estimator"),
        ({"algorithm": "fedmeta", "outer_optimizer": "newton"}, "--outer-optimizer='newton' is unknown"),
        ({"algorithm": "fedmeta", "server_optimizer": "adam:fast"}, "--server-optimizer 'fast' must be numbers"),
        ({"algorithm": "fedavg", "inner_lr": 0.1}, "fedavg takes no option 'inner_lr'"),
        ({"algorithm": "fedmeta_metasgd", "estimator": "implicit"}, "implicit has no gradient for learned rates"),
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


def test_the_command_line_says_what_is_wrong_in_one_line(tmp_path):
    result = RUNNER.invoke(compose.app, ["--protocol", "other", "--out", str(tmp_path / "run")], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "--protocol='other' is unknown" in result.output
    assert not (tmp_path / "run").exists()
