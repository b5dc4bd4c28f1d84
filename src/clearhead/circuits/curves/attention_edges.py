"""Attention edges (layer, head, query, key): the scores of all of them from one backward, and circuits made of them.

An edge carries c_qk = pattern_qk · v_k. With g = ∂M/∂z of a run in which every edge is mixed, m c + (1 − m) c',

    atp    (c_qk − c'_qk) · g_q    at m = 1             one backward for all L · H · T (T + 1) / 2 edges
    ig     its mean over m = (s − ½)/S, s = 1..S        S backwards; the scores sum to M(all) − M(none)
    exact  M(all) − M(all but one)                      a row of a forward per edge

and c_qk · g_q = pattern_qk (v_k · g_q) is a matrix product of gradients and values (with grouped keys the group's). It
is the gradient of the mask that circuits use, so it holds for the ablation they use. Patterns, values and gates above
an edge respond to it in all three, but a hard gate has no gradient and counts as held in atp and ig. An edge that
carries exactly 0 in both runs (closed gates) has effect 0 and costs nothing.

Edges to the first token mostly hold attention that a head does not use (a sink); with `freeze_bos` they belong to every
circuit and are no components. In any case `describe_edges` counts them apart.

Not here: the forward with replaced edges (patching/edge_patching.py), rankings and curves (curve.py).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from clearhead.circuits.curves.level import Method
from clearhead.circuits.curves.rank import IG_STEPS, refuse_path_to_zero
from clearhead.circuits.patching.edge_patching import EdgePatching, Gating, open_edges, open_patching, project
from clearhead.circuits.patching.metrics import METRICS, measure_logits
from clearhead.circuits.patching.nodes import BATCH_TOKENS, identify, select_rows
from clearhead.data.tasks import TaskBatch, logit_difference
from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError
from clearhead.model.access import Model

EdgeAblation = Literal["corrupt", "zero", "positional_mean"]
"""What an edge outside a circuit carries: what it carries in the corrupt prompt; nothing, which in a sparse model is
what a closed gate leaves; the mean over reference prompts of the same length. (A mean over positions has no meaning: an
edge is a pair of positions.)"""
METHODS = ("exact", "atp", "ig")


class Places(NamedTuple):
    """Where the components of prompts of one length are; `layer` is the model's own number."""

    layer: Int[Tensor, " n"]
    head: Int[Tensor, " n"]
    query: Int[Tensor, " n"]
    key: Int[Tensor, " n"]
    flat: Int[Tensor, " n"]
    """Index into a mask [l, h, q, k] of all pairs, with attention layers only."""


@dataclass(frozen=True, eq=False)
class _Opened:
    """Prompts with all that their circuits share."""

    rows: TaskBatch
    patching: EdgePatching
    full: Float[Tensor, "b v"]
    streams: tuple[Float[Tensor, "b t d"], ...]
    alive: Bool[Tensor, "b n"]
    """Edges that carry something in one of the runs; the others have no effect."""


class AttentionEdges:
    """Circuits of one model's attention edges under one ablation. Implements `Level`.

    reference: prompts whose mean `positional_mean` is. Raises `UnknownNameError` for an ablation that does not exist,
    `ClearheadError` where a reference is missing and for frozen gates without gates.
    """

    name = "attention-edges"
    per_prompt = True

    def __init__(
        self,
        model: Model,
        ablation: EdgeAblation = "corrupt",
        *,
        gates: Gating = "recomputed",
        freeze_bos: bool = False,
        reference: Sequence[TaskBatch] = (),
    ):
        if ablation not in get_args(EdgeAblation):
            raise UnknownNameError("ablation of attention edges", ablation, get_args(EdgeAblation))
        if ablation == "positional_mean" and not reference:
            raise ClearheadError("ablation 'positional_mean' takes its values from a reference: give prompts of a task")
        if gates == "frozen" and model.gates is None:
            raise ClearheadError(f"{model.name} has no edge gates to freeze; use gates='recomputed'")
        self.model, self.freeze_bos = model, freeze_bos
        self.ablation: EdgeAblation = ablation
        self.gates: Gating = gates
        self.reference = tuple(reference)
        self._opened: _Opened | None = None
        self._places: dict[int, Places] = {}

    @property
    def described(self) -> str:
        """Which prompts the values of dropped edges come from, for the protocol."""
        match self.ablation:
            case "zero":
                return "none"
            case "corrupt":
                return "the corrupt prompt of each item"
            case _:
                return f"{sum(len(rows.items) for rows in self.reference)} clean prompts of the task"

    @property
    def notes(self) -> list[str]:
        """What is recomputed and what is no component."""
        bos = "edges to the first token belong to every circuit and are not counted"
        every = "edges to the first token are components like all others"
        notes = [
            "an edge carries pattern · value of one head from one key to one query; every prompt has its own edges",
            "kept edges are recomputed; embedding, norms and MLPs belong to every circuit",
            bos if self.freeze_bos else every,
        ]
        if self.model.gates is not None:
            held = "held at the clean prompt's open edges in all runs, the corrupt ones too"
            notes.append(f"edge gates are {held if self.gates == 'frozen' else 'recomputed in every run'}")
        return notes

    def places(self, length: int) -> Places:
        """The edges of a prompt of `length` tokens that are components: causal, inside of the layer's window."""
        if length not in self._places:
            layers, n_heads = self.model.attention_layers, self.model.n_heads
            seen = torch.ones(len(layers), length, length, dtype=torch.bool).tril()
            for place, layer in enumerate(layers):
                if (window := self.model.geometry(layer).window) is not None:
                    seen[place].triu_(1 - window)
            if self.freeze_bos:
                seen[..., 0] = False
            every = seen[:, None].expand(-1, n_heads, -1, -1)
            place, head, query, key = every.nonzero(as_tuple=True)
            if not len(place):
                raise ClearheadError("prompts of one token have no edges but those to the first token, which are fixed")
            flat = ((place * n_heads + head) * length + query) * length + key
            self._places[length] = Places(torch.tensor(layers)[place], head, query, key, flat)
        return self._places[length]

    def count(self, rows: TaskBatch) -> int:
        """Edges of one prompt of `rows`."""
        return len(self.places(rows.clean.shape[1]).flat)

    def names(self, rows: TaskBatch) -> list[str]:
        """Unit ids: `edge.layer.head.key@query`."""
        places = self.places(rows.clean.shape[1])
        columns = (places.layer.tolist(), places.head.tolist(), places.key.tolist(), places.query.tolist())
        return [f"edge.{layer}.{head}.{key}@{query}" for layer, head, key, query in zip(*columns, strict=True)]

    def scores(self, method: Method, batches: Sequence[TaskBatch]) -> list[Float64[Tensor, "b n"]]:
        """The effect M(all) − M(all but one edge) on each prompt, or an estimate of it, with M the logit difference."""
        match method:
            case "exact":
                return [self.exact_effects(rows) for rows in batches]
            case "atp":
                return [self.attribution(rows) for rows in batches]
            case "ig":
                return [self.attribution(rows, steps=IG_STEPS) for rows in batches]
        raise UnknownNameError("ranking of attention edges", method, METHODS)

    def attribution(self, rows: TaskBatch, *, steps: int | None = None) -> Float64[Tensor, "b n"]:
        """Attribution patching of all edges, or integrated gradients with `steps` midpoints.

        Raises `NonFiniteError` where a score is not finite.
        """
        if steps is not None and steps < 1:
            raise ClearheadError(f"integrated gradients need at least 1 step, got {steps}")
        if steps is not None and self.ablation == "zero" and not self.freeze_bos:
            refuse_path_to_zero(self.model)
        patching = self._patching(rows)
        mixed = [None] if steps is None else [(step + 0.5) / steps for step in range(steps)]
        every = torch.stack([self._mask_gradient(patching, rows, share) for share in mixed]).mean(0)
        scores = every.flatten(1)[:, self.places(rows.clean.shape[1]).flat.to(every.device)]
        if not bool(scores.isfinite().all()):
            row, edge = (~scores.isfinite()).nonzero()[0].tolist()
            raise NonFiniteError(f"the score of {self.names(rows)[edge]} on item {rows.items[row]} of the task")
        return scores.double().cpu()

    def _mask_gradient(
        self, patching: EdgePatching, rows: TaskBatch, share: float | None
    ) -> Float[Tensor, "b l h q k"]:
        """∂M/∂m of every edge's mask where all components are `share`; None is 1, the clean run."""
        layers = patching.layers
        keep = None
        if share is not None:
            device, length = self.model.device, rows.clean.shape[1]
            keep = torch.full((1, len(layers), 1, 1, length), share, dtype=self.model.dtype, device=device)
            if self.freeze_bos:
                keep[..., 0] = 1.0
        run = patching.run(keep, read=[*(f"z.{layer}" for layer in layers), "logits"], grad=True)
        logits = run.logits[:, 0]
        total = logit_difference(logits.float() if logits.dtype.itemsize < 4 else logits, rows).sum()
        found = torch.autograd.grad(total, [run[f"z.{layer}"] for layer in layers])
        scores = []
        for layer, gradient in zip(layers, found, strict=True):
            pattern = run[f"pattern.{layer}"].detach().to(gradient.dtype)
            score = pattern * project(gradient, run[f"v.{layer}"].detach())
            scores.append(score if self.ablation == "zero" else score - patching.replaced[layer].along(gradient))
        return torch.stack(scores, 1)

    def exact_effects(self, rows: TaskBatch, edges: Int[Tensor, "b e"] | None = None) -> Float64[Tensor, "b e"]:
        """M(all) − M(all but one) of e edges of each prompt, indices below `count`; of all edges if None.

        Edges that carry exactly 0 in both runs have effect 0 and are not run.
        """
        n, opened = self.count(rows), self._open(rows)
        wanted = torch.arange(n).expand(len(rows.items), -1) if edges is None else edges
        effects = torch.zeros(wanted.shape, dtype=torch.float64)
        prompt, place = opened.alive.gather(1, wanted).nonzero(as_tuple=True)
        column = METRICS.index("logit_difference")
        whole = self.evaluate(torch.ones(1, 1, n, dtype=torch.bool), rows)[0, :, column]
        for some in torch.arange(len(place)).split(BATCH_TOKENS):
            keep = torch.ones(len(some), n, dtype=torch.bool)
            keep[torch.arange(len(some)), wanted[prompt[some], place[some]]] = False
            effects[prompt[some], place[some]] = (
                whole[prompt[some]] - self._measure(keep, prompt[some], opened)[:, column]
            )
        return effects

    def evaluate(self, keep: Bool[Tensor, "r b n"], rows: TaskBatch) -> Float64[Tensor, "r b m"]:
        """Every metric of r circuits on each prompt; an axis b of length 1 serves all prompts.

        Raises `ClearheadError` for masks of another size, `NonFiniteError` for logits that are not finite.
        """
        b, n = len(rows.items), self.count(rows)
        if keep.dtype != torch.bool or keep.ndim != 3 or keep.shape[1] not in (1, b) or keep.shape[2] != n:
            raise ClearheadError(
                f"keep: expected booleans [circuits, {b} prompts or 1, {n} edges], got {keep.dtype} {list(keep.shape)}"
            )
        prompt = torch.arange(b).repeat(len(keep))
        flat = self._measure(keep.expand(-1, b, -1).reshape(-1, n), prompt, self._open(rows))
        return flat.view(len(keep), b, len(METRICS))

    def _measure(
        self, masks: Bool[Tensor, "i n"], prompt: Int[Tensor, " i"], opened: _Opened
    ) -> Float64[Tensor, "i m"]:
        """Every metric of row i: prompt `prompt[i]` under its mask; rows begin where their first edge is dropped."""
        length = opened.rows.clean.shape[1]
        places, layers = self.places(length), self.model.attention_layers
        last = self.model.n_layers
        start = torch.where(masks, last, places.layer).amin(1)
        found = torch.empty(len(masks), len(METRICS), dtype=torch.float64)
        whole = (start == last).nonzero()[:, 0]
        left = start.argsort(descending=True, stable=True)[len(whole) :]
        for chosen in (whole, *left.split(max(1, BATCH_TOKENS // length))):
            if not len(chosen):
                continue
            some = prompt[chosen].to(self.model.device)
            if chosen is whole:
                logits = opened.full[some]
            else:
                keep = torch.ones(len(chosen), len(layers) * self.model.n_heads * length**2, dtype=torch.bool)
                keep[:, places.flat] = masks[chosen]
                keep = keep.view(-1, len(layers), self.model.n_heads, length, length).to(self.model.device)
                begin = int(start[chosen].amin())
                stream = opened.streams[begin][some]
                logits = opened.patching.run(keep, some, read=["logits"], begin=(begin, stream)).logits[:, 0]
            batch = select_rows(opened.rows, some.tolist())
            found[chosen] = measure_logits(logits[None], batch, opened.full[some])[0].cpu()
        return found

    def _open(self, rows: TaskBatch) -> _Opened:
        """What circuits on these prompts share; kept until other prompts come."""
        last = self._opened
        if last is None or identify(last.rows) != identify(rows):
            patching = self._patching(rows)
            streams = [f"resid_pre.{layer}" for layer in range(self.model.n_layers)]
            run = patching.run(None, read=[*streams, "logits"])
            carried = [
                (run[f"pattern.{layer}"] != 0) | (patching.replaced[layer].pattern != 0).any(1)
                for layer in patching.layers
            ]
            flat = self.places(rows.clean.shape[1]).flat
            alive = torch.stack(carried, 1).flatten(1).cpu()[:, flat]
            last = _Opened(rows, patching, run.logits[:, 0], tuple(run[site] for site in streams), alive)
            self._opened = last
        return last

    def _patching(self, rows: TaskBatch) -> EdgePatching:
        clean, reference = rows.clean.to(self.model.device), None
        if self.ablation == "positional_mean":
            length = clean.shape[1]
            same = [other.clean for other in self.reference if other.clean.shape[1] == length]
            if not same:
                have = sorted({other.clean.shape[1] for other in self.reference})
                raise ClearheadError(
                    f"a mean of edges needs reference prompts of {length} tokens; the reference has lengths {have}: "
                    "give more prompts, or ablate with 'corrupt' or 'zero'"
                )
            reference = torch.cat(same).to(self.model.device)
        corrupt = rows.corrupt.to(self.model.device) if self.ablation == "corrupt" else None
        return open_patching(self.model, clean, corrupt=corrupt, reference=reference, gates=self.gates)


@dataclass(frozen=True)
class EdgeCounts:
    """What a circuit of attention edges consists of, on one prompt."""

    edges: int
    """Kept components that the gates leave open in the clean prompt (all, in a dense model)."""
    heads: int
    """Heads with at least one of them."""
    pairs_per_head: float
    """Query–key pairs of such a head, on average."""
    bos: int
    """Edges to the first token."""
    open_edges: int
    """Open components of the whole model on this prompt."""
    open_bos: int


def describe_edges(level: AttentionEdges, rows: TaskBatch, keep: Bool[Tensor, "b n"]) -> list[EdgeCounts]:
    """Edges, heads and query–key pairs per head of a circuit on each prompt of `rows`."""
    places = level.places(rows.clean.shape[1])
    opened = torch.ones_like(keep)
    if level.model.gates is not None:
        by_layer = open_edges(level.model, rows.clean.to(level.model.device))
        opened = torch.stack([by_layer[layer] for layer in level.model.attention_layers], 1).flatten(1).cpu()
        opened = opened[:, places.flat]
    heads = places.layer * level.model.n_heads + places.head
    found = []
    for row, possible in zip(keep & opened, opened, strict=True):
        used = len(heads[row].unique())
        edges = int(row.sum())
        bos, open_bos = (int((some & (places.key == 0)).sum()) for some in (row, possible))
        found.append(EdgeCounts(edges, used, edges / max(1, used), bos, int(possible.sum()), open_bos))
    return found


def describe_circuits(
    level: AttentionEdges, batches: Sequence[TaskBatch], keys: Sequence[Float64[Tensor, "b n"]], count: int
) -> dict[str, float]:
    """Means over prompts of `EdgeCounts` for the circuits of the `count` edges with the largest keys."""
    found: list[EdgeCounts] = []
    for rows, key in zip(batches, keys, strict=True):
        order = key.argsort(dim=1, descending=True, stable=True)[:, :count]
        keep = torch.zeros(key.shape, dtype=torch.bool).scatter_(1, order, value=True)
        found += describe_edges(level, rows, keep.expand(len(rows.items), -1))
    numbers = [dataclasses.asdict(one) for one in found]
    return {name: sum(one[name] for one in numbers) / len(numbers) for name in numbers[0]}
