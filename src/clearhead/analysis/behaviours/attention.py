"""Behaviours that an attention pattern shows: previous token, duplicate, the three kinds of induction, sink.

All are scored on the same text (probe_text.py: natural text, and natural text said again) by the excess share of a
unit's contributions on the expected keys (tally.py). For the sink, the share of its active queries whose largest part
comes from there must be as high. The share I on induction keys is cut into three, which add up to it:

    token_induction      I c                    c: how far I comes from few tokens (concentration.py)
    subtoken_induction   s (1 − c)              s: share on keys inside words, beyond what induction on any key has
    induction            (I − s) (1 − c)

so that a unit for one token, or for the ends of words, does not count as one that continues whatever came before. What
the units write is not looked at here.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from clearhead.analysis.behaviours import matching
from clearhead.analysis.behaviours.behaviour import Behaviour, Habit, Probe, Scores
from clearhead.analysis.behaviours.concentration import FEW, concentration
from clearhead.analysis.behaviours.probe_text import natural_blocks, pattern_batches
from clearhead.analysis.behaviours.reading import Reading
from clearhead.analysis.behaviours.tally import best_cases, tally
from clearhead.model.access import Model
from clearhead.ops.hash_rng import mix

TEXT = "natural text and text said again"
INSIDE = "inside words"
"""The mark that holds which induction keys continue a word."""


def _probe(model: Model, seed: int, name: str) -> Probe:
    """The common text with one behaviour's keys."""
    batches = pattern_batches(model, seed)
    marks = {}
    if name == "previous_token":
        expected = tuple(map(matching.previous, batches))
        control = tuple(matching.previous(tokens, 2) for tokens in batches)
    elif name == "bos_sink":
        expected = tuple(map(matching.first, batches))
        control = tuple(matching.first(tokens, 1) for tokens in batches)
    elif name == "duplicate":
        expected = tuple(map(matching.duplicate, batches))
        control = tuple(map(matching.elsewhere, expected))
    else:
        inside, expected = _induction_keys(model, batches)
        control = tuple(map(matching.elsewhere, expected))
        marks = {INSIDE: inside}
    positional = name in ("previous_token", "bos_sink")
    return Probe(TEXT, batches, expected, control, marks, positional=positional)


@lru_cache(maxsize=1)
def _induction_keys(model: Model, batches: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Keys inside words, and all induction keys, of each batch: the three kinds of induction share them."""
    inside = tuple(matching.subword(model, tokens) for tokens in batches)
    return inside, tuple(matching.induction(t) | keys for t, keys in zip(batches, inside, strict=True))


def _score_excess(probe: Probe, readings: list[Reading]) -> Scores:
    rows = tally(probe, readings)
    return Scores(rows.excess(), rows.cases(), best_cases(rows, probe, readings))


def _score_sink(probe: Probe, readings: list[Reading]) -> Scores:
    rows = tally(probe, readings)
    resting = rows.per_unit(rows.on > rows.total / 2)
    queries = rows.per_unit(np.ones(len(rows.unit)))
    share = np.divide(resting, queries, out=np.zeros(rows.n_units), where=queries > 0)
    return Scores(np.minimum(rows.excess(), share), rows.cases(), best_cases(rows, probe, readings))


_KINDS_OF: WeakKeyDictionary[Reading, tuple[Probe, dict[str, Scores]]] = WeakKeyDictionary()
"""The three kinds of the readings asked for last, by the first of these: what they are cut from is computed once."""


def _score_induction(probe: Probe, readings: list[Reading], part: str) -> Scores:
    known = _KINDS_OF.get(readings[0])
    if known is None or known[0].expected is not probe.expected or known[0].marks[INSIDE] is not probe.marks[INSIDE]:
        known = _KINDS_OF[readings[0]] = probe, _induction_kinds(probe, readings)
    return known[1][part]


def _induction_kinds(probe: Probe, readings: list[Reading]) -> dict[str, Scores]:
    rows = tally(probe, readings)
    inside = tally(probe, readings, probe.marks[INSIDE])
    all_keys = rows.excess()
    usual = _usual(probe)
    words = np.clip((inside.share(inside.on) - usual * rows.share(rows.on)) / max(1 - usual, 1e-6), 0, all_keys)
    few = concentration(probe, readings, rows)
    cases, best = rows.cases(), best_cases(rows, probe, readings)
    return {
        "token_induction": Scores(all_keys * few, cases, best),
        "subtoken_induction": Scores(words * (1 - few), inside.cases(), best_cases(inside, probe, readings)),
        "induction": Scores((all_keys - words) * (1 - few), cases, best),
    }


def _usual(probe: Probe) -> float:
    """The share of a unit's induction that lies inside words when it does not tell keys apart."""
    share = count = 0.0
    for inside, expected in zip(probe.marks[INSIDE], probe.expected, strict=True):
        keys = expected.sum(-1)
        share += float((inside.sum(-1) / keys.clamp_min(1)).sum())
        count += float((keys > 0).sum())
    return share / max(count, 1)


def _reads(name: str, model: Model, tokens: Tensor) -> Tensor:
    """The keys that a planted unit reads: for induction inside words, those alone."""
    if name == "subtoken_induction":
        return matching.subword(model, tokens)
    rules = {"previous_token": matching.previous, "bos_sink": matching.first, "duplicate": matching.duplicate}
    return rules.get(name, matching.induction)(tokens)


COMMON = 150
"""Token-specific units are planted for tokens among this many most frequent ones."""


def _plant(model: Model, seed: int, name: str) -> Habit:
    only = None
    if name == "token_induction":
        common = natural_blocks(model, 64).flatten().bincount().argsort(descending=True)[:COMMON]
        draws = mix(seed, np.arange(1 + seed % FEW)) % np.uint64(len(common))
        only = tuple(int(common[int(draw)]) for draw in draws)
    dense = name in ("previous_token", "duplicate", "induction", "bos_sink")
    return Habit(partial(_reads, name, model), only=only, dense=dense)


def _behaviour(
    name: str, title: str, question: str, threshold: float, score: Callable[[Probe, list[Reading]], Scores]
) -> Behaviour:
    return Behaviour(
        name,
        title,
        question,
        TEXT,
        threshold,
        min_cases=10,
        probe=partial(_probe, name=name),
        score=score,
        plant=partial(_plant, name=name),
    )


ATTENTION = (
    _behaviour(
        "previous_token",
        "previous token",
        "Which share of what it moves comes from the token before, beyond that from two before?",
        0.4,
        _score_excess,
    ),
    _behaviour(
        "duplicate",
        "duplicate token",
        "Which share of what it moves comes from earlier copies of the token?",
        0.4,
        _score_excess,
    ),
    _behaviour(
        "induction",
        "induction",
        "Which share of what it moves comes from what followed earlier copies of the token, whatever the token is?",
        0.35,
        partial(_score_induction, part="induction"),
    ),
    _behaviour(
        "token_induction",
        "induction of particular tokens",
        "Which share of what it moves is induction on five tokens or fewer?",
        0.4,
        partial(_score_induction, part="token_induction"),
    ),
    _behaviour(
        "subtoken_induction",
        "induction inside words",
        "Which share of what it moves comes from the next letters of a word that came before?",
        0.3,
        partial(_score_induction, part="subtoken_induction"),
    ),
    _behaviour(
        "bos_sink",
        "rests on the first token",
        "Which share of what it moves, and of its active queries, comes from the first token of the text?",
        0.5,
        _score_sink,
    ),
)
"""Thresholds: fixed by the rule of calibration.py on 1,088 planted units, those of four seeds together."""
