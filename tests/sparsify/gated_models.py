"""Small random models with gates, and what loops over their scores find; float64."""

import torch

from clearhead.model import Model
from clearhead.model.gates import Gates, install
from tests.model.tiny_configs import VOCABULARY, build

LENGTH = 20


def gated_model(family: str, sink: float | None = None) -> tuple[Model, Gates]:
    """Gates that leave some edges open in most heads, and none in one."""
    model = Model(build(family).double(), name=f"gated {family}")
    gates = install(model, bias=0.0, sink=sink)
    for gate in gates.layers.values():
        gate.to(torch.float64)
    generator = torch.Generator().manual_seed(3)
    bias = 2 * torch.randn(len(gates.layers), model.n_heads, generator=generator, dtype=torch.float64) - 2
    bias[1, 2] = -1e3
    gates.set_bias(bias)
    return model, gates


def dense_model(family: str) -> Model:
    return Model(build(family, seed=5).double(), name=f"dense {family}")


def random_tokens(n: int = 3, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(VOCABULARY, (n, length), generator=torch.Generator().manual_seed(7))


def break_embedding(model: Model, token: int) -> None:
    """The embedding of one token becomes NaN."""
    weight = model.hf.get_input_embeddings().get_parameter("weight")
    with torch.no_grad():
        weight[token] = torch.nan


def layers_of(model: Model, gates: Gates, tokens: torch.Tensor):
    """(layer, scores, bias, first visible key of each row), of the forward under hard gates."""
    window = model.hf.config.to_dict().get("sliding_window") or tokens.shape[1]
    run = model.run(tokens, read=[f"scores.{layer}" for layer in gates.layers])
    for place, layer in enumerate(gates.layers):
        first = [max(0, i - window + 1) for i in range(tokens.shape[1])]
        yield place, run[f"scores.{layer}"], gates.layers[layer].bias.tolist(), first


def edges_of(scores, bias, first):
    """{(b, h, i): {j: (open, x, P)}} by loops."""
    b, h, t, _ = scores.shape
    values = scores.tolist()
    found = {}
    for row in range(b):
        for head in range(h):
            for i in range(t):
                seen = values[row][head][i][first[i] : i + 1]
                weights = torch.tensor(seen, dtype=torch.float64).softmax(-1).tolist()
                found[row, head, i] = {
                    first[i] + n: (s + bias[head] > 0, s + bias[head], p)
                    for n, (s, p) in enumerate(zip(seen, weights, strict=True))
                }
    return found
