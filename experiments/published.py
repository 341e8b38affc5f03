"""Published numbers, by paper: what the experiments print beside what they measure."""

from typing import NamedTuple


class Published(NamedTuple):
    """One row of a results table, in percent; `None` where the paper has no number.

    Attributes:
      accuracy: over the samples of all clients.
      mean, std: of the clients' accuracies, with population std.
      f1, f1_std: of the clients' macro F1, after the paper's post-processing.
    """

    accuracy: float
    mean: float | None
    std: float | None
    f1: float
    f1_std: float | None


# Nguyen, Cao: "Meta-learning and personalization layer in federated learning", Tables 3 and 4, by data set, clients, system.
# Centralised training and IID clients have no groups of clients; they stand under "local".
FEDMETA_PER: dict[tuple[str, str], dict[str, Published]] = {
    ("mnist", "local"): {
        "centralised": Published(97.07, None, None, 97.04, None),
        "fedavg_iid": Published(90.36, 90.34, 2.24, 90.12, 2.29),
        "fedavg": Published(85.03, 82.14, 14.76, 79.43, 16.83),
        "fedper_averaged": Published(77.29, 75.48, 14.84, 72.32, 15.99),
        "fedavg_meta": Published(84.84, 81.56, 16.68, 78.31, 19.80),
        "fedper_meta_averaged": Published(75.91, 74.11, 16.20, 71.22, 16.77),
        "fedmeta": Published(92.99, 91.14, 5.99, 90.16, 6.28),
        "fedmeta_metasgd": Published(98.02, 96.35, 4.62, 95.80, 5.51),
        "fedmeta_per": Published(99.37, 99.12, 1.29, 98.94, 1.60),
        "fedmeta_per_metasgd": Published(98.92, 98.15, 3.32, 98.20, 2.94),
    },
    ("mnist", "new"): {
        "fedavg": Published(83.92, 81.69, 19.71, 77.66, 22.54),
        "fedper_averaged": Published(78.30, 76.19, 18.79, 72.72, 19.30),
        "fedavg_meta": Published(84.34, 82.37, 17.42, 78.78, 19.31),
        "fedper_meta_averaged": Published(77.47, 75.56, 20.33, 72.60, 21.37),
        "fedmeta": Published(92.96, 91.88, 5.88, 90.02, 7.34),
        "fedmeta_metasgd": Published(96.39, 93.53, 8.39, 89.31, 14.56),
        "fedmeta_per": Published(93.60, 93.57, 5.58, 91.83, 6.43),
        "fedmeta_per_metasgd": Published(96.62, 95.88, 3.58, 94.85, 4.61),
    },
    ("cifar10", "local"): {
        "centralised": Published(61.91, None, None, 61.72, None),
        "fedavg_iid": Published(53.83, 53.83, 3.14, 53.00, 3.21),
        "fedavg": Published(19.02, 19.29, 25.11, 16.85, 23.92),
        "fedper_averaged": Published(13.22, 12.99, 19.39, 10.52, 14.91),
        "fedavg_meta": Published(40.30, 38.47, 31.52, 33.81, 30.61),
        "fedper_meta_averaged": Published(18.57, 17.48, 22.55, 14.54, 18.67),
        "fedmeta": Published(69.02, 68.76, 14.86, 61.14, 20.00),
        "fedmeta_metasgd": Published(78.63, 78.73, 11.59, 72.87, 18.31),
        "fedmeta_per": Published(86.60, 86.52, 6.31, 85.33, 6.77),
        "fedmeta_per_metasgd": Published(85.61, 85.68, 7.22, 85.08, 7.32),
    },
    ("cifar10", "new"): {
        "fedavg": Published(24.63, 24.83, 22.57, 20.52, 20.45),
        "fedper_averaged": Published(14.40, 14.52, 20.15, 10.66, 13.79),
        "fedavg_meta": Published(43.39, 43.54, 18.00, 35.14, 17.22),
        "fedper_meta_averaged": Published(13.33, 13.57, 19.62, 10.05, 13.17),
        "fedmeta": Published(61.69, 61.64, 12.49, 50.76, 19.20),
        "fedmeta_metasgd": Published(68.36, 67.89, 15.11, 60.24, 21.52),
        "fedmeta_per": Published(64.22, 63.70, 12.29, 53.68, 19.06),
        "fedmeta_per_metasgd": Published(69.97, 69.13, 14.63, 62.42, 20.94),
    },
}

# The authors' internal report on the same split, tested with each client's own head; it gives only the accuracy over samples.
FEDMETA_PER_OWN_HEADS: dict[str, dict[str, float]] = {
    "mnist": {"fedper": 96.53, "fedper_meta": 96.65},
    "cifar10": {"fedper": 84.59, "fedper_meta": 84.55},
}
