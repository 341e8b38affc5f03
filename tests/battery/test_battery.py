"""Every bad input is refused with one line that says what is wrong: the tables are in the other files of this folder."""

import pytest

from tests.battery import commands, data, federations, parts, runs

TABLES = (federations, data, runs, parts)
ROWS = {name: row for table in TABLES for name, row in table.ROWS.items()}


def test_there_are_many_and_none_hides_another():
    assert sum(len(table.ROWS) for table in TABLES) == len(ROWS)
    tables = [*commands.WHOLE.values(), *((table, ()) for table in (*commands.OTHERS.values(), *commands.BENCHMARKS.values()))]
    assert sum(len(table) for table, _ in tables) == len(commands.ROWS)
    assert len(ROWS) + len(commands.ROWS) >= 800


@pytest.mark.parametrize("name", ROWS)
def test_one_line_says_what_is_wrong(name):
    call, words = ROWS[name]
    with pytest.raises((ValueError, TypeError, OSError)) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
