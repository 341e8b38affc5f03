"""Saved runs: a state and the records so far, written so that a run can be killed at any moment and go on bit for bit.

A checkpoint is a folder named by its round. It appears under that name only when it is complete, and restoring compares every
file with a digest taken when it was saved. Arrays are stored by orbax, which is imported only when it is needed; NumPy arrays,
which are those that wait on the host (see `store`) and may be larger than its memory, as plain files.
"""

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks

FORMAT = 2
"""Written into every checkpoint; raised when the meaning of its contents changes."""

_WRITING = ".writing"
_HOST = "host"


class Checkpoint(NamedTuple):
    """What was saved.

    Attributes:
      state: arrays on the default device, in the structure that `restore` was given; what was saved from NumPy arrays is mapped
        from its file, to be read only.
      records: what was saved beside the state, as JSON gives it back.
      round: rounds done.
    """

    state: Any
    records: Any
    round: int


def save(folder: str | os.PathLike, state: Any, records: Any, config: Any, *, keep: int = 2) -> Path:
    """Saves a state with the records so far, and removes all but the newest checkpoints.

    Args:
      folder: the checkpoints of ONE run; made when missing.
      state: an algorithm's state: a pytree with an integer leaf `round`. Typed PRNG keys are allowed.
      records: whatever JSON can hold.
      config: what the run was started with, as JSON; `restore` refuses another.
      keep: checkpoints that stay.

    Returns:
      The folder of the new checkpoint.

    Raises:
      OSError: it could not be written (no space, no permission); what was saved before is as it was.
      ValueError: `keep` below 1, records or a config that JSON cannot hold.
    """
    checks.count("keep", keep)
    folder = Path(folder).absolute()
    arrays: dict[str, np.ndarray] = {}
    on_host: dict[str, np.ndarray] = {}
    leaves = []
    for number, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        array, kind = _as_array(leaf)
        leaves.append({"path": jax.tree_util.keystr(path), "kind": kind, "form": _form(array)})
        if array.size:  # orbax stores no empty arrays, and there is nothing in them to store
            (on_host if kind == _HOST else arrays)[f"{number:04d}"] = array
    run = {"format": FORMAT, "round": int(state.round), "config": config, "leaves": leaves, "records": records}
    try:
        json.dumps(run)
    except TypeError as error:
        raise ValueError(f"records and config must be JSON values: {error}") from None
    target, writing = folder / str(int(state.round)), folder / _WRITING
    checkpointer = _checkpointer()
    try:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        _try_space(writing / "space", sum(array.nbytes for array in (arrays | on_host).values()) + 2**16)
        if arrays:
            checkpointer.save(writing / "state", arrays)
        (writing / _HOST).mkdir()
        for name, array in on_host.items():
            array.tofile(writing / _HOST / name)
        text = json.dumps({**run, "files": _files(writing)})
        (writing / "run.json").write_text(f"{_digest(text.encode())}\n{text}\n", encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        writing.rename(target)
        for old in _rounds(folder)[:-keep]:
            shutil.rmtree(folder / str(old))
    # The array store reports a full disk as one of several types of its own.
    except Exception as error:
        shutil.rmtree(writing, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else _reason(error)
        raise OSError(
            f"could not save round {int(state.round)} to {folder}: {reason}; what was saved before is intact"
        ) from error
    return target


def restore(
    folder: str | os.PathLike, like: Any, config: Any, *, on_damage: Callable[[str], None] | None = None
) -> Checkpoint | None:
    """The newest whole checkpoint of a run, or `None` when nothing was saved yet.

    Args:
      folder: as given to `save`.
      like: a state of the same algorithm, or its shapes (`jax.eval_shape(algorithm.init, key, data)`).
      config: must equal the one that the run was started with.
      on_damage: gets one line for every checkpoint that is damaged; a warning when not given.

    Raises:
      ValueError: another config (the message names the first field that differs), a state of another structure, shape or type
        (it names the first leaf), or damaged checkpoints and no whole one.
    """
    folder = Path(folder).absolute()
    damaged: list[str] = []
    rounds = _rounds(folder)
    for done in reversed(rounds):
        path = folder / str(done)
        try:
            run = _read_run(path)
        except (OSError, ValueError) as error:
            damaged.append(_reason(error))
            continue
        _check_config(run["config"], json.loads(json.dumps(config)), path)
        _check_structure(run["leaves"], like, path)
        try:
            arrays = _checkpointer().restore(path / "state") if (path / "state").is_dir() else {}
        # The array store has many types of error of its own.
        except Exception as error:
            damaged.append(f"{path / 'state'} cannot be read: {_reason(error)}")
            continue
        state = _as_state(arrays, run["leaves"], like, path)
        for line in damaged:
            (on_damage or warnings.warn)(f"damaged checkpoint: {line}; going on from round {done}, saved before")
        return Checkpoint(state, run["records"], done)
    if damaged:
        raise ValueError(f"damaged checkpoint: {damaged[0]}; no whole one is left: delete {folder} to begin this run anew")
    return None


def latest_round(folder: str | os.PathLike) -> int | None:
    """The round of the newest checkpoint, whole or not; `None` where there is none."""
    rounds = _rounds(Path(folder))
    return rounds[-1] if rounds else None


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a text file so that, whenever the process dies, the file is the old one or the new one.

    Raises:
      OSError: it could not be written; the old file is as it was.
    """
    path = Path(path)
    other = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        other.write_text(text, encoding="utf-8")
        other.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            other.unlink()
        raise OSError(f"could not write {path}: {error.strerror or error}") from error


def first_difference(saved: Any, given: Any) -> tuple[str, Any, Any] | None:
    """The first field in which two JSON values differ, as (dotted name, first value, second value).

    Example:
      >>> first_difference({"seed": 1, "rates": {"lr": 0.1}}, {"seed": 1, "rates": {"lr": 0.2}})
      ('rates.lr', 0.1, 0.2)
    """
    absent = "nothing"
    left, right = dict(_fields("", saved)), dict(_fields("", given))
    for name in sorted(left | right):
        if left.get(name, absent) != right.get(name, absent):
            return name, left.get(name, absent), right.get(name, absent)
    return None


def _fields(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield prefix, value
        return
    for key, part in value.items():
        yield from _fields(f"{prefix}.{key}" if prefix else str(key), part)


def _check_config(saved: Any, given: Any, path: Path) -> None:
    difference = first_difference(saved, given)
    if difference is not None:
        name, old, new = difference
        raise ValueError(
            f"cannot resume: {name} was {old!r} when {path.parent} was written, and is {new!r} now; "
            "use the same options, or another folder"
        )


def _check_structure(leaves: list[dict[str, Any]], like: Any, path: Path) -> None:
    wanted = [jax.tree_util.keystr(where) for where, _ in jax.tree_util.tree_leaves_with_path(like)]
    saved = [leaf["path"] for leaf in leaves]
    if saved != wanted:
        lacks, surplus = ([name for name in a if name not in b] for a, b in ((wanted, saved), (saved, wanted)))
        odd = f"{lacks[0]} is missing" if lacks else f"{surplus[0]} does not belong there" if surplus else "another order"
        raise ValueError(f"cannot resume: {path} holds a state of another structure: {odd}")


def _read_run(path: Path) -> dict[str, Any]:
    """What `run.json` holds, after every file was found to be as it was written."""
    digest, _, text = (path / "run.json").read_text(encoding="utf-8", errors="replace").partition("\n")
    text = text.removesuffix("\n")
    if _digest(text.encode()) != digest:
        raise ValueError(f"{path / 'run.json'} is not what was written (cut off?)")
    run = json.loads(text)
    if run["format"] != FORMAT:
        raise ValueError(f"{path / 'run.json'} has format {run['format']}, not {FORMAT}")
    found = _files(path)
    for name, digest in run["files"].items():
        if name not in found:
            raise ValueError(f"{path / name} is missing")
        if found[name] != digest:
            raise ValueError(f"{path / name} is not what was written (cut off?)")
    return run


def _as_state(arrays: dict[str, Any], leaves: list[dict[str, Any]], like: Any, path: Path) -> Any:
    shapes, structure = jax.tree.flatten(like)
    values: list[Any] = []
    for number, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True)):
        is_key = leaf["kind"] not in ("array", _HOST)
        plain = jax.eval_shape(jax.random.key_data, shape) if is_key else shape
        if leaf["form"] != _form(plain):
            raise ValueError(
                f"cannot resume: {path} holds another state: {leaf['path']} is {leaf['form']}, not {_form(plain)}"
            )
        if leaf["kind"] == _HOST and plain.size:
            values.append(np.memmap(path / _HOST / f"{number:04d}", plain.dtype, "r", shape=plain.shape))
            continue
        array = np.asarray(arrays[f"{number:04d}"]) if plain.size else np.zeros(plain.shape, plain.dtype)
        # A copy: JAX may otherwise go on using the memory of the NumPy array, and a state's buffers are donated.
        value = jnp.array(array)
        values.append(jax.random.wrap_key_data(value, impl=leaf["kind"]) if is_key else value)
    return jax.tree.unflatten(structure, values)


def _as_array(leaf: Any) -> tuple[np.ndarray, str]:
    """A leaf as plain numbers, and what it was: "array", "host", or the name of a PRNG implementation."""
    if isinstance(leaf, np.ndarray):
        return leaf, _HOST
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf)), str(jax.random.key_impl(leaf))
    return np.asarray(leaf), "array"


def _form(array: Any) -> str:
    """Type and shape, e.g. float32[5, 3]."""
    return f"{array.dtype}{list(array.shape)}"


def _files(folder: Path) -> dict[str, str]:
    """Digest of every file of a checkpoint but `run.json`, by relative name."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / "run.json")
    digests = {}
    for path in paths:
        with path.open("rb") as file:
            digests[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, _new_digest).hexdigest()
    return digests


def _digest(content: bytes) -> str:
    digest = _new_digest()
    digest.update(content)
    return digest.hexdigest()


def _new_digest() -> Any:
    return hashlib.blake2b(digest_size=16)


def _rounds(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal()) if folder.is_dir() else []


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _try_space(path: Path, size: int) -> None:
    """Fails with a plain `OSError` where so many bytes do not fit; orbax would write tracebacks to stderr."""
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.write(bytes(size))
    path.unlink()


def _checkpointer() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        raise ValueError("checkpoints need orbax: pip install 'fedjax_meta[experiments]'") from None
    return ocp.PyTreeCheckpointer()
