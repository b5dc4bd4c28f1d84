"""What setting heads or families of a Lorsa does to the next token in the model, against what is predicted.

For each unit (one head, or several together) and a few tokens at which it is active, drawn from text, its activations z
become something else, so that its write in the model's own attention output changes by Σ (becomes − z) w_o:

    a factor      becomes = factor · z: 0 ablates, 2 steers to twice as much
    mean          becomes the unit's mean z over all tokens at which it is active
    elsewhere     becomes its z at another token at which it is active, drawn at random

Everything later computes anew (`circuits.patching.unit_effects`), and the logits are read along mean W_U of the 10
tokens that the unit's mean write raises most less those that it lowers most: effect is measured; direct, linear and
gradient are predictions (formulas there); loss and KL are of the next token's prediction. With a factor f, effect is to
first order (f − 1) times what the unit's presence does.

Two controls at the same tokens: `random`, a random direction, the same for all settings, as long as the unit's own
change; `other`, another active head of the dictionary, set likewise and read along this unit's u. A removed head that
is not in the model's output is an error put in, with effects of its own: whether it is there says `explained`
(trust.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

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

Becomes = float | Literal["mean", "elsewhere"]
"""What activations become: that many times what they are, or a patch."""
KINDS = ("own", "random", "other")
SIGNED = ("effect", "direct", "linear", "gradient")
"""Numbers that change their sign with the change."""


@dataclass(frozen=True, eq=False)
class HeadEffects:
    """Effects of m cases of n units. `unit` [m] counts the units given; the rest is by kind of case."""

    unit: NDArray[np.int64]
    token: NDArray[np.int64]
    """block · context + position."""
    becomes: tuple[Becomes, ...]
    values: dict[str, dict[str, Float[np.ndarray, "s m"]]]
    """values["own"]["effect"]: kinds are own, random and other; numbers those of `Effects`; a row for each setting."""

    def presence(self) -> dict[str, dict[str, Float[np.ndarray, " m"]]]:
        """What being there does, from removing it: the first setting that is 0, signed numbers turned round."""
        removed = self.becomes.index(0)
        return {
            kind: {name: (-1 if name in SIGNED else 1) * values[removed] for name, values in numbers.items()}
            for kind, numbers in self.values.items()
        }


@torch.no_grad()
def measure_heads(
    meter: EffectMeter,
    lorsa: Lorsa,
    z: Sparse,
    tokens: Int64[Tensor, "b t"],
    units: Sequence[Sequence[int]],
    *,
    cases: int = 8,
    becomes: Sequence[Becomes] = (0.0,),
    seed: int = 0,
) -> HeadEffects:
    """Effects of setting units, each a list of heads that are set together, at `cases` tokens each.

    z: activations of all heads on the blocks (`analysis.seeds.activations`); becomes: the settings, each measured at
    the same tokens. Units that are active at fewer tokens have fewer cases; one that is active at a single token is
    itself elsewhere. Raises `ClearheadError` when none of them is ever active, and for a factor of 1.
    """
    if not becomes or 1 in becomes:
        raise ClearheadError("a factor of 1 changes nothing; give 0 to remove heads, 2 to double them")
    members = _members(units, lorsa.n_heads)
    active = _active(z, members)
    unit, token = _draw(active, tokens.shape[1], cases, seed)
    if not len(unit):
        raise ClearheadError("none of these heads is active on this text; give more tokens, or other heads")
    writes = lorsa.W_O.detach().double().cpu().numpy()
    generator = np.random.default_rng(seed)
    noise = generator.normal(size=(len(unit), writes.shape[1]))
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    others = _others(z, members, unit, token, generator)
    deltas = {
        kind: list(_changes(z, heads, token, becomes, generator))
        for kind, heads in (("own", members[unit]), ("other", others))
    }
    readers = _readers(meter, z, members, writes)
    shape = (len(becomes), len(unit))
    found = {kind: {name: np.zeros(shape) for name in Effects.__dataclass_fields__} for kind in KINDS}
    block, position = np.divmod(token, tokens.shape[1])
    with progress("effects", len(unit), "cases") as advance:
        for here in np.split(np.argsort(block, kind="stable"), np.flatnonzero(np.diff(np.sort(block))) + 1):
            own, other = (np.stack([delta[here] @ writes for delta in deltas[kind]]) for kind in ("own", "other"))
            random = noise[here] * np.linalg.norm(own, axis=-1, keepdims=True)
            change = torch.from_numpy(np.stack([own, random, other]))
            opened = meter.open(tokens[block[here[0]]])
            effects = meter.measure(
                opened, torch.from_numpy(position[here]), change, readers[torch.from_numpy(unit[here])]
            )
            for name, values in vars(effects).items():
                for kind, part in zip(KINDS, values.cpu().double().numpy(), strict=True):
                    found[kind][name][:, here] = part
            advance(len(here))
    return HeadEffects(unit, token, tuple(becomes), found)


def _changes(
    z: Sparse, heads: Sparse, token: NDArray[np.int64], becomes: Sequence[Becomes], generator: np.random.Generator
) -> Iterator[Sparse]:
    """By setting, becomes − z of the heads [cases, heads] of each case at its token."""
    now = csr_matrix(z[token].multiply(heads))
    active = _active(z, heads) if set(becomes) & {"mean", "elsewhere"} else None
    for value in becomes:
        if not isinstance(value, str):
            yield now * (value - 1)
            continue
        assert active is not None
        if value == "mean":
            total = csr_matrix(abs(active.sign()).T @ z).multiply(heads)
            then = total.multiply(1 / np.maximum(np.diff(active.indptr), 1)[:, None])
        else:
            then = z[_elsewhere(active, token, generator)].multiply(heads)
        yield csr_matrix(then) - now


def _elsewhere(active: Sparse, token: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.int64]:
    """For each case another token at which its unit is active; the same one where there is no other."""
    found = token.copy()
    for case, here in enumerate(token):
        choice = active.indices[active.indptr[case] : active.indptr[case + 1]]
        choice = choice[choice != here]
        if len(choice):
            found[case] = generator.choice(choice)
    return found


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


def _others(
    z: Sparse,
    members: Sparse,
    unit: NDArray[np.int64],
    token: NDArray[np.int64],
    generator: np.random.Generator,
) -> Sparse:
    """[cases, heads]: for each case a random head that is active at the same token and not of the unit, if any."""
    rest = csr_matrix(z[token] - z[token].multiply(members[unit]))
    rest.eliminate_zeros()
    count = np.diff(rest.indptr)
    place = rest.indptr[:-1] + (generator.random(len(count)) * count).astype(np.int64)
    some = np.flatnonzero(count)
    return csr_matrix((np.ones(len(some)), (some, rest.indices[place[some]])), shape=rest.shape)


def _readers(meter: EffectMeter, z: Sparse, members: Sparse, writes: NDArray[np.float64]) -> Float[Tensor, "n d"]:
    """Per unit, the tokens that its mean write moves most."""
    total = members.multiply(np.asarray(z.sum(0))) @ writes
    W_U: Tensor = meter.parts.unembedding[0].detach()
    mean = meter.into_stream(torch.from_numpy(np.asarray(total)).to(W_U))
    effects = logit_effects(mean, W_U, min(10, W_U.shape[1] // 2))
    return reader(W_U, effects.raised_ids, effects.lowered_ids)
