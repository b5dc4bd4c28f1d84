"""A finished training run, opened for measurement: its Lorsa, its model, and text that it has not seen."""

from pathlib import Path
from typing import Any, NamedTuple

from clearhead.config import OfRun, TrainLorsa
from clearhead.configfile import from_file
from clearhead.data.text import TokenBlocks, token_blocks
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError
from clearhead.model.access import Model


class OpenedRun(NamedTuple):
    """What every measurement of a run needs."""

    lorsa: Lorsa
    model: Model
    layer: int
    blocks: TokenBlocks


def training_of(run: Path) -> TrainLorsa:
    """The resolved configuration a run was trained with; raises `ClearheadError` when nothing was trained there."""
    if not (run / "config.json").exists():
        raise ClearheadError(f"{run} is no run directory: it holds no config.json; `clearhead train lorsa` makes one")
    config = from_file(run)
    if not isinstance(config, TrainLorsa) or config.layer is None:
        raise ClearheadError(
            f"{run} was written by `clearhead {config.verb}`; give a directory of `clearhead train lorsa`"
        )
    return config


def open_run(config: OfRun) -> OpenedRun:
    """Load the Lorsa of a run onto its model's device, and tokenise the text to measure on.

    Raises `ClearheadError` when the run is unfinished or the text is shorter than one block.
    """
    training = training_of(config.run)
    if not (config.run / "lorsa").exists():
        raise ClearheadError(
            f"{config.run} has not been trained to its end; type: clearhead train lorsa --from {config.run} "
            f"--out {config.run}"
        )
    model = Model.load(training.model, dtype=config.dtype or training.dtype, device=config.device)
    lorsa = Lorsa.from_pretrained(config.run / "lorsa").to(model.device).eval()
    belongs = {name: lorsa.provenance.get(name) for name in ("model", "layer")}
    asked = {"model": training.model, "layer": training.layer}
    if belongs != asked:
        raise ClearheadError(
            f"{config.run} names {asked} in its config.json and its Lorsa was trained on {belongs}; restore the file, "
            f"or train again"
        )
    blocks = token_blocks(
        model,
        config.text or training.text,
        split=config.split,
        n_tokens=config.tokens,
        context=training.context,
        at_most=True,
    )
    return OpenedRun(lorsa, model, int(training.layer or 0), blocks)


def plan_of(config: OfRun) -> dict[str, Any]:
    """What a measurement will take and from where, without loading a model."""
    training = training_of(config.run)
    return {
        "model": training.model,
        "dtype": config.dtype or training.dtype,
        "layer": training.layer,
        "heads": training.heads,
        "text": f"{config.text or training.text} ({config.split})",
        "tokens, at most": config.tokens,
        "blocks": -(-config.tokens // training.context),
        "context": training.context,
    }
