"""A program for one study of the package, so that `python -m experiments.NAME` has the options of `fedjax-meta run NAME`."""

import functools
import inspect
from pathlib import Path

import typer

from fedjax_meta import cli
from fedjax_meta.study import files


def program(name: str) -> typer.Typer:
    """A command that runs the study `name`; its help has the study's title, two examples, and its variants.

    Raises:
      ValueError: no such study in the package.
    """
    tree = files.read(name)
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)

    @functools.wraps(cli.run)
    def main(**options: object) -> None:
        cli.run(study=Path(name), **options)

    parameters = [one for one in inspect.signature(cli.run).parameters.values() if one.name != "study"]
    main.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    del main.__wrapped__
    variants = ", ".join(f"`{one}`" for one in tree.get("variants") or ())
    lines = [f"{tree['title']}.", f"`python -m experiments.{name} --quick --dry-run`"]
    lines += [f"`python -m experiments.{name} --out runs/{name}`", f"The same as `fedjax-meta run {name}`."]
    lines += [f"Variants: {variants}."] if variants else []
    main.__doc__ = "\n\n".join(lines)
    app.command()(main)
    return app
