"""The package: what an import loads, its version, and which modules may import which."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import fedjax_meta

# A module imports only from its own line and the lines above it. A folder counts as one module.
LAYERS = (
    ("types",),
    (
        "checks",
        "runtime",
        "keys",
        "config",
        "disk",
        "escape",
        "syntax",
        "loops",
        "hardware",
        "fitting",
        "dependence",
        "imports",
        "numerics",
    ),
    (
        "task",
        "tasks",
        "measures",
        "masks",
        "layers",
        "models",
        "lora",
        "metrics",
    ),
    ("data",),
    ("local", "features", "clusters", "trajectory", "meta", "implicit", "multistep"),
    ("aggregate",),
    ("participation", "asynchronous", "schedules", "uploads", "privacy"),
    ("attacks",),
    ("rows", "placement", "engine"),
    ("contract",),
    ("federation",),
    ("algorithm", "builders", "rates"),
    ("rounds", "methods"),
    ("host_store", "evaluation", "adaptation", "costs"),
    ("blocks",),
    ("faults",),
    ("simulation",),
    ("sweeps",),
    ("report", "checkpoint"),
    ("process",),
    ("loggers", "export", "flower"),
    ("study",),
    ("cli", "front"),
    ("__main__",),
)
# These run, measure or save any method, so that they must not import a particular one.
METHOD_AGNOSTIC = {
    "host_store",
    "evaluation",
    "costs",
    "blocks",
    "faults",
    "simulation",
    "sweeps",
    "report",
    "checkpoint",
    "loggers",
    "flower",
}

OPTIONAL = (
    "tensorflow_datasets",
    "tensorflow",
    "matplotlib",
    "typer",
    "rich",
    "sklearn",
    "mlxtend",
    "chex",
    "cv2",
    "PIL",
    "pandas",
    "yaml",
    "dp_accounting",
    "equinox",
    "h5py",
    "tensorboardX",
    "wandb",
    "mlflow",
    "trackio",
    "safetensors",
    "flwr",
)


def test_an_import_needs_none_of_the_optional_packages():
    code = f"import sys, fedjax_meta; print([name for name in {OPTIONAL!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_version_is_that_of_the_project():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert fedjax_meta.__version__ == project["version"]


def test_what_goes_with_a_release_names_this_version():
    root = Path(__file__).parents[1]
    assert f"version: {fedjax_meta.__version__}\n" in (root / "CITATION.cff").read_text(encoding="utf-8")
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## Unreleased" in changes or f"## {fedjax_meta.__version__}" in changes
    assert (root / "fedjax_meta" / "py.typed").is_file()


def test_every_extra_names_extras_that_exist():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for needs in extras.values():
        for one in needs:
            name, bracket, inner = one.partition("[")
            if name == "fedjax_meta" and bracket:
                assert set(inner.rstrip("]").split(",")) <= set(extras)


def test_modules_import_only_from_their_layer_and_below():
    root = Path(fedjax_meta.__file__).parent
    level = {module: number for number, modules in enumerate(LAYERS) for module in modules}
    files = [path for path in root.rglob("*.py") if path != root / "__init__.py"]
    assert {path.relative_to(root).parts[0].removesuffix(".py") for path in files} == set(level)
    for path in files:
        module = path.relative_to(root).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path.relative_to(root)} imports relatively"
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("fedjax_meta") for alias in node.names), f"use from ... import in {path}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedjax_meta":
                names = [node.module.split(".")[1]] if "." in node.module else [alias.name for alias in node.names]
                for name in set(names) - {"__version__"}:
                    assert level[name] <= level[module], f"{path.relative_to(root)} imports {name}"
                    assert not (module in METHOD_AGNOSTIC and name == "methods"), f"{path.relative_to(root)} imports {name}"
