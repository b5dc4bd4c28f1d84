"""`clearhead steer`: units of a traced prompt turned up or down, what edges predict and what the model does.

Writes `summary.json`: every target's value, the predicted change, and the change measured with everything, attention,
or nothing held (circuits/tracing/steer.py).
"""

from typing import Any

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.tracing.sources import Opened, open_prompt
from clearhead.circuits.tracing.steer import HELD, steer
from clearhead.circuits.tracing.trace import likely_logits
from clearhead.commands.printing.table import say, show
from clearhead.commands.trace import one_token
from clearhead.config import Steer, TracePrompt
from clearhead.configfile import from_file
from clearhead.dictionaries.load import load_dictionary_of
from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.model.access import Model
from clearhead.runs import RunDirectory
from clearhead.spectral.tracing import Target
from clearhead.spectral.writes import Parts
from clearhead.units import Unit


def plan(config: Steer) -> dict[str, Any]:
    """What will be turned, without loading weights."""
    traced = _traced(config)
    return {"model": traced.model, "prompt": traced.prompt, **config.factors(), "directory": config.directory()}


def run(config: Steer) -> None:
    """Steer, print one row per target, write the run directory."""
    traced = _traced(config)
    model = Model.load(traced.model, dtype=traced.dtype, device=config.device)
    dictionaries = Dictionaries(model, map(load_dictionary_of, traced.dictionaries))
    opened = open_prompt(Parts(model), model.tokenize(traced.prompt), dictionaries)
    targets = _targets(traced, opened)
    found: dict[str, dict[str, float | None]] = {}
    for held in HELD:
        try:
            effect = steer(opened, config.factors(), targets, held)
        except NonFiniteError as error:
            say(f"with {held} held: {error}")
            continue
        for place, unit in enumerate(effect.targets):
            row = found.setdefault(unit.id, {"before": float(effect.before[place])})
            row["predicted"] = float(effect.predicted[place])
            row[f"measured, {held} held"] = float(effect.measured[place])
    with RunDirectory(config.directory()) as directory:
        directory.write_config(config.to_dict())
        directory.write_summary(
            {"model": model.name, "model_note": model.note, "prompt": traced.prompt, "turned": config.factors()}
            | {"targets": found}
        )
    for name, row in found.items():
        show(row, f"{name}:")
    say(f"numbers: {config.directory()}")


def _traced(config: Steer) -> TracePrompt:
    traced = from_file(config.traced)
    if not isinstance(traced, TracePrompt):
        raise ClearheadError(f"{config.traced} is a run of clearhead {traced.verb}; give one of clearhead trace")
    return traced


def _targets(traced: TracePrompt, opened: Opened) -> list[Unit] | Target:
    """What the trace explained."""
    model = opened.parts.model
    if traced.unit is not None:
        return [Unit.parse(traced.unit)]
    if traced.answer is None:
        return list(likely_logits(opened).reads.targets)
    answer = one_token(model, traced.answer, "answer")
    if traced.wrong is not None:
        return Target((answer,), (one_token(model, traced.wrong, "wrong"),))
    return [Unit("logit", index=answer, position=len(opened) - 1)]
