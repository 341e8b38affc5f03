"""The experiment on data: its table, its figure, and its one-line errors."""

import numpy as np
import pytest

from fedjax_meta.data import synthetic

typer_testing = pytest.importorskip("typer.testing", reason="the command line needs typer")
data = pytest.importorskip("experiments.data", reason="the command line needs typer, rich and matplotlib")

RUNNER = typer_testing.CliRunner()


@pytest.fixture
def own(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=rng.integers(0, 256, (1000, 6, 6), dtype=np.uint8), y=np.repeat(np.arange(10), 100))
    return tmp_path / "own.npz"


def _run(*arguments):
    return RUNNER.invoke(data.app, [str(a) for a in arguments], env={"COLUMNS": "120", "TERM": "dumb"})


@pytest.mark.parametrize("name", (*data.PAPERS, *data.PARTITIONS))
def test_every_partition_has_a_table_and_a_figure(name, own, tmp_path):
    options = ["--share"] if name == "fedpac" else []
    options += ["--size", 50] if name == "fedpac" else []
    result = _run("--dataset", own, "--partition", name, "--clients", 20, "--out", tmp_path / "f" / "look.png", *options)
    assert result.exit_code == 0, result.output
    assert "samples" in result.output and "train" in result.output
    assert (tmp_path / "f" / "look.png").read_bytes()[:4] == b"\x89PNG"


def test_clients_without_classes_have_a_figure_of_their_sizes(tmp_path):
    result = _run("--dataset", "sinusoids", "--clients", 8, "--out", tmp_path / "look.png")
    assert result.exit_code == 0, result.output
    assert "none" in next(line for line in result.output.splitlines() if "test_query" in line)
    assert (tmp_path / "look.png").read_bytes()[:4] == b"\x89PNG"


def test_the_table_counts_the_clients_samples(own, tmp_path):
    result = _run("--dataset", own, "--partition", "shards", "--clients", 25, "--out", tmp_path / "look.png")
    row = next(line for line in result.output.splitlines() if "train" in line and "1,000" in line)
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells == ["training", "train", "25", "1,000", "40", "40.0", "0.0", "40", "1 to 2"]


def test_clients_may_be_few_or_without_images(tmp_path):
    np.savez(tmp_path / "flat.npz", x=np.random.default_rng(0).normal(size=(200, 3)), y=np.arange(200) % 4)
    result = _run("--dataset", tmp_path / "flat.npz", "--partition", "shards", "--clients", 2, "--out", tmp_path / "look.svg")
    assert result.exit_code == 0 and (tmp_path / "look.svg").stat().st_size > 1000


@pytest.mark.parametrize("channels", [2, 5])
def test_images_of_any_number_of_channels_are_drawn(channels, tmp_path):
    x = np.random.default_rng(0).normal(size=(200, 4, 4, channels))
    np.savez(tmp_path / "odd.npz", x=x, y=np.arange(200) % 4)
    result = _run("--dataset", tmp_path / "odd.npz", "--partition", "shards", "--clients", 4, "--out", tmp_path / "look.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "look.png").stat().st_size > 1000


def test_class_counts_against_a_loop(own):
    protocol = data.build(data.sources.load(own), "dirichlet_classes", num_clients=7, seed=0)
    counts = data.class_counts(protocol.train, "train")
    begin = 0
    for u, size in enumerate(np.asarray(protocol.train.sizes("train"))):
        assert np.array_equal(counts[u], np.bincount(protocol.train.y[begin : begin + size], minlength=10))
        begin += size


def test_synthetic_clients_are_generated(tmp_path):
    spreads = ["--model-spread", 0.5, "--data-spread", 2]
    result = _run("--dataset", "synthetic", *spreads, "--clients", 6, "--seed", 4, "--out", tmp_path / "look.png")
    assert result.exit_code == 0 and "synthetic(0.5, 2)" in result.output
    drawn = synthetic.synthetic(0.5, 2.0, seed=4, num_clients=6)
    assert f"{np.sum(drawn.sizes('train')):,}" in result.output
    assert (tmp_path / "look.png").read_bytes()[:4] == b"\x89PNG"


def test_natural_clients_are_those_named_in_the_file(tmp_path):
    rng = np.random.default_rng(0)
    writer = rng.choice(["ann", "bob", "cy", "dee"], 100, p=[0.6, 0.2, 0.15, 0.05])
    x, y = rng.integers(0, 256, (100, 6, 6), dtype=np.uint8), rng.integers(0, 3, 100)
    np.savez(tmp_path / "own.npz", x=x, y=y, writer=writer)
    protocol = data.natural(str(tmp_path / "own.npz"), num_clients=None, seed=None, by="writer", min_samples=10)
    for client, name in enumerate(["ann", "bob", "cy"]):
        begin, size = (int(part[client]) for part in (protocol.train.start["train"], protocol.train.sizes("train")))
        assert np.array_equal(protocol.train.x[begin : begin + size, ..., 0], x[writer == name])
        assert np.array_equal(protocol.train.y[begin : begin + size], y[writer == name])
    options = ["--partition", "natural", "--by", "writer", "--min-samples", 10, "--out", tmp_path / "look.png"]
    result = _run("--dataset", tmp_path / "own.npz", *options)
    assert result.exit_code == 0 and "natural, by writer, on own" in result.output
    assert (tmp_path / "look.png").read_bytes()[:4] == b"\x89PNG"


BAD = {
    "another option for a generator": (["--dataset", "synthetic", "--by", "x"], "takes no --by; it takes --model-spread"),
    "a partition of a generator": (["--dataset", "synthetic", "--partition", "iid"], "'synthetic' takes no --partition"),
    "negative spread": (["--dataset", "synthetic", "--model-spread", "-1"], "model_spread=-1.0 must be"),
    "natural without owners": (["--partition", "natural"], "by='client' needs x, y and client"),
    "natural of a set": (
        ["--dataset", "digits", "--partition", "natural"],
        "needs an .npz that names the client of each sample",
    ),
    "natural takes no count": (
        ["--partition", "natural", "--clients", "3"],
        "takes no --clients; it takes --by, --min-samples",
    ),
    "unknown partition": (["--partition", "random"], "--partition='random' is unknown; allowed are fedmeta_per"),
    "option of another one": (
        ["--partition", "mtfl", "--concentration", "1"],
        "takes no --concentration; it takes --noisy",
    ),
    "too many clients": (["--partition", "iid", "--clients", "2000"], "num_clients=2000"),
    "alpha": (["--partition", "dirichlet_classes", "--concentration", "-1"], "concentration=-1.0 must be"),
    "unknown set": (["--dataset", "no-such-set"], "data set 'no-such-set' is unknown"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_are_one_line_and_a_status(case, own, tmp_path):
    arguments, message = BAD[case]
    result = _run("--dataset", own, "--out", tmp_path / "look.png", *arguments)
    assert result.exit_code == 1 and message in result.output
    assert "Traceback" not in result.output and not (tmp_path / "look.png").exists()


def test_help_has_examples_and_names():
    result = _run("--help")
    assert result.exit_code == 0 and "Examples" in result.output and "dirichlet_classes" in result.output
