"""One trial: a file of a copy of the project with an error in it, and the tests that should notice.

This process imports the libraries once and forks for every trial, before JAX has started a backend, so that a trial imports the
package and its tests alone.
"""

import compileall
import importlib
import os
import py_compile
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

UNIMPORTABLE, BROKEN_TOOL = 90, 91
PARTS = ("fedjax_meta", "tests", "docs", "experiments", "benchmarks", "pyproject.toml", "README.md", "Makefile")
LIBRARIES = ("jax", "jax.numpy", "numpy", "optax", "pytest", "_pytest.doctest", "_pytest.assertion.rewrite")
MEMORY = 12 * 2**30
CACHE = 2 * 2**30
"""Bytes of compiled programs that are kept: those used last. Most mutants leave most programs as they are."""


class Result(NamedTuple):
    """What became of a trial.

    Attributes:
      status: "survived", "killed", "timeout", "crashed"; "unimportable" when the package cannot even be imported, "error" when
        the tests could not be run. The last two do not count.
      seconds: wall-clock time.
      failed: the first test that failed.
    """

    status: str
    seconds: float
    failed: str


class Copy:
    """A copy of the project, in which files may be broken.

    Attributes:
      root: its folder.
    """

    def __init__(self, project: Path, root: Path) -> None:
        self.root = root
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for part in PARTS:
            source = project / part
            if source.is_dir():
                shutil.copytree(source, root / part, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, root / part)
        # Checked by contents: by its time, the compiled file of another mutant of the same second would pass for this one's.
        compileall.compile_dir(root, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)

    def start(self, path: str, source: bytes, tests: list[list[str]], cache: Path) -> int:
        """Starts the tests, arguments of one call of pytest each, with `source` in place of a file; the id of the process."""
        self.original = (self.root / path).read_bytes()
        (self.root / path).write_bytes(source)
        process = os.fork()
        if process == 0:
            self._child(tests, cache)
        # With a group of its own, a trial ends together with the processes that its tests start.
        os.setpgid(process, process)
        return process

    def _child(self, tests: list[list[str]], cache: Path) -> None:
        """Runs the tests and ends the process."""
        code = BROKEN_TOOL
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            out = os.open(self.root / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(out, stream)
            code = self._test(tests, cache)
            sys.stdout.flush()
        finally:
            os._exit(code)

    def _test(self, tests: list[list[str]], cache: Path) -> int:
        os.chdir(self.root)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.environ |= {"PYTHONPATH": str(self.root), "FEDJAX_META_CACHE": str(cache)}
        options = {"jax_persistent_cache_min_compile_time_secs": 0.2, "jax_compilation_cache_max_size": CACHE}
        jax = importlib.import_module("jax")
        for name, value in options.items():
            os.environ[name.upper()] = str(value)  # also for the processes that tests start
            jax.config.update(name, value)
        sys.dont_write_bytecode = True
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "fedjax_meta")]:
            del sys.modules[name]
        sys.path[:] = [str(self.root), *(entry for entry in sys.path if entry and not (Path(entry) / "fedjax_meta").is_dir())]
        try:
            package = importlib.import_module("fedjax_meta")
        except Exception as error:
            print(f"cannot be imported: {error!r}")
            return UNIMPORTABLE
        assert Path(package.__file__).is_relative_to(self.root)
        pytest, code = importlib.import_module("pytest"), 0
        for call in tests:
            code = code or int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-n", "0", "--no-header", *call]))
        return code

    def wait(self, process: int, path: str, limit: float) -> Result:
        """Waits for a trial, at most `limit` seconds, and puts the file right again."""
        began, done, status = time.monotonic(), 0, 0
        try:
            while not done and time.monotonic() - began < limit:
                time.sleep(0.05)
                done, status = os.waitpid(process, os.WNOHANG)
        finally:
            # Also when this process is told to end.
            if not done:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
            (self.root / path).write_bytes(self.original)
        seconds = round(time.monotonic() - began, 2)
        lines = (self.root / "output.txt").read_text(errors="replace").splitlines()
        failed = next((line for line in lines if line.startswith(("FAILED ", "ERROR ", "cannot be imported"))), "")[:160]
        if not done:
            return Result("timeout", seconds, failed)
        if os.WIFSIGNALED(status):
            return Result("crashed", seconds, f"signal {os.WTERMSIG(status)}")
        code = os.WEXITSTATUS(status)
        # 2: a test file could not be collected; 3: pytest itself failed, by what the package did.
        names = {0: "survived", 1: "killed", 2: "killed", 3: "crashed", UNIMPORTABLE: "unimportable"}
        return Result(names.get(code, "error"), seconds, failed if code in names else f"{code}: {' '.join(lines[-3:])}"[:300])


def load_libraries() -> None:
    """Imports what every trial needs, without starting JAX's backend."""
    for name in LIBRARIES:
        importlib.import_module(name)
