"""Tables on a terminal: words stay whole, cells begin at the top, nothing is wider than the terminal."""

import io
import re

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from fedjax_meta import escape, process, report
from fedjax_meta.report.tables import wrap
from fedjax_meta.study import files, from_tree, results, terminal


def shown(table, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def pieces(text):
    return re.findall(r"[(\[]+[^\s(\[]*|[^\s(\[]+", text)


@pytest.mark.parametrize("width", [40, 80, 100, 160])
@pytest.mark.parametrize("name", files.packaged())
def test_tables_of_every_packaged_study_fit_and_break_no_word(name, width):
    study = from_tree(files.read(name))
    accuracy = report.Kind("accuracy", True, True)
    lines = [
        results.Line(
            study.title_of(system), accuracy, ", ".join(f"{option}=0.003" for option in one.grid), (97.21, 0.51), (88.12, 1.25),
            12.0, (95.5, 0.75), 1.7e5, 3.0, "best outer_lr at the end of its grid; new clients do not train; not tuned",
        )
        for system, one in study.systems.items()
    ]  # fmt: skip
    table = results.table(lines)
    for part in (table.only(results.SCORES), table.only(results.HOW)):
        text = shown(report.rich_table("known clients", part.headings, part.rows), width)
        assert all(len(line) <= width for line in text.splitlines())
        words = set(text.split())
        for cell in (cell for row in (part.headings, *part.rows) for cell in row):
            # Whole words, or the parts before and from a bracket on.
            assert all(word in words or all(any(piece in w for w in words) for piece in pieces(word)) for word in cell.split())
        assert "±0.51" in text if "known" in part.headings else "170 kB" in text


def test_a_row_begins_on_its_first_line_and_numbers_stay_whole():
    table = report.rich_table(
        "t", ["system", "known", "remark"], [["FedMeta(MAML)", "97.21 ±0.51", "new clients do not train; not tuned; diverged"]]
    )
    lines = table.lines(30)
    first = lines[next(i for i, line in enumerate(lines) if "─" in line) + 1]
    assert first.startswith("FedMeta ") and "97.21 ±0.51" in first and "new" in first
    assert lines[lines.index(first) + 1].startswith("(MAML)")


def test_columns_that_do_not_fit_follow_below_with_the_first_one_again():
    headings = ["system", *(f"score {number}" for number in range(6))]
    table = report.rich_table("t", headings, [["FedAvg", *(f"{number}.00 ±0.12" for number in range(6))]])
    lines = table.lines(40)
    assert max(map(len, lines)) <= 40 and sum(line.startswith("FedAvg") for line in lines) == 3
    assert all(f"{number}.00 ±0.12" in "\n".join(lines) for number in range(6))
    assert len(table.lines(100)) == 3


@pytest.mark.parametrize("width", [20, 50])
@pytest.mark.parametrize("name", ["FedMeta-Per", "fedmeta_per_metasgd_exact_second_order_run", "联邦元学习个性化方法实验结果"])
def test_no_number_is_cut_at_the_edge_of_the_terminal(width, name, monkeypatch, capsys):
    monkeypatch.setattr(process.console, "_width", width)
    numbers = ["97.1 ±0.3", "12345678.25", "96.0 ±1.0"]
    terminal.table(report.Table(("system", "known clients", "bytes", "new clients"), [[name, *numbers]], "accuracy"))
    printed = capsys.readouterr().out
    assert all(word in printed for word in (name, "clients", *numbers))


def test_letters_of_two_cells_keep_columns_in_line():
    names = ["联邦学习", "fedavg", "e\u0301tude"]
    lines = report.rich_table("t", ["system", "known"], [[name, "97.1 ±0.3"] for name in names]).lines(40)
    ends = [cell_len(line) for line in lines]
    assert len(set(ends)) == 1 and all(line.endswith("97.1 ±0.3") for line in lines[2:])
    assert wrap("联邦 学习", 5) == ["联邦", "学习"]


def test_text_wraps_between_words_then_before_brackets_and_never_inside_a_word():
    rng = np.random.default_rng(0)
    for _ in range(300):
        words = ["".join(rng.choice(list("abc(-"), rng.integers(1, 12))) for _ in range(rng.integers(1, 6))]
        width = int(rng.integers(3, 20))
        lines = wrap(" ".join(words), width)
        assert "".join(lines).replace(" ", "") == "".join(words)
        assert all(len(line) <= width or len(pieces(line)) == 1 for line in lines)
        found = {piece for line in lines for piece in pieces(line)}
        assert found == {piece for word in words for piece in pieces(word)}
    assert wrap("", 5) == [""]


def test_names_between_colons_are_no_emoji(capsys):
    for console in (process.console, process.errors):
        console.print(escape.console("my_module:fire:name"))
    assert [text.strip() for text in capsys.readouterr()] == ["my_module:fire:name"] * 2
