"""The list of the papers' runs, `runs.yaml`; the leaderboard has one of the same kind."""

import dataclasses
import shlex
from pathlib import Path
from typing import NamedTuple

import yaml

from fedjax_meta.study import Study, load

LIST = Path(__file__).parent / "runs.yaml"


class Claim(NamedTuple):
    """What a paper says of an order, where it prints no numbers.

    Attributes:
      says: in words.
      systems: names in the study, the best first.
      scenarios: on which it is said.
      clients, score: of a test; or a score of user accuracy, "user_accuracy" or "rounds to 95". Deviations are better if small.
    """

    says: str
    systems: list[str]
    scenarios: list[str]
    clients: str = "known"
    score: str = "accuracy_mean"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """An entry of the list.

    Attributes:
      name: of its folder and of its extract.
      title: of its section.
      study: name of a study of the package.
      variants, systems, scenarios, settings, seeds: as `fedjax-meta run` takes them.
      hours: measured or estimated on two cores, see `cost`.
      cost: where `hours` is from.
      causes: by system, why a published number is not reproduced.
      notes: sentences below the tables.
      claims: orders that the paper asserts.
      targets: user accuracies in percent to which rounds are counted.
    """

    name: str
    title: str
    study: str
    hours: float
    cost: str
    variants: list[str] = dataclasses.field(default_factory=list)
    systems: list[str] = dataclasses.field(default_factory=list)
    scenarios: list[str] = dataclasses.field(default_factory=list)
    settings: list[str] = dataclasses.field(default_factory=list)
    seeds: list[int] = dataclasses.field(default_factory=list)
    causes: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    claims: list[Claim] = dataclasses.field(default_factory=list)
    targets: list[float] = dataclasses.field(default_factory=list)

    def arguments(self) -> list[str]:
        """What follows `fedjax-meta run`, without folders."""
        words = [self.study]
        for variant in self.variants:
            words += ["--variant", variant]
        words += ["--systems", ",".join(self.systems)] if self.systems else []
        words += ["--scenarios", ",".join(self.scenarios)] if self.scenarios else []
        words += ["--seeds", ",".join(map(str, self.seeds))] if self.seeds else []
        for setting in self.settings:
            words += ["--set", setting]
        return words

    @property
    def command(self) -> str:
        """The command, without folders, as a shell reads it."""
        return shlex.join(["fedjax-meta", "run", *self.arguments()])

    def load(self) -> Study:
        """The study as the command runs it."""
        seeds = [f"seeds={self.seeds}"] if self.seeds else []
        systems, scenarios = self.systems or None, self.scenarios or None
        return load(self.study, [*seeds, *self.settings], variants=self.variants, systems=systems, scenarios=scenarios)


def read_list(path: Path = LIST) -> list[Run]:
    """The runs in order of priority.

    Raises:
      ValueError: an entry with an unknown or a missing field.
    """
    runs = []
    for name, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        try:
            claims = [Claim(**claim) for claim in entry.get("claims", ())]
            runs.append(Run(name=name, **{**entry, "claims": claims}))
        except TypeError as error:
            raise ValueError(f"{path.name}: {name}: {error}") from None
    return runs
