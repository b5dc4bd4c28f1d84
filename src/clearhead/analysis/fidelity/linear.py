"""How much of an error a linear map predicts: the part of it that is no new information.

    e ~ W x + c        R^2 = 1 - sum |e - W x - c|^2 / sum |e - e_bar|^2      on blocks that neither W nor lambda saw

Ridge regression from streaming moments: fitted on the first half of the blocks, its penalty chosen on the third
quarter, R^2 measured on the last (contiguous parts, as neighbouring blocks share documents). A negative R^2 says that
the map is worse than the mean. Not here: maps that are not linear, or that look at other tokens.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Multiples of the mean variance of the inputs."""
FIT, CHOOSE, TEST = range(3)


def fold_of(block: int, n_blocks: int) -> int:
    """The part that a block belongs to: FIT, CHOOSE or TEST."""
    place = 4 * block // n_blocks
    return FIT if place < 2 else (CHOOSE if place == 2 else TEST)


class Moments:
    """Sums over one part: of x, e, x x', x e' and |e|^2, float64 on the CPU."""

    def __init__(self, d_in: int, d_out: int):
        self.n = 0
        self.x = torch.zeros(d_in, dtype=torch.float64)
        self.e = torch.zeros(d_out, dtype=torch.float64)
        self.xx = torch.zeros(d_in, d_in, dtype=torch.float64)
        self.xe = torch.zeros(d_in, d_out, dtype=torch.float64)
        self.ee = 0.0

    def add(self, x: Float[Tensor, "n d_in"], e: Float[Tensor, "n d_out"]) -> None:
        """Take in the tokens of a batch."""
        self.n += len(x)
        self.x += x.sum(0)
        self.e += e.sum(0)
        self.xx += x.T @ x
        self.xe += x.T @ e
        self.ee += float(e.square().sum())

    def about(self, x: Tensor, e: Tensor) -> tuple[Tensor, Tensor, float]:
        """xx, xe and ee about the points x and e."""
        xx = self.xx - torch.outer(self.x, x) - torch.outer(x, self.x) + self.n * torch.outer(x, x)
        xe = self.xe - torch.outer(self.x, e) - torch.outer(x, self.e) + self.n * torch.outer(x, e)
        return xx, xe, self.ee - 2 * float(self.e @ e) + self.n * float(e @ e)


class LinearShare:
    """The R^2 of a linear map from x to e, from streams of both."""

    def __init__(self, d_in: int, d_out: int):
        self.parts = [Moments(d_in, d_out) for _ in range(3)]

    def add(self, fold: int, x: Float[Tensor, "n d_in"], e: Float[Tensor, "n d_out"]) -> None:
        """Take in tokens of one part; see `fold_of`."""
        self.parts[fold].add(x.double().cpu(), e.double().cpu())

    def r_squared(self) -> float | None:
        """R^2 on the last part; None where a part is empty or the error does not vary there."""
        fit, choose, test = self.parts
        if min(part.n for part in self.parts) < 2:
            return None
        x, e = fit.x / fit.n, fit.e / fit.n
        xx, xe, _ = fit.about(x, e)
        scale = float(xx.diagonal().mean())
        if scale == 0:
            return 0.0
        values, vectors = torch.linalg.eigh(xx)
        rotated = vectors.T @ xe
        maps = [vectors @ (rotated / (values.clamp_min(0) + penalty * scale)[:, None]) for penalty in PENALTIES]
        best = int(np.argmin([_missed(choose, w, x, e) for w in maps]))
        spread = test.ee - float(test.e @ test.e) / test.n
        return 1 - _missed(test, maps[best], x, e) / spread if spread > 0 else None


def _missed(part: Moments, w: Tensor, x: Tensor, e: Tensor) -> float:
    """Squared error of the map w about the points x and e."""
    xx, xe, ee = part.about(x, e)
    return ee - 2 * float((w * xe).sum()) + float((w * (xx @ w)).sum())
