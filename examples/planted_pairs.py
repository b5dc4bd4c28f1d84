"""How well are planted feature pairs recovered from a head's product: raw, unwhitened, separated?

python examples/planted_pairs.py          three seeds per setting, a few seconds

Features lie in a cone, tokens are sparse sums of them, and the head fits a number of pairs exactly; see
clearhead.spectral.planted. The first line has its defaults.
"""

from statistics import mean

import torch

from clearhead.spectral.planted import measure_recovery, plant_pairs

SETTINGS = [
    {},
    {"cone": 0.0},
    {"n": 60},
    {"n": 200},
    {"pairs": 5},
    {"pairs": 1},
    {"samples": 1000},
]


def main() -> None:
    torch.set_num_threads(1)
    defaults = {"d": 50, "n": 100, "pairs": 20, "cone": 1.0, "samples": 20_000}
    print(*(f"{name:>8}" for name in (*defaults, "raw", "Σ u", "+ ICA")))
    for setting in SETTINGS:
        found = [measure_recovery(plant_pairs(seed=seed, **setting)) for seed in range(3)]
        cosines = (mean(values) for values in zip(*((r.raw, r.unwhitened, r.separated) for r in found), strict=True))
        print(*(f"{value:>8}" for value in (defaults | setting).values()), *(f"{value:>8.3f}" for value in cosines))


if __name__ == "__main__":
    main()
