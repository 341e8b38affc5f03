"""A system: a method and how it is run, with parts that are given by name so that a file can hold them."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from fedjax_meta import aggregate, attacks, checks, implicit, masks, meta, participation, schedules, uploads
from fedjax_meta import federation as federations
from fedjax_meta.algorithm import Algorithm
from fedjax_meta.contract import Method
from fedjax_meta.features import with_projection
from fedjax_meta.federation import Federation
from fedjax_meta.methods import METHODS
from fedjax_meta.rounds import federate
from fedjax_meta.study import presets
from fedjax_meta.task import Task

ESTIMATORS: dict[str, Callable[..., meta.Estimator]] = {
    "exact": meta.exact,
    "first_order": meta.first_order,
    "hessian_free": meta.hessian_free,
    "implicit": implicit.implicit_gradient,
    "reptile": meta.reptile_gradient,
}


def _sgd(learning_rate: Any, momentum: float | None = None, nesterov: bool = False, weight_decay: float = 0.0) -> Any:
    """Gradient descent; `weight_decay` times the weights is added to the gradient."""
    plain = optax.sgd(learning_rate, momentum, nesterov)
    return optax.chain(optax.add_decayed_weights(weight_decay), plain) if weight_decay else plain


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": _sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "adam": optax.adam,
    "adamw": optax.adamw,
    "yogi": optax.yogi,
    "adagrad": optax.adagrad,
}
AGGREGATORS: dict[str, Callable[..., Any]] = {name: entry.make for name, entry in aggregate.RULES.items()}
ATTACKS: dict[str, Callable[..., Any]] = {name: entry.make for name, entry in attacks.ATTACKS.items()}
SCHEDULES: dict[str, Callable[..., schedules.Schedule]] = {
    "uniform": lambda: schedules.uniform,
    "poisson": schedules.poisson,
    "given": schedules.given,
    "fedbuff": schedules.fedbuff,
    "fedasync": schedules.fedasync,
}
PARTICIPATION: dict[str, Callable[..., participation.Rule]] = {
    "unreliable": participation.unreliable,
    "stragglers": participation.stragglers,
    "deadline": participation.deadline,
}
UPLOADS: dict[str, Callable[..., uploads.UploadTransform]] = {
    "sparsify": uploads.sparsify,
    "quantize": uploads.quantize,
    "clip": uploads.clip,
    "adaptive_clip": uploads.adaptive_clip,
    "noise": uploads.noise,
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
}
"""Options that name a part: its registry, and whether the option wants the part as a factory that is called later."""


_PARSERS: dict[str, Callable[[str], Any]] = {"aggregator": aggregate.parse, "attack": attacks.parse}


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """A method in a federation, ready to be compared.

    A part is written as its name (`outer_optimizer: adam`), or as a name with options (`estimator: {name: implicit,
    prox_weight: 2.0}`); aggregators and attacks also as on a command line (`aggregator: nearest_neighbours:f=2+median`).

    Attributes:
      method: name in `METHODS`.
      options: of the method.
      federation: of `Federation`; `uploads` is a list of parts.
      grid: values to try, by the name of an option of the method or the federation.
      title: for tables; the method's name when not given.
      preset: name of tuned values, see `presets`; they fill in options that are not given.
      scenarios: names of the scenarios that it is run on; all when not given.
      projection: numbers between two more layers before the head, which MOON's contrast needs (`features.with_projection`);
        none when not given.
      pooled: central training: the samples of all clients that train are those of one, which makes as many passes over them as a
        client makes on average in the study's rounds. Only for methods without personal leaves and memory, such as FedAvg.

    Raises:
      ValueError: an unknown method, option, part or preset, a preset of another method, a grid without values, an option that is
        also in the grid.
    """

    method: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    federation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    grid: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    title: str | None = None
    preset: str | None = None
    scenarios: Sequence[str] | None = None
    projection: int | None = None
    pooled: bool = False

    def __post_init__(self) -> None:
        for name in ("options", "federation", "grid"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"{name}={checks.shown(getattr(self, name))} must be a mapping of names and values")
        if not isinstance(self.federation.get("uploads") or [], (list, tuple)):
            raise ValueError(f"uploads={checks.shown(self.federation['uploads'])} must be a list of parts")
        checks.one_of("method", self.method, METHODS)
        if self.preset is not None:
            self._fill_in(presets.find(self.preset))
        taken, given = _keywords(METHODS[self.method]), {**self.options, **dict.fromkeys(self.grid)}
        try:
            own = [name for name in given if name not in federations.OPTIONS or name in self.options]
            checks.options(self.method, own, taken, dict.fromkeys(federations.OPTIONS, "federation"))
            checks.options("federation", self.federation, federations.OPTIONS, dict.fromkeys(taken, "options"))
        except TypeError as error:
            raise ValueError(str(error).replace("() takes", " takes")) from None
        for name, values in self.grid.items():
            if name in self.options or name in self.federation:
                raise ValueError(f"{name} has a value and a grid: leave one of them out")
            numbers = isinstance(values, (list, tuple)) and values and all(_is_number(value) for value in values)
            if not numbers or len(set(values)) < len(values):
                raise ValueError(f"grid of {name} must be a list of different numbers, not {values!r}")
        if self.scenarios is not None and not isinstance(self.scenarios, (list, tuple)):
            raise ValueError(f"scenarios={self.scenarios!r} must be a list of names")
        if self.projection is not None:
            checks.count("projection", self.projection)
        checks.flag("pooled", self.pooled)
        for name in (*self.options, *self.federation):
            if name in PARTS:
                part(name, {**self.options, **self.federation}[name])
        for given_upload in self.federation.get("uploads", ()):
            _made("uploads", UPLOADS, given_upload)

    def _fill_in(self, preset: presets.Preset) -> None:
        if preset.method != self.method:
            raise ValueError(f"preset {preset.name} is of method {preset.method}, not {self.method}")
        takes, free = _keywords(METHODS[self.method]), {**preset.options, **preset.chosen}
        for kind, mine in (("options", [name for name in free if name in takes]), ("federation", set(free) - set(takes))):
            tuned = {name: free[name] for name in mine if name not in self.grid}
            object.__setattr__(self, kind, {**tuned, **getattr(self, kind)})

    def build(self, task: Task, **numbers: Any) -> Algorithm:
        """The algorithm, see `parts`."""
        return federate(*self.parts(task, **numbers))

    def parts(self, task: Task, **numbers: Any) -> tuple[Method, Federation]:
        """The method and its federation, with numbers of the grid that may be traced.

        Raises:
          ValueError: what the method or the federation refuses.
        """
        takes = _keywords(METHODS[self.method])
        options = {name: part(name, value) if name in PARTS else value for name, value in self.options.items()}
        shared = {name: part(name, value) if name in PARTS else value for name, value in self.federation.items()}
        if "uploads" in shared:
            shared["uploads"] = tuple(_made("uploads", UPLOADS, one) for one in shared["uploads"])
        for name, value in numbers.items():
            (options if name in takes else shared)[name] = value
        try:
            if self.projection is not None:
                task = with_projection(task, *_size_of_head(task), projection=self.projection)
            return METHODS[self.method](task, **options), Federation(**shared)
        except TypeError as error:
            raise ValueError(str(error)) from error


def _size_of_head(task: Task) -> tuple[int, int]:
    """(d, K) of a task whose head is one dense layer."""
    leaves = jax.tree.leaves(masks.split(masks.variables_shape(task), masks.resolve("head", task))[0])
    shapes = sorted((leaf.shape for leaf in leaves), key=len)
    if [len(shape) for shape in shapes] != [1, 2]:
        raise ValueError("projection needs a model whose head is one dense layer with a bias")
    return math.prod(shapes[1]) // shapes[0][0], shapes[0][0]


def part(option: str, given: Any) -> Any:
    """A part from its name, or from a mapping with its `name` and options."""
    if given is None:
        return None
    registry, as_factory = PARTS[option]
    if isinstance(given, str) and ":" in given and option in _PARSERS:
        return _PARSERS[option](given)
    if not as_factory:
        return _made(option, registry, given)
    name, options = _name_and_options(option, given)
    checks.one_of(option, name, registry)
    if registry is ESTIMATORS:
        _check(option, name, registry[name], options)
    return functools.partial(registry[name], **options) if options else registry[name]


def _made(option: str, registry: Mapping[str, Callable[..., Any]], given: Any) -> Any:
    name, options = _name_and_options(option, given)
    checks.one_of(option, name, registry)
    _check(option, name, registry[name], options)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [
        word for word, p in inspect.signature(registry[name]).parameters.items() if p.default is p.empty and p.kind in named
    ]
    lacking = [word for word in needed if word not in options]
    if lacking:
        raise ValueError(f"{option} {name} needs {', '.join(lacking)}")
    try:
        return registry[name](**options)
    except TypeError as error:
        raise ValueError(f"{option} {name}: {error}") from None


def _name_and_options(option: str, given: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(given, str):
        return given, {}
    if isinstance(given, Mapping) and isinstance(given.get("name"), str):
        return given["name"], {key: value for key, value in given.items() if key != "name"}
    raise ValueError(f"{option} must be a name, or a mapping with a name and options, not {given!r}")


def _check(option: str, name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    try:
        checks.options(f"{option} {name}", options, list(inspect.signature(function).parameters), {})
    except TypeError as error:
        raise ValueError(str(error).replace("() takes", " takes")) from None


def _keywords(function: Callable[..., Any]) -> list[str]:
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
