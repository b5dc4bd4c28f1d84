"""Ablation: what activations outside a circuit are overwritten with, computed from other prompts or not at all.

    corrupt           the same site in the corrupt prompt of the same item, position by position
    zero              0
    mean              mean over all prompts and positions of a reference
    positional_mean   mean over the reference's prompts of the same length, at each position
    resample          the corrupt prompt of another item of the reference that has the same length
    optimal           a constant per component, learned to harm the model least (curves/optimal.py)

The reference is the clean prompts of a task, stated in every protocol (`resample`: their corrupt prompts). A mean over
positions puts activations where the model never has them and destroys more than `corrupt` does: numbers under different
ablations are not comparable. Position means something only between prompts of equal length: others are refused.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from clearhead.data.tasks import TaskBatch
from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.access import Model
from clearhead.model.sites import SOFTMAX_SITES
from clearhead.ops.hash_rng import mix

Ablation = Literal["corrupt", "zero", "mean", "positional_mean", "resample", "optimal"]
ABLATIONS: tuple[Ablation, ...] = ("corrupt", "zero", "mean", "positional_mean", "resample", "optimal")
FROM_REFERENCE = frozenset({"mean", "positional_mean", "resample", "optimal"})
"""Ablations that need a reference."""
HEADS_FIRST = frozenset({"q", "k", "v", "q_pre", "k_pre"})
"""Sites shaped [b, h, t, dh]: positions are axis 2; elsewhere they are axis 1."""


class Replacement:
    """The values of one ablation at some sites, for any batch of prompts.

    constants: for `optimal`, site → the learned values. Raises `UnknownNameError` for an ablation that does not exist,
    `ClearheadError` where a reference is needed and there is none, for a mean of patterns or scores over positions
    (each belongs to a pair of them) and for scores of zero (which would open keys behind the query).
    """

    def __init__(
        self,
        model: Model,
        sites: Sequence[str],
        ablation: Ablation,
        *,
        reference: Sequence[TaskBatch] = (),
        constants: Mapping[str, Tensor] | None = None,
        seed: int = 0,
    ):
        if ablation not in ABLATIONS:
            raise UnknownNameError("ablation", ablation, ABLATIONS)
        if ablation in FROM_REFERENCE and not reference:
            raise ClearheadError(f"ablation {ablation!r} takes its values from a reference: give prompts of the task")
        if (constants is None) == (ablation == "optimal"):
            raise ClearheadError("ablation 'optimal', and no other, takes learned constants: see learn_constants")
        pairs = [site for site in sites if site.partition(".")[0] in SOFTMAX_SITES]
        if pairs and ablation == "mean":
            raise ClearheadError(
                f"{pairs[0]} belongs to pairs of positions and has no mean over them: use 'positional_mean'"
            )
        scores = [site for site in pairs if not site.startswith("pattern.")]
        if scores and ablation == "zero":
            raise ClearheadError(
                f"{scores[0]} set to zero would open keys that the mask hides: patch the pattern, or use 'corrupt'"
            )
        self.model, self.sites, self.ablation, self.seed = model, list(sites), ablation, seed
        self.reference = list(reference)
        self._constants = dict(constants or {})
        self._positional: dict[int, dict[str, Tensor]] = {}

    @property
    def described(self) -> str:
        """Which prompts the values come from, for the protocol."""
        n = sum(len(rows.items) for rows in self.reference)
        match self.ablation:
            case "zero":
                return "none"
            case "corrupt":
                return "the corrupt prompt of each item"
            case "resample":
                return f"corrupt prompts of other items of equal length, drawn from {n} items"
            case _:
                return f"{n} clean prompts of the task"

    def values(self, rows: TaskBatch) -> dict[str, Tensor]:
        """Site → values, of the site's shape or one that broadcasts to it.

        Raises `ClearheadError` for prompts of unequal length and where the reference has none of the length.
        """
        if rows.clean.shape != rows.corrupt.shape:
            raise ClearheadError(
                f"clean and corrupt prompts must have equal length, got {list(rows.clean.shape)} and"
                f" {list(rows.corrupt.shape)}: positions would not correspond"
            )
        match self.ablation:
            case "corrupt":
                return self._run(rows.corrupt)
            case "zero":
                zero = torch.zeros((), dtype=self.model.dtype, device=self.model.device)
                return dict.fromkeys(self.sites, zero)
            case "mean":
                if not self._constants:
                    self._constants = self._mean()
                return self._constants
            case "positional_mean":
                return self._mean_of_length(rows.clean.shape[1])
            case "resample":
                return self._run(self._others(rows))
        return self._constants  # optimal

    def _run(self, tokens: Tensor) -> dict[str, Tensor]:
        run = self.model.run(tokens, read=self.sites)
        return {site: run[site] for site in self.sites}

    def _mean(self) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        count = 0
        for rows in self.reference:
            count += rows.clean.numel()
            for site, value in self._run(rows.clean).items():
                added = value.double().sum((0, _position_axis(site)), keepdim=True)
                total[site] = total[site] + added if site in total else added
        return {site: (value / count).to(self.model.dtype) for site, value in total.items()}

    def _mean_of_length(self, length: int) -> dict[str, Tensor]:
        if length not in self._positional:
            same = self._of_length(length, "a mean per position")
            found = self._run(torch.cat([rows.clean for rows in same]))
            self._positional[length] = {site: value.mean(0, keepdim=True) for site, value in found.items()}
        return self._positional[length]

    def _others(self, rows: TaskBatch) -> Tensor:
        same = self._of_length(rows.clean.shape[1], "another item's prompt")
        pool = {item: ids for some in same for item, ids in zip(some.items, some.corrupt, strict=True)}
        chosen = []
        for item in rows.items:
            others = [other for other in pool if other != item]
            if not others:
                raise ClearheadError(f"item {item} is the only one of its length in the reference: give more prompts")
            chosen.append(pool[others[int(mix(self.seed, item)[0]) % len(others)]])
        return torch.stack(chosen)

    def _of_length(self, length: int, what: str) -> list[TaskBatch]:
        same = [rows for rows in self.reference if rows.clean.shape[1] == length]
        if not same:
            have = sorted({rows.clean.shape[1] for rows in self.reference})
            raise ClearheadError(
                f"{what} needs reference prompts of {length} tokens; the reference has lengths {have}: give more"
                " prompts, or ablate with 'corrupt' or 'mean'"
            )
        return same


def _position_axis(site: str) -> int:
    return 2 if site.partition(".")[0] in HEADS_FIRST else 1
