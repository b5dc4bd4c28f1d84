"""`clearhead demo`: every step from text to page on one layer of a real model, each skipped when it is already done.

What is done is recorded in `demo.json` in the run directory, step by step with its configuration: a step is repeated
when its own configuration or that of a step before it changed.
"""

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.commands import analyze, evaluate, view
from clearhead.commands.printing.table import duration, say, show, size
from clearhead.config import Analyze, Demo, Evaluate, TrainLorsa, Verb, View
from clearhead.runs import read_json, write_json
from clearhead.training.session import peak_memory
from clearhead.training.train import train_lorsa

DOWNSTREAM_TOKENS = 6_000  # each costs four passes through the whole model


class Step(NamedTuple):
    """One verb of the demo: its configuration, the file that shows that it is done, and what does it."""

    config: Verb
    output: Path
    work: Callable[[Any], Any]


def steps(config: Demo) -> list[Step]:
    """The verbs of the demo, in order; each could be given by hand."""
    train = TrainLorsa(
        model=config.model,
        layer=config.layer,
        tokens=config.tokens,
        heads=config.heads,
        context=config.context,
        batch_tokens=config.context,
        device=config.device,
        out=config.out,
    )
    of_run: dict[str, Any] = {"run": config.out, "device": config.device}
    measure = Evaluate(**of_run, tokens=config.measured_tokens, downstream_tokens=DOWNSTREAM_TOKENS)
    return [
        Step(train, config.out / "summary.json", train_lorsa),
        Step(measure, config.out / "evaluation.json", evaluate.measure),
        Step(Analyze(**of_run, tokens=config.analysed_tokens), config.out / "atlas" / "atlas.json", analyze.write),
        Step(View(run=config.out), config.out / "page.html", view.write),
    ]


def plan(config: Demo) -> dict[str, Any]:
    """Each step, and whether it is done already."""
    done = finished(config)
    rows = {"model": config.model, "layer": config.layer, "training tokens": config.tokens, "directory": config.out}
    for step in steps(config):
        verb = step.config.verb
        rows[verb] = "done before" if verb in done else f"will write {step.output}"
    return rows


def run(config: Demo) -> None:
    """Do what is not done, then print one table, the page and what to try next."""
    record = finished(config)
    for number, step in enumerate(steps(config), 1):
        verb = step.config.verb
        if verb in record:
            say(f"[{number}/4] {verb}: done before, in {step.output.parent}")
            continue
        say(f"[{number}/4] {verb}")
        begun = time.monotonic()
        step.work(step.config)
        record[verb] = {
            "config": step.config.to_dict(),
            "seconds": time.monotonic() - begun,
            "peak_memory_bytes": peak_memory(),
        }
        write_json(config.out / "demo.json", record)
    _report(config, record)


def finished(config: Demo) -> dict[str, Any]:
    """The leading steps whose output exists and was made with this configuration."""
    path = config.out / "demo.json"
    record = read_json(path) if path.exists() else {}
    done: dict[str, Any] = {}
    for step in steps(config):
        earlier = record.get(step.config.verb)
        if earlier is None or earlier["config"] != step.config.to_dict() or not step.output.exists():
            break
        done[step.config.verb] = earlier
    return done


def _report(config: Demo, record: dict[str, Any]) -> None:
    summary = read_json(config.out / "summary.json")
    metrics = read_json(config.out / "evaluation.json")
    out = config.out
    say("")
    show(
        {
            "FVU": f"{metrics['fvu']:.3f}",
            "L0": f"{metrics['l0']:.1f} of {summary['heads']:,} heads",
            "dead heads": f"{metrics['dead_share']:.1%} on {metrics['tokens']:,} tokens",
            "CE recovered": _share(metrics["ce_recovered"]) + " of what removing the layer costs",
            "tokens/s": f"{summary['tokens_per_second']:,.0f} in training",
            "peak memory": size(max(step["peak_memory_bytes"] for step in record.values())),
            "wall time": duration(sum(step["seconds"] for step in record.values())),
        },
        f"layer {summary['layer']} of {summary['model']}, {summary['tokens']:,} training tokens, held-out numbers:",
    )
    if config.model == "smollm2":
        say("SmolLM2-135M-Instruct dequantised from Q4_1 (not the hub's SmolLM2-135M)")
    say(f"\npage: {(out / 'page.html').resolve()}\n")
    say("next:")
    program = "clearhead" if shutil.which("clearhead") else sys.argv[0]
    other = summary["layer"] // 2
    say(f"  {program} train lorsa --from {out}/config.json --tokens 400000 --out runs/longer")
    say(f"  {program} train lorsa --model {config.model} --layer {other} --context {config.context} --dry-run")
    say(f"  {program} train lorsa --help")


def _share(value: float | None) -> str:
    return "unmeasurable share" if value is None else f"{value:.1%}"
