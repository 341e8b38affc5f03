"""Keys by name: a draw depends on its purpose and on nothing else."""

import jax
import numpy as np

import fedjax_meta as fm
from fedjax_meta.keys import tagged
from tests import problems

KEY = jax.random.key(1)


def _bits(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_tags_and_numbers_give_distinct_keys():
    keys = [tagged(KEY, tag, *numbers) for tag in ("a", "b", "ab") for numbers in ((), (0,), (1,), (0, 1), (1, 0))]
    assert len({_bits(key) for key in keys}) == len(keys)
    assert _bits(tagged(KEY, "a", 3)) == _bits(jax.random.fold_in(tagged(KEY, "a"), 3))


def test_switching_options_on_leaves_every_other_draw_as_it_was():
    """Cohorts, batches and initial values are those of the plain run, whatever else is drawn."""
    data = problems.data()

    def cohorts(**options):
        algorithm = problems.build("fedavg", cohort_size=3, devices=1, **options)
        state, step, found = algorithm.init(KEY, data), jax.jit(algorithm.round), []
        for r in range(3):
            state, info = step(jax.random.fold_in(KEY, r), state, data)
            found.append((info.ids.tolist(), np.asarray(info.metrics["loss"]).tolist()))
        return found

    plain = cohorts()
    late = cohorts(participation=fm.participation.unreliable(late=0.5))
    coarse = cohorts(uploads=(fm.uploads.quantize(2),))
    for other in (late, coarse):
        assert [ids for ids, _ in other] == [ids for ids, _ in plain]
        # The first round starts from the same model: the losses of its batches are the same too.
        assert other[0] == plain[0]
        assert other[1:] != plain[1:]
