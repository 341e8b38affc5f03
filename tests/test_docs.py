"""The documentation: its code runs as it stands, its commands exist, and its site builds without a warning."""

import ast
import contextlib
import importlib.util
import inspect
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import fedjax_meta as fm
from fedjax_meta.study import files, load
from tests import problems
from tests.programs import programs
from tests.test_commands import own_modules

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ("getting_started", "concepts", "own", "data", "meta_gradients", "sweeps")
"""Pages whose blocks run one after the other; tasks, models, studies, reports and the guide have tests of their own."""


def run(page: str) -> dict:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(block, names)
    return names


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """What the code of each page defines; a page runs when it is first asked for."""
    found: dict = {}

    def of(page):
        if page not in found:
            here = Path.cwd()
            os.chdir(tmp_path_factory.mktemp(page))
            try:
                with jax.enable_x64(False):
                    found[page] = run(page)
            finally:
                os.chdir(here)
        return found[page]

    return of


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, pages):
    pages(page)


def test_fedper_is_far_ahead_as_the_page_says(pages):
    accuracy = pages("getting_started")["accuracy"]
    assert accuracy["fedper"] > accuracy["fedavg"] + 0.1


def test_an_own_head_and_the_two_methods_of_the_page_learn(pages):
    table = pages("own")["table"]
    assert set(table) == {"MAML, own head", "FedRep"}
    assert min(known for known, _ in table.values()) > 0.6  # by chance 0.33


def test_the_csv_has_as_many_samples_as_rows(pages):
    names = pages("data")
    assert names["names"].tolist() == ["user0", "user1", "user2", "user3"]
    assert [int((names["owner"] == i).sum()) for i in range(4)] == [20] * 4


def test_the_csv_of_the_page_with_an_empty_cell_is_refused(tmp_path, monkeypatch):
    """Also where its column has whole numbers, of which NumPy's guess of types would make -1."""
    (block,) = [one for one in TEXTS["data.md"].split("```") if "measurements.csv" in one]
    whole = block.removeprefix("python").replace("{rng.normal():.3f},{rng", "{'' if i == 5 else i},{rng")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="inputs hold NaN or infinite values, first in sample 1 of client 1"):
        exec(whole, {"np": np, "fm": fm, "rng": np.random.default_rng(0)})


def test_first_order_is_off_by_what_the_page_computes(pages):
    assert 0.01 < float(pages("meta_gradients")["error"]) < 2


TEXTS = {path.name: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]}


def given():
    """What blocks of other pages take for granted: data, a task, a method, a federation and a key."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(120, 4)).astype(np.float32), rng.integers(0, 3, 120)
    order, sizes = np.arange(120), np.full(12, 10)
    task, data = fm.models.logistic(4, 3), fm.from_partition(x, y, order, sizes, views=fm.train_test_views(sizes))
    return {
        **{"x": x, "y": y, "order": order, "sizes": sizes, "task": task, "data": data, "method": fm.fedper(task)},
        **{"federation": fm.Federation(cohort_size=2), "key": jax.random.key(0), "P": jax.sharding.PartitionSpec},
    }


SHORTER = {
    "fm.use_all_cores()": "()",  # comes before anything is computed, and tests have computed
    "cohort_size=100": "cohort_size=4",
    "rounds=100": "rounds=2",
    '"/scratch/run"': '"store"',
}


@pytest.mark.parametrize("number", [0, 1])
def test_the_runs_of_the_page_on_scaling(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = re.findall(r"```python\n(.*?)```", TEXTS["distributed.md"], flags=re.DOTALL)[number]
    for long, short in SHORTER.items():
        block = block.replace(long, short)
    with jax.enable_x64(False):
        exec(block, {"fm": fm, **given()})


def test_the_sharded_meta_gradient_of_the_page_on_scaling_is_the_mean_over_clients():
    block = re.findall(r"```python\n(.*?)```", TEXTS["distributed.md"], flags=re.DOTALL)[3]
    names = {"jax": jax, "fm": fm, "P": jax.sharding.PartitionSpec, "loss": lambda w, batch: jnp.mean((batch @ w - 1) ** 2)}
    exec(block, names)
    w, batches = jnp.arange(3.0), jax.random.normal(jax.random.key(0), (2, jax.device_count(), 5, 3))
    found = names["sharded"](w, *batches)
    each = [names["maml"](names["loss"], w, *batches[:, i]).gradient for i in range(jax.device_count())]
    assert jnp.allclose(found, sum(each) / len(each), rtol=1e-5)


def test_the_federations_of_other_pages_can_be_made():
    names = given()
    for page in ("privacy", "robustness"):
        block = re.search(r"```python\n(.*?)```", TEXTS[f"{page}.md"], flags=re.DOTALL)[1]
        exec(block, names)
        assert isinstance(names["federation"], fm.Federation)
    names |= {"traffic": fm.costs.traffic(names["method"], names["data"]), "flops": 1e6}
    exec(re.search(r"```python\n(.*?)```", TEXTS["architecture.md"], flags=re.DOTALL)[1], names)
    assert names["federation"].cohort_size == 10


def test_the_program_of_the_page_on_runs_goes_on_where_it_stopped(tmp_path):
    names, method = {}, fm.fedper(problems.task(), lr=0.1, batch_size=8)
    exec(re.search(r"```python\n(.*?)```", TEXTS["runs.md"], flags=re.DOTALL)[1], names)
    train, data = names["train"], problems.data()
    train(method, data, tmp_path / "one", 13)
    found, lines = train(method, data, tmp_path / "one", 25)
    whole, _ = train(method, data, tmp_path / "two", 25)
    assert problems.distance((found.model, found.personal), (whole.model, whole.personal)) == 0
    assert [line["round"] for line in lines] == [1, 10, 13, 20, 25]


def test_the_success_of_a_backdoor_on_the_page_is_a_share_of_marked_samples():
    block = re.findall(r"```python\n(.*?)```", TEXTS["robustness.md"], flags=re.DOTALL)[1]
    names = given() | {"fm": fm, "honest": np.arange(8)}
    names["algorithm"] = fm.federate(names["method"], names["federation"])
    names["state"] = names["algorithm"].init(names["key"], names["data"])
    exec(block, names)
    others = np.asarray(names["result"].confusion)[:, 1:]  # of 8 clients, the true classes 1 and 2
    assert len(others) == 8 and names["success"] == pytest.approx(others[..., 0].sum() / others.sum())


ELSEWHERE = {
    "README.md": 3,
    "deployment.md": 4,
    "models.md": 7,
    "new_method.md": 2,
    "reports.md": 1,
    "studies.md": 4,
    "tasks.md": 5,
}
"""Blocks that test_readme, test_guide, test_tasks, models/test_docs, study/test_docs and study/test_own run."""
HERE = {"architecture.md": 1, "distributed.md": 4, "privacy.md": 1, "robustness.md": 2, "runs.md": 1}
"""Blocks that run above; the third of distributed.md starts a cluster, which test_launch does."""


def test_every_block_of_python_has_a_test():
    counts = {page: text.count("```python\n") for page, text in TEXTS.items()}
    found = {page: count for page, count in counts.items() if count and page.removesuffix(".md") not in PAGES}
    assert found == ELSEWHERE | HERE


YAML = [(page, block) for page, text in TEXTS.items() for block in re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)]
WHOLE = next(block for page, block in YAML if page == "studies.md")
"""The study that other blocks are laid over."""


@pytest.mark.parametrize(("page", "block"), [pytest.param(*one, id=f"{one[0]}: {one[1].splitlines()[0]}") for one in YAML])
def test_a_part_of_a_study_fits_into_a_study(page, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("experiments").symlink_to(ROOT / "experiments")
    Path("my_package").mkdir()
    close = "fm.measures.mean('close', lambda outputs, y: abs(outputs - y) < 0.1, share=True)"
    Path("my_package/scores.py").write_text(f"import fedjax_meta as fm\nclose = {close}\n", encoding="utf-8")
    for name, code in own_modules().items():
        Path(f"{name}.py").write_text(code, encoding="utf-8")
    Path("runs/first/presets").mkdir(parents=True)
    found = (Path(fm.__file__).parent / "study" / "presets" / "mnist_small-pairs.yaml").read_text(encoding="utf-8")
    Path("runs/first/presets/pairs.yaml").write_text(found, encoding="utf-8")
    fields = yaml.safe_load(block)
    Path("study.yaml").write_text(yaml.safe_dump(yaml.safe_load(WHOLE) | fields), encoding="utf-8")
    study = load("study.yaml")
    assert study.systems and set(fields.get("scenarios", {})) <= {name.partition("-")[0] for name in study.scenarios}


@pytest.mark.parametrize("page", TEXTS)
def test_what_a_page_runs_exists(page):
    for name in re.findall(r"fedjax-meta (?:run|show) (\w+)\b(?!\.yaml|/)", TEXTS[page]):
        assert name in {*files.packaged(), "study", "STUDY"}, name
    commands = re.findall(r"python (?:-m )?(experiments|benchmarks)[./](\w+)", TEXTS[page])
    for folder, name in commands:
        assert name == "NAME" or name in programs(folder), name
    for name, word in re.findall(r"python -m experiments\.([a-z]\w*)(?: ([a-z_]+))?", TEXTS[page]):
        source = programs("experiments")[name].read_text(encoding="utf-8")
        subcommands = re.findall(r"^@app\.command\(\)\ndef (\w+)", source, flags=re.MULTILINE)
        if re.search(r"^\w+ = program\(", source, flags=re.MULTILINE):
            assert not word, f"experiments.{name} has no command {word}"
        elif len(subcommands) > 1:
            assert word in {one.replace("_", "-") for one in subcommands} | set(subcommands), f"experiments.{name} {word}"
    for name in re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", TEXTS[page]):
        made = name.startswith("api/")  # by the build of the site
        folder = ROOT if page == "README.md" else DOCS
        assert made or (folder / name).exists(), name


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _headings(page):
    """The anchors of a page: its headings in small letters, with a hyphen for each space and without other signs."""
    text = re.sub(r"^```.*?^```", "", TEXTS[page], flags=re.MULTILINE | re.DOTALL)
    found = [re.sub(r"[`*]", "", line) for line in re.findall(r"^#+ +(.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in found}


def test_every_link_to_a_heading_finds_one():
    links = [
        (page, Path(target).name or page, anchor)
        for page, text in TEXTS.items()
        for target, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([^)\s]+)\)", text)
    ]
    assert len(links) > 30
    assert not [f"{page}: {target}#{anchor}" for page, target, anchor in links if anchor not in _headings(target)]


def test_the_drawings_are_those_of_their_script():
    pictures = loaded("pictures")
    for name, draw in pictures.DRAWINGS.items():
        assert (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8") == draw()


def test_the_table_of_methods_is_that_of_its_script():
    gallery = loaded("gallery")
    assert gallery.PAGE.read_text(encoding="utf-8") == gallery.filled(TEXTS["methods.md"], gallery.table())


# The site.


def public_names():
    """Functions and classes that a module of the package defines and does not hide, by their full name."""
    for _, dotted in loaded_modules().items():
        for name in dotted:
            module = importlib.import_module(name)
            for key, thing in vars(module).items():
                if key.startswith("_") or not (inspect.isfunction(thing) or inspect.isclass(thing)):
                    continue
                if thing.__module__ == name:
                    yield f"{name}.{key}", thing


def loaded_modules():
    code = (DOCS / "tools" / "hooks.py").read_text(encoding="utf-8")
    names: dict = {"Path": Path, "ROOT": ROOT}
    exec(code[code.index("def modules") : code.index("def on_config")], names)
    return names["modules"]()


COMMANDS = ("cli", "front", "process", "study")
"""Modules of the command line; their constants are no part of the API. Everybody's are `REDUCES_TO` and parameters of types."""


def test_every_public_constant_says_what_it_is():
    missing = []
    for path in sorted(Path(fm.__file__).parent.rglob("*.py")):
        parts = path.relative_to(Path(fm.__file__).parent).with_suffix("").parts
        if parts[0] in COMMANDS or any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for node, after in itertools.pairwise([*body, ast.Pass()]):
            targets = (
                node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            )
            names = [one.id for one in targets if isinstance(one, ast.Name) and not one.id.startswith("_")]
            typing = (
                isinstance(node.value, ast.Call)
                and isinstance(node.value.func, ast.Name)
                and node.value.func.id in ("TypeVar", "ParamSpec")
                if names
                else False
            )
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if names and not said and not typing and names != ["REDUCES_TO"]:
                missing.append(f"{path.name}: {names[0]}")
    assert not missing


class Sources(HTMLParser):
    """What a page loads by itself."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag in ("script", "img", "iframe"):
            self.found.append(given.get("src"))
        if tag == "link" and given.get("rel") in ("stylesheet", "preconnect", "icon"):
            self.found.append(given.get("href"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "-f",
        str(ROOT / "mkdocs.yml"),
        "-d",
        str(folder),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0 and not done.stdout + done.stderr, done.stdout + done.stderr
    return folder


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(site):
    read = list(site.rglob("*.html"))
    assert len(read) > 60
    for page in read:
        sources = Sources()
        sources.feed(page.read_text(encoding="utf-8"))
        assert not [one for one in sources.found if one and one.startswith(("http:", "https:", "//"))], page.name


def test_every_public_name_is_on_a_page_of_the_api(site):
    """The inventory has what the pages show; a function or class without a docstring is not shown."""
    raw = (site / "objects.inv").read_bytes()
    shown = {line.split(" ")[0] for line in zlib.decompress(raw.split(b"\n", 4)[4]).decode().splitlines()}
    missing = [name for name, thing in public_names() if name not in shown or not inspect.getdoc(thing)]
    assert not missing
    index = (site / "api" / "index.html").read_text(encoding="utf-8")
    assert not [name for name in fm.__all__ if f"<code>{name}</code>" not in index]


MAY_BE_BLANK = ("Cost of a round", "Our number")
"""What the gallery says only of methods that were measured."""


def test_the_gallery_says_all_of_every_method(site):
    page = (site / "methods.html").read_text(encoding="utf-8")
    for name in fm.METHODS:
        section = page.split(f'<h2 id="{name}">')[1].split("<h2 ")[0]
        said = dict(re.findall(r"<strong>([^<]+)</strong>: (.*?)</li>", section, flags=re.DOTALL))
        wanted = ("Paper", "Personal", "A new client", "Running statistics", "Travels", "Cost of a round", "Run it")
        wanted += ("Our number", "Options", "File")
        assert tuple(said) == wanted and all(said[word] for word in wanted if word not in MAY_BE_BLANK), name
    text = {
        name: page.split(f'<h2 id="{name}">')[1].split("<h2 ")[0] for name in ("fedavg", "fedper", "scaffold", "local_only")
    }
    assert "<strong>Personal</strong>: nothing" in text["fedavg"]
    assert "<strong>Personal</strong>: the head" in text["fedper"]
    assert "2.00 down, 2.00 up" in text["scaffold"]
    assert "0.00 down, 0.00 up" in text["local_only"]
    rows = json.loads((DOCS / "results" / "fedmeta_per.json").read_text(encoding="utf-8"))["rows"]
    (scores,) = (row["known"]["accuracy_mean"] for row in rows if row["system"] == "fedmeta_metasgd")
    number = f"{statistics.mean(scores):.2f} ±{statistics.stdev(scores):.2f} %"
    assert f"<strong>Our number</strong>: {number}" in page.split('<h2 id="fedmeta_metasgd">')[1].split("<h2 ")[0]
    assert re.search(r"<strong>Our number</strong>:\s*</li>", page.split('<h2 id="scaffold">')[1].split("<h2 ")[0])


def test_methods_that_need_class_labels_or_refuse_batch_norm_are_those_of_the_pages():
    text = " ".join((DOCS / "tasks.md").read_text(encoding="utf-8").split())
    said = set(re.findall(r"`(\w+)`", re.search(r"- ((?:`\w+`(?:, | and )?)+) need one class label per sample", text)[1]))
    assert said == {name for name, builder in fm.METHODS.items() if builder(problems.task_of(name)).needs_classes}
    row = next(
        line for line in (DOCS / "models.md").read_text(encoding="utf-8").splitlines() if "a model without batch norm" in line
    )
    refused = set()
    for name, builder in fm.METHODS.items():
        with contextlib.suppress(ValueError):
            builder(problems.normed_task())
            continue
        refused.add(name)
    assert set(re.findall(r"`(\w+)`", row)) == refused
