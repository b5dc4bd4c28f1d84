"""What every model must pass when it is loaded: the access reproduces the model, or the model is refused.

Two short sequences that differ in their last token are run, on both paths, and in every layer with attention:

- write sums: Σ_h head_out + b_O = attn_out;
- mixing: pattern · v = z;
- causality: pattern is 0 above the diagonal, and the logits before the last token do not see it;
- agreement: runs that read inside attention, on the eager path and on the sdpa path, give the logits of HF's own
  forward on that path.

The tolerance is the rounding of the dtype, since kernels on some devices do not repeat theirs; that the numbers agree
bit for bit is tested. Cost: four forwards over 2 × 4 tokens.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.model.attention import attention_implementation
from clearhead.model.gates import GATED
from clearhead.model.places import output_weight, require_module
from clearhead.model.run import Path, Run

if TYPE_CHECKING:
    from clearhead.model.access import Model

POSITIONS = 4
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest difference that counts as rounding, relative to the largest entry."""


class SelfTestError(ClearheadError):
    """The access to a model does not reproduce the model; the text says where."""


@torch.no_grad()
def check_model(model: "Model") -> None:
    """Runs the self-test. Raises `SelfTestError` with the first identity that does not hold."""
    tokens = _probe_tokens(model)
    readable = {"v", "z"} if model.family.interface or "v" in model.family.plain else {"z"}
    layers = model.attention_layers
    read = [f"{name}.{layer}" for layer in layers for name in ("pattern", "head_out", "attn_out", *sorted(readable))]
    run = model.run(tokens, read=[*read, "logits"])
    for layer in layers:
        _check_writes(model, run, layer)
        _check_pattern(model, run, layer, mixing="v" in readable)
    _check_causal(run.logits)
    if model.gates is None:  # hard gates on the edge of opening may round to the other side on another path
        _check_forward(model, tokens, run)
    fused = model.run(tokens, read=[*(f"z.{layer}" for layer in layers), "logits"])
    if fused.path != run.path:
        _check_forward(model, tokens, fused)


def _probe_tokens(model: "Model") -> Tensor:
    """Two rows [2, t] that differ in their last token only, spread over the vocabulary."""
    row = torch.linspace(1, model.d_vocab - 2, POSITIONS, dtype=torch.float64).long()
    tokens = row.repeat(2, 1)
    tokens[1, -1] = 0
    return tokens.to(model.device)


def _check_writes(model: "Model", run: Run, layer: int) -> None:
    """Σ_h head_out + b_O = attn_out."""
    attention = model.places.attentions[layer]
    assert attention is not None
    bias = output_weight(require_module(attention, model.family.output))[1]
    total = run[f"head_out.{layer}"].sum(dim=-2)
    _compare(total if bias is None else total + bias, run[f"attn_out.{layer}"], f"heads' sum in layer {layer}")


def _check_pattern(model: "Model", run: Run, layer: int, *, mixing: bool) -> None:
    """Nothing above the diagonal; pattern · v = z."""
    pattern = run[f"pattern.{layer}"]
    if pattern.triu(1).any():
        raise SelfTestError(f"{model.name}: the pattern of layer {layer} attends to later tokens")
    if mixing:
        v = run[f"v.{layer}"]
        v = v.repeat_interleave(pattern.shape[1] // v.shape[1], dim=1)
        mixed = (pattern.to(v.dtype) @ v).transpose(1, 2)
        _compare(mixed, run[f"z.{layer}"], f"pattern times values in layer {layer}")


def _check_causal(logits: Tensor) -> None:
    """The two rows agree before the token in which they differ, and differ there."""
    _compare(logits[0, :-1], logits[1, :-1], "logits before a changed token")
    if torch.equal(logits[0, -1], logits[1, -1]):
        raise SelfTestError("the logits do not depend on the last token")


def _check_forward(model: "Model", tokens: Tensor, run: Run) -> None:
    """The run's logits are those of HF's own forward on the same path."""
    path: Path = run.path
    name = path if model.gates is None else GATED
    with attention_implementation(model.hf, name), model.evaluating():
        plain = model.hf(input_ids=tokens, use_cache=False).logits
    _compare(plain, run.logits, f"logits of the plain forward (path {path})")


def _compare(found: Tensor, expected: Tensor, what: str) -> None:
    """Raises where the two differ by more than rounding, relative to the largest entry."""
    if not bool((found.isfinite() & expected.isfinite()).all()):
        raise SelfTestError(f"self-test: {what}: numbers that are not finite")
    if torch.equal(found, expected):
        return
    worst = float((found.double() - expected.double()).abs().max())
    tolerance = TOLERANCE[expected.dtype] * float(expected.abs().max())
    if worst > tolerance:
        raise SelfTestError(
            f"self-test: {what}: off by {worst:.2e} where at most {tolerance:.2e} is rounding; this model computes"
            " something that clearhead does not see, and is refused (self_test=False loads it at your own risk)"
        )
