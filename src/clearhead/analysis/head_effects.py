"""What removing heads or families of a Lorsa does to the next token in the model, against what their writes predict.

For each unit (one head, or several together) and a few tokens at which it is active, drawn from text, its write Σ z w_o
is taken out of what the model's own attention wrote there, everything later computes anew (`circuits.unit_effects`),
and the logits are read along mean W_U of the 10 tokens that its mean write raises most less those that it lowers most:

    effect     what the unit's presence does to the reader in the model          (minus the change when it is removed)
    direct     z w_o · u with the final norm's scale held: the same without the layers between
    linear     direct, and what attention with held patterns and scales carries on at the same token
    loss, kl   what removing it costs the prediction of the next token

Two controls at the same tokens: `random`, a random direction of the same length in place of the write, read along the
same u; `other`, another active head of the dictionary removed, read along this unit's u. A removed head that is not in
the model's output is an error put in, with effects of its own: whether it is there says `explained` (trust.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from scipy.sparse import csc_matrix, csr_matrix
from torch import Tensor

from clearhead.analysis.logits import logit_effects
from clearhead.analysis.seeds import Sparse
from clearhead.circuits.patching.unit_effects import EffectMeter, Effects, reader
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError
from clearhead.runs import progress

KINDS = ("removed", "random", "other")


@dataclass(frozen=True, eq=False)
class HeadEffects:
    """Effects of m cases of n units. `unit` [m] counts the units given; the rest is by kind of case."""

    unit: NDArray[np.int64]
    token: NDArray[np.int64]
    """block · context + position."""
    values: dict[str, dict[str, Float[np.ndarray, " m"]]]
    """values["removed"]["effect"]: kinds are removed, random and other; numbers effect, direct, linear, loss, kl."""


@torch.no_grad()
def measure_heads(
    meter: EffectMeter,
    lorsa: Lorsa,
    z: Sparse,
    tokens: Int64[Tensor, "b t"],
    units: Sequence[Sequence[int]],
    *,
    cases: int = 8,
    factor: float = 0.0,
    seed: int = 0,
) -> HeadEffects:
    """Effects of units, each a list of heads that are removed together, at `cases` tokens each.

    z: activations of all heads on the blocks (`analysis.seeds.activations`); factor: what z is multiplied by instead
    of being removed (the effect is then still given as that of presence: minus the change, over 1 − factor). Units
    that are active at fewer tokens have fewer cases. Raises `ClearheadError` when none of them is ever active.
    """
    if factor == 1:
        raise ClearheadError("a factor of 1 changes nothing; give 0 to remove heads, 2 to double them")
    members = _members(units, lorsa.n_heads)
    unit, token = _draw(_active(z, members), tokens.shape[1], cases, seed)
    if not len(unit):
        raise ClearheadError("none of these heads is active on this text; give more tokens, or other heads")
    writes = lorsa.W_O.detach().double().cpu().numpy()
    own = _write(z, members, unit, token, writes)
    generator = np.random.default_rng(seed)
    noise = generator.normal(size=own.shape)
    noise *= np.linalg.norm(own, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    changes = {"removed": own, "random": noise, "other": _others(z, members, unit, token, writes, generator)}
    readers = _readers(meter, z, members, writes)
    found = {kind: {name: np.zeros(len(unit)) for name in Effects.__dataclass_fields__} for kind in KINDS}
    block, position = np.divmod(token, tokens.shape[1])
    with progress("effects", len(unit), "cases") as advance:
        for here in np.split(np.argsort(block, kind="stable"), np.flatnonzero(np.diff(np.sort(block))) + 1):
            opened = meter.open(tokens[block[here[0]]])
            at = torch.from_numpy(np.tile(position[here], len(KINDS)))
            change = torch.from_numpy(np.concatenate([changes[kind][here] for kind in KINDS])) * (factor - 1)
            effects = meter.measure(opened, at, change, readers[torch.from_numpy(unit[here])].repeat(len(KINDS), 1))
            for name, values in vars(effects).items():
                sign = 1 / (factor - 1) if name in ("effect", "direct", "linear") else 1.0
                for kind, part in zip(KINDS, values.cpu().double().numpy().reshape(len(KINDS), -1), strict=True):
                    found[kind][name][here] = part * sign
            advance(len(here))
    return HeadEffects(unit, token, found)


def _members(units: Sequence[Sequence[int]], n_heads: int) -> Sparse:
    """Which heads belong to which unit, [units, heads]."""
    heads = np.concatenate([np.asarray(unit, dtype=np.int64) for unit in units])
    if len(heads) and not 0 <= heads.min() <= heads.max() < n_heads:
        raise ClearheadError(f"there is no head {heads[(heads < 0) | (heads >= n_heads)][0]}: the Lorsa has {n_heads}")
    rows = np.repeat(np.arange(len(units)), [len(unit) for unit in units])
    return csr_matrix((np.ones(len(heads)), (rows, heads)), shape=(len(units), n_heads))


def _active(z: Sparse, members: Sparse) -> Sparse:
    """[tokens, units], not 0 where a member is active."""
    return csc_matrix(abs(z.sign()) @ members.T)


def _draw(active: Sparse, context: int, cases: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of every unit at random, spread so that few of them lie at the same token, in as few blocks as will do.

    Blocks come in random order until each unit is active at twice as many tokens of them as are drawn and there are as
    many tokens as cases; the last token of a block, whose next one is not known, is never drawn.
    """
    generator = np.random.default_rng(seed)
    n_blocks = active.shape[0] // context
    candidates = [token[token % context < context - 1] for token in np.split(active.indices, active.indptr[1:-1])]
    order = generator.permutation(n_blocks)
    place = np.empty(n_blocks, dtype=np.int64)
    place[order] = np.arange(n_blocks)
    counts = np.array([np.bincount(place[token // context], minlength=n_blocks) for token in candidates])
    enough = (counts.cumsum(1) >= np.minimum(2 * cases, counts.sum(1))[:, None]).all(0)
    wanted = cases * len(candidates)
    enough &= np.arange(1, n_blocks + 1) * context >= min(wanted, n_blocks * context)
    used = int(enough.argmax()) + 1
    load = np.zeros(active.shape[0])
    units, tokens = [], []
    for unit in np.argsort(counts.sum(1), kind="stable"):
        near = candidates[unit][place[candidates[unit] // context] < used]
        chosen = near[np.argsort(load[near] + generator.random(len(near)))[:cases]]
        load[chosen] += 1
        units.append(np.full(len(chosen), unit))
        tokens.append(chosen)
    unit, token = np.concatenate(units), np.concatenate(tokens).astype(np.int64)
    by_unit = np.lexsort((token, unit))
    return unit[by_unit], token[by_unit]


def _write(
    z: Sparse, members: Sparse, unit: NDArray[np.int64], token: NDArray[np.int64], writes: NDArray[np.float64]
) -> Float[np.ndarray, "m d"]:
    """Σ z w_o over the members of each case's unit at its token."""
    return np.asarray(z[token].multiply(members[unit]) @ writes)


def _others(
    z: Sparse,
    members: Sparse,
    unit: NDArray[np.int64],
    token: NDArray[np.int64],
    writes: NDArray[np.float64],
    generator: np.random.Generator,
) -> Float[np.ndarray, "m d"]:
    """What a random head that is active at the same token and not of the unit writes; 0 where there is none."""
    rest = csr_matrix(z[token] - z[token].multiply(members[unit]))
    rest.eliminate_zeros()
    count = np.diff(rest.indptr)
    place = rest.indptr[:-1] + (generator.random(len(count)) * count).astype(np.int64)
    found = np.zeros((len(token), writes.shape[1]))
    some = count > 0
    found[some] = rest.data[place[some], None] * writes[rest.indices[place[some]]]
    return found


def _readers(meter: EffectMeter, z: Sparse, members: Sparse, writes: NDArray[np.float64]) -> Float[Tensor, "n d"]:
    """Per unit, the tokens that its mean write moves most."""
    total = members.multiply(np.asarray(z.sum(0))) @ writes
    W_U: Tensor = meter.parts.unembedding[0].detach()
    mean = meter.into_stream(torch.from_numpy(np.asarray(total)).to(W_U))
    effects = logit_effects(mean, W_U, min(10, W_U.shape[1] // 2))
    return reader(W_U, effects.raised_ids, effects.lowered_ids)
