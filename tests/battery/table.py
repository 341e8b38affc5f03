"""What the rows of the battery are made of, and small parts that they share. Nothing here is compiled."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import fedjax_meta as fm
from tests import problems


class Row(NamedTuple):
    """One bad input of a function.

    Attributes:
      call: `() -> anything`; must raise.
      words: that the message must hold, all of them.
    """

    call: Callable[[], Any]
    words: tuple[str, ...]


class Shell(NamedTuple):
    """One bad input of a command line.

    Attributes:
      program: module under `experiments`, or file under `benchmarks` with a slash before it; "study", "command", "call", "flags"
        and "clients" are `fedjax-meta`.
      arguments: `{own}` is a small data set, `{study}` a study of it, `{tmp}` a folder, `{taken}` a file, `{blocked}` a folder
        that cannot be written.
      words: that the output must hold, all of them.
    """

    program: str
    arguments: tuple[str, ...]
    words: tuple[str, ...]


def rows(function: Callable[..., Any], good: dict[str, Any], bad: list[tuple[Any, ...]]) -> dict[str, Row]:
    """A row for each (option, wrong value, words ...), with right values for the other options."""
    found = {}
    for number, (option, value, *words) in enumerate(bad):
        # Not the value: the representation of a function has an address, and names must be the same in every process.
        name = f"{function.__name__}({option}) {number}: {(words or [option])[0]}"
        found[name] = Row(functools.partial(_called, function, good, option, value), tuple(words or (option,)))
    return found


def _called(function: Callable[..., Any], good: dict[str, Any], option: str, value: Any) -> Any:
    given = {name: made() if isinstance(made, Late) else made for name, made in {**good, option: value}.items()}
    return function(**given)


class Late(NamedTuple):
    """A value that is made when a row runs, not when the table is read."""

    make: Callable[[], Any]

    def __call__(self) -> Any:
        return self.make()


@functools.cache
def algorithm() -> fm.Algorithm:
    return fm.federate(fm.fedavg(problems.task()), fm.Federation(cohort_size=3, devices=1))


@functools.cache
def state() -> fm.State:
    """Zeros in the form of a state, so that nothing has to be compiled."""
    shapes = jax.eval_shape(algorithm().init, jax.random.key(0), problems.data())
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


TASK, DATA, ALGORITHM, STATE = Late(problems.task), Late(problems.data), Late(algorithm), Late(state)
KEY = Late(lambda: jax.random.key(0))
LABELS = np.arange(100) % 4
