"""How rounds are run: a `Federation`, the same for all methods."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_meta import checks, hardware, schedules
from fedjax_meta.aggregate import WEIGHTINGS, Aggregator, Rule
from fedjax_meta.attacks import Attack
from fedjax_meta.config import plain
from fedjax_meta.contract import Method, Population
from fedjax_meta.data import ClientView, FederatedData
from fedjax_meta.dependence import dependent
from fedjax_meta.engine import PRECISIONS
from fedjax_meta.hardware import Devices
from fedjax_meta.masks import Role, variables_shape
from fedjax_meta.numerics.axes import leading
from fedjax_meta.participation import Participation
from fedjax_meta.task import Batch, MeanLoss, Task, Weighted, check_entries, targets
from fedjax_meta.types import Key, PyTree, Rate, Roles, Variables
from fedjax_meta.uploads import UploadTransform, check_order, kinds

_FUNCTIONS = {
    "schedule": (("key", "round", "num_clients", "cohort_size"), "schedules.uniform, or schedules.given(table)"),
    "participation": (("key", "client"), "participation.unreliable(late=0.1)"),
    "aggregator": (("stacked", "weights"), "aggregate.median, or aggregate.trimmed_mean(0.1)"),
    "new_client": (("key", "population", "support"), "contract.Method.new_client of another method"),
}
"""Options that are functions: what they are called with, and what to write."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Federation:
    """Everything about a round that is not the method's.

    Attributes:
      cohort_size: C, clients in a round.
      schedule: which clients, see `schedules`.
      participation: `(key, client id) -> Participation`, what becomes of a client that was asked; by default all finish. A round
        from which no client returns changes nothing but its number, apart from what late clients keep and the noise of
        `uploads.noise`, which the server adds in every round.
      uploads: a chain of transformations of what clients send to be averaged, see `fedjax_meta.uploads`.
      aggregator: `(stacked uploads [C, ...], weights [C]) -> upload` in place of the weighted mean, also of statistics:
        `aggregate.median`, `aggregate.trimmed_mean(share)`; or an `aggregate.Rule`. It takes memory for C uploads, where the
        mean takes one.
      drop_nonfinite: whether a client whose result holds NaN or infinity is left out of the round, and keeps what it had before.
        It is counted in `RoundInfo.faults`.
      max_dropped: the share of a cohort's results, in [0, 1], that may be left out so before the round counts as diverged. With 1
        it never does for that, which suits FedAsync: its cohorts are single clients.
      attack: what some clients do to their data or send instead of what they should, see `fedjax_meta.attacks`.
      weighting: how much clients count: "samples", "query" or "uniform"; the method's when not given.
      server_optimizer: factory `rate -> optax.GradientTransformation`, what the server descends along the mean pseudo-gradient
        with; the method's when not given.
      server_lr: its rate, may be traced; alone it is the rate of `optax.sgd`.
      average_personal: average personal leaves at the server too. A client that has taken part never reads that average; one that
        has not starts from it (the reference code of FedMeta-Per tests FedPer so). It costs upload bytes and reveals personal
        leaves to the server.
      own_at_test: known clients test with their own personal leaves and memory; else with the server's personal leaves and a
        fresh memory.
      new_client: `(key, population, support) -> variables`, what a client that is none of the N tests with; the method's when not
        given. "fresh" is the method's `personalize` from the server's model and a fresh memory, also where the method has another
        rule. Under `uploads.noise` the population holds no rows of clients.
      lanes: clients that run side by side on a device, see `engine.run_cohort`.
      devices: how many devices share a cohort, or which (a list); all by default, see `engine.run_cohort`.
      precision: of matrix products in training where the hardware has a choice: "float32", "tf32" or "bfloat16". Tests take
        float32.

    Raises:
      ValueError: a value out of range, transformations in an illegal order, or combinations that cannot work together.
    """

    cohort_size: int = 5
    schedule: schedules.Schedule = schedules.uniform
    participation: Callable[[Key, jax.Array], Participation] | None = None
    uploads: tuple[UploadTransform, ...] = ()
    aggregator: Aggregator | Rule | None = None
    drop_nonfinite: bool = True
    max_dropped: float = 0.5
    attack: Attack | None = None
    weighting: str | None = None
    server_optimizer: Callable[[Any], optax.GradientTransformation] | None = None
    server_lr: Rate | None = None
    average_personal: bool = False
    own_at_test: bool = True
    new_client: Callable[[Key, Population, ClientView], Variables] | str | None = None
    lanes: int | None = None
    devices: Devices = None
    precision: str = "float32"

    def __post_init__(self) -> None:
        checks.count("cohort_size", self.cohort_size)
        if self.lanes is not None:
            checks.count("lanes", self.lanes)
        object.__setattr__(self, "devices", hardware.check(self.devices))
        checks.one_of("precision", self.precision, PRECISIONS)
        checks.share("max_dropped", self.max_dropped)
        if self.weighting is not None:
            checks.one_of("weighting", self.weighting, WEIGHTINGS)
        for name, (takes, example) in _FUNCTIONS.items():
            value = getattr(self, name)
            if name == "new_client" and isinstance(value, str):
                checks.one_of("new_client", value, ("fresh",))
            elif (value is not None or name == "schedule") and not isinstance(value, Rule):
                checks.function(name, value, takes, example)
        for name in ("average_personal", "own_at_test", "drop_nonfinite"):
            checks.flag(name, getattr(self, name))
        if not isinstance(self.uploads, tuple):
            given = checks.shown(self.uploads)
            raise ValueError(f"uploads must be a tuple of upload transformations, e.g. (fm.uploads.clip(1.0),), not {given}")
        check_order(self.uploads)
        if self.server_lr is not None:
            checks.positive("server_lr", self.server_lr)
        if self.server_optimizer is not None:
            checks.optimizer_factory("server_optimizer", self.server_optimizer)
            if self.server_lr is None:
                raise ValueError("server_optimizer needs server_lr, its rate")
        names = kinds(self.uploads)
        if self.aggregator is not None and "noise" in names:
            raise ValueError("noise is scaled to the mean and says nothing of another aggregator: leave one of them out")
        if self.aggregator is not None and "adaptive_clip" in names:
            raise ValueError("adaptive_clip follows a mean over clients, not another aggregator: leave one of them out")
        if not self.drop_nonfinite and "mask" in names:
            raise ValueError(
                "the server cannot see a broken upload that mask hides: clients must check it (drop_nonfinite=True)"
            )
        if self.aggregator is not None and "mask" in names:
            raise ValueError("an aggregator must see every upload, which mask hides: leave one of them out")

        if self.attack is not None:
            self._check_attack(self.attack, names)

    @staticmethod
    def _check_attack(attack: Any, names: set[str]) -> None:
        if not isinstance(attack, Attack):
            raise ValueError(f"attack={checks.shown(attack)} must be an attack such as fm.attacks.sign_flip(0.2)")
        hiding = sorted({"noise", "mask"} & names)
        if attack.changes_uploads and hiding:
            raise ValueError(
                f"{attack.name} sends what no client clips or rounds, which {hiding[0]} cannot stand: leave one out"
            )

    def __new__(cls, *args: Any, **options: Any) -> "Federation":
        """Raises `TypeError` for an unknown option, and suggests the nearest name."""
        if args:
            raise TypeError("Federation takes its options by name, e.g. Federation(cohort_size=10)")
        checks.options("Federation", options, [field.name for field in dataclasses.fields(cls)], {})
        return super().__new__(cls)

    @property
    def config(self) -> Mapping[str, Any]:
        """Every field as a JSON value."""
        return {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


def check_values(task: Task | None, data: FederatedData) -> None:
    """Raises `ValueError` where targets of data lie beyond those of a task's loss, e.g. labels -1 and 1 in place of 0 and 1."""
    criterion = None if task is None else getattr(task.loss, "criterion", None)
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(data.y))
    if traced or not isinstance(criterion, MeanLoss) or criterion.within is None:
        return
    least, most = criterion.within
    value, weight = data.y if isinstance(data.y, Weighted) else (data.y, np.ones(1))
    if not hasattr(value, "dtype"):  # a tree, which the loss refuses
        return
    values, weight = np.asarray(value), np.asarray(weight)
    counts = leading(weight, values) > 0  # weights may be of the leading axes
    odd = values[((values < least) | (values > most)) & counts]
    if odd.size:
        raise ValueError(f"the {criterion.name} takes targets from {least} to {most}, but one is {odd[0]:g}")


def check_data(method: Method, federation: Federation, data: FederatedData) -> None:
    """Refuses data that a method in a federation cannot learn from; of traced data, shapes and types alone are read.

    Raises:
      ValueError: other targets where one class label a sample is needed; a loss that is no scalar; a view that weights need and
        the data lack; rules of participation for another number of clients; a model with complex leaves, with integers that are
        to be trained, with fewer outputs than there are classes, or that does not take such samples.
    """
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    if method.needs_classes and not data.labelled:
        none = "" if data.num_classes else ", real numbers or several labels (num_classes is 0)"
        raise ValueError(f"{method.name} needs one class label a sample, but the data have targets {_form(data.y)}{none}")
    view = WEIGHTINGS[federation.weighting or method.weighting]
    if view is not None and view not in data.views:
        raise ValueError(
            f"clients are weighted by the samples of their view {view!r}, which the data lack; they have {', '.join(data.views)}"
        )
    known = getattr(federation.participation, "num_clients", None)
    if known is not None and known != data.total_clients:
        raise ValueError(f"participation knows {known} clients, but the data have N={data.total_clients}")
    why = method.refuses.get("a part of the clients")
    if why is not None and not (federation.schedule is schedules.uniform and federation.cohort_size == data.total_clients):
        raise ValueError(
            f"{method.name} needs all of the N={data.total_clients} clients in each round (cohort_size={data.total_clients}, no "
            f"schedule): {why}"
        )
    if method.task is not None:
        check_values(method.task, data)
        _check_task(method.task, method.roles, data)


def _check_task(task: Task, roles: Roles, data: FederatedData) -> None:
    """Raises where a task's model has leaves that cannot be trained, or does not take the data or weigh their samples."""
    variables = variables_shape(task)
    trainable = task.trainable(variables)
    if checks.misplaced_leaf(roles, variables) is None:
        trainable = jax.tree.map(lambda moves, role: moves and role is not Role.FROZEN, trainable, roles)
    _check_types(variables, trainable)
    x, y = _one_sample(data)
    weight: Any = jax.ShapeDtypeStruct((1,), jnp.result_type(float))
    batch = Batch(x, y, weight)
    form = f"inputs {_form(x)} and {'labels' if data.num_classes else 'targets'} {_form(y)}"
    part = "model"
    try:
        logits = jax.eval_shape(task.predict, variables, x)
        part = "loss"
        program, (loss, after) = jax.make_jaxpr(_loss_of(task), return_shape=True)(variables, batch)
        criterion = getattr(task.loss, "criterion", None)
        if isinstance(criterion, MeanLoss):
            check_entries(criterion.name, criterion.entries, logits, targets(batch))
    # The task is code of the user's own, and JAX and Flax raise exceptions of many types for shapes that do not fit.
    except Exception as error:
        raise ValueError(f"the {part} does not take these data, {form}: {checks.first_line(error)}") from error
    if loss.shape != ():
        raise ValueError(f"the task's loss must be one number, the mean over a batch, not {loss.dtype}{list(loss.shape)}")
    _check_weight_is_read(program, len(jax.tree.leaves(variables)), len(jax.tree.leaves((x, y))), after)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(f"the task's loss is {loss.dtype}, which has no gradient: it must be a floating-point number")
    labels = y.value if isinstance(y, Weighted) else y
    ranks = getattr(logits, "ndim", 0), 1 + getattr(labels, "ndim", -1)
    # A task without predictions (`from_loss`) has no outputs at all.
    if data.num_classes and ranks[0] == ranks[1] and 0 < logits.shape[-1] < data.num_classes:
        raise ValueError(f"the model has {logits.shape[-1]} outputs, but the data have num_classes={data.num_classes}")


def _check_types(variables: Variables, trainable: PyTree) -> None:
    """Raises where a leaf that is trained has no gradient, or a leaf is complex."""
    moved = jax.tree.leaves(trainable)
    for (path, leaf), moves in zip(jax.tree_util.tree_leaves_with_path(variables), moved, strict=True):
        if moves and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            where = jax.tree_util.keystr(path)
            raise ValueError(
                f"the model's leaf {where} is {leaf.dtype}{list(leaf.shape)}, which has no gradient: keep it out of the "
                "parameters, or make it one that is not trained (trainable of fm.models.from_functions)"
            )
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            where = jax.tree_util.keystr(path)
            raise ValueError(f"the model's leaf {where} is {leaf.dtype}{list(leaf.shape)}: complex leaves are not supported")


def _check_weight_is_read(program: Any, model: int, samples: int, after: Variables) -> None:
    """Raises where a loss, or a variable that it renews, follows from samples and not from their weight.

    Args:
      program: the jaxpr of `(variables, batch) -> (loss, variables)`.
      model, samples: how many leaves the variables have, and the samples.
      after: the renewed variables.
    """
    by_samples, by_weight = ([*[False] * model, *[not of_weight] * samples, of_weight] for of_weight in (False, True))
    reads = zip(dependent(program, by_samples), dependent(program, by_weight), strict=True)
    careless = [of_samples and not of_weight for of_samples, of_weight in reads]
    if careless[0]:
        raise ValueError(
            "the task's loss does not read batch.weight, which is 0 for rows that fill a batch up: they would count as samples; "
            "take the mean of real ones, fm.task.weighted_mean(losses, batch.weight)"
        )
    if any(careless):
        path, _ = jax.tree_util.tree_leaves_with_path(after)[careless.index(True) - 1]
        raise ValueError(
            f"the model's leaf {jax.tree_util.keystr(path)} is renewed from samples without their weight, which is 0 for rows "
            "that fill a batch up: they would count as samples; take statistics of real ones, by the argument weight"
        )


def _loss_of(task: Task) -> Callable[[Variables, Batch], tuple[jax.Array, Variables]]:
    return lambda variables, batch: task.loss(variables, batch, jax.random.key(0))


def _one_sample(data: FederatedData) -> tuple[PyTree, PyTree]:
    """Shapes of a batch of one sample, as the model gets it."""

    def form(leaf: Any, shape: tuple[int, ...], scale: Any = None) -> jax.ShapeDtypeStruct:
        dtype = leaf.dtype if scale is None else jnp.result_type(float)
        return jax.ShapeDtypeStruct((1, *shape), jax.dtypes.canonicalize_dtype(dtype))

    shapes = jax.tree.unflatten(jax.tree.structure(data.x), data.sample_shapes)
    scales = () if data.scale is None else (data.scale,)
    return jax.tree.map(form, data.x, shapes, *scales), jax.tree.map(lambda leaf: form(leaf, leaf.shape[1:]), data.y)


def _form(samples: PyTree) -> str:
    """Types and shapes of samples, without their leading axis."""
    leaves = jax.tree_util.tree_leaves_with_path(samples)
    return ", ".join(
        f"{jax.tree_util.keystr(path)}{' ' * bool(path)}{leaf.dtype}{list(leaf.shape[1:])}" for path, leaf in leaves
    )


OPTIONS = tuple(field.name for field in dataclasses.fields(Federation))
"""Names that belong to a federation and to no method."""
