"""This library in the comparison."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _workloads import Job, Workload

from fedjax_meta import Algorithm, Task, engine, fedavg, local, masks, meta, models, mtfl, simulate
from fedjax_meta.algorithm import Received, Trained, federated
from fedjax_meta.data import CHUNK, Batches, ClientData, FederatedData, federate
from fedjax_meta.data.shuffle import permuted, round_keys
from fedjax_meta.task import Batch, Key


def federation(job: Job) -> FederatedData:
    """The workload's samples, as stored by the library: every sample once, images uint8."""
    x, y = job.x, job.y
    count = np.full(len(x), job.workload.samples)
    total = count.sum()
    return federate(x.reshape(total, *x.shape[2:]), y.reshape(total), np.arange(total), count, num_classes=10)


def meta_rounds(task: Task, case: Workload, **options: Any) -> Algorithm:
    """The meta-gradient workloads: every step takes the next support batch and the next query batch in storage order."""
    trainable = task.trainable(masks.variables_shape(task))
    estimate = (meta.exact if case.rule == "exact" else meta.first_order)(meta.sgd(case.lr))
    span = case.batch_size + case.query_size

    def client(key: Key, received: Received, data: ClientData) -> Trained:
        view = data["train"]

        def batch(step: Any, begin: int, size: int) -> Batches:
            rows = -(-size // -(-size // CHUNK))  # as many chunks as needed, evenly filled

            def get(t: Any, chunk: Any = 0) -> Batch:
                index = chunk * rows + jnp.arange(rows, dtype=jnp.int32)
                return view.take(step * span + begin + index, index < size)

            return Batches(get, 1, 1, chunks=-(-size // rows)).keyed(key)

        def step(t: Any, variables: Any) -> Any:
            support, query = batch(t, 0, case.batch_size), batch(t, case.batch_size, case.query_size)
            result = estimate(local.parameter_loss(task, masks.split(variables, trainable)[1]), variables, support, query)
            return jax.tree.map(lambda p, g: p - case.lr * g, variables, result.gradient)

        # A client of the cohort's padding has no samples and does no work.
        steps = (jnp.asarray(view.size, jnp.int32) + span - 1) // span
        return Trained(jax.lax.fori_loop(0, steps, step, received.model), jnp.ones(()), {})

    nothing = masks.resolve("none", task)
    return federated(
        init=task.init,
        client=client,
        personalize=lambda key, received, support: received.model,
        predict=task.predict,
        personal=nothing,
        trainable=trainable,
        **options,
    )


def algorithm(case: Workload, **options: Any) -> Algorithm:
    """The workload as an algorithm of the library."""
    task = models.MODELS[case.model]()
    options = {"cohort_size": case.cohort_size, **options}
    if case.rule == "fedavg":
        return fedavg(task, lr=case.lr, batch_size=case.batch_size, **options)
    if case.rule == "private":
        return mtfl(task, lr=case.lr, batch_size=case.batch_size, private="bn", **options)
    return meta_rounds(task, case, **options)


def _name(path: Any) -> str:
    """A leaf as `layer/part`, wherever the algorithm keeps it."""
    return "/".join(masks.path_names(path)[-2:])


def start(job: Job, key: Key, data: FederatedData, build: Algorithm) -> Any:
    """A fresh state that begins at the job's parameters."""
    state = build.init(key, data)

    def given(path: Any, leaf: jax.Array) -> jax.Array:
        values = job.parameters.get(_name(path))  # running statistics begin as they always do
        return leaf if values is None else jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    model = jax.tree_util.tree_map_with_path(given, state.model)
    return state._replace(model=model)


def shuffled_cohort(job: Job, key: Key) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, samples, labels) of the cohort of the round with this key, each client's in the order in which it takes them."""
    cohort_key, client_key, _ = jax.random.split(key, 3)
    ids = engine.sample_cohort(cohort_key, len(job.x), job.workload.cohort_size)
    picked = []
    for client in ids:
        order_key, _ = jax.random.split(jax.random.fold_in(client_key, client))
        keys = round_keys(order_key, (1,))[0]
        picked.append(np.asarray(permuted(keys, jnp.arange(job.workload.samples, dtype=jnp.int32), job.workload.samples)))
    ids, order = np.asarray(ids), np.stack(picked)
    if job.workload.rule not in ("fedavg", "private"):
        order = np.broadcast_to(np.arange(job.workload.samples), order.shape)
    return ids, job.x[ids[:, None], order], job.y[ids[:, None], order]


def one_round_by_hand(job: Job) -> dict[str, np.ndarray]:
    """Parameters after the first round, and the samples that it went through, for others to repeat."""
    key = jax.random.key(7)
    data = federation(job)
    build = algorithm(job.workload)
    state, _ = jax.jit(build.round)(jax.random.fold_in(key, 0), start(job, key, data, build), data)
    ids, x, y = shuffled_cohort(job, jax.random.fold_in(key, 0))
    model, personal = (jax.tree_util.tree_leaves_with_path(tree) for tree in (state.model, state.personal))
    leaves = {_name(path): np.asarray(leaf) for path, leaf in model}
    # What clients keep is compared client by client, in the order of the cohort.
    return {"x": x, "y": y, **leaves, **{_name(path): np.asarray(leaf)[ids] for path, leaf in personal}}


def serve(peer: str, job: Job, turns: Any) -> None:
    """Runs rounds as the parent asks for them, each a call of one compiled block as in `simulate`."""
    key = jax.random.key(0)
    build = algorithm(job.workload)
    # The others hold their samples where they compute before the first round, too.
    state = start(job, key, federation(job), build)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    data, key, one = engine.share((federation(job), key, np.int32(1)), places.round)

    def block(state: Any, data: FederatedData, key: Key, count: Any) -> Any:
        return simulate.run_rounds(build, key, state, data, count, most=1)[0]

    run = jax.jit(block, donate_argnums=0, out_shardings=places)
    for _ in turns:
        state = jax.block_until_ready(run(state, data, key, one))
    stats = jax.devices()[0].memory_stats() or {}
    turns.device_bytes = stats.get("peak_bytes_in_use")
