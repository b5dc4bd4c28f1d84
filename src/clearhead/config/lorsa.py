"""The verbs of a Lorsa: harvest, train, evaluate, analyze, and the demo that chains them."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tyro.conf import Positional

from clearhead.config.dictionaries import SAE_SITES, OfMixture, TrainDictionary
from clearhead.config.verb import Dtype, Split, Verb, resolve_layer

Activation = Literal["topk", "batchtopk", "jumprelu", "relu", "signed-topk"]
Initialisation = Literal["data", "original", "random", "reference"]


@dataclass(frozen=True, kw_only=True)
class OfRun(Verb):
    """The verbs that start from a finished training run; model, layer and context are read from its config.json."""

    run: Positional[Path]
    """Directory written by `clearhead train lorsa`."""
    text: str | None = None
    """Text to measure on, as for training. Derived: the run's own, from its held-out part."""
    split: Split = "held_out"
    """Part of the text: held_out holds other documents (other packages, other books) than train."""
    tokens: int = 100_000
    """Tokens to measure on."""
    batch_blocks: int = 8
    """Blocks per forward pass: memory against speed, never the result."""
    dtype: Dtype | None = None
    """Number format of the model's weights. Derived: the one the run was trained with."""
    device: str = "auto"
    """Where to compute: a torch device (cpu, cuda, cuda:1, mps), or auto for an accelerator where there is one."""

    def validate(self) -> None:
        """Counts are positive."""
        self._positive("tokens", "batch-blocks")


@dataclass(frozen=True, kw_only=True)
class Harvest(OfMixture):
    """Store the inputs and outputs of attention layers (or MLPs, or a site), once, for many trainings."""

    verb: ClassVar[str] = "harvest"

    site: str = "attention"
    """What to store: attention (for a Lorsa), mlp (for a transcoder), or a site such as resid_post (for an SAE)."""
    split: Split = "train"
    """Part of the text to read."""
    tokens: int = 400_000
    """Tokens to harvest."""
    batch_blocks: int = 8
    """Blocks per forward pass."""
    store_dtype: Dtype = "float32"
    """Number format on disk."""
    out: Path | None = None
    """Directory of the store, or of the stores of several layers; continued. Derived: stores/<model>-<layer>-<text>."""

    def validate(self) -> None:
        """Counts are positive."""
        super().validate()
        self._positive("tokens", "batch-blocks")
        known = ("attention", "mlp", *SAE_SITES)
        self._refuse(self.site not in known, "site", f"give one of {', '.join(known)}, and --layer apart")

    def sites(self) -> tuple[str, str]:
        """The sites of input and output, without their layer."""
        pairs = {"attention": ("attn_in", "attn_out"), "mlp": ("mlp_in", "mlp_out")}
        return pairs.get(self.site, (self.site, self.site))

    def directory(self, layer: int) -> Path:
        """The store's directory, for the layer's index from 0; of several layers each has a folder of its own."""
        part = "" if self.site == "attention" else f"-{self.site}"
        several = isinstance(self.layer, str)
        named = "layers" if several else str(layer)
        out = self.out or Path("stores") / f"{Path(self.model).name}{part}-{named}-{Path(self.text).stem}"
        return out / str(layer) if several else out


@dataclass(frozen=True, kw_only=True)
class TrainLorsa(TrainDictionary):
    """Train a Lorsa: thousands of rank-1 heads that together reproduce one attention layer."""

    verb: ClassVar[str] = "train lorsa"

    heads: int | None = None
    """Number of Lorsa heads H. Derived: 8 times the model's width."""
    groups: int | None = None
    """QK groups; their heads share a pattern. Derived: heads per head width, at least one per original head."""
    patterns_per_group: int = 1
    """Attention patterns per QK group, told apart by learned gates over its coordinates; 1: all its heads share one."""
    sink: bool = False
    """Give each pattern a learned logit that takes attention and moves nothing, so that heads need no first token."""
    qk_width: int | None = None
    """Width of queries and keys, narrower as a control: the planes that move scores most. Derived: the model's."""
    k: int = 64
    """Heads active per token (K); the mean of them for batchtopk. Not used by relu and jumprelu."""
    activation: Activation = "topk"
    """Which heads stay active at a token."""
    init: Initialisation = "data"
    """Starting weights: components of the original heads' outputs, their weights, noise, or the reference package's."""
    qk_lr_factor: float = 0.3
    """Learning rate of queries and keys, as a multiple of --lr; 0 keeps the model's own (the frozen-QK control)."""
    l0_weight: float = 0.0
    """Weight of the sparsity term of relu (L1) and jumprelu (L0), which need one; the other activations have none."""
    store: Path | None = None
    """Store of `clearhead harvest`, or folder of several. Derived: none, computed as needed; several: made in --out."""
    out: Path | None = None
    """Run directory. Derived: runs/<model>-<layer>-h<heads>-k<k>-<init>."""

    def validate(self) -> None:
        """Besides what all trainings check: K fits into the heads, groups divide them, sparsity has one source."""
        super().validate()
        self._positive("heads", "groups", "patterns-per-group", "qk-width")
        if self.heads is not None:
            self._refuse(self.k > self.heads, "k", f"at most all {self.heads} heads can be active; see --heads")
            self._refuse(
                self.groups is not None and self.heads % self.groups != 0,
                "groups",
                f"it must divide the {self.heads} heads into equal groups",
            )
            self._refuse(
                self.groups is not None and self.heads // self.groups % self.patterns_per_group != 0,
                "patterns-per-group",
                f"it must divide the {self.heads // (self.groups or 1)} heads of a group evenly",
            )
        for option in ("l0-weight", "qk-lr-factor"):
            self._refuse(getattr(self, option.replace("-", "_")) < 0, option, "give 0 to turn it off")
        kind, by_weight = self.activation, self.activation in ("relu", "jumprelu")
        advice = "begin with --l0-weight 0.5 and raise it until the l0 in metrics.jsonl is low enough"
        self._refuse(by_weight and not self.l0_weight, "l0-weight", f"nothing else makes {kind} sparse; {advice}")
        self._refuse(not by_weight and self.l0_weight > 0, "l0-weight", f"{kind} is sparse by --k; leave this out")

    def resolved(self, *, n_layers: int, d_model: int, d_head: int, n_heads: int) -> "TrainLorsa":
        """The same configuration with every derived field filled in from the model's geometry; validated again.

        Raises `ClearheadError` when the layer does not exist or K exceeds the heads.
        """
        heads = 8 * d_model if self.heads is None else self.heads
        groups = self.groups
        if groups is None:
            most, each = max(n_heads, heads // d_head), self.patterns_per_group
            groups = next((count for count in range(most, 0, -1) if heads % (count * each) == 0), 1)
        resolved = dataclasses.replace(self, heads=heads, groups=groups, layer=resolve_layer(self.layer, n_layers))
        return dataclasses.replace(resolved, out=resolved.directory())

    def directory(self) -> Path:
        """The run directory; defined once `layer` and `heads` are."""
        return self.out or Path("runs") / f"{Path(self.model).name}-{self.layer}-h{self.heads}-k{self.k}-{self.init}"

    def sites(self) -> tuple[str, str]:
        """The sites of input and output, without their layer."""
        return "attn_in", "attn_out"


@dataclass(frozen=True, kw_only=True)
class Evaluate(OfRun):
    """Measure a dictionary (FVU, L0, loss through it) or a sparse model (edges) on held-out text."""

    verb: ClassVar[str] = "evaluate"

    run: Positional[Path]
    """Directory written by `clearhead train ...` or `clearhead sparsify`, or the folder of a sparse model."""
    downstream_tokens: int = 20_000
    """Dictionary: tokens for the loss with the site replaced, which needs the whole model; 0 leaves it out."""
    retrieval: str | None = None
    """Sparse model: lengths of passkey and needle prompts, as 1024,2048. Derived: 512, doubled up to its context."""
    out: Path | None = None
    """File for the numbers. Derived: evaluation.json in the run directory."""

    def validate(self) -> None:
        """Counts are positive."""
        super().validate()
        self._refuse(self.downstream_tokens < 0, "downstream-tokens", "give 0 to leave it out")
        self.retrieval_lengths(0)

    def retrieval_lengths(self, context: int) -> tuple[int, ...]:
        """The lengths of retrieval prompts for a run of this context; `none` asks for none."""
        if self.retrieval is None:
            return tuple(length for length in (2**power for power in range(9, 31)) if length <= context)
        if self.retrieval == "none":
            return ()
        words = [word.strip() for word in self.retrieval.split(",")]
        wrong = not all(word.isdecimal() and int(word) > 0 for word in words)
        self._refuse(wrong, "retrieval", "give numbers of tokens with commas between them, as 1024,2048, or none")
        return tuple(sorted({int(word) for word in words}))


@dataclass(frozen=True, kw_only=True)
class Analyze(OfRun):
    """Find what each head does: contexts, z patterns, logits, what it reads and writes, families."""

    verb: ClassVar[str] = "analyze"

    run: Positional[Path]
    """Directory written by `clearhead train lorsa`; of one with a run per layer, each layer gets its own atlas."""
    dictionaries: tuple[str, ...] = ()
    """Transcoders, SAEs or Lorsas of other places of the model, for what heads read, write and look for."""
    explain_heads: str | None = None
    """Heads whose attention scores are split exactly over tokens and features: as 12,77, or top20, the most active."""
    seed: int = 0
    """Seed of the examples that are drawn and of the intervals."""
    top: int = 16
    """Contexts kept per head, by activation."""
    quantiles: int = 8
    """Further contexts per head, spread over the range of its activation."""
    negatives: int = 4
    """Further contexts per head in which it is not active, drawn at random."""
    out: Path | None = None
    """Directory of the atlas. Derived: atlas in the run directory."""

    def validate(self) -> None:
        """Counts are positive."""
        super().validate()
        self._positive("top")
        self._refuse(self.quantiles < 0, "quantiles", "give 0 for none")
        self._refuse(self.negatives < 0, "negatives", "give 0 for none")
        asked = self.explain_heads
        wrong = asked is not None and not re.fullmatch(r"top[0-9]+|[0-9]+(,[0-9]+)*", asked)
        self._refuse(wrong, "explain-heads", "give numbers of heads with commas between them, or top20")


@dataclass(frozen=True, kw_only=True)
class Demo(Verb):
    """Decompose one layer of a real model, from training to the page, on text that needs no network."""

    verb: ClassVar[str] = "demo"

    model: str = "smollm2"
    """Model under study, as for `clearhead train lorsa`."""
    layer: int | None = 12
    """Attention layer."""
    tokens: int = 150_000
    """Tokens to train on."""
    heads: int | None = None
    """Number of Lorsa heads. Derived: 8 times the model's width."""
    context: int = 256
    """Tokens per block."""
    measured_tokens: int = 100_000
    """Held-out tokens for the evaluation."""
    analysed_tokens: int = 30_000
    """Held-out tokens for the analysis of the heads."""
    device: str = "auto"
    """Where to compute: a torch device (cpu, cuda, cuda:1, mps), or auto for an accelerator where there is one."""
    out: Path = Path("runs/demo")
    """Directory of the run; what is finished there with the same settings is reused."""

    def validate(self) -> None:
        """Counts are positive."""
        self._positive("tokens", "measured-tokens", "analysed-tokens", "heads")
