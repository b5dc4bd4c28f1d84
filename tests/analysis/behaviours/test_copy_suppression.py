from dataclasses import replace
from functools import cache

import pytest
import torch

from clearhead.analysis.behaviours import copy_suppression
from clearhead.analysis.behaviours.behaviour import Habit, Probe
from clearhead.analysis.behaviours.copy_suppression import COPY_SUPPRESSION, EXPECTED_IN, predicted_again
from clearhead.analysis.behaviours.decoys import of_copy_suppression
from clearhead.analysis.behaviours.reading import Reading
from clearhead.model.access import Model
from tests.analysis.behaviours.beside import plant_beside

BEHAVIOUR = COPY_SUPPRESSION


@cache
def tiny():
    return Model.load("clearhead-tiny")


@cache
def keys_of(model, tokens):
    """One forward for all units that read the same batch."""
    return predicted_again(model, tokens)


def short_probe(model, seed):
    """The batches with expectations, four blocks of each."""
    probe = COPY_SUPPRESSION.probe(model, seed)

    def cut(parts):
        return tuple(parts[n][:4] for n in EXPECTED_IN)

    tokens = cut(probe.batches)
    return replace(probe, batches=tokens, expected=cut(probe.expected), marks={"token": tokens})


def planted_cases(seed, size=1):
    model = tiny()

    def plant(model, own):
        habit = COPY_SUPPRESSION.plant(model, own)
        return Habit(lambda tokens: keys_of(model, tokens), habit.writes)

    short = replace(COPY_SUPPRESSION, probe=short_probe, plant=plant)
    return plant_beside(short, model, of_copy_suppression(model), per_kind=6 * size, each=2 * size, seed=seed)


def test_planted_copy_suppression_is_found_and_nothing_else():
    precision, recall, by_chance = planted_cases(0).rates()
    assert precision >= 0.95
    assert recall >= 0.7
    assert by_chance <= 0.01


def test_expected_are_earlier_tokens_among_the_likeliest_and_not_the_query_itself():
    model = tiny()
    tokens = torch.randint(0, model.d_vocab, (2, 24), generator=torch.Generator().manual_seed(0)) % 40
    likely = model.run(tokens).logits.topk(copy_suppression.LIKELIEST).indices
    keys = predicted_again(model, tokens)
    assert keys.any()
    for block in range(2):
        for query in range(24):
            named = set(likely[block, query].tolist()) - {int(tokens[block, query])}
            wanted = [key < query and int(tokens[block, key]) in named for key in range(24)]
            assert keys[block, query].tolist() == wanted


@pytest.mark.parametrize(
    ("written", "source", "score"), [((-7,), 2, 1.0), ((7,), 2, 0.0), ((-7, -9, -9), 2, 0.0), ((-7,), 3, 0.0)]
)
def test_the_score_of_one_row(written, source, score):
    tokens = torch.tensor([[1, 5, 7, 9, 11]])
    expected = torch.zeros(1, 5, 5, dtype=torch.bool)
    expected[0, 4, 2] = True
    directions = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    write = sum((1 if token > 0 else -1) * directions[abs(token)] for token in written)
    zero, last = torch.tensor([0]), torch.tensor([4])
    parts = torch.zeros(1, 5)
    parts[0, source] = 2.0
    reading = Reading(tokens, zero, zero, last, parts, torch.ones(1), lambda rows: write.expand(len(rows), -1), 1)
    probe = Probe("one", (tokens,), (expected,), marks={"token": (tokens,)}, unembedding=directions)
    scores = COPY_SUPPRESSION.score(probe, [reading])
    assert scores.cases.tolist() == [1]
    assert scores.score.tolist() == [score]
