"""Compares the meta-gradient estimators of `fedjax_meta`: cost, and error against the exact gradient.

For one client and k inner steps, each estimator's time, work and memory relative to first order, its compile time, and the error
of its gradient against the exact gradient in float64. PyTorch is timed in the same run if it is installed.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from _measure import Program, Spread, as_program, check_outputs, compile_anew, compiled, environment, interleaved, write_row
from jax.flatten_util import ravel_pytree
from rich.console import Console
from rich.table import Table

import fedjax_meta as fm
from fedjax_meta import checks, implicit, meta, models
from fedjax_meta.trajectory import hessian_product
from fedjax_meta.types import Params, Updates

RATE = 0.01
STEPS = (1, 2, 4, 8, 16, 32)
PROX_WEIGHT = 2.0

Loss = Callable[[Params, fm.Batch], jax.Array]

ESTIMATORS: dict[str, Callable[..., meta.Estimator]] = {
    "first order": meta.first_order,
    "exact": meta.exact,
    "exact, parameters kept": partial(meta.exact, keep="parameters"),
    "exact, linearisations kept": partial(meta.exact, keep="linearisation"),
    "Hessian-free (difference)": meta.hessian_free,
    "Hessian-free (product)": partial(meta.hessian_free, method="product"),
    "reptile": meta.reptile_gradient,
    "implicit, 1 CG": partial(implicit.implicit_gradient, prox_weight=PROX_WEIGHT, cg_steps=1, tolerance=0.0),
    "implicit, 5 CG": partial(implicit.implicit_gradient, prox_weight=PROX_WEIGHT, cg_steps=5, tolerance=0.0),
}
"""The estimators by name. "exact" keeps the smaller of parameters and linearisations; the next two keep one or the other."""


def reverse_over_reverse(inner: meta.InnerOptimizer, *, steps: int) -> meta.Estimator:
    """The textbook baseline: `jax.grad` through a scanned inner loop."""

    def estimate(loss: Loss, theta: Params, support: fm.Batch, query: fm.Batch) -> meta.MetaGradient:
        def outer(theta: Params) -> jax.Array:
            def step(phi: Params, _: None) -> tuple[Params, None]:
                return inner.update(theta, jax.grad(loss)(phi, support), (), phi)[0], None

            return loss(jax.lax.scan(step, theta, length=steps)[0], query)

        value, gradient = jax.value_and_grad(outer)(theta)
        return meta.MetaGradient(None, gradient, value)

    return estimate


def problem(model: str, support: int, query: int, seed: int = 0) -> tuple[Loss, Params, fm.Batch, fm.Batch]:
    """(loss, parameters, support [B, ...], query [B, ...]) with random data; cost does not depend on values."""
    task = models.MODELS[model]()
    shape = (784,) if model == "mlp" else (32, 32, 3)
    rng = np.random.default_rng(seed)

    def samples(size: int) -> fm.Batch:
        x = rng.normal(size=(size, *shape)).astype(np.float32)
        y = rng.integers(0, 10, size).astype(np.int32)
        return jax.tree.map(jnp.asarray, fm.Batch(x, y, np.ones(size, np.float32)))

    key = jax.random.key(seed)
    theta = task.init(key)
    return lambda p, batch: task.loss(p, batch, key)[0], theta, samples(support), samples(query)


def program(estimate: meta.Estimator, loss: Loss, *arguments: Any) -> Program:
    """The compiled gradient of one client. Parameters and data are arguments: XLA would fold computations on constants."""
    return compiled(lambda *arguments: estimate(loss, *arguments).gradient, *arguments)


def work_of_parts(loss: Loss, theta: Params, support: fm.Batch, query: fm.Batch) -> dict[str, float]:
    """XLA's FLOPs of the gradients of support and query, and of a Hessian-vector product with and without a gradient."""

    def with_product(theta: Params, vector: Updates, batch: fm.Batch) -> tuple[Updates, Updates]:
        _, gradient, product = hessian_product(loss, theta, meta.as_batches(batch, 1), 0)
        return gradient, product(vector)

    gradient = compiled(jax.grad(loss), theta, support).flops
    return {
        "support": gradient,
        "query": compiled(jax.grad(loss), theta, query).flops,
        "product": compiled(with_product, theta, theta, support).flops - gradient,
        "product alone": compiled(lambda *arguments: with_product(*arguments)[1], theta, theta, support).flops,
    }


def executed(name: str, once: float, k: int, parts: dict[str, float]) -> float:
    """FLOPs that run, from XLA's count of the program, which counts the body of each loop once."""
    if name.startswith("implicit"):
        solver = int(name.split()[1])
        return once + (k - 1) * parts["support"] + (solver - 1) * parts["product"]
    outside = 0.0 if name == "reptile" else parts["query"]
    return outside + k * (once - outside)


def floor(name: str, k: int, parts: dict[str, float]) -> float:
    """The minimum FLOPs: every gradient and every Hessian-vector product once, without recomputation."""
    inner, query = k * parts["support"], parts["query"]
    if name.startswith("implicit"):
        return inner + query + parts["product alone"] + (int(name.split()[1]) - 1) * parts["product"]
    if name == "Hessian-free (difference)":
        return 3 * inner + query
    if name == "reptile":
        return inner
    return inner + query + (0 if name == "first order" else k * parts["product"])


def exact_in_float64(model: str, support: int, query: int, steps: int) -> np.ndarray:
    """The reference gradient as one vector."""
    loss, theta, inner, outer = problem(model, support, query)
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(  # noqa: E731
            lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64) if leaf.dtype == jnp.float32 else leaf, tree
        )
        theta, inner, outer = wide(theta), wide(inner), wide(outer)
        gradient = program(meta.exact(meta.sgd(RATE), steps=steps), loss, theta, inner, outer).call(theta, inner, outer)
        return np.asarray(ravel_pytree(gradient)[0])


def torch_cases(
    model: str, support: Any, query: Any, k: int, *, compile_too: bool, threads: int
) -> dict[str, Callable[[], Any]]:
    """The same meta-gradient in PyTorch, by `autograd.grad(create_graph=True)` and by nested `torch.func.grad`.

    Empty if PyTorch is not installed.
    """
    try:
        import torch
        from _torch_peers import network
        from torch import func, nn
    except ImportError:
        return {}
    if threads:
        torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    net = network(model).to(device)
    theta = {name: leaf.detach().clone() for name, leaf in net.named_parameters()}

    def to_torch(x: Any, y: Any) -> tuple[Any, Any]:
        x = torch.tensor(np.asarray(x), device=device)
        x = x if model == "mlp" else x.permute(0, 3, 1, 2).contiguous()
        return x, torch.tensor(np.asarray(y), device=device).long()

    first = to_torch(support.x, support.y)
    last = to_torch(query.x, query.y)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(func.functional_call(net, params, (x,)), y)

    def autograd(second: bool) -> Any:
        leaves = {name: leaf.clone().requires_grad_(True) for name, leaf in theta.items()}
        params = leaves
        for _ in range(k):
            gradients = torch.autograd.grad(loss(params, *first), list(params.values()), create_graph=second)
            params = {name: p - RATE * g for (name, p), g in zip(params.items(), gradients, strict=True)}
            if not second:
                params = {name: p.detach().requires_grad_(True) for name, p in params.items()}
        result = torch.autograd.grad(loss(params, *last), list((leaves if second else params).values()))
        return finish(result)

    def adapted_loss(params: Any) -> Any:
        for _ in range(k):
            gradients = func.grad(loss)(params, *first)
            params = {name: p - RATE * gradients[name] for name, p in params.items()}
        return loss(params, *last)

    def finish(result: Any) -> Any:
        if device == "cuda":
            torch.cuda.synchronize()
        return result

    outer = func.grad(adapted_loss)
    cases = {
        "torch autograd, first order": partial(autograd, False),
        "torch autograd, exact": partial(autograd, True),
        "torch.func, exact": lambda: finish(outer(theta)),
    }
    if compile_too:
        forms = {"": "default"} | ({", CUDA graphs": "reduce-overhead"} if device == "cuda" else {})
        for name, mode in forms.items():
            cases[f"torch.compile(torch.func){name}, exact"] = lambda fast=torch.compile(outer, mode=mode): finish(fast(theta))
    return cases


def bench(
    *,
    model: Annotated[str, typer.Option(help="mlp (784-100-10) or lenet (CIFAR-10 size).")] = "mlp",
    steps: Annotated[
        list[int] | None,
        typer.Option(min=1, help=f"Inner steps k; by default {', '.join(map(str, STEPS))}.", show_default=False),
    ] = None,
    support: Annotated[int, typer.Option(min=1, help="Support samples; every inner step uses all of them.")] = 32,
    query: Annotated[int, typer.Option(min=1, help="Query samples.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Number of times that each estimator is timed.")] = 30,
    peers: Annotated[bool, typer.Option(help="Also time PyTorch if it is installed.")] = True,
    compile_peers: Annotated[
        bool, typer.Option(help="Also time torch.compile (tens of seconds per case, needs a C++ compiler).")
    ] = False,
    torch_threads: Annotated[int, typer.Option(min=0, help="Threads of PyTorch on CPU; 0 keeps PyTorch's default.")] = 0,
    output: Annotated[Path | None, typer.Option(help="File to append the rows to, as JSON lines.")] = None,
    figure: Annotated[Path | None, typer.Option(help="File of a figure of time against gradient error.")] = None,
) -> None:
    """Times every meta-gradient estimator on one client, and compares its gradient with the exact one.

    \b
    Examples:
      python benchmarks/second_order.py --output rows.jsonl --figure cost.pdf
      python benchmarks/second_order.py --model lenet --steps 1

    \b
    time    milliseconds per gradient; all estimators take turns in one process
    /FO     median and quartiles of the ratio to first order in the same turn
    best    ratio of the shortest times, which a busy machine affects least
    floor   ratio of the minimum FLOPs: each gradient once (k support, 1 query)
            and each Hessian-vector product once (k, or one per CG step)
    GFLOP   executed, from XLA's count, which counts a loop body once
    temp    XLA's peak of temporary memory, in multiples of the parameters
    cosine  and relative error of the gradient against `exact` in float64.
            Implicit gradients belong to another inner problem (with a
            proximal term) and Reptile's gradient is divided by rate * k, so
            their difference is expected
    """
    checks.one_of("--model", model, ("mlp", "lenet"))
    check_outputs(output, figure)
    compile_anew()
    fm.use_all_cores()
    where = environment()
    console = Console(width=160)
    title = f"{model}, {support} support and {query} query samples, {where['device']}, JAX {where['jax']}"
    table = Table(title=title)
    for column in ("k", "estimator", "time ms", "/FO", "best", "floor", "compile s", "GFLOP", "temp trees", "cosine", "error"):
        table.add_column(column, justify="left" if column == "estimator" else "right")
    rows = []
    for k in steps or STEPS:
        options = {"repeats": repeats, "peers": peers, "compile_peers": compile_peers, "torch_threads": torch_threads}
        say = partial(console.print, style="dim", highlight=False)
        with jax.default_matmul_precision("float32"):  # as rounds compute; a GPU's own precision is TF32
            measured = measure_steps(model, support, query, k, **options, say=say)
        for row in measured:
            rows.append(row)
            write_row(output, {"benchmark": "second_order", **row, **where})
            table.add_row(*shown(row))
        table.add_section()
    console.print(table)
    if figure is not None:
        draw(rows, title, figure)


def measure_steps(
    model: str,
    support: int,
    query: int,
    k: int,
    *,
    repeats: int,
    peers: bool,
    compile_peers: bool,
    torch_threads: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The rows of all estimators at k inner steps; `say` gets a line for each step of the work."""
    loss, theta, inner, outer = problem(model, support, query)
    tree = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(theta))
    parts = work_of_parts(loss, theta, inner, outer)
    reference = exact_in_float64(model, support, query, k)
    programs: dict[str, Program] = {}
    for name, build in {**ESTIMATORS, "reverse over reverse": reverse_over_reverse}.items():
        if k == 1 and name.startswith("exact,"):
            continue  # with one step, "exact" has no choice of what to keep
        programs[name] = program(build(meta.sgd(RATE), steps=k), loss, theta, inner, outer)
        say(f"k={k}, {name}: compiled in {programs[name].compile_seconds:.1f} s")
    cases = {name: partial(_finished, found.call, theta, inner, outer) for name, found in programs.items()}
    if peers:
        cases |= torch_cases(model, inner, outer, k, compile_too=compile_peers, threads=torch_threads)
    say(f"k={k}: timing {len(cases)} estimators {repeats} times")
    times = interleaved(cases, repeats=repeats)
    rows = []
    for name, seconds in times.items():
        time, ratio = Spread.of(seconds), Spread.of(seconds / times["first order"])
        row = {"model": model, "support": support, "query": query, "k": k, "estimator": name}
        row |= {"seconds": time.median, "seconds_quartiles": time[1:], "ratio": ratio.median, "ratio_quartiles": ratio[1:]}
        row["ratio_of_best"] = float(seconds.min() / times["first order"].min())
        if name in programs:
            found = programs[name]
            gradient = np.asarray(ravel_pytree(cases[name]())[0], np.float64) / (RATE * k if name == "reptile" else 1)
            row |= {
                "floor": floor(name, k, parts) / floor("first order", k, parts),
                "compile_seconds": found.compile_seconds,
                "flops": executed(name, found.flops, k, parts),
                "temp_bytes": found.temp_bytes,
                "temp_trees": found.temp_bytes / tree,
                "cosine": float(gradient @ reference / (np.linalg.norm(gradient) * np.linalg.norm(reference))),
                "relative_error": float(np.linalg.norm(gradient - reference) / np.linalg.norm(reference)),
            }
        rows.append(row)
    return rows


def _finished(call: Callable[..., Any], *arguments: Any) -> Any:
    return jax.block_until_ready(call(*arguments))


def shown(row: dict[str, Any]) -> list[str]:
    """The cells of a row in the table."""
    low, high = row["ratio_quartiles"]
    cells = [str(row["k"]), row["estimator"], f"{1e3 * row['seconds']:.3f}", f"{row['ratio']:.2f} ({low:.2f}-{high:.2f})"]
    cells.append(f"{row['ratio_of_best']:.2f}")
    if "flops" not in row:
        return [*cells, *[""] * 6]
    cells += [f"{row['floor']:.2f}", f"{row['compile_seconds']:.2f}", f"{row['flops'] / 1e9:.4f}", f"{row['temp_trees']:.1f}"]
    return [*cells, f"{row['cosine']:.6f}", f"{row['relative_error']:.1e}"]


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draws gradient error over time relative to first order: one line per estimator, one point per k."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for i, name in enumerate(dict.fromkeys(row["estimator"] for row in rows if "relative_error" in row)):
        points = [row for row in rows if row["estimator"] == name]
        x, y = [row["ratio"] for row in points], [row["relative_error"] for row in points]
        axes.plot(x, y, marker="osD^vP*Xh<"[i % 10], label=name, lw=0.8, color=f"C{i}")
        axes.annotate(f"k={points[-1]['k']}", (x[-1], y[-1]), fontsize=7, xytext=(3, 3), textcoords="offset points")
    axes.set(yscale="log", xlabel="time / first order", ylabel="relative error against exact in float64", title=title)
    axes.title.set_fontsize(9)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    as_program(bench)()
