"""`clearhead trust`: how far the heads of an analysed Lorsa can be trusted, as the table `trust` of its atlas.

Families of heads that the atlas names are removed as one unit each, besides single heads; with heads named, those that
these belong to. What removing them does, and setting them to other values, is the table `interventions`. Numbers over
all heads go to `trust.json` beside the atlas.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clearhead.analysis.trust import SET, measure_trust
from clearhead.atlas import Atlas, add_tables
from clearhead.commands.opening.opened import open_run, plan_of, refuse_no_lorsa
from clearhead.commands.opening.run_folders import refuse_several
from clearhead.commands.printing.table import say, show
from clearhead.commands.printing.trust_report import print_interventions
from clearhead.config import Trust
from clearhead.dictionaries.load import load_dictionary_of
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError
from clearhead.runs import write_json
from clearhead.units import Unit


def plan(config: Trust) -> dict[str, Any]:
    """What will be measured, without loading a model."""
    measured = len(config.heads) or f"{config.effects} at most"
    return plan_of(config) | {
        "other seeds": len(config.seeds),
        "heads whose effects are measured": measured,
        "set to": ", ".join(("0", *config.becomes)),
        "cases per head": f"{config.cases} for each of these, and as many of two controls",
        "atlas": folder_of(config),
    }


def run(config: Trust) -> None:
    """Measure, write the table, print the numbers over all heads."""
    atlas = Atlas(folder_of(config))
    opened = open_run(config)
    _refuse_other_atlas(atlas, opened.lorsa, opened.layer, config)
    found = measure_trust(
        opened.lorsa,
        opened.model,
        opened.layer,
        opened.blocks,
        others=[_other(path, opened.lorsa, config.run) for path in config.seeds],
        heads=config.heads,
        families=_families(atlas, opened.layer, config.heads),
        n_effects=config.effects,
        cases=config.cases,
        becomes=config.settings(),
        batch_blocks=config.batch_blocks,
        seed=config.seed,
    )
    add_tables(atlas.path, {"trust": [found.rows], "interventions": [found.interventions]})
    write_json(atlas.path.parent / "trust.json", found.summary)
    told = found.summary
    if config.heads:  # the table below says it head by head
        told = {name: value for name, value in told.items() if SET not in name}
    show({name: _with_interval(value) for name, value in told.items()}, f"trust in {config.run}:")
    if config.heads:
        print_interventions(found.interventions)
    say(f"tables trust and interventions of {atlas.path}; next: clearhead view {config.run}")


def folder_of(config: Trust) -> Path:
    """The directory of the atlas: as given, or atlas in the run directory."""
    refuse_several(config.run)
    refuse_no_lorsa(config.run)
    folder = config.out or config.run / "atlas"
    if not (folder / "atlas.json").exists():
        raise ClearheadError(f"{folder} is no atlas yet; type: clearhead analyze {config.run}")
    return folder


def _refuse_other_atlas(atlas: Atlas, lorsa: Lorsa, layer: int, config: Trust) -> None:
    """Raise `ClearheadError` for an atlas of other heads than the run's, before anything is measured."""
    layers = [row["layer"] for row in atlas.sql("select distinct layer from units where kind = 'lorsa'")]
    if layers and layer not in layers:
        raise ClearheadError(
            f"{atlas.path} is of layer {layers[0]} and {config.run} of layer {layer}; type: clearhead analyze "
            f"{config.run}, and leave out --out"
        )
    about = atlas.about.get("dictionary")
    if about is None:
        return
    of = about.get("provenance", {})
    mine = (lorsa.KIND, lorsa.provenance.get("model"), lorsa.n_heads, lorsa.provenance.get("training"))
    theirs = (about.get("kind"), of.get("model"), about.get("n_heads"), of.get("training"))
    names = ("kind", "model", "heads", "training")
    other = [name for name, one, two in zip(names, mine, theirs, strict=True) if one != two]
    if other:
        raise ClearheadError(
            f"{atlas.path} is of another dictionary than {config.run} ({', '.join(other)} differ); type: clearhead "
            f"analyze {config.run}, and leave out --out"
        )


def _other(path: str, lorsa: Lorsa, run: Path) -> Lorsa:
    """The Lorsa of another run of the same layer, on the same device."""
    if Path(path).resolve() == run.resolve():
        raise ClearheadError(f"--seeds {path} is the run itself; give runs trained from other seeds (--seed)")
    other = load_dictionary_of(path)
    if not isinstance(other, Lorsa):
        raise ClearheadError(f"{path} holds a {type(other).__name__}; --seeds takes runs of `clearhead train lorsa`")
    for name in ("model", "layer"):
        mine, theirs = lorsa.provenance.get(name), other.provenance.get(name)
        if mine != theirs:
            raise ClearheadError(
                f"--seeds {path} was trained on {name} {theirs}, and {run} on {mine}; give runs of the same layer"
            )
    return other.to(lorsa.W_O.device).eval()


def _families(atlas: Atlas, layer: int, heads: Sequence[int]) -> dict[str, list[int]]:
    """Heads of each family that the atlas names; where heads are named, of those that these belong to."""
    rows = atlas.sql("select family, units from families where layer = ?", [layer])
    families = {row["family"]: [Unit.parse(name).index or 0 for name in row["units"]] for row in rows}
    return {name: members for name, members in families.items() if not heads or set(heads) & set(members)}


def _with_interval(value: Any) -> Any:
    if isinstance(value, list):
        return f"{value[0]:.3g} ({value[1]:.3g} to {value[2]:.3g})"
    return value
