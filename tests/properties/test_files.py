"""Prepared arrays: what was written is read, and a damaged file is refused with one line or holds the same numbers."""

import io
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_meta.data import npz

DTYPES = st.sampled_from(["u1", "<i4", ">i8", "<f4", "f2", "?", "<c8", "U3"])
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
ARRAYS = {"x": np.random.default_rng(0).normal(size=(20, 3)), "y": np.arange(20) % 3}


def _file(arrays, *, compressed):
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **arrays)
    return file.getvalue()


def _read(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.npz")
        path.write_bytes(content)
        return npz.read(path)


@given(dtype=DTYPES, shape=SHAPES, fortran=st.booleans(), compressed=st.booleans())
def test_what_was_written_is_read(dtype, shape, fortran, compressed):
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    array = np.asfortranarray(array) if fortran else array
    found = _read(_file({"a b": array}, compressed=compressed))
    assert list(found) == ["a b"] and found["a b"].dtype == array.dtype and np.array_equal(found["a b"], array)


WHOLE = {compressed: _file(ARRAYS, compressed=compressed) for compressed in (False, True)}


@settings(max_examples=300)
@given(compressed=st.booleans(), place=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255), length=st.integers(0, 60))
def test_damage_is_refused_or_harmless(compressed, place, bits, length):
    """A changed byte, followed by a hole of some length."""
    content = bytearray(WHOLE[compressed])
    at = int(place * len(content))
    content[at] ^= bits
    content[at + 1 : at + 1 + length] = bytes(min(length, len(content) - at - 1))
    try:
        found = _read(bytes(content))
    except ValueError as error:
        assert "\n" not in str(error)
        return
    # The names of the arrays are not covered by a checksum, and a record of the directory may vanish.
    known = {key: value for key, value in found.items() if key in ARRAYS}
    assert all(np.array_equal(value, ARRAYS[key]) for key, value in known.items())


@given(compressed=st.booleans(), share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(compressed, share):
    content = WHOLE[compressed]
    try:
        found = _read(content[: int(share * len(content))])
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        raise AssertionError(f"read {list(found)} from a truncated file")
