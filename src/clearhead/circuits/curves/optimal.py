"""Optimal ablation: the constants that stand in for dropped components with the least harm (arXiv 2409.09951).

    a* = argmin_a E_{x, C} KL(whole model on x ‖ run(x; C, a)),   p ~ U(0, 1)

where C keeps each component with probability p. One constant vector per component, the same at all positions and for
all prompts, trained by Adam from the mean over the reference, in units of each component's root mean square there.
Because the circuits are drawn at random, the constants serve circuits of all sizes and are best for none in particular.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clearhead.circuits.curves.masks import rows_of_step
from clearhead.circuits.patching.metrics import divergence
from clearhead.circuits.patching.nodes import Nodes
from clearhead.data.tasks import TaskBatch
from clearhead.errors import NonFiniteError
from clearhead.runs import progress


def learn_constants(
    means: Nodes,
    reference: Sequence[TaskBatch],
    *,
    steps: int = 100,
    rate: float = 0.05,
    seed: int = 0,
    quiet: bool = False,
) -> dict[str, Tensor]:
    """Site → constants [1, 1, h, dv] or [1, 1, d], from the mean values of `means` on. Raises `NonFiniteError`."""
    generator = torch.Generator().manual_seed(seed)
    opened = means.open(rows_of_step(reference, 0))
    start = {site: value.clone() for site, value in opened.values.items()}
    size = {
        site: value.square().mean((0, 1), keepdim=True).sqrt()
        for site, value in means.model.run(opened.rows.clean, read=list(start)).items()
    }
    shifts = {site: torch.zeros_like(value, requires_grad=True) for site, value in start.items()}
    optimiser = torch.optim.Adam(shifts.values(), lr=rate)
    n = len(means.components)
    with progress("learning constants", steps, "steps", quiet=quiet) as advance:
        for step in range(steps):
            opened = means.open(rows_of_step(reference, step))
            b = len(opened.rows.items)
            keep = torch.rand(b, n, generator=generator) < torch.rand(b, 1, generator=generator)
            values = {site: start[site] + shifts[site] * size[site] for site in start}
            logits = means.run_masked(
                keep.to(means.model.device),
                torch.arange(b, device=means.model.device),
                replace(opened, values=values),
                grad=True,
            )
            loss = divergence(logits, opened.full.logits).mean().cpu()
            if not bool(loss.isfinite()):
                raise NonFiniteError(f"loss of the optimal constants at step {step}")
            optimiser.zero_grad()
            gradients = torch.autograd.grad(loss, list(shifts.values()), allow_unused=True)
            for shift, gradient in zip(shifts.values(), gradients, strict=True):
                shift.grad = gradient
            optimiser.step()
            advance(1)
    return {site: (start[site] + shifts[site] * size[site]).detach() for site in start}
