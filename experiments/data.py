"""Any data set under any partition: a table of sizes and classes, and a figure.

See `python -m experiments.data --help`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import numpy as np
import typer
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from rich.table import Table

from experiments import _runner as runner
from fedjax_meta import checks, escape
from fedjax_meta.data import FederatedData, from_partition, npz, partition, protocols, sources, synthetic
from fedjax_meta.data.protocols import Protocol

INK, MUTED, BAR = "#1f2430", "#6b7280", "#3b6ea8"


def _plain(part: Callable[..., partition.Partition]) -> Callable[..., Protocol]:
    """A protocol of one partition rule: all samples of both splits, one view "train"."""

    def build(source: sources.Source, *, num_clients: int, seed: int, **options: Any) -> Protocol:
        x, y = source.pooled()
        held = part(y, num_clients, seed=seed, **options).shuffled(seed)
        return Protocol(from_partition(x, y, *held, num_classes=source.num_classes), None, source.name, source.note)

    return build


def _shards(labels: np.ndarray, num_clients: int, *, seed: int) -> partition.Partition:
    return partition.shards(labels, partition.shard_assignment(num_clients, seed=seed), uneven=True)


def _iid(source: sources.Source, *, num_clients: int, seed: int) -> Protocol:
    return Protocol(
        protocols.fedmeta_per_iid_clients(source, num_clients=num_clients, seed=seed),
        None,
        f"IID on {source.name}",
        source.note,
    )


# For each partition: its builder, its default number of clients, and the options that it takes.
PARTITIONS: dict[str, tuple[Callable[..., Protocol], int, tuple[str, ...]]] = {
    "fedmeta_per": (protocols.fedmeta_per_clients, 50, ("pairing",)),
    "fedpac": (protocols.fedpac_clients, 20, ("share", "size")),
    "reptile": (protocols.perfedavg_reptile_clients, 50, ("concentration",)),
    "mtfl": (protocols.mtfl_clients, 200, ("noisy",)),
    "iid": (_iid, 50, ()),
    "shards": (_plain(_shards), 50, ()),
    "dirichlet_classes": (_plain(partition.dirichlet_classes), 50, ("concentration",)),
    "dirichlet_clients": (_plain(partition.dirichlet_clients), 50, ("concentration",)),
    "quantity_skew": (_plain(partition.quantity_skew), 50, ("concentration",)),
}
OWN_SEED = {"fedmeta_per", "fedpac", "reptile", "mtfl"}
"""Protocols of papers, which have default seeds of their own."""
NEEDS_CONCENTRATION = {"dirichlet_classes", "dirichlet_clients", "quantity_skew"}


def build(source: sources.Source, name: str, *, num_clients: int | None, seed: int | None, **options: Any) -> Protocol:
    """The protocol `name` on a data set; options that are `None` keep the protocol's default.

    Raises:
      ValueError: an unknown partition, an option that it does not take, and whatever the protocol refuses.
    """
    checks.one_of("--partition", name, (*PARTITIONS, "natural"))
    make, default_clients, takes = PARTITIONS[name]
    given = _given(f"partition {name!r}", options, takes)
    if name in NEEDS_CONCENTRATION:
        given.setdefault("concentration", 0.5)
    if seed is not None or name not in OWN_SEED:
        given["seed"] = 1 if seed is None else seed
    protocol = make(source, num_clients=num_clients or default_clients, **given)
    return protocol if protocol.name != source.name else protocol._replace(name=f"{name} on {source.name}")


def generated(*, num_clients: int | None, seed: int | None, **options: Any) -> Protocol:
    """Synthetic(δ, θ), a generator of clients; δ and θ are 1 when not given.

    Raises:
      ValueError: an option of a partition, and whatever `synthetic.synthetic` refuses.
    """
    given = _given("data set 'synthetic'", options, ("model_spread", "data_spread"))
    spreads = [given.get(name, 1.0) for name in ("model_spread", "data_spread")]
    data = synthetic.synthetic(
        *spreads, seed=1 if seed is None else seed, num_clients=30 if num_clients is None else num_clients
    )
    return Protocol(data, None, f"synthetic({spreads[0]:g}, {spreads[1]:g})")


def natural(dataset: str, *, num_clients: int | None, seed: int | None, **options: Any) -> Protocol:
    """The clients that an .npz file itself names, in a third array beside x and y.

    Raises:
      ValueError: another kind of data set, no such array, an option of another partition, and whatever `partition.natural`
        refuses.
    """
    asked = {"clients": num_clients, "seed": seed} | options
    given = _given("partition 'natural'", asked, ("by", "min_samples"))
    by = given.get("by", "client")
    if not dataset.endswith(".npz"):
        raise ValueError(
            f"partition 'natural' needs an .npz that names the client of each sample, not the data set {dataset!r}"
        )
    source = sources.read_npz(dataset)
    arrays = npz.read(dataset)
    if not {"x", "y", by} <= set(arrays):
        raise ValueError(f"{dataset!r} holds {', '.join(arrays)}; --by {by} needs x, y and {by}")
    x, y, owner = arrays["x"], arrays["y"], arrays[by]
    if owner.shape != y.shape:
        raise ValueError(
            f"{by} has shape {list(owner.shape)} in {dataset!r}, but y has {list(y.shape)}: it needs one entry a sample"
        )
    # A source sorts its samples, but x, y and owner agree only in the order of the file.
    x = x.reshape(-1, *source.x_train.shape[1:])
    held = partition.natural(owner, min_samples=given.get("min_samples", 1))
    return Protocol(from_partition(x, y, *held, num_classes=source.num_classes), None, f"natural, by {by}, on {source.name}")


def _given(what: str, options: dict[str, Any], takes: tuple[str, ...]) -> dict[str, Any]:
    """The options that are not `None`. Raises `ValueError` for an option that is not taken."""
    given = {key: value for key, value in options.items() if value is not None}
    flags = {key: "--" + key.replace("_", "-") for key in (*given, *takes)}
    for key in given:
        if key not in takes:
            raise ValueError(f"{what} takes no {flags[key]}; it takes {', '.join(flags[t] for t in takes) or 'none'}")
    return given


def class_counts(data: FederatedData, view: str) -> np.ndarray:
    """int64 `[N, K]`: the number of samples of each class in each client's view."""
    start, size = np.asarray(data.start[view], np.int64), np.asarray(data.sizes(view), np.int64)
    where = np.repeat(start - (np.cumsum(size) - size), size) + np.arange(size.sum())
    cell = np.repeat(np.arange(len(size)), size) * data.num_classes + np.asarray(data.y)[where]
    return np.bincount(cell, minlength=len(size) * data.num_classes).reshape(len(size), -1)


def show(protocol: Protocol) -> None:
    """Prints the table, with one row a view."""
    table = Table(title=escape.console(protocol.name), caption=escape.console(protocol.note) or None)
    for heading in ("clients", "view"):
        table.add_column(heading, no_wrap=True)
    for heading in ("N", "samples", "min", "mean", "std", "max"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("classes each", justify="right")
    for group, data in (("training", protocol.train), ("new", protocol.new)):
        if data is None:
            continue
        for row, view in enumerate(data.views):
            size = np.asarray(data.sizes(view))
            classes = (class_counts(data, view) > 0).sum(1)
            spread = str(classes.min()) if classes.min() == classes.max() else f"{classes.min()} to {classes.max()}"
            table.add_row(
                group if row == 0 else "",
                view,
                str(len(size)),
                f"{size.sum():,}",
                f"{size.min():,}",
                f"{size.mean():,.1f}",
                f"{size.std():,.1f}",
                f"{size.max():,}",
                spread,
                end_section=row == len(data.views) - 1,
            )
    runner.console.print(table)


def draw(protocol: Protocol, path: Path, *, faces: int = 6) -> None:
    """Saves the figure: sizes, a heat map of class by client, and sample images of a few clients."""
    groups = [("training clients", protocol.train, "train")]
    if protocol.new is not None:
        groups.append(("new clients", protocol.new, "query"))
    images = np.asarray(protocol.train.x).ndim == 4
    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "text.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(6.4 * len(groups), 8.6 if images else 5.2), layout="constrained")
        parts = figure.subfigures(2 if images else 1, 1, height_ratios=[5.2, 3.4] if images else [1], squeeze=False)[:, 0]
        axes = parts[0].subplots(2, len(groups), height_ratios=[1, 2.4], squeeze=False, sharex="col")
        for column, (title, data, view) in enumerate(groups):
            _draw_group(parts[0], axes[:, column], f"{title}, view “{view}”", data, view)
        if images:
            _draw_images(parts[1], groups, protocol.noisy, faces)
        figure.suptitle(escape.label(protocol.name), fontsize=13, fontweight="bold")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def _draw_group(figure: Any, axes: Any, title: str, data: FederatedData, view: str) -> None:
    counts = class_counts(data, view)
    size, clients = counts.sum(1), np.arange(len(counts))
    bars, heat = axes
    bars.bar(clients, size, width=0.8 if len(size) <= 100 else 1.0, color=BAR)
    bars.axhline(size.mean(), color=INK, linewidth=0.8, linestyle="--")
    bars.set_title(title, fontsize=10, loc="left")
    bars.set_title(f"{size.sum():,} samples, mean {size.mean():,.0f} (dashed)", fontsize=8, loc="right", color=MUTED)
    bars.set_ylabel("samples")
    bars.set_ylim(0, 1.12 * size.max())
    bars.tick_params(labelbottom=False)
    shown = np.ma.masked_equal(counts.T, 0)
    # On a linear scale, a single large cell would make all others look alike.
    norm = LogNorm(1, max(counts.max(), 2))
    drawn = heat.imshow(shown, aspect="auto", cmap="YlGnBu", interpolation="nearest", norm=norm)
    heat.set_facecolor("#ececef")
    heat.set_xlabel("client")
    heat.set_ylabel("class")
    if counts.shape[1] <= 20:
        heat.set_yticks(range(counts.shape[1]))
    heat.set_xlim(-0.5, len(counts) - 0.5)
    bar = figure.colorbar(drawn, ax=heat, orientation="horizontal", fraction=0.06, pad=0.02, aspect=50, format="%d")
    bar.set_label("samples of the class, log scale (grey: none)")
    bar.outline.set_visible(False)


def _draw_images(figure: Any, groups: list, noisy: np.ndarray, faces: int) -> None:
    """Rows of images, one a client: a few clients of each group, spread over the population."""
    axes = figure.subplots(faces, len(groups), squeeze=False)
    columns = 16
    for column, (_, data, view) in enumerate(groups):
        start, size = np.asarray(data.start[view]), np.asarray(data.sizes(view))
        for row, axis in enumerate(axes[:, column]):
            axis.set_axis_off()
            client = row * max((len(size) - 1) // (faces - 1), 1)
            if client >= len(size):
                continue
            images = np.asarray(data.x[start[client] : start[client] + min(size[client], columns)])
            low, high = (0, 255) if images.dtype == np.uint8 else (float(images.min()), float(images.max()))
            height, width, channels = images.shape[1:]
            # A blank column of pixels between images.
            strip = np.full((height, columns * (width + 1), channels), high, images.dtype)
            for i, image in enumerate(images):
                strip[:, i * (width + 1) : i * (width + 1) + width] = image
            axis.imshow(strip[..., 0] if channels == 1 else strip, cmap="gray", vmin=low, vmax=high, interpolation="nearest")
            classes = np.unique(np.asarray(data.y[start[client] : start[client] + size[client]]))
            label = f"{len(classes)} classes" if len(classes) > 6 else f"class {' '.join(map(str, classes))}"
            mark = ", noisy" if column == 0 and client in noisy else ""
            axis.set_title(f"client {client}: {label}{mark}", fontsize=8, loc="left", pad=2)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def main(  # long because every option brings its help text
    dataset: Annotated[
        str,
        typer.Option(
            help="`mnist_small` or `digits`, which come with packages; `mnist`, `fashion_mnist`, `cifar10`, `cifar100`, "
            "`emnist/byclass`, `emnist/letters` or another image set of tensorflow-datasets; the path of an .npz with x and y; "
            "or `synthetic`, which generates its clients."
        ),
    ] = "mnist_small",
    name: Annotated[
        str | None,
        typer.Option(
            "--partition",
            help="A paper's protocol: `fedmeta_per` (two classes a client, new clients), `fedpac` (dominant groups), "
            "`reptile` (Dirichlet shares), `mtfl` (two shards a client); a single rule on both splits together: "
            + ", ".join(list(PARTITIONS)[4:])
            + "; or `natural`, the clients that an .npz names. `fedmeta_per` when not given.",
        ),
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients; the protocol's own when not given.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes the partition; the protocol's own when not given.")] = None,
    concentration: Annotated[float | None, typer.Option(help="Dirichlet concentration: smaller is more unequal.")] = None,
    pairing: Annotated[str | None, typer.Option(help="fedmeta_per: classes `2u+j` or `u+j` of client u.")] = None,
    size: Annotated[int | None, typer.Option(help="fedpac: training samples of a client.", min=1)] = None,
    share: Annotated[
        bool | None, typer.Option("--share", help="fedpac: clients may share samples when a class runs out.")
    ] = None,
    noisy: Annotated[float | None, typer.Option(help="mtfl: share of clients with noisy training images.")] = None,
    model_spread: Annotated[
        float | None, typer.Option(help="synthetic: how much the clients' models differ; default 1.")
    ] = None,
    data_spread: Annotated[float | None, typer.Option(help="synthetic: how much their inputs differ; default 1.")] = None,
    by: Annotated[
        str | None,
        typer.Option(help="natural: the array of the .npz with the client of each sample; `client` when not given."),
    ] = None,
    min_samples: Annotated[int | None, typer.Option(help="natural: samples that a client must have.", min=1)] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where tensorflow-datasets keeps prepared sets.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where decoded images are cached.")] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Download and prepare the set if needed; needs TensorFlow.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The figure to write (.png, .pdf or .svg).")] = Path("results/data.png"),
    debug: runner.DebugOption = False,
) -> None:
    """Shows how samples are divided: prints sizes and classes of every view, and saves a figure.

    The figure has the samples of each client, a heat map of class by client, and sample images of a few clients.

    Examples:

    `python -m experiments.data` (5,000 images that come with a package, two classes a client)

    `python -m experiments.data --dataset cifar10 --data-dir DIR --partition dirichlet_classes --concentration 0.1`

    `python -m experiments.data --dataset mnist --data-dir DIR --partition mtfl --clients 400 --noisy 0.2`

    `python -m experiments.data --dataset synthetic --model-spread 0.5 --data-spread 0.5`

    `python -m experiments.data --dataset letters.npz --partition natural --by writer --min-samples 20`
    """
    options: dict[str, Any] = {
        "num_clients": clients,
        "seed": seed,
        "concentration": concentration,
        "pairing": pairing,
        "size": size,
        "share": share,
        "noisy": noisy,
        "model_spread": model_spread,
        "data_spread": data_spread,
        "by": by,
        "min_samples": min_samples,
    }
    with runner.one_line_errors(debug):
        checks.writable("--out", out, endings=checks.FIGURES)
        if seed is not None:
            checks.seed("--seed", seed, bits=32)
        if dataset == "synthetic":
            protocol = generated(**options, partition=name)
        elif name == "natural":
            protocol = natural(dataset, **options)
        else:
            source = sources.load(dataset, data_dir=data_dir, cache_dir=cache_dir, download=download)
            protocol = build(source, name or "fedmeta_per", **options)
        show(protocol)
        draw(protocol, out)
    runner.console.print(f"figure: {out}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    app()
