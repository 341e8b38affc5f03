"""Attacks by name, for a command line."""

from collections.abc import Callable, Mapping
from typing import Any

from fedjax_meta import checks
from fedjax_meta.aggregate.registry import made, name_and_options
from fedjax_meta.attacks.alone import gaussian, sign_flip
from fedjax_meta.attacks.attack import Attack
from fedjax_meta.attacks.on_data import backdoor, label_flip
from fedjax_meta.attacks.together import alie, ipm, min_max, min_sum

ATTACKS: Mapping[str, Callable[..., Any]] = {
    "label_flip": label_flip,
    "backdoor": backdoor,
    "sign_flip": sign_flip,
    "gaussian": gaussian,
    "alie": alie,
    "ipm": ipm,
    "min_max": min_max,
    "min_sum": min_sum,
}
"""Attacks by name; `attackers` is a share of the clients or a tuple of ids."""


def parse(text: str) -> Attack:
    """An attack from text, `NAME:attackers=SHARE,OPTION=VALUE,...`.

    Raises:
      ValueError: an unknown name or option, a value that is refused.

    Example:
      >>> parse("sign_flip:attackers=0.2,scale=10").config
      {'attackers': 0.2, 'seed': 0, 'scale': 10}
    """
    name, options = name_and_options(text)
    checks.one_of("attack", name, ATTACKS)
    return made(ATTACKS[name], name, options)
