"""What each digit of the sum rests on: a causal test of where the model reads the digits being added, and the carry.

Place p predicts a digit. It is made to read some places K from another sum: at row p alone, in every layer and head,

    S_pj = scale · q_p · k'_j       v_j = v'_j        for j in K        (k', v' from the other sum; gates follow S)

so that p sees the other sum's tens pair (a1, b1) or units pair (a0, b0), whatever those places have gathered, and keeps
its own token, its own queries and all other keys. A digit that rests on the pair, read there, becomes the other sum's;
one that does not stays. The other sums differ from a sum in one thing:

    tens                other tens pair and another c1, the same c2 (for digit c2: another c2)
    units, same carry   other units pair and another c0, the same carry
    units, other carry  other units pair with the other carry; for c1 only where a1 + b1 ≠ 9, as c2 would contradict it

A model may gather the units pair at one place and read it there from another, so that pair is also tested wherever it
can have been gathered: all places before p but the tens pair. "Of the units pair the tens use the carry only" says: c1
stays under the second change and becomes the other sum's under the third. What p uses may be less than it receives. How
much of that, as a vector, is the carry:

    m = Σ_heads Σ_j∈K A_pj v_j W_O, of all layers one after another
    explained = 1 − Σ |m − mean of its carry|² / Σ |m − mean|²        sums over sums

The other test is to close all edges from p to K (addition_edges.py).
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

TENS, UNITS = ("a1", "b1"), ("a0", "b0")
SOURCES = ("tens", "units", "units, gathered")
"""What a place may rest on: a pair, read at its own places, or the units pair wherever it was gathered."""
Change = Literal["tens", "units, same carry", "units, other carry"]
CHANGES: tuple[Change, ...] = ("tens", "units, same carry", "units, other carry")
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


def read_places(source: str, place: int) -> list[int]:
    """The places K of a source, for what `place` reads; all lie before it."""
    if source == "units, gathered":
        return [key for key in range(place) if INPUTS[key] not in TENS]
    return [INPUTS.index(key) for key in (TENS if source == "tens" else UNITS)]


@torch.no_grad()
def explained_by_carry(model: Model, sums: Addition, place: int, keys: list[int]) -> float | None:
    """Share of the variance of what `place` receives from `keys` that the carry makes; None where it receives nothing.

    See the module for the formula.
    """
    layers = model.attention_layers
    read = [f"{site}.{layer}" for layer in layers for site in ("v", "pattern")]
    run = model.run(sums.tokens[:, :-1], read=read)
    parts = []
    for layer in layers:
        pattern, v = run[f"pattern.{layer}"][:, :, place, keys], run[f"v.{layer}"][:, :, keys]
        parts.append(torch.einsum("nhk,nhkd,hde->ne", pattern, v, model.weights(layer).W_O))
    received = torch.cat(parts, dim=1).double()
    total = (received - received.mean(0)).square().sum()
    if total == 0:
        return None
    groups = [received[sums.carries[:, 0] == carry] for carry in (False, True)]
    return 1 - float(sum((group - group.mean(0)).square().sum() for group in groups) / total)


def measure_reading(model: Model, sums: Addition, opened: Bool[Tensor, "n l h q k"]) -> list[dict[str, Any]]:
    """For every digit and source: the edges from the digit's place to it, what closing them and reading elsewhere does.

    per_sum_by_layer     open edges per sum
    open                 share of sums that open any of them, without and with a carry from the units
    closed               accuracy of the digit without these edges, without and with a carry from the units
    changes              by change: share that becomes the other sum's digit where that is another (`follows`), and that
                         stays where it is the same (`stays`); None where there are no such sums
    explained_by_carry   of the variance of what is received
    """
    carry = sums.carries[:, 0]
    rows = []
    for digit, name in enumerate(DIGITS):
        place = FIRST + digit
        own = sums.tokens[:, ANSWER][:, digit]
        for source in SOURCES:
            keys = read_places(source, place)
            closed = torch.zeros_like(opened[0])
            closed[:, :, place, keys] = True
            right = predict(model, sums, closed)[:, digit] == own
            used = opened[:, :, :, place, keys]
            changes: dict[str, dict[str, float | None]] = {}
            for change in CHANGES[:1] if source == "tens" else CHANGES[1:]:
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
                    "source": source,
                    "per_sum_by_layer": used.double().sum((2, 3)).mean(0).tolist(),
                    "open": _apart(used.flatten(1).any(1), carry),
                    "closed": _apart(right, carry),
                    "changes": changes,
                    "explained_by_carry": explained_by_carry(model, sums, place, keys),
                }
            )
    return rows


def conclude(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Five statements about what is read, each with its numbers and whether all of them reach `HELD`."""
    changes = {(row["digit"], row["source"], change): found for row in rows for change, found in row["changes"].items()}
    explained = {(row["digit"], row["source"]): row["explained_by_carry"] for row in rows}

    def statement(text: str, **numbers: float | None) -> dict[str, Any]:
        held = all(value is not None and value >= HELD for value in numbers.values())
        return {"statement": text, "held": held, "numbers": numbers}

    return [
        statement(
            "The units digit is made of the units pair, read at its own places, and not of the tens pair.",
            follows_other_units=changes["c0", "units", "units, same carry"]["follows"],
            stays_under_other_tens=changes["c0", "tens", "tens"]["stays"],
        ),
        statement(
            "The tens digit is made of the tens pair, read at its own places.",
            follows_other_tens=changes["c1", "tens", "tens"]["follows"],
        ),
        statement(
            "Of the units pair, the place that predicts the tens digit uses the carry only.",
            stays_under_other_units_of_the_same_carry=changes["c1", "units, gathered", "units, same carry"]["stays"],
            follows_the_other_carry=changes["c1", "units, gathered", "units, other carry"]["follows"],
        ),
        statement(
            "It reads the carry at the units pair itself, not at a place that has gathered it.",
            follows_the_other_carry=changes["c1", "units", "units, other carry"]["follows"],
        ),
        statement(
            "What it receives of the units pair is the carry already, and no digits.",
            variance_explained_by_the_carry=explained["c1", "units, gathered"],
        ),
    ]


def _apart(of: Bool[Tensor, " n"], carry: Bool[Tensor, " n"]) -> dict[str, float | None]:
    return {"no_carry": share(of, ~carry), "carry": share(of, carry)}
