"""The command `fedjax-meta`."""

import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import types
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

import fedjax_meta as fm
from fedjax_meta import cli, disk, models, process, report
from fedjax_meta.builders import about
from fedjax_meta.cli import app
from fedjax_meta.data.natural_sets import NATURAL
from fedjax_meta.data.prepared import PREPARED
from fedjax_meta.data.registry import GENERATED, PAPERS, PARTITIONS
from fedjax_meta.methods import METHODS
from fedjax_meta.study import catalogue, descriptions, from_tree, page, parts, run, system, terminal, to_tree, tuning
from fedjax_meta.study.scenario import SHIFTS, Scenario
from tests.study.common import TREE, Silent, study

runner = CliRunner()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "digits.yaml"
    path.write_text(yaml.safe_dump(TREE), encoding="utf-8")
    return path


def said(*words):
    result = runner.invoke(app, [str(word) for word in words])
    return result.exit_code, result.output


def test_run_prints_tables_that_fit_80_columns_and_writes_a_report(file, tmp_path):
    code, text = said("run", file, "--out", tmp_path / "run", "--set", "rounds=2", "--set", "seeds=[1]")
    assert code == 0
    for word in ("known", "worst 10 %", "behind local", "majority class", "untrained model", "Local only", "not tuned"):
        assert word in text
    assert all(len(line) <= 80 for line in text.splitlines() if "report.html" not in line) and "…" not in text
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {
        "report.md",
        "report.html",
        "report.tex",
        "figures",
        "figure.png",
        "metrics.jsonl",
        "run.json",
        "study.yaml",
    } <= names
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 10 + 4 and "Local only" in page  # four of the samples of clients
    assert not any(word in page for word in ('src="http', 'href="http', "@import", "url(http"))
    # A part of the study in the same folder.
    code, text = said("run", file, "--out", tmp_path / "run", "--set", "rounds=2", "--set", "seeds=[1]", "--systems", "fedavg")
    assert code == 0 and "This report leaves out local, although the folder has results of it" in " ".join(text.split())


def test_what_a_report_leaves_out_is_named_and_its_pictures_go(tmp_path, capsys):
    chosen = study(systems={name: TREE["systems"][name] for name in ("fedavg", "local")})
    for scenario in ("pairs", "gone"):
        for name in ("fedavg", "local", "old"):
            disk.write_text(tmp_path / "results" / scenario / f"{name}.final.json", "{}")
    terminal.left_out(chosen, tmp_path)
    assert "leaves out scenario gone, old, although the folder has results of them" in " ".join(
        capsys.readouterr().out.split()
    )
    for name in ("figures/gone-curves.svg", "figure-f1.png", "figures/mine.txt"):
        disk.write_text(tmp_path / name, "")
    built = run.build(chosen)
    outcomes = run.run(chosen, tmp_path / "run", watcher=Silent(), clients=built)
    page.write_all(tmp_path, chosen, built, outcomes, "it")
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("figure*") if path.is_file()}
    there = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {"figure.png"} and "mine.txt" in there and "gone-curves.svg" not in there and "pairs-samples.svg" in there


def test_a_signal_after_the_last_round_is_not_lost(tmp_path, monkeypatch):
    def ends(*_, **__):
        signal.raise_signal(signal.SIGTERM)
        return []

    monkeypatch.setattr(cli.runs, "run", ends)
    with (
        pytest.raises(process.Stopped, match="stopped while the report was written. Write it with: again"),
        cli._trained(study(), tmp_path, {}, "again", Silent(), shared=False),
    ):
        raise AssertionError("the report is written")


def test_a_signal_while_the_command_is_imported_ends_it_in_one_line():
    code = """
import os, signal, sys
import fedjax_meta.__main__ as command

class Finder:
    def find_spec(name, *_):
        if name == "fedjax_meta.cli":
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder)
command.main()
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "stopped\n")


class Sweep:
    """A sweep that is told to the lines of a command: its clock and its alarms stand still until a test moves them."""

    def __init__(self, monkeypatch, lines, *, is_terminal=False):
        self.now, self.alarms, self.lines = 0.0, [], lines
        self._printed = io.StringIO()
        shown = Console(file=self._printed, force_terminal=is_terminal, width=200, color_system=None)
        monkeypatch.setattr(terminal, "console", shown)
        monkeypatch.setattr(terminal.sys, "stdout", self._printed)
        monkeypatch.setattr(terminal.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(terminal.threading, "Timer", self._alarm)
        lines.begin("pairs", "local", "tuning", 2, 1000, 0, [1, 500, 1000])

    def _alarm(self, seconds, rings):
        assert seconds == terminal.QUIET
        self.alarms.append(types.SimpleNamespace(start=lambda: None, ring=rings, cancel=self.alarms.clear))
        return self.alarms[-1]

    def trains(self, seconds, done):
        self.now += seconds
        self.lines.progress(done, {"loss": np.full((2, 1), 1 / done)})

    def tests(self, seconds, done):
        self.now += seconds
        self.lines.record(done, [None, None])

    def minute(self):
        (alarm,) = self.alarms
        self.alarms.clear()
        alarm.ring()

    @property
    def said(self):
        """The lines since the last look, without the name of the sweep."""
        found = self._printed.getvalue()
        self._printed.seek(0)
        self._printed.truncate()
        return [
            line.removeprefix("pairs, Local only, tuning (2 runs): ")
            for line in re.split(r"[\n\r]+(?:\x1b\[2K)?", found)
            if line
        ]


def test_elsewhere_than_on_a_terminal_a_quiet_minute_has_a_line_and_so_has_each_test(monkeypatch):
    with terminal.lines(study(), {}) as lines:
        sweep = Sweep(monkeypatch, lines)
        assert sweep.said == []
        sweep.minute()
        assert sweep.said == ["compiling"]
        sweep.trains(100, 1)
        sweep.minute()  # the test after round 1 takes that long
        assert sweep.said == ["round 1/1000, loss 1.000, testing"]
        sweep.tests(300, 1)
        assert sweep.said == ["round 1/1000"]
        for done in (5, 8, 10):
            sweep.trains(2, done)
        sweep.minute()
        # 6 s for the 9 rounds since the program was there, which makes 660 s for 990, and two more tests like the first.
        assert sweep.said == ["round 10/1000, loss 0.100, 21 min left"]
        sweep.trains(330, 500)
        sweep.tests(30, 500)
        assert sweep.said == ["round 500/1000"] and sweep.alarms == []
        sweep.trains(330, 999)
        sweep.trains(1, 1000)
    assert sweep.said == [] and sweep.alarms == []  # nothing is printed after the end


def test_a_sweep_that_has_nothing_to_do_is_not_said_to_compile_later(monkeypatch):
    with terminal.lines(study(), {}) as lines:
        sweep = Sweep(monkeypatch, lines)
        assert len(sweep.alarms) == 1
        lines.wait([("pairs", "local")])
        assert sweep.said == ["waiting for systems that other processes train: pairs, Local only"] and sweep.alarms == []


def test_on_a_terminal_one_line_is_renewed_and_says_that_a_test_goes_on(monkeypatch):
    with terminal.lines(study(), {}) as lines:
        sweep = Sweep(monkeypatch, lines, is_terminal=True)
        sweep.trains(0.01, 1)
        assert sweep.said == ["compiling", "round 1/1000, loss 1.000, testing"]
        sweep.tests(5, 1)
        sweep.trains(1, 2)
        sweep.trains(0.01, 3)  # too soon to be read
        sweep.trains(1, 4)
        assert [line.partition(",")[0] for line in sweep.said] == ["round 2/1000", "round 4/1000"]
        assert sweep.alarms == []


def test_long_titles_and_remarks_wrap_between_words(file, tmp_path):
    title = "Local training with a title that needs more than one line"
    words = ["--set", "rounds=1", "--set", "seeds=[1]", "--set", f"systems.local.title={title}"]
    code, text = said("run", file, "--out", tmp_path / "run", *words)
    assert code == 0 and "…" not in text
    for table in text.split("known    worst")[1:]:
        assert all(len(line) <= 80 for line in table.splitlines() if "report.html" not in line)
    assert all(word in text.split() for word in title.split())
    assert {"clients", "train;", "tuned"} <= set(text.split())


def test_dry_run_says_what_would_run_and_writes_nothing(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, text = said("run", file, "--dry-run")
    assert code == 0 and "8 known, 2 new" in text and "rounds in all" in text
    # Two points for three rounds, and four rounds with two seeds.
    assert " 14" in text
    assert sorted(tmp_path.rglob("*")) == before
    # Logistic regression of 64 inputs: the server's model, what a client is sent, what it keeps.
    counts = {" ".join(line.split()[:4]) for line in text.splitlines()}
    assert "fedavg 650 650 0" in counts and "Local only 650 0" in counts
    assert "FLOPs" in text and "a round" in text and "minutes in all on 2 devices" in " ".join(text.split())
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_dry_run_is_refused_as_the_run_would_be(tmp_path):
    common = (
        "run",
        "--systems",
        "fedavg(lr=0.1)",
        "--dataset",
        "digits",
        "--clients",
        "6",
        "--rounds",
        "1",
        "--out",
        tmp_path / "run",
    )
    assert said(*common)[0] == 0
    code, text = said(*common, "--model", "logistic", "--dry-run")
    assert code == 1 and "holds another study" in text and "scenarios.clients.model" in text
    assert said(*common, "--dry-run")[0] == 0


@pytest.mark.long
def test_what_the_last_run_left_out_is_said_to_be_there(tmp_path):
    common = ("run", "--dataset", "digits", "--clients", "6", "--rounds", "1", "--out", tmp_path / "run")
    assert said(*common, "--systems", "fedavg(lr=0.1),fedprox(lr=0.1)")[0] == 0
    code, text = said(*common, "--systems", "fedavg(lr=0.1)")
    assert code == 0 and "This report leaves out fedprox" in " ".join(text.split())
    code, text = said("export", tmp_path / "run", "--system", "fedprox", "--out", tmp_path / "x.safetensors")
    assert code == 1 and "left fedprox out, of which it has results" in " ".join(text.split())


def test_a_system_that_shares_nothing_says_so(tmp_path):
    systems = "fedper(lr=0.1),local_only(lr=0.1)"
    common = ("run", "--systems", systems, "--dataset", "digits", "--clients", "6", "--rounds", "1", "--out", tmp_path / "run")
    text = " ".join(said(*common, "--model", "logistic")[1].split())
    assert text.count("clients send nothing: no part of the model is trained together") == 1
    clients = report.load_clients(tmp_path / "run")
    assert set(map(tuple, clients[["system", "clients"]].drop_duplicates().to_numpy())) == {
        ("fedper", "known"),
        ("fedper", "new"),
        ("local_only", "known"),  # its new clients do not train
    }


def test_a_warning_is_one_line(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "gaps.npz", x=rng.normal(size=(120, 4)), y=10 * rng.integers(0, 4, 120), client=np.arange(120) % 6)
    common = ("run", "--systems", "fedavg", "--dataset", tmp_path / "gaps.npz", "--partition", "natural")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, text = said(*common, "--dry-run")
    assert code == 0 and "note: labels run up to 30" in " ".join(text.split()) and "sources.py" not in text


def test_a_run_becomes_a_preset_and_a_line_of_the_index(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "there is no folder runs" in said("runs")[1]
    assert said("run", file, "--out", "runs/first", "--set", "rounds=1", "--set", "seeds=[1]", "--extend")[0] == 0
    code, text = said("runs")
    assert code == 0 and "runs/first" in text and "finished" in text and "best is" in text
    code, text = said("preset", "runs/first")
    assert code == 0 and text.startswith("digits-pairs/fedavg  fedavg: lr=")
    assert "digits-pairs/fedavg" in said("list", "presets")[1]
    code, text = said("show", file, "--set", "systems.local={method: fedavg, preset: digits-pairs/fedavg}")
    assert code == 0 and "preset: digits-pairs/fedavg" in text


def test_show_prints_a_study_that_runs_again(file):
    code, text = said("show", file, "--set", "rounds=9")
    assert code == 0 and to_tree(from_tree(yaml.safe_load(text))) == to_tree(study(rounds=9))


def test_show_takes_what_shapes_a_study_in_run(file):
    taken = [set(inspect.signature(command).parameters) for command in (cli.run, cli.show)]
    assert taken[0] - taken[1] == {"out", "dry_run", "shared", "data_dir", "log"} and taken[1] <= taken[0]
    words = ["--rounds", "2", "--seeds", "3,4", "--store", "host", "--delta", "0.01", "--devices", "1", "--extend"]
    code, text = said("show", file, *words, "--on-divergence", "stop")
    given = {"rounds": 2, "seeds": [3, 4], "store": "host", "delta": 0.01, "devices": 1, "on_divergence": "stop"}
    wanted = study(**given, tuning={**TREE["tuning"], "rounds": 2, "extend": cli.EXTENSIONS})
    assert code == 0 and to_tree(from_tree(yaml.safe_load(text))) == to_tree(wanted)


@pytest.mark.parametrize("what", ["methods", "partitions", "models", "masks", "shifts", "parts", "datasets", "presets"])
def test_list_names_everything_in_one_line_each(what):
    code, text = said("list", what)
    found = text.splitlines()
    assert code == 0 and len(found) >= 3 and all(len(line) <= 80 for line in found)
    if what == "methods":
        assert [line.split()[0] for line in found] == list(METHODS)


def test_every_name_of_a_study_is_listed_whole():
    """No name is missing or invented, and none of the lines is cut."""
    named = {
        f"{option}: {name}"
        for option, registry in (
            ("estimator", parts.ESTIMATORS),
            ("step_weights", parts.STEP_WEIGHTS),
            ("optimizer", parts.OPTIMIZERS),
            ("aggregator", parts.AGGREGATORS),
            ("attack", parts.ATTACKS),
            ("schedule", parts.SCHEDULES),
            ("rates", parts.RATES),
            ("participation", parts.PARTICIPATION),
            ("uploads", parts.UPLOADS),
        )
        for name in registry
    }
    datasets = {"mnist_small", "digits", "PATH.npz", *PREPARED, *NATURAL, *GENERATED}
    for known, names in (
        (descriptions.PARTITIONS, {*PARTITIONS, "natural", *PAPERS}),
        (descriptions.MODELS, set(models.MODELS)),
        (descriptions.SHIFTS, set(SHIFTS)),
        (descriptions.PARTS, named),
        (descriptions.DATASETS, datasets),
        (catalogue.MASKS, set(catalogue.MASKS)),
    ):
        assert set(known) == names
        entries = {name: (words, "") if isinstance(words, str) else words for name, words in known.items()}
        assert not [line for line in catalogue.lines(entries) if "..." in line]
    code, text = said("list", "studies")
    assert code == 0 and "Eight systems, tuned alike, on digits of two classes a client" in " ".join(text.split())


def test_options_are_listed_with_their_defaults():
    code, text = said("list", "methods", "fedper")
    assert code == 0 and text.startswith("fedper: FedAvg with own head\n  lr: 0.01\n      ") and '  personal: "head"\n' in text
    for what, known in catalogue.FUNCTIONS.items():
        lines = [line for name in known for line in catalogue.options(what, name)]
        assert all(len(line) <= catalogue.WIDTH for line in lines)
        names = [line.strip().partition(": ")[0] for line in lines if re.match(r"  \w", line)]
        assert "seed" not in names or what == "parts"
    assert '  optimizer: {"name": "sgd", "momentum": 0.5}' in catalogue.options("methods", "fedrep")
    # What is listed is what a study takes.
    for name, builder in METHODS.items():
        lines = catalogue.options("methods", name)[1:]
        assert [line.strip().partition(":")[0] for line in lines if re.match(r"  \w", line)] == system.keywords(builder)
    assert "method='fedpre' is unknown (did you mean 'fedrep'?)" in " ".join(said("list", "methods", "fedpre")[1].split())
    assert "datasets have no options to list; methods, partitions," in " ".join(said("list", "datasets", "mnist")[1].split())


def explained(what, name):
    """The options of a name with what is said of each."""
    text = "\n".join(catalogue.options(what, name))
    return {one[1]: " ".join(one[3].split()) for one in re.finditer(r"^  (\w+): (.*)((?:\n {6}.*)*)", text, re.MULTILINE)}


def test_every_option_is_explained():
    silent = [
        (what, name, option)
        for what, known in catalogue.FUNCTIONS.items()
        for name in known
        for option, words in explained(what, name).items()
        if not words
    ]
    assert not silent


def test_options_are_explained_by_the_docstrings_that_say_what_they_are():
    batch = explained("methods", "fedavg")["batch_size"]
    assert batch and batch == explained("methods", "fedper")["batch_size"]  # a variant
    assert batch == explained("methods", "ditto")["batch_size"]  # "as in `fedavg`"
    assert batch == explained("methods", "fedavgm")["batch_size"]  # "The others: as in `fedavg`"
    # What follows the reference is kept, and references are followed into other modules.
    started = explained("methods", "fedrep")["optimizer"]
    assert started == explained("methods", "fedavg")["optimizer"].rstrip(".") + ", started afresh in each phase."
    assert explained("methods", "imaml")["tolerance"] and "as in" not in explained("methods", "imaml")["tolerance"]
    assert not [name for name, builder in METHODS.items() if not all([*explained("methods", name).values()][1:])]
    assert "  concentration: required" in catalogue.options("partitions", "dirichlet_classes")


def test_every_method_is_cited_as_its_file_cites_it():
    for name, builder in METHODS.items():
        words, source = about(builder)
        text = " ".join((inspect.getmodule(builder).__doc__ or "").split())
        assert words and (source or name == "local_only"), f"{name} needs @described(words, paper) above its other decorators"
        author, _, number = source.rpartition(" ")
        if number.replace(".", "").isdecimal():
            for cited in (f"arXiv {number}", author.split()[0].rstrip(",")):
                assert cited in text, (
                    f"{name} is described as of {source!r}, but the docstring of its file does not say {cited!r}"
                )
        else:
            form = re.fullmatch(r".+ \(.+\)|", source)
            assert form, f"{source!r}, paper of {name}, must be 'AUTHOR NUMBER' (of arXiv) or 'AUTHOR (VENUE YEAR)'"
    cut = [line for line in catalogue.lines({name: about(builder) for name, builder in METHODS.items()}) if "..." in line]
    assert not cut, f"words of @described do not fit a line of {catalogue.WIDTH} characters beside the paper: {cut}"


BAD = {
    "no such file": (["run", "missing.yaml"], "No such file or directory: missing.yaml; `fedjax-meta list studies` has"),
    "a system that is not there": (
        ["run", "FILE", "--set", "systems.fedavgg.options.epochs=2"],
        "systems has no 'fedavgg' (did you mean 'fedavg'?)",
    ),
    "a bad point of a grid, asked what it costs": (
        ["run", "FILE", "--dry-run", "--set", "systems.fedavg.grid.lr=[0.1,-1]"],
        "pairs, fedavg: lr=-1.0 must be finite",
    ),
    "a field that is not there": (["run", "FILE", "--set", "round=3"], "study has no field 'round' (did you mean 'rounds'?)"),
    "no override": (["show", "FILE", "--set", "rounds"], "must read field.field=value"),
    "a data set that is not there": (["run", "FILE", "--set", "scenarios.pairs.dataset=mnixt"], "mnixt"),
    "nothing to list": (["list", "people"], "what to list='people' is unknown"),
    "a partition without what it needs": (
        ["run", "--systems", "fedavg", "--dataset", "digits", "--partition", "dirichlet_classes"],
        "partition dirichlet_classes needs concentration; `fedjax-meta list partitions dirichlet_classes` explains it",
    ),
    "a method as the study": (["run", "fedavg(lr=1)"], "fedavg(lr=1) is a method and no study: give --systems 'fedavg(lr=1)'"),
    "a value of a grid": (["run", "FILE", "--set", "systems.fedavg.grid.lr=[-1,2]"], "pairs, fedavg: lr=-1.0 must be finite"),
    "a cohort that is too large": (
        ["run", "FILE", "--set", "federation.cohort_size=99"],
        "cohort_size=99 is more than the N=8",
    ),
}


@pytest.mark.parametrize(("words", "message"), BAD.values(), ids=BAD)
def test_bad_input_gets_one_line_and_leaves_nothing(words, message, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, [str(file) if word == "FILE" else word for word in words])
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split()) and "Traceback" not in result.output
    assert not (tmp_path / "runs").exists()


def test_a_short_run_has_short_trials(file, tmp_path):
    words = ["--out", tmp_path / "run", "--rounds", "1", "--seeds", "1", "--systems", "fedavg", "--set", "tuning.rounds=2"]
    assert said("run", file, *words)[0] == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["rounds"] == {"final": 1, "tuning": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda client: client, "not float64; client.astype(int) makes integers"),
        (lambda client: client / 2, "not float64: sample 1 has 0.5, which names no client"),
        (lambda client: np.where(client == 2, np.nan, client), "not float64: sample 2 has nan, which names no client"),
        (lambda client: client.astype(str).astype(object), "names? .astype(str) makes text"),
    ],
)
def test_client_ids_that_are_no_ids_are_named(change, message, tmp_path):
    y = np.arange(40) % 3
    np.savez(tmp_path / "own.npz", x=np.ones((40, 4), np.float32), y=y, client=change(y.astype(float)))
    words = ["--systems", "fedavg", "--dataset", tmp_path / "own.npz", "--partition", "natural", "--dry-run"]
    code, text = said("run", *words)
    assert code == 1 and message in text


def test_a_run_needs_a_folder_and_a_logger_that_can_be_made(file, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("")
    code, text = said("run", file, "--out", tmp_path / "taken")
    assert code == 1 and "taken is no folder" in text
    (tmp_path / "no_logger.py").write_text("here = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, text = said("run", file, "--log", "no_logger:here", "--out", tmp_path / "run")
    assert code == 1 and "logger no_logger:here=3 must be a function (folder, name)" in text
    code, text = said("run", file, "--log", "nope", "--out", tmp_path / "run")
    assert code == 1 and "module:Name" in text and not (tmp_path / "run").exists()


def test_a_split_of_a_file_that_a_partition_does_not_use_is_said(tmp_path):
    x, y = np.random.default_rng(0).integers(0, 256, (2000, 5, 5), dtype=np.uint8), np.arange(2000) % 10
    split = np.where(np.arange(2000) < 1500, "train", "test")
    np.savez(tmp_path / "own.npz", x=x, y=y, client=np.arange(2000) // 8 % 5, split=split)
    notes = {
        partition: Scenario(dataset=str(tmp_path / "own.npz"), partition=partition).build().note
        for partition in ("natural", "iid", "fedmeta_per_iid")
    }
    assert {name: "the array split of the file is not used" in note for name, note in notes.items()} == {
        "natural": False,
        "iid": True,
        "fedmeta_per_iid": True,
    }


def test_a_study_in_several_processes_is_refused(file, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    code, text = said("run", file, "--out", tmp_path / "run")
    assert code == 1 and "a study runs in one process, and JAX sees 2" in text and not (tmp_path / "run").exists()


def test_the_version_is_that_of_the_package():
    assert said("--version") == (0, f"fedjax_meta {fm.__version__}\n")


@pytest.mark.parametrize("words", [[], ["run"], ["show"], ["list"]])
def test_help_fits_80_columns(words):
    code, text = said(*words, "--help")
    assert code == 0 and all(len(line) <= 80 for line in text.splitlines())


def test_a_metric_of_a_module_that_stands_here_is_found_by_the_installed_command(tmp_path):
    """-P leaves the working directory out of the path, as the script that pip installs does."""
    (tmp_path / "scores_of_mine.py").write_text(
        "import fedjax_meta as fm\nclose = fm.measures.mean('close', lambda outputs, y: outputs == y, share=True)\n",
        encoding="utf-8",
    )
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(TREE | {"metrics": ["scores_of_mine:close"]}), encoding="utf-8")
    code = "from fedjax_meta.__main__ import main; main()"
    command = [sys.executable, "-P", "-c", code, "show", "study.yaml"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "scores_of_mine:close" in done.stdout, done.stderr


def test_a_study_of_several_draws_has_a_whole_report(tmp_path):
    """Draws have the same seeds; each chooses a point of its own."""
    drawn = {**TREE, "data_seeds": [3, 4], "rounds": 2, "eval_every": 2}
    drawn["systems"] = {**TREE["systems"], "fedavg": {**TREE["systems"]["fedavg"], "grid": {"lr": [0.01, 0.3]}}}
    (tmp_path / "drawn.yaml").write_text(yaml.safe_dump(drawn), encoding="utf-8")
    code, text = said("run", tmp_path / "drawn.yaml", "--out", tmp_path / "run")
    assert code == 0, text
    text = " ".join(text.split())
    assert "over 4 runs (2 draws x 2 seeds)" in text and "(2 draws)" in text
    # Of two values the best is at an end in every draw.
    assert "best lr at the end of its grid" in text and "in 1 of 2 draws" not in text
    assert {"report.html", "report.md", "figure.png", "metrics.jsonl"} <= {path.name for path in (tmp_path / "run").iterdir()}


def test_the_rounds_that_are_promised_are_those_that_are_run(tmp_path):
    """Five points, of which halving ends three early."""
    halved = {**TREE, "rounds": 3, "tuning": {"rounds": 8, "halving": 2, "seeds": [0, 1]}}
    halved["systems"] = {"fedavg": {**TREE["systems"]["fedavg"], "grid": {"lr": [0.01, 0.02, 0.05, 0.1, 0.3]}}}
    (tmp_path / "halved.yaml").write_text(yaml.safe_dump(halved), encoding="utf-8")
    code, promised = said("run", tmp_path / "halved.yaml", "--dry-run", "--set", "tuning.extend=1")
    assert code == 0 and "or more" in " ".join(promised.split())
    code, text = said("run", tmp_path / "halved.yaml", "--out", tmp_path / "run")
    assert code == 0, text
    rounds = {}
    for line in map(json.loads, (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        rounds[line["phase"], str(line["numbers"]), line["seed"]] = line["round"]
    chosen = from_tree(halved)
    tried = sum(last for (phase, *_), last in rounds.items() if phase == "tuning")
    assert tuning.rounds_of_trials(5, chosen) == tried < 8 * 10
    assert f"{tried + 3 * len(chosen.seeds)}" in promised


def test_a_system_is_exported_by_its_title_too(tmp_path):
    systems = "fedavg(lr=0.1), fedavg(lr=0.3)"
    common = ("run", "--systems", systems, "--dataset", "digits", "--clients", "6", "--rounds", "1", "--out", tmp_path / "run")
    assert said(*common)[0] == 0
    models_ = []
    for name in ("fedavg(lr=0.3)", "fedavg-2"):
        path = tmp_path / f"{len(models_)}.safetensors"
        assert said("export", tmp_path / "run", "--system", name, "--out", path)[0] == 0
        models_.append(path.read_bytes()[-4000:])  # numbers; the order of the header is not fixed
    assert models_[0] == models_[1]
    code, text = said("export", tmp_path / "run", "--system", "fedavg(lr=0.5)", "--out", tmp_path / "x.safetensors")
    assert code == 1 and "fedavg-2 (fedavg(lr=0.3))" in " ".join(text.split())
