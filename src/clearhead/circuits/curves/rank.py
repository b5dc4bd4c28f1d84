"""Rankings: how much each component matters to the logit difference, measured or estimated.

With M(m) the logit difference under the mask m (1 keeps a component, 0 overwrites it), the score of component i is

    exact       M(1) − M(1 with m_i = 0)                         one row of a forward per component
    atp         ∂M/∂m_i at m = 1, = Σ (z_i − a_i)·∂M/∂z_i        attribution patching, one backward
    ig          mean of ∂M/∂m_i at m = (s − ½)/S, s = 1..S       integrated gradients along the joint path; they sum
                                                                 to M(1) − M(0) up to the midpoint rule
    relevance   as atp, through a linearised model               rules.py
    mask        P(m_i > 0) of a mask trained to be small         masks.py

A positive score is that of a component that helps. The score of atp is the gradient of the mask that circuits use, so
it holds for whatever ablation they use; a ranking is only meant for the ablation that it was made with. Exact single
effects are not the truth about circuits either: components act together.

Not here: what is done with a ranking (curve.py).
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from clearhead.circuits.curves.rules import constant_patterns, linearised
from clearhead.circuits.patching.metrics import METRICS
from clearhead.circuits.patching.nodes import Nodes, Opened
from clearhead.data.tasks import TaskBatch, logit_difference
from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.model.access import Model

IG_STEPS = 5
"""Points of integrated gradients."""


def exact_effects(nodes: Nodes, rows: TaskBatch) -> Float64[Tensor, "b n"]:
    """M(all) − M(all but i), by overwriting every component alone."""
    n = len(nodes.components)
    keep = torch.ones(n + 1, 1, n, dtype=torch.bool)
    keep[torch.arange(n), 0, torch.arange(n)] = False
    measured = nodes.evaluate(keep, rows)[..., METRICS.index("logit_difference")]
    return (measured[n:] - measured[:n]).T


def attribution(nodes: Nodes, rows: TaskBatch) -> Float64[Tensor, "b n"]:
    """Attribution patching: the gradient of the mask where everything is kept."""
    return mask_gradient(nodes, nodes.open(rows), 1.0)


def integrated_gradients(nodes: Nodes, rows: TaskBatch, *, steps: int = IG_STEPS) -> Float64[Tensor, "b n"]:
    """The mean gradient of the mask on the straight path from nothing kept to all kept, at `steps` midpoints."""
    if steps < 1:
        raise ClearheadError(f"integrated gradients need at least 1 step, got {steps}")
    if nodes.replacement.ablation == "zero":
        refuse_path_to_zero(nodes.model)
    opened = nodes.open(rows)
    return torch.stack([mask_gradient(nodes, opened, (step + 0.5) / steps) for step in range(steps)]).mean(0)


def refuse_path_to_zero(model: Model) -> None:
    """Raises `ClearheadError` where a norm follows attention (Gemma 2, OLMo 2): it undoes the factor m common to all
    heads, so that nothing changes on the path from all to none but at its very end, between all midpoints.
    """
    if model.family.post_attention_norm is not None:
        raise ClearheadError(
            f"{model.name} has a norm behind attention, which undoes a factor that all heads share: the path of"
            " integrated gradients to zero leads nowhere; rank with exact or atp, or ablate with corrupt"
        )


def relevance(nodes: Nodes, rows: TaskBatch) -> Float64[Tensor, "b n"]:
    """The gradient of the mask in the model with patterns, norm scales and gates held at their values (rules.py)."""
    return mask_gradient(nodes, nodes.open(rows), 1.0, rules=True)


def mask_gradient(
    nodes: Nodes, opened: Opened, at: float | Float[Tensor, "b n"], *, rules: bool = False
) -> Float64[Tensor, "b n"]:
    """∂M/∂m of every prompt's own mask at the point `at`, the same number for all components or one for each.

    Raises `NonFiniteError` for gradients that are not finite, with `rules` what `linearised` raises.
    """
    b, model = len(opened.rows.items), nodes.model
    shape = (b, len(nodes.components))
    mask = torch.as_tensor(at, dtype=model.dtype, device=model.device).expand(shape).clone().requires_grad_()
    prompt = torch.arange(b, device=model.device)
    around: AbstractContextManager[object] = linearised(model) if rules else nullcontext()
    edit = constant_patterns(model) if rules else None
    with around:
        logits = nodes.run_masked(mask, prompt, opened, grad=True, edit=edit)
    total = logit_difference(logits.float() if model.dtype.itemsize < 4 else logits, opened.rows).sum()
    (gradient,) = torch.autograd.grad(total, mask)
    if not bool(gradient.isfinite().all()):
        bad = (~gradient.isfinite()).nonzero()[0].tolist()
        raise NonFiniteError(
            f"the gradient of {nodes.components.names[bad[1]]} on item {opened.rows.items[bad[0]]} of the task"
        )
    return gradient.double().cpu()
