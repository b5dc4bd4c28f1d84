"""How far each head of a Lorsa can be trusted: rows of the atlas' table `trust`, and a summary over all heads.

    seed_stability    likeness to the best partner in Lorsas of other seeds (seeds.py)
    explained         R² of the head's write |w_o| z with what the model's own attention output y has along it, over the
                      tokens i where it is active:  corr( |w_o| z_i, y_i · ŵ_o )², 0 where it is negative
    explained_alone   the same with the other heads' part taken out of y:  corr( |w_o| z_i, |w_o| z_i + e_i · ŵ_o )²,
                      e = y − ŷ. Low where what the head says is the dictionary's error rather than the layer's output
    host_share        largest share of an original head by the output formula (shares.py), for the same host throughout
    causal_effect     presence of the head, in logits of the tokens that it moves most, measured by removing it
    gradient_effect, predicted_effect, linear_effect    predicted to first order, by the direct path, through attention
    effect_slope      Σ effect · direct / Σ direct² over the cases (head_effects.py): 1 when the direct path is all
    effect_correlation   their correlation over the cases; left out below 4 cases
    causal_loss, causal_kl       what removing the head costs the next token's prediction, nats
    control_effect, control_loss, control_kl   the same reader when another active head is removed (effect), and what a
                      random direction of the same length costs (loss, KL)
    pattern_rank      of the pattern_coordinates that its pattern's score is a sum over, those that keep 95 % of z
    pattern_overlap   largest mean overlap with another pattern of its group (own_patterns.py); not where there is one

What other settings than removal do is in `interventions` (interventions.py).

Intervals are the 2.5 % and 97.5 % quantiles of 1,000 bootstrap samples: of stretches of text (seed_stability,
explained, host_share) or of a head's cases (effects), which for few cases is too narrow rather than too wide.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from clearhead.analysis.entries import Entries, entries_of
from clearhead.analysis.head_effects import Becomes, HeadEffects, measure_heads
from clearhead.analysis.interventions import fit_slope, intervention_rows, setting_name
from clearhead.analysis.own_patterns import OWN, head_ranks, own_share
from clearhead.analysis.seeds import STABLE, STRETCHES, Stability, activations, stability, stretch_of
from clearhead.circuits.patching.unit_effects import EffectMeter
from clearhead.data.text import TokenBlocks
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.ops.bootstrap import RESAMPLES, bounds, draw_counts, mean_bounds
from clearhead.runs import progress

FIRST = 1
"""Positions before this are left out, as everywhere."""
UNITS_AT_ONCE = 256
RANK_TOKENS = 32
"""Active tokens per head from which the rank of its pattern is measured; twice as many moved no quantile by one."""
SET = " when set to "
"""In the names of numbers about settings other than removal."""
PREDICTIONS = ("gradient", "direct", "linear")
EFFECTS = {
    "causal_effect": ("own", "effect"),
    "gradient_effect": ("own", "gradient"),
    "predicted_effect": ("own", "direct"),
    "linear_effect": ("own", "linear"),
    "causal_loss": ("own", "loss"),
    "causal_kl": ("own", "kl"),
    "control_effect": ("other", "effect"),
    "control_loss": ("random", "loss"),
    "control_kl": ("random", "kl"),
}
"""Means over cases: name, kind of case, number."""


class Measure(NamedTuple):
    """One measure of some units, with NaN where an interval or value is missing."""

    value: Float[np.ndarray, " n"]
    low: Float[np.ndarray, " n"]
    high: Float[np.ndarray, " n"]
    cases: NDArray[np.int64]


class Trust(NamedTuple):
    """What is known of every unit, and of all of them together."""

    rows: dict[str, list[Any]]
    """Columns of the table `trust`."""
    interventions: dict[str, list[Any]]
    """Columns of the table `interventions`."""
    summary: dict[str, Any]
    """Numbers over all heads; a list of three is a value with its interval."""


@torch.no_grad()
def measure_trust(
    lorsa: Lorsa,
    model: Model,
    layer: int,
    blocks: TokenBlocks,
    *,
    others: Sequence[Lorsa] = (),
    heads: Sequence[int] = (),
    families: dict[str, list[int]] | None = None,
    n_effects: int = 1000,
    cases: int = 8,
    becomes: Sequence[Becomes] = (),
    batch_blocks: int = 8,
    seed: int = 0,
) -> Trust:
    """Measures every head on all blocks; effects and patterns of `heads`, or of the `n_effects` active at most tokens.

    others: Lorsas of the same layer from other seeds. families: names with their heads, whose effects are measured as
    one unit's. becomes: what activations are set to besides 0 (`head_effects.py`). Raises `ClearheadError` for Lorsas
    of other layers, without blocks, and for heads that do not exist.
    """
    if not len(blocks):
        raise ClearheadError("there are no token blocks to measure on; give more text or a shorter context")
    missing = [head for head in heads if not 0 <= head < lorsa.n_heads]
    if missing:
        raise ClearheadError(f"there is no head {missing[0]}: the Lorsa has {lorsa.n_heads}")
    meter = EffectMeter(model, layer)
    carried = _Carried(lorsa, model, layer, len(blocks))
    n, context = len(blocks), blocks.context
    entries: list[list[Entries]] = [[] for _ in (lorsa, *others)]
    inputs: list[Float[Tensor, "b t d"]] = []
    with progress("activity", blocks.tokens.numel()) as advance:
        for first in range(0, n, batch_blocks):
            tokens = blocks.tokens[first : first + batch_blocks]
            numbers = np.arange(first, first + len(tokens))
            run = model.run(tokens, read=[f"{site}.{layer}" for site in ("attn_in", "attn_out", "z")])
            inputs.append(run[f"attn_in.{layer}"].to(lorsa.W_V.dtype))
            for place, one in enumerate((lorsa, *others)):
                codes = one.encode(run[f"attn_in.{layer}"].to(one.W_V.dtype))
                entries[place].append(entries_of(codes, numbers, FIRST))
                if not place:
                    y = run[f"attn_out.{layer}"].to(one.W_V.dtype)
                    carried.update(entries[0][-1], first, y, y - one.decode(codes), run[f"z.{layer}"])
            advance(tokens.numel())
    sparse = [
        activations(_joined(found), one.n_heads, n, context)
        for one, found in zip((lorsa, *others), entries, strict=True)
    ]
    z, count = sparse[0], np.diff(sparse[0].tocsc().indptr)
    names = [f"lorsa.{layer}.{head}" for head in range(lorsa.n_heads)]
    drawn = draw_counts(min(STRETCHES, n), seed)
    measures = {name: (names, found) for name, found in carried.measures(drawn, count).items()}
    summary: dict[str, Any] = {"tokens": n * (context - FIRST), "heads": len(count), "dead": int((count == 0).sum())}
    if others:
        back = stability(
            lorsa, z, list(zip(others, sparse[1:], strict=True)), n_blocks=n, context=context, first=FIRST, seed=seed
        )
        measures["seed_stability"] = (
            names,
            Measure(back.value, back.low, back.high, np.full(len(names), len(others))),
        )
        summary |= _stable(back, seed)
    chosen = list(heads) or [int(h) for h in np.argsort(-count, kind="stable")[:n_effects] if count[h]]
    units = [[head] for head in chosen] + list((families or {}).values())
    settings: list[Becomes] = [0.0, *(value for value in becomes if value != 0)]
    found = measure_heads(meter, lorsa, z, blocks.tokens, units, cases=cases, becomes=settings, seed=seed)
    labels = [names[head] for head in chosen] + list(families or {})
    measures |= {name: (labels, one) for name, one in _effects(found, len(units), seed).items()}
    summary |= _together(found, len(chosen), seed)
    patterns, said = _patterns(lorsa, inputs, chosen, seed)
    measures |= {name: (names, one) for name, one in patterns.items()}
    summary |= said
    for name in ("explained", "explained_alone", "host_share"):
        value = measures[name][1].value
        if np.isfinite(value).any():
            summary[f"{name}_median"] = float(np.nanmedian(value))
    return Trust(_rows(measures), intervention_rows(found, labels, seed), summary)


class _Carried:
    """Sums over active tokens, per head and stretch of text, of what the layer's output has along the head."""

    def __init__(self, lorsa: Lorsa, model: Model, layer: int, n_blocks: int):
        self.n_blocks, self.stretches = n_blocks, min(STRETCHES, n_blocks)
        self.norm = lorsa.W_O.norm(dim=-1).clamp_min(torch.finfo(lorsa.W_O.dtype).tiny)
        self.direction = lorsa.W_O / self.norm[:, None]
        self.W_O = model.weights(layer).W_O.detach().to(self.direction)
        heads, n = len(self.W_O), lorsa.n_heads
        self.sums = np.zeros((8, self.stretches, n))
        """Number, Σa, Σa², Σp, Σp², Σap, and with q = a + e · ŵ: Σq, Σq² (Σaq = Σa² + Σa e·ŵ is apart)."""
        self.along = np.zeros((self.stretches, n))
        self.hosts = np.zeros((self.stretches, n, heads))

    def update(
        self,
        entries: Entries,
        first: int,
        y: Float[Tensor, "b t d"],
        error: Float[Tensor, "b t d"],
        z: Float[Tensor, "b t h dv"],
    ) -> None:
        """Take one batch, which begins at block `first`, into account."""
        t, n = y.shape[1], len(self.direction)
        for block in range(len(y)):  # a block's entries at a time: each needs a vector of width d
            here = entries.token // t == first + block
            unit = torch.from_numpy(entries.unit[here]).to(y.device)
            position = torch.from_numpy(entries.token[here] % t).to(y.device)
            stretch = int(stretch_of(np.array([first + block]), self.n_blocks)[0])
            a = torch.from_numpy(entries.value[here]).to(y) * self.norm[unit]
            w = self.direction[unit]
            p, q = (w * y[block, position]).sum(1), a + (w * error[block, position]).sum(1)
            for place, values in enumerate((torch.ones_like(a), a, a * a, p, p * p, a * p, q, q * q)):
                self.sums[place, stretch] += self._sum(unit, values, n)
            self.along[stretch] += self._sum(unit, a * q, n)
            for head, W_O in enumerate(self.W_O):
                out = z[block, :, head].to(y) @ W_O
                self.hosts[stretch, :, head] += self._sum(unit, (w * out[position]).sum(1), n)

    def _sum(self, unit: Tensor, values: Tensor, n: int) -> NDArray[np.float64]:
        return np.bincount(unit.cpu().numpy(), values.double().cpu().numpy(), minlength=n).astype(np.float64)

    def measures(self, drawn: Float[np.ndarray, "r g"], count: NDArray[np.int64]) -> dict[str, Measure]:
        """`explained`, `explained_alone` and `host_share` of every head."""
        number, a, aa, p, pp, ap, q, qq = self.sums
        total = self.hosts.sum(0)
        host = total.argmax(1)
        found: dict[str, list[NDArray[np.float64]]] = {"explained": [], "explained_alone": [], "host_share": []}
        for low in range(0, len(count), UNITS_AT_ONCE):
            part = slice(low, low + UNITS_AT_ONCE)
            for name, parts in (
                ("explained", (number, a, aa, p, pp, ap)),
                ("explained_alone", (number, a, aa, q, qq, self.along)),
            ):
                found[name].append(_with_interval([one[:, part] for one in parts], drawn, _squared_correlation))
            at = host[part]
            found["host_share"].append(
                _with_interval([self.hosts[:, part]], drawn, lambda sums, at=at: _share_of(sums, at))
            )
        least = {"explained": 3, "explained_alone": 3, "host_share": 1}
        rows = {name: np.where(count >= least[name], np.concatenate(one, 1), np.nan) for name, one in found.items()}
        return {name: Measure(value, low, high, count) for name, (value, low, high) in rows.items()}


def _with_interval(parts: list[NDArray[np.float64]], drawn: Float[np.ndarray, "r g"], measure: Any) -> Any:
    """[3, n]: a measure of sums over stretches, and its bounds when stretches are resampled; NaN bounds for one."""
    value = measure(*(part.sum(0) for part in parts))
    if drawn.shape[1] < 2:
        return np.stack([value, np.full_like(value, np.nan), np.full_like(value, np.nan)])
    resampled = measure(*(np.tensordot(drawn, part, 1) for part in parts))
    return np.stack([value, *bounds(resampled)])


def _squared_correlation(n: Any, x: Any, xx: Any, y: Any, yy: Any, xy: Any) -> Any:
    """max(0, r)² from sums; NaN without variance."""
    with np.errstate(divide="ignore", invalid="ignore"):
        varied = np.where((n * xx - x * x > 1e-9 * n * xx) & (n * yy - y * y > 1e-9 * n * yy), 1.0, np.nan)
        r = varied * (n * xy - x * y) / np.sqrt((n * xx - x * x) * (n * yy - y * y))
    return np.minimum(np.maximum(r, 0), 1) ** 2


def _share_of(sums: Float[np.ndarray, "*r n h"], host: NDArray[np.int64]) -> Any:
    """Share of one original head; NaN where no coefficient is positive."""
    positive = np.maximum(sums, 0)
    total = positive.sum(-1)
    own = np.take_along_axis(positive, np.broadcast_to(host[:, None], (*positive.shape[:-1], 1)), -1)[..., 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total > 0, own / total, np.nan)


def _stable(back: Stability, seed: int) -> dict[str, Any]:
    """Share of heads that come back, and by chance; heads resampled."""
    known = ~np.isnan(back.value)
    return {
        f"stable (likeness ≥ {STABLE})": _mean(back.value[known] >= STABLE, seed),
        f"stable (likeness ≥ {STABLE}), write vectors exchanged": _mean(back.chance[known] >= STABLE, seed),
        "likeness": _mean(back.value[known], seed),
        "likeness, write vectors exchanged": _mean(back.chance[known], seed),
    }


def _effects(found: HeadEffects, n_units: int, seed: int) -> dict[str, Measure]:
    """Means over each unit's cases, slope and correlation of the direct prediction."""
    count = np.bincount(found.unit, minlength=n_units)
    stop = count.cumsum()
    generator = np.random.default_rng(seed)
    shape = [*EFFECTS, "effect_slope", "effect_correlation"]
    table = {name: np.full((3, n_units), np.nan) for name in shape}
    present = found.presence()
    effect, direct = (present["own"][name] for name in ("effect", "direct"))
    for unit in np.flatnonzero(count):
        at = slice(stop[unit] - count[unit], stop[unit])
        picks = generator.integers(count[unit], size=(RESAMPLES, count[unit]))
        for name, (kind, number) in EFFECTS.items():
            values = present[kind][number][at]
            table[name][:, unit] = values.mean(), *bounds(values[picks].mean(1))
        x, y = direct[at], effect[at]
        table["effect_slope"][:, unit] = fit_slope(x, y), *bounds(fit_slope(x[picks], y[picks]))
        if count[unit] >= 4:
            table["effect_correlation"][:, unit] = _correlation(x, y), *bounds(_correlation(x[picks], y[picks]))
    return {name: Measure(value, low, high, count) for name, (value, low, high) in table.items()}


def _together(found: HeadEffects, n_heads: int, seed: int) -> dict[str, Any]:
    """Over all heads whose effects were measured: agreement of prediction and measurement, against the controls.

    Heads are resampled; of a single head, its cases. What a few cases, or a prediction of 0 for all, leave open is
    left out.
    """
    single = found.unit < n_heads
    unit = found.unit[single]
    held = np.unique(unit)
    rows = [np.flatnonzero(unit == one) for one in held] if len(held) > 1 else list(np.arange(len(unit))[:, None])
    generator = np.random.default_rng(seed)
    samples = [np.concatenate([rows[i] for i in generator.integers(len(rows), size=len(rows))]) for _ in range(300)]
    summary: dict[str, Any] = {"heads with effects": len(held), "cases": len(unit)}
    kinds = {"own": "", "random": ", random direction", "other": ", another active head"}
    present = found.presence()
    if not present["other"]["effect"][single].any():  # no other head was active at these tokens: no control
        del kinds["other"]

    def agreement(name: str, measure: Any, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
        resampled = [measure(x[sample], y[sample]) for sample in samples]
        found = [float(measure(x, y)), *map(float, bounds(np.array(resampled)))]
        if np.isfinite(found).all():
            summary[name] = found

    for kind, words in kinds.items():
        values = {name: numbers[single] for name, numbers in present[kind].items()}
        for against in PREDICTIONS:
            for name, measure in (("correlation", _correlation), ("slope", fit_slope)):
                agreement(f"{name} of effect with {against}{words}", measure, values[against], values["effect"])
        for name, label in (("loss", "loss when removed"), ("kl", "KL when removed")):
            means = np.array([values[name][row].mean() for row in rows])
            summary[f"{label}, nats{words}"] = _mean(means, seed)
        means = np.array([values["effect"][row].mean() for row in rows])
        summary[f"effect, logits{words}"] = _mean(means, seed)
    for place, setting in enumerate(found.becomes[1:], 1):
        for kind, words in kinds.items():
            x, y = (found.values[kind][name][place][single] for name in ("gradient", "effect"))
            change = np.array([y[row].mean() for row in rows])
            summary[f"logits{SET}{setting_name(setting)}{words}"] = _mean(change, seed)
            agreement(f"slope with gradient{SET}{setting_name(setting)}{words}", fit_slope, x, y)
    return summary


def _patterns(
    lorsa: Lorsa, inputs: list[Float[Tensor, "b t d"]], heads: list[int], seed: int
) -> tuple[dict[str, Measure], dict[str, Any]]:
    """Rank of the heads' patterns and, where groups have several, how far they are their own; and over all heads."""
    ranks = head_ranks(lorsa, lambda: inputs, heads=heads, tokens_per_head=RANK_TOKENS, first=FIRST)
    rank, cases = (one.cpu().numpy() for one in (ranks.rank, ranks.cases))
    known = rank >= 0
    value, none = np.where(known, rank, np.nan), np.full(len(rank), np.nan)
    coordinates = ranks.order.shape[1]
    measures = {
        "pattern_rank": Measure(value, none, none, cases),
        "pattern_coordinates": Measure(np.where(known, coordinates, np.nan), none, none, cases),
    }
    summary: dict[str, Any] = {}
    if known.any():
        drawn = np.random.default_rng(seed).choice(value[known], size=(RESAMPLES, int(known.sum())))
        summary[f"rank of a head's pattern, of {coordinates} coordinates, median"] = [
            float(np.median(value[known])),
            *map(float, bounds(np.median(drawn, axis=1))),
        ]
    if lorsa.config.patterns_per_group > 1 and known.any():
        own = own_share(lorsa, lambda: inputs, heads=heads, tokens_per_head=RANK_TOKENS, first=FIRST)
        overlap = own.overlap.double().cpu().numpy()
        measures["pattern_overlap"] = Measure(overlap, none, none, cases)
        summary[f"heads whose pattern is their own (overlap < {OWN})"] = [own.share, own.low, own.high]
    return measures, summary


def _mean(values: Any, seed: int) -> list[float]:
    """Mean over heads with its interval, heads resampled (of a single head, over its cases)."""
    values = np.asarray(values, dtype=np.float64)
    return [float(values.mean()), *mean_bounds(values, seed)]


def _correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> Any:
    """Along the last axis; NaN where one of them does not vary."""
    x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
    spread = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    return np.where(spread > 0, (x * y).sum(-1) / np.where(spread > 0, spread, 1), np.nan)


def _joined(parts: list[Entries]) -> Entries:
    return Entries(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _rows(measures: dict[str, tuple[list[str], Measure]]) -> dict[str, list[Any]]:
    """Columns of the table; units without a value have no row, intervals that are missing are empty."""
    rows: dict[str, list[Any]] = {name: [] for name in ("unit_id", "measure", "value", "low", "high", "cases")}
    for name, (units, found) in measures.items():
        for place in np.flatnonzero(np.isfinite(found.value)):
            ends = [float(end[place]) if np.isfinite(end[place]) else None for end in (found.low, found.high)]
            values = (units[place], name, float(found.value[place]), *ends, int(found.cases[place]))
            for column, value in zip(rows.values(), values, strict=True):
                column.append(value)
    return rows
