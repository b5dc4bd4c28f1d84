"""Copy, the induction task: random tokens, the beginning of the same tokens again; the answer is what came next.

    . x1 x2 ... xm x1 ... xj  ->  x(j+1)                                   m drawn from 17..22, m + j = 30

No two of x1..xm are equal, so that nothing but the first half says what follows. All prompts have one length, while
the distance m between a token and its copy differs: a head that looks a fixed number of tokens back solves a sixth of
them at most. The full stop in front is a place where attention may rest. The corrupt prompt is

    last      xj at the end becomes a later xk of the first half, so that x(k+1) is its answer; that is the wrong answer
    earlier   x(j+1) in the first half becomes a token that is nowhere else, and that one is the wrong answer

Tokens are words or beginnings of words (a space and letters) among the first 2,000 such of the vocabulary, which are
the frequent ones; each is the same token whatever stands before it, so the prompt as text has exactly these tokens.
Labels as the literature writes induction, A B ... A -> B: A (the earlier copy of the last token), B (behind it), end.
"""

import re

import numpy as np

from clearhead.data.task_item import TaskItem
from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.access import Model
from clearhead.ops.hash_rng import mix

FRONT = "."
PIECE = re.compile(" [A-Za-z]+")
MOST_PIECES = 2000
LENGTH = 30  # tokens behind the full stop
PERIODS = range(17, 23)
CORRUPTIONS = ("last", "earlier")
PIECE_DRAW, PERIOD_DRAW, LAST_DRAW = range(3)


def generate(model: Model, n: int, seed: int, corrupt: str | None = None) -> tuple[TaskItem, ...]:
    """`n` items; item i depends on nothing but i, the seed, the tokenizer and `corrupt` ("last" unless given).

    Raises `UnknownNameError` for another corruption, `ClearheadError` where too few tokens of the vocabulary keep
    their form between others.
    """
    corrupt = CORRUPTIONS[0] if corrupt is None else corrupt
    if corrupt not in CORRUPTIONS:
        raise UnknownNameError("corruption of copy", corrupt, CORRUPTIONS)
    pieces = _pieces(model)
    if len(pieces) <= PERIODS[-1]:
        raise ClearheadError(
            f"copy: the vocabulary of {model.name} has {len(pieces)} tokens of a space and letters that stay themselves"
            f" between others; more than {PERIODS[-1]} are needed"
        )
    return tuple(_item(model, pieces, index, seed, corrupt) for index in range(n))


def _pieces(model: Model) -> list[str]:
    """Tokens that are one token behind another, in the order of the vocabulary."""
    front = model.tokenize(FRONT)[0].tolist()
    found: list[str] = []
    for token, text in enumerate(model.token_strings(range(model.d_vocab))):
        if PIECE.fullmatch(text) and model.tokenize(FRONT + text)[0].tolist() == [*front, token]:
            found.append(text)
            if len(found) == MOST_PIECES:
                break
    return found


def _item(model: Model, pieces: list[str], index: int, seed: int, corrupt: str) -> TaskItem:
    period = PERIODS[int(mix(seed, index, PERIOD_DRAW)[0] % np.uint64(len(PERIODS)))]
    copied = LENGTH - period
    order = np.argsort(mix(seed, index, PIECE_DRAW, np.arange(len(pieces))))
    first = [pieces[place] for place in order[:period]]
    again = first[:copied]
    if corrupt == "last":
        later = range(copied + 1, period - 1)  # neither the answer nor the last, which nothing follows
        other = later[int(mix(seed, index, LAST_DRAW)[0] % np.uint64(len(later)))]
        wrong = first[other + 1]
        changed = [*first, *again[:-1], first[other]]
    else:
        wrong = pieces[order[period]]
        changed = [*first[:copied], wrong, *first[copied + 1 :], *again]
    clean = FRONT + "".join((*first, *again))
    ids = model.tokenize(clean)[0]
    begin = len(ids) - LENGTH
    labels = {"A": begin + copied - 1, "B": begin + copied, "end": len(ids) - 1}
    return TaskItem(
        clean=clean,
        corrupt=FRONT + "".join(changed),
        answers=(first[copied],),
        wrong_answers=(wrong,),
        template=f"copy {period}",
        labels=labels,
        label_tokens=dict(zip(labels, model.token_strings(ids[list(labels.values())]), strict=True)),
    )
