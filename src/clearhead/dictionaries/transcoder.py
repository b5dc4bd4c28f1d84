"""Transcoder: a sparse dictionary that imitates the map from one site of a layer to another, the MLP by default.

With activation sigma (topk by default) and all vectors as the model computes them at the sites,

    pre_n = w_enc[n] . x + b_enc[n]        values, features = sigma(pre)
    y     = sum_n value_n w_dec[n] + b_dec  [+ x W_skip]

`Sae` (sae.py) is the same module with one site for input and output. What is active is decided by `pre` alone, so with
decoder rows of other norms than 1 a feature's effect is value times |w_dec|. Not here: features that write to several
layers (clt.py), training, initial weights.
"""

import dataclasses
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.dictionaries.activation import ROW_SPARSE, Coded, Codes, activate, compact
from clearhead.dictionaries.dictionary import SavedDictionary
from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.ops.sparse import decode

FeatureActivation = Literal["topk", "batchtopk", "jumprelu", "relu"]
ACTIVATIONS = ("topk", "batchtopk", "jumprelu", "relu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranscoderConfig:
    """Shape of a transcoder or SAE."""

    d_in: int
    """Width of the input site."""
    d_out: int
    """Width of the output site."""
    n_features: int
    """Number of features."""
    k: int
    """Features kept per token (topk); their average for batchtopk; ignored by relu and jumprelu."""
    activation: FeatureActivation = "topk"
    """Which features stay active."""
    skip: bool = False
    """Whether a linear map from input to output stands beside the features."""
    unit_norm: bool = True
    """Training keeps decoder rows at norm 1; where they are free, sparsity terms weigh a feature by its norm."""
    bandwidth: float = 1.0
    """Width of the window in which a jumprelu threshold receives gradient."""

    def __post_init__(self) -> None:
        check_features(self, ("d_in", "d_out", "n_features", "k"))


def check_features(config: Any, counts: tuple[str, ...]) -> None:
    """Refuse counts below 1, more active features than there are, and unknown activations."""
    for name in counts:
        if getattr(config, name) < 1:
            raise ClearheadError(f"{name} must be at least 1 and is {getattr(config, name)}")
    if config.k > config.n_features:
        raise ClearheadError(f"k = {config.k} exceeds the number of features, {config.n_features}; choose a smaller k")
    if config.activation not in ACTIVATIONS:
        raise UnknownNameError("activation", config.activation, ACTIVATIONS)


class Transcoder(SavedDictionary):
    """A dictionary of features for one layer. Parameters (see the module's formulas):

    W_enc [n, d_in]; b_enc [n]; W_dec [n, d_out]; b_dec [d_out]; with `skip` W_skip [d_in, d_out], else None; with
    jumprelu `log_threshold` [n]; with batchtopk the buffer `threshold` [].

    `provenance` says where it belongs: model, layer, input_site and output_site (`mlp_in.L`, `mlp_out.L`).
    """

    KIND: ClassVar[str] = "transcoder"
    CONFIG: ClassVar[type] = TranscoderConfig
    config: TranscoderConfig
    threshold: Tensor

    def __init__(self, config: TranscoderConfig, provenance: dict[str, Any] | None = None):
        super().__init__(config, provenance)
        n = config.n_features
        self.W_enc = nn.Parameter(torch.zeros(n, config.d_in))
        self.b_enc = nn.Parameter(torch.zeros(n))
        self.W_dec = nn.Parameter(torch.zeros(n, config.d_out))
        self.b_dec = nn.Parameter(torch.zeros(config.d_out))
        skip = nn.Parameter(torch.zeros(config.d_in, config.d_out)) if config.skip else None
        self.W_skip: nn.Parameter | None = skip
        if config.activation == "jumprelu":
            self.log_threshold = nn.Parameter(torch.full((n,), -2.0))
        if config.activation == "batchtopk":
            self.register_buffer("threshold", torch.tensor(0.0))

    @property
    def n_units(self) -> int:
        """Number of features, under the name that all dictionaries have for it."""
        return self.config.n_features

    def pre(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows n"]:
        """Pre-activations of all features."""
        return F.linear(x, self.W_enc, self.b_enc)

    def encode(self, x: Float[Tensor, "*rows d"]) -> Codes:
        """Active features per token, as few columns as the busiest token needs."""
        values, features = self._activate(self.pre(x).flatten(0, -2), self.config.k)
        if self.config.activation not in ROW_SPARSE:
            values, features = compact(values, features)
        return Codes(values.view(*x.shape[:-1], -1), features.view(*x.shape[:-1], -1))

    def decode(self, codes: Codes) -> Float[Tensor, "*rows d"]:
        """What the active features write, plus b_dec; the skip connection (`linear`) is not in it."""
        y = decode(codes.values.flatten(0, -2), codes.features.flatten(0, -2), self.W_dec)
        return (y + self.b_dec).view(*codes.values.shape[:-1], -1)

    def linear(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"]:
        """What the skip connection writes: x W_skip, 0 without one."""
        if self.W_skip is None:
            return x.new_zeros(*x.shape[:-1], self.config.d_out)
        return x @ self.W_skip

    def forward(self, x: Float[Tensor, "*rows d"], k: int | None = None) -> Coded:
        """Predict the output; `k` overrides the configured number of active features (annealing)."""
        pre = self.pre(x)
        values, features = self._activate(pre.flatten(0, -2), k or self.config.k)
        if self.config.activation in ROW_SPARSE:
            y = decode(values, features, self.W_dec)
        else:
            y = values @ self.W_dec
        y = (y + self.b_dec).view(*x.shape[:-1], -1)
        if self.W_skip is not None:
            y = y + x @ self.W_skip
        return Coded(y, pre, Codes(values.view(*x.shape[:-1], -1), features.view(*x.shape[:-1], -1)))

    def _activate(self, pre: Float[Tensor, "r n"], k: int) -> tuple[Float[Tensor, "r m"], Int[Tensor, "r m"]]:
        kind = self.config.activation
        return activate(
            pre,
            k,
            kind,
            training=self.training,
            threshold=self.threshold if kind == "batchtopk" else None,
            log_threshold=self.log_threshold if kind == "jumprelu" else None,
            bandwidth=self.config.bandwidth,
            through_all=True,
        )

    def decoder_rows(self, units: Int[Tensor, " m"]) -> Float[Tensor, "m d"]:
        """What these features write."""
        return self.W_dec[units]

    def decoder_norms(self) -> Float[Tensor, " n"]:
        """Norm of every feature's write."""
        return self.W_dec.norm(dim=-1)

    @torch.no_grad()
    def normalise_decoder(self) -> None:
        """Bring every |w_dec| to 1 and carry the norm into the encoder and the threshold, in place.

        y is unchanged for relu and jumprelu, and for the top-k kinds where the norms agree. A feature with w_dec = 0
        keeps its zero vector.
        """
        norm = self.decoder_norms()
        norm = torch.where(norm == 0, torch.ones_like(norm), norm)
        self.W_dec /= norm[:, None]
        self.W_enc *= norm[:, None]
        self.b_enc *= norm
        if self.config.activation == "jumprelu":
            self.log_threshold += norm.log()

    @torch.no_grad()
    def fold_scales(self, input_scale: float, output_scale: float) -> Self:
        """Rewrite, in place, a module trained on (input_scale * x -> output_scale * y) as one on (x -> y).

        Exact for every activation: decoder rows stay as they are, and activations and thresholds are then measured
        in units of the output.
        """
        self.W_enc *= input_scale / output_scale
        self.b_enc /= output_scale
        self.b_dec /= output_scale
        if self.W_skip is not None:
            self.W_skip.mul_(input_scale / output_scale)
        if self.config.activation == "jumprelu":
            self.log_threshold -= torch.log(torch.tensor(output_scale))
        if self.config.activation == "batchtopk":
            self.threshold /= output_scale
        return self
