"""Runs in which chosen attention edges carry something else: edge patching for (layer, head, query, key), exactly.

An edge carries c_qk = pattern_qk · v_k into its query's z. With keep_qk = 1 inside a circuit and 0 outside,

    z_q = Σ_k keep_qk pattern_qk v_k + Σ_k (1 − keep_qk) c'_qk,      c'_qk = mean over n of pattern'_n,qk v'_n,k

where pattern and v are those of this very run (in-circuit parts are recomputed from whatever reaches them) and c' is
what the edges carry in the runs that replace them: the corrupt prompt (n = 1), a reference set at the same positions
(its mean), or nothing (zero; in a gated model that closes the edge). Both sums are matrix products; no tensor of
(head, query, key, width) is formed. Masks differ by row, and may be fractions, through which gradients flow.

In a model with edge gates (model/gates.py) `pattern` is what multiplies the values, so a closed edge carries exactly 0.
Gates are recomputed in every run, or frozen: then every run, the replacing ones too, attends through the edges that the
clean prompt opens, and an edge that is closed there has no effect at all.

Not here: which edges matter (curves/attention_edges.py).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.access import Model
from clearhead.model.gates import EdgeGate
from clearhead.model.run import Edit, Run

Gating = Literal["recomputed", "frozen"]
Opened = Mapping[int, Bool[Tensor, "b h q k"]]
"""The edges that gates leave open, by layer."""


class Carried(NamedTuple):
    """What the edges of one layer carry in n runs for each of b rows, pattern · v; b is 1 where all rows share them."""

    pattern: Float[Tensor, "b n h q k"]
    value: Float[Tensor, "b n g k dv"]

    def mix(self, share: Float[Tensor, "#b #h #q #k"]) -> Float[Tensor, "b q h dv"]:
        """Σ_k share_qk c'_qk, the mean over the n runs."""
        runs = [weigh(share * self.pattern[:, i], self.value[:, i]) for i in range(self.pattern.shape[1])]
        return torch.stack(runs).mean(0)

    def along(self, gradient: Float[Tensor, "b q h dv"]) -> Float[Tensor, "b h q k"]:
        """c'_qk · gradient_q for every edge, the mean over the n runs."""
        runs = [self.pattern[:, i] * project(gradient, self.value[:, i]) for i in range(self.pattern.shape[1])]
        return torch.stack(runs).mean(0)


def weigh(pattern: Float[Tensor, "b h q k"], value: Float[Tensor, "#b g k dv"]) -> Float[Tensor, "b q h dv"]:
    """Σ_k pattern_qk v_k; each kv head serves h/g query heads and is not copied for them."""
    b, h, q, k = pattern.shape
    g = value.shape[1]
    grouped = pattern.reshape(b, g, -1, k) @ value
    return grouped.reshape(b, h, q, -1).transpose(1, 2)


def project(gradient: Float[Tensor, "b q h dv"], value: Float[Tensor, "#b g k dv"]) -> Float[Tensor, "b h q k"]:
    """v_k · gradient_q for every head, query and key."""
    b, q, h, dv = gradient.shape
    grouped = gradient.transpose(1, 2).reshape(b, value.shape[1], -1, dv) @ value.mT
    return grouped.reshape(b, h, q, -1)


@dataclass(frozen=True, eq=False)
class EdgePatching:
    """The runs of one set of rows: what is kept comes from the clean prompts, the rest is replaced."""

    model: Model
    clean: Int[Tensor, "b t"]
    replaced: Mapping[int, Carried]
    """By layer."""
    opened: Opened | None = field(default=None, repr=False)
    """The edges of the clean rows, where gates are frozen."""

    @property
    def layers(self) -> list[int]:
        """The attention layers, in the order of the mask's second axis."""
        return self.model.attention_layers

    def run(
        self,
        keep: Shaped[Tensor, "r l #h #q #k"] | None,
        rows: Int[Tensor, " r"] | None = None,
        *,
        read: Iterable[str] = (),
        grad: bool = False,
        begin: tuple[int, Float[Tensor, "r t d"]] | None = None,
    ) -> Run:
        """One forward over the clean rows `rows` (all in order if None) under a mask per row; None keeps every edge.

        The run also holds `pattern` and `v` of every layer as they were recomputed, before the edges were replaced.
        Logits, where read, are those of the last token. `begin` is that of `Model.run`; below it nothing is replaced.
        """
        rows = torch.arange(len(self.clean), device=self.clean.device) if rows is None else rows
        layers = [layer for layer in self.layers if begin is None or layer >= begin[0]]
        edits: dict[str, Edit] = {}
        if keep is not None:
            places = {layer: place for place, layer in enumerate(self.layers)}
            edits = {f"z.{layer}": self._replace(layer, keep[:, places[layer]], rows) for layer in layers}
        with frozen_gates(self.model, self.opened, rows) as held:
            return self.model.run(
                self.clean[rows],
                read=[*_sites(layers, self.opened), *read],
                edit=edits | {f"pattern.{layer}": held[layer] for layer in layers if layer in held},
                grad=grad,
                begin=begin,
                positions=[-1],
            )

    def _replace(self, layer: int, keep: Tensor, rows: Tensor) -> Edit:
        """The edit of z in one layer."""

        def edited(z: Tensor, run: Run) -> Tensor:
            pattern, value = run[f"pattern.{layer}"].to(z.dtype), run[f"v.{layer}"]
            share = keep.to(z.dtype)
            return weigh(share * pattern, value) + self._replaced(layer, rows).mix(1 - share)

        return edited

    def _replaced(self, layer: int, rows: Tensor) -> Carried:
        """What replaces the edges of these rows."""
        one = self.replaced[layer]
        return one if len(one.pattern) == 1 else Carried(one.pattern[rows], one.value[rows])


def open_patching(
    model: Model,
    clean: Int[Tensor, "b t"],
    *,
    corrupt: Int[Tensor, "b t"] | None = None,
    reference: Int[Tensor, "n t"] | None = None,
    gates: Gating = "recomputed",
) -> EdgePatching:
    """Patching of `clean` by what the edges carry in `corrupt`, row by row, or on average in `reference`; else by zero.

    `gates` says whether a gated model's gates are recomputed in every run or frozen at the clean prompts; frozen gates
    and a `reference` of other prompts do not go together. Raises `UnknownNameError` for another word, and
    `ClearheadError` for frozen gates in a model without any, for prompts of different lengths, and for layers or
    families whose values cannot be read.
    """
    if gates not in get_args(Gating):
        raise UnknownNameError("way to treat gates", gates, get_args(Gating))
    if corrupt is not None and reference is not None:
        raise ClearheadError("edges are replaced either by the corrupt prompts or by a reference mean; leave one out")
    other = reference if corrupt is None else corrupt
    if other is not None and other.shape[1] != clean.shape[1]:
        raise ClearheadError(
            f"an edge joins a query and a key position, so prompts must have one length: the clean ones have "
            f"{clean.shape[1]} tokens, the others {other.shape[1]}"
        )
    if corrupt is not None and len(corrupt) != len(clean):
        raise ClearheadError(f"expected a corrupt prompt for each of {len(clean)} clean ones, got {len(corrupt)}")
    opened = None
    if gates == "frozen":
        if model.gates is None:
            raise ClearheadError(f"{model.name} has no edge gates to freeze; use gates='recomputed'")
        if reference is not None:
            raise ClearheadError(
                "frozen gates keep each clean prompt's open edges, which the reference prompts do not have; "
                "use gates='recomputed', or replace by the corrupt prompts or zero"
            )
        opened = open_edges(model, clean)
    layers = model.attention_layers
    if other is None:
        run = model.run(clean[:1], read=_sites(layers, None))
        value = {layer: torch.zeros_like(run[f"v.{layer}"])[None] for layer in layers}
        pattern = {layer: torch.zeros_like(run[f"pattern.{layer}"])[None] for layer in layers}
    else:
        with frozen_gates(model, opened, torch.arange(len(clean), device=clean.device)) as held:
            edits = {f"pattern.{layer}": edit for layer, edit in held.items()}
            run = model.run(other, read=_sites(layers, opened), edit=edits)
        axis = 1 if reference is None else 0  # a run for each row, or all runs for every row
        value = {layer: run[f"v.{layer}"].unsqueeze(axis) for layer in layers}
        pattern = {layer: run[f"pattern.{layer}"].unsqueeze(axis) for layer in layers}
    replaced = {layer: Carried(pattern[layer].to(value[layer].dtype), value[layer]) for layer in layers}
    return EdgePatching(model, clean, replaced, opened)


def _sites(layers: list[int], opened: Opened | None) -> list[str]:
    """What a run must read for its edges to be replaced and its gates held."""
    names = ("v", "pattern") if opened is None else ("v", "scores", "pattern")
    return [f"{name}.{layer}" for layer in layers for name in names]


def open_edges(model: Model, tokens: Int[Tensor, "b t"]) -> dict[int, Bool[Tensor, "b h q k"]]:
    """The edges that a gated model's gates leave open, none of them to a later key.

    Raises `ClearheadError` for a model without gates.
    """
    gates = model.gates
    if gates is None:
        raise ClearheadError(f"{model.name} has no edge gates")
    run = model.run(tokens, read=[f"scores.{layer}" for layer in gates.layers])
    return {layer: gate.open_edges(run[f"scores.{layer}"]).tril() for layer, gate in gates.layers.items()}


@contextmanager
def frozen_gates(model: Model, opened: Opened | None, rows: Int[Tensor, " r"]) -> Iterator[dict[int, Edit]]:
    """Edits of `pattern` by layer, for runs inside of the `with`: exactly the edges of the clean rows are open.

    The runs must read `scores` of every gated layer. No edits where `opened` is None.
    """
    gates = model.gates
    if opened is None or gates is None:
        yield {}
        return
    with gates.opened():  # the pattern that arrives is then the family's own softmax
        yield {layer: _held(layer, gate, opened[layer][rows]) for layer, gate in gates.layers.items()}


def _held(layer: int, gate: EdgeGate, opened: Bool[Tensor, "b h q k"]) -> Edit:
    """What multiplies the values when exactly the edges of `opened` are open.

    Without a sink the softmax runs over all keys and closed ones are dropped (arXiv 2512.05865); with one it runs over
    the open keys and the sink.
    """

    def edited(pattern: Tensor, run: Run) -> Tensor:
        if gate.sink is None:
            return pattern * opened
        logits = run[f"scores.{layer}"].float().masked_fill(~opened, -torch.inf)
        sink = gate.sink.float()[:, None, None].expand(*logits.shape[:3], 1)
        return torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]

    return edited
