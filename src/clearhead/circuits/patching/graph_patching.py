"""Runs in which every reader sees its own mixture of writers: edge patching between heads and MLPs, exactly.

With keep_ru = 1 for an edge inside a circuit and 0 outside, reader r reads

    x_r = x + Σ_u (1 − keep_ru) (a_u − w_u)

where x is the stream of this very run, w_u what the writers write in it (recomputed from what their own readers saw),
and a_u what they write in the run that replaces them. So with all edges kept it is the model, and with none every
reader sees the replacing run. The masks differ by row, and may be fractions, through which gradients flow.

A place's readers are served through edits of q_pre, k_pre, v, mlp_in and the last resid_post; the model computes all
else. Memory of a row: the writes of all writers once, u · t · d, and the readers of one layer, r · t · d.

Not here: which edges matter (curves/graph_scores.py), rows and metrics (curves/graph_edges.py).
"""

from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from clearhead.circuits.patching.graph_parts import GraphParts, Readers
from clearhead.model.run import Edit, Run


class MaskedGraph:
    """One forward under a mask of edges per row.

    clean: the rows' tokens. mask: [i, n], 1 keeps an edge. replacing: site → what its writers hold in the replacing
    run, for the sites of `GraphParts.sites`, with a row per row of the mask or one for all.
    begin: layer and the sites of the whole model's run of these rows, where no edge below that layer is dropped.
    """

    def __init__(
        self,
        parts: GraphParts,
        clean: Int[Tensor, "i t"],
        mask: Shaped[Tensor, "i n"],
        replacing: Mapping[str, Tensor],
        *,
        begin: tuple[int, Mapping[str, Tensor]] | None = None,
    ):
        self.parts, self.clean, self.replacing = parts, clean, replacing
        self.off = 1 - mask.to(parts.model.dtype)
        self.begin, self.below = (0, {}) if begin is None else begin
        self._differences: list[Tensor] = []
        self._sites = iter(parts.sites)
        self._known = 0
        self._stack: Tensor | None = None
        self._read: dict[str, Tensor] = {}

    def run(self, *, grad: bool = False) -> Float[Tensor, "i v"]:
        """Logits at the last token."""
        parts, last = self.parts, self.parts.model.n_layers
        edits: dict[str, Edit] = {f"resid_post.{last - 1}": self._read_logits}
        for layer in range(self.begin, last):
            edits |= {f"{site}.{layer}": self._read_attention(layer, site) for site in ("q_pre", "k_pre", "v")}
            edits[f"mlp_in.{layer}"] = self._read_mlp(layer)
        if not grad:
            shape = (len(self.clean), len(parts.writers), self.clean.shape[1], parts.model.d_model)
            self._stack = torch.empty(shape, dtype=parts.model.dtype, device=parts.model.device)
        stream = self.below[f"resid_pre.{self.begin}"] if self.begin else None
        run = parts.model.run(
            self.clean,
            read=[*parts.read(self.begin), "logits"],
            edit=edits,
            grad=grad,
            begin=None if stream is None else (self.begin, stream),
            positions=[-1],
        )
        return run.logits[:, 0]

    def _read_attention(self, layer: int, site: Literal["q_pre", "k_pre", "v"]) -> Edit:
        """The edit of queries, keys or values: each head's read from its own stream."""
        weights = self.parts.parts.layers[layer].weights

        def edited(value: Tensor, run: Run) -> Tensor:
            if f"v.{layer}" not in self._read:
                x = self._streams(self.parts.place("attention", layer), run)
                split = x.split([len(weights.W_Q), len(weights.W_K), len(weights.W_V)], 1)
                maps = ((weights.W_Q, weights.b_Q), (weights.W_K, weights.b_K), (weights.W_V, weights.b_V))
                self._read = {
                    f"{name}.{layer}": _project(part, *one)
                    for name, part, one in zip(("q_pre", "k_pre", "v"), split, maps, strict=True)
                }
            return self._read[f"{site}.{layer}"].to(value.dtype)

        return edited

    def _read_mlp(self, layer: int) -> Edit:
        def edited(_value: Tensor, run: Run) -> Tensor:
            return self._streams(self.parts.place("mlp", layer), run)[:, 0]

        return edited

    def _read_logits(self, value: Tensor, run: Run) -> Tensor:
        return self._mixed(self.parts.place("logits", self.parts.model.n_layers), value, run)[:, 0]

    def _streams(self, at: Readers, run: Run) -> Float[Tensor, "i r t d"]:
        """What each reader of a place receives, normalised."""
        stream = self.parts.stream(at.kind, at.layer, run)
        return self.parts.normalise(at.kind, at.layer, self._mixed(at, stream, run))

    def _mixed(self, at: Readers, stream: Tensor, run: Run) -> Float[Tensor, "i r t d"]:
        differences = self._until(at.seen, run).flatten(2)
        mixed = at.of(self.off) @ differences
        return stream[:, None] + mixed.unflatten(-1, stream.shape[1:])

    def _until(self, count: int, run: Run) -> Float[Tensor, "i u t d"]:
        """a_u − w_u of the first `count` writers."""
        while self._known < count:
            site = next(self._sites)
            layer = int(site.partition(".")[2])
            own = self.below[site] if layer < self.begin else run[site]
            other = self.replacing[site].expand_as(own) if self.replacing[site].ndim == 0 else self.replacing[site]
            difference = self.parts.writes(site, other) - self.parts.writes(site, own)
            if self._stack is None:
                self._differences.append(difference)
            else:
                self._stack[:, self._known : self._known + difference.shape[1]] = difference
            self._known += difference.shape[1]
        return (torch.cat(self._differences, 1) if self._stack is None else self._stack)[:, :count]


def _project(x: Float[Tensor, "i h t d"], weight: Float[Tensor, "h d e"], bias: Tensor | None) -> Tensor:
    """Each head's projection of its own stream."""
    y = torch.einsum("ihtd,hde->ihte", x, weight.detach())
    return y if bias is None else y + bias.detach()[:, None]
