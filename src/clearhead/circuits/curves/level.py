"""Level: components of one kind, one ablation, one model: what an inclusion curve needs to know of them.

A level says how many components a prompt has and what they are called, scores them, and measures circuits: sets of
components that are kept (compute normally from whatever reaches them) while all others are overwritten. curve.py,
statistics.py and the command `circuit curve` work with any object of this form: node_level.py has heads and MLPs,
attention_edges.py and graph_edges.py have their edges.

Not here: how scores become rankings and circuits (curve.py).
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from jaxtyping import Bool, Float64
from torch import Tensor

from clearhead.data.tasks import TaskBatch

Method = Literal["exact", "atp", "ig", "relevance", "mask"]
METHODS: tuple[Method, ...] = ("exact", "atp", "ig", "relevance", "mask")
"""Ways to score components (rank.py); a random ranking is made by curve.py and asks the level for nothing."""


class Level(Protocol):
    """Components of one kind in one model under one ablation."""

    @property
    def name(self) -> str:
        """As on the command line: `heads`, `heads+mlps`, `attention-edges`, `graph-edges`."""
        ...

    @property
    def per_prompt(self) -> bool:
        """Whether component i of one prompt is another component than i of the next (attention edges: positions).

        Then every prompt is ranked by its own scores, and ranking on one split for use on another is impossible.
        """
        ...

    @property
    def described(self) -> str:
        """Which prompts the values of dropped components come from."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Sentences that belong beside every number: what is fixed, what is recomputed, what is no component."""
        ...

    def count(self, rows: TaskBatch) -> int:
        """Number of components that a prompt of `rows` has; the same for every call unless `per_prompt`."""
        ...

    def names(self, rows: TaskBatch) -> Sequence[str]:
        """The components' unit ids, `count` of them."""
        ...

    def scores(self, method: Method, batches: Sequence[TaskBatch]) -> list[Float64[Tensor, "b n"]]:
        """One tensor per batch: the effect M(all) − M(all but i) on each prompt, or an estimate of it.

        M is the logit difference, so a positive score is that of a component that helps. Raises `ClearheadError` for a
        method that the level does not have.
        """
        ...

    def evaluate(self, keep: Bool[Tensor, "r b n"], rows: TaskBatch) -> Float64[Tensor, "r b m"]:
        """Every metric (`metrics.METRICS`, in that order) of r circuits on each of the b prompts.

        keep[i, j] is the i-th circuit of prompt j; an axis of length 1 at b means the same circuit for all prompts.
        Prompts may be large in number: the level cuts r·b into batches that fit. Kept components are recomputed.
        """
        ...
