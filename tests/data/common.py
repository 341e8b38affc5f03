"""Helpers of the tests in this folder: clients whose samples are numbered."""

import numpy as np

from fedjax_meta.data import from_partition

SIZES = np.array([5, 12, 1, 8])


def numbered(sizes=SIZES, **options):
    """Clients with the inputs 0, 1, 2, ... in storage order, so that a batch shows which samples it holds."""
    total = int(np.sum(sizes))
    x = np.arange(total, dtype=np.float32)[:, None]
    return from_partition(x, np.arange(total) % 3, np.arange(total), sizes, num_classes=3, **options)


def seen(batches):
    """The numbers of the real samples of each step."""
    steps = []
    for step in range(int(batches.steps)):
        batch = batches.get(step, 0)
        steps.append(np.asarray(batch.x)[np.asarray(batch.weight) > 0, 0].astype(int).tolist())
    return steps


def flat(batches):
    """The numbers of the real samples of all steps."""
    return [number for step in seen(batches) for number in step]
