"""The verbs that trace a prompt through dictionaries, and that put dictionaries in the place of what they imitate."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tyro.conf import Positional

from clearhead.config.verb import Dtype, Verb, shortened
from clearhead.errors import ClearheadError


@dataclass(frozen=True, kw_only=True)
class TracePrompt(Verb):
    """Trace a prediction back to its tokens: a graph of features, heads and errors, and why heads look."""

    verb: ClassVar[str] = "trace"

    prompt: Positional[str]
    """The text whose next token is explained."""
    model: str = "smollm2"
    """Model under study: a Hugging Face id, a local folder, or a bundled one (smollm2, clearhead-tiny)."""
    dictionaries: tuple[str, ...] = ()
    """Transcoders, Lorsas or a cross-layer transcoder of this model: folders, run directories or hub ids."""
    answer: str | None = None
    """Explain this next token, its leading space included. Derived: the likely ones, to 0.95 of the probability."""
    wrong: str | None = None
    """A token that --answer is compared with. Derived: the mean over the vocabulary."""
    unit: str | None = None
    """Explain this unit instead, as feature.12.345@7 or lorsa.12.345@7."""
    units: int = 1000
    """Features and Lorsa heads that are explained, those of most influence."""
    kept: int = 256
    """Edges stored per feature or Lorsa head; the others enter the scores but not the graph."""
    unit_share: float = 0.8
    """Share of all influence that the units of the graph hold."""
    edge_share: float = 0.98
    """Share of the influence between them that its edges hold."""
    tables: int = 4
    """Attention edges, and Lorsa heads, whose scores are explained by pairs of units; 0 for none."""
    edge: tuple[str, ...] = ()
    """Source and target of an edge whose heads are listed; the source a unit, or @7 for all that token 7 writes."""
    slug: str | None = None
    """Name of the graph in Neuronpedia's format. Derived: from the prompt."""
    dtype: Dtype = "float32"
    """Number format of the model's weights; edges are float32 at least."""
    device: str = "auto"
    """Where to compute: a torch device (cpu, cuda, cuda:1, mps), or auto for an accelerator where there is one."""
    out: Path | None = None
    """Run directory. Derived: runs/graph-MODEL-TEXT."""

    def validate(self) -> None:
        """A text, one target, shares that are shares."""
        self._refuse(not self.prompt.strip(), "prompt", "give a text")
        self._refuse(self.wrong is not None and self.answer is None, "wrong", "give --answer too")
        if self.unit is not None and self.answer is not None:
            raise ClearheadError("--unit and --answer exclude each other: give one of them")
        expected = "give two: a unit or @POSITION, then a unit that reads, as logit.5@7"
        self._refuse(len(self.edge) not in (0, 2), "edge", expected)
        self._positive("units", "kept")
        self._refuse(self.tables < 0, "tables", "give 0 or a positive number")
        for option in ("unit-share", "edge-share"):
            share = getattr(self, option.replace("-", "_"))
            self._refuse(not 0 < share <= 1, option, "a share lies above 0 and at most at 1")

    def directory(self) -> Path:
        """The run directory."""
        return self.out or Path("runs") / f"graph-{Path(self.model).name}-{shortened(self.prompt)}"


@dataclass(frozen=True, kw_only=True)
class Replace(Verb):
    """Run a model with its layers replaced by dictionaries, one more at a time, and measure what is lost."""

    verb: ClassVar[str] = "replace"

    model: str = "smollm2"
    """Model under study: a Hugging Face id, a local folder, or a bundled one (smollm2, clearhead-tiny)."""
    dictionaries: tuple[str, ...] = ()
    """Transcoders, Lorsas or a cross-layer transcoder of this model: folders, run directories or hub ids."""
    text: str = "default"
    """Text: a Hugging Face dataset id, a folder, a file (txt, jsonl, parquet), or default (needs no network)."""
    context: int = 128
    """Tokens per block."""
    tokens: int = 4096
    """Tokens to measure on, held out from training."""
    prompts: int = 4
    """Beginnings of blocks that are traced for the mean replacement score; 0 for none."""
    prompt_tokens: int = 24
    """Tokens of each."""
    units: int = 500
    """Features and Lorsa heads that are explained in each."""
    dtype: Dtype = "float32"
    """Number format of the model's weights."""
    device: str = "auto"
    """Where to compute: a torch device (cpu, cuda, cuda:1, mps), or auto for an accelerator where there is one."""
    out: Path | None = None
    """Run directory. Derived: runs/replace-MODEL."""

    def validate(self) -> None:
        """Something to replace, whole blocks, prompts of at least two tokens within a block."""
        self._refuse(not self.dictionaries, "dictionaries", "name at least one, as runs/NAME/transcoder")
        self._refuse(self.context < 3, "context", "a block needs at least 3 tokens")
        self._refuse(self.tokens < self.context, "tokens", f"at least one block of {self.context}; see --context")
        self._refuse(self.prompts < 0, "prompts", "give 0 or a positive number")
        self._positive("units")
        expected = f"give 2 to {self.context}, the tokens of a block"
        self._refuse(not 2 <= self.prompt_tokens <= self.context, "prompt-tokens", expected)

    def directory(self) -> Path:
        """The run directory."""
        return self.out or Path("runs") / f"replace-{Path(self.model).name}"
