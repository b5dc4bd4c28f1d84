"""Attention with a gate on every edge (arXiv 2512.05865): one function, the same for every backend.

    S_ij = scale · q_i · k_j                        as the softmax scores them (after RoPE)
    x_ij = S_ij + bias_h                            gate logit, from the same queries and keys
    P_ij = exp(S_ij) / Σ_j' exp(S_ij')              over all visible keys: closed edges stay in the denominator
    out_i = Σ_j M_ij P_ij v_j

    sampled  M_ij = [u_ij < σ(x_ij)]                u uniform, a counter hash of (seed, layer, batch, head, i, j)
    hard     M_ij = [x_ij > 0]
    open     M_ij = 1                               the dense model

With a sink κ the denominator is Z_i = exp(κ_h) + Σ_j M_ij exp(S_ij) instead, and a closed edge carries exactly nothing.
A row without an open edge gives exactly 0. The keys that a row sees are an interval, first_i ≤ j ≤ i, which covers
causality, sliding windows and packed documents.

Gradients of a surrogate in which M has the slope of s = σ(x + noise) ("straight_through"; s = σ(x) in hard mode) or of
σ(x) ("exact", the derivative of P(M = 1)). With G = ∂L/∂out · v, D = ∂L/∂out · out and Π = exp(S)/Z:

    all keys   dS = P (M G − D) + P G s(1−s)
    sink       dS = M Π (G − D) + min(Π, 1) (G − D) s(1−s)        dκ = −Σ_i exp(κ)/Z_i D_i

Π of a closed edge has no bound, so its gate gradient is held to what an open edge could have. Here: the interface, the
hash and the reference, explicit and in any precision. The fast forms are gated_cpu.py and gated_triton.py.
"""

from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, Int32
from torch import Tensor

from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.ops.hash_rng import mix

Mode = Literal["sampled", "hard", "open"]
Estimator = Literal["straight_through", "exact"]

UNIT = 2.0**-23
"""Spacing of the uniform numbers. With one bit more, float32 would round the largest of them to 1."""


class Noise(NamedTuple):
    """Where the random bits of one call come from; batch and head are the global indices of its first row and head."""

    seed: int
    layer: int = 0
    batch: int = 0
    head: int = 0


class Gated(NamedTuple):
    """What gated attention returns; only `out` and `expected` carry gradients."""

    out: Float[Tensor, "b h t dv"]
    lse: Float[Tensor, "b h t"]
    """Logarithm of the denominator; −inf for a row that sees nothing (with a sink: κ)."""
    expected: Float[Tensor, "b h t"]
    """Σ_j (1 + slope (i − j)) σ(x_ij): with slope 0 the expected number of open edges of the row."""
    opened: Int32[Tensor, "b h t"]
    """Open edges of the row."""
    leak: Float[Tensor, "b h t"]
    """Softmax mass on closed edges, Σ_j (1 − M_ij) P_ij; 0 with a sink."""


def gated_attention(
    q: Float[Tensor, "b h t dh"],
    k: Float[Tensor, "b g t dh"],
    v: Float[Tensor, "b g t dv"],
    bias: Float[Tensor, " h"],
    *,
    mode: Mode,
    scale: float,
    noise: Noise | None = None,
    first: Int[Tensor, "b t"] | None = None,
    sink: Float[Tensor, " h"] | None = None,
    slope: float = 0.0,
    estimator: Estimator = "straight_through",
    check: bool = False,
) -> Gated:
    """Gated attention by the fastest backend for these tensors (ops/dispatch.py); see the module for the formulas.

    `noise`: the source of the gates in mode "sampled". `first[b, t]`: the first key that each query sees; None is 0; a
    row whose first key lies behind it sees nothing. `sink`: the logit κ of each head, for the denominator over open
    edges. `slope`: extra price of an edge per position of its length. `check`: the backward pass counts its gates again
    and refuses to return gradients of other gates than the forward pass had.
    Raises `ClearheadError` for shapes and settings that do not fit, `UnknownNameError` for a mode or estimator.
    """
    check_arguments(q, k, v, bias, mode, noise, first, sink, estimator)
    # the backends take their types from this module
    from clearhead.ops.dispatch import gated_backend

    if gated_backend(q, k, v) == "triton":
        from clearhead.ops.gated_triton import gated_attention_triton as run
    else:
        from clearhead.ops.gated_cpu import gated_attention_tiled as run
    return run(
        *(q, k, v, bias),
        mode=mode,
        scale=scale,
        noise=noise,
        first=first,
        sink=sink,
        slope=slope,
        estimator=estimator,
        check=check,
    )


def gated_attention_reference(
    q: Float[Tensor, "b h t dh"],
    k: Float[Tensor, "b g t dh"],
    v: Float[Tensor, "b g t dv"],
    bias: Float[Tensor, " h"],
    *,
    mode: Mode,
    scale: float,
    noise: Noise | None = None,
    first: Int[Tensor, "b t"] | None = None,
    sink: Float[Tensor, " h"] | None = None,
    slope: float = 0.0,
    estimator: Estimator = "straight_through",
) -> Gated:
    """`gated_attention` with every pair laid out, in the precision of its inputs, differentiated by autograd."""
    check_arguments(q, k, v, bias, mode, noise, first, sink, estimator)
    b, h, t, _ = q.shape
    k, v = (x.repeat_interleave(h // x.shape[1], dim=1) for x in (k, v))
    seen = visible_pairs(first, t, q.device)[:, None]
    scores = q @ k.mT * scale
    logits = scores + bias.to(scores.dtype)[:, None, None]
    probability = logits.sigmoid() * seen
    gate = soft = seen.to(scores.dtype).expand_as(scores)  # mode "open"
    if mode == "hard":
        gate, soft = ((logits > 0) & seen).to(scores.dtype), probability
    elif mode == "sampled":
        assert noise is not None
        rows = torch.arange(t, device=q.device)
        u = uniforms(noise_keys(noise, b, h, q.device), rows, rows).to(scores.dtype)
        gate = ((u < logits.sigmoid()) & seen).to(scores.dtype)
        # 1 − u is as uniform as u, and opens the same edges: σ(x + logit(1 − u)) > 1/2 where u < σ(x)
        soft = (logits + torch.log1p(-u) - u.log()).sigmoid() * seen if estimator == "straight_through" else probability
    slant = soft - soft.detach()  # no value, the surrogate's slope

    masked = scores.masked_fill(~seen, -torch.inf)
    shift = masked.amax(-1, keepdim=True).detach()
    if sink is not None:
        shift = torch.maximum(shift, sink.detach().to(scores.dtype)[:, None, None])
    shift = shift.nan_to_num(neginf=0.0)
    weight = (masked - shift).exp()
    if sink is None:
        denominator = weight.sum(-1, keepdim=True)
        mixed = (gate + slant) * weight
        mass = denominator
    else:
        rest = (sink.to(scores.dtype)[:, None, None] - shift).exp()
        held = (rest + (gate * weight).sum(-1, keepdim=True)).detach()
        mixed = gate * weight + slant * torch.minimum(weight, held).detach()
        mass = denominator = rest + mixed.sum(-1, keepdim=True)
    out = (mixed / mass.masked_fill(mass == 0, 1.0)) @ v
    position = torch.arange(t, device=q.device, dtype=scores.dtype)
    distance = position[:, None] - position
    expected = (probability * (1 + slope * distance)).sum(-1)
    with torch.no_grad():
        # not from the denominator: beside a large score of a closed edge, an exp(κ) of the sink can vanish
        counted = masked if sink is None else masked.masked_fill(gate == 0, -torch.inf)
        lse = counted.logsumexp(-1)
        if sink is not None:
            lse = torch.logaddexp(lse, sink.to(scores.dtype)[:, None])
        closed = ((1 - gate) * weight).sum(-1) / mass[..., 0].masked_fill(mass[..., 0] == 0, 1.0)
        leak = closed if sink is None else torch.zeros_like(closed)
    return Gated(out, lse, expected, gate.sum(-1).int(), leak)


def visible_pairs(first: Int[Tensor, "b t"] | None, t: int, device: torch.device) -> Bool[Tensor, "b t t"]:
    """Which keys each query sees, [b, query, key]; b is 1 where `first` is None."""
    position = torch.arange(t, device=device)
    seen = position <= position[:, None]
    return seen[None] if first is None else seen & (position >= first[:, :, None])


def noise_keys(noise: Noise, b: int, h: int, device: torch.device) -> Int32[Tensor, "b h 2"]:
    """The two 32-bit words that the noise of each (batch, head) starts from."""
    batches = np.arange(noise.batch, noise.batch + b)[:, None]
    heads = np.arange(noise.head, noise.head + h)[None, :]
    words = mix(noise.seed, noise.layer, batches, heads)
    halves = np.stack([words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)], axis=-1).astype(np.uint32)
    return torch.from_numpy(halves.view(np.int32)).to(device)


def noise_words(
    keys: Int32[Tensor, "*b 2"], rows: Int[Tensor, " q"], columns: Int[Tensor, " k"]
) -> Int32[Tensor, "*b q k"]:
    """The 32 random bits of each (row, column) pair, as int32; a mixing of 32-bit words in two rounds (murmur-style).

    A row has 64 bits of its own, of which one half enters between the rounds: two rows with equal noise are as unlikely
    as two equal 64-bit numbers.
    """
    row = _mixed(rows.int() * _signed(0x9E3779B1) + keys[..., :1], None)
    second = _mixed(row ^ keys[..., 1:], None)
    start = row[..., :, None] ^ (columns.int() * _signed(0xC2B2AE3D))
    return _mixed(start, second[..., :, None])


def uniforms(
    keys: Int32[Tensor, "*b 2"], rows: Int[Tensor, " q"], columns: Int[Tensor, " k"]
) -> Float32[Tensor, "*b q k"]:
    """A number strictly between 0 and 1 for each (row, column) pair, on a grid of 2⁻²³, exact in float32."""
    return (_shifted(noise_words(keys, rows, columns), 9).float() + 0.5) * UNIT


def _mixed(x: Tensor, between: Tensor | None) -> Tensor:
    x = x ^ _shifted(x, 16)
    x = x * _signed(0x21F0AAAD)
    x = x ^ _shifted(x, 15)
    if between is not None:
        x = x + between
    x = x * _signed(0x735A2D97)
    return x ^ _shifted(x, 15)


def _shifted(x: Tensor, by: int) -> Tensor:
    """A logical shift to the right: torch's own keeps the sign."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mode: str,
    noise: Noise | None,
    first: Tensor | None,
    sink: Tensor | None,
    estimator: str,
) -> None:
    """Raises `ClearheadError` or `UnknownNameError` for arguments of `gated_attention` that do not fit each other."""
    if mode not in get_args(Mode):
        raise UnknownNameError("gate mode", mode, get_args(Mode))
    if estimator not in get_args(Estimator):
        raise UnknownNameError("estimator", estimator, get_args(Estimator))
    if mode == "sampled" and noise is None:
        raise ClearheadError("gated attention: sampled gates need noise=Noise(seed, layer); give it, or mode='hard'")
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    fits = q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0]
    fits = fits and q.shape[3] == k.shape[3] and k.shape[1:3] == v.shape[1:3] and q.shape[2] == k.shape[2]
    if not fits or q.shape[1] % k.shape[1]:
        raise ClearheadError(
            f"gated attention got {shapes}; expected q [batch, heads, positions, width] and k, v of the same batch and "
            "positions, with a number of heads that divides the queries'"
        )
    b, h, t, _ = q.shape
    for name, given in (("bias", bias), ("sink", sink)):
        if given is not None and given.shape != (h,):
            raise ClearheadError(f"gated attention got a {name} of shape {list(given.shape)}; expected [{h}], per head")
    if first is not None and (first.shape != (b, t) or first.is_floating_point()):
        raise ClearheadError(
            f"gated attention got first {first.dtype} {list(first.shape)}; expected integers [{b}, {t}]: the first key "
            "that each query sees"
        )
