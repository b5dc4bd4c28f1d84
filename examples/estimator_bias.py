"""How wrong the straight-through slope of a gate is: its mean over the noise against the derivative it stands for.

    python examples/estimator_bias.py

A gate opens with probability p = σ(x). The slope that its gradient should have is dp/dx = p(1−p); straight-through
estimation uses s(1−s) with s = σ(x + noise). The mean is taken over a fine grid of the noise, and beside it stands the
closed form, with a = eˣ: a (−(1+a)x − 2(1−a)) / (1−a)³.
"""

import torch

from clearhead.ops.gated import Noise, noise_keys, uniforms

GRID = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000


def mean_slope(x: float) -> float:
    """The mean of s(1−s) over uniform noise."""
    s = torch.sigmoid(x + torch.log(GRID) - torch.log1p(-GRID))
    return float((s * (1 - s)).mean())


def closed_form(x: float) -> float:
    """The same, integrated; the limit 1/6 at x = 0."""
    a = torch.tensor(x, dtype=torch.float64).exp().item()
    return 1 / 6 if x == 0 else a * (-(1 + a) * x - 2 * (1 - a)) / (1 - a) ** 3


def main() -> None:
    """Print the table."""
    drawn = uniforms(noise_keys(Noise(0), 1, 1, torch.device("cpu")), torch.arange(1000), torch.arange(1000)).double()
    print("   x   p(1-p)   mean of s(1-s)   closed form   with the op's own noise   ratio")
    for x in (0.0, 1.0, 2.0, 4.0, 6.0, 8.0):
        p = 1 / (1 + torch.tensor(-x, dtype=torch.float64).exp().item())
        s = torch.sigmoid(x + torch.log(drawn) - torch.log1p(-drawn))
        own = float((s * (1 - s)).mean())
        right, mean = p * (1 - p), mean_slope(x)
        means = f"{mean:.5f}          {closed_form(x):.5f}       {own:.5f}"
        print(f"{x:4.0f}  {right:.5f}  {means}            {mean / right:.3f}")


if __name__ == "__main__":
    main()
