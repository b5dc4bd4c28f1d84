"""`clearhead train transcoder`: trains, then prints the numbers of the run and what to do with it."""

from typing import Any

from clearhead.commands.printing.trained_features import plan_features, run_features
from clearhead.config import TrainTranscoder
from clearhead.training.transcoder import TRANSCODER, train_transcoder


def run(config: TrainTranscoder) -> None:
    """Train, and print the summary, or the table of several layers."""
    run_features(config, TRANSCODER, train_transcoder)


def plan(config: TrainTranscoder) -> dict[str, Any]:
    """Derived values, parameters, memory and time of a training, none of which is begun."""
    return plan_features(config, TRANSCODER)
