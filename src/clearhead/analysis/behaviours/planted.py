"""Units that have a behaviour because they were made to: what thresholds are fixed on before any model is looked at.

    row of a planted unit = amplitude · ( focus · keys its habit reads + (1 − focus) · all it sees, half on key 0 )

A unit acts by its habit in the share `follows` of what it moves, by another habit or at random in the rest. The other
is another behaviour only where the unit's own has cases in any text: a unit that has none of its own in a probe does
nothing but the other there, and is what the probe finds in it. Units
differ in amplitude, focus, how far back they reach, how often they act, whether they rest on the first token at all
other queries (as original heads do) and in which of several keys they read. Among them are units that follow a habit
in a few per cent only, and units of `STRAY` habits next to the real ones: the token itself, two back, the recent ones,
two behind the earlier copy, fixed places, single tokens. Those with `follows` from `SHOWS` on count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.analysis.behaviours.behaviour import Behaviour, Habit
from clearhead.analysis.behaviours.decoys import decoys_of
from clearhead.analysis.behaviours.matching import duplicate
from clearhead.analysis.behaviours.reading import FIRST, Reading
from clearhead.model.access import Model
from clearhead.ops.hash_rng import mix

FOLLOWS = (1.0, 0.85, 0.7)
"""Shares of what a unit with the behaviour moves by it."""
HARDLY = (0.15, 0.05)
"""The same for units that do not count as having it."""
SHOWS = 0.6
FOCUS, BLUR = (0.7, 0.98), (0.35, 0.95)
"""Share of a row on the habit's keys: of sparse units, and of dense ones, whose softmax never lets the others go."""
REST = 0.1
"""Amplitude of a dense unit's rows where it rests on key 0."""
REACHES = (32, 64, 10**6)
"""How many tokens back a unit's keys lie at most."""
UNIT_DRAW, BATCH_DRAW = 131, 132

Reads = Callable[[Int[Tensor, "b t"]], Tensor]


@dataclass(frozen=True)
class PlantedUnit:
    """One unit: its habit, and how it carries it out."""

    kind: str
    """Behaviour, or stray habit."""
    habit: Habit
    follows: float
    other: str
    """The kind it acts by otherwise."""
    dense: bool
    often: float
    """Rows per token, about, unless there are fewer cases or it is dense."""
    focus: float
    reach: int
    seed: int
    shows: str | None
    """The behaviour that it has, if any: it may be the one it acts by otherwise."""


def _itself(tokens: Int[Tensor, "b t"]) -> Tensor:
    b, t = tokens.shape
    return torch.eye(t, dtype=torch.bool).expand(b, t, t)


def _two_back(tokens: Int[Tensor, "b t"]) -> Tensor:
    return _itself(tokens).roll(-2, -1).tril(-1)


def _recent(tokens: Int[Tensor, "b t"]) -> Tensor:
    b, t = tokens.shape
    return torch.ones(t, t, dtype=torch.bool).tril().triu(-7).expand(b, t, t)


def _anything(tokens: Int[Tensor, "b t"]) -> Tensor:
    b, t = tokens.shape
    return torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)


def _behind_what_followed(tokens: Int[Tensor, "b t"]) -> Tensor:
    return duplicate(tokens).roll(2, -1).tril(-1)


def _before_the_copy(tokens: Int[Tensor, "b t"]) -> Tensor:
    return duplicate(tokens).roll(-1, -1).tril(-1)


def _fifth(tokens: Int[Tensor, "b t"]) -> Tensor:
    b, t = tokens.shape
    mask = torch.zeros(t, t, dtype=torch.bool)
    mask[8:, 5:6] = True
    return mask.expand(b, t, t)


STRAY: dict[str, Reads] = {
    "itself": _itself,
    "two back": _two_back,
    "recent": _recent,
    "anything": _anything,
    "behind what followed": _behind_what_followed,
    "before the copy": _before_the_copy,
    "fifth place": _fifth,
    "few tokens": _anything,
}
"""Habits that are none of the behaviours; `few tokens` reads the same few wherever they stand."""


def plant_units(behaviours: Sequence[Behaviour], model: Model, per_kind: int, seed: int) -> list[PlantedUnit]:
    """`per_kind` units with each behaviour, half as many that hardly follow it, and `per_kind` of each stray habit.

    Of each decoy of a behaviour (decoys.py) there are a fifth as many, one at least.
    """
    units: list[PlantedUnit] = []
    names = [behaviour.name for behaviour in behaviours]
    for behaviour in behaviours:
        for number in range(per_kind + per_kind // 2):
            share = FOLLOWS[number % 3] if number < per_kind else HARDLY[number % 2]
            unit_seed = int(mix(seed, UNIT_DRAW, len(units))[0] >> 2)
            habit = behaviour.plant(model, unit_seed)
            common = habit.dense and habit.only is None and habit.writes is None
            others = [name for name in (*STRAY, *(names if common else ())) if name != behaviour.name]
            units.append(_unit(behaviour.name, habit, share, others, unit_seed, names))
    meant = {token for unit in units for token in unit.habit.only or ()}
    free = [token for token in range(model.d_vocab) if token not in meant]  # a unit for digits may be an operand head
    for name, reads in STRAY.items():
        for _ in range(per_kind):
            unit_seed = int(mix(seed, UNIT_DRAW, len(units))[0] >> 2)
            few = None
            if name == "few tokens":
                few = tuple(free[int(mix(unit_seed, i)[0] % len(free))] for i in range(40))
            units.append(_unit(name, Habit(reads, only=few, dense=True), 1.0, ["anything"], unit_seed, names))
    for behaviour in behaviours:
        for name, make in decoys_of(behaviour.name, model).items():
            for _ in range(max(1, per_kind // 5)):
                unit_seed = int(mix(seed, UNIT_DRAW, len(units))[0] >> 2)
                units.append(_unit(f"{behaviour.name}: {name}", make(unit_seed), 1.0, ["anything"], unit_seed, names))
    return units


def _unit(kind: str, habit: Habit, follows: float, others: list[str], seed: int, behaviours: list[str]) -> PlantedUnit:
    draw = [float(value >> 11) / 2**53 for value in mix(seed, torch.arange(6).numpy()).tolist()]
    dense = habit.dense and follows >= SHOWS and draw[1] < 0.15
    low, high = BLUR if dense else FOCUS
    other = others[int(draw[0] * len(others))]
    main = kind if follows >= SHOWS else other if follows <= 1 - SHOWS else None
    return PlantedUnit(
        kind,
        habit,
        follows,
        other,
        dense=dense,
        often=0.002 * 16.0 ** draw[2] * habit.often,
        focus=low + (high - low) * draw[3],
        reach=REACHES[int(draw[4] * len(REACHES))],
        seed=seed,
        shows=main if main in behaviours else None,
    )


class PlantedUnits:
    """A population of planted units."""

    def __init__(self, units: Sequence[PlantedUnit], d_model: int):
        self.units = list(units)
        self.d_model = d_model
        self._habits = {unit.kind: unit.habit for unit in units}

    @property
    def n_units(self) -> int:
        """How many were planted."""
        return len(self.units)

    @property
    def names(self) -> list[str]:
        """`planted.0` and on."""
        return [f"planted.{number}" for number in range(self.n_units)]

    @property
    def rows_per_token(self) -> int:
        """At most, as if all were dense."""
        return self.n_units

    def read(self, tokens: Int[Tensor, "b t"]) -> Reading:
        """What they do on these tokens, the same at every call."""
        key = int(mix(BATCH_DRAW, *(int(token) for token in tokens[:, 1:9].flatten()))[0])
        masks: dict[str, Tensor] = {}

        def keys_of(kind: str, habit: Habit) -> Tensor:
            if kind not in masks:
                masks[kind] = habit.reads(tokens)[:, :, : tokens.shape[1]]
            mask = masks[kind]
            return mask if habit.only is None else mask & torch.isin(tokens, torch.tensor(habit.only))[:, None]

        rows = []
        for number, unit in enumerate(self.units):
            generator = torch.Generator().manual_seed(int(mix(unit.seed, key)[0] >> 1))
            own = keys_of(unit.kind, unit.habit)
            other = self._habits.get(unit.other, Habit(_anything))
            rows += _act(number, unit, own, keys_of(unit.other, other), other, tokens, generator)
        return _join([act for act in rows if len(act.at)], tokens, self.n_units, self.d_model)


@dataclass(frozen=True, eq=False)
class _Act:
    """Rows of one unit that follow one habit."""

    unit: int
    at: Int[Tensor, "m 2"]
    parts: Float[Tensor, "m t"]
    write: Float[Tensor, "m d"] | None
    direction: int
    """Seed of the unit's own write direction, where `write` is None."""


def _act(
    number: int,
    unit: PlantedUnit,
    own: Tensor,
    other: Tensor,
    other_habit: Habit,
    tokens: Int[Tensor, "b t"],
    generator: torch.Generator,
) -> list[_Act]:
    b, t = tokens.shape
    back = torch.arange(t)[:, None] - torch.arange(t)
    own = own & (back <= unit.reach) if unit.reach < t and unit.kind != "bos_sink" else own
    cases = own.any(-1)
    cases[:, :FIRST] = False
    acts_at = unit.follows if unit.dense else unit.follows * unit.often * tokens.numel() / max(int(cases.sum()), 1)
    cases &= torch.rand(b, t, generator=generator) < acts_at
    acts = [_rows(number, unit, own, cases, 1.0, unit.habit, tokens, generator)]
    if unit.dense:
        rest = torch.ones(b, t, dtype=torch.bool) & ~cases
        rest[:, :FIRST] = False
        sink = torch.zeros_like(own)
        sink[:, :, 0] = True
        acts.append(_rows(number, unit, sink, rest, REST, Habit(_anything), tokens, generator))
    elif unit.follows < SHOWS or (unit.follows < 1 and bool(own.any())):  # where it has no case, it is silent
        possible = other.any(-1) & ~cases
        possible[:, :FIRST] = False
        chance = unit.often * tokens.numel() * (1 - unit.follows) / max(int(possible.sum()), 1)
        elsewhere = possible & (torch.rand(b, t, generator=generator) < chance)
        acts.append(_rows(number, unit, other, elsewhere, 1.0, other_habit, tokens, generator))
    return acts


def _rows(
    number: int,
    unit: PlantedUnit,
    keys: Tensor,
    where: Tensor,
    amplitude: float,
    habit: Habit,
    tokens: Int[Tensor, "b t"],
    generator: torch.Generator,
) -> _Act:
    """Rows at the queries of `where` that read `keys`."""
    at = where.nonzero()
    if not len(at):
        return _Act(number, at, torch.zeros(0, tokens.shape[1]), None, unit.seed)
    chosen = keys[at[:, 0], at[:, 1]].float()
    chosen *= torch.rand(chosen.shape, generator=generator)
    chosen /= chosen.sum(-1, keepdim=True)
    seen = (torch.arange(tokens.shape[1]) <= at[:, 1:]).float()
    weight = torch.rand(seen.shape, generator=generator) + 1e-3
    blur = seen * weight * weight * weight
    blur = 0.5 * blur / blur.sum(-1, keepdim=True)
    blur[:, 0] += 0.5
    size = amplitude * torch.exp(0.5 * torch.randn(len(at), 1, generator=generator))
    parts = size * (unit.focus * chosen + (1 - unit.focus) * blur)
    write = None
    if habit.writes is not None:
        write = size * habit.writes(tokens[at[:, 0], chosen.argmax(-1)]).float()
    return _Act(number, at, parts, write, unit.seed)


def _join(acts: list[_Act], tokens: Int[Tensor, "b t"], n_units: int, d_model: int) -> Reading:
    empty = [torch.zeros(0, 2, dtype=torch.int64)], [torch.zeros(0, tokens.shape[1])]
    unit = torch.tensor([act.unit for act in acts for _ in range(len(act.at))], dtype=torch.int64)
    source = torch.tensor([number for number, act in enumerate(acts) for _ in range(len(act.at))], dtype=torch.int64)
    place = torch.cat([act.at for act in acts] or empty[0])
    parts = torch.cat([act.parts for act in acts] or empty[1])
    first = torch.tensor([0, *(len(act.at) for act in acts)]).cumsum(0)

    def written(rows: Int[Tensor, " m"]) -> Float[Tensor, "m d"]:
        out = torch.zeros(len(rows), d_model)
        for number in source[rows].unique().tolist():
            here, act = (source[rows] == number).nonzero()[:, 0], acts[number]
            within = rows[here] - first[number]
            if act.write is not None:
                out[here] = act.write[within]
            else:
                generator = torch.Generator().manual_seed(act.direction)
                own = torch.nn.functional.normalize(torch.randn(d_model, generator=generator), dim=0)
                out[here] = act.parts[within].sum(-1, keepdim=True) * own
        return out

    return Reading(tokens, unit, place[:, 0], place[:, 1], parts, parts.sum(-1), written, n_units)
