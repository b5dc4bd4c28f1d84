"""What each digit of the sum rests on: a causal test of where the model reads the digits being added, and the carry.

Place p predicts a digit. It is made to read some places K from another sum: at row p alone, in every layer and head,

    S_pj = scale · q_p · k'_j       v_j = v'_j        for j in K        (k', v' from the other sum; gates follow S)

so that p sees the other sum's tens pair (a1, b1) or units pair (a0, b0), whatever those places have gathered, and keeps
its own token, its own queries and all other keys. A digit that rests on the pair, read there, becomes the other sum's;
one that does not stays. The other sums differ from a sum in one thing:

    tens                other tens pair and another c1, the same c2 (for digit c2: another c2)
    units, same carry   other units pair and another c0, the same carry
    units, other carry  other units pair with the other carry; for c1 only where a1 + b1 ≠ 9, as c2 would contradict it

So "the units pair is read by the place that predicts the tens, for the carry only" says: c1 stays under the second and
becomes the other sum's under the third. The other test is to close all edges from p to K (addition_edges.py).
"""

from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.data.addition import ANSWER, PLACES, Addition
from clearhead.model.access import Model
from clearhead.model.run import Edit, Run
from clearhead.sparsify.addition import FIRST
from clearhead.sparsify.addition_edges import DIGITS, INPUTS, predict, share

PAIRS = {"tens": ("a1", "b1"), "units": ("a0", "b0")}
Change = Literal["tens", "units, same carry", "units, other carry"]
CHANGES: dict[str, tuple[Change, ...]] = {"tens": ("tens",), "units": ("units, same carry", "units, other carry")}
HELD = 0.95
"""Share of sums from which on a statement about reading counts as held."""


def other_sums(sums: Addition, change: Change, digit: int, seed: int = 0) -> Addition:
    """For each sum another one, drawn from those that differ in what `change` says; see the module."""
    a1, a0, b1, b0 = (sums.tokens[:, PLACES.index(place), None] for place in ("a1", "a0", "b1", "b0"))
    left, right = torch.arange(100) // 10, torch.arange(100) % 10
    if change == "tens":
        before, total = a1 + b1 + sums.carries[:, :1].long(), left + right + sums.carries[:, :1].long()
        other_hundreds = (before >= 10) != (total >= 10)
        fits = other_hundreds if digit == 0 else ~other_hundreds & (before % 10 != total % 10)
    else:
        before, total = a0 + b0, left + right
        other_carry = (before >= 10) != (total >= 10)
        fits = other_carry if change == "units, other carry" else ~other_carry & (before % 10 != total % 10)
    draws = torch.rand(fits.shape, generator=torch.Generator().manual_seed(seed))
    chosen = draws.masked_fill(~fits, -1.0).argmax(1)
    new_left, new_right = left[chosen], right[chosen]
    if change == "tens":
        return Addition.of_pairs(10 * new_left + a0[:, 0], 10 * new_right + b0[:, 0])
    return Addition.of_pairs(10 * a1[:, 0] + new_left, 10 * b1[:, 0] + new_right)


def read_elsewhere(model: Model, sums: Addition, others: Addition, place: int, keys: list[int]) -> Float[Tensor, "n v"]:
    """The logits of `place` when it reads the places `keys`, all before it, from the other sums."""
    layers = model.attention_layers
    other = model.run(others.tokens[:, :-1], read=["k.*", "v.*"], path="eager")
    edits: dict[str, Edit] = {}
    for layer in layers:
        k, v = other[f"k.{layer}"][:, :, keys], other[f"v.{layer}"][:, :, keys]
        edits[f"scores.{layer}"] = _score(layer, k, model.geometry(layer).scale, place, keys)
        edits[f"z.{layer}"] = _mix(layer, v, place, keys)
    read = [f"{site}.{layer}" for layer in layers for site in ("q", "v", "pattern")]
    return model.run(sums.tokens[:, :-1], read=[*read, "logits"], edit=edits).logits[:, place]


def _score(layer: int, k: Tensor, scale: float, place: int, keys: list[int]) -> Edit:
    def edit(scores: Tensor, run: Run) -> Tensor:
        scores = scores.clone()
        scores[:, :, place, keys] = torch.einsum("nhd,nhkd->nhk", run[f"q.{layer}"][:, :, place], k) * scale
        return scores

    return edit


def _mix(layer: int, v: Tensor, place: int, keys: list[int]) -> Edit:
    def edit(z: Tensor, run: Run) -> Tensor:
        weight = run[f"pattern.{layer}"][:, :, place, keys]
        z = z.clone()
        z[:, place] += torch.einsum("nhk,nhkd->nhd", weight, v - run[f"v.{layer}"][:, :, keys])
        return z

    return edit


def measure_reading(model: Model, sums: Addition, opened: Bool[Tensor, "n l h q k"]) -> list[dict[str, Any]]:
    """For every digit and pair: the edges from the digit's place to the pair, what closing them and reading other does.

    per_sum_by_layer     open edges per sum
    open                 share of sums that open any of them, without and with a carry from the units
    closed               accuracy of the digit without these edges, without and with a carry from the units
    changes              by change: share that becomes the other sum's digit where that is another (`follows`), and that
                         stays where it is the same (`stays`); None where there are no such sums
    """
    carry = sums.carries[:, 0]
    rows = []
    for digit, name in enumerate(DIGITS):
        place = FIRST + digit
        own = sums.tokens[:, ANSWER][:, digit]
        for pair, places in PAIRS.items():
            keys = [INPUTS.index(key) for key in places]
            closed = torch.zeros_like(opened[0])
            closed[:, :, place, keys] = True
            right = predict(model, sums, closed)[:, digit] == own
            used = opened[:, :, :, place, keys]
            changes: dict[str, dict[str, float | None]] = {}
            for change in CHANGES[pair]:
                others = other_sums(sums, change, digit)
                found = read_elsewhere(model, sums, others, place, keys).argmax(-1)
                fair = ~sums.cascades if change == "units, other carry" and name == "c1" else torch.ones_like(carry)
                theirs = others.tokens[:, ANSWER][:, digit]
                changes[change] = {
                    "follows": share(found == theirs, fair & (own != theirs)),
                    "stays": share(found == own, fair & (own == theirs)),
                }
            rows.append(
                {
                    "digit": name,
                    "place": INPUTS[place],
                    "pair": pair,
                    "per_sum_by_layer": used.double().sum((2, 3)).mean(0).tolist(),
                    "open": _apart(used.flatten(1).any(1), carry),
                    "closed": _apart(right, carry),
                    "changes": changes,
                }
            )
    return rows


def conclude(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Three statements about what is read, each with its numbers and whether all of them reach `HELD`."""
    changes = {(row["digit"], change): found for row in rows for change, found in row["changes"].items()}

    def statement(text: str, **numbers: float | None) -> dict[str, Any]:
        held = all(value is not None and value >= HELD for value in numbers.values())
        return {"statement": text, "held": held, "numbers": numbers}

    return [
        statement(
            "The units digit is made of the units pair, read at its own place, and not of the tens pair.",
            follows_other_units=changes["c0", "units, same carry"]["follows"],
            stays_under_other_tens=changes["c0", "tens"]["stays"],
        ),
        statement(
            "The tens digit is made of the tens pair, read at its own place.",
            follows_other_tens=changes["c1", "tens"]["follows"],
        ),
        statement(
            "The place that predicts the tens digit reads the units pair for the carry only.",
            stays_under_other_units_of_the_same_carry=changes["c1", "units, same carry"]["stays"],
            follows_the_other_carry=changes["c1", "units, other carry"]["follows"],
        ),
    ]


def _apart(of: Bool[Tensor, " n"], carry: Bool[Tensor, " n"]) -> dict[str, float | None]:
    return {"no_carry": share(of, ~carry), "carry": share(of, carry)}
