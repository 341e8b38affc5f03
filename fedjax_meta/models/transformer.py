"""A small decoder-only transformer."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.layers import Dense, Embed
from fedjax_meta.models import functional
from fedjax_meta.models.linen import from_linen
from fedjax_meta.models.recurrent import TOKEN_METRICS
from fedjax_meta.task import Task, cross_entropy


class Block(nn.Module):
    """Causal self-attention and a network of two layers with GELU, each after a layer norm and added to its input.

    Attributes:
      width: d.
      heads: attention heads; they divide d.
      inner: width of the inner layer.
    """

    width: int
    heads: int
    inner: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, d]` to `[B, T, d]`; a position reads itself and earlier ones."""
        rows, length, width = x.shape

        def norm(name: str, x: jax.Array) -> jax.Array:
            return nn.LayerNorm(name=name, param_dtype=jnp.result_type(float))(x)

        z = norm("norm1", x)
        query, key, value = (
            Dense(width, start="lecun", name=name)(z).reshape(rows, length, self.heads, -1)
            for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(query.shape[-1])
        earlier = jnp.tril(jnp.ones((length, length), bool))
        share = jax.nn.softmax(jnp.where(earlier, scores, -jnp.inf), -1)
        read = jnp.einsum("bhqk,bkhd->bqhd", share, value).reshape(rows, length, width)
        x = x + Dense(width, start="lecun", name="out")(read)
        z = jax.nn.gelu(Dense(self.inner, start="lecun", name="inner1")(norm("norm2", x)))
        return x + Dense(width, start="lecun", name="inner2")(z)


class Transformer(nn.Module):
    """Token and position vectors, blocks `block1, block2, ...`, a layer norm and a dense head.

    Attributes:
      vocabulary: V.
      longest: the largest T.
      width, heads, depth: d, attention heads, number of blocks.
    """

    vocabulary: int
    longest: int
    width: int
    heads: int
    depth: int

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers from input to output."""
        return ("embed", *(f"block{i + 1}" for i in range(self.depth)), "head")

    def setup(self) -> None:
        """Creates the layers."""
        self.embed = Embed(self.vocabulary, self.width, param_dtype=jnp.result_type(float))
        self.position = self.param(
            "position", nn.initializers.normal(0.02), (self.longest, self.width), jnp.result_type(float)
        )
        for name in self.layers[1:-1]:
            setattr(self, name, Block(self.width, self.heads, 4 * self.width))
        self.norm = nn.LayerNorm(param_dtype=jnp.result_type(float))
        self.head = Dense(self.vocabulary, start="lecun")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of the next tokens of `x [B, T]`: `[B, T, V]`."""
        return self.head(self.features(x))

    def features(self, x: jax.Array) -> jax.Array:
        """The inputs of the head, `[B, T, d]`."""
        if x.shape[1] > self.longest:
            raise ValueError(f"x of shape {x.shape} is longer than the {self.longest} positions of this transformer")
        h = self.embed(x) + self.position[None, : x.shape[1]]
        for name in self.layers[1:-1]:
            h = getattr(self, name)(h)
        return self.norm(h)


def transformer(
    vocabulary: int = 80,
    length: int = 80,
    *,
    width: int = 128,
    heads: int = 4,
    depth: int = 2,
    loss: functional.Criterion = cross_entropy,
) -> Task:
    """A decoder-only transformer with layer norms before its parts, learned positions and GELU, after GPT-2; no dropout.

    Layer norms add 1e-6 to the variance (Flax's default), where GPT-2 adds 1e-5.

    Args:
      vocabulary: V, number of tokens.
      length: the largest T.
      width: d.
      heads: attention heads, a divisor of `width`.
      depth: number of blocks, each with 12 d^2 + 13 d parameters.
      loss: `(logits [B, T, V], batch) -> scalar`; softmax cross-entropy by default.

    Raises:
      ValueError: sizes below 1, heads that do not divide the width.
    """
    for name, value in (("length", length), ("width", width), ("heads", heads), ("depth", depth)):
        checks.count(name, value)
    checks.count("vocabulary", vocabulary, least=2)
    if width % heads:
        raise ValueError(f"heads={heads} must divide width={width}")
    module = Transformer(vocabulary, length, width, heads, depth)
    return from_linen(
        module,
        (length,),
        layers=module.layers,
        features="features",
        head="head",
        loss=loss,
        metrics=TOKEN_METRICS,
        sample_dtype=jnp.int32,
    )
