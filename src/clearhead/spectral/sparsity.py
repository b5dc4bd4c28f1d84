"""How few terms make up a sum: sparsity, number of terms needed, cancellation, and relative contributions.

For contributions c_1 … c_r that add up to a logit:

    S       = (Σ|c_k| / r)² / (Σ c_k² / r)     in [1/r, 1]: 1/r for one term, 1 for equal ones
    N_recon = fewest terms, largest first, whose sum reaches the total
    cancellation = Σ|c_k| / |Σ c_k|            1 where all terms have the total's sign

Numbers to compare S with: 2/π ≈ 0.64 for independent Gaussian terms, (2/π)² ≈ 0.41 for products of two Gaussians, which
is where a random head stands. It does not start near 1.

A firing is explained relative to the other keys the query could have looked at:

    l̃_j = l_j − mean over visible i ≠ j of l_i = Σ_k c̃_k,    c̃_k = A_k (B_jk − mean of the others' B_ik)

where A (query) and B (key) are head vectors in the modes of `attention_modes`. Whatever is the same for all keys drops
out. Sources: S is Rolls and Tovee's (1995) as used by SVF (arXiv 2602.13524), N_recon and the relative logit those of
SVF and of ACC. No tensor of (query, key, mode) is formed here: all-pair versions go through products or by blocks.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.errors import ClearheadError

COMPLETE = 1 - 5e-6
"""Share of the total that counts as all of it: the papers' code rounds to five decimals."""
BLOCK = 1 << 22
"""Numbers held at once where all pairs are streamed: 16 MB in float32."""


def rolls_tovee(c: Float[Tensor, "*b r"]) -> Float[Tensor, "*b"]:
    """S over the last axis; 1 where every contribution is zero, for then no term stands out."""
    square = c.square().mean(-1)
    s = c.abs().mean(-1).square() / torch.where(square > 0, square, 1)
    return torch.where(square > 0, s, torch.ones_like(s))


def n_recon(c: Float[Tensor, "*b r"]) -> Int[Tensor, "*b"]:
    """Fewest terms whose sum reaches the total, the largest in the total's direction first; 0 where the total is 0.

    Negative totals are explained by their most negative terms. Later terms may lower the sum again: the count stops
    where the total is first reached, so cancellation makes it small. Read it beside `cancellation` and a control.
    """
    total = c.sum(-1, keepdim=True)
    ordered = (c * total.sign()).sort(-1, descending=True).values
    short = ordered.cumsum(-1) < COMPLETE * total.abs()
    # the whole sum reaches the total by definition, whatever rounding makes of it
    count = (short.sum(-1) + 1).clamp_max(c.shape[-1])
    return torch.where(total[..., 0] == 0, 0, count)


def cancellation(c: Float[Tensor, "*b r"]) -> Float[Tensor, "*b"]:
    """Σ|c| / |Σc|; at most 1/ε of the number format where terms cancel entirely, 1 where all are zero."""
    size = c.abs().sum(-1)
    floor = torch.finfo(c.dtype).eps * size
    ratio = size / torch.maximum(c.sum(-1).abs(), floor).clamp_min(torch.finfo(c.dtype).tiny)
    return torch.where(size > 0, ratio, torch.ones_like(ratio))


def largest_rank(c: Float[Tensor, "*b r"]) -> Float[Tensor, "*b"]:
    """Place of the largest |c| among the modes, 0 for the largest singular value, 1 for the smallest."""
    return c.abs().argmax(-1).to(c.dtype) / max(c.shape[-1] - 1, 1)


def visible_mean(B: Float[Tensor, "*b t r"], window: int | None = None) -> Float[Tensor, "*b t r"]:
    """Mean of the rows that each query sees: rows 0 … i, or the last `window` of them."""
    # float64: a running sum in float32 loses the digits that relative contributions live on
    total = B.double().cumsum(-2)
    count = torch.arange(1, B.shape[-2] + 1, device=B.device, dtype=torch.float64)
    if window is not None and window < B.shape[-2]:
        total = torch.cat([total[..., :window, :], total[..., window:, :] - total[..., :-window, :]], -2)
        count = count.clamp_max(window)
    return (total / count[:, None]).to(B.dtype)


def visible_count(query: Int[Tensor, "*n"], window: int | None = None) -> Int[Tensor, "*n"]:
    """m: how many keys each query sees, itself included."""
    return query + 1 if window is None else (query + 1).clamp_max(window)


def relative_key(
    B_key: Float[Tensor, "*n r"], B_mean: Float[Tensor, "*n r"], count: Int[Tensor, "*n"]
) -> Float[Tensor, "*n r"]:
    """D: the key of a firing less the mean of the other visible keys, from B of the key, `visible_mean`, and m.

    c̃ = A ⊙ D. Raises `ClearheadError` for a query that sees one key only: there is nothing to compare it with.
    """
    if bool((count < 2).any()):
        raise ClearheadError(
            "a query that sees a single key has no relative logit; leave out position 0 (prompts need two tokens)"
        )
    m = count.to(B_key.dtype)[..., None]
    return (B_key - B_mean) * (m / (m - 1))


def absolute_sparsity(A: Float[Tensor, "*b q r"], B: Float[Tensor, "*b k r"]) -> Float[Tensor, "*b q k"]:
    """S of the contributions A_ik B_jk to the logit itself, for every pair, by two products of matrices."""
    r = A.shape[-1]
    size, square = A.abs() @ B.abs().mT, A.square() @ B.square().mT
    s = size.square() / (r * torch.where(square > 0, square, 1))
    return torch.where(square > 0, s, torch.ones_like(s))


def relative_sparsity(
    A: Float[Tensor, "*b t r"], B: Float[Tensor, "*b t r"], window: int | None = None
) -> Float[Tensor, "*b t t"]:
    """S of the relative contributions for every visible pair, 0 elsewhere; query 0, which has no other key, is 0 too.

    |A (B_j − mean)| does not factor over pairs, so queries are streamed in blocks of `BLOCK` numbers.
    """
    t, r = A.shape[-2:]
    mean = visible_mean(B, window)
    seen = visible(t, window, A.device)
    seen[0] = False
    flat_A, flat_B, flat_mean = A.reshape(-1, t, r), B.reshape(-1, t, r), mean.reshape(-1, t, r)
    out = A.new_zeros(len(flat_A), t, t)
    rows = max(1, BLOCK // (t * r))
    for head in range(len(flat_A)):
        for start in range(0, t, rows):
            some = slice(start, start + rows)
            difference = flat_B[head][None] - flat_mean[head, some, None]
            # m/(m−1) is common to all modes and leaves S as it is
            out[head, some] = rolls_tovee(flat_A[head, some, None] * difference)
    return (out * seen).reshape(*A.shape[:-1], t)


def visible(t: int, window: int | None, device: torch.device | str = "cpu") -> Bool[Tensor, "t t"]:
    """Which keys each query sees under the causal mask and, where there is one, the sliding window."""
    seen = torch.ones(t, t, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)
