import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.view.visible import json_for_html, visible


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" the", " the"),
        ("\n\t", "↵⇥"),
        ("\u202egnp.exe", "⟨RLO⟩gnp.exe"),
        ("a\u200bb", "a⟨ZWSP⟩b"),
        ("\ufeff", "⟨BOM⟩"),
        ("\x00\x1b[31m", "⟨NUL⟩⟨ESC⟩[31m"),
        ("\x07", "⟨U+0007⟩"),
        ("\U000e0041", "⟨U+E0041⟩"),
        ("\u3164", "⟨U+3164⟩"),
        ("\ufe0f", "⟨U+FE0F⟩"),
        ("\u0301", "◌\u0301"),
        ("e\u0301", "e\u0301"),
        ("", "⟨empty⟩"),
        ("</script>", "</script>"),
        ("\u05e9\u05dc\u05d5\u05dd", "\u05e9\u05dc\u05d5\u05dd"),
    ],
)
def test_what_is_shown(token, shown):
    assert visible(token) == shown


@settings(max_examples=60)
@given(st.text())
def test_nothing_shown_is_invisible(token):
    shown = visible(token)
    assert shown
    unseen = [c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") or c == "\u00a0"]
    assert not unseen


@settings(max_examples=60)
@given(st.text())
def test_different_tokens_without_marks_stay_different(token):
    if not set("⟨⟩↵⇥◌") & set(token):
        assert visible(token + "x") != visible(token)


@settings(max_examples=40)
@given(st.lists(st.text(max_size=20), max_size=5))
def test_json_for_html_is_the_same_value_and_opens_no_element(value):
    value = {"tokens": value, **dict.fromkeys(value, 1)}
    text = json_for_html(value)
    assert json.loads(text) == value
    assert not set("<>&") & set(text)
    assert text.isascii()


def test_json_for_html_refuses_what_json_lacks():
    with pytest.raises(ValueError, match="Out of range"):
        json_for_html(float("nan"))
