"""Wrong hyper-parameters are refused when an algorithm is built, not in the middle of its first round."""

import pytest

import fedjax_meta as fm
from tests import problems

BAD = [
    (fm.fedavg, {"lr": 0}, "lr=0 must be finite and above 0"),
    (fm.fedavg, {"epochs": 0}, "epochs=0 must be an integer of at least 1"),
    (fm.fedavg, {"batch_size": 0}, "batch_size=0 must be an integer"),
    (fm.fedavg, {"finetune_epochs": -1}, "finetune_epochs=-1 must be an integer of at least 0"),
    (fm.fedavg, {"weighting": "size"}, "weighting='size' is unknown; allowed are samples, query, uniform"),
    (fm.fedavg, {"personal": "tail"}, "personal='tail' is unknown"),
    (fm.fedavg, {"finetune": "tail"}, "finetune='tail' is unknown"),
    (fm.fedavg, {"cohort_size": 0}, "cohort_size=0 must be an integer of at least 1"),
    (fm.fedprox, {"prox_weight": -1}, "prox_weight=-1 must be finite and at least 0"),
    (fm.fedprox, {"lr": "fast"}, "lr=fast must be finite and above 0"),
    (fm.fedprox, {"epochs": 0}, "epochs=0 must be an integer of at least 1"),
    (fm.fedprox, {"batch_size": 2.5}, "batch_size=2.5 must be an integer of at least 1"),
    (fm.fedmeta, {"inner_lr": -0.1}, "inner_lr=-0.1 must be finite and at least 0"),
    (fm.fedmeta, {"outer_lr": 0}, "outer_lr=0 must be finite and above 0"),
    (fm.fedmeta, {"inner_steps": 0}, "inner_steps=0 must be an integer of at least 1"),
    (fm.fedmeta, {"batch_size": 0}, "batch_size=0 must be an integer of at least 1"),
    (fm.fedmeta, {"weighting": "size"}, "weighting='size' is unknown"),
    (fm.fedmeta, {"score": "best"}, "score='best' is unknown; allowed are online, fitted"),
    (fm.fedmeta, {"outer_at": "cloud"}, "outer_at='cloud' is unknown; allowed are client, server"),
    (fm.fedmeta, {"personal_rates": "head"}, "personal_rates needs learned_rates=True"),
]


@pytest.mark.parametrize(
    ("builder", "options", "message"), BAD, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_refused_when_built(builder, options, message):
    with pytest.raises(ValueError, match=message):
        builder(problems.task(), **options)
