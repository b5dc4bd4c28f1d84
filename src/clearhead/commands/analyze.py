"""`clearhead analyze`: finds what each head of a trained Lorsa does, and writes it as an atlas."""

from pathlib import Path
from typing import Any

from clearhead.analysis.analyze import analyze
from clearhead.commands.opened import open_run, plan_of
from clearhead.commands.table import say
from clearhead.config import Analyze
from clearhead.runs import read_json


def plan(config: Analyze) -> dict[str, Any]:
    """What will be analysed, and where the atlas goes."""
    per_head = {"contexts per head": config.top + config.quantiles + config.negatives}
    return plan_of(config) | per_head | {"atlas": folder_of(config)}


def run(config: Analyze) -> None:
    """Analyse, and print where the atlas lies."""
    say(f"atlas: {write(config)}; next: clearhead view {config.run}")


def write(config: Analyze) -> Path:
    """Analyse the run, write its atlas, and return the atlas' directory."""
    opened = open_run(config)
    evaluation = config.run / "evaluation.json"
    analyze(
        opened.lorsa,
        opened.model,
        opened.layer,
        opened.blocks,
        folder_of(config),
        top=config.top,
        quantiles=config.quantiles,
        negatives=config.negatives,
        seed=config.seed,
        evaluation=read_json(evaluation) if evaluation.exists() else None,
        batch_blocks=config.batch_blocks,
    )
    return folder_of(config)


def folder_of(config: Analyze) -> Path:
    """The directory of the atlas: as given, or atlas in the run directory."""
    return config.out or config.run / "atlas"
