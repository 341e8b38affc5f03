"""Models of a finished run, for `export.save`."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_meta import __version__, checkpoint, checks, sweeps
from fedjax_meta.algorithm import State
from fedjax_meta.blocks import run_keys
from fedjax_meta.data import FederatedData
from fedjax_meta.export import OWN_LAYERS, flax_layout, personal
from fedjax_meta.keys import tagged
from fedjax_meta.masks import variables_shape
from fedjax_meta.study import phase
from fedjax_meta.study.files import DRAW
from fedjax_meta.study.job import final_phase
from fedjax_meta.study.result_files import read_final, read_trials
from fedjax_meta.study.scenario import Clients, model_name
from fedjax_meta.study.study import Study, load
from fedjax_meta.study.tuning import KNOWN, NEW
from fedjax_meta.sweeps import Member
from fedjax_meta.types import Variables

Json = Any
"""What a JSON text can hold."""


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
    layout: str = "as trained",
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
      layout: of kernels: "as trained", which the study's task and `tasks.starting_from` take, or "flax", what `flax.linen` takes,
        where the model is of the library's networks for images and sensors (see `export.flax_layout`).

    Raises:
      ValueError: another layout, a folder without a run, an unknown name, a client that is not there, no checkpoint of that seed,
        the server's model of a method whose clients share none.
      OSError: a file cannot be read.
    """
    checks.one_of("layout", layout, ("as trained", "flax"))
    folder = Path(folder)
    if not (folder / "study.yaml").is_file():
        raise ValueError(f"{folder} holds no run (no study.yaml)")
    study = load(folder / "study.yaml")
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
    scenario = _scenario(study, scenario)
    seed = study.seeds[0] if seed is None else seed
    if seed not in study.seeds:
        # A folder keeps what was taken out of its study; reports and exports leave it out.
        raise ValueError(f"seed={seed} is not in the study, which has the seeds {', '.join(map(str, study.seeds))}")
    if client is not None and new_client is not None:
        raise ValueError(f"client={client} and new_client={new_client}: give one of them")
    clients = study.scenarios[scenario].build(data_dir)
    if client is not None and study.systems[system].pooled:
        raise ValueError(f"client={client}, but {system} is central training, which knows no clients: leave client out")
    runs = final_phase(study, scenario, system, clients)
    member, state = restored(runs, folder, seed, clients)
    algorithm = sweeps.member_algorithm(runs.build, member)
    if client is None and new_client is None and not jax.tree.leaves(algorithm.exchange(runs.data).down[0]):
        raise ValueError(
            f"clients of {system} share no model, so that the server has the first one: name a client (--client 0)"
        )
    (diverged,) = [trial.diverged for trial in read_final(folder, study, scenario, system)[0] if trial.seed == seed]
    name = study.scenarios[scenario].model or model_name(None, clients.train)

    def exported(variables: Variables, what: str) -> Exported:
        # A method's own tree, such as a mixture of models, has kernels of other shapes, and stays as it is.
        plain = name in OWN_LAYERS and checks.mismatch(variables, variables_shape(clients.task)) is None
        found = layout if plain else "as trained"
        return Exported(flax_layout(variables) if found == "flax" else variables, {**about, "client": what, "layout": found})

    about: dict[str, Json] = {
        "fedjax_meta": __version__,
        "system": study.title_of(system),
        "method": study.systems[system].method,
        "scenario": clients.title,
        "model": {"name": name, "options": dict(study.scenarios[scenario].model_options)},
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
        raise ValueError(f"new_client={new_client}, but the scenario {scenario} has no new clients")
    option, given = ("client", client) if new_client is None else ("new_client", new_client)
    assert given is not None
    number = _number(option, given, clients.names)
    support = study.scenarios[scenario].adapt_on if group == KNOWN else "support"
    key = tagged(run_keys(jax.random.key(seed))[2], group, state.round)
    model = personal(algorithm, key, state, data, number, support=support, known=group == KNOWN)
    mine = clients.names[group == NEW]
    return exported(model, f"{group} client {number}{f' ({mine[number]})' if mine else ''}")


def _number(option: str, client: int | str, names: tuple[tuple[str, ...], tuple[str, ...]]) -> int:
    """The number of a client that is given as such, or by its name; `names` are those of known and new clients.

    A text of digits is a number only where no client has such a name.
    """
    numbered = not any(name.isdecimal() for name in (*names[0], *names[1]))
    if isinstance(client, str) and not (numbered and client.removeprefix("-").isdecimal()):
        mine, others = names if option == "client" else reversed(names)
        if client in others and client not in mine:
            kind, right = ("a new client", "new client") if option == "client" else ("a client that trained", "client")
            raise ValueError(f"{option}={client!r} is {kind}: give it as the {right}")
        if not mine:
            raise ValueError(f"{option}={client!r}: the clients of this run have no names: give a number, from 0 on")
        checks.one_of(option, client, mine)
        return mine.index(client)
    return int(client)


def _scenario(study: Study, scenario: str | None) -> str:
    """The name of a scenario, which of several draws names one.

    Raises:
      ValueError: no such scenario, or several.
    """
    names = list(study.scenarios)
    if scenario is None and len(names) > 1:
        raise ValueError(f"scenario is needed: the run has {', '.join(names)}")
    scenario = names[0] if scenario is None else scenario
    drawn = [name for name in names if name.partition(DRAW)[0] == scenario]
    if scenario not in names and drawn:
        if len(drawn) > 1:
            raise ValueError(f"scenario={scenario!r} was drawn {len(drawn)} times: give one of {', '.join(drawn)}")
        return drawn[0]
    checks.one_of("scenario", scenario, names)
    return scenario


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
      final: of the system, see `study.job.final_phase`.
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
    damaged = ""
    # Seeds that were added later lie beside the older ones, whose checkpoint may be of fewer rounds than the results.
    for states in sorted((folder / "state" / scenario).glob(f"{system}.final.*")):
        config = checkpoint.saved_config(states)
        if config is None:
            damaged += f" ({states} is damaged: delete it, too)" if any(states.glob("*.ckpt")) else ""
            continue
        if label not in config["members"]:
            continue
        if config["data"] != clients.fingerprint:
            raise ValueError(f"the clients of {scenario} are not those of the run: was the data set changed?")
        members = [Member(trials[name].numbers, trials[name].seed) for name in config["members"]]
        shapes = phase.saved_shapes(final, members)
        try:
            saved = checkpoint.restore(states, shapes, config)
        except checkpoint.UnreadableError as error:
            raise ValueError(f"{error}; delete {path} too, without which {system} counts as not finished") from None
        number = config["members"].index(label)
        if saved is not None and int(saved.state.members.round[number]) == done:
            return members[number], jax.tree.map(lambda leaf, m=number: leaf[m], saved.state.members)
    raise ValueError(
        f"{folder} has no checkpoint of {system} with {label} after round {done}, of which its results are{damaged}: delete "
        f"{path} and run the study again to train it anew"
    )
