"""Scalings of uint8 images to the numbers that a model reads."""

from typing import TypedDict

import numpy as np

from fedjax_meta import checks

SCALINGS = ("pixel", "half", "unit", "cifar")
"""Names of ways to scale pixels, see `pixel_scaling`."""


class Scaling(TypedDict):
    """The keyword arguments `offset` and `scale` of `from_partition`."""

    offset: float | np.ndarray
    scale: float | np.ndarray


def pixel_scaling(x: np.ndarray, scaling: str) -> Scaling:
    """The `offset` and `scale` of `from_partition` for a named scaling; the stored images stay uint8.

    Args:
      x: uint8 images `[M, height, width, channels]`.
      scaling: `"pixel"`: each pixel less its mean over all images, divided by its standard deviation + 0.001 in grey levels
        (the standardisation of pFedMe; the published MNIST numbers of FedMeta-Per need it); `"half"`: mean and standard
        deviation 0.5 for all channels; `"unit"`: to [0, 1]; `"cifar"`: the usual means and standard deviations of CIFAR's
        three channels.

    Raises:
      ValueError: an unknown scaling, inputs that are not uint8.

    Example:
      >>> pixel_scaling(np.zeros((4, 2, 2, 1), np.uint8), "half")
      {'offset': 127.5, 'scale': 0.00784313725490196}
    """
    checks.one_of("scaling", scaling, SCALINGS)
    checks.instance("x", x, np.ndarray, "source.x_train")
    if not x.size:
        raise ValueError("x holds no images")
    if x.dtype != np.uint8:
        raise ValueError(f"scaling={scaling!r} is for uint8 images, not {x.dtype}; scale other inputs before")
    if scaling == "unit":
        return {"offset": 0.0, "scale": 1 / 255}
    if scaling == "half":
        return {"offset": 127.5, "scale": 1 / 127.5}
    if scaling == "cifar":
        if x.shape[-1] != 3:
            raise ValueError(f"scaling='cifar' is for images of 3 channels, not {x.shape[-1]}")
        mean, deviation = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2023, 0.1994, 0.2010])
        return {"offset": (255 * mean).astype(np.float32), "scale": (1 / (255 * deviation)).astype(np.float32)}
    # Sums of integers are exact, so the result does not depend on the order of the samples.
    total, square = np.zeros(x.shape[1:], np.int64), np.zeros(x.shape[1:], np.int64)
    for begin in range(0, len(x), 2048):
        chunk = x[begin : begin + 2048].astype(np.uint32)
        total += chunk.sum(0, dtype=np.uint32)
        square += np.square(chunk, out=chunk).sum(0, dtype=np.uint32)
    mean = total / len(x)
    deviation = np.sqrt(np.maximum(square / len(x) - mean**2, 0))
    return {"offset": mean.astype(np.float32), "scale": (1 / (deviation + 1e-3)).astype(np.float32)}
