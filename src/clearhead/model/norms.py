"""LayerNorm and RMSNorm as data, and their exact folding into the linear map that reads them.

    norm(x) = γ ⊙ n(x) + β,   n(x) = C x / sqrt(mean((C x)²) + ε),   C = I − 11ᵀ/d for LayerNorm, I for RMSNorm
    norm(x) W + b = n(x) W' + b',   W' = C γ W,   b' = β W + b

W' reads the same from C x as from x, so with the scale 1/sqrt(...) held fixed (`frozen_scale`) the residual stream is
read linearly: n(x) W' = x W' · scale. Whether a family's class centres, and whether its gain is w or 1 + w, is found by
applying the module to a probe, not looked up. `unembedding` folds the final norm; weights.py folds that of attention
with the same `fold`. Not done here: norms behind a module (OLMo 2's, Gemma 2's second), whose scale depends on the
module's output; they are left as they are.
"""

import copy
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from clearhead.errors import ClearheadError
from clearhead.model.families import find_family, find_module

Kind = Literal["rms", "layer"]


@runtime_checkable
class HoldsModel(Protocol):
    """A clearhead `Model`, or anything else with the transformers model at `.hf`."""

    @property
    def hf(self) -> PreTrainedModel:
        """The transformers model."""
        ...


@dataclass(frozen=True, eq=False)
class Norm:
    """A normalisation of the last axis."""

    kind: Kind
    """"layer" subtracts the mean first, "rms" does not."""
    eps: float
    gain: Tensor | None
    """What multiplies the normalised vector (for Gemma already 1 + w), connected to the parameters; None if 1."""
    bias: Tensor | None

    def __call__(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """γ ⊙ n(x) + β, in float32 at least, returned in the type of `x`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = self.normalise(wide)
        if self.gain is not None:
            y = y * self.gain
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype)

    def normalise(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """n(x): centred if the kind is "layer", divided by its root mean square; no gain, no bias."""
        return self.centre(x) * self.frozen_scale(x)

    def centre(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """C x."""
        return x - x.mean(-1, keepdim=True) if self.kind == "layer" else x

    def frozen_scale(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b 1"]:
        """1/sqrt(mean((C x)²) + ε): hold it fixed to read the residual stream linearly."""
        return torch.rsqrt(self.centre(x).square().mean(-1, keepdim=True) + self.eps)

    def plain(self) -> "Norm":
        """The same norm without gain and bias: what a folded map reads."""
        return replace(self, gain=None, bias=None)


def read_norm(module: nn.Module, width: int) -> Norm:
    """Describes a norm module acting on `width` components, whatever its class.

    Every combination of kind and gain is compared with the module itself on probe vectors of three magnitudes (which
    checks ε); raises `ClearheadError` if none reproduces it. A module without storage is read like one of its class
    with any weights.
    """
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    probed = _with_storage(module) if weight is not None and weight.is_meta else module
    like = dict(probed.named_parameters(recurse=False)).get("weight")
    candidates = _candidates(module)
    errors = [_disagreement(norm, probed, width, like) for norm in _candidates(probed)]
    best = min(range(len(candidates)), key=errors.__getitem__)
    low_precision = weight is not None and weight.dtype not in (torch.float32, torch.float64)
    if errors[best] > (2e-2 if low_precision else 1e-5):
        raise ClearheadError(
            f"{type(module).__name__} is neither a LayerNorm nor an RMSNorm with gain w or 1 + w "
            f"(closest is off by {errors[best]:.1e}); its gain cannot be folded"
        )
    return candidates[best]


def _candidates(module: nn.Module) -> list[Norm]:
    """The norms that a module with these parameters may be."""
    parameters = dict(module.named_parameters(recurse=False))
    weight, bias = parameters.get("weight"), parameters.get("bias")
    fields = vars(module)
    eps = fields.get("variance_epsilon", fields.get("eps", 1e-5))  # OLMo's class has its 1e-5 in the code
    gains = [None] if weight is None else [weight, 1.0 + weight]
    return [Norm(kind, eps, gain, bias) for kind in ("rms", "layer") for gain in gains]


def _with_storage(module: nn.Module) -> nn.Module:
    """A copy in memory of a module on the meta device, its parameters no special values."""
    twin = copy.deepcopy(module).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in twin.parameters():
        nn.init.normal_(parameter, generator=generator)
    return twin


@torch.no_grad()
def _disagreement(norm: Norm, module: nn.Module, width: int, weight: Tensor | None) -> float:
    """Largest relative difference between `norm` and `module` on three probe vectors."""
    like = torch.empty(0) if weight is None else weight
    shape = (3, *like.shape[:-1], width)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(shape, generator=generator) + 0.5
    probe = (probe * torch.tensor([1e-3, 1.0, 30.0]).view(3, *[1] * (probe.ndim - 1))).to(like)
    expected, found = module(probe).double(), norm(probe).double()
    return float((expected - found).abs().max() / expected.abs().max().clamp_min(1e-30))


def fold(
    norm: Norm, weight: Float[Tensor, "*h d e"], bias: Float[Tensor, "*h e"] | None
) -> tuple[Float[Tensor, "*h d e"], Float[Tensor, "*h e"] | None]:
    """(W', b') with norm(x) W + b = n(x) W' + b'.

    Folding a norm without gain and bias again changes nothing: centring twice is centring once.
    """
    if norm.bias is not None:
        shift = torch.einsum("d,...de->...e", norm.bias, weight)
        bias = shift if bias is None else bias + shift
    if norm.gain is not None:
        weight = norm.gain[:, None] * weight
    if norm.kind == "layer":
        weight = weight - weight.mean(-2, keepdim=True)
    return weight, bias


def final_norm(model: HoldsModel) -> Norm:
    """The norm between the last layer and the unembedding."""
    module = find_module(model.hf, find_family(model.hf).final_norm)
    if module is None:
        raise ClearheadError(f"this {model.hf.config.model_type} model has no norm before its unembedding")
    return read_norm(module, model.hf.config.hidden_size)


def unembedding(model: HoldsModel) -> tuple[Float[Tensor, "d v"], Float[Tensor, " v"]]:
    """(W_U, b_U) with logits = cap(n(resid_post of the last layer) · W_U + b_U).

    n is `final_norm(model).normalise`, cap is c·tanh(·/c) with c = `logit_softcap(model)` or the identity. W_U holds
    the final norm's gain, is centred for LayerNorm, and holds the family's logit scaling (Granite, Cohere) and output
    projection (OPT); b_U holds the norm's bias and that of the unembedding, and is 0 where there is neither.
    """
    head = model.hf.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ClearheadError(f"the unembedding is a {type(head).__name__}, not a linear layer; load it unquantised")
    factor = _logit_factor(model.hf)
    weight, bias = head.weight.T, head.bias
    narrow = find_module(model.hf, find_family(model.hf).layers.rpartition(".")[0] + ".project_out")
    if narrow is not None:
        weight = narrow.get_parameter("weight").T @ weight
    if factor != 1.0:
        weight, bias = weight * factor, None if bias is None else bias * factor
    weight, bias = fold(final_norm(model), weight, bias)
    return weight, weight.new_zeros(weight.shape[1]) if bias is None else bias


def logit_softcap(model: HoldsModel) -> float | None:
    """The c of logits = c·tanh(·/c) (Gemma 2 and later), None where logits are not capped."""
    return model.hf.config.to_dict().get("final_logit_softcapping")


def _logit_factor(hf: PreTrainedModel) -> float:
    """What the model multiplies its logits by."""
    if hf.config.model_type.startswith("granite"):
        return 1.0 / hf.config.logits_scaling
    return float(vars(hf).get("logit_scale", 1.0))  # Cohere; MPT's config has the name too, but its model ignores it


@dataclass(frozen=True)
class HeadNormRule:
    """How a family normalises queries, keys or values at every position."""

    kind: Kind
    eps: float
    whole: bool
    """Statistics over all heads' components together (OLMo 2) instead of over each head's own."""
    after_rope: bool
    """Applied to the rotated vector (HunYuan) instead of before the rotation."""


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """A `HeadNormRule` with its parameters."""

    rule: HeadNormRule
    gain: Float[Tensor, "h_or_1 dh"] | None
    bias: Float[Tensor, "h_or_1 dh"] | None

    def __call__(self, x: Float[Tensor, "*b h t dh"]) -> Float[Tensor, "*b h t dh"]:
        """The normalised heads, in float32 at least, returned in the type of `x`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        plain = Norm(self.rule.kind, self.rule.eps, None, None)
        if self.rule.whole:
            joined = wide.movedim(-3, -2)
            y = plain.normalise(joined.flatten(-2)).view(joined.shape).movedim(-2, -3)
        else:
            y = plain.normalise(wide)
        if self.gain is not None:
            y = y * self.gain[:, None]
        if self.bias is not None:
            y = y + self.bias[:, None]
        return y.to(x.dtype)

    def repeat(self, ratio: int) -> "HeadNorm":
        """The norm of `ratio` copies of each head. Raises `ClearheadError` if statistics span the heads."""
        if self.rule.whole:
            raise ClearheadError(
                "these heads are normalised over all of them together, so copies would change the statistics; "
                "normalise first, then repeat"
            )
        return HeadNorm(self.rule, _repeat_rows(self.gain, ratio), _repeat_rows(self.bias, ratio))


def _repeat_rows(rows: Tensor | None, ratio: int) -> Tensor | None:
    return rows if rows is None or len(rows) == 1 else rows.repeat_interleave(ratio, 0)


def read_head_norm(module: nn.Module, n_heads: int, d_head: int, after_rope: bool) -> HeadNorm:
    """Describes a norm of queries, keys or values: shared by the heads, one per head, or over all of them.

    `module` holds one weight of shape [d_head], [n_heads, d_head] (Cohere) or [n_heads · d_head] (OLMo 2), or one norm
    per head in a list (StableLM). Raises `ClearheadError` if it is none of these.
    """
    norms = [read_norm(head, d_head) for heads in module.children() for head in heads.children()]
    if norms:
        if len(norms) != n_heads:
            raise ClearheadError(f"{type(module).__name__} holds {len(norms)} norms for {n_heads} heads")
        rule = HeadNormRule(norms[0].kind, norms[0].eps, False, after_rope)
        return HeadNorm(rule, _stack([norm.gain for norm in norms]), _stack([norm.bias for norm in norms]))
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    whole = weight is not None and weight.shape == (n_heads * d_head,) and n_heads > 1
    norm = read_norm(module, n_heads * d_head if whole else d_head)
    rule = HeadNormRule(norm.kind, norm.eps, whole, after_rope)
    return HeadNorm(rule, _as_rows(norm.gain, d_head), _as_rows(norm.bias, d_head))


def _stack(parameters: list[Tensor | None]) -> Tensor | None:
    present = [parameter for parameter in parameters if parameter is not None]
    return torch.stack(present) if present else None


def _as_rows(parameter: Tensor | None, d_head: int) -> Tensor | None:
    return None if parameter is None else parameter.view(-1, d_head)
