"""The multi-step meta-gradient of MAML++: the query loss counts after every inner step, not after the last one alone."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.data import Batches
from fedjax_meta.meta import Estimator, Info, MetaGradient, prepared, require_inner, require_second_order
from fedjax_meta.trajectory import InnerOptimizer, Losses, ScalarLoss, exact_product, second_order_vjp, value_and_gradient
from fedjax_meta.types import Params, PyTree, Scalar


class EveryStep(NamedTuple):
    """A query that counts after every inner step.

    Attributes:
      query: a batch, or `Batches` of one step.
      weights: `[S]`, how much it counts after each of the S steps.
    """

    query: PyTree
    weights: jax.Array


def multi_step(inner: InnerOptimizer) -> Estimator:
    """The exact gradient of sum_t weights_t loss(phi_t; query), t = 1..S, for an `EveryStep` query.

    Args:
      inner: an inner optimiser whose state has no floats, e.g. `meta.sgd` or `meta.learned_sgd`.

    Cost: S gradients and S Hessian-vector products of the support, S gradients of the query. Every step is a part of the program
    and stores its linearisation.

    Raises:
      ValueError: from the estimator: an optimiser with momentum or the like, a query of another kind, weights that are not `[S]`.
    """
    require_inner("multi_step", inner)

    def estimate(loss: ScalarLoss, meta: Params, support: PyTree, query: PyTree) -> MetaGradient:
        if not isinstance(query, EveryStep):
            raise ValueError("multi_step needs an EveryStep(query, weights), which step_weights of fedmeta makes")
        require_second_order(loss)
        meta, support, batches, _ = prepared(inner, loss, meta, support, query.query, 1)
        phi, to_meta = jax.vjp(inner.start, meta)
        state = inner.init(meta, phi)
        if any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(jax.eval_shape(inner.init, meta, phi))):
            raise ValueError("multi_step takes inner gradient descent: an optimiser with a state of its own has no such steps")
        count = support.max_steps
        weights = jnp.asarray(query.weights)
        if weights.shape != (count,):
            raise ValueError(f"weights must be one for each of the {count} inner steps, not {list(weights.shape)}")
        values, total, pulls = [], Losses.none(), []
        for t in range(count):
            before = phi
            phi, losses, pull = second_order_vjp(
                loss,
                (meta, before),
                _only(support, t),
                _one_step(inner, state),
                linearise=partial(exact_product, loss, None, mask=inner.mask),
                keep="smaller",
                checkpoint_every=None,
            )
            # Counters of steps do not depend on gradients.
            state = inner.update(meta, jax.tree.map(jnp.zeros_like, before), state, before)[1]
            total = jax.tree.map(partial(jnp.where, t < support.steps), total.add(t, losses.total), total)
            value, outer = value_and_gradient(loss, phi, batches, 0)
            values.append(weights[t] * value)
            pulls.append((pull, outer))
        updates, start = _unwind(pulls, weights, meta, phi)
        descent = jax.tree.map(jnp.add, updates, *to_meta(start))
        return MetaGradient(phi, descent, Info.of(total, sum(values[1:], values[0]), support.steps))

    return estimate


def _one_step(inner: InnerOptimizer, state: PyTree) -> InnerOptimizer:
    """One step of an optimiser that is in this state, of the meta-parameters (meta, phi before the step)."""

    def update(both: Params, gradient: Params, state: PyTree, phi: Params) -> tuple[Params, PyTree]:
        return inner.update(both[0], gradient, state, phi)

    return inner._replace(start=lambda both: both[1], init=lambda both, phi: state, update=update)


def _only(support: Batches, t: int) -> Batches:
    """Step t of the support alone; no step if the client stops before it."""
    whole = isinstance(support.steps, int) and support.steps == support.max_steps
    steps = 1 if whole else jnp.where(t < support.steps, 1, 0)

    def get(step: Scalar, chunk: Scalar = 0) -> PyTree:
        del step
        return support.get(t, chunk)

    return dataclasses.replace(support, get=get, steps=steps, max_steps=1)


def _unwind(pulls: list[Any], weights: jax.Array, meta: Params, phi: Params) -> tuple[Params, Params]:
    """From the last step to the first: (the cotangent of meta by the updates, that of phi_0).

    To the cotangent of each phi_t, that of the query loss there is added.
    """
    total, cotangent = jax.tree.map(jnp.zeros_like, (meta, phi))
    for (pull, outer), weight in zip(reversed(pulls), weights[::-1], strict=True):
        cotangent = jax.tree.map(lambda c, g, weight=weight: c + weight.astype(g.dtype) * g, cotangent, outer)
        here, cotangent = pull(cotangent)
        total = jax.tree.map(jnp.add, total, here)
    return total, cotangent


def annealed(rounds: int) -> Any:
    """`(round, S) -> [S]`: all steps count equally at first, and after this many rounds the last one alone.

    As in the code of MAML++ (AntreasAntoniou/HowToTrainYourMAMLPytorch, few_shot_learning_system.py,
    get_per_step_loss_importance_vector): in between, each other step loses 1 / (S rounds) a round, down to 0.03 / S.

    Args:
      rounds: after so many, the last step alone counts.

    Raises:
      ValueError: less than one round.
    """
    checks.count("rounds", rounds)
    return partial(_annealed, rounds)


def _annealed(rounds: int, round_: Scalar, steps: int) -> jax.Array:
    least, done = 0.03 / steps, jnp.asarray(round_, jnp.result_type(float)) / rounds
    others = jnp.maximum((1 - done) / steps, least)
    last = jnp.minimum((1 + done * (steps - 1)) / steps, 1 - (steps - 1) * least)
    is_last = jnp.arange(steps) == steps - 1
    return jnp.where(done < 1, jnp.where(is_last, last, others), is_last.astype(jnp.result_type(float)))
