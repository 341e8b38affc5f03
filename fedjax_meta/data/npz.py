"""Safe reading of `.npz` files: nothing is allocated before the file was found to hold what its headers promise.

An `.npz` is a zip archive of `.npy` files. Header sizes, in the archive's table and in the arrays, cannot be trusted: a file of a
few kilobytes can claim terabytes.
"""

import math
import os
import warnings
import zipfile
from typing import IO, Any

import numpy as np

from fedjax_meta import checks, runtime

LONGEST_HEADER = 10_000
"""Bytes; the header of an array takes about a hundred."""


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """All arrays of a file, by name.

    Raises:
      ValueError: no such file, no `.npz`, damage, arrays of Python objects, more numbers than fit into the free memory; the
        message is one line and begins with the path.
    """
    shown = repr(os.fspath(path))
    if not os.path.exists(path):
        raise ValueError(f"there is no file {shown}")
    if not os.path.isfile(path):
        raise ValueError(f"{shown} is a folder or a device, not an .npz file")
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
            _check_sizes(archive, members)
            return {member.filename.removesuffix(".npy"): _array(archive, member) for member in members}
    except _Refused as error:
        raise ValueError(f"{shown} is not an .npz of plain arrays that can be read: {error}") from None
    except PermissionError:
        raise ValueError(f"{shown} cannot be read: permission denied") from None
    # A damaged archive, a damaged stream and a damaged header end in exceptions of a dozen types (zlib.error, KeyError,
    # struct.error, tokenize.TokenError, NotImplementedError, ...).
    except Exception as error:
        raise ValueError(f"{shown} is not an .npz of plain arrays, or it is damaged: {checks.first_line(error)}") from None


def names(path: str | os.PathLike) -> list[str]:
    """The names of the arrays of a file that `read` takes."""
    with zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]


class _Refused(Exception):  # noqa: N818 - never leaves this module
    """What is wrong, in words."""


def _check_sizes(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo]) -> None:
    total = 0
    for member in members:
        with archive.open(member) as file:
            # NumPy reads a header before it looks at its length.
            begin = file.read(12)
        length = int.from_bytes(begin[8:], "little") if begin[6:7] == b"\x02" else 0
        if length > LONGEST_HEADER:
            raise _Refused(f"the header of {member.filename} has {length} bytes, more than the {LONGEST_HEADER} allowed")
        with archive.open(member) as file:
            shape, dtype = _header(file, member)
            size, promised = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
        if size != promised:
            raise _Refused(
                f"the header of {member.filename} promises {list(shape)} {dtype}, {size} bytes, but the archive has {promised}"
            )
        total += size
    free = runtime.free_host_bytes()
    if total > free:
        raise _Refused(f"its arrays take {total / 1e9:.1f} GB, more than the {free / 1e9:.1f} GB of free memory")


def _header(file: IO[bytes], member: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype[Any]]:
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in readers:
        raise _Refused(f"{member.filename} has version {version} of the .npy format")
    with warnings.catch_warnings():  # of a header that Python 2 wrote
        warnings.simplefilter("ignore")
        shape, _, dtype = readers[version](file)
    if dtype.hasobject:
        raise _Refused(
            f"{member.filename} holds Python objects (samples of mixed shape, or names? .astype(str) makes text of names)"
        )
    if any(extent < 0 for extent in shape):
        raise _Refused(f"the header of {member.filename} has the shape {list(shape)}")
    return shape, dtype


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    # zipfile compares the CRC-32 of an entry when it is read to its end.
    with archive.open(member) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array = np.lib.format.read_array(file, allow_pickle=False)
        if file.read(1):
            raise _Refused(f"{member.filename} is longer than its header says")
    return array
