"""A 1-D CNN for sensors, and ResNet-18 with group norm."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_meta import checks
from fedjax_meta.layers import INITS, Dense, dense
from fedjax_meta.models import functional
from fedjax_meta.models.images import check_outputs
from fedjax_meta.models.linen import from_linen
from fedjax_meta.task import Task, cross_entropy


class _Strided(nn.Module):
    """Convolution without bias as one product with all windows, which stays a batched product under `vmap` over kernels.

    Attributes:
      features: number of outputs.
      size: extent of the kernel in each direction; as many directions as the input has.
      stride: step of the windows.
      padding: zeros on each side.
      bias: whether to add one.
      start: initial values, `"torch"` or `"lecun"` as in `layers.Dense`, or `"he"`: normal, of variance 2 / fan in.
    """

    features: int
    size: int
    stride: int = 1
    padding: int = 0
    bias: bool = False
    start: str = "he"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, (height,) width, in]` to `[B, (height',) width', features]`."""
        real, spatial = jnp.result_type(float), x.ndim - 2
        shape = (self.features, *(self.size,) * spatial, x.shape[-1])
        fan_in = self.size**spatial * x.shape[-1]
        axes = tuple(range(1, len(shape)))
        starts = {
            "torch": _within(fan_in**-0.5),
            "lecun": nn.initializers.lecun_normal(in_axis=axes, out_axis=0),
            "he": nn.initializers.he_normal(in_axis=axes, out_axis=0),
        }
        kernel = self.param("kernel", starts[self.start], shape, real)
        x = jnp.pad(x, [(0, 0), *[(self.padding, self.padding)] * spatial, (0, 0)])
        for axis in range(1, 1 + spatial):
            x = _windows(x, axis, self.size, self.stride, spatial)
        # [B, positions..., offsets of the last axis, ..., of the first, in]; the kernel has the first axis first.
        flat = jnp.transpose(kernel, (0, *range(spatial, 0, -1), spatial + 1)).reshape(self.features, -1)
        z = dense(x.reshape(*x.shape[: 1 + spatial], -1).astype(flat.dtype), flat)
        if self.bias:
            start = _within(fan_in**-0.5) if self.start == "torch" else nn.initializers.zeros
            z = z + self.param("bias", start, (self.features,), real).reshape((1,) * (z.ndim - 1) + (-1,))
        return z


def _within(bound: float) -> Callable[..., jax.Array]:
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def _windows(x: jax.Array, axis: int, size: int, stride: int, spatial: int) -> jax.Array:
    """Windows along an axis: it becomes that of their positions, and their entries become an axis after the positions."""
    count = (x.shape[axis] - size) // stride + 1
    pieces = [
        lax.slice_in_dim(x, offset, offset + stride * (count - 1) + 1, stride=stride, axis=axis) for offset in range(size)
    ]
    return jnp.stack(pieces, 1 + spatial)


class DenseHead(nn.Module):
    """Dense layers with ReLU in between.

    Attributes:
      widths: of each; the last one is K.
      start: see `layers.Dense`.
    """

    widths: tuple[int, ...]
    start: str = "torch"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits `[B, K]` of features `[B, d]`."""
        for i, width in enumerate(self.widths, 1):
            x = Dense(width, start=self.start, name=f"fc{i}")(jax.nn.relu(x) if i > 1 else x)
        return x


class SensorNetwork(nn.Module):
    """1-D convolutions with ReLU and max-pool of 2, then dense layers, then a head of one or more dense layers.

    Attributes:
      classes: K.
      convs: `(features, kernel size)` of each.
      hidden: widths of the dense layers before the head.
      in_head: widths of the hidden layers of the head.
      start: see `layers.Dense`.
    """

    classes: int
    convs: tuple[tuple[int, int], ...]
    hidden: tuple[int, ...]
    in_head: tuple[int, ...] = ()
    start: str = "torch"

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers from input to output."""
        return (*(f"conv{i + 1}" for i in range(len(self.convs))), *(f"fc{i + 1}" for i in range(len(self.hidden))), "head")

    def setup(self) -> None:
        """Creates the layers, named as in `layers`."""
        for i, (features, size) in enumerate(self.convs, 1):
            setattr(self, f"conv{i}", _Strided(features, size, bias=True, start=self.start))
        for i, features in enumerate(self.hidden, 1):
            setattr(self, f"fc{i}", Dense(features, start=self.start))
        widths = (*self.in_head, self.classes)
        self.head = DenseHead(widths, self.start) if self.in_head else Dense(self.classes, start=self.start)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits `[B, K]` of windows `[B, T, channels]`."""
        return self.head(self.features(x))

    def features(self, x: jax.Array) -> jax.Array:
        """The input of the head, `[B, d]`."""
        h = x.astype(jnp.result_type(float))
        for i in range(len(self.convs)):
            h = getattr(self, f"conv{i + 1}")(h)
            h = h[:, : 2 * (h.shape[1] // 2)]
            h = jax.nn.relu(jnp.maximum(h[:, ::2], h[:, 1::2]))
        h = h.reshape(h.shape[0], -1)
        for i in range(len(self.hidden)):
            h = jax.nn.relu(getattr(self, f"fc{i + 1}")(h))
        return h


def sensor_cnn(
    window: tuple[int, int] = (128, 9),
    classes: int = 6,
    *,
    convs: tuple[tuple[int, int], ...] = ((32, 9), (64, 9)),
    hidden: tuple[int, ...] = (128,),
    head_layers: int = 1,
    init: str = "torch",
    loss: functional.Criterion = cross_entropy,
) -> Task:
    """A 1-D CNN for windows of sensor values; the defaults fit UCI HAR (128 samples of 9 channels, 6 activities).

    Args:
      window: samples in time and channels.
      classes: K.
      convs: outputs and kernel size of each convolution; a max-pool of 2 follows each.
      hidden: widths of the dense layers.
      head_layers: how many of the dense layers, the output included, are the head, whose input is the features.
      init: see `models.mlp`.
      loss: see `from_linen`.

    Raises:
      ValueError: sizes below 1, a head of more layers than there are, or a window that is too short for the convolutions.
    """
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window={checks.shown(window)} must be (samples in time, channels)")
    check_outputs(classes, loss)
    checks.one_of("init", init, INITS)
    length = window[0]
    for extent in window:
        checks.count("window", extent)
    for name, given in (("convs", convs), ("hidden", hidden)):
        if not isinstance(given, (tuple, list)):
            raise ValueError(f"{name}={checks.shown(given)} must be a tuple")
    for pair in convs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"convs={checks.shown(convs)} must have (outputs, kernel size) of each convolution")
    for features, size in convs:
        checks.count("convs", features)
        checks.count("convs", size)
        length = (length - size + 1) // 2
        if length < 1:
            raise ValueError(f"window={tuple(window)} is too short for the convolutions and poolings of this network")
    for width in hidden:
        checks.count("hidden", width)
    checks.count("head_layers", head_layers)
    if head_layers > len(hidden) + 1:
        raise ValueError(f"head_layers={head_layers}, but with the output there are {len(hidden) + 1} dense layers")
    before = len(hidden) + 1 - head_layers
    pairs = tuple((features, size) for features, size in convs)
    module = SensorNetwork(classes, pairs, tuple(hidden[:before]), tuple(hidden[before:]), init)
    return from_linen(module, tuple(window), layers=module.layers, features="features", head="head", loss=loss)


class _Residual(nn.Module):
    features: int
    stride: int
    groups: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, H, W, in]` to `[B, H/stride, W/stride, features]`."""

        def norm(name: str, x: jax.Array) -> jax.Array:
            return nn.GroupNorm(self.groups, name=name, epsilon=1e-5, param_dtype=jnp.result_type(float))(x)

        z = _Strided(self.features, 3, self.stride, 1, name="conv1")(x)
        z = _Strided(self.features, 3, 1, 1, name="conv2")(jax.nn.relu(norm("norm1", z)))
        z = norm("norm2", z)
        if x.shape != z.shape:
            x = norm("norm3", _Strided(self.features, 1, self.stride, name="shortcut")(x))
        return jax.nn.relu(x + z)


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016) for small images: a 3x3 stem without pooling, group norm in place of batch norm.

    Attributes:
      classes: K.
      groups: of each group norm.
      width: channels of the first stage; they double in each of the other three.
    """

    classes: int
    groups: int = 2
    width: int = 64

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers from input to output; a block is one layer."""
        return ("stem", *(f"block{i + 1}" for i in range(8)), "head")

    def setup(self) -> None:
        """Creates the layers."""
        self.stem = _Strided(self.width, 3, 1, 1)
        self.stem_norm = nn.GroupNorm(self.groups, epsilon=1e-5, param_dtype=jnp.result_type(float))
        for i in range(8):
            stride = 2 if i in (2, 4, 6) else 1
            setattr(self, f"block{i + 1}", _Residual(self.width * 2 ** (i // 2), stride, self.groups))
        self.head = Dense(self.classes, start="torch")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits `[B, K]` of images `[B, H, W, channels]`."""
        return self.head(self.features(x))

    def features(self, x: jax.Array) -> jax.Array:
        """The mean over the image of the last stage, `[B, 8 * width]`."""
        h = jax.nn.relu(self.stem_norm(self.stem(x.astype(jnp.result_type(float)))))
        for i in range(8):
            h = getattr(self, f"block{i + 1}")(h)
        return jnp.mean(h, (1, 2))


def resnet18(
    image: tuple[int, int, int] = (32, 32, 3),
    classes: int = 10,
    *,
    groups: int = 2,
    width: int = 64,
    loss: functional.Criterion = cross_entropy,
) -> Task:
    """ResNet-18 with group norm for images such as CIFAR's: 11,173,962 parameters by default.

    Batch statistics of clients with few classes mislead the server's model; group norm has none (Hsieh et al. 2020, arXiv
    1910.00189).

    Args:
      image: height, width and channels.
      classes: K.
      groups: of each group norm; they divide `width`.
      width: channels of the first stage.
      loss: see `from_linen`.

    Raises:
      ValueError: sizes below 1, groups that do not divide the width.
    """
    if not isinstance(image, (tuple, list)) or len(image) != 3:
        raise ValueError(f"image={checks.shown(image)} must be (height, width, channels)")
    for extent in image:
        checks.count("image", extent)
    check_outputs(classes, loss)
    checks.count("groups", groups)
    checks.count("width", width)
    if width % groups:
        raise ValueError(f"groups={groups} must divide width={width}")
    module = ResNet18(classes, groups, width)
    return from_linen(module, tuple(image), layers=module.layers, features="features", head="head", loss=loss)
