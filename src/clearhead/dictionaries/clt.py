"""Cross-layer transcoder: features read one layer's MLP input and write to the MLP outputs of that layer and all above.

For a model of L layers, with x_l the input and y_m the output of the MLPs,

    pre_{l,n} = w_enc[l, n] . x_l + b_enc[l, n]           values, features = sigma(pre)
    y_m       = sum_{l <= m} sum_n value_{l,n} W_dec[l][n, m - l] + b_dec[m]

A feature's norm is that of its concatenated decoders. topk keeps k features of each layer, batchtopk k * L over all
layers of a batch. Whole forward passes number the units l * n_features + n. Caution: a cross-layer transcoder can skip
steps that the model takes, and so be right about the output for another reason than the model is; per-layer
transcoders cannot. Not here: features for attention outputs, skip connections.
"""

import dataclasses
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.dictionaries.activation import ROW_SPARSE, Coded, Codes, activate, compact
from clearhead.dictionaries.dictionary import SavedDictionary
from clearhead.dictionaries.transcoder import FeatureActivation, check_features
from clearhead.errors import ClearheadError
from clearhead.ops.sparse import decode


@dataclasses.dataclass(frozen=True, kw_only=True)
class CltConfig:
    """Shape of a cross-layer transcoder."""

    d_model: int
    """Width of the residual stream."""
    n_layers: int
    """Number of layers of the model (L)."""
    n_features: int
    """Number of features of each layer."""
    k: int
    """Features kept per token and layer (topk); their average for batchtopk; ignored by relu and jumprelu."""
    activation: FeatureActivation = "topk"
    """Which features stay active."""
    unit_norm: bool = True
    """Training keeps concatenated decoders at norm 1; where they are free, sparsity terms weigh a feature by its norm.
    """
    bandwidth: float = 1.0
    """Width of the window in which a jumprelu threshold receives gradient."""

    def __post_init__(self) -> None:
        check_features(self, ("d_model", "n_layers", "n_features", "k"))


class Clt(SavedDictionary):
    """Features of all layers of a model. Parameters (see the module's formulas):

    W_enc [L, n, d]; b_enc [L, n]; W_dec, a list of L: [n, L - l, d]; b_dec [L, d]; with jumprelu `log_threshold`
    [L, n]; with batchtopk the buffer `threshold` [].
    """

    KIND: ClassVar[str] = "clt"
    CONFIG: ClassVar[type] = CltConfig
    config: CltConfig
    threshold: Tensor

    def __init__(self, config: CltConfig, provenance: dict[str, Any] | None = None):
        super().__init__(config, provenance)
        layers, n, d = config.n_layers, config.n_features, config.d_model
        self.W_enc = nn.Parameter(torch.zeros(layers, n, d))
        self.b_enc = nn.Parameter(torch.zeros(layers, n))
        self.W_dec = nn.ParameterList([nn.Parameter(torch.zeros(n, layers - layer, d)) for layer in range(layers)])
        self.b_dec = nn.Parameter(torch.zeros(layers, d))
        if config.activation == "jumprelu":
            self.log_threshold = nn.Parameter(torch.full((layers, n), -2.0))
        if config.activation == "batchtopk":
            self.register_buffer("threshold", torch.tensor(0.0))

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return self.config.n_layers

    @property
    def n_units(self) -> int:
        """Number of features of all layers together."""
        return self.config.n_layers * self.config.n_features

    def pre(self, layer: int, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows n"]:
        """Pre-activations of one layer's features, from that layer's MLP input."""
        self._check(layer)
        return F.linear(x, self.W_enc[layer], self.b_enc[layer])

    def encode(self, layer: int, x: Float[Tensor, "*rows d"]) -> Codes:
        """Active features of one layer per token, numbered within the layer; as few columns as the busiest needs."""
        pre = self.pre(layer, x).flatten(0, -2)
        kind = self.config.activation
        values, features = self._activate(pre, self.config.k, layer)
        if kind not in ROW_SPARSE:
            values, features = compact(values, features)
        return Codes(values.view(*x.shape[:-1], -1), features.view(*x.shape[:-1], -1))

    def writes(self, layer: int, codes: Codes) -> Float[Tensor, "*rows m d"]:
        """What active features of one layer write to the MLP outputs of layers `layer` to L - 1, biases left out."""
        self._check(layer)
        rows = codes.values.flatten(0, -2), codes.features.flatten(0, -2)
        y = decode(*rows, self.W_dec[layer].flatten(1))
        return y.view(*codes.values.shape[:-1], self.n_layers - layer, self.config.d_model)

    def forward(self, x: Float[Tensor, "*rows l d"], k: int | None = None) -> Coded:
        """Predict the MLP outputs of all layers from their MLP inputs; `k` overrides the configured number (annealing).

        y is [*rows, l, d]; pre-activations and codes run over all L * n units.
        """
        c = self.config
        k = k or c.k
        rows = x.reshape(-1, c.n_layers, c.d_model)
        pre = torch.einsum("rld,lnd->rln", rows, self.W_enc) + self.b_enc
        if c.activation == "batchtopk":
            values, units = self._activate(pre.flatten(1), k * c.n_layers, None)
            coded = list(values.split(c.n_features, 1))
            written = [part @ self.W_dec[layer].flatten(1) for layer, part in enumerate(coded)]
        else:
            codes = [self._activate(pre[:, layer], k, layer) for layer in range(c.n_layers)]
            values = torch.cat([code[0] for code in codes], 1)
            units = torch.cat([code[1] + layer * c.n_features for layer, code in enumerate(codes)], 1)
            if c.activation in ROW_SPARSE:
                written = [decode(*code, self.W_dec[layer].flatten(1)) for layer, code in enumerate(codes)]
            else:
                written = [code[0] @ self.W_dec[layer].flatten(1) for layer, code in enumerate(codes)]
        y = self.b_dec.expand(len(rows), -1, -1)
        for layer, part in enumerate(written):
            y = y + F.pad(part.view(len(rows), -1, c.d_model), (0, 0, layer, 0))
        shape = x.shape[:-2]
        codes = Codes(values.view(*shape, -1), units.view(*shape, -1))
        return Coded(y.view(*shape, c.n_layers, c.d_model), pre.reshape(*shape, self.n_units), codes)

    def _activate(
        self, pre: Float[Tensor, "r n"], k: int, layer: int | None
    ) -> tuple[Float[Tensor, "r m"], Int[Tensor, "r m"]]:
        kind = self.config.activation
        return activate(
            pre,
            k,
            kind,
            training=self.training,
            threshold=self.threshold if kind == "batchtopk" else None,
            log_threshold=self.log_threshold[layer] if kind == "jumprelu" else None,
            bandwidth=self.config.bandwidth,
            through_all=True,
        )

    def _check(self, layer: int) -> None:
        if not 0 <= layer < self.n_layers:
            raise ClearheadError(f"there is no layer {layer}: the dictionary has layers 0 to {self.n_layers - 1}")

    def decoder_rows(self, units: Int[Tensor, " m"]) -> Float[Tensor, "m e"]:
        """What these units write to all layers, concatenated (e = L * d); zeros below a unit's own layer."""
        c = self.config
        layer, feature = units // c.n_features, units % c.n_features
        rows = []
        for own in range(c.n_layers):
            written = self.W_dec[own][feature[layer == own]]
            rows.append(F.pad(written, (0, 0, own, 0)).flatten(1))
        order = torch.cat([(layer == own).nonzero().squeeze(1) for own in range(c.n_layers)])
        return torch.cat(rows)[order.argsort()]

    def decoder_norms(self) -> Float[Tensor, " n"]:
        """Norm of every unit's concatenated decoders."""
        return torch.cat([weight.flatten(1).norm(dim=-1) for weight in self.W_dec])

    @torch.no_grad()
    def normalise_decoder(self) -> None:
        """Bring the norm of all concatenated decoders to 1 and carry it into encoders and thresholds, in place.

        y is unchanged for relu and jumprelu, and for the top-k kinds where the norms agree.
        """
        norm = self.decoder_norms().view(self.n_layers, -1)
        norm = torch.where(norm == 0, torch.ones_like(norm), norm)
        for layer in range(self.n_layers):
            self.W_dec[layer] /= norm[layer, :, None, None]
        self.W_enc *= norm[..., None]
        self.b_enc *= norm
        if self.config.activation == "jumprelu":
            self.log_threshold += norm.log()

    @torch.no_grad()
    def fold_scales(self, input_scale: Float[Tensor, "l 1"], output_scale: Float[Tensor, "l 1"]) -> "Clt":
        """Rewrite, in place, a module trained on (input_scale * x -> output_scale * y) as one on (x -> y).

        Activations and thresholds stay; decoders are divided by the scale of the layer they write to.
        """
        self.W_enc *= input_scale[..., None].to(self.W_enc)
        scale = output_scale.to(self.b_dec)
        self.b_dec /= scale
        for layer in range(self.n_layers):
            self.W_dec[layer] /= scale[layer:]
        return self
