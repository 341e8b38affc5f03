"""The folder of a run of a study as data frames of pandas, which is imported only here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from fedjax_meta.report.records import numbers_again

if TYPE_CHECKING:
    import pandas

USER_ACCURACY = "user_accuracy"
"""The metric of a round that `Study.user_accuracy` records."""


def load(folder: str | Path) -> "pandas.DataFrame":
    """Every evaluation of a run: one row for each scenario, system, phase, member, round and group of clients.

    A run that was stopped may have evaluated a round twice; the last line counts. Systems, scenarios and seeds that were taken
    out of the run's study are left out; values that were taken out of a grid are not.

    Raises:
      OSError: the folder holds no `metrics.jsonl`.
      ValueError: a line that is no JSON.
    """
    import pandas

    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    path, belongs = Path(folder) / "metrics.jsonl", _belongs(Path(folder))
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = numbers_again(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from None
        if not belongs(line["scenario"], line["system"], line["phase"], line["seed"]):
            continue
        numbers = line["numbers"]
        for group, test in line["tests"].items():
            row = {key: line[key] for key in ("scenario", "system", "phase", "seed", "round")}
            key = (*row.values(), tuple(numbers.items()), group)
            found[key] = {**row, "seconds": line["seconds"], **numbers, "clients": group, **test["scores"]}
            if group == "known" and USER_ACCURACY in line["train"]:
                found[key][USER_ACCURACY] = line["train"][USER_ACCURACY][-1]
    return pandas.DataFrame(list(found.values()))


def load_clients(folder: str | Path) -> "pandas.DataFrame":
    """Every client of a run after the last round: one row for each scenario, system, seed, group and client.

    `client` is a number, and `name` what the data set calls the client; empty where it has no names.

    What was taken out of the run's study is left out.

    Raises:
      OSError: the folder holds no finished results.
    """
    import pandas

    frames, belongs = [], _belongs(Path(folder))
    for path in sorted((Path(folder) / "results").glob("*/*.clients.npz")):
        facts = {"scenario": path.parent.name, "system": path.name.removesuffix(".clients.npz")}
        with np.load(path) as arrays:
            kept = np.array([belongs(facts["scenario"], facts["system"], "final", int(seed)) for seed in arrays["seeds"]])
            if not kept.any():
                continue
            seeds = arrays["seeds"][kept]
            for group in [name.removesuffix("_samples") for name in arrays.files if name.endswith("_samples")]:
                samples = arrays[f"{group}_samples"]
                scores = {
                    name.removeprefix(f"{group}_"): arrays[name] for name in arrays.files if name.startswith(f"{group}_")
                }
                rows = {
                    "seed": np.repeat(seeds, len(samples)),
                    "clients": group,
                    "client": np.tile(scores.pop("ids", np.arange(len(samples))), len(seeds)),
                    "name": np.tile(scores.pop("name", np.full(len(samples), "")), len(seeds)),
                    "samples": np.tile(samples, len(seeds)),
                }
                flat = {name: values[kept].ravel() for name, values in scores.items() if name != "samples"}
                frames.append(pandas.DataFrame({**rows, **flat}).assign(**facts))
    if not frames:
        raise FileNotFoundError(f"{folder} has no finished results")
    return pandas.concat(frames, ignore_index=True)


def _belongs(folder: Path) -> Callable[[str, str, str, int], bool]:
    """Whether the folder's study still speaks of a (scenario, system, phase, seed); true where no study is said."""
    path = folder / "study.yaml"
    if not path.is_file():
        return lambda *_: True
    # The file has every field; what is read of it is no more than names and seeds.
    study = yaml.safe_load(path.read_text(encoding="utf-8"))

    def belongs(scenario: str, system: str, phase: str, seed: int) -> bool:
        own = study["systems"].get(system)
        if scenario not in study["scenarios"] or own is None:
            return False
        named = own.get("scenarios") is None or scenario.partition("@")[0] in own["scenarios"]
        return named and seed in (study["seeds"] if phase == "final" else study["tuning"]["seeds"])

    return belongs
