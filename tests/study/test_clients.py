"""What the clients of a scenario hold: the table, the pictures and the command."""

import re

import numpy as np
import pytest
from typer.testing import CliRunner

from fedjax_meta import cli
from fedjax_meta.study import Scenario, clients, figures


def _command(*words):
    return CliRunner().invoke(cli.app, ["clients", *map(str, words)], env={"COLUMNS": "140", "TERM": "dumb"})


@pytest.fixture(scope="module")
def unequal():
    return Scenario(partition="dirichlet_classes", options={"concentration": 0.3, "min_samples": 20}, clients=12).build()


def _labels(data, view, client):
    start, size = int(data.start[view][client]), int(data.sizes(view)[client])
    return np.asarray(data.y)[start : start + size]


def test_class_counts_are_those_of_a_loop(unequal):
    for data, views in ((unequal.train, ["train", "test"]), (unequal.train, ["test_query"]), (unequal.new, ["query"])):
        counts = clients.class_counts(data, views)
        assert counts.shape == (data.num_clients, 10)
        for client in range(data.num_clients):
            labels = np.concatenate([_labels(data, view, client) for view in views])
            assert counts[client].tolist() == [np.sum(labels == k) for k in range(10)]


def test_the_table_has_a_row_for_each_view(unequal):
    shown = clients.table("place", unequal)
    assert shown.title == f"place: {unequal.title}" and tuple(shown.headings) == clients.HEADINGS
    views = [*((unequal.train, view) for view in unequal.train.views), *((unequal.new, view) for view in unequal.new.views)]
    assert [row[1] for row in shown.rows] == [view for _, view in views]
    assert [row[0] for row in shown.rows if row[0]] == ["known", "new"]
    for row, (data, view) in zip(shown.rows, views, strict=True):
        sizes = [len(_labels(data, view, client)) for client in range(data.num_clients)]
        classes = [len(set(_labels(data, view, client).tolist())) for client in range(data.num_clients)]
        assert [float(cell.replace(",", "")) for cell in row[2:8]] == pytest.approx(
            [len(sizes), sum(sizes), min(sizes), np.mean(sizes), np.std(sizes), max(sizes)], abs=0.05
        )
        assert row[8] == (f"{min(classes)} to {max(classes)}" if min(classes) < max(classes) else str(min(classes)))


def test_the_parts_of_a_picture_are_all_samples_once(unequal):
    drawn = sum(clients.class_counts(data, clients.PARTS[group]).sum() for group, data in clients._groups(unequal).items())
    assert drawn == 5000  # of mnist_small


def test_targets_that_are_no_classes_have_a_picture_of_their_sizes(tmp_path):
    result = _command("--dataset", "sinusoids", "--clients", 8, "--out", tmp_path / "f" / "look.png")
    assert result.exit_code == 0, result.output
    assert "classes each" not in result.output and (tmp_path / "f" / "look.png").read_bytes()[:4] == b"\x89PNG"
    (row,) = clients._rows(Scenario(dataset="sinusoids", clients=8).build())
    assert len(row) == 1  # no classes


def _drawn(panel):
    from matplotlib.figure import Figure

    axis = Figure().subplots()
    panel.draw(axis)
    return axis


def test_bars_and_cells_are_the_counts(unequal):
    bars, cells = (_drawn(panel) for panel in clients._rows(unequal)[0])
    tops = [patch.get_data().values for patch in bars.patches]
    train, test = (np.asarray(unequal.train.sizes(view)) for view in ("train", "test"))
    np.testing.assert_array_equal(tops, [train, train + test])
    counts = clients.class_counts(unequal.train, ["train", "test"])
    opacity = np.asarray(cells.images[0].get_array())[..., 3].T
    assert ((opacity == 0) == (counts == 0)).all() and opacity.max() == 1
    order = np.argsort(counts[counts > 0], kind="stable")
    assert (np.diff(opacity[counts > 0][order]) >= 0).all()  # more samples are never lighter


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_images_of_any_number_of_channels_are_drawn(channels, tmp_path):
    x = np.random.default_rng(0).normal(size=(400, 4, 5, channels)).astype(np.float32)
    np.savez(tmp_path / "odd.npz", x=x, y=np.arange(400) % 4)
    built = Scenario(dataset=str(tmp_path / "odd.npz"), partition="shards", clients=4, model="mlp").build()
    wall = np.asarray(_drawn(clients._samples(built, "known", built.train)).images[0].get_array())
    # The second image of the first client begins a pixel after the first, which is 5 pixels wide.
    start = int(built.train.start["train"][0])
    seen = (x_of(built)[start + 1] - x_of(built).min()) / np.ptp(x_of(built))
    kept = seen if channels == 3 else np.repeat(seen[..., :1], 3, -1)
    first = wall[:4, 6:11, :3]
    order = np.argsort(kept.ravel())
    assert (np.diff(first.ravel()[order]) >= 0).all()
    assert (wall[4] == 0).all() and (wall[:, 5] == 0).all()
    words = ["--partition", "shards", "--clients", 4, "--model", "mlp", "--out", tmp_path / "a.svg"]
    result = _command("--dataset", tmp_path / "odd.npz", *words)
    assert result.exit_code == 0, result.output
    assert "<svg" in (tmp_path / "a.svg").read_text(encoding="utf-8")


def x_of(built):
    """The stored inputs of the clients that train."""
    return np.asarray(built.train.x)


def test_clients_have_their_names_and_noise_is_marked(tmp_path):
    built = Scenario(partition="mtfl", clients=10, options={"noisy": 0.3}).build()
    said = [clients._label(built, "known", client) for client in range(10)]
    assert [one.endswith(", noisy") for one in said] == [client in built.noisy for client in range(10)]
    assert sum(one.endswith(", noisy") for one in said) == 3
    rng = np.random.default_rng(0)
    names = rng.choice(["ann", "bob $1", "cy", "dee", "eve"], 500)
    np.savez(tmp_path / "own.npz", x=rng.integers(0, 256, (500, 6, 6), np.uint8), y=rng.integers(0, 3, 500), client=names)
    own = Scenario(dataset=str(tmp_path / "own.npz"), partition="natural").build()
    shown = {clients._label(own, group, i) for group, data in clients._groups(own).items() for i in range(data.num_clients)}
    assert shown == {"ann", r"bob \$1", "cy", "dee", "eve"}


@pytest.mark.parametrize("share", [-0.2, 2.0, float("nan"), "0.2", None])
def test_a_share_of_noisy_clients_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match=r"share=.* must"):
        Scenario(dataset="digits", shift="noise", shift_options={"share": share}).build()


def test_the_tests_of_a_client_are_like_what_it_trains_on():
    """Partitions may give samples class by class; they are mixed before they are cut into views."""
    data = Scenario(dataset="digits", partition="classes", clients=10, new=0.0).build().train
    for client in range(10):
        train, test = (np.bincount(_labels(data, view, client), minlength=10) for view in ("train", "test"))
        assert (train > 0).sum() == 2
        assert np.abs(train / train.sum() - test / test.sum()).max() < 0.25


def test_the_server_trains_on_all_of_its_samples():
    server = Scenario(dataset="digits", partition="iid", server=100, test=0.5).build().server
    sizes = {name: int(np.asarray(server[name].size)) for name in ("train", "support", "query")}
    assert sizes == {"train": 100, "support": 20, "query": 80}
    with pytest.raises(ValueError, match="server=1 must be 0 or at least 2"):
        Scenario(dataset="digits", partition="iid", server=1)


def test_the_samples_of_the_server_are_drawn(tmp_path):
    np.savez(tmp_path / "ordered.npz", x=np.arange(400.0)[:, None], y=np.arange(400.0))
    server = Scenario(dataset=str(tmp_path / "ordered.npz"), partition="iid", server=100, model="mlp").build().server
    drawn = np.asarray(server["train"].in_order(100).get(0, 0).x).ravel()
    assert 120 < drawn.mean() < 280 and len(set(drawn.tolist())) == 100


def test_the_command_shows_a_study_or_any_data_set(tmp_path):
    result = _command("quickstart", "--out", tmp_path / "look.pdf")
    assert result.exit_code == 0 and "digits: FedMeta-Per on mnist_small" in result.output
    assert (tmp_path / "look.pdf").read_bytes()[:4] == b"%PDF"
    result = _command(
        "--dataset", "digits", "--partition", "shards(per_client=3)", "--clients", 10, "--set", "scenarios.clients.new=0"
    )
    assert result.exit_code == 0 and "shards (per_client 3) on digits, 10 clients" in result.output
    assert not re.search(r"^ *new ", result.output, re.MULTILINE) and "picture" not in result.output


def test_each_scenario_has_a_picture_of_its_own(tmp_path):
    (tmp_path / "two.yaml").write_text(
        "title: two\nsystems: {fedavg: {method: fedavg}}\n"
        "scenarios: {a: {partition: iid, clients: 8}, b: {partition: shards, clients: 8}}\n",
        encoding="utf-8",
    )
    result = _command(tmp_path / "two.yaml", "--out", tmp_path / "look.png")
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.glob("*.png")} == {"look-a.png", "look-b.png"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dataset", "digits", "--out", "look.jpeg"], "the ending of --out='.jpeg' is unknown"),
        (["--partition", "random"], "'random' is unknown"),
        (["--partition", "iid", "--clients", "4000"], "client 0 has 2 samples of mnist_small, too few"),
        (["--dataset", "no-such-set"], "data set 'no-such-set' is unknown"),
        (["--dataset", "digits", "--partition", "natural"], "names the client of each sample"),
    ],
)
def test_errors_are_one_line(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = _command(*words)
    assert result.exit_code == 1 and said in result.output, result.output
    assert len(result.output.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


def test_the_figure_of_a_page_shows_no_samples(unequal):
    assert len(clients.figure(unequal).panels) == 4
    assert all("first samples" not in figures.svg([panel], "x") for panel in clients.figure(unequal).panels)
