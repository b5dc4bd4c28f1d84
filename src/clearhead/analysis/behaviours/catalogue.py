"""Look for all behaviours in populations of units: what is found, and what would be found by chance.

Every probe is read twice, as it is and shuffled (`Probe.shuffled`): what counts as found on shuffled text is what the
detectors find in this many units when there is nothing to find. One text is finished before the next is begun, so that
what stops halfway has whole behaviours. Behaviours of one text share their readings, and populations whose readings fit
in `READINGS_BYTES` share their forwards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from clearhead.analysis.behaviours.behaviour import Behaviour, Probe, Scores
from clearhead.analysis.behaviours.reading import Population, Reading
from clearhead.model.access import Model
from clearhead.runs import progress

READINGS_BYTES = 2 * 2**30
"""Memory for the readings of one text: those of all layers of a small model."""
WRITTEN = 0.5
"""Rows of the atlas are those whose score reaches this share of the threshold; the others show nothing."""


@dataclass(frozen=True, eq=False)
class Found:
    """What was found of one behaviour in one population."""

    behaviour: Behaviour
    place: int
    """Of the population, among those looked at."""
    names: list[str]
    scores: Scores
    probe: Probe
    by_chance: int | None
    """Units found on the shuffled probe; None where it was not read."""

    @property
    def found(self) -> np.ndarray:
        """Which units have the behaviour, [n] of bool."""
        return self.behaviour.found(self.scores)


def build_probes(behaviours: Sequence[Behaviour], model: Model, seed: int) -> dict[str, Probe]:
    """The probe of each behaviour by its name; those of one text share their batches."""
    probes: dict[str, Probe] = {}
    with progress("probes", len(behaviours), "probes") as advance:
        for behaviour in behaviours:
            probes[behaviour.name] = behaviour.probe(model, seed)
            advance(1)
    return probes


def look_for(
    populations: Sequence[Population],
    behaviours: Sequence[Behaviour],
    probes: Mapping[str, Probe],
    *,
    seed: int = 0,
    by_chance: bool = True,
) -> Iterator[list[Found]]:
    """Every behaviour in every population, text by text; within a text, in the order of the populations."""
    texts = same_text(behaviours, probes)
    rounds = 2 if by_chance else 1
    tokens = sum(batch.numel() for text in texts for batch in probes[text[0].name].batches)
    with progress("behaviours", 2 * rounds * len(populations) * tokens) as advance:  # tokens are read, then scored
        for text in texts:
            own = {one.name: probes[one.name] for one in text}
            scores = score_all(populations, text, own, advance)
            chance = None
            if by_chance:
                dealt = {name: probe.shuffled(seed) for name, probe in own.items()}
                chance = score_all(populations, text, dealt, advance)
            found = []
            for (place, name), value in scores.items():
                behaviour = next(one for one in text if one.name == name)
                count = None if chance is None else int(behaviour.found(chance[place, name]).sum())
                found.append(Found(behaviour, place, populations[place].names, value, own[name], count))
            yield found


def rows_of(found: Found, model: Model) -> dict[str, list[Any]]:
    """Columns of the atlas table: units found, and those at `WRITTEN` of the threshold and above."""
    behaviour, scores = found.behaviour, found.scores
    names = ("unit_id", "behaviour", "score", "threshold", "found", "cases", "tokens", "query", "keys")
    rows: dict[str, list[Any]] = {name: [] for name in names}
    is_found = found.found
    for unit in np.flatnonzero(scores.score >= WRITTEN * behaviour.threshold).tolist():
        case = scores.best[unit]
        tokens = [] if case is None else found.probe.batches[case.batch][case.block]
        values = (
            found.names[unit],
            behaviour.name,
            float(scores.score[unit]),
            behaviour.threshold,
            bool(is_found[unit]),
            int(scores.cases[unit]),
            model.token_strings(tokens),
            None if case is None else case.query,
            [] if case is None else list(case.keys),
        )
        for name, value in zip(names, values, strict=True):
            rows[name].append(value)
    return rows


def score_all(
    populations: Sequence[Population],
    text: Sequence[Behaviour],
    probes: Mapping[str, Probe],
    advance: Callable[[int], object] = lambda _: None,
) -> dict[tuple[int, str], Scores]:
    """Scores by place of the population and name of the behaviour, in this order; all probes have the same batches."""
    batches = probes[text[0].name].batches
    size = max(1, 4 * sum(tokens.numel() * tokens.shape[1] for tokens in batches))
    scores: dict[tuple[int, str], Scores] = {}
    for group in _groups(populations, READINGS_BYTES // size):
        readings: list[list[Reading]] = [[] for _ in group]
        for tokens in batches:
            for population, of_population in zip(group, readings, strict=True):
                of_population.append(population.read(tokens))
                advance(tokens.numel())
        for of_population in readings:
            place = len(scores) // len(text)
            for behaviour in text:
                scores[place, behaviour.name] = behaviour.score(probes[behaviour.name], of_population)
            of_population.clear()
            advance(sum(tokens.numel() for tokens in batches))
    return scores


def same_text(behaviours: Sequence[Behaviour], probes: Mapping[str, Probe]) -> list[list[Behaviour]]:
    """Behaviours whose probes have the same batches stand together."""
    texts: list[list[Behaviour]] = []
    for behaviour in behaviours:
        batches = probes[behaviour.name].batches
        for text in texts:
            others = probes[text[0].name].batches
            if len(others) == len(batches) and all(map(torch.equal, others, batches)):
                text.append(behaviour)
                break
        else:
            texts.append([behaviour])
    return texts


def _groups(populations: Sequence[Population], rows_per_token: float) -> Iterator[list[Population]]:
    """Neighbours that together have at most so many rows per token; one alone may have more."""
    group: list[Population] = []
    for population in populations:
        if group and sum(one.rows_per_token for one in (*group, population)) > rows_per_token:
            yield group
            group = []
        group.append(population)
    if group:
        yield group
