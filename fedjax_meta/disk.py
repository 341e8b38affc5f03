"""Files that survive the death of a process or of the machine, and folders that only one process writes.

All that changes files goes through functions of `os`, so that a test can end the process at every one of them.
"""

import contextlib
import hashlib
import os
import platform
import re
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

LOCK = ".lock"
"""The file that `lock` makes in a folder. It holds the id of the process that has the folder."""

_MACHINE = hashlib.blake2b(platform.node().encode(), digest_size=4).hexdigest()
"""Stands for this machine in names of files: whether a process of another one is alive is not known here."""

_PIECE = 2**22
_locks: dict[str, tuple[int, bool]] = {}
"""By folder, the open file of every lock that this process holds, and whether others may hold it too."""


class InUseError(OSError):
    """Another process has a folder."""


class NoLocksError(OSError):
    """A file system, or the system as a whole, has no locks."""


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
    writing = path.parent / f".{path.name}.{_MACHINE}-{os.getpid()}-{secrets.token_hex(4)}.writing"
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
    """Writes a text file atomically: if the process or the machine dies, the file has either its old or its new content.

    Raises:
      OSError: the file could not be written; an old file is intact.
    """
    path = Path(path)
    try:
        replace(path, [text.encode()])
    except OSError as error:
        raise OSError(f"could not write {path}: {error.strerror or error}") from error


def lock(folder: str | os.PathLike, *, shared: bool = False) -> None:
    """Gives a folder to this process until the process ends, however it ends; a second such call changes nothing.

    Call it before the first `save` in a script that may be started twice; in a run of several processes, in the one that saves.

    Args:
      folder: made if it is not there.
      shared: the folder is given to all processes that say so, and to no other one.

    Raises:
      InUseError: another process has the folder; the message names it.
      OSError: the folder cannot be written, or it is to be shared and its file system has no locks.
    """
    folder = Path(folder)
    key = os.path.realpath(folder)
    if key in _locks and (folder / LOCK).exists():
        before, was_shared = _locks[key]
        if shared or not was_shared:
            return
        del _locks[key]
        os.close(before)
    try:
        file = _take(folder, shared)
    except NoLocksError as missing:
        if shared:
            raise OSError(f"{folder} cannot be shared by processes: {missing}") from None
        warnings.warn(f"{folder} cannot be locked ({missing}): do not start two runs in it", stacklevel=2)
        return
    _locks[key] = file, shared


@contextlib.contextmanager
def held(folder: str | os.PathLike) -> Iterator[bool]:
    """Gives a folder to this process for the length of a block; false where another process has it.

    Raises:
      NoLocksError: its file system has no locks.
      OSError: it cannot be written.
    """
    try:
        file = _take(Path(folder), shared=False)
    except InUseError:
        yield False
        return
    try:
        yield True
    finally:
        os.close(file)


def _take(folder: Path, shared: bool) -> int:
    """The open file of a lock that was taken; closing it gives the folder back."""
    try:
        import fcntl  # POSIX only
    except ImportError:
        raise NoLocksError("this system has no file locks") from None
    try:
        _make_folder(folder)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise OSError(f"could not write {folder / LOCK}: {error.strerror or error}") from error
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, 100, 0).decode(errors="replace").strip() or "unknown"
        os.close(file)
        raise InUseError(f"{folder} is in use by process {holder}: wait until it ends, or use another folder") from None
    except OSError as error:
        os.close(file)
        raise NoLocksError(error.strerror or str(error)) from None
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    return file


def locked(folder: str | os.PathLike) -> bool:
    """Whether a process, this one or another, has a folder by `lock`; nothing is written."""
    folder = Path(folder)
    if os.path.realpath(folder) in _locks:
        return True
    try:
        import fcntl  # POSIX only

        file = os.open(folder / LOCK, os.O_RDWR)
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


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
    """Removes what processes of this machine left that died while they wrote."""
    for name in os.listdir(folder):
        found = re.fullmatch(rf"\..+\.{_MACHINE}-(\d+)-[0-9a-f]{{8}}\.writing", name)
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
