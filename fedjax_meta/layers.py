"""Layers that become batched matrix products under `vmap` over clients, and the operations that they use.

Under `vmap` over clients with different kernels, XLA's convolution becomes a grouped convolution, which is slow on every
backend. `benchmarks/model_forms.py` times the alternatives.
"""

import math
from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from fedjax_meta import checks, loops, runtime
from fedjax_meta.numerics.axes import leading

# ------------------------------------------------------------------------------------------- dense product, convolution, pool

FORMS = ("banded", "im2col", "lax")
"""Ways to compute a convolution, with the same result."""
# Measured on a CPU and on an H200, where the gradients of 50 clients of a LeNet took 1.1, 1.7 and 7.1 ms in these forms.
_FORM = {"cpu": "banded", "gpu": "banded"}
# Maximum columns of a banded product: fewer leave vector units idle, more multiply zeros (measured on LeNet's layers on CPU).
_WIDE_ENOUGH = 64

# A GPU computes each tile of a product's result in a block of threads. Where a kernel's gradient has fewer tiles than this, all
# clients together, its rows are added up in several pieces (an H200 has 132 processors and runs two blocks on each).
_BLOCKS, _TILE, _PIECES = 264, 64, 8
_WARP = 32
"""Threads of a GPU that move together: they read and write so many neighbouring numbers at once."""


def default_form() -> str:
    """The default form of convolution for the platform, chosen by the times of `benchmarks/model_forms.py`."""
    return _FORM.get(runtime.platform(), "banded")


def _block(width: int, outputs_a_column: int, step: int) -> int:
    """Output columns per banded product. More columns make the product wider, and more of it is multiplication by zero.

    Returns the largest divisor of `width` that is a multiple of `step` and keeps the product within `_WIDE_ENOUGH` columns.
    """
    allowed = [b for b in range(step, width + 1, step) if width % b == 0]
    return max([b for b in allowed if b * outputs_a_column <= _WIDE_ENOUGH], default=allowed[0])


def dense(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x [..., in]` times `kernel [out, in]` transposed: `[..., out]`.

    The kernel has PyTorch's layout. For an output cotangent `d`, its gradient is `d.T @ x`.
    """
    return lax.dot_general(x, kernel, (((x.ndim - 1,), (1,)), ((), ())))


def _sliding(x: jax.Array, axis: int, count: int, step: int, size: int) -> jax.Array:
    """`count` windows of `size` entries, one every `step`, along `axis`; that axis becomes two, `[count, size]`.

    Neighbouring windows overlap, so they are concatenated from blocks of `step` entries, without a gather.
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

    The matrix contains one copy of the kernel per output of the block, shifted to its position in the block's receptive field,
    in the order of `offsets`; `block = (1, 1)` is im2col.
    """
    outputs, kernel_height, kernel_width, _ = kernel.shape
    height, width = x.shape[1] - kernel_height + 1, x.shape[2] - kernel_width + 1
    rows, columns = height // block[0], width // block[1]
    field = block[0] + kernel_height - 1, block[1] + kernel_width - 1
    matrix = jnp.concatenate(
        [jnp.pad(kernel, ((0, 0), (i, block[0] - 1 - i), (j, block[1] - 1 - j), (0, 0))) for i, j in offsets]
    ).reshape(len(offsets) * outputs, -1)
    fields = _fields(x, block, field, (rows, columns))
    # Flatten to two dimensions: the gradient of the matrix is then one product. With more, XLA transposes the cotangent first.
    flat = fields.reshape(-1, fields.shape[-1])
    pieces = _pieces(len(flat), matrix.shape)
    if pieces == 1:
        return dense(flat, matrix).reshape(*fields.shape[:3], -1)
    many = jnp.broadcast_to(matrix, (pieces, *matrix.shape))
    product = lax.dot_general(flat.reshape(pieces, -1, flat.shape[-1]), many, (((2,), (2,)), ((0,), (0,))))
    return product.reshape(*fields.shape[:3], -1)


def _fields(x: jax.Array, block: tuple[int, int], field: tuple[int, int], count: tuple[int, int]) -> jax.Array:
    """The `count` receptive fields of `x [B, H, W, C]`, one every `block`: `[B, rows, columns, field height * width * C]`."""
    if runtime.platform() == "gpu":
        # Rows first: what remains is a transposition of whole rows of a field, one kernel.
        fields = _sliding(_sliding(x, 1, count[0], block[0], field[0]), 3, count[1], block[1], field[1])
        return fields.transpose(0, 1, 3, 2, 4, 5).reshape(len(x), *count, -1)
    fields = _sliding(x, 2, count[1], block[1], field[1]).reshape(*x.shape[:2], count[1], field[1] * x.shape[3])
    last = block[0] * (count[0] - 1)
    pieces = [lax.slice_in_dim(fields, row, row + last + 1, stride=block[0], axis=1) for row in range(field[0])]
    return jnp.concatenate(pieces, -1)


def _pieces(rows: int, matrix: tuple[int, ...]) -> int:
    """In how many pieces the gradient of a matrix `[outputs, inputs]` adds up so many rows."""
    if runtime.platform() != "gpu" or loops.explicit_mesh():  # where JAX refuses to divide an axis that is sharded
        return 1
    tiles = (loops.lanes() or 1) * math.prod(-(-extent // _TILE) for extent in matrix)
    return max(n for n in range(1, min(_PIECES, -(-_BLOCKS // tiles)) + 1) if rows % n == 0)


def _form(form: str | None) -> str:
    if form is None:
        return default_form()
    checks.one_of("form", form, FORMS)
    return form


def _must_fit(x: jax.Array, kernel: jax.Array, least: int) -> None:
    """Raises unless the result of a convolution has at least so many rows and columns."""
    if min(x.shape[1] - kernel.shape[1], x.shape[2] - kernel.shape[2]) + 1 < least:
        pooled = " and a 2x2 pooling" if least > 1 else ""
        raise ValueError(
            f"a kernel of {kernel.shape[1]}x{kernel.shape[2]}{pooled} does not fit into {x.shape[1]}x{x.shape[2]} pixels"
        )


def _padded(x: jax.Array, padding: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0))) if padding else x


def convolution(x: jax.Array, kernel: jax.Array, *, padding: int = 0, form: str | None = None) -> jax.Array:
    """Convolution of stride 1 (cross-correlation, as is usual for networks).

    Args:
      x: images `[B, H, W, channels]`.
      kernel: `[out, kernel height, kernel width, channels]`, outputs first as in a dense kernel.
      padding: rows and columns of zeros on each side.
      form: `"banded"` or `"im2col"`, which use matrix products only, also under `vmap` over kernels; `"lax"`, XLA's own
        convolution; `None` for `default_form()`.

    Returns:
      `[B, H + 2 padding - kernel height + 1, W + 2 padding - kernel width + 1, out]`.

    Raises:
      ValueError: an unknown form, a kernel that is larger than the padded image.
    """
    form, x = _form(form), _padded(x, padding)
    _must_fit(x, kernel, 1)
    if form == "lax":
        dimensions = ("NHWC", "OHWI", "NHWC")
        return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=dimensions)
    height, width = x.shape[1] - kernel.shape[1] + 1, x.shape[2] - kernel.shape[2] + 1
    block = 1 if form == "im2col" else _block(width, kernel.shape[0], 1)
    z = _banded(x, kernel, (1, block), [(0, j) for j in range(block)])
    # In two steps, which JAX takes for images that are sharded over an explicit mesh.
    return z.reshape(*z.shape[:3], block, kernel.shape[0]).reshape(x.shape[0], height, width, kernel.shape[0])


def convolution_windows(
    x: jax.Array, kernel: jax.Array, *, padding: int = 0, form: str | None = None, block: int | None = None
) -> jax.Array:
    """`convolution` in the layout of a 2x2 max-pool: `[B, H', groups, 4, W' / groups, out]`.

    `H' x W'` is the size of the pooled image (an odd last row or column is dropped, as in pooling), and axis 3 runs over the
    four entries of each pooling window. `pool_windows` then computes the maximum. The banded form computes its outputs in this
    order, `block` columns at a time (an even divisor of 2 W'), so that pooling moves no data.

    Raises:
      ValueError: an unknown form, a result smaller than a pooling window.
    """
    form, x = _form(form), _padded(x, padding)
    _must_fit(x, kernel, 2)
    if form != "banded":
        return _windows(convolution(x, kernel, form=form))[:, :, None]
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
    # A mask and a sum: linear in the tangent, so its transpose is a masked broadcast, and second derivatives cost nothing.
    (z,), (tangent,) = primals, tangents
    a, b, c, d = (z[..., k, :] for k in range(4))
    # Selected, not `maximum`, which takes care of NaN in an operation more: where z is NaN, so is the loss.
    left, right = a >= b, c >= d
    first = jnp.where(left, a, b) >= jnp.where(right, c, d)
    mask = jnp.stack([first & left, first & ~left, ~first & right, ~(first | right)], axis=-2)
    return _largest(z), jnp.sum(jnp.where(mask, tangent, 0), axis=-2)


def pool_windows(z: jax.Array) -> jax.Array:
    """Maximum of each window: `[B, H', groups, 4, W' / groups, C]` to `[B, H', W', C]`.

    If several entries are equal to the maximum, the first of them in row-major order gets the whole gradient.
    """
    rows, height, groups, _, width, channels = z.shape
    return _largest(z.reshape(rows, height, groups, 4, width * channels)).reshape(rows, height, groups * width, channels)


def max_pool(x: jax.Array) -> jax.Array:
    """Max-pool over non-overlapping 2x2 windows: `[B, H, W, C]` to `[B, H // 2, W // 2, C]`.

    An odd last row or column is dropped; ties are broken as in `pool_windows`.

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
"""Initial distributions of kernels and biases."""


def _channels(values: jax.Array, x: jax.Array) -> jax.Array:
    """`values [C]` with the rank of `x [..., C]`."""
    return values.reshape((1,) * (x.ndim - 1) + values.shape)


class _Linear(nn.Module):
    """Shared base of dense layer and convolution: kernel (outputs first), bias, initial values and precision.

    Attributes:
      features: number of outputs.
      start: initial values. `"torch"`: kernel and bias uniform within ±1/sqrt(fan in). `"lecun"`: kernel truncated normal of
        variance 1/(fan in), bias 0 (Flax's default).
      dtype: of the products, e.g. `jnp.bfloat16`; that of the parameters when not given. Parameters and outputs keep theirs.
    """

    features: int
    start: str = "torch"
    dtype: DTypeLike | None = None

    def _parameters(self, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        checks.one_of("start", self.start, INITS)
        uniform = _uniform_of_fan_in(math.prod(shape))
        inputs = tuple(range(1, len(shape) + 1))
        normal = nn.initializers.lecun_normal(in_axis=inputs, out_axis=0)
        kernel, bias = (uniform, uniform) if self.start == "torch" else (normal, nn.initializers.zeros)
        real = jnp.result_type(float)
        return self.param("kernel", kernel, (self.features, *shape), real), self.param("bias", bias, (self.features,), real)

    def _shifted(self, product: jax.Array, bias: jax.Array) -> jax.Array:
        product = product.astype(bias.dtype)
        if product.ndim < 3 or len(bias) >= _WARP or runtime.platform() != "gpu":
            return product + _channels(bias, product)
        # XLA would transpose all outputs to sum over the positions of few channels. Behind the barrier it sums over images first.
        numbers = product.reshape(len(product), math.prod(product.shape[1:]))
        return (numbers + lax.optimization_barrier(jnp.tile(bias, numbers.shape[1] // len(bias)))).reshape(product.shape)

    def _cast(self, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        dtype = kernel.dtype if self.dtype is None else self.dtype
        return x.astype(dtype), kernel.astype(dtype)


class Dense(_Linear):
    """Dense layer `[..., in]` to `[..., features]`; kernel `[features, in]`, bias `[features]`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`x [..., in]` to `[..., features]`."""
        kernel, bias = self._parameters((x.shape[-1],))
        return self._shifted(dense(*self._cast(x, kernel)), bias)


class Conv(_Linear):
    """Convolution of stride 1, with a 2x2 max-pool if `pool`; kernel `[features, height, width, in]`.

    With pooling, the convolution computes its outputs in the order of the pooling windows, and the bias is added after the
    pooling: adding the same bias to four numbers commutes with their maximum.

    Attributes:
      size: height and width of the kernel.
      padding: rows and columns of zeros on each side.
      pool: whether a 2x2 max-pool follows.
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
        x, kernel = self._cast(x, kernel)
        convolve = partial(convolution, padding=self.padding, form=self.form)
        windows = partial(convolution_windows, padding=self.padding, form=self.form)
        height, width = (extent + 2 * self.padding - self.size + 1 for extent in x.shape[1:3])
        if before_pool is None:
            z = pool_windows(windows(x, kernel)) if self.pool else convolve(x, kernel)
            return self._shifted(z, bias)
        if self.pool and height % 2 == width % 2 == 0:
            return pool_windows(before_pool(self._shifted(windows(x, kernel), bias)))
        # An odd last row is not pooled, but it does count in the statistics of the batch norm.
        z = before_pool(self._shifted(convolve(x, kernel), bias))
        return max_pool(z) if self.pool else z


_VOCABULARY = 1024
"""Up to so many tokens, a product with one-hot vectors costs little beside a model's other products."""


class Embed(nn.Embed):
    """`flax.linen.Embed`, the vectors of tokens; on an accelerator a product with one-hot vectors where there are few tokens.

    Rows are picked by a gather, whose gradient is a scatter. A GPU adds up what it scatters in any order, unless it sorts first.
    """

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """The vectors `[..., features]` of tokens `[...]`; NaN for a token that is none."""
        if runtime.on_cpu() or self.num_embeddings > _VOCABULARY:
            # A gather counts negative places from the end, and Flax takes every token for that of a table of one.
            known = (inputs >= 0) & (inputs < self.num_embeddings)
            return jnp.where(known[..., None], super().__call__(inputs), jnp.nan)
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers, not {inputs.dtype}")
        chosen = jax.nn.one_hot(inputs, self.num_embeddings, dtype=self.embedding.dtype)
        found = jnp.matmul(chosen, self.embedding, precision="highest")
        return jnp.where(((inputs >= 0) & (inputs < self.num_embeddings))[..., None], found, jnp.nan)


class BatchNorm(nn.Module):
    """Batch normalisation over all axes but the last (Ioffe and Szegedy 2015), with PyTorch's defaults.

    Rows of weight 0, which must be finite, count neither in the batch statistics nor in the running statistics, and a batch of
    padding alone does not change the latter. Running statistics (`batch_stats`: `mean`, `var`) move by `momentum` towards those
    of the batch, the variance towards the unbiased one. They are a differentiable function of the parameters, so a meta-gradient
    through them is exact.

    Attributes:
      momentum: fraction by which the running statistics move per batch.
      epsilon: added to the variance.
    """

    momentum: float = 0.1
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, weight: jax.Array | None = None) -> jax.Array:
        """Normalises `x [B, ..., C]` by the batch if `train`, else by running statistics; `weight [B]` defaults to ones."""
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
        row = leading(rows, x)
        count = jnp.sum(rows) * math.prod(x.shape[1:-1])
        mean = jnp.sum(row * x, axes) / jnp.maximum(count, 1)
        centred = x - _channels(mean, x)
        variance = jnp.sum(row * centred**2, axes) / jnp.maximum(count, 1)
        if self.is_mutable_collection("batch_stats") and not self.is_initializing():
            # A single entry has no unbiased variance; its biased variance, 0, is used.
            unbiased = variance * count / jnp.maximum(count - 1, 1)
            rate = jnp.where(count > 0, self.momentum, 0)
            running_mean.value = running_mean.value + rate * (mean - running_mean.value)
            running_var.value = running_var.value + rate * (unbiased - running_var.value)
        return normalised(centred, variance)
