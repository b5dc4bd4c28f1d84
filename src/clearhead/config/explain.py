"""The verb that explains units of an atlas in words and scores the explanations."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tyro.conf import Positional

from clearhead.config.verb import Dtype, Verb

TEMPLATE, LOCAL, NONE = "template", "local", "none"
SCORERS = ("detection", "fuzzing", "intruder")


@dataclass(frozen=True, kw_only=True)
class Explain(Verb):
    """Explain units in words, by counting or by a language model, and score that on other examples."""

    verb: ClassVar[str] = "explain"

    run: Positional[Path]
    """Run directory with an atlas, or the atlas itself; the results go into its table explanations."""
    unit: tuple[str, ...] = ()
    """Units to explain, as lorsa.12.345. Derived: units of every layer, drawn at random."""
    units: int = 100
    """Units to draw from each layer."""
    kind: str | None = None
    """Kind of units to draw, as lorsa or feature. Derived: every kind that has examples."""
    explainer: str = TEMPLATE
    """Who explains: template (counts, needs no model), local (see --local), or the name of a model at --endpoint."""
    judge: str | None = None
    """Who judges: template, local, a model at --endpoint, or none for no scores. Derived: the explainer."""
    scorers: tuple[str, ...] = SCORERS
    """Scores: detection (which texts?), fuzzing (is the mark right?), intruder (which one does not belong?)."""
    endpoint: str | None = None
    """Address of an OpenAI-compatible server, as http://localhost:8000/v1; its key in CLEARHEAD_API_KEY."""
    local: str | None = None
    """Model on this machine: a Hugging Face id, a local folder, or a bundled one (smollm2)."""
    price_in: float | None = None
    """Price of a million prompt tokens, in any currency."""
    price_out: float | None = None
    """Price of a million tokens of answers."""
    max_requests: int | None = None
    """Requests after which the run ends; what was explained by then is kept."""
    max_cost: float | None = None
    """Cost before which the run ends, at --price-in and --price-out."""
    parallel: int = 4
    """Units worked on at once, with an endpoint."""
    timeout: float = 60.0
    """Seconds to wait for an answer of the endpoint."""
    against: Path | None = None
    """Another run or atlas with scores by the same explainer and judge: tells which explanations are better."""
    seed: int = 0
    """Seed of the units, texts and marks drawn."""
    dtype: Dtype = "float32"
    """Number format of the local model's weights."""
    device: str = "auto"
    """Where the local model computes: a torch device, or auto for an accelerator where there is one."""
    out: Path | None = None
    """Run directory, which also keeps every answer so that none is paid for twice. Derived: explain, by the atlas."""

    def validate(self) -> None:
        """Every name has the option it needs, and no option is idle."""
        self._positive("units", "price-in", "price-out", "max-requests", "max-cost", "parallel", "timeout")
        known = set(self.scorers) <= set(SCORERS) and bool(self.scorers)
        self._refuse(not known, "scorers", f"give one or more of {', '.join(SCORERS)}")
        roles = {self.explainer, self.judge_name()}
        asked = roles - {TEMPLATE, LOCAL, NONE}
        self._refuse(self.explainer == NONE, "explainer", "give template, local or the name of a model")
        role = "explainer" if self.explainer in asked else "judge"
        self._refuse(bool(asked) and self.endpoint is None, role, "give --endpoint, the server that has this model")
        self._refuse(not asked and self.endpoint is not None, "endpoint", "name its model with --explainer or --judge")
        role = "explainer" if self.explainer == LOCAL else "judge"
        self._refuse(LOCAL in roles and self.local is None, role, "give the model with --local")
        self._refuse(LOCAL not in roles and self.local is not None, "local", "add --judge local or --explainer local")
        self._refuse(
            self.judge_name() == TEMPLATE and self.explainer != TEMPLATE,
            "judge",
            "the template judges by the rule of its own explanations; name a model, or none",
        )
        self._refuse(
            self.max_cost is not None and (self.price_in is None or self.price_out is None),
            "max-cost",
            "give --price-in and --price-out",
        )
        if not asked:
            self._meaningless(("parallel", "timeout"), "nothing is asked of an endpoint")
        if not roles - {TEMPLATE, NONE}:
            self._meaningless(("price-in", "price-out", "max-requests", "max-cost"), "the template costs nothing")
        if self.judge_name() == NONE:
            self._refuse(self.against is not None, "against", "without a judge there are no scores to compare")
        if self.unit:
            self._meaningless(("units", "kind"), "--unit names the units")

    def judge_name(self) -> str:
        """Who judges."""
        return self.explainer if self.judge is None else self.judge
