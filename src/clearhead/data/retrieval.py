"""Retrieval: whether a model finds a fact far back, by length of the prompt and depth of the fact.

    measure_retrieval(model, lengths=(1024, 4096), depths=(0, 0.5, 1), n=8, kind="passkey").exact   -> [length, depth]

For each cell, `n` prompts of exactly that many tokens, the answer's included (hidden_fact.py), kind "passkey" or
"needle". With the whole answer given to the model (teacher forcing), for its tokens a_1..a_m behind the prompt,

    exact             every a_i is the most likely token given those before it: what greedy generation would print
    log_probability   Σ_i log p(a_i | prompt, a_1..a_{i-1}), nats of the whole answer, mean over the cell

The same fact and the same haystack are used at all depths, so cells of a row differ by nothing but the place. `n`
prompts per cell are few: the standard error of `exact` is up to 1/(2√n). Not here: generation, several facts at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from clearhead.data import hidden_fact, needle, passkey
from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError
from clearhead.model.access import Model
from clearhead.runs import progress

Kind = Literal["passkey", "needle"]
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Retrieval:
    """What a model retrieves; rows are lengths, columns depths."""

    kind: Kind
    lengths: tuple[int, ...]
    """Tokens of a prompt with its answer."""
    depths: tuple[float, ...]
    """Where the fact stands in the text: 0 first, 1 last."""
    n: int
    """Prompts per cell."""
    exact: Float[Tensor, "lengths depths"]
    """Share of prompts whose answer is the most likely continuation, token by token."""
    log_probability: Float[Tensor, "lengths depths"]
    """Log-probability of the answer, nats, mean over the prompts."""


def measure_retrieval(
    model: Model,
    lengths: Sequence[int] = (1024,),
    depths: Sequence[float] = DEPTHS,
    n: int = 8,
    seed: int = 0,
    *,
    kind: Kind = "passkey",
    text: str = "default",
    batch: int = 4,
) -> Retrieval:
    """Exact match and log-probability of the answer in each cell of length × depth.

    text: the held-out text that needles are hidden in; not used for passkeys.
    batch: prompts per forward; logits of all their positions are held at once.

    Raises `UnknownNameError` for another kind, `ClearheadError` for lengths beyond the model's context or too short
    for the fact and its question, depths outside 0 to 1 and text that is too short, `NonFiniteError` for logits.
    """
    lengths, depths = tuple(lengths), tuple(depths)
    _check(model, lengths, depths, n, batch, kind)
    longest = max(lengths)
    if kind == "passkey":
        facts, rows = passkey.passkeys(n, seed), passkey.filler(model, n, longest)
    else:
        facts, rows = needle.needles(n, seed), needle.haystacks(model, n, longest, text)
    exact = torch.zeros(len(lengths), len(depths), dtype=torch.float64)
    log_probability = torch.zeros_like(exact)
    with progress(kind, n * sum(lengths) * len(depths)) as advance:
        for i, length in enumerate(lengths):
            for j, depth in enumerate(depths):
                pairs = zip(facts, rows, strict=True)
                prompts = [hidden_fact.prompt(model, fact, row, length, depth) for fact, row in pairs]
                for start in range(0, n, batch):
                    tokens, answers = zip(*prompts[start : start + batch], strict=True)
                    right, logs = read_answers(model, torch.stack(tokens), answers)
                    exact[i, j] += right.sum()
                    log_probability[i, j] += logs.sum()
                    advance(len(tokens) * length)
    return Retrieval(kind, lengths, depths, n, exact / n, log_probability / n)


def read_answers(
    model: Model, tokens: Int64[Tensor, "b t"], answers: Sequence[int]
) -> tuple[Bool[Tensor, " b"], Float[Tensor, " b"]]:
    """Of each row, whether its last `answers[row]` tokens are each the most likely, and their log-probability."""
    logits = model.run(tokens, read=["logits"]).logits
    right, logs = [], []
    for row, (ids, count) in enumerate(zip(tokens, answers, strict=True)):
        found = logits[row, -count - 1 : -1].float()
        if not bool(found.isfinite().all()):
            raise NonFiniteError(f"logits of {model.name} at the answer of a prompt of {len(ids)} tokens")
        wanted = ids[-count:]
        right.append((found.argmax(-1) == wanted).all())
        logs.append(found.log_softmax(-1).gather(-1, wanted[:, None]).double().sum())
    return torch.stack(right).cpu(), torch.stack(logs).cpu()


def _check(model: Model, lengths: tuple[int, ...], depths: tuple[float, ...], n: int, batch: int, kind: Kind) -> None:
    if kind not in get_args(Kind):
        raise UnknownNameError("kind of retrieval", kind, get_args(Kind))
    if not lengths or not depths:
        raise ClearheadError("lengths and depths: expected at least one of each")
    if model.n_ctx is not None and max(lengths) > model.n_ctx:
        raise ClearheadError(
            f"lengths: the context of {model.name} is {model.n_ctx} tokens, got {max(lengths)}; leave out longer ones"
        )
    if not all(0 <= depth <= 1 for depth in depths):
        raise ClearheadError(f"depths: expected fractions of the text from 0 to 1, got {depths}")
    if n < 1 or batch < 1:
        raise ClearheadError(f"n and batch: expected at least 1 prompt, got {n} and {batch}")
