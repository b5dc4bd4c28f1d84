r"""Examples as a language model reads them: the activating token and its source tokens marked, everything else text.

    the price ‹of|62%› bread «went|8»

«…» is the activating token, its activation after the bar (10 is the unit's largest); ‹…› is a source token, and after
the bar the share of the activation that comes from it. The four marks occur nowhere else: where a token holds one, or
a character that would break the line or hide, that is written as its code, `\u00ab`; a line break is written `\n`,
a backslash `\\`. So a text cannot pretend to be a mark, an instruction on a line of its own, or another example.
"""

import math
import unicodedata
from collections.abc import Mapping

from clearhead.explain.evidence import AFTER, BEFORE, Example, Text

ACTIVE, SOURCE = "«»", "‹›"
LEAST_SHARE = 0.05
"""Least magnitude of a share that a source token is marked for."""
FAR_SHARE, AROUND = 0.1, 3
"""From this share on, a source token further back than the text shown is shown with so many tokens on each side."""
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}


def shown(token: str) -> str:
    """The token as text on one line, without the marks' characters and without any that hide."""
    return "".join(map(_shown_character, token))


def _shown_character(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    # C: controls, bidirectional and zero-width format characters, surrogates, unassigned; Zl, Zp: line separators
    hidden = unicodedata.category(character)[0] == "C" or unicodedata.category(character) in ("Zl", "Zp")
    if hidden or character in ACTIVE + SOURCE:
        return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"
    return character


def plain(text: Text) -> str:
    """A text without marks."""
    return "".join(map(shown, text.tokens))


def marked(text: Text, at: int) -> str:
    """A text with one token marked as the activating one, without its activation."""
    return _line(text, {at: (ACTIVE, "")})


def with_pattern(example: Example, largest: float) -> str:
    """An example with its activation and its sources, as an explainer sees it; one line.

    largest: the unit's largest activation, which is 10 on the scale.
    """
    marks = {}
    near = [source for source in example.sources if abs(source.share) >= LEAST_SHARE]
    for source in near:
        if 0 <= source.place < example.at:
            marks[source.place] = (SOURCE, f"|{source.share:.0%}")
    marks[example.at] = (ACTIVE, f"|{scaled(example.activation, largest)}")
    size = len(example.text.tokens)
    places = set(range(max(example.at - BEFORE, 0), min(example.at + AFTER + 1, size)))
    for source in near:
        if source.place >= 0 and abs(source.share) >= FAR_SHARE:
            places |= set(range(max(source.place - AROUND, 0), min(source.place + AROUND + 1, size)))
    own = sum(source.share for source in near if source.place == example.at)
    unseen = sum(source.share for source in near if source.place < 0)
    notes = [f"{share:.0%} from {where}" for share, where in ((own, "itself"), (unseen, "before this text")) if share]
    line = " … ".join(_line(example.text, marks, run) for run in _runs(sorted(places)))
    return f"{line}  ({'; '.join(notes)})" if notes else line


def scaled(activation: float, largest: float) -> int:
    """|activation| on a scale of 0 to 10: 10 is `largest`, 0 is inactive and nothing else."""
    return min(math.ceil(10 * abs(activation) / largest), 10) if largest else 0


def _line(text: Text, marks: Mapping[int, tuple[str, str]], places: range | None = None) -> str:
    parts = []
    for place in range(len(text.tokens)) if places is None else places:
        token = shown(text.tokens[place])
        if place in marks:
            (left, right), note = marks[place]
            token = f"{left}{token}{note}{right}"
        parts.append(token)
    return "".join(parts)


def _runs(places: list[int]) -> list[range]:
    """Consecutive places joined."""
    runs: list[range] = []
    for place in places:
        if runs and runs[-1].stop == place:
            runs[-1] = range(runs[-1].start, place + 1)
        else:
            runs.append(range(place, place + 1))
    return runs
