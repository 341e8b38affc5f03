"""The gallery of methods, made of the registry, the docstrings, the roles of leaves, and the committed measurements.

docs/methods.md has a table of it; the site has a section for each method in its place.
"""

import argparse
import functools
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import fedjax_meta as fm
from experiments.reproduce import run_list
from fedjax_meta import costs, masks
from fedjax_meta.builders import about
from fedjax_meta.study import files

HELP = """\
Writes the table of all methods into docs/methods.md.

Examples:
  python docs/tools/gallery.py
  python docs/tools/gallery.py --to runs/methods.md
"""
PAGE = ROOT / "docs" / "methods.md"
BEGIN, END = "<!-- the methods -->\n", "<!-- end of the methods -->\n"
"""Between them, docs/methods.md has the table; the site has the gallery there."""

NEW_CLIENT = re.compile(r"known or new|new client|new one|a new|never took part|all clients, known|for known and new")
"""Words by which a docstring says what a client does that never took part."""


class Entry(NamedTuple):
    """One method, in the words of a page.

    Attributes:
      name: of the builder.
      words: what it does, in a few words.
      paper: Markdown, a link where there is an arXiv number.
      idea: one or two sentences of its docstrings.
      personal: what stays with a client.
      new_client: what a client does that never took part.
      statistics: who has the running statistics of batch norms.
      travels: download and upload, in models.
      cost: of a round, in rounds of FedAvg.
      command: how it is run.
      results: what was measured, empty where nothing was.
    """

    name: str
    words: str
    paper: str
    idea: str
    personal: str
    new_client: str
    statistics: str
    travels: str
    cost: str
    command: str
    results: str


def sentences(text: str) -> list[str]:
    """The sentences of a docstring's first paragraphs, on one line each."""
    return [one.strip() for one in re.split(r"(?<=[.!?])\s+(?=[A-Z`])", " ".join(text.split())) if one.strip()]


def paper(name: str) -> str:
    """Author and number of a method's paper, as a link where it is on arXiv."""
    cited = about(fm.METHODS[name]).paper
    found = re.search(r"\d{4}\.\d{4,5}", cited)
    return f"[{cited}](https://arxiv.org/abs/{found[0]})" if found else cited or "none"


def idea(name: str) -> str:
    """Two sentences: of the builder's docstring where it has a file with others, and of the file's."""
    builder = fm.METHODS[name]
    paragraphs = (inspect.getdoc(inspect.getmodule(builder)) or "").split("\n\n")
    cited = re.compile(r"arXiv|et al|\w: \"|[A-Z]\w+, [A-Z]\w+")
    of_file = sentences(paragraphs[0]) + [one for one in sentences(" ".join(paragraphs[1:2])) if not cited.search(one)]
    own = [one for one in sentences(inspect.getdoc(builder).split("\n\n")[0]) if not NEW_CLIENT.search(one) and len(one) > 20]
    alone = name == builder.__module__.rpartition(".")[2]
    return " ".join((of_file if alone or not own else own[:1] + of_file)[:2])


@functools.cache
def _clients() -> Any:
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(size=(20, 64)).astype(np.float32), np.arange(20) % 10) for _ in range(4)]
    return fm.from_clients(pairs, num_classes=10)


@functools.cache
def _networks() -> list[fm.Task]:
    return [fm.models.mlp(64, (32, 32)), fm.models.mtfl_mlp(64)]


@functools.cache
def _built(name: str) -> tuple[fm.Task, fm.Method]:
    """A method on a small network; on one with batch norms if it needs these."""
    plain, normed = _networks()
    try:
        return plain, fm.METHODS[name](plain)
    except ValueError:
        return normed, fm.METHODS[name](normed)


@functools.cache
def _whole(task: fm.Task) -> costs.Traffic:
    return costs.traffic(fm.fedavg(task), _clients())


def personal(name: str) -> str:
    """Which leaves and which memory stay with a client."""
    task, method = _built(name)
    data = _clients()
    state = jax.eval_shape(fm.federate(method, fm.Federation(cohort_size=2)).init, jax.random.key(0), data)
    roles = [(_name(path), role) for path, role in jax.tree_util.tree_leaves_with_path(method.roles)]
    own = {path for path, role in roles if role == masks.Role.PERSONAL}
    said = []
    if own:
        known = {
            "the whole model": {path for path, _ in roles},
            **{words: _paths(mask, task) for mask, words in (("head", "the head"), ("body", "the body"))},
            "the last two layers": _paths("last:2", task),
            "the batch norms": _paths("bn", task),
            "the batch norms' scales and shifts": _paths("bn_affine", task),
        }
        said.append(next((words for words, paths in known.items() if paths == own), f"{len(own)} of {len(roles)} leaves"))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state.memory)) / data.num_clients
    model = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0))))
    if numbers:
        size = (
            f"{numbers / model:.1f} models" if numbers > 0.05 * model else f"{numbers:.0f} number{'s' * (round(numbers) > 1)}"
        )
        said.append(f"a memory of {size}")
    return " and ".join(said) or "nothing"


def _name(path: Any) -> str:
    """The path of a leaf in the task's variables: a method's model may hold them in fields of its own."""
    field, bracket, rest = jax.tree_util.keystr(path).partition("[")
    return f"{bracket}{rest}" or field


def _paths(mask: str, task: fm.Task) -> set[str]:
    try:
        tree = masks.resolve(mask, task)
    except ValueError:  # the network has no batch norms
        return set()
    return {_name(path) for path, chosen in jax.tree_util.tree_leaves_with_path(tree) if chosen}


def new_client(name: str) -> str:
    """What a client does that never took part, by the docstring, else by the functions of the method."""
    text = (inspect.getdoc(fm.METHODS[name]) or "").partition("Args:")[0].partition("Arguments, errors:")[0]
    said = [one for one in sentences(text) if NEW_CLIENT.search(one)]
    if said:
        return " ".join(said[:2])
    method = _built(name)[1]
    if method.new_client is not None:
        return "It chooses or mixes what the known clients keep, by a rule of the method; see the file."
    if method.personalize is fm.received_model:
        return "It tests with the server's model."
    return "It starts from the server's model and does on its support set what the method's test does."


def statistics(name: str) -> str:
    """Who has the running statistics of batch norms."""
    try:
        roles = fm.METHODS[name](_networks()[1]).roles
    except ValueError:
        return "models with batch norms are refused"
    found = {role for path, role in jax.tree_util.tree_leaves_with_path(roles) if "batch_stats" in masks.path_names(path)}
    return "a client's own" if found == {masks.Role.PERSONAL} else "averaged"


def travels(name: str) -> str:
    """Download and upload of a round, in models of FedAvg."""
    task, method = _built(name)
    mine, whole = costs.traffic(method, _clients()), _whole(task)
    return f"{mine.down / whole.down:.2f} down, {mine.up / whole.up:.2f} up"


@functools.cache
def _measured() -> dict[str, dict[str, Any]]:
    lines = (ROOT / "benchmarks" / "results" / "cpu.jsonl").read_text().splitlines()
    return {row["case"]: row for row in map(json.loads, lines) if row["benchmark"] == "systems"}


def cost(name: str) -> str:
    """Time of a round relative to FedAvg, from the committed rows of `benchmarks/systems.py`; nothing where there is none."""
    row = _measured().get(name)
    return "" if row is None else f"{row['ratio']:.2f} of FedAvg's (arithmetic {row['arithmetic']:.1f})"


@functools.cache
def _systems() -> list[tuple[str, str, str, str]]:
    """(study, system, title, method) of all systems of the package's studies that are written out."""
    found = []
    for study, text in files.packaged().items():
        tree = yaml.safe_load(text)
        for key, system in (tree.get("systems") or {}).items():
            if isinstance(system, dict) and "method" in system:
                found.append((study, key, str(system.get("title", key)), str(system["method"])))
    return found


def command(name: str) -> str:
    """A study of the package that has the method, else the call."""
    for study, key, _, method in _systems():
        if method == name and "{" not in key:
            return f"`fedjax-meta run {study}` has it as `{key}`"
    return f"`fm.{name}(task)`, or `method: {name}` in a study"


@functools.cache
def _extracts() -> list[tuple[str, str, dict[str, Any]]]:
    """(method, title of the run, row) of every system in docs/results/*.json, in the order of experiments/reproduce/runs.yaml."""
    found = []
    for run in run_list.read_list():
        path = ROOT / "docs" / "results" / f"{run.name}.json"
        if path.is_file():
            systems = run.load().systems
            rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
            found += [(systems[row["system"]].method, run.title, row) for row in rows]
    return found


def results(name: str) -> str:
    """The method's first system in docs/results/*.json that did not diverge; nothing where none was measured."""
    for method, title, row in _extracts():
        values = row.get("known", {}).get("accuracy_mean")
        if method == name and values and None not in values:
            spread = f" ±{np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
            seeds = f"{len(values)} seed{'s' * (len(values) > 1)}"
            return (
                f"{np.mean(values):.2f}{spread} % mean accuracy over known clients ({title}; {seeds}), "
                "see [results](results.md)"
            )
    return ""


def entry(name: str) -> Entry:
    """All that the gallery says of a method."""
    return Entry(
        name,
        about(fm.METHODS[name]).words,
        paper(name),
        idea(name),
        personal(name),
        new_client(name),
        statistics(name),
        travels(name),
        cost(name),
        command(name),
        results(name),
    )


def page() -> str:
    """The gallery in Markdown: a table, and a section for each method."""
    entries = [entry(name) for name in fm.METHODS]
    lines = ["| method | what it does | paper | personal | travels, in models |", "|---|---|---|---|---|"]
    lines += [f"| [{e.name}](#{e.name}) | {e.words} | {e.paper} | {e.personal} | {e.travels} |" for e in entries]
    for e in entries:
        file = fm.METHODS[e.name].__module__
        signature = ", ".join(
            f"{p.name}={getattr(p.default, '__name__', None) or repr(p.default)}"
            for p in inspect.signature(fm.METHODS[e.name]).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        )
        signature = re.sub(r" at 0x[0-9a-f]+|functools\.partial\(<function (\w+)[^)]*\)", r"\1", signature)
        lines += ["", f"## {e.name} {{ #{e.name} }}", "", e.idea, ""]
        for label, text in (
            ("Paper", e.paper),
            ("Personal", e.personal),
            ("A new client", e.new_client),
            ("Running statistics", e.statistics),
            ("Travels", e.travels),
            ("Cost of a round", e.cost),
            ("Run it", e.command),
            ("Our number", e.results),
            ("Options", f"`{signature}`"),
            ("File", f"[{file}](api/methods.md#{file})"),
        ):
            lines.append(f"- **{label}**: {text}")
    return "\n".join(lines) + "\n"


def table() -> str:
    """What docs/methods.md says of all methods, with links to their files."""
    lines = ["| method | what it does | paper | personal |", "|---|---|---|---|"]
    for name, builder in fm.METHODS.items():
        file = f"../{builder.__module__.replace('.', '/')}.py"
        lines.append(f"| [{name}]({file}) | {about(builder).words} | {paper(name)} | {personal(name)} |")
    return "\n".join(lines) + "\n"


def filled(text: str, what: str) -> str:
    """A page with something in the place of its list of methods."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{what}{END}{rest.partition(END)[2]}"


def main() -> None:
    """Writes the table."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=HELP, formatter_class=shape, allow_abbrev=False)
    parser.add_argument("--to", type=Path, default=PAGE, help="file to write; docs/methods.md when not given")
    to = parser.parse_args().to
    to.write_text(filled(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")


if __name__ == "__main__":
    main()
