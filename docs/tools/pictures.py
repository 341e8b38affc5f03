"""The drawings of the documentation, as SVG without a library, and two figures of the committed benchmark rows.

The drawings have a background of their own, so that they are read on dark pages as on light ones.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path

HELP = """\
Draws the pictures of the documentation, figures of benchmark rows included.

Examples:
  python docs/tools/pictures.py
  python docs/tools/pictures.py --to runs/pictures
"""
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"

INK, PAPER, SHARED, OWN, GREY, LINE = "#1f2933", "#fbfaf7", "#9cc5c1", "#f2b880", "#d9dde1", "#5b6770"


def svg(width: int, height: int, parts: Iterable[str], title: str) -> str:
    """A drawing with a title for screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'font-family="sans-serif" font-size="14">\n<title>{title}</title>\n'
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker></defs>\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def box(x: float, y: float, w: float, h: float, fill: str, text: str = "", size: int = 13) -> str:
    """A rectangle with a word in it."""
    label = words(x + w / 2, y + h / 2 + size / 3, text, size, "middle") if text else ""
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" fill="{fill}" stroke="{LINE}"/>{label}'


def words(x: float, y: float, text: str, size: int = 13, anchor: str = "start", weight: str = "normal") -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="{INK}">{text}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line with a head."""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{LINE}" stroke-width="1.5" marker-end="url(#a)"/>'


def client_axis() -> str:
    """One array with a leading axis for clients, and the lanes that run a cohort."""
    parts = [words(20, 28, "What clients keep, a row each", weight="bold")]
    for i in range(6):
        parts += [box(90, 42 + 30 * i, 190, 24, OWN if i in (1, 4) else GREY, "own head of client " + str(i))]
        parts += [words(20, 59 + 30 * i, f"client {i}")]
    parts += [words(90, 242, "personal leaves [N, ...]"), words(330, 28, "A round: the rows of its cohort", weight="bold")]
    for place, i in enumerate((1, 4)):
        y = 92 + 60 * place
        parts += [arrow(284, 54 + 30 * i, 328, y + 14), box(330, y, 120, 28, OWN, f"client {i}"), arrow(452, y + 14, 498, 134)]
    parts += [words(330, 212, "rows [C, ...]: vmap over clients")]
    parts += [box(500, 108, 150, 52, SHARED, "one weighted mean"), words(650, 242, "the server keeps one model", anchor="end")]
    return svg(680, 262, parts, "Clients are an array axis")


def mask() -> str:
    """A model as a tree, and three masks over it."""
    parts = [words(20, 28, "A mask says which leaves of the model stay with the client", weight="bold")]
    leaves = ("conv1", "conv2", "fc1", "bn", "head")
    rows: tuple[tuple[str, Callable[[str], bool]], ...] = (
        ('"none"  FedAvg', lambda leaf: False),
        ('"head"  FedPer, FedRep, FedMeta-Per', lambda leaf: leaf == "head"),
        ('"body"  LG-FedAvg', lambda leaf: leaf != "head"),
        ('"bn"  FedBN, MTFL', lambda leaf: leaf == "bn"),
        ('"all"  local training', lambda leaf: True),
    )
    for j, (label, chosen) in enumerate(rows):
        parts.append(words(20, 67 + 38 * j, label))
        parts += [
            box(300 + 74 * i, 48 + 38 * j, 68, 28, OWN if chosen(leaf) else SHARED, leaf) for i, leaf in enumerate(leaves)
        ]
    parts += [box(300, 248, 18, 18, SHARED), words(326, 262, "shared, averaged")]
    parts += [box(540, 248, 18, 18, OWN), words(566, 262, "personal")]
    return svg(680, 282, parts, "Masks over the parameter tree")


def views() -> str:
    """The samples of a client and the named parts of them."""
    parts = [words(20, 28, "Views: named ranges of a client's samples", weight="bold")]
    for x, w, fill, name, what in (
        (20, 96, OWN, "support", "adapts on"),
        (116, 384, SHARED, "query", "is judged by"),
        (500, 40, OWN, "", ""),
        (540, 120, GREY, "test_query", "predicts"),
    ):
        parts += [box(x, 76, w, 40, fill, name), words(x + w / 2, 68, what, 12, "middle")]
    parts += [arrow(520, 150, 520, 120), words(520, 166, "test_support", 13, "middle")]
    parts += [f'<path d="M20 128v8h480v-8" fill="none" stroke="{LINE}"/>', words(260, 154, "train, 75 %", 13, "middle")]
    parts += [f'<path d="M500 182v8h160v-8" fill="none" stroke="{LINE}"/>', words(580, 208, "test, 25 %", 13, "middle")]
    parts += [words(20, 236, "A new client adapts on its test_support, or on its train view, and is tested like the others.")]
    return svg(680, 256, parts, "Views of a client's samples")


def a_round() -> str:
    """The steps of a round, as docs/architecture.md numbers them."""
    steps = (
        ("cohort", "draw C of N ids"),
        ("rows", "read what they keep"),
        ("clients", "train, upload (vmap)"),
        ("aggregate", "mean, median, Krum"),
        ("server", "optimiser's step"),
        ("collaborate", "mix, where methods do"),
    )
    parts = [words(20, 28, "One round: a pure function (key, state, data) to state", weight="bold")]
    for i, (name, what) in enumerate(steps):
        x, y = 20 + 220 * (i % 3), 48 + 100 * (i // 3)
        fill = OWN if name in ("rows", "clients", "collaborate") else SHARED
        parts += [box(x, y, 190, 44, fill, f"{i + 1}. {name}", 14), words(x + 95, y + 62, what, 12, "middle")]
        if i in (0, 1, 3, 4):
            parts.append(arrow(x + 191, y + 22, x + 218, y + 22))
    parts.append(f'<path d="M555 118v12H115v16" fill="none" stroke="{LINE}" stroke-width="1.5" marker-end="url(#a)"/>')
    parts += [box(20, 236, 18, 18, OWN), words(46, 250, "reads or writes rows of clients")]
    parts += [box(330, 236, 18, 18, SHARED), words(356, 250, "does not")]
    return svg(680, 270, parts, "A round")


DRAWINGS = {"client_axis": client_axis, "masks": mask, "views": views, "round": a_round}


def rows(benchmark: str) -> list[dict]:
    """The committed rows of a benchmark."""
    lines = (ROOT / "benchmarks" / "results" / "cpu.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["benchmark"] == benchmark]


def meta_gradients(path: Path) -> None:
    """Cost and error of the meta-gradients by inner steps: rows of `benchmarks/second_order.py`, MLP, 32 samples a batch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen = [row for row in rows("second_order") if row["model"] == "mlp" and row["support"] == 32 == row["query"]]
    colours = {
        "first order": "#5b6770",
        "exact": "#00796b",
        "Hessian-free (difference)": "#c2185b",
        "reverse over reverse": "#1565c0",
    }
    colours |= {"implicit, 1 CG": "#ef6c00", "implicit, 5 CG": "#a1620a", "reptile": "#7b5ea7"}
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for axis, key, label in zip(
        axes,
        ("ratio", "temp_trees", "relative_error"),
        ("time / first order", "memory, in models", "error of the gradient"),
        strict=True,
    ):
        for name, colour in colours.items():
            points = sorted((row["k"], row[key]) for row in chosen if row["estimator"] == name)
            axis.plot(*zip(*points, strict=True), "o-", color=colour, label=name, markersize=4)
        axis.set(xscale="log", xlabel="inner steps k", ylabel=label, yscale="linear" if key == "ratio" else "log")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def speed(path: Path) -> None:
    """Seconds of a round beside other simulators: rows of `benchmarks/peers.py`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = {"W1": "MLP, 5 clients", "W2-5": "LeNet, 5 clients", "W2-50": "LeNet, 50 clients", "W4": "MLP, 100 small clients"}
    peers = {"fedjax_meta": "#00796b", "torch.compile(vmap)": "#5b6770", "torch": "#8a949b", "pfl-research": "#c2185b"}
    peers |= {"Flower": "#ef6c00", "FedJAX": "#1565c0"}
    seconds = {(row["case"], row["peer"]): row["seconds"] for row in rows("peers")}
    figure, axis = plt.subplots(figsize=(9, 3.2), layout="constrained")
    for place, (peer, colour) in enumerate(peers.items()):
        found = [(i + 0.13 * (place - 2.5), seconds[case, peer]) for i, case in enumerate(cases) if (case, peer) in seconds]
        axis.bar(*zip(*found, strict=True), width=0.12, color=colour, label=peer)
    axis.set(
        yscale="log", ylim=(0.01, 200), ylabel="seconds a round", xticks=range(len(cases)), xticklabels=list(cases.values())
    )
    axis.legend(fontsize=7, ncols=3, loc="upper left")
    axis.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Writes all of them."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=HELP, formatter_class=shape, allow_abbrev=False)
    parser.add_argument("--to", type=Path, default=FOLDER, help="folder to write to; docs/pictures when not given")
    folder = parser.parse_args().to
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")
    meta_gradients(folder / "meta_gradients.png")
    speed(folder / "speed.png")


if __name__ == "__main__":
    main()
