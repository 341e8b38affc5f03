"""The package as it is installed: what an import brings along, and its version."""

import subprocess
import sys
import tomllib
from pathlib import Path

import fedjax_meta

OPTIONAL = (
    "tensorflow_datasets",
    "tensorflow",
    "matplotlib",
    "orbax",
    "typer",
    "rich",
    "sklearn",
    "mlxtend",
    "chex",
    "cv2",
    "PIL",
)


def test_an_import_needs_none_of_the_optional_packages():
    code = f"import sys, fedjax_meta; print([name for name in {OPTIONAL!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_version_is_that_of_the_project():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert fedjax_meta.__version__ == project["version"]
