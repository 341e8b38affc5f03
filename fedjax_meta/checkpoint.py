"""Checkpoints: a run's state and records, saved so that a run killed at any moment resumes bit for bit.

A checkpoint is a folder named by its round. It gets that name only when it is complete, and `restore` compares every file with
a digest taken when it was saved. Orbax stores JAX arrays and is imported only when it is needed. NumPy arrays, which are the
rows of a host store (see `host_store`) and may exceed the host's memory, are stored as plain files.
"""

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks
from fedjax_meta.types import PyTree

FORMAT = 2
"""The version of the format, which every checkpoint records. It changes when the meaning of the contents changes."""

Json: TypeAlias = Any
"""A value that JSON can hold."""

_WRITING = ".writing"
_HOST = "host"


class Checkpoint(NamedTuple):
    """A restored checkpoint.

    Attributes:
      state: in the structure that `restore` was given. JAX arrays are on the default device; NumPy arrays are read-only maps of
        their files.
      records: as saved with the state, after a round trip through JSON.
      round: rounds done.
    """

    state: PyTree
    records: Json
    round: int


def save(folder: str | os.PathLike, state: PyTree, records: Json, config: Json, *, keep: int = 2) -> Path:
    """Saves a state with the records so far, and removes all but the newest checkpoints.

    Args:
      folder: holds the checkpoints of ONE run; created if missing.
      state: a method's state: a pytree with an integer attribute `round`. Typed PRNG keys are allowed.
      records: any JSON value.
      config: the configuration of the run, as a JSON value; `restore` refuses a different one.
      keep: the number of checkpoints to keep, the newest ones.

    Returns:
      The folder of the new checkpoint.

    Raises:
      OSError: the checkpoint could not be written (no space, no permission); earlier checkpoints are intact.
      ValueError: `keep` is below 1, or JSON cannot hold the records or the config.
    """
    checks.count("keep", keep)
    folder = Path(folder).absolute()
    arrays: dict[str, np.ndarray] = {}
    on_host: dict[str, np.ndarray] = {}
    leaves = []
    for number, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        array, kind = _as_array(leaf)
        leaves.append({"path": jax.tree_util.keystr(path), "kind": kind, "form": _form(array)})
        if array.size:  # orbax cannot store empty arrays
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
    # Orbax reports a full disk by several exception types of its own.
    except Exception as error:
        shutil.rmtree(writing, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else _reason(error)
        raise OSError(
            f"could not save round {int(state.round)} to {folder}: {reason}; earlier checkpoints are intact"
        ) from error
    return target


def restore(
    folder: str | os.PathLike, like: PyTree, config: Json, *, on_damage: Callable[[str], None] | None = None
) -> Checkpoint | None:
    """The newest intact checkpoint of a run; `None` when none was saved yet.

    Args:
      folder: as given to `save`.
      like: a state of the same method, or its shapes (`jax.eval_shape(method.init, key, data)`).
      config: must equal the config that was saved.
      on_damage: called with one line for each damaged checkpoint; the line is a Python warning when not given.

    Raises:
      ValueError: `config` differs (the message names the first field), the state has another structure, shape or dtype (the
        message names the first leaf), or all checkpoints are damaged.
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
        # Orbax raises many exception types of its own.
        except Exception as error:
            damaged.append(f"{path / 'state'} cannot be read: {_reason(error)}")
            continue
        state = _as_state(arrays, run["leaves"], like, path)
        for line in damaged:
            (on_damage or warnings.warn)(f"damaged checkpoint: {line}; resuming from the earlier round {done}")
        return Checkpoint(state, run["records"], done)
    if damaged:
        raise ValueError(f"damaged checkpoint: {damaged[0]}; no intact one is left: delete {folder} to start this run again")
    return None


def latest_round(folder: str | os.PathLike) -> int | None:
    """The round of the newest checkpoint, intact or damaged; `None` when there is none."""
    rounds = _rounds(Path(folder))
    return rounds[-1] if rounds else None


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a text file atomically: if the process dies, the file has either its old or its new content.

    Raises:
      OSError: the file could not be written; an old file is intact.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(f"could not write {path}: {error.strerror or error}") from error


def first_difference(saved: Json, given: Json) -> tuple[str, Json, Json] | None:
    """The first field, by name, in which two JSON values differ, as (dotted name, saved value, given value); `None` if equal.

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


def _fields(prefix: str, value: Json) -> Iterator[tuple[str, Json]]:
    if not isinstance(value, dict):
        yield prefix, value
        return
    for key, part in value.items():
        yield from _fields(f"{prefix}.{key}" if prefix else str(key), part)


def _check_config(saved: Json, given: Json, path: Path) -> None:
    difference = first_difference(saved, given)
    if difference is not None:
        name, old, new = difference
        raise ValueError(
            f"cannot resume: {name} was {old!r} when {path.parent} was written and is {new!r} now; "
            "use the same options or another folder"
        )


def _check_structure(leaves: list[dict[str, Json]], like: PyTree, path: Path) -> None:
    wanted = [jax.tree_util.keystr(where) for where, _ in jax.tree_util.tree_leaves_with_path(like)]
    saved = [leaf["path"] for leaf in leaves]
    if saved != wanted:
        missing, surplus = ([name for name in a if name not in b] for a, b in ((wanted, saved), (saved, wanted)))
        odd = f"{missing[0]} is missing" if missing else f"{surplus[0]} does not belong there" if surplus else "another order"
        raise ValueError(f"cannot resume: {path} holds a state of another structure: {odd}")


def _read_run(path: Path) -> dict[str, Json]:
    """The content of `run.json`. Raises when the digest of a file differs from the saved one."""
    digest, _, text = (path / "run.json").read_text(encoding="utf-8", errors="replace").partition("\n")
    text = text.removesuffix("\n")
    if _digest(text.encode()) != digest:
        raise ValueError(f"{path / 'run.json'} has changed since it was saved (truncated?)")
    run = json.loads(text)
    if run["format"] != FORMAT:
        raise ValueError(f"{path / 'run.json'} has format {run['format']}, not {FORMAT}")
    found = _files(path)
    for name, digest in run["files"].items():
        if name not in found:
            raise ValueError(f"{path / name} is missing")
        if found[name] != digest:
            raise ValueError(f"{path / name} has changed since it was saved (truncated?)")
    return run


def _as_state(arrays: dict[str, Any], leaves: list[dict[str, Json]], like: PyTree, path: Path) -> PyTree:
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
        # Copy: JAX could otherwise share the NumPy array's memory, and a run donates the buffers of its state.
        value = jnp.array(array)
        values.append(jax.random.wrap_key_data(value, impl=leaf["kind"]) if is_key else value)
    return jax.tree.unflatten(structure, values)


def _as_array(leaf: Any) -> tuple[np.ndarray, str]:
    """A leaf as a NumPy array, and its kind: "array", "host" (it was in NumPy), or the name of a PRNG implementation."""
    if isinstance(leaf, np.ndarray):
        return leaf, _HOST
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf)), str(jax.random.key_impl(leaf))
    return np.asarray(leaf), "array"


def _form(array: Any) -> str:
    """Dtype and shape, e.g. float32[5, 3]."""
    return f"{array.dtype}{list(array.shape)}"


def _files(folder: Path) -> dict[str, str]:
    """The digest of every file of a checkpoint except `run.json`, by relative path."""
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
    """Raises `OSError` when `size` bytes do not fit on the disk. Orbax would print tracebacks to stderr instead."""
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
