"""Checkpoints: exact, atomic, and checked for damage when they are restored."""

import resource
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import checkpoint
from tests.problems import data, leaves_equal, task

CONFIG = {"seed": 3, "rates": {"lr": 0.1}}


class State(NamedTuple):
    model: Any
    empty: Any
    key: Any
    round: Any


def state(done=4, seed=0):
    """A state with every kind of leaf: several dtypes, a typed key, an array of size 0, absent subtrees."""
    rng = np.random.default_rng(seed)
    model = {
        "w": jnp.asarray(rng.normal(size=(300, 7))),
        "b": jnp.asarray(rng.normal(size=7), jnp.bfloat16),
        "seen": jnp.asarray(rng.random(5) < 0.5),
        "absent": None,
    }
    return State(model, {"none": jnp.zeros((0, 3)), "nothing": ()}, jax.random.split(jax.random.key(seed), 2), jnp.int32(done))


def same(a, b):
    plain = lambda tree: jax.tree.map(  # noqa: E731
        lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf, tree
    )
    return leaves_equal(plain(a), plain(b))


def like(state):
    return jax.eval_shape(lambda: state)


def test_restore_returns_what_was_saved(tmp_path):
    records = [{"loss": [0.1, 1 / 3, float("nan")], "name": "ä"}]
    checkpoint.save(tmp_path, state(), records, CONFIG)
    saved = checkpoint.restore(tmp_path, like(state()), CONFIG)
    assert saved is not None
    assert saved.round == 4
    assert same(saved.state, state())
    assert jax.random.key_impl(saved.state.key) == jax.random.key_impl(state().key)
    np.testing.assert_array_equal(saved.records[0]["loss"], records[0]["loss"])
    assert saved.records[0]["name"] == "ä"


def test_restore_is_none_when_nothing_was_saved(tmp_path):
    assert checkpoint.restore(tmp_path / "never", like(state()), CONFIG) is None
    assert checkpoint.latest_round(tmp_path / "never") is None


def test_the_newest_two_are_kept(tmp_path):
    for done in (1, 2, 10, 9):
        checkpoint.save(tmp_path, state(done), [], CONFIG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "9"]
    assert checkpoint.latest_round(tmp_path) == 10


def test_saving_a_round_again_replaces_it(tmp_path):
    checkpoint.save(tmp_path, state(4, seed=0), ["old"], CONFIG)
    checkpoint.save(tmp_path, state(4, seed=1), ["new"], CONFIG)
    saved = checkpoint.restore(tmp_path, like(state()), CONFIG)
    assert saved.records == ["new"]
    assert same(saved.state, state(4, seed=1))


@pytest.mark.parametrize("name", ["fedmeta_per_metasgd", "fedper"])
def test_a_resumed_run_equals_an_uninterrupted_one(name, tmp_path):
    method, key = fm.federate(fm.METHODS[name](task())), jax.random.key(5)
    whole, _ = fm.simulate(method, data(), key=key, rounds=5, eval_every=2)

    def stop(state, record):
        checkpoint.save(tmp_path, state, [record.round], CONFIG)
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fm.simulate(method, data(), key=key, rounds=5, eval_every=2, on_record=stop)
    saved = checkpoint.restore(tmp_path, jax.eval_shape(method.init, key, data()), CONFIG)
    assert saved.records == [2]
    resumed, _ = fm.simulate(method, data(), key=key, rounds=5, eval_every=2, state=saved.state)
    assert leaves_equal(resumed, whole)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"seed": 4, "rates": {"lr": 0.1}}, "seed was 3 .* is 4 now"),
        ({"seed": 3, "rates": {"lr": 0.2}}, r"rates\.lr was 0\.1 .* is 0\.2 now"),
        ({"seed": 3, "rates": {"lr": 0.1}, "extra": 1}, "extra was 'nothing'"),
        ({"seed": 3}, r"rates\.lr was 0\.1 .* is 'nothing'"),
    ],
)
def test_another_config_is_refused_with_the_field(change, expected, tmp_path):
    checkpoint.save(tmp_path, state(), [], CONFIG)
    with pytest.raises(ValueError, match=f"cannot resume: {expected}"):
        checkpoint.restore(tmp_path, like(state()), change)


def test_tuples_and_lists_of_a_config_are_the_same(tmp_path):
    checkpoint.save(tmp_path, state(), [], {"rates": (1, 2)})
    assert checkpoint.restore(tmp_path, like(state()), {"rates": (1, 2)}) is not None


def test_a_state_of_another_structure_is_refused(tmp_path):
    checkpoint.save(tmp_path, state(), [], CONFIG)
    other = state()._replace(model={"w": state().model["w"]})
    with pytest.raises(ValueError, match=r"another structure: .model\['b'\] does not belong there"):
        checkpoint.restore(tmp_path, like(other), CONFIG)
    other = state()._replace(empty={"none": jnp.zeros((0, 3)), "nothing": jnp.zeros(2)})
    with pytest.raises(ValueError, match=r"another structure: .empty\['nothing'\] is missing"):
        checkpoint.restore(tmp_path, like(other), CONFIG)


def test_a_state_of_another_shape_or_dtype_is_refused_with_the_leaf(tmp_path):
    checkpoint.save(tmp_path, state(), [], CONFIG)
    for name, leaf, message in (
        ("w", jnp.zeros((300, 8)), r".model\['w'\] is float64\[300, 7\], not float64\[300, 8\]"),
        ("b", jnp.zeros(7), r".model\['b'\] is bfloat16\[7\], not float64\[7\]"),
    ):
        other = state()._replace(model={**state().model, name: leaf})
        with pytest.raises(ValueError, match=f"cannot resume: .* holds another state: {message}"):
            checkpoint.restore(tmp_path, like(other), CONFIG)


def damage_cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def damage_remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [damage_cut, damage_flip, damage_remove])
def test_damage_is_reported_and_the_checkpoint_before_is_used(damage, tmp_path):
    """For each file of the newest checkpoint: a line names the damaged file, and the checkpoint before it is restored."""
    checkpoint.save(tmp_path, state(1, seed=1), ["one"], CONFIG)
    newest = checkpoint.save(tmp_path, state(2, seed=2), ["two"], CONFIG)
    victims = [path for path in newest.rglob("*") if path.is_file() and path.stat().st_size > 0]
    assert len(victims) > 2
    for victim in victims:
        content = victim.read_bytes()
        damage(victim)
        lines = []
        saved = checkpoint.restore(tmp_path, like(state()), CONFIG, on_damage=lines.append)
        assert (saved.round, saved.records) == (1, ["one"])
        assert same(saved.state, state(1, seed=1))
        assert len(lines) == 1
        assert str(victim) in lines[0]
        assert "resuming from the earlier round 1" in lines[0]
        victim.write_bytes(content)
    assert checkpoint.restore(tmp_path, like(state()), CONFIG).records == ["two"]


def test_damage_is_a_warning_without_on_damage(tmp_path):
    checkpoint.save(tmp_path, state(1), [], CONFIG)
    damage_cut(checkpoint.save(tmp_path, state(2), [], CONFIG) / "run.json")
    with pytest.warns(UserWarning, match="damaged checkpoint"):
        assert checkpoint.restore(tmp_path, like(state()), CONFIG).round == 1


def test_the_error_says_what_to_do_when_all_checkpoints_are_damaged(tmp_path):
    damage_cut(checkpoint.save(tmp_path, state(1), [], CONFIG) / "run.json")
    with pytest.raises(ValueError, match=r"no intact one is left: delete .* to start this run again"):
        checkpoint.restore(tmp_path, like(state()), CONFIG)


def test_a_half_written_checkpoint_is_ignored(tmp_path):
    checkpoint.save(tmp_path, state(1), [], CONFIG)
    half = tmp_path / ".writing"
    half.mkdir()
    (half / "run.json").write_text("half")
    assert checkpoint.restore(tmp_path, like(state()), CONFIG).round == 1
    checkpoint.save(tmp_path, state(2), [], CONFIG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@pytest.fixture
def no_space():
    """Limits files to 2,000 bytes: a write beyond that fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_line_and_damages_nothing(tmp_path, request):
    checkpoint.save(tmp_path / "run", state(1), ["kept"], CONFIG)
    checkpoint.write_text(tmp_path / "metrics.json", "old")
    request.getfixturevalue("no_space")
    for attempt in (state(2), state(1)):
        with pytest.raises(OSError, match=r"could not save round . to .*; earlier checkpoints are intact") as caught:
            checkpoint.save(tmp_path / "run", attempt, ["lost"], CONFIG)
        assert "\n" not in str(caught.value)
    with pytest.raises(OSError, match="could not write"):
        checkpoint.write_text(tmp_path / "metrics.json", "x" * 5000)
    assert (tmp_path / "metrics.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.json", "run"]
    saved = checkpoint.restore(tmp_path / "run", like(state()), CONFIG)
    assert (saved.round, saved.records) == (1, ["kept"])


def test_bad_records_and_counts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        checkpoint.save(tmp_path, state(), [np.zeros(3)], CONFIG)
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.save(tmp_path, state(), [], CONFIG, keep=0)
