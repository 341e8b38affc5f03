"""The networks of the papers as `Task`s, and `flax_task`, which makes a `Task` from any Flax module."""

import inspect
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_meta import checks
from fedjax_meta.layers import FORMS, INITS, BatchNorm, Conv, Dense
from fedjax_meta.task import Batch, LogitsLoss, Task, check_layers, cross_entropy
from fedjax_meta.types import Key, Mask, Params, PyTree, Variables

# ------------------------------------------------------------------------------------------------------------------- networks

# All of these are non-decreasing, so they commute with max-pooling: they run on the pooled images only.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "leaky_relu": partial(jax.nn.leaky_relu, negative_slope=0.01),
    "elu": jax.nn.elu,
}
NORMS = ("before", "after")


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


# ---------------------------------------------------------------------------------------------------------------------- tasks


def flax_task(
    module: nn.Module,
    sample_shape: tuple[int, ...],
    *,
    layers: tuple[str, ...] = (),
    features: str | None = None,
    head: str | None = None,
    loss: Callable[[jax.Array, Batch], jax.Array] = cross_entropy,
    sample_dtype: DTypeLike | None = None,
) -> Task:
    """A task from any Flax (linen) module.

    The module's `__call__(x, ...)` returns logits `[B, K]`. Its other arguments are recognised by name: a flag `train` or
    `training` (or `deterministic`, which gets the opposite value), and `weight [B]`, 1 for real rows and 0 for padding. A
    module with none of them is called with `x` alone. Every variable collection except `params` is a buffer: training updates
    it, and no gradient reaches it. Dropout gets its key under the name `dropout`.

    Args:
      module: the module, unbound.
      sample_shape: shape of one input.
      layers: layer names from input to output, as they appear in the paths of the variables, for masks such as `"last:2"`.
      features: name of the method `(x, ...) -> [B, d]` that stops before the head; it takes the same flags as `__call__`.
      head: name of the submodule or method `[B, d] -> [B, K]` that continues from there.
      loss: `(logits, batch) -> scalar`, over rows with weight only; softmax cross-entropy by default.
      sample_dtype: dtype of the inputs; JAX's default float type if `None`.

    Raises:
      ValueError: the module lacks a given layer, method or flag. A module with batch statistics must take `train` and `weight`
        (for `flax.linen.BatchNorm`, as its `mask`), because rows of padding would enter its statistics otherwise.

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
    checks.instance("module", module, nn.Module, "models.Network((784,), 10)")
    for extent in _tuple("sample_shape", sample_shape):
        checks.count("sample_shape", extent)
    check_layers(layers)
    for option, name in (("features", features), ("head", head)):
        if name is not None:
            checks.word(option, name)
    if not callable(loss):
        raise ValueError(f"loss={checks.shown(loss)} must be a function (logits, batch)")
    if (features is None) != (head is None):
        raise ValueError(f"features={features!r} and head={head!r} must be given together")
    if features is not None and not callable(getattr(type(module), features, None)):
        raise ValueError(f"features={features!r} is not a method of {type(module).__name__}")
    flags = _flags(type(module).__call__)
    feature_flags = _flags(getattr(type(module), features)) if features else flags
    init = partial(_flax_init, module, flags, (1, *sample_shape), sample_dtype or jnp.result_type(float))
    shapes = jax.eval_shape(init, jax.random.key(0))
    _check_module(module, layers, flags, shapes)
    evaluate, logits = partial(_flax_evaluate, module), partial(_flax_logits, module, flags)
    predict = partial(evaluate, type(module).__call__, flags)
    samples = jax.ShapeDtypeStruct((2, *sample_shape), sample_dtype or jnp.result_type(float))
    return Task(
        init=init,
        loss=LogitsLoss(logits, loss, as_predicted=_as_predicted(logits, predict, shapes, samples)),
        predict=predict,
        features=partial(evaluate, getattr(type(module), features), feature_flags) if features else None,
        head=partial(evaluate, lambda bound, z: getattr(bound, head)(z), lambda train, weight: {}) if head else None,
        layers=tuple(layers),
        trainable=_flax_trainable,
    )


_Flags = Callable[[bool, jax.Array | None], dict[str, Any]]


def _flax_init(module: nn.Module, flags: _Flags, shape: tuple[int, ...], dtype: DTypeLike, key: Key) -> Variables:
    rngs = {"params": key, "dropout": jax.random.fold_in(key, 1)}
    return flax.core.unfreeze(module.init(rngs, jnp.zeros(shape, dtype), **flags(False, jnp.ones(1))))


def _flax_logits(
    module: nn.Module, flags: _Flags, variables: Variables, batch: Batch, key: Key
) -> tuple[jax.Array, Variables]:
    buffers = [name for name in variables if name != "params"]
    arguments = flags(True, batch.weight)
    logits, updated = module.apply(variables, batch.x, rngs={"dropout": key}, mutable=buffers, **arguments)
    return logits, {**variables, **flax.core.unfreeze(updated)}


def _as_predicted(
    logits: Callable[..., Any], predict: Callable[..., jax.Array], variables: Variables, x: jax.ShapeDtypeStruct
) -> bool:
    """Whether a module without buffers computes the same in training as in evaluation, without dropout in particular."""
    if set(variables) != {"params"}:
        return False

    def program(function: Callable[..., Any]) -> str:
        weight, key = jax.ShapeDtypeStruct(x.shape[:1], jnp.result_type(float)), jax.eval_shape(jax.random.key, 0)
        # Two traces of one function differ in the addresses of its helpers.
        return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(function)(variables, x, weight, key)))

    return program(lambda v, x, weight, key: logits(v, Batch(x, weight, weight), key)[0]) == program(
        lambda v, x, weight, key: predict(v, x)
    )


def _flax_evaluate(module: nn.Module, method: Callable[..., Any], flags: _Flags, variables: Variables, x: PyTree) -> jax.Array:
    return jnp.asarray(module.apply(variables, x, method=method, **flags(False, None)))


def _flax_trainable(variables: Variables) -> Mask:
    return {name: jax.tree.map(lambda _, name=name: name == "params", tree) for name, tree in variables.items()}


def _check_module(module: nn.Module, layers: tuple[str, ...], flags: _Flags, shapes: Variables) -> None:
    """Raises `ValueError` for a layer name without parameters, and for batch statistics without `train` and `weight`."""
    params: Params = shapes.get("params", {})
    named = {str(part.key) for path, _ in jax.tree_util.tree_leaves_with_path(params) for part in path}
    for layer in layers:
        if layer not in named:
            raise ValueError(f"layers={layers} names {layer!r}, but the parameters are called {', '.join(sorted(named))}")
    taken = flags(True, jnp.ones(1))
    if "batch_stats" in shapes and not ("weight" in taken and len(taken) == 2):
        raise ValueError(
            f"module {type(module).__name__} has batch statistics, so its __call__ must take train (or deterministic) and "
            f"weight [B]: rows of padding would enter them otherwise; it takes {', '.join(taken) or 'neither'}"
        )


def _flags(method: Callable[..., Any]) -> _Flags:
    """`(train, weight) -> keyword arguments`, reduced to those in the signature of a module's method."""
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
    dtype: DTypeLike | None,
    form: str | None = None,
    norm: str = "after",
    convs: tuple[tuple[int, int, int], ...] = (),
    **layout: Any,
) -> Task:
    checks.count("classes", classes, least=2)
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
    return flax_task(module, sample_shape, layers=module.layers, features="features", head="head")


def _is_float(dtype: Any) -> bool:
    if isinstance(dtype, jax.Array):
        return False
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def _tuple(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)):
        raise ValueError(f"{name}={checks.shown(values)} must be a tuple of sizes")
    return tuple(values)


def mlp(
    inputs: int = 784,
    hidden: tuple[int, ...] = (100,),
    classes: int = 10,
    *,
    init: str = "torch",
    dtype: DTypeLike | None = None,
) -> Task:
    """Multi-layer perceptron with ReLU; by default the MNIST network of FedMeta-Per (Nguyen and Cao), 79,510 parameters.

    Args:
      inputs: size of one sample; images are flattened.
      hidden: widths of the hidden layers `fc1, fc2, ...`.
      classes: outputs K of the `head`.
      init: `"torch"` (weights and biases uniform within ±1/sqrt(fan in); published step sizes assume it) or `"lecun"`.
      dtype: dtype of the matrix products, e.g. `jnp.bfloat16`; parameters stay in full precision.

    Raises:
      ValueError: a size below 1, or an unknown `init` or `dtype`.
    """
    return _network_task((inputs,), classes, hidden=_tuple("hidden", hidden), init=init, dtype=dtype)


def lenet(
    image: tuple[int, int, int] = (32, 32, 3),
    classes: int = 10,
    *,
    init: str = "torch",
    dtype: DTypeLike | None = None,
    form: str | None = None,
) -> Task:
    """LeNet: 6 and 16 convolutions of 5x5, dense layers of 120 and 84; the CIFAR-10 network of FedMeta-Per (Nguyen and Cao).

    It has 62,006 parameters; the last 1, 2 and 3 layers have 850, 11,014 and 59,134.

    Args:
      image: height, width and channels of a sample.
      form: form of the convolutions, see `layers.convolution`; `None` for the default of the current backend.
      classes, init, dtype: see `mlp`.
    """
    convs = ((6, 5, 0), (16, 5, 0))
    return _network_task(_tuple("image", image), classes, convs=convs, hidden=(120, 84), init=init, dtype=dtype, form=form)


def fedpac_cnn(
    image: tuple[int, int, int] = (32, 32, 3),
    classes: int = 10,
    *,
    init: str = "torch",
    dtype: DTypeLike | None = None,
    form: str | None = None,
) -> Task:
    """The networks of FedPAC (Xu, Tong and Huang, ICLR 2023), with leaky ReLU and 128 features.

    For colour images (CIFAR-10, CINIC-10): three convolutions, 107,690 parameters. For images of one channel (Fashion-MNIST,
    EMNIST): two convolutions, 117,066 parameters for 10 classes and 123,774 for 62. Arguments as for `lenet`.
    """
    shape = _tuple("image", image)
    convs = ((16, 5, 0), (32, 5, 1), (64, 3, 1))[: 2 if shape[-1:] == (1,) else 3]
    return _network_task(
        shape, classes, convs=convs, hidden=(128,), activation="leaky_relu", init=init, dtype=dtype, form=form
    )


def mtfl_mlp(
    inputs: int = 784, classes: int = 10, *, norm: str = "after", init: str = "torch", dtype: DTypeLike | None = None
) -> Task:
    """The "2NN" of MTFL (Mills, Hu and Min, arXiv 2007.09236): 784-200-200-10 with a batch norm on the first layer.

    It has 199,610 parameters, 400 of them in the batch norm, and 400 running statistics.

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
    dtype: DTypeLike | None = None,
    form: str | None = None,
) -> Task:
    """The CIFAR-10 network of MTFL (Mills, Hu and Min, arXiv 2007.09236): 32 and 64 convolutions of 3x3, a dense layer of 512.

    It has 1,204,874 parameters, 192 of them in the batch norms, and 192 running statistics.

    Args:
      norm: `"after"` activation and pooling, as in the authors' code, or `"before"` both, as in the paper's text.
      image, classes, init, dtype, form: see `lenet`.
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
    )


def elu_mlp(inputs: int = 784, classes: int = 10, *, init: str = "torch", dtype: DTypeLike | None = None) -> Task:
    """The network of Per-FedAvg-Reptile (Xia and Cui 2022): d-80-60-10 with ELU.

    It has 68,270 parameters for MNIST and 251,310 for flattened CIFAR-10 (`inputs=3072`). Arguments as for `mlp`.
    """
    return _network_task((inputs,), classes, hidden=(80, 60), activation="elu", init=init, dtype=dtype)


def logistic(inputs: int = 60, classes: int = 10, *, init: str = "torch", dtype: DTypeLike | None = None) -> Task:
    """Multinomial logistic regression; by default the model for synthetic(δ, θ) data, with 610 parameters.

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
