"""Protocol: everything that a circuit size depends on, printed and saved with every number.

The same model and task gives circuits of 10 or of 270 heads, depending on what the components outside are overwritten
with, on the sign policy of the ranking and on which crossing is reported. A number without its protocol means nothing.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Policy = Literal["signed", "absolute"]
POLICIES: tuple[Policy, Policy] = ("signed", "absolute")


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How a curve was made."""

    model: str
    model_note: str
    task: str
    level: str
    components: str
    """How many there are: one number, or smallest to largest where prompts differ."""
    ablation: str
    """What components outside the circuit are overwritten with."""
    reference: str
    """Which prompts means, resampled and learned values come from."""
    rank: str
    policy: Policy
    metric: str
    threshold: float
    """Share of the behaviour that a circuit must keep."""
    min_effect: float
    """Prompts whose |M(all) − M(none)| is smaller are dropped (units of the metric)."""
    ranked_on: tuple[int, ...]
    """Items of the task."""
    evaluated_on: tuple[int, ...]
    wrong: tuple[int, ...]
    """Items that the whole model gets wrong; left out of both splits."""
    dropped: tuple[int, ...]
    """Items left out for `min_effect`."""
    refused: dict[str, int]
    """Reason → number of items that the tokenizer could not take."""
    seed: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    def lines(self) -> dict[str, object]:
        """Name → value as a reader is shown them, item lists as counts."""
        counted = ("ranked_on", "evaluated_on", "wrong", "dropped")
        plain = {name: value for name, value in asdict(self).items() if name not in ("notes", "refused")}
        shown: dict[str, object] = {
            name.replace("_", " "): len(value) if name in counted else value for name, value in plain.items()
        }
        shown.update({f"refused: {reason}": number for reason, number in self.refused.items()})
        shown.update({f"note {number}": note for number, note in enumerate(self.notes, 1)})
        return shown
