"""Samples that are held back for the choice of hyper-parameters."""

import numpy as np
import pytest

from fedjax_meta.data import from_partition, holdout
from fedjax_meta.study.scenario import Scenario


def clients(*sizes):
    sizes = np.array(sizes)
    x = np.zeros((sizes.sum(), 2), np.float32)
    return from_partition(x, np.arange(len(x)) % 2, np.arange(len(x)), sizes, num_classes=2)


def test_the_view_that_is_scored_is_never_empty():
    data = clients(3, 4, 6, 32)
    held = holdout.validation_samples(data, 0.2, scored="test_query")
    assert np.asarray(held.sizes("test_query")).min() >= 1 and np.asarray(held.sizes("train")).min() >= 1
    whole = np.asarray(data.sizes("train"))
    assert (np.asarray(held.sizes("train")) + np.asarray(held.sizes("test")) == whole).all()
    # Who tests on all held-back samples needs one.
    assert np.asarray(holdout.validation_samples(data, 0.2).sizes("test")).tolist() == [1, 1, 1, 6]


def test_clients_that_are_too_small_are_named():
    with pytest.raises(ValueError, match="client 1 has 2 train samples: validation on 'test_query' needs at least 3"):
        holdout.validation_samples(clients(9, 2), 0.2, scored="test_query")


def test_a_study_that_adapts_on_a_part_of_the_test_samples_tunes_on_some():
    scenario = Scenario(dataset="mnist_small", partition="iid", clients=300, adapt_on="test_support", new=0.0)
    assert np.asarray(scenario.build().tuning.sizes("test_query")).min() >= 1
