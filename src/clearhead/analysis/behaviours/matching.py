"""Where a head with a known attention pattern reads: from tokens alone to the expected keys of every query.

    previous      k = q − 1
    duplicate     an earlier k with the token of q
    induction     an earlier k behind a token that is that of q
    subword       q ends inside a word: the token of an earlier occurrence of this word that holds its next letter

Key 0 is left out of all of them, because attention that has nothing to do rests there, and a query is no key of
itself. Words are runs of Latin letters, compared without case, whatever tokens they are cut into: behind "M" of
"Marion" the next letter is held by the one token " Marion" as well as by the "arion" of " M", "arion".
"""

import re
from functools import cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from clearhead.model.access import Model

WORD = re.compile("[A-Za-z]+")


@cache
def _earlier(t: int) -> Bool[Tensor, "q k"]:
    """The keys before each query, without key 0."""
    mask = torch.ones(t, t, dtype=torch.bool).tril(-1)
    mask[:, 0] = False
    return mask


def previous(tokens: Int[Tensor, "b t"], back: int = 1) -> Bool[Tensor, "b q k"]:
    """The key `back` positions before the query."""
    b, t = tokens.shape
    mask = torch.ones(t, t, dtype=torch.bool).triu(-back).tril(-back) & _earlier(t)
    return mask.expand(b, t, t)


def first(tokens: Int[Tensor, "b t"], place: int = 0) -> Bool[Tensor, "b q k"]:
    """Position `place`, from the second position behind it on: at the first it is the previous token."""
    b, t = tokens.shape
    mask = torch.zeros(t, t, dtype=torch.bool)
    mask[2 + place :, place] = True
    return mask.expand(b, t, t)


def duplicate(tokens: Int[Tensor, "b t"]) -> Bool[Tensor, "b q k"]:
    """Earlier copies of the query's token."""
    return (tokens[:, :, None] == tokens[:, None]) & _earlier(tokens.shape[1])


def induction(tokens: Int[Tensor, "b t"]) -> Bool[Tensor, "b q k"]:
    """What followed earlier copies of the query's token."""
    copies = tokens[:, :, None] == tokens[:, None]
    return copies.roll(1, -1) & _earlier(tokens.shape[1])


def subword(model: Model, tokens: Int[Tensor, "b t"]) -> Bool[Tensor, "b q k"]:
    """The next letters of an unfinished word, where the word came before."""
    mask = torch.zeros(*tokens.shape, tokens.shape[1], dtype=torch.bool)
    for block, row in enumerate(tokens.tolist()):
        for query, key in _word_pairs(model.token_strings(row)):
            mask[block, query, key] = True
    return mask & _earlier(tokens.shape[1])


def _word_pairs(strings: list[str]) -> list[tuple[int, int]]:
    """(query, key) pairs of one text."""
    holds: list[int] = []  # the token that holds each character
    for place, string in enumerate(strings):
        holds += [place] * len(string.replace("\\x", "--"))  # a byte, not the letter x
    text = "".join(string.replace("\\x", "--") for string in strings)
    pairs, before = [], {}
    for found in WORD.finditer(text):
        word, start = found[0].lower(), found.start()
        for letter in range(1, len(word)):
            query, following = holds[start + letter - 1], holds[start + letter]
            if query != following:  # the query's token ends inside the word
                pairs += [(query, holds[earlier + letter]) for earlier in before.get(word, ())]
        before.setdefault(word, []).append(start)
    return pairs


def elsewhere(mask: Bool[Tensor, "b q k"]) -> Bool[Tensor, "b q k"]:
    """A control for keys that depend on tokens: those that the next block of the batch expects, but its own."""
    return mask.roll(1, 0) & ~mask
