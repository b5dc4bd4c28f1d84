"""How faithful a dictionary is: fraction of variance unexplained, sparsity, dead units, the model's loss through it.

    FVU = sum ||y - y_hat||^2 / sum ||y - y_bar||^2       y_bar per dimension, over the evaluated tokens
    CE recovered = (CE_ablated - CE_replaced) / (CE_ablated - CE_clean)

One definition each, used everywhere, for Lorsa, transcoders and SAEs; evaluate_clt.py builds on it for cross-layer
transcoders. Position 0 of a block is excluded and reported apart. When a site is replaced or ablated its value at
position 0 stays the model's own, and losses are means over predictions from position 1 on. A unit (a head of a Lorsa, a
feature) is dead when it is active on none of the evaluated tokens; how many those were is part of the result. The
metrics of units are called dead_heads and over_dense_heads for every kind.

Tokens with massive outputs (dictionary_task.py), which training leaves out, are counted in all of this; where there are
any, one of them outweighs thousands of others in FVU. Then `massive_tokens` says how many, and `fvu_ordinary` is the
FVU of all others.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.data.harvest import ATTENTION, LiveActivations
from clearhead.data.text import TokenBlocks
from clearhead.model.access import Model
from clearhead.model.run import Run, keep_first
from clearhead.runs import progress
from clearhead.training.dictionary_task import ordinary

OVER_DENSE = 0.1  # a unit active on more than a tenth of all tokens is hardly one unit of meaning

Metrics = dict[str, Any]


class FidelityMeter:
    """Streaming sums for FVU, explained variance, error by position, L0 and firing counts; float64 throughout."""

    def __init__(self, d_model: int, n_units: int, context: int):
        self.sum_y = torch.zeros(d_model, dtype=torch.float64)
        self.sum_e = torch.zeros(d_model, dtype=torch.float64)
        self.square_y = torch.zeros(context, dtype=torch.float64)
        self.square_e = torch.zeros(context, dtype=torch.float64)
        self.blocks = 0
        self.counts = torch.zeros(n_units, dtype=torch.int64)
        self.active = 0
        self.sum_ordinary = torch.zeros(d_model, dtype=torch.float64)
        self.ordinary = self.square_ordinary = self.error_ordinary = 0.0

    def add(self, y: Float[Tensor, "b t d"], y_hat: Float[Tensor, "b t d"], values: Tensor, units: Tensor) -> None:
        """Take in one batch: targets, predictions and codes of the same tokens."""
        y, e = y.double().cpu(), (y - y_hat).double().cpu()
        self.sum_y += y[:, 1:].sum((0, 1))
        self.sum_e += e[:, 1:].sum((0, 1))
        self.square_y += y.square().sum((0, 2))
        self.square_e += e.square().sum((0, 2))
        self.blocks += len(y)
        counts = ordinary(y[:, 1:])
        self.ordinary += int(counts.sum())
        self.sum_ordinary += y[:, 1:][counts].sum(0)
        self.square_ordinary += float(y[:, 1:][counts].square().sum())
        self.error_ordinary += float(e[:, 1:][counts].square().sum())
        fired = units[:, 1:][values[:, 1:] != 0].cpu()
        self.counts += torch.bincount(fired, minlength=len(self.counts))
        self.active += len(fired)

    @property
    def tokens(self) -> int:
        """Tokens that count: all but each block's first."""
        return self.blocks * (len(self.square_y) - 1)

    @property
    def mean_y(self) -> Float[Tensor, " d"]:
        """Mean target over the tokens that count."""
        return self.sum_y / self.tokens

    def result(self) -> Metrics:
        """FVU and its companions."""
        n = self.tokens
        total = float(self.square_y[1:].sum() - self.sum_y.square().sum() / n)
        error = float(self.square_e[1:].sum())
        rate = self.counts / n
        relative = (self.square_e / self.square_y).sqrt()
        spread = self.square_ordinary - float(self.sum_ordinary.square().sum()) / max(self.ordinary, 1)
        apart = {"massive_tokens": int(n - self.ordinary), "fvu_ordinary": self.error_ordinary / spread}
        return {
            "tokens": n,
            "fvu": error / total,
            **(apart if self.ordinary < n else {}),
            "explained_variance": 1 - (error - float(self.sum_e.square().sum()) / n) / total,
            "relative_error_position_0": float(relative[0]),
            "l0": self.active / n,
            "dead_heads": int((self.counts == 0).sum()),
            "dead_share": float((self.counts == 0).double().mean()),
            "over_dense_heads": int((rate > OVER_DENSE).sum()),
            "over_dense_share": float((rate > OVER_DENSE).double().mean()),
            "relative_error_by_position": [round(float(value), 6) for value in relative],
        }


@torch.no_grad()
def measure_fidelity(module: Any, source: Any, batch_blocks: int = 8) -> tuple[Metrics, Float[Tensor, " d"]]:
    """Metrics of a dictionary over all blocks of an activation source, and the mean target (for mean ablation)."""
    meter = FidelityMeter(module.decoder_rows(torch.tensor([0])).shape[-1], module.n_units, source.context)
    with progress("evaluate", len(source) * source.context) as advance:
        for chosen in torch.arange(len(source)).split(batch_blocks):
            batch = source.batch(chosen)
            y, _, codes = module(batch.x)
            meter.add(batch.y, y, *codes)
            advance(len(chosen) * source.context)
    return meter.result(), meter.mean_y


def measure_downstream(
    module: Any,
    model: Model,
    layer: int,
    tokens: Int[Tensor, "b t"],
    mean_y: Float[Tensor, " d"],
    batch_blocks: int = 8,
    sites: tuple[str, str] = ATTENTION,
) -> Metrics:
    """Next-token loss (nats) with the output site clean, replaced, zeroed and set to its mean; KL(clean || replaced).

    `sites` are those that the dictionary reads and imitates, without their layer; for an SAE they are the same.
    """
    reads, writes = (f"{site}.{layer}" for site in sites)
    dtype = next(module.parameters()).dtype

    def replace(y: Tensor, run: Run) -> Tensor:
        x = y if reads == writes else run[reads]
        return module(x.to(dtype)).y.to(y.dtype)

    return downstream_losses(model, tokens, {writes: replace}, {writes: mean_y}, [reads], batch_blocks)


@torch.no_grad()
def downstream_losses(
    model: Model,
    tokens: Int[Tensor, "b t"],
    replacements: dict[str, Any],
    means: dict[str, Float[Tensor, " d"]],
    reads: list[str],
    batch_blocks: int = 8,
) -> Metrics:
    """Losses with sites clean, all edited by `replacements`, all zero and all at their `means`.

    replacements: for every site a function of (value, run), where `run` holds the sites of `reads` passed so far.
    """
    constant = {site: mean.to(device=model.device, dtype=model.dtype) for site, mean in means.items()}
    variants = {
        "replaced": replacements,
        "zero": {site: lambda y, _: torch.zeros_like(y) for site in means},
        "mean": {site: lambda y, _, mean=mean: mean.expand_as(y) for site, mean in constant.items()},
    }
    sums = dict.fromkeys(("clean", *variants, "kl"), 0.0)
    count = 0
    with progress("downstream loss", tokens.numel() * (1 + len(variants))) as advance:
        for batch in tokens.split(batch_blocks):
            gold = batch[:, 2:].to(model.device)
            count += gold.numel()
            clean = model.run(batch, read=["logits"])["logits"][:, 1:-1]
            sums["clean"] += _cross_entropy(clean, gold)
            advance(batch.numel())
            for name, edits in variants.items():
                kept = {site: keep_first(edit) for site, edit in edits.items()}
                run = model.run(batch, read=[*reads, "logits"], edit=kept)
                changed = run["logits"][:, 1:-1]
                sums[name] += _cross_entropy(changed, gold)
                if name == "replaced":
                    sums["kl"] += _divergence(clean, changed)
                advance(batch.numel())
    ce = {name: value / count for name, value in sums.items()}
    return {
        "downstream_tokens": count,
        **{f"ce_{name}": ce[name] for name in ("clean", "replaced", "zero", "mean")},
        "kl_replaced": ce["kl"],
        "ce_recovered": _recovered(ce["zero"], ce["replaced"], ce["clean"]),
        "ce_recovered_over_mean": _recovered(ce["mean"], ce["replaced"], ce["clean"]),
    }


def _cross_entropy(logits: Float[Tensor, "b t v"], gold: Int[Tensor, "b t"]) -> float:
    """Sum of next-token losses. Block by block, as a copy of all logits in float32 is the largest tensor in sight."""
    parts = zip(logits, gold, strict=True)
    return sum(float(F.cross_entropy(row.float(), target, reduction="sum")) for row, target in parts)


def _divergence(clean: Float[Tensor, "b t v"], changed: Float[Tensor, "b t v"]) -> float:
    """Sum over positions of KL(clean || changed)."""
    total = 0.0
    for p, q in zip(clean, changed, strict=True):
        log_p, log_q = F.log_softmax(p.float(), -1), F.log_softmax(q.float(), -1)
        total += float(F.kl_div(log_q, log_p, reduction="sum", log_target=True))
    return total


def _recovered(ablated: float, replaced: float, clean: float) -> float | None:
    """Share of the ablation's damage that the replacement avoids; None where ablation does no damage to measure."""
    damage = ablated - clean
    return (ablated - replaced) / damage if math.isfinite(damage) and damage > 0 else None


def evaluate(
    module: Any,
    model: Model,
    layer: int,
    blocks: TokenBlocks,
    *,
    sites: tuple[str, str] = ATTENTION,
    downstream_tokens: int = 20_000,
    batch_blocks: int = 8,
) -> Metrics:
    """Fidelity over all of `blocks` and downstream loss over the first `downstream_tokens` of them.

    module: a Lorsa, transcoder or SAE; `sites` are those that it reads and imitates, without their layer.
    """
    was_training = module.training
    module.eval()
    source = LiveActivations(model, blocks, layer, sites=sites)
    metrics, mean_y = measure_fidelity(module, source, batch_blocks)
    metrics = {"layer": layer, **metrics}
    if downstream_tokens:
        tokens = first_blocks(blocks, downstream_tokens)
        metrics |= measure_downstream(module, model, layer, tokens, mean_y, batch_blocks, sites)
    module.train(was_training)
    return metrics


def first_blocks(blocks: TokenBlocks, n_tokens: int) -> Int[Tensor, "b t"]:
    """The first blocks that hold about `n_tokens` tokens, at least one."""
    return blocks.tokens[: max(1, round(n_tokens / blocks.context))]
