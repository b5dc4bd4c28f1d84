"""A prompt of exactly T tokens with a fact hidden in other text, and a question about it at the end.

    special tokens, intro, text, fact, text, question, answer               T tokens, the answer's included

The pieces are tokenised one by one and joined as tokens, so that prompts with longer and shorter facts have one length
and share a batch; the text takes what room is left, its beginning cut off. The fact stands between two sentences or
lines, where such a place is nearest to `depth` times the length of the text: depth 0 is right behind the intro, depth
1 right before the question. A space in front of the answer that is a token of its own (SmolLM2 cuts " 12345" into a
space and digits) is counted to the question: whether a model would write it says nothing about retrieval.
"""

from typing import NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.model.access import Model

SENTENCE_ENDS = (".", "!", "?")


class HiddenFact(NamedTuple):
    """A fact, what is asked about it, and the answer as it continues the question."""

    intro: str
    fact: str
    question: str
    answer: str


def prompt(
    model: Model, hidden: HiddenFact, text: Int64[Tensor, " n"], length: int, depth: float
) -> tuple[Int64[Tensor, " t"], int]:
    """The `length` tokens of a prompt, and how many of them, at the end, are the answer.

    text: tokens without special ones, as many as there is room for or more; its end is used.
    Raises `ClearheadError` where the fact and the question alone are longer than `length`, and where the tokenizer
    joins the answer and the question.
    """
    intro = model.tokenize(hidden.intro)[0]
    fact, question, asked = (
        model.tokenize(part, special_tokens=False)[0]
        for part in (hidden.fact, hidden.question, hidden.question + hidden.answer)
    )
    if not torch.equal(asked[: len(question)], question):
        raise ClearheadError(
            f"the tokenizer of {model.name} cuts {hidden.question!r} otherwise where the answer follows"
        )
    room = length - len(intro) - len(fact) - len(asked)
    if room < 0:
        raise ClearheadError(
            f"length: {length} tokens cannot hold the fact and the question, which are {length - room} tokens of"
            f" {model.name}"
        )
    text = text[len(text) - room :]
    place = nearest_break(model.token_strings(text.tolist()), depth)
    text = text.to(intro)
    answer = model.token_strings(asked[len(question) :])
    return torch.cat([intro, text[:place], fact, text[place:], asked]), len(answer) - answer[0].isspace()


def nearest_break(strings: list[str], depth: float) -> int:
    """The index, nearest to depth · len(strings), before which a sentence or a line ends; 0 and the end count too."""
    inside = [place for place in range(1, len(strings)) if _ends(strings[place - 1], strings[place])]
    return min([0, *inside, len(strings)], key=lambda place: abs(place - depth * len(strings)))


def _ends(token: str, following: str) -> bool:
    return "\n" in token or (token.endswith(SENTENCE_ENDS) and following[:1].isspace())
