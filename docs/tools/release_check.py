"""Builds the package, installs the wheel into an environment of its own, and runs it in an empty folder.

1. sdist and wheel, into dist/; the wheel is built from the sdist.
2. What must be in them, and what must not.
3. A new environment with the wheel and the extras experiments and equinox.
4. There, in an empty folder: the command, a small quick start, and the code of README and docs.
5. With --extras, every extra is resolved; nothing more is installed.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

HELP = """\
Builds the package, installs it elsewhere and runs it there.

Examples:
  python docs/tools/release_check.py
  python docs/tools/release_check.py --extras
"""
ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("getting_started", "concepts", "own", "data", "meta_gradients", "sweeps", "tasks")),
)


def run(*command: object, **options: object) -> None:
    """Runs a command and ends with its error if it fails."""
    print("+", *command, flush=True)
    done = subprocess.run(list(map(str, command)), check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"error: {command[0]} ended with {done.returncode}")


def environment(folder: Path) -> Path:
    """A new environment; its Python."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip")
    return python


def built(folder: Path, dist: Path) -> tuple[Path, Path]:
    """(sdist, wheel), built in an environment that has nothing but the tools for it."""
    python = environment(folder)
    run(python, "-m", "pip", "install", "--quiet", "build")
    run(python, "-m", "build", "--outdir", dist, ROOT)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return dist / f"fedjax_meta-{version}.tar.gz", dist / f"fedjax_meta-{version}-py3-none-any.whl"


def check_contents(sdist: Path, wheel: Path) -> None:
    """Refuses a wheel without its data, or with more than the package, and an sdist that cannot be tested."""
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fedjax_meta").rglob("*") if path.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    if inside != package:
        sys.exit(f"error: the wheel differs from the package in {sorted(inside ^ package)[:5]}")
    for name in ("fedjax_meta/py.typed", "fedjax_meta/studies/quickstart.yaml"):
        if name not in inside:
            sys.exit(f"error: the wheel has no {name}")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("tests/conftest.py", "docs/index.md", "README.md", "CITATION.cff", "LICENSE", "Makefile"):
        if name not in names:
            sys.exit(f"error: the sdist has no {name}")


def code(page: str) -> str:
    """The Python blocks of a page, one after the other; those of the README stand alone."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    return "\n".join(blocks)


def main() -> None:
    """Runs all steps."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=HELP, formatter_class=shape, allow_abbrev=False)
    parser.add_argument("--extras", action="store_true", help="also resolve every extra")
    wanted = parser.parse_args()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XLA", "JAX"))}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        sdist, wheel = built(place / "build", ROOT / "dist")
        check_contents(sdist, wheel)
        python, empty = environment(place / "user"), place / "empty"
        empty.mkdir()
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}[experiments,equinox]")
        run(python, "-m", "pip", "check")
        here = {"cwd": empty, "env": clean}
        command = python.parent / "fedjax-meta"
        run(command, "list", "studies", **here)
        words = ("--systems", "fedavg,fedper,fedmeta_per", "--seeds", "1", "--rounds", "4", "--set", "tuning.rounds=2")
        run(command, "run", "quickstart", "--quick", *words, "--out", "first", **here)
        if not (empty / "first" / "report.html").is_file():
            sys.exit("error: the quick start wrote no report")
        for page in PAGES:
            run(python, "-c", code(page), **here)
        if wanted.extras:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
            for extra in extras:
                run(python, "-m", "pip", "install", "--quiet", "--dry-run", f"{wheel}[{extra}]")
    print("the release is as it should be")


if __name__ == "__main__":
    main()
