"""A key that is not the run's: noise that can be computed from a seed, which stands in every record of a run, hides nothing."""

import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from fedjax_meta.types import Key, PyTree


def init_secret(key: Key, upload: PyTree) -> jax.Array:
    """64 random bits of the operating system, uint32 `[2]`; an `UploadTransform.init_server`.

    They are drawn when the compiled program runs, so that no program holds them, and are kept in `State.aggregation` alone. A
    checkpoint holds them as long as it exists: it is as secret as the uploads.

    Raises:
      ValueError: several processes, each of which would draw its own.
    """
    del upload
    if jax.process_count() > 1:
        raise ValueError(
            "noise from the operating system's randomness needs a run of one process: with several, give reproducible=True, "
            "which takes it from the run's seed"
        )
    # The key is not used, but a call without arguments is made once for all members of a sweep that train side by side.
    return io_callback(_bits, jax.ShapeDtypeStruct((2,), jnp.uint32), jax.random.key_data(key), ordered=False)


def _bits(key: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    del key
    return np.frombuffer(secrets.token_bytes(8), np.uint32)


def with_secret(key: Key, kept: jax.Array) -> Key:
    """The round's key with the secret folded in: another in every round, and in every member of a sweep."""
    return jax.random.fold_in(jax.random.fold_in(key, kept[0]), kept[1])
