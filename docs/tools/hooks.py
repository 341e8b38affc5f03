"""Hooks of MkDocs: pages that are made when the site is built, so that they cannot be out of date.

- `methods.md` gets the gallery of all methods (`gallery`) in place of its table;
- `api/` gets a page for each module of the package, filled by mkdocstrings;
- `notebooks/` gets a page for each notebook, with its committed outputs;
- rows of `leaderboard.md` that later code may have changed get a mark;
- links to notebooks lead to their pages;
- links to files outside of docs/ (`../fedjax_meta/...`) lead to the API page of the module, or become plain text.
"""

import ast
import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]  # MkDocs takes them away again when this file has been read

import gallery

import fedjax_meta as fm
from experiments.leaderboard import page as leaderboard


def modules() -> dict[str, list[str]]:
    """Public modules of the package by top-level name, with their public submodules, as dotted names."""
    package = ROOT / "fedjax_meta"
    found = {}
    for path in sorted(package.iterdir()):
        if path.name.startswith("_") or not (path.suffix == ".py" or (path / "__init__.py").is_file()):
            continue
        inner = [one.stem for one in sorted(path.glob("*.py")) if not one.stem.startswith("_")] if path.is_dir() else []
        found[path.stem] = [f"fedjax_meta.{path.stem}", *(f"fedjax_meta.{path.stem}.{one}" for one in inner)]
    return found


def own_members(dotted: str) -> str:
    """Options for a package: what its `__init__.py` defines and not what it takes from its modules, which stand below it."""
    path = ROOT.joinpath(*dotted.split(".")) / "__init__.py"
    if not path.is_file():
        return ""
    names = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [one.id for one in targets if isinstance(one, ast.Name)]
    public = [one for one in names if not one.startswith("_")]
    return f"    options:\n      members: {json.dumps(public) if public else 'false'}\n"


def on_config(config: Any) -> Any:
    """Lists the API pages in the menu."""
    for entry in config["nav"]:
        if "API" in entry:
            entry["API"] = ["api/index.md", *({name: f"api/{name}.md"} for name in modules())]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages."""
    for name, dotted in modules().items():
        text = f"# {name}\n\n" + "\n".join(f"::: {one}\n{own_members(one)}" for one in dotted)
        files.append(File.generated(config, f"api/{name}.md", content=text))
    files.append(File.generated(config, "api/index.md", content=_index()))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        text, pictures = notebook_page(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    for name in ("CHANGELOG", "CONTRIBUTING"):
        files.append(File.generated(config, f"{name.lower()}.md", content=(ROOT / f"{name}.md").read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fills in the gallery, and mends links that leave docs/."""
    del config, files
    if page.file.src_uri == "methods.md":
        markdown = gallery.filled(markdown, gallery.page())
    if page.file.src_uri == "leaderboard.md":
        markdown = leaderboard.marked(markdown)
    return markdown if "/" in page.file.src_uri else mended(markdown)  # pages in folders are made here


def mended(markdown: str) -> str:
    """Links to modules of the package lead to their API pages; other links out of docs/ keep their words alone."""

    def module(found: re.Match) -> str:
        words, path = found[1], found[2]
        parts = path.removesuffix(".py").removesuffix("/__init__").strip("/").split("/")
        return f"[{words}](api/{parts[1]}.md#{'.'.join(parts)})" if len(parts) > 1 else words

    markdown = re.sub(r"\[([^\]]+)\]\(\.\./(fedjax_meta/[^)]*)\)", module, markdown)
    markdown = re.sub(r"\]\((notebooks/\w+)\.ipynb\)", r"](\1.md)", markdown)
    markdown = re.sub(r"\[([^\]]+)\]\(docs/([^)]*)\)", r"[\1](\2)", markdown)
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)


def _index() -> str:
    """Every public name of `fedjax_meta`, with the first sentence of its docstring and a link."""
    lines = ["# API", "", "What `import fedjax_meta as fm` gives. Modules have pages of their own, in the menu.", ""]
    lines += ["| name | what it is |", "|---|---|"]
    for name in sorted(fm.__all__, key=str.lower):
        thing = getattr(fm, name)
        first = " ".join((thing.__doc__ or "").strip().split("\n\n")[0].split()).split(". ")[0].rstrip(".").replace("|", "\\|")
        lines.append(f"| {_link(name, thing)} | {first if name not in ('__version__', 'METHODS') else _CONSTANTS[name]} |")
    return "\n".join(lines) + "\n"


_CONSTANTS = {"__version__": "the version, SemVer", "METHODS": "every method by the name of its builder"}


def _link(name: str, thing: Any) -> str:
    if hasattr(thing, "__path__") or type(thing).__name__ == "module":
        return f"[`{name}`]({name}.md)"
    module = getattr(thing, "__module__", None)
    if not isinstance(module, str) or not module.startswith("fedjax_meta."):
        return f"`{name}`"
    dotted = getattr(thing, "__name__", name)
    return f"[`{name}`]({module.split('.')[1]}.md#{module}.{dotted})"


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as (Markdown, its pictures by file name)."""
    parts, pictures = [], {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![output]({name})")
            else:
                text = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures
