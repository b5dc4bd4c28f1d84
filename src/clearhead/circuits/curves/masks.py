"""Learned masks: which components does a small circuit need, found by training a random mask with a budget.

A component is kept to the degree m of a hard-concrete variable (arXiv 1712.01312, section 2.2):

    s = σ((log u − log(1 − u) + α)/β),   m = clamp(s·(ζ − γ) + γ, 0, 1),   P(m > 0) = σ(α − β·log(−γ/ζ))

with u uniform, β = 2/3, γ = −0.1, ζ = 1.1. The log-odds α are trained on the KL divergence of the circuit from the
whole model, with the expected number of kept components held to the budget by a multiplier λ that rises while it is
exceeded:

    loss = KL + λ·c + c²·PENALTY,   c = (Σ P(m > 0) − budget)/n,   λ ← λ + STEP·c

The score is P(m > 0). It has no sign: a component is as necessary for behaving like the model when it works against the
answer. It depends on the budget; a ranking far from the budget is extrapolation.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from clearhead.circuits.patching.metrics import divergence
from clearhead.circuits.patching.nodes import Nodes, select_rows
from clearhead.data.tasks import TaskBatch
from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.runs import progress

TEMPERATURE, LOW, HIGH = 2 / 3, -0.1, 1.1
PENALTY, STEP = 10.0, 1.0
ROWS = 8
"""Prompts per step."""


def learn_masks(
    nodes: Nodes,
    batches: Sequence[TaskBatch],
    *,
    budget: int | None = None,
    steps: int = 150,
    rate: float = 0.1,
    seed: int = 0,
    quiet: bool = False,
) -> Float64[Tensor, " n"]:
    """P(m > 0) of every component after training; `budget` None is a tenth of the components, at least one.

    Raises `ClearheadError` for a budget outside 1 to n, `NonFiniteError` where training diverges.
    """
    n = len(nodes.components)
    budget = max(1, n // 10) if budget is None else budget
    if not 1 <= budget <= n:
        raise ClearheadError(f"budget: expected 1 to {n} components, got {budget}")
    generator = torch.Generator().manual_seed(seed)
    alpha = torch.full((n,), 2.0, requires_grad=True)
    optimiser = torch.optim.Adam([alpha], lr=rate)
    multiplier = 0.0
    shift = TEMPERATURE * math.log(-LOW / HIGH)
    with progress("learning masks", steps, "steps", quiet=quiet) as advance:
        for step in range(steps):
            opened = nodes.open(rows_of_step(batches, step))
            b = len(opened.rows.items)
            u = torch.rand(b, n, generator=generator).clamp(1e-6, 1 - 1e-6)
            s = ((u.log() - (-u).log1p() + alpha) / TEMPERATURE).sigmoid()
            mask = (s * (HIGH - LOW) + LOW).clamp(0, 1).to(nodes.model.device, nodes.model.dtype)
            logits = nodes.run_masked(mask, torch.arange(b, device=mask.device), opened, grad=True)
            over = ((alpha - shift).sigmoid().sum() - budget) / n
            loss = divergence(logits, opened.full.logits).mean().cpu() + multiplier * over + PENALTY * over.square()
            if not bool(loss.isfinite()):
                raise NonFiniteError(f"loss of the learned masks at step {step}")
            optimiser.zero_grad()
            (alpha.grad,) = torch.autograd.grad(loss, [alpha])
            optimiser.step()
            multiplier = max(0.0, multiplier + STEP * float(over.detach()))
            advance(1)
    return (alpha.detach() - shift).sigmoid().double()


def rows_of_step(batches: Sequence[TaskBatch], step: int) -> TaskBatch:
    """The prompts of one step: `ROWS` of a batch, batches and the rows in them taken in turn."""
    pieces = [(rows, start) for rows in batches for start in range(0, len(rows.items), ROWS)]
    rows, start = pieces[step % len(pieces)]
    return select_rows(rows, range(start, min(start + ROWS, len(rows.items))))
