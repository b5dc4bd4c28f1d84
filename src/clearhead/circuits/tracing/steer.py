"""Units turned up or down: the effect that edges predict, and the effect measured in the model.

Turning a unit s by a factor f adds (f − 1) times what it wrote in this prompt to the stream, at its depths and
positions: 0 removes it, 2 doubles it, -1 turns it round. An edge is linear in its source, so the prediction is

    Δ target = Σ_s (f_s − 1) · edge(s → target)

The measurement runs the model again with those vectors added, and holds as much of the first forward as is asked:

    everything    patterns, norm scales and the outputs of MLPs: what comes after the units is clamped. All that is left
                  is linear, and the measured effect is the prediction, to rounding
    attention     patterns and norm scales; MLPs compute anew, and with them all features downstream. Meant for small
                  changes: without its norms nothing keeps a large one from growing from layer to layer
    nothing       everything computes anew

Between the prediction and the second lies what goes through MLPs (features downstream answer), between the second and
the third what patterns and norms do. Targets are read as graphs read them: a logit less the mean of all logits, before
any soft-cap; the pre-activation of a feature; that of a Lorsa head with its own pattern held. Activations of edited
units are not computed anew: a unit that depends on another edited one still adds what its factor says.

Attention layers that a Lorsa replaces are clamped with `everything` (their heads are units), and carry what the model's
own attention carries with `attention`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.circuits.tracing.readers import Reads, read_difference, read_units
from clearhead.circuits.tracing.sources import Opened
from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError
from clearhead.model.norms import Norm
from clearhead.model.run import Edit, Run
from clearhead.spectral.tracing import Target
from clearhead.units import Unit
from clearhead.units.graph import Graph

Held = Literal["everything", "attention", "nothing"]
Factors = Mapping[Unit, float] | Mapping[str, float]
"""By unit or by its name, 0 to remove it, 1 to leave it."""
HELD: tuple[Held, ...] = ("everything", "attention", "nothing")


@dataclass(frozen=True, eq=False)
class Effect:
    """What turning units did to m targets."""

    targets: tuple[Unit, ...]
    held: Held
    before: Float[Tensor, " m"]
    """The targets in the unchanged forward."""
    predicted: Float[Tensor, " m"]
    """The change that the edges say."""
    measured: Float[Tensor, " m"]
    """The change that was found."""


def predict(graph: Graph, factors: Factors) -> dict[Unit, float]:
    """The change of every unit that edges of the turned units lead to, as a saved graph has it; direct edges alone.

    Edges that were pruned from the graph are missing from the prediction. Raises `UnknownNameError` for a unit that is
    not in the graph, `NonFiniteError` for a factor that is no number.
    """
    turned = np.zeros(len(graph.units))
    for unit, factor in factors.items():
        turned[graph.place(unit)] = _finite(unit, factor) - 1
    change = np.bincount(graph.target, graph.weight * turned[graph.source], minlength=len(graph.units))
    reached = np.unique(graph.target[turned[graph.source] != 0])
    return {graph.units[place]: float(change[place]) for place in reached}


@torch.no_grad()
def steer(
    opened: Opened,
    factors: Factors,
    targets: Sequence[Unit] | Target,
    held: Held = "nothing",
) -> Effect:
    """Turns units of an opened prompt and measures what becomes of the targets: one forward, two where parts are held.

    Raises `UnknownNameError` for a unit that writes nothing in this prompt, `NonFiniteError` for a factor that is no
    number, and `ClearheadError` for no units, another `held`, and targets that cannot be read.
    """
    if held not in HELD:
        raise UnknownNameError("part to hold", held, HELD)
    if not factors:
        raise ClearheadError("give at least one unit with a factor, as in {'feature.4.17@7': 0.0}")
    reads = read_difference(opened, targets) if isinstance(targets, Target) else read_units(opened, targets)
    turned = torch.zeros(len(opened.sources), dtype=opened.frozen.dtype, device=opened.sources.write.device)
    names = {unit.id: place for unit, place in opened.sources.place.items()}
    for unit, factor in factors.items():
        name = unit if isinstance(unit, str) else unit.id
        if name not in names:
            raise UnknownNameError("unit that writes in this prompt", name, names)
        turned[names[name]] = _finite(unit, factor) - 1
    before = {depth: opened.frozen.state(depth) for depth in range(opened.frozen.top + 1)}
    if held != "nothing":  # the same forward without the change, so that its rounding is not measured
        before = _forward(opened, turned * 0, held)
    after = _forward(opened, turned, held)
    measured = _read(opened, reads, after, held) - _read(opened, reads, before, held)
    if not bool(measured.isfinite().all()):
        raise NonFiniteError(
            "the model's answer to this change is not finite: with norm scales held, MLPs that answer to one another "
            "can grow without bound. Take factors nearer to 1, or hold nothing"
        )
    return Effect(reads.targets, held, reads.value, reads.edges(opened) @ turned, measured)


def _finite(unit: Unit | str, factor: float) -> float:
    if not math.isfinite(factor):
        raise NonFiniteError(f"the factor of {unit} is {factor}; 0 removes a unit, 1 leaves it, 2 doubles it")
    return factor


def _read(opened: Opened, reads: Reads, states: dict[int, Tensor], held: Held) -> Float[Tensor, " m"]:
    """The targets' values in a stream, through norms whose scale is held or not."""
    value = reads.constant.clone()
    for depth in reads.depth.unique().tolist():
        here = (reads.depth == depth).nonzero()[:, 0]
        state, position, vector = states[depth], reads.position[here], reads.vector[here]
        norm = opened.norm_at(depth)
        if held == "nothing" and norm is not None:
            scale = norm.frozen_scale(state) / norm.frozen_scale(opened.frozen.state(depth))
            vector = vector * scale[position]
        value.index_add_(0, reads.row[here], (vector * state[position]).sum(1))
    return value


def _forward(opened: Opened, turned: Float[Tensor, " n"], held: Held) -> dict[int, Float[Tensor, "t d"]]:
    """The stream at every depth when units add (factor − 1) times their writes."""
    frozen = opened.frozen
    changes = _changes(opened, turned)
    names = {depth: _stream_site(opened, depth) for depth in range(frozen.top + 1)}
    if held == "nothing":
        edit: dict[str, Edit] = {names[depth]: _adding(change) for depth, change in changes.items()}
    else:
        edit = _holding(opened, changes, held)
    reads = {*names.values(), *(f"{site}.{layer}" for layer in range(frozen.n_layers) for site in _READ)}
    tokens = torch.tensor([opened.stream.tokens], device=opened.parts.model.device)
    run = opened.parts.model.run(tokens, read=sorted(reads), edit=edit, path="eager")
    return {depth: run[name][0].to(frozen.dtype) for depth, name in names.items()}


_READ = ("resid_pre", "attn_out", "mlp_out")


def _changes(opened: Opened, turned: Float[Tensor, " n"]) -> dict[int, Float[Tensor, "t d"]]:
    """What is added to the stream, by depth."""
    sources = opened.sources
    entries = turned[sources.unit].nonzero()[:, 0]
    added: dict[int, Tensor] = {}
    for depth in sources.depth[entries].unique().tolist():
        here = entries[sources.depth[entries] == depth]
        write = sources.write[here] * turned[sources.unit[here], None]
        added[depth] = torch.zeros_like(opened.frozen.state(0)).index_add(0, sources.position[here], write)
    return added


def _stream_site(opened: Opened, depth: int) -> str:
    """The site that holds the stream of a depth: writes into it are seen by all that reads there."""
    layer, second = divmod(depth, 2)
    if layer == opened.frozen.n_layers:
        return f"resid_post.{layer - 1}"
    return f"resid_mid.{layer}" if second and not opened.frozen.parallel else f"resid_pre.{layer}"


def _adding(change: Float[Tensor, "t d"]) -> Edit:
    return lambda value, _run: value + change.to(value.dtype)


def _holding(opened: Opened, changes: dict[int, Tensor], held: Held) -> dict[str, Edit]:
    """Edits that keep patterns, norm scales and, with `everything`, the modules' outputs as they were."""
    frozen, stream = opened.frozen, opened.stream
    edit: dict[str, Edit] = {}
    for layer in range(frozen.n_layers):
        edit[f"pattern.{layer}"] = stream.run[f"pattern.{layer}"]
        for site, depth in (("attn_in", 2 * layer), ("mlp_in", 2 * layer + 1)):
            norm = opened.norm_at(depth)
            if norm is not None:
                edit[f"{site}.{layer}"] = _normed(norm, frozen.state(depth), _stream_site(opened, depth))
        if held == "everything":
            edit[f"mlp_out.{layer}"] = stream.run[f"mlp_out.{layer}"]
            if layer in frozen.replaced:
                edit[f"attn_out.{layer}"] = stream.run[f"attn_out.{layer}"]
        if not frozen.parallel:
            edit[f"resid_mid.{layer}"] = _summed(opened, layer, ("attn_out",), changes.get(2 * layer + 1))
        edit[f"resid_post.{layer}"] = _summed(
            opened, layer, ("attn_out", "mlp_out"), changes.get(2 * layer + 2), changes.get(2 * layer + 1)
        )
    if 0 in changes:
        edit["resid_pre.0"] = _adding(changes[0])
    return edit


def _normed(norm: Norm, state: Float[Tensor, "t d"], site: str) -> Edit:
    """What a module reads: the stream at `site` through a norm with the scale that it had in `state`."""
    scale = norm.frozen_scale(state)

    def read(value: Tensor, run: Run) -> Tensor:
        x = norm.centre(run[site].to(scale.dtype)) * scale
        x = x if norm.gain is None else x * norm.gain.detach()
        x = x if norm.bias is None else x + norm.bias.detach()
        return x.to(value.dtype)

    return read


def _summed(opened: Opened, layer: int, modules: tuple[str, ...], *changes: Tensor | None) -> Edit:
    """The stream behind one or both modules: as it was, and what has changed, through norms behind them held."""
    frozen, stream = opened.frozen, opened.stream
    depth = 2 * layer + len(modules)
    places = range(len(frozen))
    write = {"attn_out": frozen.attention_write, "mlp_out": frozen.mlp_write}

    def total(value: Tensor, run: Run) -> Tensor:
        state = frozen.state(depth) + run[f"resid_pre.{layer}"][0].to(frozen.dtype) - frozen.state(2 * layer)
        for module in modules:
            changed = run[f"{module}.{layer}"][0].to(frozen.dtype) - stream.site(module, layer)
            state = state + write[module](layer, changed, places)
        for change in changes:
            if change is not None:
                state = state + change
        return state[None].to(value.dtype)

    return total
