"""`clearhead analyze`: finds what each head of a trained Lorsa does, and writes it as an atlas.

Of a directory with a run per layer, every layer gets an atlas of its own.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clearhead.analysis.analyze import analyze
from clearhead.analysis.analyze_features import analyze_features
from clearhead.commands.opening.opened import kind_of, open_dictionary, open_run, plan_of, source_of
from clearhead.commands.opening.run_folders import runs_in
from clearhead.commands.opening.training_time import free_memory
from clearhead.commands.printing.table import say
from clearhead.config import Analyze
from clearhead.dictionaries.load import Dictionary, load_dictionary_of
from clearhead.dictionaries.transcoder import Transcoder
from clearhead.errors import ClearheadError, CorruptFileError
from clearhead.runs import read_json

KEPT_SHARE = 0.5
"""Share of the free memory that what the first pass read may take; the rest is read again."""


def plan(config: Analyze) -> dict[str, Any]:
    """What will be analysed, and where the atlas goes."""
    runs = runs_in(config.run)
    if runs != [config.run]:
        one = plan(dataclasses.replace(config, run=runs[0]))
        one["layer"] = ", ".join(run.name for run in runs)
        return one | {"atlas": f"atlas in each of {len(runs)} directories in {config.run}"}
    per_head = {"contexts per head": config.top + config.quantiles + config.negatives}
    others = {"dictionaries": list(config.dictionaries) or "none: tokens and modes only"}
    return plan_of(config) | per_head | others | {"atlas": folder_of(config)}


def run(config: Analyze) -> None:
    """Analyse, and print where the atlas lies; of a directory of several layers, one line for each."""
    runs = runs_in(config.run)
    if runs == [config.run]:
        say(f"atlas: {write(config)}; next: clearhead view {config.out or config.run}")
        return
    _analyze_layers(config, runs)


def write(config: Analyze) -> Path:
    """Analyse the run, write its atlas, and return the atlas' directory."""
    return _write(config, _load(config), strict=True)


def _analyze_layers(config: Analyze, runs: list[Path]) -> None:
    """Analyse one run after the other; one that cannot be analysed is named, and the others go on."""
    if config.out is not None:
        raise ClearheadError("--out is for one run; of several each keeps its atlas, leave out --out")
    dictionaries, left_out = _load(config), {}
    for place in runs:
        try:
            say(f"layer {place.name}: {_write(dataclasses.replace(config, run=place), dictionaries, strict=False)}")
        except ClearheadError as error:
            left_out[place.name] = str(error)
    for name, reason in left_out.items():
        say(f"layer {name} left out: {reason}")
    if len(left_out) == len(runs):
        raise ClearheadError(f"none of the {len(runs)} layers in {config.run} could be analysed")
    say(f"next: clearhead view {next(place for place in runs if place.name not in left_out)}")


def _load(config: Analyze) -> dict[str, Dictionary]:
    return {name: load_dictionary_of(name) for name in config.dictionaries}


def _write(config: Analyze, dictionaries: Mapping[str, Dictionary], *, strict: bool) -> Path:
    folder = folder_of(config)
    if folder.exists() and not folder.is_dir():  # asked before the work, not after it
        raise ClearheadError(f"{folder} is a file; give a directory for the atlas with --out")
    evaluation = _evaluation(config.run / "evaluation.json")
    if kind_of(config.run, source_of(config.run)) in ("sae", "transcoder"):
        _write_features(config, folder)
        return folder
    opened = open_run(config)
    device = opened.model.device
    analyze(
        opened.lorsa,
        opened.model,
        opened.layer,
        opened.blocks,
        folder,
        dictionaries={name: dictionary.to(device).eval() for name, dictionary in dictionaries.items()},
        strict=strict,
        explained=config.explain_heads,
        top=config.top,
        quantiles=config.quantiles,
        negatives=config.negatives,
        seed=config.seed,
        evaluation=evaluation,
        batch_blocks=config.batch_blocks,
        keep_bytes=int(free_memory() * KEPT_SHARE),
    )
    return folder


def _write_features(config: Analyze, folder: Path) -> None:
    """The atlas of an SAE or transcoder: units and examples only."""
    if config.dictionaries or config.explain_heads:
        raise ClearheadError(f"{config.run} is no Lorsa; leave out --dictionaries and --explain-heads")
    opened = open_dictionary(config)
    assert isinstance(opened.module, Transcoder)  # `kind_of`
    analyze_features(
        opened.module,
        opened.model,
        opened.blocks,
        folder,
        top=config.top,
        quantiles=config.quantiles,
        negatives=config.negatives,
        batch_blocks=config.batch_blocks,
        seed=config.seed,
    )


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
