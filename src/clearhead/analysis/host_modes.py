"""Which singular modes of its host head a Lorsa head's query-key product uses.

The host of a Lorsa head is the original head with the largest routing share. With Ω_h = Σ_m σ_m u_m v_mᵀ the host's
query-key product (spectral/attention_modes.py) and Ω_p that of the Lorsa head's pattern, both acting on the normalised
stream with the attention norm and the gains of query-key norms folded in,

    c_m = u_mᵀ Ω_p v_m / |Ω_p|_F        Σ_m c_m² ≤ 1

c_m² is the share of Ω_p that lies along mode m: a Lorsa that only copied its host would have c_m = σ_m / |σ|. Modes are
numbered as in the spectral lens (`mode.L.h.m`). With RoPE these are the products before the rotation, the same for all
offsets; biases are left out. Weights alone: whether the text uses a mode is not asked here (spectral/firings.py).
"""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.analysis.relations import Related
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.model.access import Model
from clearhead.model.norms import fold
from clearhead.model.weights import attention_norm
from clearhead.spectral.attention_modes import HeadModes, head_modes

MODES = 5
"""Modes named per head."""
LEAST = 0.05
"""Modes with a smaller |c_m| are not named: together they hold what no mode explains."""
PATTERNS_AT_ONCE = 16


@torch.no_grad()
def mode_coefficients(lorsa: Lorsa, model: Model, layer: int, modes: HeadModes) -> Float[Tensor, "p h r"]:
    """c_m of every pattern of the Lorsa with every original head's modes, float64; a pattern of zeros has c = 0."""
    W_Q, W_K = _folded(lorsa, model, layer)
    norm = ((W_Q.mT @ W_Q) * (W_K.mT @ W_K)).sum((1, 2)).clamp_min(0).sqrt()
    U, V = modes.svd.U.to(W_Q), modes.svd.V.to(W_Q)
    parts = [
        (torch.einsum("hdr,pde->phre", U, q) * torch.einsum("hdr,pde->phre", V, k)).sum(-1)
        for q, k in zip(W_Q.split(PATTERNS_AT_ONCE), W_K.split(PATTERNS_AT_ONCE), strict=True)
    ]
    return torch.cat(parts) / torch.where(norm > 0, norm, torch.inf)[:, None, None]


def host_modes(lorsa: Lorsa, model: Model, layer: int, routing: Float[Tensor, "n h"]) -> Related:
    """The modes that each head's QK shares most with its host; heads without a routing share (NaN rows) have none."""
    modes = head_modes(model, layer, torch.float64)
    coefficients = mode_coefficients(lorsa, model, layer, modes).cpu()
    head = np.flatnonzero(~routing.isnan().any(-1).cpu().numpy())
    host = routing[torch.from_numpy(head)].argmax(-1).cpu()
    pattern = torch.from_numpy(head) // lorsa.config.pattern_size
    own = coefficients[pattern, host]
    top = own.abs().topk(min(MODES, own.shape[-1]))
    row, column = (index.numpy() for index in (top.values >= LEAST).nonzero(as_tuple=True))
    number = top.indices.numpy()[row, column]
    names = np.array([f"mode.{layer}.{h}.{m}" for h, m in zip(host.numpy()[row], number, strict=True)], dtype=np.str_)
    labels = [f"mode {m} of head {layer}.{h}" for h, m in zip(host.numpy()[row], number, strict=True)]
    value = own.numpy()[row, number]
    return Related("modes", head[row], names, pa.array(labels, pa.string()), value)


def _folded(lorsa: Lorsa, model: Model, layer: int) -> tuple[Float[Tensor, "p d dh"], Float[Tensor, "p d dh"]]:
    """W_Q and W_K of every pattern as they act on the stream normalised without gain and bias, gates and gains in."""
    config = lorsa.config
    maps = []
    for weight, gain in ((lorsa.W_Q, "q_gain"), (lorsa.W_K, "k_gain")):
        W = weight.detach().double().mT
        norm = attention_norm(model, layer)
        if norm is not None:
            W, _ = fold(replace(norm, bias=None), W, None)
        if config.qk_norm:
            if config.qk_norm == "layer":
                W = W - W.mean(-1, keepdim=True)
            W = W * lorsa.get_parameter(gain).detach().double()[:, None]
        maps.append(W.repeat_interleave(config.patterns_per_group, 0))
    return maps[0] * lorsa.gates().detach().double()[:, None], maps[1]
