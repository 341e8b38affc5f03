"""Accuracy against the share of attackers, drawn from a table; see `python -m experiments.attackers_figure --help`."""

import re
from pathlib import Path
from typing import Annotated

import typer

from fedjax_meta import checks, report
from fedjax_meta.process import one_line_errors

Curves = dict[tuple[str, str], dict[float, float]]
"""By (system, rule): accuracy by the share of attackers, both in percent."""


def read(text: str) -> list[tuple[str, Curves]]:
    """The tables of a Markdown text whose columns are system, rule, none, and shares such as `sign flip x10 20 %`.

    Returns:
      (the attack, the curves) of each table of one attack with at least two shares.

    Raises:
      ValueError: no such table.
    """
    found = []
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE):
        head, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        shares = [re.fullmatch(r"(.+) (\d+(?:\.\d+)?) %", word) for word in head[3:]]
        attacks = {match[1] for match in shares if match is not None}
        if len(rows) > 1 and head[:3] == ["system", "rule", "none"] and len(shares) > 1 and all(shares) and len(attacks) == 1:
            places = [0.0, *(float(match[2]) for match in shares if match is not None)]
            curves = {
                (row[0], row[1]): {
                    share: float(cell.split()[0])
                    for share, cell in zip(places, row[2:], strict=True)
                    if cell not in ("-", "diverged")
                }
                for row in rows[1:]
            }
            found.append((attacks.pop(), curves))
    if not found:
        raise ValueError("there is no table with the columns system, rule, none, and one attack at two shares or more")
    return found


def draw(path: str | Path, attack: str, curves: Curves) -> None:
    """One line for each system and rule; systems differ in their dashes, rules in their colour."""
    from matplotlib.figure import Figure

    systems, rules = (list(dict.fromkeys(names)) for names in zip(*curves, strict=True))
    figure = Figure(figsize=(8.2, 3.8), layout="constrained")
    axis = figure.subplots()
    for (system, rule), points in curves.items():
        style = {"color": report.COLORS[rules.index(rule)], "linestyle": ("-", "--", ":", "-.")[systems.index(system) % 4]}
        axis.plot(list(points), list(points.values()), marker="o", label=f"{system}, {rule}", **style)
    axis.set(xlabel=f"clients that attack ({attack}), percent", ylabel="accuracy of honest clients, percent", ylim=(0, 100))
    figure.legend(fontsize=8, frameon=False, loc="outside right upper")
    figure.savefig(path, dpi=150)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def main(
    table: Annotated[Path, typer.Argument(help="A Markdown file with such a table.")],
    out: Annotated[Path, typer.Argument(help="The figure: .png, .pdf or .svg.")],
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Draws accuracy against the share of attackers, from the first table of a text that has several shares of one attack.

    `python -m experiments.attackers_figure docs/robustness.md docs/robustness_shares.png`

    `python -m experiments.attackers_figure docs/robustness.md shares.pdf`
    """
    with one_line_errors(debug):
        checks.writable("OUT", out, endings=(".png", ".pdf", ".svg"))
        draw(out, *read(table.read_text(encoding="utf-8"))[0])


if __name__ == "__main__":
    app()
