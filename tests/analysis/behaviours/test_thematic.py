import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from clearhead.analysis.behaviours.behaviour import Habit
from clearhead.analysis.behaviours.reading import Reading
from clearhead.analysis.behaviours.thematic import BACK, THEMATIC_ANCHOR, Documents, lasting
from clearhead.model.access import Model
from tests.analysis.behaviours.beside import Planted, plant

BEHAVIOUR = THEMATIC_ANCHOR
VOCABULARY, CONTENT, TOPICS, WORDS = 200, 160, 8, 8
"""Tokens 0 to 63 belong to a topic each, to 159 are content words of no topic, the others are no content."""
DOCUMENTS, LENGTH = 16, 112
RULES = ("anchor", "recent", "everywhere", "one place", "burst", "new each time", "half")


def documents(seed):
    """Documents of one topic each; a quarter of the tokens are words of it."""
    g = torch.Generator().manual_seed(seed)
    topic = torch.arange(DOCUMENTS)[:, None] % TOPICS
    words = topic * WORDS + torch.randint(0, WORDS, (DOCUMENTS, LENGTH), generator=g)
    others = torch.randint(TOPICS * WORDS, VOCABULARY, (DOCUMENTS, LENGTH), generator=g)
    tokens = torch.where(torch.rand(DOCUMENTS, LENGTH, generator=g) < 0.25, words, others)
    batches = tokens.split(DOCUMENTS // 2)
    far = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-BACK)
    return Documents("documents", batches, tuple((part < CONTENT)[:, None] & far for part in batches))


def read(units, tokens, batch):
    """Attention of unit's shape times the values of the tokens it cares for; active where the sum is positive."""
    b, t = tokens.shape
    seen = torch.ones(t, t).tril()
    rows = []
    for number, unit in enumerate(units):
        g = torch.Generator().manual_seed((unit.seed + batch) % 2**62)
        weight = torch.exp(0.4 * torch.randn(b, t, generator=g))[:, None].expand(b, t, t) * seen
        cares = tokens // WORDS == unit.seed % TOPICS
        rule = "anchor" if unit.kind == BEHAVIOUR.name else unit.kind
        if rule == "recent":
            weight = weight.triu(-8)
        elif rule == "everywhere":
            cares = (tokens >= TOPICS * WORDS) & (tokens < CONTENT)
        elif rule == "one place":
            cares = cares & (cares.cumsum(1) == 1)
        elif rule == "new each time":
            one_each = (weight * cares[:, None] * torch.rand(b, t, t, generator=g)).argmax(-1)
            weight = F.one_hot(one_each, t).float() * seen
        part = weight / weight.sum(-1, keepdim=True).clamp_min(1e-9) * cares[:, None]
        strays = F.one_hot((torch.rand(b, t, t, generator=g) * seen).argmax(-1), t) * 0.12
        obeys = torch.rand(b, t, generator=g) < unit.follows
        acts = torch.rand(b, t, generator=g) < 0.6 + 0.4 * unit.rate
        if rule == "burst":
            start = torch.randint(0, t - 12, (b, 1), generator=g)
            acts &= (torch.arange(t) >= start) & (torch.arange(t) < start + 12)
        elif rule == "half":
            acts &= (torch.arange(t) < t // 2) == (unit.seed // 8 % 2 == 0)
        part = torch.where(obeys[..., None], part, strays.to(part.dtype))
        at = (acts & (part.sum(-1) > 0.02)).nonzero()
        at = at[at[:, 1] > 0]
        rows.append((torch.full((len(at),), number), at[:, 0], at[:, 1], part[at[:, 0], at[:, 1]]))
    unit, block, query, parts = (torch.cat(column) for column in zip(*rows, strict=True))
    z = parts.sum(-1)
    direction = torch.randn(len(units), 6, generator=torch.Generator().manual_seed(0))
    return Reading(tokens, unit, block, query, parts, z, lambda r: z[r, None] * direction[unit[r]], len(units))


@cache
def planted_cases(seed, size=1):
    def habit(_):
        return Habit(lambda tokens: tokens)

    shares = [*(1.0, 0.85, 0.7) * (3 * size), *(0.15, 0.05) * (2 * size)]
    units = plant(BEHAVIOUR.name, habit, shares, seed)
    for rule in RULES[1:]:
        units += plant(rule, habit, [1.0] * (3 * size), seed)
    probe = documents(seed)
    scores, shuffled = (
        BEHAVIOUR.score(one, [read(units, tokens, n) for n, tokens in enumerate(one.batches)])
        for one in (probe, probe.shuffled(seed))
    )
    return Planted(replace(BEHAVIOUR, min_cases=20), units, scores, shuffled)


def test_planted_anchors_are_found_and_nothing_else():
    precision, recall, by_chance = planted_cases(0).rates()
    assert precision >= 0.95
    assert recall >= 0.6  # units that follow their theme in 70 % are missed
    assert by_chance <= 0.01


def one_unit(z, tokens, parts=None):
    """A unit with activation z [b, t] that writes along one axis."""
    block, query = z.nonzero(as_tuple=True)
    values = z[block, query]
    if parts is None:
        parts = torch.zeros(len(values), tokens.shape[1])
    unit = torch.zeros_like(block)
    return Reading(tokens, unit, block, query, parts, values, lambda rows: values[rows, None], 1)


def test_lasting_is_the_covariance_of_halves_as_a_share_of_the_variance():
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    z = torch.rand(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first, second = z[:, :4].mean(1), z[:, 4:].mean(1)
    covariance = ((first - first.mean()) * (second - second.mean())).sum() / 3
    expected = float(covariance / z.var(unbiased=False))
    assert lasting([one_unit(z, tokens)])[0] == pytest.approx(expected, rel=1e-5)
    split = [one_unit(z[:2], tokens[:2]), one_unit(z[2:], tokens[2:])]
    assert lasting(split)[0] == pytest.approx(expected, rel=1e-5)
    assert lasting([one_unit(torch.ones(4, 8), tokens)])[0] == 0
    whole = torch.tensor([1.0, 0, 0, 1])[:, None].expand(4, 8)
    assert lasting([one_unit(whole, tokens)])[0] == pytest.approx(4 / 3)


def test_the_numbers_of_two_rows():
    tokens = torch.zeros(1, 40, dtype=torch.int64)
    expected = torch.ones(40, 40, dtype=torch.bool).tril(-BACK)[None]
    z = torch.zeros(1, 40)
    z[0, 30], z[0, 36] = 3.0, 1.0
    parts = torch.zeros(2, 40)
    parts[0, [2, 4, 29]] = torch.tensor([1.0, 1.0, 1.0])
    parts[1, [2, 4]] = torch.tensor([0.5, 0.5])
    from clearhead.analysis.behaviours.thematic import ReadingHabits

    habits = ReadingHabits(1)
    habits.add(0, one_unit(z, tokens, parts), Documents("one", (tokens,), (expected,)))
    far, spread, steady = habits.means()[:, 0]
    assert far == pytest.approx((3 * 2 / 3 + 1) / 4, rel=1e-5)
    assert spread == pytest.approx((3 * (1 - 1 / 3) + 1 / 2) / 4, rel=1e-5)
    assert steady == pytest.approx(2 / 3, rel=1e-5)
    assert habits.best.cases[0].query == 30 and set(habits.best.cases[0].keys) == {2, 4, 29}


def test_documents_are_dealt_anew_over_all_blocks():
    probe = documents(0)
    dealt = probe.shuffled(1)
    assert isinstance(dealt, Documents)
    before, after = torch.cat(probe.batches), torch.cat(dealt.batches)
    assert torch.equal(before[:, 0], after[:, 0])
    assert torch.equal(before[:, 1:].flatten().sort().values, after[:, 1:].flatten().sort().values)
    moved = [set(a.tolist()) != set(b.tolist()) for a, b in zip(before, after, strict=True)]
    assert all(moved)


def test_the_probe_takes_one_block_of_each_document_and_its_far_words():
    tiny = Model.load("clearhead-tiny")
    probe = THEMATIC_ANCHOR.probe(tiny, 0)
    strings = tiny.token_strings(range(tiny.d_vocab))
    rows = {tuple(row.tolist()) for tokens in probe.batches for row in tokens}
    assert len(rows) == sum(len(tokens) for tokens in probe.batches)
    expected, tokens = probe.expected[0], probe.batches[0]
    block, query, key = expected.nonzero(as_tuple=True)
    assert int((query - key).min()) == BACK
    assert all(len(strings[token].strip()) >= 4 and strings[token].strip().isalpha() for token in tokens[block, key])
    assert math.isclose(float(np.mean([len(t) for t in probe.batches])), 8)
