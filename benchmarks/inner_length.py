"""How many inner steps fit a memory budget: the exact meta-gradient of an LSTM beside reverse mode and PyTorch.

One client, sequences of tokens, k steps of SGD on the same batch, and the exact gradient of the loss after them. This library
stores the parameters of some steps (`checkpoint_every` near the root of k). Reverse mode (`jax.grad` through the loop) and
PyTorch's `create_graph` store what every operation of every step needs.
"""

import importlib.util
import json
import math
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from _measure import as_program, check_outputs, compiled, environment, write_row
from rich.console import Console
from rich.table import Table
from second_order import reverse_over_reverse

import fedjax_meta as fm
from fedjax_meta import checks, meta
from fedjax_meta.types import Params

VOCABULARY, EMBEDDED, RATE = 80, 8, 0.1
STEPS = (1, 4, 16, 64, 256, 1000)
BYTES = 4


def lstm_task(hidden: int) -> fm.Task:
    """The next token by an LSTM of one layer, as pure functions."""

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key, 3)
        bound = hidden**-0.5
        return {
            "table": jax.random.normal(keys[0], (VOCABULARY, EMBEDDED)),
            "cell": jax.random.uniform(keys[1], (4 * hidden, EMBEDDED + hidden), minval=-bound, maxval=bound),
            "head": jax.random.uniform(keys[2], (VOCABULARY, hidden), minval=-bound, maxval=bound),
        }

    def predict(params: Params, x: jax.Array) -> jax.Array:
        def step(carry: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            state, cell = carry
            gates = jnp.concatenate([token, state], -1) @ params["cell"].T
            take, forget, new, give = jnp.split(gates, 4, -1)
            cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(take) * jnp.tanh(new)
            state = jax.nn.sigmoid(give) * jnp.tanh(cell)
            return (state, cell), state

        zeros = jnp.zeros((x.shape[0], hidden), params["cell"].dtype)
        _, states = jax.lax.scan(step, (zeros, zeros), jnp.swapaxes(params["table"][x], 0, 1))
        return jnp.swapaxes(states, 0, 1) @ params["head"].T

    return fm.next_token(init, predict, layers=("table", "cell", "head"))


def problem(hidden: int, sequences: int, length: int) -> tuple[Any, Params, fm.Batch, fm.Batch]:
    """(loss, parameters, support, query) with random tokens; cost does not depend on values."""
    task, rng, key = lstm_task(hidden), np.random.default_rng(0), jax.random.key(0)

    def samples() -> fm.Batch:
        tokens = jnp.asarray(rng.integers(0, VOCABULARY, (sequences, length + 1)), jnp.int32)
        return fm.Batch(tokens[:, :-1], tokens[:, 1:], jnp.ones(sequences))

    return lambda params, batch: task.loss(params, batch, key)[0], task.init(key), samples(), samples()


def checkpointed(steps: int) -> meta.Estimator:
    """The exact meta-gradient in about 2 sqrt(k) parameter trees."""
    return meta.exact(meta.sgd(RATE), steps=steps, keep="parameters", checkpoint_every=max(1, round(math.sqrt(steps))))


def memory(steps: int, hidden: int, sequences: int, length: int) -> dict[str, float]:
    """Bytes of temporary memory of each gradient, by XLA's analysis; nothing is run."""
    loss, theta, support, query = problem(hidden, sequences, length)
    inner = meta.sgd(RATE)
    estimators = {
        "first order": meta.first_order(inner, steps=steps),
        "exact": checkpointed(steps),
        "reverse mode": reverse_over_reverse(inner, steps=steps),
    }
    found: dict[str, float] = {
        name: compiled(lambda *given, of=of: of(loss, *given).gradient, theta, support, query).temp_bytes
        for name, of in estimators.items()
    }
    return {**found, "tree": sum(leaf.size * BYTES for leaf in jax.tree.leaves(theta))}


def torch_bytes(steps: int, hidden: int, sequences: int, length: int) -> int:
    """Growth of a process's peak memory while PyTorch computes the same gradient with `create_graph`."""
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    torch.set_num_threads(1)
    params = [torch.randn(VOCABULARY, EMBEDDED), torch.randn(4 * hidden, EMBEDDED + hidden), torch.randn(VOCABULARY, hidden)]
    params = [(tensor * hidden**-0.5).requires_grad_() for tensor in params]
    tokens = torch.randint(VOCABULARY, (2, sequences, length + 1))

    def loss(params: Sequence[Any], tokens: Any) -> Any:
        table, kernel, head = params
        embedded, states = table[tokens[:, :-1]], []
        state = cell = torch.zeros(sequences, hidden)
        for t in range(length):
            take, forget, new, give = (torch.cat([embedded[:, t], state], -1) @ kernel.T).chunk(4, -1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(take) * torch.tanh(new)
            state = torch.sigmoid(give) * torch.tanh(cell)
            states.append(state)
        logits = torch.stack(states, 1) @ head.T
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    torch.autograd.grad(loss(params, tokens[0]), params)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    adapted = params
    for _ in range(steps):
        gradient = torch.autograd.grad(loss(adapted, tokens[0]), adapted, create_graph=True)
        adapted = [tensor - RATE * slope for tensor, slope in zip(adapted, gradient, strict=True)]
    torch.autograd.grad(loss(adapted, tokens[1]), params)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def main(
    steps: Annotated[
        list[int] | None,
        typer.Option(min=1, help=f"Inner steps; by default {', '.join(map(str, STEPS))}.", show_default=False),
    ] = None,
    hidden: Annotated[int, typer.Option(min=1, help="States of the LSTM.")] = 256,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences in support and query.")] = 4,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 20,
    budget_mib: Annotated[int, typer.Option(min=1, help="Budget of memory for the gradient of one client.")] = 1024,
    torch_steps: Annotated[int, typer.Option(help="Only PyTorch with this many steps; prints its bytes.", hidden=True)] = 0,
    output: Annotated[Path | None, typer.Option(help="File of JSON lines to append to.")] = None,
) -> None:
    """Prints a table: memory of the exact meta-gradient of an LSTM by the number of inner steps.

    \b
    Examples:
      python benchmarks/inner_length.py
      python benchmarks/inner_length.py --steps 1 --steps 64 --budget-mib 512

    If PyTorch is installed, its memory is measured (growth of a process's peak), up to the first number of steps beyond the
    budget. The other numbers are the memory that XLA states for the compiled program, without parameters and data.
    """
    if torch_steps:
        print(json.dumps(torch_bytes(torch_steps, hidden, sequences, length)))
        return
    check_outputs(output)
    console, where = Console(width=140), environment()
    title = f"MiB of the exact meta-gradient, LSTM-{hidden}, {sequences} sequences of {length} tokens, budget {budget_mib} MiB"
    table = Table(title=title)
    for column in ("k", "parameters", "first order", "exact", "bound", "reverse mode", "PyTorch create_graph"):
        table.add_column(column, justify="right")
    within = True
    for k in steps or STEPS:
        row: dict[str, Any] = {"benchmark": "inner_length", "k": k, "hidden": hidden, "sequences": sequences, "length": length}
        row |= memory(k, hidden, sequences, length)
        row |= {"bound": row["first order"] + 3 * math.sqrt(k) * row["tree"], "budget": 2**20 * budget_mib}
        row["PyTorch"] = _torch(k, hidden, sequences, length) if within else None
        within = row["PyTorch"] is not None and row["PyTorch"] <= row["budget"]
        write_row(output, {**row, **where})
        cells = [f"{row[name] / 2**20:.1f}" for name in ("tree", "first order", "exact", "bound", "reverse mode")]
        own = "" if row["PyTorch"] is None else f"{row['PyTorch'] / 2**20:.1f}{'' if within else ' (beyond the budget)'}"
        table.add_row(str(k), *cells, own)
    console.print(table)


def _torch(k: int, hidden: int, sequences: int, length: int) -> int | None:
    """`torch_bytes` in a process of its own; `None` without PyTorch.

    Raises:
      RuntimeError: the process failed.
    """
    if importlib.util.find_spec("torch") is None:
        return None
    size = ["--hidden", str(hidden), "--sequences", str(sequences), "--length", str(length)]
    command = [sys.executable, __file__, "--torch-steps", str(k), *size]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"PyTorch with {k} steps failed: {checks.first_line(RuntimeError(done.stderr[-200:]))}")
    return int(done.stdout)


if __name__ == "__main__":
    as_program(main)()
