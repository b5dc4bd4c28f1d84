"""Thematic anchors: what they write is a matter of the whole document, gathered from many words far back.

The score is the least of four numbers in [0, 1]:

    far       share of its contributions from content words at least 16 tokens back, weighted by activity
    spread    1 − 1/m, m the effective number of tokens it reads (exp of the entropy of its contributions)
    steady    overlap of what it reads at successive queries where it is active, Σ min of the two distributions
    lasting   Σ_d (w̄_d1 − w̄) · (w̄_d2 − w̄) / (D · variance of w): covariance of what it writes on average in the
              first and in the second half of document d, as a share of its variance from token to token

A short burst of activity lies in one half and adds nothing to `lasting`; a unit that writes the same in all documents
has no covariance. Content words are tokens of a space and four letters or more. Each document is one block of text;
the control deals the tokens of all documents anew, so that none has a theme.
"""

import re
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from clearhead.analysis.behaviours.behaviour import OFTEN, Behaviour, Habit, Probe, Scores
from clearhead.analysis.behaviours.reading import Reading
from clearhead.analysis.behaviours.shown import BestCase
from clearhead.data.text import token_blocks
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.ops.hash_rng import mix

CASES, THRESHOLD = 64, 0.4
"""Least cases, and the score fixed on 124 planted units: precision 1, recall 0.67, 0.8 % found on dealt documents."""
CONTEXT, DOCUMENTS, BATCH = 256, 16, 8
SPREAD_OVER = 2**18
"""Tokens of text that the documents are looked for in."""
BACK = 16
"""A far source is at least this many tokens before the query."""
SUCCESSIVE = 8
"""Queries at most this far apart are successive."""
WORD = re.compile(r"\s?[^\W\d_]{4,}")
DEAL_DRAW = 131


class Documents(Probe):
    """Blocks of text of one document each."""

    def shuffled(self, seed: int) -> "Documents":
        """The tokens of all documents dealt anew among them, first tokens aside."""
        body = torch.cat([tokens[:, 1:] for tokens in self.batches])
        order = torch.from_numpy(np.argsort(mix(seed, DEAL_DRAW, np.arange(body.numel()))))
        dealt = body.flatten()[order].view_as(body).split([len(tokens) for tokens in self.batches])
        batches = tuple(torch.cat([a[:, :1], b], 1) for a, b in zip(self.batches, dealt, strict=True))
        return replace(self, name=f"{self.name}, shuffled", batches=batches)


def document_probe(model: Model, seed: int) -> Probe:
    """One block each of documents of the held-out text that fill one; `expected` are far content words."""
    context = min(CONTEXT, model.n_ctx or CONTEXT)
    blocks = token_blocks(model, "default", split="held_out", n_tokens=SPREAD_OVER, context=context, at_most=True)
    per_block = context - blocks.prefix
    inside = np.setdiff1d(np.arange(len(blocks)), blocks.starts.numpy() // per_block)
    documents, first = np.unique(blocks.documents.numpy()[inside], return_index=True)
    if len(documents) < 2:
        raise ClearheadError(f"the held-out default text has {len(documents)} documents of {2 * context} tokens")
    chosen = np.argsort(mix(seed, DEAL_DRAW, documents))[:DOCUMENTS]
    batches = blocks.tokens[torch.from_numpy(inside[first[chosen]])].split(BATCH)
    return Documents(
        name=f"documents of {context} tokens",
        batches=batches,
        expected=tuple(_far_words(model, tokens) for tokens in batches),
    )


def _far_words(model: Model, tokens: Int[Tensor, "b t"]) -> Bool[Tensor, "b q k"]:
    t = tokens.shape[1]
    return _is_word(model)[tokens][:, None] & torch.ones(t, t, dtype=torch.bool).tril(-BACK)


@lru_cache(maxsize=1)
def _is_word(model: Model) -> Bool[Tensor, " v"]:
    return torch.tensor([bool(WORD.fullmatch(text)) for text in model.token_strings(range(model.d_vocab))])


def score_thematic(probe: Probe, readings: list[Reading]) -> Scores:
    """The least of far, spread, steady and lasting for each unit."""
    n = readings[0].n_units
    habits, cases = ReadingHabits(n), np.zeros(n, dtype=np.int64)
    for batch, reading in enumerate(readings):
        habits.add(batch, reading, probe)
        could = probe.expected[batch][reading.block, reading.query].any(-1)
        cases += np.bincount(reading.unit[could].numpy(), minlength=n)
    numbers = np.stack([*habits.means(), lasting(readings)])
    return Scores(numbers.min(0).clip(0, 1), cases, habits.best.cases)


class ReadingHabits:
    """Activity-weighted sums of far, spread and steady."""

    def __init__(self, n_units: int):
        self.n_units = n_units
        self.sums = np.zeros((3, n_units))
        self.weights = np.zeros((3, n_units))
        self.best = BestCase(n_units)

    def add(self, batch: int, reading: Reading, probe: Probe) -> None:
        """Takes the rows that have far words to read into account."""
        expected = probe.expected[batch]
        rows = expected[reading.block, reading.query].any(-1).nonzero()[:, 0]
        order = np.lexsort([part[rows].numpy() for part in (reading.query, reading.block, reading.unit)])
        rows = rows[torch.from_numpy(order)]
        unit, block, query = reading.unit[rows], reading.block[rows], reading.query[rows]
        parts = reading.parts[rows].abs()
        p = parts / parts.sum(-1, keepdim=True).clamp_min(torch.finfo(parts.dtype).tiny)
        far = (p * expected[block, query]).sum(-1)
        spread = 1 - (-torch.special.entr(p).sum(-1)).exp()
        gap = query[1:] - query[:-1]
        follows = (unit[1:] == unit[:-1]) & (block[1:] == block[:-1]) & (gap <= SUCCESSIVE)
        pair = follows.nonzero()[:, 0]
        steady = torch.minimum(p[pair], p[pair + 1]).sum(-1)
        weight = reading.activation[rows].abs()
        for place, (where, value) in enumerate([(slice(None), far), (slice(None), spread), (pair, steady)]):
            of, size = unit[where].numpy(), weight[where].double().numpy()
            self.sums[place] += np.bincount(of, size * value.double().numpy(), minlength=self.n_units)
            self.weights[place] += np.bincount(of, size, minlength=self.n_units)
        self.best.offer(batch, reading, rows, (weight * far * spread).numpy())

    def means(self) -> np.ndarray:
        """Far, spread and steady of each unit, [3, n]; 0 where there are no rows."""
        return np.divide(self.sums, self.weights, out=np.zeros_like(self.sums), where=self.weights > 0)


def lasting(readings: list[Reading]) -> np.ndarray:
    """Covariance of the mean writes of the two halves of a document, as a share of the variance, [n].

    Where a unit is not active it writes 0. Units that write nothing or always the same have 0.
    """
    n, documents, tokens = readings[0].n_units, 0, 0
    together, square = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    sums: list[Tensor] = []
    for reading in readings:
        length = reading.tokens.shape[1]
        for block in range(len(reading.tokens)):
            halves = []
            for late in (False, True):
                half = (reading.block == block) & ((reading.query >= length // 2) == late)
                rows = half.nonzero()[:, 0]
                writes = reading.coordinates(rows)
                unit = reading.unit[rows]
                square.index_add_(0, unit, writes.double().square().sum(-1))
                mean = writes.new_zeros(n, writes.shape[1]).index_add_(0, unit, writes)
                halves.append(mean / (length - length // 2 if late else length // 2))
            together += (halves[0] * halves[1]).sum(-1).double()
            sums = halves if not sums else [a + b for a, b in zip(sums, halves, strict=True)]
        documents, tokens = documents + len(reading.tokens), tokens + reading.tokens.numel()
    first, second = (part / documents for part in sums)
    between = (together / documents - (first * second).sum(-1).double()) * documents / max(1, documents - 1)
    variance = square / tokens - ((first + second) / 2).double().square().sum(-1)
    share = torch.where(variance > 1e-12 * square / tokens, between / variance.clamp_min(1e-30), 0.0)
    return share.numpy()


def plant_thematic(model: Model, seed: int) -> Habit:
    """A unit that reads far words of one theme wherever they stand, and writes its own direction.

    The theme: content words of one document that occur in it more often than in all others of the probe together.
    """
    documents = _documents(model)
    chosen = documents[seed % len(documents)]
    words = chosen[_is_word(model)[chosen]].unique()
    here, all_over = ((text.flatten() == words[:, None]).sum(-1) for text in (chosen, documents))
    return Habit(
        reads=lambda batch: _far_words(model, batch), only=tuple(words[2 * here > all_over].tolist()), often=OFTEN
    )


@lru_cache(maxsize=1)
def _documents(model: Model) -> Int[Tensor, "n t"]:
    return torch.cat(document_probe(model, 0).batches)


THEMATIC_ANCHOR = Behaviour(
    "thematic_anchor",
    "thematic anchor",
    "Is what it writes a matter of the whole document, gathered steadily from many words far back?",
    "documents of held-out natural text",
    THRESHOLD,
    CASES,
    document_probe,
    score_thematic,
    plant_thematic,
)
