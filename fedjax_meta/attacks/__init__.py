"""Attacks on a federation, by client id: on an attacker's data, or on everything that it sends.

An attack is an option of every federation: `Federation(attack=sign_flip(0.2, scale=10.0))`. Axis letters: C cohort, N clients, B
batch, K classes.

- An attack on data changes the samples that an attacker trains on. Everything else is honest: its numbers of samples, what it
  keeps, and the samples that it tests on.
- An attack on what is sent changes all of it: the upload that is averaged, what the server sees of each client separately
  (`Trained.stacked`), and what `collaborate` reads (models of FedAMP and FedFomo, heads of FedPAC). What an attacker keeps for
  itself stays honest; it takes nothing of what a collaboration gives, so that its lies never come back to it. How much a client
  counts stays honest, too.
- Such an attack acts on changes: on the pseudo-gradient of shared leaves, and for numbers that are sent as values (buffers,
  renewed extra state, personal leaves and memories that the server reads) on their difference from what the client got or had
  before.
- It comes after the client halves of the upload transformations: an attacker does not clip itself. The rule for that is
  `aggregate.norm_bounding`, at the server. Noise and masks cannot stand an upload that is not clipped, and are refused.
- Where the simulation averages other numbers than a client sends (pFedHN), the attack is on those that are averaged.
"""

from fedjax_meta.attacks.alone import gaussian, sign_flip
from fedjax_meta.attacks.attack import Attack, Conspiracy, Lie, Poison
from fedjax_meta.attacks.on_data import backdoor, backdoor_success, label_flip, stamped
from fedjax_meta.attacks.registry import ATTACKS, parse
from fedjax_meta.attacks.together import alie, ipm, largest_z, min_max, min_sum

__all__ = [
    "ATTACKS",
    "Attack",
    "Conspiracy",
    "Lie",
    "Poison",
    "alie",
    "backdoor",
    "backdoor_success",
    "gaussian",
    "ipm",
    "label_flip",
    "largest_z",
    "min_max",
    "min_sum",
    "parse",
    "sign_flip",
    "stamped",
]
