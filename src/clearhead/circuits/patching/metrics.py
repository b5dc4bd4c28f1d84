"""What a circuit is measured by, from the logits at the last token of each prompt.

    logit_difference        mean logit of the answers − mean logit of the wrong answers
    probability_difference  Σ probability of the answers − Σ probability of the wrong answers
    kl                      −KL(whole model ‖ circuit): 0 for the whole model, negative for all others
    accuracy                1 where the best answer's logit exceeds every wrong answer's

For all four larger is better, so that one formula of faithfulness serves them (curves/statistics.py).

Not here: what was kept and what was overwritten to get the logits (nodes.py, edge_patching.py, patch.py).
"""

from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from clearhead.data.tasks import TaskBatch
from clearhead.errors import ClearheadError, NonFiniteError

Metric = Literal["logit_difference", "probability_difference", "kl", "accuracy"]
METRICS: tuple[Metric, ...] = ("logit_difference", "probability_difference", "kl", "accuracy")
"""The metrics, in the order of the last axis of `measure_logits`."""


def measure_logits(
    logits: Float[Tensor, "r b v"], rows: TaskBatch, full: Float[Tensor, "b v"]
) -> Float64[Tensor, "r b m"]:
    """All metrics of r circuits on the b prompts of `rows`; `full` are the logits of the whole model.

    Raises `NonFiniteError` naming the items for logits that are not finite, `ClearheadError` where an item has no
    answer or no wrong answer to compare with.
    """
    for item, answers, wrong in zip(rows.items, rows.answers, rows.wrong_answers, strict=True):
        if not answers or not wrong:
            raise ClearheadError(f"item {item} of the task needs answers and wrong answers to be measured by")
    if not bool(logits.isfinite().all()):
        bad = sorted({rows.items[row] for row in (~logits.isfinite()).any(-1).any(0).nonzero()[:, 0].tolist()})
        raise NonFiniteError(f"logits at the last token of items {bad}")
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p, kl = wide.log_softmax(-1), -divergence(wide, full)
    columns = []
    for row, (answers, others) in enumerate(zip(rows.answers, rows.wrong_answers, strict=True)):
        right, wrong = (wide[:, row, ids].double() for ids in (answers, others))
        p_right, p_wrong = (log_p[:, row, ids].double().exp().sum(-1) for ids in (answers, others))
        accurate = (right.amax(-1) > wrong.amax(-1)).double()
        columns.append([right.mean(-1) - wrong.mean(-1), p_right - p_wrong, kl[:, row].double(), accurate])
    return torch.stack([torch.stack(column, dim=-1) for column in columns], dim=1)


def divergence(logits: Float[Tensor, "*r b v"], full: Float[Tensor, "b v"]) -> Float[Tensor, "*r b"]:
    """KL(whole model ‖ circuit) of every row in nats, in float32 at least."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_full = full.to(wide).log_softmax(-1)
    return (log_full.exp() * (log_full - logits.to(wide).log_softmax(-1))).sum(-1)
