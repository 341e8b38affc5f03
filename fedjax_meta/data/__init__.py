"""Data sets, who holds what of them, and what one client sees."""

from fedjax_meta.data.federated import (
    Batches,
    ClientData,
    ClientView,
    FederatedData,
    federate,
    from_clients,
    train_test_views,
)
from fedjax_meta.data.partition import Partition
from fedjax_meta.data.protocols import Protocol, fedmeta_per, fedmeta_per_iid, fedpac, mtfl, pooled, reptile, reptile_synthetic
from fedjax_meta.data.sources import Source, from_arrays, load

__all__ = [
    "Batches",
    "ClientData",
    "ClientView",
    "FederatedData",
    "Partition",
    "Protocol",
    "Source",
    "federate",
    "fedmeta_per",
    "fedmeta_per_iid",
    "fedpac",
    "from_arrays",
    "from_clients",
    "load",
    "mtfl",
    "pooled",
    "reptile",
    "reptile_synthetic",
    "train_test_views",
]
