"""MTFL's inequality (10), measured: how far activations move when the mean of all clients' models replaces each model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import fedjax_meta as fm
from fedjax_meta import masks, models, report
from fedjax_meta.engine import map_clients
from fedjax_meta.layers import BatchNorm
from fedjax_meta.types import Variables

KINDS = ("federated", "γβ private", "all private")
LESS = "γβ less"


def normalised(net: models.Network, variables: Variables, x: jax.Array, rows: jax.Array, *, by: str) -> dict[str, jax.Array]:
    """The outputs of the batch norms, and the logits, of samples `x [B, ...]`, each `[rows, channels]`.

    Args:
      net: the network.
      variables: its parameters and running statistics.
      x: the samples.
      rows: bool `[B]`, which samples are no padding.
      by: normalise by the "running" statistics, as in a test, or by those of the samples ("own").
    """
    logits, found = net.apply(
        variables,
        x,
        train=by == "own",
        weight=rows.astype(float),
        capture_intermediates=lambda module, _: isinstance(module, BatchNorm),
        mutable=["intermediates", "batch_stats"],
    )
    layers = {name: outputs["__call__"][0] for name, outputs in found["intermediates"].items()} | {"logits": logits}
    return {name: values.reshape(-1, values.shape[-1]) for name, values in layers.items()}


def moved_by_aggregation(  # long because two thirds are the docstring and functions of one client
    net: models.Network, task: fm.Task, trained: fm.Algorithm, state: fm.State, data: fm.FederatedData
) -> dict[str, dict[str, Any]]:
    """How far aggregation moves activations on a client's own samples, with federated and with private batch norms.

    All clients train from `state`, as `trained` personalises; then the mean of their models replaces each client's model: the
    whole model ("federated"), without gamma and beta ("γβ private"), or without the batch norms ("all private"). For each layer
    and each channel of a client this gives |mean after - mean before|, and the same for the standard deviation. The results are
    means over channels and clients, and the share of (client, channel) pairs that private gamma and beta move less than
    federated ones. The output of a batch norm that normalises by the client's own samples has mean beta and deviation gamma, so
    that the inequality holds there by construction; with running statistics it need not hold.

    Returns:
      By "layer, by own statistics" or "layer, by running statistics", and in it by "mean" and "std".
    """
    sizes = jnp.asarray(data.sizes("train"))
    ids = jnp.arange(data.num_clients)

    def local_model(i: jax.Array) -> Variables:
        return trained.personalize(jax.random.fold_in(jax.random.key(0), i), state, data.client(i)["train"], i)

    models_ = map_clients(local_model, ids)
    mean = jax.tree.map(lambda leaf: jnp.tensordot(sizes / jnp.sum(sizes), leaf, 1), models_)
    kinds = dict(zip(KINDS, (masks.resolve(mask, task) for mask in ("none", "bn_affine", "bn")), strict=True))

    def one(inputs: Any) -> dict[str, Any]:
        i, before = inputs
        view = data.client(i)["train"]
        rows = jnp.arange(view.max_size) < view.size
        x = view.take(jnp.arange(view.max_size), rows).x
        after = {name: masks.merge(masks.split(before, kind)[0], masks.split(mean, kind)[1]) for name, kind in kinds.items()}

        def moments(values: jax.Array) -> tuple[jax.Array, jax.Array]:
            keep = jnp.repeat(rows, values.shape[0] // rows.shape[0], total_repeat_length=values.shape[0])[:, None]
            return jnp.mean(values, 0, where=keep), jnp.std(values, 0, where=keep)

        def moved(by: str) -> dict[str, Any]:
            old = normalised(net, before, x, rows, by=by)
            new = {name: normalised(net, model, x, rows, by=by) for name, model in after.items()}
            return {
                f"{layer}, by {by} statistics": {
                    name: [jnp.abs(a - b) for a, b in zip(moments(values[layer]), moments(old[layer]), strict=True)]
                    for name, values in new.items()
                }
                for layer in old
            }

        return moved("own") | moved("running")

    def summary(by: dict[str, Any], k: int) -> dict[str, jax.Array]:
        return {name: jnp.mean(by[name][k]) for name in KINDS} | {LESS: jnp.mean(by[KINDS[1]][k] < by[KINDS[0]][k])}

    found = map_clients(one, (ids, models_))
    return {layer: {what: summary(by, k) for k, what in enumerate(("mean", "std"))} for layer, by in found.items()}


def table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """(headings, lines) of rows that hold "training", "round", "layer" and what `moved_by_aggregation` returns for the layer."""
    columns = [(what, kind) for what in ("mean", "std") for kind in (*KINDS, LESS)]
    lines = [
        [row["training"], f"{row['round']}, {row['layer']}"]
        + [f"{row[what][kind]:.0%}" if kind == LESS else f"{row[what][kind]:.4f}" for what, kind in columns]
        for row in rows
    ]
    return ["training", "round, layer", *(f"{what}:\n{kind}" for what, kind in columns)], lines


def draw(path: Path, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """How far means and deviations move, by round; a column for each layer and kind of statistics."""
    from matplotlib.figure import Figure

    layers, trainings = (list(dict.fromkeys(row[key] for row in rows)) for key in ("layer", "training"))
    figure = Figure(figsize=(3.6 * len(layers), 6.5), layout="constrained")
    axes = figure.subplots(2, len(layers), squeeze=False, sharex=True)
    for i, what in enumerate(("mean", "std")):
        for j, layer in enumerate(layers):
            for training, line in zip(trainings, ("--", "-"), strict=True):
                mine = [row for row in rows if (row["layer"], row["training"]) == (layer, training)]
                at = [row["round"] for row in mine]
                for kind, color in zip(KINDS, report.COLORS, strict=False):
                    values = [row[what][kind] for row in mine]
                    axes[i, j].plot(at, values, line, color=color, marker="o", label=f"{kind}, trained as {training}")
            axes[0, j].set_title(layer, fontsize=9)
            axes[i, j].set_ylim(0, 1.05 * max(row[what][kind] for row in rows if row["layer"] == layer for kind in KINDS))
        axes[i, 0].set_ylabel(f"how far the {what} of a channel moves")
    axes[0, 1].legend(fontsize=7, loc="lower right")
    figure.supxlabel("round")
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    figure.savefig(path, dpi=130)
