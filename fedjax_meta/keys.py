"""Random keys by name.

Every purpose has a key of its own, folded from a tag. A draw therefore depends on its purpose alone and never on which other
options are on: switching quantisation, participation, evaluation or logging on leaves every other draw as it was, so that two
runs that differ in one option are paired.
"""

import zlib
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.types import Key


def is_key(leaf: Any) -> bool:
    """Whether an array, or the shape of one, is of typed PRNG keys."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def tagged(key: Key, tag: str, *numbers: Any) -> Key:
    """The key of one purpose.

    Args:
      key: where the purposes share a source; `fold_in` does not consume it.
      tag: the purpose, e.g. "cohort".
      numbers: folded in after the tag, e.g. a client's id or a round; may be traced.

    Example:
      >>> a, b = (tagged(jax.random.key(0), tag) for tag in ("cohort", "clients"))
      >>> bool((jax.random.key_data(a) == jax.random.key_data(b)).all())
      False
    """
    checks.prng_key("key", key)
    key = jax.random.fold_in(key, zlib.crc32(tag.encode()))
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key
