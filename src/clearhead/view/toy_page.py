"""The page of a toy run: what was reached, beside a toy without a head, and how; a view for every pair of every seed.

The frame is that of every page (`view.shell`); the list holds pairs. Charts are `view.toy_figures`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch
from torch import Tensor

from clearhead.spectral.toy_dynamics import ORDER, Watched
from clearhead.spectral.toy_sweeps import Anisotropy, SweepPoint
from clearhead.spectral.toy_verdict import outcome, verdict
from clearhead.view import toy_figures as figures
from clearhead.view.packing import pack
from clearhead.view.shell import Contents, render, write_within
from clearhead.view.summary import plotly_json

MODES_SHOWN = 40

HELP: dict[str, str] = {
    "target": "T: the logit that the pair should have when both its features are fully present.",
    "sigma": "Singular value σ of the mode that was matched to the pair.",
    "query": "|u · w|: cosine of the mode's left singular vector with the pair's query feature.",
    "key": "|v · w|: cosine of the mode's right singular vector with the pair's key feature.",
    "ratio": "σ |w_q| |w_p| / T: the logit that the head gives the pair, as a share of its target.",
    "overlap": "Largest |cosine| of the pair's two features with any other feature in use. 0 is orthogonal.",
    "error": "Merr: largest |W Ω Wᵀ − T| over all pairs of features (and distances, with rotary positions).",
    "others_dim": "tr(G)² / tr(G²) of the features that are not attended to: how many dimensions they spread over.",
    "sparsity": (
        "Rolls and Tovee's S of the contributions of singular modes to the relative logit of target keys: 1/r for one "
        "mode; for products of Gaussians 0.41 with a flat spectrum, less with a steep one. In brackets the same logits "
        "split in a rotated basis."
    ),
    "mode": "Mode matched to the pair by the assignment with the largest sum of products of both cosines.",
    "together": "Modes whose singular values lie within 20 times the error: only their span means something.",
    "contained": "Length of the pair's features inside the span of the leading modes, one mode per pair.",
    "spectrum": "Trained singular values fall on target / (|w_q| |w_p|); beyond the pairs nothing is left.",
    "cosines_query": "|u · w|: left singular vectors in rows, features in columns, those of queries first.",
    "cosines_key": "|v · w|: right singular vectors in rows, features in columns, those of keys second.",
    "arrangement": "|cosines| between features. The attended ones come first: orthogonal where a head pays for it.",
    "arrangement_without": "The same seed without a head: the autoencoder alone leaves all features in superposition.",
    "dynamics": (
        "Of the worst pair at each step: features inside the span of the leading modes, along a mode of their own, "
        "overlap with others, logit as a share of the target, and σ as a share of where it ends. Dotted: the step from "
        "which singular vectors, orthogonality and amplitude are reached for good by every pair."
    ),
    "losses": "Reconstruction: squared error per token. Attention: divergence from the target distribution in nats.",
    "sparsity_steps": "S falls as modes take up pairs; the same logits in a rotated basis stay where random heads are.",
    "n_recon_steps": "Modes needed to reach the relative logit, median over firings. Weak alone: cancelling lowers it.",
    "anisotropy": (
        "Closed form, frozen random features in 50 dimensions with a common direction mixed in. u₁: theorem 1 as it "
        "is. Mean removed: against the feature without the features' mean. Σ u₁: unwhitened by a sample's covariance. "
        "Floor: what the spectrum of Σ guarantees. Shaded: the range that the paper reports for GPT-2."
    ),
    "sweep": "One toy per value, all from the first seed; cosine, overlap and logit of the worst pair.",
    "pair": "This pair over training: its cosines, overlap, and logit as a share of its target.",
}


def write_toy_page(
    out: str | Path,
    toys: Sequence[Watched],
    without: Watched | None,
    rows: Sequence[Anisotropy],
    sweep: tuple[str, Sequence[SweepPoint]] | None,
    about: Mapping[str, Any],
) -> Path:
    """Write the page of toys of one setting, one per seed, and return its path; charts are of the first.

    `without` is the toy of the first seed without a head, where there is one; `about` says where the numbers come from,
    its `model` is the title. Raises `ClearheadError` when the disk is full.
    """
    contents = Contents(
        index={
            "vocab": [],
            "help": HELP,
            "title": str(about["model"]),
            "toys": [_toy(toy) for toy in toys],
            "tiles": _tiles(toys[0], without),
            "pairs": _pairs(toys),
            "charts": _charts(toys[0], without, rows, sweep),
            "sweep": None if sweep is None else {"name": sweep[0], "points": [_brief(p._asdict()) for p in sweep[1]]},
            "template": plotly_json(
                figures.dynamics([1], dict.fromkeys(("query", "key", "overlap", "logit / T"), [0]), {})
            ),
        },
        parts={"curves": [pack(_curves(toy)) for toy in toys]},
        scripts=("toy.js",),
        styles=("toy.css",),
        items="Pairs",
    )
    return write_within(Path(out), [render(contents, about)], 25.0, "with all its pairs")


def _toy(toy: Watched) -> dict[str, Any]:
    """One seed: its verdict and the steps of its events."""
    m = toy.end
    crossings = toy.crossings()
    return {
        "seed": toy.seed,
        "outcome": outcome(toy.setting, m),
        "verdict": verdict(toy.setting, m),
        "query": float(m.query.min()),
        "key": float(m.key.min()),
        "ratio": float(m.ratio.min()),
        "overlap": float(m.overlap.max()),
        "error": m.error,
        "events": {event: last(crossings[event]) for event in ORDER},
        "in_order": toy.in_order(),
        "seconds": toy.cpu_seconds,
    }


def last(steps: Sequence[int | None]) -> int | None:
    """The step at which every pair has reached an event; None when one never does."""
    reached = [step for step in steps if step is not None]
    return max(reached) if len(reached) == len(steps) else None


def _tiles(toy: Watched, without: Watched | None) -> list[dict[str, str]]:
    """The large numbers, each with the toy's without a head beside it."""

    def numbers(run: Watched) -> dict[str, tuple[str, str]]:
        m = run.end
        return {
            "query": ("Cosine, query", f"{float(m.query.min()):.3f}"),
            "key": ("Cosine, key", f"{float(m.key.min()):.3f}"),
            "ratio": ("Logit / target", f"{float(m.ratio.min()):.3f}"),
            "overlap": ("Overlap", f"{float(m.overlap.max()):.3f}"),
            "error": ("Error", f"{m.error:.1e}".replace("e-0", "e−").replace("e+0", "e")),
            "others_dim": ("Others’ dims", f"{m.others_dim:.1f}"),
            "sparsity": ("S (rotated)", f"{m.spread.sparsity:.2f} ({m.spread.rotated_sparsity:.2f})"),
        }

    beside = numbers(without) if without else {}
    return [
        {"name": name, "label": label, "value": value, "small": f"no head {beside[name][1]}" if name in beside else ""}
        for name, (label, value) in numbers(toy).items()
    ]


def _pairs(toys: Sequence[Watched]) -> dict[str, list[Any]]:
    """Columns of the list: every pair of every seed."""
    columns: dict[str, list[Any]] = {}
    for place, toy in enumerate(toys):
        m, pairs = toy.end, toy.setting.pairs
        own = m.mode >= 0
        values = {
            "id": [f"pair.{toy.seed}.{pair}" for pair in range(pairs)],
            "toy": [place] * pairs,
            "seed": [toy.seed] * pairs,
            "pair": list(range(pairs)),
            "mode": [int(mode) if mode >= 0 else None for mode in m.mode],
            "target": _rounded(m.targets),
            "sigma": [float(f"{m.sigma[mode]:.4g}") if mode >= 0 else None for mode in m.mode],
            "query": _rounded(m.query),
            "key": _rounded(m.key),
            "aligned": _rounded(m.aligned),
            "contained": _rounded(m.contained),
            "ratio": [float(f"{ratio:.4g}") if has else None for ratio, has in zip(m.ratio, own, strict=True)],
            "overlap": _rounded(m.overlap),
            "partner": m.partner.tolist(),
            "opposite": m.opposite.tolist(),
            "together": m.together.tolist(),
        }
        for name, column in values.items():
            columns.setdefault(name, []).extend(column)
    return columns


def _curves(toy: Watched) -> dict[str, Any]:
    """Every pair's curves of one seed: steps, then a list per pair for each measure."""
    measured = {name: _rounded(toy.over_steps(name).mT) for name in ("query", "key", "overlap", "ratio")}
    return {"steps": [moment.step for moment in toy.moments], **measured}


def _charts(
    toy: Watched,
    without: Watched | None,
    rows: Sequence[Anisotropy],
    sweep: tuple[str, Sequence[SweepPoint]] | None,
) -> list[dict[str, Any]]:
    seed = f"seed {toy.seed}"
    built: list[tuple[str, str, go.Figure]] = [
        ("spectrum", "Singular values", _spectrum(toy, without)),
        ("dynamics", "What happens when", _dynamics(toy)),
        ("cosines_query", "Left singular vectors and features", _cosines(toy, "U")),
        ("cosines_key", "Right singular vectors and features", _cosines(toy, "V")),
        ("arrangement", "Features between themselves", _arrangement(toy)),
    ]
    if without:
        built.append(("arrangement_without", "The same without a head", _arrangement(without)))
    steps = [moment.step for moment in toy.moments][1:]
    spreads = [moment.measures.spread for moment in toy.moments][1:]
    built += [
        ("sparsity_steps", "S over training", figures.sparsity(steps, *_columns(spreads, "sparsity"))),
        ("n_recon_steps", "N_recon over training", figures.n_recon(steps, *_columns(spreads, "n_recon"))),
        ("losses", "Losses", _losses(toy)),
    ]
    if sweep:
        built.append(("sweep", f"Sweep over {sweep[0].replace('-', ' ')}", _sweep(*sweep)))
    for n in sorted({row.features for row in rows}):
        built.append(("anisotropy", f"Anisotropy, {n} features", _anisotropy([r for r in rows if r.features == n])))
    charts = [
        {"name": name, "title": title, "help": HELP[name], **plotly_json(figure)} for name, title, figure in built
    ]
    for chart in charts:
        if chart["name"] not in ("anisotropy", "sweep"):
            chart["title"] += f", {seed}"
    return charts


def _spectrum(toy: Watched, without: Watched | None) -> go.Figure:
    shown = min(len(toy.end.sigma), max(10, 2 * toy.setting.pairs), MODES_SHOWN)
    control = without.end.sigma[:shown] if without else torch.zeros(0)
    return figures.spectrum(_rounded(toy.end.sigma[:shown]), _rounded(toy.end.targets), _rounded(control))


def _dynamics(toy: Watched) -> go.Figure:
    sigma = toy.over_steps("sigma")[:, : toy.setting.pairs]
    curves = {
        "in the span": toy.over_steps("contained").amin(1),
        "own vector": toy.over_steps("aligned").amin(1),
        "overlap": toy.over_steps("overlap").amax(1),
        "logit / T": toy.over_steps("ratio").amin(1),
        "σ / final": (sigma / sigma[-1].clamp_min(1e-12)).amin(1),
    }
    if toy.setting.pairs == 1:
        del curves["own vector"]
    steps = [moment.step for moment in toy.moments]
    crossings = toy.crossings()
    return figures.dynamics(
        steps[1:],
        {name: _rounded(values[1:]) for name, values in curves.items()},
        {event: last(crossings[event]) for event in ORDER},
    )


def _cosines(toy: Watched, side: str) -> go.Figure:
    svd = toy.toy.omega().svd()
    vectors = (svd.U if side == "U" else svd.V)[:, :MODES_SHOWN]
    return figures.shades(_rounded((vectors.mT @ _unit(toy).mT).abs(), 3), x="feature", y="mode")


def _arrangement(toy: Watched) -> go.Figure:
    unit = _unit(toy)
    return figures.shades(_rounded((unit @ unit.mT).abs(), 3), x="feature", y="feature")


def _unit(toy: Watched) -> Tensor:
    W = toy.toy.W.detach().double()
    return W / W.norm(dim=1, keepdim=True).clamp_min(1e-12)


def _losses(toy: Watched) -> go.Figure:
    moments = toy.moments[1:]
    steps = [moment.step for moment in moments]
    return figures.losses(steps, [m.reconstruction for m in moments], [m.attention for m in moments])


def _sweep(name: str, points: Sequence[SweepPoint]) -> go.Figure:
    curves = {
        "cosine": [point.cosine for point in points],
        "overlap": [point.overlap for point in points],
        "logit / T": [point.ratio for point in points],
    }
    return figures.sweep(name.replace("-", " "), [point.value for point in points], curves)


def _anisotropy(rows: Sequence[Anisotropy]) -> go.Figure:
    curves = {
        "u₁": [row.raw for row in rows],
        "u₁, mean removed": [row.centred for row in rows],
        "Σ u₁": [row.recovered for row in rows],
        "floor": [row.floor for row in rows],
    }
    return figures.anisotropy([row.interference for row in rows], curves)


def _columns(spreads: Sequence[Any], name: str) -> tuple[list[float], list[float]]:
    return [getattr(s, name) for s in spreads], [getattr(s, f"rotated_{name}") for s in spreads]


def _rounded(values: Tensor, digits: int = 4) -> list[Any]:
    return values.double().mul(10**digits).round().div(10**digits).tolist()


def _brief(point: Mapping[str, Any]) -> dict[str, Any]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in point.items()}
