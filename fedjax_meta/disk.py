"""Files that survive the death of a process or of the machine, and folders that only one process writes.

All that changes files goes through functions of `os`, so that a test can end the process at every one of them.
"""

import contextlib
import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

LOCK = ".lock"
"""The file that `lock` makes in a folder. It holds the id of the process that has the folder."""

_PIECE = 2**22
_locks: dict[str, int] = {}
"""The open file of every lock that this process holds, by folder."""


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
    writing = path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.writing"
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


def lock(folder: str | os.PathLike) -> None:
    """Gives a folder to this process until the process ends, however it ends; a second call changes nothing.

    Call it before the first `save` in a script that may be started twice; in a run of several processes, in the one that saves.

    Raises:
      OSError: another process has the folder (the message names it), or it cannot be written.
    """
    folder = Path(folder)
    key = os.path.realpath(folder)
    if key in _locks and (folder / LOCK).exists():
        return
    try:
        import fcntl  # POSIX only
    except ImportError:
        warnings.warn(f"this system has no file locks: do not start two runs in {folder}", stacklevel=2)
        return
    try:
        _make_folder(folder)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise OSError(f"could not write {folder / LOCK}: {error.strerror or error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, 100, 0).decode(errors="replace").strip() or "unknown"
        os.close(file)
        raise OSError(f"{folder} is in use by process {holder}: wait until it ends, or use another folder") from None
    except OSError as error:
        os.close(file)
        warnings.warn(f"{folder} cannot be locked ({error.strerror}): do not start two runs in it", stacklevel=2)
        return
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    _locks[key] = file


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
    """Removes what processes left that died while they wrote."""
    for name in os.listdir(folder):
        found = re.fullmatch(r"\..+\.(\d+)-[0-9a-f]{8}\.writing", name)
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
