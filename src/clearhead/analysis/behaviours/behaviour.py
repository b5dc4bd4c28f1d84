"""A behaviour that units may show: the text it is looked for on, the score, and the threshold.

    probe    batches of tokens and, per query, the keys that a unit with the behaviour would read there
    score    in [0, 1], from what a population did on the probe; 0 is what chance gives
    found    score >= threshold on at least `min_cases` cases

The thresholds are constants, fixed on planted units (planted.py) before any model was looked at. `Habit` is how such a
unit acts. The behaviours themselves are in attention.py and the files beside it, all of them in registry.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor

from clearhead.analysis.behaviours.reading import Reading
from clearhead.model.access import Model
from clearhead.ops.hash_rng import mix

SHUFFLE_DRAW, KEY_DRAW = 101, 102
OFTEN = 30.0
"""`Habit.often` of behaviours whose probes are short prompts."""


@dataclass(frozen=True, eq=False)
class Probe:
    """The text a behaviour is looked for on; every tuple has one entry per batch."""

    name: str
    """Probes of one name have the same tokens, so that a population reads them once."""
    batches: tuple[Int[Tensor, "b t"], ...]
    expected: tuple[Bool[Tensor, "b q k"], ...]
    """The keys that the behaviour reads at each query; a row without any is no case."""
    control: tuple[Bool[Tensor, "b q k"], ...] = ()
    """Keys like the expected ones in number and place that the behaviour gives no reason to read."""
    marks: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)
    """What else a detector needs to know of each batch, by name."""
    unembedding: Float[Tensor, "v d"] | None = None
    """Logit directions, for detectors of what units write."""
    positional: bool = False
    """The expected keys follow from positions alone, whatever the tokens are."""

    def shuffled(self, seed: int) -> "Probe":
        """The probe without the behaviour: what is found here is found by chance.

        The tokens of each block, its first aside, are dealt anew while the expected keys stay where they were. Where
        these do not depend on tokens, each query expects as many keys at random places instead.
        """
        batches = tuple(_shuffle(tokens, mix(seed, SHUFFLE_DRAW, i)[0]) for i, tokens in enumerate(self.batches))
        expected = self.expected
        if self.positional:
            expected = tuple(_deal(mask, mix(seed, KEY_DRAW, i)[0]) for i, mask in enumerate(expected))
        return replace(self, name=f"{self.name}, shuffled", batches=batches, expected=expected)


def _shuffle(tokens: Int[Tensor, "b t"], key: np.uint64) -> Int[Tensor, "b t"]:
    b, t = tokens.shape
    order = np.argsort(mix(key, np.arange(b * (t - 1))).reshape(b, t - 1), axis=1)
    shuffled = tokens.clone()
    shuffled[:, 1:] = tokens[:, 1:].gather(1, torch.from_numpy(order).to(tokens.device))
    return shuffled


def _deal(mask: Bool[Tensor, "b q k"], key: np.uint64) -> Bool[Tensor, "b q k"]:
    """As many keys per query, at random places up to the query."""
    draw = torch.from_numpy((mix(key, np.arange(mask.numel())) >> np.uint64(2)).astype(np.int64)).view(mask.shape)
    seen = torch.ones(mask.shape[1:], dtype=torch.bool).tril()
    place = draw.masked_fill(~seen, 2**62).argsort(-1).argsort(-1).to(mask.device)
    return place < mask.sum(-1, keepdim=True)


class Case(NamedTuple):
    """One row of a reading that shows a behaviour: which batch, block and query, and the keys it reads there."""

    batch: int
    block: int
    query: int
    keys: tuple[int, ...]
    """Largest contribution first."""


class Scores(NamedTuple):
    """What a detector says of each of a population's n units."""

    score: Float64[np.ndarray, " n"]
    """In [0, 1]."""
    cases: Int64[np.ndarray, " n"]
    """Rows on which the behaviour could show."""
    best: list[Case | None]
    """The row that shows it best; None where none does."""


@dataclass(frozen=True)
class Habit:
    """How a planted unit with a behaviour acts: where it reads and what it writes."""

    reads: Callable[[Int[Tensor, "b t"]], Bool[Tensor, "b q k"]]
    """From tokens to the keys read at each query; one rule for all units of a behaviour."""
    writes: Callable[[Int[Tensor, " m"]], Float[Tensor, "m d"]] | None = None
    """From the tokens read to what is written, of length 1; None: a direction of the unit's own."""
    only: tuple[int, ...] | None = None
    """It acts where the token read is one of these; None: everywhere."""
    dense: bool = False
    """Its cases are so many that a unit which acts at every query, as original heads do, may have it."""
    often: float = 1.0
    """How much more often than on long text it acts: prompts of a few words have few cases."""


@dataclass(frozen=True)
class Behaviour:
    """One kind of unit and how it is recognised."""

    name: str
    """As in the atlas: `induction`."""
    title: str
    question: str
    """One sentence: what the score answers."""
    text: str
    """The text it is tested on, in a few words."""
    threshold: float
    """The score from which a unit counts as found."""
    min_cases: int
    """Fewer cases are not enough to tell."""
    probe: Callable[[Model, int], Probe]
    """From a model and a seed."""
    score: Callable[[Probe, list[Reading]], Scores]
    """One reading per batch of the probe, all of one population."""
    plant: Callable[[Model, int], Habit]
    """From a model and a unit's seed to a unit that has the behaviour."""
    of_letters: bool = True
    """The probe is text; False: it needs digits and signs alone."""

    def served_by(self, model: Model) -> bool:
        """Whether the model's tokens can write the probe: those of the addition toy hold no letter."""
        return not self.of_letters or any(map(str.isalpha, "".join(model.token_strings(range(model.d_vocab)))))

    def found(self, scores: Scores) -> np.ndarray:
        """Which units have the behaviour, [n] of bool."""
        return (scores.score >= self.threshold) & (scores.cases >= self.min_cases)
