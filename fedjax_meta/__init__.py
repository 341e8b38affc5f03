"""fedjax_meta: federated meta-learning and personalised federated learning, with clients as an array axis."""

from fedjax_meta import (
    aggregate,
    algorithms,
    costs,
    data,
    engine,
    evaluate,
    local,
    masks,
    meta,
    participation,
    privacy,
    runtime,
    simulate,
    store,
    task,
)
from fedjax_meta.algorithm import Algorithm, FederationOptions, RoundInfo, State, Trained, federated
from fedjax_meta.algorithms import (
    ALGORITHMS,
    apfl,
    ditto,
    fedadagrad,
    fedadam,
    fedamp,
    fedavg,
    fedavg_adam,
    fedavgm,
    fedbabu,
    fedbn,
    fedem,
    fedfomo,
    fedmeta,
    fedmeta_per,
    fedmeta_server,
    fedopt,
    fedpac,
    fedper,
    fedprox,
    fedrep,
    fedrod,
    fedyogi,
    imaml,
    knn_per,
    l2gd,
    lg_fedavg,
    local_only,
    moon,
    mtfl,
    perfedavg,
    perfedavg_reptile,
    pfedhn,
    pfedme,
    reptile,
    scaffold,
)
from fedjax_meta.data.federated import FederatedData, federate, from_clients, train_test_views
from fedjax_meta.participation import Participation
from fedjax_meta.task import Batch, Task, classification

__version__ = "0.1.0"

runtime.configure()
