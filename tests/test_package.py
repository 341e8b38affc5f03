"""The package as it is installed: what an import brings along, and its version."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import fedjax_meta

# From below to above: what stands in a line imports only from lines above it, or from its own.
ROOMS = (
    ("checks", "runtime"),
    ("task", "masks", "layers", "models", "simplex"),
    ("data",),
    ("local", "features", "trajectory", "meta", "implicit", "participation", "privacy"),
    ("aggregate",),
    ("engine",),
    ("algorithm",),
    ("algorithms",),
    ("store", "evaluate", "costs"),
    ("simulate",),
    ("report", "checkpoint"),
)
# An algorithm may stand on another one, but nothing that it is run by may know of any.
ABOVE = {"store", "evaluate", "costs", "simulate", "report", "checkpoint"}

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


def test_imports_point_the_way_that_data_flow():
    root = Path(fedjax_meta.__file__).parent
    level = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}
    files = [path for path in root.rglob("*.py") if path != root / "__init__.py"]
    assert {path.relative_to(root).parts[0].removesuffix(".py") for path in files} == set(level)
    for path in files:
        room = path.relative_to(root).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path.relative_to(root)} imports relatively"
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("fedjax_meta") for alias in node.names), f"use from ... import in {path}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedjax_meta":
                names = [node.module.split(".")[1]] if "." in node.module else [alias.name for alias in node.names]
                for name in names:
                    assert level[name] <= level[room], f"{path.relative_to(root)} imports {name}"
                    assert not (room in ABOVE and name == "algorithms"), f"{path.relative_to(root)} imports {name}"
