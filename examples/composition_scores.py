"""Which later heads read what an earlier head writes? Composition scores from the weights alone, beside chance.

python examples/composition_scores.py                  # clearhead-tiny, a second
python examples/composition_scores.py smollm2          # a real model, 30 layers: a few minutes

For the OV product of an earlier head and the query-key product Ω of a later one, |OV·Ω| / (|OV| |Ω|) says how much of
what the first writes the second reads as a query, and |OV·Ωᵀ| / (|OV| |Ω|) how much it reads as a key. A random
rotation between the two gives 1/√d on average (root mean square), whatever their singular values are. Among many pairs
the largest is larger by chance alone, so the largest with a random rotation in every pair of layers stands beside it.
"""

import sys

import torch

from clearhead.model import Model
from clearhead.spectral.attention_modes import query_key_products, value_output_products
from clearhead.spectral.factored import Factored, composition

SHOWN = 10


def between(writers: Factored, readers: Factored) -> torch.Tensor:
    """Scores of every writer with every reader, [writers, readers]."""
    g = len(readers.A)
    each = [Factored(A.expand(g, -1, -1), B.expand(g, -1, -1)) for A, B in zip(writers.A, writers.B, strict=True)]
    return torch.stack([composition(one, readers) for one in each])


def random_rotation(d: int, generator: torch.Generator) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=generator)).Q


def main(name: str = "clearhead-tiny") -> None:
    model = Model.load(name)
    d = model.d_model
    generator = torch.Generator().manual_seed(0)

    # only what lies between the two products matters for the norm of OV·Ω: the outer factors shrink to r × r
    writes, reads = {}, {}
    for layer in model.attention_layers:
        ov, qk = value_output_products(model, layer), query_key_products(model, layer)
        writes[layer] = Factored(torch.linalg.qr(ov.A).R, ov.B)
        reads[layer] = [
            (side, Factored(omega.A, torch.linalg.qr(omega.B).R)) for side, omega in (("query", qk), ("key", qk.T))
        ]
    found: list[tuple[float, str]] = []
    turned: list[float] = []
    for early, ov in writes.items():
        for late, sides in reads.items():
            if late <= early:
                continue
            for side, omega in sides:
                scores = between(ov, omega)
                turned += between(Factored(ov.A, random_rotation(d, generator) @ ov.B), omega).flatten().tolist()
                found += [
                    (float(scores[h, g]), f"{early}.{h} → {late}.{g} {side}")
                    for h in range(scores.shape[0])
                    for g in range(scores.shape[1])
                ]

    chance, random = d**-0.5, torch.tensor(turned)
    print(f"{name}: {len(found)} pairs of heads and sides; chance 1/√{d} = {chance:.4f}")
    print(f"rotated at random: root mean square {random.square().mean().sqrt():.4f}, largest {random.max():.4f}")
    mean_square = sum(score**2 for score, _ in found) / len(found)
    print(f"as trained:        root mean square {mean_square**0.5:.4f}, largest:")
    for score, pair in sorted(found, reverse=True)[:SHOWN]:
        print(f"  {pair:<18} {score:.4f}  {score / chance:.1f} × chance")


if __name__ == "__main__":
    main(*sys.argv[1:])
