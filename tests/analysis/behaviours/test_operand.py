from functools import cache

import pytest
import torch
import torch.nn.functional as F

from clearhead.analysis.behaviours.behaviour import Habit
from clearhead.analysis.behaviours.operand import (
    DIGITS,
    EQUALS_PLACE,
    OPERAND,
    PLUS_PLACE,
    Sums,
    explained,
    operand_probe,
    sum_texts,
)
from clearhead.analysis.behaviours.reading import Reading
from clearhead.model.access import Model
from tests.analysis.behaviours.beside import Planted, plant

BEHAVIOUR = OPERAND
RULES = ("constant", "noise", "sign", "value from elsewhere", "position", "any digits")


def sums(seed):
    """Sums and lists whose tokens are the digits; "+" is 10, "=" 11 and "," 12."""
    texts, values = sum_texts(seed)
    tokens = torch.tensor([["0123456789+=".index(letter) for letter in text] for text in texts])
    lists = tokens.masked_fill(tokens == 10, 12)
    keys = torch.zeros(9, 9, dtype=torch.bool)
    keys[EQUALS_PLACE:, list(DIGITS.values())] = True
    keys = keys.expand(len(tokens), 9, 9)
    return Sums("sums", (tokens, lists), (keys, keys), marks={"values": (values, values)})


def read(units, tokens):
    """Units that act at one position, by the digits at one or two places; where no "+" stands, in one case of ten."""
    b, t = tokens.shape
    rows = []
    for number, unit in enumerate(units):
        g = torch.Generator().manual_seed(unit.seed)
        query = EQUALS_PLACE + int(torch.randint(0, 3, (), generator=g))
        places = [[1], [3], [4], [3, 4], [1, 4]][int(torch.randint(0, 5, (), generator=g))]
        weights = torch.tensor([10, 1] if places in ([0, 1], [3, 4]) else [1, 1])[: len(places)]
        value = (tokens[:, places] * weights).sum(-1)
        way = int(torch.randint(0, 4, (), generator=g))
        low = int(torch.randint(0, 7, (), generator=g))
        z = (
            (value.float() - value.float().mean()).clamp_min(0) / 5,  # the more, the more
            ((value % 10 >= low) & (value % 10 < low + 3)).float(),  # a range of the last digit
            (value % 3 == low % 3).float(),  # a residue
            (value == value[0]).float(),  # one value
        )[way]
        if unit.kind in RULES:
            z = torch.ones(b) if unit.kind in ("constant", "position") else z
        stray = torch.rand(b, generator=g) * z.max()
        obeys = torch.rand(b, generator=g) < unit.follows
        z = torch.where(obeys, z, stray) * torch.exp(0.2 * torch.randn(b, generator=g))
        if unit.kind == "noise":
            z = torch.rand(b, generator=g).square()
        if int(tokens[0, PLUS_PLACE]) != 10 and unit.kind == BEHAVIOUR.name:
            z = z * (torch.rand(b, generator=g) < 0.1)
        elsewhere = {"sign": [2, 5], "value from elsewhere": [5], "position": [0, 2, 5]}.get(unit.kind)
        shape = torch.rand(b, t, generator=g) * 0.1
        shape[:, elsewhere or places] += 1.0 / len(elsewhere or places)
        at = (z > 0).nonzero()[:, 0]
        parts = F.normalize(shape[at], p=1, dim=-1) * z[at, None]
        rows.append((torch.full((len(at),), number), at, torch.full((len(at),), query), parts))
    unit, block, query, parts = (torch.cat(column) for column in zip(*rows, strict=True))
    z = parts.sum(-1)
    direction = torch.randn(len(units), 4, generator=torch.Generator().manual_seed(0))
    return Reading(tokens, unit, block, query, parts, z, lambda r: z[r, None] * direction[unit[r]], len(units))


@cache
def planted_cases(seed, size=1):
    def habit(_):
        return Habit(lambda tokens: tokens)

    units = plant(BEHAVIOUR.name, habit, [*(1.0, 0.85, 0.7) * (6 * size), *(0.15, 0.05) * (4 * size)], seed)
    for rule in RULES:
        units += plant(rule, habit, [1.0] * (6 * size), seed)
    probe = sums(seed)
    scores, shuffled = (
        BEHAVIOUR.score(one, [read(units, tokens) for tokens in one.batches]) for one in (probe, probe.shuffled(seed))
    )
    return Planted(BEHAVIOUR, units, scores, shuffled)


def test_planted_operand_heads_are_found_and_nothing_else():
    precision, recall, by_chance = planted_cases(0).rates()
    assert precision >= 0.95
    assert recall >= 0.7
    assert by_chance <= 0.01


def one_unit(z):
    tokens = torch.zeros(len(z), 9, dtype=torch.int64)
    block = z.nonzero()[:, 0]
    unit = torch.zeros_like(block)
    parts = torch.zeros(len(block), 9)
    parts[:, 1] = z[block]
    return Reading(tokens, unit, block, torch.full_like(block, 5), parts, z[block], lambda r: z[block][r, None], 1)


def test_explained_variance_is_the_one_way_analysis():
    z = torch.tensor([1.0, 1, 0, 4, 3, 2, 0, 0])
    value = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    groups = [z[value == level] for level in range(3)]
    within = sum(float((group - group.mean()).square().sum()) for group in groups)
    total = float((z - z.mean()).square().sum())
    reading = one_unit(z)
    rows = torch.arange(len(reading.unit))
    assert explained(reading, rows, reading.writes(rows), value)[0] == pytest.approx(1 - within / total * 7 / 5)
    same = one_unit(torch.ones(8))
    rows = torch.arange(8)
    assert explained(same, rows, same.writes(rows), value)[0] <= 0


def test_what_dealt_values_explain_is_zero_on_average():
    g = torch.Generator().manual_seed(0)
    reading = one_unit(torch.rand(200, generator=g))
    rows = torch.arange(len(reading.unit))
    values = [torch.arange(200)[torch.randperm(200, generator=g)] % 10 for _ in range(60)]
    dealt = [explained(reading, rows, reading.writes(rows), value)[0] for value in values]
    assert abs(sum(dealt) / 60) < 0.02


def test_a_head_that_reads_one_digit_and_acts_by_it_scores_one():
    probe = sums(0)
    digit = probe.marks["values"][0][:, 1].float()
    silent = one_unit(torch.zeros(len(digit)))
    scores = OPERAND.score(probe, [one_unit(digit), silent])
    assert scores.score[0] == pytest.approx(1.0)
    case = scores.best[0]
    assert (case.query, case.keys) == (5, (1,))
    assert OPERAND.score(probe, [one_unit(torch.ones(len(digit))), silent]).score[0] == 0


def test_what_it_does_in_lists_is_taken_off():
    probe = sums(0)
    digit = probe.marks["values"][0][:, 1].float()
    assert OPERAND.score(probe, [one_unit(digit), one_unit(digit)]).score[0] == pytest.approx(0, abs=1e-6)
    half = torch.where(torch.arange(len(digit)) % 2 == 0, digit, digit.flip(0))
    score = OPERAND.score(probe, [one_unit(digit), one_unit(half)]).score[0]
    assert 0.3 < score < 0.9
    alone = Sums("sums", probe.batches[:1], probe.expected[:1], marks={"values": probe.marks["values"][:1]})
    assert OPERAND.score(alone, [one_unit(digit)]).score[0] == pytest.approx(1.0)


def test_a_tokenizer_that_does_not_write_digits_one_by_one_gives_no_cases():
    tiny = Model.load("clearhead-tiny")
    probe = operand_probe(tiny, 0)
    digits = all(len(tiny.tokenize(text)[0]) == 9 for text in sum_texts(0)[0])
    assert bool(probe.expected[0].any()) == digits
    assert ["".join(tiny.token_strings(tokens[0])) for tokens in probe.batches] == [
        sum_texts(0)[0][0],
        sum_texts(0)[0][0].replace("+", ","),
    ]
