"""Loops, and the pure functions inside programs of users: `jax.shard_map` with its checks, an explicit mesh, derivatives."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from fedjax_meta import loops

ROOT = Path(__file__).parent.parent

COMMON = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, numpy as np, optax
from functools import partial
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import fedjax_meta as fm

weights = jnp.arange(3.0) / 10  # closed over by the loss, and by no means an argument of a loop

def loss(params, batch):
    return jnp.mean((jnp.tanh(batch[0] @ params["w"]) * jnp.sum(weights) + params["b"] - batch[1]) ** 2)

x = jax.random.normal(jax.random.key(0), (4, 6, 3))
y = jax.random.normal(jax.random.key(1), (4, 6))
params = {"w": jnp.arange(3.0) / 10, "b": jnp.zeros(())}
sgd = fm.meta.sgd(0.1)

def estimators(steps):
    yield "exact", fm.meta.exact(sgd, steps=steps)
    yield "adam", fm.meta.exact(fm.meta.optimizer(optax.adam, 0.1), steps=steps)
    yield "checkpoints", fm.meta.exact(sgd, steps=steps, checkpoint_every=2)
    yield "hessian_free", fm.meta.hessian_free(sgd, steps=steps)
    yield "first_order", fm.meta.first_order(sgd, steps=steps)
    yield "reptile", fm.meta.reptile_gradient(sgd, steps=steps)
    yield "implicit", fm.implicit.implicit_gradient(sgd, steps=steps, prox_weight=2.0)
    yield "multi_step", partial(every_step, steps)

def every_step(steps, loss, params, support, query):
    batches = fm.data.Batches(lambda step, chunk=0: support, steps, steps)
    return fm.multistep.multi_step(sgd)(loss, params, batches, fm.multistep.EveryStep(query, 1 / (1 + jnp.arange(steps))))

def all_clients(estimate, params, x, y):
    def one(x, y):
        return estimate(loss, params, (x[:3], y[:3]), (x[3:], y[3:]))
    return jax.vmap(one)(x, y)

def same(expected, found, tolerance):
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
"""


def run(code: str) -> None:
    """Runs `code` in a process with two CPU devices."""
    done = subprocess.run(
        [sys.executable, "-c", COMMON + code], check=False, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_estimators_run_inside_shard_map_as_outside():
    """Each client adapts its own copy: nothing is summed over the devices."""
    run("""
mesh = jax.make_mesh((2,), ("clients",), axis_types=(AxisType.Auto,))
for steps in (1, 2, 5):
    for name, estimate in estimators(steps):
        inside = jax.shard_map(
            lambda p, x, y: all_clients(estimate, p, x, y), mesh=mesh, in_specs=(P(), P("clients"), P("clients")),
            out_specs=P("clients"),
        )
        same(all_clients(estimate, params, x, y), jax.jit(inside)(params, x, y), 1e-7)
""")


def test_estimators_run_on_an_explicit_mesh():
    """Parameters may come from outside the mesh."""
    run("""
mesh = jax.make_mesh((2,), ("clients",), axis_types=(AxisType.Explicit,))
expected = {(s, n): all_clients(e, params, x, y) for s in (1, 2, 5) for n, e in estimators(s)}
with jax.set_mesh(mesh):
    weights = jax.device_put(weights, NamedSharding(mesh, P()))
    placed = [jax.device_put(a, NamedSharding(mesh, P("clients"))) for a in (x, y)]
    for (steps, name), before in expected.items():
        estimate = dict(estimators(steps))[name]
        same(before, jax.jit(lambda x, y: all_clients(estimate, params, x, y))(*placed), 1e-7)
""")


def test_a_query_loss_can_be_differentiated_around_the_estimator():
    """By central differences, with every way to store steps; 5 steps are two segments of 2 and one of 1."""
    run("""
def query_loss(estimate, w):
    return estimate(loss, {**params, "w": w}, (x[0], y[0]), (x[1], y[1])).info.query_loss

for steps in (1, 4, 5):
    for name, estimate in estimators(steps):
        value = jax.jit(lambda w: query_loss(estimate, w))
        found = jax.grad(value)(params["w"])
        for i, step in enumerate(1e-5 * np.eye(3)):
            numeric = (value(params["w"] + step) - value(params["w"] - step)) / 2e-5
            np.testing.assert_allclose(found[i], numeric, rtol=1e-6, atol=1e-9)
""")


def test_local_training_runs_inside_shard_map_as_outside():
    run("""
from fedjax_meta import local, models
task = models.mlp(inputs=3, classes=2)
data = fm.from_clients([(np.asarray(x[i]), (np.asarray(y[i]) > 0).astype(int)) for i in range(4)], num_classes=2)
start, sgd = task.init(jax.random.key(0)), optax.sgd(0.1)
everything = jax.tree.map(lambda _: True, start)
mesh = jax.make_mesh((2,), ("clients",), axis_types=(AxisType.Auto,))

def trained(start, clients, data):
    def one(client):
        view = data.client(client)["train"]
        return local.train_epochs(jax.random.key(2), task.loss, start, view, sgd, everything, epochs=3, batch_size=2)
    return jax.vmap(one)(clients)

inside = jax.shard_map(
    trained, mesh=mesh, in_specs=(P(), P("clients"), P()), out_specs=P("clients")
)
same(trained(start, jnp.arange(4), data), jax.jit(inside)(start, jnp.arange(4), data), 1e-10)
""")


@pytest.mark.parametrize(("most", "least", "expected"), [(50, 3, 6), (5, 3, 5), (50, 9, 9), (0, 3, 0)])
def test_steps_go_on_until_their_values_are_steady(most, least, expected):
    """The last three values deviate by less than 0.1 for the first time after six steps."""
    values = jnp.array([4.0, 1.0, 1.0, 2.0, 2.1, 2.0, 2.05] + [2.0] * 50)

    def step(i, total):
        return total + values[i], values[i]

    run = jax.jit(lambda most: loops.until_steady(step, 0.0, most=most, least=least, window=3, tolerance=0.1))
    total, count = run(most)
    assert int(count) == expected and float(total) == pytest.approx(float(jnp.sum(values[:expected])))
