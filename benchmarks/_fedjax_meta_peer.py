"""This library as one of the simulators that `peers.py` compares."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _workloads import Job, Workload

import fedjax_meta as fm
from fedjax_meta import local, masks, meta, models, placement, runtime
from fedjax_meta.blocks import Compiled, run_rounds
from fedjax_meta.data import Batches, ClientData, chunk_length
from fedjax_meta.data.shuffle import permutation_keys, permute
from fedjax_meta.keys import tagged
from fedjax_meta.types import Key, PyTree, Scalar


def client_data(job: Job) -> fm.FederatedData:
    """The samples of a job as the library stores them: every sample once, images as uint8."""
    x, y = job.x, job.y
    sizes = np.full(len(x), job.workload.samples)
    total = sizes.sum()
    return fm.from_partition(x.reshape(total, *x.shape[2:]), y.reshape(total), np.arange(total), sizes, num_classes=10)


def meta_gradient_steps(task: fm.Task, case: Workload) -> fm.Method:
    """The meta-gradient workloads: each step takes the next support batch and the next query batch in storage order."""
    trainable = task.trainable(masks.variables_shape(task))
    estimate = (meta.exact if case.rule == "exact" else meta.first_order)(meta.sgd(case.lr))
    span = case.batch_size + case.query_size

    def client(key: Key, received: fm.Received, data: ClientData) -> fm.Trained:
        view = data["train"]

        def batch(step: Scalar, begin: int, size: int) -> Batches:
            rows = -(-size // -(-size // chunk_length()))  # equal chunks

            def get(t: Scalar, chunk: Scalar = 0) -> fm.Batch:
                index = chunk * rows + jnp.arange(rows, dtype=jnp.int32)
                return view.take(step * span + begin + index, index < size)

            return Batches(get, 1, 1, chunks=-(-size // rows)).keyed(key)

        def step(t: Scalar, variables: PyTree) -> PyTree:
            support, query = batch(t, 0, case.batch_size), batch(t, case.batch_size, case.query_size)
            result = estimate(local.parameter_loss(task, masks.split(variables, trainable)[1]), variables, support, query)
            return jax.tree.map(lambda p, g: p - case.lr * g, variables, result.gradient)

        # A client that pads the cohort has no samples and takes no steps.
        steps = (jnp.asarray(view.size, jnp.int32) + span - 1) // span
        return fm.Trained(jax.lax.fori_loop(0, steps, step, received.model), {})

    return fm.Method(
        init=task.init,
        client=client,
        personalize=fm.received_model,
        predict=task.predict,
        roles=masks.roles(masks.nothing(task), trainable),
        weighting="uniform",
    )


def method(case: Workload) -> fm.Method:
    """The workload's method, as the library writes it."""
    task = models.MODELS[case.model]()
    if case.rule == "fedavg":
        return fm.fedavg(task, lr=case.lr, batch_size=case.batch_size)
    if case.rule == "private":
        return fm.mtfl(task, lr=case.lr, batch_size=case.batch_size, private="bn")
    return meta_gradient_steps(task, case)


def algorithm(job: Job) -> fm.Algorithm:
    """The workload as an algorithm of the library."""
    case = job.workload
    return fm.federate(method(case), fm.Federation(cohort_size=case.cohort_size, precision=job.precision))


def _name(path: tuple[Any, ...]) -> str:
    """The last two names of a path, `layer/part`; methods differ in what comes before them."""
    return "/".join(masks.path_names(path)[-2:])


def initial_state(job: Job, key: Key, data: fm.FederatedData, run: fm.Algorithm) -> fm.State:
    """A new state whose model has the job's parameters."""
    # As `simulate` compiles its programs.
    state = runtime.compiled(jax.jit(run.init).lower(key, data), once=True)(key, data)

    def given(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        values = job.parameters.get(_name(path))  # the job has no running statistics: those keep their initial values
        return leaf if values is None else jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return state._replace(model=jax.tree_util.tree_map_with_path(given, state.model))


def cohort_samples(job: Job, key: Key, run: fm.Algorithm) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, samples, labels) of the cohort of the first round, each client's samples in the order in which it takes them.

    Args:
      job: the workload and its samples.
      key: the key of the round.
      run: what the round belongs to.
    """
    size = job.workload.samples
    ids = np.asarray(run.cohort(key, 0, len(job.x)))
    orders = []
    for client in ids:
        # The tags are those of a round, of its clients' training and of `local.train_epochs`.
        client_key = jax.random.fold_in(tagged(key, "clients"), client)
        keys = permutation_keys(tagged(tagged(client_key, "train"), "order"), (1,))[0]
        orders.append(np.asarray(permute(keys, jnp.arange(size, dtype=jnp.int32), size)))
    order = np.stack(orders)
    if job.workload.rule not in ("fedavg", "private"):
        order = np.broadcast_to(np.arange(size), order.shape)
    return ids, job.x[ids[:, None], order], job.y[ids[:, None], order]


def one_recorded_round(job: Job) -> dict[str, np.ndarray]:
    """The parameters after one round, with the samples "x" and "y" that the cohort went through, for the others to repeat."""
    key = jax.random.key(7)
    data = client_data(job)
    run = algorithm(job)
    round_key = jax.random.fold_in(key, 0)
    state, _ = jax.jit(run.round)(round_key, initial_state(job, key, data, run), data)
    ids, x, y = cohort_samples(job, round_key, run)
    model, personal = (jax.tree_util.tree_leaves_with_path(tree) for tree in (state.model, state.personal))
    leaves = {_name(path): np.asarray(leaf) for path, leaf in model}
    # Personal leaves are compared client by client, in the order of the cohort.
    return {"x": x, "y": y, **leaves, **{_name(path): np.asarray(leaf)[ids] for path, leaf in personal}}


def rounds(job: Job) -> Callable[[], None]:
    """A function that runs a round and waits for it: a call of one compiled block, as in `simulate`."""
    fm.use_all_cores()
    key = jax.random.key(0)
    run = algorithm(job)
    # The samples are on the devices before the first round, as with the other simulators.
    state = initial_state(job, key, client_data(job), run)
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    data, key, one = placement.place_shared((client_data(job), key, np.int32(1)), places.round)

    def block(state: fm.State, data: fm.FederatedData, key: Key, count: Scalar) -> fm.State:
        return run_rounds(run, key, state, data, count, most=1)[0]

    program = Compiled(jax.jit(block, donate_argnums=0, out_shardings=places))

    def next_round() -> None:
        nonlocal state
        state = jax.block_until_ready(program(state, data, key, one))

    return next_round


def serve(peer: str, job: Job, turns: Any) -> None:
    """Runs rounds when the parent asks for them."""
    next_round = rounds(job)
    for _ in turns:
        next_round()
    stats = jax.devices()[0].memory_stats() or {}
    turns.device_bytes = stats.get("peak_bytes_in_use")
