"""Puts a method and a federation together: `federate`.

A round samples a cohort, lets the engine run the client half (`client`) for each of its members, sums up what they send, and
gives the sum to the server half (`server`). `setting` holds what follows from method and federation together.
"""

from fedjax_meta.rounds.assemble import as_algorithm, federate

__all__ = ["as_algorithm", "federate"]
