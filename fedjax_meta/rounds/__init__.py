"""Puts a method and a federation together: `federate`.

A round (`round`) draws a cohort, lets the engine run the client half (`client`) for each of its clients, sums up what they send,
and gives the sum to the server half (`server`). `setting` holds what follows from method and federation together, and what goes
from one half to the other. What only some federations have stands apart: `stale` (asynchronous rounds), `attacked`, and `ratios`
(other aggregators than the mean). `refusals` and `leaks` refuse what cannot go together.
"""

from fedjax_meta.rounds.assemble import as_algorithm, federate

__all__ = ["as_algorithm", "federate"]
