"""Parts of a system by name: optimisers, meta-gradients, aggregators, attacks, cohorts, and transformations of uploads."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import optax

from fedjax_meta import aggregate, attacks, checks, implicit, meta, multistep, participation, privacy, schedules, uploads
from fedjax_meta.aggregate.registry import name_and_options
from fedjax_meta.federation import Federation
from fedjax_meta.methods.fedopt import adaptive
from fedjax_meta.study import lookup
from fedjax_meta.study.rates import RATES
from fedjax_meta.study.scenario import Clients

ESTIMATORS: dict[str, Callable[..., meta.Estimator]] = {
    "exact": meta.exact,
    "first_order": meta.first_order,
    "hessian_free": meta.hessian_free,
    "implicit": implicit.implicit_gradient,
    "multi_step": multistep.multi_step,
    "reptile": meta.reptile_gradient,
}

RATE = "learning_rate"
"""The argument of an optimiser that is given later."""

STEP_WEIGHTS: dict[str, Callable[..., Any]] = {"annealed": multistep.annealed}


def _sgd(learning_rate: Any, momentum: float | None = None, nesterov: bool = False, weight_decay: float = 0.0) -> Any:
    """Gradient descent.

    Args:
      momentum: share of the last step that the next one keeps, in [0, 1); without it there is none.
      nesterov: whether the momentum is Nesterov's.
      weight_decay: so many times the weights are added to the gradient.
    """
    plain = optax.sgd(learning_rate, momentum, nesterov)
    return optax.chain(optax.add_decayed_weights(weight_decay), plain) if weight_decay else plain


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": _sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "adam": optax.adam,
    "adamw": optax.adamw,
    "yogi": optax.yogi,
    "adagrad": optax.adagrad,
    "fedadam": functools.partial(adaptive, "adam"),
    "fedyogi": functools.partial(adaptive, "yogi"),
    "fedadagrad": functools.partial(adaptive, "adagrad"),
}


def _mean() -> None:
    """The weighted mean, which a federation takes when it has no other rule."""


def _fltrust() -> Callable[[Clients], aggregate.Rule]:
    """The mean by trust, the cosine with what the scenario's samples of the server give (Cao et al. 2021)."""

    def of(clients: Clients) -> aggregate.Rule:
        if clients.server is None:
            raise ValueError("aggregator fltrust needs samples of the server: give the scenario server=100")
        return aggregate.fltrust(clients.server)

    return of


AGGREGATORS: dict[str, Callable[..., Any]] = {
    "mean": _mean,
    **aggregate.RULES,
    "fltrust": _fltrust,
}
ATTACKS = attacks.ATTACKS
SCHEDULES: dict[str, Callable[..., schedules.Schedule]] = {
    "uniform": lambda: schedules.uniform,
    "poisson": schedules.poisson,
    "passes": schedules.passes,
    "given": schedules.given,
    "fedbuff": schedules.fedbuff,
    "fedasync": schedules.fedasync,
}
PARTICIPATION: dict[str, Callable[..., participation.Rule]] = {
    "unreliable": participation.unreliable,
    "stragglers": participation.stragglers,
    "deadline": participation.deadline,
}


def _noise(
    multiplier: Any = None,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    rounds: int | None = None,
    reproducible: bool = False,
    tree: int | None = None,
) -> uploads.UploadTransform:
    """Noise on the mean of clipped uploads, by its multiplier or by the epsilon that all rounds may spend, see `multiplier`.

    Args:
      multiplier, reproducible, tree: as in `uploads.noise`.
      epsilon: what all rounds may spend, in place of a multiplier.
      delta, rounds: of that epsilon; the study gives them.
    """
    del rounds
    if (multiplier is None) == (epsilon is None):
        raise ValueError("noise takes a multiplier or an epsilon, one of them")
    if epsilon is None and delta is not None:
        raise ValueError("delta belongs to an epsilon")
    if epsilon is not None:
        checks.positive("epsilon", epsilon)
        multiplier = 1.0
    if epsilon is not None and tree is not None:
        raise ValueError("noise by trees takes a multiplier, not an epsilon: privacy.epsilon says which guarantee it gives")
    if delta is not None:
        checks.fraction("delta", delta)
    return uploads.noise(multiplier, reproducible=reproducible, tree=tree)


UPLOADS: dict[str, Callable[..., uploads.UploadTransform]] = {
    "sparsify": uploads.sparsify,
    "quantize": uploads.quantize,
    "clip": uploads.clip,
    "adaptive_clip": uploads.adaptive_clip,
    "noise": _noise,
    "mask": uploads.mask,
}

PARTS: dict[str, tuple[Mapping[str, Callable[..., Any]], bool]] = {
    "estimator": (ESTIMATORS, True),
    "optimizer": (OPTIMIZERS, True),
    "inner_optimizer": (OPTIMIZERS, True),
    "outer_optimizer": (OPTIMIZERS, True),
    "server_optimizer": (OPTIMIZERS, True),
    "aggregator": (AGGREGATORS, False),
    "attack": (ATTACKS, False),
    "participation": (PARTICIPATION, False),
    "schedule": (SCHEDULES, False),
    "step_weights": (STEP_WEIGHTS, False),
}
"""Options that name a part: its registry, and whether the option wants the part as a factory that is called later."""


_PARSERS: dict[str, Callable[[str], Any]] = {"aggregator": aggregate.parse, "attack": attacks.parse}

OWN: dict[str, Callable[[str], Callable[..., Any]]] = {"aggregator": lookup.aggregator, "attack": lookup.attack}
"""Options that also name a part of a user's own, "module:name": what finds its function."""

ATTACKERS = "attackers"
"""A word in options of aggregators and attacks, in place of how many clients attack, or which share of them."""


def written_as(name: str, options: Collection[str]) -> str | None:
    """How a part of this name is written, in one of these options; `None` if none of them has such a part.

    Example:
      >>> written_as("clip", ["uploads"]), written_as("adam", ["outer_optimizer", "server_optimizer"]), written_as("lr", ["lr"])
      ('uploads: [{name: clip}]', 'outer_optimizer: adam', None)
    """
    if name in UPLOADS and "uploads" in options:
        return f"uploads: [{{name: {name}}}]"
    return next((f"{option}: {name}" for option in options if option in PARTS and name in PARTS[option][0]), None)


def part(option: str, given: Any) -> Any:
    """A part from its name, or from a mapping with its `name` and options."""
    if given is None:
        return None
    registry, as_factory = registry_of(option, given), PARTS[option][1]
    if isinstance(given, str) and ":" in given and given not in registry and option in _PARSERS:
        return _PARSERS[option](given)
    if not as_factory:
        return made(option, registry, given)
    name, options = _name_and_options(option, given)
    checks.one_of(option, name, registry)
    if registry is OPTIMIZERS:
        _check_optimizer(option, name, options)
    _check(option, name, registry[name], options)
    _check_needed(option, name, registry[name], options, (inspect.Parameter.KEYWORD_ONLY,))  # the rest is given later
    return functools.partial(registry[name], **options) if options else registry[name]


def _check_optimizer(option: str, name: str, options: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a rate, which the method or the federation has, and for what is no number where one stands."""
    for word in ("lr", RATE):
        if word in options:
            rate = option.replace("optimizer", "lr")
            raise ValueError(f"{option} {name} takes no {word!r}: its rate is the option {rate}")
    for word, parameter in inspect.signature(OPTIMIZERS[name]).parameters.items():
        default, value = parameter.default, options.get(word, parameter.default)
        if isinstance(default, bool):
            checks.flag(f"{option} {name}: {word}", value)
        elif isinstance(default, (int, float)) or (isinstance(value, str) and not word.endswith("_dtype")):
            checks.finite(f"{option} {name}: {word}", value)


def registry_of(option: str, given: Any) -> Mapping[str, Callable[..., Any]]:
    """The functions that make the parts of an option, with the one of a user's own that is given, if any.

    Raises:
      ValueError: see `lookup.aggregator` and `lookup.attack`.
    """
    registry = PARTS[option][0]
    name = own_name(option, given)
    return registry if name is None else {**registry, name: OWN[option](name)}


def own_name(option: str, given: Any) -> str | None:
    """The "module:name" of a part of a user's own, `None` for other parts.

    Example:
      >>> own_name("aggregator", {"name": "my_rules:near", "limit": 2}), own_name("aggregator", "krum:f=2")
      ('my_rules:near', None)
    """
    name = given.get("name") if isinstance(given, Mapping) else given
    if option not in OWN or not lookup.is_own(name):
        return None
    form = re.fullmatch(r"([\w.]+):[A-Za-z_]\w*", name)
    return name if form and form[1] not in PARTS[option][0] else None


def own_names(federation: Mapping[str, Any]) -> list[str]:
    """The names of a user's own parts in the options of a federation."""
    return [name for option in OWN if (name := own_name(option, federation.get(option))) is not None]


def made(option: str, registry: Mapping[str, Callable[..., Any]], given: Any) -> Any:
    """What a function of a registry makes of its options."""
    name, options = _name_and_options(option, given)
    checks.one_of(option, name, registry)
    _check(option, name, registry[name], options)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    _check_needed(option, name, registry[name], options, kinds)
    try:
        return registry[name](**options)
    except TypeError as error:
        raise ValueError(f"{option} {name}: {error}") from None


def _check_needed(option: str, name: str, make: Callable[..., Any], options: Mapping[str, Any], kinds: Sequence[Any]) -> None:
    """Raises `ValueError` for a parameter of one of these kinds that has no default and is not given."""
    needed = [word for word, p in inspect.signature(make).parameters.items() if p.default is p.empty and p.kind in kinds]
    lacking = [word for word in needed if word not in options]
    if lacking:
        raise ValueError(f"{option} {name} needs {', '.join(lacking)}: {{name: {name}, {lacking[0]}: VALUE}}")


def _name_and_options(option: str, given: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(given, str) and (call := re.fullmatch(r"([\w:.]+)\(.*", given)):
        raise ValueError(f"{option}={checks.shown(given)}: write {{name: {call[1]}, OPTION: VALUE}}")
    if isinstance(given, str):
        return given, {}
    if isinstance(given, Mapping) and isinstance(given.get("name"), str):
        return given["name"], {key: value for key, value in given.items() if key != "name"}
    name = next(iter(given), None) if isinstance(given, Mapping) else None
    known = isinstance(name, str) and (name in RATES or written_as(name, [*PARTS, "uploads"]))
    hint = f"; write {{name: {name}, OPTION: VALUE}}" if known else ""
    raise ValueError(f"{option} must be a name, or a mapping with a name and options, not {given!r}{hint}")


def _check(option: str, name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    takes = [word for word in inspect.signature(function).parameters if word != RATE]
    checks.options(f"{option} {name}", options, takes, {}, error=ValueError)


def told(
    federation: Mapping[str, Any], *, attackers: float | None = None, cohort_sizes: Sequence[float] = ()
) -> dict[str, Any]:
    """The options of a federation with what a scenario says of attackers.

    - An attack without `attackers` gets the share of the scenario.
    - The word "attackers" in an aggregator or an attack becomes a number: the share under `share` and `attackers`, one over it
      under `boost` (model replacement), and else that share of a cohort.

    Args:
      federation: as a study has them.
      attackers: share of the clients that attack, where the attack does not say it.
      cohort_sizes: those that a grid may have; that of the federation when empty.

    Raises:
      ValueError: the word, or an attack, without a share; a number of attackers that depends on the point of a grid.
    """
    found = dict(federation)
    attack = None if found.get("attack") is None else _mapping(found["attack"])
    if attack is not None:
        own = attack.get(ATTACKERS, attackers)
        attackers = own if isinstance(own, float) else attackers
        known = registry_of("attack", attack)
        checks.one_of("attack", attack.get("name"), known)
        takes = inspect.signature(known[attack["name"]]).parameters
        given = attack.keys() - {"name"}
        checks.options(f"attack {attack['name']}", given, dict.fromkeys([*takes, ATTACKERS]), {}, error=ValueError)
        if own is None:
            raise ValueError(f"attack {attack.get('name')} needs attackers: give it, or the scenario, a share, attackers=0.2")
        found["attack"] = {**attack, ATTACKERS: own}
    for option in ("attack", "aggregator"):
        if found.get(option) is not None:
            sizes = cohort_sizes or [found.get("cohort_size", Federation.cohort_size)]
            each = [_numbered(option, found[option], attackers, size) for size in sizes]
            if any(one != each[0] for one in each):
                raise ValueError(
                    f"{option} says {ATTACKERS!r}, a number of a cohort, but the grid has several sizes: write a number"
                )
            found[option] = each[0]
    return found


def to_spend(federation: Mapping[str, Any], *, rounds: int, delta: float | None) -> dict[str, Any]:
    """The options of a federation, in which noise by its epsilon has what its multiplier depends on.

    Args:
      federation: as a study has them.
      rounds: R.
      delta: of the guarantee; N^-1.1 when not given.

    Raises:
      ValueError: the noise says so itself.
    """
    chain = federation.get("uploads") or ()
    if not isinstance(chain, (list, tuple)):
        raise ValueError(f"uploads={checks.shown(chain)} must be a list of parts, e.g. [{{name: clip, norm: 1.0}}]")
    private = [one for one in chain if isinstance(one, Mapping) and one.get("epsilon") is not None]
    if any({"rounds", "delta"} & set(one) for one in private):
        raise ValueError("noise by its epsilon takes rounds and delta from the study: leave them out")
    if not private:
        return dict(federation)
    return {**federation, "uploads": [{**one, "rounds": rounds, "delta": delta} if one in private else one for one in chain]}


def over_rounds(given: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """The rates of a system that change, where a part that takes the number of rounds and does not say it has that of the study.

    Example:
      >>> over_rounds({"lr": "cosine", "outer_lr": {"name": "exponential", "factor": 0.9}}, 100)
      {'lr': {'name': 'cosine', 'rounds': 100}, 'outer_lr': {'name': 'exponential', 'factor': 0.9}}
    """
    found: dict[str, Any] = {}
    for option, one in given.items():
        name, options = _name_and_options(f"rates: {option}", one)
        checks.one_of(f"rates: {option}", name, RATES)
        told = {"rounds": rounds} if "rounds" in inspect.signature(RATES[name]).parameters else {}
        found[option] = {"name": name, **told, **options}
    return found


def _mapping(given: Any) -> dict[str, Any]:
    """A part as a mapping with its name."""
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, str):
        raise ValueError(f"a part must be a name, or a mapping with a name and options, not {checks.shown(given)}")
    if any(own_name(option, given) for option in OWN):
        return {"name": given}
    name, options = name_and_options(given)
    return {"name": name, **options}


def _numbered(option: str, given: Any, share: float | None, cohort_size: float) -> Any:
    def number(name: str) -> float:
        if share is None:
            raise ValueError(f"{option} says {ATTACKERS!r}: give the scenario a share, attackers=0.2")
        if name == "boost":
            return 1 / share
        return share if name in ("share", ATTACKERS) else round(share * cohort_size)

    if isinstance(given, str):
        return re.sub(rf"(\w+)={ATTACKERS}\b", lambda found: f"{found[1]}={number(found[1])}", given)
    if isinstance(given, Mapping):
        return {name: number(name) if value == ATTACKERS else value for name, value in given.items()}
    return given


def at_point(federation: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a federation at a point of a grid, whose numbers may be for it or for its parts, see `placed`."""
    dotted = {name: value for name, value in point.items() if "." in name}
    return placed(federation, dotted) | {name: value for name, value in point.items() if "." not in name}


def placed(federation: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a federation with numbers for options of its parts.

    Args:
      federation: as a study has them.
      numbers: by "OPTION.KEY", "uploads.NAME.KEY" for a transformation.

    Raises:
      ValueError: a part that is not there.

    Example:
      >>> placed({"attack": {"name": "ipm"}, "uploads": [{"name": "clip"}]}, {"attack.scale": 2.0, "uploads.clip.norm": 1.0})
      {'attack': {'name': 'ipm', 'scale': 2.0}, 'uploads': [{'name': 'clip', 'norm': 1.0}]}
    """
    found = dict(federation)
    for path, value in numbers.items():
        option, *words = path.split(".")
        if option == "uploads" and len(words) == 2:
            names = [_named(one) for one in found.get(option) or ()]
            checks.one_of(f"grid: {path}: part", words[0], names)
            found[option] = [
                {**_mapping(one), words[1]: value} if name == words[0] else one
                for name, one in zip(names, found[option], strict=True)
            ]
        elif option in PARTS and len(words) == 1 and found.get(option) is not None:
            found[option] = {**_mapping(found[option]), words[0]: value}
        else:
            raise ValueError(
                f"grid: {path} must be OPTION.KEY of a part that the federation has, or uploads.NAME.KEY; `each` tries values of "
                "parts of the method"
            )
    return found


def filled(federation: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """As `placed`, but for parts that are there alone, and for options of theirs that have no value.

    Example:
      >>> filled({"uploads": [{"name": "clip", "norm": 3}, "noise"]}, {"uploads.noise.multiplier": 2.0, "uploads.clip.norm": 1.0})
      {'uploads': [{'name': 'clip', 'norm': 3}, {'name': 'noise', 'multiplier': 2.0}]}
    """
    lacking = {}
    for path, value in numbers.items():
        option, *words = path.split(".")
        chain = federation.get(option) or () if option == "uploads" else filter(None, [federation.get(option)])
        parts = [_mapping(one) for one in chain]
        if any(words[-1] not in one and (len(words) == 1 or one.get("name") == words[0]) for one in parts):
            lacking[path] = value
    return placed(federation, lacking)


def option_at(federation: Mapping[str, Any], path: str) -> inspect.Parameter | None:
    """The option of a part that a name in a grid means, see `placed`; `None` if there is none."""
    option, *words = path.split(".")
    if federation.get(option) is None:  # a study or a scenario has it
        return None
    uploaded = option == "uploads"
    registry: Mapping[str, Callable[..., Any]] = UPLOADS if uploaded else registry_of(option, federation[option])
    name = words[0] if uploaded else _named(federation[option])
    return inspect.signature(registry[name]).parameters.get(words[-1]) if name in registry else None


def with_clients(federation: Mapping[str, Any], clients: Clients | None) -> dict[str, Any]:
    """The options of `Federation`, every part made.

    Args:
      federation: as a study has them.
      clients: of the scenario; needed by FLTrust and by noise that is given as an epsilon.

    Raises:
      ValueError: what a part refuses, and parts that need clients without them.
    """
    shared = {name: part(name, value) if name in PARTS else value for name, value in federation.items()}
    given = shared.get("uploads")
    if callable(shared.get("aggregator")) and _named(federation["aggregator"]) == "fltrust":
        shared["aggregator"] = shared["aggregator"](_needed("aggregator fltrust", clients))
    if isinstance(given, (list, tuple)):  # else `Federation` says what it must be
        others = {name: value for name, value in shared.items() if name != "uploads"}
        plain = [_by_multiplier(one, others, clients) for one in given]
        shared["uploads"] = tuple(made("uploads", UPLOADS, one) for one in plain)
    return shared


def _by_multiplier(one: Any, shared: Mapping[str, Any], clients: Clients | None) -> Any:
    """A transformation with the multiplier in place of the epsilon."""
    if not isinstance(one, Mapping) or one.get("epsilon") is None:
        return one
    count = _needed("noise by its epsilon", clients).train.num_clients
    if one.get("rounds") is None:
        raise ValueError("noise by its epsilon needs rounds")
    delta = count**-1.1 if one.get("delta") is None else one["delta"]
    sampling = privacy.sampling_of(Federation(**shared).config, count)
    found = {name: value for name, value in one.items() if name not in ("epsilon", "delta", "rounds")}
    return {**found, "multiplier": _multiplier(float(one["epsilon"]), one["rounds"], delta, sampling)}


@functools.cache
def _multiplier(epsilon: float, rounds: int, delta: float, sampling: privacy.Sampling) -> float:
    try:
        return privacy.noise_for(epsilon, rounds, delta, sampling)
    except ImportError as error:
        raise ValueError(str(error)) from None


def _needed(what: str, clients: Clients | None) -> Clients:
    if clients is None:
        raise ValueError(f"{what} needs the clients of a scenario, not a task alone")
    return clients


def _named(given: Any) -> str:
    return _mapping(given).get("name", "")
