"""What commands say: every help fits 80 columns and begins with two examples that exist; an unknown word gets the nearest one."""

import importlib
import importlib.util
import inspect
import re
import sys

import pytest
import typer
from typer.testing import CliRunner

from fedjax_meta import cli
from tests.programs import ROOT, module_of, programs

BENCHMARKS = str(ROOT / "benchmarks")

PROGRAMS = [
    f"{folder}.{name}"
    for folder in ("experiments", "benchmarks")
    for name, path in programs(folder).items()
    if "typer" in path.read_text(encoding="utf-8") or "program(" in path.read_text(encoding="utf-8")
]


def app_of(program):
    """The Typer application of `experiments.NAME` or `benchmarks.NAME`."""
    if BENCHMARKS not in sys.path:
        sys.path.insert(0, BENCHMARKS)  # the benchmarks import each other from their folder
    folder, name = program.split(".")
    module = importlib.import_module(module_of(name) if folder == "experiments" else name)
    if hasattr(module, "app"):
        return module.app
    if folder == "benchmarks":
        return importlib.import_module("_measure").as_program(getattr(module, "main", None) or module.bench)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(module.main)
    return app


def words_of(app, *arguments):
    done = CliRunner().invoke(app, list(arguments), terminal_width=80, env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    return re.sub(r"\x1b\[[0-9;]*m", "", done.output)


def commands(app):
    """The names of an application's commands; an empty one where it has a single command."""
    command = typer.main.get_command(app)
    return ["", *command.commands] if hasattr(command, "commands") else [""]


CASES = [("fedjax-meta", name) for name in commands(cli.app)] + [(program, "") for program in PROGRAMS]


@pytest.mark.parametrize(("program", "command"), CASES)
def test_a_help_fits_80_columns_and_begins_with_two_examples(program, command):
    app = cli.app if program == "fedjax-meta" else app_of(program)
    for inner in [command] if program == "fedjax-meta" else commands(app):
        said = words_of(app, *([inner] if inner else []), "--help")
        assert "Usage:" in said
        assert max(map(len, said.splitlines())) <= 80
        before = re.split(r"^╭─|^Options:", said, maxsplit=1, flags=re.MULTILINE)[0]
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", before) if part.strip()]
        usage, _, *rest = (one for one in paragraphs if one != "Examples:")
        start = "fedjax-meta " if program == "fedjax-meta" else "python "
        assert usage.startswith("Usage:") and re.match(rf"(Examples: )?{start}", rest[0]), said
        examples = [line.strip() for line in before.splitlines() if line.strip().startswith(start)]
        assert len(examples) >= 2, said
        if program != "fedjax-meta":
            folder, name = program.split(".")
            start = f"python -m experiments.{name}" if folder == "experiments" else f"python benchmarks/{name}.py"
            assert all(one.startswith((start, "python -m experiments.fedpac")) for one in examples)
        else:
            known = set(commands(cli.app))
            assert all(one.split()[1] in known for one in examples)


def test_no_program_is_forgotten():
    """Every file of the folders that is started by itself, but those that only others start."""
    started = {
        f"{folder}.{name}"
        for folder in ("experiments", "benchmarks")
        for name, path in programs(folder).items()
        if "__main__" in path.read_text(encoding="utf-8")
    }
    assert started == set(PROGRAMS)


PLAIN = {
    "python -m tests.mutation": "tests/mutation/__main__.py",
    "python -m fedjax_meta.data.natural_sets": "fedjax_meta/data/natural_sets.py",
    "python docs/tools/gallery.py": "docs/tools/gallery.py",
    "python docs/tools/notebooks.py": "docs/tools/notebooks.py",
    "python docs/tools/pictures.py": "docs/tools/pictures.py",
    "python docs/tools/release_check.py": "docs/tools/release_check.py",
    "python run.py": "docs/launch/run.py",
}
"""Programs without Typer, by how they are started."""


def said_by_plain(program, arguments, monkeypatch, capsys):
    """(exit code, what it says) of one of them."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", [PLAIN[program], *arguments])
    spec = importlib.util.spec_from_file_location("plain", ROOT / PLAIN[program])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit) as ended:
        module.main(*([list(arguments)] if inspect.signature(module.main).parameters else []))
    printed = capsys.readouterr()
    return ended.value.code, printed.out + printed.err


@pytest.mark.parametrize("program", PLAIN)
def test_the_help_of_other_programs_does_so_too(program, monkeypatch, capsys):
    code, said = said_by_plain(program, ("--help",), monkeypatch, capsys)
    assert code == 0 and max(map(len, said.splitlines())) <= 80
    before = said.partition("\noptions:")[0]
    examples = [line.strip() for line in before.splitlines() if line.startswith("  ") and "python " in line]
    assert len(examples) >= 2 and all(program in one for one in examples), said


@pytest.mark.parametrize(
    ("program", "arguments", "nearest"),
    [
        ("python -m tests.mutation", ("--files", "fedjax_meta/locl.py"), "fedjax_meta/local.py"),
        ("python docs/tools/notebooks.py", ("speakrs",), "speakers"),
    ],
)
def test_other_programs_name_the_nearest_word(program, arguments, nearest, monkeypatch, capsys):
    code, said = said_by_plain(program, arguments, monkeypatch, capsys)
    assert code == 2 and f"did you mean {nearest!r}?" in " ".join(said.split())


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (("rnu",), "run"),
        (("run", "quikstart"), "quickstart"),
        (("run", "quickstart", "--variant", "quik", "--dry-run"), "quick"),
        (("run", "quickstart", "--systems", "fedvag", "--dry-run"), "fedavg"),
        (("run", "quickstart", "--set", "federation.cohort_sise=5", "--dry-run"), "cohort_size"),
        (("run", "quickstart", "--dryrun"), "--dry-run"),
        (("list", "metods"), "methods"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_an_unknown_word_gets_the_nearest_one(arguments, nearest):
    done = CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200"})
    said = done.output + (getattr(done, "stderr", "") or "")
    assert done.exit_code != 0
    assert re.search(rf"(Did you mean|did you mean|Possible options:).*'?{nearest}", said), said


@pytest.mark.parametrize(
    ("program", "arguments", "nearest"),
    [
        ("benchmarks.peers", ("--case", "W44"), "W4"),
        ("benchmarks.scaling", ("--axis", "populaton"), "population"),
        ("benchmarks.systems", ("--model", "lenett"), "lenet"),
        ("benchmarks.systems", ("--systems", "dito"), "ditto"),
        ("benchmarks.second_order", ("--model", "lenett"), "lenet"),
        ("benchmarks.model_forms", ("--part", "pol"), "pool"),
        ("experiments.shakespeare", ("--systems", "fedvag"), "fedavg"),
        ("experiments.quickstart", ("--dry-rnu",), "--dry-run"),
        ("experiments.leaderboard", ("--only", "mnist_smal"), "mnist_small"),
        ("experiments.reproduce", ("--only", "mtf"), "mtfl"),
        ("experiments.figures", ("tabels",), "tables"),
        ("experiments.round_costs", ("quikstart",), "quickstart"),
        ("benchmarks.static", ("--target", "h20"), "h200"),
        ("benchmarks.accelerator", ("--part", "round"), "rounds"),
    ],
)
def test_a_program_names_the_nearest_word_too(program, arguments, nearest):
    done = CliRunner().invoke(app_of(program), list(arguments), env={"COLUMNS": "200"})
    said = done.output + (getattr(done, "stderr", "") or "")
    assert done.exit_code != 0
    assert re.search(rf"(did you mean|Did you mean|Possible options:).*'?{nearest}", said), said
