"""`clearhead train clt`: trains, then prints the numbers of the run and what to do with it."""

from typing import Any

from clearhead.commands.printing.trained_features import plan_features, show_trained
from clearhead.config import TrainClt
from clearhead.training.clt import CLT, train_clt


def run(config: TrainClt) -> None:
    """Train, and print the summary."""
    show_trained(config, train_clt(config))


def plan(config: TrainClt) -> dict[str, Any]:
    """Derived values, parameters, memory and time of a training, none of which is begun."""
    return plan_features(config, CLT)
