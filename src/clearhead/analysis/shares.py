"""How each Lorsa head is spread over the layer's original heads, by three formulas, and how many it spans.

The paper reports that about a quarter of Lorsa heads span several original heads (arXiv 2504.20938) but not how the
share was computed; so all three are reported. For Lorsa head n and original head m, with ŵ_o = w_o / |w_o|:

    output   c[n,m] = mean over tokens i where n is active of head_out_m,i · ŵ_o[n]
    weights  c[n,m] = w_v[n] W_V^m W_O^m w_o[n] / (|w_v[n]| |w_o[n]| |W_V^m W_O^m|_F)      no data
    routing  c[n,m] = mean over tokens i where n is active of Σ_j min(A^n_ij, A^m_ij)

share p[n,m] = max(c, 0) / Σ_m max(c, 0); participation 1 / Σ_m p², the number of heads spanned. A head spans several
when its participation is at least 2 or its second share at least half of its first. A head with no positive c has no
share (NaN here, empty in the atlas). Control: the output share with ŵ_o exchanged between heads at random.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from clearhead.analysis.entries import Entries
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.model.weights import AttentionWeights
from clearhead.ops.bootstrap import share_bounds

UNITS_AT_ONCE = 512


class OutputShares:
    """The output formula, streaming: sums each head's original z over its active tokens, projects at the end.

    head_out_m,i · ŵ_o = z_m,i · (W_O^m ŵ_o), so it suffices to sum z: memory n · h · dv, and k additions of one row
    per token.
    """

    def __init__(self, n_units: int, n_heads: int, d_value: int):
        self.shape = (n_heads, d_value)
        self.total = torch.zeros(n_units, n_heads * d_value)
        self.count = torch.zeros(n_units, dtype=torch.int64)

    def update(self, entries: Entries, row: NDArray[np.int64], z: Float[Tensor, "r h dv"]) -> None:
        """Take one batch into account; `row` [entries] is the place of each entry's token in `z`."""
        rows = z.flatten(1).to("cpu", torch.float32)
        total, count = _sum_rows(entries.unit, row, rows, len(self.total))
        self.total += total
        self.count += count

    def coefficients(self, write: Float[Tensor, "n d"], W_O: Float[Tensor, "h dv d"]) -> Float[Tensor, "n h"]:
        """c[n, m]; rows of units that were never active are NaN."""
        direction = F.normalize(write.float(), dim=-1).cpu()
        W_O = W_O.detach().to("cpu", torch.float32)
        parts = [
            (total.unflatten(-1, self.shape) * torch.einsum("nd,hvd->nhv", part, W_O)).sum(-1)
            for total, part in zip(self.total.split(UNITS_AT_ONCE), direction.split(UNITS_AT_ONCE), strict=True)
        ]
        return torch.cat(parts) / torch.where(self.count > 0, self.count, torch.nan)[:, None]


@torch.no_grad()
def weight_coefficients(lorsa: Lorsa, weights: AttentionWeights) -> Float[Tensor, "n h"]:
    """The weights formula; a head with w_v = 0 or w_o = 0 has coefficients 0."""
    read, write = F.normalize(lorsa.W_V, dim=-1), F.normalize(lorsa.W_O, dim=-1)
    W_V, W_O = value_weights(weights).to(read), weights.W_O.detach().to(read)
    parts = [
        (torch.einsum("nd,hdv->nhv", a, W_V) * torch.einsum("nd,hvd->nhv", b, W_O)).sum(-1)
        for a, b in zip(read.split(UNITS_AT_ONCE), write.split(UNITS_AT_ONCE), strict=True)
    ]
    return torch.cat(parts) / frobenius(W_V, W_O)


def value_weights(weights: AttentionWeights) -> Float[Tensor, "h d dv"]:
    """W_V with one entry per query head."""
    return weights.W_V.detach().repeat_interleave(len(weights.W_O) // len(weights.W_V), 0)


def frobenius(W_V: Float[Tensor, "h d dv"], W_O: Float[Tensor, "h dv d"]) -> Float[Tensor, " h"]:
    """|W_V W_O|_F per head, without forming the product: its square is tr(W_VᵀW_V · W_O W_Oᵀ)."""
    square = ((W_V.transpose(1, 2) @ W_V) * (W_O @ W_O.transpose(1, 2))).sum((1, 2))
    return square.clamp_min(0).sqrt()


class RoutingShares:
    """The routing formula, streaming over as many tokens as given: Lorsa heads of one pattern share their overlap."""

    def __init__(self, n_units: int, pattern_size: int, n_heads: int):
        self.pattern_size = pattern_size
        self.total = torch.zeros(n_units, n_heads)
        self.count = torch.zeros(n_units, dtype=torch.int64)

    def update(
        self,
        entries: Entries,
        row: NDArray[np.int64],
        ours: Float[Tensor, "b g q k"],
        theirs: Float[Tensor, "b h q k"],
    ) -> None:
        """Take one batch into account; `row` [entries] is the place of each entry's token in [b · q]."""
        overlap = pattern_overlap(ours, theirs).flatten(0, 2).to("cpu", torch.float32)
        pattern = entries.unit // self.pattern_size
        total, count = _sum_rows(entries.unit, row * ours.shape[1] + pattern, overlap, len(self.total))
        self.total += total
        self.count += count

    def coefficients(self) -> Float[Tensor, "n h"]:
        """c[n, m]; rows of units not active on the tokens given are NaN."""
        return self.total / torch.where(self.count > 0, self.count, torch.nan)[:, None]


def pattern_overlap(ours: Float[Tensor, "b g q k"], theirs: Float[Tensor, "b h q k"]) -> Float[Tensor, "b q g h"]:
    """Σ_j min(A^g_ij, A^m_ij) for every query: 1 when two heads look at the same places, 0 when at none in common."""
    b, g, q, _ = ours.shape
    overlap = ours.new_empty(b, q, g, theirs.shape[1])
    for block in range(b):
        for head in range(theirs.shape[1]):
            overlap[block, :, :, head] = torch.minimum(ours[block], theirs[block, head]).sum(-1).T
    return overlap


def _sum_rows(
    unit: NDArray[np.int64], row: NDArray[np.int64], rows: Float[Tensor, "r c"], n_units: int
) -> tuple[Float[Tensor, "n c"], Int[Tensor, " n"]]:
    """Per unit, the sum of its rows and their number."""
    order = np.argsort(unit, kind="stable")
    count = torch.from_numpy(np.bincount(unit, minlength=n_units))
    if not len(order):
        return rows.new_zeros(n_units, rows.shape[1]), count
    offsets = count.cumsum(0) - count
    return F.embedding_bag(torch.from_numpy(row[order]), rows, offsets, mode="sum"), count


def shares(coefficients: Float[Tensor, "n h"]) -> Float[Tensor, "n h"]:
    """p[n, m]; a row without a positive coefficient is NaN."""
    positive = coefficients.clamp_min(0)
    total = positive.sum(-1, keepdim=True)
    return positive / torch.where(total > 0, total, torch.nan)


def participation(share: Float[Tensor, "n h"]) -> Float[Tensor, " n"]:
    """1 / Σ p²: 1 for a head inside one original head, h for one spread evenly over h."""
    return 1 / share.square().sum(-1)


def spans(share: Float[Tensor, "n h"]) -> NDArray[np.bool_]:
    """Whether each head spans several original heads; raises `ValueError` for rows without shares."""
    if bool(share.isnan().any()):
        raise ValueError("heads without shares neither span nor do not; leave them out first")
    if share.shape[1] < 2:
        return np.zeros(len(share), dtype=bool)
    first, second = share.topk(2).values.unbind(-1)
    return ((participation(share) >= 2) | (second >= first / 2)).cpu().numpy()


class Spanning(NamedTuple):
    """Fraction of heads that span several original heads, with its 95 % bootstrap interval over heads."""

    fraction: float
    low: float
    high: float
    n_heads: int
    """Heads that have shares; the others are left out."""


def spanning_fraction(share: Float[Tensor, "n h"]) -> Spanning | None:
    """Fraction that spans; None when no head has shares. In the interval heads vary, training seeds do not."""
    spanning = spans(share[~share.isnan().any(-1)])
    n = len(spanning)
    if not n:
        return None
    fraction = float(spanning.mean())
    return Spanning(fraction, *share_bounds(fraction, n), n)


def shuffled(write: Float[Tensor, "n d"], seed: int = 0) -> Float[Tensor, "n d"]:
    """The write vectors exchanged between heads at random: the control of the output formula."""
    generator = torch.Generator().manual_seed(seed)
    return write[torch.randperm(len(write), generator=generator).to(write.device)]
