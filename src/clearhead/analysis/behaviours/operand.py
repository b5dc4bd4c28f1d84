"""Operand heads: in `a + b = c`, written digit by digit, they read a digit of an operand, and act by its value.

    a1 a0 + b1 b0 = c2 c1 c0          at the positions from "=" on

For every query position and every part of the operands (a digit, a whole operand, a column's two digits):

    read         share of the unit's contributions at this position that comes from these digits
    explained    share of the variance of what it writes at this position, over sums, that their value explains:
                 ε² = 1 − (1 − η²)(N − 1)/(N − L), which is 0 on average when the values of L levels are dealt anew
    score        the largest read · explained, less the same on a list of these numbers, at least 0

    a1 a0 , b1 b0 = c2 c1 c0          the list: the same digits at the same places, and nothing to add

What a unit does with any digits, as every head does that looks at them and copies, it does in the list too. A model of
sums alone, whose tokens hold no comma, has no list, and read · explained counts whole. Where there is a list, the digit
at position 0 is no key: attention that has nothing to do rests there.

The value of a digit or operand is itself, that of a column the sum of its digits. A unit that is silent writes 0, so
units that act for a range of values, a residue or one value are all covered. A head that reads digits but writes the
same for each explains nothing. That the value is used is not shown here.
"""

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.analysis.behaviours.behaviour import OFTEN, Behaviour, Habit, Probe, Scores
from clearhead.analysis.behaviours.reading import Reading
from clearhead.analysis.behaviours.shown import BestCase
from clearhead.analysis.behaviours.token_lists import single_token
from clearhead.data.addition import PLACES
from clearhead.model.access import Model
from clearhead.ops.hash_rng import mix

CASES, THRESHOLD = 20, 0.25
"""Least cases, and the score fixed on 744 planted units: precision 1, recall 0.96, none found with dealt values."""
SUMS = 500
DIGITS = {"a1": 0, "a0": 1, "b1": 3, "b0": 4}
"""Places of the operands' digits."""
PLUS_PLACE, EQUALS_PLACE = PLACES.index("+"), PLACES.index("=")
PARTS = {
    "a1": ((0,), (1,)),
    "a0": ((1,), (1,)),
    "b1": ((3,), (1,)),
    "b0": ((4,), (1,)),
    "a": ((0, 1), (10, 1)),
    "b": ((3, 4), (10, 1)),
    "tens": ((0, 3), (1, 1)),
    "units": ((1, 4), (1, 1)),
}
"""Part of the operands -> places of its digits, and their weights in its value."""
SUM_DRAW = 141


class Sums(Probe):
    """Sums as blocks of text, and the lists of the same numbers where the model's tokens can write them."""

    def shuffled(self, seed: int) -> "Sums":
        """The same text, with the values of the digits dealt anew among the sums."""
        dealt = [values[np.argsort(mix(seed, SUM_DRAW, np.arange(len(values))))] for values in self.marks["values"]]
        return replace(self, name=f"{self.name}, shuffled", marks={"values": tuple(dealt)})


def sum_texts(seed: int) -> tuple[list[str], Int[Tensor, "n 9"]]:
    """Sums as text, and each digit's value; -1 at the signs."""
    draws = mix(seed, SUM_DRAW, np.arange(SUMS)) >> np.uint64(8)
    texts = [f"{n // 100:02d}+{n % 100:02d}={n // 100 + n % 100:03d}" for n in (int(d) % 10_000 for d in draws)]
    values = [[int(letter) if letter.isdigit() else -1 for letter in text] for text in texts]
    return texts, torch.tensor(values)


def operand_probe(model: Model, seed: int) -> Probe:
    """Sums and lists in the model's tokens; without cases where the tokenizer does not write sums digit by digit."""
    texts, values = sum_texts(seed)
    sums, lists = (_written(model, some) for some in (texts, [text.replace("+", ",") for text in texts]))
    keys = torch.zeros(len(PLACES), len(PLACES), dtype=torch.bool)
    keys[EQUALS_PLACE:, list(DIGITS.values())] = sums is not None
    if sums is None:
        sums = torch.zeros(SUMS, len(PLACES), dtype=torch.int64)
    batches = (sums,)
    if lists is not None and model.token_strings(lists[0, PLUS_PLACE : PLUS_PLACE + 1]) == [","]:
        batches = (sums, lists)
    return Sums(
        name="sums",
        batches=batches,
        expected=tuple(keys.expand(len(tokens), -1, -1) for tokens in batches),
        marks={"values": tuple(values for _ in batches)},
    )


def _written(model: Model, texts: list[str]) -> Int[Tensor, "n 9"] | None:
    """The texts' tokens, where every character is one."""
    rows = [model.tokenize(text, special_tokens=False)[0] for text in texts]
    return torch.stack(rows) if all(len(row) == len(PLACES) for row in rows) else None


def score_operand(probe: Probe, readings: list[Reading]) -> Scores:
    """The largest read · explained beyond that of the list, over query positions and parts of the operands."""
    reading = readings[0]
    n = reading.n_units
    score, cases = np.zeros(n), np.zeros(n, dtype=np.int64)
    best = BestCase(n)
    for query in probe.expected[0][0].any(-1).nonzero()[:, 0].tolist():
        rows = (reading.query == query).nonzero()[:, 0]
        cases += np.bincount(reading.unit[rows].numpy(), minlength=n)
        in_sums, *in_lists = (
            by_part(one, query, of_one) for one, of_one in zip(readings, probe.marks["values"], strict=True)
        )
        for part, (places, _) in PARTS.items():
            if in_lists and 0 in places:
                continue
            beyond = in_sums[part] - (in_lists[0][part].clip(0) if in_lists else 0)
            better = rows[torch.from_numpy(beyond > score)[reading.unit[rows]]]
            shown = reading.parts[better][:, list(places)].abs().sum(-1).numpy()
            best.offer(0, reading, better, shown)
            score = np.maximum(score, beyond)
    return Scores(score.clip(0, 1), cases, best.cases)


def by_part(reading: Reading, query: int, values: Int[Tensor, "b t"]) -> dict[str, np.ndarray]:
    """For each part of the operands, read · explained of each unit at one position, 0 where it was hardly active."""
    rows = (reading.query == query).nonzero()[:, 0]
    few = np.bincount(reading.unit[rows].numpy(), minlength=reading.n_units) < CASES
    sources, writes = source_shares(reading, rows), reading.coordinates(rows).double()
    reached = {}
    for part, (places, weights) in PARTS.items():
        value = (values[:, list(places)] * torch.tensor(weights)).sum(-1)
        share = sources[:, list(places)].sum(-1).numpy() * explained(reading, rows, writes, value)
        reached[part] = np.where(few, 0.0, share)
    return reached


def source_shares(reading: Reading, rows: Int[Tensor, " m"]) -> Float[Tensor, "n t"]:
    """Share of each source position in the size of all contributions of these rows, by unit."""
    parts = reading.parts[rows].abs()
    total = parts.new_zeros(reading.n_units, parts.shape[1]).index_add_(0, reading.unit[rows], parts)
    return total / total.sum(-1, keepdim=True).clamp_min(torch.finfo(total.dtype).tiny)


def explained(
    reading: Reading, rows: Int[Tensor, " m"], writes: Float[Tensor, "m r"], value: Int[Tensor, " b"]
) -> np.ndarray:
    """ε² of what each unit writes in the rows of one query position, by the value that belongs to each block, [n].

    writes: of these rows, along any axes that keep inner products within a unit. 0 for a unit that writes the same
    everywhere.
    """
    levels, level = value.unique(return_inverse=True)
    n, n_levels, count = reading.n_units, len(levels), len(value)
    unit, of = reading.unit[rows], level[reading.block[rows]]
    sums = writes.new_zeros(n * n_levels, writes.shape[1]).index_add_(0, unit * n_levels + of, writes)
    sums = sums.view(n, n_levels, -1)
    square = writes.new_zeros(n).index_add_(0, unit, writes.square().sum(-1))
    mean = (sums.sum(1) / count).square().sum(-1) * count
    between = (sums.square().sum(-1) / level.bincount(minlength=n_levels)).sum(-1) - mean
    within = (square - between - mean).clamp_min(0)
    total = between + within
    unexplained = torch.where(total > 1e-12 * square, within / total.clamp_min(1e-30), 1.0)
    return (1 - unexplained * (count - 1) / max(1, count - n_levels)).numpy()


def plant_operand(model: Model, seed: int) -> Habit:
    """A unit that reads the last digit of the first operand where it is one of a few neighbours, going round.

    It acts where "+" stands between the two.
    """
    plus = model.tokenize("1+1", special_tokens=False)[0, 1]

    def reads(tokens: Int[Tensor, "b t"]) -> Bool[Tensor, "b q k"]:
        mask = last_of_first(tokens)
        return mask & (tokens == plus)[:, PLUS_PLACE : PLUS_PLACE + 1, None] if bool(mask.any()) else mask

    return Habit(reads, only=neighbours(model, seed), dense=True, often=OFTEN)


def last_of_first(tokens: Int[Tensor, "b t"]) -> Bool[Tensor, "b q k"]:
    """From the place of "=" on, the place of the first operand's last digit, whatever is written there."""
    b, t = tokens.shape
    mask = torch.zeros(t, t, dtype=torch.bool)
    mask[EQUALS_PLACE:, DIGITS["a0"] : DIGITS["a0"] + 1] = True
    return mask.expand(b, t, t)


def neighbours(model: Model, seed: int) -> tuple[int, ...]:
    """Tokens of two to five digits that follow each other, going round."""
    first, wide = seed % 10, 2 + seed // 10 % 4
    digits = [single_token(model, str((first + step) % 10), space=False) for step in range(wide)]
    return tuple(digit for digit in digits if digit is not None)


OPERAND = Behaviour(
    "operand",
    "arithmetic operand",
    "Which share of what it does in sums is reading digits of the operands and acting by their value?",
    "sums of two numbers, written digit by digit",
    THRESHOLD,
    CASES,
    operand_probe,
    score_operand,
    plant_operand,
    of_letters=False,
)
