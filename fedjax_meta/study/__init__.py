"""Studies: systems compared on scenarios, tuned alike. `python -m fedjax_meta run STUDY.yaml` runs one.

A `Study` is declared in a file, or built in Python. `run` tunes and trains every system; a grid of rates times seeds is one
program (`fedjax_meta.sweeps`).
"""

from fedjax_meta.data.registry import GENERATED, PAPERS, PARTITIONS
from fedjax_meta.study.scenario import AUGMENTS, SHIFTS, Clients, Scenario
from fedjax_meta.study.study import Published, Study, Tuning, from_tree, load, to_tree, to_yaml
from fedjax_meta.study.system import System

__all__ = [
    "AUGMENTS",
    "GENERATED",
    "PAPERS",
    "PARTITIONS",
    "SHIFTS",
    "Clients",
    "Published",
    "Scenario",
    "Study",
    "System",
    "Tuning",
    "from_tree",
    "load",
    "to_tree",
    "to_yaml",
]
