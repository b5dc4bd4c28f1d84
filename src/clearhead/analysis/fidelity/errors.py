"""The one pass over text that all reports of errors come from.

For each layer, the model's attn_in and attn_out (and the outputs of its heads) are read once, all dictionaries of the
layer predict attn_out from them, and their errors go to the meter of `training.evaluate`, which gives FVU and its
companions, and to the streaming sums of this package. What is compared:

    main        the Lorsa that the report is about
    partner     the dictionary whose error predicts main's, linearly (an SAE of the same size); may be none
    the others  of the layer: overlap of their error with main's (overlap.py)

Position 0 and massive tokens are left out of everything but FVU, which has its own words for them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.analysis.fidelity.heads import HeadShares
from clearhead.analysis.fidelity.linear import LinearShare, fold_of
from clearhead.analysis.fidelity.overlap import compare_errors
from clearhead.analysis.fidelity.tokens import describe_tokens, place_in_blocks, repeats
from clearhead.data.harvest import ATTENTION, refuse_non_finite
from clearhead.data.text import TokenBlocks
from clearhead.model.access import Model
from clearhead.runs import progress
from clearhead.training.dictionary_task import ordinary
from clearhead.training.evaluate import FidelityMeter, Metrics

LAYERS_AT_ONCE = 6
"""Layers that share a forward pass: memory against the time of the layers below."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One dictionary that predicts a layer's attn_out."""

    name: str
    layer: int
    module: Any
    reads: str
    """attn_in for a Lorsa or transcoder, attn_out for an SAE."""

    def predict(self, x: Float[Tensor, "b t d"], y: Float[Tensor, "b t d"]) -> Any:
        """What the module's forward pass returns for its site of the two."""
        given = y if self.reads == ATTENTION[1] else x
        return self.module(given.to(next(self.module.parameters()).dtype))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is to be said of one layer beyond FVU: the places of main and partner among its candidates."""

    main: int
    partner: int | None = None


class LayerErrors:
    """What one pass finds for one layer."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        model: Model,
        blocks: TokenBlocks,
        compared: Comparison | None = None,
        seed: int = 0,
    ):
        self.candidates, self.compared, self.seed = candidates, compared, seed
        self.n_blocks, self.done = len(blocks), 0
        self.meters = [FidelityMeter(model.d_model, c.module.n_units, blocks.context) for c in candidates]
        self.random = torch.Generator().manual_seed(seed)
        self.kept: dict[str, list[Tensor]] = {}
        if compared is not None:
            self.tracked = [compared.main] if compared.partner is None else [compared.main, compared.partner]
            self.heads = HeadShares(len(model.weights(candidates[0].layer).W_O), model.d_model, len(self.tracked))
            self.linear = {name: LinearShare(model.d_model, model.d_model) for name in ("input", "partner")}
            self.r_squared: dict[str, float | None] = {}

    def add(
        self,
        tokens: Int[Tensor, "b t"],
        x: Float[Tensor, "b t d"],
        y: Float[Tensor, "b t d"],
        heads: Float[Tensor, "b t h d"] | None,
    ) -> None:
        """Take in one batch; `heads` is needed where there is something to compare."""
        errors = []
        for candidate, meter in zip(self.candidates, self.meters, strict=True):
            predicted, _, codes = candidate.predict(x, y)
            meter.add(y, predicted, *codes)
            errors.append((y - predicted)[:, 1:])
        if heads is not None and self.compared is not None:
            self._compare(tokens, x[:, 1:], y[:, 1:], heads[:, 1:], torch.stack(errors))
        self.done += len(tokens)

    def _compare(self, tokens: Tensor, x: Tensor, y: Tensor, heads: Tensor, errors: Float[Tensor, "c b t d"]) -> None:
        assert self.compared is not None
        main, partner = self.compared.main, self.compared.partner
        counts = ordinary(y)
        here = counts.cpu()  # where tokens are
        at = torch.arange(self.done, self.done + len(y))[:, None].expand(here.shape)
        self._keep("massive_square", errors.double().square().sum(-1)[:, ~counts].T)
        other = torch.randperm(int(here.sum()), generator=self.random)
        flat = errors[:, counts]
        self._keep("token", tokens[:, 1:][here])
        self._keep("position", place_in_blocks(y.shape[1] + 1, len(y))[here])
        self._keep("repeated", repeats(tokens)[:, 1:][here])
        self._keep("block", at[here])
        self._keep("square_y", y[counts].double().square().sum(-1))
        self._keep("square", flat.double().square().sum(-1).T)
        self._keep("inner", torch.einsum("nd,cnd->nc", flat[main].double(), flat.double()))
        self._keep("shuffled_inner", torch.einsum("nd,cnd->nc", flat[main].double(), flat[:, other].double()))
        self._keep("shuffled_square", flat[:, other].double().square().sum(-1).T)
        self.heads.add(heads[counts], y[counts], flat[self.tracked], other)
        for place in range(len(y)):
            fold, chosen = fold_of(self.done + place, self.n_blocks), counts[place]
            error = errors[main, place, chosen]
            self.linear["input"].add(fold, x[place, chosen], error)
            if partner is not None:
                self.linear["partner"].add(fold, errors[partner, place, chosen], error)

    def _keep(self, name: str, values: Tensor) -> None:
        self.kept.setdefault(name, []).append(values.cpu())

    def close(self) -> None:
        """After the last batch: solve for the linear maps and let go of their moments, which are large."""
        if self.compared is not None:
            self.r_squared = {name: share.r_squared() for name, share in self.linear.items()}
            self.linear = {}

    def metrics(self) -> list[Metrics]:
        """FVU and its companions of every candidate, as `clearhead evaluate` gives them."""
        return [{"layer": c.layer, **meter.result()} for c, meter in zip(self.candidates, self.meters, strict=True)]

    def result(self, texts: Sequence[str], special: frozenset[int]) -> dict[str, Any]:
        """What the errors of the layer have in common and contain; `texts` are those of the vocabulary."""
        assert self.compared is not None
        main, partner = self.compared.main, self.compared.partner
        kept = {name: torch.cat(values).numpy() for name, values in self.kept.items()}
        overlap = []
        for place, candidate in enumerate(self.candidates):
            if place != main:
                numbers = compare_errors(
                    kept["square"][:, main],
                    kept["square"][:, place],
                    kept["inner"][:, place],
                    kept["shuffled_inner"][:, place],
                    kept["shuffled_square"][:, place],
                    kept["square_y"],
                    kept["block"],
                    self.seed,
                )
                overlap.append({"run": candidate.name, **numbers})
        massive = kept["massive_square"]
        whole = kept["square"].sum(0) + massive.sum(0)
        by_token = {
            self.candidates[place].name: describe_tokens(
                kept["token"],
                kept["position"],
                kept["repeated"],
                kept["square"][:, place],
                kept["square_y"],
                texts,
                special,
            )
            for place in self.tracked
        }
        heads = self.heads.result()
        return {
            "layer": self.candidates[main].layer,
            "main": self.candidates[main].name,
            "partner": None if partner is None else self.candidates[partner].name,
            "tokens": len(kept["token"]),
            "massive_tokens": len(massive),
            "massive_share_of_error": {
                self.candidates[place].name: float(massive[:, place].sum() / whole[place]) if whole[place] else 0.0
                for place in self.tracked
            },
            "overlap": overlap,
            "r2_from_input": self.r_squared["input"],
            "r2_from_partner": self.r_squared["partner"],
            "heads": {
                "output_share": heads["output_share"],
                **{self.candidates[place].name: own for place, own in zip(self.tracked, heads["errors"], strict=True)},
            },
            "by_token": by_token,
        }


@torch.no_grad()
def measure_errors(
    model: Model,
    blocks: TokenBlocks,
    candidates: Sequence[Candidate],
    compared: dict[int, Comparison] | None = None,
    *,
    batch_blocks: int = 8,
    seed: int = 0,
) -> dict[int, LayerErrors]:
    """One pass over `blocks` for the candidates of any layers; by layer, what it found.

    compared: for layers with more to say than FVU, the places of main and partner among the layer's candidates.
    Raises `NonFiniteError` for activations that are no numbers.
    """
    compared = compared or {}
    by_layer: dict[int, list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda c: c.layer):
        by_layer.setdefault(candidate.layer, []).append(candidate)
    found: dict[int, LayerErrors] = {}
    layers = list(by_layer)
    with progress("fidelity", blocks.tokens.numel() * len(layers)) as advance:
        for start in range(0, len(layers), LAYERS_AT_ONCE):
            some = layers[start : start + LAYERS_AT_ONCE]
            found |= {layer: LayerErrors(by_layer[layer], model, blocks, compared.get(layer), seed) for layer in some}
            sites = [f"{site}.{layer}" for layer in some for site in ATTENTION]
            sites += [f"head_out.{layer}" for layer in some if layer in compared]
            for chosen in torch.arange(len(blocks)).split(batch_blocks):
                tokens = blocks.tokens[chosen]
                run = model.run(tokens, read=sites)
                for layer in some:
                    x, y = (run[f"{site}.{layer}"].float() for site in ATTENTION)
                    refuse_non_finite(y, f"attn_out.{layer}", chosen)
                    heads = run[f"head_out.{layer}"].float() if layer in compared else None
                    found[layer].add(tokens, x, y, heads)
                    advance(tokens.numel())
            for layer in some:
                found[layer].close()
    return found
