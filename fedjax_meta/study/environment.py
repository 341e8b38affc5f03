"""Where results were made: versions, the machine, settings and commits, for `run.json` and for result files."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_meta import __version__, runtime

Json = Any

_ENVIRONMENT = ("JAX_", "XLA_", "FEDJAX_META_", "CUDA_VISIBLE", "OMP_NUM", "TF_", "NVIDIA_TF32")
"""How the names of environment variables begin that may change numbers or speed."""


def environment() -> dict[str, Json]:
    """Versions, the machine, settings, and the commits of the package and of the working folder."""
    others = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy", "scipy")}
    chosen = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)}
    return {
        "versions": {"python": platform.python_version(), "fedjax_meta": __version__, **others},
        "device": runtime.device_kinds(),
        "machine": {
            "system": platform.platform(),
            "cores": runtime.cores(),
            "name": platform.node(),
            "processor": processor(),
        },
        "environment": chosen,
        "x64": bool(jax.numpy.zeros(0).dtype == np.float64),
        "git": {"package": package_commit(), "working folder": commit(Path.cwd())},
    }


def processor() -> str:
    """The kind of processor that JAX computes on: numbers of another kind differ by rounding."""
    device = runtime.default_devices()[0]
    return cpu_model() if device.platform == "cpu" else device.device_kind


def cpu_model() -> str:
    """The name of this machine's CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def package_commit() -> dict[str, Json] | None:
    """The commit of the package's own repository, whose docs may differ; `None` where it is installed without one."""
    root = Path(__file__).resolve().parents[2]
    return commit(root, ":(top,exclude)docs") if (root / ".git").exists() else None


def commit(folder: Path, *but: str) -> dict[str, Json] | None:
    """The commit of a folder's git repository, and whether tracked files differ from it; `None` outside of one.

    Args:
      folder: anywhere in it.
      but: files that may differ, as exclusions of git (pathspecs).
    """

    def git(*words: str) -> str:
        run = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=30)
        return run.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", *but)
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or no commit
        return None
