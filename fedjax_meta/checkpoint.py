"""Checkpoints: a run's state and records, saved so that a run killed at any moment resumes bit for bit.

A checkpoint is one file, named by its round:

1. one line: the format, with a digest of that line, which is the same in all formats;
2. the bytes of each array, in pieces of `_PIECE` bytes, the first at a multiple of 64;
3. a JSON text: the round, the configuration, the records, and for each array its dtype, its shape and its pieces: place, digest,
   and the round of the file that holds it;
4. `_FOOTER_BYTES` bytes: the digest and the length of the JSON text.

A large state whose clients changed little is saved in part: pieces that an earlier whole checkpoint, its base, holds too are not
written again. The base stays as long as a checkpoint needs it.

The file gets its name only when all of it is on the disk and has been read back, pieces of the base included, and `restore`
compares everything that it reads with the digests. Arrays that are NumPy arrays, which are the rows of a host store (see
`host_store`) and may exceed the host's memory, become maps of files when they are restored.
"""

import collections
import concurrent.futures
import contextlib
import hashlib
import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks, disk, runtime
from fedjax_meta.keys import is_key
from fedjax_meta.types import PyTree

FORMAT = 5
"""The version of the format, which every checkpoint records. It changes when the meaning of the contents changes."""

Json: TypeAlias = Any
"""A value that JSON can hold."""

_SUFFIX = ".ckpt"
_NAME = "fedjax_meta checkpoint, format"
_HOST = "host"
_ALIGNED = 64
_PIECE = 2**18
_TOGETHER = 64
"""Pieces that one thread reads, one after the other."""
_LARGE = 2**26
"""States of at least so many bytes are saved in part where they changed little; smaller ones are files of their own."""
_FOOTER_BYTES = 64 + 1 + 20 + 1


class Checkpoint(NamedTuple):
    """A restored checkpoint.

    Attributes:
      state: in the structure that `restore` was given. JAX arrays are on the default device; NumPy arrays are read-only maps of
        the file, or of a nameless one beside it if two files hold them.
      records: as saved with the state, after a round trip through JSON.
      round: rounds done.
    """

    state: PyTree
    records: Json
    round: int


class _DamagedError(Exception):
    """A file does not hold what was saved."""


class UnreadableError(ValueError):
    """Checkpoints were saved, and none of them is intact."""


class _NoRoomError(Exception):
    """An intact checkpoint needs space that there is not."""


def save(folder: str | os.PathLike, state: PyTree, records: Json, config: Json, *, keep: int = 2) -> Path:
    """Saves a state with the records so far, and removes older checkpoints.

    When it returns, the checkpoint is on the disk (`fsync`) and has been read back. Several runs must not share a folder, see
    `disk.lock`. The arrays are fetched one after the other, each from one device after the other. Of a state of 64 MiB or more,
    what an earlier checkpoint of the folder holds already is not written again: do not take single files out of a folder.

    Args:
      folder: holds the checkpoints of ONE run; created if missing. Any path will do.
      state: a method's state: a pytree with an integer attribute `round`. Typed PRNG keys are allowed.
      records: any JSON value; records of `simulate` become some by `report.compact`.
      config: the configuration of the run, as a JSON value; `restore` refuses a different one.
      keep: the number of checkpoints to keep: this one, and the newest of the others. Those of a large state share one base,
        which stays beside them: damage of that file damages all of them. Saving a round again may damage later ones of which it
        is the base.

    Returns:
      The file of the new checkpoint.

    Raises:
      OSError: the checkpoint could not be written (no space, no permission); earlier checkpoints are intact.
      ValueError: `keep` is below 1, or JSON cannot hold the records or the config.
    """
    checks.count("keep", keep)
    folder = Path(folder).absolute()
    done = int(state.round)
    run = {"format": FORMAT, "round": done, "config": config, "records": records}
    try:
        json.dumps(run)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"records and config must be JSON values: {error}; report.compact makes some of a record of simulate"
        ) from None
    path = _file(folder, done)
    base = _base(folder, done, state)
    try:
        try:
            disk.replace(path, _contents(run, state, base), check=_check_whole)
        except (_DamagedError, OSError):  # a base that cannot be read must not keep this state from being saved
            if base is None:
                raise
            disk.replace(path, _contents(run, state, None), check=_check_whole)
        others = [old for old in saved_rounds(folder) if old != done]
        surplus = others[: max(len(others) + 1 - keep, 0)]
        needed = _bases(folder, set(others) - set(surplus) | {done}) if surplus else set()
        for old in surplus:
            if needed is not None and old not in needed:
                os.unlink(_file(folder, old))
    except (OSError, _DamagedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"could not save round {done} to {folder}: {reason}; earlier checkpoints are intact") from error
    return path


def restore(
    folder: str | os.PathLike,
    like: PyTree | Callable[[], PyTree],
    config: Json,
    *,
    on_damage: Callable[[str], None] | None = None,
) -> Checkpoint | None:
    """The newest intact checkpoint of a run; `None` when none was saved yet.

    Args:
      folder: as given to `save`.
      like: a state of the same algorithm, or its shapes (`jax.eval_shape(algorithm.init, key, data)`), or a function that gives
        them, which is called if there is a checkpoint.
      config: must equal the config that was saved.
      on_damage: called with one line for each damaged checkpoint; the line is a Python warning when not given.

    Raises:
      OSError: arrays of a host store that two files hold find no space to be put together.
      ValueError: `config` differs (the message names the first field), the state has another structure, shape or dtype (the
        message names the first leaf), a checkpoint has another format; `UnreadableError`: all checkpoints are damaged.
    """
    folder = Path(folder).absolute()
    damaged: list[str] = []
    for done in reversed(saved_rounds(folder)):
        path = _file(folder, done)
        try:
            run = _read_run(path)
            if run["round"] != done:
                raise _DamagedError(f"{path} holds round {run['round']}, not the round of its name")
            _check_config(run["config"], json.loads(json.dumps(config)), path)
            like = like() if callable(like) else like
            _check_structure(run["leaves"], like, path)
            state = _as_state(path, run, like)
        except OSError as error:
            needs = error.filename is not None and Path(error.filename) != path
            which = f"{path} needs {error.filename}, which" if needs else str(path)
            damaged.append(f"{which} cannot be read: {error.strerror or error}")
            continue
        except _NoRoomError as error:
            raise OSError(str(error)) from None
        except _DamagedError as error:
            damaged.append(str(error))
            continue
        for line in damaged:
            (on_damage or warnings.warn)(f"damaged checkpoint: {line}; resuming from the earlier round {done}")
        return Checkpoint(state, run["records"], done)
    if damaged:
        raise UnreadableError(
            f"damaged checkpoint: {damaged[0]}; no intact one is left: delete {folder} to start this run again"
        )
    return None


def saved_config(folder: str | os.PathLike) -> Json | None:
    """The config of the newest checkpoint that can be read; `None` when there is none.

    Raises:
      ValueError: a checkpoint of another format.
    """
    folder = Path(folder).absolute()
    for done in reversed(saved_rounds(folder)):
        with contextlib.suppress(OSError, _DamagedError):
            return _read_run(_file(folder, done))["config"]
    return None


def saved_rounds(folder: Path) -> list[int]:
    """The rounds of the checkpoints in a folder, in order."""
    if not folder.is_dir():
        return []
    names = [name.removesuffix(_SUFFIX) for name in os.listdir(folder) if name.endswith(_SUFFIX)]
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


class _NotSet:
    def __repr__(self) -> str:
        return "not set"


NOT_SET = _NotSet()
"""A value that is not there, in `differences`."""


def first_difference(saved: Json, given: Json) -> tuple[str, Json, Json] | None:
    """The first field, by name, in which two JSON values differ, as (dotted name, saved value, given value); `None` if equal.

    Example:
      >>> first_difference({"seed": 1, "rates": {"lr": 0.1}}, {"seed": 1, "rates": {"lr": 0.2}})
      ('rates.lr', 0.1, 0.2)
    """
    return next(differences(saved, given), None)


def differences(saved: Json, given: Json) -> Iterator[tuple[str, Json, Json]]:
    """Every field, by name, in which two JSON values differ, see `first_difference`.

    Example:
      >>> list(differences({"options": {}}, {"options": {"epochs": 3}}))
      [('options.epochs', not set, 3)]
    """
    left, right = dict(_fields((), saved)), dict(_fields((), given))
    inside = {name[:end] for name in left | right for end in range(len(name))}
    for name in sorted(left | right):
        if name in inside and (left | right)[name] == {}:
            continue  # the other side has fields in it, which are told
        if name not in left or name not in right or not _same(left[name], right[name]):
            yield ".".join(name), left.get(name, NOT_SET), right.get(name, NOT_SET)


def _same(one: Json, other: Json) -> bool:
    """Whether two JSON values are equal: NaN equals NaN, and true is no 1."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _fields(place: tuple[str, ...], value: Json) -> Iterator[tuple[tuple[str, ...], Json]]:
    if not isinstance(value, dict) or (not value and place):
        yield place, value
        return
    for key, part in value.items():
        yield from _fields((*place, str(key)), part)


def _check_config(saved: Json, given: Json, path: Path) -> None:
    difference = first_difference(saved, given)
    if difference is not None:
        name, *values = difference
        old, new = (checks.shown(value, most=200) for value in values)
        raise ValueError(
            f"cannot resume: {name} was {old} when {path.parent} was written and is {new} now; use the same options or another "
            "folder"
        )


def _check_structure(leaves: list[dict[str, Json]], like: PyTree, path: Path) -> None:
    wanted = [jax.tree_util.keystr(where) for where, _ in jax.tree_util.tree_leaves_with_path(like)]
    saved = [leaf["path"] for leaf in leaves]
    if saved != wanted:
        missing, surplus = ([name for name in a if name not in b] for a, b in ((wanted, saved), (saved, wanted)))
        odd = f"{missing[0]} is missing" if missing else f"{surplus[0]} does not belong there" if surplus else "another order"
        raise ValueError(f"cannot resume: {path} holds a state of another structure: {odd}")


# The file of a checkpoint.


def _first_line(number: int) -> bytes:
    text = f"{_NAME} {number}"
    return f"{text}, {hashlib.sha256(text.encode()).hexdigest()[:16]}\n".encode()


def _contents(run: dict[str, Json], state: PyTree, base: dict[str, Json] | None) -> Iterator[Any]:
    """The bytes of a checkpoint, piece by piece, without those that its base holds."""
    leaves: list[dict[str, Json]] = []
    line = _first_line(FORMAT)
    yield line
    place, written = len(line), 0
    with _threads() as pool:
        for number, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
            array, kind = _plain(leaf)
            entry = {"path": jax.tree_util.keystr(path), "kind": kind, "form": _form(array), "bytes": array.nbytes}
            there = _same_array(entry, base, number)
            yield bytes(-place % _ALIGNED)
            place += -place % _ALIGNED
            pieces: list[list[Json]] = []
            for content, digest in _digested(array, pool):
                # A short piece is not worth a second file, unless the base holds all of the array then.
                worth = len(content) == _PIECE or (pieces and all(piece[2] != run["round"] for piece in pieces))
                if worth and len(pieces) < len(there) and there[len(pieces)][1] == digest:
                    pieces.append(there[len(pieces)])
                    continue
                pieces.append([place, digest, run["round"]])
                yield content
                place, written = place + len(content), written + len(content)
            leaves.append({**entry, "pieces": pieces})
    used = any(piece[2] != run["round"] for leaf in leaves for piece in leaf["pieces"])
    of = base["round"] if base is not None and used else None
    text = json.dumps({**run, "base": of, "piece": _PIECE, "written": written, "leaves": leaves}).encode()
    yield text
    yield f"{_digest(text)} {len(text):020d}\n".encode()


def _digested(array: Any, pool: concurrent.futures.Executor) -> Iterator[tuple[memoryview, str]]:
    """The pieces of an array with their digests, which are computed some pieces ahead."""
    ahead: collections.deque[tuple[memoryview, concurrent.futures.Future[str]]] = collections.deque()
    for content in _pieces(array):
        ahead.append((content, pool.submit(_digest, content)))
        if len(ahead) == _TOGETHER:
            first, digest = ahead.popleft()
            yield first, digest.result()
    for first, digest in ahead:
        yield first, digest.result()


def _pieces(array: Any) -> Iterator[memoryview]:
    """The bytes of an array in pieces of `_PIECE`, the last may be shorter, wherever its parts end."""
    left = b""
    for part in _parts(array):
        content = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        first = min(-len(left) % _PIECE, len(content))
        if first:
            left += content[:first]
        if len(left) == _PIECE:
            yield memoryview(left)
            left = b""
        if not left:
            whole = first + (len(content) - first) // _PIECE * _PIECE
            for start in range(first, whole, _PIECE):
                yield content[start : start + _PIECE]
            left = bytes(content[whole:])
    if left:
        yield memoryview(left)


def _same_array(entry: dict[str, Json], base: dict[str, Json] | None, number: int) -> list[list[Json]]:
    """The pieces of the base's array that has the path, kind and form of `entry`."""
    if base is None or number >= len(base["leaves"]):
        return []
    other = base["leaves"][number]
    return other["pieces"] if all(other[name] == value for name, value in entry.items()) else []


def _base(folder: Path, done: int, state: PyTree) -> dict[str, Json] | None:
    """The whole checkpoint that one of round `done` may refer to.

    `None` if there is none, the state is small, or the newest checkpoint differs from its base in more than a half: then it is
    time for a whole one.
    """
    if sum(_plain(leaf)[0].nbytes for leaf in jax.tree.leaves(state)) < _LARGE:
        return None
    others = [old for old in saved_rounds(folder) if old < done]
    with contextlib.suppress(OSError, _DamagedError, ValueError, IndexError):
        run = _read_run(_file(folder, others[-1]))
        if 2 * run["written"] < sum(leaf["bytes"] for leaf in run["leaves"]):
            run = _read_run(_file(folder, run["base"]))
        if run["base"] is None and run["piece"] == _PIECE:
            return run
    return None


def _bases(folder: Path, rounds: Iterable[int]) -> set[int] | None:
    """Bases that these checkpoints need, without damaged ones; `None` if a file cannot be read, because its base is unknown."""
    found = set()
    for done in rounds:
        try:
            found.add(_read_run(_file(folder, done))["base"])
        except _DamagedError:
            continue
        except (OSError, ValueError):
            return None
    return found - {None}


def _read_run(path: Path) -> dict[str, Json]:
    """The JSON text of a checkpoint, compared with its digest."""
    with path.open("rb") as file:
        line = file.readline(200)
        found = re.fullmatch(rf"{_NAME} (\d+), .*\n", line.decode(errors="replace"))
        if found is None or line != _first_line(int(found[1])):
            raise _changed(path)
        if int(found[1]) != FORMAT:
            raise ValueError(
                f"cannot resume: {path} was written by another version of fedjax_meta (format {found[1]}; this version reads "
                f"format {FORMAT}): use that version, or another folder"
            )
        size = os.fstat(file.fileno()).st_size
        file.seek(max(size - _FOOTER_BYTES, 0))
        footer = file.read().decode(errors="replace")
        parts = re.fullmatch(r"([0-9a-f]{64}) (\d{20})\n", footer)
        if parts is None or int(parts[2]) > size - _FOOTER_BYTES:
            raise _changed(path)
        file.seek(size - _FOOTER_BYTES - int(parts[2]))
        text = file.read(int(parts[2]))
    if _digest(text) != parts[1]:
        raise _changed(path)
    return json.loads(text)


def _as_state(path: Path, run: dict[str, Json], like: PyTree) -> PyTree:
    shapes, structure = jax.tree.flatten(like)
    shapes = [shape if hasattr(shape, "dtype") else jnp.asarray(shape) for shape in shapes]
    leaves, plain = run["leaves"], []
    values: list[Any] = []
    for leaf, shape in zip(leaves, shapes, strict=True):
        key = leaf["kind"] not in ("array", _HOST)
        if key and not is_key(shape):
            raise ValueError(f"cannot resume: {path} holds another state: {leaf['path']} is a key, not {_form(shape)}")
        plain.append(jax.eval_shape(jax.random.key_data, shape) if key else shape)
        if leaf["form"] != _form(plain[-1]):
            raise ValueError(
                f"cannot resume: {path} holds another state: {leaf['path']} is {leaf['form']}, not {_form(plain[-1])}"
            )
    with _threads() as pool, _on_the_host():
        for leaf, shape, wanted in zip(leaves, plain, shapes, strict=True):
            if leaf["kind"] == _HOST:
                values.append(_mapped(path, run, leaf, shape, pool))
                continue
            array = np.empty(shape.shape, shape.dtype)
            _read(path, run, leaf, pool, into=array)
            # Copy: JAX could otherwise share the NumPy array's memory, and a run donates the buffers of its state.
            value = jnp.array(array)
            value = value if leaf["kind"] == "array" else jax.random.wrap_key_data(value, impl=leaf["kind"])
            if value.dtype != wanted.dtype:  # another kind of random key, or a type that needs jax_enable_x64
                raise ValueError(
                    f"cannot resume: {path} holds another state: {leaf['path']} is {value.dtype}, not {wanted.dtype}"
                )
            values.append(value)
    return jax.tree.unflatten(structure, values)


def _on_the_host() -> contextlib.AbstractContextManager[Any]:
    """New arrays are in the host's memory until a run places them: an accelerator may have no room for two copies of a state.

    Where JAX was started without the CPU (`JAX_PLATFORMS=cuda`), they are on the accelerator.
    """
    if runtime.on_cpu():
        return contextlib.nullcontext()
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()


def _mapped(
    path: Path, run: dict[str, Json], leaf: dict[str, Json], shape: Any, pool: concurrent.futures.Executor
) -> np.ndarray:
    """An array as a read-only map of the file that holds all of it, or of a file without a name that is put together here."""
    if not leaf["bytes"]:
        return np.empty(shape.shape, shape.dtype)
    place, _, done = leaf["pieces"][0]
    if all(piece[2] == done and piece[0] == place + k * run["piece"] for k, piece in enumerate(leaf["pieces"])):
        _read(path, run, leaf, pool)
        return np.memmap(_file_of(path, run, done), shape.dtype, "r", place, shape.shape)
    array = _new_map(path, shape)
    _read(path, run, leaf, pool, into=array)
    array.flags.writeable = False
    return array


def _new_map(path: Path, shape: Any) -> np.ndarray:
    """A map of a new file without a name, beside a checkpoint or, where that cannot be, in the folder of temporary files."""
    refused: list[OSError] = []
    for folder in (path.parent, Path(tempfile.gettempdir())):
        try:
            return disk.unnamed_map(folder, shape.dtype, shape.shape)
        except OSError as error:
            refused.append(error)
    size = math.prod(shape.shape) * shape.dtype.itemsize
    raise _NoRoomError(f"{path} is intact, but restoring it needs {size:,} bytes in {path.parent}: {refused[0].strerror}")


def _check_whole(path: Path) -> None:
    """Reads a checkpoint, with what it needs of its base, and compares all of it with its digests."""
    run = _read_run(path)
    with _threads() as pool:
        for leaf in run["leaves"]:
            _read(path, run, leaf, pool)


def _read(
    path: Path,
    run: dict[str, Json],
    leaf: dict[str, Json],
    pool: concurrent.futures.Executor,
    *,
    into: np.ndarray | None = None,
) -> None:
    """Reads all pieces of an array, `into` an array if given, and compares them with their digests."""
    buffer = None if into is None else into.reshape(-1).view(np.uint8).data
    step = run["piece"]

    def read(numbers: Sequence[int]) -> None:
        with contextlib.ExitStack() as stack:
            files: dict[int, Any] = {}
            for number in numbers:
                place, digest, done = leaf["pieces"][number]
                if done not in files:
                    files[done] = stack.enter_context(_file_of(path, run, done).open("rb", buffering=0))
                start, end = number * step, min((number + 1) * step, leaf["bytes"])
                if _digest_at(files[done], place, end - start, None if buffer is None else buffer[start:end]) != digest:
                    base = "" if done == run["round"] else f" needs {_file_of(path, run, done)}, which"
                    raise _DamagedError(f"{path}{base} has changed since it was saved: {leaf['path']}")

    count = -(-leaf["bytes"] // step) if leaf["bytes"] else 0
    ranges = [range(first, min(first + _TOGETHER, count)) for first in range(0, count, _TOGETHER)]
    list(map(read, ranges) if len(ranges) == 1 else pool.map(read, ranges))


def _digest_at(file: Any, place: int, length: int, into: memoryview | None) -> str:
    """The digest of some bytes of a file, which `into` gets if given; "" if they are not there."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(length, _PIECE))) if into is None else into
    file.seek(place)
    while length:
        count = file.readinto(buffer[: min(length, _PIECE)])
        if not count:
            return ""
        digest.update(buffer[:count])
        buffer = buffer if into is None else buffer[count:]
        length -= count
    return digest.hexdigest()


def _file(folder: Path, done: int) -> Path:
    return folder / f"{done}{_SUFFIX}"


def _file_of(path: Path, run: dict[str, Json], done: int) -> Path:
    """The file of a piece: the checkpoint's own, which may not have its name yet, or that of its base."""
    return path if done == run["round"] else _file(path.parent, done)


def _threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(min(runtime.cores(), 8))


def _changed(path: Path) -> _DamagedError:
    return _DamagedError(f"{path} has changed since it was saved (truncated?)")


def _plain(leaf: Any) -> tuple[Any, str]:
    """A leaf as an array of numbers, and its kind: "array", "host" (it is in NumPy), or the name of a PRNG implementation."""
    if isinstance(leaf, np.ndarray):
        return leaf, _HOST
    if isinstance(leaf, (bool, int, float, complex)):
        leaf = jnp.asarray(leaf)  # of the type that it has in a program
    if is_key(leaf):
        return jax.random.key_data(leaf), str(jax.random.key_impl(leaf))
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf), "array"


def _parts(array: Any) -> Iterator[np.ndarray]:
    """An array in NumPy, in parts that follow each other.

    Rows that are spread over devices are taken from one device after the other: all of them in one NumPy array would double the
    memory of a large state, and JAX would keep that array.
    """
    if isinstance(array, jax.Array) and array.is_fully_addressable and array.ndim:
        shards = {shard.index[0].start or 0: shard for shard in array.addressable_shards}
        if all(shard.data.shape[1:] == array.shape[1:] for shard in shards.values()):
            for start in sorted(shards):
                yield np.asarray(shards[start].data)
            return
    yield np.asarray(array)


def _form(array: Any) -> str:
    """Dtype and shape, e.g. float32[5, 3]."""
    return f"{array.dtype}{list(array.shape)}"


def _digest(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()
