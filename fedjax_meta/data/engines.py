"""Federated data that other engines wrote: FedJAX's SQLite, TensorFlow Federated's HDF5, and PFLlib's folders.

Nothing of a file is run. PFLlib pickles a dict of arrays into its .npz files; it is read by a parser that knows arrays alone.
"""

import codecs
import io
import os
import pickle
import sqlite3
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from fedjax_meta import checks, runtime
from fedjax_meta.data import text
from fedjax_meta.data.natural import Natural, class_labels, decoded, of_clients
from fedjax_meta.data.samples import class_count

PAIRS = (("pixels", "label"), ("x", "y"), ("image", "label"))
"""Names of inputs and targets in the data sets of FedJAX and TensorFlow Federated."""

SNIPPETS = "snippets"
"""The feature of the Shakespeare data of both: texts of one speaker."""


def read_fedjax_sqlite(path: str | os.PathLike, *, length: int = 80, published: str = "") -> Natural:
    """Reads a database of FedJAX: a table `federated_data (client_id, data, num_examples)` of zlib-compressed msgpack.

    Clients have the features `pixels` and `label`, `x` and `y`, or `image` and `label`; of `snippets` (Shakespeare),
    next-character sequences are made.

    Args:
      path: of the database, e.g. `shakespeare_train.sqlite`.
      length: T of sequences.
      published: see `Natural`.

    Raises:
      ValueError: no such file, no such database, damaged data, clients without samples or of other features.
    """
    shown = repr(os.fspath(path))
    if not os.path.isfile(path):
        raise ValueError(
            f"there is no file {shown}: FedJAX downloads its databases, e.g. fedjax.datasets.shakespeare.load_split"
        )
    connection = sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro", uri=True)
    try:
        rows = connection.execute("SELECT client_id, data FROM federated_data ORDER BY rowid").fetchall()
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{shown} is no database of FedJAX: {checks.first_line(error)}") from None
    finally:
        connection.close()
    clients = [(decoded(client), _unpacked(decoded(client), shown, data)) for client, data in rows]
    return _natural(clients, shown, Path(path).stem, length, published)


def read_tff_hdf5(path: str | os.PathLike, *, length: int = 80, published: str = "") -> Natural:
    """Reads an HDF5 file of TensorFlow Federated: a group `examples` with a group a client; features as for FedJAX.

    It needs the package h5py. Arguments and errors as for `read_fedjax_sqlite`.
    """
    shown = repr(os.fspath(path))
    try:
        import h5py
    except ImportError:
        raise ValueError(f"reading {shown} needs the package h5py: pip install 'fedjax_meta[hdf5]'") from None
    if not os.path.isfile(path):
        raise ValueError(
            f"there is no file {shown}: TensorFlow Federated downloads its archives, e.g. tff.simulation.datasets.shakespeare"
        )
    try:
        with h5py.File(path, "r") as file:
            if "examples" not in file:
                raise ValueError(f"{shown} is no HDF5 file of TensorFlow Federated: it has no group 'examples'")
            clients = _hdf5_clients(file["examples"], h5py)
    except _Refused as error:
        raise ValueError(f"{shown} is no HDF5 file of TensorFlow Federated: {error}") from None
    except (OSError, RuntimeError, KeyError) as error:
        raise ValueError(f"{shown} is no HDF5 file, or it was cut off: {checks.first_line(error)}") from None
    return _natural(clients, shown, Path(path).stem, length, published)


def _hdf5_clients(groups: Any, h5py: Any) -> list[tuple[str, dict[str, Any]]]:
    """The features of each client.

    HDF5 can point into other files, whose content would pass for samples, and promise any size.
    """
    if not isinstance(groups, h5py.Group):
        raise _Refused("'examples' is no group")
    total, free = 0, runtime.free_host_bytes()

    def own(group: Any, name: str, kind: Any, what: str) -> Any:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise _Refused(f"{name!r} is a link to another place or file")
        if not isinstance(group[name], kind):
            raise _Refused(f"{name!r} is no {what}")
        return group[name]

    clients = []
    for client in groups:
        features, found = own(groups, client, h5py.Group, "group of a client"), {}
        for name in features:
            dataset = own(features, name, h5py.Dataset, "dataset")
            if dataset.external or dataset.is_virtual:
                raise _Refused(f"{name!r} of client {client!r} takes its numbers from another file")
            total += dataset.nbytes
            _check_size(total, free)
            found[name] = np.asarray(dataset)
        clients.append((client, found))
    return clients


def _check_size(size: float, free: float) -> None:
    if size > free:
        raise _Refused(f"its content takes {size / 1e9:.3g} GB, more than the {free / 1e9:.3g} GB of free memory")


def _natural(clients: list[tuple[str, dict[str, Any]]], shown: str, name: str, length: int, published: str) -> Natural:
    if not clients:
        raise ValueError(f"{shown} has no clients")
    features = clients[0][1]
    if SNIPPETS in features:
        return _of_snippets(clients, shown, name, length, published)
    pair = next((pair for pair in PAIRS if set(pair) <= features.keys()), None)
    if pair is None:
        raise ValueError(
            f"clients of {shown} have the features {', '.join(features)}; pixels and label, x and y, or snippets are read"
        )
    rows = []
    for client, arrays in clients:
        if not set(pair) <= arrays.keys():
            raise ValueError(f"client {client!r} of {shown} has no {' and '.join(pair)}")
        x, y = (np.asarray(arrays[key]) for key in pair)
        if not x.ndim or not y.ndim:
            raise ValueError(f"client {client!r} of {shown} must have {' and '.join(pair)} of each sample")
        grey = pair[0] != "x" and x.ndim == 3  # images without a channel
        rows.append((client, x[..., None] if grey else x, class_labels(y, f"client {client!r} of {shown}")))
    return of_clients(rows, where=shown, num_classes=_classes(rows), name=name, published=published)


def _of_snippets(clients: list[tuple[str, dict[str, Any]]], shown: str, name: str, length: int, published: str) -> Natural:
    texts = []
    for client, arrays in clients:
        snippets = np.asarray(arrays.get(SNIPPETS, ()))
        if not snippets.ndim or not len(snippets):
            raise ValueError(f"client {client!r} of {shown} has no samples")
        texts.append((client, "\n".join(map(decoded, snippets.tolist()))))
    vocabulary = text.characters(spoken for _, spoken in texts)
    rows = [(client, *text.shifted_by_one(text.encode(spoken, vocabulary), length)) for client, spoken in texts]
    kept = [row for row in rows if len(row[1])]
    note = (
        f"{len(rows) - len(kept)} clients have fewer than {length + 1} characters and are left out"
        if len(kept) < len(rows)
        else ""
    )
    return of_clients(
        kept,
        where=shown,
        num_classes=len(vocabulary),
        name=name,
        note=note,
        published=published,
        ordered=True,
        vocabulary=vocabulary,
    )


def _unpacked(client: str, shown: str, data: bytes) -> dict[str, Any]:
    """A client's features, from zlib-compressed msgpack with arrays as extension types 1 (numbers), 3 (one number), 4 (bytes)."""

    def extension(code: int, content: bytes) -> Any:
        if code in (1, 3):
            shape, dtype, buffer = msgpack.unpackb(content, raw=True)
            array = np.frombuffer(buffer, np.dtype(dtype.decode())).reshape(shape)
            return array if code == 1 else array[()]
        if code == 4:
            shape, flat = msgpack.unpackb(content, raw=True)
            return np.array(flat, object).reshape(shape)
        raise ValueError(f"unknown extension type {code}")

    try:
        features = msgpack.unpackb(_inflated(data), ext_hook=extension, raw=False)
    # Damaged data end in exceptions of many types, of msgpack and of NumPy.
    except Exception as error:
        raise ValueError(f"the data of client {client!r} of {shown} are damaged: {checks.first_line(error)}") from None
    if not isinstance(features, dict):
        raise ValueError(f"the data of client {client!r} of {shown} are no dict of features")
    return features


def _inflated(data: bytes) -> bytes:
    """What zlib compressed, if there is room for it: a file of kilobytes can hold gigabytes of zeros."""
    free = runtime.free_host_bytes()
    stream = zlib.decompressobj()
    found = stream.decompress(data, free // 4)
    if not stream.eof:
        raise ValueError(f"they are cut off, or take more than a quarter of the {free / 1e9:.3g} GB of free memory")
    return found


def _classes(rows: Sequence[tuple[str, Any, np.ndarray]]) -> int:
    """How many classes the clients (name, x, y) have, at least 1; see `class_count` for what it warns of."""
    return max(class_count(*(y for _, _, y in rows)), 1)


# ----------------------------------------------------------------------------------------------------------------------- PFLlib


def read_pfllib(folder: str | os.PathLike) -> Natural:
    """Reads a data set of PFLlib: folders `train` and `test` with `0.npz, 1.npz, ...`, each with x and y of a client.

    Images of up to 4 channels, `[n, channels, height, width]`, become `[n, height, width, channels]`.

    Raises:
      ValueError: no such folders, a client in one of them alone, a file that holds anything but arrays x and y.
    """
    folder = Path(folder)
    parts: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for part in ("train", "test"):
        files = sorted((folder / part).glob("*.npz"), key=lambda path: (len(path.stem), path.stem))
        if not files:
            raise ValueError(
                f"there is no .npz in {str(folder / part)!r}: PFLlib's dataset/generate_*.py write NAME/train and NAME/test"
            )
        parts[part] = {path.stem: _pair(path) for path in files}
    if parts["train"].keys() != parts["test"].keys():
        odd = sorted(parts["train"].keys() ^ parts["test"].keys())[0]
        raise ValueError(f"client {odd} of {str(folder)!r} is in one of train and test alone")
    rows, sizes = [], []
    for client, (x, y) in parts["train"].items():
        x_test, y_test = parts["test"][client]
        if x.shape[1:] != x_test.shape[1:]:
            raise ValueError(f"client {client} of {str(folder)!r} has samples {list(x.shape[1:])} in train and others in test")
        inputs = np.concatenate([x, x_test])
        # PFLlib stores images [channels, height, width].
        inputs = np.moveaxis(inputs, 1, -1) if inputs.ndim == 4 and inputs.shape[1] <= 4 else inputs
        labels = class_labels(np.concatenate([y, y_test]), f"client {client} of {str(folder)!r}")
        rows.append((client, inputs, labels))
        sizes.append(len(y))
    return of_clients(
        rows,
        where=repr(str(folder)),
        num_classes=_classes(rows),
        name=folder.name,
        train_sizes=np.array(sizes, np.int64),
    )


def _pair(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with zipfile.ZipFile(path) as archive:
            _check_size(sum(member.file_size for member in archive.infolist()), runtime.free_host_bytes())
            stored = dict(_members(archive, archive.namelist()))
    except (zipfile.BadZipFile, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{str(path)!r} is no .npz, or it was cut off: {checks.first_line(error)}") from None
    except _Refused as error:
        raise ValueError(f"{str(path)!r} holds more than arrays: {error}") from None
    # Damage ends in exceptions of a dozen types, of pickle and of NumPy.
    except Exception as error:
        raise ValueError(f"{str(path)!r} holds more than arrays, or is damaged: {checks.first_line(error)}") from None
    data = stored.get("data", stored)
    data = data[()] if isinstance(data, np.ndarray) and data.shape == () else data
    if not isinstance(data, dict) or not {"x", "y"} <= data.keys():
        raise ValueError(f"{str(path)!r} has no arrays x and y")
    x, y = np.asarray(data["x"]), np.asarray(data["y"])
    if not checks.is_real(x.dtype) or not np.issubdtype(y.dtype, np.integer) or y.ndim != 1 or len(x) != len(y):
        raise ValueError(
            f"{str(path)!r} must have numbers x [n, ...] and class labels y [n], not {x.dtype}{list(x.shape)} and "
            f"{y.dtype}{list(y.shape)}"
        )
    return x, y


def _members(archive: zipfile.ZipFile, names: list[str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        content = io.BytesIO(archive.read(name))
        version = np.lib.format.read_magic(content)
        read: Callable[..., Any] = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, columns_first, dtype = read(content)
        if dtype.hasobject:
            loaded = _Arrays(content).load()
            value = loaded.item() if isinstance(loaded, np.ndarray) and loaded.shape == () else loaded
        else:
            value = np.frombuffer(content.read(), dtype).reshape(shape, order="F" if columns_first else "C")
        yield name.removesuffix(".npy"), value


class _Refused(Exception):  # noqa: N818 - never leaves this module
    """What a pickle asks for that is no array."""


class _Plain:
    """An array or a dtype while it is read: what pickle's instructions do to it is kept, and nothing is called."""

    def __init__(self, kind: str, *arguments: Any) -> None:
        self.kind, self.arguments, self.state = kind, arguments, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Arrays(pickle.Unpickler):
    """Reads dicts and lists of NumPy arrays; every name that a pickle asks for beside those of arrays is refused."""

    KNOWN = {  # noqa: RUF012
        ("numpy", "ndarray"): lambda: None,
        ("numpy", "dtype"): lambda *arguments: _Plain("dtype", *arguments),
        ("_codecs", "encode"): lambda value, coding: codecs.encode(str(value), "latin1") if coding == "latin1" else b"",
    }

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in for the names of arrays."""
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return lambda *arguments: _Plain("array")
        if (module, name) in self.KNOWN:
            return self.KNOWN[module, name]
        raise _Refused(f"it asks for {module}.{name}")

    def load(self) -> Any:
        """The content, with real arrays in place of what was kept."""
        return _real(super().load())


def _real(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _real(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_real(item) for item in value]
    if not isinstance(value, _Plain):
        return value
    if value.kind != "array" or not isinstance(value.state, tuple) or len(value.state) != 5:
        raise _Refused("an array without content")
    _, shape, dtype, fortran, content = value.state
    code = dtype.arguments[0] if isinstance(dtype, _Plain) else None
    if code == "O" or (isinstance(code, str) and code.startswith("O")):
        items = [_real(item) for item in content]
        return items[0] if shape == () else items
    byte_order = dtype.state[1] if isinstance(dtype, _Plain) and dtype.state else "="
    real = np.dtype(code).newbyteorder(byte_order if byte_order in "<>=" else "=")
    if real.hasobject:
        raise _Refused("an array of Python objects")
    return np.frombuffer(content, real).reshape(shape, order="F" if fortran else "C")
