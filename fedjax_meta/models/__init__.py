"""Models as `Task`s: the networks of the papers by name, and builders that make a `Task` from a model of any framework."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fedjax_meta.models.convolutional import ResNet18, SensorNetwork, resnet18, sensor_cnn
from fedjax_meta.models.factorisation import matrix_factorisation
from fedjax_meta.models.functional import from_functions
from fedjax_meta.models.images import (
    ACTIVATIONS,
    NORMS,
    Network,
    elu_mlp,
    fedpac_cnn,
    lenet,
    logistic,
    mlp,
    mtfl_cnn,
    mtfl_mlp,
)
from fedjax_meta.models.linen import from_linen
from fedjax_meta.models.recurrent import CharacterNetwork, char_gru, char_lstm
from fedjax_meta.models.transformer import Transformer, transformer
from fedjax_meta.task import Task

if TYPE_CHECKING:
    from fedjax_meta.models.equinox import from_equinox
    from fedjax_meta.models.nnx import from_nnx

MODELS: dict[str, Callable[..., Task]] = {
    "mlp": mlp,
    "lenet": lenet,
    "fedpac_cnn": fedpac_cnn,
    "mtfl_mlp": mtfl_mlp,
    "mtfl_cnn": mtfl_cnn,
    "elu_mlp": elu_mlp,
    "logistic": logistic,
    "char_lstm": char_lstm,
    "char_gru": char_gru,
    "transformer": transformer,
    "sensor_cnn": sensor_cnn,
    "resnet18": resnet18,
    "matrix_factorisation": matrix_factorisation,
}
"""Builders by name, for command lines."""

__all__ = [
    "ACTIVATIONS",
    "MODELS",
    "NORMS",
    "CharacterNetwork",
    "Network",
    "ResNet18",
    "SensorNetwork",
    "Transformer",
    "char_gru",
    "char_lstm",
    "elu_mlp",
    "fedpac_cnn",
    "from_equinox",
    "from_functions",
    "from_linen",
    "from_nnx",
    "lenet",
    "logistic",
    "matrix_factorisation",
    "mlp",
    "mtfl_cnn",
    "mtfl_mlp",
    "resnet18",
    "sensor_cnn",
    "transformer",
]


def __getattr__(name: str) -> Any:
    # NNX takes a while to import, and Equinox is optional.
    if name == "from_nnx":
        from fedjax_meta.models import nnx

        return nnx.from_nnx
    if name == "from_equinox":
        try:
            from fedjax_meta.models import equinox
        except ImportError as error:
            raise ImportError(
                f"from_equinox needs the package equinox: pip install 'fedjax_meta[equinox]' ({error})"
            ) from None
        return equinox.from_equinox
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
