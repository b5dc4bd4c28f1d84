"""What it means to train a dictionary: targets on one scale, the loss, AuxK, sparsity terms, unit decoder rows.

Inputs and targets are multiplied by sqrt(d) / mean norm of the data set (one number per layer), so that learning rates
carry over between layers; the factors are folded into the weights at the end. With a the activations, h the
pre-activations, theta a jumprelu's threshold and |w| the norm of what a unit writes, the loss is

    L = mean over tokens of || f_out y - y_hat(f_in x) ||^2  +  aux_weight * L_aux  +  S
    S = 0                                                                             topk, batchtopk
        lambda_s sum_n |w_n| a_n                                                      relu
        lambda_s sum_n tanh(c |w_n| a_n) + lambda_p sum_n max(0, theta_n - h_n) |w_n| jumprelu

(the last from Anthropic's Circuits Updates of January 2025), lambda_s rising linearly from 0 over the whole training.
Position 0 of every block is left out: it is an outlier in most models. So are tokens whose target is `MASSIVE` times as
long as that of the batch's median token: a few models write such outputs at some separators, hundreds of times the
length of all others, and squared errors, scales and FVU would be about these tokens alone.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.data.harvest import Activations
from clearhead.errors import ClearheadError
from clearhead.training.dead import DeadUnits, aux_loss, fired
from clearhead.training.optim import Schedule

THRESHOLD_MEMORY = 0.99  # of the running batchtopk threshold; the average over the last hundred steps
TANH_SCALE = (
    4.0  # c: a unit that changes the output by a quarter of a typical entry is hardly cheaper than a strong one
)
MASSIVE = 20.0
"""Lengths of the median token from which a token is left out."""


@dataclasses.dataclass(frozen=True)
class Scales:
    """Factors that bring inputs and targets to mean norm sqrt(d); tensors [l, 1] where they come in layers."""

    input: Any
    output: Any


def ordinary(y: Float[Tensor, "b t *l d"]) -> Bool[Tensor, "b t *l"]:
    """Which tokens are not massive, by the length of y; all where the median token is zero."""
    norm = y.norm(dim=-1)
    median = norm.flatten(0, 1).median(0).values
    return (norm <= MASSIVE * median) | (median == 0)


def measure_scales(x: Float[Tensor, "b t *l d"], y: Float[Tensor, "b t *l d"]) -> Scales:
    """Factors from a sample of activations, position 0 and massive tokens excluded.

    Raises `ClearheadError` for an output that is zero everywhere.
    """
    factors = []
    for part in (x[:, 1:], y[:, 1:]):
        counts = ordinary(part)
        norm = (part.norm(dim=-1) * counts).mean((0, 1)) / counts.to(part).mean((0, 1))
        if not bool((norm > 0).all()):
            raise ClearheadError("the sampled activations are zero everywhere, so there is nothing to imitate")
        factors.append(math.sqrt(part.shape[-1]) / (norm[:, None] if norm.ndim else float(norm)))
    return Scales(*factors)


class Coder(Protocol):
    """What a module offers besides its forward pass, which returns (y, pre, codes)."""

    config: Any

    @property
    def n_units(self) -> int:
        """Number of units: heads of a Lorsa, features."""
        ...

    def decoder_rows(self, units: Int[Tensor, " m"]) -> Float[Tensor, "m e"]:
        """What these units write, all layers concatenated."""
        ...

    def decoder_norms(self) -> Float[Tensor, " n"]:
        """Norm of what each unit writes."""
        ...

    def normalise_decoder(self) -> None:
        """Bring those norms to 1."""
        ...


class DictionaryTask:
    """Training one dictionary: the loop's `Task`."""

    def __init__(
        self,
        module: Any,
        scales: Scales,
        *,
        aux_k: int,
        aux_weight: float = 1.0,
        dead_after_tokens: int,
        sparsity: float = 0.0,
        pre_weight: float = 0.0,
    ):
        self.module: nn.Module = module
        self.coder: Any = module
        self.scales = scales
        self.aux_k, self.aux_weight = aux_k, aux_weight
        self.sparsity, self.pre_weight = sparsity, pre_weight
        self.dead = DeadUnits(module.n_units, dead_after_tokens, next(module.parameters()).device)
        self._fired: Tensor | None = None
        self._tokens = 0

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """All parameters at one rate."""
        return [(list(self.module.parameters()), 1.0)]

    def loss(
        self, forward: Callable[..., Any], batch: Activations, schedule: Schedule, step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of one batch (a mean over its tokens from position 1 on, massive ones left out) and what to log.

        `batch_fvu` takes the batch's own mean and variance, and the current k: it follows the training and is no
        substitute for the FVU that `training.evaluate` measures on held-out text.
        """
        y, pre, codes = forward(batch.x * self.scales.input, schedule.active(step))
        target = (batch.y * self.scales.output)[:, 1:].flatten(2)
        counts = ordinary(target)
        whole = bool(counts.all())  # choosing rows by a mask is slow, and rarely needed
        parts = target, y[:, 1:].flatten(2), *(part[:, 1:] for part in (*codes, pre))
        target, y, values, units, pre = (part.flatten(0, 1) if whole else part[counts] for part in parts)
        residual = target - y
        error = residual.square().sum(-1).mean()
        dead = self.dead.units
        aux = aux_loss(residual, pre, self.coder.decoder_rows(dead), dead, self.aux_k)
        loss = error + self.aux_weight * aux + self._penalty(pre, values, (step + 1) / schedule.steps)
        with torch.no_grad():
            self._fired, self._tokens = fired(values, units, self.coder.n_units), len(values)
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

    def _penalty(self, pre: Float[Tensor, "r n"], values: Tensor, progress: float) -> Tensor | float:
        """The sparsity terms S, `progress` of the way through the training."""
        kind = self.coder.config.activation
        if kind not in ("relu", "jumprelu"):
            return 0.0
        norms = self.coder.decoder_norms()
        if kind == "relu":
            return self.sparsity * progress * (values * norms).sum(-1).mean()
        penalty = self.sparsity * progress * torch.tanh(TANH_SCALE * norms * values).sum(-1).mean()
        below = (self.coder.log_threshold.flatten().exp() - pre).relu()
        return penalty + self.pre_weight * (below * norms).sum(-1).mean()

    def _note_threshold(self, values: Tensor) -> None:
        """Follow the smallest value that batchtopk keeps; it is the threshold that `encode` uses afterwards."""
        if self.coder.config.activation != "batchtopk":
            return
        smallest = values[values > 0].min() if bool((values > 0).any()) else values.new_zeros(())
        old = self.coder.threshold
        old.copy_(smallest if float(old) == 0 else THRESHOLD_MEMORY * old + (1 - THRESHOLD_MEMORY) * smallest)

    def finish_step(self, accelerator: Accelerator) -> None:
        """Keep decoder rows at norm 1 (the function is unchanged) and count silent units over all processes."""
        if self.coder.config.unit_norm:
            self.coder.normalise_decoder()
        if self._fired is None:
            return
        counted = accelerator.reduce(self._fired.int(), reduction="sum")
        self.dead.update(counted > 0, self._tokens * accelerator.num_processes)  # pyright: ignore[reportOperatorIssue]

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs besides weights and moments."""
        scales = [torch.as_tensor(part, dtype=torch.float64) for part in (self.scales.input, self.scales.output)]
        return {"silent_for": self.dead.silent_for, "scales": torch.stack(scales)}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.dead.silent_for.copy_(tensors["silent_for"])
        input_scale, output_scale = tensors["scales"]
        if input_scale.ndim:
            device = self.dead.silent_for.device
            self.scales = Scales(input_scale.float().to(device), output_scale.float().to(device))
        else:
            self.scales = Scales(float(input_scale), float(output_scale))
