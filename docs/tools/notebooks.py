"""Runs the notebooks of the documentation and keeps what they show."""

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from fedjax_meta import checks

FOLDER = Path(__file__).parents[1] / "notebooks"
HELP = """\
Runs the notebooks of the documentation and keeps what they show.

Examples:
  python docs/tools/notebooks.py
  python docs/tools/notebooks.py fedmeta_per speakers --to runs/notebooks
"""


def execute(path: Path, *, timeout: int = 1200) -> nbformat.NotebookNode:
    """A notebook with what it shows when it is run in its folder.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell ended with an error.
    """
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    for cell in notebook.cells:
        cell.metadata = {}  # the times of execution
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return notebook


def main() -> None:
    """Runs those named, or all, and writes them."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=HELP, formatter_class=shape, allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all when not given")
    parser.add_argument("--to", type=Path, default=FOLDER, help="folder to write to; their own when not given")
    given = parser.parse_args()
    known = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    for name in given.names:
        if name not in known:
            parser.error(f"there is no notebook {name!r}{checks.nearest(name, known)}; there are {', '.join(known)}")
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not given.names or path.stem in given.names:
            print(path.stem, flush=True)
            nbformat.write(execute(path), given.to / path.name)


if __name__ == "__main__":
    main()
