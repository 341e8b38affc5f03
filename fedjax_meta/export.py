"""Trained models as plain variables in safetensors files, which Flax and NumPy read without this library.

A file holds the leaves of a model's variables, named by their path with "/" between ("params/head/kernel"), and in its header
what they are. This reads them anywhere::

    from flax.traverse_util import unflatten_dict
    from safetensors.numpy import load_file

    variables = unflatten_dict(load_file("client3.safetensors"), sep="/")

The networks of `models` keep the outputs of a kernel on its first axis. In the files of runs they are on the last one, as in Flax
(`flax_layout`), so that `flax.linen.Dense`, `Conv` and `BatchNorm` take the variables as they are.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import __version__, checkpoint, checks, disk, sweeps
from fedjax_meta.algorithm import Algorithm, State, check_known, state_rows
from fedjax_meta.data import FederatedData
from fedjax_meta.keys import tagged
from fedjax_meta.masks import variables_shape
from fedjax_meta.simulation import run_keys
from fedjax_meta.study import phase
from fedjax_meta.study.folder import read_final, read_trials
from fedjax_meta.study.scenario import Clients, model_name
from fedjax_meta.study.step import final_phase
from fedjax_meta.study.study import DRAW, Study
from fedjax_meta.study.study import load as load_study
from fedjax_meta.study.tuning import KNOWN, NEW
from fedjax_meta.sweeps import Member
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
    for place, leaf in jax.tree_util.tree_leaves_with_path(variables):
        name = jax.tree_util.keystr(place, simple=True, separator="/") or "value"
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
    for name in arrays:
        above = next((parent for parent in _parents(name) if parent in arrays), None)
        if above is not None:
            raise ValueError(f"the leaf {above} has the name of the branch that holds {name}")
    try:
        header = {str(name): value if isinstance(value, str) else json.dumps(value) for name, value in (about or {}).items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"about must hold JSON values by name: {checks.first_line(error)}") from None
    try:
        disk.replace(Path(path), [to_bytes(arrays, metadata=header)])
    except OSError as error:
        raise OSError(f"could not write {path}: {error.strerror or error}") from error


def _parents(name: str) -> list[str]:
    """The branches above a leaf, `a` and `a/b` of `a/b/c`."""
    words = name.split("/")
    return ["/".join(words[:end]) for end in range(1, len(words))]


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
        tree: dict[str, Any] = {}
        for name, array in arrays.items():
            *parents, last = name.split("/")
            place = tree
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = array
        return tree
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    names = [jax.tree_util.keystr(place, simple=True, separator="/") or "value" for place, _ in paths]
    odd = set(names) ^ set(arrays)
    if odd:
        raise ValueError(f"{path} holds other leaves: {min(odd)} is {'missing' if min(odd) in names else 'not wanted'}")
    found = jax.tree.unflatten(structure, [arrays[name] for name in names])
    different = checks.mismatch(found, like)
    if different is not None:
        raise ValueError(f"{path} holds other leaves: {different}")
    return found


def personal(
    algorithm: Algorithm, key: Key, state: State, data: FederatedData, client: int, *, support: str, known: bool = True
) -> Variables:
    """The model that one client predicts with, after whatever its method does with its support view.

    Args:
      algorithm: what was trained.
      key: of the test, as `evaluation.evaluate` takes it: the model is the one that is tested there.
      state: of the training.
      data: the clients.
      client: its position in the data.
      support: name of the view to adapt on.
      known: whether these are the clients of the training.

    Raises:
      ValueError: no such client or view, a state of another method or model, known clients that are not as many as those of the
        training, arguments of another kind.
    """
    checks.instance("algorithm", algorithm, Algorithm, "fm.federate(fm.fedavg(task))")
    checks.instance("state", state, State, "algorithm.init(key, data)")
    checks.prng_key("key", key)
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    checks.indices("client", client, data.num_clients)
    data.sizes(support)
    if known:
        check_known(data, state.seen.shape[0])

    row = int(state_rows(state, data, jnp.asarray(client))) if known else None
    population = max(state.seen.shape[0], data.total_clients)

    def one(key: Key, state: State, data: FederatedData) -> Variables:
        own = jax.random.fold_in(key, data.ids_of(np.array(client)))
        return algorithm.personalize(own, state, data.client(client)[support], row, population)

    return jax.jit(one)(key, state, data)


OWN_LAYERS = ("mlp", "lenet", "fedpac_cnn", "mtfl_mlp", "mtfl_cnn", "elu_mlp", "logistic")
"""Models of the layers of `layers`, whose kernels have their outputs on the first axis."""


def flax_layout(variables: Variables) -> Variables:
    """The variables of a model of `OWN_LAYERS` with every kernel as Flax has it, its outputs on the last axis."""

    def moved(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return np.moveaxis(np.asarray(leaf), 0, -1) if name == "kernel" else leaf

    return jax.tree_util.tree_map_with_path(moved, variables)


class Exported(NamedTuple):
    """A model of a run, and what it is.

    Attributes:
      variables: the model.
      about: where it comes from, and how its inputs are made; `diverged` is the round from which on the run had diverged.
    """

    variables: Variables
    about: dict[str, Json]


def of_run(
    folder: str | Path,
    system: str,
    *,
    scenario: str | None = None,
    seed: int | None = None,
    client: int | str | None = None,
    new_client: int | str | None = None,
    data_dir: str | None = None,
) -> Exported:
    """A model of a finished run, from the checkpoint after its last round.

    Args:
      folder: of the run.
      system: its name in the study, or its title where no other one has it.
      scenario: its name in the study; needed where there are several.
      seed: the first of the study when not given.
      client: a known client, whose personalised model is wanted, by its number or by the name that the data set has for it; the
        server's model when neither this nor `new_client` is given.
      new_client: a client that never trained.
      data_dir: where prepared data sets are.

    Raises:
      ValueError: a folder without a run, an unknown name, a client that is not there, no checkpoint of that seed, the server's
        model of a method whose clients share none.
      OSError: a file cannot be read.
    """
    folder = Path(folder)
    if not (folder / "study.yaml").is_file():
        raise ValueError(f"{folder} holds no run (no study.yaml)")
    study = load_study(folder / "study.yaml")
    titles = {name: study.title_of(name) for name in study.systems}
    titled = [name for name, title in titles.items() if title == system]
    system = titled[0] if len(titled) == 1 else system
    if system not in study.systems:
        if any((folder / "results").glob(f"*/{system}.final.json")):
            raise ValueError(
                f"the last run of {folder} left {system} out, of which it has results: run it again with all its systems first"
            )
        names = ", ".join(name if name == title else f"{name} ({title})" for name, title in titles.items())
        raise ValueError(f"system={system!r} is unknown; allowed are {names}")
    place = _place(study, scenario)
    seed = study.seeds[0] if seed is None else seed
    if seed not in study.seeds:
        # A folder keeps what was taken out of its study; reports and exports leave it out.
        raise ValueError(f"seed={seed} is not in the study, which has the seeds {', '.join(map(str, study.seeds))}")
    if client is not None and new_client is not None:
        raise ValueError(f"client={client} and new_client={new_client}: give one of them")
    clients = study.scenarios[place].build(data_dir)
    if client is not None and study.systems[system].pooled:
        raise ValueError(f"client={client}, but {system} is central training, which knows no clients: leave client out")
    found_phase = final_phase(study, place, system, clients)
    member, state = restored(found_phase, folder, seed, clients)
    algorithm = sweeps.member_algorithm(found_phase.build, member)
    if client is None and new_client is None and not jax.tree.leaves(algorithm.exchange(found_phase.data).down[0]):
        raise ValueError(
            f"clients of {system} share no model, so that the server has the first one: name a client (--client 0)"
        )
    (diverged,) = [trial.diverged for trial in read_final(folder, study, place, system)[0] if trial.seed == seed]
    name = study.scenarios[place].model or model_name(None, clients.train)

    def exported(variables: Variables, what: str) -> Exported:
        # A method's own tree, such as a mixture of models, has kernels of other shapes, and stays as it is.
        plain = name in OWN_LAYERS and checks.mismatch(variables, variables_shape(clients.task)) is None
        layout = "flax" if plain else "as trained"
        return Exported(flax_layout(variables) if plain else variables, {**about, "client": what, "layout": layout})

    about: dict[str, Json] = {
        "fedjax_meta": __version__,
        "system": study.title_of(system),
        "method": study.systems[system].method,
        "scenario": clients.title,
        "model": {"name": name, "options": dict(study.scenarios[place].model_options)},
        "numbers": dict(member.numbers),
        "seed": seed,
        "round": int(state.round),
        "diverged": diverged,
        **_inputs(clients.train),
    }
    if client is None and new_client is None:
        return exported(state.model, "the server's model")
    group, data = (KNOWN, clients.train) if new_client is None else (NEW, clients.new)
    if data is None:
        raise ValueError(f"new_client={new_client}, but the scenario {place} has no new clients")
    option, given = ("client", client) if new_client is None else ("new_client", new_client)
    assert given is not None
    number = _number(option, given, clients.names)
    support = study.scenarios[place].adapt_on if group == KNOWN else "support"
    key = tagged(run_keys(jax.random.key(seed))[2], group, state.round)
    found = personal(algorithm, key, state, data, number, support=support, known=group == KNOWN)
    return exported(found, f"{group} client {number}")


def _number(option: str, client: int | str, names: tuple[tuple[str, ...], tuple[str, ...]]) -> int:
    """The number of a client that is given as such, as text too, or by its name; `names` are those of known and new clients."""
    if isinstance(client, str) and not client.removeprefix("-").isdecimal():
        mine, others = names if option == "client" else reversed(names)
        if client in others:
            kind, right = ("a new client", "new_client") if option == "client" else ("a client that trained", "client")
            raise ValueError(f"{option}={client!r} is {kind}: give {right}={client!r} in its place")
        checks.one_of(option, client, mine)
        return mine.index(client)
    return int(client)


def _place(study: Study, scenario: str | None) -> str:
    """The name of a scenario, which of several draws names one.

    Raises:
      ValueError: no such scenario, or several.
    """
    names = list(study.scenarios)
    if scenario is None and len(names) > 1:
        raise ValueError(f"scenario is needed: the run has {', '.join(names)}")
    place = names[0] if scenario is None else scenario
    drawn = [name for name in names if name.partition(DRAW)[0] == place]
    if place not in names and drawn:
        if len(drawn) > 1:
            raise ValueError(f"scenario={place!r} was drawn {len(drawn)} times: give one of {', '.join(drawn)}")
        return drawn[0]
    checks.one_of("scenario", place, names)
    return place


def _inputs(data: FederatedData) -> dict[str, Json]:
    """How the model's inputs are made of stored samples: `(x - offset) * scale`."""
    shapes = jax.tree.map(lambda leaf: list(leaf.shape[1:]), data.x)
    shape = {"input_shape": shapes, "classes": data.num_classes}
    if data.offset is None or data.scale is None:
        return shape
    offset, scale = (jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), tree) for tree in (data.offset, data.scale))
    return {**shape, "offset": offset, "scale": scale}


def restored(final: phase.Phase, folder: Path, seed: int, clients: Clients) -> tuple[Member, State]:
    """The member of a seed in the final runs of a finished system, and its state.

    Args:
      final: of the system, see `study.step.final_phase`.
      folder: of the run.
      seed: of the study.
      clients: of the scenario.

    Raises:
      ValueError: no finished results, no such seed, other clients, or no checkpoint of the results' last round.
    """
    scenario, system = final.scenario, final.system
    path = folder / "results" / scenario / f"{system}.final.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no finished results of {system} on {scenario}")
    trials, _ = read_trials(path)
    chosen = next(((label, trial) for label, trial in trials.items() if trial.seed == seed), None)
    if chosen is None:
        raise ValueError(f"seed={seed} was not run; {system} has the seeds {', '.join(str(t.seed) for t in trials.values())}")
    label, done = chosen[0], chosen[1].rows[-1]["round"]
    # Seeds that were added later lie beside the older ones, whose checkpoint may be of fewer rounds than the results.
    for states in sorted((folder / "state" / scenario).glob(f"{system}.final.*")):
        config = checkpoint.saved_config(states)
        if config is None or label not in config["members"]:
            continue
        if config["data"] != clients.fingerprint:
            raise ValueError(f"the clients of {scenario} are not those of the run: was the data set changed?")
        members = [Member(trials[name].numbers, trials[name].seed) for name in config["members"]]
        shapes = phase.saved_shapes(final, members)
        saved = checkpoint.restore(states, shapes, config)
        number = config["members"].index(label)
        if saved is not None and int(saved.state.members.round[number]) == done:
            return members[number], jax.tree.map(lambda leaf, m=number: leaf[m], saved.state.members)
    raise ValueError(f"{folder} has no checkpoint of {system} with {label} after round {done}, of which its results are")
