"""`clearhead spectral toy`: trains the toy model for every seed, beside one without a head, and shows what came out."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from clearhead.commands.printing.table import say, show, show_columns
from clearhead.config import SpectralToy
from clearhead.configfile import refuse_other_run
from clearhead.runs import RunDirectory
from clearhead.spectral.toy_dynamics import Watched, train_watched
from clearhead.spectral.toy_sweeps import SweepPoint, anisotropy, run_sweep, variations
from clearhead.spectral.toy_verdict import outcome, verdict
from clearhead.view.toy_page import last, write_toy_page


def plan(config: SpectralToy) -> dict[str, Any]:
    """What will be trained."""
    setting = config.setting()
    return {
        **{name.replace("_", " "): value for name, value in dataclasses.asdict(setting).items()},
        "seeds": config.seeds,
        "toys without a head": 1 if setting.attention_weight else 0,
        f"toys of the sweep ({config.sweep})": len(variations(setting, config.sweep)),
        "directory": config.resolved().out,
    }


def run(config: SpectralToy) -> None:
    """Train, write the run directory and its page, print the tables."""
    config = config.resolved()
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        _run(config)
    finally:
        torch.set_num_threads(before)


def _run(config: SpectralToy) -> None:
    setting, out = config.setting(), Path(str(config.out))
    refuse_other_run(out, config, ("out", "threads"))
    with RunDirectory(out) as directory:
        directory.write_config(config.to_dict())
        directory.truncate_metrics(-1)
        toys = []
        for seed in range(config.seed, config.seed + config.seeds):
            toys.append(train_watched(setting, seed))
            for moment in toys[-1].moments:
                directory.log(seed=seed, **moment.describe())
            _print(toys[-1])
        without = None
        if setting.attention_weight:
            without = train_watched(dataclasses.replace(setting, attention_weight=0.0), config.seed)
            say(f"control: {' '.join(verdict(without.setting, without.end))}")
        points = run_sweep(setting, config.sweep, config.seed)
        if points:
            _print_sweep(config.sweep, points)
        rows = anisotropy()
        summary = {
            "setting": dataclasses.asdict(setting),
            "seeds": [summarise(toy) for toy in toys],
            "without_head": summarise(without) if without else None,
            "sweep": {"setting": config.sweep, "points": [point._asdict() for point in points]},
            "anisotropy": [row._asdict() for row in rows],
        }
        directory.write_summary(summary)
        about = {
            "model": f"Toy model: {setting.pairs} {'pair' if setting.pairs == 1 else 'pairs'} of features",
            "task": f"{setting.features} features in {setting.width} dimensions, attention weight "
            f"{setting.attention_weight:g}",
            "config": config.to_dict(),
        }
        page = write_toy_page(out / "page.html", toys, without, rows, (config.sweep, points) if points else None, about)
    show(_across(toys), f"all {len(toys)} seeds:" if len(toys) > 1 else "this seed:")
    say(f"page: {page}; numbers: {out / 'summary.json'}")


def summarise(toy: Watched) -> dict[str, Any]:
    """The final numbers of one toy as JSON values; entries of lists are pairs, the strongest target first."""
    m = toy.end
    pairs = ("targets", "query", "key", "rank_query", "rank_key", "mode", "contained", "effective_query")
    pairs += ("effective_key", "together", "ratio", "overlap", "partner")
    return {
        "seed": toy.seed,
        "outcome": outcome(toy.setting, m),
        "verdict": verdict(toy.setting, m),
        "pairs_from_0.98": int((m.aligned >= 0.98).sum()),
        "pairs_from_0.999": int((m.aligned >= 0.999).sum()),
        "error": m.error,
        "sigma": m.sigma[: toy.setting.pairs + 3].tolist(),
        **{name: getattr(m, name).tolist() for name in pairs},
        "overlap_rms": m.overlap_rms,
        "others_dim": m.others_dim,
        "all_dim": m.all_dim,
        "live": m.live,
        **m.spread._asdict(),
        "crossings": toy.crossings(),
        "pairs_in_order": toy.in_order(),
        "cpu_seconds": toy.cpu_seconds,
    }


def _across(toys: Sequence[Watched]) -> dict[str, Any]:
    """The worst of all seeds and pairs."""
    ends = [toy.end for toy in toys]
    pairs, setting = len(toys) * toys[0].setting.pairs, toys[0].setting
    aligned = torch.cat([m.aligned for m in ends])
    crossings = [toy.crossings() for toy in toys]
    spreads = [m.spread for m in ends]
    return {
        "pairs with both cosines ≥ 0.999": f"{int((aligned >= 0.999).sum())} of {pairs}",
        "pairs with both cosines ≥ 0.98": f"{int((aligned >= 0.98).sum())} of {pairs}",
        "smallest cosine, query and key": [
            f"{min(float(cosines.min()) for cosines in side):.4f}"
            for side in ([m.query for m in ends], [m.key for m in ends])
        ],
        "largest overlap": float(max(m.overlap.max() for m in ends)),
        "largest error of a logit": max(m.error for m in ends),
        f"others spread over, of {setting.width - 2 * setting.pairs}": [m.others_dim for m in ends],
        "S, and rotated": [spreads[0].sparsity, spreads[0].rotated_sparsity],
        "N_recon, and rotated": [spreads[0].n_recon, spreads[0].rotated_n_recon],
        **{
            f"{event}, by step": [last(reached[event]) for reached in crossings]
            for event in ("singular vectors", "own vector", "logit", "orthogonalisation", "amplitude")
        },
        "pairs in the order vectors, orthogonality, amplitude": f"{sum(toy.in_order() for toy in toys)} of {pairs}",
        "CPU seconds": [toy.cpu_seconds for toy in toys],
    }


def _print(toy: Watched) -> None:
    """The alignment table of one seed, and what it means."""
    m = toy.end
    head = ("pair", "mode", "target", "sigma", "cos query", "cos key", "logit/target", "overlap", "close modes")
    lines = [
        (
            str(pair),
            str(mode) if mode >= 0 else "–",
            f"{float(m.targets[pair]):.3f}",
            f"{float(m.sigma[mode]):.3f}" if mode >= 0 else "–",
            f"{float(m.query[pair]):.4f}",
            f"{float(m.key[pair]):.4f}",
            f"{float(m.ratio[pair]):.3f}" if mode >= 0 else "–",
            f"{float(m.overlap[pair]):.4f}",
            str(int(m.together[pair]) - 1 or "–"),
        )
        for pair, mode in enumerate(m.mode.tolist())
    ]
    say(f"seed {toy.seed}: {outcome(toy.setting, m)}")
    show_columns([head, *lines])
    for sentence in verdict(toy.setting, m):
        say(f"  {sentence}")


def _print_sweep(name: str, points: Sequence[SweepPoint]) -> None:
    say(f"sweep over {name}, worst pair of each:")
    head = (name, "cosine", "logit/target", "overlap", "error", "others spread over", "CPU s", "outcome")
    lines = [
        (
            f"{p.value:g}",
            f"{p.cosine:.4f}",
            f"{p.ratio:.3f}",
            f"{p.overlap:.4f}",
            f"{p.error:.1e}",
            f"{p.others_dim:.2f}",
            f"{p.cpu_seconds:.1f}",
            p.outcome,
        )
        for p in points
    ]
    show_columns([head, *lines])
