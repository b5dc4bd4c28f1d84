"""One query against cached keys, through hard gates: what a step of generation computes.

    out = Σ_{j open} exp(S_j)/Z v_j          S_j = scale · q · k_j,  open: S_j + bias_h > 0

with Z over all visible keys, or over exp(κ) and the open ones with a sink (ops/gated.py). Only the rows of v that an
edge is open to are read, so values may live where reading them is dear; all keys are read, as all scores are needed.
Equal to the last row of `gated_attention` in mode "hard".
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.errors import ClearheadError


def gated_decode(
    q: Float[Tensor, "b h 1 dh"],
    k: Float[Tensor, "b g k dh"],
    v: Float[Tensor, "b g k dv"],
    bias: Float[Tensor, " h"],
    *,
    scale: float,
    first: Int[Tensor, " b"] | None = None,
    sink: Float[Tensor, " h"] | None = None,
) -> Float[Tensor, "b h 1 dv"]:
    """Gated attention of the query at the last position; `first[b]` is the first key it sees. Not differentiable.

    Raises `ClearheadError` for shapes that do not fit each other.
    """
    b, h, queries, dh = q.shape
    g, keys = k.shape[1:3]
    if queries != 1 or k.shape[0] != b or k.shape[3] != dh or v.shape[:3] != k.shape[:3] or h % g:
        raise ClearheadError(
            f"gated decoding got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; expected one query "
            "[batch, heads, 1, width], and keys and values of one length whose heads divide the queries'"
        )
    with torch.no_grad():
        # in float32 at least: a score near the threshold must not change sides by rounding
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q.view(b, g, h // g, dh).to(wide) @ k.mT.to(wide) * scale).view(b, h, keys)
        if first is not None:
            hidden = torch.arange(keys, device=q.device) < first[:, None]
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
        opened = scores + bias.to(wide)[:, None] > 0
        counted = scores if sink is None else scores.masked_fill(~opened, -torch.inf)
        lse = counted.logsumexp(-1, keepdim=True)
        if sink is not None:
            lse = torch.logaddexp(lse, sink.to(wide)[:, None])
        row, head, key = opened.nonzero(as_tuple=True)
        weight = (scores[row, head, key] - lse[row, head, 0]).exp()
        out = torch.zeros(b * h, v.shape[3], dtype=wide, device=q.device)
        out.index_add_(0, row * h + head, weight[:, None] * v[row, head // (h // g), key].to(wide))
    return out.view(b, h, 1, -1).to(q.dtype)
