"""The multi-step meta-gradient of MAML++: the query loss counts after every inner step, not after the last one alone."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.meta import (
    Estimator,
    Info,
    MetaGradient,
    MetaSGD,
    check_problem,
    require_inner,
    require_second_order,
)
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
      inner: `meta.sgd` or `meta.learned_sgd`, which keep no state but the number of the step.

    Cost: S gradients and S Hessian-vector products of the support, S gradients of the query. Every step is a part of the program
    and stores its linearisation.

    Raises:
      ValueError: `inner` is no such optimiser; from the estimator: a query of another kind, weights that are not `[S]`.
    """
    require_inner("multi_step", inner)

    def estimate(loss: ScalarLoss, meta: Params, support: PyTree, query: PyTree) -> MetaGradient:
        if not isinstance(query, EveryStep):
            raise ValueError("multi_step needs an EveryStep(query, weights), which step_weights of fedmeta makes")
        require_second_order(loss)
        phi = inner.start(meta)
        if any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(jax.eval_shape(inner.init, meta, phi))):
            raise ValueError("multi_step takes inner gradient descent: an optimiser with a state of its own has no such steps")
        support, batches = check_problem(loss, phi, support, query.query, 1)
        count = support.max_steps
        if jnp.shape(query.weights) != (count,):
            raise ValueError(f"weights must be one for each of the {count} inner steps, not {list(jnp.shape(query.weights))}")
        values, total, pulls = [], Losses.none(), []
        for t in range(count):
            here = meta._replace(params=phi) if isinstance(meta, MetaSGD) else phi
            one = inner._replace(init=partial(_number, t))
            phi, losses, pull = second_order_vjp(
                loss,
                here,
                _only(support, t),
                one,
                linearise=partial(exact_product, loss, None, mask=inner.mask),
                keep="smaller",
                checkpoint_every=None,
            )
            total = total.add(t, losses.total)
            value, outer = value_and_gradient(loss, phi, batches, 0)
            values.append(query.weights[t] * value)
            pulls.append((pull, outer))
        descent = _unwind(pulls, query.weights, phi, meta)
        return MetaGradient(phi, descent, Info.of(total, sum(values[1:], values[0]), support.steps))

    return estimate


def _number(t: int, meta: Params, phi: Params) -> jax.Array:
    del meta, phi
    return jnp.full((), t, jnp.int32)


def _only(support: Any, t: int) -> Any:
    """Step t of the support alone; no step if the client stops before it."""
    steps = 1 if isinstance(support.steps, int) else jnp.where(t < support.steps, 1, 0)

    def get(step: Scalar, chunk: Scalar = 0) -> PyTree:
        del step
        return support.get(t, chunk)

    return dataclasses.replace(support, get=get, steps=steps, max_steps=1)


def _unwind(pulls: list[Any], weights: jax.Array, phi: Params, meta: Params) -> Params:
    """From the last step to the first: the cotangent of phi_t, with that of the query loss there added."""
    cotangent = jax.tree.map(jnp.zeros_like, phi)
    rates = jax.tree.map(jnp.zeros_like, meta.rates) if isinstance(meta, MetaSGD) else None
    for (pull, outer), weight in zip(reversed(pulls), weights[::-1], strict=True):
        cotangent = jax.tree.map(lambda c, g, weight=weight: c + weight.astype(g.dtype) * g, cotangent, outer)
        result = pull(cotangent)
        if rates is None:
            cotangent = result
        else:
            cotangent, rates = result.params, jax.tree.map(jnp.add, rates, result.rates)
    return cotangent if rates is None else MetaSGD(cotangent, rates)


def annealed(rounds: int) -> Any:
    """`(round, S) -> [S]`: all steps count equally at first, and after this many rounds the last one alone.

    As in the code of MAML++ (AntreasAntoniou/HowToTrainYourMAMLPytorch, few_shot_learning_system.py,
    get_per_step_loss_importance_vector): in between, each other step loses 1 / (S rounds) a round, down to 0.03 / S.

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
