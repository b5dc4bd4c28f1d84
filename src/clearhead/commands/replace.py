"""`clearhead replace`: the model with its layers replaced by dictionaries, and how much of its prompts they explain.

Writes `curve.json` (loss, KL and lost variance as more layers are replaced) and `summary.json`.
"""

from typing import Any

import numpy as np
import torch

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.replacement.measure import Replacement, measure_replacement
from clearhead.circuits.tracing.influence import Scores
from clearhead.circuits.tracing.sources import open_prompt
from clearhead.circuits.tracing.trace import likely_logits, trace
from clearhead.commands.opening.structure import without_weights
from clearhead.commands.printing.table import say, show
from clearhead.config import Replace
from clearhead.configfile import refuse_other_run
from clearhead.data.text import token_blocks
from clearhead.dictionaries.load import load_dictionary_of
from clearhead.model.access import Model
from clearhead.runs import RunDirectory, progress, write_json
from clearhead.spectral.writes import Parts


def plan(config: Replace) -> dict[str, Any]:
    """What will be measured, without loading weights."""
    model = without_weights(config.model)
    return {
        "model": config.model,
        "layers": model.n_layers,
        "dictionaries": list(config.dictionaries),
        "text": f"{config.text} (held_out)",
        "blocks": -(-config.tokens // config.context),
        "forwards per block": f"{len(config.dictionaries)} + 3; a cross-layer transcoder counts as {model.n_layers}",
        "prompts traced": config.prompts,
        "directory": config.directory(),
    }


def run(config: Replace) -> None:
    """Measure, write the run directory, print."""
    refuse_other_run(config.directory(), config)
    model = Model.load(config.model, dtype=config.dtype, device=config.device)
    dictionaries = Dictionaries(model, map(load_dictionary_of, config.dictionaries))
    blocks = token_blocks(
        model, config.text, split="held_out", n_tokens=config.tokens, context=config.context, at_most=True
    )
    with RunDirectory(config.directory()) as directory:
        directory.write_config(config.to_dict())
        found = measure_replacement(model, dictionaries, blocks.tokens)
        write_json(directory.path / "curve.json", found.to_dict())
        scores = _trace(model, dictionaries, blocks.tokens[: config.prompts, : config.prompt_tokens], config.units)
        summary = {
            "model": model.name,
            "model_note": model.note,
            "dictionaries": dictionaries.describe(),
            **_numbers(found),
            **_means(scores),
        }
        directory.write_summary(summary)
    _print(found, summary)
    say(f"numbers: {directory.path}")


def _trace(model: Model, dictionaries: Dictionaries, prompts: torch.Tensor, units: int) -> list[Scores]:
    """The scores of every prompt's graph."""
    parts, found = Parts(model), []
    with progress("prompts", len(prompts), "prompts") as advance:
        for tokens in prompts:
            opened = open_prompt(parts, tokens[None].to(model.device), dictionaries)
            found.append(trace(opened, likely_logits(opened), units=units, quiet=True).scores())
            advance(1)
    return found


def _numbers(found: Replacement) -> dict[str, Any]:
    """The single numbers of a replacement."""
    return {name: value for name, value in found.to_dict().items() if name not in ("curve", "places")}


def _means(scores: list[Scores]) -> dict[str, Any]:
    """Mean scores over prompts, with their spread."""
    if not scores:
        return {}
    replacement = [score.replacement for score in scores]
    return {
        "prompts": len(scores),
        "replacement_score": float(np.mean(replacement)),
        "replacement_score_range": [min(replacement), max(replacement)],
        "completeness": float(np.mean([score.completeness for score in scores])),
        "error_share": float(np.mean([score.errors for score in scores])),
    }


def _print(found: Replacement, summary: dict[str, Any]) -> None:
    show({name.replace("_", " "): v for name, v in summary.items() if name not in ("model", "model_note")}, "replaced:")
    fidelity = {
        place.place: f"{place.fvu:.3f} alone, {place.fvu_in_place:.3f} with all replaced" for place in found.places
    }
    show(fidelity, "variance unexplained (FVU) of each:")
    curve = {
        f"{point.replaced} {point.last and f'({point.last} last)'}": f"loss {point.ce:.3f}, KL {point.kl:.3f}, "
        f"variance of the last stream lost {point.stream_fvu:.3f}"
        for point in found.curve
    }
    show(curve, "as more are replaced, in the order of layers:")
