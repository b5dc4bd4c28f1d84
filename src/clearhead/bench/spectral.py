"""What the spectral lens costs: decomposing every head once, and a census of firings against the plain forward passes.

The census reads queries, keys and patterns, which needs the family's eager attention; the forward it is compared with
is the model's own, by its fast path, to the logits. Both see the same held-out blocks of the default text in turns.
Times are CPU and wall seconds. Beside them stands how far the lens' central identity, Σ_k A_k B_k = score, is from
exact: in the model's float32 on a whole block, and in a float64 copy of the model on the first tokens of it.
"""

import statistics
import time
from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from clearhead.data.text import token_blocks
from clearhead.model.access import Model
from clearhead.spectral.attention_modes import HeadModes, head_modes
from clearhead.spectral.census import take_census
from clearhead.spectral.firings import Prompts
from clearhead.spectral.sparsity import visible

DOUBLE_TOKENS = 16
"""Tokens of the block that the float64 copy sees."""


def time_spectral(model_name: str, *, context: int, blocks: int, repeats: int, threads: int) -> dict[str, float]:
    """Medians over repeats, and how far Σ_k A_k B_k is from the scores of all layers in float32 and in float64.

    Raises `ClearheadError` for a context that the model cannot see. The process keeps its number of threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _measure(model_name, context, blocks, repeats)
    finally:
        torch.set_num_threads(before)


def _measure(model_name: str, context: int, blocks: int, repeats: int) -> dict[str, float]:
    model = Model.load(model_name)
    text = token_blocks(model, "default", split="held_out", n_tokens=blocks * context, context=context)
    prompts = Prompts([f"block {n}" for n in range(len(text))], list(text.tokens), text.source)
    modes: dict[int, HeadModes] = {}
    work: dict[str, Callable[[], object]] = {
        "decomposition": lambda: modes.update({n: head_modes(model, n) for n in model.attention_layers}),
        "forward": lambda: [model.run(batch) for _, batch in prompts.batches(model)],
        "census": lambda: take_census(model, prompts),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, task in work.items():
            times[name].append(_timed(task))
    numbers: dict[str, float] = {"heads": len(modes) * model.n_heads, "tokens": prompts.n_tokens}
    for clock, unit in enumerate(("CPU", "wall")):
        of_clock = {name: [spent[clock] for spent in some] for name, some in times.items()}
        numbers |= {f"{name} ({unit} s)": statistics.median(values) for name, values in of_clock.items()}
        ratios = [census / forward for census, forward in zip(of_clock["census"], of_clock["forward"], strict=True)]
        numbers[f"census / forward ({unit})"] = statistics.median(ratios)
    block = text.tokens[:1].to(model.device)
    return numbers | {
        "largest error of a decomposition": max(float(one.svd.error.max()) for one in modes.values()),
        "error of the sum, float32": sum_error(model, modes, block),
        "error of the sum, float64": _double_error(model_name, block[:, :DOUBLE_TOKENS]),
    }


def sum_error(model: Model, modes: dict[int, HeadModes], tokens: Int[Tensor, "b t"]) -> float:
    """Largest |Σ_k A_k B_k − score|, relative to the layer's largest score, over all layers and visible pairs."""
    seen = visible(tokens.shape[1], None)
    worst = 0.0
    for layer, of_layer in modes.items():
        # one run, one path: eager and sdpa attention round differently in the layers below
        run = model.run(tokens, read=[f"{site}.{layer}" for site in ("scores", "q", "k")])
        scores = run[f"scores.{layer}"]
        A, B = of_layer.project(run[f"q.{layer}"], run[f"k.{layer}"])
        difference = ((A @ B.mT - scores) * seen).abs().max()
        worst = max(worst, float(difference / scores[..., seen].abs().max()))
    return worst


def _double_error(model_name: str, tokens: Int[Tensor, "1 t"]) -> float:
    model = Model(Model.load(model_name, self_test=False).hf.double(), name=model_name, self_test=False)
    return sum_error(model, {layer: head_modes(model, layer) for layer in model.attention_layers}, tokens)


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall
