"""How well clients adapt: scores by the number of support samples and of adaptation steps."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_meta import checks
from fedjax_meta.algorithm import Algorithm, State
from fedjax_meta.contract import Method
from fedjax_meta.data import FederatedData
from fedjax_meta.evaluation import Evaluation, evaluate
from fedjax_meta.types import Key


class Adapted(NamedTuple):
    """The scores of clients that adapted on so many samples by so many steps.

    Attributes:
      samples: at most this many support samples of each client; `None` for all.
      steps: adaptation steps, as given to the builder; `None` where there is one method only.
      evaluation: of the clients.
    """

    samples: int | None
    steps: int | None
    evaluation: Evaluation


def adaptation(
    method: Method | Algorithm | Callable[[int], Method | Algorithm],
    key: Key,
    state: State,
    data: FederatedData,
    *,
    samples: Sequence[int | None] = (None,),
    steps: Sequence[int] | None = None,
    support: str | None = None,
    query: str | None = None,
    known: bool = False,
    **options: Any,
) -> list[Adapted]:
    """Evaluates clients for every number of support samples and of steps; one program each.

    Args:
      method: what was trained; or, with `steps`, a function that makes it for a number of steps, e.g.
        `lambda steps: fm.fedmeta(task, inner_steps=steps)`. A state fits all that differ in how clients adapt only.
      key, state, data: as in `evaluate`. The same key is used for all.
      samples: numbers of support samples, each client's first ones; all where `None`.
      steps: numbers of adaptation steps.
      support, query: the views that clients adapt and are tested on; "support" and "query" for clients that never took part, and
        "test_support" and "test_query" for known ones, who trained on the former.
      known: as in `evaluate`; by default clients that never took part.
      **options: of `evaluate`, such as `metrics`.

    Raises:
      ValueError: no counts, counts below 1, and as in `evaluate`.
      TypeError: `steps` without a function that takes them, one number in place of several.
    """
    for name, counts in (("samples", samples), ("steps", steps)):
        if counts is not None and not np.iterable(counts):
            raise TypeError(f"{name}={checks.shown(counts)} must be several numbers, e.g. {name}=(1, 5, 10)")
    samples, steps = tuple(samples), None if steps is None else tuple(steps)
    if not samples or steps == ():
        raise ValueError(f"{'samples' if not samples else 'steps'} must hold a number at least, e.g. (1, 5, 10)")
    for count in samples:
        if count is not None:
            checks.count("samples", count)
    is_built = isinstance(method, (Method, Algorithm))
    if is_built == (steps is not None):
        raise TypeError(
            "give steps=(1, 5, ...) together with a function of them, e.g. lambda k: fm.fedmeta(task, inner_steps=k)"
        )
    support = support or ("test_support" if known else "support")
    query = query or ("test_query" if known else "query")
    found = []
    for step in (None,) if steps is None else steps:
        made: Any = method if step is None else method(step)  # type: ignore[operator]
        for count in samples:
            some = data if count is None else data.limited(support, count)
            result = evaluate(made, key, state, some, support=support, query=query, known=known, **options)
            found.append(Adapted(count, step, result))
    return found
