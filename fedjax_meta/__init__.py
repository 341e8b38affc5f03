"""fedjax_meta: federated meta-learning and personalised federated learning, with clients as an array axis."""

from fedjax_meta import aggregate, algorithms, data, engine, evaluate, local, masks, meta, simulate, task
from fedjax_meta.algorithm import Algorithm, FederationOptions, RoundInfo, State, Trained, federated
from fedjax_meta.algorithms import ALGORITHMS, fedavg, fedmeta, fedmeta_per, fedper, fedprox, local_only
from fedjax_meta.data.federated import FederatedData, federate, from_clients, train_test_views
from fedjax_meta.task import Batch, Task, classification

__version__ = "0.1.0"
