"""Lorsa: low-rank sparse attention, a dictionary of rank-1 heads that imitates one attention layer.

For an input x [b, t, d] (what the attention module receives), groups g and heads n (arXiv 2504.20938, section 3):

    q_g = R( N( W_Q[g] x + b_Q[g] ) )      k_g = R( N( W_K[g] x + b_K[g] ) )      R rotation, N optional RMS norm
    v_n = w_v[n] . x + b_V[n]                                                     one scalar per token and head
    pre_n,i = sum_{j<=i} softmax_j( scale * (a_p * q_g,i) . k_g,j ) v_n,j         p = n // (n_heads / n_patterns)
    z       = act( pre * |w_o| ) / |w_o|                                          few heads stay active
    y       = sum_n z_n w_o[n] + b_D                                              the predicted attention output

A group forms `patterns_per_group` patterns p, consecutive heads share one, and a_p is the pattern's gate over the
group's coordinates: one number per plane of the rotation, which both of its components share and the rotation leaves
alone, and one per component that does not turn. With one pattern per group there is no gate (the paper's Lorsa).

Rotation, scale, window, soft-cap, sinks and query-key norms are the host model's own; nothing is typed by hand.
Rows of the pattern sum to 1, so b_V acts as the bias of the pre-activation (with a sink the row sum is below 1).
Training, losses and schedules are in `clearhead.training`; how the weights start is in `dictionaries.init`.
"""

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.dictionaries.activation import ROW_SPARSE, Activation, activate, compact
from clearhead.dictionaries.dictionary import SavedDictionary
from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.rope import RopeSpec, rotate
from clearhead.ops.lorsa import attend, attend_topk, pattern
from clearhead.ops.rotation import Rotation
from clearhead.ops.sparse import decode

ACTIVATIONS = ("topk", "signed-topk", "batchtopk", "jumprelu", "relu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LorsaConfig:
    """Shape and fixed geometry of a Lorsa; everything below `patterns_per_group` is derived from the host model."""

    d_model: int
    """Width of the residual stream."""
    n_heads: int
    """Number of rank-1 heads (H in the paper)."""
    n_groups: int
    """Number of query-key groups; consecutive heads share one."""
    d_qk: int
    """Width of queries and keys."""
    k: int
    """Heads kept per token (top-k kinds); the average for batchtopk; ignored by relu and jumprelu."""
    activation: Activation = "topk"
    """Which heads stay active."""
    patterns_per_group: int = 1
    """Attention patterns that each group forms; above 1 each has its own gate over the group's coordinates."""
    scale: float = 1.0
    """Factor on q.k before the softmax."""
    rope: dict[str, Any] | None = None
    """Rotation of queries and keys (`RopeSpec.to_dict`), None without one."""
    qk_norm: Literal["rms", "layer"] | None = None
    """Norm of each query and key vector before the rotation, with trained gains."""
    qk_norm_eps: float = 0.0
    """Epsilon of that norm."""
    window: int | None = None
    """Sliding window: a query sees this many keys, itself included."""
    softcap: float | None = None
    """Scores are squashed to +-softcap by tanh."""
    sinks: bool = False
    """A learned logit per pattern joins the softmax and carries no value."""
    unit_norm: bool = True
    """Decoder rows have norm 1, so the gate by |w_o| costs nothing; False keeps free norms and gates by them."""
    bandwidth: float = 0.1
    """Width of the window in which a jumprelu threshold receives gradient."""

    def __post_init__(self) -> None:
        for name in ("d_model", "n_heads", "n_groups", "d_qk", "k", "patterns_per_group"):
            if getattr(self, name) < 1:
                raise ClearheadError(f"{name} must be at least 1 and is {getattr(self, name)}")
        if self.n_heads % self.n_groups:
            raise ClearheadError(
                f"{self.n_heads} heads cannot be shared evenly by {self.n_groups} query-key groups; "
                f"choose a number of groups that divides the number of heads"
            )
        if self.group_size % self.patterns_per_group:
            raise ClearheadError(
                f"a group's {self.group_size} heads cannot share {self.patterns_per_group} patterns evenly; "
                f"choose a number of patterns per group that divides them"
            )
        if self.k > self.n_heads:
            raise ClearheadError(f"k = {self.k} exceeds the number of heads, {self.n_heads}; choose a smaller --k")
        if self.activation not in ACTIVATIONS:
            raise UnknownNameError("activation", self.activation, ACTIVATIONS)

    @property
    def group_size(self) -> int:
        """Heads per query-key group (G in the paper)."""
        return self.n_heads // self.n_groups

    @property
    def n_patterns(self) -> int:
        """Attention patterns of all groups."""
        return self.n_groups * self.patterns_per_group

    @property
    def pattern_size(self) -> int:
        """Heads per attention pattern."""
        return self.n_heads // self.n_patterns

    @property
    def coordinates(self) -> list[int]:
        """By component of a query, the coordinate whose gate scales it."""
        if self.rope is None:
            return coordinates(self.d_qk, 0, False)
        return coordinates(self.d_qk, self.rope["rotary_dim"], self.rope["interleaved"])


def coordinates(width: int, turning: int, interleaved: bool) -> list[int]:
    """What each component of a query belongs to: a plane of the rotation, or, where it does not turn, itself.

    The first `turning` components turn, in planes (2i, 2i+1) or (i, i + turning/2); planes are counted first.
    """
    half = turning // 2
    planes = [i // 2 if interleaved else i % half for i in range(turning)]
    return planes + [i - half for i in range(turning, width)]


class Codes(NamedTuple):
    """Active heads per token; where fewer are active than the last axis holds, the rest have value 0."""

    values: Float[Tensor, "*rows k"]
    heads: Int[Tensor, "*rows k"]


class LorsaOutput(NamedTuple):
    """What one forward pass computes."""

    y: Float[Tensor, "b t d"]
    """Predicted attention output."""
    pre: Float[Tensor, "b t n"]
    """Pre-activations of all heads."""
    codes: Codes
    """Activations; for relu, jumprelu and batchtopk all heads are listed and most values are 0."""


class Lorsa(SavedDictionary):
    """A dictionary of rank-1 attention heads for one layer. Parameters (see the module's formulas):

    W_Q, W_K [g, dh, d]; W_V, W_O [n, d]; b_Q, b_K [g, dh]; b_V [n]; b_D [d]; with qk_norm also q_gain and k_gain
    [g, dh]; with several patterns per group `qk_gate` [p, c], all 1 at first; with sinks `sink` [p]; with jumprelu
    `log_threshold` [n]; with batchtopk the buffer `threshold` [].
    """

    KIND: ClassVar[str] = "lorsa"
    CONFIG: ClassVar[type] = LorsaConfig
    config: LorsaConfig

    def __init__(self, config: LorsaConfig, provenance: dict[str, Any] | None = None):
        super().__init__(config, provenance)
        g, dh, d, n = config.n_groups, config.d_qk, config.d_model, config.n_heads
        self.W_Q = nn.Parameter(torch.zeros(g, dh, d))
        self.W_K = nn.Parameter(torch.zeros(g, dh, d))
        self.W_V = nn.Parameter(torch.zeros(n, d))
        self.W_O = nn.Parameter(torch.zeros(n, d))
        self.b_Q = nn.Parameter(torch.zeros(g, dh))
        self.b_K = nn.Parameter(torch.zeros(g, dh))
        self.b_V = nn.Parameter(torch.zeros(n))
        self.b_D = nn.Parameter(torch.zeros(d))
        if config.qk_norm:
            self.q_gain = nn.Parameter(torch.ones(g, dh))
            self.k_gain = nn.Parameter(torch.ones(g, dh))
        if config.sinks:
            self.sink = nn.Parameter(torch.zeros(config.n_patterns))
        if config.patterns_per_group > 1:
            self.register_buffer("_coordinates", torch.tensor(config.coordinates), persistent=False)
            self.qk_gate = nn.Parameter(torch.ones(config.n_patterns, max(config.coordinates) + 1))
        if config.activation == "jumprelu":
            self.log_threshold = nn.Parameter(torch.full((n,), -3.0))
        if config.activation == "batchtopk":
            self.register_buffer("threshold", torch.tensor(0.0))
        self.rope = RopeSpec.from_dict(config.rope) if config.rope else None
        self._tables: tuple[Tensor, Tensor] | None = None

    @property
    def n_heads(self) -> int:
        """Number of rank-1 heads."""
        return self.config.n_heads

    def gates(self) -> Float[Tensor, "p dh"]:
        """What each pattern multiplies its group's queries by; 1 where groups form one pattern only."""
        if self.config.patterns_per_group == 1:
            return self.W_Q.new_ones(self.config.n_patterns, self.config.d_qk)
        return self.qk_gate[:, self.get_buffer("_coordinates")]

    def queries_keys(self, x: Float[Tensor, "b t d"]) -> tuple[Float[Tensor, "b p t dh"], Float[Tensor, "b p t dh"]]:
        """Queries and keys of every pattern as they are scored: normed, gated and rotated."""
        q, k = self._unrotated(x)
        if self.rope is not None:
            cos, sin = self._tables_for(x)
            q, k = rotate(q, cos, sin, self.rope), rotate(k, cos, sin, self.rope)
        return q, k

    def values(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t n"]:
        """The scalar that each head moves from each token: v_n = w_v[n] . x + b_V[n]."""
        return F.linear(x, self.W_V, self.b_V)

    def pre_activations(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t n"]:
        """Attention-weighted values of all heads, before any is switched off."""
        q, k = self._unrotated(x)
        return attend(q, k, self.values(x), rotation=self._rotation(x), **self._geometry())

    def patterns(self, x: Float[Tensor, "b t d"], which: Int[Tensor, " m"] | None = None) -> Float[Tensor, "b m q k"]:
        """The given attention patterns (all by default), computed explicitly."""
        q, k = self.queries_keys(x)
        geometry = self._geometry()
        if which is not None:
            q, k = q[:, which], k[:, which]
            if geometry["sink"] is not None:
                geometry["sink"] = geometry["sink"][which]
        return pattern(q, k, **geometry)

    def forward(self, x: Float[Tensor, "b t d"], k: int | None = None) -> LorsaOutput:
        """Predict the attention output; `k` overrides the configured number of active heads (annealing)."""
        k = k or self.config.k
        if self.config.activation in ROW_SPARSE and self.config.unit_norm:
            signed = self.config.activation == "signed-topk"
            queries, keys = self._unrotated(x)
            values, heads, pre = attend_topk(
                queries,
                keys,
                self.values(x),
                k,
                signed=signed,
                rotation=self._rotation(x),
                consume=self.training,
                **self._geometry(),
            )
            y = decode(values, heads, self.W_O)
        else:
            pre = self.pre_activations(x)
            values, heads = self._activate(pre.flatten(0, 1), k)
            if heads.shape[-1] == self.n_heads:
                y = values @ self.W_O
            else:
                y = decode(values, heads, self.W_O)
        shape = x.shape[:2]
        codes = Codes(values.view(*shape, -1), heads.view(*shape, -1))
        return LorsaOutput((y + self.b_D).view(*shape, -1), pre, codes)

    def encode(self, x: Float[Tensor, "b t d"]) -> Codes:
        """Active heads per token, as few columns as the busiest token needs."""
        pre = self.pre_activations(x)
        values, heads = self._activate(pre.flatten(0, 1), self.config.k)
        if self.config.activation not in ROW_SPARSE:
            values, heads = compact(values, heads)
        return Codes(values.view(*x.shape[:2], -1), heads.view(*x.shape[:2], -1))

    def decode(self, codes: Codes) -> Float[Tensor, "b t d"]:
        """Y = sum over the active heads of value times w_o, plus b_D."""
        shape = codes.values.shape[:-1]
        y = decode(codes.values.flatten(0, -2), codes.heads.flatten(0, -2), self.W_O)
        return (y + self.b_D).view(*shape, -1)

    def _activate(self, pre: Float[Tensor, "r n"], k: int) -> tuple[Float[Tensor, "r m"], Int[Tensor, "r m"]]:
        norm = None if self.config.unit_norm else self.W_O.norm(dim=-1)
        gate = pre if norm is None else pre * norm
        kind = self.config.activation
        values, heads = activate(
            gate,
            k,
            kind,
            training=self.training,
            threshold=self.threshold if kind == "batchtopk" else None,
            log_threshold=self.log_threshold if kind == "jumprelu" else None,
            bandwidth=self.config.bandwidth,
        )
        if norm is not None:
            values = values / norm[heads]
        return values, heads

    @property
    def n_units(self) -> int:
        """Number of rank-1 heads, under the name that all dictionaries have for it."""
        return self.config.n_heads

    def decoder_rows(self, units: Int[Tensor, " m"]) -> Float[Tensor, "m d"]:
        """What these heads write."""
        return self.W_O[units]

    def decoder_norms(self) -> Float[Tensor, " n"]:
        """Norm of every head's write."""
        return self.W_O.norm(dim=-1)

    def _project(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        g, dh, d = weight.shape
        return F.linear(x, weight.view(g * dh, d), bias.view(-1)).view(*x.shape[:2], g, dh).transpose(1, 2)

    def _norm(self, vectors: Tensor, gain: Tensor) -> Tensor:
        if self.config.qk_norm == "rms":
            normed = F.rms_norm(vectors, vectors.shape[-1:], eps=self.config.qk_norm_eps)
        else:
            normed = F.layer_norm(vectors, vectors.shape[-1:], eps=self.config.qk_norm_eps)
        return normed * gain[:, None]

    def _unrotated(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys before the rotation, which `attend` does more cheaply."""
        q = self._project(x, self.W_Q, self.b_Q)
        k = self._project(x, self.W_K, self.b_K)
        if self.config.qk_norm:
            q, k = self._norm(q, self.q_gain), self._norm(k, self.k_gain)
        return (q, k) if self.config.patterns_per_group == 1 else self._per_pattern(q, k)

    def _per_pattern(
        self, q: Float[Tensor, "b g t dh"], k: Float[Tensor, "b g t dh"]
    ) -> tuple[Float[Tensor, "b p t dh"], Float[Tensor, "b p t dh"]]:
        """Each pattern's queries and keys, in memory of their own: `attend_topk` may write gradients over them."""
        gates = self.gates().view(q.shape[1], -1, q.shape[-1])
        q, k = (side.transpose(1, 2)[:, :, :, None] for side in (q, k))
        # laid out as [b, t, p, dh], as the projections are
        q, k = q * gates, k.expand(-1, -1, -1, gates.shape[1], -1).contiguous()
        return q.flatten(2, 3).transpose(1, 2), k.flatten(2, 3).transpose(1, 2)

    def _rotation(self, x: Tensor) -> Rotation | None:
        return None if self.rope is None else Rotation(*self._tables_for(x), self.rope.interleaved)

    def _tables_for(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tables, t = self._tables, x.shape[1]
        if tables is None or len(tables[0]) < t or tables[0].device != x.device or tables[0].dtype != x.dtype:
            positions = torch.arange(t, device=x.device)
            tables = self._tables = cast(RopeSpec, self.rope).tables(positions, dtype=x.dtype)
        return tables[0][:t], tables[1][:t]

    def _geometry(self) -> dict[str, Any]:
        c = self.config
        return {"scale": c.scale, "window": c.window, "softcap": c.softcap, "sink": self.sink if c.sinks else None}

    @torch.no_grad()
    def normalise_decoder(self) -> None:
        """Bring every |w_o| to 1 and carry the norm into w_v and b_V, in place; y is unchanged.

        Exact for every activation: the gate of a unit-norm head equals the gate of the free-norm head.
        A head with w_o = 0 never contributes and keeps its zero vector.
        """
        norm = self.W_O.norm(dim=-1)
        norm = torch.where(norm == 0, torch.ones_like(norm), norm)
        self.W_O /= norm[:, None]
        self.W_V *= norm[:, None]
        self.b_V *= norm

    @torch.no_grad()
    def unit_normed(self) -> "Lorsa":
        """The same function with |w_o| = 1 for every head (exact for every activation)."""
        twin = Lorsa(dataclasses.replace(self.config, unit_norm=True), dict(self.provenance))
        twin = twin.to(device=self.W_O.device, dtype=self.W_O.dtype)
        twin.load_state_dict(self.state_dict())
        twin.normalise_decoder()
        return twin.train(self.training)

    @torch.no_grad()
    def fold_scales(self, input_scale: float, output_scale: float) -> "Lorsa":
        """Rewrite, in place, a Lorsa trained on (input_scale * x -> output_scale * y) as one on (x -> y).

        Exact for every activation: the gate is measured in units of the output, so thresholds are divided by
        output_scale together with w_o.
        """
        for weight in (self.W_Q, self.W_K, self.W_V):
            weight *= input_scale
        self.b_D /= output_scale
        if self.config.unit_norm:
            self.W_V /= output_scale
            self.b_V /= output_scale
        else:
            self.W_O /= output_scale
        if self.config.activation == "jumprelu":
            self.log_threshold -= torch.log(torch.tensor(output_scale))
        if self.config.activation == "batchtopk":
            self.threshold /= output_scale
        return self
