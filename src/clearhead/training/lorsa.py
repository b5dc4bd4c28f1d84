"""What it means to train a Lorsa: targets on one scale, the loss, AuxK, and unit decoder rows.

Inputs and targets are multiplied by sqrt(d) / mean norm of the data set (one number each), so that learning rates carry
over between layers; the factors are folded into the weights at the end. The loss is

    L = mean over tokens of || f_out y - y_hat(f_in x) ||^2  +  aux_weight * L_aux  (+ sparsity terms where they apply)

Position 0 of every block is left out: attention there sees one key, and its output is an outlier in most models.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.data.harvest import Activations
from clearhead.dictionaries.init import Sample
from clearhead.dictionaries.lorsa import Lorsa, LorsaOutput
from clearhead.errors import ClearheadError
from clearhead.ops.topk import active
from clearhead.training.dead import DeadHeads, aux_loss, fired
from clearhead.training.optim import Schedule

THRESHOLD_MEMORY = 0.99  # of the running batchtopk threshold; the average over the last hundred steps


@dataclasses.dataclass(frozen=True)
class Scales:
    """Factors that bring inputs and targets to mean norm sqrt(d)."""

    input: float
    output: float


def measure_scales(sample: Activations | Sample) -> Scales:
    """Factors from a sample of activations, position 0 excluded; refuses an output that is zero everywhere."""
    d = sample.x.shape[-1]
    norms = [float(part[:, 1:].norm(dim=-1).mean()) for part in (sample.x, sample.y)]
    if not all(norms):
        raise ClearheadError("the sampled activations are zero everywhere, so there is nothing to imitate")
    return Scales(*(math.sqrt(d) / norm for norm in norms))


class LorsaTask:
    """Training one Lorsa: the loop's `Task`."""

    def __init__(
        self,
        lorsa: Lorsa,
        scales: Scales,
        *,
        aux_k: int,
        aux_weight: float = 1.0,
        dead_after_tokens: int,
        qk_lr_factor: float = 1.0,
        l0_weight: float = 0.0,
    ):
        self.module: nn.Module = lorsa
        self.lorsa = lorsa
        self.scales = scales
        self.aux_k, self.aux_weight, self.l0_weight = aux_k, aux_weight, l0_weight
        self.qk_lr_factor = qk_lr_factor
        self.dead = DeadHeads(lorsa.n_heads, dead_after_tokens, lorsa.W_O.device)
        self._fired: Tensor | None = None
        self._tokens = 0

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Queries and keys apart from the rest: they start from the model's own and need smaller steps."""
        qk = ("W_Q", "W_K", "b_Q", "b_K", "q_gain", "k_gain", "sink")
        named = list(self.lorsa.named_parameters())
        return [
            ([p for name, p in named if name in qk], self.qk_lr_factor),
            ([p for name, p in named if name not in qk], 1.0),
        ]

    def loss(
        self, forward: Callable[..., Any], batch: Activations, schedule: Schedule, step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of one batch (a mean over its tokens from position 1 on) and what to log.

        `batch_fvu` takes the batch's own mean and variance, and the current k: it follows the training and is no
        substitute for the FVU that `training.evaluate` measures on held-out text.
        """
        output: LorsaOutput = forward(batch.x * self.scales.input, schedule.active(step))
        target = (batch.y * self.scales.output)[:, 1:].flatten(0, 1)
        residual = target - output.y[:, 1:].flatten(0, 1)
        error = residual.square().sum(-1).mean()
        values = output.codes.values[:, 1:].flatten(0, 1)
        heads = output.codes.heads[:, 1:].flatten(0, 1)
        pre = output.pre[:, 1:].flatten(0, 1)
        dead = self.dead.heads
        aux = aux_loss(residual, pre, self.lorsa.W_O, dead, self.aux_k)
        loss = error + self.aux_weight * aux + self._sparsity(pre, values)
        with torch.no_grad():
            self._fired, self._tokens = fired(values, heads, self.lorsa.n_heads), len(values)
            self._note_threshold(values)
            spread = (target - target.mean(0)).square().sum(-1).mean()
            metrics = {
                "batch_fvu": error.detach() / spread,
                "l0": (values != 0).sum(-1).float().mean(),
                "aux": aux.detach(),
                "dead": torch.tensor(float(len(dead))),
                "k": torch.tensor(float(schedule.active(step))),
            }
        return loss, metrics

    def _sparsity(self, pre: Float[Tensor, "r n"], values: Tensor) -> Tensor | float:
        """For jumprelu the expected L0 with its straight-through gradient, for relu the L1 norm; 0 for top-k kinds."""
        if not self.l0_weight:
            return 0.0
        if self.lorsa.config.activation == "jumprelu":
            gate = active(pre, self.lorsa.log_threshold, self.lorsa.config.bandwidth)
            return self.l0_weight * gate.sum(-1).mean()
        if self.lorsa.config.activation == "relu":
            return self.l0_weight * values.sum(-1).mean()
        return 0.0

    def _note_threshold(self, values: Tensor) -> None:
        """Follow the smallest value that batchtopk keeps; it is the threshold that `encode` uses afterwards."""
        if self.lorsa.config.activation != "batchtopk":
            return
        smallest = values[values > 0].min() if bool((values > 0).any()) else values.new_zeros(())
        old = self.lorsa.threshold
        old.copy_(smallest if float(old) == 0 else THRESHOLD_MEMORY * old + (1 - THRESHOLD_MEMORY) * smallest)

    def finish_step(self, accelerator: Accelerator) -> None:
        """Keep decoder rows at norm 1 (the function is unchanged) and count silent heads over all processes."""
        if self.lorsa.config.unit_norm:
            self.lorsa.normalise_decoder()
        if self._fired is None:
            return
        counted = accelerator.reduce(self._fired.int(), reduction="sum")
        self.dead.update(counted > 0, self._tokens * accelerator.num_processes)  # pyright: ignore[reportOperatorIssue]

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs besides weights and moments."""
        scales = torch.tensor([self.scales.input, self.scales.output], dtype=torch.float64)
        return {"silent_for": self.dead.silent_for, "scales": scales}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.dead.silent_for.copy_(tensors["silent_for"])
        self.scales = Scales(*(float(value) for value in tensors["scales"]))
