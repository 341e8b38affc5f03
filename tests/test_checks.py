"""Checks at the door: what they refuse, in one line, and that traced values pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_meta import checks

REFUSED = {
    "zero": (lambda: checks.positive("lr", 0.0), "lr=0.0 must be finite and above 0"),
    "NaN": (lambda: checks.positive("lr", float("nan")), "lr=nan must be finite"),
    "one entry": (lambda: checks.positive("lr", np.array([0.1, -1.0])), "must be finite and above 0"),
    "text": (lambda: checks.positive("lr", "0.1"), "lr=0.1 must be finite and above 0"),
    "nothing": (lambda: checks.not_negative("lr", None), "lr=None must be finite and at least 0"),
    "negative": (lambda: checks.not_negative("mu", -1e-9), "mu=-1e-09 must be finite and at least 0"),
    "infinite": (lambda: checks.not_negative("mu", np.inf), "mu=inf must be finite"),
    "a bool": (lambda: checks.count("epochs", True), "epochs=True must be an integer of at least 1"),
    "a float": (lambda: checks.count("epochs", 2.0), "epochs=2.0 must be an integer of at least 1"),
    "below": (lambda: checks.count("epochs", 1, least=2), "epochs=1 must be an integer of at least 2"),
    "the whole": (lambda: checks.fraction("train", 1), "train=1 must lie strictly between 0 and 1"),
    "no number": (lambda: checks.fraction("train", "half"), "train=half must lie strictly between 0 and 1"),
    "an index beyond": (lambda: checks.indices("ids", [0, 3], 3), r"ids=\[0, 3\] must be integers in \[0, 3\)"),
    "half an index": (lambda: checks.indices("ids", 0.5, 3), r"ids=0.5 must be integers in \[0, 3\)"),
    "unknown": (lambda: checks.one_of("how", "c", ("a", "b")), "how='c' is unknown; allowed are a, b"),
}


def test_the_first_leaf_that_differs_is_named():
    wanted = {"a": jnp.zeros(3, jnp.float32), "b": (jnp.zeros((), jnp.int32),)}
    assert checks.mismatch(jax.tree.map(jnp.ones_like, wanted), wanted) is None
    assert checks.mismatch({"a": np.ones(3, np.float32), "b": (2,)}, wanted) is None
    for given, words in (
        ({"a": np.ones(3), "b": (2,)}, "['a'] is float64[3], not float32[3]"),
        ({"a": wanted["a"], "b": (2.5,)}, "['b'][0] is float64[], not int32[]"),
        ({"a": wanted["a"], "b": ()}, "['b'][0] is missing"),
        ({**wanted, "c": 1}, "['c'] does not belong there"),
        (jnp.zeros(2), "['a'] is missing"),
    ):
        assert checks.mismatch(given, wanted) == words
    assert checks.mismatch(jnp.zeros(2), jnp.zeros(3)) == "the only leaf is float64[2], not float64[3]"
    assert "structure" in checks.mismatch({**wanted, "c": ()}, wanted)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_one_line_that_names_value_and_range(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_what_is_allowed_passes():
    checks.positive("lr", jnp.array([0.1, 2.0]))
    checks.not_negative("mu", 0)
    checks.count("epochs", np.int64(3))
    checks.fraction("train", 0.75)
    checks.indices("ids", np.array([2, 0]), 3)
    checks.one_of("how", "a", ("a", "b"))


def test_traced_values_have_no_number_yet_and_pass():
    def build(rate):
        checks.positive("lr", rate)
        checks.not_negative("mu", rate)
        checks.fraction("share", rate)
        checks.indices("ids", rate, 3)
        return rate

    assert jax.jit(build)(-1.0) == -1
