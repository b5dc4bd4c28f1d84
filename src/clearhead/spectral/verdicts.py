"""What the numbers of one head say in words, by fixed rules in a fixed order.

    no query–key product      all singular values are zero
    no firings                no key ever received more than the threshold of attention
    sink                      most firings are on the first token, and too few others are left to judge
    no token energy           the directions catch under 1 % of what random directions catch
    too few firings           fewer than 5 to measure, or from fewer than 5 texts
    not compared              `gauge` or `span` was not run, is not defined, or had too few draws for a p value
    not separated             some of `gauge` and `span` are as sparse: q > 0.05, or an interval that holds 0
    sparse but cancelling     separated, but negative contributions are at least half of the positive ones
    sparse, separated         S is below both controls, and few modes add up without cancelling

The rules are clearhead's own; SVF (2602.13524) gives none. S must separate from both readings of a rotated basis, for a
steep spectrum alone passes the one and a lucky basis the other.
"""

from collections.abc import Mapping
from typing import Literal, get_args

from clearhead.spectral.controls import Separation

Verdict = Literal[
    "no query–key product",
    "no firings",
    "sink",
    "no token energy",
    "too few firings",
    "not compared",
    "not separated",
    "sparse but cancelling",
    "sparse, separated",
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

LOW_ENERGY = 0.01
FEWEST = 5
LEVEL = 0.05
CANCELLING = 3.0
"""Σ|c|/|Σc| at which the negative contributions are half of the positive ones: (P + N)/(P − N) = 3 for N = P/2."""
JUDGED_BY = ("gauge", "span")


def judge(
    *,
    rank: int,
    n_firings: int,
    n_sink: int,
    n_texts: int,
    energy: float,
    cancellation: float | None,
    separations: Mapping[str, tuple[Separation, float | None]],
) -> Verdict:
    """The verdict on one head.

    n_texts: how many texts its firings come from, which the intervals resample; energy: the smaller of query and key
    energy; cancellation: its median over firings; separations: by control, with the corrected p.
    """
    if rank == 0:
        return "no query–key product"
    if n_firings + n_sink == 0:
        return "no firings"
    few = min(n_firings, n_texts) < FEWEST or cancellation is None
    # a head that rests on the first token is judged by what it does when it does not: movers rest most of the time
    if few and n_sink > n_firings:
        return "sink"
    if energy < LOW_ENERGY:
        return "no token energy"
    if few or cancellation is None:
        return "too few firings"
    judged = [separations[name] for name in JUDGED_BY if name in separations]
    if len(judged) < len(JUDGED_BY) or any(q is None for _, q in judged):
        return "not compared"
    if any(q is not None and q > LEVEL or found.low <= 0 for found, q in judged):
        return "not separated"
    return "sparse but cancelling" if cancellation >= CANCELLING else "sparse, separated"
