"""Optional homes for metrics besides metrics.jsonl: wandb, trackio or tensorboard, imported only when asked for."""

import importlib
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError


class _Session:
    """wandb and trackio share one interface: init, log, finish."""

    def __init__(self, module: Any, run: str, config: dict[str, Any]):
        self.module = module
        module.init(project="clearhead", name=run, config=config)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.module.log({**metrics, "step": step})


class _Tensorboard:
    def __init__(self, writer: Any):
        self.writer = writer

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


def open_tracker(name: str, run: Path, config: dict[str, Any], main_process: bool) -> Any:
    """The tracker called `name`, or None for "none" and on all but the main process.

    Raises `ClearheadError` with the command that installs it when its package is missing.
    """
    if name == "none" or not main_process:
        return None
    try:
        if name == "tensorboard":
            writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
            return _Tensorboard(writer(str(run / "tensorboard")))
        return _Session(importlib.import_module(name), run.name, config)
    except ModuleNotFoundError as error:
        raise ClearheadError(
            f"--tracker {name} needs a package that is not installed; type: pip install {name}"
        ) from error
