"""Do the chosen edges matter? The loss when other edges are open, as many as the gates open.

    random             by lot, each head's own share of all visible pairs, without a look at the text
    top_in_row         in every row as many edges as the gates open there, those of the largest scores
    renormalised       the same, with the kept weights scaled to sum to 1 (the usual top-k attention)
    top_probability    in every head and sequence as many edges as the gates open there, those of the largest P_ij

Each is an edit of the pattern of a dense forward: of the base, or of the sparse model's own weights with its gates
opened. Kept edges carry what the gate would let them carry: P_ij where all keys are in the denominator, with a sink a
softmax over kept edges and sink. In the sparse model the gates are `top_in_row` by construction, as they cut every row
of a head at one score: that control says something about the base alone, and `top_probability` takes its place.

The patterns of one layer are in memory at a time. Training controls (a dense fine-tuning, training under random edges)
are runs of their own.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.gates import Gates
from clearhead.model.run import Edit, Run
from clearhead.ops.gated import Noise, noise_keys, uniforms
from clearhead.runs import progress
from clearhead.sparsify.measures import losses

Choice = Callable[[int, Float[Tensor, "b h t t"]], Bool[Tensor, "b h t t"]]
"""The edges of a layer that are kept, given its pattern."""
Opened = dict[int, Int64[Tensor, "b h t"]]
"""How many edges the gates open, by layer."""


def random_edges(rates: dict[int, Float[Tensor, " h"]], seed: int, first: int = 0) -> Choice:
    """Every edge open with its head's rate, independently; `first` is the number of the first sequence."""

    def choose(layer: int, pattern: Tensor) -> Tensor:
        b, h, t, _ = pattern.shape
        position = torch.arange(t, device=pattern.device)
        drawn = uniforms(noise_keys(Noise(seed, layer, first), b, h, pattern.device), position, position)
        return drawn < rates[layer].to(drawn)[:, None, None]

    return choose


def top_in_row(opened: Opened) -> Choice:
    """The largest weights of each row, as many as the row has open edges."""

    def choose(layer: int, pattern: Tensor) -> Tensor:
        return _largest(pattern, opened[layer])

    return choose


def top_probability(opened: Opened) -> Choice:
    """The largest weights of each head in each sequence, as many as the head has open edges there."""

    def choose(layer: int, pattern: Tensor) -> Tensor:
        return _largest(pattern.flatten(2), opened[layer].sum(-1)).view_as(pattern)

    return choose


def keep_edges(choose: Choice, layers: list[int], gates: Gates | None, *, renormalise: bool = False) -> dict[str, Edit]:
    """Edits for `Model.run` under which only the chosen edges carry anything.

    `gates`: those of the model that runs, opened; their sinks stay in the denominator.
    """
    totals: dict[int, Tensor] = {}

    def see_scores(value: Tensor, run: Run) -> Tensor:
        assert run.site is not None and run.site.layer is not None
        totals[run.site.layer] = value.float().logsumexp(-1, keepdim=True)
        return value

    def keep(value: Tensor, run: Run) -> Tensor:
        assert run.site is not None and run.site.layer is not None
        layer = run.site.layer
        kept = value * choose(layer, value)
        sink = gates.layers[layer].sink if gates is not None else None
        if sink is not None:
            rest = (sink.float()[:, None, None] - totals.pop(layer)).exp()
            return kept / (rest + kept.sum(-1, keepdim=True))
        if renormalise:
            mass = kept.sum(-1, keepdim=True)
            return kept / mass.masked_fill(mass == 0, 1.0)
        return kept

    edits: dict[str, Edit] = {f"pattern.{layer}": keep for layer in layers}
    if gates is not None and gates.has_sink:
        edits |= {f"scores.{layer}": see_scores for layer in layers}
    return edits


@torch.no_grad()
def measure_controls(
    model: Model,
    base: Model | None,
    tokens: Int64[Tensor, "n t"],
    rates: Float64[Tensor, "l h"],
    seeds: list[int],
    *,
    batch: int = 1,
) -> dict[str, float | None]:
    """Mean losses (nats) on the same tokens: hard gates, and each control; None for those of a base that is not given.

    `rates`: the share of open edges by layer and head for the random edges. Raises `ClearheadError` for a model
    without gates.
    """
    gates = model.gates
    if gates is None:
        raise ClearheadError(f"{model.name} has no edge gates to compare other edges with")
    layers = list(gates.layers)
    rate_of = dict(zip(layers, rates, strict=True))
    sums: dict[str, float] = {}
    passes = 2 + len(seeds) + (0 if base is None else 3 + len(seeds))

    def add(name: str, logits: Tensor, part: Tensor, weight: float = 1.0) -> None:
        sums[name] = sums.get(name, 0.0) + weight * float(losses(logits, part).double().sum())
        advance(part.numel())

    def measure(name: str, runner: Model, part: Tensor, edits: dict[str, Edit], weight: float = 1.0) -> None:
        add(name, runner.run(part, read=["logits"], edit=edits).logits, part, weight)

    with model.evaluating(), progress("controls", tokens.numel() * passes) as advance:
        for first in range(0, len(tokens), batch):
            part = tokens[first : first + batch].to(model.device)
            with gates.hard() as tally:
                add("hard", model.hf(input_ids=part, use_cache=False).logits, part)
            opened = {layer: tally[layer].opened for layer in layers}
            with gates.opened():
                for seed in seeds:
                    edits = keep_edges(random_edges(rate_of, seed, first), layers, gates)
                    measure("random_sparse", model, part, edits, 1 / len(seeds))
                measure("top_probability_sparse", model, part, keep_edges(top_probability(opened), layers, gates))
            if base is None:
                continue
            for seed in seeds:
                edits = keep_edges(random_edges(rate_of, seed, first), layers, None)
                measure("random_base", base, part, edits, 1 / len(seeds))
            by_row = top_in_row(opened)
            measure("top_in_row_base", base, part, keep_edges(by_row, layers, None))
            renormalised = keep_edges(by_row, layers, None, renormalise=True)
            measure("top_in_row_base_renormalised", base, part, renormalised)
            measure("top_probability_base", base, part, keep_edges(top_probability(opened), layers, None))
    count = tokens.shape[0] * (tokens.shape[1] - 1)
    names = ("hard", "random_sparse", "top_probability_sparse", "random_base", "top_in_row_base")
    names += ("top_in_row_base_renormalised", "top_probability_base")
    return {name: sums[name] / count if name in sums else None for name in names}


def _largest(values: Float[Tensor, "*b n"], counts: Int64[Tensor, "*b"]) -> Bool[Tensor, "*b n"]:
    """The `counts` largest entries along the last axis, exactly as many also where entries are equal."""
    most = int(counts.max())
    order = values.topk(most, dim=-1).indices
    among = torch.arange(most, device=values.device) < counts[..., None]
    return torch.zeros_like(values, dtype=torch.bool).scatter(-1, order, among)
