"""Checks of arguments. Each raises with one line that names the argument, its value and what is allowed.

Rates may be traced, because a sweep over rates is one vmapped program. A traced value is not known yet, so it passes.
"""

import difflib
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_meta.types import PyTree

LARGEST_COUNT = 2**31 - 1
"""Counts and positions are 32-bit integers on a device."""


MOST_CLASSES = 10**6
"""A label beyond is taken for an id of something else: scores take a matrix of K x K numbers for each client."""


def is_real(dtype: Any) -> bool:
    """Whether a dtype is one of real numbers that JAX has; a bool is no number."""
    return getattr(dtype, "itemsize", 0) <= 8 and bool(np.issubdtype(dtype, np.integer) or jnp.issubdtype(dtype, jnp.floating))


def instance(name: str, value: Any, wanted: type, example: str) -> None:
    """Raises `ValueError` unless `value` is a `wanted`; `example` says how to make one."""
    if not isinstance(value, wanted):
        raise ValueError(f"{name} must be a {wanted.__name__}, e.g. {example}, not {shown(value)}")


def _concrete(value: Any) -> bool:
    return not isinstance(value, jax.core.Tracer)


def shown(value: Any, *, most: int = 80) -> str:
    """A value as one short line for a message, whatever it is.

    Example:
      >>> shown(0.1), shown("fast"), shown(np.zeros((2, 2))), shown(10**5000)
      ('0.1', "'fast'", '[[0. 0.] [0. 0.]]', 'an integer of 16610 bits')
    """
    try:
        if isinstance(value, np.generic):
            value = value.item()
        text = str(value) if isinstance(value, (np.ndarray, jax.Array)) else repr(value)
    # A repr is code of the user's own, and Python refuses to print very large integers.
    except Exception:
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"an object of {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _numbers(value: Any) -> np.ndarray | None:
    """A concrete value as an array of real numbers; `None` when it is none. A bool is no number."""
    try:
        array = np.asarray(value)
    # NumPy and JAX refuse ragged lists, keys and objects by exceptions of several types.
    except Exception:
        return None
    return array if is_real(array.dtype) else None


def _check_numbers(name: str, value: Any, each: bool, holds: Callable[[np.ndarray], Any], wanted: str) -> None:
    """Raises `ValueError` unless `value` is one number, or with `each` an array of numbers, and `holds` is true everywhere."""
    if not each and isinstance(value, (np.ndarray, jax.Array)) and value.ndim:
        raise ValueError(f"{name} must be one number, not an array {_shown(value)}; it must {wanted}")
    if not _concrete(value):
        return
    if not each and isinstance(value, (list, tuple)):
        raise ValueError(f"{name}={shown(value)} must be one number, not a {type(value).__name__}; it must {wanted}")
    numbers = _numbers(value)
    if numbers is None or not np.all(holds(numbers)):
        raise ValueError(f"{name}={shown(value)} must {wanted}{': a number, not text' if isinstance(value, str) else ''}")


def positive(name: str, value: Any, *, each: bool = False) -> None:
    """Raises `ValueError` unless a concrete `value` is finite and above 0.

    Args:
      name: of the argument.
      value: one number; may be traced.
      each: whether `value` may be an array, of which every entry must hold.
    """
    _check_numbers(name, value, each, lambda number: np.isfinite(number) & (number > 0), "be finite and above 0")


def not_negative(name: str, value: Any, *, each: bool = False) -> None:
    """Raises `ValueError` unless a concrete `value` is finite and at least 0; `each` as in `positive`."""
    _check_numbers(name, value, each, lambda number: np.isfinite(number) & (number >= 0), "be finite and at least 0")


def finite(name: str, value: Any, *, each: bool = False) -> None:
    """Raises `ValueError` unless a concrete `value` is a finite number; `each` as in `positive`."""
    _check_numbers(name, value, each, np.isfinite, "be a finite number")


def fraction(name: str, value: Any) -> None:
    """Raises `ValueError` unless a concrete `value` lies strictly between 0 and 1."""
    _check_numbers(name, value, False, lambda number: (number > 0) & (number < 1), "lie strictly between 0 and 1")


def below_one(name: str, *factors: Any) -> None:
    """Raises `ValueError` unless the product of concrete factors, numbers that were checked by themselves, is below 1."""
    if all(_concrete(factor) for factor in factors):
        product = float(np.prod([np.asarray(factor, float) for factor in factors]))
        if not product < 1:
            raise ValueError(f"{name}={product:.6g} must be below 1")


def share(name: str, value: Any) -> None:
    """Raises `ValueError` unless a concrete `value` lies in [0, 1]."""
    _check_numbers(name, value, False, lambda number: (number >= 0) & (number <= 1), "lie between 0 and 1")


def between(name: str, value: Any, least: float, most: float, *, each: bool = False) -> None:
    """Raises `ValueError` unless a concrete `value` lies in [least, most]; `each` as in `positive`."""
    _check_numbers(name, value, each, lambda number: (number >= least) & (number <= most), f"lie in [{least}, {most}]")


def count(name: str, value: Any, *, least: int = 1) -> None:
    """Raises `ValueError` unless `value` is an integer of at least `least` that fits in 32 bits."""
    _not_traced(name, value)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name}={shown(value)} must be an integer of at least {least}{_no_array(value)}")
    if value > LARGEST_COUNT:
        raise ValueError(f"{name}={shown(value)} must be at most {LARGEST_COUNT}")


def seed(name: str, value: Any, *, bits: int = 63, generator: bool = True) -> None:
    """Raises `ValueError` unless `value` is an integer of at least 0 with at most this many bits, or a NumPy generator.

    NumPy's generators take 63 bits, its legacy generator 32. JAX's keys take 32 too, unless `jax_enable_x64` is set: a larger
    seed would have the key of a smaller one. Where 32 bits are asked for, or `generator` is false, a generator is refused.
    """
    _not_traced(name, value)
    generator = generator and bits > 32
    if isinstance(value, np.random.Generator) and generator:
        return
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or not 0 <= value < 2**bits:
        either = " or a NumPy generator" if generator else ""
        raise ValueError(
            f"{name}={shown(value)} must be an integer of at least 0 and below 2**{bits}{either}{_no_array(value)}"
        )


def _no_array(value: Any) -> str:
    """The end of a message: an array of one integer is shown like an integer."""
    return ", not an array" if isinstance(value, (np.ndarray, jax.Array)) else ""


def _not_traced(name: str, value: Any) -> None:
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"{name} decides what a program is, so that it cannot be traced: give a Python integer; in a sweep, leave it out of "
            "the numbers, and give each of its values a sweep of its own"
        )


def word(name: str, value: Any) -> None:
    """Raises `ValueError` unless `value` is text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}={shown(value)} must be a word")


def flag(name: str, value: Any) -> None:
    """Raises `ValueError` unless `value` is `True` or `False`; a word such as "no" would count as true."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}={shown(value)} must be True or False")


def indices(name: str, values: Any, count: int) -> None:
    """Raises `ValueError` unless concrete `values` are integers in `[0, count)`."""
    if not _concrete(values):
        return
    array = _numbers(values)
    integers = array is not None and (np.issubdtype(array.dtype, np.integer) or not array.size)
    if array is None or not integers or (array.size and not 0 <= array.min() <= array.max() < count):
        form = "an integer" if array is not None and array.ndim == 0 else "integers"
        raise ValueError(f"{name}={shown(values)} must be {form} in [0, {count})")


def numeric(name: str, values: Any, *, integers: bool = False) -> np.ndarray:
    """Concrete `values` as one NumPy array of real numbers.

    Raises:
      ValueError: traced values, ragged lists, text, objects, complex numbers, bools; with `integers`, anything but integers.
    """
    if isinstance(values, jax.core.Tracer):
        raise ValueError(
            f"{name} must be known, but is traced: a function that is compiled returns it, and it is read outside"
        )
    array = _numbers(values)
    if array is not None and (not integers or np.issubdtype(array.dtype, np.integer) or not array.size):
        # NumPy turns sums of uint64 and int64 into floats.
        return array.astype(np.int64) if integers and (not array.size or array.dtype.kind == "u") else array
    form = _shown(values) if isinstance(values, (np.ndarray, jax.Array)) else shown(values)
    raise ValueError(f"{name} must be one array of {'integers' if integers else 'real numbers'}, not {form}")


def nearest(value: Any, allowed: Iterable[Any]) -> str:
    """The hint after an unknown name, e.g. " (did you mean 'head'?)"; empty when no allowed name is near.

    Example:
      >>> nearest("fedavgg", ["fedavg", "fedprox"]), nearest("x", ["fedavg"])
      (" (did you mean 'fedavg'?)", '')
    """
    words = {str(word).lower(): word for word in allowed}
    if not isinstance(value, str):
        return ""
    given = value.lower()
    near = difflib.get_close_matches(given, words, 1, 0.7)
    # Short words share few letters in a row when two of them are in another order; the end of a long name may be missing.
    near = near or [word for word in words if sorted(word) == sorted(given) or (len(given) > 3 and word.startswith(given))]
    return f" (did you mean {words[near[0]]!r}?)" if near else ""


def one_of(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raises `ValueError` unless `value` is one of `allowed`; the message has the nearest of them."""
    # Not `value in allowed`: a list cannot be looked up in a dict, and an array equals a word entry by entry.
    if not any(isinstance(value, type(word)) and value == word for word in allowed):
        allowed = list(dict.fromkeys(allowed))
        hint = nearest(value, allowed)
        words = (repr(word) if isinstance(word, str) and not (word and word.isprintable()) else str(word) for word in allowed)
        those = f"allowed are {', '.join(words)}" if allowed else "there is none"
        raise ValueError(f"{name}={shown(value)} is unknown{hint}; {those}")


def function(name: str, value: Any, takes: Sequence[str], example: str) -> None:
    """Raises `ValueError` unless `value` can be called with as many positional arguments as `takes` names.

    A factory that was not called, e.g. `aggregator=trimmed_mean`, takes other arguments than what it makes.

    Args:
      name: of the argument.
      value: what the user gave.
      takes: names of the arguments that it will be called with.
      example: what to write.

    Example:
      >>> function("schedule", lambda rounds: rounds, ("key", "round"), "schedules.given(table)")
      Traceback (most recent call last):
      ...
      ValueError: schedule must be a function (key, round), but <lambda> takes (rounds); write e.g. schedules.given(table)
    """
    wanted = f"must be a function ({', '.join(takes)})"
    if not callable(value):
        raise ValueError(f"{name}={shown(value)} {wanted}; write e.g. {example}")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some built-in functions have none
        if isinstance(value, type):
            raise ValueError(f"{name}={value.__name__} {wanted}; write e.g. {example}") from None
        return
    try:
        signature.bind(*takes)
    except TypeError:
        given = ", ".join(
            f"{p.name}=..." if p.kind is p.KEYWORD_ONLY else str(p.replace(annotation=p.empty, default=p.empty))
            for p in signature.parameters.values()
        )
        called = getattr(value, "__name__", type(value).__name__)
        raise ValueError(f"{name} {wanted}, but {called} takes ({given}); write e.g. {example}") from None


def optimizer_factory(name: str, value: Any) -> None:
    """Raises `ValueError` unless `value` is a function that makes an optimiser from its rate, e.g. `optax.sgd`."""
    wanted = f"{name} must be a factory `rate -> optax.GradientTransformation` such as optax.sgd"
    if isinstance(value, optax.GradientTransformation):
        raise ValueError(f"{wanted}; its rate is an argument of its own, not {name}=optax.sgd(0.1)")
    if not callable(value):
        raise ValueError(f"{wanted}, not {shown(value)}")
    called = getattr(value, "__name__", type(value).__name__)
    try:
        made = value(0.1)
    # The user's own code may raise anything.
    except Exception as error:
        raise ValueError(f"{wanted}, but {called}(0.1) raises {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(made, optax.GradientTransformation):
        raise ValueError(f"{wanted}, but {called}(0.1) gives {shown(made)}")
    gradients_suffice(name, called, made)


def gradients_suffice(name: str, called: str, made: optax.GradientTransformation) -> None:
    """Raises `ValueError` for an optimiser that needs more than gradients and parameters in a step, e.g. a line search.

    Args:
      name: of the argument that it was given as.
      called: what the caller calls the optimiser.
      made: the optimiser.
    """
    leaf = jax.ShapeDtypeStruct((1,), jnp.float32)
    try:
        jax.eval_shape(lambda numbers: made.update(numbers, made.init(numbers), numbers), {"w": leaf})
    # What else a rule needs of its parameters shows with those of the model.
    except Exception as error:
        if isinstance(error, TypeError) and "required keyword-only argument" in str(error):
            needs = " and ".join(f"{word}=" for word in re.findall(r"'(\w+)'", str(error)))
            raise ValueError(
                f"{name}: {called} needs {needs} at each step, such as the value of the loss, which is not given here"
            ) from None
        if isinstance(error, AttributeError) and error.name == "fast":
            raise ValueError(
                f"{name}: {called} needs pairs of fast and slow parameters (optax.LookaheadParams); models have one of each"
            ) from None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type where it has none."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip()[:200] if lines else type(error).__name__


FIGURES = (".png", ".pdf", ".svg")
"""Endings of the files that a figure can be written to."""


def writable(name: str, path: str | os.PathLike, *, endings: Collection[str] = ()) -> None:
    """Makes the folder of a file that will be written; call it before the work whose result goes there.

    Args:
      name: of the argument.
      path: of the file, which is not changed.
      endings: that are allowed, e.g. `FIGURES`; all when empty.

    Raises:
      ValueError: another ending.
      OSError: the file cannot be written.
    """
    path = Path(path)
    if endings:
        one_of(f"the ending of {name}", path.suffix, endings)
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise OSError(f"{name}={shown(str(path), most=200)} cannot be written: {reason}") from None


def arrays(name: str, tree: PyTree) -> None:
    """Raises `ValueError` for a leaf that is no array of numbers, or that holds NaN or infinity; traced leaves pass."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        where, dtype = f"{name}{jax.tree_util.keystr(path)}", getattr(leaf, "dtype", None)
        if isinstance(leaf, (bool, int, float)):
            dtype = np.result_type(leaf)
        if dtype is None or getattr(dtype, "kind", "") in ("O", "S", "U"):
            raise ValueError(f"{where} must be an array of numbers, not {shown(leaf)}")
        # Each where it is: a large model is not copied.
        finite = jnp.isfinite if isinstance(leaf, jax.Array) else np.isfinite
        if _concrete(leaf) and jnp.issubdtype(dtype, jnp.inexact) and not finite(leaf).all():
            raise ValueError(f"{where} holds NaN or infinite values")


def float_type(name: str, dtype: Any) -> None:
    """Raises `ValueError` unless `dtype` names a floating-point type."""
    try:
        fits = jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"{name}={shown(dtype)} must be a floating-point type such as jnp.bfloat16")


def floats(params: Any) -> None:
    """Raises `ValueError` unless all parameters are floating-point."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            where = jax.tree_util.keystr(path) or "the tree"
            raise ValueError(f"parameters must be floating-point to be differentiated, but {where} is {jnp.result_type(leaf)}")


def prng_key(name: str, value: Any) -> None:
    """Raises `ValueError` unless `value` is a typed JAX PRNG key (`jax.random.key`), which may be traced."""
    dtype = getattr(value, "dtype", None)
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        if value.shape:
            raise ValueError(f"{name} must be one JAX PRNG key, not an array of keys {list(value.shape)}")
        return
    if dtype == np.uint32 and value.shape == (2,):
        raise ValueError(f"{name} is a legacy uint32[2] key: use jax.random.key(0) instead of jax.random.PRNGKey(0)")
    form = shown(value) if dtype is None or not hasattr(value, "shape") else _shown(value)
    raise ValueError(f"{name}={form} must be a JAX PRNG key: jax.random.key(0)")


def options(
    function_name: str,
    given: Iterable[str],
    allowed: Collection[str],
    elsewhere: Mapping[str, str],
    *,
    error: type[Exception] = TypeError,
) -> None:
    """Raises an error for a keyword argument that a function does not take.

    Args:
      function_name: the function that the user called.
      given: names of the keyword arguments that the user gave.
      allowed: names of the arguments that the function takes.
      elsewhere: for names of arguments that something else takes, what that is.
      error: its type. Any but `TypeError` is of a name in a file and not of a call, and is written without brackets.

    Example:
      >>> options("fedavg", {"cohort_size": 10}, ["lr", "epochs"], {"cohort_size": "Federation"})
      Traceback (most recent call last):
      TypeError: fedavg() takes no 'cohort_size', which belongs to Federation; allowed are lr, epochs
    """
    for name in given:
        if name in allowed:
            continue
        hint = ""
        if name in elsewhere:
            hint = f", which belongs to {elsewhere[name]}"
        elif near := difflib.get_close_matches(str(name), [*allowed, *elsewhere], 1):
            owner = f", which belongs to {elsewhere[near[0]]}" if near[0] in elsewhere else ""
            hint = f" (did you mean {near[0]!r}{owner}?)"
        called = f"{function_name}()" if error is TypeError else function_name
        raise error(f"{called} takes no {name!r}{hint}; allowed are {', '.join(allowed) or 'none'}")


def mismatch(given: PyTree, wanted: PyTree) -> str | None:
    """Describes the first leaf of `given` that differs from `wanted`; `None` when structure, shapes and types agree.

    A Python number, or a weakly typed array, agrees with any type that can hold it.

    Args:
      given: a pytree of arrays, shapes or Python numbers.
      wanted: likewise. For a mask this is a tree of bools, e.g. `masks.everything_like(shapes)`.

    Example:
      >>> mismatch({"w": np.zeros(3, np.float32)}, {"w": np.zeros((3, 2), np.float32)})
      "['w'] is float32[3], not float32[3, 2]"
      >>> mismatch({}, {"w": np.zeros(3, np.float32)})
      "['w'] is missing"
      >>> mismatch({"head": True}, {"head": {"w": True}})
      "['head']['w'] is missing"
    """

    def by_path(tree: PyTree) -> dict[str, Any]:
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    found, expected = by_path(given), by_path(wanted)
    for path, like in expected.items():
        if path not in found:
            return f"{path or 'the only leaf'} is missing"
        leaf, form, like_form = found[path], _form(found[path]), _form(like)
        fits = getattr(form, "weak_type", False) and jnp.result_type(leaf, like_form.dtype) == like_form.dtype
        if form.shape != like_form.shape or not (fits or form.dtype == like_form.dtype):
            return f"{path or 'the only leaf'} is {_shown(form)}, not {_shown(like_form)}"
    for path in found:
        if path not in expected:
            return f"{path or 'the only leaf'} does not belong there"
    structure: Any = jax.tree.structure(given)
    wanted_structure: Any = jax.tree.structure(wanted)
    return None if structure == wanted_structure else f"it has the structure {structure}, not {wanted_structure}"


def misplaced_leaf(given: PyTree, wanted: PyTree) -> str | None:
    """Describes the first leaf of either tree that the other does not have; `None` when the leaves of both are at the same paths.

    Example:
      >>> misplaced_leaf({"head": True}, {"head": {"w": 1, "b": 2}})
      "it has one value at ['head'], where there are 2 leaves (['head']['b'], ...)"
    """

    def paths(tree: PyTree) -> list[str]:
        return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]

    found, asked = paths(given), paths(wanted)
    for path in found:
        below = [other for other in asked if other.startswith(path) and other != path]
        if path not in asked and below:
            return f"it has one value at {path or 'the root'}, where there are {len(below)} leaves ({below[0]}, ...)"
        if path not in asked:
            return f"it has a value at {path}, where there is no leaf"
    missing = [path for path in asked if path not in found]
    return f"it has none at {missing[0]}" if missing else None


def _form(leaf: Any) -> Any:
    """A leaf's dtype and shape. Computes nothing, so that a check does not start JAX's backend."""
    return leaf if hasattr(leaf, "dtype") else jax.typeof(leaf)


def _shown(form: Any) -> str:
    return f"{form.dtype}{list(form.shape)}"
