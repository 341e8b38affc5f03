"""Attacks and aggregators in studies: what a scenario tells its systems, who is scored, and the numbers of a run."""

import re
import shlex

import jax
import numpy as np
import pytest

import fedjax_meta as fm
from fedjax_meta import aggregate, attacks, report
from fedjax_meta.blocks import run_keys
from fedjax_meta.study import compare, from_tree, load, parts, run, summary
from fedjax_meta.study.tuning import Trial
from tests.study.common import TREE, Silent

typer_testing = pytest.importorskip("typer.testing", reason="the command line needs typer")
robustness = pytest.importorskip("experiments.robustness", reason="the command line needs typer, rich and matplotlib")
figures = pytest.importorskip("experiments.figures")

SMALL = {
    **TREE,
    "scenarios": {
        "pairs": {
            **TREE["scenarios"]["pairs"],
            "server": 50,
            "attackers": 0.25,
            "each": {
                "federation.attack": [{"none": None}, {"backdoor": {"name": "backdoor", "boost": "attackers", "size": 2}}]
            },
        }
    },
    "systems": {
        "rule": {
            "method": "fedavg",
            "title": "{aggregator}",
            "options": {"epochs": 1, "batch_size": 20, "lr": 0.1},
            "each": {"federation.aggregator": [{"trimmed": {"name": "trimmed_mean", "share": "attackers"}}, "fltrust"]},
        }
    },
    "rounds": 2,
    "federation": {"cohort_size": 8},
}
CELLS = [(s, a) for s in ("rule-trimmed", "rule-fltrust") for a in ("pairs-none", "pairs-backdoor")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    study = from_tree(SMALL)
    folder = tmp_path_factory.mktemp("robust") / "run"
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
        clients = run.build(study)
        outcomes = run.run(study, folder, watcher=Silent(), clients=clients)
    return study, clients, {(one.system, one.scenario): one for one in outcomes}, folder


@pytest.mark.parametrize("cell", CELLS, ids="/".join)
def test_a_study_gives_the_numbers_of_a_federation_that_was_put_together_by_hand(finished, cell):
    study, clients, outcomes, _ = finished
    system, scenario = cell
    place = clients[scenario]
    assert (place.train.num_clients, place.new.num_clients) == (8, 2)
    rule = aggregate.trimmed_mean(0.25) if "trimmed" in system else aggregate.fltrust(place.server)
    attack = attacks.backdoor(0.25, boost=4.0, size=2) if "backdoor" in scenario else None
    honest = np.flatnonzero(~attack.members(8)) if attack else np.arange(8)
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
        federation = fm.Federation(cohort_size=8, aggregator=rule, attack=attack, devices=1)
        algorithm = fm.federate(fm.fedavg(place.task, lr=0.1, epochs=1, batch_size=20), federation)
        state, _ = fm.simulate(algorithm, place.train, key=jax.random.key(2), rounds=2, eval_every=2)
        key = run_keys(jax.random.key(2))[2]  # FedAvg's tests draw nothing
        marked = attacks.stamped(place.train, "test", size=2)
        tests = [place.train, marked] if attack else [place.train]
        found = [fm.evaluate(algorithm, key, state, data, support="train", query="test", ids=honest) for data in tests]
    rows = outcomes[system, scenario].final[1].rows[-1]["tests"]
    np.testing.assert_array_equal(np.array(rows["known"]["confusion"]), np.asarray(found[0].confusion))
    assert set(rows) == {"known", "new", "backdoor"} if attack else {"known", "new"}
    if attack:
        assert rows["known"]["ids"] == rows["backdoor"]["ids"] == honest.tolist()
        success = summary.values(study, outcomes[system, scenario], "backdoor")
        assert success[1] == pytest.approx(100 * attacks.backdoor_success(found[1].confusion, target=0))


def test_the_summary_has_a_column_for_each_attack(finished):
    study, _, outcomes, _ = finished
    known, new, success = summary.tables(study, list(outcomes.values()))
    assert known.headings == new.headings == ["system", "pairs-none", "pairs-backdoor"]
    assert success.headings == ["system", "pairs-backdoor"]
    assert known.title == "Known clients in all scenarios: accuracy, %"
    assert [row[0] for row in known.rows] == ["trimmed", "fltrust"] and all(
        "±" in cell for row in known.rows for cell in row[1:]
    )
    (remark,) = summary.remarks(study, outcomes["rule-trimmed", "pairs-backdoor"])
    assert remark == f"backdoor succeeds on {success.rows[0][1]} %"
    assert summary.remarks(study, outcomes["rule-trimmed", "pairs-none"]) == []


def test_the_clients_of_a_file_have_their_ids(finished):
    *_, folder = finished
    found = report.load_clients(folder)
    liars = set(np.flatnonzero(attacks.backdoor(0.25).members(8)).tolist())
    for scenario, out in (("pairs-none", set()), ("pairs-backdoor", liars)):
        mine = found[(found["scenario"] == scenario) & (found["clients"] == "known")]
        assert set(mine["client"]) == set(range(8)) - out


def test_the_figure_is_made_of_the_folder(finished):
    *_, folder = finished
    titles, scenarios, values = figures.accuracies(load(folder / "study.yaml"), compare.finished([folder]))
    assert (titles, scenarios) == (["trimmed", "fltrust"], ["pairs-none", "pairs-backdoor"]) and np.isfinite(values).all()
    one = compare.finished([folder])[0]
    lost = one._replace(trials=[one.trials[0]._replace(diverged=1), *one.trials[1:]])
    assert np.isnan(figures.known(lost)[0]) and np.isfinite(figures.known(one)).all()
    assert typer_testing.CliRunner().invoke(figures.app, ["robustness", str(folder)]).exit_code == 0
    assert (folder / "robustness.png").stat().st_size > 5000


def test_the_page_gets_the_tables_of_the_folder(finished, tmp_path):
    *_, folder = finished
    page = tmp_path / "page.md"
    page.write_text(f"a\n<!-- run: {folder.name} -->\nold\n<!-- end -->\nb\n<!-- run: other -->\nkept\n<!-- end -->\n")
    done = typer_testing.CliRunner().invoke(figures.app, ["tables", str(folder.parent), str(page)])
    text = page.read_text()
    assert done.exit_code == 0 and "old" not in text and "\nkept\n" in text and text.startswith("a\n")
    known = summary.tables(finished[0], list(finished[2].values()))[0]
    assert f"| trimmed | {' | '.join(known.rows[0][1:])} |" in text and "| system | none | backdoor |" in text
    refused = typer_testing.CliRunner().invoke(figures.app, ["tables", str(tmp_path), str(page)])
    assert refused.exit_code == 1 and "holds no run that" in refused.output and refused.output.count("\n") == 1


def test_curves_by_the_share_of_attackers():
    tree = {**SMALL, "scenarios": {"pairs": {**SMALL["scenarios"]["pairs"]}}}
    tree["scenarios"]["pairs"]["each"] = {
        "federation.attack": [{"none": None}, {"some": "ipm:attackers=0.25"}, {"more": "ipm:attackers=0.4"}]
    }
    study = from_tree(tree)
    ones = [
        compare.Finished(
            "trimmed",
            name,
            "",
            [Trial({}, 1, [{"tests": {"known": {"accuracy": [value], "scores": {"accuracy_mean": value}}}}], None)],
        )
        for name, value in zip(study.scenarios, (0.9, 0.7, 0.5), strict=True)
    ]
    (found,) = figures.by_share(study, ones[::-1]).values()
    assert found == [(0.0, pytest.approx(90)), (25.0, pytest.approx(70)), (40.0, pytest.approx(50))]
    for wrong, words in ((ones[:1], "one share of attackers"), ([*ones, ones[1]], "several scenarios with 25 % attackers")):
        with pytest.raises(ValueError, match=words):
            figures.by_share(study, wrong)


def test_the_server_shares_no_sample_with_the_clients(finished):
    _, clients, *_ = finished
    place = clients["pairs-none"]
    x, y = fm.data.sources.load("digits").pooled()
    assert int(place.server["train"].size) == len(np.asarray(place.server["train"].y)) == 50
    parts_ = [np.asarray(part).reshape(-1, 64) for part in (place.train.x, place.server["train"].x)]
    together, everything = np.concatenate(parts_), x.reshape(len(y), -1)
    assert np.array_equal(together[np.lexsort(together.T)], everything[np.lexsort(everything.T)])


def test_words_become_the_numbers_of_the_scenario():
    told = parts.told(
        {
            "attack": "sign_flip:scale=10",
            "aggregator": "nearest_neighbours:f=attackers+trimmed_mean:share=attackers",
            "cohort_size": 20,
        },
        attackers=0.2,
    )
    assert told["attack"] == {"name": "sign_flip", "scale": 10, "attackers": 0.2}
    assert told["aggregator"] == "nearest_neighbours:f=4+trimmed_mean:share=0.2"
    own = parts.told(
        {"attack": {"name": "ipm", "attackers": 0.4}, "aggregator": {"name": "krum", "f": "attackers"}, "cohort_size": 10}
    )
    assert own["aggregator"] == {"name": "krum", "f": 4}  # of the attack itself
    with pytest.raises(ValueError, match=r"aggregator says 'attackers': give the scenario a share, attackers=0\.2"):
        parts.told({"aggregator": {"name": "krum", "f": "attackers"}})


def test_the_study_of_the_package_is_whole():
    study = load("robustness")
    assert (len(study.scenarios), len(study.systems)) == (14, 35)
    quick = load("robustness", variants=["quick"])
    assert [quick.title_of(name) for name in quick.systems][:3] == [
        "FedAvg, mean",
        "FedAvg, trimmed mean",
        "FedAvg, NNM + trimmed mean",
    ]
    every = load("robustness", variants=["all_rules", "all_attacks"])
    assert len(every.systems) == 7 * 14 and len(every.scenarios) == 20
    rules = {name.partition("-")[2] for name in every.systems}
    used = {str(every.system(f"fedavg-{rule}", "iid-none").federation["aggregator"]) for rule in rules}
    assert len(used) == 14
    shares = load("robustness", variants=["shares", "dirichlet"])
    told = [shares.system("fedavg-NNM_trimmed_mean", name).federation["aggregator"] for name in shares.scenarios]
    wanted = ((4, 0.2), (2, 0.1), (4, 0.2), (6, 0.3), (8, 0.4))  # with nobody attacking, as with a fifth
    assert told == [f"nearest_neighbours:f={f}+trimmed_mean:share={share}" for f, share in wanted]
    assert {place.dataset for place in load("robustness", variants=["fashion"]).scenarios.values()} == {"fashion_mnist"}


def test_every_table_of_the_page_is_that_of_a_command():
    """The commands run; where a table was written from a run, its systems and scenarios are those of its command."""
    blocks = figures.BLOCK.findall(figures.PAGE.read_text(encoding="utf-8"))
    assert {name for name, _ in blocks} >= {"rules", "dirichlet", "shares", "fashion"}
    for name, text in blocks:
        ((command, commit),) = re.findall(
            r"^    fedjax-meta run robustness (.*?)(  # commit [0-9a-f]{10})?$", text, re.MULTILINE
        )
        words = shlex.split(command)
        given = {key: [words[i + 1] for i, word in enumerate(words) if word == f"--{key}"] for key in ("variant", "systems")}
        study = load("robustness", variants=given["variant"], systems=given["systems"][0] if given["systems"] else None)
        known, *others = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
        if not commit:
            continue
        attacks_ = [one.partition("-")[2].replace("_", " ") for one in study.scenarios]
        assert known.splitlines()[0] == f"| {' | '.join(['system', *attacks_])} |", name
        for table in (known, *others):
            _, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
            assert [row[0] for row in rows] == [study.title_of(one) for one in study.systems], name
            assert all(re.fullmatch(r"\d+(\.\d+)?( ±\d+(\.\d+)?)?|diverged", cell) for row in rows for cell in row[1:]), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"federation": {"attack": "storm"}}, "attack='storm' is unknown"),
        ({"federation": {"epochs": 2}}, "scenarios.pairs, systems.fedavg: federation takes no 'epochs'"),
        ({"federation": {"attack": "ipm"}}, "attack ipm needs attackers: give it, or the scenario, a share, attackers=0.2"),
        ({"attackers": 1.5}, "attackers=1.5 must lie strictly between 0 and 1"),
        ({"server": -1}, "server=-1"),
        ({"server": 5, "partition": "fedpac", "options": {}}, "server=5 needs one of the partitions iid, shards"),
    ],
)
def test_what_cannot_be_is_one_line(changes, message):
    pairs = {**TREE["scenarios"]["pairs"], **changes}
    with pytest.raises(ValueError) as failed:
        from_tree({**TREE, "scenarios": {"pairs": pairs}})
    assert message in str(failed.value) and "\n" not in str(failed.value)


def test_a_rule_that_allows_fewer_attackers_is_refused_before_anything_is_written(tmp_path):
    tree = {**SMALL, "federation": {"cohort_size": 8}}
    tree["systems"] = {"bulyan": {"method": "fedavg", "federation": {"aggregator": {"name": "bulyan", "f": "attackers"}}}}
    with pytest.raises(ValueError, match="pairs-none, bulyan: f=2 is too many for bulyan with C=8 clients"):
        run.run(from_tree(tree), tmp_path / "run", watcher=Silent())
    assert not (tmp_path / "run").exists()
