"""`clearhead train sae`: trains, then prints the numbers of the run and what to do with it."""

from typing import Any

from clearhead.commands.printing.trained_features import plan_features, run_features
from clearhead.config import TrainSae
from clearhead.training.transcoder import SAE, train_sae


def run(config: TrainSae) -> None:
    """Train, and print the summary, or the table of several layers."""
    run_features(config, SAE, train_sae)


def plan(config: TrainSae) -> dict[str, Any]:
    """Derived values, parameters, memory and time of a training, none of which is begun."""
    return plan_features(config, SAE)
