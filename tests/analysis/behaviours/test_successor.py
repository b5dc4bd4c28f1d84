from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from clearhead.analysis.behaviours.behaviour import Habit
from clearhead.analysis.behaviours.direct_effect import LEANS, lean, logit_directions
from clearhead.analysis.behaviours.reading import Reading
from clearhead.analysis.behaviours.shown import visible_keys
from clearhead.analysis.behaviours.successor import SUCCESSOR
from clearhead.analysis.behaviours.token_lists import Successors, ordinal_sequences
from clearhead.analysis.behaviours.word_model import word_model
from clearhead.ops.hash_rng import mix
from tests.analysis.behaviours.decoys import plant_beside


def decoys(model):
    tables, directions = Successors.of_sequences(ordinal_sequences(model), model.d_vocab), logit_directions(model)
    after, known = tables.following, tables.following >= 0
    elements = known.nonzero()[:, 0]
    before = torch.full_like(after, -1)
    before[after[elements]] = elements

    def reads(tokens):
        return visible_keys(known[tokens])

    def to(choose):
        return lambda seed: Habit(
            reads, lambda tokens: lean(directions, choose(tokens, seed), seed, LEANS[seed % 3]), dense=True
        )

    def any_element(tokens, seed):
        return elements[torch.from_numpy((mix(seed, tokens.numpy()) % np.uint64(len(elements))).astype(np.int64))]

    def whole_sequence(seed):
        centres = torch.stack([directions[tables.sequence == s].mean(0) for s in range(int(tables.sequence.max()) + 1)])
        centred = F.normalize(centres - directions.mean(0), dim=-1)
        return Habit(reads, lambda tokens: centred[tables.sequence[tokens]], dense=True)

    def one(seed):
        return (int(elements[seed // 7 % len(elements)]),)

    return {
        "copies": to(lambda tokens, _: tokens),
        "predecessor": to(lambda tokens, _: torch.where(before[tokens] >= 0, before[tokens], tokens)),
        "two ahead": to(lambda tokens, _: torch.where(known[after[tokens]], after[after[tokens]], tokens)),
        "any element": to(any_element),
        "whole sequence": whole_sequence,
        "own direction": lambda _: Habit(reads, dense=True),
        "one, own direction": lambda seed: Habit(reads, only=one(seed)),
        "one, copies": lambda seed: Habit(
            reads, lambda tokens: lean(directions, tokens, seed, LEANS[seed % 3]), only=one(seed)
        ),
    }


BEHAVIOUR = SUCCESSOR


@cache
def planted_cases(seed, size=1):
    model = word_model()
    return plant_beside(SUCCESSOR, model, decoys(model), per_kind=9 * size, each=2 * size, seed=seed)


def test_planted_successors_are_found_and_nothing_else():
    precision, recall, by_chance = planted_cases(0).rates()
    assert precision >= 0.95
    assert recall >= 0.5
    assert by_chance <= 0.01


def one_unit(model, text, source, write):
    tokens = model.tokenize(text)
    parts = torch.zeros(1, tokens.shape[1])
    parts[0, source] = 1.0
    last = torch.tensor([tokens.shape[1] - 1])
    zero = torch.tensor([0])
    return Reading(tokens, zero, zero, last, parts, torch.ones(1), lambda rows: write.expand(len(rows), -1), 1)


@pytest.mark.parametrize(
    ("written", "source", "score"),
    [(" Thursday", 4, 1.0), (" Wednesday", 4, 0.0), (" Friday", 4, 0.0), (" Thursday", 3, 0.0)],
)
def test_the_score_of_one_row(written, source, score):
    model = word_model()
    tables, directions = Successors.of_sequences(ordinal_sequences(model), model.d_vocab), logit_directions(model)
    text = "He was there on Wednesday and"
    probe = SUCCESSOR.probe(model, 0)
    tokens = model.tokenize(text)
    after = tables.following[tokens]
    probe = type(probe)(
        "one",
        (tokens,),
        (visible_keys(after >= 0),),
        marks={"following": (after,), "sequence": (tables.sequence[tokens],), "elements": (tables.sequence,)},
        unembedding=directions,
    )
    write = directions[model.tokenize(written)[0, -1]] - directions.mean(0)
    scores = SUCCESSOR.score(probe, [one_unit(model, text, source, write)])
    assert scores.score.tolist() == pytest.approx([score])
    assert scores.cases.tolist() == [1]
    assert (scores.best[0] is not None) == (score > 0)


def test_a_tokenizer_without_the_words_gives_no_cases():
    from clearhead.model.access import Model

    tiny = Model.load("clearhead-tiny")
    probe = SUCCESSOR.probe(tiny, 0)
    held = {text for s in ordinal_sequences(tiny) for text in tiny.token_strings(s.tokens)}
    assert " Monday" not in held and "3" in held
    for tokens, expected in zip(probe.batches, probe.expected, strict=True):
        keys = tokens[expected.any(1)]
        assert set(tiny.token_strings(keys)) <= held
