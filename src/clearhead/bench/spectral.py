"""What the spectral lens costs: decomposing every head once, and a census of firings against the plain forward passes.

The census reads queries, keys and patterns, which needs the family's eager attention; the forward it is compared with
is the model's own, by its fast path, to the logits. Both see the same blocks in turns. Times are CPU seconds.
"""

import statistics
import time
from collections.abc import Callable

import torch

from clearhead.model.access import Model
from clearhead.spectral.attention_modes import HeadModes, head_modes
from clearhead.spectral.census import take_census
from clearhead.spectral.firings import Prompts, read_queries_and_keys
from clearhead.spectral.sparsity import visible


def time_spectral(model_name: str, *, context: int, blocks: int, repeats: int, threads: int) -> dict[str, float]:
    """Medians over repeats, and how far Σ_k is from the scores in float32 and, for the first layer, in float64."""
    torch.set_num_threads(threads)
    model = Model.load(model_name)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.d_vocab, (blocks, context), generator=generator)
    prompts = Prompts([f"block {n}" for n in range(blocks)], list(tokens), "random tokens")
    times: dict[str, list[float]] = {"decomposition": [], "forward": [], "census": []}
    modes: dict[int, HeadModes] = {}
    for _ in range(repeats):
        times["decomposition"].append(
            _cpu(lambda: modes.update({n: head_modes(model, n) for n in model.attention_layers}))
        )
        times["forward"].append(_cpu(lambda: [model.run(batch) for _, batch in prompts.batches(model)]))
        times["census"].append(_cpu(lambda: take_census(model, prompts)))
    medians = {f"{name} (CPU s)": statistics.median(values) for name, values in times.items()}
    ratios = [census / forward for census, forward in zip(times["census"], times["forward"], strict=True)]
    return {
        "heads": len(modes) * model.n_heads,
        **medians,
        "census / forward": statistics.median(ratios),
        "largest error of a decomposition": max(float(one.svd.error.max()) for one in modes.values()),
        "error of the sum, float32": sum_error(model, modes, tokens[:1]),
        "error of the sum, float64": _double_error(model_name, tokens[:1]),
    }


def sum_error(model: Model, modes: dict[int, HeadModes], tokens: torch.Tensor) -> float:
    """Largest |Σ_k A_k B_k − score|, relative to the layer's largest score, over all layers and visible pairs."""
    seen = visible(tokens.shape[1], None)
    worst = 0.0
    for layer, of_layer in modes.items():
        scores = model.run(tokens, read=[f"scores.{layer}"])[f"scores.{layer}"]
        q, k = read_queries_and_keys(model, [layer], tokens)[layer]
        A, B = of_layer.project(q, k)
        difference = ((A @ B.mT - scores) * seen).abs().max()
        worst = max(worst, float(difference / scores[..., seen].abs().max()))
    return worst


def _double_error(model_name: str, tokens: torch.Tensor) -> float:
    loaded = Model.load(model_name, self_test=False)
    model = Model(loaded.hf.double(), name=model_name, self_test=False)
    layers = model.attention_layers[:1]
    return sum_error(model, {layer: head_modes(model, layer) for layer in layers}, tokens)


def _cpu(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun
