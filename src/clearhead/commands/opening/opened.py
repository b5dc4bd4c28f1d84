"""A finished training run, opened for measurement: its dictionary or sparse model, and text that it has not seen."""

from pathlib import Path
from typing import Any, NamedTuple, cast

from jaxtyping import Int64
from torch import Tensor

from clearhead.config import Convert, OfRun, Sparsify, TrainDictionary
from clearhead.configfile import from_file
from clearhead.data.text import TokenBlocks, token_blocks
from clearhead.dictionaries.load import KINDS, Dictionary
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.gates import SETTINGS
from clearhead.runs import read_json
from clearhead.sparsify.evaluate import load_base
from clearhead.sparsify.posttrain import open_unwatched

Source = TrainDictionary | Convert
"""Where the dictionary of a run comes from: a training, or another library."""


class OpenedRun(NamedTuple):
    """What every measurement of a Lorsa needs."""

    lorsa: Lorsa
    model: Model
    layer: int
    blocks: TokenBlocks


class OpenedDictionary(NamedTuple):
    """What every measurement of a dictionary of any kind needs."""

    module: Dictionary
    model: Model
    source: Source
    blocks: TokenBlocks


class OpenedSparse(NamedTuple):
    """What every measurement of a sparse model needs."""

    model: Model
    base: Model | None
    tokens: Int64[Tensor, "n t"]
    blocks: TokenBlocks
    """The text that `tokens` are blocks of."""
    training: Sparsify | None
    """None for a model folder without its run."""


def source_of(run: Path) -> Source:
    """The resolved configuration of a run; raises `ClearheadError` where no dictionary was trained or converted."""
    if not run.exists():
        raise ClearheadError(f"there is no directory {run}; give one that `clearhead train lorsa` made")
    if not (run / "config.json").exists():
        raise ClearheadError(f"{run} is no run directory: it holds no config.json; `clearhead train lorsa` makes one")
    config = from_file(run)
    if not isinstance(config, Source):
        raise ClearheadError(
            f"{run} was written by `clearhead {config.verb}`; give a directory of `clearhead train lorsa`, or to "
            "evaluate also one of `clearhead train transcoder`, `train clt`, `train sae` or `sparsify`"
        )
    return config


def kind_of(run: Path, source: Source) -> str:
    """The kind of dictionary that a run holds or will hold, which is also the folder it lies in."""
    if isinstance(source, TrainDictionary):
        return source.verb.removeprefix("train ")
    kinds = [kind for kind in KINDS if (run / kind).exists()]
    if len(kinds) != 1:
        raise ClearheadError(f"{run} holds {' and '.join(kinds) or 'no dictionary'}; convert it into a new folder")
    return kinds[0]


def open_dictionary(config: OfRun, model: Model | None = None) -> OpenedDictionary:
    """Load the dictionary of a run onto its model's device, and tokenise the text to measure on.

    `model` is the run's, where it is loaded already.
    Raises `ClearheadError` when the run is unfinished or the text is shorter than one block.
    """
    source = source_of(config.run)
    kind = kind_of(config.run, source)
    if not (config.run / kind).exists():
        raise ClearheadError(
            f"{config.run} has not been trained to its end; type: clearhead {source.verb} --from {config.run} "
            f"--out {config.run}"
        )
    name = str(source.model)
    model = model or Model.load(name, dtype=config.dtype or source.dtype, device=config.device)
    module = KINDS[kind].from_pretrained(config.run / kind).to(model.device).eval()
    belongs = {name: module.provenance.get(name) for name in ("model", "layer")}
    asked = {"model": name, "layer": belongs["layer"] if source.layer is None else source.layer}
    if belongs != asked:
        raise ClearheadError(
            f"{config.run} names {asked} in its config.json and its {kind} was trained on {belongs}; restore the "
            f"file, or train again"
        )
    blocks = token_blocks(
        model,
        config.text or source.text,
        split=config.split,
        n_tokens=config.tokens,
        context=source.context,
        at_most=True,
    )
    return OpenedDictionary(module, model, source, blocks)


def open_run(config: OfRun) -> OpenedRun:
    """`open_dictionary` for what takes a Lorsa alone; raises `ClearheadError` for another kind."""
    refuse_no_lorsa(config.run)
    opened = open_dictionary(config)
    lorsa = cast(Lorsa, opened.module)
    return OpenedRun(lorsa, opened.model, int(lorsa.provenance["layer"]), opened.blocks)


def refuse_no_lorsa(run: Path) -> None:
    """Raise `ClearheadError` for a run that holds another kind of dictionary than a Lorsa."""
    kind = kind_of(run, source_of(run))
    if kind != "lorsa":
        raise ClearheadError(f"{run} holds a dictionary of kind {kind}; give a directory of `clearhead train lorsa`")


def plan_of(config: OfRun) -> dict[str, Any]:
    """What a measurement will take and from where, without loading a model."""
    source = source_of(config.run)
    values = source.to_dict()
    told = [name for name in ("layer", "heads", "features", "site") if values.get(name) is not None]
    return {
        "model": source.model,
        "dtype": config.dtype or source.dtype,
        **{name: values[name] for name in told},
        "text": f"{config.text or source.text} ({config.split})",
        "tokens, at most": config.tokens,
        "blocks": -(-config.tokens // source.context),
        "context": source.context,
    }


def is_sparse(run: Path) -> bool:
    """Whether a directory is a run of `clearhead sparsify` or the folder of a model with edge gates."""
    if not (run / "config.json").exists():
        return False
    config = read_json(run / "config.json")
    return isinstance(config, dict) and (config.get("verb") == Sparsify.verb or SETTINGS in config)


def sparsify_of(run: Path) -> Sparsify | None:
    """The configuration a sparse model was trained with; None for a model folder without its run.

    Raises `ClearheadError` for a run that is not finished.
    """
    if SETTINGS in read_json(run / "config.json"):
        return None
    training = from_file(run)
    assert isinstance(training, Sparsify)
    if not (run / "model").exists() or not (run / "summary.json").exists():
        raise ClearheadError(
            f"{run} has not been trained to its end; type: clearhead sparsify --from {run} --out {run}"
        )
    return training


def text_of(config: OfRun, training: Sparsify | None) -> str:
    """The text to measure a sparse model on: as given, or the one it was trained on."""
    return config.text or (Sparsify.text if training is None else training.text)


def open_sparse(config: OfRun) -> OpenedSparse:
    """Load a sparse model and its base, and tokenise text on which it was neither trained nor chosen.

    Raises `ClearheadError` when the run is unfinished or the text is too short.
    """
    training = sparsify_of(config.run)
    folder = config.run if training is None else config.run / "model"
    model = Model.load(str(folder), dtype=config.dtype or "float32", device=config.device)
    context = min(Sparsify.context, model.n_ctx or Sparsify.context) if training is None else training.context
    text = text_of(config, training)
    tokens, blocks = open_unwatched(model, text, context=context, tokens=config.tokens, split=config.split)
    return OpenedSparse(model, load_base(model), tokens, blocks, training)
