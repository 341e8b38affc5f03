"""Shows any data set under any partition: a table of sizes and classes, and a figure.

See `python -m experiments.data --help`.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import numpy as np
import typer
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from rich.table import Table

from fedjax_meta import checks, escape, process
from fedjax_meta.data import FederatedData, from_partition, registry, sources
from fedjax_meta.data.protocols import Protocol
from fedjax_meta.data.registry import GENERATED, PAPERS, PARTITIONS

INK, MUTED, BAR = "#1f2430", "#6b7280", "#3b6ea8"


def build(source: sources.Source, name: str, *, num_clients: int | None, seed: int | None, **options: Any) -> Protocol:
    """The clients of a partition or of a paper's protocol; options that are `None` keep their defaults.

    Raises:
      ValueError: an unknown partition, an option that it does not take, and whatever the partition refuses.
    """
    checks.one_of("--partition", name, (*PAPERS, *PARTITIONS, "natural"))
    rule = PAPERS[name] if name in PAPERS else PARTITIONS[name]
    given = _given(f"partition {name!r}", options, rule)
    if name in PAPERS:  # with default seeds and numbers of clients of their own
        own = {"num_clients": num_clients, "seed": seed}
        return PAPERS[name](source, **given, **{key: value for key, value in own.items() if value is not None})
    if "concentration" in inspect.signature(rule).parameters:
        given.setdefault("concentration", 0.5)
    x, y = source.pooled()
    seed = 1 if seed is None else seed
    held = PARTITIONS[name](y, num_clients or 50, seed=seed, **given).shuffled(seed)
    return Protocol(from_partition(x, y, *held, num_classes=source.num_classes), None, f"{name} on {source.name}", source.note)


def generated(dataset: str, *, num_clients: int | None, seed: int | None, **options: Any) -> Protocol:
    """Clients of a generator.

    Raises:
      ValueError: an option of a partition, and whatever the generator refuses.
    """
    given = _given(f"data set {dataset!r}", options, GENERATED[dataset])
    own = {"num_clients": num_clients, "seed": seed}
    return GENERATED[dataset](**given, **{key: value for key, value in own.items() if value is not None})


def natural(dataset: str, **options: Any) -> Protocol:
    """The clients that an .npz file itself names, in a third array beside x and y.

    Raises:
      ValueError: an option of another partition, and whatever `registry.natural` refuses.
    """
    given = _given("partition 'natural'", {"clients": options.pop("num_clients"), **options}, registry.natural)
    named = registry.natural(dataset, **given)
    source, title = named.source, f"natural, by {given.get('by', 'client')}, on {named.source.name}"
    return Protocol(from_partition(*source.pooled(), *named.held, num_classes=source.num_classes), None, title, named.note)


def _given(what: str, options: Mapping[str, Any], rule: Callable[..., Any]) -> dict[str, Any]:
    """The options that are not `None`. Raises `ValueError` for an option that the rule does not take."""
    given = {key: value for key, value in options.items() if value is not None}
    takes = [key for key in options if key in inspect.signature(rule).parameters]
    flags = {key: "--" + key.replace("_", "-") for key in (*given, *takes)}
    for key in given:
        if key not in takes:
            raise ValueError(f"{what} takes no {flags[key]}; it takes {', '.join(flags[t] for t in takes) or 'none'}")
    return given


def class_counts(data: FederatedData, view: str) -> np.ndarray:
    """int64 `[N, K]`: the number of samples of each class in each client's view; `[N, 1]`, of all samples, without classes."""
    start, size = np.asarray(data.start[view], np.int64), np.asarray(data.sizes(view), np.int64)
    where = np.repeat(start - (np.cumsum(size) - size), size) + np.arange(size.sum())
    labels = np.asarray(data.y)[where] if data.labelled else 0
    classes = data.num_classes if data.labelled else 1
    cell = np.repeat(np.arange(len(size)), size) * classes + labels
    return np.bincount(cell, minlength=len(size) * classes).reshape(len(size), -1)


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
            spread = spread if data.labelled else "none"
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
    process.console.print(table)


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
        ratios = [1, 2.4] if protocol.train.labelled else [1]
        axes = parts[0].subplots(len(ratios), len(groups), height_ratios=ratios, squeeze=False, sharex="col")
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
    bars = axes[0]
    bars.bar(clients, size, width=0.8 if len(size) <= 100 else 1.0, color=BAR)
    bars.axhline(size.mean(), color=INK, linewidth=0.8, linestyle="--")
    bars.set_title(title, fontsize=10, loc="left")
    bars.set_title(f"{size.sum():,} samples, mean {size.mean():,.0f} (dashed)", fontsize=8, loc="right", color=MUTED)
    bars.set_ylabel("samples")
    bars.set_ylim(0, 1.12 * size.max())
    axes[-1].set_xlabel("client")
    if not data.labelled:
        return
    heat = axes[1]
    bars.tick_params(labelbottom=False)
    shown = np.ma.masked_equal(counts.T, 0)
    # On a linear scale, a single large cell would make all others look alike.
    norm = LogNorm(1, max(counts.max(), 2))
    drawn = heat.imshow(shown, aspect="auto", cmap="YlGnBu", interpolation="nearest", norm=norm)
    heat.set_facecolor("#ececef")
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
            images = images if images.shape[-1] in (1, 3) else images[..., :1]  # of others, the first channel
            if images.dtype != np.uint8:  # Matplotlib wants colours in [0, 1]
                images = (images - images.min()) / max(float(np.ptp(images)), 1e-12)
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
            help="A paper's protocol: `fedmeta_per` (two classes per client, new clients), `fedmeta_per_iid` (its control), "
            "`fedpac` (dominant groups), `perfedavg_reptile` (Dirichlet shares), `mtfl` (two shards per client); a rule for both "
            "splits together: "
            + ", ".join(PARTITIONS)
            + "; or `natural`, the clients that an .npz names. By default `fedmeta_per`.",
        ),
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients; by default that of the protocol.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the partition; by default that of the protocol.")] = None,
    concentration: Annotated[float | None, typer.Option(help="Dirichlet concentration; smaller means more unequal.")] = None,
    pairing: Annotated[str | None, typer.Option(help="fedmeta_per: classes `2u+j` or `u+j` of client u.")] = None,
    newcomers: Annotated[
        str | None, typer.Option(help="fedmeta_per: pairs of new clients, `as published` or `unlike` those of others.")
    ] = None,
    orders: Annotated[int | None, typer.Option(help="fedmeta_per: orders of the labels for new clients.", min=1)] = None,
    per_client: Annotated[int | None, typer.Option(help="classes, shards: number per client.", min=1)] = None,
    size: Annotated[int | None, typer.Option(help="fedpac: training samples of a client.", min=1)] = None,
    share: Annotated[
        bool | None, typer.Option("--share", help="fedpac: clients may share training samples of a class that runs out.")
    ] = None,
    noisy: Annotated[float | None, typer.Option(help="mtfl: share of clients with noisy training images.")] = None,
    model_spread: Annotated[
        float | None, typer.Option(help="synthetic: how much the clients' models differ; default 1.")
    ] = None,
    data_spread: Annotated[
        float | None, typer.Option(help="synthetic: how much the clients' inputs differ; default 1.")
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(help="natural: name of the array in the .npz with the client of each sample; by default `client`."),
    ] = None,
    min_samples: Annotated[int | None, typer.Option(help="natural: least number of samples of a client.", min=1)] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of prepared data sets of tensorflow-datasets.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Folder for the cache of decoded images.")] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Download and prepare the set if needed; needs TensorFlow.")
    ] = False,
    out: Annotated[Path, typer.Option(help="File of the figure (.png, .pdf or .svg).")] = Path("results/data.png"),
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Shows how samples are divided: prints sizes and classes of every view, and saves a figure.

    Examples:

    `python -m experiments.data` (5,000 images that come with a package, two classes per client)

    `python -m experiments.data --dataset cifar10 --data-dir DIR --partition dirichlet_classes --concentration 0.1`

    `python -m experiments.data --dataset mnist --data-dir DIR --partition mtfl --clients 400 --noisy 0.2`

    `python -m experiments.data --dataset synthetic --model-spread 0.5 --data-spread 0.5`

    `python -m experiments.data --dataset letters.npz --partition natural --by writer --min-samples 20`

    The figure shows the number of samples of each client, a heat map of class by client, and sample images of a few clients.
    """
    options: dict[str, Any] = {
        "num_clients": clients,
        "seed": seed,
        "concentration": concentration,
        "pairing": pairing,
        "newcomers": newcomers,
        "orders": orders,
        "per_client": per_client,
        "size": size,
        "share": share,
        "noisy": noisy,
        "model_spread": model_spread,
        "data_spread": data_spread,
        "by": by,
        "min_samples": min_samples,
    }
    with process.one_line_errors(debug):
        checks.writable("--out", out, endings=checks.FIGURES)
        if seed is not None:
            checks.seed("--seed", seed, bits=32)
        if dataset in GENERATED:
            protocol = generated(dataset, **options, partition=name)
        elif name == "natural":
            protocol = natural(dataset, **options)
        else:
            source = sources.load(dataset, data_dir=data_dir, cache_dir=cache_dir, download=download)
            protocol = build(source, name or "fedmeta_per", **options)
        show(protocol)
        draw(protocol, out)
    process.console.print(f"figure: {out}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    app()
