"""Shifts between clients as transforms of their data, and augmentation of batches.

Concept shift gives groups of clients another meaning of the labels, feature shift rotates or blurs what they see. Axis
letters: N clients, S samples, B batch, K classes.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_meta import checks
from fedjax_meta.data.federated import FederatedData
from fedjax_meta.task import Batch, Key, Task, Variables


def concept_shift(data: FederatedData, *, num_groups: int, seed: int | np.random.Generator) -> FederatedData:
    """Clients i with the same i mod `num_groups` share one permutation of the labels; group 0 keeps them.

    The permutations are random and all different.

    FedPAC's own recipe (ICLR 2023) is not public; this one is that of clustered learning (Sattler et al., TNNLS 2021).

    Raises:
      ValueError: real targets, which have no labels to permute; more groups than permutations.
    """
    checks.count("num_groups", num_groups)
    if data.num_classes < 2:
        raise ValueError("concept shift permutes class labels, but the data have none to permute")
    if data.num_classes < 20 and num_groups > math.factorial(data.num_classes):
        raise ValueError(f"num_groups={num_groups} is more than the permutations of {data.num_classes} labels")
    rng = np.random.default_rng(seed)
    drawn = {tuple(range(data.num_classes))}
    meaning = [np.arange(data.num_classes)]
    while len(meaning) < num_groups:
        order = rng.permutation(data.num_classes)
        if tuple(order) not in drawn:
            drawn.add(tuple(order))
            meaning.append(order)
    labels = np.array(data.y)
    for client, where in enumerate(_samples(data, data.views)):
        labels[where] = meaning[client % num_groups][labels[where]]
    return dataclasses.replace(data, y=_like(data.y, labels))


def rotate(data: FederatedData, quarter_turns: Any) -> FederatedData:
    """Turns all images of client i by `quarter_turns[i]` times 90 degrees, counter-clockwise; no pixel is interpolated.

    Args:
      data: images `[S, height, width, channels]`.
      quarter_turns: int `[N]`.

    Raises:
      ValueError: inputs that are not images, or not square where a quarter turn would change their shape.
    """
    turns = np.asarray(quarter_turns)
    if turns.shape != (data.num_clients,) or not np.issubdtype(turns.dtype, np.integer):
        raise ValueError(f"quarter_turns must be integers [N={data.num_clients}], not {turns.dtype} {turns.shape}")
    if data.x.ndim != 4 or (data.x.shape[1] != data.x.shape[2] and (turns % 2).any()):
        raise ValueError(f"only square images [S, side, side, channels] can be turned, not {list(data.x.shape)}")
    images = np.array(data.x)
    for where, turn in zip(_samples(data, data.views), turns, strict=True):
        images[where] = np.rot90(images[where], turn, axes=(1, 2))
    return dataclasses.replace(data, x=_like(data.x, images))


def add_noise(
    data: FederatedData,
    std: Any,
    *,
    seed: int | np.random.Generator,
    views: Sequence[str] = ("train",),
    clip: tuple[float, float] | None = (0.0, 1.0),
) -> FederatedData:
    """Adds zero-mean Gaussian noise to inputs of the named views (S4: training images of some clients, clipped to [0, 1]).

    uint8 images count as [0, 1] and are rounded back to bytes, so a noisy pixel is off by at most 1/510; they are always
    clipped.

    Args:
      data: the clients.
      std: standard deviation, a number or `[N]`; a client with 0 is left alone.
      seed: an integer or a numpy generator.
      views: which samples become noisy.
      clip: bounds of the result, or `None`.
    """
    checks.not_negative("std", std)
    std = np.broadcast_to(np.asarray(std, np.float32), (data.num_clients,))
    if data.x.dtype == np.uint8 and clip is None:
        raise ValueError("clip=None needs floating-point inputs; bytes cannot leave [0, 1]")
    rng = np.random.default_rng(seed)
    unit = np.float32(255 if data.x.dtype == np.uint8 else 1)
    inputs = np.array(data.x)
    for client, where in enumerate(_samples(data, views)):
        if std[client] == 0:
            continue
        noisy = inputs[where] / unit + std[client] * rng.standard_normal(inputs[where].shape, np.float32)
        noisy = noisy if clip is None else np.clip(noisy, *clip)
        inputs[where] = np.rint(noisy * unit) if data.x.dtype == np.uint8 else noisy
    return dataclasses.replace(data, x=_like(data.x, inputs))


def crop_and_flip(key: Key, x: jax.Array, *, pad: int = 4, fill: Any = 0.0) -> jax.Array:
    """Random crops of the padded images, each mirrored with probability 1/2 (FedPAC on CIFAR-10 and CINIC-10).

    Args:
      key: consumed.
      x: images `[B, height, width, channels]`.
      pad: pixels added on every side; a shift lies in [-pad, pad].
      fill: what stands beyond the border, broadcast against one image. After scaling, black is `(0 - offset) * scale`.
    """
    key_shift, key_flip = jax.random.split(key)
    shift = jax.random.randint(key_shift, (x.shape[0], 2), -pad, pad + 1)
    flip = jax.random.bernoulli(key_flip, 0.5, (x.shape[0],))
    height, width = x.shape[1:3]

    def one(image: jax.Array, shift: jax.Array, flip: jax.Array) -> jax.Array:
        row = jnp.arange(height) + shift[0]
        column = jnp.arange(width) + shift[1]
        column = jnp.where(flip, column[::-1], column)
        inside = ((row >= 0) & (row < height))[:, None, None] & ((column >= 0) & (column < width))[None, :, None]
        return jnp.where(inside, image[jnp.clip(row, 0, height - 1)][:, jnp.clip(column, 0, width - 1)], fill)

    return jax.vmap(one)(x, shift, flip).astype(x.dtype)


def augmented(task: Task, augment: Callable[[Key, Any], Any]) -> Task:
    """The same task whose loss sees `augment(key, x)`; evaluation sees the samples as they are."""

    def loss(variables: Variables, batch: Batch, key: Key) -> tuple[jax.Array, Variables]:
        key_augment, key_loss = jax.random.split(key)
        return task.loss(variables, batch._replace(x=augment(key_augment, batch.x)), key_loss)

    return task._replace(loss=loss)


def _samples(data: FederatedData, views: Sequence[str]) -> list[np.ndarray]:
    """For each client the positions in the flat arrays of the union of the views."""
    runs = [(np.asarray(data.sizes(view)), np.asarray(data.start[view])) for view in views]
    return [
        np.unique(np.concatenate([np.arange(start[i], start[i] + size[i]) for size, start in runs]))
        for i in range(data.num_clients)
    ]


def _like(old: Any, new: np.ndarray) -> Any:
    return jnp.asarray(new) if isinstance(old, jax.Array) else new
