"""The page of a sweep over checkpoints: S of all heads over training, and a view for every head.

The frame is that of every page (`view.shell`); the list holds heads, those whose S fell most first. Charts are
`view.sweep_figures`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clearhead.spectral.sweep import SweepRow
from clearhead.view import sweep_figures as figures
from clearhead.view.packing import pack
from clearhead.view.shell import Contents, render, write_within
from clearhead.view.summary import plotly_json

HELP: dict[str, str] = {
    "sparsity": (
        "Rolls and Tovee's S of the relative contributions at the pairs that fire in the last checkpoint: 1/r when one "
        "mode decides; for products of Gaussians 0.41 with a flat spectrum (dotted), where untrained heads stand, less "
        "with a steep one."
    ),
    "span": "S with the directions rotated within what the head reads: what its singular values alone make of it.",
    "rotated": "S of the same scores with the head's modes rotated: how sparse any basis would look.",
    "n_recon": "Fewest modes whose contributions reach the relative score; median over the pairs.",
    "induction": "Attention to what followed the earlier copy of a token, on random tokens said twice.",
    "behaviour": "What the whole head attends to, at each checkpoint.",
    "firings": "Firings of the checkpoint itself, sinks left out.",
    "fall": "S at the first checkpoint minus S at the last.",
    "pairs": "Pairs followed: the head's firings in the last checkpoint, at most 128.",
}
BEHAVIOURS = ("previous", "duplicate", "induction", "sink")


def write_sweep_page(rows: Sequence[SweepRow], about: Mapping[str, Any], out: str | Path) -> Path:
    """Write the page of a sweep's rows and return its path.

    `about` says where they come from; its `model` is the title. Raises `ClearheadError` when the disk is full.
    """
    heads: dict[str, list[SweepRow]] = {}
    for row in rows:
        heads.setdefault(f"{row.layer}.{row.head}", []).append(row)
    steps = [row.step for row in next(iter(heads.values()))]
    contents = Contents(
        index={
            "vocab": [],
            "help": HELP,
            "title": str(about["model"]),
            "checkpoints": len(steps),
            "heads": _columns(heads),
            "charts": _charts(steps, heads),
        },
        parts={"heads": [pack(_head(steps, own)) for own in heads.values()]},
        scripts=("sweep.js",),
        styles=("toy.css",),
        items="Heads",
    )
    return write_within(Path(out), [render(contents, about)], 25.0, "with all its heads")


def _columns(heads: Mapping[str, Sequence[SweepRow]]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for name, own in heads.items():
        first, last = own[0], own[-1]
        known = first.sparsity is not None and last.sparsity is not None
        values = {
            "id": f"head.{name}",
            "name": name,
            "layer": last.layer,
            "pairs": last.pairs,
            "first": _brief(first.sparsity),
            "last": _brief(last.sparsity),
            "rotated": _brief(last.gauge_sparsity),
            "span": _brief(last.span_sparsity),
            "fall": _brief((first.sparsity or 0) - (last.sparsity or 0)) if known else None,
            "n_recon": last.n_recon,
            "rotated_n_recon": last.gauge_n_recon,
            "firings": last.n_firings,
            **{behaviour: _brief(getattr(last, behaviour)) for behaviour in BEHAVIOURS},
        }
        for column, value in values.items():
            columns.setdefault(column, []).append(value)
    return columns


def _charts(steps: Sequence[int], heads: Mapping[str, Sequence[SweepRow]]) -> list[dict[str, Any]]:
    measured = {name: own for name, own in heads.items() if own[-1].sparsity is not None}
    built = [
        ("sparsity", "S over training", figures.over_training(steps, _curves(measured, "sparsity"), "S")),
        ("induction", "Induction score", figures.over_training(steps, _curves(heads, "induction"), "attention")),
        ("n_recon", "N_recon over training", figures.over_training(steps, _curves(measured, "n_recon"), "N_recon")),
        ("firings", "Firings", figures.over_training(steps, _curves(heads, "n_firings"), "firings")),
    ]
    return [{"name": name, "title": title, "help": HELP[name], **plotly_json(figure)} for name, title, figure in built]


def _curves(heads: Mapping[str, Sequence[SweepRow]], field: str) -> dict[str, list[float | None]]:
    return {name: [_brief(getattr(row, field)) for row in own] for name, own in heads.items()}


def _head(steps: Sequence[int], own: Sequence[SweepRow]) -> list[dict[str, Any]]:
    """The charts of one head."""

    def column(field: str) -> list[Any]:
        return [_brief(getattr(row, field)) for row in own]

    charts = [
        ("behaviour", "What it attends to", figures.behaviour(steps, {name: column(name) for name in BEHAVIOURS}))
    ]
    if own[-1].sparsity is not None:
        charts = [
            (
                "sparsity",
                "S over training",
                figures.sparsity(steps, *map(column, ("sparsity", "gauge_sparsity", "span_sparsity"))),
            ),
            ("n_recon", "N_recon over training", figures.n_recon(steps, column("n_recon"), column("gauge_n_recon"))),
            *charts,
        ]
    return [{"name": name, "title": title, "help": HELP[name], **plotly_json(figure)} for name, title, figure in charts]


def _brief(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
