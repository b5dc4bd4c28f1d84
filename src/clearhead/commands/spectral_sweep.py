"""`clearhead spectral sweep`: S and N_recon of every head over the checkpoints of a model, as a table and a figure."""

import dataclasses
from pathlib import Path
from typing import Any

from clearhead.commands.printing.table import say, show
from clearhead.config import SpectralSweep
from clearhead.configfile import refuse_other_run
from clearhead.runs import RunDirectory, environment, write_json
from clearhead.spectral.sweep import SweepRow, find_checkpoints, load, sweep
from clearhead.spectral.texts import read_prompts
from clearhead.view.sweep_page import write_sweep_page


def plan(config: SpectralSweep) -> dict[str, Any]:
    """Which checkpoints will be measured on what."""
    found = find_checkpoints(config.checkpoints)
    return {
        "checkpoints": len(found),
        "steps": [one.step for one in found],
        **config.texts(),
        "directory": config.directory(),
    }


def run(config: SpectralSweep) -> None:
    """Measure every checkpoint, write sweep.json, summary.json and page.html, print the first and the last."""
    refuse_other_run(config.directory(), config)
    checkpoints = find_checkpoints(config.checkpoints)
    last = load(checkpoints[-1], config.dtype, config.device)
    prompts, _ = read_prompts(last, config)
    rows: list[SweepRow] = []
    with RunDirectory(config.directory()) as directory:
        directory.write_config(config.to_dict())
        measured = sweep(
            checkpoints,
            prompts,
            last,
            threshold=config.threshold,
            basis=config.basis,
            seed=config.seed,
            dtype=config.dtype,
            device=config.device,
        )
        for of_checkpoint in measured:
            rows += of_checkpoint
        columns = [field.name for field in dataclasses.fields(SweepRow)]
        table = {name: [getattr(row, name) for row in rows] for name in columns}
        write_json(directory.path / "sweep.json", table)
        directory.write_summary(summarise(rows, config.checkpoints, prompts.source))
        about = {
            "model": f"{Path(config.checkpoints).name} over training",
            "text": prompts.source,
            "tokens": prompts.n_tokens,
            "threshold": config.threshold,
            "basis": config.basis,
            "seed": config.seed,
            "environment": environment(),
        }
        page = write_sweep_page(rows, about, directory.path / "page.html")
    for step in (checkpoints[0].step, checkpoints[-1].step):
        show(
            {f"head {row.layer}.{row.head}": _shown(row) for row in rows if row.step == step},
            f"step {step:,}:",
        )
    say(f"page: {page}; table: {directory.path / 'sweep.json'}")


def summarise(rows: list[SweepRow], checkpoints: str, source: str) -> dict[str, Any]:
    """Per head: S first, last and lowest, with the step of the lowest and of the steepest fall."""
    heads = sorted({(row.layer, row.head) for row in rows})
    summary: dict[str, Any] = {
        "checkpoints": checkpoints,
        "text": source,
        "n_checkpoints": len({row.step for row in rows}),
    }
    for layer, head in heads:
        own = [row for row in rows if (row.layer, row.head) == (layer, head) and row.sparsity is not None]
        if len(own) < 2:
            continue
        values = [float(row.sparsity or 0) for row in own]
        falls = [before - after for before, after in zip(values, values[1:], strict=False)]
        steepest = falls.index(max(falls))
        summary[f"head_{layer}_{head}"] = {
            "pairs": own[-1].pairs,
            "sparsity_first": values[0],
            "sparsity_last": values[-1],
            "gauge_last": own[-1].gauge_sparsity,
            "span_last": own[-1].span_sparsity,
            "n_recon_first": own[0].n_recon,
            "n_recon_last": own[-1].n_recon,
            "steepest_fall_between_steps": [own[steepest].step, own[steepest + 1].step],
            "induction_last": own[-1].induction,
            "previous_last": own[-1].previous,
        }
    return summary


def _shown(row: SweepRow) -> str:
    if row.sparsity is None:
        return "does not fire in the last checkpoint"
    return (
        f"S {row.sparsity:.3f} (rotated {row.gauge_sparsity:.3f}, spans {row.span_sparsity:.3f}), N_recon "
        f"{row.n_recon:.0f} (rotated {row.gauge_n_recon:.0f}), {row.n_firings} firings, induction {row.induction:.2f}, "
        f"previous {row.previous:.2f}"
    )
