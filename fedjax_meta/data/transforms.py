"""Shifts between clients as transforms of their data, and augmentation of batches.

Concept shift permutes the labels of groups of clients; feature shift rotates or adds noise to their inputs. Axis letters: N
clients, S samples, B batch, K classes.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_meta import checks
from fedjax_meta.data.federated import FederatedData
from fedjax_meta.data.samples import one_array
from fedjax_meta.task import Batch, LogitsLoss, Task
from fedjax_meta.types import Key


def concept_shift(data: FederatedData, *, num_groups: int, seed: int | np.random.Generator) -> FederatedData:
    """Permutes the labels; clients i with the same i mod `num_groups` share one permutation, and group 0 keeps its labels.

    The permutations are random and all different. The recipe of FedPAC (ICLR 2023) is not public; this is the recipe of
    clustered federated learning (Sattler et al., TNNLS 2021).

    Args:
      data: clients with class labels.
      num_groups: number of permutations.
      seed: an integer or a NumPy generator.

    Raises:
      ValueError: data without class labels, more groups than permutations, clients with samples in common.
    """
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    checks.count("num_groups", num_groups)
    if data.num_classes < 2:
        raise ValueError(f"num_classes={data.num_classes} must be at least 2: concept shift permutes class labels")
    one_array("concept_shift permutes labels", data.y)
    if data.num_classes < 20 and num_groups > math.factorial(data.num_classes):
        raise ValueError(f"num_groups={num_groups} is more than the permutations of {data.num_classes} labels")
    checks.seed("seed", seed)
    rng = np.random.default_rng(seed)
    drawn = {tuple(range(data.num_classes))}
    permutations = [np.arange(data.num_classes)]
    while len(permutations) < num_groups:
        order = rng.permutation(data.num_classes)
        if tuple(order) not in drawn:
            drawn.add(tuple(order))
            permutations.append(order)
    labels = np.array(data.y)
    for client, where in enumerate(_samples(data, data.views)):
        labels[where] = permutations[client % num_groups][labels[where]]
    return dataclasses.replace(data, y=_like(data.y, labels))


def rotate(data: FederatedData, quarter_turns: ArrayLike) -> FederatedData:
    """Rotates all images of client i by `quarter_turns[i]` times 90 degrees counter-clockwise, without interpolation.

    Args:
      data: images `[S, height, width, channels]`.
      quarter_turns: int `[N]`.

    Raises:
      ValueError: inputs that are not images, or images that are not square with an odd number of quarter turns, clients
        with samples in common.
    """
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    turns = checks.numeric("quarter_turns", quarter_turns)
    if turns.shape != (data.num_clients,) or not np.issubdtype(turns.dtype, np.integer):
        raise ValueError(f"quarter_turns must be integers [N={data.num_clients}], not {turns.dtype} {list(turns.shape)}")
    one_array("rotate turns inputs", data.x)
    if data.x.ndim != 4 or (data.x.shape[1] != data.x.shape[2] and (turns % 2).any()):
        raise ValueError(f"only square images [S, side, side, channels] can be rotated, not {list(data.x.shape)}")
    images = np.array(data.x)
    for where, turn in zip(_samples(data, data.views), turns, strict=True):
        images[where] = np.rot90(images[where], turn, axes=(1, 2))
    return dataclasses.replace(data, x=_like(data.x, images))


def add_noise(
    data: FederatedData,
    std: ArrayLike,
    *,
    seed: int | np.random.Generator,
    views: Sequence[str] = ("train",),
    clip: tuple[float, float] | Literal["auto"] | None = "auto",
) -> FederatedData:
    """Adds zero-mean Gaussian noise to the inputs of some views.

    MTFL does this to the training images of some clients and clips the result to [0, 1]. uint8 images are treated as values in
    [0, 1], always clipped, and rounded to uint8 again, which changes a noisy pixel by at most 1/510.

    Args:
      data: the clients.
      std: standard deviation, a number or `[N]`; a client with 0 keeps its inputs.
      seed: an integer or a NumPy generator.
      views: the views whose samples become noisy.
      clip: bounds of the result, or `None`; by default [0, 1] where all inputs lie there, else none.

    Raises:
      ValueError: a negative `std`, an unknown view, `clip=None` with uint8 inputs, other integers, clients with
        samples in common.
    """
    checks.instance("data", data, FederatedData, "fm.from_clients(...)")
    checks.not_negative("std", std, each=True)
    if np.shape(std) not in ((), (data.num_clients,)):
        raise ValueError(f"std must be a number or [N={data.num_clients}], not of shape {np.shape(std)}")
    std = np.broadcast_to(np.asarray(std, np.float32), (data.num_clients,))
    if isinstance(clip, str):
        checks.one_of("clip", clip, ("auto",))
    elif clip is not None:
        bounds = checks.numeric("clip", clip)
        if bounds.shape != (2,) or not bounds[0] < bounds[1]:
            raise ValueError(f"clip={checks.shown(clip)} must be two bounds, the lower one first, or None")
    one_array("add_noise changes inputs", data.x)
    if data.x.dtype != np.uint8 and not np.issubdtype(data.x.dtype, np.floating):
        raise ValueError(f"noise needs floating-point inputs or images of uint8, not {data.x.dtype}")
    if data.x.dtype == np.uint8 and clip is None:
        raise ValueError("clip=None needs floating-point inputs: uint8 cannot hold values outside [0, 1]")
    checks.seed("seed", seed)
    rng = np.random.default_rng(seed)
    unit = np.float32(255 if data.x.dtype == np.uint8 else 1)
    inputs = np.array(data.x)
    if isinstance(clip, str):
        clip = (0.0, 1.0) if unit == 255 or bool(inputs.min() >= 0 and inputs.max() <= 1) else None
    for client, where in enumerate(_samples(data, views)):
        if std[client] == 0:
            continue
        noisy = inputs[where] / unit + std[client] * rng.standard_normal(inputs[where].shape, np.float32)
        noisy = noisy if clip is None else np.clip(noisy, *clip)
        inputs[where] = np.rint(np.clip(noisy, 0, 1) * unit) if data.x.dtype == np.uint8 else noisy
    return dataclasses.replace(data, x=_like(data.x, inputs))


def crop_and_flip(key: Key, x: jax.Array, *, pad: int = 4, fill: ArrayLike = 0.0) -> jax.Array:
    """Random crops of the padded images, each flipped with probability 1/2 (FedPAC on CIFAR-10 and CINIC-10).

    Args:
      key: consumed.
      x: images `[B, height, width, channels]`.
      pad: pixels added on every side; a shift lies in [-pad, pad].
      fill: value of the padding, broadcast against one image. For scaled images, black is `(0 - offset) * scale`.

    Returns:
      Images like `x`.
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


def augmented(task: Task, augment: Callable[[Key, jax.Array], jax.Array]) -> Task:
    """The same task with the loss on `augment(key, x)`; evaluation uses the samples unchanged."""

    def prepare(batch: Batch, key: Key) -> tuple[Batch, Key]:
        key_augment, key_loss = jax.random.split(key)
        return batch._replace(x=augment(key_augment, batch.x)), key_loss

    inside = task.loss
    if isinstance(inside, LogitsLoss):
        loss = dataclasses.replace(inside, prepare=lambda batch, key: inside.prepare(*prepare(batch, key)))
        return task._replace(loss=loss)
    return task._replace(loss=lambda variables, batch, key: inside(variables, *prepare(batch, key)))


def _samples(data: FederatedData, views: Sequence[str]) -> list[np.ndarray]:
    """For each client, the positions in the flat arrays of the samples in any of the views."""
    if not isinstance(views, (tuple, list)) or not views:
        raise ValueError(f"views={checks.shown(views)} must be a tuple with the name of at least one view")
    runs = [(np.asarray(data.sizes(view)), np.asarray(data.start[view])) for view in views]
    found = [
        np.unique(np.concatenate([np.arange(start[i], start[i] + size[i]) for size, start in runs]))
        for i in range(data.num_clients)
    ]
    owners = np.full(len(jax.tree.leaves(data.y)[0]), -1)
    for client, where in enumerate(found):
        if (owners[where] >= 0).any():
            first = owners[where].max()
            raise ValueError(f"clients {first} and {client} have samples in common, so that neither can be changed alone")
        owners[where] = client
    return found


def _like(old: jax.Array | np.ndarray, new: np.ndarray) -> jax.Array | np.ndarray:
    return jnp.asarray(new) if isinstance(old, jax.Array) else new
