"""Quantisation: the numbers of an upload are sent with a few bits each.

Suresh, Yu, Kumar, McMahan: "Distributed mean estimation with limited communication", ICML 2017, arXiv 1611.00429: their
stochastic k-level quantization of each leaf, with k = 2^bits levels from its smallest to its largest number. Differs: an exact 0
stays 0, which may be one level more.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.numerics.units import power_of_two
from fedjax_meta.types import Key, PyTree
from fedjax_meta.uploads.transform import Message, UploadTransform, per_leaf


def quantize(bits: int) -> UploadTransform:
    """Sends each number with `bits` bits, and the smallest and largest number of each leaf in full.

    Args:
      bits: from 1 to 24, the digits of a float32.

    Raises:
      ValueError: bits out of range.
    """
    checks.count("bits", bits)
    checks.between("bits", bits, 1, 24)

    def client(key: Key, upload: PyTree, memory: PyTree, kept: PyTree) -> tuple[PyTree, PyTree]:
        del kept
        return quantized(key, upload, bits), memory

    def message(message: Message, leaf: Any) -> Message:
        if not leaf.size:
            return message  # no numbers, and no range of them
        return message._replace(bits=bits, extra_bits=message.extra_bits + 2 * 8 * leaf.dtype.itemsize)

    return UploadTransform(name="quantize", client=client, message=message, on_grid=True, config={"bits": bits})


def quantized(key: Key, tree: PyTree, bits: int) -> PyTree:
    """The tree as the server receives it after quantisation.

    A number is rounded at random to one of the two nearest of `2^bits` evenly spaced levels between the smallest and the largest
    number of its leaf, such that its expectation is the number itself, up to the rounding of its type. No number leaves the range
    of its leaf, so variances that are sent as values stay positive. Those sent as differences (beside `clip` or `sparsify`, or to
    a rule that compares clients) may not. Zeros stay zeros, so that sparse uploads stay sparse. Integers are sent as they are.

    Args:
      key: consumed.
      tree: any pytree of arrays.
      bits: at least 1.
    """
    steps = 2**bits - 1

    def one(key: Key, leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or not leaf.size:
            return leaf
        # In 32 bits at least: 16 bits cannot tell the place of a number between two of many levels.
        exact = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        # In units of a power of 2, which changes no digit: the width of levels must neither overflow nor be 0.
        unit = power_of_two(jnp.max(jnp.abs(exact)))
        exact = exact / unit
        low, high = jnp.min(exact), jnp.max(exact)
        width = jnp.where(high > low, (high - low) / steps, 1)
        place = (exact - low) / width
        level = jnp.floor(place)
        level = level + (jax.random.uniform(key, leaf.shape, exact.dtype) < place - level)
        return jnp.where(leaf == 0, 0, jnp.clip(low + level * width, low, high) * unit).astype(leaf.dtype)

    return per_leaf(one, key, tree)
