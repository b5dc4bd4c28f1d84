"""Circuits of heads and MLPs: the model run with chosen components kept and all others overwritten.

    run(x; C, a):  every component in C computes from whatever reaches it, every other one has its output set to a

Circuits are rows of one forward, each with its own prompt and its own mask; in-circuit parts are recomputed. What rows
share is computed once: up to the first layer where a circuit drops something it is the clean run, up to the first layer
where it keeps something the run without components, so each row begins at the later of the two from a cached stream.
Logits are computed at the last token only.

Masks may be fractions m, which mix m·z + (1 − m)·a and let gradients through: attribution patching, integrated
gradients and learned masks (curves/rank.py, curves/masks.py) are operations on that one mask.

Not here: the values of a (ablation.py), rankings and curves (curves/rank.py, curves/curve.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from clearhead.circuits.patching.ablation import Replacement
from clearhead.circuits.patching.components import Components
from clearhead.circuits.patching.metrics import METRICS, measure_logits
from clearhead.data.tasks import TaskBatch
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.run import Edit, Run

BATCH_TOKENS = 1024
"""Tokens of one forward, at most, unless a single row has more."""
WORTH_A_FORWARD = 512
"""With fewer tokens than this, rows join those that begin at a lower layer."""


class Shared(NamedTuple):
    """One run that circuits begin from."""

    logits: Float[Tensor, "b v"]
    """At the last token."""
    streams: tuple[Float[Tensor, "b t d"], ...]
    """What each layer receives."""


@dataclass(frozen=True, eq=False)
class Opened:
    """Some prompts with all that circuits on them share."""

    rows: TaskBatch
    values: dict[str, Tensor]
    """Site → what dropped components are overwritten with."""
    full: Shared
    """The whole model."""
    run_empty: Callable[[], Shared] = field(repr=False)

    @cached_property
    def empty(self) -> Shared:
        """The model without any component; run when first asked for, since effects of single ones never ask."""
        return self.run_empty()


class Nodes:
    """Circuits of one model's components under one ablation."""

    def __init__(self, model: Model, components: Components, replacement: Replacement):
        missing = sorted(set(components.sites) - set(replacement.sites))
        if missing:
            raise ClearheadError(f"the replacement has no values for {missing[0]}; make it with components.sites")
        self.model, self.components, self.replacement = model, components, replacement
        self._layers = components.layers().to(model.device)
        self._opened: dict[tuple[object, ...], Opened] = {}

    def open(self, rows: TaskBatch) -> Opened:
        """The prompts run once with all components and once with none; kept for the next call with the same rows."""
        key = identify(rows)
        if key not in self._opened:
            values = self.replacement.values(rows)
            nothing = torch.zeros(len(rows.items), len(self.components), dtype=torch.bool, device=self.model.device)
            edits = self._edits(nothing, values, torch.arange(len(rows.items), device=self.model.device), 0)
            self._opened[key] = Opened(rows, values, self._run_shared(rows, {}), lambda: self._run_shared(rows, edits))
        return self._opened[key]

    def _run_shared(self, rows: TaskBatch, edits: dict[str, Edit]) -> Shared:
        streams = [f"resid_pre.{layer}" for layer in range(self.model.n_layers)]
        run = self.model.run(rows.clean, read=[*streams, "logits"], positions=[-1], edit=edits)
        return Shared(run.logits[:, 0], tuple(run[site] for site in streams))

    def evaluate(self, keep: Bool[Tensor, "r b n"], rows: TaskBatch) -> Float64[Tensor, "r b m"]:
        """Every metric of r circuits on each prompt of `rows`; an axis b of length 1 serves all prompts.

        Raises `ClearheadError` for masks of another size, `NonFiniteError` for logits that are not finite.
        """
        b, n = len(rows.items), len(self.components)
        if keep.dtype != torch.bool or keep.ndim != 3 or keep.shape[1] not in (1, b) or keep.shape[2] != n:
            raise ClearheadError(
                f"keep: expected booleans [circuits, {b} prompts or 1, {n} components], got {keep.dtype}"
                f" {list(keep.shape)}"
            )
        opened = self.open(rows)
        keep = keep.to(self.model.device).expand(-1, b, -1)
        found = torch.empty(*keep.shape[:2], len(METRICS), dtype=torch.float64)
        masks = keep.reshape(-1, n)
        prompt = torch.arange(b, device=self.model.device).repeat(len(keep))
        flat = found.view(-1, len(METRICS))
        for chosen, logits in self._run_all(masks, prompt, opened):
            some = prompt[chosen]
            measured = measure_logits(logits[None], select_rows(rows, some.tolist()), opened.full.logits[some])
            flat[chosen.cpu()] = measured[0].cpu()
        return found

    def run_masked(
        self,
        mask: Float[Tensor, "i n"] | Bool[Tensor, "i n"],
        prompt: Int64[Tensor, " i"],
        opened: Opened,
        *,
        begin: int = 0,
        streams: Float[Tensor, "i t d"] | None = None,
        grad: bool = False,
        edit: dict[str, Edit] | None = None,
    ) -> Float[Tensor, "i v"]:
        """Logits at the last token of row i: prompt `prompt[i]` under its mask; 1 keeps, 0 overwrites.

        streams: what layer `begin` receives; all components below then count as they were in the run it is from.
        edit: further edits of sites that hold no component.
        grad: keep the graph. Gates of a sparse model are then constants: the fused operation would let a
            straight-through gradient pass, which is no derivative of anything that circuits measure.
        """
        edits = self._edits(mask, opened.values, prompt, begin) | (edit or {})
        start = None if streams is None else (begin, streams)
        tokens = opened.rows.clean.to(self.model.device)[prompt]
        path = "eager" if grad and self.model.gates is not None else None
        run = self.model.run(tokens, edit=edits, grad=grad, begin=start, positions=[-1], path=path)
        return run.logits[:, 0]

    def _edits(self, mask: Tensor, values: dict[str, Tensor], prompt: Tensor, begin: int) -> dict[str, Edit]:
        """An edit for every site at or above layer `begin` where some row does not keep everything."""
        edits: dict[str, Edit] = {}
        for slot in self.components.slots:
            part = mask[:, slot.start : slot.stop]
            if slot.layer < begin or (part.dtype == torch.bool and bool(part.all())):
                continue
            value = values[slot.site]
            if value.ndim and value.shape[0] > 1:
                value = value[prompt]
            edits[slot.site] = _overwrite(slot.spread(mask), value)
        return edits

    def _run_all(self, masks: Tensor, prompt: Tensor, opened: Opened) -> Iterator[tuple[Tensor, Tensor]]:
        """Which rows, and their logits, from as deep as each can begin."""
        layers = self.model.n_layers
        dropped = torch.where(masks, layers, self._layers).amin(1)
        kept = torch.where(masks, self._layers, layers).amin(1)
        for rows, whole in ((dropped == layers, True), (kept == layers, False)):
            if bool(rows.any()):
                chosen = rows.nonzero()[:, 0]
                yield chosen, (opened.full if whole else opened.empty).logits[prompt[chosen]]
        start = torch.maximum(dropped, kept)
        left = ((dropped < layers) & (kept < layers)).nonzero()[:, 0]
        length = opened.rows.clean.shape[1]
        for chosen in _groups(left[start[left].argsort(descending=True, stable=True)], start, length):
            begin = int(start[chosen].amin())
            clean = dropped[chosen] >= kept[chosen]
            some = prompt[chosen]
            streams = opened.full.streams[begin][some]
            if not bool(clean.all()):
                streams = torch.where(clean[:, None, None], streams, opened.empty.streams[begin][some])
            yield chosen, self.run_masked(masks[chosen], some, opened, begin=begin, streams=streams)


def _overwrite(mask: Tensor, value: Tensor) -> Edit:
    def edit(z: Tensor, _run: Run) -> Tensor:
        if mask.dtype == torch.bool:
            return torch.where(mask, z, value)
        return mask * z + (1 - mask) * value

    return edit


def _groups(ordered: Tensor, start: Tensor, length: int) -> Iterator[Tensor]:
    """Rows that go into one forward: with the same start, or too few to be worth one of their own."""
    group: list[int] = []
    for row in ordered.tolist():
        tokens = len(group) * length
        deeper = bool(group) and int(start[row]) < int(start[group[0]])
        if group and (tokens + length > BATCH_TOKENS or (deeper and tokens >= WORTH_A_FORWARD)):
            yield torch.tensor(group, device=ordered.device)
            group = []
        group.append(row)
    if group:
        yield torch.tensor(group, device=ordered.device)


def identify(rows: TaskBatch) -> tuple[object, ...]:
    """What tells prompts with their answers from others: items alone do not, a task may have other corruptions."""
    tokens = (rows.clean.cpu().numpy().tobytes(), rows.corrupt.cpu().numpy().tobytes())
    return (tuple(rows.items), *tokens, str(rows.answers), str(rows.wrong_answers))


def select_rows(rows: TaskBatch, indices: Sequence[int]) -> TaskBatch:
    """The prompts with these indices as a batch; an index may come several times."""
    place = torch.tensor(indices)
    return TaskBatch(
        items=[rows.items[index] for index in indices],
        clean=rows.clean[place],
        corrupt=rows.corrupt[place],
        answers=[rows.answers[index] for index in indices],
        wrong_answers=[rows.wrong_answers[index] for index in indices],
        labels={name: places[place] for name, places in rows.labels.items()},
    )
