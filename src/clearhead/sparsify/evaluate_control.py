"""What a training control came to: its loss beside the base's, on the tokens that sparse models are evaluated on.

    dense     all gates open: what training on these tokens does without a price on edges
    random    every edge open by lot, with the rate of its head in a sparse model: what so many edges are worth anywhere

The keys are those of evaluate.py, with `control` in place of `hard` and no map of edges, as none of them was learned.
"""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.sparsify.best import edges_per_query
from clearhead.sparsify.evaluate import BEHAVIOURS, Forms, measure_induction_of, measure_task
from clearhead.sparsify.measures import as_it_is, by_position, measure_losses


def evaluate_control(
    model: Model,
    base: Model | None,
    tokens: Int64[Tensor, "n t"],
    rates: dict[int, Float[Tensor, " h"]] | None,
    *,
    prompts: int = 128,
    batch_tokens: int = 4096,
) -> dict[str, Any]:
    """Losses, induction and tasks of a trained control and of its base; `rates` None for the dense one.

    Raises `ClearheadError` for a model without gates, and `NonFiniteError` for losses and logits that are no numbers.
    """
    gates = model.gates
    if gates is None:
        raise ClearheadError(f"{model.name} has no edge gates, so it is no control of a sparse model")

    def drawn(_first: int):
        return gates.opened() if rates is None else gates.random(rates)

    forms: Forms = {
        "control": (model, drawn),
        "base": None if base is None else (base, as_it_is),
    }
    context = tokens.shape[1]
    batch = max(1, batch_tokens // context)
    shares = torch.stack(list(rates.values())) if rates else torch.ones(len(gates.layers), model.n_heads)
    losses = {
        name: None if form is None else measure_losses(form[0], tokens, form[1], batch=batch, what=f"{name} loss")[0]
        for name, form in forms.items()
    }
    return {
        "model": model.name,
        "base": None if base is None else base.name,
        "tokens": tokens.numel(),
        "context": context,
        "ce": {name: None if values is None else float(values.mean()) for name, values in losses.items()},
        "ce_by_position": by_position(losses),
        "edges": {"share": float(shares.mean()), "per_query": edges_per_query(model, shares, context)},
        "induction": measure_induction_of(model, forms, context, batch),
        "tasks": {name: measure_task(model, forms, name, prompts) for name in BEHAVIOURS},
    }
