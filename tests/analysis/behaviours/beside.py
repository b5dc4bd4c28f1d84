"""Planted units that read and write: some with a behaviour, others that only look like it.

    row = size · ( focus · one key of the unit's rule + (1 − focus) · all it sees ),   size lognormal

A unit acts at a random part of the queries where its rule has keys. In the share `follows` of them it obeys the rule,
in the others it reads any token it sees and writes a direction of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.analysis.behaviours.behaviour import Behaviour, Habit, Scores
from clearhead.analysis.behaviours.reading import Reading
from clearhead.ops.hash_rng import mix

FOLLOWS, HARDLY = (1.0, 0.85, 0.7), (0.15, 0.05)


@dataclass(frozen=True)
class Unit:
    kind: str
    habit: Habit
    follows: float
    rate: float
    focus: float
    seed: int

    def has(self, behaviour: Behaviour) -> bool:
        return self.kind == behaviour.name and self.follows >= min(FOLLOWS)


def plant(kind: str, make: Callable[[int], Habit], shares: Sequence[float], seed: int) -> list[Unit]:
    """A unit for each share; `make` gives a unit's rule from its seed."""
    units = []
    for number, follows in enumerate(shares):
        own = int(mix(seed, len(kind), number)[0] >> 2)
        draw = [int(value >> 11) / 2**53 for value in mix(own, torch.arange(2).numpy()).tolist()]
        units.append(Unit(kind, make(own), follows, 0.3 + 0.7 * draw[0], 0.5 + 0.45 * draw[1], own))
    return units


def read(units: Sequence[Unit], tokens: Tensor, d_model: int, seed: int) -> Reading:
    """What these units do on a batch."""
    b, t = tokens.shape
    seen = torch.ones(t, t, dtype=torch.bool).tril()
    rows, writes = [], []
    for number, unit in enumerate(units):
        g = torch.Generator().manual_seed((unit.seed + seed) % 2**62)
        keys = unit.habit.reads(tokens) & seen
        if unit.habit.only is not None:
            keys = keys & torch.isin(tokens, torch.tensor(unit.habit.only))[:, None]
        acts = keys.any(-1) & (torch.rand(b, t, generator=g) < unit.rate)
        acts[:, 0] = False
        at = acts.nonzero()
        obeys = torch.rand(len(at), generator=g) < unit.follows
        visible = seen[at[:, 1]]
        choice = torch.where(obeys[:, None], keys[at[:, 0], at[:, 1]], visible).float()
        key = (choice * torch.rand(choice.shape, generator=g)).argmax(-1)
        blur = F.normalize(visible * torch.rand(visible.shape, generator=g), p=1, dim=-1)
        size = torch.exp(0.5 * torch.randn(len(at), generator=g))
        parts = size[:, None] * (unit.focus * F.one_hot(key, t) + (1 - unit.focus) * blur)
        own = F.normalize(torch.randn(d_model, generator=g), dim=0).expand(len(at), -1)
        write = own.clone()
        if unit.habit.writes is not None and bool(obeys.any()):
            write[obeys] = unit.habit.writes(tokens[at[:, 0], key][obeys]).float()
        rows.append((torch.full((len(at),), number), at[:, 0], at[:, 1], parts, size))
        writes.append(size[:, None] * write)
    unit, block, query, parts, size = (torch.cat(column) for column in zip(*rows, strict=True))
    written = torch.cat(writes)
    return Reading(tokens, unit, block, query, parts, size, lambda chosen: written[chosen], len(units))


@dataclass(frozen=True)
class Planted:
    behaviour: Behaviour
    units: list[Unit]
    scores: Scores
    shuffled: Scores

    def rates(self, threshold: float | None = None) -> tuple[float, float, float]:
        """(precision, recall, share of all units found on shuffled text)."""
        threshold = self.behaviour.threshold if threshold is None else threshold
        found, chance = (
            (scores.score >= threshold) & (scores.cases >= self.behaviour.min_cases)
            for scores in (self.scores, self.shuffled)
        )
        has = torch.tensor([unit.has(self.behaviour) for unit in self.units]).numpy()
        return (found & has).sum() / max(1, found.sum()), (found & has).sum() / has.sum(), chance.mean()


def plant_beside(
    behaviour: Behaviour,
    model,
    decoys: Mapping[str, Callable[[int], Habit]],
    *,
    per_kind: int,
    each: int,
    seed: int = 0,
) -> Planted:
    """Units with the behaviour, half as many that hardly follow it, and decoys; scored on the probe and its twin."""
    shares = [*(FOLLOWS[n % 3] for n in range(per_kind)), *(HARDLY[n % 2] for n in range(per_kind // 2))]
    units = plant(behaviour.name, lambda own: behaviour.plant(model, own), shares, seed)
    for name, make in decoys.items():
        units += plant(name, make, [1.0] * each, seed)
    probe = behaviour.probe(model, seed)
    scores, shuffled = (
        behaviour.score(one, [read(units, tokens, model.d_model, n) for n, tokens in enumerate(one.batches)])
        for one in (probe, probe.shuffled(seed))
    )
    return Planted(behaviour, units, scores, shuffled)
