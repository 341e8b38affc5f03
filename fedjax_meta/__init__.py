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
    runtime,
    simulate,
    task,
)
from fedjax_meta.algorithm import Algorithm, FederationOptions, RoundInfo, State, Trained, federated
from fedjax_meta.algorithms import (
    ALGORITHMS,
    fedadagrad,
    fedadam,
    fedavg,
    fedavg_adam,
    fedavgm,
    fedbn,
    fedmeta,
    fedmeta_per,
    fedopt,
    fedper,
    fedprox,
    fedyogi,
    local_only,
    mtfl,
)
from fedjax_meta.data.federated import FederatedData, federate, from_clients, train_test_views
from fedjax_meta.participation import Participation
from fedjax_meta.task import Batch, Task, classification

__version__ = "0.1.0"

runtime.configure()
