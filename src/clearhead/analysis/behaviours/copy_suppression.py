"""Copy suppression: where the model expects an earlier token again, they read it and lower the logit of that token.

    "All's fair in love and"        " love" is expected; reads " love", writes minus " love"

    cases   queries where an earlier token, not that of the query itself, is among the model's 10 likeliest next tokens
    shown   the position that contributes most holds such a token, and what is written there lowers it below every
            other token of the context and at least 2 standard deviations below the mean of the vocabulary
    score   share of the unit's activity on its cases

The idea is that of McDougall et al. (arXiv 2310.04625), who measured it by ablation. The expectation is read from the
logits of the whole model, which the suppression has already entered: a token that is suppressed wholly is missed.
"""

from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from clearhead.analysis.behaviours.behaviour import Behaviour, Habit, Probe, Scores
from clearhead.analysis.behaviours.direct_effect import LEANS, DirectEffect, lean, logit_directions
from clearhead.analysis.behaviours.matching import induction
from clearhead.analysis.behaviours.probe_text import NATURAL, pattern_batches
from clearhead.analysis.behaviours.reading import Reading
from clearhead.analysis.behaviours.shown import ShownActivity, main_source, rows_at, stands_out
from clearhead.model.access import Model

CASES, THRESHOLD = 10, 0.35
"""Least cases, and the score fixed on 100 planted units of four seeds among 948 others: precision 1, recall 0.9."""
EXPECTED_IN = (0, NATURAL)
"""Batches of the text whose logits are computed: one of natural text, one of text said again."""
LIKELIEST = 10


def copy_probe(model: Model, seed: int) -> Probe:
    """Natural text and text said again; expected are the earlier tokens that the model expects next."""
    batches = pattern_batches(model, seed)
    expected = [torch.zeros(*tokens.shape, tokens.shape[1], dtype=torch.bool) for tokens in batches]
    for batch in EXPECTED_IN:
        expected[batch] = predicted_again(model, batches[batch])
    return Probe(
        name="patterns",  # the text of attention.py
        batches=batches,
        expected=tuple(expected),
        marks={"token": batches},
        unembedding=logit_directions(model),
    )


def predicted_again(model: Model, tokens: Int[Tensor, "b t"]) -> Bool[Tensor, "b q k"]:
    """Keys with a token that is among the likeliest to follow the query, and is not the query's own."""
    t = tokens.shape[1]
    likely = model.run(tokens).logits.topk(LIKELIEST).indices
    again = (likely[:, :, None] == tokens[:, None, :, None]).any(-1)
    return again & (tokens[:, :, None] != tokens[:, None]) & torch.ones(t, t, dtype=torch.bool).tril(-1)


def score_copy_suppression(probe: Probe, readings: list[Reading]) -> Scores:
    """The share of each unit's activity that lowers the expected token it reads."""
    effect, tally = DirectEffect.of_probe(probe), ShownActivity(readings[0].n_units)
    for batch, reading in enumerate(readings):
        expected, tokens = probe.expected[batch], probe.marks["token"][batch]
        rows = rows_at(reading, expected.any(-1))
        source = main_source(reading, rows)
        reads = expected[reading.block[rows], reading.query[rows], source]
        gain = torch.zeros(len(rows))
        for block in range(len(tokens)):  # the tokens of one context are the rivals
            here = (reads & (reading.block[rows] == block)).nonzero()[:, 0]
            if len(here):
                context = tokens[block].unique()
                lowered = -effect(reading.writes(rows[here]), context)
                read = context == tokens[block, source[here]][:, None]
                gain[here] = stands_out(lowered, read, ~read).to(gain.dtype)
        tally.add(batch, reading, rows, gain)
    return tally.scores()


def plant_copy_suppression(model: Model, seed: int) -> Habit:
    """A unit that reads expected tokens and lowers them.

    What induction would read is left out, so that it is no induction head besides.
    """
    directions, strength = logit_directions(model), LEANS[seed % len(LEANS)]
    return Habit(reads_expected(model), writes=lambda tokens: -lean(directions, tokens, seed, strength))


@cache
def reads_expected(model: Model) -> Callable[[Int[Tensor, "b t"]], Bool[Tensor, "b q k"]]:
    """From tokens to the keys that `predicted_again` gives and induction does not; one forward for the same batch."""
    known: list[tuple[Tensor, Tensor]] = []

    def reads(tokens: Int[Tensor, "b t"]) -> Bool[Tensor, "b q k"]:
        keys = next((keys for batch, keys in known if batch is tokens), None)
        if keys is None:
            keys = predicted_again(model, tokens) & ~induction(tokens)
            known[:] = [(tokens, keys)]
        return keys

    return reads


COPY_SUPPRESSION = Behaviour(
    "copy_suppression",
    "copy suppression",
    "Which share of its activity, where an earlier token is expected again, reads that token and lowers it?",
    "natural text, and natural text said again",
    THRESHOLD,
    CASES,
    copy_probe,
    score_copy_suppression,
    plant_copy_suppression,
)
