"""Indirect object identification: two people are named, one of them again as a giver; the gift goes to the other.

    When Clara and Martin came to the station, Martin gave a ticket to  ->  " Clara", not " Martin"

The repeated name is the subject S (S1, then S2), the other the indirect object IO. In half of the prompts IO comes
first (ABBA: IO S S), in half second (BABA: S IO S), in every template alike. The corrupt prompt keeps the template:

    resample   all three mentions become three other people, so that nobody is repeated and there is no answer
    s2_flip    S2 becomes IO, so that the answer changes sides

Only names, places and objects that are single tokens behind a space are used, so that a template has one length.
Labels: IO, S1, S1+1 (the token behind S1), S2, end (the last token). Task as in Wang et al. 2022 (2211.00593); the
sentences and words are our own.
"""

from typing import NamedTuple

import numpy as np

from clearhead.data.task_item import TaskItem
from clearhead.data.task_tokens import token_ids
from clearhead.data.templates import end_of_slot
from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.access import Model
from clearhead.ops.hash_rng import mix

TEMPLATES = (
    "When {first} and {second} came to the {place}, {again} gave a {object} to",
    "After {first} and {second} had talked about the {place}, {again} handed a {object} to",
    "While {first} and {second} were waiting near the {place}, {again} offered a {object} to",
    "Then {first} and {second} walked back to the {place}, and {again} passed a {object} to",
    "Last night {first} and {second} met outside the {place}. Smiling, {again} gave a {object} to",
    "Because {first} and {second} often worked at the {place}, {again} lent a {object} to",
    "Once {first} and {second} were home from the {place}, {again} showed a {object} to",
    "On the day that {first} and {second} visited the {place}, {again} sent a {object} to",
    "Before {first} and {second} left the {place}, {again} gave a {object} to",
    "Yesterday {first} and {second} worked together at the {place}, and {again} handed a {object} to",
    "As {first} and {second} were cleaning the {place}, {again} threw a {object} to",
    "At the {place}, {first} and {second} began to argue, until {again} returned a {object} to",
    "Although {first} and {second} hardly spoke at the {place}, {again} gave a {object} to",
    "On the way to the {place}, {first} and {second} found a {object}, and {again} gave it to",
    "It was raining when {first} and {second} reached the {place}, and {again} lent a {object} to",
    "Inside the {place}, while {first} and {second} were talking, {again} quietly passed a {object} to",
    "Long ago {first} and {second} had opened a shop beside the {place}, where {again} sold a {object} to",
    "The guards let {first} and {second} into the {place}, where {again} presented a {object} to",
)
NAMES = (
    "Adam Alice Andrea Andrew Anna Anthony Barbara Ben Brian Carl Carol Charles Chris Clara Daniel David Diana Edward "
    "Elena Emily Emma Eric Eva Felix George Hannah Helen Henry Jack Jacob James Jane Jason Jennifer Jessica Julia "
    "Karen Kate Kevin Laura Leo Linda Lisa Louis Lucy Maria Martin Mary Matthew Michael Nancy Nathan Nick Oliver Oscar "
    "Paul Peter Philip Rachel Richard Robert Ruth Sam Sandra Sarah Simon Sophie Stephen Susan Thomas Tom Victor Walter"
)
PLACES = (
    "park school station library market office beach hospital museum garden kitchen farm bank restaurant church hotel "
    "airport theater lake castle bridge factory harbor store"
)
OBJECTS = (
    "book ring coin letter drink camera watch ticket card key hat ball pen map gift cake phone basket knife flower "
    "bottle box lamp necklace"
)
CORRUPTIONS = ("resample", "s2_flip")
PEOPLE = 5  # the two of the clean prompt and three others
NAME_DRAW, PLACE_DRAW, OBJECT_DRAW = range(3)


class Words(NamedTuple):
    """The words that are single tokens behind a space."""

    names: list[str]
    places: list[str]
    objects: list[str]


def generate(model: Model, n: int, seed: int, corrupt: str | None = None) -> tuple[TaskItem, ...]:
    """`n` items; item i depends on nothing but i, the seed, the tokenizer and `corrupt` ("resample" unless given).

    Raises `UnknownNameError` for another corruption, `ClearheadError` where too few words are single tokens.
    """
    corrupt = CORRUPTIONS[0] if corrupt is None else corrupt
    if corrupt not in CORRUPTIONS:
        raise UnknownNameError("corruption of ioi", corrupt, CORRUPTIONS)
    words = single_token_words(model)
    return tuple(_item(model, words, index, seed, corrupt) for index in range(n))


def single_token_words(model: Model) -> Words:
    """The names, places and objects that are single tokens. Raises `ClearheadError` where they are too few."""
    names, places, objects = (words.split() for words in (NAMES, PLACES, OBJECTS))
    found = Words(*([word for word in words if _is_token(model, word)] for words in (names, places, objects)))
    if len(found.names) < PEOPLE or not found.places or not found.objects:
        raise ClearheadError(
            f"the tokenizer of {model.name} has {len(found.names)} of {len(names)} names, {len(found.places)} of "
            f"{len(places)} places and {len(found.objects)} of {len(objects)} objects as single tokens; ioi needs "
            f"{PEOPLE}, 1 and 1. Take a model with a larger vocabulary, such as smollm2"
        )
    return found


def _item(model: Model, words: Words, index: int, seed: int, corrupt: str) -> TaskItem:
    number, order = index // 2 % len(TEMPLATES), ("ABBA", "BABA")[index % 2]
    io, s, *others = _draw(words.names, seed, index, NAME_DRAW)[:PEOPLE]
    slots = {
        "place": _draw(words.places, seed, index, PLACE_DRAW)[0],
        "object": _draw(words.objects, seed, index, OBJECT_DRAW)[0],
    }
    filled = slots | _people(order, io, s, s)
    changed = slots | _people(order, *(others if corrupt == "resample" else (io, s, io)))
    clean = TEMPLATES[number].format(**filled)
    ids = token_ids(model, clean)
    first, second, again = (
        end_of_slot(model, TEMPLATES[number], slot, filled, ids) for slot in ("first", "second", "again")
    )
    io_place, s1_place = (first, second) if order == "ABBA" else (second, first)
    labels = {"IO": io_place, "S1": s1_place, "S1+1": s1_place + 1, "S2": again, "end": len(ids) - 1}
    return TaskItem(
        clean=clean,
        corrupt=TEMPLATES[number].format(**changed),
        answers=(f" {io}",),
        wrong_answers=(f" {s}",),
        template=f"ioi {number} {order}",
        labels=labels,
        label_tokens=dict(zip(labels, model.token_strings(ids[place] for place in labels.values()), strict=True)),
    )


def _people(order: str, io: str, s1: str, s2: str) -> dict[str, str]:
    first, second = (io, s1) if order == "ABBA" else (s1, io)
    return {"first": first, "second": second, "again": s2}


def _draw(words: list[str], seed: int, index: int, purpose: int) -> list[str]:
    """The words in an order that depends on nothing but the numbers and how many words there are."""
    keys = mix(seed, index, purpose, np.arange(len(words)))
    return [words[place] for place in np.argsort(keys)]


def _is_token(model: Model, word: str) -> bool:
    alone, behind = model.tokenize("The")[0].tolist(), model.tokenize(f"The {word}")[0].tolist()
    return behind[:-1] == alone
