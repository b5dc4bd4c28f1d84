"""What `clearhead trust` prints of single heads and families: what setting them to other values did."""

from typing import Any

from clearhead.analysis.interventions import linear_range
from clearhead.commands.printing.table import say, show_columns, spelled

COLUMNS = (
    "unit",
    "becomes",
    "logits",
    "95 %",
    "first order",
    "slope",
    "direct",
    "another head",
    "random",
    "KL",
    "cases",
)


def print_interventions(rows: dict[str, list[Any]]) -> None:
    """A line for each unit and setting, controls beside it, then how far each unit is linear."""
    at = {
        (unit, becomes, changed): place
        for place, (unit, becomes, changed) in enumerate(
            zip(rows["unit_id"], rows["becomes"], rows["changed"], strict=True)
        )
    }
    lines: list[list[str]] = [list(COLUMNS)]
    for (unit, becomes, changed), place in at.items():
        if changed != "own":
            continue
        own = {name: values[place] for name, values in rows.items()}
        random, other = (rows["effect"][at[unit, becomes, kind]] for kind in ("random", "other"))
        interval = f"{spelled(own['low'])} to {spelled(own['high'])}"
        numbers = (own["gradient"], own["slope"], own["direct"], other, random, own["kl"], own["cases"])
        lines.append([unit, becomes, spelled(own["effect"]), interval, *map(spelled, numbers)])
    say("change of the logits that a unit writes to when its activations are set, and predicted to first order:")
    show_columns(lines)
    for unit in dict.fromkeys(rows["unit_id"]):
        ends = linear_range(rows, unit)
        if ends is not None:
            said = "at none of these factors" if ends == (1, 1) else f"from factor {ends[0]:g} to {ends[1]:g}"
            say(f"  {unit} is linear {said}")
