"""The trained dictionaries of attention that a report compares: found in directories, checked, loaded."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clearhead.analysis.fidelity.errors import Candidate, Comparison
from clearhead.commands.opening.opened import Source, kind_of
from clearhead.commands.opening.run_folders import run_folders
from clearhead.config import Convert, TrainDictionary, TrainLorsa, TrainSae, TrainTranscoder
from clearhead.configfile import from_file
from clearhead.data.harvest import ATTENTION
from clearhead.dictionaries.dictionary import SavedDictionary
from clearhead.dictionaries.load import KINDS
from clearhead.errors import ClearheadError
from clearhead.model.access import Model

EQUAL = 0.1
"""Dictionaries whose numbers of parameters differ by at most this share are of equal size."""
REFERENCE = "reference"
"""The initialisation of the reference implementation, which is compared and not reported on."""


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """One finished run that predicts a layer's attn_out."""

    path: Path
    name: str
    """Its directory, as short as tells it from the others."""
    training: TrainDictionary

    @property
    def kind(self) -> str:
        """lorsa, sae or transcoder."""
        return kind_of(self.path, self.training)

    @property
    def layer(self) -> int:
        """The layer it belongs to."""
        return int(self.training.layer or 0)

    @property
    def init(self) -> str | None:
        """Starting weights of a Lorsa; None for the others."""
        return self.training.init if isinstance(self.training, TrainLorsa) else None


def find_runs(paths: Sequence[Path]) -> tuple[list[TrainedRun], list[tuple[Path, str]]]:
    """The finished runs of attention in `paths` and the folders in them, and what was left out, with the reason.

    Raises `ClearheadError` for a directory named itself that is no such run, and where none is found.
    """
    if not paths:
        raise ClearheadError("name the runs to report on: clearhead fidelity RUN RUN ..., or a folder of runs")
    found: dict[Path, TrainDictionary] = {}
    left: list[tuple[Path, str]] = []
    for path in paths:
        if not path.is_dir():
            raise ClearheadError(f"there is no directory {path}")
        for run in run_folders(path):
            config = from_file(run)
            if not isinstance(config, Source):
                continue
            reason = why_not(run, config)
            if isinstance(config, TrainDictionary) and not reason:
                found[run] = config
            elif run == path:
                raise ClearheadError(f"{path} cannot be in this report: {reason}")
            else:
                left.append((run, reason))
    if not found:
        raise ClearheadError(
            f"{', '.join(map(str, paths))} holds no finished dictionary of attention; `clearhead train lorsa`, "
            "`train sae --site attn_out` and `train sweep` make them"
        )
    return [
        TrainedRun(path, name, found[path]) for path, name in zip(found, short_names(list(found)), strict=True)
    ], left


def why_not(run: Path, training: Source) -> str:
    """Why a run cannot be compared with a Lorsa; empty where it can."""
    if isinstance(training, Convert):
        return "it comes from another library, and what its training took is not known"
    kind = kind_of(run, training)
    if kind not in KINDS or not isinstance(training, TrainLorsa | TrainSae | TrainTranscoder):
        return f"it is of `clearhead {training.verb}`"
    if not isinstance(training, TrainLorsa):
        reads, writes = training.sites()
        if writes != ATTENTION[1]:
            return f"it predicts {writes}, not {ATTENTION[1]}, from {reads}"
    if not (run / kind / "config.json").exists() or not (run / "summary.json").exists():
        return "it has not been trained to its end"
    return ""


def short_names(paths: Sequence[Path]) -> list[str]:
    """The directories' own names, with as many of the folders above as tell them apart."""
    resolved = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, resolved)) + 1):
        names = ["/".join(parts[-depth:]) for parts in resolved]
        if len(set(names)) == len(names):
            return names
    raise ClearheadError("a run is named twice; name every run once")


def refuse_unlike(found: Sequence[TrainedRun]) -> None:
    """Raise `ClearheadError` unless all runs belong to one model, text and context."""
    for field in ("model", "text", "context", "dtype"):
        values = list(dict.fromkeys(str(getattr(run.training, field)) for run in found))
        if len(values) > 1:
            raise ClearheadError(
                f"these runs differ in their {field}: {values[0]} and {values[1]}; report on runs of one {field}"
            )


def load_candidate(run: TrainedRun, model: Model) -> Candidate:
    """The run's dictionary on the model's device; raises `ClearheadError` where it was trained on another site."""
    module: Any = KINDS[run.kind].from_pretrained(run.path / run.kind).to(model.device).eval()
    reads = run.training.sites()[0] if isinstance(run.training, TrainSae | TrainTranscoder) else ATTENTION[0]
    _refuse_other_place(run, module, reads)
    return Candidate(run.name, run.layer, module, reads)


def _refuse_other_place(run: TrainedRun, module: SavedDictionary, reads: str) -> None:
    named = {name: module.provenance.get(name) for name in ("model", "layer", "input_site", "output_site")}
    asked = {
        "model": run.training.model,
        "layer": run.layer,
        "input_site": f"{reads}.{run.layer}",
        "output_site": f"{ATTENTION[1]}.{run.layer}",
    }
    other = [f"{name} {named[name]}, not {value}" for name, value in asked.items() if named[name] != value]
    if other:
        raise ClearheadError(f"the dictionary in {run.path} has {'; '.join(other)}; restore its config.json")


def choose(found: Sequence[TrainedRun], parameters: Sequence[int]) -> Comparison | None:
    """The Lorsa of one layer that is reported on and the SAE it is compared with, by their places; None without Lorsa.

    The Lorsa: not of the reference's initialisation where there is another; then the largest, the longest trained, the
    one with most active heads, the first seed. The SAE: the most alike in tokens, K and size.
    """
    lorsas = [place for place, run in enumerate(found) if run.kind == "lorsa"]
    if not lorsas:
        return None
    main = min(
        lorsas,
        key=lambda at: (
            found[at].init in (REFERENCE, "random"),
            -parameters[at],
            -found[at].training.tokens,
            -found[at].training.k,
            found[at].training.seed,
        ),
    )
    return Comparison(main, most_alike(found, parameters, main, kind="sae"))


def most_alike(
    found: Sequence[TrainedRun],
    parameters: Sequence[int],
    main: int,
    *,
    kind: str,
    init: str | None = None,
    other_seed: bool = False,
) -> int | None:
    """The run of a kind (and initialisation, or of another seed) most alike to `main`; None where there is none."""
    seed = found[main].training.seed
    others = [
        at
        for at, run in enumerate(found)
        if at != main
        and run.kind == kind
        and init in (None, run.init)
        and not (other_seed and run.training.seed == seed)
    ]

    def distance(at: int) -> tuple[Any, ...]:
        one, other = found[main].training, found[at].training
        size = abs(parameters[at] - parameters[main])
        return (one.tokens != other.tokens, one.k != other.k, size, one.seed != other.seed, other.seed)

    return min(others, key=distance, default=None)


def is_equal(found: Sequence[TrainedRun], parameters: Sequence[int], one: int, other: int) -> bool:
    """Whether two runs had equal budgets: tokens, active units and parameters."""
    a, b = found[one].training, found[other].training
    close = abs(parameters[one] - parameters[other]) <= EQUAL * parameters[one]
    return a.tokens == b.tokens and a.k == b.k and close
