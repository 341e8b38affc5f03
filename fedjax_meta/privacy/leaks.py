"""Which parts of what leaves a client depend on its samples in another way than through private gradients.

The client rule is traced once, and the dependence on inputs and labels is followed through its operations (`dependence`). It
ends at a private gradient (`samples.private_gradient`), whose noise covers its batch if nothing else that it reads depends on
samples. The number of samples of each client counts as public. Two things are not followed: that rows of a batch are samples, and
not mixtures of them, and that samples do not decide which rows a batch has.
"""

from functools import partial
from typing import Any

from fedjax_meta import dependence
from fedjax_meta.privacy.samples import PRIVATE_GRADIENT


def _covered(equation: Any, given: list[bool]) -> list[bool] | None:
    name = str(equation.params.get("name"))
    if not name.startswith(PRIVATE_GRADIENT):
        return None
    samples = int(name.removeprefix(PRIVATE_GRADIENT))
    return [any(given[samples:])] * len(equation.outvars)


marks_of = partial(dependence.marks_of, rule=_covered)
"""`dependence.marks_of` in which a private gradient does not depend on its batch."""
