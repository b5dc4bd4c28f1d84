"""Tokens as text a reader can see: every character that would be invisible or would move others becomes a mark.

A newline becomes `↵`, a right-to-left override `⟨RLO⟩`; ordinary spaces and letters of every script stay as they are.
The result is plain text, not HTML: pages insert it as text content, and `json_for_html` makes it safe inside a
`<script>` data block.
"""

import json
import unicodedata
from typing import Any

_MARKS = {
    "\n": "↵",
    "\t": "⇥",
    "\r": "⟨CR⟩",
    "\x00": "⟨NUL⟩",
    "\x1b": "⟨ESC⟩",
    "\x7f": "⟨DEL⟩",
    "\u00a0": "⟨NBSP⟩",
    "\u00ad": "⟨SHY⟩",
    "\u034f": "⟨CGJ⟩",
    "\u061c": "⟨ALM⟩",
    "\u200b": "⟨ZWSP⟩",
    "\u200c": "⟨ZWNJ⟩",
    "\u200d": "⟨ZWJ⟩",
    "\u200e": "⟨LRM⟩",
    "\u200f": "⟨RLM⟩",
    "\u202a": "⟨LRE⟩",
    "\u202b": "⟨RLE⟩",
    "\u202c": "⟨PDF⟩",
    "\u202d": "⟨LRO⟩",
    "\u202e": "⟨RLO⟩",
    "\u2028": "⟨LS⟩",
    "\u2029": "⟨PS⟩",
    "\u2060": "⟨WJ⟩",
    "\u2066": "⟨LRI⟩",
    "\u2067": "⟨RLI⟩",
    "\u2068": "⟨FSI⟩",
    "\u2069": "⟨PDI⟩",
    "\ufeff": "⟨BOM⟩",
}
# letters and symbols by category, yet drawn as nothing
_BLANK = frozenset("\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
_UNSEEN_CATEGORIES = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"})


def visible(token: str) -> str:
    """`token` with control, zero-width, bidirectional and blank characters replaced by marks; "" becomes `⟨empty⟩`."""
    shown = "".join(map(_mark, token))
    if shown and unicodedata.combining(shown[0]):
        # without a letter of its own it would attach to whatever the page shows before it
        shown = "◌" + shown
    return shown or "⟨empty⟩"


def _mark(character: str) -> str:
    if character in _MARKS:
        return _MARKS[character]
    code = ord(character)
    variation_selector = 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF
    unseen = unicodedata.category(character) in _UNSEEN_CATEGORIES or character in _BLANK or variation_selector
    return f"⟨U+{code:04X}⟩" if unseen and character != " " else character


def json_for_html(value: Any) -> str:
    """`value` as JSON that cannot end or open an HTML element: `<`, `>`, `&` and all non-ASCII are escaped.

    Raises `ValueError` for NaN and infinity, which JSON does not have.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
