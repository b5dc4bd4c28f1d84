"""Writers and readers of the residual stream: between which the edges of a computational graph run.

    writers   the embedding, each head, each MLP                               u writes w_u [t, d]
    readers   q of each head, k and v of each kv head, each MLP, the logits    r reads the stream x_r = c + Σ_u w_u

in the order of depth, so that the writers that a reader sees are always the first so many. c holds what no writer owns
(output biases b_O, the biases of norms behind a module). Under grouped keys the kv head is the honest unit: its k and v
serve several query heads and read the stream once. What a head or MLP writes passes the norm behind its module where
there is one (Gemma 2, OLMo 2), with the scale that this norm has in the same run, and the residual multiplier.

    ∂M/∂x_r = Jᵀ W_r ∂M/∂y_r      y_r = norm(x_r) W_r + b_r (an MLP's y_r is the normalised stream itself)
    Jᵀ p = s (C γ⊙p − n mean(n ⊙ C γ⊙p))      n = s C x, and without the second term where the scale s is frozen

Names are those of EAP-IG and MIB: `input`, `a0.h1`, `m3`; `a5.h1<q>`, `m3`, `logits`, and for the k and v of a kv head
that serves several query heads `a5.kv0<k>`.

Refused: layers without softmax attention, normalised values (Gemma 4), an output bias in front of a norm.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.model.access import Model
from clearhead.model.families import find_module
from clearhead.model.norms import Norm
from clearhead.model.run import Run
from clearhead.model.self_test import TOLERANCE
from clearhead.spectral.writes import Parts

Kind = Literal["q", "k", "v", "mlp", "logits"]


@dataclass(frozen=True)
class Readers:
    """The readers of one place: all of a layer's attention, an MLP, the logits."""

    kind: Literal["attention", "mlp", "logits"]
    layer: int
    names: tuple[str, ...]
    seen: int
    """How many of the writers they see, the first ones."""
    start: int
    """Index of the first reader's first edge; edge (r, u) of the place is start + r · seen + u."""

    @property
    def stop(self) -> int:
        """Index behind the last edge."""
        return self.start + len(self.names) * self.seen

    def of(self, edges: Tensor) -> Tensor:
        """The place's part of `edges` [*b, n] as [*b, r, u]."""
        return edges[..., self.start : self.stop].unflatten(-1, (len(self.names), self.seen))


class GraphParts:
    """The writers, readers and edges of one model. Raises `ClearheadError` with the reason where it has none."""

    def __init__(self, model: Model):
        self.model = model
        self.parts = Parts(model)
        self.parallel = model.family.parallel
        for layer, part in enumerate(self.parts.layers):
            if part.weights.v_norm is not None:
                raise ClearheadError(
                    f"layer {layer} of {model.name} normalises its values, so what a value reads is no linear map"
                )
            if part.behind_attention is not None and part.weights.b_O is not None:
                raise ClearheadError(
                    f"layer {layer} of {model.name} has an output bias in front of a norm, whose scale mixes it with "
                    "what the heads write"
                )
        self.writers: list[str] = ["input"]
        self.places: list[Readers] = []
        for layer, part in enumerate(self.parts.layers):
            h, g = part.geometry.n_heads, part.geometry.n_kv_heads
            heads = [f"a{layer}.h{head}" for head in range(h)]
            groups = heads if g == h else [f"a{layer}.kv{group}" for group in range(g)]
            names = [f"{name}<{kind}>" for kind, some in (("q", heads), ("k", groups), ("v", groups)) for name in some]
            before = len(self.writers)
            self._add("attention", layer, names, before)
            self.writers += heads
            self._add("mlp", layer, [f"m{layer}"], before if self.parallel else len(self.writers))
            self.writers.append(f"m{layer}")
        self._add("logits", model.n_layers, ["logits"], len(self.writers))

    def _add(self, kind: Literal["attention", "mlp", "logits"], layer: int, names: list[str], seen: int) -> None:
        start = self.places[-1].stop if self.places else 0
        self.places.append(Readers(kind, layer, tuple(names), seen, start))

    @property
    def n_edges(self) -> int:
        """Number of edges."""
        return self.places[-1].stop

    @cached_property
    def names(self) -> list[str]:
        """The edges' names, `m2->a5.h1<q>`."""
        return [f"{writer}->{name}" for at in self.places for name in at.names for writer in self.writers[: at.seen]]

    @cached_property
    def ends(self) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        """Writer and reader of every edge; readers are counted through all places."""
        writer = torch.cat([torch.arange(at.seen).repeat(len(at.names)) for at in self.places])
        counts = torch.tensor([at.seen for at in self.places for _ in at.names])
        return writer, torch.arange(len(counts)).repeat_interleave(counts)

    @cached_property
    def reader_names(self) -> list[str]:
        """All readers, in the order of the edges."""
        return [name for at in self.places for name in at.names]

    def place(self, kind: Literal["attention", "mlp", "logits"], layer: int) -> Readers:
        """The readers of one place."""
        return self.places[2 * layer + (kind == "mlp")]

    @property
    def sites(self) -> list[str]:
        """The sites that hold what writers write, in their order."""
        layers = range(self.model.n_layers)
        return ["resid_pre.0", *(f"{site}.{layer}" for layer in layers for site in ("z", "mlp_out"))]

    def read(self, begin: int = 0) -> list[str]:
        """The sites of layers from `begin` on that a run must read for its streams and writes to be known."""
        names = ("resid_pre", "z", "attn_out", "mlp_out")
        return [f"{name}.{layer}" for layer in range(begin, self.model.n_layers) for name in names]

    def writes(self, site: str, value: Float[Tensor, "b ..."]) -> Float[Tensor, "b u t d"]:
        """What the writers of `site` (one of `sites`) write into the stream, from the site's value."""
        name, _, layer = site.partition(".")
        if name == "resid_pre":
            return value[:, None]
        part = self.parts.layers[int(layer)]
        if name == "mlp_out":
            return self._behind(part.behind_mlp, value[:, None], value[:, None])
        heads = torch.einsum("bthv,hvd->bhtd", value, part.weights.W_O.detach())
        return self._behind(part.behind_attention, heads.sum(1, keepdim=True), heads)

    def _behind(self, norm: Norm | None, whole: Tensor, pieces: Tensor) -> Tensor:
        """Pieces of a module's output as they enter the stream, without the norm's bias."""
        if norm is not None:
            pieces = norm.centre(pieces) * norm.frozen_scale(whole)
            if norm.gain is not None:
                pieces = pieces * norm.gain.detach()
        return pieces * self.parts.multiplier

    def stream(self, kind: str, layer: int, run: Mapping[str, Tensor]) -> Float[Tensor, "b t d"]:
        """What attention or MLP of a layer receives in a run that read `read`."""
        stream = run[f"resid_pre.{layer}"]
        if kind == "attention" or self.parallel:
            return stream
        return stream + self._added("post_attention_norm", layer, run[f"attn_out.{layer}"])

    def _added(self, norm: Literal["post_attention_norm", "post_mlp_norm"], layer: int, out: Tensor) -> Tensor:
        family, place = self.model.family, self.model.places.layers[layer]
        path = family.post_attention_norm if norm == "post_attention_norm" else family.post_mlp_norm
        module = None if path is None else find_module(place, path)
        return (out if module is None else module(out)) * self.parts.multiplier

    def normalise(self, kind: str, layer: int, x: Float[Tensor, "*b t d"]) -> Float[Tensor, "*b t d"]:
        """The stream as attention or MLP of a layer reads it, by the model's own module."""
        family, place = self.model.family, self.model.places.layers[layer]
        path = family.attention_norm
        if kind == "mlp" and not (self.parallel and family.mlp_norm is None):
            path = family.mlp_norm
        module = None if path is None else find_module(place, path)
        return x if module is None else module(x)

    def pull_back(
        self, at: Readers, x: Float[Tensor, "b t d"], gradients: tuple[Tensor, ...], *, frozen_scale: bool = False
    ) -> Float[Tensor, "b r t d"]:
        """Gradients of what the readers of a place compute, at the stream x that they all read.

        gradients: those at q_pre, k_pre and v, at mlp_in, or at the stream itself for the logits.
        """
        if at.kind == "logits":
            return gradients[0][:, None]
        part = self.parts.layers[at.layer]
        if at.kind == "mlp":
            norm, read = part.mlp_norm, gradients[0][:, None]
        else:
            norm, maps = part.norm, (part.weights.W_Q, part.weights.W_K, part.weights.W_V)
            read = torch.cat(
                [torch.einsum("bhte,hde->bhtd", g, w.detach()) for g, w in zip(gradients, maps, strict=True)], 1
            )
        if norm is None:
            return read
        read = norm.centre(read if norm.gain is None else read * norm.gain.detach())
        scale = norm.frozen_scale(x)[:, None]
        if not frozen_scale:
            n = norm.normalise(x)[:, None]
            read = read - n * (n * read).mean(-1, keepdim=True)
        return read * scale

    @torch.no_grad()
    def check(self, run: Run) -> None:
        """Heads and MLP are all that a layer adds. Raises `ClearheadError` with the layer where they are not.

        Raises `NonFiniteError` for a stream that is not finite.

        The run must have read `read` and the last `resid_post`.
        """
        for layer, part in enumerate(self.parts.layers):
            heads = torch.einsum("bthv,hvd->btd", run[f"z.{layer}"], part.weights.W_O.detach())
            attention = run[f"attn_out.{layer}"]
            bias = 0.0 if part.weights.b_O is None else part.weights.b_O.detach()
            before = self.stream("mlp", layer, run)
            if self.parallel:
                before = before + self._added("post_attention_norm", layer, attention)
            last = layer + 1 == self.model.n_layers
            after = run[f"resid_post.{layer}" if last else f"resid_pre.{layer + 1}"]
            for found, expected in (
                (heads + bias, attention),
                (before + self._added("post_mlp_norm", layer, run[f"mlp_out.{layer}"]), after),
            ):
                worst = float((found - expected).abs().max() / expected.abs().max())
                if not math.isfinite(worst):
                    raise NonFiniteError(f"the residual stream of {self.model.name} at layer {layer}")
                if not worst <= max(TOLERANCE[self.model.dtype], TOLERANCE[torch.float32]):
                    raise ClearheadError(
                        f"layer {layer} of {self.model.name} writes more into the residual stream than its heads and "
                        f"its MLP (their sum is off by {worst:.1e} of the largest entry), so it has no graph of edges"
                    )
