"""Data sets, their partition among clients, and the views and batches of each client."""

from fedjax_meta.data.batches import CHUNK, Batches, chunk_length
from fedjax_meta.data.builders import from_clients, from_partition, train_test_views
from fedjax_meta.data.episodes import episodes
from fedjax_meta.data.federated import FederatedData
from fedjax_meta.data.natural import Natural
from fedjax_meta.data.packing import capacity, pack
from fedjax_meta.data.partition import Partition
from fedjax_meta.data.protocols import (
    Protocol,
    fedmeta_per_clients,
    fedmeta_per_iid_clients,
    fedpac_clients,
    fl_imaml_clients,
    local_steps,
    mtfl_clients,
    on_device,
    perfedavg_reptile_clients,
    perfedavg_reptile_synthetic_clients,
    pooled,
)
from fedjax_meta.data.scaling import pixel_scaling
from fedjax_meta.data.sequences import next_tokens, pad
from fedjax_meta.data.sources import Source, from_arrays, load, read_npz
from fedjax_meta.data.views import ClientData, ClientView

__all__ = [
    "CHUNK",
    "Batches",
    "ClientData",
    "ClientView",
    "FederatedData",
    "Natural",
    "Partition",
    "Protocol",
    "Source",
    "capacity",
    "chunk_length",
    "episodes",
    "fedmeta_per_clients",
    "fedmeta_per_iid_clients",
    "fedpac_clients",
    "fl_imaml_clients",
    "from_arrays",
    "from_clients",
    "from_partition",
    "load",
    "local_steps",
    "mtfl_clients",
    "next_tokens",
    "on_device",
    "pack",
    "pad",
    "perfedavg_reptile_clients",
    "perfedavg_reptile_synthetic_clients",
    "pixel_scaling",
    "pooled",
    "read_npz",
    "train_test_views",
]
