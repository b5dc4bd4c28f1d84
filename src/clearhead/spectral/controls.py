"""What the same statistics are where they should mean nothing, and whether a head differs from that.

Five controls of a head's firings (A the query side, D the key side, c̃ = A ⊙ D, S the singular values):

    gauge      (A R) ⊙ (D R)          another basis of the same head: every logit is kept, only the axes are lost
    span       (x·U R₁) S (V R₂·y)    spectrum and spans are kept, their pairing is lost; logits change (a query's bias
                                      stays where it is)
    subspace   (x·U′) S (V′·y)        random directions of the residual stream with the head's spectrum
    shuffle    A ⊙ D of another firing of the head: the query no longer meets the key that it chose
    untrained  the same pairs in the same architecture with initial weights

The first, second and fourth need A and D only and live here; the other two run a model (control_runs.py). The papers
say "random rotation of U and V" (SVF, 2602.13524) without a construction: `gauge` and `span` are its two readings. S
should separate from both; N_recon is small for random bases too, because contributions cancel. `span` and `subspace`
take A and D for coordinates along U and V. RoPE in the fixed basis mixes those (strong modes leak into weak ones and
are blown up there), which makes a head without structure look less sparse than its own control: there they are left
out, and so is the verdict. In the basis of each pair's offset they are calibrated (tested on structureless heads).

Separation is judged per head by the mean S over its firings. p is the share of draws (each one rotation for all firings
of the head) in which a control is as sparse, (1 + #)/(1 + draws); q corrects it for the number of heads (Benjamini and
Hochberg). The effect is the mean of S(control) − S over firings, its interval the 95 % bootstrap over prompts, because
firings of one prompt are not independent.
"""

from collections.abc import Callable
from dataclasses import dataclass

import scipy.stats
import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.spectral.sparsity import n_recon, rolls_tovee

DRAWS = 1000
RESAMPLES = 1000
RECON_DRAWS = 20
"""Draws whose N_recon is computed: it needs a sort, and its median settles early."""
CHUNK = 1 << 18
"""Numbers of rotated coordinates held at once: they should stay in the cache."""

Draw = Callable[[int, int], tuple[Tensor, Tensor]]
"""From first and last draw to query and key sides [draws, n, r] whose product are contributions."""


@dataclass(frozen=True)
class Separation:
    """One head against one control."""

    control: str
    draws: int
    sparsity: float
    """Mean S under the control."""
    n_recon: float
    """Median N_recon under the control."""
    effect: float
    """Mean over firings of S under the control minus S."""
    low: float
    high: float
    p: float | None
    """None where there are too few draws for one."""


def random_rotations(n: int, r: int, generator: torch.Generator) -> Float[Tensor, "n r r"]:
    """Orthogonal matrices, uniformly distributed (Haar)."""
    Q, R = torch.linalg.qr(torch.randn(n, r, r, generator=generator))
    return Q * torch.diagonal(R, dim1=-2, dim2=-1).sign()[:, None]  # QR alone favours some signs


def gauge(A: Float[Tensor, "n r"], D: Float[Tensor, "n r"], rotations: Float[Tensor, "m r r"]) -> Draw:
    """The head in rotated bases: sums of contributions are unchanged."""
    return lambda first, last: (A @ rotations[first:last], D @ rotations[first:last])


def span(
    A: Float[Tensor, "n r"],
    D: Float[Tensor, "n r"],
    S: Float[Tensor, "n r"],
    bias: Float[Tensor, "n r"],
    rotations: Float[Tensor, "m r r"],
) -> Draw:
    """The head's singular values with directions rotated within what it reads, each side by its own rotation.

    Up to constants A = (x·U) √S + bias and D = (y·V) √S. Only what comes from tokens is rotated: a bias lies anywhere
    in the head's space, and in a weak mode it would be blown up by the division.
    """
    root, other = S.sqrt(), rotations.roll(1, 0)
    x, y = (A - bias) / root, D / root
    return lambda first, last: (x @ rotations[first:last] * root + bias, y @ other[first:last] * root)


def shuffle(A: Float[Tensor, "n r"], D: Float[Tensor, "n r"], orders: Int[Tensor, "m n"]) -> Draw:
    """Queries with the keys of other firings of the head."""
    return lambda first, last: (A[None], D[orders[first:last]])


def compare(
    control: str,
    draw: Draw,
    n_draws: int,
    c: Float[Tensor, "n r"],
    prompt: Int[Tensor, " n"],
    generator: torch.Generator,
) -> Separation:
    """A head's firings with contributions `c` against draws of one control."""
    n, r = c.shape
    own = rolls_tovee(c).double()
    pooled, per_firing = torch.empty(n_draws, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    counts: list[Tensor] = []
    step = max(1, CHUNK // (n * r))
    for first in range(0, n_draws, step):
        last = min(first + step, n_draws)
        left, right = draw(first, last)
        drawn = left * right
        s = rolls_tovee(drawn).double()
        pooled[first:last] = s.mean(-1)
        per_firing += s.sum(0)
        if first < RECON_DRAWS:
            counts.append(n_recon(drawn[: RECON_DRAWS - first]).flatten())
    return separation(control, own, pooled, per_firing / n_draws, torch.cat(counts), prompt, generator)


def separation(
    control: str,
    own: Float[Tensor, " n"],
    pooled: Float[Tensor, " draws"],
    per_firing: Float[Tensor, " n"],
    counts: Int[Tensor, " m"],
    prompt: Int[Tensor, " n"],
    generator: torch.Generator,
) -> Separation:
    """A head's S per firing against the pooled S of each draw and the mean S per firing under the control."""
    low, high = bootstrap(per_firing - own, prompt, generator)
    as_sparse = int((pooled <= own.mean()).sum())
    return Separation(
        control=control,
        draws=len(pooled),
        sparsity=float(pooled.mean()),
        n_recon=float(counts.double().quantile(0.5)),
        effect=float((per_firing - own).mean()),
        low=low,
        high=high,
        p=(1 + as_sparse) / (1 + len(pooled)) if len(pooled) >= DRAWS else None,
    )


def bootstrap(
    values: Float[Tensor, " n"], prompt: Int[Tensor, " n"], generator: torch.Generator
) -> tuple[float, float]:
    """The 95 % interval of the mean of `values`, resampling prompts; firings where there is a single prompt."""
    _, group = torch.unique(prompt, return_inverse=True)
    if int(group.max()) == 0:
        group = torch.arange(len(values))
    size = torch.bincount(group).double()
    total = torch.zeros_like(size).index_add(0, group, values.double())
    m = len(size)
    drawn = torch.randint(m, (RESAMPLES, m), generator=generator)
    means = total[drawn].sum(-1) / size[drawn].sum(-1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def corrected(p: list[float]) -> list[float]:
    """Benjamini and Hochberg's q values: the share of false discoveries among all p at most this one."""
    return scipy.stats.false_discovery_control(p, method="bh").tolist() if p else []
