"""Sparsification: only the largest numbers of an upload are sent, and the rest is added to the client's next upload.

Stich, Cordonnier, Jaggi: "Sparsified SGD with memory", NeurIPS 2018, arXiv 1809.07599, top-k with error feedback, leaf by leaf.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.types import Key, PyTree
from fedjax_meta.uploads.transform import Message, UploadTransform


def sparsify(share: float, *, feedback: bool = True) -> UploadTransform:
    """Sends the `share` of each leaf that is largest in magnitude, with its indices.

    With it, clients send by how much the model moved instead of its values.

    Args:
      share: of the numbers of each leaf, in (0, 1]; at least one number of a leaf is sent.
      feedback: whether a client keeps what it left out, or all of an upload that was lost, and adds it to its next upload. It
        takes memory for one upload a client. Only increments are added up: the next value of a buffer, of a personal leaf that is
        averaged or of a renewed statistic contains what was left out of the last one.

    Raises:
      ValueError: a share outside (0, 1].
    """
    checks.share("share", share)
    checks.positive("share", share)

    def client(key: Key, upload: PyTree, memory: PyTree, at_server: PyTree) -> tuple[PyTree, PyTree]:
        del key, at_server
        if not feedback:
            return jax.tree.map(lambda leaf: _largest(leaf, kept(leaf.size, share)), upload), memory
        whole = jax.tree.map(jnp.add, upload, memory)
        sent = jax.tree.map(lambda leaf: _largest(leaf, kept(leaf.size, share)), whole)
        left = jax.tree.map(jnp.subtract, whole, sent)
        return sent, left

    def lost(upload: PyTree, memory: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, upload, memory) if feedback else memory

    def init_memory(upload: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), upload) if feedback else ()

    def message(message: Message, leaf: Any) -> Message:
        del leaf
        count = kept(message.numbers, share)
        # All of a leaf needs no indices.
        index_bits = math.ceil(math.log2(message.numbers)) if count < message.numbers else 0
        return message._replace(numbers=count, extra_bits=message.extra_bits + count * index_bits)

    return UploadTransform(
        name="sparsify",
        client=client,
        lost=lost,
        init_memory=init_memory,
        message=message,
        has_feedback=feedback,
        leaves_out=True,
        sends_differences=True,
        config={"share": share, "feedback": feedback},
    )


def kept(size: int, share: float) -> int:
    """How many numbers of a leaf are sent.

    Example:
      >>> kept(100, 0.29), kept(3, 0.01)
      (29, 1)
    """
    return min(size, max(1, round(size * share))) if size else 0


def _largest(leaf: jax.Array, count: int) -> jax.Array:
    if count == leaf.size:
        return leaf
    flat = leaf.reshape(-1)
    _, index = jax.lax.top_k(jnp.abs(flat), count)
    return jnp.zeros_like(flat).at[index].set(flat[index], unique_indices=True).reshape(leaf.shape)
