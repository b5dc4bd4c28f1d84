"""`clearhead spectral run`: every head's firings in singular modes, against controls, as an atlas and a page."""

from collections import Counter
from typing import Any

from clearhead.commands.opening.structure import without_weights
from clearhead.commands.printing.table import say, show
from clearhead.config import SpectralRun
from clearhead.configfile import refuse_other_run
from clearhead.model.access import Model
from clearhead.runs import RunDirectory
from clearhead.spectral.census import Census, take_census
from clearhead.spectral.firings import KEEP, Prompts
from clearhead.spectral.judging import compare_all, judge_all
from clearhead.spectral.record import summarise, write_spectral_atlas
from clearhead.spectral.texts import read_prompts
from clearhead.view.page import write_page

SHOWN = 12


def plan(config: SpectralRun) -> dict[str, Any]:
    """What will be decomposed, without loading weights."""
    model = without_weights(config.model)
    heads = len(model.attention_layers) * model.n_heads
    return {
        "model": config.model,
        **config.texts(),
        "heads": heads,
        "modes per head": model.d_head,
        "firings kept, at most": heads * KEEP,
        "controls": config.controls,
        "draws": config.draws,
        "directory": config.directory(),
    }


def run(config: SpectralRun) -> None:
    """Take the census, compare, judge, write the run directory and its page, print the numbers."""
    refuse_other_run(config.directory(), config)
    model = Model.load(config.model, dtype=config.dtype, device=config.device)
    prompts, behaviour = read_prompts(model, config)
    with RunDirectory(config.directory()) as directory:
        directory.write_config(config.to_dict())
        census = take_census(model, prompts, threshold=config.threshold, basis=config.basis, seed=config.seed)
        separations = {}
        if config.controls:
            separations = compare_all(
                model, prompts, census, draws=config.draws, seed=config.seed, untrained=config.untrained
            )
        judged = judge_all(census, separations)
        summary = {"model": config.model, "model_note": model.note, **summarise(census, separations, judged)}
        shared = write_spectral_atlas(
            directory.path / "atlas",
            model,
            prompts,
            census,
            separations,
            judged,
            _about(config, model, prompts),
            config.seed,
        )
        if behaviour is not None and behaviour.refused:
            summary["prompts_left_out"] = dict(Counter(behaviour.refused.values()))
        summary["shared_modes"] = sum(found.n_modes for found in shared.values())
        summary["shared_modes_in_rotated_bases"] = round(sum(found.in_rotated for found in shared.values()), 1)
        directory.write_summary(summary)
    _print(summary, census, judged)
    page = write_page(directory.path / "atlas", directory.path / "page.html")
    say(f"page: {page}; numbers: {directory.path / 'summary.json'}; next: clearhead spectral trace --help")


def _about(config: SpectralRun, model: Model, prompts: Prompts) -> dict[str, Any]:
    return {
        "lens": "spectral",
        "model": config.model,
        "model_note": model.note,
        "text": prompts.source,
        "tokens": prompts.n_tokens,
        "threshold": config.threshold,
        "basis": config.basis,
        "draws": config.draws if config.controls else 0,
        "seed": config.seed,
    }


def _print(summary: dict[str, Any], census: Census, judged: Any) -> None:
    flat = {
        name.replace("_", " "): value
        for name, value in summary.items()
        if not isinstance(value, dict) and name != "model_note"
    }
    show(flat, "spectral census (three numbers are quartiles):")
    show(summary["verdicts"], "heads by verdict:")
    for name, numbers in summary.items():
        if name.startswith("control_"):
            show(
                {key.replace("_", " "): value for key, value in numbers.items()},
                f"against {name.removeprefix('control_')}:",
            )
    show(summary["seconds"], "CPU seconds:")
    for reason, count in summary.get("prompts_left_out", {}).items():
        say(f"{count} prompts of the task were left out: {reason}")
    for layer, reason in census.refused.items():
        say(f"layer {layer} was left out: {reason}")
    best = sorted(
        ((numbers.sparsity, place) for place, numbers in judged.numbers.items() if numbers.sparsity is not None)
    )[:SHOWN]
    show(
        {f"head {layer}.{head}": f"S {value:.3f}, {judged.verdicts[layer, head]}" for value, (layer, head) in best},
        "sparsest heads:",
    )
