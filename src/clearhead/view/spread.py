"""Where a unit sits among the original heads of its layer: the largest share, and whether it spans several heads.

The criterion is that of `analysis.shares`: participation 1 / Σ p² of at least 2, or a second share of at least half the
first. It stands here a second time, in plain Python, because a page is written without loading torch.
"""

from collections.abc import Sequence


def host(share: Sequence[float] | None) -> int | None:
    """The original head with the largest share; None for a unit without shares."""
    if not share or max(share) <= 0:
        return None
    return max(range(len(share)), key=lambda head: share[head])


def spans(share: Sequence[float] | None) -> bool:
    """Whether a unit with these shares (they sum to 1) spans several original heads; False without shares."""
    if host(share) is None or share is None or len(share) < 2:
        return False
    first, second = sorted(share, reverse=True)[:2]
    return 1 / sum(p * p for p in share) >= 2 or second >= first / 2
