"""Trained models as plain variables in safetensors files, which Flax and NumPy read without this library.

A file holds the leaves of a model's variables, named by their path with "/" between ("params/head/kernel"), and in its header
what they are. This reads them anywhere::

    from flax.traverse_util import unflatten_dict
    from safetensors.numpy import load_file

    variables = unflatten_dict(load_file("client3.safetensors"), sep="/")

The networks of `models` for images and sensors keep the outputs of a kernel on its first axis. In the files of runs they are on
the last one, as in Flax (`flax_layout`), so that `Dense`, `Conv`, `BatchNorm` and `GroupNorm` of `flax.linen` take the variables
as they are; `own_layout` turns them back.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_meta import checks, disk
from fedjax_meta.algorithm import Algorithm, State, check_known, check_one_run, rows_with_ids
from fedjax_meta.contract import Method
from fedjax_meta.data import FederatedData
from fedjax_meta.engine import in_precision
from fedjax_meta.rounds.assemble import as_algorithm
from fedjax_meta.types import Key, PyTree, Variables

_TYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "bool",
)
"""What `safetensors.numpy` writes and reads again."""

Json = Any
"""What a JSON text can hold."""


def save(path: str | Path, variables: PyTree, about: Mapping[str, Json] | None = None) -> None:
    """Writes variables to a safetensors file.

    Args:
      path: of the file; an old one there is replaced at once.
      variables: a pytree of arrays; leaves are named by their path.
      about: for the header, JSON values by name.

    Raises:
      ImportError: the package safetensors is not installed.
      ValueError: a file that is not named *.safetensors, no leaves, a leaf that is no array of numbers, two leaves of one name.
      OSError: the file cannot be written.
    """
    if Path(path).suffix != ".safetensors":
        raise ValueError(f"{path} must end with .safetensors, the format that is written")
    try:
        from safetensors.numpy import save as to_bytes
    except ImportError:
        raise ImportError("an export needs the package safetensors: pip install safetensors") from None
    arrays: dict[str, np.ndarray] = {}
    for where, leaf in jax.tree_util.tree_leaves_with_path(variables):
        name = jax.tree_util.keystr(where, simple=True, separator="/") or "value"
        if jax.dtypes.issubdtype(getattr(leaf, "dtype", np.dtype(object)), jax.dtypes.extended):
            raise ValueError(f"the leaf {name} is a random key, which a model for other programs cannot hold")
        if name in arrays:
            raise ValueError(f"two leaves have the name {name}")
        # The reshape is for scalars, of which `ascontiguousarray` makes vectors.
        arrays[name] = np.ascontiguousarray(leaf).reshape(np.shape(leaf))
        dtype = arrays[name].dtype
        if dtype.name not in _TYPES:
            raise ValueError(f"the leaf {name} is {dtype}, which an export cannot hold; it holds {', '.join(_TYPES)}")
        if name == "__metadata__":
            raise ValueError("a leaf cannot have the name __metadata__, under which safetensors files keep what is about them")
    if not arrays:
        raise ValueError("there is nothing to export: the model has no leaves")
    _check_branches(arrays)
    try:
        header = {str(name): value if isinstance(value, str) else json.dumps(value) for name, value in (about or {}).items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"about must hold JSON values by name: {checks.first_line(error)}") from None
    try:
        disk.replace(Path(path), [to_bytes(arrays, metadata=header)])
    except OSError as error:
        raise OSError(f"could not write {path}: {error.strerror or error}") from error


def _check_branches(names: Collection[str]) -> None:
    for name in names:
        words = name.split("/")
        for above in ("/".join(words[:end]) for end in range(1, len(words))):
            if above in names:
                raise ValueError(f"the leaf {above} has the name of the branch that holds {name}")


def load(path: str | Path, like: PyTree = None) -> PyTree:
    """The variables of a file, as nested dictionaries of NumPy arrays.

    Args:
      path: of the file.
      like: a tree of the wanted structure, e.g. `jax.eval_shape(task.init, key)`, for variables that are no dictionaries.

    Raises:
      ValueError: a file of another kind, or damaged; leaves that differ from those of `like` in name, shape or type.
      OSError: the file cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        arrays = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or is damaged: {checks.first_line(error)}") from None
    if like is None:
        _check_branches(arrays)
        tree: dict[str, Any] = {}
        for name, array in arrays.items():
            *parents, last = name.split("/")
            branch = tree
            for parent in parents:
                branch = branch.setdefault(parent, {})
            branch[last] = array
        return tree
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    names = [jax.tree_util.keystr(where, simple=True, separator="/") or "value" for where, _ in paths]
    odd = set(names) ^ set(arrays)
    if odd:
        raise ValueError(f"{path} holds other leaves: {min(odd)} is {'missing' if min(odd) in names else 'not wanted'}")
    found = jax.tree.unflatten(structure, [arrays[name] for name in names])
    different = checks.mismatch(found, like)
    if different is not None:
        raise ValueError(f"{path} holds other leaves: {different}")
    return found


def personal(
    method: Method | Algorithm,
    key: Key,
    state: State,
    data: FederatedData,
    client: int,
    *,
    support: str,
    known: bool = True,
) -> Variables:
    """The model that one client predicts with, after whatever its method does with its support view.

    Args:
      method: what was trained, or the algorithm that holds it.
      key: of the test, as `evaluation.evaluate` takes it: the model is the one that is tested there.
      state: of the training.
      data: the clients.
      client: its position in the data.
      support: name of the view to adapt on.
      known: whether these are the clients of the training.

    Raises:
      TypeError: neither a method nor an algorithm.
      ValueError: no such client or view, a state of another method or model, known clients that are not as many as those of the
        training, arguments of another kind.
    """
    algorithm = as_algorithm(method)
    checks.instance("state", state, State, "algorithm.init(key, data)")
    checks.prng_key("key", key)
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    checks.indices("client", client, data.num_clients)
    data.sizes(support)
    check_one_run(state)
    if known:
        check_known(data, state.ids)

    row, population = None, None
    if known:
        population, id_ = max(state.seen.shape[0], data.total_clients), data.ids_of(np.array(client))  # as in `evaluate`
        row = int(rows_with_ids(state, np.asarray(id_), population))
        if row < 0:
            raise ValueError(f"the state has no row of client {id_}, because that client did not train: give known=False")

    def one(key: Key, state: State, data: FederatedData) -> Variables:
        own = jax.random.fold_in(key, data.ids_of(np.array(client)))
        return algorithm.personalize(own, state, data.client(client)[support], row, population)

    return jax.jit(in_precision("float32", one))(key, state, data)  # that of tests


OWN_LAYERS = ("mlp", "lenet", "fedpac_cnn", "mtfl_mlp", "mtfl_cnn", "elu_mlp", "logistic", "sensor_cnn", "resnet18")
"""Models of the layers of `layers`, whose kernels have their outputs on the first axis."""


def flax_layout(variables: Variables) -> Variables:
    """The variables of a model of `OWN_LAYERS` with every kernel as Flax has it, its outputs on the last axis."""
    return _kernels_moved(variables, 0, -1)


def own_layout(variables: Variables) -> Variables:
    """The inverse of `flax_layout`: a model from a file of `fedjax-meta export`, as tasks of `OWN_LAYERS` take it."""
    return _kernels_moved(variables, -1, 0)


def _kernels_moved(variables: Variables, source: int, destination: int) -> Variables:
    def moved(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return np.moveaxis(np.asarray(leaf), source, destination) if name == "kernel" else leaf

    return jax.tree_util.tree_map_with_path(moved, variables)
