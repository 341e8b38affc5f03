"""Messages and texts of users: one line whatever the value, escaped text that reads as it was written, and options that parse."""

import io
import json
import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedjax_meta import checks, escape

ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(), st.binary())
    | st.sampled_from([object(), int, print, np.zeros((2, 3)), np.array(["a"]), np.array([None]), np.float32(1)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=5,
)
CHECKS = {
    "positive": lambda value: checks.positive("lr", value),
    "each": lambda value: checks.positive("lr", value, each=True),
    "not_negative": lambda value: checks.not_negative("lr", value),
    "finite": lambda value: checks.finite("lr", value),
    "fraction": lambda value: checks.fraction("lr", value),
    "share": lambda value: checks.share("lr", value),
    "between": lambda value: checks.between("lr", value, 0, 1),
    "count": lambda value: checks.count("lr", value),
    "seed": lambda value: checks.seed("lr", value),
    "flag": lambda value: checks.flag("lr", value),
    "word": lambda value: checks.word("lr", value),
    "indices": lambda value: checks.indices("lr", value, 3),
    "one_of": lambda value: checks.one_of("lr", value, {"head": 1, "body": 2}),
    "numeric": lambda value: checks.numeric("lr", value),
    "function": lambda value: checks.function("lr", value, ("key",), "f"),
    "prng_key": lambda value: checks.prng_key("lr", value),
}


@pytest.mark.parametrize("name", CHECKS)
@given(value=ANYTHING)
def test_a_check_passes_or_says_in_one_line_what_is_wrong(name, value):
    try:
        CHECKS[name](value)
    except ValueError as error:
        message = str(error)
        assert message.startswith("lr") and "\n" not in message and len(message) < 300


@given(value=ANYTHING)
def test_a_shown_value_is_one_short_line(value):
    assert len(checks.shown(value)) <= 80 and len(checks.shown(value).splitlines()) <= 1


TEXT = st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S", "Zs")), max_size=40)


# rich doubles a backslash at the end, lest it escape what follows.
@given(text=TEXT.filter(lambda text: not text.endswith("\\")))
@example(text="\\[")
@example(text="a\\\\[ [Red] \\[Red] \\\\[red] [/x][")
def test_the_console_shows_text_as_it_is(text):
    rich_console = pytest.importorskip("rich.console", reason="the console needs rich")
    file = io.StringIO()
    console = rich_console.Console(file=file, width=10_000, highlight=False, emoji=False)
    console.print(escape.console(text) + "|", soft_wrap=True)
    assert file.getvalue() == f"{text}|\n"


@given(text=TEXT)
def test_markdown_shows_text_as_it_is_in_one_cell(text):
    """Every character that Markdown could read otherwise has a backslash or is an entity; undone, the text is back."""
    escaped = escape.markdown(text)
    assert not re.search(r"(?<!\\)(\\\\)*[`*_\[\]|~$]", escaped) and "<" not in escaped
    plain = re.sub(r"\\([\\`*_\[\]|~$])", r"\1", escaped)
    assert plain.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") == " ".join(text.split())


@given(text=TEXT)
def test_html_shows_text_as_it_is(text):
    import html

    escaped = escape.html(text)
    assert not set("<>\"'") & set(escaped) and html.unescape(escaped) == text


VALUES = st.one_of(st.integers(-5, 5), st.floats(0, 1), st.booleans(), st.none(), st.lists(st.integers(0, 9), max_size=3))
OPTIONS = st.dictionaries(
    st.from_regex(r"[a-z_]{1,6}", fullmatch=True).filter(str.isidentifier), VALUES, min_size=1, max_size=4
)


@given(options=OPTIONS)
def test_options_of_a_call_read_as_they_were_written(options):
    flags = pytest.importorskip("fedjax_meta.study.flags", reason="the command line is not installed")
    text = ", ".join(f"{key}={json.dumps(value)}" for key, value in options.items())
    assert flags.called("--systems", f"name({text})") == ("name", options)
    assert flags.words(f"name({text}), other") == [f"name({text})", "other"]
