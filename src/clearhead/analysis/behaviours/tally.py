"""What of a unit's contributions goes where a behaviour says.

    share(keys) = Σ |parts on these keys| / Σ |parts|       both sums over ALL rows of the unit, cases or not
    excess      = (share(expected) − share(control)) / (1 − share(control)), at least 0

A unit that acts everywhere and shows the behaviour in 3 % of what it moves has a share of 0.03, however well it does
in these 3 %. The control takes away what any unit with attention of that shape would get.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from clearhead.analysis.behaviours.behaviour import Case, Probe
from clearhead.analysis.behaviours.reading import Reading

KEYS_SHOWN = 5
"""Most keys of a case that are named."""
AT_ONCE = 4096
"""Rows reduced at once: few enough to stay in the processor's cache."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Every row of all readings of one population, reduced to what lies on given keys."""

    n_units: int
    batch: Int64[np.ndarray, " e"]
    place: Int64[np.ndarray, " e"]
    """Row within its batch's reading."""
    unit: Int64[np.ndarray, " e"]
    case: np.ndarray
    """The row's query has expected keys, [e] of bool."""
    total: Float64[np.ndarray, " e"]
    """Σ_j |part|."""
    on: Float64[np.ndarray, " e"]
    """Of that, on expected keys."""
    off: Float64[np.ndarray, " e"]
    """Of that, on control keys."""

    def per_unit(self, values: np.ndarray) -> Float64[np.ndarray, " n"]:
        """Sums over each unit's rows."""
        return np.bincount(self.unit, weights=values, minlength=self.n_units)

    def share(self, values: np.ndarray) -> Float64[np.ndarray, " n"]:
        """`values` as a share of all that each unit moves; 0 for a unit that moves nothing."""
        total = self.per_unit(self.total)
        return np.divide(self.per_unit(values), total, out=np.zeros(self.n_units), where=total > 0)

    def cases(self) -> Int64[np.ndarray, " n"]:
        """Rows of each unit at which the behaviour could show."""
        return self.per_unit(self.case).astype(np.int64)

    def excess(self) -> Float64[np.ndarray, " n"]:
        """The share on expected keys beyond that on control keys."""
        return beyond(self.share(self.on), self.share(self.off))


def beyond(share: Float64[np.ndarray, " n"], chance: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """`share` rescaled so that chance gives 0 and everything gives 1, at least 0."""
    return np.clip(np.divide(share - chance, 1 - chance, out=np.zeros_like(share), where=chance < 1), 0, 1)


def tally(probe: Probe, readings: list[Reading], expected: tuple[Tensor, ...] | None = None) -> Rows:
    """Reduce the readings; `expected` takes the place of the probe's own keys."""
    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in ("batch", "place", "unit", "case", "total", "on", "off")
    }
    for batch, reading in enumerate(readings):
        count = len(reading.unit)
        keys = (expected or probe.expected)[batch]
        columns["batch"].append(np.full(count, batch))
        columns["place"].append(np.arange(count))
        columns["unit"].append(reading.unit.cpu().numpy())
        columns["case"].append(keys.any(-1)[reading.block, reading.query].cpu().numpy())
        columns["total"].append(_on(reading, None))
        columns["on"].append(_on(reading, keys))
        columns["off"].append(_on(reading, probe.control[batch]) if probe.control else np.zeros(count))
    return Rows(readings[0].n_units, **{name: np.concatenate(parts) for name, parts in columns.items()})


def _on(reading: Reading, keys: Bool[Tensor, "b q k"] | None) -> Float64[np.ndarray, " e"]:
    """Size of each row's contributions on these keys; None: on all."""
    keys = None if keys is None else keys.to(reading.parts.device)
    sums = []
    for parts, block, query in zip(
        *(column.split(AT_ONCE) for column in (reading.parts, reading.block, reading.query)), strict=True
    ):
        size = parts.abs()
        sums.append((size if keys is None else size.mul_(keys[block, query])).sum(-1))
    return torch.cat(sums).double().cpu().numpy()


def best_cases(rows: Rows, probe: Probe, readings: list[Reading], value: np.ndarray | None = None) -> list[Case | None]:
    """Per unit the row with the largest product of what lies on expected keys and its share of the row.

    value: another measure [e] to choose rows by; rows with 0 are never chosen.
    """
    if value is None:
        value = rows.on * np.divide(rows.on, rows.total, out=np.zeros_like(rows.on), where=rows.total > 0)
    order = np.lexsort((-value, rows.unit))
    unit, start = np.unique(rows.unit[order], return_index=True)
    best: list[Case | None] = [None] * rows.n_units
    for one, row in zip(unit.tolist(), order[start].tolist(), strict=True):
        if value[row] > 0:
            best[one] = _case(readings, probe, int(rows.batch[row]), int(rows.place[row]))
    return best


def _case(readings: list[Reading], probe: Probe, batch: int, place: int) -> Case:
    reading = readings[batch]
    block, query = int(reading.block[place]), int(reading.query[place])
    size = reading.parts[place].abs() * probe.expected[batch][block, query].to(reading.parts.device)
    keys = size.argsort(descending=True)[:KEYS_SHOWN]
    return Case(batch, block, query, tuple(int(key) for key in keys if size[key] > 0.1 * size.max()))


def largest_key(reading: Reading, keys: Bool[Tensor, "b q k"]) -> Int64[np.ndarray, " e"]:
    """Of each row, the one of these keys with the largest contribution; 0 where there is none."""
    keys = keys.to(reading.parts.device)
    found = [
        parts.abs().mul_(keys[block, query]).argmax(-1)
        for parts, block, query in zip(
            *(column.split(AT_ONCE) for column in (reading.parts, reading.block, reading.query)), strict=True
        )
    ]
    return torch.cat(found).cpu().numpy()
