"""Checkpoints: exact, atomic, on the disk, and checked for damage when they are written and restored."""

import contextlib
import errno
import hashlib
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import checkpoint, disk
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
    assert checkpoint.saved_rounds(tmp_path / "never") == []


def test_the_newest_two_are_kept(tmp_path):
    for done in (1, 2, 10, 9):
        checkpoint.save(tmp_path, state(done), [], CONFIG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10.ckpt", "9.ckpt"]
    assert checkpoint.saved_rounds(tmp_path)[-1] == 10


@pytest.mark.parametrize(("keep", "left"), [(1, ["3"]), (2, ["10", "3"]), (3, ["10", "2", "3"]), (9, ["10", "2", "3"])])
def test_an_older_round_than_the_newest_is_not_removed_by_its_own_saving(keep, left, tmp_path):
    for done in (2, 10):
        checkpoint.save(tmp_path, state(done), [], CONFIG)
    assert checkpoint.save(tmp_path, state(3), [], CONFIG, keep=keep).is_file()
    assert sorted(path.stem for path in tmp_path.iterdir()) == left


def test_so_many_are_kept(tmp_path):
    for done in range(1, 11):
        checkpoint.save(tmp_path, state(done), [], CONFIG, keep=4)
        assert len(list(tmp_path.iterdir())) == min(done, 4)
    assert {int(path.stem) for path in tmp_path.iterdir()} == {7, 8, 9, 10}


@pytest.mark.parametrize("name", ["lr[0.1]", "a*b", "what?", "{x,y}", "a\\b", "[!a]", "naïve 名", " ", "%s", "~", "$HOME"])
def test_any_path_works(name, tmp_path):
    """Also those that are patterns for a shell or for a library of file systems."""
    for done in (1, 2, 3):
        checkpoint.save(tmp_path / name / "deeper", state(done), [done], CONFIG)
    saved = checkpoint.restore(tmp_path / name / "deeper", like(state()), CONFIG)
    assert (saved.round, saved.records) == (3, [3])
    assert same(saved.state, state(3))
    assert sorted(path.name for path in (tmp_path / name / "deeper").iterdir()) == ["2.ckpt", "3.ckpt"]


def test_arrays_of_numpy_are_mapped(tmp_path):
    """Rows of a host store: also those that are not contiguous, of other types, or maps themselves."""
    rng = np.random.default_rng(0)
    rows = {"a": rng.normal(size=(100, 7)), "b": rng.normal(size=(20, 9)).T, "c": np.zeros((0, 4)), "d": np.arange(5) > 2}
    rows["e"] = np.asarray(jnp.arange(6, dtype=jnp.bfloat16))
    given = State(rows, (), jax.random.key(0), jnp.int32(1))
    for _ in range(2):  # the second time from maps
        checkpoint.save(tmp_path, given, [], CONFIG)
        saved = checkpoint.restore(tmp_path, like(state())._replace(model=rows, empty=(), key=jax.random.key(0)), CONFIG)
        for name, values in rows.items():
            found = saved.state.model[name]
            assert isinstance(found, np.memmap if values.size else np.ndarray)
            assert (found.dtype, found.shape) == (values.dtype, values.shape)
            np.testing.assert_array_equal(np.asarray(found), values)
        assert not saved.state.model["a"].flags.writeable
        given = saved.state


@pytest.mark.parametrize(
    ("order", "spec"), [((0, 1), "rows"), ((1, 0), "rows"), ((0, 1), "columns"), ((0, 1), "copies")], ids=str
)
def test_a_file_does_not_depend_on_where_the_arrays_are(order, spec, tmp_path):
    """Rows or columns spread over the devices, in either order, or a copy on each of them."""
    mesh = jax.sharding.Mesh(np.array(jax.devices())[list(order)], ("devices",))
    axes = {"rows": ("devices",), "columns": (None, "devices"), "copies": ()}[spec]
    rows = np.random.default_rng(0).normal(size=(10, 6))
    given = State({"w": jnp.asarray(rows)}, (), jax.random.split(jax.random.key(3), 2), jnp.int32(1))
    spread = jax.device_put(given.model["w"], jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))
    files = [
        checkpoint.save(tmp_path / name, given._replace(model={"w": leaf}), [], CONFIG).read_bytes()
        for name, leaf in (("one", given.model["w"]), ("spread", spread))
    ]
    assert len(spread.addressable_shards) == 2
    assert files[0] == files[1]
    assert rows.tobytes() in files[1]


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


def test_an_empty_mapping_is_no_field_where_the_other_side_has_some():
    def words(saved, given):
        return [f"{name}: {old!r}, {new!r}" for name, old, new in checkpoint.differences(saved, given)]

    filled, empty = {"a": {"b": {"c": 3}}}, {"a": {}}
    assert words(empty, filled) == ["a.b.c: not set, 3"] and words(filled, empty) == ["a.b.c: 3, not set"]
    assert words(empty, {}) == ["a: {}, not set"] and words(empty, {"a": None}) == ["a: {}, None"]
    assert words({"a": 5}, filled) == ["a: 5, not set", "a.b.c: not set, 3"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"seed": 4, "rates": {"lr": 0.1}}, "seed was 3 .* is 4 now"),
        ({"seed": 3, "rates": {"lr": 0.2}}, r"rates\.lr was 0\.1 .* is 0\.2 now"),
        ({"seed": 3, "rates": {"lr": 0.1}, "extra": 1}, "extra was not set"),
        ({"seed": 3}, r"rates\.lr was 0\.1 .* is not set"),
    ],
)
def test_another_config_is_refused_with_the_field(change, expected, tmp_path):
    checkpoint.save(tmp_path, state(), [], CONFIG)
    with pytest.raises(ValueError, match=f"cannot resume: {expected}"):
        checkpoint.restore(tmp_path, like(state()), change)


def test_tuples_and_lists_of_a_config_are_the_same(tmp_path):
    checkpoint.save(tmp_path, state(), [], {"rates": (1, 2)})
    assert checkpoint.restore(tmp_path, like(state()), {"rates": (1, 2)}) is not None


def test_numbers_of_python_come_back_as_they_are_in_a_program(tmp_path):
    state = Plain(jnp.ones(2), 3, 0.5)
    checkpoint.save(tmp_path, state, [], {})
    for like in (state, jax.eval_shape(lambda: state)):
        back = checkpoint.restore(tmp_path, like, {}).state
        assert (int(back.round), float(back.rate)) == (3, 0.5)
        assert jax.tree.map(lambda leaf: leaf.dtype, back) == jax.tree.map(lambda leaf: jnp.asarray(leaf).dtype, state)


class Plain(NamedTuple):
    w: jax.Array
    round: int
    rate: float


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


def test_a_random_key_and_its_words_are_different_states(tmp_path):
    class Round(NamedTuple):
        round: Any
        key: Any

    checkpoint.save(tmp_path, Round(jnp.int32(1), jax.random.key(0)), [], CONFIG)
    for other in (jnp.zeros(2, jnp.uint32), jnp.zeros(2, jnp.float32), jax.random.key(0, impl="rbg")):
        with pytest.raises(ValueError, match="cannot resume"):
            checkpoint.restore(tmp_path, Round(jnp.int32(1), other), CONFIG)


def damage_cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_remove(path):
    path.write_bytes(b"")


def damage_of_another_run(path):
    path.write_bytes(path.with_name("1.ckpt").read_bytes())


@pytest.mark.parametrize("damage", [damage_cut, damage_remove, damage_of_another_run])
def test_damage_is_reported_and_the_checkpoint_before_is_used(damage, tmp_path):
    checkpoint.save(tmp_path, state(1, seed=1), ["one"], CONFIG)
    newest = checkpoint.save(tmp_path, state(2, seed=2), ["two"], CONFIG)
    damage(newest)
    lines = []
    saved = checkpoint.restore(tmp_path, like(state()), CONFIG, on_damage=lines.append)
    assert (saved.round, saved.records) == (1, ["one"])
    assert same(saved.state, state(1, seed=1))
    assert len(lines) == 1
    assert str(newest) in lines[0]
    assert "resuming from the earlier round 1" in lines[0]


def test_no_flipped_bit_goes_unseen(tmp_path):
    """Any bit of any byte: the checkpoint counts as damaged, or the bit is one of the zeros that fill up to multiples of 64."""
    small = State({"w": jnp.arange(3.0)}, (), jax.random.key(1), jnp.int32(2))
    checkpoint.save(tmp_path, small._replace(round=jnp.int32(1)), ["one"], CONFIG)
    newest = checkpoint.save(tmp_path, small, ["two"], CONFIG)
    content = newest.read_bytes()
    unseen = 0
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        newest.write_bytes(changed)
        lines = []
        saved = checkpoint.restore(tmp_path, like(small), CONFIG, on_damage=lines.append)
        assert saved.records == (["one"] if lines else ["two"])
        assert lines or content[place] == 0
        assert same(saved.state._replace(round=small.round), small)
        unseen += not lines
    assert unseen < 3 * 64


def test_damage_is_a_warning_without_on_damage(tmp_path):
    checkpoint.save(tmp_path, state(1), [], CONFIG)
    damage_cut(checkpoint.save(tmp_path, state(2), [], CONFIG))
    with pytest.warns(UserWarning, match="damaged checkpoint"):
        assert checkpoint.restore(tmp_path, like(state()), CONFIG).round == 1


def test_the_error_says_what_to_do_when_all_checkpoints_are_damaged(tmp_path):
    damage_cut(checkpoint.save(tmp_path, state(1), [], CONFIG))
    with pytest.raises(ValueError, match=r"no intact one is left: delete .* to start this run again"):
        checkpoint.restore(tmp_path, like(state()), CONFIG)


def dead_process():
    """The id of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_what_dead_writers_left_is_ignored_and_removed(tmp_path):
    checkpoint.save(tmp_path, state(1), [], CONFIG)
    left = tmp_path / f".2.ckpt.{disk._PROCESSES}-{dead_process()}-0123abcd.writing"
    other = tmp_path / f".2.ckpt.{disk._PROCESSES}-{os.getppid()}-0123abcd.writing"  # of a process that lives
    elsewhere = tmp_path / f".2.ckpt.{'0' * 8}-{dead_process()}-0123abcd.writing"  # of another machine
    own = tmp_path / ".2.ckpt.notes"
    for path in (left, other, elsewhere, own):
        path.write_text("half")
    assert checkpoint.restore(tmp_path, like(state()), CONFIG).round == 1
    checkpoint.save(tmp_path, state(2), [], CONFIG)
    assert {path.name for path in tmp_path.iterdir()} == {"1.ckpt", "2.ckpt", other.name, elsewhere.name, own.name}
    metrics = tmp_path / "metrics.json"
    left = tmp_path / f".metrics.json.{disk._PROCESSES}-{dead_process()}-0123abcd.writing"
    left.write_text("half")
    disk.write_text(metrics, "whole")
    assert metrics.read_text() == "whole"
    assert not left.exists()


def test_what_another_users_process_writes_is_left_alone(tmp_path, monkeypatch):
    """Such a process can be told nothing, not even whether it lives."""

    def forbidden(process, signal):
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)
    other = tmp_path / f".metrics.json.{disk._PROCESSES}-{os.getppid()}-0123abcd.writing"
    other.write_text("half")
    disk.write_text(tmp_path / "metrics.json", "whole")
    assert other.exists()


# Formats.


def first_line(number):
    text = f"fedjax_meta checkpoint, format {number}"
    return f"{text}, {hashlib.sha256(text.encode()).hexdigest()[:16]}\n"


def test_another_format_is_refused_by_its_number(tmp_path):
    """Whatever follows the first line, which carries a digest of its own: other formats need not look like this one."""
    checkpoint.save(tmp_path, state(1), [], CONFIG)
    line = first_line(checkpoint.FORMAT + 3)
    for rest in (b"", b"something else"):
        (tmp_path / "2.ckpt").write_bytes(line.encode() + rest)
        with pytest.raises(ValueError, match=r"2.ckpt was written by another .* \(format 8; .* format 5\)"):
            checkpoint.restore(tmp_path, like(state()), CONFIG)
    # The same number without its digest is damage.
    (tmp_path / "2.ckpt").write_text(line.replace("8", "9"))
    with pytest.warns(UserWarning, match=r"damaged checkpoint: .*2.ckpt has changed"):
        assert checkpoint.restore(tmp_path, like(state()), CONFIG).round == 1


# Large states, saved in part.


@pytest.fixture
def in_part(monkeypatch):
    """Pieces of 1,024 bytes, and every state counts as large."""
    monkeypatch.setattr(checkpoint, "_LARGE", 1)
    monkeypatch.setattr(checkpoint, "_PIECE", 1024)


def clients(place, size=(1000, 4)):
    """The rows of clients, 32 bytes each, in NumPy as in a host store or on a device."""
    return place(np.random.default_rng(0).normal(size=size))


def of_clients(rows, done):
    return State({"w": rows}, jnp.arange(3.0), jax.random.key(0), jnp.int32(done))


PLACES = pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["host", "device"])


def changed(rows, ids):
    if isinstance(rows, jax.Array):
        return rows.at[jnp.asarray(ids)].add(1.0)
    rows = np.array(rows)
    rows[ids] += 1.0
    return rows


@PLACES
def test_of_a_large_state_only_what_changed_is_written(place, in_part, tmp_path):
    start = clients(place)
    whole = checkpoint.save(tmp_path, of_clients(start, 1), [], CONFIG, keep=1).stat().st_size
    rows = changed(start, [0, 500, 999])
    part = checkpoint.save(tmp_path, of_clients(rows, 2), ["two"], CONFIG, keep=1)
    # Three pieces and the small arrays, beside the JSON text; what it needs of round 1 stays.
    assert part.stat().st_size < whole - 32000 + 3 * 1024 + 500
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.ckpt", "2.ckpt"]
    saved = checkpoint.restore(tmp_path, of_clients(start, 0), CONFIG)
    assert (saved.round, saved.records) == (2, ["two"])
    assert same(saved.state, of_clients(rows, 2))
    if place is np.asarray:
        assert isinstance(saved.state.model["w"], np.memmap)
        assert not saved.state.model["w"].flags.writeable
    # What is restored is saved again, and what was restored before stays as it was.
    again = changed(saved.state.model["w"], [7])
    checkpoint.save(tmp_path, of_clients(again, 3), [], CONFIG, keep=1)
    assert same(checkpoint.restore(tmp_path, of_clients(start, 0), CONFIG).state, of_clients(again, 3))
    assert same(saved.state, of_clients(rows, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.ckpt", "3.ckpt"]


def test_a_small_state_is_a_file_of_its_own(tmp_path):
    checkpoint.save(tmp_path, of_clients(clients(np.asarray), 1), [], CONFIG, keep=1)
    path = checkpoint.save(tmp_path, of_clients(clients(np.asarray), 2), [], CONFIG, keep=1)
    assert list(tmp_path.iterdir()) == [path]
    assert clients(np.asarray).tobytes() in path.read_bytes()


def test_a_whole_checkpoint_follows_when_half_has_changed(in_part, tmp_path):
    """Then the old base goes; where all rows have changed there is nothing to refer to."""
    rows = clients(np.asarray)
    checkpoint.save(tmp_path, of_clients(rows, 1), [], CONFIG, keep=1)
    cases = [
        (2, 200, {1, 2}),
        (3, 400, {1, 3}),
        (4, 700, {1, 4}),
        (5, 0, {5}),
        (6, 100, {5, 6}),
        (7, 1000, {7}),
        (8, 0, {7, 8}),
    ]
    for done, count, left in cases:
        rows = changed(rows, np.arange(count))
        checkpoint.save(tmp_path, of_clients(rows, done), [], CONFIG, keep=1)
        assert {int(path.stem) for path in tmp_path.iterdir()} == left
        assert same(checkpoint.restore(tmp_path, of_clients(rows, 0), CONFIG).state, of_clients(rows, done))


@pytest.mark.parametrize("seed", range(10))
def test_any_history_of_saves_restores_what_was_saved_last(seed, in_part, tmp_path):
    """Rounds that go on and back, any share of changed rows, other shapes, any number kept; each kept one is whole."""
    rng = np.random.default_rng(seed)
    rows, saved = clients(np.asarray), {}
    for _ in range(12):
        if rng.random() < 0.15:
            rows = clients(np.asarray, (int(rng.integers(1, 1500)), 4))
        ids = rng.choice(len(rows), int(rng.choice([0, 1, 3, len(rows) // 2, len(rows)])), replace=False)
        rows = changed(rows, ids)
        done, keep = int(rng.integers(1, 30)), int(rng.integers(1, 4))
        before = {int(path.stem) for path in tmp_path.iterdir()}
        checkpoint.save(tmp_path, of_clients(rows, done), [done], CONFIG, keep=keep)
        if (
            done in before
        ):  # another content under an old name: what referred to it may be damaged, and is never taken for whole
            for path in list(tmp_path.iterdir()):
                if int(path.stem) != done:
                    path.unlink()
            saved = {}
            checkpoint.save(tmp_path, of_clients(rows, done), [done], CONFIG, keep=keep)
        saved[done] = rows
        newest = checkpoint.saved_rounds(tmp_path)[-1]
        found = checkpoint.restore(tmp_path, of_clients(saved[newest], 0), CONFIG, on_damage=pytest.fail)
        assert found.records == [newest]
        assert same(found.state, of_clients(saved[newest], newest))


def test_where_the_rows_are_makes_no_difference_to_the_pieces(in_part, tmp_path):
    """Rows spread over two devices, whose parts end within a piece."""
    mesh = jax.sharding.Mesh(np.array(jax.devices())[:2], ("devices",))
    rows = clients(jnp.asarray, (1002, 3))
    spread = jax.device_put(rows, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices")))
    assert spread.addressable_shards[0].data.nbytes % 1024
    one, two = (checkpoint.save(tmp_path / n, of_clients(r, 1), [], CONFIG) for n, r in (("one", rows), ("two", spread)))
    assert one.read_bytes() == two.read_bytes()
    path = checkpoint.save(tmp_path / "one", of_clients(spread, 2), [], CONFIG)
    assert path.stat().st_size < one.stat().st_size - 20000


def damage_byte(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_damaged_base_is_found_when_it_is_used_and_a_whole_checkpoint_is_written(in_part, tmp_path):
    rows = clients(np.asarray)
    base = checkpoint.save(tmp_path, of_clients(rows, 1), [], CONFIG, keep=1)
    damage_byte(base, 5000)
    checkpoint.save(tmp_path, of_clients(changed(rows, [3]), 2), [], CONFIG, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["2.ckpt"]
    assert same(checkpoint.restore(tmp_path, of_clients(rows, 0), CONFIG).state, of_clients(changed(rows, [3]), 2))


@pytest.mark.parametrize(
    "damage", [lambda path: damage_byte(path, 5000), damage_cut, Path.unlink], ids=["byte", "cut", "lost"]
)
def test_damage_of_a_base_is_reported_with_its_name(damage, in_part, tmp_path):
    rows = clients(np.asarray)
    base = checkpoint.save(tmp_path, of_clients(rows, 1), [], CONFIG, keep=1)
    checkpoint.save(tmp_path, of_clients(changed(rows, [3]), 2), [], CONFIG, keep=1)
    damage(base)
    with pytest.raises(
        ValueError, match=r"damaged checkpoint: .*2.ckpt needs .*1.ckpt, which (has changed|cannot be read).*no intact"
    ):
        checkpoint.restore(tmp_path, of_clients(rows, 0), CONFIG)


def fails_to_open(monkeypatch, file, times=1, code=errno.EIO):
    """Opening a file fails so often."""
    left, whole = [times], Path.open

    def opened(self, *arguments, **options):
        if self.name == file and left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code), str(self))
        return whole(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", opened)


def test_a_base_stays_when_it_is_not_known_who_needs_it(in_part, tmp_path, monkeypatch):
    """A passing error while the kept checkpoint is read: nothing is removed."""
    rows = clients(np.asarray)
    for done in (1, 2):
        checkpoint.save(tmp_path, of_clients(changed(rows, [done]), done), [], CONFIG, keep=1)
    fails_to_open(monkeypatch, "3.ckpt", code=errno.EMFILE)
    checkpoint.save(tmp_path, of_clients(changed(rows, [3]), 3), [], CONFIG, keep=1)
    assert {int(path.stem) for path in tmp_path.iterdir()} == {1, 2, 3}
    assert checkpoint.restore(tmp_path, of_clients(rows, 0), CONFIG, on_damage=pytest.fail).round == 3


def test_a_base_that_cannot_be_read_does_not_keep_a_state_from_being_saved(in_part, tmp_path, monkeypatch):
    rows = clients(np.asarray)
    checkpoint.save(tmp_path, of_clients(rows, 1), [], CONFIG, keep=1)
    base, whole = tmp_path / "1.ckpt", checkpoint._digest_at

    def read(file, *arguments):
        if file.name == str(base):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(base))
        return whole(file, *arguments)

    monkeypatch.setattr(checkpoint, "_digest_at", read)
    checkpoint.save(tmp_path, of_clients(changed(rows, [3]), 2), [], CONFIG, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["2.ckpt"]
    assert same(checkpoint.restore(tmp_path, of_clients(rows, 0), CONFIG).state, of_clients(changed(rows, [3]), 2))


def test_a_base_is_of_an_earlier_round(in_part, tmp_path):
    """A run that went back keeps the round that it saved, and nothing that comes later."""
    rows = clients(np.asarray)
    checkpoint.save(tmp_path, of_clients(rows, 10), [], CONFIG)
    checkpoint.save(tmp_path, of_clients(changed(rows, [3]), 3), ["three"], CONFIG, keep=1)
    assert checkpoint.restore(tmp_path, of_clients(rows, 0), CONFIG).records == ["three"]


def test_rows_that_did_not_change_are_mapped_where_they_are(in_part, tmp_path):
    """Also where the last piece is a short one."""
    rows = clients(np.asarray)
    assert rows.nbytes % 1024
    for done in (1, 2):
        checkpoint.save(tmp_path, of_clients(rows, done), [], CONFIG, keep=1)
    found = checkpoint.restore(tmp_path, of_clients(rows, 0), CONFIG)
    assert (found.round, Path(found.state.model["w"].filename)) == (2, tmp_path / "1.ckpt")


def test_a_disk_without_room_to_put_rows_together_is_no_damage(in_part, tmp_path, monkeypatch):
    rows = clients(np.asarray)
    for done in (1, 2):
        checkpoint.save(tmp_path, of_clients(changed(rows, [done]), done), [], CONFIG, keep=1)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"2.ckpt is intact, but restoring it needs 32,000 bytes in .*: No space left"):
            checkpoint.restore(tmp_path, of_clients(rows, 0), CONFIG, on_damage=pytest.fail)
    assert checkpoint.restore(tmp_path, of_clients(rows, 0), CONFIG).round == 2


# Dying, and full disks.


WRITES = ("open", "write", "fsync", "close", "replace", "mkdir", "unlink", "listdir")
"""The functions of `os` through which `disk` changes files."""


def rows(done):
    """A state of NumPy arrays, which a forked process can save although it cannot use JAX."""
    return State({"w": np.arange(5000.0) + done}, (), np.uint32([1, 2]), np.int32(done))


def few_changed(done):
    """As `rows`, of which a hundredth changes."""
    return rows(0)._replace(model={"w": np.where(np.arange(5000) < 50, float(done), np.arange(5000.0))}, round=np.int32(done))


CHILD = """
import os, signal, sys
import tests.test_checkpoint as case
from fedjax_meta import checkpoint, disk

class Os:
    "The module os, in which the process dies at the n-th call; a write writes half of its bytes before."
    calls = 0
    def __getattr__(self, name):
        whole = getattr(os, name)
        if name not in case.WRITES:
            return whole
        def counted(*arguments, **options):
            Os.calls += 1
            if Os.calls == last:
                if name == "write":
                    whole(arguments[0], arguments[1][: len(arguments[1]) // 2])
                elif when == "after":
                    whole(*arguments, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(*arguments, **options)
        return counted

disk.os = checkpoint.os = Os()
for line in sys.stdin:  # each line in a process of its own, which starts in no time
    folder, done, last, when, given, large, piece = line.split()
    done, last, checkpoint._LARGE, checkpoint._PIECE = int(done), int(last), int(large), int(piece)
    process = os.fork()
    if process == 0:
        checkpoint.save(folder, getattr(case, given)(done), [done], case.CONFIG)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@pytest.fixture
def dying():
    """`(folder, round, call, when, state) -> exit code` of a process that saves a round and dies before or after a call."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root), "JAX_ENABLE_X64": "true", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], cwd=root, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:

        def save(folder, done, call, when, given="rows"):
            process.stdin.write(f"{folder} {done} {call} {when} {given} {checkpoint._LARGE} {checkpoint._PIECE}\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        yield save
        process.stdin.close()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("given", ["rows", "few_changed"])
def test_dying_at_any_call_of_save_loses_at_most_that_save(given, when, tmp_path, dying, request):
    """Killed before or after each call that touches the disk, or in the middle of a write; also while it replaces a round."""
    if given == "few_changed":  # saved in part
        request.getfixturevalue("in_part")
    values, calls = globals()[given], 0
    for done in (3, 2):  # a new round, and one that is there
        for call in range(1, 100):
            folder = tmp_path / f"{done}_{call}"
            for before in (1, 2):
                checkpoint.save(folder, values(before), [-before], CONFIG)
            code = dying(folder, done, call, when, given)
            saved = checkpoint.restore(folder, values(0), CONFIG, on_damage=pytest.fail)
            if code == 0:
                assert saved.records == [done]
                break
            assert code == -signal.SIGKILL
            assert saved.records in ([-2], [done])
            assert same(saved.state, values(saved.round))
            # The next save works and tidies up.
            checkpoint.save(folder, values(4), [4], CONFIG)
            assert checkpoint.restore(folder, values(0), CONFIG).records == [4]
            assert not list(folder.glob(".*"))
            calls += 1
        assert call > 10
    assert calls > 30


def test_dying_in_the_first_save_leaves_nothing_that_harms(tmp_path, dying):
    for call in range(1, 100):
        folder = tmp_path / str(call) / "deeper"
        code = dying(folder, 1, call, "before")
        saved = checkpoint.restore(folder, rows(0), CONFIG, on_damage=pytest.fail)
        assert saved is None or saved.records == [1]
        if code == 0:
            break
        checkpoint.save(folder, rows(2), [2], CONFIG)
        assert checkpoint.restore(folder, rows(0), CONFIG).records == [2]
    assert 10 < call < 99


class Watched:
    """The module os, which notes the calls that touch the disk, and fails at the n-th of them with an error."""

    def __init__(self, fails=0, code=errno.ENOSPC):
        self.calls, self.fails, self.code = [], fails, code

    def __getattr__(self, name):
        whole = getattr(os, name)
        if name not in WRITES:
            return whole

        def noted(*arguments, **options):
            self.calls.append((name, *map(str, arguments[:2])) if name == "replace" else (name, arguments[0]))
            if len(self.calls) == self.fails:
                raise OSError(self.code, os.strerror(self.code))
            return whole(*arguments, **options)

        return noted


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_an_error_at_any_call_of_save_is_one_line_and_damages_nothing(code, tmp_path, monkeypatch):
    failed = 0
    for call in range(1, 100):
        folder = tmp_path / str(call)
        for before in (1, 2):
            checkpoint.save(folder, state(before), [before], CONFIG)
        watched = Watched(call, code)
        with monkeypatch.context() as patch:
            patch.setattr(disk, "os", watched)
            patch.setattr(checkpoint, "os", watched)
            try:
                checkpoint.save(folder, state(3), [3], CONFIG)
            except OSError as error:
                failed += 1
                assert str(error) == f"could not save round 3 to {folder}: {os.strerror(code)}; earlier checkpoints are intact"
        saved = checkpoint.restore(folder, like(state()), CONFIG, on_damage=pytest.fail)
        assert saved.records in ([2], [3])
        assert not list(folder.glob(".*"))
        if len(watched.calls) < call:
            break
    assert 10 < failed == call - 1


def test_a_checkpoint_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    """The file before it gets its name, the folder after it, and what is older is removed only then."""
    for done in (1, 2):
        checkpoint.save(tmp_path / "run", state(done), [], CONFIG)
    watched = Watched()
    monkeypatch.setattr(disk, "os", watched)
    monkeypatch.setattr(checkpoint, "os", watched)
    checkpoint.save(tmp_path / "run", state(3), [], CONFIG)
    names = [call[0] for call in watched.calls]
    assert names.count("fsync") == 2
    last_write = max(number for number, name in enumerate(names) if name == "write")
    file, folder = (number for number, name in enumerate(names) if name == "fsync")
    assert last_write < file < names.index("replace") < folder < names.index("unlink")
    opened = [call[1] for call in watched.calls if call[0] == "open"]
    assert [Path(path).name.endswith(".writing") for path in opened] == [True, False]
    assert opened[1] == tmp_path / "run"
    # New folders are brought to the disk too, each with the one above it.
    watched.calls.clear()
    checkpoint.save(tmp_path / "new" / "run", state(1), [], CONFIG)
    assert [call[0] for call in watched.calls][:8] == ["mkdir", "open", "fsync", "close"] * 2


def test_what_was_written_wrongly_is_never_given_a_name(tmp_path, monkeypatch):
    """A disk that changes a byte on its way: `save` reads back, says so, and keeps the checkpoint before."""
    checkpoint.save(tmp_path, state(1), ["one"], CONFIG)

    def write(file, content):
        if len(content) > 10000:
            content = bytes(content[:-1]) + bytes([content[-1] ^ 1])
        return os.write(file, content)

    watched = Watched()
    watched.write = write
    monkeypatch.setattr(disk, "os", watched)
    with pytest.raises(OSError, match=r"could not save round 2 .* has changed since it was saved: .model\['w'\]; earlier"):
        checkpoint.save(tmp_path, state(2), ["two"], CONFIG)
    assert checkpoint.restore(tmp_path, like(state()), CONFIG).records == ["one"]
    assert [path.name for path in tmp_path.iterdir()] == ["1.ckpt"]


@pytest.fixture
def no_space():
    """Limits files to 2,000 bytes: a write beyond that fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_line_and_damages_nothing(tmp_path, request):
    checkpoint.save(tmp_path / "run", state(1), ["kept"], CONFIG)
    disk.write_text(tmp_path / "metrics.json", "old")
    request.getfixturevalue("no_space")
    for attempt in (state(2), state(1)):
        with pytest.raises(OSError, match=r"could not save round . to .*; earlier checkpoints are intact") as caught:
            checkpoint.save(tmp_path / "run", attempt, ["lost"], CONFIG)
        assert "\n" not in str(caught.value)
    with pytest.raises(OSError, match="could not write"):
        disk.write_text(tmp_path / "metrics.json", "x" * 5000)
    assert (tmp_path / "metrics.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.json", "run"]
    saved = checkpoint.restore(tmp_path / "run", like(state()), CONFIG)
    assert (saved.round, saved.records) == (1, ["kept"])


def test_bad_records_and_counts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        checkpoint.save(tmp_path, state(), [np.zeros(3)], CONFIG)
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.save(tmp_path, state(), [], CONFIG, keep=0)


# Two processes.


HOLD = "import sys; from fedjax_meta import disk; disk.lock(sys.argv[1]); print('has it', flush=True); input()"


def test_a_folder_belongs_to_one_process_until_it_dies(tmp_path):
    """A second process is told who has the folder, and has it as soon as the first was killed."""
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "has it\n"
        before = (folder / disk.LOCK).read_bytes()
        with pytest.raises(
            OSError, match=rf"run is in use by process {process.pid} on .*: wait until it ends, or use another"
        ):
            disk.lock(folder)
        assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [(disk.LOCK, before)]
        process.kill()
        process.wait()
        for _ in range(2):
            disk.lock(folder)
    assert (folder / disk.LOCK).read_text() == f"{os.getpid()} on {platform.node()}\n"


def test_processes_that_share_a_folder_keep_out_those_that_want_it_alone(tmp_path):
    with disk.held(tmp_path, shared=True) as first, disk.held(tmp_path, shared=True) as second:
        assert first and second and disk.locked(tmp_path) and disk.locked(tmp_path, patience=0.05)
        with disk.held(tmp_path) as alone:
            assert not alone
        with pytest.raises(disk.InUseError, match=rf"in use by process {os.getpid()} on "):
            disk.lock(tmp_path)
    assert not disk.locked(tmp_path)
    disk.lock(tmp_path)
    with disk.held(tmp_path, shared=True) as mine:
        assert not mine
    with disk.held(tmp_path / "block") as mine, disk.held(tmp_path / "block") as other:
        assert mine and not other
    with disk.held(tmp_path / "block") as mine:
        assert mine


def test_a_lock_that_cannot_be_written_is_given_back(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match=r"could not write .*\.lock: No space left on device"):
            disk.lock(tmp_path)
    assert not disk.locked(tmp_path)


def test_a_folder_that_is_had_for_a_moment_is_asked_for_again(tmp_path):
    with contextlib.ExitStack() as stack:
        assert stack.enter_context(disk.held(tmp_path))
        threading.Timer(0.1, stack.pop_all().close).start()
        disk.lock(tmp_path)


def test_differences_of_configurations():
    """NaN equals itself, true is no 1, and the words "not set" are a value."""
    nan = float("nan")
    same = {"rate": nan, "list": [nan, {"deep": nan}], "whole": 1}
    assert checkpoint.first_difference(json.loads(json.dumps(same)), {**same, "whole": 1.0}) is None
    assert checkpoint.first_difference({"flag": True}, {"flag": 1}) == ("flag", True, 1)
    assert checkpoint.first_difference({"list": [1, 2]}, {"list": [1, True]}) == ("list", [1, 2], [1, True])
    assert checkpoint.first_difference({}, {"mode": "not set"}) == ("mode", checkpoint.NOT_SET, "not set")
    assert checkpoint.first_difference({"x": {"sgd": {}}}, {"x": {"adam": {}}}) == ("x.adam", checkpoint.NOT_SET, {})
    assert checkpoint.first_difference({"a.b": 1}, {"a": {"b": 1}}) is not None


def test_long_values_of_a_configuration_are_cut(tmp_path):
    checkpoint.save(tmp_path, state(), [], {"cohorts": list(range(5000))})
    with pytest.raises(ValueError, match="cannot resume: cohorts was") as told:
        checkpoint.restore(tmp_path, like(state()), {"cohorts": list(range(5001))})
    assert len(str(told.value)) < 1000
