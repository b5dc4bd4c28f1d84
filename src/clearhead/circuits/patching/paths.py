"""Path patching: what a sender does to the answer through chosen receivers alone (arXiv 2211.00593, appendix B).

    1.  the prompt runs with the sender's output replaced and every other head and MLP held at its clean output: the
        receivers then read the clean stream plus the sender's change, directly, and nothing that others make of it
    2.  the prompt runs with the receivers' queries, keys, values or MLP outputs replaced by those of step 1, all else
        computed: what the receivers make of it travels on by every way

Senders are heads and MLPs; receivers are `head_q.L.h`, `head_k.L.g`, `head_v.L.g` (g a kv head: under grouped keys the
k and v of a group serve all of its queries) and `mlp.L`. Without receivers the effect is the direct one on the logits:
step 1 run to the end. Norms are computed, not frozen, in both steps. All receivers are patched at once.

Not here: edge patching of all edges of the graph (curves/graph_edges.py).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from clearhead.circuits.patching.ablation import Ablation, Replacement
from clearhead.circuits.patching.components import Components
from clearhead.circuits.patching.metrics import measure_logits
from clearhead.circuits.patching.nodes import BATCH_TOKENS, select_rows
from clearhead.circuits.patching.patch import Patches, Place
from clearhead.data.tasks import TaskBatch
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.run import Edit, Run
from clearhead.units.unit import Unit

_RECEIVING = ("head_q", "head_k", "head_v", "mlp")


def patch_paths(
    model: Model,
    rows: TaskBatch,
    senders: Sequence[str | Unit],
    receivers: Sequence[str | Unit] = (),
    ablation: Ablation = "corrupt",
    *,
    reference: Sequence[TaskBatch] = (),
    seed: int = 0,
) -> Patches:
    """Every metric with the paths of each sender alone replaced, for every prompt; places are the senders.

    Raises `ClearheadError` for units that cannot send or receive, for a receiver that reads nothing of a sender, and
    for layers without softmax attention, whose output cannot be held.
    """
    if len(model.attention_layers) < model.n_layers:
        raise ClearheadError(f"{model.name} has layers without softmax attention, which cannot be held at their output")
    if not senders:
        raise ClearheadError("senders: expected at least one head or MLP, as in ['head.5.2', 'mlp.3']")
    sending = [_unit(model, sender, ("head", "mlp"), "send: heads and MLPs do") for sender in senders]
    receiving = [_unit(model, one, _RECEIVING, "receive: head_q, head_k, head_v and mlp do") for one in receivers]
    for sender in sending:
        deaf = [one for one in receiving if not _reads(model, one, sender)]
        if deaf:
            raise ClearheadError(f"{deaf[0].id} reads nothing of {sender.id}: the sender must write before it reads")
    components = Components.of(model, "heads+mlps")
    held = list(components.sites)
    values = Replacement(model, held, ablation, reference=reference, seed=seed).values(rows)
    tokens = rows.clean.to(model.device)
    base = model.run(tokens, read=[*held, *(f"resid_pre.{n}" for n in range(model.n_layers)), "logits"])
    full = base.logits[:, -1]
    b, length = tokens.shape
    pairs = [(sender, item) for sender in range(len(sending)) for item in range(b)]
    at_once = max(1, BATCH_TOKENS // length)
    measured = []
    for first in range(0, len(pairs), at_once):
        some = pairs[first : first + at_once]
        item = torch.tensor([i for _, i in some], device=model.device)
        units = [sending[s] for s, _ in some]
        logits = _run_paths(model, tokens[item], units, receiving, components, base, values, item)
        measured.append(measure_logits(logits[None], select_rows(rows, item.tolist()), full[item])[0].cpu())
    patched = torch.cat(measured).unflatten(0, (len(sending), b))
    unpatched: Float64[Tensor, "b m"] = measure_logits(full[None], rows, full)[0].cpu()
    return Patches(tuple(unit.id for unit in sending), tuple(rows.items), unpatched, patched)


def _run_paths(
    model: Model,
    tokens: Tensor,
    senders: Sequence[Unit],
    receivers: Sequence[Unit],
    components: Components,
    base: Run,
    values: dict[str, Tensor],
    item: Tensor,
) -> Tensor:
    """Logits at the last token of each row: prompt `item[i]` with the paths of `senders[i]`."""
    begin = min(_layer(unit) for unit in senders)
    start = (begin, base[f"resid_pre.{begin}"][item])
    sent = torch.zeros(len(senders), len(components), dtype=torch.bool, device=model.device)
    for row, unit in enumerate(senders):
        sent[row, components.index(unit.id)] = True
    own: dict[str, list[int | None]] = {}
    for unit in receivers:
        own.setdefault(Place.parse(unit, model).sites[0], []).append(unit.index)
    top = max((_layer(unit) for unit in receivers), default=model.n_layers)
    received: dict[str, Tensor] = {}
    edits: dict[str, Edit] = {}
    for slot in components.slots:
        if not begin <= slot.layer <= top:
            continue
        value = values[slot.site]
        replaced = value[item] if value.ndim and value.shape[0] > 1 else value
        held = torch.where(slot.spread(sent), replaced, base[slot.site][item])
        edits[slot.site] = _hold(held, received, slot.site) if slot.site in own else held
    if not own:
        return model.run(tokens, edit=edits, begin=start, positions=[-1]).logits[:, 0]
    first = model.run(tokens, read=sorted(set(own) - set(edits)), edit=edits, begin=start)
    received |= first
    taken = {site: _take(received[site], heads) for site, heads in own.items()}
    lowest = min(_layer(unit) for unit in receivers)
    stream = (lowest, base[f"resid_pre.{lowest}"][item])
    return model.run(tokens, edit=taken, begin=stream, positions=[-1]).logits[:, 0]


def _hold(held: Tensor, received: dict[str, Tensor], site: str) -> Edit:
    """Notes what an MLP that receives makes of its input, and goes on with what others are to read."""

    def edit(x: Tensor, _run: Run) -> Tensor:
        received[site] = x
        return held

    return edit


def _take(value: Tensor, heads: Sequence[int | None]) -> Edit:
    """Overwrites the heads [b, h, t, dh] that receive, or all of an MLP's output."""

    def edit(x: Tensor, _run: Run) -> Tensor:
        if heads == [None]:
            return value
        x = x.clone()
        for head in heads:
            x[:, head] = value[:, head]
        return x

    return edit


def _unit(model: Model, text: str | Unit, kinds: Sequence[str], who: str) -> Unit:
    unit = Unit.parse(str(text))
    if unit.kind not in kinds or unit.position is not None:
        raise ClearheadError(f"{unit.id} does not {who}, at all positions together")
    place = Place.parse(unit, model)
    count = model.n_heads
    if unit.kind in ("head_k", "head_v"):
        count = model.geometry(place.layer).n_kv_heads
    if unit.index is not None and unit.index >= count:
        raise ClearheadError(f"{unit.id}: layer {unit.layer} has {count} of these, numbered from 0")
    return unit


def _layer(unit: Unit) -> int:
    assert unit.layer is not None
    return unit.layer


def _reads(model: Model, receiver: Unit, sender: Unit) -> bool:
    """Whether the sender writes into the stream that the receiver reads."""
    if _layer(sender) < _layer(receiver):
        return True
    after = receiver.kind == "mlp" and sender.kind == "head" and not model.family.parallel
    return after and sender.layer == receiver.layer
