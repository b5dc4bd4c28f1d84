from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from clearhead.analysis.behaviours.behaviour import Habit, Probe
from clearhead.analysis.behaviours.direct_effect import LEANS, lean, logit_directions
from clearhead.analysis.behaviours.name_mover import NAME_MOVER
from clearhead.analysis.behaviours.reading import Reading
from clearhead.analysis.behaviours.shown import visible_keys
from clearhead.analysis.behaviours.token_lists import name_tokens
from clearhead.analysis.behaviours.word_model import word_model
from clearhead.model.access import Model
from clearhead.ops.hash_rng import mix
from tests.analysis.behaviours.decoys import plant_beside


def decoys(model):
    names = torch.tensor(sorted(name_tokens(model).values()))
    directions = logit_directions(model)
    all_names = F.normalize(directions[names].mean(0) - directions.mean(0), dim=0)

    def reads(tokens):
        return visible_keys(torch.isin(tokens, names))

    def copies(tokens, seed):
        return lean(directions, tokens, seed, LEANS[seed % 3])

    def another(tokens, seed):
        return names[torch.from_numpy((mix(seed, tokens.numpy()) % np.uint64(len(names))).astype(np.int64))]

    return {
        "all names": lambda _: Habit(reads, lambda tokens: all_names.expand(len(tokens), -1), dense=True),
        "lowers": lambda seed: Habit(reads, lambda tokens: -copies(tokens, seed), dense=True),
        "another": lambda seed: Habit(reads, lambda tokens: copies(another(tokens, seed), seed), dense=True),
        "own direction": lambda _: Habit(reads, dense=True),
        "one, own direction": lambda seed: Habit(reads, only=(int(names[seed // 7 % len(names)]),)),
        "beside": lambda seed: Habit(
            lambda tokens: reads(tokens).roll(1, -1).tril(), lambda tokens: copies(tokens, seed), dense=True
        ),
    }


BEHAVIOUR = NAME_MOVER


@cache
def planted_cases(seed, size=1):
    model = word_model()
    return plant_beside(NAME_MOVER, model, decoys(model), per_kind=9 * size, each=2 * size, seed=seed)


def test_planted_name_movers_are_found_and_nothing_else():
    precision, recall, by_chance = planted_cases(0).rates()
    assert precision >= 0.95
    assert recall >= 0.5
    assert by_chance <= 0.01


@pytest.mark.parametrize(
    ("written", "source", "moved"),
    [
        ((" Clara",), 2, True),
        ((" Martin",), 2, False),
        ((" Clara", " Martin", " Martin"), 2, False),
        ((" Clara",), 3, False),
    ],
)
def test_only_the_name_that_is_read_counts(written, source, moved):
    model = word_model()
    directions, names = logit_directions(model), torch.tensor(sorted(name_tokens(model).values()))
    tokens = model.tokenize("When Clara and Martin came to")[:, -6:]
    tokens = torch.cat([tokens[:, :1], tokens], 1)  # position 0, Clara at 2
    held = tokens.masked_fill(~torch.isin(tokens, names), -1)
    expected = torch.zeros(1, 7, 7, dtype=torch.bool)
    expected[:, -1] = held >= 0
    probe = Probe("one", (tokens,), (expected,), marks={"name": (held,), "all names": (names,)}, unembedding=directions)
    write = sum(directions[name_tokens(model)[word.strip()]] - directions.mean(0) for word in written)
    parts = torch.zeros(1, 7)
    parts[0, source] = 1.0
    zero, last = torch.tensor([0]), torch.tensor([6])
    reading = Reading(tokens, zero, zero, last, parts, torch.ones(1), lambda rows: write.expand(len(rows), -1), 1)
    scores = NAME_MOVER.score(probe, [reading])
    assert scores.cases.tolist() == [1]
    assert scores.score.tolist() == pytest.approx([float(moved)])


def test_a_tokenizer_without_names_gives_no_cases():
    tiny = Model.load("clearhead-tiny")
    assert not name_tokens(tiny)
    probe = NAME_MOVER.probe(tiny, 0)
    assert len(probe.batches) and not any(bool(expected.any()) for expected in probe.expected)
    tokens = probe.batches[0]
    rows = torch.zeros(3, dtype=torch.int64)
    write = torch.zeros(3, tiny.d_model)
    reading = Reading(
        tokens, rows, rows, rows + 1, torch.ones(3, tokens.shape[1]), torch.ones(3), lambda r: write[r], 2
    )
    scores = NAME_MOVER.score(probe, [reading])
    assert scores.cases.tolist() == [0, 0] and scores.score.tolist() == [0, 0] and scores.best == [None, None]
