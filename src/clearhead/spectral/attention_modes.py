"""The singular modes of every head's query–key product, and the change of basis that splits its scores over them.

For a head with W_Q, W_K `[d, dh]` acting on the normalised residual stream, Ω = W_Q·W_Kᵀ = U S Vᵀ. Mode k makes a
query that contains u_k look at a key that contains v_k. By QR, W_Q = Q₁R₁ and W_K = Q₂R₂, Ω's decomposition is that of
the dh × dh matrix R₁R₂ᵀ = u S vᵀ, and the fixed maps

    G_q = R₂ᵀ v S^(−1/2) · scale,   G_k = R₁ᵀ u S^(−1/2)        G_q·G_kᵀ = scale · I

rotate the queries and keys that the model itself formed: A = q·G_q, B = k·G_k, so that

    score_ij = Σ_k A_ik B_jk      exactly, with biases, RoPE, grouped keys and the gains of a QK norm included,

before soft-cap, mask and ALiBi. This is the head's canonical gauge: A and B do not change when W_Q → W_Q·M and
W_K → W_K·M⁻ᵀ. It equals ACC++'s construction (2602.13483) with its pseudo-inverse offsets and token-space rotations,
and needs none. What of a bias or a rotation falls outside the reach of a rank-deficient Ω is carried by the modes with
zero singular value (`outside`), so that the sum stays exact there too.

With RoPE the basis above is that of the unrotated product, the same for all offsets. `at_offset` gives the basis that
diagonalises one offset exactly (ACC's choice). Sources: SVF (2602.13524), SAD (2410.00340).
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.geometry import AttentionGeometry
from clearhead.model.norms import HeadNorm
from clearhead.model.rope import relative, rotate
from clearhead.model.weights import AttentionWeights, fold_attention_norm
from clearhead.spectral.factored import Factored, FactoredSVD, canonical_sign, decompose, residual, rounding_floor


@dataclass(frozen=True, eq=False)
class HeadSpace:
    """The heads' dh × dh matrices, float64: W_Q = Q₁R_q, R_q·R_kᵀ = u S vᵀ, U = Q₁u. Other bases are made from them."""

    R_q: Float[Tensor, "h dh dh"]
    R_k: Float[Tensor, "h dh dh"]
    u: Float[Tensor, "h dh r"]
    v: Float[Tensor, "h dh r"]


@dataclass(frozen=True, eq=False)
class HeadModes:
    """The modes of all heads of one layer; entry h of every tensor is query head h."""

    layer: int
    svd: FactoredSVD
    """U, V [h, d, r]: directions in n(resid_pre), the residual stream normalised without gain and bias (and centred
    where the norm centres). S is that of W_Q·W_Kᵀ without the score scale, the gains of norm and QK norm folded in."""
    G_q: Float[Tensor, "h dh r"]
    G_k: Float[Tensor, "h dh r"]
    geometry: AttentionGeometry
    space: HeadSpace
    b_q: Float[Tensor, "h dh"]
    """The bias of the queries as scored, before rotation; zeros where there is none, or where a QK norm mixes it in."""
    offset: int | None = None
    """j − i for a basis that diagonalises one RoPE offset; its maps act on queries and keys that are not rotated."""

    @property
    def n_heads(self) -> int:
        """Number of query heads."""
        return len(self.G_q)

    @property
    def outside(self) -> Bool[Tensor, "h r"]:
        """Modes with zero singular value: they carry what biases and rotations add outside the reach of Ω."""
        return torch.arange(self.G_q.shape[-1], device=self.G_q.device) >= self.svd.rank[:, None]

    @property
    def has_offsets(self) -> bool:
        """Whether pairs at one offset have a basis of their own: with RoPE, unless queries are normalised after it."""
        norm = self.geometry.qk_norm
        return self.geometry.rope is not None and not (norm is not None and norm.after_rope)

    def project(
        self, q: Float[Tensor, "*b h t dh"], k: Float[Tensor, "*b g t dh"]
    ) -> tuple[Float[Tensor, "*b h t r"], Float[Tensor, "*b h t r"]]:
        """A and B of queries and keys as the attention function receives them (sites `q.L`, `k.L`).

        Σ_k A_ik B_jk is the score before soft-cap, mask and ALiBi. Keys are rotated once per query head, since each has
        its own basis. Raises `ClearheadError` for tensors of another head width or count.
        """
        h, g = self.geometry.n_heads, self.geometry.n_kv_heads
        if q.shape[-3] != h or k.shape[-3] != g or q.shape[-1] != self.geometry.d_head:
            raise ClearheadError(
                f"layer {self.layer} has {h} query heads and {g} key heads of width {self.geometry.d_head}; got q "
                f"{list(q.shape)} and k {list(k.shape)}"
            )
        if h != g:
            k = k.repeat_interleave(h // g, -3)
        return q @ self.G_q.to(q.dtype), k @ self.G_k.to(k.dtype)

    def unrotate(
        self, x: Float[Tensor, "*b t dh"], positions: Int[Tensor, " t"] | None = None
    ) -> Float[Tensor, "*b t dh"]:
        """Queries or keys before RoPE, from those after it; positions count from 0 where not given."""
        rope = self.geometry.rope
        if rope is None:
            return x
        at = torch.arange(x.shape[-2], device=x.device) if positions is None else positions
        cos, sin = rope.tables(at, x.dtype)
        square = rope.scaling**2
        return rotate(x, cos / square, -sin / square, rope)

    def at_offset(self, offset: int) -> "HeadModes":
        """The modes of W_Q·R(offset)·W_Kᵀ, offset = key − query position; `project` then takes `unrotate`d tensors.

        Only pairs at that offset sum to their score. Raises `ClearheadError` without RoPE, where all offsets agree, and
        where queries are normalised after the rotation.
        """
        made = self._made_at(offset)
        U = self.svd.U.double().cpu() @ (self.space.u.mT @ made.u)
        V = self.svd.V.double().cpu() @ (self.space.v.mT @ made.v)
        # the frames were checked with the fixed basis; what is new is the decomposition of the small matrix
        turned = self.space.R_q @ self._turn(offset) @ self.space.R_k.mT
        top = made.S[..., 0].clamp_min(torch.finfo(made.S.dtype).tiny)
        error = residual(turned, made.u, made.S, made.v) / top + self.svd.error.cpu()
        svd, made = _signed(U, V, made, error)
        like = self.G_q
        moved = replace(self, svd=svd, G_q=made.G_q, G_k=made.G_k, offset=offset)
        return moved.to(like.dtype, like.device)

    def maps_at(
        self, offset: int, heads: Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, "n dh r"], Float[Tensor, "n dh r"], Float[Tensor, "n r"]]:
        """G_q, G_k and S of `at_offset` for some heads, without its vectors; signs are not canonical."""
        made = self._made_at(offset, heads)
        return made.G_q.to(self.G_q), made.G_k.to(self.G_q), made.S.to(self.G_q)

    def _made_at(self, offset: int, heads: Tensor | slice = slice(None)) -> "_Made":
        if self.geometry.qk_norm is not None and self.geometry.qk_norm.after_rope:
            raise ClearheadError(f"layer {self.layer} normalises queries after RoPE: no matrix serves one offset")
        if self.offset is not None:
            raise ClearheadError("ask the fixed basis for an offset, not the basis of another offset")
        return _modes_of(self.space.R_q[heads], self.space.R_k[heads], self._turn(offset), self.geometry.scale)

    def _turn(self, offset: int) -> Float[Tensor, "dh dh"]:
        if self.geometry.rope is None:
            raise ClearheadError(f"layer {self.layer} has no rotary embedding: one basis serves every offset")
        return relative(self.geometry.rope, offset, self.geometry.d_head).to(self.space.R_q)

    def to(self, dtype: torch.dtype, device: torch.device | str) -> "HeadModes":
        """The same in another format and place; the small matrices of `space` stay as they are."""
        maps = {name: getattr(self, name).to(device, dtype) for name in ("G_q", "G_k", "b_q")}
        return replace(self, svd=self.svd.to(dtype, device), **maps)


def head_modes(model: Model, layer: int, dtype: torch.dtype | None = None) -> HeadModes:
    """The modes of one layer's heads, decomposed in float64 and returned in `dtype` (default: the model's).

    Raises `ClearheadError` with the reason for layers whose scores are not a product of projected queries and keys
    (linear attention, state spaces, latent attention), `NonFiniteError` for damaged weights.
    """
    geometry = model.geometry(layer)
    with torch.no_grad():
        weights = fold_attention_norm(model, layer).to(torch.float64, "cpu")
        W_Q, W_K = query_key_maps(weights)
        d, ratio = W_Q.shape[1], len(W_Q) // len(W_K)
        # heads wider than the model (Ernie's smallest): rows of zeros make room for as many modes as a head is wide
        W_Q, W_K = (torch.nn.functional.pad(W, (0, 0, 0, max(0, geometry.d_head - d))) for W in (W_Q, W_K))
        frame_q, R_q = torch.linalg.qr(W_Q)
        # keys are factored once per kv head
        frame_k, R_k = (part.repeat_interleave(ratio, 0) for part in torch.linalg.qr(W_K))
        made = _modes_of(R_q, R_k, torch.eye(geometry.d_head, dtype=torch.float64), geometry.scale)
        U, V = frame_q @ made.u, frame_k @ made.v
        error = Factored(W_Q, W_K.repeat_interleave(ratio, 0)).error_of(U, made.S, V)
        svd, made = _signed(U[:, :d], V[:, :d], made, error)
    modes = HeadModes(
        layer=layer,
        svd=svd,
        G_q=made.G_q,
        G_k=made.G_k,
        geometry=geometry,
        space=HeadSpace(R_q, R_k, made.u, made.v),
        b_q=_query_bias(weights, geometry),
    )
    return modes.to(dtype or model.dtype, model.device)


def query_key_maps(weights: AttentionWeights) -> tuple[Float[Tensor, "h d dh"], Float[Tensor, "g d dh"]]:
    """W_Q and W_K with what is linear in a QK norm folded in: its gain, and its centring where it centres.

    What remains of the norm is one positive factor per query and per key, which moves no direction.
    """
    return _fold_head_norm(weights.W_Q, weights.q_norm), _fold_head_norm(weights.W_K, weights.k_norm)


def _query_bias(weights: AttentionWeights, geometry: AttentionGeometry) -> Float[Tensor, "h dh"]:
    h, _, dh = weights.W_Q.shape
    if weights.b_Q is None or weights.q_norm is not None:
        return torch.zeros(h, dh, dtype=torch.float64)
    return weights.b_Q * geometry.q_scale


def query_key_products(model: Model, layer: int) -> Factored:
    """Ω of every head of a layer as factors, float64, acting on n(resid_pre): what composition scores compare."""
    W_Q, W_K = query_key_maps(fold_attention_norm(model, layer).to(torch.float64, "cpu"))
    return Factored(W_Q.detach(), W_K.detach().repeat_interleave(len(W_Q) // len(W_K), 0))


def value_output_products(model: Model, layer: int) -> Factored:
    """OV of every head as factors, float64: x ↦ x·W_V·W_O, from n(resid_pre) to the residual stream."""
    weights = fold_attention_norm(model, layer).to(torch.float64, "cpu")
    W_V = weights.W_V.detach().repeat_interleave(len(weights.W_Q) // len(weights.W_V), 0)
    return Factored(W_V, weights.W_O.detach().mT)


def _fold_head_norm(W: Tensor, norm: HeadNorm | None) -> Tensor:
    if norm is None:
        return W
    if norm.rule.kind == "layer":
        W = W - (W.mean((0, 2), keepdim=True) if norm.rule.whole else W.mean(-1, keepdim=True))
    return W if norm.gain is None else W * norm.gain[:, None, :]


@dataclass(frozen=True, eq=False)
class _Made:
    u: Tensor
    S: Tensor
    v: Tensor
    driver: str
    G_q: Tensor
    G_k: Tensor


def _modes_of(R_q: Tensor, R_k: Tensor, turn: Tensor, scale: float) -> _Made:
    """The decomposition of R_q·turn·R_kᵀ and maps with G_q·G_kᵀ = scale · turn."""
    u, S, v, driver = decompose(R_q @ turn @ R_k.mT)
    floor = rounding_floor(S)
    inverse = torch.where(floor < S, S, torch.inf).rsqrt()
    G_q = turn @ R_k.mT @ v * inverse[..., None, :]
    G_k = turn.mT @ R_q.mT @ u * inverse[..., None, :]
    for head in (floor >= S).any(-1).nonzero()[:, 0].tolist():
        # G_q·G_kᵀ reaches only part of the head's space here; the unused modes carry the rest of it
        left, size, right = torch.linalg.svd(turn - G_q[head] @ G_k[head].mT)
        empty = S[head] <= floor[head]
        n = int(empty.sum())
        G_q[head][:, empty] = left[:, :n] * size[:n].sqrt()
        G_k[head][:, empty] = right[:n].mT * size[:n].sqrt()
    return _Made(u, S, v, driver, G_q * scale, G_k)


def _signed(U: Tensor, V: Tensor, made: _Made, error: Tensor) -> tuple[FactoredSVD, _Made]:
    """Vectors and maps with canonical joint signs: a change of the head's gauge does not flip them."""
    sign = canonical_sign(U)
    made = replace(made, u=made.u * sign, v=made.v * sign, G_q=made.G_q * sign, G_k=made.G_k * sign)
    return FactoredSVD.of(U * sign, made.S, V * sign, error, made.driver), made
