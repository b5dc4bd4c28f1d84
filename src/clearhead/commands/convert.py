"""`clearhead convert`: dictionaries from other libraries and for them.

What comes in becomes a run directory: its `config.json` is that of this verb and says which model, text and context
`evaluate`, `analyze`, `catalogue` and `trust` measure it with. How it was trained is not known, so `fidelity`, which
compares budgets, does not take it.
"""

from pathlib import Path
from typing import Any

from clearhead.commands.opening.run_folders import runs_in
from clearhead.commands.opening.structure import without_weights
from clearhead.commands.printing.table import say, show
from clearhead.config import Convert
from clearhead.configfile import refuse_other_run
from clearhead.dictionaries.clt import Clt
from clearhead.dictionaries.interop import load_foreign, save_foreign
from clearhead.dictionaries.interop_circuit_tracer import save_circuit_tracer
from clearhead.dictionaries.load import KINDS, Dictionary, load_dictionary_of
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.dictionaries.sae import Sae
from clearhead.dictionaries.transcoder import Transcoder
from clearhead.errors import ClearheadError
from clearhead.runs import RunDirectory


def plan(config: Convert) -> dict[str, Any]:
    """What will be written, and where; the files are read and checked."""
    if config.to != "clearhead":
        _refuse_files(config.directory())
        return {"from": config.dictionary, "to": config.to, "directory": config.directory()}
    return _described(_read(config)) | {"model": config.model, "directory": config.directory()}


def run(config: Convert) -> None:
    """Convert, and print what it is and where it lies."""
    if config.to != "clearhead":
        folder = _write(config)
        say(f"{config.to}: {folder}")
        return
    refuse_other_run(config.directory(), config)
    module = _read(config)
    with RunDirectory(config.directory()) as directory:
        directory.write_config(config.to_dict())
        module.save_pretrained(directory.path / module.KIND)
    show(_described(module), f"{config.dictionary}, for {config.model}")
    say(f"run: {directory.path}; next: clearhead evaluate {directory.path}")


def _read(config: Convert) -> Dictionary:
    """The dictionary, once it is known to fit its model; raises `ClearheadError` where it does not."""
    assert config.model is not None  # `Convert.validate`
    module = load_foreign(config.dictionary, model=config.model, layer=config.layer)
    model, read = without_weights(config.model), _widths(module)
    if set(read) != {model.d_model}:
        raise ClearheadError(
            f"{config.dictionary} reads and writes {' and '.join(map(str, read))} dimensions, and {config.model} has "
            f"{model.d_model}; give the model it was trained on with --model"
        )
    if isinstance(module, Clt) and module.config.n_layers != model.n_layers:
        raise ClearheadError(
            f"{config.dictionary} is of a model of {module.config.n_layers} layers, and {config.model} has "
            f"{model.n_layers}; give the model it was trained on with --model"
        )
    layer = module.provenance.get("layer")
    if layer is not None and layer >= model.n_layers:
        raise ClearheadError(f"{config.dictionary} is of layer {layer}, and {config.model} has {model.n_layers} layers")
    if model.n_ctx is not None and config.context > model.n_ctx:
        raise ClearheadError(
            f"--context {config.context} is not possible: {config.model} reads {model.n_ctx} tokens at most; type "
            f"--context {model.n_ctx}"
        )
    return module


def _widths(module: Dictionary) -> list[int]:
    if isinstance(module, Lorsa):
        return [module.config.d_model]
    if isinstance(module, Transcoder):
        return [module.config.d_in, module.config.d_out]
    return [module.config.d_model]


def _described(module: Dictionary) -> dict[str, Any]:
    told = ("library", "layer", "input_site", "output_site")
    return {
        "kind": module.KIND,
        "units": module.n_units,
        **{name.replace("_", " "): module.provenance[name] for name in told if name in module.provenance},
        "activation": module.config.activation,
    }


def _write(config: Convert) -> Path:
    _refuse_files(config.directory())
    runs = runs_in(config.dictionary)
    for run in runs:
        if (run / "env.json").exists() and not any((run / kind / "config.json").exists() for kind in KINDS):
            raise ClearheadError(f"{run} holds no finished dictionary; end its training first, or give another run")
    modules = [load_dictionary_of(run) for run in runs]
    if config.to == "llamascopium":
        if len(modules) > 1:
            raise ClearheadError(f"llamascopium has a folder for each layer; name one run, as {runs[0]}")
        (lorsa,) = modules
        if not isinstance(lorsa, Lorsa):
            raise ClearheadError(f"{runs[0]} holds a {lorsa.KIND}; only a Lorsa is written in llamascopium's layout")
        return save_foreign(lorsa, config.directory(), config.to)
    transcoders = [module for module in modules if isinstance(module, Transcoder) and not isinstance(module, Sae)]
    if len(transcoders) < len(modules):
        raise ClearheadError(f"{config.dictionary} holds other than transcoders; circuit-tracer takes these alone")
    return save_circuit_tracer(transcoders, config.directory())


def _refuse_files(folder: Path) -> None:
    """Raise `ClearheadError` where files of another run or layout would be replaced, or mixed with what is written."""
    if folder.is_dir() and any(folder.iterdir()):
        raise ClearheadError(f"{folder} holds files already; give another folder with --out, or empty it")
