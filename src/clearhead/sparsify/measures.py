"""Losses and open edges by position, from which every average over lengths, layers and heads is taken.

    loss[p]        mean over sequences of −log p(token p + 1 | tokens 0..p)                      (nats)
    share          Σ open / Σ visible pairs, per query Σ open / rows: of one head, then averaged over heads and layers

Attention is causal, so the first L positions of a long sequence are what a sequence of L tokens would be: one pass
gives the edges at every length up to its own. Averages over heads and layers give each the same weight, as the penalty
does. Losses are computed in float32 at least, whatever the model's dtype.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from clearhead.data.repeats import MEASURED_SEED, repeated_sequences
from clearhead.errors import NonFiniteError
from clearhead.model.access import Model
from clearhead.model.gates import Tally
from clearhead.runs import progress

Drawn = Callable[[int], AbstractContextManager[Tally | None]]
"""Gates for the sequences from this number on, as a context manager that may count their edges."""
INDUCTION_SEQUENCES = 32


def as_it_is(_first: int) -> AbstractContextManager[None]:
    """No change of gates: for a dense model."""
    return nullcontext()


class EdgeCounts:
    """Sums over sequences of the edges of each layer, head and query; float64."""

    def __init__(self):
        self.layers: list[int] = []
        self.sequences = 0
        self.opened = self.expected = self.empty = self.leak = torch.zeros(0, 0, 0, dtype=torch.float64)
        self.visible = torch.zeros(0, 0, dtype=torch.float64)

    def add(self, tally: Tally) -> None:
        """Take in what one forward counted."""
        layers = sorted(tally)
        counts = [tally[layer] for layer in layers]
        n = len(counts[0].opened)
        opened = torch.stack([count.opened.sum(0) for count in counts]).double().cpu()
        expected = torch.stack([count.expected.double().sum(0) for count in counts]).cpu()
        empty = torch.stack([(count.opened == 0).sum(0) for count in counts]).double().cpu()
        leak = torch.stack([count.leak.double().sum(0) for count in counts]).cpu()
        visible = torch.stack([count.visible.double().expand(n, -1).sum(0) for count in counts]).cpu()
        if self.sequences:
            self.opened, self.expected = self.opened + opened, self.expected + expected
            self.empty, self.leak, self.visible = self.empty + empty, self.leak + leak, self.visible + visible
        else:
            self.layers, self.opened, self.expected = layers, opened, expected
            self.empty, self.leak, self.visible = empty, leak, visible
        self.sequences += n

    def shares(self, length: int | None = None) -> Float64[Tensor, "l h"]:
        """Share of visible pairs that are open, of each layer and head, in the first `length` positions."""
        return self.opened[..., :length].sum(-1) / self.visible[:, None, :length].sum(-1)

    def per_row(self, sums: Float64[Tensor, "l h t"], length: int | None = None) -> Float64[Tensor, "l h"]:
        """Mean over the rows of the first `length` positions, of each layer and head."""
        return sums[..., :length].mean(-1) / self.sequences

    def summary(self, length: int | None = None) -> dict[str, float]:
        """Averages over the layers, heads and rows of the first `length` positions."""
        expected_share = self.expected[..., :length].sum(-1) / self.visible[:, None, :length].sum(-1)
        return {
            "share": float(self.shares(length).mean()),
            "expected_share": float(expected_share.mean()),
            "per_query": float(self.per_row(self.opened, length).mean()),
            "expected_per_query": float(self.per_row(self.expected, length).mean()),
            "empty_rows": float(self.per_row(self.empty, length).mean()),
            "leak": float(self.per_row(self.leak, length).mean()),
        }


@torch.no_grad()
def measure_losses(
    model: Model, tokens: Int64[Tensor, "n t"], drawn: Drawn = as_it_is, *, batch: int = 8, what: str = "loss"
) -> tuple[Float64[Tensor, " s"], EdgeCounts]:
    """Mean loss of each prediction (nats, [t−1]) and the edges that were counted on the way, if any.

    `batch`: sequences per forward. `what` is shown with the progress. Raises `NonFiniteError` for losses that are none.
    """
    total = torch.zeros(tokens.shape[1] - 1, dtype=torch.float64)
    counts = EdgeCounts()
    with model.evaluating(), progress(what, tokens.numel()) as advance:
        for first in range(0, len(tokens), batch):
            part = tokens[first : first + batch].to(model.device)
            with drawn(first) as tally:
                logits = model.hf(input_ids=part, use_cache=False).logits
            total += losses(logits, part).double().sum(0).cpu()
            if tally:
                counts.add(tally)
            advance(part.numel())
    if not bool(total.isfinite().all()):
        position = int(total.isfinite().int().argmin())
        raise NonFiniteError(f"{what} of {model.name}: the prediction from position {position} is not a number")
    return total / len(tokens), counts


def losses(logits: Float[Tensor, "b t v"], tokens: Int64[Tensor, "b t"]) -> Float[Tensor, "b s"]:
    """Loss (nats) of predicting tokens 1..T−1 of each row, a row at a time as its logits are the largest tensor."""
    return torch.stack(
        [
            F.cross_entropy(row[:-1] if row.dtype == torch.float64 else row[:-1].float(), ids[1:], reduction="none")
            for row, ids in zip(logits, tokens, strict=True)
        ]
    )


def measure_induction(
    model: Model, alphabet: Int64[Tensor, " a"], context: int, drawn: Drawn = as_it_is, *, batch: int = 8
) -> dict[str, float]:
    """Mean loss (nats) on the first and the second half of random sequences that repeat once (data/repeats.py)."""
    period = context // 2
    tokens = repeated_sequences(MEASURED_SEED, torch.arange(INDUCTION_SEQUENCES), context, alphabet, period)
    found, _ = measure_losses(model, tokens, drawn, batch=batch, what="induction")
    first, second = found[: period - 1], found[period : 2 * period - 1]
    return {"first_half": float(first.mean()), "second_half": float(second.mean())}


def by_position(found: dict[str, Float64[Tensor, " s"] | None]) -> list[dict[str, Any]]:
    """Mean losses in bins of positions that double: predictions of tokens 1, 2–3, 4–7, ..., both ends included."""
    count = next(len(values) for values in found.values() if values is not None)
    bins = []
    first = 1
    while first <= count:
        last = min(2 * first - 1, count)
        means = {
            name: None if values is None else float(values[first - 1 : last].mean()) for name, values in found.items()
        }
        bins.append({"first": first, "last": last, **means})
        first = 2 * first
    return bins
