"""`clearhead train lorsa`: trains, then prints the numbers of the run and what to do with it."""

import dataclasses
from pathlib import Path
from typing import Any

from clearhead.commands.table import say, show
from clearhead.config import TrainLorsa
from clearhead.training.train import train_lorsa


def run(config: TrainLorsa) -> None:
    """Train, and print the summary."""
    summary = train_lorsa(config)
    directory = directory_of(config, summary)
    show({name: value for name, value in summary.items() if name != "text_sha256"}, f"trained in {directory}")
    say(f"next: clearhead evaluate {directory}; clearhead analyze {directory}; clearhead view {directory}")


def directory_of(config: TrainLorsa, summary: dict[str, Any]) -> Path:
    """Where the run that returned `summary` lies."""
    derived = {name: summary[name] for name in ("layer", "heads", "groups")}
    return dataclasses.replace(config, **derived).directory()
