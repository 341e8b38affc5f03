"""Scenarios of data sets whose clients are given."""

import json

import jax
import numpy as np
import pytest

from fedjax_meta import report
from fedjax_meta.data.registry import natural
from fedjax_meta.study import from_tree, results, run
from fedjax_meta.study.export import of_run
from fedjax_meta.study.scenario import Scenario
from tests.study.common import Silent


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "uci_har").mkdir()
    np.savez(
        tmp_path / "uci_har" / "uci_har.npz",
        x=rng.normal(size=(100, 128, 9)).astype(np.float16),
        y=rng.integers(0, 6, 100),
        subject=np.arange(100) % 10,
    )
    return str(tmp_path)


HAR = {"dataset": "uci_har", "partition": "natural", "model": "sensor_cnn", "new": 0.2}


def test_a_scenario_names_natural_clients_and_their_model(folder):
    clients = Scenario(**HAR).build(folder)
    assert clients.train.num_clients == 8
    assert clients.new.num_clients == 2
    assert clients.title == "uci_har, 10 natural clients"
    assert "30 subjects" in clients.note
    shapes = clients.task.predict(clients.task.init(jax.random.key(0)), clients.train.x[:2].astype(float)).shape
    assert shapes == (2, 6)
    assert Scenario(**HAR).build(folder).fingerprint == clients.fingerprint
    assert Scenario(**HAR, clients=5).build(folder).train.num_clients == 4


def test_a_scenario_of_ratings_keeps_users_apart(tmp_path):
    (tmp_path / "movielens").mkdir()
    rows = [f"{user},{item},{1 + (user + item) % 5},{item}" for user in range(6) for item in range(12)]
    (tmp_path / "movielens" / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + "\n".join(rows))
    scenario = Scenario(
        dataset="movielens", partition="natural", options={"least": 10}, model="matrix_factorisation",
        model_options={"mean": 3.0}, new=0.0,
    )  # fmt: skip
    clients = scenario.build(str(tmp_path))
    assert clients.train.num_clients == 6
    assert clients.train.num_classes == 0
    assert clients.task.init(jax.random.key(0))["items"]["bias"].shape == (12,)
    with pytest.raises(ValueError, match="the default model takes one array of inputs, but the data have item"):
        Scenario(dataset="movielens", partition="natural", options={"least": 10}).build(str(tmp_path))


def few(tmp_path, kind):
    """12 clients, "u0" to "u11", of 3, 4, 5, 6 and more samples, as an .npz file or a folder of LEAF."""
    rng = np.random.default_rng(0)
    sizes = [3, 4, 5, 6, 7, 8, 9, 10, 12, 20, 4, 3]
    x, y = rng.normal(size=(sum(sizes), 3)).astype(np.float32), np.arange(sum(sizes)) % 2
    owner = np.repeat([f"u{i}" for i in range(12)], sizes)
    if kind == "npz":
        np.savez(tmp_path / "own.npz", x=x, y=y, client=owner)
        return Scenario(dataset=str(tmp_path / "own.npz"), partition="natural", model="mlp")
    folder = tmp_path / "leaf" / "synthetic"
    folder.mkdir(parents=True)
    users = {f"u{i}": {"x": x[owner == f"u{i}"].tolist(), "y": y[owner == f"u{i}"].tolist()} for i in range(12)}
    content = {"users": list(users), "num_samples": sizes, "user_data": users}
    (folder / "all.json").write_text(json.dumps(content))
    return Scenario(dataset="leaf_synthetic", partition="natural", model="mlp")


@pytest.mark.parametrize("kind", ["npz", "leaf"])
def test_small_natural_clients_are_left_out_by_one_rule_and_named(tmp_path, kind):
    clients = few(tmp_path, kind).build(str(tmp_path))
    assert clients.train.num_clients + clients.new.num_clients == 8
    assert "4 of 12 clients have fewer than 5 samples and are left out (u0, u1, u10, u11)" in clients.note
    assert min(int(np.min(size)) for data in (clients.train, clients.new) for size in data.size.values()) >= 1


@pytest.mark.parametrize("partition", ["natural", "iid", "classes", "dealt_tests"])
def test_a_note_on_the_test_split_stands_where_a_protocol_uses_it(tmp_path, partition):
    path, count, options = tmp_path / "own.npz", 2000, {"concentration": 10.0} if partition == "dealt_tests" else {}
    np.savez(path, x=np.zeros((count, 2)), y=np.arange(count) % 10, client=np.arange(count) % 10)
    note = (
        Scenario(
            dataset=str(path),
            partition=partition,
            options=options,
            clients=None if partition == "natural" else 10,
            model="mlp",
        )
        .build()
        .note
    )
    assert ("the last fifth of each class" in note) == (partition == "dealt_tests")


def leaf(folder):
    """Text as LEAF writes it: the character after each of some lines; with tests of each user."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("test", 3)):
        lines = {f"user {i}": ["".join(rng.choice(list("abc "), 80)) for _ in range(count)] for i in range(4)}
        content = {user: {"x": x, "y": ["a"] * count} for user, x in lines.items()}
        place = folder / "leaf" / "shakespeare" / part
        place.mkdir(parents=True)
        users = {"users": list(content), "num_samples": [count] * 4, "user_data": content}
        (place / "all.json").write_text(json.dumps(users))


def test_text_needs_a_model_of_text_which_predicts_what_the_data_ask_for(tmp_path):
    leaf(tmp_path)
    with pytest.raises(ValueError, match="leaf_shakespeare holds tokens, for which there is no default model"):
        Scenario(dataset="leaf_shakespeare").build(str(tmp_path))
    clients = Scenario(dataset="leaf_shakespeare", model="char_gru", new=0.0).build(str(tmp_path))
    model = clients.task.init(jax.random.key(0))
    assert clients.task.predict(model, clients.train.x[:2]).shape == (2, clients.train.num_classes)  # one label a line


@pytest.mark.parametrize("model", ["char_lstm", "char_gru"])
def test_a_model_of_text_has_a_vector_for_each_token_and_an_output_for_each_class(tmp_path, model):
    """As in Sent140: two moods, thousands of words."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 30, (200, 12))
    x[0, 0] = 29
    np.savez(tmp_path / "moods.npz", x=x, y=rng.integers(0, 2, 200))
    clients = Scenario(dataset=str(tmp_path / "moods.npz"), partition="iid", clients=5, model=model).build()
    variables = clients.task.init(jax.random.key(0))
    assert variables["params"]["embed"]["embedding"].shape[0] == 30
    found = clients.task.predict(variables, clients.train.x)
    assert found.shape == (len(clients.train.x), 2) and np.isfinite(found).all()


def test_a_model_of_text_refuses_numbers_that_are_no_tokens():
    with pytest.raises(
        ValueError, match=r"model='char_lstm' reads tokens, integers \[S, T\], but the inputs are \w+\[S, 8, 8, 1\]"
    ):
        Scenario(dataset="digits", partition="iid", clients=5, model="char_lstm").build()


@pytest.mark.parametrize("token", [-1, 10**9])
def test_ids_that_are_no_tokens_are_refused(tmp_path, token):
    x = np.random.default_rng(0).integers(0, 30, (200, 12))
    x[5, 2] = token
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(200) % 3)
    made = Scenario(dataset=str(tmp_path / "own.npz"), partition="iid", clients=5, model="char_gru")
    with pytest.raises(ValueError, match=f"reads tokens, integers from 0 to 999999, but the inputs hold {token}"):
        made.build()


def test_a_share_of_test_samples_is_refused_where_the_clients_have_tests(tmp_path):
    leaf(tmp_path)
    with pytest.raises(ValueError, match="test=0.4, but leaf_shakespeare has test samples of its own: leave test out"):
        Scenario(dataset="leaf_shakespeare", model="char_gru", test=0.4).build(str(tmp_path))


def test_a_client_with_too_few_samples_is_named(tmp_path):
    path = str(tmp_path / "own.npz")
    owner = np.repeat(["ann", "bob", "cec", "dan"], [20, 4, 20, 20])
    np.savez(path, x=np.zeros((64, 2)), y=np.arange(64) % 3, client=owner)
    few = {"dataset": path, "partition": "natural", "options": {"min_samples": 4}}
    with pytest.raises(ValueError, match=r"client 'bob' has 4 samples of .*own.npz, too few for the views .*\(test=0.25"):
        Scenario(**few).build()
    assert Scenario(**few, test=0.5, new=0.0).build().train.num_clients == 4


def test_an_npz_keeps_the_order_of_its_samples(tmp_path):
    x = np.arange(60, dtype=np.uint8).repeat(4).reshape(60, 2, 2)
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(60) % 3, client=np.arange(60) % 4)
    named = natural(tmp_path / "own.npz")
    assert named.source.pooled()[0].shape == (60, 2, 2, 1) and np.array_equal(named.source.pooled()[0][..., 0], x)
    assert named.clients == ("0", "1", "2", "3") and named.note == "" and named.source.num_classes == 3


def test_clients_that_a_file_names_are_not_dealt_out_anew_without_a_word(tmp_path):
    path = str(tmp_path / "own.npz")
    np.savez(path, x=np.zeros((60, 2)), y=np.arange(60) % 3, client=np.arange(60) % 4)
    with pytest.raises(ValueError, match="names the client of each sample: set partition to natural"):
        Scenario(dataset=path).build()
    assert Scenario(dataset=path, partition="iid", clients=3, new=0).build().train.num_clients == 3
    assert Scenario(dataset=path, partition="natural", new=0).build().train.num_clients == 4


@pytest.mark.parametrize(
    ("short", "words"),
    [
        ("y", "y has shape [59] in PATH, but x and client have [60]: it needs one entry a sample"),
        ("client", "client has shape [59] in PATH, but y has [60]: it needs one entry a sample"),
    ],
)
def test_the_array_that_is_too_short_is_named(tmp_path, short, words):
    arrays = {"x": np.zeros((60, 2)), "y": np.arange(60) % 3, "client": np.arange(60) % 4}
    np.savez(tmp_path / "own.npz", **{**arrays, short: arrays[short][:-1]})
    with pytest.raises(ValueError) as error:
        natural(tmp_path / "own.npz")
    assert str(error.value) == words.replace("PATH", repr(str(tmp_path / "own.npz")))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "iid"}, "the clients of uci_har are given: partition='iid' must be 'natural'"),
        ({"options": {"least": 3}}, "option of uci_har='least' is unknown"),
        ({"model_options": {"window": [1, 2]}}, "window"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(options, words):
    with pytest.raises(ValueError) as error:
        Scenario(**{**HAR, **options})
    assert words in str(error.value)


def test_a_set_that_is_not_there_says_how_to_get_it(tmp_path):
    with pytest.raises(ValueError, match=r"download the archive from https://archive\.ics\.uci\.edu"):
        Scenario(**HAR).build(str(tmp_path))


def test_a_study_of_ratings_is_compared_by_errors(tmp_path):
    (tmp_path / "movielens").mkdir()
    rows = [f"{user},{item},{1 + (user + item) % 5},0" for user in range(12) for item in range(20)]
    (tmp_path / "movielens" / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + "\n".join(rows))
    scenario = {"dataset": "movielens", "partition": "natural", "options": {"least": 10}, "model": "matrix_factorisation"}
    systems = {"fedper": {"method": "fedper", "grid": {"lr": [0.1, 1e-9]}}}
    study = from_tree(
        {
            "title": "Ratings",
            "scenarios": {"users": scenario},
            "systems": systems,
            "rounds": 2,
            "tuning": {"rounds": 2},
            "main": "rmse",
        }
    )
    built = run.build(study, str(tmp_path))
    (one,) = run.run(study, tmp_path / "out", watcher=Silent(), clients=built)
    assert one.chosen == {"lr": 0.1}
    line, mean, untrained = results.lines(study, "users", built["users"], [one])
    assert line.kind.name == "rmse" and set(line.others) >= {"mae", "r2", "mae, new"}
    assert mean.title == "mean of own targets" and untrained.known[0] > line.known[0]


def test_natural_clients_keep_their_names(tmp_path):
    """Each score of a named client is that of its number, and the model of a name that of its number."""
    names = [f"site{i}" for i in range(10)]
    rng = np.random.default_rng(1)
    y = np.arange(200) % 2
    np.savez(tmp_path / "own.npz", x=rng.normal(size=(200, 3)) + y[:, None], y=y, client=np.repeat(names, 20).astype("S"))
    scenario = {"dataset": str(tmp_path / "own.npz"), "partition": "natural", "model": "mlp", "new": 0.2}
    systems = {"fedper": {"method": "fedper"}, "alone": {"method": "local_only", "options": {"lr": 1e-6}}}
    study = from_tree({"title": "T", "scenarios": {"s": scenario}, "systems": systems, "rounds": 2, "seeds": [1, 2]})
    built = run.build(study)
    known, new = built["s"].names
    assert len(known) == 8 and sorted(known + new) == names
    x = np.load(tmp_path / "own.npz")["x"].astype(np.float32)
    for data, called in ((built["s"].train, known), (built["s"].new, new)):
        for i, name in enumerate(called):
            begin = min(int(start[i]) for start in data.start.values())
            mine = {row.tobytes() for row in x[20 * names.index(name) : 20 * names.index(name) + 20]}
            assert {row.tobytes() for row in np.asarray(data.x[begin : begin + 20], np.float32)} == mine
    outcomes = run.run(study, tmp_path / "out", watcher=Silent(), clients=built)
    table = report.load_clients(tmp_path / "out")
    for group, called in (("known", known), ("new", new)):
        rows = table[(table.system == "fedper") & (table.clients == group)]
        assert rows.name.tolist() == [*called, *called] and rows.client.tolist() == [*range(len(called))] * 2
    facts = json.loads((tmp_path / "out" / "run.json").read_text())["clients"]["s"]
    assert facts["names"] == list(known) and facts["names of new clients"] == list(new)
    ends = [cell for row in results.gains(study, outcomes, built["s"]) for cell in row[-2:]]
    assert ends and all(any(f"(client {name})" in cell for name in names) for cell in ends if cell != "none")
    assert set(ends) != {"none"}
    by_name, by_number = (of_run(tmp_path / "out", "fedper", client=one) for one in (known[3], "3"))
    assert by_name.about["client"] == f"known client 3 ({known[3]})"
    assert all(map(np.array_equal, jax.tree.leaves(by_name.variables), jax.tree.leaves(by_number.variables)))
    with pytest.raises(ValueError, match="client='site' is unknown"):
        of_run(tmp_path / "out", "fedper", client="site")


def with_split(folder, split, **changes):
    """A scenario of 10 sites with 20 samples each, whose inputs are their numbers, and its file's own split."""
    path = folder / "own.npz"
    np.savez(path, x=np.arange(200.0)[:, None], y=np.arange(200) % 2, client=np.arange(200) % 10, split=split)
    return Scenario(**{"dataset": str(path), "partition": "natural", "model": "mlp", **changes})


@pytest.mark.parametrize("kind", ["U", "S"])
def test_a_split_of_the_file_is_kept(kind, tmp_path):
    tests = np.random.default_rng(0).random(200) < 0.4
    tests[np.arange(200) % 10 == 3] = np.arange(20) < 1  # site 3 has one test
    clients = with_split(tmp_path, np.where(tests, "test", "train").astype(kind), new=0.0).build()
    assert "1 of 10 clients has fewer than 5 samples, or than 2 in a part of their split, and is left out (3)" in clients.note
    assert clients.names[0] == tuple(str(site) for site in range(10) if site != 3)
    for data in (clients.train, clients.tuning):
        for i, site in enumerate(map(int, clients.names[0])):
            mine = np.arange(200)[np.arange(200) % 10 == site]
            views = {
                name: sorted(np.asarray(data.x[data.start[name][i] :][: data.size[name][i], 0]).tolist()) for name in data.size
            }
            of_train, of_tests = mine[~tests[mine]].tolist(), mine[tests[mine]].tolist()
            if data is clients.train:
                assert (views["train"], views["test"]) == (of_train, of_tests)
                assert sorted(views["test_support"] + views["test_query"]) == of_tests
            else:
                # Validation holds back samples of the training part alone.
                assert sorted(views["train"] + views["test"]) == of_train
            assert sorted(views["support"] + views["query"]) == views["train"]


@pytest.mark.parametrize(
    ("split", "changes", "message"),
    [
        (np.repeat(["train", "test"], 100), {"test": 0.5}, "own.npz has test samples of its own: leave test out"),
        (
            np.repeat(["train", "valid"], 100),
            {},
            'split in .* must say "train" or "test" of each sample, but it holds \'valid\'',
        ),
        (np.repeat([0, 1], 100), {}, 'must say "train" or "test" of each sample, but it is int64'),
        (np.repeat(["train", "test"], 50), {}, r"split has shape \[100\] in .*, but there are 200 samples"),
        (np.repeat(["train"], 200), {}, "no client of .* has 5 samples and 2 in each part of its split"),
    ],
)
def test_another_split_is_refused(split, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        with_split(tmp_path, split, **changes).build()


@pytest.mark.parametrize("what", ["inputs", "targets"])
def test_the_client_of_a_sample_that_is_not_finite_is_named(what, tmp_path):
    x = np.zeros((40, 3))
    x[25, 1] = x[25, 2] = x[31, 0] = np.nan
    x, y = (x, np.arange(40) % 2) if what == "inputs" else (np.zeros((40, 3)), x)
    np.savez(tmp_path / "own.npz", x=x, y=y, client=np.array([f"ward{i // 10}" for i in range(40)]))
    said = f"{what} of client ward2 in .* hold NaN or infinite values, first in row 25 of the file .*; in all 3 values of 2 cl"
    with pytest.raises(ValueError, match=said):
        Scenario(dataset=str(tmp_path / "own.npz"), partition="natural").build()
