"""Layers whose batch of clients is a batch of matrix products, and the convolution, pooling and product that they are made of.

Under `vmap` over clients, whose kernels differ, XLA's convolution becomes a grouped one, which is slow everywhere;
`benchmarks/model_forms.py` times the alternatives.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

# ------------------------------------------------------------------------------------------- dense product, convolution, pool

FORMS = ("banded", "im2col", "lax")
# On CPU by measurement. On GPU not yet measured: it keeps the form that stays a batched matrix product.
_FORM = {"cpu": "banded", "gpu": "banded"}
# Columns of a banded product: narrower wastes the vector units, wider wastes the products (measured on LeNet's layers on CPU).
_WIDE_ENOUGH = 64


def default_form() -> str:
    """The form of convolution for the backend in use: `benchmarks/model_forms.py` prints the times that it is chosen by."""
    return _FORM.get(jax.default_backend(), "banded")


def _block(width: int, outputs_a_column: int, step: int) -> int:
    """Output columns that one banded product computes: more columns make the product wider and waste more of it on zeros.

    The largest divisor of `width` (and multiple of `step`) that keeps the product within `_WIDE_ENOUGH` columns.
    """
    allowed = [b for b in range(step, width + 1, step) if width % b == 0]
    return max([b for b in allowed if b * outputs_a_column <= _WIDE_ENOUGH], default=allowed[0])


def dense(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x [..., in]` times `kernel [out, in]` transposed: `[..., out]`.

    The kernel is stored as PyTorch stores it, and its gradient is `d.T @ x`.
    """
    return lax.dot_general(x, kernel, (((x.ndim - 1,), (1,)), ((), ())))


def _sliding(x: jax.Array, axis: int, count: int, step: int, size: int) -> jax.Array:
    """`count` windows of `size` entries, one every `step`, along `axis`; that axis becomes two, `[count, size]`.

    Neighbouring windows share entries, so they are put together from steps of the input and never gathered one by one.
    """
    steps = -(-size // step)
    needed = step * (count - 1 + steps)
    if x.shape[axis] < needed:
        x = jnp.pad(x, [(0, needed - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])
    x = lax.slice_in_dim(x, 0, needed, axis=axis)
    x = x.reshape(*x.shape[:axis], count - 1 + steps, step, *x.shape[axis + 1 :])
    pieces = [
        lax.slice_in_dim(lax.slice_in_dim(x, k, k + count, axis=axis), 0, min(step, size - k * step), axis=axis + 1)
        for k in range(steps)
    ]
    return jnp.concatenate(pieces, axis + 1)


def _banded(x: jax.Array, kernel: jax.Array, block: tuple[int, int], offsets: list[tuple[int, int]]) -> jax.Array:
    """Valid convolution, `block` outputs at a time, as one product with a banded matrix: `[B, H/block, W/block, offsets * O]`.

    The matrix holds the kernel once for each output of the block, moved to its place in the block's receptive field, in the
    order of `offsets`; `block = (1, 1)` is im2col.
    """
    outputs, kernel_height, kernel_width, channels = kernel.shape
    height, width = x.shape[1] - kernel_height + 1, x.shape[2] - kernel_width + 1
    rows, columns = height // block[0], width // block[1]
    field = block[0] + kernel_height - 1, block[1] + kernel_width - 1
    matrix = jnp.concatenate(
        [jnp.pad(kernel, ((0, 0), (i, block[0] - 1 - i), (j, block[1] - 1 - j), (0, 0))) for i, j in offsets]
    ).reshape(len(offsets) * outputs, -1)
    fields = _sliding(x, 2, columns, block[1], field[1]).reshape(*x.shape[:2], columns, field[1] * channels)
    last = block[0] * (rows - 1)
    fields = jnp.concatenate(
        [lax.slice_in_dim(fields, row, row + last + 1, stride=block[0], axis=1) for row in range(field[0])], -1
    )
    # In two dimensions, so that the matrix's gradient is one product; over three XLA transposes the cotangent first.
    flat = dense(fields.reshape(-1, fields.shape[-1]), matrix)
    return flat.reshape(*fields.shape[:3], flat.shape[-1])


def _padded(x: jax.Array, padding: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0))) if padding else x


def convolution(x: jax.Array, kernel: jax.Array, *, padding: int = 0, form: str | None = None) -> jax.Array:
    """Convolution of stride 1 (cross-correlation, as networks mean it).

    Args:
      x: images `[B, H, W, channels]`.
      kernel: `[out, kernel height, kernel width, channels]`: like a dense kernel, outputs first.
      padding: rows and columns of zeros on each side.
      form: `"banded"` or `"im2col"`, matrix products and nothing else, also under `vmap` over kernels; `"lax"`, XLA's own
        convolution; `None` for `default_form()`.

    Returns:
      `[B, H + 2 padding - kernel height + 1, W + 2 padding - kernel width + 1, out]`.
    """
    form = form or default_form()
    x = _padded(x, padding)
    if form == "lax":
        dimensions = ("NHWC", "OHWI", "NHWC")
        return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=dimensions)
    height, width = x.shape[1] - kernel.shape[1] + 1, x.shape[2] - kernel.shape[2] + 1
    block = 1 if form == "im2col" else _block(width, kernel.shape[0], 1)
    z = _banded(x, kernel, (1, block), [(0, j) for j in range(block)])
    return z.reshape(x.shape[0], height, width, kernel.shape[0])


def convolution_windows(
    x: jax.Array, kernel: jax.Array, *, padding: int = 0, form: str | None = None, block: int | None = None
) -> jax.Array:
    """`convolution`, laid out for a max-pool of 2x2: `[B, H', groups, 4, W' / groups, out]`.

    `H' x W'` is the pooled image (an odd last row or column is left out, as pooling would), and axis 3 runs over the four
    entries of each pooling window. `pool_windows` finishes it. The banded form computes its outputs in this order, `block`
    columns at a time (an even divisor of 2 W'), so that pooling moves no data.
    """
    form = form or default_form()
    if form != "banded":
        z = convolution(x, kernel, padding=padding, form=form)
        return _windows(z)[:, :, None]
    x = _padded(x, padding)
    outputs = kernel.shape[0]
    height, width = (x.shape[1] - kernel.shape[1] + 1) // 2, (x.shape[2] - kernel.shape[2] + 1) // 2
    x = x[:, : 2 * height + kernel.shape[1] - 1, : 2 * width + kernel.shape[2] - 1]
    block = block or _block(2 * width, 2 * outputs, 2)
    offsets = [(i, 2 * column + j) for i in range(2) for j in range(2) for column in range(block // 2)]
    z = _banded(x, kernel, (2, block), offsets)
    return z.reshape(x.shape[0], height, 2 * width // block, 4, block // 2, outputs)


def _windows(x: jax.Array) -> jax.Array:
    """`[B, H, W, C]` as non-overlapping windows of 2x2: `[B, H // 2, 4, W // 2, C]`."""
    rows, height, width, channels = x.shape[0], x.shape[1] // 2, x.shape[2] // 2, x.shape[3]
    x = x[:, : 2 * height, : 2 * width].reshape(rows, height, 2, width, 2, channels)
    return x.transpose(0, 1, 2, 4, 3, 5).reshape(rows, height, 4, width, channels)


@jax.custom_jvp
def _largest(z: jax.Array) -> jax.Array:
    a, b, c, d = (z[..., k, :] for k in range(4))
    return jnp.maximum(jnp.maximum(a, b), jnp.maximum(c, d))


@_largest.defjvp
def _largest_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # A mask and a sum: linear in the tangent, so its transpose is a masked broadcast; second derivatives cost nothing.
    (z,), (tangent,) = primals, tangents
    largest = _largest(z)
    hit = z == largest[..., None, :]
    taken = hit[..., :1, :]
    chosen = [taken]
    for k in range(1, 4):
        chosen.append(hit[..., k : k + 1, :] & ~taken)
        taken = taken | hit[..., k : k + 1, :]
    mask = jnp.concatenate(chosen, axis=-2)
    return largest, jnp.sum(jnp.where(mask, tangent, 0), axis=-2)


def pool_windows(z: jax.Array) -> jax.Array:
    """Largest of each window: `[B, H', groups, 4, W' / groups, C]` to `[B, H', W', C]`.

    Where several entries are equally large the first of them, row by row, takes the whole gradient.
    """
    rows, height, groups, _, width, channels = z.shape
    return _largest(z.reshape(rows, height, groups, 4, width * channels)).reshape(rows, height, groups * width, channels)


def max_pool(x: jax.Array) -> jax.Array:
    """Max-pool over 2x2 windows that do not overlap: `[B, H, W, C]` to `[B, H // 2, W // 2, C]`.

    An odd last row or column is left out; ties are broken as in `pool_windows`.

    Example:
      >>> import jax.numpy as jnp
      >>> max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1))[0, :, :, 0].tolist()
      [[5.0, 7.0], [13.0, 15.0]]
    """
    return pool_windows(_windows(x)[:, :, None])


# --------------------------------------------------------------------------------------------------------------------- layers


def _uniform_of_fan_in(fan_in: int) -> Callable[..., jax.Array]:
    bound = 1 / math.sqrt(fan_in)
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


INITS = ("torch", "lecun")


def _channels(values: jax.Array, x: jax.Array) -> jax.Array:
    """`values [C]` with the rank of `x [..., C]`."""
    return values.reshape((1,) * (x.ndim - 1) + values.shape)


class _Linear(nn.Module):
    """What a dense layer and a convolution share: a kernel with the outputs first, a bias, how they begin, and the precision.

    Attributes:
      features: number of outputs.
      start: `"torch"`, kernel and bias uniform within 1/sqrt(fan in), or `"lecun"`, kernel truncated normal of variance
        1/(fan in) and bias 0 (Flax's default).
      dtype: type in which the products are computed, e.g. `jnp.bfloat16`; parameters and outputs stay as they are.
    """

    features: int
    start: str = "torch"
    dtype: Any = None

    def _parameters(self, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        uniform = _uniform_of_fan_in(math.prod(shape))
        inputs = tuple(range(1, len(shape) + 1))
        normal = nn.initializers.lecun_normal(in_axis=inputs, out_axis=0)
        kernel, bias = (uniform, uniform) if self.start == "torch" else (normal, nn.initializers.zeros)
        real = jnp.result_type(float)
        return self.param("kernel", kernel, (self.features, *shape), real), self.param("bias", bias, (self.features,), real)

    def _shifted(self, product: jax.Array, bias: jax.Array) -> jax.Array:
        return product.astype(bias.dtype) + _channels(bias, product)

    def _cast(self, x: jax.Array) -> jax.Array:
        return x if self.dtype is None else x.astype(self.dtype)


class Dense(_Linear):
    """Dense layer `[..., in]` to `[..., features]`; kernel `[features, in]`, bias `[features]`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`x [..., in]` to `[..., features]`."""
        kernel, bias = self._parameters((x.shape[-1],))
        return self._shifted(dense(self._cast(x), self._cast(kernel)), bias)


class Conv(_Linear):
    """Convolution of stride 1, with its max-pool of 2x2 where `pool` says so; kernel `[features, height, width, in]`.

    The convolution of a pooled layer computes its outputs in the order in which they are pooled, and adds the bias after it:
    the largest of four sums with the same bias is the sum of the largest.

    Attributes:
      size: height and width of the kernel.
      padding: rows and columns of zeros on each side.
      pool: whether a max-pool of 2x2 follows.
      form: see `convolution`.
    """

    size: int = 3
    padding: int = 0
    pool: bool = False
    form: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, before_pool: Callable[[jax.Array], jax.Array] | None = None) -> jax.Array:
        """`x [B, H, W, in]` to `[B, H', W', features]`; `before_pool` (a batch norm) sees all outputs, channels last."""
        kernel, bias = self._parameters((self.size, self.size, x.shape[-1]))
        x, kernel = self._cast(x), self._cast(kernel)
        convolve = partial(convolution, padding=self.padding, form=self.form)
        windows = partial(convolution_windows, padding=self.padding, form=self.form)
        height, width = (extent + 2 * self.padding - self.size + 1 for extent in x.shape[1:3])
        if before_pool is None:
            z = pool_windows(windows(x, kernel)) if self.pool else convolve(x, kernel)
            return self._shifted(z, bias)
        if self.pool and height % 2 == width % 2 == 0:
            return pool_windows(before_pool(self._shifted(windows(x, kernel), bias)))
        # An odd last row is not pooled, but it does count in a batch norm's statistics.
        z = before_pool(self._shifted(convolve(x, kernel), bias))
        return max_pool(z) if self.pool else z


class BatchNorm(nn.Module):
    """Batch normalisation over all axes but the last (Ioffe and Szegedy 2015), with PyTorch's defaults.

    Rows of weight 0 count neither in the statistics of the batch nor in the running ones, which a batch of padding alone
    leaves as they are. Running statistics (`batch_stats`: `mean`, `var`) move by `momentum` towards those of the batch, the
    variance with the unbiased one. They are a differentiable function of the parameters, so a meta-gradient through them is
    exact.
    """

    momentum: float = 0.1
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, weight: jax.Array | None = None) -> jax.Array:
        """`x [B, ..., C]`, `weight [B]` (all ones by default); in training normalised by the batch, else by what is stored."""
        shape, real = (x.shape[-1],), jnp.result_type(float)
        scale = self.param("scale", nn.initializers.ones, shape, real)
        shift = self.param("bias", nn.initializers.zeros, shape, real)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, shape, real)
        running_var = self.variable("batch_stats", "var", jnp.ones, shape, real)

        def normalised(centred: jax.Array, variance: jax.Array) -> jax.Array:
            return centred * _channels(scale * lax.rsqrt(variance + self.epsilon), x) + _channels(shift, x)

        if not train:
            return normalised(x - _channels(running_mean.value, x), running_var.value)
        rows = jnp.ones(x.shape[0], real) if weight is None else weight.astype(real)
        axes = tuple(range(x.ndim - 1))
        row = rows.reshape(-1, *(1,) * (x.ndim - 1))
        count = jnp.sum(rows) * math.prod(x.shape[1:-1])
        mean = jnp.sum(row * x, axes) / jnp.maximum(count, 1)
        centred = x - _channels(mean, x)
        variance = jnp.sum(row * centred**2, axes) / jnp.maximum(count, 1)
        if self.is_mutable_collection("batch_stats") and not self.is_initializing():
            # One entry has no unbiased variance; it then counts with its biased one, 0.
            unbiased = variance * count / jnp.maximum(count - 1, 1)
            rate = jnp.where(count > 0, self.momentum, 0)
            running_mean.value = running_mean.value + rate * (mean - running_mean.value)
            running_var.value = running_var.value + rate * (unbiased - running_var.value)
        return normalised(centred, variance)
