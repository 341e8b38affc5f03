"""Checks of arguments: what they refuse, in one line, and that traced values pass."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_meta import checks, schedules

REFUSED = {
    "zero": (lambda: checks.positive("lr", 0.0), "lr=0.0 must be finite and above 0"),
    "NaN": (lambda: checks.positive("lr", float("nan")), "lr=nan must be finite"),
    "one entry": (
        lambda: checks.positive("s", np.array([0.1, -1.0]), each=True),
        r"s=\[ 0\.1 -1\. \] must be finite and above 0",
    ),
    "text": (lambda: checks.positive("lr", "0.1"), "lr='0.1' must be finite and above 0: a number, not text"),
    "a list": (
        lambda: checks.positive("lr", [0.1, 0.2]),
        r"lr=\[0\.1, 0\.2\] must be one number, not a list; it must be finite",
    ),
    "an array": (lambda: checks.share("late", np.ones(2)), r"late must be one number, not an array float64\[2\]; it must lie"),
    "a traced array": (
        lambda: jax.eval_shape(lambda rate: checks.positive("lr", rate), jnp.ones(2)),
        r"lr must be one number, not an array float64\[2\]",
    ),
    "complex": (lambda: checks.not_negative("mu", 1j), "mu=1j must be finite and at least 0"),
    "a ragged list": (
        lambda: checks.positive("s", [[1.0], [1.0, 2.0]], each=True),
        r"s=\[\[1\.0\], \[1\.0, 2\.0\]\] must be finite",
    ),
    "a huge integer": (lambda: checks.count("epochs", 10**5000), "epochs=an integer of 16610 bits must be at most 2147483647"),
    "a share that is text": (lambda: checks.share("late", "x"), "late='x' must lie between 0 and 1"),
    "a bound that is text": (lambda: checks.between("a", "x", 0, 1), r"a='x' must lie in \[0, 1\]"),
    "not finite": (lambda: checks.finite("x", np.nan), "x=nan must be a finite number"),
    "a seed below 0": (
        lambda: checks.seed("seed", -1),
        r"seed=-1 must be an integer of at least 0 and below 2\*\*63 or a NumPy",
    ),
    "a seed beyond 64 bits": (lambda: checks.seed("seed", 2**64), "seed=18446744073709551616 must be an integer"),
    "a seed beyond 32 bits": (lambda: checks.seed("seed", 2**32, bits=32), r"below 2\*\*32$"),
    "a generator where none can be": (lambda: checks.seed("seed", np.random.default_rng(0), bits=32), r"below 2\*\*32$"),
    "a generator whose seed is kept": (
        lambda: schedules.passes(np.random.default_rng(0)),
        r"^seed=.* must be an integer of at least 0 and below 2\*\*32$",
    ),
    "no seed": (lambda: checks.seed("seed", None), "seed=None must be an integer"),
    "a word for a flag": (lambda: checks.flag("partial", "no"), "partial='no' must be True or False"),
    "ids of several lengths": (
        lambda: checks.indices("ids", [[0], [1, 2]], 3),
        r"ids=\[\[0\], \[1, 2\]\] must be integers in \[0, 3\)",
    ),
    "a near word": (
        lambda: checks.one_of("mask", "haed", ("head", "body")),
        r"'haed' is unknown \(did you mean 'head'\?\); allowed",
    ),
    "letters in another order": (
        lambda: checks.one_of("o", "sdg", ("adam", "sgd")),
        r"'sdg' is unknown \(did you mean 'sgd'\?\)",
    ),
    "the beginning of a word": (
        lambda: checks.one_of("o", "momen", ("sgd", "momentum_nesterov")),
        "did you mean 'momentum_nest",
    ),
    "a far word": (lambda: checks.one_of("dataset", "moons", ("mnist", "cifar10")), "'moons' is unknown; allowed are mnist"),
    "a list for a word": (lambda: checks.one_of("how", ["a"], {"a": 1}), r"how=\['a'\] is unknown; allowed are a"),
    "an array for a word": (lambda: checks.one_of("how", np.array(["a", "b"]), ("a",)), "is unknown; allowed are a"),
    "no function": (
        lambda: checks.function("schedule", 3, ("key", "round"), "uniform"),
        r"schedule=3 must be a function \(key, round\); write e\.g\. uniform",
    ),
    "a factory that was not called": (
        lambda: checks.function("rule", lambda *, late=0.0: late, ("key", "client"), "unreliable(late=0.1)"),
        r"rule must be a function \(key, client\), but <lambda> takes \(late=\.\.\.\); write e\.g\. unreliable\(late=0\.1\)",
    ),
    "a factory of something else": (
        lambda: checks.optimizer_factory("optimizer", float),
        r"such as optax\.sgd, but float\(0\.1\) gives 0\.1$",
    ),
    "a factory that fails": (
        lambda: checks.optimizer_factory("optimizer", lambda: optax.sgd(0.1)),
        r"but <lambda>\(0\.1\) raises TypeError: ",
    ),
    "an optimiser that needs the loss": (
        lambda: checks.optimizer_factory("optimizer", optax.polyak_sgd),
        r"optimizer: polyak_sgd needs value= at each step, such as the value of the loss, which is not given here$",
    ),
    "an optimiser that needs more": (
        lambda: checks.optimizer_factory("server_optimizer", optax.lbfgs),
        r"server_optimizer: lbfgs needs value= and grad= and value_fn= at each step",
    ),
    "a part of an optimiser that needs the loss": (
        lambda: checks.optimizer_factory(
            "optimizer", lambda rate: optax.chain(optax.sgd(rate), optax.contrib.reduce_on_plateau())
        ),
        "optimizer: <lambda> needs value= at each step",
    ),
    "two sets of parameters": (
        lambda: checks.optimizer_factory("optimizer", lambda rate: optax.lookahead(optax.sgd(rate), 5, 0.5)),
        r"optimizer: <lambda> needs pairs of fast and slow parameters \(optax.LookaheadParams\)",
    ),
    "several keys": (
        lambda: checks.prng_key("key", jax.random.split(jax.random.key(0))),
        r"key must be one JAX PRNG key, not an array of keys \[2\]",
    ),
    "nothing": (lambda: checks.not_negative("lr", None), "lr=None must be finite and at least 0"),
    "negative": (lambda: checks.not_negative("mu", -1e-9), "mu=-1e-09 must be finite and at least 0"),
    "infinite": (lambda: checks.not_negative("mu", np.inf), "mu=inf must be finite"),
    "a bool": (lambda: checks.count("epochs", True), "epochs=True must be an integer of at least 1"),
    "a float": (lambda: checks.count("epochs", 2.0), "epochs=2.0 must be an integer of at least 1"),
    "an array of one count": (
        lambda: checks.count("epochs", jnp.array(2)),
        "epochs=2 must be .* of at least 1, not an array$",
    ),
    "an array of one seed": (lambda: checks.seed("seed", np.array(2)), r"below 2\*\*63 or a NumPy generator, not an array$"),
    "below": (lambda: checks.count("epochs", 1, least=2), "epochs=1 must be an integer of at least 2"),
    "the whole": (lambda: checks.fraction("train", 1), "train=1 must lie strictly between 0 and 1"),
    "no number": (lambda: checks.fraction("train", "half"), "train='half' must lie strictly between 0 and 1"),
    "an index beyond": (lambda: checks.indices("ids", [0, 3], 3), r"ids=\[0, 3\] must be integers in \[0, 3\)"),
    "half an index": (lambda: checks.indices("ids", 0.5, 3), r"ids=0.5 must be an integer in \[0, 3\)"),
    "unknown": (lambda: checks.one_of("how", "c", ("a", "b", "a")), "how='c' is unknown; allowed are a, b$"),
    "an optimiser with its rate": (
        lambda: checks.optimizer_factory("optimizer", optax.sgd(0.1)),
        r"optimizer must be a factory `rate -> optax\.GradientTransformation` such as optax\.sgd; its rate is an argument of its "
        r"own, not optimizer=optax\.sgd\(0\.1\)$",
    ),
    "an optimiser by name": (
        lambda: checks.optimizer_factory("optimizer", "sgd"),
        r"optimizer must be a factory `rate -> optax\.GradientTransformation` such as optax\.sgd, not 'sgd'$",
    ),
    "a seed": (lambda: checks.prng_key("key", 0), r"^key=0 must be a JAX PRNG key: jax\.random\.key\(0\)$"),
    "no key": (lambda: checks.prng_key("key", None), "key=None must be a JAX PRNG key"),
    "numbers": (lambda: checks.prng_key("key", jnp.zeros(3)), r"key=float64\[3\] must be a JAX PRNG key"),
    "a legacy key": (
        lambda: checks.prng_key("key", jax.random.PRNGKey(0)),
        r"key is a legacy uint32\[2\] key: use jax\.random\.key\(0\) instead of jax\.random\.PRNGKey\(0\)",
    ),
    "a traced legacy key": (
        lambda: jax.eval_shape(lambda key: checks.prng_key("key", key), jax.random.PRNGKey(0)),
        r"key is a legacy uint32\[2\] key",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_one_line_that_names_value_and_range(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_what_is_allowed_passes():
    checks.positive("lr", jnp.array(0.1))
    checks.positive("seconds", [0.1, 2.0], each=True)
    checks.not_negative("mu", 0)
    checks.count("epochs", np.int64(3))
    checks.fraction("train", 0.75)
    checks.indices("ids", np.array([2, 0]), 3)
    checks.one_of("how", "a", ("a", "b"))
    for factory in (optax.sgd, lambda rate: optax.adam(rate, eps=1e-3)):
        checks.optimizer_factory("optimizer", factory)
    checks.prng_key("key", jax.random.key(0))
    checks.prng_key("key", jax.random.key(0, impl="rbg"))
    checks.options("fedavg", {"lr": 0.1}, ["lr", "epochs"], {})


def test_traced_values_pass():
    def build(rate):
        checks.positive("lr", rate)
        checks.not_negative("mu", rate)
        checks.fraction("share", rate)
        checks.indices("ids", rate, 3)
        return rate

    assert jax.jit(build)(-1.0) == -1


def test_a_traced_key_passes():
    def build(key):
        checks.prng_key("key", key)
        return jax.random.bits(key)

    assert jax.jit(build)(jax.random.key(0)) == jax.random.bits(jax.random.key(0))


ELSEWHERE = {"cohort_size": "Federation", "rounds": "simulate"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("epoch", "fedavg() takes no 'epoch' (did you mean 'epochs'?); allowed are lr, epochs"),
        ("cohort_size", "fedavg() takes no 'cohort_size', which belongs to Federation; allowed are lr, epochs"),
        (
            "cohort_sizes",
            "fedavg() takes no 'cohort_sizes' (did you mean 'cohort_size', which belongs to Federation?); allowed are lr, epochs",
        ),
        ("x", "fedavg() takes no 'x'; allowed are lr, epochs"),
    ],
)
def test_an_unknown_option_is_refused_with_what_to_write_instead(name, message):
    with pytest.raises(TypeError) as caught:
        checks.options("fedavg", {"lr": 0.1, name: 1}, ["lr", "epochs"], ELSEWHERE)
    assert str(caught.value) == message


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


def test_a_mask_of_another_depth_or_type_is_told_from_the_model():
    model = {"body": {"w": False, "b": False}, "head": {"w": False}}
    assert checks.mismatch({"body": {"w": True, "b": True}, "head": {"w": False}}, model) is None
    for mask, words in (
        ({"body": True, "head": False}, "['body']['b'] is missing"),
        ({"body": {"w": True, "b": True}, "head": {"w": {"deep": False}}}, "['head']['w'] is missing"),
        ({"body": {"w": True, "b": 1}, "head": {"w": False}}, "['body']['b'] is int64[], not bool[]"),
    ):
        assert checks.mismatch(mask, model) == words
