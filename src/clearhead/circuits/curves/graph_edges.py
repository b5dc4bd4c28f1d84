"""Graph edges (writer → reader): circuits of connections between heads and MLPs, as a level of `circuit curve`.

An edge inside a circuit carries what its writer writes in this very run; one outside carries what the writer writes in
the replacing run. Every reader has its own mixture, so a head may be in a circuit through its values and not through
its keys. What writes and what reads is in patching/graph_parts.py, the forward in patching/graph_patching.py, scores in
graph_scores.py, connected circuits and MIB's files in formats/graph_circuits.py.

Not here: rankings and curves (curve.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from clearhead.circuits.curves.graph_scores import score_edges
from clearhead.circuits.curves.level import Method
from clearhead.circuits.curves.rank import IG_STEPS
from clearhead.circuits.patching.ablation import Ablation, Replacement
from clearhead.circuits.patching.graph_parts import GraphParts
from clearhead.circuits.patching.graph_patching import MaskedGraph
from clearhead.circuits.patching.metrics import METRICS, measure_logits
from clearhead.circuits.patching.nodes import BATCH_TOKENS, identify, select_rows
from clearhead.data.tasks import TaskBatch
from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError
from clearhead.model.access import Model

METHODS = ("exact", "atp", "ig")
BATCH_BYTES = 1 << 28
"""Of the writes of all writers in all rows of a forward."""


@dataclass(frozen=True, eq=False)
class _Opened:
    """Prompts with all that their circuits share."""

    rows: TaskBatch
    replacing: Mapping[str, Tensor]
    whole: Mapping[str, Tensor]
    """The sites of the whole model's run."""
    full: Float[Tensor, "b v"]
    empty: Float[Tensor, "b v"]


class GraphEdges:
    """Circuits of one model's graph edges under one ablation. Implements `Level`.

    frozen_scale: hold the norms' scales in `atp` and `ig` (never in circuits). reference and seed: see `Replacement`.
    Raises `ClearheadError` with the reason for a model without such a graph and for the ablation `optimal`.
    """

    name = "graph-edges"
    per_prompt = False

    def __init__(
        self,
        model: Model,
        ablation: Ablation = "corrupt",
        *,
        frozen_scale: bool = False,
        reference: Sequence[TaskBatch] = (),
        seed: int = 0,
    ):
        if ablation == "optimal":
            raise ClearheadError("graph edges have no learned constants: use the ablation 'corrupt', 'zero' or a mean")
        self.model, self.frozen_scale = model, frozen_scale
        self.parts = GraphParts(model)
        self.replacement = Replacement(model, self.parts.sites, ablation, reference=reference, seed=seed)
        self._opened: _Opened | None = None
        self._depth = torch.cat([torch.full((at.stop - at.start,), at.layer) for at in self.parts.places])

    @property
    def described(self) -> str:
        """Which prompts the values of dropped edges come from, for the protocol."""
        return self.replacement.described

    @property
    def notes(self) -> list[str]:
        """What is recomputed and what is no component."""
        notes = [
            "an edge carries what a head, an MLP or the embedding writes to one q, k, v, MLP or the logits",
            "kept edges are recomputed; norms and output biases belong to every circuit",
            f"norms in atp and ig: {'scale held' if self.frozen_scale else 'exact Jacobian'}",
            "ig interpolates the embedding (EAP-IG inputs)",
        ]
        if self.model.n_kv_heads < self.model.n_heads:
            notes.append(
                f"keys and values are read once by each of {self.model.n_kv_heads} kv heads, which serve "
                f"{self.model.n_heads} query heads"
            )
        if self.model.gates is not None:
            notes.append("the edge gates of the model are recomputed in every run")
        return notes

    def count(self, rows: TaskBatch) -> int:  # noqa: ARG002 every prompt has the same
        """Number of edges."""
        return self.parts.n_edges

    def names(self, rows: TaskBatch) -> list[str]:  # noqa: ARG002
        """The edges' names, `m2->a5.h1<q>`."""
        return self.parts.names

    def scores(self, method: Method, batches: Sequence[TaskBatch]) -> list[Float64[Tensor, "b n"]]:
        """The effect M(all) − M(all but one edge) on each prompt, or an estimate of it, with M the logit difference."""
        match method:
            case "exact":
                return [self.exact_effects(rows, torch.arange(self.parts.n_edges)) for rows in batches]
            case "atp":
                return [self.attribution(rows) for rows in batches]
            case "ig":
                return [self.attribution(rows, steps=IG_STEPS) for rows in batches]
        raise UnknownNameError("ranking of graph edges", method, METHODS)

    def attribution(self, rows: TaskBatch, *, steps: int | None = None) -> Float64[Tensor, "b n"]:
        """Edge attribution patching, or EAP-IG with `steps` midpoints. Raises `NonFiniteError` naming the edge."""
        if steps is not None and steps < 1:
            raise ClearheadError(f"integrated gradients need at least 1 step, got {steps}")
        replacing = self._open(rows).replacing
        scores = score_edges(self.parts, rows, replacing, steps=steps, frozen_scale=self.frozen_scale)
        if not bool(scores.isfinite().all()):
            row, edge = (~scores.isfinite()).nonzero()[0].tolist()
            raise NonFiniteError(f"the score of {self.parts.names[edge]} on item {rows.items[row]} of the task")
        return scores.double().cpu()

    def exact_effects(self, rows: TaskBatch, edges: Int[Tensor, " e"]) -> Float64[Tensor, "b e"]:
        """M(all) − M(all but one), by replacing each of the edges `edges` (indices below `count`) alone."""
        column = METRICS.index("logit_difference")
        n, b = self.parts.n_edges, len(rows.items)
        whole = self.evaluate(torch.ones(1, 1, n, dtype=torch.bool), rows)[0, :, column]
        measured = []
        for some in edges.split(max(1, BATCH_TOKENS // b)):
            keep = torch.ones(len(some), 1, n, dtype=torch.bool)
            keep[torch.arange(len(some)), 0, some] = False
            measured.append(self.evaluate(keep, rows)[..., column])
        return (whole - torch.cat(measured)).T

    def evaluate(self, keep: Bool[Tensor, "r b n"], rows: TaskBatch) -> Float64[Tensor, "r b m"]:
        """Every metric of r circuits on each prompt; an axis b of length 1 serves all prompts.

        Raises `ClearheadError` for masks of another size, `NonFiniteError` for logits that are not finite.
        """
        b, n = len(rows.items), self.parts.n_edges
        if keep.dtype != torch.bool or keep.ndim != 3 or keep.shape[1] not in (1, b) or keep.shape[2] != n:
            raise ClearheadError(
                f"keep: expected booleans [circuits, {b} prompts or 1, {n} edges], got {keep.dtype} {list(keep.shape)}"
            )
        opened, last = self._open(rows), self.model.n_layers
        # the first layer whose readers lose something; `last` is that of the logits, `last + 1` the whole model
        start = torch.where(keep, last + 1, self._depth).amin(2)
        circuit, prompt = torch.arange(len(keep) * b) // b, torch.arange(b).repeat(len(keep))
        start = start.expand(-1, b).flatten()
        nothing = (~keep).all(2).expand(-1, b).flatten()
        order = start.argsort(descending=True, stable=True)
        run = order[(start[order] <= last) & ~nothing[order]]
        found = torch.empty(len(start), len(METRICS), dtype=torch.float64)
        for known, logits in ((start > last, opened.full), (nothing, opened.empty)):
            chosen = known.nonzero()[:, 0]
            if len(chosen):
                found[chosen] = self._metrics(logits[prompt[chosen].to(logits.device)], prompt[chosen], opened)
        for chosen in run.split(self._batch(rows.clean.shape[1])) if len(run) else ():
            some = prompt[chosen]
            masks = keep[circuit[chosen], some if keep.shape[1] > 1 else 0].to(self.model.device)
            logits = self._logits(masks, some.to(self.model.device), opened, min(last - 1, int(start[chosen].amin())))
            found[chosen] = self._metrics(logits, some, opened)
        return found.view(len(keep), b, len(METRICS))

    def _batch(self, length: int) -> int:
        """Rows of a forward."""
        row = len(self.parts.writers) * length * self.model.d_model * self.model.dtype.itemsize
        return max(1, min(BATCH_TOKENS // length, BATCH_BYTES // row))

    @torch.no_grad()
    def _logits(
        self, masks: Bool[Tensor, "i n"], some: Int[Tensor, " i"], opened: _Opened, begin: int
    ) -> Float[Tensor, "i v"]:
        """Logits at the last token of row i: prompt `some[i]` under its mask, which drops nothing below `begin`."""
        below = None
        if begin:
            sites = [site for site in self.parts.sites if int(site.partition(".")[2]) < begin]
            below = (begin, {site: opened.whole[site][some] for site in (*sites, f"resid_pre.{begin}")})
        clean = opened.rows.clean.to(self.model.device)[some]
        return MaskedGraph(self.parts, clean, masks, _of_rows(opened.replacing, some), begin=below).run()

    def _metrics(self, logits: Tensor, some: Tensor, opened: _Opened) -> Float64[Tensor, "i m"]:
        batch = select_rows(opened.rows, some.tolist())
        return measure_logits(logits[None], batch, opened.full[some.to(opened.full.device)])[0].cpu()

    def _open(self, rows: TaskBatch) -> _Opened:
        """What circuits on these prompts share; kept until other prompts come.

        Raises `ClearheadError` where heads and MLPs are not all that writes into the stream.
        """
        last = self._opened
        if last is None or identify(last.rows) != identify(rows):
            clean = rows.clean.to(self.model.device)
            read = [*self.parts.read(), f"resid_post.{self.model.n_layers - 1}", "logits"]
            run = self.model.run(clean, read=read, positions=[-1])
            self.parts.check(run)
            replacing = self.replacement.values(rows)
            nothing = torch.zeros(len(clean), self.parts.n_edges, dtype=torch.bool, device=clean.device)
            empty = [
                MaskedGraph(self.parts, clean[some], nothing[some], _of_rows(replacing, some)).run()
                for some in torch.arange(len(clean), device=clean.device).split(self._batch(clean.shape[1]))
            ]
            last = _Opened(rows, replacing, {site: run[site] for site in read[:-2]}, run.logits[:, 0], torch.cat(empty))
            self._opened = last
        return last


def _of_rows(values: Mapping[str, Tensor], rows: Int[Tensor, " i"]) -> dict[str, Tensor]:
    """The values of these rows, where rows have their own."""
    return {site: value[rows] if value.ndim and len(value) > 1 else value for site, value in values.items()}
