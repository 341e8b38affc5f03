"""The tool that breaks the library: one real error at a time, tests for every file, and survivors that no test notices."""

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.mutation.__main__ import read_explained, read_mapping, wilson
from tests.mutation.mutants import mutants_of

PROJECT = Path(__file__).parents[1]
CORE = (
    "meta",
    "implicit",
    "local",
    "engine",
    "placement",
    "multistep",
    "adaptation",
    "trajectory",
    "schedules",
    "asynchronous",
    "participation",
    "clusters",
)
PACKAGES = {
    "rounds": (),
    "aggregate": ("registry", "rule"),
    "numerics": (),
    "uploads": (),
    "attacks": ("registry",),
    "privacy": (),
}
"""All files of them, but some: what only names things, or says what a thing is."""

CODE = '''"""Docstring with 1 number."""

def f(a, b, *, wide=True, view="support"):
    """1 < 2"""
    if a <= b and not wide:
        raise ValueError(f"a={a + 1}")
    a = -a * 2
    print(zip(a, strict=True))
    return where(a > 0, a, b), g(a, b, width=3), [x for x in (a, b) if x], tagged(a, "train", 7)
'''


def changes(tmp_path):
    (tmp_path / "code.py").write_text(CODE)
    return [(mutant.kind, *mutant.diff) for mutant in mutants_of(tmp_path, "code.py")]


def test_mutants_of_a_function_are_these(tmp_path):
    found = changes(tmp_path)
    signature, condition, negative, last = (CODE.splitlines()[line] for line in (2, 4, 6, 8))
    wanted = [
        ("constant", signature, signature.replace("True", "False")),
        ("constant", signature, signature.replace("support", "train")),
        ("comparison", condition, condition.replace("<=", "<")),
        ("condition", condition, condition.replace("and", "or")),
        ("sign", condition, condition.replace("not wide", "wide")),
        ("negated condition", condition, "    if (not (a <= b and not wide)):"),
        ("sign", negative, negative.replace("-", "")),
        ("arithmetic", negative, negative.replace("*", "/")),
        ("constant", negative, negative.replace("2", "3")),
        ("constant", negative, negative.replace("2", "1")),
        ("deleted statement", negative, "    pass"),
        ("deleted statement", "    print(zip(a, strict=True))", "    pass"),
        ("comparison", last, last.replace("a > 0", "a >= 0")),
        ("constant", last, last.replace("a > 0", "a > 1")),
        ("swapped arguments", last, last.replace("a > 0, a, b", "a > 0, b, a")),
        ("swapped arguments", last, last.replace("g(a, b", "g(b, a")),
        ("dropped keyword", last, last.replace(", width=3", "")),
        ("constant", last, last.replace("width=3", "width=4")),
        ("constant", last, last.replace("width=3", "width=2")),
        ("negated condition", last, last.replace("if x]", "if (not (x))]")),
    ]
    assert Counter(found) == Counter((kind, f"-{old}", f"+{new}") for kind, old, new in wanted)


@pytest.mark.parametrize("path", ["fedjax_meta/local.py", "fedjax_meta/methods/scaffold.py"])
def test_every_mutant_is_another_program_with_one_change(path):
    mutants = mutants_of(PROJECT, path)
    whole = ast.dump(ast.parse((PROJECT / path).read_bytes()))
    assert len({mutant.id for mutant in mutants}) == len(mutants) > 20
    for mutant in mutants:
        assert ast.dump(ast.parse(mutant.broken)) != whole
        assert mutant.broken.startswith(mutant.source[: mutant.begin])
        assert mutant.broken.endswith(mutant.source[mutant.end :])


def test_every_method_and_the_core_have_tests():
    methods = {f"fedjax_meta/methods/{path.name}" for path in (PROJECT / "fedjax_meta/methods").glob("*.py")}
    wanted = methods - {"fedjax_meta/methods/__init__.py"} | {f"fedjax_meta/{name}.py" for name in CORE}
    for package, left_out in PACKAGES.items():
        files = {path.stem for path in (PROJECT / "fedjax_meta" / package).glob("*.py")} - {"__init__", *left_out}
        wanted |= {f"fedjax_meta/{package}/{stem}.py" for stem in files}
    mapping = read_mapping()
    assert set(mapping) == wanted, f"tests/mutation/tests_of.toml: {sorted(set(mapping) ^ wanted)}"
    for path, calls in mapping.items():
        assert calls[0], (
            f"{path} has no test of its own, as tests/methods/test_{Path(path).stem}.py or by name in tests_of.toml"
        )
        for argument in (argument for call in calls for argument in call if argument.endswith(".py")):
            assert (PROJECT / argument).exists(), f"{path} names {argument}"


@pytest.mark.parametrize("entry", read_explained(), ids=lambda entry: f"{entry['file']}: {entry['old']}")
def test_explained_mutants_still_exist(entry):
    def lines(mutant, sign):
        return "\n".join(line[1:].strip() for line in mutant.diff if line[0] == sign)

    found = {lines(m, "+") for m in mutants_of(PROJECT, entry["file"]) if lines(m, "-") == entry["old"]}
    assert set(entry["new"]) <= found and len(entry["because"]) > 20


def test_the_interval_of_a_score_is_wilsons():
    """Wallis, "Binomial confidence intervals" (2013): the roots p of |p - share| = z sqrt(p (1 - p) / n)."""
    low, high = wilson(27, 30)
    for p in (low, high):
        assert abs(abs(p - 0.9) - 1.96 * (p * (1 - p) / 30) ** 0.5) < 1e-12
    assert low < 0.9 < high and wilson(0, 0) == (0.0, 1.0)
    assert wilson(5, 5)[1] == pytest.approx(1) and wilson(0, 5)[0] == pytest.approx(0)


SMALL = {
    "fedjax_meta/__init__.py": "from fedjax_meta.size import size\n",
    "fedjax_meta/size.py": "def size(a, b):\n    return a * 2 + (0 if a > b else 0)\n",
    "tests/__init__.py": "",
    "tests/test_size.py": "from fedjax_meta import size\n\n\ndef test_size():\n    assert size(3, 4) == 6\n",
    "tests/mutation/tests_of.toml": 'named = []\n[files]\n"fedjax_meta/size.py" = { tests = ["tests/test_size.py"] }\n',
    "pyproject.toml": "",
}
BECAUSE = '{ file = "fedjax_meta/size.py", old = "OLD", new = ["NEW"], because = "both branches are 0" }'


def written(folder, **changes):
    for name, text in {**SMALL, **changes}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in ("__init__", "__main__", "mutants", "trial"):
        (folder / f"tests/mutation/{name}.py").write_text((PROJECT / f"tests/mutation/{name}.py").read_text())


def command(folder, sample):
    words = [sys.executable, "-m", "tests.mutation", "--sample", str(sample), "--out", "out"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_test_that_fails_without_an_error_ends_the_run(tmp_path):
    broken = SMALL["tests/test_size.py"].replace("== 6", "== 7")
    written(tmp_path, **{"tests/test_size.py": broken, "tests/mutation/explained.toml": ""})
    done = command(tmp_path, 1)
    assert done.returncode == 1 and "the tests of fedjax_meta/size.py fail, or are slow, without an error in it" in done.stderr


@pytest.mark.long
def test_a_run_finds_the_survivors_and_goes_on_where_it_stopped(tmp_path):
    """In `a * 2 + (0 if a > b else 0)`, the sign, the condition and the first 0 do not matter where a < b."""
    old = "return a * 2 + (0 if a > b else 0)"
    explained = BECAUSE.replace("OLD", old).replace("NEW", old.replace("> b", ">= b"))
    written(tmp_path, **{"tests/mutation/explained.toml": f"equivalent = [{explained}]\n"})

    def run(sample):
        done = command(tmp_path, sample)
        assert done.returncode == 0, done.stderr
        return done.stdout, [json.loads(line) for line in (tmp_path / "out/trials.jsonl").read_text().splitlines()]

    whole = mutants_of(tmp_path, "fedjax_meta/size.py")
    _, first = run(3)
    output, records = run(100)
    assert records[: len(first)] == first and len(first) == 4  # the test that noticed, without an error, and three mutants
    status = {record["id"]: record["status"] for record in records}
    survived = {mutant.diff[1][5:] for mutant in whole if status[mutant.id] == "survived"}
    assert survived == {
        old.replace("> b", ">= b"),
        old.replace("(0 if", "(1 if"),
        old.replace("if a > b", "if (not (a > b))"),
        old.replace("+", "-"),
    }
    assert sorted(status.values()) == sorted(["whole", *["survived"] * 4, *["killed"] * (len(whole) - 4)])
    assert f"{len(whole) - 4}/{len(whole)} = " in output and f"{len(whole) - 4}/{len(whole) - 1} = " in output
    assert "because: both branches are 0" in output
    assert (tmp_path / "fedjax_meta/size.py").read_text() == SMALL["fedjax_meta/size.py"]
