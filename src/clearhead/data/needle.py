"""Needle in a haystack: a fact about a person and a thing, hidden in text that is about something else.

The haystack is held-out text (the default one, or any that `token_blocks` reads), another stretch for each prompt. The
answer is a colour, a thing and a room, drawn alike and so not to be guessed from the question: by chance one in 2,880
is right. All words are frequent ones. The facts are our own; the source paper's needles are not known to us.
"""

import numpy as np
from jaxtyping import Int64
from torch import Tensor

from clearhead.data.hidden_fact import HiddenFact
from clearhead.data.text import token_blocks
from clearhead.model.access import Model
from clearhead.ops.hash_rng import mix

INTRO = "Read the following text. A question about it is asked at the end.\n\n"
FACT = "\n\n{name} keeps the spare key under the{answer}.\n\n"
QUESTION = "\n\nQuestion: Where does {name} keep the spare key?\nAnswer: {name} keeps the spare key under the"
ANSWER = " {colour} {thing} in the {room}"
NAMES = "Alice Anna Clara Daniel David Emma George Helen Henry Jack Laura Lucy Martin Mary Oliver Paul Peter Sarah"
COLOURS = "black blue brown gold gray green orange pink purple red white yellow"
THINGS = "bag basket bench book bottle bowl box chair clock cup hat lamp mirror pillow plate pot stone table tray vase"
ROOMS = "attic bathroom basement bedroom cellar garage garden hall kitchen library office workshop"


def needles(n: int, seed: int) -> list[HiddenFact]:
    """`n` facts; number i depends on nothing but i and the seed."""
    lists = [words.split() for words in (NAMES, COLOURS, THINGS, ROOMS)]
    drawn = [mix(seed, np.arange(n), purpose) % np.uint64(len(words)) for purpose, words in enumerate(lists)]
    facts = []
    for places in zip(*drawn, strict=True):
        name, colour, thing, room = (words[place] for words, place in zip(lists, places, strict=True))
        answer = ANSWER.format(colour=colour, thing=thing, room=room)
        fact, question = FACT.format(name=name, answer=answer), QUESTION.format(name=name)
        facts.append(HiddenFact(INTRO, fact, question, answer))
    return facts


def haystacks(model: Model, n: int, length: int, text: str = "default") -> Int64[Tensor, "n t"]:
    """`n` rows of `length` tokens of held-out text, without special tokens in front, each from another place.

    Raises what `token_blocks` raises, among it `ClearheadError` where the text has too few tokens.
    """
    blocks = token_blocks(model.tokenizer, text, split="held_out", n_tokens=n * length, context=length)
    return blocks.tokens[:, blocks.prefix :]
