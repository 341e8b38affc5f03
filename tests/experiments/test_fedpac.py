"""The comparison of FedPAC: its data, tuning, table and errors."""

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import fedpac
from fedjax_meta.data import protocols, sources
from tests import problems


def runs(data, view, client):
    start, size = int(data.start[view][client]), int(data.sizes(view)[client])
    return set(range(start, start + size))


def test_the_validation_cut_holds_training_samples_only_and_trains_on_the_others():
    data, cut = problems.data(), fedpac.validation_cut(problems.data())
    for client in range(data.num_clients):
        train, held = runs(cut, "train", client), runs(cut, "test", client)
        assert train | held == runs(data, "train", client)
        assert not train & held
        assert 0.1 < len(held) / len(train | held) < 0.3
        assert runs(cut, "support", client) | runs(cut, "query", client) == train
        assert not runs(cut, "support", client) & runs(cut, "query", client)
    assert dict(cut.max_size) == {name: int(max(cut.sizes(name))) for name in cut.views}


def test_new_clients_share_no_sample_with_those_that_train():
    train, new = fedpac.load(
        sources.load("mnist_small"), fedpac.Setting(30, 0.2, 1), num_clients=5, num_new=2, seed=1, share=False
    )
    assert (train.num_clients, new.num_clients) == (5, 2)
    theirs = set().union(*(runs(train, "train", i) | runs(train, "test", i) for i in range(5)))
    for i in range(2):
        assert not theirs & (runs(new, "train", i) | runs(new, "test", i))
    assert new.sizes("train").tolist() == [30, 30]


def test_every_system_can_be_built_and_its_rate_may_be_traced():
    for name, system in fedpac.SYSTEMS.items():
        build = fedpac.builder(system, problems.task(), epochs=1, batch_size=8, cohort=3, devices=1)
        shapes = jax.eval_shape(lambda rate, build=build: build(rate).init(jax.random.key(0), problems.data()), 0.1)
        assert shapes.seen.shape == (7,), name


def test_tuning_takes_the_best_rate_on_held_back_samples_and_all_seeds_run():
    build = fedpac.builder(fedpac.SYSTEMS["fedper"], problems.task(), epochs=1, batch_size=8, cohort=7, devices=1)
    data = protocols.on_device(problems.data())
    options = {"tune_rounds": 2, "rounds": 3, "last": 2, "devices": 1}
    outcome = fedpac.compare(build, data, data, rates=(1e-6, 0.3), seeds=(1, 2), **options)
    assert outcome.rate == outcome.rates[int(np.argmax(outcome.validation))]
    assert len(outcome.known) == len(outcome.new) == 2
    assert outcome.known[0] != outcome.known[1]


def test_waiting_can_be_interrupted():
    class Late:
        asked = 0

        def is_ready(self):
            self.asked += 1
            if self.asked == 3:
                raise KeyboardInterrupt
            return False

    with pytest.raises(KeyboardInterrupt):
        fedpac.wait({"late": Late()})
    np.testing.assert_array_equal(fedpac.wait({"now": jax.numpy.arange(3)})["now"], [0, 1, 2])


def test_the_table_has_means_and_spreads():
    outcome = fedpac.Outcome([0.1], [50.0], 0.1, [60.0, 61.0], [40.0, 42.0], 1.5)
    assert fedpac.table({"fedper": outcome}) == [["FedPer", "0.1", "60.50 ±0.71", "41.00 ±1.41", "50.00", "0.0"]]


def test_a_rate_at_an_end_of_its_grid_has_a_star(tmp_path, capsys):
    outcome = fedpac.Outcome([0.01, 0.1, 1.0], [40.0, 50.0, 10.0], 0.1, [60.0], [40.0], 1.5)
    rows = fedpac.table({"fedper": outcome, "fedpac": outcome._replace(rate=1.0)})
    assert [row[1] for row in rows] == ["0.1", "1*"]
    fedpac.write_report(tmp_path, "title", "", {fedpac.Setting(9, 0.2, 1): {"fedpac": outcome._replace(rate=0.01)}}, "how")
    assert fedpac.EDGE in (tmp_path / "report.md").read_text()
    assert fedpac.EDGE in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--systems", "fedpacc"], "--systems='fedpacc'"),
        (["--rates", "0"], "--rates=0"),
        (["--rounds", "3", "--last", "4"], "--last 4"),
        (["--num-clients", "5", "--clients-per-round", "6"], "--clients-per-round 6"),
        (["--dataset", "mnist"], "--dataset='mnist'"),
    ],
)
def test_wrong_options_are_one_line(options, text):
    result = CliRunner().invoke(fedpac.app, options)
    assert result.exit_code == 1
    assert text in result.output


def test_a_rate_that_diverges_is_not_chosen_and_a_final_run_that_does_is_marked():
    nan = float("nan")
    fine = fedpac.Outcome([0.1, 9.0], [50.0, nan], 0.1, [60.0], [40.0], 1.5)
    broken = fedpac.Outcome([0.1], [nan], 0.1, [60.0, nan], [40.0, 41.0], 1.5)
    assert (fedpac.diverged(fine), fedpac.diverged(broken)) == (False, True)
    rows = fedpac.table({"fedavg": fine, "fedper": broken})
    by_title = {row[0]: row for row in rows}
    assert by_title["FedAvg"][4] == "50.00"
    assert by_title["FedPer (diverged)"][2:5] == ["nan ±nan", "40.50 ±0.71", "nan"]
