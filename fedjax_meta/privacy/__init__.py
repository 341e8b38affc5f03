"""Differential privacy: what a run guarantees."""

from fedjax_meta.privacy.accounting import (
    ACCOUNTANTS,
    Everyone,
    FixedSize,
    Guarantee,
    Poisson,
    Sampling,
    epsilon,
    gaussian_delta,
    gaussian_epsilon,
    noise_for,
)
from fedjax_meta.privacy.samples import SamplePrivacy, private_gradient, private_task, sample_epsilon
