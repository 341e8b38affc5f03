"""The code of docs/models.md runs as it stands."""

import re
from pathlib import Path

import jax
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
TITLES = re.split(r"^## ", PAGE, flags=re.MULTILINE)
BLOCKS = {
    part.splitlines()[0]: block for part in TITLES for block in re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL)
}
FIRST, *SECTIONS = BLOCKS


def run(section):
    names: dict = {}
    exec(BLOCKS[FIRST], names)
    exec(BLOCKS[section], names)
    return names


@pytest.mark.parametrize("section", SECTIONS)
def test_the_code_of_a_section_runs(section):
    with jax.enable_x64(False):
        names = run(section)
        assert int(names["state"].round) == 2


def test_the_adapters_of_the_page_are_small():
    with jax.enable_x64(False):
        names = run("Low-rank adapters")
        fm, text = names["fm"], names["text"]
        whole, small = (fm.costs.traffic(fm.fedavg(names[task]), text) for task in ("base_task", "task"))
        half = fm.costs.traffic(names["shared_b"], text)
        assert 2 * half.up == small.up == 4 * 4 * (2 * 64 + 2 * 64)
        assert small.up < 0.04 * whole.up


def test_there_is_a_section_for_each_framework():
    assert SECTIONS == ["Your own functions", "Flax Linen", "Flax NNX", "Equinox", "Real targets", "Low-rank adapters"]
