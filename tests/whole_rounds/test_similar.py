"""Two rounds of methods in which clients take from those that are like them: pFedSim and FedCAC.

pFedSim (KarhouTam/FL-bench, src/server/pfedsim.py 114-148): after the warm-up client i starts from its own head and the body
sum_j S_ij theta_j, S_ij = -log(1 - max(0, cosine of heads)), 0.9999 in place of the cosine with itself, rows normalised.
FedCAC (TsingZ0/PFLlib, clientcac.py 72-121, servercac.py 79-118): critical are the entries of a leaf with the largest |change *
value|; O_ij = 1 - |m_i - m_j| / (2 |m_i|); client i averages over j with O_ij >= mean + (t + 1) / beta (max - mean) and itself,
and starts from that mean at critical entries and from the global mean elsewhere.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta.aggregate.ranks import kth_largest
from fedjax_meta.methods.fedcac import critical as marks_of
from fedjax_meta.methods.fedcac import overlaps
from fedjax_meta.methods.pfedsim import class_rows
from tests import problems
from tests.authors.source import written_from
from tests.whole_rounds.world import (
    COHORTS,
    HEAD,
    KEY,
    KNOWN,
    LATE,
    NEW,
    TRAIN,
    Library,
    check,
    descend,
    epochs,
    near,
    order_key,
    rows,
    task,
    unpack,
)

RATE, BATCH, SERVER = 0.3, 4, 0.7
LEAVES = (slice(0, 12), slice(12, 15), slice(15, 27))


@pytest.mark.parametrize(("warmup", "cosines"), [(0, "heads"), (1, "heads"), (2, "heads"), (0, "rows")])
@written_from("KarhouTam/FL-bench", "06e658b", "src/server/pfedsim.py:38-148")
def test_two_rounds_of_pfedsim(warmup, cosines):
    options = {"lr": RATE, "warmup": warmup, "cosines": cosines, "epochs": 2, "batch_size": BATCH}
    library = Library(fm.pfedsim(task(), **options), server_lr=SERVER)
    w, own, shares = library.w, {}, []
    for number, cohort in enumerate(COHORTS):
        late, trained = number >= warmup, {}
        for i in cohort:
            start = own[i][27:54] if late and i in own and own[i][54] else w
            trained[i] = descend(start, RATE, epochs(order_key(number, i), i, "train", BATCH, 2))
        if cosines == "rows":
            # Of a class, as rows of a kernel [classes, features]; the mean over the classes.
            heads = np.array([unpack(trained[i])[2].T for i in cohort])
        else:
            heads = np.array([trained[i][HEAD] for i in cohort])[:, None]
        unit = heads / np.linalg.norm(heads, axis=2, keepdims=True)
        cosine = np.maximum(np.mean([a @ a.T for a in unit.transpose(1, 0, 2)], 0), 0)
        np.fill_diagonal(cosine, 0.9999)
        weight = -np.log(1 - cosine)
        weight /= weight.sum(1, keepdims=True)
        mixed = weight @ np.array([trained[i] for i in cohort])
        for place, i in enumerate(cohort):
            own[i] = np.r_[trained[i], np.where(HEAD, trained[i], mixed[place]), float(late)]
        shares.append(weight)
        if not late:
            w = w + SERVER * (np.average([trained[i] for i in cohort], 0, [TRAIN[i] for i in cohort]) - w)
        check((library.first, library.last)[number], number + 1, model=w, memory=rows(own, np.zeros(55)))
    assert np.min(np.diag(shares[-1])) < 0.99
    for i in (KNOWN, LATE):
        near(library.tested(i), own[i][:27] if own[i][54] else w)
    near(library.tested(NEW), w)


def test_the_rows_of_a_head_are_its_weights_in_any_layout():
    """A linear head is its rows times the features, and what it gives for none."""
    for of in (problems.normed_task(), problems.task()):
        variables = of.init(KEY)
        found = class_rows(of, variables)
        z = np.random.default_rng(1).normal(size=(4, found.shape[1]))
        near(z @ found.T, of.head(variables, z) - of.head(variables, 0 * z), 1e-12)


def test_rows_want_a_task_with_features():
    with pytest.raises(ValueError, match="looks at features"):
        fm.pfedsim(task()._replace(features=None), cosines="rows")


def critical(before, after, share):
    marks = np.zeros(27)
    for leaf in LEAVES:
        score = np.abs((after - before) * after)[leaf]
        least = np.sort(score)[::-1][int(share * len(score)) - 1]
        marks[leaf] = score >= least
    return marks


def test_what_has_not_changed_is_not_critical_and_without_critical_entries_nobody_is_near():
    before, after = np.arange(1.0, 9.0), np.arange(1.0, 9.0)
    assert not np.any(marks_of(jnp.asarray(before), jnp.asarray(after), 0.5))
    after[[2, 5, 6]] += np.array([0.1, -0.2, 0.3])
    # Half of the 8 would be 4, of which one has a score of 0.
    assert np.flatnonzero(marks_of(jnp.asarray(before), jnp.asarray(after), 0.5)).tolist() == [2, 5, 6]
    assert np.flatnonzero(marks_of(jnp.asarray(before), jnp.asarray(after), 0.25)).tolist() == [5, 6]
    assert not np.any(marks_of(jnp.asarray(before), jnp.asarray(after), 0.1))
    marks = jnp.array([[1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]], bool)
    expected = [[1, 1 - 3 / 4, 1 - 2 / 4], [1 - 3 / 6, 1, 1 - 3 / 6], [0, 0, 0]]
    near(overlaps(marks), expected, 1e-12)


def test_the_patience_of_fedcac_is_a_round_at_least():
    with pytest.raises(ValueError, match="patience=0.5"):
        fm.fedcac(task(), patience=0.5)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_the_kth_largest_is_that_of_a_sort(dtype):
    rng = np.random.default_rng(0)
    values = np.abs(rng.normal(size=101) * 10.0 ** rng.integers(-4, 3, 101)).astype(dtype)
    values[::7] = 0
    for number in (1, 2, 50, 86, 101):
        assert float(kth_largest(jnp.asarray(values), number)) == float(np.sort(values)[::-1][number - 1])


@pytest.mark.parametrize(("share", "patience"), [(0.5, 3.0), (0.9, 1.0)])
@written_from(
    "TsingZ0/PFLlib", "d832e76", "system/flcore/clients/clientcac.py:59-121", "system/flcore/servers/servercac.py:72-118"
)
def test_two_rounds_of_fedcac(share, patience):
    options = {"lr": RATE, "share": share, "patience": patience, "epochs": 2, "batch_size": BATCH}
    library = Library(fm.fedcac(task(), **options), server_lr=SERVER)
    common, own, marks, chosen = library.w, {}, {}, []
    for number, cohort in enumerate(COHORTS):
        trained = {}
        for i in cohort:
            start = np.where(marks[i], own[i], common) if i in own else common
            trained[i] = descend(start, RATE, epochs(order_key(number, i), i, "train", BATCH, 2))
            marks[i] = critical(start, trained[i], share)
        pairs = [(i, j) for i in cohort for j in cohort if i != j]
        overlap = {(i, j): 1 - np.abs(marks[i] - marks[j]).sum() / (2 * marks[i].sum()) for i, j in pairs}
        mean = np.mean(list(overlap.values()))
        least = mean + (number + 1) / patience * (max(overlap.values()) - mean)
        for i in cohort:
            with_ = [i] + [j for j in cohort if j != i and overlap[i, j] >= least]
            chosen.append(len(with_))
            own[i] = np.mean([trained[j] for j in with_], 0)
        common = np.average([trained[i] for i in cohort], 0, [TRAIN[i] for i in cohort])
        kept = {"personal": rows(own, library.w), "memory": rows(marks, np.zeros(27))}
        check((library.first, library.last)[number], number + 1, model=library.w, extra=common, **kept)
        assert list(np.asarray(library.infos[number].metrics["partners"])) == chosen[-len(cohort) :]
    assert len(set(chosen)) > 1
    for i in (KNOWN, LATE):
        near(library.tested(i), np.where(marks[i], own[i], common))
    near(library.tested(NEW), common)


def test_pfedsim_refuses_aggregators_that_would_move_its_model_after_the_warmup():
    memory = fm.aggregate.centered_clipping(radius=0.1)
    for rule in (memory, fm.aggregate.bucketing(memory, 2)):
        with pytest.raises(ValueError, match="pfedsim cannot go with an aggregator with a memory"):
            fm.federate(fm.pfedsim(task(), warmup=2), fm.Federation(aggregator=rule))
    fm.federate(fm.pfedsim(task(), warmup=2), fm.Federation(aggregator=fm.aggregate.median))
