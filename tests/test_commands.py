"""Every command of README and docs runs, in a copy of the checkout, made small by options that the command documents.

`pytest tests/test_commands.py` runs those that take a second; `-m long` the others, `-k PAGE` those of one page. Commands on real
data sets need the folder of tensorflow-datasets in FEDJAX_META_DATA_DIR, and skip where the set is not in it.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import typer
import yaml
from typer.testing import CliRunner

from fedjax_meta import cli
from fedjax_meta.data.sources import data_folder

ROOT = Path(__file__).parents[1]
PAGES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
}

# Which words are commands.

PROGRAMS = ("cd", "fedjax-meta", "for", "gcloud", "git", "make", "pip", "pytest", "python", "srun")
IS_COMMAND = re.compile(rf"(?:\w+=\S+ )*(?:{'|'.join(PROGRAMS)}) .")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def lines(text):
    """The commands of a block; one may end in a comment, and go on after a backslash."""
    for line in text.replace("\\\n", " ").splitlines():
        command = re.sub(r"\s+#.*$", "", line).strip()
        if command:
            yield from re.split(r"; (?=python )", " ".join(command.split()))


def commands(page):
    """The commands of a page, from top to bottom; in blocks, indented, or in the text."""
    text = PAGES[page]
    found = [(block.start(), one) for block in FENCED.finditer(text) if not block[1] for one in lines(block[2])]
    text = FENCED.sub(lambda block: " " * len(block[0]), text)
    for block in re.finditer(r"(?:(?<=\n\n)|\A)(?: {4}.*\n)+", text):
        found += [(block.start(), one) for one in lines(block[0]) if IS_COMMAND.match(one)]
    for span in re.finditer(r"`([^`]+)`", text):
        one = " ".join(span[1].split())
        if IS_COMMAND.match(one):
            found.append((span.start(), one.replace("\\|", "|")))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


CASES = {}
"""Command -> the first page that has it."""
for _page in PAGES:
    for _command in commands(_page):
        CASES.setdefault(_command, _page)

# What is not run here, and how the others are made small.

NOT_RUN = {
    r"pip install .*": "it needs a network and changes the environment; `make release-check` installs the package",
    r"git clone.*": "it needs a network",
    r"(cd (fl-|imaml)|git show|for ).*|.*published_cohorts (fl-ml|CLONE).*": "it needs a clone of an authors' repository",
    r"python -m build --wheel|make release-check": "it installs packages from a network",
    r"make test(-all)?( ARGS=.*)?": "it runs this test",
    r"make mutation": "it takes hours; a smaller sample of it runs",
    r"gcloud .*|srun .*": "it needs a cluster",
    r"python run\.py .*": "tests/test_launch.py runs it",
    r"pytest -m long tests/test_accelerators\.py": "it is a test of its own",
    r"python benchmarks/peers\.py --case=.*": "a round of its largest case takes minutes; the command above it runs",
    r"python benchmarks/all\.py": "it takes ten minutes with --quick; its parts run",
    r"python -m fedjax_meta\.data\.natural_sets uci_har ARCHIVE OUT": "it needs UCI's archive; tests/data/test_natural.py",
    r".*=DIR/cinic10\.npz": "it needs CINIC-10; tests/experiments/test_personalised_studies.py",
    r"python benchmarks/static\.py .*": "it needs the extra accelerator-aot, in an environment of its own",
    r".* --log tensorboard,wandb,.*": "wandb is no extra of the package; tests/test_loggers.py",
    r"python -m experiments\.leaderboard --beside runs/mine": "it needs a full run; tests/experiments/test_leaderboard.py",
    r".*leaderboard .*--(confirm|same-programs|same-start|count-flops|new-clients|write-docs).*": (
        "it takes hours; tests/experiments/test_leaderboard.py"
    ),
}
"""Regular expression of whole commands -> why no test can run them, or which other one does."""


class Row(NamedTuple):
    """How a command is made small: `more` words after it, the real data that it `needs`, the command that comes `after`."""

    command: str
    more: str = ""
    needs: str = ""
    after: str = ""
    quick: bool = False


TINY = "--rounds 2 --seeds 1 --set tuning.rounds=1"
RULES = "fedjax-meta run robustness --variant all_rules --variant one_attack --systems fedavg"
ATTACKS = "fedjax-meta run robustness --variant dirichlet --systems fedavg,fedrep,ditto,fedmeta_per"
SHARES = "fedjax-meta run robustness --variant shares --variant dirichlet --seeds 1"
ROWS = (
    # They train nothing.
    Row(r"fedjax-meta (list \w+( [\w:]+)?|show study\.yaml)", quick=True),
    Row(r"python -m tests\.mutation --help", quick=True),
    Row(r"python -m experiments\.leaderboard --(list|changed)", quick=True),
    Row(r"fedjax-meta (runs|clients|compare|export|preset) .*"),
    Row(
        r"python -m experiments\.(reproduce|leaderboard) --data-dir DIR( --hours 3| --missing)?|python -m experiments\.reproduce",
        "--hours 0",
    ),
    Row(r"python -m experiments\.published_cohorts", "--rounds 2"),
    Row(r"python -m experiments\.published_samples .*", "--rounds 1 --seeds 1", "cifar10"),
    Row(r"make docs", 'ARGS="-d site"'),
    Row(r"python docs/tools/gallery\.py", "--to methods.md"),
    Row(r"make mutation ARGS=.*", 'ARGS="--sample 2 --list --files fedjax_meta/local.py"'),
    # Studies.
    Row(r"make run", f'ARGS="--quick --systems fedavg,fedper {TINY}"'),
    Row(r"fedjax-meta run quickstart( --.*)?", f"--quick --systems fedavg,fedper {TINY}"),
    Row(r"fedjax-meta run (\.\.\.|study\.yaml|STUDY|--systems)(?!.*wandb).*", TINY),
    Row(
        r"(fedjax-meta run|python -m) (experiments\.)?fedmeta_per( --quick| --variant unlike)?",
        f"--quick --systems fedavg,fedmeta_per {TINY}",
    ),
    Row(
        r"fedjax-meta run fedmeta_per .*orders=30.*",
        f"--systems fedavg,fedmeta_per --set scenarios.pairs.options.orders=1 {TINY}",
        "mnist",
    ),
    Row(
        r"fedjax-meta run fedmeta_per --(data|seeds|systems)(?!.*orders=30).*", f"--systems fedavg,fedmeta_per {TINY}", "mnist"
    ),
    Row(r"fedjax-meta run fedmeta_per --variant central .*", f"--systems centralised-100 {TINY}", "mnist"),
    Row(r"fedjax-meta run fedmeta_per_cifar10_published_cohorts .*", f"--systems fedmeta_per {TINY}", "cifar10"),
    Row(r"fedjax-meta run fedmeta_per_published_cohorts .*", f"--systems fedmeta {TINY}", "mnist"),
    Row(r"fedjax-meta run fedmeta_per_cifar10 .*", f"--systems fedavg {TINY}", "cifar10"),
    Row(r"fedjax-meta run fedmeta_per_sweeps( .*)?", f"--systems maml_clients-2 {TINY}", "mnist"),
    Row(r"python -m experiments\.round_costs imaml( .*)?", "--variant quick --systems maml-1,imaml-5-1 --repeats 1"),
    Row(r"fedjax-meta run imaml( --systems .*)?", f"--quick --systems maml-1,imaml-5-1 {TINY}"),
    Row(r"fedjax-meta run imaml --data-dir DIR", f"--systems maml-1 {TINY}", "mnist"),
    Row(r"fedjax-meta run imaml_cifar10 .*", f"--systems logged_maml-1 --set scenarios.pairs.dataset=mnist_small {TINY}"),
    Row(r"fedjax-meta run reptile --variant cifar10.*", f"--quick --systems reptile,fedavg {TINY}", "cifar10"),
    Row(r"fedjax-meta run reptile --variant mnist .*", f"--quick --systems reptile,fedavg {TINY}", "mnist"),
    Row(
        r"(fedjax-meta run|python -m) (experiments\.)?reptile(?! --variant (cifar10|mnist ))( .*)?",
        f"--quick --systems reptile,fedavg {TINY}",
    ),
    Row(
        r"(fedjax-meta run|python -m) (experiments\.)?fedpac( --systems .*)?",
        f"--quick --systems fedavg,fedpac {TINY}",
        "cifar10",
    ),
    Row(r"fedjax-meta run fedpac --variant fashion_mnist .*", f"--systems fedavg_ft,fedpac {TINY}", "fashion_mnist"),
    Row(r"fedjax-meta run mtfl", f"--quick --systems fedavg-FL {TINY}"),
    Row(
        r"fedjax-meta run mtfl --variant (tuned|w400|curves) .*|fedjax-meta run mtfl --seeds .*",
        f"--systems fedavg-FL {TINY}",
        "mnist",
    ),
    Row(r"fedjax-meta run mtfl --variant cifar10 .*", f"--systems fedavg-FL {TINY}", "cifar10"),
    Row(r"python -m experiments\.mtfl_tables targets runs/mtfl_cifar10 .*", "", "cifar10", r".* --out runs/mtfl_cifar10.*"),
    Row(r"python -m experiments\.mtfl_tables (targets|curves) RUN", "", "", r"fedjax-meta run mtfl"),
    Row(r"fedjax-meta run mtfl_figure5 .*", f"--systems mtfl_affine {TINY}", "mnist"),
    Row(r"python -m experiments\.mtfl_tables testbed .*", "--variant quick"),
    Row(r"python -m experiments\.mtfl_tables shift .*", "--variant quick --rounds 1"),
    Row(r"fedjax-meta run robustness", f"--quick --systems fedavg-mean {TINY}"),
    Row(RULES, f"--systems fedavg-mean,fedavg-median --out runs/robustness/rules {TINY}"),
    Row(ATTACKS, f"--systems fedavg-mean --out runs/robustness/dirichlet {TINY}"),
    Row(SHARES, f"--systems fedavg-mean --out runs/robustness/shares {TINY}"),
    Row(r"fedjax-meta run robustness --variant iid .*", f"--systems fedavg-mean {TINY}"),
    Row(r"fedjax-meta run robustness --variant fashion .*", f"--systems fedavg-mean {TINY}", "fashion_mnist"),
    Row(r"python -m experiments\.figures tables runs/robustness", "", "", RULES),
    Row(r"python -m experiments\.figures robustness runs/robustness/dirichlet", "", "", ATTACKS),
    Row(r"python -m experiments\.figures shares runs/robustness/shares", "", "", SHARES),
    Row(r"fedjax-meta run privacy( .*)?", f"--quick --systems none,fixed-8,fixed-1 {TINY}"),
    Row(r"python -m experiments\.figures privacy runs/privacy", "", "", r"fedjax-meta run privacy --out runs/privacy"),
    Row(r"fedjax-meta run uci_har( .*)?", f"--systems fedavg,maml {TINY}", "uci_har"),
    Row(r"fedjax-meta run shakespeare( .*)?", f"--quick --systems fedavg {TINY}", "tiny_shakespeare"),
    Row(r"fedjax-meta run sinusoids", f"--quick {TINY}"),
    Row(r"fedjax-meta run eight_systems( .*)?", f"--systems fedavg,fedper {TINY}"),
    Row(r"fedjax-meta run experiments/published_har\.yaml( .*)?", f"--systems fedavg {TINY} --set rounds=2", "uci_har"),
    Row(r"fedjax-meta run experiments/leaderboard\.yaml .*", TINY),
    Row(r"fedjax-meta run mine\.yaml .*", TINY),
    Row(
        r"fedjax-meta run experiments/published_methods\.yaml( .*)?",
        f"--systems fedavg --set systems.fedavg.options.epochs=1 {TINY}",
        "cifar10",
    ),
    # Benchmarks.
    Row(r"python benchmarks/check\.py .*"),
    Row(
        r"python benchmarks/peers\.py( --case W1 --case W[-\w]+)?( --rounds 10)?",
        "--peer fedjax_meta --case W4 --rounds 3 --no-compare",
    ),
    Row(r"python benchmarks/scaling\.py", "--axis skew --max-clients 1000 --repeats 3"),
    Row(r"python benchmarks/scaling\.py --axis \w+", "--max-clients 1000 --repeats 3"),
    Row(r"python benchmarks/second_order\.py .*", "--steps 1 --support 4 --query 4 --repeats 1 --no-peers"),
    Row(r"python benchmarks/inner_length\.py", "--steps 1 --steps 4 --hidden 8"),
    Row(
        r"python benchmarks/systems\.py( .*)?",
        "--systems ditto --clients 2 --samples 10 --batch-size 5 --epochs 1 --repeats 3",
    ),
    Row(
        r"python benchmarks/start\.py", '--repeats 1 --blocks 2 --rounds 2 --experiment "quickstart --quick --systems fedavg"'
    ),
    Row(r"python benchmarks/sweeps\.py", "--rates 2 --seeds 1 --rounds 2 --samples 40"),
    Row(r"python benchmarks/published\.py.*", "--case B --rounds 20"),
    Row(r"python benchmarks/accelerator\.py.*", "--limit 120 --part numbers --rows 2"),
    Row(r"python benchmarks/model_forms\.py", "--part dense --repeats 1"),
    Row(r"python -m pytest tests/.*"),
)


def row_of(command):
    """The row of a command."""
    return next((one for one in ROWS if re.fullmatch(one.command, command)), Row(""))


def reason(command):
    """Why a command is not run here, or None."""
    return next((why for one, why in NOT_RUN.items() if re.fullmatch(one, command)), None)


# What commands find when they start.

WORDS = {"STUDY": "study.yaml", "SYSTEM": "fedavg", "NAME": "fedper", "FILE": "client.safetensors"}
WORDS |= {"...": "study.yaml"}
"""Words that stand for one of the reader's: data folders, a run, a study, a system, a file; `<name>` is a method."""


def study():
    """The study of docs/studies.md, with FedPer."""
    (tree,) = [
        yaml.safe_load(block[2]) for block in FENCED.finditer(PAGES["studies"]) if "title: Two digits a client" in block[2]
    ]
    tree["systems"]["fedper"] = tree["systems"]["fedavg"] | {"method": "fedper"}
    tree["systems"]["fedavg"] |= {"title": "FedAvg"}
    return tree


def page_arrays():
    """Writes the files of docs/data.md here, by the code of the page."""
    (code,) = [block[2] for block in FENCED.finditer(PAGES["data"]) if "prices.npz" in block[2] and block[1] == "python"]
    exec(code, {"np": np, "x": np.random.default_rng(0).normal(size=(600, 4)).astype(np.float32)})


def own_modules():
    """By module, the code that the pages call their reader's own."""
    pages = {
        "my_methods": ("new_method", "def fading("),
        "my_models": ("studies", "def small("),
        "my_partitions": ("studies", "def odd_and_even("),
        "my_rules": ("studies", "def near_median("),
    }
    return {
        name: next(block[2] for block in FENCED.finditer(PAGES[page]) if block[1] == "python" and code in block[2])
        for name, (page, code) in pages.items()
    }


CHECKOUT = ("benchmarks", "docs", "experiments", "fedjax_meta", "tests", *(path.name for path in ROOT.glob("*.md")))
CHECKOUT += ("Makefile", "mkdocs.yml", "pyproject.toml")


def called(words, folder):
    """Runs a command in a folder, with the package of that folder, or else of this checkout."""
    program = {"fedjax-meta": [sys.executable, "-m", "fedjax_meta"], "python": [sys.executable]}.get(words[0], words[:1])
    makes = [f"PYTHON={sys.executable}"] if words[0] == "make" else []
    here = folder if (folder / "fedjax_meta").is_dir() else ROOT
    environment = {**os.environ, "PYTHONPATH": str(here), "COLUMNS": "120", "MPLBACKEND": "agg"}
    return subprocess.run(
        [*program, *words[1:], *makes], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=900
    )


class Shelf:
    """Folders in which commands ran; each command runs once."""

    def __init__(self, place):
        self.place, self.done, self.finished = place, {}, None

    def folder(self, command):
        """Where a command begins: after another one, in a copy of the checkout, or in an empty folder."""
        row = row_of(command)
        if row.after:
            (before,) = [one for one in CASES if re.fullmatch(row.after, one)]
            done, folder = self.run(before)
            assert done.returncode == 0, f"{before}: {done.stderr[-2000:]}"
            return folder
        # Of its own also where the one before ran out of time.
        folder = Path(tempfile.mkdtemp(dir=self.place))
        if not command.startswith("fedjax-meta") or re.search(r"\b(experiments|fedjax_meta)/|\bmine\.yaml", command):
            for name in CHECKOUT:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.html"))
                else:
                    shutil.copy(ROOT / name, folder / name)
        return folder

    def run(self, command):
        """(finished process, folder) of a command, as short as its row says."""
        if command not in self.done:
            folder, row = self.folder(command), row_of(command)
            self.provide(command, folder)
            self.done[command] = called(self.words(command, folder, row.more), folder), folder
        return self.done[command]

    def words(self, command, folder, more):
        """A command and what makes it small, with words that exist in place of those that stand for the reader's own."""
        words = [WORDS.get(word) or word for word in shlex.split(f"{command} {more}".replace("<name>", "local_only"))]
        words = [str(data_folder()) if word in ("DIR", "DATA") else word for word in words]
        return [str(next((folder / "runs").iterdir())) if word == "RUN" else word for word in words]

    def provide(self, command, folder):
        """Writes what a command reads: a study, arrays, a finished run, rows of benchmarks."""
        words = set(re.findall(r"[\w./]+", command))
        if words & {"study.yaml", "STUDY", "..."}:
            (folder / "study.yaml").write_text(yaml.safe_dump(study()), encoding="utf-8")
        if words & {"prices.npz", "tags.npz"}:
            with contextlib.chdir(folder):
                page_arrays()
        if "mine.npz" in words:
            rng = np.random.default_rng(0)
            x, y = rng.normal(size=(600, 4)).astype(np.float32), rng.integers(0, 10, 600)
            np.savez(folder / "mine.npz", x=x, y=y, client=np.arange(600) % 12)
        if "mine.yaml" in words:
            (tree,) = [block[2] for block in FENCED.finditer(PAGES["leaderboard"]) if "extends: " in block[2]]
            (folder / "mine.yaml").write_text(tree, encoding="utf-8")
            words |= set(re.findall(r"\w+", tree))
        for name, code in own_modules().items():
            if name in words:
                (folder / f"{name}.py").write_text(code, encoding="utf-8")
        rows = folder / "runs" / "benchmarks" / "rows.jsonl"
        if "runs/benchmarks/rows.jsonl" in words:
            rows.parent.mkdir(parents=True)
            shutil.copy(ROOT / "benchmarks" / "results" / "cpu.jsonl", rows)
        if command.split()[1] in ("compare", "export", "preset", "runs"):
            names = {one for one in words if one.startswith("runs/")} or {"runs/first"}
            for name in names:
                shutil.copytree(self.small_run(), folder / name)

    def small_run(self):
        """A finished run of the study of docs/studies.md."""
        if self.finished is None:
            place = self.place / "finished"
            place.mkdir()
            tree = study() | {"user_accuracy": "support"}
            (place / "study.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
            done = called(
                shlex.split(f"fedjax-meta run study.yaml --out run --dataset digits --model mlp --clients 10 {TINY}"),
                place,
            )
            assert done.returncode == 0, done.stderr[-2000:]
            self.finished = place / "run"
        return self.finished


@pytest.fixture(scope="module")
def shelf():
    with tempfile.TemporaryDirectory() as place:
        yield Shelf(Path(place))


# The tests.


def test_every_block_says_what_it_is():
    """A block without a language has commands alone."""
    for page, text in PAGES.items():
        for block in FENCED.finditer(text):
            for line in [] if block[1] else lines(block[2]):
                assert IS_COMMAND.match(line), f"{page}: {line}: say the language of this block"


def test_a_command_runs_or_says_why_not():
    """Each command has one row or a reason, and each row and reason is that of a command."""
    for command in CASES:
        fitting = [one for one in [*NOT_RUN, *(row.command for row in ROWS)] if re.fullmatch(one, command)]
        assert len(fitting) == 1, (
            f"{command}: {fitting or 'say in ROWS how it is made small, or in NOT_RUN why it cannot be run'}"
        )
    for one in [*NOT_RUN, *(row.command for row in ROWS)]:
        assert any(re.fullmatch(one, command) for command in CASES), f"no page has {one}"


STUDIES = [one for one in CASES if re.match(r"fedjax-meta run|python -m experiments\.\w+", one) and (reason(one) is None)]
STUDIES = [
    one for one in STUDIES if " run " in one or (ROOT / "fedjax_meta" / "studies" / f"{one.split()[2][12:]}.yaml").is_file()
]


@pytest.mark.parametrize("more", [False, True], ids=["as it stands", "made small"])
def test_the_studies_of_the_commands_are_read(more, tmp_path, monkeypatch):
    """All that a command says of a study fits, as it stands and made small; nothing is trained."""

    def build(*_):
        raise typer.Exit(0)

    monkeypatch.setattr(cli.runs, "build", build)
    shelf, wrong = Shelf(tmp_path), {}
    for number, command in enumerate(STUDIES):
        folder = tmp_path / str(number)
        folder.mkdir()
        shelf.provide(command, folder)
        (folder / "experiments").symlink_to(ROOT / "experiments")
        words = shelf.words(command, folder, row_of(command).more if more else "")
        words = ["run", words[2].partition(".")[2], *words[3:]] if words[0] == "python" else words[1:]
        monkeypatch.syspath_prepend(folder)
        with contextlib.chdir(folder):
            done = CliRunner().invoke(cli.app, words)
        wrong |= {command: done.output} if done.exit_code else {}
    assert not wrong


def the_command_runs(command, shelf):
    needs = row_of(command).needs
    if needs and not (data_folder() / needs).is_dir():
        pytest.skip(f"{data_folder()} has no {needs}; FEDJAX_META_DATA_DIR names the folder of tensorflow-datasets")
    done, _ = shelf.run(command)
    assert done.returncode == 0 and "Traceback" not in done.stderr, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


RUN = {command: page for command, page in CASES.items() if reason(command) is None}
QUICK = [pytest.param(one, id=f"{page}: {one}") for one, page in RUN.items() if row_of(one).quick]
LONG = [pytest.param(one, id=f"{page}: {one}") for one, page in RUN.items() if not row_of(one).quick]


@pytest.mark.parametrize("command", QUICK)
def test_a_command_of_a_second_runs(command, shelf):
    the_command_runs(command, shelf)


@pytest.mark.long
@pytest.mark.parametrize("command", LONG)
def test_a_command_runs(command, shelf):
    the_command_runs(command, shelf)
