"""The verb that asks how many components explain a behaviour."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from clearhead.config.task import is_file
from clearhead.config.verb import Dtype, Verb

CircuitLevel = Literal["heads", "heads+mlps", "attention-edges", "graph-edges"]
CircuitAblation = Literal["corrupt", "zero", "mean", "positional_mean", "resample", "optimal"]
CircuitRank = Literal["exact", "atp", "ig", "relevance", "mask", "random"]
CircuitPolicy = Literal["signed", "absolute", "both"]
CircuitMetric = Literal["logit_difference", "probability_difference", "kl", "accuracy"]
CircuitGates = Literal["recomputed", "frozen"]


@dataclass(frozen=True, kw_only=True)
class CircuitCurve(Verb):
    """Measure how many heads, MLPs or edges keep a behaviour, with controls and the whole protocol."""

    verb: ClassVar[str] = "circuit curve"

    model: str = "smollm2"
    """Model under study: a Hugging Face id, a local folder, or a bundled one (smollm2, clearhead-tiny)."""
    against: str | None = None
    """A second model, measured on the same prompts: those that both models get right."""
    task: str = "ioi"
    """A built-in task (ioi, copy, pronoun, ...), or a file: ours, AutoCircuit, EAP, Edge-Pruning or MIB."""
    prompts: int = 32
    """Prompts of a built-in task; half of those that the model gets right rank, the other half evaluate."""
    level: CircuitLevel = "heads"
    """What circuits are made of."""
    ablation: CircuitAblation = "corrupt"
    """What components outside a circuit are overwritten with."""
    rank: CircuitRank | None = None
    """How components are ranked. Derived: exact for heads and MLPs, atp for edges."""
    compare_exact: bool = False
    """Measure exact effects too, of a part of the edges where there are many, and say how well the ranking agrees."""
    policy: CircuitPolicy = "both"
    """Sort by the score (what helps) or by its size (what matters at all)."""
    metric: CircuitMetric = "logit_difference"
    """What a circuit is measured by; the others are recorded beside it."""
    threshold: float = 0.9
    """Share of the behaviour that a circuit must keep."""
    min_effect: float = 0.5
    """Prompts on which the components change the metric by less are dropped and counted."""
    gates: CircuitGates = "recomputed"
    """Attention edges of a sparse model: its gates in every run, or those of the clean prompt in all runs."""
    keep_sinks: bool = False
    """Attention edges: those to the first token belong to every circuit and are not counted."""
    controls: int = 3
    """Random rankings to compare with."""
    seed: int = 0
    """Seed of prompts, random rankings, masks, resampling and bootstrap."""
    dtype: Dtype = "float32"
    """Number format of the model's weights; metrics are float64."""
    device: str = "auto"
    """Where to compute: a torch device (cpu, cuda, cuda:1, mps), or auto for an accelerator where there is one."""
    out: Path | None = None
    """Run directory. Derived: runs/curve-MODEL-TASK-LEVEL."""

    def validate(self) -> None:
        """Counts are positive, the threshold is a share, the level has the ranking and the ablation."""
        self._positive("prompts", "threshold")
        self._refuse(self.controls < 0, "controls", "give 0 or a positive number")
        self._refuse(self.min_effect < 0, "min-effect", "give 0 or a positive number")
        self._refuse(self.prompts < 2, "prompts", "one prompt ranks, another evaluates: give at least 2")
        self._refuse(self.threshold > 1, "threshold", "give a share of the behaviour, at most 1")
        if is_file(self.task):
            self._meaningless(("prompts",), "all prompts of the file are used")
        if self.level.endswith("-edges"):
            self._refuse(self.rank in ("relevance", "mask"), "rank", f"{self.level} have exact, atp, ig and random")
            self._refuse(self.ablation == "optimal", "ablation", f"{self.level} have no learned constants")
        if self.level == "attention-edges":
            average = "an edge has no other position to average over; attention-edges have corrupt, zero and"
            self._refuse(self.ablation in ("mean", "resample"), "ablation", f"{average} positional_mean")
            broken = self.gates == "frozen" and self.ablation == "positional_mean"
            self._refuse(broken, "gates", "the prompts of a mean have open edges of their own; give --gates recomputed")
        else:
            self._meaningless(("gates", "keep-sinks"), "it belongs to --level attention-edges")
        if self.compare_exact:
            self._refuse(self.ranking == "exact", "compare-exact", "the ranking is exact; give --rank atp or another")

    @property
    def ranking(self) -> str:
        """The ranking, derived from the level where none is given."""
        return self.rank or ("atp" if self.level.endswith("-edges") else "exact")

    def directory(self) -> Path:
        """The run directory."""
        models = Path(self.model).name + (f"-{Path(self.against).name}" if self.against else "")
        return self.out or Path("runs") / f"curve-{models}-{Path(self.task).stem}-{self.level}"
