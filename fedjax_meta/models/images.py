"""The image and vector networks of the papers: perceptrons and small convolutional networks."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_meta import checks
from fedjax_meta.layers import FORMS, INITS, BatchNorm, Conv, Dense
from fedjax_meta.models.functional import Criterion
from fedjax_meta.models.linen import from_linen
from fedjax_meta.task import Task, cross_entropy

# All of these are non-decreasing, so they commute with max-pooling: they run on the pooled images only.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "leaky_relu": partial(jax.nn.leaky_relu, negative_slope=0.01),
    "elu": jax.nn.elu,
}
"""Activations by name."""
NORMS = ("before", "after")
"""Where a batch norm stands: before or after the activation (and the pooling)."""


class Network(nn.Module):
    """Convolutions, each with activation and 2x2 max-pool, then dense layers, then a dense head.

    Layers are named `conv1, conv2, ..., fc1, fc2, ..., head`, batch norms `bn1, bn2, ...` in the order of their layers.

    Attributes:
      sample_shape: shape of one input; flattened inputs of the same size are accepted too.
      classes: number of outputs K.
      convs: `(features, kernel size, padding)` of each convolution.
      hidden: widths of the dense layers before the head.
      activation: a key of `ACTIVATIONS`.
      normed: names of the layers that have a batch norm.
      norm: place of the batch norms: `"before"` the activation and the pooling, or `"after"` both.
      momentum: step of the running statistics, see `layers.BatchNorm`.
      start, dtype: see `layers.Dense`.
      form: see `layers.convolution`.
    """

    sample_shape: tuple[int, ...]
    classes: int
    convs: tuple[tuple[int, int, int], ...] = ()
    hidden: tuple[int, ...] = ()
    activation: str = "relu"
    normed: tuple[str, ...] = ()
    norm: str = "after"
    momentum: float = 0.1
    start: str = "torch"
    dtype: DTypeLike | None = None
    form: str | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the dense and convolution layers from input to output, without batch norms."""
        convs = tuple(f"conv{i + 1}" for i in range(len(self.convs)))
        return *convs, *(f"fc{i + 1}" for i in range(len(self.hidden))), "head"

    def setup(self) -> None:
        """Creates the layers, named as in `layers`."""
        checks.one_of("activation", self.activation, ACTIVATIONS)
        checks.one_of("norm", self.norm, NORMS)
        for name in self.normed:
            checks.one_of("normed", name, self.layers[:-1])
        common: dict[str, Any] = {"start": self.start, "dtype": self.dtype}
        for name, (features, size, padding) in zip(self.layers, self.convs, strict=False):
            setattr(self, name, Conv(features, size=size, padding=padding, pool=True, form=self.form, **common))
        for i, features in enumerate(self.hidden, 1):
            setattr(self, f"fc{i}", Dense(features, **common))
        for i in range(len(self.normed)):
            setattr(self, f"bn{i + 1}", BatchNorm(self.momentum))
        self.head = Dense(self.classes, **common)

    def __call__(self, x: jax.Array, *, train: bool = False, weight: jax.Array | None = None) -> jax.Array:
        """Logits `[B, K]` of inputs `[B, *sample_shape]`; `weight [B]` marks the real rows for batch norms."""
        return self.head(self.features(x, train=train, weight=weight))

    def features(self, x: jax.Array, *, train: bool = False, weight: jax.Array | None = None) -> jax.Array:
        """The input of the head, `[B, d]`."""
        if math.prod(x.shape[1:]) != math.prod(self.sample_shape):
            raise ValueError(f"x of shape {x.shape} must be [B, *{self.sample_shape}], or the same flattened")
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


def _network_task(
    sample_shape: tuple[int, ...],
    classes: int,
    *,
    init: str,
    dtype: DTypeLike | None,
    form: str | None = None,
    norm: str = "after",
    convs: tuple[tuple[int, int, int], ...] = (),
    loss: Criterion = cross_entropy,
    **layout: Any,
) -> Task:
    check_outputs(classes, loss)
    if convs and len(sample_shape) != 3:
        raise ValueError(f"image={checks.shown(sample_shape)} must be (height, width, channels)")
    for extent in sample_shape:
        checks.count("image" if convs else "inputs", extent)
    for width in layout.get("hidden", ()):
        checks.count("hidden", width)
    checks.one_of("init", init, INITS)
    checks.one_of("norm", norm, NORMS)
    if form is not None:
        checks.one_of("form", form, FORMS)
    if dtype is not None and not _is_float(dtype):
        raise ValueError(f"dtype={checks.shown(dtype)} must be a floating-point type, e.g. jnp.bfloat16")
    if convs:
        height, width = sample_shape[:2]
        for _, size, padding in convs:
            height, width = ((extent + 2 * padding - size + 1) // 2 for extent in (height, width))
            if height < 1 or width < 1:
                raise ValueError(f"image={sample_shape} is too small for the convolutions and poolings of this network")
    module = Network(sample_shape, classes, convs=convs, start=init, dtype=dtype, form=form, norm=norm, **layout)
    return from_linen(module, sample_shape, layers=module.layers, features="features", head="head", loss=loss)


def check_outputs(classes: Any, loss: Criterion) -> None:
    """Raises `ValueError` for fewer than two outputs of a classifier, or fewer than one of a model with another loss."""
    checks.count("classes", classes, least=2 if loss is cross_entropy else 1)


def _is_float(dtype: Any) -> bool:
    if isinstance(dtype, jax.Array):
        return False
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def _tuple(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)):
        raise ValueError(f"{name}={checks.shown(values)} must be a tuple of sizes; one size too is written in brackets")
    return tuple(values)


def mlp(
    inputs: int = 784,
    hidden: tuple[int, ...] = (100,),
    classes: int = 10,
    *,
    init: str = "torch",
    dtype: DTypeLike | None = None,
    loss: Criterion = cross_entropy,
) -> Task:
    """Multi-layer perceptron with ReLU; by default the MNIST network of FedMeta-Per (Nguyen and Cao), 79,510 parameters.

    Args:
      inputs: size of one sample; images are flattened.
      hidden: widths of the hidden layers `fc1, fc2, ...`.
      classes: outputs K of the `head`.
      init: `"torch"` (weights and biases uniform within ±1/sqrt(fan in); published step sizes assume it) or `"lecun"`.
      dtype: dtype of the matrix products, e.g. `jnp.bfloat16`; parameters stay in full precision.
      loss: see `from_linen`; with another than cross-entropy one output will do.

    Raises:
      ValueError: a size below 1, or an unknown `init` or `dtype`.
    """
    return _network_task((inputs,), classes, hidden=_tuple("hidden", hidden), init=init, dtype=dtype, loss=loss)


def lenet(
    image: tuple[int, int, int] = (32, 32, 3),
    classes: int = 10,
    *,
    init: str = "torch",
    dtype: DTypeLike | None = None,
    form: str | None = None,
    loss: Criterion = cross_entropy,
) -> Task:
    """LeNet: 6 and 16 convolutions of 5x5, dense layers of 120 and 84; the CIFAR-10 network of FedMeta-Per (Nguyen and Cao).

    It has 62,006 parameters; the last 1, 2 and 3 layers have 850, 11,014 and 59,134.

    Args:
      image: height, width and channels of a sample.
      form: form of the convolutions, see `layers.convolution`; `None` for the default of the current backend.
      classes, init, dtype, loss: see `mlp`.
    """
    convs = ((6, 5, 0), (16, 5, 0))
    return _network_task(
        _tuple("image", image), classes, convs=convs, hidden=(120, 84), init=init, dtype=dtype, form=form, loss=loss
    )


def fedpac_cnn(
    image: tuple[int, int, int] = (32, 32, 3),
    classes: int = 10,
    *,
    init: str = "torch",
    dtype: DTypeLike | None = None,
    form: str | None = None,
    loss: Criterion = cross_entropy,
) -> Task:
    """The networks of FedPAC (Xu, Tong and Huang, ICLR 2023), with leaky ReLU and 128 features.

    For colour images (CIFAR-10, CINIC-10): three convolutions, 107,690 parameters. For images of one channel (Fashion-MNIST,
    EMNIST): two convolutions, 117,066 parameters for 10 classes and 123,774 for 62. Arguments as for `lenet`.
    """
    shape = _tuple("image", image)
    convs = ((16, 5, 0), (32, 5, 1), (64, 3, 1))[: 2 if shape[-1:] == (1,) else 3]
    return _network_task(
        shape, classes, convs=convs, hidden=(128,), activation="leaky_relu", init=init, dtype=dtype, form=form, loss=loss
    )


def mtfl_mlp(
    inputs: int = 784,
    classes: int = 10,
    *,
    norm: str = "after",
    init: str = "torch",
    dtype: DTypeLike | None = None,
    loss: Criterion = cross_entropy,
) -> Task:
    """The "2NN" of MTFL (Mills, Hu and Min, arXiv 2007.09236): 784-200-200-10 with a batch norm on the first layer.

    It has 199,610 parameters, 400 of them in the batch norm, and 400 running statistics.

    Args:
      norm: `"after"` the activation, as in the authors' code, or `"before"` it.
      inputs, classes, init, dtype, loss: see `mlp`.
    """
    return _network_task((inputs,), classes, hidden=(200, 200), normed=("fc1",), norm=norm, init=init, dtype=dtype, loss=loss)


def mtfl_cnn(
    image: tuple[int, int, int] = (32, 32, 3),
    classes: int = 10,
    *,
    norm: str = "after",
    init: str = "torch",
    dtype: DTypeLike | None = None,
    form: str | None = None,
    loss: Criterion = cross_entropy,
) -> Task:
    """The CIFAR-10 network of MTFL (Mills, Hu and Min, arXiv 2007.09236): 32 and 64 convolutions of 3x3, a dense layer of 512.

    It has 1,204,874 parameters, 192 of them in the batch norms, and 192 running statistics.

    Args:
      norm: `"after"` activation and pooling, as in the authors' code, or `"before"` both, as in the paper's text.
      image, classes, init, dtype, form, loss: see `lenet`.
    """
    convs = ((32, 3, 0), (64, 3, 0))
    return _network_task(
        _tuple("image", image),
        classes,
        convs=convs,
        hidden=(512,),
        normed=("conv1", "conv2"),
        norm=norm,
        init=init,
        dtype=dtype,
        form=form,
        loss=loss,
    )


def elu_mlp(
    inputs: int = 784,
    classes: int = 10,
    *,
    init: str = "torch",
    dtype: DTypeLike | None = None,
    loss: Criterion = cross_entropy,
) -> Task:
    """The network of Per-FedAvg-Reptile (Xia and Cui 2022): d-80-60-10 with ELU.

    It has 68,270 parameters for MNIST and 251,310 for flattened CIFAR-10 (`inputs=3072`). Arguments as for `mlp`.
    """
    return _network_task((inputs,), classes, hidden=(80, 60), activation="elu", init=init, dtype=dtype, loss=loss)


def logistic(
    inputs: int = 60,
    classes: int = 10,
    *,
    init: str = "torch",
    dtype: DTypeLike | None = None,
    loss: Criterion = cross_entropy,
) -> Task:
    """Multinomial logistic regression; by default the model for synthetic(δ, θ) data, with 610 parameters.

    Arguments as for `mlp`.
    """
    return _network_task((inputs,), classes, init=init, dtype=dtype, loss=loss)
