"""The programs of the experiments as a user starts them: help, errors in one line, a full disk, ignored signals."""

import gc
import importlib
import os
import re
import signal
import time

import jax
import pytest
import typer
from typer.testing import CliRunner

from fedjax_meta import process
from fedjax_meta.study import files
from tests.programs import ROOT, module_of, programs

STUDIES = ["fedmeta_per", "fedpac", "imaml", "mtfl", "privacy", "quickstart", "reptile", "robustness", "shakespeare"]
TOOLS = [
    "fedpac_figures",
    "figures",
    "leaderboard",
    "mtfl_tables",
    "published_cohorts",
    "published_samples",
    "reproduce",
    "round_costs",
]


@pytest.fixture(autouse=True)
def as_users_run_it():
    """Programs run as from a shell, without the stricter settings of the other tests."""
    with jax.numpy_rank_promotion("allow"), jax.enable_x64(False):
        yield


def invoke(name, *words):
    program = importlib.import_module(module_of(name))
    return CliRunner().invoke(program.app, list(words), env={"COLUMNS": "200"})


def test_every_program_is_known_here():
    assert set(programs("experiments")) == {*STUDIES, *TOOLS}
    assert set(STUDIES) <= set(files.packaged())


@pytest.mark.parametrize("name", STUDIES)
def test_a_program_of_a_study_is_thin_and_explains_itself(name):
    assert len((ROOT / "experiments" / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 15
    shown = invoke(name, "--help")
    assert shown.exit_code == 0
    assert all(word in shown.output for word in ("--out", "--quick", "--dry-run", "--systems", f"fedjax-meta run {name}"))


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_explains_itself(name):
    shown = invoke(name, "--help")
    assert shown.exit_code == 0 and "experiments." in shown.output + (
        importlib.import_module(f"experiments.{name}").__doc__ or ""
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--dataset", "imagenet"], "data set 'imagenet' is unknown"),
        (["--seeds", "1,x"], "'x'"),
        (["--seeds", "1,1"], "names a seed twice"),
        (["--dataset", "mnist", "--data-dir", "nothing_here"], "'mnist' is not prepared in nothing_here"),
        (["--systems", "fedsgd"], "system='fedsgd' is unknown"),
        (["--variant", "huge"], "variant='huge' is unknown"),
    ],
)
def test_errors_are_one_line(words, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = invoke("quickstart", "--quick", *words)
    assert result.exit_code == 1
    assert expected in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback():
    assert isinstance(invoke("quickstart", "--dataset", "imagenet", "--debug").exception, ValueError)


SMALL = ["--systems", "fedavg", "--dataset", "digits", "--partition", "iid", "--clients", "6", "--model", "logistic"]
SMALL += ["--rounds", "1", "--set", "systems.fedavg={method: fedavg, title: FedAvg, options: {lr: 0.1}}"]
SMALL += ["--set", "federation.cohort_size=2", "--set", "scenarios.digits.adapt_on=train"]


def test_no_space_stops_in_one_line(tmp_path, monkeypatch):
    """A full disk while a state is saved: one line, and the same command goes on."""
    whole = os.replace

    def full(source, target, **options):
        if str(target).endswith(".ckpt"):
            raise OSError(28, "No space left on device")
        whole(source, target, **options)

    words = [*SMALL, "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        result = invoke("quickstart", *words)
    assert result.exit_code == 1
    assert re.search(r"^error: could not save round 1 to .*: No space left on device; .* intact$", result.stderr.strip())
    again = invoke("quickstart", *words)
    assert again.exit_code == 0, again.output


def test_signals_that_were_ignored_stay_so():
    """As under `nohup`."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with process.one_line_errors(debug=False):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_full_device_is_one_line_that_says_what_helps(capsys):
    with pytest.raises(typer.Exit), process.one_line_errors(debug=False):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 93.56GiB\nwith an allocator"
        )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 93.56GiB; train fewer clients")
    assert "federation.lanes=8" in line and "XLA_PYTHON_CLIENT_MEM_FRACTION" in line


def test_a_signal_that_arrives_in_the_garbage_collector_ends_the_program(capsys):
    """Python drops an exception that is raised there."""

    def on_collection(phase, info):
        if on_collection in gc.callbacks:
            gc.callbacks.remove(on_collection)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(typer.Exit) as stop, process.one_line_errors(debug=False):
        gc.callbacks.append(on_collection)
        gc.collect()
        time.sleep(60)
    assert stop.value.exit_code == 128 + signal.SIGTERM
    assert "stopped; everything that was saved is still there" in capsys.readouterr().err
