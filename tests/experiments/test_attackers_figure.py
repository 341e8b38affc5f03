"""The figure of accuracy against the share of attackers is drawn from a table."""

import pytest

attackers_figure = pytest.importorskip("experiments.attackers_figure", reason="the command line needs typer and matplotlib")
from typer.testing import CliRunner  # noqa: E402

TABLES = """text | with a bar

| system | rule | none | sign flip x10 20 % | backdoor 20 % |
|:---|:---|---:|---:|---:|
| FedAvg | mean | 85.6 ±0.7 | 12.1 ±1.0 | 82.4 ±0.8 |

| system | rule | none | sign flip x10 10 % | sign flip x10 2.5 % |
|:---|:---|---:|---:|---:|
| FedAvg | mean | 86.0 ±1.1 | diverged | 10.9 |
| Ditto | Bulyan | 83.9 | 77.3 ±2.0 | - |
"""


def test_the_table_of_several_shares_of_one_attack_is_read():
    (found,) = attackers_figure.read(TABLES)
    curves = {("FedAvg", "mean"): {0.0: 86.0, 2.5: 10.9}, ("Ditto", "Bulyan"): {0.0: 83.9, 10.0: 77.3}}
    assert found == ("sign flip x10", curves)


def test_it_is_drawn_or_refused_in_one_line(tmp_path):
    (tmp_path / "report.md").write_text(TABLES)
    (tmp_path / "other.md").write_text(TABLES[:250])
    run = lambda *words: CliRunner().invoke(attackers_figure.app, [str(tmp_path / word) for word in words])  # noqa: E731
    assert run("report.md", "a.svg").exit_code == 0
    assert {"FedAvg, mean", "Ditto, Bulyan", "sign flip x10"} <= _texts((tmp_path / "a.svg").read_text())
    for given, words in ((("other.md", "a.svg"), "there is no table"), (("report.md", "a.txt"), "'.txt' is unknown")):
        refused = run(*given)
        assert refused.exit_code == 1 and refused.output.count("\n") == 1 and words in refused.output


def _texts(svg):
    return {word for word in ("FedAvg, mean", "Ditto, Bulyan", "sign flip x10") if f"<!-- {word}" in svg or word in svg}
