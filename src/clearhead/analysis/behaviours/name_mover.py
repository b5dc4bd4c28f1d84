"""Name movers: where a name comes next, they read a name of the context and raise the logit of that same name.

    "When Clara and Martin came to the station, Martin gave a ticket to"        reads " Clara", writes " Clara"

    cases   the ends of prompts with two or three names
    shown   the position that contributes most holds a name, and what is written there raises this name above every
            other name of the context, among the highest twentieth of all names, and at least 2 standard deviations
            above the mean of the vocabulary (direct_effect.py)
    score   share of the unit's activity at the ends, corrected for the twentieth

Which of the names is read is not asked: that it is the right one is the work of other heads (arXiv 2211.00593).
Prompts vary in sentence, names, their order, how often each is said and how far back. A unit that raises all names
alike moves none of them. Prompts use few of the names, so that units which copy one name have cases.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.analysis.behaviours.behaviour import OFTEN, Behaviour, Habit, Probe, Scores
from clearhead.analysis.behaviours.direct_effect import LEANS, DirectEffect, lean, logit_directions
from clearhead.analysis.behaviours.reading import Reading
from clearhead.analysis.behaviours.shown import (
    ShownActivity,
    correct_for_chance,
    main_source,
    rows_at,
    stands_out,
    visible_keys,
)
from clearhead.analysis.behaviours.token_lists import name_tokens, rows_of_equal_length
from clearhead.data.generators import ioi
from clearhead.model.access import Model
from clearhead.ops.hash_rng import mix

CASES, THRESHOLD = 8, 0.4
"""Least cases, and the score fixed on 204 planted units: precision 1, recall 0.74, none found on shuffled text."""
PROMPTS = 192
PEOPLE = 24
"""Names that the prompts draw from."""
TOP = 20
"""A moved name is among the first 1/TOP of all names."""
STORIES = (
    "{a} asked {b} a question in front of the whole class. After a long silence, {b} answered",
    "{a} wrote to {b} every week, and at last {b} wrote back to",
    "There were three people in the room: {a}, {b} and {c}. The first to speak was",
    "{a} lives next door to {b}. In the evening {b} often plays cards with",
    "\u201cWhere have you been?\u201d {a} asked {b}. \u201cAt the market,\u201d {b} told",
    "The prize was shared by {a}, {b} and {c}, but {c} had done less than",
    "{a} was older than {b}, and {c} was younger. When they met, {b} shook hands with",
    "{a} lost a glove on the way home. It was {b} who found it and brought it to",
)
LEADS = ("", "", "It was a cold morning. ", "Nobody knew how the day would end. ", "Listen to this story. ")
PLACES, OBJECTS = ("station", "garden", "office", "school"), ("ticket", "book", "letter", "ring")
NAME_DRAW, TEXT_DRAW = range(2)


def prompts(names: list[str], seed: int) -> list[str]:
    """Prompts of `ioi` and of ours, in turn; every name of `names` in about as many."""
    texts = []
    for index in range(PROMPTS):
        a, b, c = (names[place] for place in np.argsort(mix(seed, NAME_DRAW, index, np.arange(len(names))))[:3])
        draws = [int(number) for number in mix(seed, TEXT_DRAW, index, np.arange(4)) >> np.uint64(8)]
        if index % 3:
            filled = ioi.TEMPLATES[draws[0] % len(ioi.TEMPLATES)].format(
                first=a,
                second=b,
                again=(a, b)[draws[3] % 2],
                place=PLACES[draws[1] % len(PLACES)],
                object=OBJECTS[draws[2] % len(OBJECTS)],
            )
        else:
            filled = STORIES[draws[0] % len(STORIES)].format(a=a, b=b, c=c)
        texts.append(LEADS[draws[3] // 2 % len(LEADS)] + filled)
    return texts


def name_probe(model: Model, seed: int) -> Probe:
    """The prompts in the model's tokens; `name` is the token at positions that hold a name, -1 at the others."""
    known = name_tokens(model)
    batches = rows_of_equal_length(model, prompts(_people(list(known) or list[str](ioi.NAMES.split()), seed), seed))
    names = torch.tensor(sorted(known.values()), dtype=torch.int64)
    held = tuple(tokens.masked_fill(~torch.isin(tokens, names), -1) for tokens in batches)
    expected = []
    for name in held:
        mask = torch.zeros(*name.shape, name.shape[1], dtype=torch.bool)
        mask[:, -1] = name >= 0
        expected.append(mask)
    return Probe(
        name="names",
        batches=batches,
        expected=tuple(expected),
        marks={"name": held, "all names": tuple(names for _ in batches)},
        unembedding=logit_directions(model),
    )


def _people(names: list[str], seed: int) -> list[str]:
    return [names[place] for place in np.argsort(mix(seed, NAME_DRAW, np.arange(len(names))))[:PEOPLE]]


def score_name_mover(probe: Probe, readings: list[Reading]) -> Scores:
    """The share of each unit's activity at the ends of prompts that copies a name."""
    effect, tally = DirectEffect.of_probe(probe), ShownActivity(readings[0].n_units)
    for batch, reading in enumerate(readings):
        rows = rows_at(reading, probe.expected[batch].any(-1))
        block = reading.block[rows]
        held, names = probe.marks["name"][batch], probe.marks["all names"][batch]
        read = held[block, main_source(reading, rows)]
        gain = torch.zeros(len(rows))
        reads = (read >= 0).nonzero()[:, 0]
        if len(reads):
            effects = effect(reading.writes(rows[reads]), names)
            moved = names == read[reads][:, None]
            others = (held[block[reads]][:, :, None] == names).any(1) & ~moved
            won = stands_out(effects, moved, others) & _among_first(effects, moved, max(1, len(names) // TOP))
            gain[reads] = correct_for_chance(won, torch.full((len(reads),), 1 / TOP))
        tally.add(batch, reading, rows, gain)
    return tally.scores()


def _among_first(effects: Float[Tensor, "m k"], target: Bool[Tensor, "m k"], n: int) -> Bool[Tensor, " m"]:
    """Whether fewer than n effects exceed the target's."""
    reached = effects.masked_fill(~target, -torch.inf).amax(-1, keepdim=True)
    return (effects > reached).sum(-1) < n


def plant_name_mover(model: Model, seed: int) -> Habit:
    """A unit that copies names: all, or (every third unit) a single one of those that the probe of seed 0 has."""
    known = name_tokens(model)
    names, drawn = torch.tensor(sorted(known.values()), dtype=torch.int64), _people(list(known), 0)
    directions, strength = logit_directions(model), LEANS[seed % len(LEANS)]
    only = (known[drawn[seed // 7 % len(drawn)]],) if seed % 3 == 0 and drawn else None
    return Habit(
        reads=lambda tokens: visible_keys(torch.isin(tokens, names)),
        writes=lambda tokens: lean(directions, tokens, seed, strength),
        only=only,
        dense=True,
        often=OFTEN,
    )


NAME_MOVER = Behaviour(
    "name_mover",
    "name mover",
    "Which share of its activity, where a name comes next, copies a name of the context?",
    "prompts with two or three names that end where one of them follows",
    THRESHOLD,
    CASES,
    name_probe,
    score_name_mover,
    plant_name_mover,
)
