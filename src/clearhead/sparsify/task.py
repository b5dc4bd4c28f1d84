"""What is trained in sparse post-training, and with which loss: gates, adapters, the dense base, the Lagrangian.

    min_θ max_λ   E(θ) + λ (C(θ) − τ)          E: price of the open edges, C: what the constraint measures

(arXiv 2512.05865 with GECO, geco.py). C is measured on the batch itself. "paired" is the loss minus the dense base's on
the same tokens: its noise is a small part of the loss' own, and τ is then the tolerance. Gates are sampled, and hard in
the last steps, so that what is trained is what is kept. With LoRA the base is the model itself, adapters off and gates
open; without, a frozen copy.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from clearhead.config import Sparsify
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.gates import Gates, install
from clearhead.ops.hash_rng import mix
from clearhead.sparsify.adapters import add_adapters, without_adapters
from clearhead.sparsify.best import Best
from clearhead.sparsify.geco import Geco
from clearhead.sparsify.objective import cross_entropy, distillation, edge_penalty, edge_shares
from clearhead.training.optim import RateSchedule

TILE = 64
"""Queries and keys of a tile whose emptiness is priced, as kernels take them."""
SINK = -6.0
"""Where κ begins: beside the scores of an open model it has no weight."""


@dataclass
class Prepared:
    """A model ready to be trained: gates installed, parameters chosen, base at hand."""

    model: Model
    gates: Gates
    trained: list[nn.Parameter]
    base: Callable[[Int64[Tensor, "b t"]], Float[Tensor, "b t v"]]
    """Logits of the dense base."""


def prepare(config: Sparsify, device: str) -> Prepared:
    """Load the model, install its gates (all open), and choose what is trained.

    Raises `ClearheadError` for a context that the model does not have and for attention that cannot be gated.
    """
    model = Model.load(config.model, device=device)
    if model.n_ctx is not None and config.context > model.n_ctx:
        raise ClearheadError(
            f"--context {config.context}: {config.model} reads at most {model.n_ctx} tokens; give less"
        )
    hf: PreTrainedModel = model.hf
    twin = copy.deepcopy(hf).eval().requires_grad_(False) if config.lora is None and wants_base(config) else None
    gates = install(
        model,
        bias=config.gate_bias or 0.0,
        sink=SINK if config.sink else None,
        settings={"base": config.model},
    )
    if config.lora is None:
        trained = list(hf.parameters())
    else:
        trained = add_adapters(hf, config.lora, config.seed)
        for parameter in gates.parameters():
            parameter.requires_grad_(True)
        trained += gates.parameters()
    if config.control != "none":  # its gates are not learned, and parameters out of the graph stop several processes
        for parameter in gates.parameters():
            parameter.requires_grad_(False)
        trained = [parameter for parameter in trained if parameter.requires_grad]
    hf.eval()  # dropout is off throughout: the base has none when it is measured

    @torch.no_grad()
    def base(tokens: Int64[Tensor, "b t"]) -> Float[Tensor, "b t v"]:
        if twin is not None:
            return twin(input_ids=tokens, use_cache=False).logits
        with gates.opened(), without_adapters(hf):
            return hf(input_ids=tokens, use_cache=False).logits

    return Prepared(model, gates, trained, base)


def wants_base(config: Sparsify) -> bool:
    """Whether a step needs the logits of the dense base."""
    return config.distill > 0 or (config.control == "none" and config.constraint != "ce")


class Sparsification:
    """Post-training: the loop's `Task`."""

    def __init__(
        self,
        prepared: Prepared,
        config: Sparsify,
        geco: Geco,
        best: Best,
        rates: dict[int, Tensor] | None,
        rank: int = 0,
        world: int = 1,
        *,
        scored_from: int = 0,
    ):
        self.module: nn.Module = prepared.model.hf
        self.prepared, self.config, self.geco, self.best, self.rates = prepared, config, geco, best, rates
        self.rank, self.world = rank, world
        self.scored_from = scored_from
        """The first position whose prediction counts."""
        self.soft_steps = config.steps() - round(config.settle_share * config.steps())
        self.measured = torch.zeros(())
        self.step = 0

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """What is trained; the gates faster, as one number moves all edges of a head."""
        gates = {id(parameter) for parameter in self.prepared.gates.parameters()}
        rest = [parameter for parameter in self.prepared.trained if id(parameter) not in gates]
        if self.config.control != "none":
            return [(rest, 1.0)]
        return [(rest, 1.0), (self.prepared.gates.parameters(), self.config.gate_lr_factor)]

    def loss(
        self,
        forward: Callable[..., Any],
        batch: Int64[Tensor, "b t"],
        schedule: RateSchedule,  # noqa: ARG002 - the multiplier follows the loss, not a schedule
        step: int,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The price of the open edges and the constrained loss of one batch."""
        config, self.step = self.config, step
        start = self.scored_from
        teacher = self.prepared.base(batch)[:, start:] if wants_base(config) else None
        with self._drawn(step, len(batch)) as tally:
            logits = forward(input_ids=batch, use_cache=False).logits[:, start:]
        ce = cross_entropy(logits, batch[:, start:])
        metrics = {"ce": ce.detach()}
        extra = torch.zeros((), device=ce.device)
        divergence = None
        if teacher is not None and (config.distill or config.constraint == "kl"):
            divergence = distillation(logits, teacher)
            extra = config.distill * divergence
            metrics["kl"] = divergence.detach()
        if config.control != "none":
            return ce + extra, metrics
        if config.constraint == "kl":
            assert divergence is not None
            value = divergence
        elif config.constraint == "paired":
            assert teacher is not None
            value = ce - cross_entropy(teacher, batch[:, start:])
        else:
            value = ce
        self.measured = value.detach()
        shares = edge_shares(tally, config.length_weight / config.context)
        edges = edge_penalty(shares, "mean" if config.penalty == "tiles" else config.penalty, config.budget)
        if config.penalty == "tiles":  # a tile full of edges has no slope of its own, so their number is priced too
            edges = (
                edges + torch.stack([layer.tiles.mean() for layer in tally.values() if layer.tiles is not None]).mean()
            )
        lagrangian = self.geco.weigh(edges, value)
        opened = torch.stack([layer.opened.sum() for layer in tally.values()]).sum()
        visible = torch.stack([layer.visible.expand(len(batch), -1).sum() for layer in tally.values()]).sum()
        metrics |= {
            "violation": value.detach() - self.geco.target,
            "edges": shares.detach().mean(),
            "open_edges": opened / (visible * shares.shape[1]),
            "leak": torch.stack([layer.leak.mean() for layer in tally.values()]).mean(),
            "multiplier": torch.tensor(self.geco.multiplier),
        }
        return lagrangian + extra / (1 + self.geco.multiplier), metrics

    def _drawn(self, step: int, rows: int):
        """The gates of one step: drawn from (seed, step), hard at the end, or those of a control."""
        gates, config = self.prepared.gates, self.config
        if config.control == "dense":
            return gates.opened()
        if config.control == "random":
            assert self.rates is not None
            return gates.random(self.rates)
        slope = config.length_weight / config.context
        tile = TILE if config.penalty == "tiles" else None
        if step >= self.soft_steps:
            return gates.hard(slope=slope, tile=tile)
        seed = int(mix(config.seed, step)[0] >> 1)
        estimator = "exact" if config.exact else "straight_through"
        return gates.sampled(seed, self.rank * rows, estimator=estimator, slope=slope, tile=tile)

    def finish_step(self, accelerator: Accelerator) -> None:
        """The multiplier's step, from what all processes measured."""
        if self.config.control == "none":
            value = torch.as_tensor(accelerator.reduce(self.measured, reduction="mean"))
            self.geco.update(float(value), self.step)

    def state(self) -> dict[str, Tensor]:
        """Multiplier, best state so far, and how many processes share the batch."""
        return self.geco.state() | self.best.state() | {"world": torch.tensor(self.world)}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restores what `state` returned. Raises `ClearheadError` for another number of processes."""
        if int(tensors["world"]) != self.world:
            raise ClearheadError(
                f"this run was trained by {int(tensors['world'])} processes and {self.world} would continue it, with "
                "other gates; start the same number, or choose another --out"
            )
        self.geco.load_state(tensors)
        self.best.load_state(tensors)
