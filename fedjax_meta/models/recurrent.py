"""Recurrent models of sequences: next-character LSTM and GRU networks."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_meta import checks
from fedjax_meta.layers import INITS, Dense, Embed, dense
from fedjax_meta.models import functional
from fedjax_meta.models.linen import from_linen
from fedjax_meta.task import Task, cross_entropy

TOKEN_METRICS = ("token_accuracy", "perplexity")
"""What a model of the next token is measured by."""


CELLS = ("lstm", "gru")
"""Cells of a recurrent layer by name."""


class Recurrent(nn.Module):
    """One recurrent layer from zero states, `[B, T, in]` to `[B, T, hidden]`.

    The products with the inputs of all times are one product; only those with the state are in the loop. Kernels are
    `[gates * hidden, in]`, as in PyTorch, uniform within ±1/sqrt(hidden).

    Attributes:
      hidden: size h of the state.
      cell: `"lstm"` (gates i, f, g, o; one bias, the forget gate's is raised by `forget`) or `"gru"` (gates r, z, n; the reset
        gate scales the product with the state and its bias, as in PyTorch and cuDNN).
      forget: added to the forget gate's initial bias.
    """

    hidden: int
    cell: str = "lstm"
    forget: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """States at all times, `[B, T, hidden]`."""
        checks.one_of("cell", self.cell, CELLS)
        gates, h, real = (4 if self.cell == "lstm" else 3), self.hidden, jnp.result_type(float)
        start = partial(jax.random.uniform, minval=-(h**-0.5), maxval=h**-0.5)
        kernel = self.param("kernel", start, (gates * h, x.shape[-1]), real)
        state_kernel = self.param("state_kernel", start, (gates * h, h), real)
        bias = self.param("bias", self._bias, (gates * h,), real)
        inputs = jnp.moveaxis(dense(x, kernel) + bias[None, None], 1, 0)
        zero = jnp.zeros((x.shape[0], h), inputs.dtype)
        if self.cell == "lstm":
            _, states = lax.scan(partial(_lstm, state_kernel), (zero, zero), inputs)
        else:
            state_bias = self.param("state_bias", start, (h,), real)
            _, states = lax.scan(partial(_gru, state_kernel, state_bias), zero, inputs)
        return jnp.moveaxis(states, 0, 1)

    def _bias(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        bound = self.hidden**-0.5
        bias = jax.random.uniform(key, shape, dtype, -bound, bound)
        return bias.at[self.hidden : 2 * self.hidden].add(self.forget) if self.cell == "lstm" else bias


def _lstm(kernel: jax.Array, carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[Any, jax.Array]:
    h, c = carry
    i, f, g, o = jnp.split(x + dense(h, kernel), 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def _gru(kernel: jax.Array, bias: jax.Array, h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    own_r, own_z, own_n = jnp.split(dense(h, kernel), 3, -1)
    r, z, n = jnp.split(x, 3, -1)
    r, z = jax.nn.sigmoid(r + own_r), jax.nn.sigmoid(z + own_z)
    n = jnp.tanh(n + r * (own_n + bias[None]))
    h = (1 - z) * n + z * h
    return h, h


class CharacterNetwork(nn.Module):
    """Embedding, recurrent layers `rnn1, rnn2, ...` and a dense head over the vocabulary, or over classes of texts.

    Attributes:
      vocabulary: V, number of tokens.
      embedding: size of a token's vector.
      hidden: size of each state.
      depth: number of recurrent layers.
      cell: see `Recurrent`.
      every: whether there are outputs at every time, or at the last alone.
      start: see `layers.Dense`.
      classes: number of outputs; V by default.
    """

    vocabulary: int
    embedding: int = 8
    hidden: int = 256
    depth: int = 2
    cell: str = "lstm"
    every: bool = True
    start: str = "torch"
    classes: int | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers from input to output."""
        return ("embed", *(f"rnn{i + 1}" for i in range(self.depth)), "head")

    def setup(self) -> None:
        """Creates the layers, named as in `layers`."""
        self.embed = Embed(self.vocabulary, self.embedding, param_dtype=jnp.result_type(float))
        for name in self.layers[1:-1]:
            setattr(self, name, Recurrent(self.hidden, self.cell, forget=1.0))
        self.head = Dense(self.classes or self.vocabulary, start=self.start)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits after each token of `x [B, T]`: `[B, T, V]`, or `[B, V]` after the last one alone."""
        return self.head(self.features(x))

    def features(self, x: jax.Array) -> jax.Array:
        """States of the last layer, `[B, T, hidden]`, or the last of them `[B, hidden]`."""
        h = self.embed(x)
        for name in self.layers[1:-1]:
            h = getattr(self, name)(h)
        return h if self.every else h[:, -1]


def _characters(module: CharacterNetwork, length: int, loss: functional.Criterion) -> Task:
    sizes = {"length": length, "embedding": module.embedding, "hidden": module.hidden, "depth": module.depth}
    for name, value in sizes.items():
        checks.count(name, value)
    checks.count("vocabulary", module.vocabulary, least=2)
    if module.classes is not None:
        checks.count("classes", module.classes, least=2)
    checks.flag("every", module.every)
    checks.one_of("init", module.start, INITS)
    return from_linen(
        module,
        (length,),
        layers=module.layers,
        features="features",
        head="head",
        loss=loss,
        metrics=TOKEN_METRICS if module.every else None,
        sample_dtype=jnp.int32,
    )


def char_lstm(
    vocabulary: int = 80,
    length: int = 80,
    *,
    embedding: int = 8,
    hidden: int = 256,
    depth: int = 2,
    every: bool = True,
    classes: int | None = None,
    init: str = "torch",
    loss: functional.Criterion = cross_entropy,
) -> Task:
    """Next-character LSTM; by default two layers of 256 over vectors of 8, the sizes of LEAF and of FedAvg's Shakespeare model.

    LEAF predicts the character after 80 others (`every=False`, vocabulary 80). FedJAX and TensorFlow Federated predict at every
    character (`every=True`, vocabulary 90).

    Args:
      vocabulary: V, number of tokens.
      length: T of the sequences that the task is checked with; it learns from any length.
      embedding, hidden, depth: sizes, see `CharacterNetwork`.
      every: whether to predict at every time, logits `[B, T, V]`, or after the last, `[B, V]`.
      classes: number of outputs where what is predicted is no token, e.g. 2 for the mood of a text; V by default.
      init: initial values of the head, see `models.mlp`.
      loss: `(logits, batch) -> scalar`; softmax cross-entropy by default.

    Raises:
      ValueError: sizes below 1, an unknown `init`.
    """
    return _characters(CharacterNetwork(vocabulary, embedding, hidden, depth, "lstm", every, init, classes), length, loss)


def char_gru(
    vocabulary: int = 80,
    length: int = 80,
    *,
    embedding: int = 8,
    hidden: int = 128,
    depth: int = 1,
    every: bool = True,
    classes: int | None = None,
    init: str = "torch",
    loss: functional.Criterion = cross_entropy,
) -> Task:
    """Next-character GRU; arguments as for `char_lstm`."""
    return _characters(CharacterNetwork(vocabulary, embedding, hidden, depth, "gru", every, init, classes), length, loss)
