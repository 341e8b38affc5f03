"""The papers' networks as `Task`s, and the way to make one of any Flax module.

Every layer is written so that a batch of clients is a batch of matrix products: a convolution whose kernel differs from client
to client would become a grouped convolution, which is slow everywhere. `benchmarks/model_forms.py` times the alternatives.
"""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_meta import checks
from fedjax_meta.task import Batch, Key, Task, Variables, cross_entropy

# --------------------------------------------------------------------------------------------------- fast forms, in one place

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


# ------------------------------------------------------------------------------------------------------------------- networks

# All of them never fall, so the largest of a window is the same before and after them and they need run on pooled images only.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "leaky_relu": partial(jax.nn.leaky_relu, negative_slope=0.01),
    "elu": jax.nn.elu,
}
NORMS = ("before", "after")


class Network(nn.Module):
    """Convolutions, each with activation and 2x2 max-pool, then dense layers, then a dense head.

    Layers are called `conv1, conv2, ..., fc1, fc2, ..., head`, batch norms `bn1, bn2, ...` in the order of their layers.

    Attributes:
      sample_shape: shape of one input; flat inputs of that many numbers are taken as well.
      classes: number of outputs K.
      convs: `(features, kernel size, padding)` of each convolution.
      hidden: widths of the dense layers before the head.
      activation: a key of `ACTIVATIONS`.
      normed: names of the layers that have a batch norm.
      norm: `"before"` the activation and the pooling, or `"after"` both.
      start, dtype: see `Dense`.
      form: see `convolution`.
    """

    sample_shape: tuple[int, ...]
    classes: int
    convs: tuple[tuple[int, int, int], ...] = ()
    hidden: tuple[int, ...] = ()
    activation: str = "relu"
    normed: tuple[str, ...] = ()
    norm: str = "after"
    start: str = "torch"
    dtype: Any = None
    form: str | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers with weights from input to output; batch norms are not among them."""
        convs = tuple(f"conv{i + 1}" for i in range(len(self.convs)))
        return *convs, *(f"fc{i + 1}" for i in range(len(self.hidden))), "head"

    def setup(self) -> None:
        """Creates the layers under the names that `layers` lists."""
        common = {"start": self.start, "dtype": self.dtype}
        for name, (features, size, padding) in zip(self.layers, self.convs, strict=False):
            setattr(self, name, Conv(features, size=size, padding=padding, pool=True, form=self.form, **common))
        for i, features in enumerate(self.hidden, 1):
            setattr(self, f"fc{i}", Dense(features, **common))
        for i in range(len(self.normed)):
            setattr(self, f"bn{i + 1}", BatchNorm())
        self.head = Dense(self.classes, **common)

    def __call__(self, x: jax.Array, *, train: bool = False, weight: jax.Array | None = None) -> jax.Array:
        """Logits `[B, K]` of inputs `[B, *sample_shape]`; `weight [B]` tells batch norms which rows are real."""
        return self.head(self.features(x, train=train, weight=weight))

    def features(self, x: jax.Array, *, train: bool = False, weight: jax.Array | None = None) -> jax.Array:
        """The input of the head, `[B, d]`."""
        if math.prod(x.shape[1:]) != math.prod(self.sample_shape):
            raise ValueError(f"x of shape {x.shape} must be [B, *{self.sample_shape}], or flat with as many numbers a row")
        activation = ACTIVATIONS[self.activation]
        h = x.reshape(x.shape[0], *self.sample_shape).astype(jnp.result_type(float))
        if not self.convs:
            h = h.reshape(h.shape[0], -1)
        for name in self.layers[:-1]:
            norm = None
            if name in self.normed:
                norm = partial(getattr(self, f"bn{self.normed.index(name) + 1}"), train=train, weight=weight)
            before, after = (norm, None) if self.norm == "before" else (None, norm)
            layer = getattr(self, name)
            if isinstance(layer, Conv):
                h = layer(h, before)
            else:
                h = layer(h.reshape(h.shape[0], -1))
                h = h if before is None else before(h)
            h = activation(h)
            h = h if after is None else after(h)
        return h.reshape(h.shape[0], -1)


# ---------------------------------------------------------------------------------------------------------------------- tasks


def flax_task(
    module: nn.Module,
    sample_shape: tuple[int, ...],
    *,
    layers: tuple[str, ...] = (),
    features: str | None = None,
    head: str | None = None,
    loss: Callable[[jax.Array, Batch], jax.Array] = cross_entropy,
    sample_dtype: Any = None,
) -> Task:
    """A task of any Flax (linen) module.

    The module's `__call__(x, ...)` gives logits `[B, K]`. What else it takes is read off its signature: a flag called `train`
    or `training` (or `deterministic`, which gets the opposite) and `weight [B]`, 1 for real rows and 0 for padding. A module
    that takes none of them is called with `x` alone. Every collection of variables but `params` is a buffer: it moves in
    training and no gradient reaches it. Dropout finds its key under the name `dropout`.

    Args:
      module: the module, unbound.
      sample_shape: shape of one input.
      layers: names of the layers from input to output as they stand in the variables' paths, for masks such as `"last:2"`.
      features: name of the method `(x, ...) -> [B, d]` that stops before the head; with the same flags as `__call__`.
      head: name of the submodule or method `[B, d] -> [B, K]` that goes on from there.
      loss: `(logits, batch) -> scalar`, over rows with weight only; softmax cross-entropy by default.
      sample_dtype: type of the inputs, JAX's default float if not given.

    Raises:
      ValueError: a layer, method or flag that the module lacks. A module with batch statistics must take `train` and `weight`
        (for `flax.linen.BatchNorm`, as its `mask`), because rows of padding would count in its statistics otherwise.

    Example:
      >>> import flax.linen as nn
      >>> class Small(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return nn.Dense(3, name="head")(nn.relu(nn.Dense(8, name="fc1")(x)))
      >>> task = flax_task(Small(), (4,), layers=("fc1", "head"))
      >>> task.predict(task.init(jax.random.key(0)), jnp.ones((2, 4))).shape
      (2, 3)
    """
    if (features is None) != (head is None):
        raise ValueError(f"features={features!r} and head={head!r} must be given together")
    if features is not None and not callable(getattr(type(module), features, None)):
        raise ValueError(f"features={features!r} is not a method of {type(module).__name__}")
    flags = _flags(type(module).__call__)
    feature_flags = _flags(getattr(type(module), features)) if features else flags
    sample_dtype = sample_dtype or jnp.result_type(float)

    def init(key: Key) -> Variables:
        rngs = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        return flax.core.unfreeze(module.init(rngs, jnp.zeros((1, *sample_shape), sample_dtype), **flags(False, jnp.ones(1))))

    def train_loss(variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
        buffers = [name for name in variables if name != "params"]
        arguments = flags(True, batch.weight)
        logits, moved = module.apply(variables, batch.x, rngs={"dropout": key}, mutable=buffers, **arguments)
        return loss(logits, batch), {**variables, **flax.core.unfreeze(moved)}

    def evaluate(method: Callable[..., Any], flags: Callable[..., dict[str, Any]], variables: Variables, x: Any) -> jax.Array:
        return jnp.asarray(module.apply(variables, x, method=method, **flags(False, None)))

    def trainable(variables: Variables) -> Any:
        return {name: jax.tree.map(lambda _, name=name: name == "params", tree) for name, tree in variables.items()}

    shapes = jax.eval_shape(init, jax.random.key(0))
    named = {str(part.key) for path, _ in jax.tree_util.tree_leaves_with_path(shapes.get("params", {})) for part in path}
    for layer in layers:
        if layer not in named:
            raise ValueError(f"layers={layers} names {layer!r}, but the parameters are called {', '.join(sorted(named))}")
    taken = flags(True, jnp.ones(1))
    if "batch_stats" in shapes and not ("weight" in taken and len(taken) == 2):
        raise ValueError(
            f"module {type(module).__name__} has batch statistics, so its __call__ must take train (or deterministic) and "
            f"weight [B]: rows of padding would count in them otherwise; it takes {', '.join(taken) or 'neither'}"
        )
    return Task(
        init=init,
        loss=train_loss,
        predict=partial(evaluate, type(module).__call__, flags),
        features=partial(evaluate, getattr(type(module), features), feature_flags) if features else None,
        head=partial(evaluate, lambda bound, z: getattr(bound, head)(z), lambda train, weight: {}) if head else None,
        layers=tuple(layers),
        trainable=trainable,
    )


def _flags(method: Callable[..., Any]) -> Callable[[bool, jax.Array | None], dict[str, Any]]:
    """`(train, weight) -> the keyword arguments` of these that a module's method has in its signature."""
    accepted = inspect.signature(method).parameters

    def arguments(train: bool, weight: jax.Array | None) -> dict[str, Any]:
        values = {"train": train, "training": train, "deterministic": not train, "weight": weight}
        return {name: value for name, value in values.items() if name in accepted}

    return arguments


def _network_task(
    sample_shape: tuple[int, ...],
    classes: int,
    *,
    init: str,
    dtype: Any,
    form: str | None = None,
    norm: str = "after",
    convs: tuple[tuple[int, int, int], ...] = (),
    **layout: Any,
) -> Task:
    checks.count("classes", classes, least=2)
    for extent in sample_shape:
        checks.count("image" if convs else "inputs", extent)
    for width in layout.get("hidden", ()):
        checks.count("hidden", width)
    checks.one_of("init", init, INITS)
    checks.one_of("norm", norm, NORMS)
    if form is not None:
        checks.one_of("form", form, FORMS)
    if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise ValueError(f"dtype={dtype!r} must be a floating-point type, e.g. jnp.bfloat16")
    if convs:
        if len(sample_shape) != 3:
            raise ValueError(f"image={sample_shape} must be (height, width, channels)")
        height, width = sample_shape[:2]
        for _, size, padding in convs:
            height, width = ((extent + 2 * padding - size + 1) // 2 for extent in (height, width))
            if height < 1 or width < 1:
                raise ValueError(f"image={sample_shape} is too small for the convolutions and poolings of this network")
    module = Network(sample_shape, classes, convs=convs, start=init, dtype=dtype, form=form, norm=norm, **layout)
    return flax_task(module, sample_shape, layers=module.layers, features="features", head="head")


def mlp(
    inputs: int = 784, hidden: tuple[int, ...] = (100,), classes: int = 10, *, init: str = "torch", dtype: Any = None
) -> Task:
    """Multi-layer perceptron with ReLU; by default the MNIST network of FedMeta-Per (Nguyen and Cao), 79,510 parameters.

    Args:
      inputs: numbers in one sample; images are flattened.
      hidden: widths of the hidden layers `fc1, fc2, ...`.
      classes: outputs K of the `head`.
      init: `"torch"` (uniform within 1/sqrt(fan in), weights and biases; published step sizes assume it) or `"lecun"`.
      dtype: type of the matrix products, e.g. `jnp.bfloat16`; parameters stay in full precision.

    Raises:
      ValueError: a size below 1, or an unknown `init` or `dtype`.
    """
    return _network_task((inputs,), classes, hidden=tuple(hidden), init=init, dtype=dtype)


def lenet(
    image: tuple[int, int, int] = (32, 32, 3),
    classes: int = 10,
    *,
    init: str = "torch",
    dtype: Any = None,
    form: str | None = None,
) -> Task:
    """LeNet, 6 and 16 convolutions of 5x5 and dense layers 120, 84: the CIFAR-10 network of FedMeta-Per (Nguyen and Cao).

    62,006 parameters, of which the last 1, 2 and 3 layers hold 850, 11,014 and 59,134.

    Args:
      image: height, width and channels of a sample.
      form: form of the convolutions, see `convolution`; `None` for the fastest on the backend in use.
      classes, init, dtype: see `mlp`.
    """
    convs = ((6, 5, 0), (16, 5, 0))
    return _network_task(tuple(image), classes, convs=convs, hidden=(120, 84), init=init, dtype=dtype, form=form)


def fedpac_cnn(
    image: tuple[int, int, int] = (32, 32, 3),
    classes: int = 10,
    *,
    init: str = "torch",
    dtype: Any = None,
    form: str | None = None,
) -> Task:
    """The networks of FedPAC (Xu, Tong and Huang, ICLR 2023), leaky ReLU and 128 features.

    Colour images (CIFAR-10, CINIC-10): three convolutions, 107,690 parameters. Images of one channel (Fashion-MNIST, EMNIST):
    two, 117,066 for 10 classes and 123,774 for 62. Arguments as for `lenet`.
    """
    convs = ((16, 5, 0), (32, 5, 1), (64, 3, 1))[: 2 if image[-1] == 1 else 3]
    return _network_task(
        tuple(image), classes, convs=convs, hidden=(128,), activation="leaky_relu", init=init, dtype=dtype, form=form
    )


def mtfl_mlp(inputs: int = 784, classes: int = 10, *, norm: str = "after", init: str = "torch", dtype: Any = None) -> Task:
    """The "2NN" of MTFL (Mills, Hu and Min, arXiv 2007.09236): 784-200-200-10 with a batch norm on the first layer.

    199,610 parameters, 400 of them the batch norm's, and 400 running statistics.

    Args:
      norm: `"after"` the activation, as in the authors' code, or `"before"` it.
      inputs, classes, init, dtype: see `mlp`.
    """
    return _network_task((inputs,), classes, hidden=(200, 200), normed=("fc1",), norm=norm, init=init, dtype=dtype)


def mtfl_cnn(
    image: tuple[int, int, int] = (32, 32, 3),
    classes: int = 10,
    *,
    norm: str = "after",
    init: str = "torch",
    dtype: Any = None,
    form: str | None = None,
) -> Task:
    """The CIFAR-10 network of MTFL (Mills, Hu and Min, arXiv 2007.09236): 32 and 64 convolutions of 3x3, dense 512.

    1,204,874 parameters, 192 of them the batch norms', and 192 running statistics.

    Args:
      norm: `"after"` activation and pooling, as in the authors' code, or `"before"` both, as in the paper's text.
      image, classes, init, dtype, form: see `lenet`.
    """
    convs = ((32, 3, 0), (64, 3, 0))
    return _network_task(
        tuple(image),
        classes,
        convs=convs,
        hidden=(512,),
        normed=("conv1", "conv2"),
        norm=norm,
        init=init,
        dtype=dtype,
        form=form,
    )


def elu_mlp(inputs: int = 784, classes: int = 10, *, init: str = "torch", dtype: Any = None) -> Task:
    """The network of Per-FedAvg-Reptile (Xia and Cui 2022): d-80-60-10 with ELU.

    68,270 parameters for MNIST, 251,310 for flattened CIFAR-10 (`inputs=3072`). Arguments as for `mlp`.
    """
    return _network_task((inputs,), classes, hidden=(80, 60), activation="elu", init=init, dtype=dtype)


def logistic(inputs: int = 60, classes: int = 10, *, init: str = "torch", dtype: Any = None) -> Task:
    """Multinomial logistic regression; with its defaults the model for synthetic(δ, θ) data, 610 parameters.

    Arguments as for `mlp`.
    """
    return _network_task((inputs,), classes, init=init, dtype=dtype)


MODELS: dict[str, Callable[..., Task]] = {
    "mlp": mlp,
    "lenet": lenet,
    "fedpac_cnn": fedpac_cnn,
    "mtfl_mlp": mtfl_mlp,
    "mtfl_cnn": mtfl_cnn,
    "elu_mlp": elu_mlp,
    "logistic": logistic,
}
"""Builders by name, for command lines."""
