"""Attacks by name, for a command line."""

from collections.abc import Mapping

from fedjax_meta import checks
from fedjax_meta.aggregate.registry import Entry, made, name_and_options
from fedjax_meta.attacks.alone import gaussian, sign_flip
from fedjax_meta.attacks.attack import Attack
from fedjax_meta.attacks.on_data import backdoor, label_flip
from fedjax_meta.attacks.together import alie, ipm, min_max, min_sum

ATTACKS: Mapping[str, Entry] = {
    "label_flip": Entry(label_flip, "trains on labels K - 1 - y; options: attackers, mapping, seed"),
    "backdoor": Entry(
        backdoor, "a pattern that means a target class; options: attackers, target, size, value, share, boost, seed"
    ),
    "sign_flip": Entry(sign_flip, "sends its change times -scale; options: attackers, scale, seed"),
    "gaussian": Entry(gaussian, "sends noise; options: attackers, deviation, seed"),
    "alie": Entry(alie, "honest mean less z deviations; options: attackers, z, seed"),
    "ipm": Entry(ipm, "honest mean times -scale; options: attackers, scale, seed"),
    "min_max": Entry(min_max, "as far as two honest changes are apart; options: attackers, direction, seed"),
    "min_sum": Entry(min_sum, "as far as the outermost honest change in sum; options: attackers, direction, seed"),
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
