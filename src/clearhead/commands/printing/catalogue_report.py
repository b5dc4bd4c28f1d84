"""What `clearhead catalogue` prints: what was found, with the best cases as text; or how the detectors do."""

from collections.abc import Sequence

import numpy as np

from clearhead.analysis.behaviours.calibration import Calibration
from clearhead.analysis.behaviours.catalogue import Found
from clearhead.commands.printing.table import say, show, show_columns
from clearhead.model.access import Model

EXAMPLES = 3
"""Units shown of each behaviour and kind."""
KINDS = {"head": "original heads", "lorsa": "Lorsa heads"}
AROUND = 6
"""Tokens shown before a query."""


def show_found(found: Sequence[Found], model: Model) -> None:
    """Print for each behaviour how many units of each kind have it, and the best of them."""
    for behaviour in dict.fromkeys(one.behaviour for one in found):
        say(f"{behaviour.title} (score from {behaviour.threshold:.2f} on, {behaviour.text})")
        for kind, name in KINDS.items():
            if not any(one.names[0].startswith(f"{kind}.") for one in found):
                continue
            of_kind = [one for one in found if one.behaviour is behaviour and one.names[0].startswith(f"{kind}.")]
            if not any(bool(one.scores.cases.any()) for one in of_kind):
                say(f"  {name}: no cases in the tokens of {model.name}")
                continue
            units = sum(len(one.names) for one in of_kind)
            count = sum(int(one.found.sum()) for one in of_kind)
            chance = [one.by_chance for one in of_kind if one.by_chance is not None]
            beside = f"; {sum(chance)} on shuffled text" if chance else ""
            say(f"  {name}: {count} of {units:,}{beside}")
            with_cases = [np.where(one.scores.cases >= behaviour.min_cases, one.scores.score, 0) for one in of_kind]
            best = sorted(
                (-score, place, unit)
                for place, scores in enumerate(with_cases)
                for unit, score in enumerate(scores.tolist())
                if score > 0
            )
            for score, place, unit in best[: min(count, EXAMPLES)]:
                one = of_kind[place]
                say(f"    {-score:.2f}  {one.names[unit]:<14}  {case_text(one, unit, model)}")
            for score, place, unit in best[count : count + 1]:
                one = of_kind[place]
                say(f"    below: {-score:.2f}  {one.names[unit]}  {case_text(one, unit, model)}")


def case_text(found: Found, unit: int, model: Model) -> str:
    """The unit's best case as text: the tokens it reads, with what stands before them, and the query's surroundings."""
    case = found.scores.best[unit]
    if case is None:
        return "–"
    strings = model.token_strings(found.probe.batches[case.batch][case.block])
    before = "".join(strings[max(0, case.query - AROUND) : case.query])
    read = ", ".join(
        f"{''.join(strings[max(0, key - 2) : key])}«{strings[key]}» ({case.query - key} back)" for key in case.keys[:2]
    )
    return f"{before}[{strings[case.query]}] reads {read}".replace("\n", "⏎")


def show_calibration(calibration: Calibration) -> None:
    """Print precision, recall and what is found by chance for each detector, and which units each one finds."""
    rows = {}
    for behaviour in calibration.behaviours:
        if not calibration.tested(behaviour):
            rows[behaviour.name] = f"not tested here: no planted unit acts on {behaviour.min_cases} cases"
            continue
        chosen = calibration.choose_threshold(behaviour)
        rates = [
            f"{share:.3f} [{low:.3f}, {high:.3f}]"
            for share, (low, high) in zip(calibration.rates(behaviour), calibration.intervals(behaviour), strict=True)
        ]
        planted = sum(unit.shows == behaviour.name for unit in calibration.units)
        rows[behaviour.name] = (
            f"threshold {behaviour.threshold:.2f} (these units: {'none' if chosen is None else f'{chosen:.2f}'})  "
            f"planted {planted}, {calibration.tested(behaviour)} with cases enough  "
            f"precision {rates[0]}  recall {rates[1]}  on shuffled text {rates[2]}"
        )
    show(rows, f"{len(calibration.units)} planted units, tokens of {calibration.tokenizer}; intervals of 95 %")
    kinds, table, counts = calibration.confusion()
    say("units found, by what they were planted as (rows) and detector (columns)")
    lines = [["", "units", *(behaviour.name[:9] for behaviour in calibration.behaviours)]]
    for kind, count, row in zip(kinds, counts, table, strict=True):
        lines.append([kind, *(str(number) for number in (count, *row))])
    show_columns(lines)
