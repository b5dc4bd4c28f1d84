"""`clearhead catalogue`: which known behaviours the heads of a Lorsa, and the original heads of its layer, have."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from clearhead.analysis.behaviours.calibration import Calibration, calibrate, calibrate_all
from clearhead.analysis.behaviours.catalogue import Found, build_probes, look_for, rows_of
from clearhead.analysis.behaviours.reading import LorsaHeads, OriginalHeads, Population, SharedRun
from clearhead.analysis.behaviours.registry import BEHAVIOURS
from clearhead.analysis.behaviours.word_model import word_model
from clearhead.atlas.write import add_tables
from clearhead.commands.opening.run_folders import run_folders
from clearhead.commands.printing.catalogue_report import show_calibration, show_found
from clearhead.commands.printing.table import say
from clearhead.config import Catalogue, resolve_layers
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.runs import environment, write_json

TOKENIZER = "clearhead-tiny"
"""The model whose tokens planted units use, except those of words."""


def plan(config: Catalogue) -> dict[str, Any]:
    """What will be looked through, and where the result goes."""
    what = {"behaviours": [behaviour.name for behaviour in BEHAVIOURS]}
    if config.planted:
        return what | {"planted units of each kind": config.per_kind, "seeds": config.seeds}
    if config.model is not None:
        return what | {"model": config.model, "layers": str(config.layer), "written to": str(_target(config))}
    return what | {"runs": [str(path) for path, _ in _runs(config)], "written to": str(_target(config))}


def run(config: Catalogue) -> None:
    """Look for all behaviours, print what was found with examples, and write it."""
    if config.planted:
        for calibration in _calibrations(config):
            show_calibration(calibration)
        return
    runs = _runs(config)
    model = Model.load(config.model or str(runs[0][1].provenance["model"]), dtype=config.dtype)
    shared = SharedRun(model)
    populations: list[Population] = []
    for _, lorsa in runs:
        layer = int(lorsa.provenance["layer"])
        populations += [LorsaHeads(model, layer, lorsa, shared), OriginalHeads(model, layer, shared)]
    if not runs:
        layers = [layer for layer in resolve_layers(config.layer, model.n_layers) if layer in model.attention_layers]
        populations += [OriginalHeads(model, layer, shared) for layer in layers]
    behaviours = [behaviour for behaviour in BEHAVIOURS if behaviour.served_by(model)]
    probes = build_probes(behaviours, model, config.seed)
    found: list[Found] = []
    try:
        for of_text in look_for(populations, behaviours, probes, seed=config.seed, by_chance=config.chance):
            found += of_text
    except KeyboardInterrupt:
        if found:
            _report(config, found, model)
        missing = [one.name for one in behaviours if not any(known.behaviour is one for known in found)]
        raise KeyboardInterrupt(f"interrupted before {', '.join(missing)} were looked for") from None
    rows = _report(config, found, model)
    for place, (path, _) in enumerate(runs):
        atlas = path / "atlas"
        if atlas.exists():
            mine = (2 * place, 2 * place + 1)  # the Lorsa's heads and the layer's own
            add_tables(atlas, {"behaviours": [of for one, of in zip(found, rows, strict=True) if one.place in mine]})
            say(f"table behaviours written to {atlas}")


def _report(config: Catalogue, found: Sequence[Found], model: Model) -> list[dict[str, list[Any]]]:
    """Print what was found and write catalogue.json; the atlas rows of each entry of `found`."""
    show_found(found, model)
    rows = [rows_of(one, model) for one in found]
    target = _target(config)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_json(target, _record(config, found, rows))  # before the atlases, one of which may be damaged
    say(f"written: {target}")
    return rows


def _calibrations(config: Catalogue) -> Iterator[Calibration]:
    """Planted in the tokens of the model given, or in those that each probe is served best by."""
    how: dict[str, Any] = {"per_kind": config.per_kind, "seeds": range(config.seed, config.seed + config.seeds)}
    if config.model is None:
        return calibrate_all(BEHAVIOURS, Model.load(TOKENIZER), word_model(), **how)
    model = Model.load(config.model, dtype=config.dtype)
    return iter([calibrate([one for one in BEHAVIOURS if one.served_by(model)], model, **how)])


def _runs(config: Catalogue) -> list[tuple[Path, Lorsa]]:
    """The runs of a directory that hold a Lorsa, by layer; raises `ClearheadError` for none, and for two models."""
    if config.run is None:
        return []
    folders = [folder for folder in run_folders(config.run) if (folder / "lorsa").exists()]
    if not folders:
        raise ClearheadError(
            f"{config.run} holds no finished run of `clearhead train lorsa`; give one, or a folder of them"
        )
    runs = [(folder, Lorsa.from_pretrained(folder / "lorsa")) for folder in folders]
    models = sorted({str(lorsa.provenance["model"]) for _, lorsa in runs})
    if len(models) > 1:
        raise ClearheadError(f"{config.run} holds runs of {models[0]} and {models[1]}; give runs of one model")
    return sorted(runs, key=lambda run: int(run[1].provenance["layer"]))


def _target(config: Catalogue) -> Path:
    return (config.out or config.run or Path("runs/catalogue")) / "catalogue.json"


def _record(config: Catalogue, found: Sequence[Found], rows: Sequence[dict[str, list[Any]]]) -> dict[str, Any]:
    counts = [
        {
            "behaviour": one.behaviour.name,
            "units": one.names[0].rsplit(".", 1)[0],
            "of": len(one.names),
            "found": int(one.found.sum()),
            "on_shuffled_text": one.by_chance,
        }
        for one in found
    ]
    merged = {name: [value for part in rows for value in part[name]] for name in rows[0]}
    return {"config": config.to_dict(), "environment": environment(), "counts": counts, "behaviours": merged}
