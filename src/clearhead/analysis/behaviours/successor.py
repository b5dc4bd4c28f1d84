"""Successor heads: they read an element of a sequence and raise the logit of the next one.

    " Monday" -> " Tuesday"      "3" -> "4"      " third" -> " fourth"

    cases   queries that see an element with a successor
    shown   the position that contributes most holds such an element, and what is written there raises its successor
            above all other elements of the sequence, the one read included, and at least 2 standard deviations above
            the mean of the vocabulary (direct_effect.py)
    score   share of the unit's activity on its cases, corrected for the 1/n with which one of n elements wins by chance

Text: pieces of the sequences in order ("one, two, three,") and sentences with one element. A Lorsa head writes a fixed
direction, so it can be the successor of few elements at most. That a unit reads the latest element is not asked for.
"""

import numpy as np
import torch

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
from clearhead.analysis.behaviours.token_lists import ORDINALS, Successors, ordinal_sequences, rows_of_equal_length
from clearhead.model.access import Model
from clearhead.ops.hash_rng import mix

RAISED = 2.0
"""Standard deviations over the vocabulary by which the successor must stand above the mean."""
CASES, THRESHOLD = 10, 0.4
"""Least cases, and the score fixed on 236 planted units: precision 1, recall 0.74, none found on shuffled text."""
PIECES, SENTENCES = 96, 96
"""Prompts of each kind."""
SEPARATORS = (", ", "\n", " and ", ", then ", " or ")
OPENINGS = ("Count with me:", "In order:", "The list goes", "They read out", "Next to each other stood")
SENTENCES_BY_SEQUENCE = {
    "digits": ("Turn to page {} of the book and read", "Bus number {} was late again, so", "He rolled a {} and then"),
    "number words": ("There were {} birds on the roof and", "She waited for {} days before", "He has {} sisters who"),
    "weekdays": ("The shop is closed on {} because", "Last {} it rained all day, and", "We meet every {} at noon in"),
    "months": ("In {} the river was frozen and", "He was born in {} and grew up", "Since {} the prices have"),
    "ordinals": ("She finished in {} place and", "The {} chapter is about", "It was his {} visit to the city, so"),
    "letters": ("Take exit {} and turn left at", "Group {} won both games and", "He marked the box with {} and closed"),
}
PROMPT_DRAW, PLACE_DRAW = range(2)


def prompts(seed: int) -> list[str]:
    """Pieces of sequences in order, and sentences with one element."""
    texts = []
    names = list(ORDINALS)
    for index in range(PIECES + SENTENCES):
        draws = [int(number) for number in mix(seed, PROMPT_DRAW, index, np.arange(4)) >> np.uint64(8)]
        name = names[index % len(names)]
        words = ORDINALS[name].split()
        if index < PIECES:
            length = 2 + draws[0] % 4
            first = draws[1] % (len(words) - length + 1)
            separator = SEPARATORS[draws[2] % len(SEPARATORS)]
            piece = separator.join(words[first : first + length])
            join = "\n" if separator == "\n" else " "
            texts.append(OPENINGS[draws[3] % len(OPENINGS)] + join + piece + separator.rstrip(" "))
        else:
            sentences = SENTENCES_BY_SEQUENCE[name]
            texts.append(sentences[draws[0] % len(sentences)].format(words[draws[1] % len(words)]))
    return texts


def successor_probe(model: Model, seed: int) -> Probe:
    """The prompts in the model's tokens; `following` and `sequence` are given for each position, -1 for the others."""
    sequences = ordinal_sequences(model)
    tables = Successors.of_sequences(sequences, model.d_vocab)
    batches = rows_of_equal_length(model, prompts(seed))
    following = tuple(tables.following[tokens] for tokens in batches)
    return Probe(
        name="ordinal sequences",
        batches=batches,
        expected=tuple(visible_keys(after >= 0) for after in following),
        marks={
            "following": following,
            "sequence": tuple(tables.sequence[tokens] for tokens in batches),
            "elements": tuple(tables.sequence for _ in batches),
        },
        unembedding=logit_directions(model),
    )


def score_successor(probe: Probe, readings: list[Reading]) -> Scores:
    """The share of each unit's activity that raises the successor of the element it reads."""
    effect, tally = DirectEffect.of_probe(probe), ShownActivity(readings[0].n_units)
    for batch, reading in enumerate(readings):
        rows = rows_at(reading, probe.expected[batch].any(-1))
        source, block = main_source(reading, rows), reading.block[rows]
        following = probe.marks["following"][batch][block, source]
        gain = torch.zeros(len(rows))
        reads = (following >= 0).nonzero()[:, 0]
        if len(reads):
            elements = probe.marks["elements"][batch]
            rivals = (elements >= 0).nonzero()[:, 0]
            effects = effect(reading.writes(rows[reads]), rivals)
            same = elements[rivals] == probe.marks["sequence"][batch][block[reads], source[reads]][:, None]
            next_one = rivals == following[reads][:, None]
            won = stands_out(effects, next_one, same & ~next_one)
            gain[reads] = correct_for_chance(won, 1 / same.sum(-1))
        tally.add(batch, reading, rows, gain)
    return tally.scores()


def plant_successor(model: Model, seed: int) -> Habit:
    """A unit that reads elements and raises their successors: all elements, or (every third unit) a single one."""
    tables = Successors.of_sequences(ordinal_sequences(model), model.d_vocab)
    directions, strength = logit_directions(model), LEANS[seed % len(LEANS)]
    known = (tables.following >= 0).nonzero()[:, 0]
    only = (int(known[seed // 7 % len(known)]),) if seed % 3 == 0 and len(known) else None
    return Habit(
        reads=lambda tokens: visible_keys(tables.following[tokens] >= 0),
        writes=lambda tokens: lean(directions, tables.following[tokens], seed, strength),
        only=only,
        dense=True,
        often=OFTEN,
    )


SUCCESSOR = Behaviour(
    "successor",
    "successor",
    "Which share of its activity on ordinal words raises the next of them?",
    "pieces of ordinal sequences, and sentences with one element",
    THRESHOLD,
    CASES,
    successor_probe,
    score_successor,
    plant_successor,
)
