"""Files that survive the death of a process or of the machine, and folders that only one process writes.

All that changes files goes through functions of `os`, so that a test can end the process at every one of them.
"""

import contextlib
import hashlib
import math
import os
import platform
import re
import secrets
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

LOCK = ".lock"
"""The file that `lock` makes in a folder. It says which process took the folder last, and on which machine."""

_PATIENCE = 1.0
"""Seconds to retry a lock: `locked` also holds it for a moment."""

_PIECE = 2**22
_locks: dict[str, int] = {}
"""By folder, the open file of every lock that this process has until it ends."""


class InUseError(OSError):
    """Another process has a folder."""


class NoLocksError(OSError):
    """A file system, or the system as a whole, has no locks."""


def _processes() -> str:
    """A short id of this machine or container, used in file names."""
    found = [platform.node()]
    with contextlib.suppress(OSError):  # Linux alone has it, and this one
        found.append(Path("/etc/machine-id").read_text(encoding="utf-8"))
    with contextlib.suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.blake2b("\n".join(found).encode(), digest_size=4).hexdigest()


_PROCESSES = _processes()


def replace(path: Path, pieces: Iterable[Any], *, check: Callable[[Path], None] | None = None) -> None:
    """Writes a file under a name of its own, brings it to the disk, checks it, and gives it its name.

    Args:
      path: any old file there is replaced at once: it is whole, or the new one is.
      pieces: the content, as objects with a buffer.
      check: called with the path of the written file before it gets its name; raises if that file is not as it should be.

    Raises:
      OSError: the file could not be written; an old file is intact.
    """
    _make_folder(path.parent)
    _remove_leftovers(path.parent)
    writing = path.parent / f".{path.name}.{_PROCESSES}-{os.getpid()}-{secrets.token_hex(4)}.writing"
    try:
        file = os.open(writing, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for piece in pieces:
                left = memoryview(piece)
                while left:
                    left = left[os.write(file, left[:_PIECE]) :]
            os.fsync(file)
        finally:
            os.close(file)
        if check is not None:
            check(writing)
        os.replace(writing, path)
        _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(writing)
        raise


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a text file atomically; errors as in `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike, content: bytes) -> None:
    """Writes a file atomically: if the process or the machine dies, the file has either its old or its new content.

    Raises:
      OSError: the file could not be written; an old file is intact.
    """
    path = Path(path)
    try:
        replace(path, [content])
    except OSError as error:
        raise OSError(f"could not write {path}: {error.strerror or error}") from error


def unnamed_map(folder: str | Path, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A writable array in a new file of a folder. The file has no name: no other process can open it, and it goes with the array.

    Raises:
      OSError: no space, or no permission.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # without it, a full disk shows when the array is written, as a crash
            os.posix_fallocate(file.fileno(), 0, math.prod(shape) * np.dtype(dtype).itemsize)
        return np.memmap(file, dtype, "w+", shape=shape)


def lock(folder: str | os.PathLike) -> None:
    """Gives a folder to this process until the process ends, however it ends; a second such call changes nothing.

    Call it before the first `checkpoint.save` in a script that may be started twice; in a run of several processes, in the one
    that saves.

    Args:
      folder: made if it is not there.

    Raises:
      InUseError: another process has the folder; the message names it.
      OSError: the folder cannot be written.
    """
    folder = Path(folder)
    key = os.path.realpath(folder)
    if key in _locks and (folder / LOCK).exists():
        return
    try:
        _locks[key] = _take(folder, shared=False, patience=_PATIENCE)
    except NoLocksError as missing:
        warnings.warn(f"{missing}: do not start two runs in it", stacklevel=2)


@contextlib.contextmanager
def held(folder: str | os.PathLike, *, shared: bool = False) -> Iterator[bool]:
    """Gives a folder to this process for the length of a block; false where another process has it.

    Args:
      folder: made if it is not there.
      shared: the folder is given to all processes that say so, and to no other one.

    Raises:
      NoLocksError: its file system has no locks.
      OSError: it cannot be written.
    """
    try:
        file = _take(Path(folder), shared=shared, patience=_PATIENCE if shared else 0.0)
    except InUseError:
        yield False
        return
    try:
        yield True
    finally:
        os.close(file)


def in_use(folder: Path) -> InUseError:
    """What is to be said of a folder that another process has."""
    with contextlib.suppress(OSError):  # it may be gone by now
        said = (folder / LOCK).read_text(encoding="utf-8", errors="replace").strip()
        return InUseError(f"{folder} is in use by process {said or 'unknown'}: wait until it ends, or use another folder")
    return InUseError(f"{folder} is in use: wait until it is free, or use another folder")


def locked(folder: str | os.PathLike, *, patience: float = 0.0) -> bool:
    """Whether a process, this one or another, has a folder; nothing is written.

    Args:
      folder: which.
      patience: seconds for which it must be so: to ask takes the folder for a moment, which others may do too.
    """
    folder = Path(folder)
    if os.path.realpath(folder) in _locks:
        return True
    try:
        file = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _flock(file, shared=False, patience=patience)
    except NoLocksError:
        return False
    finally:
        os.close(file)


def _take(folder: Path, *, shared: bool, patience: float) -> int:
    """The open file of a lock that was taken; closing it gives the folder back."""
    try:
        _make_folder(folder)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _flock(file, shared=shared, patience=patience):
                raise in_use(folder)
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()} on {platform.node()}\n".encode(), 0)
        except BaseException:
            os.close(file)
            raise
    except NoLocksError as missing:
        raise NoLocksError(f"{folder} cannot be locked ({missing})") from None
    except InUseError:
        raise
    except OSError as error:
        raise OSError(f"could not write {folder / LOCK}: {error.strerror or error}") from error
    return file


def _flock(file: int, *, shared: bool, patience: float) -> bool:
    """Locks an open file; false where another process has had it for so many seconds."""
    try:
        import fcntl  # POSIX only
    except ImportError:
        raise NoLocksError("this system has no file locks") from None
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
        except OSError as error:
            raise NoLocksError(error.strerror or str(error)) from None
        else:
            return True


def _make_folder(folder: Path) -> None:
    """Makes a folder and those above it, on the disk too."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    if os.name != "posix":  # other systems cannot open folders
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _remove_leftovers(folder: Path) -> None:
    """Removes what processes left that died while they wrote, as far as this one could see them."""
    for name in os.listdir(folder):
        found = re.fullmatch(rf"\..+\.{_PROCESSES}-(\d+)-[0-9a-f]{{8}}\.writing", name)
        if found is not None and not _alive(int(found[1])):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(folder / name)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        return True
    return True
