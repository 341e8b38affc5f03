"""Differential privacy: what a run guarantees (`accounting`, `spending`), private gradients of single samples (`samples`), what a
method lets out beside them (`leaks`), and attacks that measure it (`attack`).
"""

from fedjax_meta.privacy.accounting import (
    ACCOUNTANTS,
    Everyone,
    FixedSize,
    Guarantee,
    Poisson,
    Sampling,
    Trees,
    epsilon,
    gaussian_delta,
    gaussian_epsilon,
    noise_for,
)
from fedjax_meta.privacy.attack import (
    Attack,
    largest_advantage,
    largest_true_positives,
    likelihood_ratio,
    logit_of_loss,
    membership_attack,
)
from fedjax_meta.privacy.samples import SamplePrivacy, private_gradient, private_task, sample_epsilon
from fedjax_meta.privacy.spending import sampling_of, spent
