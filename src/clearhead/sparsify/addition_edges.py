"""Which edges of the addition toy are open, for which sums, and what breaks when some of them are closed.

A class of edges is (layer, query place, key place), in all heads: "in layer 0 the token `=` reads a1". Closing sets
the score below every threshold, so that with a sink the closed edge carries exactly nothing, and closing one that was
never open changes no logit. Maps are means over sums, apart for those whose units carry into the tens and those whose
do not. Sums are teacher-forced: the digits before the predicted one are the right ones.

Measured under hard gates on the softmax laid out (path eager); the last token predicts nothing and is left out.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from clearhead.data.addition import ANSWER, PLACES, Addition
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.gates import Gates
from clearhead.model.run import Edit, Run
from clearhead.sparsify.addition import FIRST, measure

INPUTS = PLACES[:-1]
"""Places of the tokens that the model reads; 36 pairs of them are visible."""
DIGITS = PLACES[ANSWER]
"""The digits of the sum: c2, c1, c0. Place FIRST + d predicts digit d."""
CLOSED = -1e30
"""A score under which no gate opens; finite, so that a row of nothing else has a softmax."""
DRAWS = 20


def gates_of(model: Model) -> Gates:
    """The gates of a model. Raises `ClearheadError` where it has none."""
    if model.gates is None:
        raise ClearheadError(f"{model.name} has no edge gates; give the folder of a sparse model")
    return model.gates


@torch.no_grad()
def open_edges(model: Model, sums: Addition) -> Bool[Tensor, "n l h q k"]:
    """Which edges each sum opens."""
    gates = gates_of(model)
    with gates.hard():
        run = model.run(sums.tokens[:, :-1], read=[f"scores.{layer}" for layer in gates.layers])
        seen = torch.ones(len(INPUTS), len(INPUTS), dtype=torch.bool).tril()
        opened = [gate.open_edges(run[f"scores.{layer}"]) & seen for layer, gate in gates.layers.items()]
    return torch.stack(opened, dim=1)


def mean_patterns(dense: Model, sums: Addition) -> Float[Tensor, "l h q k"]:
    """Attention of a dense model, mean over sums."""
    run = dense.run(sums.tokens[:, :-1], read=["pattern.*"])
    return torch.stack([run[f"pattern.{layer}"].mean(0) for layer in dense.attention_layers])


def by_carry(
    opened: Bool[Tensor, "n l h q k"], sums: Addition
) -> tuple[Float[Tensor, "2 l h q k"], Float[Tensor, "2 l q k"]]:
    """How often each edge is open, and how often any head of its class, without and with a carry from the units."""
    carry = sums.carries[:, 0]
    parts = [opened[~carry], opened[carry]]
    single = torch.stack([part.float().mean(0) for part in parts])
    return single, torch.stack([part.any(2).float().mean(0) for part in parts])


def predict(model: Model, sums: Addition, closed: Bool[Tensor, "l h q k"] | None = None) -> Int64[Tensor, "n 3"]:
    """The three digits that the model predicts, with the edges of `closed` closed for all sums."""
    edits: dict[str, Edit] = {}
    for layer, mask in zip(gates_of(model).layers, closed if closed is not None else [], strict=False):
        if mask.any():
            edits[f"scores.{layer}"] = _closing(mask)
    logits = model.run(sums.tokens[:, :-1], read=["logits"], edit=edits, path="eager").logits
    return logits[:, FIRST:].argmax(-1)


def _closing(mask: Bool[Tensor, "h q k"]) -> Edit:
    def close(scores: Tensor, _run: Run) -> Tensor:
        return scores.masked_fill(mask, CLOSED)

    return close


def accuracies(predicted: Int64[Tensor, "n 3"], sums: Addition) -> dict[str, float]:
    """Shares of right sums: exact_match, that without and with a carry from the units, and of each digit.

    Raises `ClearheadError` where no sum has such a carry, or all have one.
    """
    if sums.carries[:, 0].all() or not sums.carries[:, 0].any():
        raise ClearheadError(f"of these {len(sums)} sums all or none carry from the units; give some of both")
    right = predicted == sums.tokens[:, ANSWER]
    exact, carry = right.all(1).double(), sums.carries[:, 0]
    return {
        "exact_match": float(exact.mean()),
        "no_carry": float(exact[~carry].mean()),
        "carry": float(exact[carry].mean()),
        **{digit: float(right[:, place].double().mean()) for place, digit in enumerate(DIGITS)},
    }


def by_kind_of_carry(predicted: Int64[Tensor, "n 3"], sums: Addition) -> list[dict[str, Any]]:
    """Accuracies of the six kinds of sums that carries make, each in one of them."""
    units, tens, nine = sums.carries[:, 0], sums.carries[:, 1], sums.cascades
    kinds = {
        "none": ~units & ~tens & ~nine,
        "none, tens add up to 9": ~units & nine,
        "units": units & ~tens,
        "tens": ~units & tens,
        "both": units & tens & ~nine,
        "both, through a 9": units & nine,
    }
    right = predicted == sums.tokens[:, ANSWER]
    return [
        {
            "carries": name,
            "sums": int(mask.sum()),
            "exact_match": share(right.all(1), mask),
            **{digit: share(right[:, place], mask) for place, digit in enumerate(DIGITS)},
        }
        for name, mask in kinds.items()
    ]


def close_classes(model: Model, sums: Addition, opened: Bool[Tensor, "n l h q k"]) -> list[dict[str, Any]]:
    """Accuracy without each class of edges that is ever open, the most harmful first; others can change nothing.

    `per_sum`: open edges of the class per sum, over all heads.
    """
    rows = []
    for layer, query, key in opened.any(2).any(0).nonzero().tolist():
        closed = torch.zeros_like(opened[0])
        closed[layer, :, query, key] = True
        rows.append(
            {
                "layer": layer,
                "query": INPUTS[query],
                "key": INPUTS[key],
                "per_sum": float(opened[:, layer, :, query, key].double().sum(1).mean()),
                **accuracies(predict(model, sums, closed), sums),
            }
        )
    return sorted(rows, key=lambda row: (row["exact_match"], -row["per_sum"]))


def close_heads(model: Model, sums: Addition, opened: Bool[Tensor, "n l h q k"]) -> list[dict[str, Any]]:
    """Open edges of each head per sum, without and with a carry, and accuracy with all of them closed."""
    carry = sums.carries[:, 0]
    counts = opened.double().sum((-2, -1))
    whole = accuracies(predict(model, sums), sums)
    rows = []
    for layer in range(opened.shape[1]):
        for head in range(opened.shape[2]):
            closed = torch.zeros_like(opened[0])
            closed[layer, head] = True
            count = counts[:, layer, head]
            silent = not bool(count.any())
            rows.append(
                {
                    "layer": layer,
                    "head": head,
                    "per_sum": float(count.mean()),
                    "per_sum_no_carry": float(count[~carry].mean()),
                    "per_sum_carry": float(count[carry].mean()),
                    **(whole if silent else accuracies(predict(model, sums, closed), sums)),
                }
            )
    return rows


def random_gates(
    model: Model, sums: Addition, shares: Float[Tensor, "l h"], draws: Sequence[int] = range(DRAWS)
) -> dict[str, float]:
    """Accuracy of the same weights with edges open by lot, a share of each head's: mean and largest over draws."""
    gates = gates_of(model)
    rates = dict(zip(gates.layers, shares.float(), strict=True))
    right = [measure(model.hf, sums.tokens, gates.random(rates, seed))[0] for seed in draws]
    return {"mean": sum(right) / len(right), "largest": max(right)}


def random_share(model: Model, sums: Addition, rates: dict[int, Float[Tensor, " h"]]) -> float:
    """The share of edges that is open in the draw that a random control was trained with."""
    with gates_of(model).random(rates):
        run = model.run(sums.tokens[:1, :-1], read=["pattern.*"])
    opened = torch.stack([run[f"pattern.{layer}"] > 0 for layer in rates])
    pairs = len(INPUTS) * (len(INPUTS) + 1) / 2
    return float(opened.double().sum((-2, -1)).mean() / pairs)


def share(of: Bool[Tensor, " n"], among: Bool[Tensor, " n"]) -> float | None:
    """How many of `among` are `of`, as a share; None where there are none."""
    return float(of[among].double().mean()) if among.any() else None
