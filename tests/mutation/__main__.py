"""The command of mutation testing."""

import argparse
import difflib
import hashlib
import json
import math
import random
import re
import signal
import sys
import tomllib
from pathlib import Path

from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.trial import Copy, Result, load_libraries

PROJECT = Path(__file__).parents[2]
HERE = Path(__file__).parent
UNCOUNTED = ("unimportable", "error")
LIMIT = 1800
"""Seconds of a trial. Without an error, the tests of a file must pass in a third of it before a time-out counts as noticed."""
HELP = """\
Breaks the library in small ways and counts how often its tests notice.

Examples:
  python -m tests.mutation --sample 300 --out runs/mutation
  python -m tests.mutation --sample 20 --files fedjax_meta/local.py
  python -m tests.mutation --list --files fedjax_meta/local.py
  python -m tests.mutation --sample 300 --out runs/mutation --survivors

The first gives the score that is reported, the second looks at one file, the
third prints the mutants of a file and tries none, the last tries the survivors
again, after a test was strengthened.

A mutant is one file with one small error: a comparison, a sign, a constant,
the name of a view, two exchanged arguments, a dropped keyword, a deleted
statement, a negated condition. A seeded sample of all mutants is tried. Each
is tried on a copy of the project in FOLDER (--out), against the tests of its
file (see tests_of.toml), cheapest first, until one fails; that one must pass
without the error. Survivors show what no test notices: strengthen a
test, or, if the mutant computes the same, say why in explained.toml.

FOLDER/trials.jsonl has a line for each mutant that was tried. A run that was
stopped goes on where it was: give it the same FOLDER. A mutant counts anew
when its file changes. FOLDER/report.txt has the score and the survivors.
"""


def main() -> None:
    """Reads the arguments and runs."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.mutation", description=HELP, formatter_class=shape, allow_abbrev=False)
    parser.add_argument(
        "--sample", type=int, default=300, help="mutants to try (300); those that cannot be imported come on top"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0); a larger sample contains the smaller one")
    parser.add_argument("--out", type=Path, default=Path("runs/mutation"), help="folder of results (runs/mutation)")
    parser.add_argument("--files", nargs="*", help="files to break; all of tests_of.toml when not given")
    parser.add_argument("--list", action="store_true", help="print the sample and try nothing")
    parser.add_argument(
        "--survivors", action="store_true", help="try those again that survived without an explanation, or timed out"
    )
    given = parser.parse_args()
    mapping = read_mapping()
    files = given.files or list(mapping)
    if unknown := [path for path in files if path not in mapping]:
        # Not by `checks.nearest`: the library is what is broken.
        near = difflib.get_close_matches(unknown[0], mapping, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        parser.error(f"tests_of.toml has no tests for {', '.join(unknown)}{hint}; it has {', '.join(mapping)}")
    if given.sample < 1:
        parser.error(f"--sample {given.sample} must be at least 1")
    mutants = [mutant for path in sorted(files) for mutant in mutants_of(PROJECT, path)]
    random.Random(given.seed).shuffle(mutants)
    if given.list:
        for mutant in mutants[: given.sample]:
            print(mutant)
        return
    Session(given.out.resolve(), mapping, given.survivors).run(mutants, given.sample)


def read_mapping() -> dict[str, list[list[str]]]:
    """The tests of each file, as arguments of one or two calls of pytest."""
    read = tomllib.loads((HERE / "tests_of.toml").read_text())
    entries = {path: {"tests": [], **entry} for path, entry in read["files"].items()}
    for path in sorted((PROJECT / "fedjax_meta" / "methods").glob("[!_]*.py")):
        own = [f"tests/{folder}/test_{path.stem}.py" for folder in ("whole_rounds", "methods")]
        entry = {"tests": [], "named": path.stem} | entries.get(str(path.relative_to(PROJECT)), {})
        entry["tests"] = [one for one in own if (PROJECT / one).exists()] + entry["tests"]
        entries[str(path.relative_to(PROJECT))] = entry
    mapping = {path: [entry["tests"]] for path, entry in entries.items()}
    for path, calls in mapping.items():
        if "named" in entries[path]:
            calls.append(["-k", entries[path]["named"], *read["named"]])
    return mapping


def read_explained() -> list[dict]:
    """The entries of explained.toml."""
    return tomllib.loads((HERE / "explained.toml").read_text()).get("equivalent", [])


class Session:
    """A run and its folder.

    Attributes:
      done: what is known of each mutant, by id; and of the tests that pass without an error.
    """

    def __init__(self, out: Path, mapping: dict[str, list[list[str]]], survivors_again: bool) -> None:
        self.out, self.mapping, self.done, self.took = out, mapping, {}, []
        out.mkdir(parents=True, exist_ok=True)
        log = out / "trials.jsonl"
        for line in log.read_text().splitlines() if log.exists() else []:
            record = json.loads(line)
            self.done[record["id"]] = record
        self.survivors_again = survivors_again
        self.explained = read_explained()

    def run(self, mutants: list[Mutant], sample: int) -> None:
        """Tries mutants in their order until `sample` of them count."""
        if self.survivors_again:
            tried = ("survived", "timeout", "error")
            again = [m for m in mutants if m.id in self.done and self.done[m.id]["status"] in tried and not self.reason(m)]
            for mutant in again:
                del self.done[mutant.id]
        load_libraries()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        copy, counted = Copy(PROJECT, self.out / "copy"), []
        for mutant in mutants:
            if len(counted) == sample:
                break
            if mutant.id not in self.done:
                result = self.trial(copy, mutant.path, mutant.broken, self.mapping[mutant.path])
                self.took.append(result.seconds)
                if result.status == "killed":
                    self.must_pass(copy, mutant.path, result.failed)
                elif result.status == "timeout":
                    self.must_pass(copy, mutant.path, "")
                self.record({"id": mutant.id, "what": str(mutant), **result._asdict()})
            record = self.done[mutant.id]
            if record["status"] not in UNCOUNTED:
                counted.append(mutant)
                left = self.left(mutants, sample - len(counted))
                what = record["what"].splitlines()[0]
                print(
                    f"{len(counted):4d}/{sample}  {record['status']:9} {record['seconds']:6.1f} s  {left}  {what}", flush=True
                )
        text = self.report(counted, [r["status"] for r in self.done.values() if r["status"] in UNCOUNTED])
        (self.out / "report.txt").write_text(text)
        print(text)

    def must_pass(self, copy: Copy, path: str, failed: str) -> None:
        """Ends the run if the test that noticed an error fails without one, too; or, if it is not known, any test of the file."""
        found = re.match(r"FAILED (\S+\.py::.*?)(?: - .*)?$", failed)
        tests = [[found[1]]] if found else self.mapping[path]
        files = {argument.split("::")[0] for call in tests for argument in call if ".py" in argument}
        read = b"".join((copy.root / part).read_bytes() for part in sorted((path, *files)))
        name = hashlib.sha1(read + repr(tests).encode()).hexdigest()[:12]
        if name in self.done:
            return
        result = self.trial(copy, path, (copy.root / path).read_bytes(), tests)
        if result.status != "survived" or (not found and result.seconds > LIMIT / 3):
            raise SystemExit(
                f"the tests of {path} fail, or are slow, without an error in it: {result}; see {copy.root}/output.txt"
            )
        self.record({"id": name, "what": f"{path} as it is", **result._asdict(), "status": "whole"})

    def trial(self, copy: Copy, path: str, source: bytes, tests: list[list[str]]) -> Result:
        """One trial on the copy."""
        return copy.wait(copy.start(path, source, tests, self.out / "cache"), path, LIMIT)

    def record(self, record: dict) -> None:
        """Keeps what is known, at once."""
        self.done[record["id"]] = record
        with (self.out / "trials.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")

    def left(self, mutants: list[Mutant], count: int) -> str:
        """The score so far and when the run will end."""
        tried = [self.done[m.id]["status"] for m in mutants if m.id in self.done]
        tried = [status for status in tried if status not in UNCOUNTED]
        killed = sum(status != "survived" for status in tried)
        low, high = wilson(killed, len(tried))
        rest = "" if not self.took else f", {count * sum(self.took) / len(self.took) / 60:.0f} min left"
        return f"{killed / len(tried):.0%} [{low:.0%}, {high:.0%}]{rest}"

    def report(self, counted: list[Mutant], others: list[str]) -> str:
        """The score, and the survivors: those without an explanation first."""
        statuses = [self.done[mutant.id]["status"] for mutant in counted]
        survivors = [mutant for mutant, status in zip(counted, statuses, strict=True) if status == "survived"]
        reasons = {mutant.id: self.reason(mutant) for mutant in survivors}
        equal, killed = sum(map(bool, reasons.values())), len(counted) - len(survivors)
        lines = ["of all", "of those that are not explained as equal"]
        text = "Mutation score, with its 95 % interval (Wilson)\n"
        for line, total in zip(lines, (len(counted), len(counted) - equal), strict=True):
            low, high = wilson(killed, total)
            text += f"  {killed}/{total} = {killed / max(total, 1):.1%} [{low:.1%}, {high:.1%}]  {line}\n"
        text += f"  {statuses.count('timeout')} by a time-out, {statuses.count('crashed')} by a crash; "
        text += f"{others.count('unimportable')} more could not be imported and {others.count('error')} not be tried\n"
        for title, wanted in (("Survivors without an explanation", False), ("Explained as equal", True)):
            text += f"\n{title}\n"
            for mutant in survivors:
                if bool(reasons[mutant.id]) is wanted:
                    text += f"{mutant}\n" + (f"  because: {reasons[mutant.id]}\n" if wanted else "")
        return text

    def reason(self, mutant: Mutant) -> str:
        """Why a mutant computes the same, from explained.toml; empty when nothing is said of it."""
        old, new = ("\n".join(line[1:].strip() for line in mutant.diff if line[0] == sign) for sign in "-+")
        for entry in self.explained:
            if entry["file"] == mutant.path and entry["old"] == old and new in entry["new"]:
                return entry["because"]
        return ""


def wilson(hits: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share."""
    if total == 0:
        return 0.0, 1.0
    share, scale = hits / total, 1 + z**2 / total
    middle = (share + z**2 / (2 * total)) / scale
    half = z * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2)) / scale
    return middle - half, middle + half


if __name__ == "__main__":
    sys.exit(main())
