"""Units that only look like one with a behaviour of writing: they read what it reads and write something else.

Of each behaviour: what a unit writes that reads the right tokens (the token itself, the one before, two ahead, any of
the list, all of it, another name, the wrong sign, a direction of its own), and units that read the neighbours of the
right tokens, or tokens that nothing speaks for. Decoys of patterns alone are the stray habits of planted.py.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.analysis.behaviours.behaviour import OFTEN, Habit
from clearhead.analysis.behaviours.copy_suppression import reads_expected
from clearhead.analysis.behaviours.direct_effect import LEANS, lean, logit_directions
from clearhead.analysis.behaviours.operand import last_of_first, neighbours
from clearhead.analysis.behaviours.shown import visible_keys
from clearhead.analysis.behaviours.token_lists import Successors, name_tokens, ordinal_sequences
from clearhead.model.access import Model
from clearhead.ops.hash_rng import mix

Decoys = Mapping[str, Callable[[int], Habit]]
"""By name, from a unit's seed to its habit."""


def decoys_of(behaviour: str, model: Model) -> Decoys:
    """The decoys of one behaviour in the tokens of `model`; none for behaviours of patterns."""
    return OF[behaviour](model) if behaviour in OF else {}


def of_successor(model: Model) -> Decoys:
    """Readers of ordinal words that do not write the next one."""
    tables, directions = Successors.of_sequences(ordinal_sequences(model), model.d_vocab), logit_directions(model)
    after, known = tables.following, tables.following >= 0
    elements = known.nonzero()[:, 0]
    if not len(elements):
        return {}
    before = torch.full_like(after, -1)
    before[after[elements]] = elements

    def reads(tokens: Int[Tensor, "b t"]) -> Tensor:
        return visible_keys(known[tokens])

    def to(choose: Callable[[Tensor, int], Tensor]) -> Callable[[int], Habit]:
        return lambda seed: Habit(
            reads, lambda tokens: lean(directions, choose(tokens, seed), seed, LEANS[seed % len(LEANS)]), dense=True
        )

    def whole_sequence(_: int) -> Habit:
        centres = torch.stack([directions[tables.sequence == s].mean(0) for s in range(int(tables.sequence.max()) + 1)])
        centred = F.normalize(centres - directions.mean(0), dim=-1)
        return Habit(reads, lambda tokens: centred[tables.sequence[tokens]], dense=True)

    def one(seed: int) -> tuple[int, ...]:
        return (int(elements[seed // 7 % len(elements)]),)

    return {
        "copies": to(lambda tokens, _: tokens),
        "predecessor": to(lambda tokens, _: torch.where(before[tokens] >= 0, before[tokens], tokens)),
        "two ahead": to(lambda tokens, _: torch.where(known[after[tokens]], after[after[tokens]], tokens)),
        "any element": to(lambda tokens, seed: _some_of(elements, tokens, seed)),
        "whole sequence": whole_sequence,
        "own direction": lambda _: Habit(reads, dense=True),
        "one, own direction": lambda seed: Habit(reads, only=one(seed)),
        "one, copies": lambda seed: Habit(
            reads, lambda tokens: lean(directions, tokens, seed, LEANS[seed % len(LEANS)]), only=one(seed)
        ),
    }


def of_name_mover(model: Model) -> Decoys:
    """Readers of names that do not write the name read, and a reader of what stands behind names."""
    names, directions = torch.tensor(sorted(name_tokens(model).values()), dtype=torch.int64), logit_directions(model)
    if not len(names):
        return {}
    all_names = F.normalize(directions[names].mean(0) - directions.mean(0), dim=0)

    def reads(tokens: Int[Tensor, "b t"]) -> Tensor:
        return visible_keys(torch.isin(tokens, names))

    def copies(tokens: Int[Tensor, " m"], seed: int) -> Float[Tensor, "m d"]:
        return lean(directions, tokens, seed, LEANS[seed % len(LEANS)])

    return {
        "all names": lambda _: Habit(reads, lambda tokens: all_names.expand(len(tokens), -1), dense=True),
        "lowers": lambda seed: Habit(reads, lambda tokens: -copies(tokens, seed), dense=True),
        "another": lambda seed: Habit(reads, lambda tokens: copies(_some_of(names, tokens, seed), seed), dense=True),
        "own direction": lambda _: Habit(reads, dense=True),
        "one, own direction": lambda seed: Habit(reads, only=(int(names[seed // 7 % len(names)]),)),
        "beside": lambda seed: Habit(
            lambda tokens: reads(tokens).roll(1, -1).tril(), lambda tokens: copies(tokens, seed), dense=True
        ),
    }


def of_copy_suppression(model: Model) -> Decoys:
    """Readers of tokens that are expected again which do not lower them, and units that lower others."""
    directions = logit_directions(model)
    expected = reads_expected(model)

    def lowers(tokens: Int[Tensor, " m"], seed: int) -> Float[Tensor, "m d"]:
        return -lean(directions, tokens, seed, LEANS[seed % len(LEANS)])

    def recent(tokens: Int[Tensor, "b t"]) -> Tensor:
        b, t = tokens.shape
        return torch.ones(t, t, dtype=torch.bool).tril(-1).triu(-6).expand(b, t, t) & ~expected(tokens)

    def itself(tokens: Int[Tensor, "b t"]) -> Tensor:
        b, t = tokens.shape
        return torch.eye(t, dtype=torch.bool).expand(b, t, t)

    return {
        "raises": lambda seed: Habit(expected, lambda tokens: -lowers(tokens, seed)),
        "own direction": lambda _: Habit(expected),
        "lowers others": lambda seed: Habit(expected, lambda tokens: lowers((tokens + 1) % model.d_vocab, seed)),
        "lowers what is not expected": lambda seed: Habit(recent, lambda tokens: lowers(tokens, seed)),
        "lowers the query's token": lambda seed: Habit(itself, lambda tokens: lowers(tokens, seed)),
    }


def of_operand(model: Model) -> Decoys:
    """A reader of the digits at an operand's place, in sums and in lists alike."""
    return {"any digits": lambda seed: Habit(last_of_first, only=neighbours(model, seed), dense=True, often=OFTEN)}


def _some_of(among: Int[Tensor, " n"], tokens: Int[Tensor, " m"], seed: int) -> Int[Tensor, " m"]:
    """For each token one of the others, the same at every call."""
    return among[torch.from_numpy((mix(seed, tokens.numpy()) % np.uint64(len(among))).astype(np.int64))]


OF: dict[str, Callable[[Model], Decoys]] = {
    "successor": of_successor,
    "name_mover": of_name_mover,
    "copy_suppression": of_copy_suppression,
    "operand": of_operand,
}
