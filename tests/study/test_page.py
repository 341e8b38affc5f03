"""The HTML page of a study, its figures and its LaTeX table."""

import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import jax
import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from fedjax_meta.report import COLORS
from fedjax_meta.study import compare, comparison, figures, page, results, run
from fedjax_meta.study.tuning import Trial
from tests.study.common import TREE, Silent, study
from tests.study.test_compare import trial as trial_of

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A study of three systems, its clients and outcomes, and the folder with every report."""
    more = {"method": "fedper", "options": {"epochs": 1, "batch_size": 20, "lr": 0.1}, "title": "Own_heads & 100 %"}
    published = [{"system": "fedavg", "scenario": "pairs", "value": 50.0, "score": "accuracy_mean", "note": "Table 3"}]
    chosen = study(systems={**TREE["systems"], "more": more}, rounds=3, published=published)
    folder = tmp_path_factory.mktemp("reports")
    built = run.build(chosen)
    outcomes = run.run(chosen, folder, watcher=Silent(), clients=built)
    page.write_all(folder, chosen, built, outcomes, "fedjax-meta run digits.yaml")
    return chosen, built, outcomes, folder


class Checked(HTMLParser):
    """Counts tables and scripts, and sees whether every tag is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.words = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_a_page_is_well_formed_and_names_from_users_are_text_in_it(tmp_path):
    systems = {**TREE["systems"], "local": {**TREE["systems"]["local"], "title": "<script>x</script> & co"}}
    published = [{"system": "fedavg", "scenario": "pairs", "value": 81.5, "note": "Table 3 <b>"}]
    chosen = study(rounds=2, seeds=[1], systems=systems, title="A <i>title</i>", published=published)
    outcomes = run.run(chosen, tmp_path / "run", watcher=Silent())
    built = {name: scenario.build() for name, scenario in chosen.scenarios.items()}
    page.write(tmp_path / "page.html", chosen, built, outcomes, "fedjax-meta run <x>")
    parser = Checked()
    parser.feed((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert parser.open == [] and "script" not in parser.seen and "b" not in parser.seen
    text = " ".join(parser.words)
    for word in ("<script>x</script> & co", "A <i>title</i>", "81.50", "fedjax-meta run <x>", "majority class"):
        assert word in text


def test_the_tables_are_those_of_the_trials(made):
    chosen, _, outcomes, folder = made
    accuracy = {one.system: 100 * np.array([t.rows[-1]["tests"]["known"]["accuracy"] for t in one.final]) for one in outcomes}
    mean, spread = accuracy["fedavg"].mean(), accuracy["fedavg"].mean(1).std(ddof=1)
    (row,) = results.published(chosen, outcomes)
    assert row[4:7] == ["50.00", f"{mean:.2f} ±{spread:.2f}", f"{mean - 50:+.2f}"]
    gains = {(row[0], row[1], row[2]): row[3:] for row in results.gains(chosen, outcomes)}
    change = np.round(accuracy["fedavg"].mean(0) - accuracy["local"].mean(0), 4) + 0.0  # scores are float32
    shown = gains["fedavg", "Local only", "known"]
    assert shown[0] == f"{100 * np.mean(change < 0):.0f} %"
    ends = (change.min(), change.argmin(), change.min() < 0), (change.max(), change.argmax(), change.max() > 0)
    assert shown[2:] == [f"{v:+.1f} (client {i})" if there else "none" for v, i, there in ends]
    assert change.min() < 0 and "none" in shown[2:]
    # New clients of this local-only system do not train, so that nobody is compared with them, nor they against others.
    assert not {("fedavg", "Local only", "new"), ("Local only", "fedavg", "new")} & set(gains)
    assert ("Local only", "fedavg", "known") in gains
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert f"{mean:.2f} ±{spread:.2f}" in text and "new clients do not train" in text
    assert text.count("sample standard deviation") == 1


def test_latex_has_a_row_for_each_system_and_escapes_titles(made):
    text = (made[3] / "report.tex").read_text(encoding="utf-8")
    rows = text[text.index(r"\midrule") : text.index(r"\bottomrule")].splitlines()[1:]
    assert [row.split(" & ")[0] for row in rows][:3] == ["fedavg", "Local only", r"Own\_heads \& 100 \%"]
    columns = text[text.index(r"\begin{tabular}") :].splitlines()[0].count("r}") and text.split(r"{tabular}{")[1].index("}")
    assert all(row.endswith(r"\\") and row.replace(r"\&", "").count("&") == columns - 1 for row in rows)
    assert r"$\pm$" in rows[0] and text.count(r"\begin{") == text.count(r"\end{")


def test_figures_are_files_in_which_each_system_has_its_own_colour(made):
    chosen, _, outcomes, folder = made
    names = {path.stem.removeprefix("pairs-") for path in (folder / "figures").glob("*.svg")}
    assert names == {"rounds", "clients", "gains", "costs", "tuning", "confusion", "samples"}
    for name in ("rounds", "clients", "costs"):
        text = (folder / "figures" / f"pairs-{name}.svg").read_text(encoding="utf-8")
        ET.fromstring(text)
        assert all(color in text for color in COLORS[:3]) and "var(" not in text
    for name in names:
        assert (folder / "report.md").read_text(encoding="utf-8").count(f"(figures/pairs-{name}.svg)") == 1
    # Without the first system, the others keep their colours, in a page too.
    shown = page.systems(chosen, outcomes)[1:]
    text = figures.svg(figures.by_round(shown).panels, "curves")
    assert "var(--s0)" not in text and "var(--s1)" in text and "var(--s2)" in text
    assert not any(color in text for color in COLORS)


def test_a_page_has_the_samples_of_the_clients(made):
    _, built, _, folder = made
    ((_, shown),) = built.items()
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.count("<summary>Who has which samples</summary>") == 1
    assert f"known clients: {shown.train.num_clients} with" in text and f"new clients: {shown.new.num_clients} with" in text
    assert "first samples of" not in text + (folder / "figures" / "pairs-samples.svg").read_text(encoding="utf-8")


def test_traffic_is_that_of_the_models_that_travel(made):
    chosen, built, outcomes, _ = made
    model = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(built["pairs"].task.init(jax.random.key(0))))
    traffic = {one.title: one.traffic for one in page.systems(chosen, outcomes)}
    # The linear model is its head.
    assert traffic["fedavg"] == 2 * model and traffic["Own_heads & 100 %"] == 0 and len(traffic) == 3


def test_a_page_of_many_systems_stays_small(made):
    """Each has a line in every figure, but only the first ones a picture; the page says where the others are."""
    chosen, _, outcomes, _ = made
    shown = page.systems(chosen, outcomes)
    many = [shown[n % len(shown)]._replace(title=f"system {n}", color=n) for n in range(65)]
    few, all_of = ({one.name: one for one in figures.all_of(many, of_page=of_page)} for of_page in (True, False))
    assert len(few["confusion"].panels) == figures.ON_PAGE and len(all_of["confusion"].panels) == 65
    assert "Of the first 12 systems" in few["confusion"].words and "figures" in few["confusion"].words
    assert "figures" in few["clients"].words and "figures" not in all_of["clients"].words
    from matplotlib.figure import Figure

    for one, lines, dots in ((few, 3, 0), (all_of, 2, 1)):
        axis = Figure().subplots()
        one["clients"].panels[0].draw(axis)
        assert (len(axis.lines), len(axis.collections)) == (65 * lines, 65 * dots)
    pair = {name: figures.svg(few[name].panels[:1], name) for name in ("clients", "confusion")}
    assert len(pair["clients"]) < 90_000 and len(pair["confusion"]) < 12_000
    for text in pair.values():
        ET.fromstring(text)
    # Of few systems a page has all.
    assert [len(one.panels) for one in figures.all_of(shown, of_page=True)] == [
        len(one.panels) for one in figures.all_of(shown)
    ]


def test_a_line_is_the_mean_over_seeds_and_its_band_one_deviation(made):
    chosen, _, outcomes, _ = made
    shown = page.systems(chosen, outcomes)
    axis = Figure().subplots()
    figures.by_round(shown).panels[1].draw(axis)
    scores = 100 * np.array([[row["tests"]["new"]["scores"]["accuracy_mean"] for row in t.rows] for t in outcomes[0].final])
    np.testing.assert_allclose(axis.lines[0].get_ydata(), scores.mean(0))
    band = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx((scores.mean(0) + scores.std(0, ddof=1)).max())


def test_a_curve_has_the_rounds_that_all_seeds_have():
    """Seeds that were tested after unlike rounds, and one that reached its goal early."""

    def tested(seed, curve):
        one = trial_of(seed, [0.5], list(curve.values()))
        return one._replace(rows=[{**row, "round": at} for row, at in zip(one.rows, curve, strict=True)])

    first, second = tested(1, {1: 0.1, 3: 0.3, 6: 0.6}), tested(2, {1: 0.2, 2: 0.4, 3: 0.5, 4: 0.7, 6: 0.8})
    shown = figures.Shown("a", 0, [first, second])
    assert figures._rounds(shown).tolist() == [1, 3, 6]
    np.testing.assert_allclose(figures._scores(shown, "known"), [[10, 30, 60], [20, 50, 80]])
    shown = shown._replace(final=[first, second, tested(3, {1: 0.3, 2: 0.9})])
    assert figures._rounds(shown).tolist() == [1, 3, 6]
    np.testing.assert_allclose(figures._scores(shown, "known")[2], [30, 90, 90])
    axis = Figure().subplots()
    figures.against([shown]).panels[-1].draw(axis)
    np.testing.assert_allclose(axis.lines[0].get_xdata(), np.mean([[2, 4, 6], [2, 6, 10]], 0))
    figures.against([shown._replace(traffic=2e6)]).panels[0].draw(axis := Figure().subplots())
    np.testing.assert_allclose(axis.lines[0].get_xdata(), [2, 6, 12])  # MB


def test_full_colour_of_a_confusion_matrix_is_all_samples_of_a_true_class():
    matrices = [[[3, 1], [0, 0]], [[0, 0], [1, 3]]]
    final = [Trial({}, 0, [{"tests": {"known": {"confusion": matrices}}}], None)]
    final += [Trial({}, 1, [{"tests": {"known": {"confusion": [matrices[0], [[0, 0], [4, 0]]]}}}], None)]
    figures.confusion([figures.Shown("a", 0, final)]).panels[0].draw(axis := Figure().subplots())
    np.testing.assert_allclose(axis.images[0].get_array()[..., 3], [[6 / 8, 2 / 8], [5 / 8, 3 / 8]])


def test_the_choice_of_every_draw_has_a_ring():
    """Two draws of the clients, each tuned on its own, which chose unlike values."""
    points = [(0.1, 0.9), (0.3, 0.2), (0.1, 0.1), (0.3, 0.9)]
    tests = [{"validation": {"accuracy": [share], "scores": {"accuracy_mean": share}}} for _, share in points]
    trials = [Trial({"lr": lr}, 0, [{"round": 1, "tests": one}], None) for (lr, _), one in zip(points, tests, strict=True)]
    shown = figures.Shown("a", 0, [], tuning=trials, grid={"lr": [0.1, 0.3]}, chosen=[{"lr": 0.1}, {"lr": 0.3}], draws=2)
    figure, axis = figures.tuning([shown]), Figure().subplots()
    figure.panels[0].draw(axis)
    curve, *rings = axis.lines
    np.testing.assert_allclose(curve.get_xydata(), [[0.1, 50], [0.3, 55]])
    assert sorted(ring.get_xdata()[0] for ring in rings) == [0.1, 0.3] and "Each draw" in figure.words
    figures.tuning([shown._replace(chosen=[{"lr": 0.3}], draws=1)]).panels[0].draw(axis := Figure().subplots())
    assert [ring.get_xdata()[0] for ring in axis.lines[1:]] == [0.3]


def test_values_that_halving_ended_are_hollow_and_not_joined_with_the_others():
    tests = [{"validation": {"accuracy": [share], "scores": {"accuracy_mean": share}}} for share in (0.3, 0.7, 0.8, 0.9)]
    rounds, rates = (4, 8, 8, 4), (0.01, 0.1, 1.0, 1.0)
    trials = [
        Trial({"lr": lr, "epochs": 1 + (i == 3)}, 0, [{"round": at, "tests": one}], None)
        for i, (lr, at, one) in enumerate(zip(rates, rounds, tests, strict=True))
    ]
    grid = {"lr": [0.01, 0.1, 1.0]}
    figure = figures.tuning([figures.Shown("a", 0, [], tuning=trials, grid=grid, chosen=[{"lr": 1.0}])])
    figure.panels[0].draw(axis := Figure().subplots())
    line, hollow, ring = axis.lines
    # At 1.0, the point that was cut scored better after fewer rounds, and does not count.
    np.testing.assert_allclose(line.get_xydata(), [[0.1, 70], [1.0, 80]])
    np.testing.assert_allclose(hollow.get_xydata(), [[0.01, 30]])
    assert (hollow.get_linestyle(), hollow.get_markerfacecolor()) == ("None", "none")
    np.testing.assert_allclose(ring.get_xydata(), [[1.0, 80]])
    assert axis.get_xscale() == "log" and "Hollow: halving ended" in figure.words
    whole = [trial._replace(rows=[{**trial.rows[0], "round": 8}]) for trial in trials]
    assert "Hollow" not in figures.tuning([figures.Shown("a", 0, [], tuning=whole, grid=grid)]).words


def test_bars_of_clients_reach_from_quartile_to_quartile():
    shares = [0.1, 0.2, 0.4, 0.8, 0.9]
    figure = figures.by_client([figures.Shown("a", 0, [trial_of(1, shares, [0.5])])])
    figure.panels[0].draw(axis := Figure().subplots())
    bar, middle = axis.lines[:2]
    np.testing.assert_allclose(bar.get_xdata(), [20, 80])
    np.testing.assert_allclose(middle.get_xdata(), [40, 40])
    assert bar.get_solid_capstyle() == "butt"


def test_what_was_not_run_is_not_spoken_of(tmp_path):
    chosen = study(rounds=1, seeds=[1], systems={"fedavg": {"method": "fedavg", "options": {"batch_size": 20}}})
    built = run.build(chosen)
    page.write_all(tmp_path, chosen, built, run.run(chosen, tmp_path, watcher=Silent(), clients=built), "x")
    text = (tmp_path / "report.html").read_text(encoding="utf-8") + (tmp_path / "report.tex").read_text(encoding="utf-8")
    for word in ("±", "training alone", "Grids", "hyper-parameters were", "Published", "standard deviation", "behind local:"):
        assert word not in text


def test_a_system_that_diverges_is_reported_as_such(tmp_path):
    systems = {
        "broken": {"method": "fedavg", "options": {"batch_size": 20, "lr": 1e308}},
        **{name: TREE["systems"][name] for name in ("local",)},
    }
    chosen = study(
        rounds=2, systems=systems, tuning={"rounds": 1}, published=[{"system": "broken", "scenario": "pairs", "value": 1}]
    )
    built = run.build(chosen)
    outcomes = run.run(chosen, tmp_path, watcher=Silent(), clients=built)
    assert all(trial.diverged is not None for trial in outcomes[0].final)
    # As where the loss is not finite.
    for row in (row for trial in outcomes[0].final for row in trial.rows):
        for test in row["tests"].values():
            test["accuracy"] = [float("nan")] * len(test["accuracy"])
            test["scores"] = dict.fromkeys(test["scores"], float("nan"))
    page.write_all(tmp_path, chosen, built, outcomes, "x")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "diverged at round" in text and "nan" not in re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)
    assert results.published(chosen, outcomes)[0][5] == "diverged"
    whole = [one._replace(final=[trial._replace(diverged=None) for trial in one.final]) for one in outcomes]
    assert results.published(chosen, whole)[0][5:7] == ["not measured", ""]
    goal = compare.Target(10)
    rows = compare.compared([compare.Finished(one.system, "pairs", "abc", one.final) for one in outcomes], target=goal)
    assert "diverged" in comparison.tables(rows)[0].rows[0]
    assert "broken: 2 of 2 seeds diverged" in comparison.markdown([rows])
    assert "diverged" in comparison.html([rows]) and comparison.comma_separated([rows]).count("\n") == 3


@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 500])
def test_the_page_in_a_browser(made, dark, width, tmp_path):
    path = tmp_path / "page.png"
    theme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND"]
    shot = [f"--screenshot={path}", f"--window-size={width},3000", f"--user-data-dir={tmp_path / 'profile'}"]
    page_ = (made[3] / "report.html").as_uri()
    subprocess.run([BROWSER, *options, theme, *shot, page_], check=True, capture_output=True, timeout=120)
    image = matplotlib.image.imread(path)[..., :3]
    assert image.shape[:2] == (3000, width)
    background = np.array(to_rgb("#14171c" if dark else "#ffffff"))
    near = np.abs(image - background).max(-1) < 0.02
    assert 0.5 < near.mean() < 0.99
    # Nothing runs out of the window: tables scroll by themselves.
    assert near[:, -8:].all() and near[:, :8].all()
    for color in COLORS[:3]:
        line = np.array(to_rgb(figures.ON_DARK.get(color, color) if dark else color))
        assert (np.abs(image - line).max(-1) < 0.03).sum() > 200
