"""Bad inputs: builders of data, partitions, slots, protocols, transforms, generated clients, sources and prepared files."""

import functools
import io
import tempfile
import zipfile
from pathlib import Path

import jax
import numpy as np

import fedjax_meta as fm
from fedjax_meta import data as D
from fedjax_meta.data import packing, partition, protocols, scaling, sequences, slots, sources, synthetic, transforms
from tests import problems
from tests.battery.table import DATA, LABELS, Late, Row, rows

NAN = float("nan")
SIZES = np.full(5, 20)
ALL = np.arange(100)
X = np.ones((100, 3), np.float32)
TOKENS = np.tile(LABELS[:, None], 3)


def _bad_x(value, dtype=np.float32, sample=41):
    x = np.ones((100, 3), dtype)
    x[sample, 1] = value
    return x


def _bad_y(value, dtype=np.int64, sample=41):
    y = LABELS.astype(dtype)
    y[sample] = value
    return y


def _in_32_bits(call):
    """As users run it: tests have 64 bits, where a large number stays finite."""

    def run():
        with jax.enable_x64(False):
            return call()

    return run


GOOD = {"x": X, "y": LABELS, "order": ALL, "sizes": SIZES}
BUILDERS = {
    **rows(fm.from_partition, GOOD, [
        ("x", None, "inputs must be one numeric array"),
        ("x", "x", "inputs must be one numeric array", "dtype <U1"),
        ("x", np.ma.masked_array(X, mask=X > 0), "x is a masked array, whose masked numbers would count"),
        ("y", np.ma.masked_array(LABELS, mask=LABELS > 2), "y is a masked array, whose masked numbers would count"),
        ("x", [[1], [1, 2]], "x is not one array [M, ...]"),
        ("x", X.astype(complex), "inputs must be one numeric array [M, ...], not dtype complex128"),
        ("x", X.astype(object), "not dtype object (images of mixed shape?)"),
        ("x", X[:, 0], "inputs must be [M, ...] and labels [M]"),
        ("x", X[:50], "not (50, 3) and (100,)"),
        ("x", X.astype("datetime64[s]"), "inputs must be one numeric array"),
        ("x", X.astype(np.longdouble), "not dtype float128"),
        ("x", _bad_x(NAN), "inputs hold NaN or infinite values, first in sample 1 of client 2 (number 41 of all)"),
        ("x", _bad_x(np.inf), "inputs hold NaN or infinite values, first in sample 1 of client 2 (number 41 of all)"),
        ("x", _bad_x(-np.inf, np.float16, 0), "first in sample 0 of client 0 (number 0 of all)"),
        ("x", Late(lambda: jax.random.split(jax.random.key(0), 100)), "x is not one array"),
        ("y", LABELS.astype(float), "labels must be integers, not dtype float64"),
        ("y", LABELS.astype(str), "labels must be integers, not dtype <U"),
        ("y", LABELS > 1, "labels must be integers, not dtype bool"),
        ("y", None, "labels must be integers, not dtype object"),
        ("y", LABELS[:0], "not (100, 3) and (0,)"),
        ("y", _bad_y(-1), "labels run from -1 to 3", "label -1 in sample 1 of client 2 (number 41"),
        ("y", _bad_y(2**40), "label 1099511627776 in sample 1 of client 2", "np.unique"),
        ("y", _bad_y(2**63, np.uint64), "label 9223372036854775808 in sample 1 of client 2"),
        ("y", _bad_y(10**6), "must lie in [0, num_classes=1000000): label 1000000 in sample 1 of client 2"),
        ("order", ALL[:-1], "order has shape (99,), but the sizes sum to S=100"),
        ("order", ALL + 1, "order names samples 1 to 100, but there are M=100"),
        ("order", ALL - 1, "order names samples -1 to 98"),
        ("order", ALL.astype(float), "order must be one array of integers, not float64[100]"),
        ("order", "0,1", "order must be one array of integers"),
        ("sizes", [0, 20, 20, 20, 40], "every client needs at least 1 sample, but client 0 has none"),
        ("sizes", [-20, 40, 20, 20, 40], "but client 0 has none"),
        ("sizes", [], "sizes must be counts [N] of N >= 1 clients"),
        ("sizes", [[20, 20]], "sizes must be counts [N]"),
        ("sizes", 100, "sizes must be counts [N] of N >= 1 clients"),
        ("sizes", [20.0] * 5, "sizes must be one array of integers"),
        ("num_classes", 3, "labels run from 0 to 3, but must lie in [0, num_classes=3): label 3 in sample 3"),
        ("num_classes", -1, "num_classes=-1 must be an integer of at least 0"),
        ("num_classes", 4.0, "num_classes=4.0 must be an integer"),
        ("num_classes", "4", "num_classes='4' must be an integer"),
        ("num_classes", True, "num_classes=True must be an integer"),
        ("views", {}, "views is empty; name at least one"),
        ("views", [("train", 0, 1)], "views must be a dict of name and (begin, end)"),
        ("views", {3: (SIZES, SIZES)}, "views must be a dict"),
        ("views", {"train": 3}, "view 'train' must be a pair (begin, end)"),
        ("views", {"train": (SIZES * 0,)}, "view 'train' must be a pair (begin, end)"),
        ("views", {"train": (SIZES * 0, SIZES + 1)}, "view 'train' of client 0 reaches from 0 to 21, beyond its 20 samples"),
        ("views", {"train": (SIZES * 0 - 1, SIZES)}, "of client 0 reaches from -1 to 20"),
        ("views", {"train": (SIZES, SIZES)}, "view 'train' of client 0 is empty: it begins at 20 and ends at 20 of 20 samples"),
        ("views", {"train": ([0, 0, 0, 5, 0], [20, 20, 20, 5, 20])}, "view 'train' of client 3 is empty"),
        ("views", {"train": (0, 20)}, "view 'train' has begin () and end (), but there are N=5 clients"),
        ("views", {"train": (SIZES * 0.0, SIZES)}, "begin of view 'train' must be one array of integers"),
        ("offset", NAN, "offset holds NaN or infinite values"),
        ("offset", "x", "offset must be one array of real numbers, not 'x'"),
        ("offset", [0.0, 1.0], "offset has shape (2,), which does not broadcast against one sample (3,)"),
        ("scale", np.inf, "scale holds NaN or infinite values"),
        ("scale", 1e300, "scale holds NaN or infinite values"),
        ("scale", 1j, "scale must be one array of real numbers"),
        ("scales", 1, "unexpected keyword argument"),
        ("scale", "stord", "scale must be one array of real numbers, not 'stord'"),
        ("x", X.astype(np.uint8), "inputs are uint8 of shape (100, 3): give scale=1/255 if they are pixels", "scale='stored'"),
        ("x", X[:, :0], "inputs are empty: shape (100, 0)"),
        ("x", {}, "x holds no arrays"),
        ("x", {"tokens": X, "mask": X[:50]}, "inputs['mask'] (50, 3) and inputs['tokens'] (100, 3) differ"),
        ("x", {"tokens": _bad_x(NAN)}, "inputs['tokens'] hold NaN or infinite values, first in sample 1 of client 2"),
        ("x", {"words": X.astype(str)}, "inputs['words'] must be one numeric array [M, ...], not dtype <U"),
        ("y", np.tile(LABELS[:, None], 5)[:, :0], "targets are empty: shape (100, 0)"),
        ("y", np.where(np.arange(300).reshape(100, 3) == 124, 9, 0) - 1, "label -1 in sample 0 of client 0"),
        ("y", fm.Weighted(LABELS, np.ones(99)), "but inputs (100, 3) and targets.weight (99,) differ"),
        ("y", fm.Weighted(TOKENS, np.arange(300).reshape(100, 3) >= 3), "sample 0 has no target with a weight above 0: leave"),
        ("y", fm.Weighted(TOKENS, np.ones((100, 2))), "targets (100, 3) have weights (100, 2): the leading axes must be the"),
        ("y", fm.Weighted(TOKENS, -np.ones((100, 3))), "weights of targets must be finite and not negative"),
        ("y", fm.Weighted(TOKENS, np.full((100, 3), NAN)), "weights of targets must be finite and not negative"),
        ("y", {"a": LABELS, "b": LABELS.astype(str)}, "targets['b'] must be numbers, not dtype <U"),
        ("num_ids", 3, "num_ids=3 is for integer ids, but inputs are float32"),
        ("num_ids", 0, "num_ids=0 must be an integer of at least 1"),
    ]),
    **rows(fm.from_partition, {**GOOD, "x": {"tokens": TOKENS, "user": LABELS}}, [
        ("num_ids", {"tokens": 3}, "inputs['tokens'] must lie in [0, num_ids=3), but one is 3, first in sample 3 of client 0"),
        ("num_ids", {"token": 3}, "num_ids={'token': 3} must name leaves of the inputs, which are ['tokens'], ['user']"),
        ("num_ids", 5, "num_ids=5 must name leaves of the inputs"),
        ("scale", 0.5, "scale=0.5 must name leaves of the inputs"),
        ("scale", {"tokens": np.ones(2)}, "scale has shape (2,), which does not broadcast against one sample (3,)"),
        ("y", TOKENS[:50], "one a sample, but inputs['tokens'] (100, 3) and targets (50, 3) differ"),
    ]),
    **rows(sequences.pad, {"length": None}, [
        ("sequences", [], "must be a list of at least one array"),
        ("sequences", "abc", "sequences='abc' must be a list"),
        ("sequences", [[1, 2], []], "sequence 1 is empty: leave it out"),
        ("sequences", [[1, 2], ["a"]], "sequence 1 must be an array [t, ...] of numbers, not <U1[1]"),
        ("sequences", [np.ones((2, 3)), np.ones((2, 4))], "sequences differ in more than their length: (3,), (4,)"),
        ("sequences", [[1, [2, 3]]], "sequence 0 is not one array [t, ...]"),
    ]),
    **rows(sequences.pad, {"sequences": [[1, 2, 3], [4]]}, [
        ("length", 2, "sequence 0 has length 3, more than length=2: cut it before"),
        ("length", 0, "length=0 must be an integer of at least 1"),
    ]),
    **rows(sequences.next_tokens, {"tokens": [1, 2, 3], "length": 2}, [
        ("tokens", [1], "text 0 must be ids [n] with n >= 2"),
        ("tokens", [[1, 2], [3]], "text 1 must be ids [n] with n >= 2"),
        ("tokens", [0.5, 1.0], "text 0 must be one array of integers"),
        ("length", -1, "length=-1 must be an integer of at least 1"),
    ]),
    **rows(fm.from_clients, {}, [
        ("clients", [], "clients is empty; give one (x, y) pair per client"),
        ("clients", None, "clients must be a list of one (x, y) pair per client, not None"),
        ("clients", {0: (X, LABELS)}, "per client, not a dict of 1: list(clients.values()) makes one"),
        ("clients", [(X, LABELS), X], "clients must be a list of (x, y) pairs, but client 1 is an array ["),
        ("clients", [(X, LABELS), (X, LABELS, 1)], "but client 1 is a tuple of 3"),
        ("clients", [(X, LABELS), None], "but client 1 is None"),
        ("clients", [(X, LABELS), (X[:, :2], LABELS)], "clients' inputs differ in shape: (2,), (3,)"),
        ("clients", [(X, LABELS), (X.astype(np.uint8), LABELS)], "some clients' inputs are uint8"),
        ("clients", [(X, LABELS), (X, LABELS[:-1])], "client 1 has 100 inputs and 99 labels"),
        ("clients", [(X, LABELS), (X, LABELS.astype(float))], "client 1: labels must be integers, not dtype float64"),
        ("clients", [(X, LABELS), (X.astype(complex), LABELS)], "client 1: inputs must be one numeric array"),
        ("clients", [(X, LABELS), ([[1, 2, 3], [1]], [0, 1])], "x of client 1 is not one array"),
        ("clients", [(X, LABELS), (X[:0], LABELS[:0])], "every client needs at least 1 sample, but client 1 has none"),
        ("clients", [({"a": X}, LABELS), ({"a": X[:0]}, LABELS[:0])], "needs at least 1 sample, but client 1 has none"),
        ("clients", [({"a": X}, LABELS), ({"b": X}, LABELS)], "clients' inputs differ in structure", "for client 1"),
        ("clients", [({"a": X}, LABELS), ({"a": X[:, :2]}, LABELS)], "clients' inputs['a'] differ in shape: (2,), (3,)"),
        ("clients", [(X, TOKENS), (X, TOKENS[:, :2])], "clients' targets differ in shape: (2,), (3,)"),
        ("clients", [(X, LABELS), (X[:1], LABELS[:1])], "of client 1 is empty: it begins at 0 and ends at 0 of 1 sample"),
        ("clients", [(X, LABELS), (_bad_x(NAN), LABELS)], "first in sample 41 of client 1 (number 141 of all)"),
        ("clients", [(X, LABELS), (X, _bad_y(-3))], "label -3 in sample 41 of client 1"),
        ("clients", [(X, LABELS), (X, _bad_y(2**35))], "of client 1"),
    ]),
    "from_clients(views of one that has none)": Row(
        lambda: fm.from_clients([(X, LABELS)], view={}), ("from_clients() takes no 'view' (did you mean 'views'?)",)
    ),
    "targets that are NaN": Row(
        lambda: fm.from_partition(X, _bad_y(NAN, float), ALL, SIZES, num_classes=0),
        ("targets hold NaN or infinite values, first in sample 1 of client 2 (number 41 of all)",),
    ),
    "targets that are complex": Row(
        lambda: fm.from_partition(X, LABELS * 1j, ALL, SIZES, num_classes=0), ("targets must be numbers, not dtype complex128",)
    ),
    "inputs infinite as float32": Row(
        _in_32_bits(lambda: fm.from_partition(_bad_x(1e300, float), LABELS, ALL, SIZES)),
        ("inputs hold NaN or infinite values as float32, first in sample 1 of client 2 (number 41 of all)",),
    ),
    "targets infinite as float32": Row(
        _in_32_bits(lambda: fm.from_partition(X, _bad_y(1e39, float), ALL, SIZES, num_classes=0)),
        ("targets hold NaN or infinite values as float32, first in sample 1 of client 2 (number 41 of all)",),
    ),
    "inputs beyond int32": Row(
        _in_32_bits(lambda: fm.from_partition(_bad_x(2**31, np.int64), LABELS, ALL, SIZES)),
        ("inputs hold integers that int32 cannot hold, first in sample 1 of client 2 (number 41 of all)",),
    ),
    **rows(fm.data.train_test_views, {"sizes": [10, 20]}, [
        ("train", 0, "train=0 must lie strictly between 0 and 1"),
        ("train", 1.0, "train=1.0 must lie strictly between 0 and 1"),
        ("train", "most", "train='most' must lie"),
        ("support", NAN, "support=nan must lie strictly between 0 and 1"),
        ("sizes", "x", "sizes must be one array of integers"),
        ("sizes", [1.5], "sizes must be one array of integers"),
        ("sizes", [-1], "sizes must be counts [N]"),
        ("sizes", [], "sizes must be counts [N] of N >= 1 clients"),
    ]),
    "a client beyond the last": Row(lambda: problems.data().client(7), ("index=7, but there are N=7 clients, counted from 0",)),
    "half a client": Row(lambda: problems.data().client(0.5), ("index=0.5 must be one integer",)),
    "a client by name": Row(lambda: problems.data().client("0"), ("index='0' must be one integer",)),
    "two clients for one": Row(lambda: problems.data().client(np.array([0, 1])), ("index=[0 1] must be one integer",)),
    "sizes of no view": Row(
        lambda: problems.data().sizes("tset"), ("the data have no view 'tset' (did you mean 'test'?); they have train",)
    ),
    "a view of no name": Row(lambda: problems.data().client(0)[0], ("the data have no view 0; they have train",)),
    "a view that is missing": Row(lambda: problems.data().client(0)["valid"], ("the data have no view 'valid'",)),
    "a selection of unknown clients": Row(lambda: problems.data().select([0, 9]), ("clients=[0, 9] must be integers in [0, 7)",)),
    "a selection by mask": Row(lambda: problems.data().select(np.ones(7, bool)), ("clients=", "must be integers in [0, 7)")),
    **rows(packing.pack, {"data": DATA, "clients": np.array([0, 1]), "capacity": 200}, [
        ("clients", [7], "clients=[7] must be integers in [0, 7)"),
        ("capacity", 10, "capacity=10 must be at least"),
        ("capacity", None, "capacity=None must be an integer"),
        ("data", None, "data must be a FederatedData"),
    ]),
    **rows(packing.capacity, {"data": DATA}, [("count", 0, "count=0 must be an integer of at least 1")]),
}  # fmt: skip

VIEW = Late(lambda: problems.data().client(0)["train"])
BATCHES = {
    f"{name}{tuple(map(str, given))}": Row(lambda name=name, given=given: getattr(VIEW(), name)(*given), (word,))
    for name, given, word in [
        ("in_order", (0,), "batch_size=0 must be an integer of at least 1"),
        ("in_order", ("all",), "batch_size='all' must be an integer"),
        ("in_chunks", (0,), "most=0 must be an integer"),
        ("full", (-1,), "steps=-1 must be an integer of at least 0"),
        ("full", (1.5,), "steps=1.5 must be an integer"),
        ("epochs", (None, 0), "batch_size=0 must be an integer"),
        ("epochs", (None, 4), "key=None must be a JAX PRNG key"),
        ("epochs", (7, 4), "key=7 must be a JAX PRNG key"),
        ("epochs", (None, 4, -1), "epochs=-1 must be an integer"),
        ("endless", (None, 4, 0.5), "steps=0.5 must be an integer"),
        ("endless", (0, 4, 1), "key=0 must be a JAX PRNG key"),
    ]
}
BATCHES |= {
    "epochs of a share above 1": Row(
        lambda: VIEW().epochs(jax.random.key(0), 4, share=1.5), ("share=1.5 must lie between 0 and 1",)
    ),
    "a legacy key": Row(lambda: VIEW().epochs(jax.random.PRNGKey(0), 4), ("key is a legacy uint32[2] key",)),
}

PARTITIONS = {
    **rows(partition.iid, {"labels": LABELS, "num_clients": 5, "seed": 0}, [
        ("labels", [], "labels must be integers [M] with M >= 1"),
        ("labels", [0.5], "labels must be integers [M] with M >= 1, not float64 [1]"),
        ("labels", [[0, 1]], "labels must be integers [M]"),
        ("labels", [[0], [1, 2]], "labels is not one array [M, ...]"),
        ("labels", np.ma.masked_array(LABELS, mask=LABELS > 2), "labels is a masked array, whose masked numbers would count"),
        ("labels", ["a", "b"], "np.unique(labels, return_inverse=True)[1] converts any"),
        ("labels", [0, -1], "labels must not be negative, but one is -1"),
        ("labels", [0, 10**12], "labels must be below 1000000, but one is 1000000000000"),
        ("num_clients", 0, "num_clients=0 must be an integer of at least 1"),
        ("num_clients", 101, "num_clients=101 with at least 1 samples each need more than the M=100"),
        ("num_clients", "5", "num_clients='5' must be an integer"),
        ("seed", None, "seed=None must be an integer of at least 0"),
        ("seed", -1, "seed=-1 must be an integer of at least 0"),
        ("seed", 2**64, "seed=18446744073709551616 must be an integer of at least 0 and below 2**63"),
        ("seed", 1.5, "seed=1.5 must be an integer"),
        ("seed", [1, 2], "seed=[1, 2] must be an integer"),
        ("seed", True, "seed=True must be an integer"),
    ]),
    **rows(partition.quantity_skew, {"labels": LABELS, "num_clients": 5, "concentration": 1.0, "seed": 0}, [
        ("concentration", 0, "concentration=0 must be finite and above 0"),
        ("concentration", [1.0], "concentration=[1.0] must be one number"),
        ("min_samples", 30, "with at least 30 samples each need more than the M=100"),
        ("min_samples", 0, "min_samples=0 must be an integer"),
    ]),
    **rows(partition.dirichlet_classes, {"labels": LABELS, "num_clients": 5, "concentration": 1.0, "seed": 0}, [
        ("concentration", NAN, "concentration=nan must be finite"),
        ("concentration", "x", "concentration='x' must be finite"),
        ("seed", "x", "seed='x' must be an integer"),
    ]),
    **rows(partition.dirichlet_clients, {"labels": LABELS, "num_clients": 5, "concentration": 1.0, "seed": 0}, [
        ("concentration", -1, "concentration=-1 must be finite and above 0"),
        ("sizes", [10, 10], "sizes must be N=5 counts of at least 1"),
        ("sizes", [0, 10, 10, 10, 10], "sizes must be N=5 counts of at least 1"),
        ("sizes", [30] * 5, "with a sum of at most M=100"),
        ("sizes", [1.5] * 5, "sizes must be one array of integers"),
    ]),
    **rows(partition.shard_assignment, {"num_clients": 5, "seed": 0}, [
        ("per_client", 0, "per_client=0 must be an integer"),
        ("num_clients", None, "num_clients=None must be an integer"),
        ("seed", -1, "seed=-1 must be an integer"),
    ]),
    **rows(partition.shards, {"labels": LABELS, "assignment": np.arange(10).reshape(5, 2)}, [
        ("assignment", np.zeros((5, 2), int), "assignment must be a permutation of the shards [N, s]"),
        ("assignment", np.arange(10), "assignment must be a permutation of the shards [N, s], not [10]"),
        ("assignment", "x", "assignment must be one array of integers"),
        ("assignment", np.arange(14).reshape(7, 2), "M=100 samples do not divide into 14 equal shards"),
        ("assignment", np.arange(200).reshape(100, 2), "200 shards are more than the M=100 samples"),
        ("uneven", "no", "uneven='no' must be True or False"),
    ]),
    **rows(partition.dominant_groups, {"labels": LABELS, "num_clients": 4, "groups": [(0, 1), (2, 3)], "size": 10}, [
        ("groups", [], "groups=[] must be non-empty lists of classes"),
        ("groups", [(0,), ()], "must be non-empty lists of classes in [0, 4)"),
        ("groups", 3, "groups=3 must be non-empty lists"),
        ("groups", [0, 1], "groups=[0, 1] must be non-empty lists"),
        ("groups", [(4,)], "groups=(4,) must be integers in [0, 4)"),
        ("size", 0, "size=0 must be an integer"),
        ("size", 80, "but the clients ask for", "--share"),
        ("uniform", 1.5, "uniform=1.5 must lie between 0 and 1"),
        ("first", -1, "first=-1 must be an integer of at least 0"),
        ("share", "yes", "share='yes' must be True or False"),
        ("num_classes", 2, "num_classes=2 must be an integer of at least 4"),
    ]),
    **rows(partition.natural, {"features": LABELS}, [
        ("features", [], "features must be integers or strings [M]"),
        ("features", [[0]], "features must be integers or strings [M]"),
        ("features", [None], "features must be integers or strings [M], not object"),
        ("features", [0.5], "features must be integers or strings [M], not float64"),
        ("min_samples", 26, "min_samples=26 must be at most 25"),
        ("min_samples", 0, "min_samples=0 must be an integer"),
    ]),
    **rows(slots.class_slots, {"num_clients": 5, "num_classes": 4}, [
        ("per_client", 5, "per_client=5 must not exceed the number of classes, 4"),
        ("num_classes", "ten", "num_classes='ten' must be an integer"),
        ("stride", 0, "stride=0 must be an integer"),
    ]),
    **rows(slots.stick_breaking, {"labels": LABELS, "slots": np.array([[0, 1], [2, 3]]), "seed": 1}, [
        ("slots", [[0, 0]], "slots must name different classes for each client"),
        ("slots", [[0, 9]], "slots name class 9, which has no samples"),
        ("slots", [0, 1], "slots must be classes [N, J]"),
        ("slots", [[0.5, 1]], "slots must be classes [N, J], not float64"),
        ("seed", 2**32, "seed=4294967296 must be an integer of at least 0 and below 2**32"),
        ("seed", Late(lambda: np.random.default_rng(0)), "must be an integer of at least 0 and below 2**32"),
        ("min_samples", 26, "class 0 has 25 samples, too few for min_samples=26"),
    ]),
    **rows(slots.lognormal_classes, {"labels": LABELS, "slots": np.array([[0, 1], [2, 3]]), "seed": 1}, [
        ("seed", 1, "num_clients=2 must be a multiple of 10"),
        ("seed", -1, "seed=-1 must be an integer"),
    ]),
    **rows(slots.new_client_slots, {"slots": np.array([[0, 1]]), "num_classes": 4, "rng": np.random.default_rng(0)}, [
        ("rng", 0, "rng must be a Generator, e.g. np.random.default_rng(1), not 0"),
        ("slots", [0, 1], "slots must be pairs of classes [N, 2]"),
        ("newcomers", "published", "newcomers='published' is unknown (did you mean 'as published'?)"),
    ]),
}  # fmt: skip


@functools.cache
def _source():
    x = np.random.default_rng(0).integers(0, 255, (400, 4, 4, 1), dtype=np.uint8)
    return D.from_arrays(x, np.arange(400) % 10)


PROTOCOLS = {
    f"{build.__name__}({', '.join(f'{k}={v!r}' for k, v in given.items())})": Row(
        lambda build=build, given=given: build(**{"source": _source(), **given}), tuple(words)
    )
    for build, given, *words in [
        (protocols.fedmeta_per_clients, {"source": "mnist"}, "source must be a Source, e.g. sources.load('mnist_small')"),
        (protocols.fedmeta_per_clients, {"sizes": "sticks"}, "sizes='sticks' is unknown (did you mean 'stick'?)"),
        (protocols.fedmeta_per_clients, {"pairing": "u+2j"}, "pairing='u+2j' is unknown"),
        (protocols.fedmeta_per_clients, {"scaling": "pixels"}, "scaling='pixels' is unknown (did you mean 'pixel'?)"),
        (protocols.fedmeta_per_clients, {"scaling": "cifar", "num_clients": 5}, "scaling='cifar' is for images of 3 channels"),
        (protocols.fedmeta_per_clients, {"num_clients": 0}, "num_clients=0 must be an integer"),
        (protocols.fedmeta_per_clients, {"num_clients": 1000}, "would be empty: too few samples of its classes"),
        (protocols.fedmeta_per_clients, {"min_samples": -1}, "min_samples=-1 must be an integer of at least 0"),
        (protocols.fedmeta_per_clients, {"seed": 2**32}, "seed=4294967296 must be an integer"),
        (protocols.fedmeta_per_clients, {"seed": "1"}, "seed='1' must be an integer"),
        (protocols.fedmeta_per_iid_clients, {"train": 1.5}, "train=1.5 must lie strictly between 0 and 1"),
        (protocols.fedmeta_per_iid_clients, {"source": None}, "source must be a Source"),
        (protocols.fl_imaml_clients, {"num_new": 0}, "num_new=0 must be an integer"),
        (protocols.fl_imaml_clients, {"orders": 0}, "orders=0 must be an integer"),
        (protocols.fl_imaml_clients, {"scaling": "pixels"}, "scaling='pixels' is unknown (did you mean 'pixel'?)"),
        (protocols.fl_imaml_clients, {"num_clients": 1000}, "would be empty: too few samples of its classes"),
        (protocols.fedpac_clients, {"size": 0}, "size=0 must be an integer"),
        (protocols.fedpac_clients, {"size": 500}, "but the clients ask for", "--share"),
        (protocols.fedpac_clients, {"uniform": -1, "size": 10}, "uniform=-1 must lie between 0 and 1"),
        (protocols.fedpac_clients, {"concept_groups": 0}, "concept_groups=0 must be an integer"),
        (protocols.fedpac_clients, {"support": 1, "size": 10, "test_size": 5, "share": True}, "support=1 must lie strictly"),
        (protocols.perfedavg_reptile_clients, {"min_samples": 4}, "min_samples=4 must be an integer of at least 5"),
        (protocols.perfedavg_reptile_clients, {"concentration": 0}, "concentration=0 must be finite and above 0"),
        (protocols.mtfl_clients, {"noisy": 2}, "noisy=2 must lie between 0 and 1"),
        (protocols.mtfl_clients, {"noise": -1}, "noise=-1 must be finite and at least 0"),
        (protocols.mtfl_clients, {"num_clients": 500}, "1000 shards are more than the M="),
    ]
} | {
    **rows(protocols.local_steps, {"samples": 100, "num_clients": 5}, [("samples", 0, "samples=0 must be an integer")]),
    **rows(protocols.pooled, {}, [("data", None, "data must be a FederatedData")]),
    **rows(transforms.concept_shift, {"data": DATA, "num_groups": 2, "seed": 0}, [
        ("num_groups", 7, "num_groups=7 is more than the permutations of 3 labels"),
        ("num_groups", 0, "num_groups=0 must be an integer"),
        ("data", Late(lambda: synthetic.linear_regression(3, seed=0)), "num_classes=0 must be at least 2"),
        ("seed", "x", "seed='x' must be an integer"),
    ]),
    **rows(transforms.rotate, {"data": DATA}, [
        ("quarter_turns", [1] * 7, "only square images [S, side, side, channels] can be rotated"),
        ("quarter_turns", [1], "quarter_turns must be integers [N=7]"),
        ("quarter_turns", [0.5] * 7, "quarter_turns must be integers [N=7], not float64"),
    ]),
    **rows(transforms.add_noise, {"data": DATA, "std": 0.1, "seed": 0}, [
        ("std", -1, "std=-1 must be finite and at least 0"),
        ("std", [0.1, 0.2], "std must be a number or [N=7], not of shape (2,)"),
        ("views", "train", "views='train' must be a tuple with the name of at least one view"),
        ("views", ("trian",), "the data have no view 'trian' (did you mean 'train'?)"),
        ("views", 3, "views=3 must be a tuple"),
        ("clip", (1.0, 0.0), "clip=(1.0, 0.0) must be two bounds, the lower one first"),
        ("clip", "unit", "clip='unit' is unknown"),
    ]),
    **rows(synthetic.synthetic, {"model_spread": 1.0, "data_spread": 1.0, "seed": 0, "num_clients": 3}, [
        ("model_spread", -1, "model_spread=-1 must be finite and at least 0"),
        ("data_spread", "x", "data_spread='x' must be finite"),
        ("spread", "var", "spread='var' is unknown"),
        ("sizes", "unifrom", "sizes='unifrom' is unknown (did you mean 'uniform'?)"),
        ("sizes", [1, 2], "sizes must be 'uniform', 'lognormal' or counts [N=3], not of shape (2,)"),
        ("sizes", [20, 0, 20], "every client needs at least 1 sample, but client 1 has none"),
        ("sizes", [20, -5, 20], "every client needs at least 1 sample, but client 1 has -5"),
        ("num_classes", 1, "num_classes=1 must be an integer of at least 2"),
        ("dim", 0, "dim=0 must be an integer"),
        ("seed", None, "seed=None must be an integer"),
    ]),
    **rows(synthetic.linear_regression, {"num_clients": 3, "seed": 0}, [("size", 7, "size=7 must be an integer of at least 8")]),
    **rows(synthetic.sinusoids, {"num_clients": 3, "seed": 0}, [("noise", -1, "noise=-1 must be finite and at least 0")]),
    **rows(synthetic.quadratics, {"data": DATA}, [
        ("view", "tran", "the data have no view 'tran'"),
    ]),
    **rows(scaling.pixel_scaling, {"x": np.zeros((4, 2, 2, 1), np.uint8)}, [
        ("scaling", "unti", "scaling='unti' is unknown (did you mean 'unit'?)"),
        ("scaling", "cifar", "scaling='cifar' is for images of 3 channels, not 1"),
    ]),
    **rows(scaling.pixel_scaling, {"scaling": "unit"}, [
        ("x", np.zeros((4, 2)), "scaling='unit' is for uint8 images, not float64"),
        ("x", None, "x must be a ndarray"),
        ("x", np.zeros((0, 2, 2, 1), np.uint8), "x holds no images"),
    ]),
}  # fmt: skip


# Files.


def _npz(**arrays):
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def _bomb(shape, dtype="<f8", body=b"", version=1, extra=0):
    """An archive whose array announces a shape that its body does not have."""
    header = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode() + b" " * extra + b"\n"
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", b"\x93NUMPY" + bytes([version, 0]) + length + header + body)
        archive.writestr("y.npy", b"")
    return file.getvalue()


def _damaged(content, at=None):
    middle = len(content) // 3 if at is None else at
    return content[:middle] + bytes(255 - byte for byte in content[middle : middle + 40]) + content[middle + 40 :]


def _entries(**entries):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name.replace("_", "."), content)
    return file.getvalue()


WHOLE = _npz(x=np.random.default_rng(0).normal(size=(100, 30)), y=np.arange(100) % 3)
FILES = {
    "an empty file": (b"", "is not an .npz of plain arrays, or it is damaged: File is not a zip file"),
    "text": (b"x,y\n1,2\n", "is not an .npz of plain arrays"),
    "a bare array": (b"\x93NUMPY" + bytes(100), "is not an .npz of plain arrays"),
    "a truncated file": (WHOLE[: len(WHOLE) // 2], "is not an .npz of plain arrays, or it is damaged"),
    "damaged compression": (_damaged(WHOLE), "is not an .npz of plain arrays, or it is damaged"),
    "a damaged header": (_damaged(WHOLE, 20), "is not an .npz of plain arrays, or it is damaged"),
    "a damaged directory": (_damaged(WHOLE, len(WHOLE) - 100), "own[1].npz' "),
    "a bomb of 8 TB": (_bomb((10**12,)), "the header of x.npy promises [1000000000000] float64, 8000000000000 bytes"),
    "a bomb of many axes": (_bomb((10**9, 10**9, 10**9)), "the header of x.npy promises"),
    "a negative shape": (_bomb((-1, 3)), "the header of x.npy has the shape [-1, 3]"),
    "a header that is code": (_bomb("__import__('os')"), "is not an .npz of plain arrays"),
    "a long header": (_bomb((1,), version=2, extra=100_000), "the header of x.npy has 100056 bytes, more than the 10000"),
    "objects": (_npz(x=np.array([1, "a"], object), y=np.arange(2)), "x.npy holds Python objects"),
    "no arrays": (_entries(readme_txt=b"hello"), "holds nothing; it needs x and y"),
    "an entry that is no array": (_entries(x_npy=b"hello", y_npy=b"hello"), "is not an .npz of plain arrays"),
    "other names": (_npz(images=np.ones((3, 2)), labels=np.arange(3)), "holds images, labels; it needs x and y, or x_train"),
    "no labels": (_npz(x=np.ones((3, 2))), "holds x; it needs x and y"),
    "labels that are no integers": (_npz(x=np.ones((3, 2)), y=np.ones(3)), "labels must be integers, not float64"),
    "labels below 0": (_npz(x=np.ones((3, 2)), y=np.arange(3) - 1), "the training labels must not be negative, but one is -1"),
    "labels beyond": (_npz(x=np.ones((3, 2)), y=np.arange(3) * 10**9), "labels must be below 1000000, but one is 2000000000"),
    "NaN inputs": (_npz(x=np.full((3, 2), NAN), y=np.arange(3)), "inputs hold NaN or infinite values, first in sample 0"),
    "complex inputs": (_npz(x=np.ones((3, 2)) * 1j, y=np.arange(3)), "must be one numeric array [M, ...], not dtype complex128"),
    "more labels than inputs": (_npz(x=np.ones((3, 2)), y=np.arange(4)), "not (3, 2) and (4,)"),
    "splits that differ": (
        _npz(x_train=np.ones((3, 2)), y_train=np.arange(3), x_test=np.ones((3, 4)), y_test=np.arange(3)),
        "training inputs are float64 [2] and test inputs float64 [4]; they must agree",
    ),
}  # fmt: skip


def _read(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "own[1].npz")
        path.write_bytes(content)
        return sources.read_npz(path)


def _too_large():
    """A file whose arrays are honest, on a machine whose memory they would not fit into."""
    from unittest import mock

    with mock.patch.object(fm.runtime, "free_host_bytes", lambda: 10_000):
        return _read(WHOLE)


SOURCES = {f"a file: {name}": Row(lambda content=content: _read(content), (word,)) for name, (content, word) in FILES.items()}
SOURCES |= {
    "more than the free memory": Row(_too_large, ("its arrays take 0.0 GB, more than the 0.0 GB of free memory",)),
    "a folder for a file": Row(lambda: sources.read_npz("tests"), ("'tests' is a folder or a device, not an .npz file",)),
    "a device for a file": Row(lambda: sources.read_npz("/dev/zero"), ("is a folder or a device",)),
    "no such file": Row(lambda: sources.load("none[1].npz"), ("there is no file 'none[1].npz'",)),
    **rows(sources.load, {}, [
        ("name", None, "name=None must be text or a path"),
        ("name", 3, "name=3 must be text or a path"),
        ("name", b"digits", "name=b'digits' must be text or a path"),
        ("name", "a\0.npz", "must be text or a path"),
    ]),
    **rows(sources.load, {"name": "digits"}, [
        ("data_dir", 3, "data_dir=3 must be text or a path"),
        ("cache_dir", [], "cache_dir=[] must be text or a path"),
        ("download", "no", "download='no' must be True or False"),
    ]),
    **rows(sources.from_arrays, {"x": X, "y": LABELS}, [
        ("x", None, "the training inputs must be one numeric array"),
        ("x", [[1], [1, 2]], "the training x is not one array"),
        ("x", np.ma.masked_array(X, mask=X > 0), "the training x is a masked array, whose masked numbers would count"),
        ("y", np.ma.masked_array(LABELS, mask=LABELS > 2), "the training y is a masked array"),
        ("x", X.astype(str), "must be one numeric array [M, ...], not dtype <U"),
        ("y", LABELS[:3], "not (100, 3) and (3,)"),
        ("y", None, "the training labels must be integers, not object"),
        ("x_test", X, "x_test and y_test must be given together"),
        ("name", None, "name=None must be a word"),
    ]),
}  # fmt: skip

ROWS = {**BUILDERS, **BATCHES, **PARTITIONS, **PROTOCOLS, **SOURCES}
