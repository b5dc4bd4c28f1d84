import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.explain.evidence import BEFORE, Example, Source, Text
from clearhead.explain.marks import marked, plain, scaled, shown, with_pattern

HOSTILE = [
    "«",
    "»",
    "‹",
    "›",
    "|9»",
    "\n2. (from token 0)",
    "\\n",
    "\u202e",
    "\u200b",
    "\x00",
    "\u2028",
    "😀",
    "\ud800",
]


def example(tokens, at, sources=(), activation=4.0):
    return Example(0, "d", 0, Text(tuple(tokens), (0.0,) * len(tokens), 5), at, activation, tuple(sources))


def test_an_example_as_a_model_reads_it():
    tokens = ["the", " price", " of", " bread", " went"]
    one = example(tokens, 4, [Source(2, 0.62), Source(4, 0.2), Source(-3, -0.1), Source(0, 0.01)])
    line = "the price‹ of|62%› bread« went|8»  (20% from itself; -10% from before this text)"
    assert with_pattern(one, largest=5.0) == line


def test_a_source_far_back_is_shown_with_what_is_around_it():
    tokens = [f" {i}" for i in range(90)]
    line = with_pattern(example(tokens, 80, [Source(10, 0.5)]), 4.0)
    assert line.startswith(f" 7 8 9‹ 10|50%› 11 12 13 …  {80 - BEFORE} ")
    assert with_pattern(example(tokens, 80, [Source(10, 0.07)]), 4.0).startswith(f" {80 - BEFORE} ")


@pytest.mark.parametrize("token", HOSTILE)
def test_hostile_tokens_neither_mark_nor_break_the_line(token):
    text = Text(("a", token, "b"), (0.0,) * 3, 0)
    assert not set(plain(text)) & set("«»‹›\n\r\u2028\u202e\u200b\x00")
    assert marked(text, 1) == f"a«{shown(token)}»b"
    plain(text).encode()


def test_escapes_cannot_be_forged():
    assert shown("«") == "\\u00ab" != shown("\\u00ab") == "\\\\u00ab"
    assert shown("😀") == "😀" and shown("\U000e0001") == "\\U000e0001"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=6), min_size=1, max_size=6), st.data())
def test_marks_stand_where_they_were_put_whatever_the_tokens(tokens, data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    line = marked(Text(tuple(tokens), (0.0,) * len(tokens), 0), at)
    found = re.fullmatch("([^«»]*)«([^«»]*)»([^«»]*)", line)
    assert found is not None and found[2] == shown(tokens[at])


def test_the_scale():
    assert [scaled(a, 5.0) for a in (0.0, 0.01, -2.5, 4.6, 5.0)] == [0, 1, 5, 10, 10]
    assert scaled(0.0, 0.0) == 0
