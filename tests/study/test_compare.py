"""Runs are compared seed by seed and client by client."""

import csv
import io
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from fedjax_meta import report
from fedjax_meta.cli import app
from fedjax_meta.study import compare, comparison, run, targets
from fedjax_meta.study.tuning import Trial
from tests.study.common import TREE, Silent, study


def trial(seed, accuracy, curve=None, new=None):
    """A trial from the clients' last accuracies, and from the mean accuracy at rounds 5, 10, ... of 2 seconds each."""
    curve = [np.mean(accuracy)] if curve is None else curve
    rows = []
    for number, mean in enumerate(curve, 1):
        tests = {"known": {"accuracy": list(accuracy), "scores": {"accuracy_mean": mean}}}
        if new is not None:
            tests["new"] = {"accuracy": list(new), "scores": {"accuracy_mean": np.mean(new)}}
        rows.append({"round": 5 * number, "seconds": 2.0, "train": {}, "tests": tests})
    return Trial({}, seed, rows, None)


def system(title, accuracy, **more):
    """A finished system from accuracies `[seeds, clients]`."""
    return compare.Finished(title, "pairs", "abc", [trial(seed, row) for seed, row in enumerate(accuracy)], **more)


def test_what_two_runs_call_alike_gets_their_names():
    one = system("a", [[0.5, 0.7]])
    found = [(one, "monday"), (one, "friday"), (one._replace(title="b"), "friday"), (one._replace(fingerprint="d"), "other")]
    named = [compare._named_apart(*pair, found) for pair in found]
    assert [n.title for n in named] == ["a (monday)", "a (friday)", "b", "a"]
    assert [n.scenario for n in named] == ["pairs (monday, friday)"] * 3 + ["pairs (other)"]


def test_a_folder_may_be_a_text_and_one_is_not_several(tmp_path):
    run.run(study(systems={"local": TREE["systems"]["local"]}, rounds=1, seeds=[1]), str(tmp_path / "a"), watcher=Silent())
    assert [one.method for one in compare.finished([str(tmp_path / "a")])] == ["local_only"]
    with pytest.raises(ValueError, match=r"folders='.*' must be several folders"):
        compare.finished(str(tmp_path / "a"))


def test_scenarios_of_the_same_clients_and_another_model_have_tables_of_their_own(tmp_path):
    pairs = {**TREE["scenarios"]["pairs"], "model": "mlp", "model_options": {"hidden": [4]}}
    places = {"pairs": pairs, "logistic": TREE["scenarios"]["pairs"]}
    local = {"local": TREE["systems"]["local"]}
    run.run(study(scenarios=places, systems=local, rounds=1, seeds=[1]), tmp_path / "both", watcher=Silent())
    run.run(study(scenarios={"pairs": pairs}, systems=local, rounds=1, seeds=[2]), tmp_path / "one", watcher=Silent())
    groups = compare.by_scenario(compare.finished([tmp_path / "both", tmp_path / "one"]), reference="Local only")
    told = [[(row.system.scenario, row.system.title) for row in rows] for rows in groups]
    assert told == [[("pairs", "Local only (both)"), ("pairs", "Local only (one)")], [("logistic", "Local only")]]


def test_scenarios_that_differ_in_neither_clients_nor_model_are_told_apart_by_their_names():
    one = system("a", [[0.5, 0.7]])
    found = [(one, "run"), (one._replace(scenario="noise"), "run"), (one._replace(scenario="noise"), "again")]
    named = [compare._named_apart(*pair, found).title for pair in found]
    assert named == ["a (pairs)", "a (noise, run)", "a (noise, again)"]


def test_a_difference_is_taken_on_the_same_seeds_and_clients():
    first = system("a", [[0.5, 0.7], [0.6, 0.8], [0.1, 0.1]])
    second = system("b", [[0.6, 0.7], [0.8, 0.8]])
    found = compare.difference(second, first, "known")
    # By seed +5 and +10 points; Student's t with one degree of freedom is 12.706.
    assert found.mean == pytest.approx(7.5) and found.seeds == 2 and (found.better, found.worse) == (50, 0)
    assert found.margin == pytest.approx(12.706 * np.std([5, 10], ddof=1) / np.sqrt(2), rel=1e-4)
    assert found.p_seeds == pytest.approx(stats.ttest_rel([65, 80], [60, 70]).pvalue)
    assert compare.difference(system("c", []), first, "known") is None
    same = compare.difference(first, first, "known")
    assert (same.mean, same.p_seeds, same.p_clients) == (0, 1, 1)


def test_a_difference_pairs_clients_by_their_numbers():
    """Attackers, which are not scored, may be others in another run."""

    def scored(title, scores, ids):
        one = trial(0, scores)
        one.rows[-1]["tests"]["known"]["ids"] = ids
        return compare.Finished(title, "pairs", "abc", [one])

    found = compare.difference(scored("a", [0.9, 0.2, 0.5], [1, 2, 5]), scored("b", [0.1, 0.3, 0.4], [0, 2, 5]), "known")
    assert found.mean == pytest.approx(0) and (found.better, found.worse) == (50, 50)
    assert compare.difference(scored("a", [0.9], [1]), scored("b", [0.1], [0]), "known") is None


def test_new_clients_are_compared_with_new_clients():
    def some(title, known, new):
        trials = [trial(seed, known, new=np.array(new) + 0.1 * seed) for seed in (0, 1)]
        return compare.Finished(title, "pairs", "abc", trials)

    rows = compare.compared([some("a", [0.5, 0.6], [0.5, 0.4]), some("b", [0.6, 0.7], [0.5, 0.2])])
    assert rows[1].against.mean == pytest.approx(10) and rows[1].against_new.mean == pytest.approx(-10)
    lines = list(csv.DictReader(io.StringIO(comparison.comma_separated([rows]))))
    # Two seeds that are 10 points apart: Student's t with one degree of freedom is 12.706.
    margins = [float(lines[0][f"{group}_margin"]) for group in ("known", "new")]
    np.testing.assert_allclose(margins, [0, 12.706 * 5], rtol=1e-4, atol=1e-9)
    for group, mean, better in (("known", 10, 100), ("new", -10, 0)):
        assert float(lines[1][f"{group}_difference_mean"]) == pytest.approx(mean)
        assert float(lines[1][f"{group}_difference_better"]) == better
        (table,) = (one for one in comparison.tables(rows) if one.title == f"Minus a, {group} clients, same seeds")
        assert [line[:2] for line in table.rows] == [["b", f"{mean:+.2f}"]]


def test_new_clients_are_not_held_against_a_local_model_that_they_never_trained():
    def with_new(title, **more):
        return compare.Finished(title, "pairs", "abc", [trial(0, [0.5, 0.7], new=[0.4, 0.6])], **more)

    fedavg = with_new("fedavg")
    for alone, there in ((("known",), False), (("known", "new"), True)):
        local = with_new("local", method="local_only", alone=alone)
        for pair in ((fedavg, local), (local, fedavg)):
            assert (compare.difference(*pair, "new") is not None) == there
            assert compare.difference(*pair, "known") is not None


@pytest.mark.parametrize(
    "values",
    [[3, -1, 4, 2.5, 6, -0.5, 5], [4, 4, 4, 8, 8], [1, 1, 1], [2, -2, 2, 2, -1, 1, 3, 3, 0, 5], [-1]],
    ids=["all different", "equal ones", "three alike", "both signs", "one"],
)
def test_the_test_over_clients_counts_all_signs_of_the_ranks(values):
    """Also where differences are equally large."""
    moved = np.array([value for value in values if value], float)
    ranks = stats.rankdata(np.abs(moved))
    sums = np.array([np.dot(ranks, signs) for signs in itertools.product([0, 1], repeat=moved.size)])
    mine = np.dot(ranks, moved > 0)
    share = 2 * min(np.mean(sums >= mine - 1e-9), np.mean(sums <= mine + 1e-9))
    assert compare.signed_rank(np.append(values, 0.0)) == pytest.approx(min(share, 1), rel=1e-12)


def test_many_clients_are_compared_by_the_normal_distribution():
    values = np.random.default_rng(0).normal(0.3, 1, compare.EXACT + 1)
    exact = compare.signed_rank(values[:-1])
    assert exact == pytest.approx(stats.wilcoxon(values[:-1], method="exact").pvalue, rel=1e-9)
    assert compare.signed_rank(values) == pytest.approx(stats.wilcoxon(values, method="asymptotic").pvalue, rel=1e-9)


def test_p_values_over_seeds_are_those_of_a_paired_t_test():
    values = np.array([3.0, -1.0, 4.0, 2.5, 6.0, -0.5, 5.0])
    assert compare.paired_t(values) == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert np.isnan(compare.paired_t(np.array([1.0]))) and np.isnan(compare.signed_rank(np.array([1.0, np.nan])))
    assert compare.paired_t(np.array([2.0, 2.0])) == 0


def test_rows_hold_the_worst_tenth_the_variance_and_who_stays_behind():
    rng = np.random.default_rng(0)
    accuracy = rng.uniform(0.4, 1, (3, 20))
    local, fedavg = accuracy + rng.normal(0, 0.1, 20), accuracy + rng.normal(0, 0.1, 20)
    systems = [
        system("mine", accuracy, method="ditto"),
        system("all samples in one place", accuracy, method="fedavg", pooled=True),
        system("alone", local, method="local_only"),
        system("mean", fedavg, method="fedavg"),
    ]
    mine, _, alone, _ = compare.compared(systems, reference="alone")
    np.testing.assert_allclose(mine.worst, [100 * np.sort(row)[:2].mean() for row in accuracy])
    np.testing.assert_allclose(mine.variance, [np.var(100 * row) for row in accuracy])
    for name, other in (("local_only", local), ("fedavg", fedavg)):
        assert mine.behind[name] == pytest.approx(100 * np.mean(accuracy.mean(0) < other.mean(0)))
    assert set(alone.behind) == {"fedavg"} and alone.against is None and mine.against.seeds == 3
    with pytest.raises(ValueError, match="reference='other' is unknown"):
        compare.compared(systems, reference="other")


def test_tables_name_the_reference_also_where_another_system_shares_no_seed_with_it():
    other = compare.Finished("other seeds", "pairs", "abc", [trial(9, [0.5, 0.6])])
    rows = compare.compared([other, system("b", [[0.6, 0.7]]), system("c", [[0.8, 0.9]])], reference="b")
    titles = [table.title for table in comparison.tables(rows)]
    assert "Minus b, known clients, same seeds" in titles
    assert [line[0] for line in comparison.tables(rows)[titles.index("Minus b, known clients, same seeds")].rows] == ["c"]


def test_targets_in_rounds_bytes_and_time():
    fast, slow = trial(1, [0.9], [0.2, 0.8, 0.7, 0.9]), trial(2, [0.9], [0.2, 0.3, 0.8, 0.9])
    one = compare.Finished("a", "pairs", "abc", [fast, slow], traffic=2e6)
    found = compare.reached(one, compare.Target(80))
    assert found.rounds.tolist() == [10, 15] and found.megabytes.tolist() == [20, 30] and found.seconds.tolist() == [4, 6]
    never = compare.reached(one._replace(trials=[fast, trial(2, [0.5], [np.nan, 0.5])]), compare.Target(80))
    assert never.rounds.tolist() == [10, np.inf]
    goal = targets.target("80")
    rows = compare.compared([one._replace(trials=[fast, trial(2, [0.5], [0.1])])], target=goal)
    assert comparison.tables(rows)[-1].rows == [["a", "never in 1 of 2", "never in 1 of 2", "never in 1 of 2"]]
    assert comparison.tables(compare.compared([one], target=goal))[-1].rows[0][1:3] == ["12.5 ±3.5", "25.0 ±7.1"]


def test_a_target_that_was_meant_as_a_part_of_one_is_told():
    one = system("a", [[0.9, 0.8]])
    for target, told in (("0.8", True), ("80", False), ("accuracy=0.8", True)):
        rows = compare.compared([one], target=targets.target(target))
        assert ("Targets of shares are in percent: the one here is 0.8 %." in comparison.notes(rows)) == told
        assert comparison.tables(rows)[-1].title.endswith(" %")


def test_the_gap_is_known_minus_new_and_other_cohorts_are_told():
    trials = [trial(seed, [0.8, 0.9], new=[0.6]) for seed in (1, 2)]
    one = compare.Finished("a", "pairs", "abc", trials)
    other = one._replace(title="b", cohorts="7")
    rows = compare.compared([one, other])
    accuracy = comparison.tables(rows)[0]
    assert accuracy.headings[-1] == "gap" and accuracy.rows[0][-1] == "+25.00"
    text = " ".join(comparison.notes(rows))
    assert "b trained on other cohorts than a" in text and "behind" not in text and "MB" not in text
    assert "cohorts" not in " ".join(comparison.notes(compare.compared([one, one._replace(title="c")])))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two runs of local training, for 1 and for 3 rounds, and one with FedAvg beside."""
    folder = tmp_path_factory.mktemp("runs")
    one = {"local": TREE["systems"]["local"]}
    for name, rounds in (("short", 1), ("long", 3)):
        run.run(study(systems=one, rounds=rounds), folder / name, watcher=Silent())
    both = {"fedavg": {"method": "fedavg", "options": {"lr": 0.1, "batch_size": 20}}, **one}
    run.run(study(systems=both, rounds=3), folder / "both", watcher=Silent())
    return folder


def test_runs_of_several_folders_are_one_table_that_fits_80_columns(folders):
    names = [str(folders / name) for name in ("short", "long", "both")]
    result = CliRunner().invoke(app, ["compare", *names, "--target", "50"])
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    for word in ("Local only (short)", "Local only (long)", "To reach 50 %", "95 % interval", "p (clients)", "behind FedAvg"):
        assert word in text
    assert "…" not in text and all(len(line) <= 80 for line in result.output.splitlines())


def test_the_first_run_that_names_a_main_score_decides_what_all_are_compared_by(folders, tmp_path):
    one = {"local": TREE["systems"]["local"]}
    for name in ("loss", "accuracy"):
        run.run(study(systems=one, rounds=1, seeds=[1], main=name), tmp_path / name, watcher=Silent())

    def kinds(*names):
        return [one.kind.name for one in compare.finished([tmp_path / n if n != "short" else folders / n for n in names])]

    assert kinds("short", "loss", "accuracy") == ["loss"] * 3 == kinds("loss", "accuracy", "short")
    assert kinds("short", "accuracy", "loss") == ["accuracy"] * 3
    assert [one.kind.name for one in compare.finished([tmp_path / "loss"], score="accuracy")] == ["accuracy"]


def test_the_traffic_of_a_system_is_that_of_the_chosen_point(tmp_path):
    ifca = {"method": "ifca", "options": {"lr": 0.1}, "grid": {"clusters": [1, 3]}}
    chosen = study(systems={"ifca": ifca}, rounds=1, seeds=[1], tuning={"rounds": 1, "seeds": [0]})
    (outcome,) = run.run(chosen, tmp_path, watcher=Silent())
    (found,) = compare.finished([tmp_path])
    # Down go the models of all clusters; up comes as much, of which all but one are zeros, and a weight for each.
    assert found.traffic == outcome.chosen["clusters"] * (2 * 650 + 1) * jnp.zeros(()).dtype.itemsize


def test_a_comparison_is_written_as_markdown_csv_and_html(folders, tmp_path):
    files = [tmp_path / name for name in ("c.md", "c.csv", "c.html")]
    words = [word for path in files for word in ("--out", str(path))]
    args = ["compare", str(folders / "both"), "--reference", "Local only", "--target", "10", *words]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    text = files[0].read_text(encoding="utf-8")
    assert "## Minus Local only, known clients, same seeds" in text
    first, second = csv.DictReader(io.StringIO(files[1].read_text(encoding="utf-8")))
    systems = {one.title: one for one in compare.finished([folders / "both"])}
    fedavg = np.array(list(systems["fedavg"].by_client("known").values()))
    local = np.array(list(systems["Local only"].by_client("known").values()))
    assert float(first["known_mean"]) == pytest.approx(fedavg.mean()) and first["system"] == "fedavg"
    assert float(first["known_difference_mean"]) == pytest.approx((fedavg - local).mean())
    assert second["known_difference_mean"] == "" and second["bytes_a_round"] == "0.0"
    # The logistic model has 65 x 10 parameters, which travel down and up.
    assert float(first["bytes_a_round"]) == 2 * 650 * jnp.zeros(()).dtype.itemsize
    page = files[2].read_text(encoding="utf-8")
    assert page.count("<svg") > 4 and "Local only" in page and "http" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("extra", "message"), [(["--out", "c.pdf"], "must end with one of"), (["--reference", "x"], "reference")]
)
def test_bad_options_get_one_line(folders, extra, message):
    result = CliRunner().invoke(app, ["compare", str(folders / "both"), *extra])
    assert result.exit_code == 1 and message in " ".join(result.stderr.split())


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_without_results_gets_one_line(tmp_path, made):
    if made:
        with pytest.raises(KeyboardInterrupt):
            run.run(study(), tmp_path, watcher=Silent(stop_at=1))
    result = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert result.exit_code == 1 and ("no finished results" if made else "holds no run") in " ".join(result.stderr.split())


def test_intervals_of_levels_stay_within_the_score_and_those_of_differences_need_not():
    """Of two seeds, Student's t goes beyond every score."""
    first, second = system("a", [[0.9, 0.9], [0.99, 0.99]]), system("b", [[0.02, 0.02], [0.12, 0.12]])
    rows = compare.compared([first, second])
    scores, *_, differences = comparison.tables(rows)
    # 94.5 and 7 percent, 12.706 standard errors of 4.5 and 5 to each side.
    assert [row[scores.headings.index("95 % interval")] for row in scores.rows] == ["[37.32, 100.00]", "[0.00, 70.53]"]
    assert differences.rows[0][2] == f"[{-87.5 - 12.7062 * 0.5:+.2f}, {-87.5 + 12.7062 * 0.5:+.2f}]"
    assert "Two seeds are too few" in " ".join(comparison.notes(rows))
    three = compare.compared([system("a", [[0.9, 0.9], [0.99, 0.99], [0.95, 0.95]])])
    assert "too few" not in " ".join(comparison.notes(three))


@pytest.mark.parametrize(
    ("name", "mean", "shown"),
    [("rmse", 1.0, "[0, 3]"), ("r2", 0.5, "[-1.5, 1]"), ("perplexity", 2.0, "[1, 4]"), ("own", 0.5, "[-1.5, 2.5]")],
)
def test_the_ranges_of_scores_that_are_no_shares(name, mean, shown):
    kind = report.Kind(name, False, False)
    assert comparison._interval(mean, 2.0, kind, ends=comparison._range(kind)) == shown


def test_p_values_are_adjusted_in_every_form_and_words_stay_words():
    rng = np.random.default_rng(3)

    def some(title, gain):
        scores = rng.uniform(size=(3, 6)) * 0.2
        return compare.Finished(
            title,
            "<script>",
            "abc",
            [
                Trial({}, seed, [{"round": 1, "tests": {"known": known(row + gain), "new": known(row[::-1] + gain)}}], None)
                for seed, row in enumerate(scores)
            ],
        )

    def known(values):
        return {"accuracy": values, "scores": {"accuracy_mean": values.mean()}}

    rows = compare.compared([some("a", 0.1), some("b", 0.2), some("c", 0.5)], reference="a")
    lines = list(csv.DictReader(io.StringIO(comparison.comma_separated([rows]))))
    for group, test in itertools.product(("known", "new"), ("p_seeds", "p_clients")):
        name = f"{group}_difference_{test}"
        raw = [float(line[f"{name}_unadjusted"] or "nan") for line in lines]
        adjusted = [float(line[name] or "nan") for line in lines]
        np.testing.assert_allclose(adjusted, compare.holm(raw))
        assert np.isnan(raw[0]) and min(adjusted[1:]) > min(raw[1:])
    assert "<script>" not in comparison.markdown([rows])


def errors(seed, rmse, user=None):
    """A trial of ten rounds and two tests, in which lower scores are better; `user` is the user accuracy of its rounds."""
    scores = {"rmse_mean": float(np.mean(rmse)), "loss": 1.0}
    each = {"rmse": {"values": list(rmse), "higher_is_better": False, "share": False}}
    tests = {"known": {"metrics": each, "scores": scores, "loss": [1.0] * len(rmse)}}
    rows = [
        {
            "round": 5 * number,
            "seconds": 2.0,
            "train": {} if user is None else {"user_accuracy": user[5 * number - 5 : 5 * number]},
            "tests": tests,
            "faults": [],
        }
        for number in (1, 2)
    ]
    return Trial({}, seed, rows, None)


def test_clients_with_lower_errors_gain():
    one, other = (
        compare.Finished(title, "s", "abc", [errors(0, values)])
        for title, values in (("a", [1.0, 2.0, 3.0]), ("b", [2.0, 3.0, 2.0]))
    )
    found = compare.difference(one, other, "known")
    assert found.mean == pytest.approx(-1 / 3) and (found.better, found.worse) == pytest.approx((200 / 3, 100 / 3))


def test_a_target_without_a_name_is_of_the_score_that_is_compared():
    one = compare.Finished("a", "s", "abc", [errors(0, [3.0])])
    found = [compare.reached(one._replace(score=score), compare.Target(2)).rounds[0] for score in (None, "rmse", "loss")]
    assert found == [np.inf, np.inf, 5]


def test_user_accuracy_reaches_a_target_in_its_round_and_at_the_time_of_the_next_test():
    one = compare.Finished("a", "s", "abc", [errors(0, [1.0], user=[0.1] * 6 + [0.9] * 4)], traffic=1e6)
    found = compare.reached(one, compare.Target(80, "user_accuracy"))
    assert (found.rounds[0], found.megabytes[0], found.seconds[0]) == (7, 7, 4)
    # It counts also if it was lower again at that test.
    between = errors(0, [1.0], user=[0.1] * 2 + [0.9] + [0.1] * 7).rows
    goal = compare.Target(80, "user_accuracy")
    assert targets.is_reached(between[:1], goal) and not targets.is_reached(between[1:], goal)


def test_a_target_in_user_accuracy_concerns_the_systems_of_which_it_was_recorded():
    """Central training never has it, and a study may name some systems only."""
    some = compare.Finished("a", "s", "abc", [errors(seed, [1.0], user=[0.1] * 6 + [0.9] * 4) for seed in (0, 1)], traffic=1e6)
    other = compare.Finished("b", "s", "abc", [errors(seed, [1.0]) for seed in (0, 1)])
    goal = compare.Target(80, "user_accuracy")
    ((row, none), (alone,)) = compare.by_scenario([other._replace(fingerprint="xyz"), some, other], target=goal)[::-1]
    assert row.reached.rounds.tolist() == [7, 7] and none.reached is None and alone.reached is None
    assert comparison.tables([row, none])[-1].rows == [["a", "7 ±0", "7 ±0", "4 ±0"]]
    assert "User accuracy was not recorded of b." in comparison.notes([row, none])
    with pytest.raises(ValueError, match="no user_accuracy was recorded"):
        compare.by_scenario([other], target=goal)


def test_user_accuracy_counts_until_the_round_before_a_divergence():
    trial = errors(0, [1.0], user=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    trial.rows[1]["faults"] = [{"round": 8, "diverged": True}]
    _, found, _ = targets.curve(trial.rows, "user_accuracy")
    np.testing.assert_allclose(found, [10, 20, 30, 40, 50, 60, 70, np.nan, np.nan, np.nan])
