"""fedjax_meta: federated meta-learning and personalised federated learning, with clients as an array axis."""

from fedjax_meta import (
    aggregate,
    checks,
    data,
    engine,
    features,
    implicit,
    keys,
    layers,
    local,
    masks,
    meta,
    method,
    methods,
    models,
    participation,
    rounds,
    runtime,
    schedules,
    task,
    uploads,
)
from fedjax_meta.methods import *  # noqa
