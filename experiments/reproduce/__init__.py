"""The papers' tables at full size: `python -m experiments.reproduce --help`."""
