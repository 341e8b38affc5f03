"""Clients that data sets name: readers against files that the tests write in each format, and one line for each broken file."""

import functools
import io
import json
import os
import pickle
import sqlite3
import zipfile
import zlib

import h5py
import msgpack
import numpy as np
import pytest

from fedjax_meta import runtime
from fedjax_meta.data import natural, natural_sets, sources, text
from fedjax_meta.data.engines import read_fedjax_sqlite, read_pfllib, read_tff_hdf5
from fedjax_meta.data.leaf import read_leaf
from fedjax_meta.data.natural_sets import NATURAL, convert_uci_har, load_natural, ratings, tiny_shakespeare, uci_har

tfds = pytest.importorskip("tensorflow_datasets", reason="reading prepared sets needs tensorflow-datasets")
REAL_DIR = os.environ.get(sources.DATA_DIR_VARIABLE)


def refused(read, *words):
    with pytest.raises(ValueError) as error:
        read()
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


# ------------------------------------------------------------------------------------------------------------------------ text


def test_tokens_are_places_in_the_vocabulary_and_unknown_characters_are_named():
    vocabulary = text.characters(["hello", "world"])
    tokens = text.encode("hold", vocabulary)
    assert "".join(vocabulary[token] for token in tokens) == "hold"
    refused(lambda: text.encode("hat", vocabulary), "the character 'a' is not in the vocabulary of 7")
    assert text.encode("hat", vocabulary, unknown=2).tolist() == [vocabulary.index("h"), 2, 2]


def test_sequences_and_targets_are_shifted_by_one_and_meet_end_to_end():
    tokens = np.random.default_rng(0).integers(0, 9, 23)
    x, y = text.shifted_by_one(tokens, 5)
    assert x.shape == y.shape == (4, 5)
    np.testing.assert_array_equal(x.ravel(), tokens[:20])
    np.testing.assert_array_equal(y.ravel(), tokens[1:21])
    assert text.shifted_by_one(tokens[:5], 5)[0].shape == (0, 5)


def test_words_are_counted_and_coded():
    known = text.most_frequent(["a b b", "c b a"], 2)
    assert known == {"b": 0, "a": 1}
    assert text.encode_words(["A b z", ""], known, 4).tolist() == [[1, 0, 2, 2], [2, 2, 2, 2]]


# --------------------------------------------------------------------------------------------------------------------- Natural


def three():
    rng = np.random.default_rng(0)
    return natural.of_clients(
        {name: (rng.normal(size=(size, 2)), np.arange(size) % 3) for name, size in (("a", 9), ("b", 5), ("c", 20))},
        where="three",
        num_classes=3,
        name="three",
        published="papers have 300",
    )


def test_the_line_of_a_data_set_has_its_count_and_the_published_one():
    assert str(three()) == "three: 3 clients, 34 samples, 5 to 20 each; papers have 300"


def test_clients_with_few_samples_can_be_left_out():
    large = three().at_least(9)
    assert large.clients == ("a", "c")
    assert large.sizes.tolist() == [9, 20]
    np.testing.assert_array_equal(large.x[9:], three().x[14:])
    assert large.note == "1 of 3 clients has fewer than 9 samples and is left out (b)"
    noted = three()._replace(note="n")
    assert noted.at_least(10).note == "n; 2 of 3 clients have fewer than 10 samples and are left out (a, b)"
    assert natural.left_out(list("abcdefg"), 9, 4).endswith(
        "7 of 9 clients have fewer than 4 samples and are left out (a, b, c, d, e and 2 more)"
    )
    assert three().at_least(5, most_clients=2).clients == ("a", "b")
    assert three().at_least(5, most_clients=2).note == ""
    refused(lambda: three().at_least(21), "no client of three has 21 samples; the largest has 20")
    # A split of its own must leave two samples in each part.
    split = three()._replace(train_sizes=np.array([8, 3, 15]))
    assert split.at_least(2).clients == ("b", "c") and split.at_least(2).federated().num_clients == 2
    assert "1 of 3 clients has fewer than 2 samples, or than 2 in a part of their split, and is left" in split.at_least(2).note
    alone = split._replace(train_sizes=np.array([8, 4, 19]))
    refused(lambda: alone.at_least(2), "no client of three has 2 samples and 2 in each part of its split")


def test_clients_are_tested_on_the_tests_of_the_data_set():
    data = three()._replace(x=np.arange(34.0)[:, None], train_sizes=np.array([4, 2, 10]), ordered=False)

    def tests(**options):
        found = data.federated(**options)
        begin, size = int(found.start["test"][2]), int(found.size["test"][2])
        return set(np.asarray(found.x)[begin : begin + size, 0].astype(int).tolist())

    assert all(tests(seed=seed) == set(range(24, 34)) for seed in (0, 1))


def test_clients_of_one_size_have_orders_of_their_own():
    same = three()._replace(x=np.arange(34.0)[:, None], sizes=np.array([12, 11, 11]), ordered=False)
    x = np.asarray(same.federated().x)[:, 0].astype(int)
    assert not np.array_equal(x[12:23] - 12, x[23:] - 23)


def test_views_keep_every_client_to_its_own_samples_and_the_split_of_the_data_set():
    split = three()._replace(train_sizes=np.array([4, 2, 15]), ordered=False)
    data = split.federated(support=0.5, seed=3)
    assert data.sizes("train").tolist() == [4, 2, 15]
    assert data.sizes("test").tolist() == [5, 3, 5]
    first = np.cumsum(split.sizes) - split.sizes
    for i in range(3):
        begin, size = int(data.start["train"][i]), int(data.size["train"][i])
        mine = {tuple(row) for row in np.asarray(data.x[begin : begin + size])}
        assert mine == {tuple(row) for row in split.x[first[i] : first[i] + size]}
    assert not np.array_equal(data.x, split.x)  # shuffled within the parts
    assert np.array_equal(split._replace(ordered=True).federated().x, split.x)
    refused(
        lambda: split._replace(train_sizes=np.array([4, 1, 15])).federated(), "client 'b' of three has 1 training and 4 test"
    )


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ({}, "F has no clients"),
        ({"a": (np.zeros((0, 2)), np.zeros(0))}, "client 'a' of F has no samples"),
        ({"a": (np.zeros((3, 2)), np.zeros(2))}, "client 'a' of F has 3 inputs and 2 targets"),
        (
            {"a": (np.zeros((3, 2)), np.zeros(3)), "b": (np.zeros((3, 4)), np.zeros(3))},
            "client 'b' of F has samples of shape [(4,)",
        ),
    ],
)
def test_broken_clients_are_named(clients, words):
    refused(lambda: natural.of_clients(clients, where="F", num_classes=2, name="f"), words)


# ------------------------------------------------------------------------------------------------------------------------ LEAF


def leaf_file(folder, content, name="all_data_0.json"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def leaf_users(users):
    return {"users": list(users), "num_samples": [len(x) for x, _ in users.values()],
            "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()}}  # fmt: skip


def test_leaf_images_keep_their_split(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.random((7, 784)).round(3)
    leaf_file(tmp_path / "train", leaf_users({"f1": (images[:3].tolist(), [0, 5, 61]), "f2": (images[3:5].tolist(), [1, 1])}))
    leaf_file(tmp_path / "test", leaf_users({"f1": (images[5:6].tolist(), [7]), "f2": (images[6:].tolist(), [8])}))
    data = read_leaf(tmp_path, "femnist")
    assert data.clients == ("f1", "f2")
    assert data.num_classes == 62
    assert data.train_sizes.tolist() == [3, 2]
    assert data.sizes.tolist() == [4, 3]
    np.testing.assert_allclose(data.x.reshape(7, 784), images[[0, 1, 2, 5, 3, 4, 6]], rtol=1e-6)
    assert data.y.tolist() == [0, 5, 61, 7, 1, 1, 8]


def test_leaf_text_is_coded_in_its_own_order_of_characters(tmp_path):
    leaf_file(tmp_path, leaf_users({"HAMLET": (["to be or not", "o be or not "], [" ", "t"])}))
    data = read_leaf(tmp_path, "shakespeare")
    assert data.x.shape == (2, 12)
    assert "".join(text.LEAF_CHARACTERS[token] for token in data.x[1]) == "o be or not "
    assert [text.LEAF_CHARACTERS[token] for token in data.y] == [" ", "t"]
    assert data.num_classes == 80
    assert data.train_sizes is None
    assert "no train and test folders" in data.note


def test_leaf_tweets_take_their_words_from_the_training_part(tmp_path):
    def tweet(words):
        # Six fields: LEAF's combine_data.py appends the part, and its data_to_json.py leaves the first column out.
        return ["1", "date", "query", "user", words, "training"]

    leaf_file(tmp_path / "train", leaf_users({"u": ([tweet("good good day"), tweet("bad day")], [1, 0])}))
    leaf_file(tmp_path / "test", leaf_users({"u": ([tweet("good unseen")], [1])}))
    data = read_leaf(tmp_path, "sent140", vocabulary=3)
    assert data.vocabulary == ("day", "good", "bad")
    assert data.x[:, :3].tolist() == [[1, 1, 0], [2, 0, 3], [1, 3, 3]]
    assert data.x.shape == (3, 25)


def test_leaf_synthetic_data_are_numbers(tmp_path):
    leaf_file(tmp_path, leaf_users({"0": ([[0.5, 1.0], [2.0, -1.0]], [0, 4])}))
    data = read_leaf(tmp_path, "synthetic")
    assert data.x.tolist() == [[0.5, 1.0], [2.0, -1.0]]
    assert data.num_classes == 5


GOOD = leaf_users({"a": ([[1.0]], [0]), "b": ([[2.0]], [1])})
BROKEN = {
    "cut in the middle": (json.dumps(GOOD)[:60], ("is no JSON, or it was cut off", "all_data_0.json")),
    "another file": ({"x": 1}, ("is no LEAF file: it has no users and no num_samples and no user_data",)),
    "a list": ([1], ("is no LEAF file",)),
    "no counts": ({**GOOD, "num_samples": [1]}, ("has 2 users and 1 num_samples",)),
    "a wrong count": ({**GOOD, "num_samples": [1, 2]}, ("user 'b' of", "has 1 inputs and 1 targets, but num_samples says 2")),
    "a user without data": ({**GOOD, "users": ["a", "c"]}, ("user 'c' of", "has no x and y in user_data")),
    "a user without samples": (leaf_users({"a": ([[1.0]], [0]), "b": ([], [])}), ("user 'b' of", "has no samples")),
    "samples of mixed length": (
        leaf_users({"a": ([[1.0], [1.0, 2.0]], [0, 1])}),
        ("user 'a' of", "inputs that are not numbers"),
    ),
    "a label between classes": (leaf_users({"a": ([[1.0]], [0.5])}), ("user 'a' of", "targets that are no class labels")),
}


for _case, _content, *_words in (
    ("user_data is a list", {**GOOD, "user_data": [1]}, "is no LEAF file: user_data is [1], no object"),
    ("num_samples is a number", {**GOOD, "num_samples": 2}, "is no LEAF file: num_samples is 2, no list"),
    ("users is text", {**GOOD, "users": "ab"}, "is no LEAF file: users is 'ab', no list"),
    ("no users", leaf_users({}), "have no users"),
    ("a count as text", {**GOOD, "num_samples": [1, "1"]}, "user 'b' of", "has num_samples '1', which is no whole number"),
    ("a number as a name", {**GOOD, "users": ["a", 3]}, "has the user 3, whose name is no text"),
    ("inputs as a number", {**GOOD, "user_data": {"a": {"x": 1, "y": [0]}}}, "user 'a' of", "x and y that are no lists"),
    (
        "a label beyond whole numbers",
        leaf_users({"a": ([[1.0]], [1e20])}),
        "user 'a' of",
        "has the label 1e+20, but labels are below",
    ),
    (
        "NaN in x",
        leaf_users({"a": ([[1.0]], [0]), "b": ([[1.0], [float("nan")]], [0, 1])}),
        "user 'b' of",
        "first in sample 1",
    ),
    ("null in x", leaf_users({"a": ([[None]], [0])}), "user 'a' of", "NaN, null"),
):
    BROKEN[_case] = (_content, tuple(_words))


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_leaf_file_is_named_in_one_line(case, tmp_path):
    content, words = BROKEN[case]
    leaf_file(tmp_path, content)
    refused(lambda: read_leaf(tmp_path, "synthetic"), *words)


def test_a_label_that_a_leaf_set_does_not_have_is_refused(tmp_path):
    leaf_file(tmp_path, leaf_users({"u": ([[0.0] * 784], [62])}))
    refused(lambda: read_leaf(tmp_path, "femnist"), "user 'u' of", "has the label 62, but labels are below 62")


def test_a_user_with_one_sample_is_named_with_its_samples(tmp_path):
    leaf_file(tmp_path, leaf_users({"a": ([[1.0]] * 5, [0] * 5), "b": ([[2.0]], [1])}))
    data = read_leaf(tmp_path, "synthetic")
    refused(data.federated, "client 'b' of leaf_synthetic has 1 samples, but 2 train and 2 are for tests")


def test_a_leaf_folder_that_is_not_there_says_how_to_make_it(tmp_path):
    refused(lambda: read_leaf(tmp_path / "no", "femnist"), "clone https://github.com/TalwalkarLab/leaf", "preprocess.sh")
    refused(lambda: read_leaf(tmp_path, "femnist"), "there is no .json file in")
    refused(lambda: read_leaf(tmp_path, "celeba"), "kind='celeba' is unknown")
    leaf_file(tmp_path / "train", GOOD)
    leaf_file(tmp_path / "test", leaf_users({"z": ([[1.0]], [0])}))
    refused(lambda: read_leaf(tmp_path, "synthetic"), "user 'z' is in", "but not in")


# --------------------------------------------------------------------------------------------------- FedJAX, TFF, UCI, ratings


def packed(features):
    def extension(value):
        if value.dtype == object:
            return msgpack.ExtType(4, msgpack.packb((value.shape, list(value.ravel())), use_bin_type=True))
        return msgpack.ExtType(1, msgpack.packb((value.shape, value.dtype.name, value.tobytes()), use_bin_type=True))

    return zlib.compress(msgpack.packb(features, default=extension, strict_types=True))


def fedjax_file(path, clients):
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE federated_data (client_id BLOB NOT NULL PRIMARY KEY, data BLOB NOT NULL, num_examples INTEGER NOT NULL)"
        )
        for name, data in clients.items():
            connection.execute("INSERT INTO federated_data VALUES (?, ?, ?)", (name.encode(), data, 1))
    connection.close()


def test_two_clients_of_one_name_are_refused():
    clients = [(name, np.zeros((4, 2)), np.zeros(4, np.int32)) for name in ("u1", "u2", "u1")]
    refused(
        lambda: natural.of_clients(clients, where="a file", num_classes=2, name="own", note=""),
        "client 'u1' is in a file twice",
    )


def test_fedjax_databases_are_read(tmp_path):
    rng = np.random.default_rng(0)
    images = {name: rng.random((size, 28, 28)).astype(np.float32) for name, size in (("w1", 3), ("w2", 2))}
    fedjax_file(
        tmp_path / "emnist.sqlite",
        {name: packed({"pixels": x, "label": np.arange(len(x), dtype=np.int32)}) for name, x in images.items()},
    )
    data = read_fedjax_sqlite(tmp_path / "emnist.sqlite")
    assert data.clients == ("w1", "w2")
    np.testing.assert_array_equal(data.x[..., 0], np.concatenate(list(images.values())))
    assert data.y.tolist() == [0, 1, 2, 0, 1]


def test_windows_of_a_fedjax_database_get_no_channel(tmp_path):
    x = np.random.default_rng(0).random((6, 8, 3)).astype(np.float32)
    fedjax_file(tmp_path / "sensors.sqlite", {"a": packed({"x": x, "y": np.arange(6, dtype=np.int32) % 2})})
    np.testing.assert_array_equal(read_fedjax_sqlite(tmp_path / "sensors.sqlite").x, x)


def test_snippets_of_both_engines_become_the_same_sequences(tmp_path):
    spoken = {"ROMEO": [b"But soft, what light", b"It is the east"], "PARIS": [b"O"], "JULIET": [b"Ay me! " * 3]}
    fedjax_file(
        tmp_path / "plays.sqlite", {name: packed({"snippets": np.array(lines, object)}) for name, lines in spoken.items()}
    )
    with h5py.File(tmp_path / "plays.h5", "w") as file:
        for name, lines in spoken.items():
            file.create_group(f"examples/{name}").create_dataset("snippets", data=lines)
    one, other = read_fedjax_sqlite(tmp_path / "plays.sqlite", length=6), read_tff_hdf5(tmp_path / "plays.h5", length=6)
    assert set(one.clients) == set(other.clients) == {"ROMEO", "JULIET"}
    assert "1 clients have fewer than 7 characters" in one.note
    i, j = one.clients.index("ROMEO"), other.clients.index("ROMEO")
    mine = [data.x[: data.sizes[0]] if k == 0 else data.x[data.sizes[0] :] for data, k in ((one, i), (other, j))]
    np.testing.assert_array_equal(*mine)
    assert "".join(one.vocabulary[token] for token in mine[0].ravel()) == "But soft, what light\nIt is the east"[:30]


@pytest.mark.parametrize(
    ("make", "read", "words"),
    [
        (lambda path: None, read_fedjax_sqlite, "FedJAX downloads its databases"),
        (lambda path: path.write_text("hello" * 500), read_fedjax_sqlite, "is no database of FedJAX"),
        (
            lambda path: fedjax_file(path, {"a": packed({"x": np.zeros((2, 3)), "y": np.array(1)})}),
            read_fedjax_sqlite,
            "must have x and y of each sample",
        ),
        (
            lambda path: fedjax_file(path, {"a": zlib.compress(msgpack.packb({"x": msgpack.ExtType(1, b"\xc1")}))}),
            read_fedjax_sqlite,
            "the data of client 'a' of",
        ),
        (lambda path: fedjax_file(path, {}), read_fedjax_sqlite, "has no clients"),
        (lambda path: fedjax_file(path, {"a": b"xx"}), read_fedjax_sqlite, "the data of client 'a' of"),
        (
            lambda path: fedjax_file(path, {"a": packed({"z": np.zeros(3)})}),
            read_fedjax_sqlite,
            "have the features z; pixels and label",
        ),
        (
            lambda path: fedjax_file(path, {"a": packed({"x": np.zeros((0, 3)), "y": np.zeros(0, np.int32)})}),
            read_fedjax_sqlite,
            "client 'a' of",
        ),
        (
            lambda path: fedjax_file(path, {"a": packed({"x": np.zeros((2, 3)), "y": np.array([0.0, 1.5])})}),
            read_fedjax_sqlite,
            "targets that are no class labels (float64)",
        ),
        (lambda path: None, read_tff_hdf5, "TensorFlow Federated downloads its archives"),
        (
            lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100)),
            read_tff_hdf5,
            "is no HDF5 file, or it was cut off",
        ),
        (lambda path: h5py.File(path, "w").close(), read_tff_hdf5, "it has no group 'examples'"),
    ],
)
def test_broken_databases_are_named_in_one_line(make, read, words, tmp_path):
    make(tmp_path / "file")
    refused(lambda: read(tmp_path / "file"), words)


@pytest.mark.parametrize("y", [np.array([0, 2**32 + 1]), np.array([0, 1e10]), np.array([0, -1])])
def test_labels_that_int32_would_change_are_refused(y, tmp_path):
    x = np.zeros((2, 3), np.float32)
    fedjax_file(tmp_path / "file", {"a": packed({"x": x, "y": y})})
    refused(lambda: read_fedjax_sqlite(tmp_path / "file"), "client 'a' of", "has labels from", "must lie in [0, ")
    if y.dtype == int:
        for part in ("train", "test"):
            pfllib_client(tmp_path / part, 0, x, y)
        refused(lambda: read_pfllib(tmp_path), "client 0 of", "has labels from", "must lie in [0, ")


def test_clients_whose_names_are_no_text_stay_apart(tmp_path):
    fedjax_file(tmp_path / "file", {})
    with sqlite3.connect(tmp_path / "file") as connection:
        for name in (b"\xff", b"\xfe"):
            data = packed({"snippets": np.array([b"to be or not"], object)})
            connection.execute("INSERT INTO federated_data VALUES (?, ?, ?)", (name, data, 1))
    connection.close()
    data = read_fedjax_sqlite(tmp_path / "file", length=4)
    assert data.clients == (r"\xff", r"\xfe") and data.sizes.tolist() == [2, 2]


def _external(path):
    (path.parent / "secret").write_bytes(b"a" * 64)
    with h5py.File(path, "w") as file:
        group = file.create_group("examples/a")
        group.create_dataset("x", (4, 4), np.uint8, external=[(str(path.parent / "secret"), 0, 16)])
        group.create_dataset("y", data=np.zeros(4, int))


def _linked(path):
    with h5py.File(path.parent / "other", "w") as file:
        file.create_dataset("x", data=np.zeros((4, 4)))
    with h5py.File(path, "w") as file:
        file.create_group("examples/a")["x"] = h5py.ExternalLink(str(path.parent / "other"), "x")


def _huge(path):
    with h5py.File(path, "w") as file:
        file.create_group("examples/a").create_dataset("x", (2**40, 2**10), np.uint8, chunks=(2**10, 2**10))


def _no_groups(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("examples", data=np.zeros(3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_external, "takes its numbers from another file"),
        (_linked, "is a link to another place or file"),
        (_huge, "more than the"),
        (_no_groups, "'examples' is no group"),
    ],
)
def test_an_hdf5_file_cannot_point_elsewhere_or_promise_any_size(make, words, tmp_path):
    make(tmp_path / "file")
    refused(lambda: read_tff_hdf5(tmp_path / "file"), "is no HDF5 file of TensorFlow Federated", words)


def test_small_files_of_large_content_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "free_host_bytes", lambda: 1_000_000)
    x, y = np.zeros((1000, 1000), np.float32), np.zeros(1000, int)
    fedjax_file(tmp_path / "file", {"a": packed({"x": x, "y": y})})
    refused(
        lambda: read_fedjax_sqlite(tmp_path / "file"), "the data of client 'a' of", "a quarter of the 0.001 GB of free memory"
    )
    for part in ("train", "test"):
        pfllib_client(tmp_path / part, 0, x, y)
    refused(lambda: read_pfllib(tmp_path), "its content takes 0.004", "more than the 0.001 GB of free memory")


def pfllib_client(folder, client, x, y):
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{client}.npz", "wb") as file:
        np.savez_compressed(file, data={"x": x, "y": y})


def test_pfllib_folders_are_read_without_running_what_is_in_them(tmp_path):
    rng = np.random.default_rng(0)
    parts = {}
    for part, count in (("train", 3), ("test", 2)):
        for client in range(11):
            parts[part, client] = (
                rng.normal(size=(count + client, 3, 4, 5)).astype(np.float32),
                rng.integers(0, 7, count + client),
            )
            pfllib_client(tmp_path / part, client, *parts[part, client])
    data = read_pfllib(tmp_path)
    assert data.clients == tuple(str(i) for i in range(11))
    assert data.train_sizes.tolist() == [3 + i for i in range(11)]
    x, y = (np.concatenate([parts["train", 10][k], parts["test", 10][k]]) for k in (0, 1))
    np.testing.assert_array_equal(data.x[-25:], np.moveaxis(x, 1, -1))
    np.testing.assert_array_equal(data.y[-25:], y)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_pfllib_images_end_with_their_channels_and_an_empty_class_is_told(channels, tmp_path):
    x = np.random.default_rng(0).normal(size=(6, channels, 8, 9)).astype(np.float32)
    for part in ("train", "test"):
        pfllib_client(tmp_path / part, 0, x, np.array([1, 2, 3, 1, 2, 3]))
    with pytest.warns(UserWarning, match="labels run from 1 to 3.*subtract 1"):
        data = read_pfllib(tmp_path)
    np.testing.assert_array_equal(data.x[:6], np.moveaxis(x, 1, -1))
    assert data.num_classes == 4


def test_fortran_order_and_other_byte_orders_are_read(tmp_path):
    x = np.asfortranarray(np.arange(12.0).reshape(3, 4)).astype(">f8", order="F")
    for part in ("train", "test"):
        pfllib_client(tmp_path / part, 0, x, np.array([0, 1, 2]))
    np.testing.assert_array_equal(read_pfllib(tmp_path).x[:3], x)
    for part in ("train", "test"):
        np.savez(tmp_path / part / "0.npz", x=x, y=np.array([0, 1, 2]))  # arrays of their own, without a pickle
    np.testing.assert_array_equal(read_pfllib(tmp_path).x[:3], x)


class _Evil:
    def __reduce__(self):
        return os.system, ("echo harm > harmed",)


@pytest.mark.parametrize("content", [_Evil(), {"x": _Evil(), "y": np.zeros(1, int)}, np.array([_Evil()], object)])
def test_a_pickle_that_asks_for_anything_else_is_refused_and_not_run(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        with open(tmp_path / part / "0.npz", "wb") as file:
            np.savez_compressed(file, data=content)
    refused(lambda: read_pfllib(tmp_path), "holds more than arrays: it asks for", "system")
    assert not (tmp_path / "harmed").exists()
    assert pickle  # the writer of such files


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: (folder / "test" / "1.npz").unlink(), "client 1 of"),
        (lambda folder: (folder / "test" / "1.npz").write_bytes(b"PK"), "is no .npz, or it was cut off"),
        (
            lambda folder: pfllib_client(folder / "test", 1, np.zeros((2, 3)), np.zeros(2)),
            "class labels y [n], not float64[2, 3]",
        ),
        (lambda folder: pfllib_client(folder / "test", 1, np.zeros((2, 4)), np.zeros(2, int)), "client 1 of"),
    ],
)
def test_broken_pfllib_folders_are_named_in_one_line(break_it, words, tmp_path):
    for part in ("train", "test"):
        for client in range(2):
            pfllib_client(tmp_path / part, client, np.zeros((2, 3)), np.zeros(2, int))
    assert len(read_pfllib(tmp_path).sizes) == 2
    break_it(tmp_path)
    refused(lambda: read_pfllib(tmp_path), words)


def har_archive(path, *, nested=False, without=""):
    rng = np.random.default_rng(0)
    content, inner = {}, io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        for part, rows in (("train", 6), ("test", 4)):
            for signal in natural_sets._SIGNALS:
                table = rng.normal(size=(rows, 128)).round(6)
                content[part, signal] = table
                name = f"UCI HAR Dataset/{part}/Inertial Signals/{signal}_{part}.txt"
                if signal != without:
                    archive.writestr(name, "\n".join(" ".join(f"{v: .7e}" for v in row) for row in table))
            for name, values in (("y", 1 + np.arange(rows) % 6), ("subject", 1 + np.arange(rows) // 2 + 3 * (part == "test"))):
                archive.writestr(f"UCI HAR Dataset/{part}/{name}_{part}.txt", "\n".join(map(str, values)))
    if nested:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("UCI HAR Dataset.zip", inner.getvalue())
    else:
        path.write_bytes(inner.getvalue())
    return content


@pytest.mark.parametrize("nested", [False, True])
def test_the_archive_of_uci_har_becomes_clients(nested, tmp_path):
    content = har_archive(tmp_path / "har.zip", nested=nested)
    (tmp_path / "uci_har").mkdir()
    natural_sets.main(["uci_har", str(tmp_path / "har.zip"), str(tmp_path / "uci_har" / "uci_har.npz")])
    data = uci_har(data_dir=tmp_path)
    assert data.clients == tuple(f"subject {i}" for i in range(5))
    assert data.sizes.tolist() == [2, 2, 2, 2, 2]
    assert data.y.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    np.testing.assert_allclose(data.x[2, :, 4], content["train", "body_gyro_y"][2], rtol=1e-5)
    np.testing.assert_allclose(data.x[7, :, 8], content["test", "total_acc_z"][1], rtol=1e-5)


def test_a_missing_or_broken_archive_says_where_to_get_it(tmp_path):
    refused(
        lambda: uci_har(data_dir=tmp_path), "download the archive from https://archive.ics.uci.edu", "natural_sets uci_har"
    )
    refused(
        lambda: convert_uci_har(tmp_path / "no.zip", tmp_path / "o.npz"), "there is no file", "https://archive.ics.uci.edu"
    )
    (tmp_path / "cut.zip").write_bytes(b"PK\x03\x04")
    refused(lambda: convert_uci_har(tmp_path / "cut.zip", tmp_path / "o.npz"), "is no zip archive, or it was cut off")
    har_archive(tmp_path / "part.zip", without="total_acc_x")
    refused(lambda: convert_uci_har(tmp_path / "part.zip", tmp_path / "o.npz"), "is not the archive of UCI HAR", "total_acc_x")
    np.savez(tmp_path / "uci_har.npz", x=np.zeros((2, 128, 9)))
    refused(lambda: uci_har(data_dir=tmp_path), "holds x; it needs x, y and subject")


@pytest.mark.parametrize(
    ("join", "header"), [(",", "userId,movieId,rating,timestamp"), ("\t", None), ("::", None)], ids=["csv", "tabs", "colons"]
)
def test_ratings_are_read_by_user_in_the_order_of_time(join, header, tmp_path):
    lines = [
        (7, 31, 2.5, 30),
        (7, 4, 5, 10),
        (7, 31, 1, 20),
        (7, 5, 4, 40),
        *[(9, k, 3, k) for k in range(1, 5)],
        (1, 4, 3, 1),
    ]
    rows = ([header] if header else []) + [join.join(map(str, line)) for line in lines]
    (tmp_path / "r").write_text("\n".join(rows) + "\n\n")  # a blank line at the end
    data = ratings(tmp_path / "r", least=4)
    assert data.clients == ("user 7", "user 9")
    assert data.vocabulary == ("1", "2", "3", "4", "5", "31")
    assert data.x["item"][:4].tolist() == [3, 5, 5, 4]
    assert data.y[:4].tolist() == [5, 1, 2.5, 4]
    assert data.num_classes == 0


def test_a_first_line_of_numbers_is_a_rating_whatever_its_last_field_is(tmp_path):
    lines = [f"7,{k},{k},{k},{'a note' if k == 1 else ''}" for k in range(1, 5)]
    (tmp_path / "r.csv").write_text("\n".join(lines) + "\n")
    assert ratings(tmp_path / "r.csv", least=4).y.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("user,item,r\u00e4ting\n".encode("latin-1"), "is no table in UTF-8"),
        ("1,2,3\n1,2\n", "line 2 of"),
        ("1,2,3\n1,2,good\n", "line 2 of"),
        ("u,i,r\n1,2,nan\n", "line 2 of"),
        ("1,2,nan,1\n1,2,3,4\n", "line 1 of"),
        ("1,7,5;0,1\n1,2,3,4\n", "line 1 of"),
        ("u,i,r\n", "no user of"),
        ("1,2,3,4\n", "has 4 ratings"),
    ],
)
def test_broken_ratings_are_named_by_line(content, words, tmp_path):
    (tmp_path / "r.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(lambda: ratings(tmp_path / "r.csv", least=4), words)


# --------------------------------------------------------------------------------------------------------- sets known by name


def prepared_play(folder, play):
    with tfds.core.registered.skip_registration():

        class Builder(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version("1.0.0")
            name = "tiny_shakespeare"
            pkg_dir_path = folder

            def _info(self):
                return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({"text": tfds.features.Text()}))

            def _split_generators(self, dl_manager):
                del dl_manager
                cut = [0, len(play) * 9 // 10, len(play) * 95 // 100, len(play)]
                names = ("train", "validation", "test")
                return {name: self._generate_examples(play[a:b]) for name, a, b in zip(names, cut, cut[1:], strict=False)}

            def _generate_examples(self, part):
                yield "all", {"text": part}

    builder = Builder(data_dir=str(folder), file_format="array_record")
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))


def test_the_speakers_of_tiny_shakespeare_are_clients(tmp_path):
    words = {"ROMEO": "But soft, what light through yonder window breaks? " * 3, "First Servant": "Up. " * 30, "Extra": "Ay."}
    play = "".join(f"{name}:\n{said[: len(said) // 2].strip()}\n\n" for name, said in words.items())
    play += "".join(f"{name}:\n{said[len(said) // 2 :].strip()}\n\n" for name, said in words.items() if name != "Extra")
    prepared_play(tmp_path, play)
    data = tiny_shakespeare(length=10, least=50, data_dir=tmp_path)
    assert data.clients == ("ROMEO", "First Servant")
    joined = "\n".join(words["ROMEO"][a:b].strip() for a, b in ((0, 76), (76, None)))
    count = data.sizes[0]
    assert "".join(data.vocabulary[token] for token in data.x[:count].ravel()) == joined[: 10 * count]
    assert count == (len(joined) - 1) // 10
    refused(lambda: tiny_shakespeare(least=10_000, data_dir=tmp_path), "no speaker of tiny_shakespeare has 10000 characters")


def test_a_set_that_is_not_there_says_how_to_get_it(tmp_path):
    refused(lambda: load_natural("tiny_shakespeare", data_dir=tmp_path), "is not prepared in", "download=True")
    for name in NATURAL:
        refused(lambda name=name: load_natural(name, data_dir=tmp_path), str(tmp_path))
    refused(lambda: load_natural("shakespear"), "name='shakespear' is unknown (did you mean")
    refused(lambda: load_natural("uci_har", length=3), "option of uci_har='length' is unknown")


@functools.cache
def _real(name):
    try:
        return load_natural(name, data_dir=REAL_DIR)
    except ValueError:
        return pytest.skip(f"{name} is not in {REAL_DIR}")


@pytest.mark.skipif(REAL_DIR is None, reason=f"needs {sources.DATA_DIR_VARIABLE}")
def test_the_real_sets_have_their_clients():
    speech = _real("tiny_shakespeare")
    assert len(speech.sizes) == 141
    assert len(speech.vocabulary) == 65
    subjects = _real("uci_har")
    assert len(subjects.sizes) == 30
    assert subjects.x.shape == (10_299, 128, 9)
