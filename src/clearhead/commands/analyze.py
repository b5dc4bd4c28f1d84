"""`clearhead analyze`: finds what each head of a trained Lorsa does, and writes it as an atlas."""

import math
from pathlib import Path
from typing import Any

from clearhead.analysis.analyze import analyze
from clearhead.commands.opened import open_run, plan_of
from clearhead.commands.table import say
from clearhead.config import Analyze
from clearhead.errors import ClearheadError, CorruptFileError
from clearhead.runs import read_json


def plan(config: Analyze) -> dict[str, Any]:
    """What will be analysed, and where the atlas goes."""
    per_head = {"contexts per head": config.top + config.quantiles + config.negatives}
    return plan_of(config) | per_head | {"atlas": folder_of(config)}


def run(config: Analyze) -> None:
    """Analyse, and print where the atlas lies."""
    say(f"atlas: {write(config)}; next: clearhead view {config.out or config.run}")


def write(config: Analyze) -> Path:
    """Analyse the run, write its atlas, and return the atlas' directory."""
    folder = folder_of(config)
    if folder.exists() and not folder.is_dir():  # asked before the work, not after it
        raise ClearheadError(f"{folder} is a file; give a directory for the atlas with --out")
    evaluation = _evaluation(config.run / "evaluation.json")
    opened = open_run(config)
    analyze(
        opened.lorsa,
        opened.model,
        opened.layer,
        opened.blocks,
        folder,
        top=config.top,
        quantiles=config.quantiles,
        negatives=config.negatives,
        seed=config.seed,
        evaluation=evaluation,
        batch_blocks=config.batch_blocks,
    )
    return folder


def _evaluation(path: Path) -> dict[str, Any] | None:
    """The metrics that `clearhead evaluate` wrote, or None if it has not run."""
    if not path.exists():
        return None
    metrics = read_json(path)
    numbers = metrics.values() if isinstance(metrics, dict) else [math.nan]
    if any(isinstance(value, float) and not math.isfinite(value) for value in numbers):
        raise CorruptFileError(f"{path} holds no finite metrics; delete it or run clearhead evaluate again")
    return metrics


def folder_of(config: Analyze) -> Path:
    """The directory of the atlas: as given, or atlas in the run directory."""
    return config.out or config.run / "atlas"
