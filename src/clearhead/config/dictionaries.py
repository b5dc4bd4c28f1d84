"""The verbs that train a dictionary other than a Lorsa, and what all trainings of dictionaries share."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

from clearhead.config.verb import Layers, OfLayers, resolve_layer

FeatureActivation = Literal["topk", "batchtopk", "jumprelu", "relu"]
TranscoderSite = Literal["mlp", "attention"]
Tracker = Literal["none", "wandb", "trackio", "tensorboard"]


@dataclass(frozen=True, kw_only=True)
class OfMixture(OfLayers):
    """The verbs that read a text to train on, and random tokens repeated among it if asked to."""

    repeat_share: float = 0.0
    """Share of the blocks that are random tokens repeated, as a model of `clearhead pretrain` saw them."""

    def validate(self) -> None:
        """Some text is left, and blocks are long enough to repeat."""
        super().validate()
        self._refuse(not 0 <= self.repeat_share < 1, "repeat-share", "give a share from 0 up to, not including, 1")
        self._refuse(self.repeat_share > 0 and self.context < 8, "context", "a repeated sequence needs 8 tokens")


@dataclass(frozen=True, kw_only=True)
class TrainDictionary(OfMixture):
    """What every training of a dictionary is told: how long, how fast, how sparse, where to."""

    seed: int = 0
    """Seed of every random choice; the batch order is a function of seed and step alone."""
    tokens: int = 400_000
    """Tokens to train on; more than the text holds means several epochs, reshuffled each time."""
    k: int = 32
    """Units active per token."""
    lr: float = 1e-3
    """Peak learning rate of Adam."""
    batch_tokens: int = 256
    """Tokens per step, a multiple of the context. At a fixed number of tokens, more steps beat larger ones."""
    warmup_share: float = 0.02
    """Share of the steps over which the learning rate rises from 0."""
    decay_share: float = 0.7
    """Share of the steps, at the end, over which the learning rate falls to 2 % of its peak."""
    k_anneal_share: float = 0.2
    """Share of the steps over which K falls to its final value."""
    k_start_factor: float = 4.0
    """K at the first step, as a multiple of its final value."""
    aux_k: int = 256
    """Dead units that help to predict what the active ones missed (AuxK); 0 turns it off."""
    dead_after_tokens: int = 10_000
    """A unit that was active nowhere in this many tokens counts as dead for AuxK."""
    grad_clip: float = 0.0
    """Largest gradient norm; 0 turns clipping off."""
    bf16: bool = False
    """Compute the dictionary in bfloat16 with float32 weights; slower than float32 on most CPUs."""
    checkpoint_every: int = 200
    """Steps between checkpoints; Ctrl-C writes one too."""
    tracker: Tracker = "none"
    """Where metrics go besides metrics.jsonl."""
    out: Path | None = None
    """Run directory. Derived from the model, the layer and the sizes."""
    resume: bool = True
    """Continue a run directory that holds the same configuration; otherwise refuse to write into it."""

    def validate(self) -> None:
        """Counts are positive, blocks fill the batch, shares are shares."""
        super().validate()
        self._positive("tokens", "k", "lr", "checkpoint-every", "dead-after-tokens", "k-start-factor")
        self._refuse(
            self.batch_tokens < self.context or self.batch_tokens % self.context != 0,
            "batch-tokens",
            f"a batch holds whole blocks; give a multiple of --context {self.context}",
        )
        for share in ("warmup-share", "decay-share", "k-anneal-share"):
            self._refuse(not 0 <= getattr(self, share.replace("-", "_")) <= 1, share, "a share lies between 0 and 1")
        self._refuse(self.warmup_share + self.decay_share > 1, "warmup-share", "more than --decay-share leaves")
        for option in ("aux-k", "grad-clip"):
            self._refuse(getattr(self, option.replace("-", "_")) < 0, option, "give 0 to turn it off")

    def steps(self) -> int:
        """Optimiser steps: tokens divided by tokens per step, rounded up."""
        return -(-self.tokens // self.batch_tokens)


@dataclass(frozen=True, kw_only=True)
class TrainFeatures(TrainDictionary):
    """What the trainings of transcoders, cross-layer transcoders and SAEs share."""

    features: int | None = None
    """Number of features, of each layer. Derived: 4 times the model's width."""
    k: int = 32
    """Features active per token (and layer); the mean of them for batchtopk. Not used by relu and jumprelu."""
    activation: FeatureActivation = "topk"
    """Which features stay active at a token."""
    lr: float = 2e-3
    """Peak learning rate of Adam; narrow models (width 128) and short trainings take twice that."""
    sparsity: float = 0.0
    """Weight of the sparsity term of relu (L1) and jumprelu (tanh), rising from 0; the others have none."""
    pre_weight: float = 3e-6
    """Weight of the term that pulls pre-activations of silent jumprelu features up to their threshold."""

    def validate(self) -> None:
        """Besides what all trainings check: K fits into the features, and sparsity has one source."""
        super().validate()
        self._positive("features")
        if self.features is not None:
            self._refuse(self.k > self.features, "k", f"at most all {self.features} can be active; see --features")
        self._refuse(self.pre_weight < 0, "pre-weight", "give 0 to turn it off")
        kind, by_weight = self.activation, self.activation in ("relu", "jumprelu")
        advice = "begin with --sparsity 1 and raise it until the l0 in metrics.jsonl is low enough"
        self._refuse(by_weight and self.sparsity <= 0, "sparsity", f"nothing else makes {kind} sparse; {advice}")
        self._refuse(not by_weight and self.sparsity != 0, "sparsity", f"{kind} is sparse by --k; leave this out")

    def sized(self, d_model: int) -> Self:
        """The same configuration with the number of features filled in; validated again."""
        return dataclasses.replace(self, features=4 * d_model if self.features is None else self.features)


@dataclass(frozen=True, kw_only=True)
class TrainTranscoder(TrainFeatures):
    """Train a transcoder: sparse features that together reproduce the map of one layer's MLP."""

    verb: ClassVar[str] = "train transcoder"

    layer: Layers = None
    """Layer whose MLP is imitated, negative from the end; or several, as 5,12,17 or all. Derived: the middle layer."""
    site: TranscoderSite = "mlp"
    """What is imitated: mlp, or attention, token by token from its input."""
    skip: bool = False
    """Add a linear map from input to output beside the features."""
    store: Path | None = None
    """Store of `clearhead harvest`, or folder of several. Derived: none, computed as needed; several: made in --out."""
    out: Path | None = None
    """Run directory. Derived: runs/<model>-<layer>-transcoder-f<features>-k<k>, for attention attention-transcoder."""

    def resolved(self, *, n_layers: int, d_model: int) -> Self:
        """The same configuration with every derived field filled in from the model's shape; validated again."""
        resolved = dataclasses.replace(self.sized(d_model), layer=resolve_layer(self.layer, n_layers))
        return dataclasses.replace(resolved, out=resolved.directory())

    def directory(self) -> Path:
        """The run directory; defined once `layer` and `features` are."""
        kind = "transcoder" if self.site == "mlp" else "attention-transcoder"
        return self.out or Path("runs") / f"{Path(self.model).name}-{self.layer}-{kind}-f{self.features}-k{self.k}"

    def sites(self) -> tuple[str, str]:
        """The sites of input and output, without their layer."""
        return ("mlp_in", "mlp_out") if self.site == "mlp" else ("attn_in", "attn_out")


@dataclass(frozen=True, kw_only=True)
class TrainSae(TrainFeatures):
    """Train a sparse autoencoder: features whose sum reproduces the values at one site."""

    verb: ClassVar[str] = "train sae"

    layer: Layers = None
    """Layer of the site, negative from the end; or several, as 5,12,17 or all. Derived: the middle layer."""
    site: str = "resid_post"
    """Site without its layer: resid_pre, resid_mid, resid_post, attn_in, attn_out, mlp_in, mlp_out."""
    store: Path | None = None
    """Store of `clearhead harvest`, or folder of several. Derived: none, computed as needed; several: made in --out."""
    out: Path | None = None
    """Run directory. Derived: runs/<model>-<site>-<layer>-sae-f<features>-k<k>."""

    def validate(self) -> None:
        """Besides what all trainings of features check: the site is one of the residual width."""
        super().validate()
        self._refuse(self.site not in SAE_SITES, "site", f"give one of {', '.join(SAE_SITES)}, and --layer apart")

    def resolved(self, *, n_layers: int, d_model: int) -> Self:
        """The same configuration with every derived field filled in from the model's shape; validated again."""
        resolved = dataclasses.replace(self.sized(d_model), layer=resolve_layer(self.layer, n_layers))
        return dataclasses.replace(resolved, out=resolved.directory())

    def directory(self) -> Path:
        """The run directory; defined once `layer` and `features` are."""
        name = f"{Path(self.model).name}-{self.site}-{self.layer}-sae-f{self.features}-k{self.k}"
        return self.out or Path("runs") / name

    def sites(self) -> tuple[str, str]:
        """The site as input and as output, without its layer."""
        return self.site, self.site


@dataclass(frozen=True, kw_only=True)
class TrainClt(TrainFeatures):
    """Train a cross-layer transcoder: features of every layer that write to all MLP outputs above it."""

    verb: ClassVar[str] = "train clt"

    layer: int | None = None
    """Means nothing here: a cross-layer transcoder spans all layers."""
    out: Path | None = None
    """Run directory. Derived: runs/<model>-clt-f<features>-k<k>."""

    def validate(self) -> None:
        """Besides what all trainings of features check: no layer is chosen."""
        super().validate()
        self._meaningless(("layer",), "a cross-layer transcoder spans all layers")

    def resolved(self, *, d_model: int) -> Self:
        """The same configuration with every derived field filled in from the model's width; validated again."""
        resolved = self.sized(d_model)
        return dataclasses.replace(resolved, out=resolved.directory())

    def directory(self) -> Path:
        """The run directory; defined once `features` is."""
        return self.out or Path("runs") / f"{Path(self.model).name}-clt-f{self.features}-k{self.k}"


SAE_SITES = ("resid_pre", "resid_mid", "resid_post", "attn_in", "attn_out", "mlp_in", "mlp_out")
