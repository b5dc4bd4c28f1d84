"""Activation patching: one place at a time is overwritten, everything above it recomputed, and the metrics measured.

    patched(p) = M(run in which the activation at place p holds another run's value, a mean, or zero)

A place is any site, one of its heads, one position of it, or a unit: `resid_pre.5@S2`, `k.5.1`, `pattern.9.2`,
`head.9.6@14`, `mlp.3`. Places are rows of one forward, as many as fit, that begins at their layer from the cached
stream of the unpatched run; logits are computed at the last token only. Under grouped keys a query head has no keys and
values of its own: `kvhead.5.1` is its group's k and v, which all query heads of the group then read.

Values are those of an ablation (ablation.py). With `corrupt` the clean prompt is patched with the corrupt one's
activations (noising: what is necessary); exchange the prompts with `exchange` for the opposite (denoising: what
suffices), measured by the same answers.

Not here: circuits, where everything but a set is overwritten (nodes.py); paths (paths.py).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float64
from torch import Tensor

from clearhead.circuits.patching.ablation import HEADS_FIRST, Ablation, Replacement
from clearhead.circuits.patching.metrics import METRICS, measure_logits
from clearhead.circuits.patching.nodes import BATCH_TOKENS, select_rows
from clearhead.data.tasks import TaskBatch
from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.access import Model
from clearhead.model.run import Edit, Run
from clearhead.model.sites import LAYER_SITES, SOFTMAX_SITES, parse
from clearhead.units.unit import Unit

_UNIT_SITES: dict[str, tuple[str, ...]] = {
    "head": ("z",),
    "kvhead": ("k", "v"),
    "head_q": ("q",),
    "head_k": ("k",),
    "head_v": ("v",),
    "attn": ("attn_out",),
    "mlp": ("mlp_out",),
}
"""Where a unit's activation is. The index of head_k and head_v is that of a kv head, as the model has it."""
_HEAD_SECOND = HEADS_FIRST | SOFTMAX_SITES
"""Sites [b, h, t, ...]: heads are axis 1, positions (for pattern and scores the query's) axis 2."""
_HEAD_THIRD = frozenset({"z", "head_out"})
"""Sites [b, t, h, ...]."""
_PLACE = re.compile(r"([a-z_]+)\.(-?\d+)(?:\.(\d+))?(?:@(\w+))?")


@dataclass(frozen=True)
class Place:
    """One thing to patch."""

    name: str
    layer: int
    sites: tuple[str, ...]
    """Patched together; several only for a kv head."""
    index: int | None
    """Of a head, for sites that have heads."""
    position: int | str | None
    """A token index, or the name of a label that every prompt has; None for all positions."""

    @classmethod
    def parse(cls, text: str | Unit, model: Model) -> Self:
        """The place called `site.layer[.head][@position]`, or that of a unit.

        Raises `UnknownNameError` for names that do not exist, `ClearheadError` for sites without heads that are given
        one, and for units that no site holds.
        """
        name = str(text)
        match = _PLACE.fullmatch(name)
        if match is None:
            raise ClearheadError(
                f"{name!r} names no place; a place looks like resid_pre.5@3, z.5.2@end, k.5.1, head.5.2 or mlp.5"
            )
        kind, layer, index, position = match.groups()
        if kind not in LAYER_SITES and kind not in _UNIT_SITES:
            raise UnknownNameError("place", kind, (*LAYER_SITES, *_UNIT_SITES))
        if kind in _UNIT_SITES:
            Unit.parse(name.partition("@")[0])  # for its errors: a missing or superfluous number
        bare = _UNIT_SITES.get(kind, (kind,))
        sites = tuple(str(parse(f"{site}.{layer}", model.n_layers)) for site in bare)
        if index is not None and bare[0] not in _HEAD_SECOND | _HEAD_THIRD:
            raise ClearheadError(f"place {name!r}: site {bare[0]} has no heads; write {bare[0]}.{layer}")
        at = None if position is None else int(position) if position.isdigit() else position
        number = int(layer) % model.n_layers
        return cls(name, number, sites, None if index is None else int(index), at)


@dataclass(frozen=True, eq=False)
class Patches:
    """What patches did; axes p places, b prompts, m metrics."""

    places: tuple[str, ...]
    items: tuple[int, ...]
    unpatched: Float64[Tensor, "b m"]
    patched: Float64[Tensor, "p b m"]

    @property
    def effects(self) -> Float64[Tensor, "p b"]:
        """Patched − unpatched logit difference: negative where the place helps the answer."""
        return (self.patched - self.unpatched)[..., METRICS.index("logit_difference")]


def patch(
    model: Model,
    rows: TaskBatch,
    places: Sequence[str | Unit],
    ablation: Ablation = "corrupt",
    *,
    reference: Sequence[TaskBatch] = (),
    seed: int = 0,
) -> Patches:
    """Every metric with each place patched alone, for every prompt of `rows`.

    reference and seed: see `Replacement`. If one place is a pattern, score or sink, all runs take the eager path.
    Raises `ClearheadError` for heads and positions that the model or the prompts do not have, for `optimal` (which has
    no constants for arbitrary sites), and without places; `UnknownNameError` for names.
    """
    if not places:
        raise ClearheadError("places: expected at least one, as in ['head.5.2', 'resid_pre.5@3']")
    parsed = [Place.parse(place, model) for place in places]
    sites = list(dict.fromkeys(site for place in parsed for site in place.sites))
    opened = any(site.partition(".")[0] in SOFTMAX_SITES for site in sites)
    path = "eager" if opened else None
    values = Replacement(model, sites, ablation, reference=reference, seed=seed).values(rows)
    layers = sorted({place.layer for place in parsed})
    streams = [f"resid_pre.{layer}" for layer in layers]
    clean = rows.clean.to(model.device)
    base = model.run(clean, read=[*streams, "logits"], positions=[-1], path=path)
    unpatched = measure_logits(base.logits[None, :, 0], rows, base.logits[:, 0])[0]
    b, length = clean.shape
    patched = torch.empty(len(parsed), b, len(METRICS), dtype=torch.float64)
    at_once = max(1, BATCH_TOKENS // length)
    for layer in layers:
        pairs = [(p, i) for p, place in enumerate(parsed) if place.layer == layer for i in range(b)]
        for first in range(0, len(pairs), at_once):
            some = pairs[first : first + at_once]
            prompt = torch.tensor([i for _, i in some], device=model.device)
            edits = _edits([(parsed[p], i) for p, i in some], rows, values)
            begin = (layer, base[f"resid_pre.{layer}"][prompt])
            run = model.run(clean[prompt], edit=edits, begin=begin, positions=[-1], path=path)
            chosen = select_rows(rows, prompt.tolist())
            measured = measure_logits(run.logits[None, :, 0], chosen, base.logits[prompt, 0])[0].cpu()
            for (p, i), row in zip(some, measured, strict=True):
                patched[p, i] = row
    return Patches(tuple(place.name for place in parsed), tuple(rows.items), unpatched.cpu(), patched)


def exchange(rows: TaskBatch) -> TaskBatch:
    """The same items with clean and corrupt prompts exchanged and the answers kept, for denoising.

    The labels are those of the clean prompts; they hold where both prompts put the same things at the same positions.
    """
    return rows._replace(clean=rows.corrupt, corrupt=rows.clean)


def _edits(some: Sequence[tuple[Place, int]], rows: TaskBatch, values: Mapping[str, Tensor]) -> dict[str, Edit]:
    """Site → the edit that overwrites each row's own place."""
    return {
        site: _overwrite(site, some, rows, values[site])
        for site in dict.fromkeys(site for place, _ in some for site in place.sites)
    }


def _overwrite(site: str, some: Sequence[tuple[Place, int]], rows: TaskBatch, value: Tensor) -> Edit:
    name = site.partition(".")[0]
    heads, positions = (1, 2) if name in _HEAD_SECOND else (2, 1)

    def edit(x: Tensor, _run: Run) -> Tensor:
        mask = torch.zeros(x.shape[:3] if name in _HEAD_SECOND | _HEAD_THIRD else x.shape[:2], dtype=torch.bool)
        for row, (place, item) in enumerate(some):
            if site not in place.sites:
                continue
            where: list[int | slice] = [row] + [slice(None)] * (mask.ndim - 1)
            if place.index is not None:
                where[heads] = _checked(place, place.index, x.shape[heads], f"heads of {site}")
            if place.position is not None:
                where[positions] = _position(place, rows, item, x.shape[positions])
            mask[tuple(where)] = True
        mask = mask.to(x.device).view(*mask.shape, *[1] * (x.ndim - mask.ndim))
        own = value[[item for _, item in some]] if value.ndim and value.shape[0] > 1 else value
        return torch.where(mask, own, x)

    return edit


def _position(place: Place, rows: TaskBatch, item: int, length: int) -> int:
    if isinstance(place.position, str):
        if place.position not in rows.labels:
            raise UnknownNameError(f"label in place {place.name!r}", place.position, rows.labels)
        return int(rows.labels[place.position][item])
    assert place.position is not None
    return _checked(place, place.position, length, "tokens of these prompts")


def _checked(place: Place, number: int, count: int, of: str) -> int:
    if number >= count:
        raise ClearheadError(f"place {place.name!r}: there are {count} {of}, numbered from 0")
    return number
