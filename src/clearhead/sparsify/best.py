"""What a post-training is judged by while it runs, and the state of it that is kept.

Every now and then the model is measured on held-out text as it will be used, with hard gates. The state that is kept is
the one with the smallest share of open edges among those whose loss is within the tolerance of the dense base's; while
there is none, the one with the smallest loss.
"""

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from clearhead.errors import NonFiniteError
from clearhead.model.access import Model
from clearhead.model.gates import Tally
from clearhead.sparsify.geco import Geco
from clearhead.training.repeats import next_token_losses

BATCH = 16


class Best:
    """The best state of the trained parameters so far, and what was measured at it."""

    def __init__(self, parameters: dict[str, nn.Parameter], target: float):
        self.parameters, self.target = parameters, target
        self.tensors: dict[str, Tensor] = {}
        self.step, self.ce, self.edges = -1, math.inf, math.inf

    @property
    def within(self) -> bool:
        """Whether the kept state is within the tolerance."""
        return self.ce <= self.target

    def offer(self, step: int, ce: float, edges: float) -> bool:
        """Keeps the present parameters where they are better than the kept ones; returns whether they were."""
        inside = ce <= self.target
        better = edges < self.edges if inside and self.within else inside or (not self.within and ce < self.ce)
        if better:
            self.step, self.ce, self.edges = step, ce, edges
            self.tensors = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        return better

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the kept state into the model."""
        for name, tensor in self.tensors.items():
            self.parameters[name].copy_(tensor)

    def state(self) -> dict[str, Tensor]:
        """The kept state for a checkpoint."""
        numbers = torch.tensor([self.step, self.ce, self.edges], dtype=torch.float64)
        return {"best": numbers} | {f"best.{name}": tensor for name, tensor in self.tensors.items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restores what `state` returned."""
        step, self.ce, self.edges = tensors["best"].tolist()
        self.step = int(step)
        kept = {name.removeprefix("best."): tensor for name, tensor in tensors.items() if name.startswith("best.")}
        self.tensors = {name: tensor.to(self.parameters[name].device) for name, tensor in kept.items()}


class Watch:
    """Measures the model as it will be used and offers it to `best`; the loop's observer, on every process alike."""

    def __init__(
        self,
        model: Model,
        drawn: Callable[[], AbstractContextManager[Tally]],
        held_out: Int64[Tensor, "n t"],
        best: Best,
        *,
        every: int,
        steps: int,
        geco: Geco | None,
    ):
        self.model, self.drawn, self.held_out, self.best = model, drawn, held_out, best
        self.every, self.steps, self.geco = every, steps, geco
        self.warned = False

    def __call__(self, done: int) -> dict[str, float]:
        """The measurement after `done` steps where it is due, else nothing."""
        if done % self.every and done != self.steps:
            return {}
        ce, shares = measure_hard(self.model, self.drawn, self.held_out)
        if not math.isfinite(ce):
            raise NonFiniteError(f"the loss on held-out text is {ce} after step {done}; lower --lr")
        edges = float(shares.mean().nan_to_num(1.0))  # a control by lot counts nothing
        self.best.offer(done, ce, edges)
        message = self.geco.unreachable() if self.geco is not None else None
        if message and not self.warned:
            self.warned = True
            sys.stderr.write(f"clearhead: {message}\n")
        return {"held_out_ce": ce, "held_out_edges": edges, "best_ce": self.best.ce, "best_edges": self.best.edges}


@torch.no_grad()
def measure_hard(
    model: Model, drawn: Callable[[], AbstractContextManager[Tally]], blocks: Int64[Tensor, "n t"]
) -> tuple[float, Float[Tensor, "l h"]]:
    """Mean next-token loss (nats) under the gates of `drawn`, and the share of open edges by layer and head.

    Shares are of visible pairs, over all blocks; NaN for gates that count nothing.
    """
    opened = torch.zeros(len(model.attention_layers), model.n_heads, dtype=torch.float64, device=model.device)
    pairs = torch.zeros(len(model.attention_layers), 1, dtype=torch.float64, device=model.device)
    total = 0.0
    with model.evaluating():
        for part in blocks.split(BATCH):
            with drawn() as tally:
                total += float(next_token_losses(model.hf, part.to(model.device)).double().sum())
            for row, layer in enumerate(tally.values()):
                opened[row] += layer.opened.double().sum((0, 2))
                pairs[row] += layer.visible.expand(len(part), -1).double().sum()
    ce = total / (blocks.shape[0] * (blocks.shape[1] - 1))
    return ce, opened / pairs


def edges_per_query(model: Model, shares: Float[Tensor, "l h"], context: int) -> float:
    """Open edges of a query, mean over the queries of a sequence, heads and layers, for shares of what is visible.

    What is visible follows from the layer's window alone.
    """
    position = torch.arange(1, context + 1, dtype=torch.float64)
    windows = [model.geometry(layer).window or context for layer in model.attention_layers]
    visible = torch.stack([position.clamp_max(window).mean() for window in windows])
    return float((shares.double().cpu().mean(1) * visible).mean())
