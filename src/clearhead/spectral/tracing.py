"""Tracing upstream: from a difference of logits, or from one firing, to the firings that wrote what it needs.

    seeds → for each firing and side: attribute, strip (signals.py) → components that lost attention their triples
          → those that are firings themselves (a head at a source token with at least τ of its attention) → again

until nothing fires, or `depth` levels are traced. A firing is traced once, whatever it is reached from: it is known by
(layer, head, query, key). A side that still fires without everything that speaks for it is `unexplained`, and nothing
is followed from it: its thousands of triples say no more than that. The result is a `Graph` of units bound to tokens,

    component → mode.l.h.m@t → edge.l.h.k@q → … → logit.v@t

where the component is `edge.…@t` (a head's write from a source token where it fires), `head.…@t` (its writes from all
tokens where it does not), `mlp.…@t`, `bias.…@t` (an output bias), `embedding.v@t`, or `bias.…` without a token: what
the reading head adds itself. Weights into modes and edges are drops in attention, so that what enters a mode leaves it,
and what enters an edge is the attention it lost on its explained sides; weights into a logit are logits.

Seeds: the writes at the last token through the frozen final norm onto W_U[answers] − W_U[wrong], before any soft-cap;
firings carry the seed, largest first, until their sum reaches the logit difference (ACC). Without wrong answers the
answers are compared with the mean over the vocabulary. Sources: ACC (NeurIPS 2025), ACC++ (2602.13483).

Not done here: effects of removing what was traced (interventions.py).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.spectral.signals import SIDES, Firing, Side, Signal, attribute, read_row, strip, threshold
from clearhead.spectral.writes import Component, Parts, Stream
from clearhead.units import Graph, Provenance, Unit

DEPTH = 3
"""Levels of firings that are traced."""
PROTOCOL = (
    "spectral trace: integrated gradients of the attention weight over (component, token, mode), 64 steps from a zero "
    "head vector, norms frozen; triples removed by attribution until the weight is below min(1, 2.5/(query+1)). "
    "Weight of component → mode → edge: drop in attention; of edge → logit: logits through the frozen final norm"
)
VERSIONED = ("clearhead", "torch", "transformers")


class NothingToTraceError(ClearheadError):
    """A prompt without a start; `reason` says which of the two it is, in the same words for every prompt."""

    def __init__(self, reason: str, details: str):
        super().__init__(f"{reason}: {details}")
        self.reason = reason


class Link(NamedTuple):
    """What one unit wrote for one side of a firing."""

    source: Unit
    firing: Firing
    side: Side
    drops: dict[int, float]
    """Mode → drop in attention when the unit's part of it was removed."""

    @property
    def drop(self) -> float:
        """Drop in attention over all modes."""
        return sum(self.drops.values())


class Seed(NamedTuple):
    """A firing at the last token and what its write adds to the logit difference."""

    firing: Firing
    logits: float


@dataclass(frozen=True)
class Target:
    """Tokens that the prompt is continued with, against wrong ones; against the mean of all tokens where none are."""

    answers: tuple[int, ...]
    wrong: tuple[int, ...] = ()

    def direction(self, parts: Parts) -> tuple[Float[Tensor, " d"], float]:
        """What reads the difference off the normalised final stream, and its constant.

        Raises `ClearheadError` for no answer and for tokens that do not exist.
        """
        W, b = parts.unembedding
        for token in (*self.answers, *self.wrong):
            if not 0 <= token < W.shape[1]:
                raise ClearheadError(f"token {token} is outside the vocabulary of 0 to {W.shape[1] - 1}")
        if not self.answers:
            raise ClearheadError("give at least one answer token; there is nothing to trace back from")
        answers, wrong = list(self.answers), list(self.wrong) or slice(None)
        direction = W[:, answers].mean(1) - W[:, wrong].mean(1)
        return direction.to(parts.dtype), float(b[answers].mean() - b[wrong].mean())

    def difference(self, parts: Parts, state: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
        """The logit difference, before any soft-cap, from the stream that the final norm receives."""
        direction, constant = self.direction(parts)
        return parts.final_norm.normalise(state.to(parts.dtype)) @ direction + constant


@dataclass(frozen=True, eq=False)
class Trace:
    """What was found upstream of the seeds."""

    graph: Graph
    seeds: tuple[Seed, ...]
    signals: dict[tuple[Firing, Side], Signal]
    """Both sides of every traced firing, in the order of tracing."""
    links: list[Link]
    """What was found upstream of them, the largest drop of a side first."""
    level: dict[Firing, int]
    """How many firings lie between a traced firing and the nearest seed."""
    difference: float | None
    """The logit difference that seeds were found from, before any soft-cap."""
    carried: dict[str, float]
    """Its share by kind of component, in logits, and `constant` for the unembedding's bias."""

    @property
    def unexplained(self) -> list[tuple[Firing, Side]]:
        """Sides that still fire without everything that speaks for them; the graph has nothing upstream of these."""
        return [side for side, signal in self.signals.items() if not signal.found]


def logit_writes(stream: Stream, target: Target) -> tuple[list[Component], Float[Tensor, " c"], float]:
    """What every component adds to the logit difference at the last token, and the constant it starts from."""
    direction, constant = target.direction(stream.parts)
    last = len(stream) - 1
    scale = stream.parts.final_norm.frozen_scale(stream.state(stream.n_layers, last))
    written = stream.read(stream.n_layers, last, (direction * scale)[:, None])[:, 0]
    return stream.components(stream.n_layers, last), written, constant


def find_seeds(stream: Stream, target: Target) -> tuple[list[Seed], float, dict[str, float]]:
    """Seeds, the logit difference, and what each kind of component adds to it.

    Raises `NothingToTraceError` where the difference is not positive, and where no firing adds to it.
    """
    components, written, constant = logit_writes(stream, target)
    difference = float(written.sum()) + constant
    if difference <= 0:
        raise NothingToTraceError(
            "the model does not prefer the answer",
            f"the logit difference is {difference:.3f}, so there is nothing to trace; give a prompt that it gets "
            "right, or start from one firing",
        )
    carried = {"constant": constant}
    for component, part in zip(components, written.tolist(), strict=True):
        carried[component.kind] = carried.get(component.kind, 0.0) + part
    seeds: list[Seed] = []
    for place in written.argsort(descending=True).tolist():
        if written[place] <= 0 or sum(seed.logits for seed in seeds) >= difference:
            break
        firing = firing_of(stream, components[place], len(stream) - 1)
        if firing is not None:
            seeds.append(Seed(firing, float(written[place])))
    if not seeds:
        raise NothingToTraceError(
            "no head that fires at the last token adds to the logit difference",
            "there is nothing to trace; give another prompt or answer, or start from one firing",
        )
    return seeds, difference, carried


def firing_of(stream: Stream, component: Component, position: int) -> Firing | None:
    """The firing whose write this component is; None for another kind, below τ, and at queries that see one key."""
    if component.layer is None or component.head is None or component.source is None:
        return None
    firing = Firing(component.layer, component.head, position, component.source)
    keys = visible_keys(stream, firing)
    return firing if keys > 1 and attention(stream, firing) >= threshold(keys) else None


def visible_keys(stream: Stream, firing: Firing) -> int:
    """How many keys the query of a firing sees, itself included."""
    window = stream.parts.layers[firing.layer].geometry.window
    return firing.query + 1 if window is None else min(firing.query + 1, window)


def attention(stream: Stream, firing: Firing) -> float:
    """The weight of a firing in the forward."""
    return float(stream.site("pattern", firing.layer)[firing.head, firing.query, firing.key])


def trace(stream: Stream, start: Target | Sequence[Firing], *, depth: int = DEPTH, prompt: str = "") -> Trace:
    """Traces a prompt back from a logit difference, or from firings.

    Raises `NothingToTraceError` for a target that gives no seed (see `find_seeds`), `ClearheadError` for a firing that
    is below its threshold.
    """
    difference, carried = None, {}
    if isinstance(start, Target):
        seeds, difference, carried = find_seeds(stream, start)
        logit = Unit("logit", index=start.answers[0], position=len(stream) - 1)
        flows = {(_edge(stream, seed.firing), logit): seed.logits for seed in seeds}
    else:
        seeds, flows = [Seed(_checked(stream, firing), 0.0) for firing in start], {}
    signals: dict[tuple[Firing, Side], Signal] = {}
    links: list[Link] = []
    level = {seed.firing: 0 for seed in seeds}
    queue = list(level)
    for firing in queue:  # grows while it is read
        if level[firing] >= depth:
            continue
        for side in SIDES:
            signal = signals[firing, side] = strip(attribute(stream, firing, side))
            found = links_of(stream, signal) if signal.found else []
            links += found
            for upstream in (firing_named(link.source) for link in found if link.source.kind == "edge"):
                if upstream not in level:
                    level[upstream] = level[firing] + 1
                    queue.append(upstream)
    traced = {firing: number for firing, number in level.items() if number < depth}
    graph = _graph(stream, flows, links, prompt, [_edge(stream, seed.firing) for seed in seeds])
    return Trace(graph, tuple(seeds), signals, links, traced, difference, carried)


def _checked(stream: Stream, firing: Firing) -> Firing:
    """The firing, if it exists and reaches its threshold."""
    read_row(stream, firing)
    weight, limit = attention(stream, firing), threshold(visible_keys(stream, firing))
    if weight < limit:
        raise ClearheadError(
            f"head {firing.layer}.{firing.head} gives key {firing.key} {weight:.3f} of its attention at query "
            f"{firing.query}, and fires there from {limit:.3f}; take a stronger one"
        )
    return firing


def links_of(stream: Stream, signal: Signal) -> list[Link]:
    """Who wrote one side of a firing, as units: the largest drop first."""
    position = signal.firing.position(signal.side)
    drops: dict[Unit, dict[int, float]] = {}
    for component, mask, drop in zip(signal.components, signal.mask, signal.drop, strict=True):
        own = drops.setdefault(_unit(stream, component, signal.firing, position), {})
        for mode in mask.nonzero()[:, 0].tolist():
            own[mode] = own.get(mode, 0.0) + float(drop[mode])
    links = [Link(unit, signal.firing, signal.side, own) for unit, own in drops.items()]
    return sorted(links, key=lambda link: -link.drop)


def firing_named(unit: Unit) -> Firing:
    """The firing that an edge unit stands for."""
    layer, head, query, key = unit.layer, unit.index, unit.position, unit.part
    if unit.kind != "edge" or layer is None or head is None or query is None or key is None:
        raise ClearheadError(f"{unit} is no attention edge bound to a query; one looks like edge.9.6.3@15")
    return Firing(layer, head, query, key)


def _edge(stream: Stream, firing: Firing) -> Unit:
    return Unit("edge", *firing, activation=attention(stream, firing))


def _unit(stream: Stream, component: Component, reader: Firing, position: int) -> Unit:
    fires = firing_of(stream, component, position)
    if fires is not None:
        return _edge(stream, fires)
    match component.kind:
        case "embedding":
            return Unit("embedding", index=stream.tokens[position], position=position)
        case "offset":
            return Unit("bias", reader.layer)
        case "head":
            return Unit("head", component.layer, component.head, position)
        case kind:
            return Unit(kind, component.layer, position=position)


def _graph(
    stream: Stream, to_logit: dict[tuple[Unit, Unit], float], links: list[Link], prompt: str, seeds: list[Unit]
) -> Graph:
    flows = defaultdict(float, to_logit)
    for link in links:
        firing = link.firing
        for mode, drop in link.drops.items():
            middle = Unit("mode", firing.layer, firing.head, firing.position(link.side), mode)
            flows[link.source, middle] += drop
            flows[middle, _edge(stream, firing)] += drop
    units = list(dict.fromkeys([*seeds, *(unit for pair in flows for unit in pair)]))
    place = {unit: number for number, unit in enumerate(units)}
    provenance = Provenance(
        model=stream.parts.model.name,
        protocol=PROTOCOL,
        prompt=prompt,
        token_ids=tuple(stream.tokens),
        versions={name: metadata.version(name) for name in VERSIONED},
    )
    source = torch.tensor([place[pair[0]] for pair in flows], dtype=torch.int64)
    target = torch.tensor([place[pair[1]] for pair in flows], dtype=torch.int64)
    return Graph(units, source, target, list(flows.values()), provenance)
