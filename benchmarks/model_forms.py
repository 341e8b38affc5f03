"""Times the alternative forms of convolution, pooling, dense layers and whole models that `fedjax_meta.layers` chooses from.

`python benchmarks/model_forms.py` prints one table for each part; `--output FILE` also appends one JSON row for each case. The
cases of a part take turns, so that a busy machine affects all of them alike. They are compiled as a run compiles its programs.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from _measure import Spread, as_program, check_outputs, environment, interleaved, write_row
from jax import lax

import fedjax_meta as fm
from fedjax_meta import checks, layers, models
from fedjax_meta.blocks import Compiled
from fedjax_meta.types import Variables

Cases = dict[tuple[str, str], Callable[[], Any]]

LAYERS = {
    "lenet conv1": (32, 3, 6, 5, 0),
    "lenet conv2": (14, 6, 16, 5, 0),
    "fedpac conv1": (32, 3, 16, 5, 0),
    "fedpac conv2": (14, 16, 32, 5, 1),
    "fedpac conv3": (6, 32, 64, 3, 1),
    "mtfl conv1": (32, 3, 32, 3, 0),
    "mtfl conv2": (15, 32, 64, 3, 0),
}
"""Convolutions that are followed by a pool: height and width, input channels, output channels, kernel size, padding."""


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _case(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """A call of a function that is compiled when it is first made."""
    program = Compiled(jax.jit(function))
    return lambda: jax.block_until_ready(program(*arguments))


def _gradients(name: str, form: str, scalar: Callable[..., jax.Array], argument: Any, *rest: Any) -> Iterator[tuple[Any, Any]]:
    """Two cases: the gradient with respect to the first argument, and the gradient with a Hessian-vector product."""
    gradient = jax.grad(scalar)

    def curvature(argument: Any, *rest: Any) -> Any:
        return jax.jvp(lambda a: gradient(a, *rest), (argument,), (argument,))

    yield (f"{name}, gradient", form), _case(gradient, argument, *rest)
    yield (f"{name}, gradient and HVP", form), _case(curvature, argument, *rest)


def convolution_cases() -> Cases:
    """Convolution and pool of a batch of 32: the banded form with each block, im2col and XLA's; one client and 5 under vmap."""
    cases: Cases = {}
    for name, (width, channels, outputs, size, padding) in LAYERS.items():
        x, kernel = _normal(0, 32, width, width, channels), _normal(1, outputs, size, size, channels)
        pooled = (width + 2 * padding - size + 1) // 2
        blocks = [b for b in range(2, 2 * pooled + 1, 2) if 2 * pooled % b == 0]
        forms: list[tuple[str, dict[str, Any]]] = [
            *((f"banded, block {b}", {"form": "banded", "block": b}) for b in blocks),
            ("banded, chosen block", {"form": "banded"}),
            ("im2col", {"form": "im2col"}),
            ("lax", {"form": "lax"}),
        ]
        for form, options in forms:

            def scalar(argument: tuple[jax.Array, jax.Array], padding: int = padding, options: Any = options) -> jax.Array:
                windows = layers.convolution_windows(*argument, padding=padding, **options)
                return jnp.sum(layers.pool_windows(windows) ** 2)

            cases[f"{name}, gradient", form] = _case(jax.grad(scalar), (x, kernel))
            clients = jnp.stack([x] * 5), jnp.stack([kernel] * 5)
            cases[f"{name}, gradient of 5 clients", form] = _case(jax.vmap(jax.grad(scalar)), clients)
    return cases


def pool_cases() -> Cases:
    """2x2 max-pool of LeNet's first layer, batch of 32."""

    def reduce_window(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def reshape_max(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2, x.shape[3]).max((2, 4))

    def pairwise(x: jax.Array) -> jax.Array:
        x = jnp.maximum(x[:, ::2], x[:, 1::2])
        return jnp.maximum(x[:, :, ::2], x[:, :, 1::2])

    x = _normal(0, 32, 28, 28, 6)
    # The layout of the banded convolution's outputs.
    windows = _normal(0, 32, 14, 7, 4, 2, 6)
    cases: Cases = {}
    for form, pool, argument in (
        ("reduce_window", reduce_window, x),
        ("reshape, max", reshape_max, x),
        ("pairwise maximum", pairwise, x),
        ("max_pool", layers.max_pool, x),
        ("pool_windows", layers.pool_windows, windows),
    ):
        cases.update(_gradients("pool", form, lambda x, pool=pool: jnp.sum(jnp.sin(pool(x))), argument))
    return cases


def dense_cases() -> Cases:
    """SGD step of a dense layer 784-100: kernel stored outputs first or inputs first, for one client and for 100."""
    cases: Cases = {}
    for form, product, shape in (
        ("kernel [out, in]", layers.dense, (100, 784)),
        ("kernel [in, out]", jnp.matmul, (784, 100)),
    ):

        def step(kernel: jax.Array, x: jax.Array, product: Any = product) -> jax.Array:
            return kernel - 0.1 * jax.grad(lambda kernel: jnp.sum(jnp.sin(product(x, kernel))))(kernel)

        cases["dense step, batch 32", form] = _case(step, _normal(0, *shape), _normal(1, 32, 784))
        clients = _normal(0, 100, *shape), _normal(1, 100, 20, 784)
        cases["dense step, 100 clients of 20", form] = _case(jax.vmap(step), *clients)
    return cases


def _loss(task: fm.Task) -> Callable[..., jax.Array]:
    return lambda variables, batch: task.loss(variables, batch, jax.random.key(0))[0]


def model_cases() -> Cases:
    """Gradient and HVP of a batch of 32; 33 SGD steps of 5 clients, one client after the other and under vmap."""
    cases: Cases = {}
    networks: dict[tuple[str, str], tuple[fm.Task, tuple[int, ...]]] = {("mlp", "[out, in]"): (models.mlp(), (784,))}
    networks.update({("lenet", form): (models.lenet(form=form), (32, 32, 3)) for form in layers.FORMS})
    for (name, form), (task, shape) in networks.items():
        variables = jax.jit(task.init)(jax.random.key(0))
        labels = jnp.asarray(np.random.default_rng(2).integers(0, 10, (5, 33, 32)))
        batches = fm.Batch(_normal(3, 5, 33, 32, *shape), labels, jnp.ones((5, 33, 32)))
        loss = _loss(task)
        cases.update(_gradients(name, form, loss, variables, jax.tree.map(lambda leaf: leaf[0, 0], batches)))

        def client(variables: Variables, batches: fm.Batch, loss: Any = loss) -> Variables:
            def step(variables: Variables, batch: fm.Batch) -> tuple[Variables, None]:
                return jax.tree.map(lambda p, g: p - 0.01 * g, variables, jax.grad(loss)(variables, batch)), None

            return lax.scan(step, variables, batches)[0]

        def streamed(variables: Variables, batches: fm.Batch, client: Any = client) -> Variables:
            def add(total: Variables, batches: fm.Batch) -> tuple[Variables, None]:
                return jax.tree.map(lambda a, b: a + b / 5, total, client(variables, batches)), None

            return lax.scan(add, jax.tree.map(jnp.zeros_like, variables), batches)[0]

        def vmapped(variables: Variables, batches: fm.Batch, client: Any = client) -> Variables:
            return jax.tree.map(lambda leaf: leaf.mean(0), jax.vmap(client, (None, 0))(variables, batches))

        cases[f"{name}, 5 clients x 33 steps streamed", form] = _case(streamed, variables, batches)
        if form != "lax" or jax.default_backend() != "cpu":  # on a CPU a grouped convolution takes minutes
            cases[f"{name}, 5 clients x 33 steps vmapped", form] = _case(vmapped, variables, batches)
    return cases


PARTS: dict[str, Callable[[], Cases]] = {
    "dense": dense_cases,
    "pool": pool_cases,
    "convolution": convolution_cases,
    "model": model_cases,
}


def chosen_cases(parts: list[str], only: str) -> dict[str, Cases]:
    """By part, its cases whose name contains `only`.

    Raises:
      ValueError: there is none.
    """
    every = {part: PARTS[part]() for part in parts}
    found = {part: {case: run for case, run in cases.items() if only in case[0]} for part, cases in every.items()}
    if not any(found.values()):
        checks.one_of("--only", only, sorted({name.partition(",")[0] for cases in every.values() for name, _ in cases}))
    return found


def main(
    part: Annotated[list[str] | None, typer.Option(help=f"Parts to time: {', '.join(PARTS)}; all by default.")] = None,
    only: Annotated[str, typer.Option(help="Time only cases whose name contains this text.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Number of timed calls of each case.")] = 20,
    output: Annotated[Path | None, typer.Option(help="File to append the rows to, as JSON lines.")] = None,
) -> None:
    """Times the forms side by side and prints them, fastest first.

    \b
    Examples:
      python benchmarks/model_forms.py
      python benchmarks/model_forms.py --part dense --repeats 5
    """
    chosen = part or list(PARTS)
    for name in chosen:
        checks.one_of("--part", name, PARTS)
    check_outputs(output)
    fm.use_all_cores()
    about = environment()
    for name, cases in chosen_cases(chosen, only).items():
        times = interleaved(cases, repeats=repeats)
        spreads = {case: Spread.of(seconds) for case, seconds in times.items()}
        for title in dict.fromkeys(case for case, _ in cases):
            print(title)
            forms = sorted((times[case].min(), case[1], spreads[case]) for case in cases if case[0] == title)
            for least, form, spread in forms:
                print(f"  {form:24} min {1e3 * least:9.3f} ms   median {1e3 * spread.median:9.3f} ms")
                row = {"part": name, "case": title, "form": form, "seconds": spread.median, "low": spread.low}
                row |= {"high": spread.high, "min": float(least)}
                write_row(output, {"benchmark": "model_forms", **row, **about})


if __name__ == "__main__":
    as_program(main)()
