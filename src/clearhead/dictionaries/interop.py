"""Dictionaries written by other libraries: which library a folder is from, and what their loaders share.

    circuit-tracer   config.yaml with layer_*.safetensors, or W_enc_*.safetensors and W_dec_*.safetensors
    sparsify         cfg.json with sae.safetensors
    SAELens          cfg.json with sae_weights.safetensors
    llamascopium     config.json (key `sae_type`) with sae_weights.safetensors
    OpenMOSS/Lorsa   config.json with final.safetensors (the paper's own code, of 2025)

`load_foreign` reads any of them, `save_foreign` writes llamascopium's Lorsa; each loader says in its module what it
converts and what it refuses. The converted module computes the same function; where a library measures activations in
other units, ours are those of the output.
Pickled weights (.pt, .pth, .bin, .dcp) are refused: opening them can run code of whoever wrote them.
"""

import importlib
import re
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from clearhead.dictionaries.dictionary import load_tensors
from clearhead.dictionaries.load import Dictionary
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.dictionaries.sae import Sae
from clearhead.dictionaries.transcoder import Transcoder, TranscoderConfig
from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError
from clearhead.runs import read_json

Placed = TypeVar("Placed", bound=Transcoder | Lorsa)

PICKLED = (".pt", ".pth", ".bin", ".dcp", ".pkl", ".ckpt")
HOOKS = {
    "hook_resid_pre": "resid_pre",
    "hook_resid_mid": "resid_mid",
    "hook_resid_post": "resid_post",
    "hook_attn_out": "attn_out",
    "hook_mlp_out": "mlp_out",
    "mlp.hook_in": "mlp_in",
    "mlp.hook_out": "mlp_out",
    "ln1.hook_normalized": "attn_in",
    "ln2.hook_normalized": "mlp_in",
}
"""Hook names of TransformerLens and the sites they stand for.

A normalised stream (`ln2.hook_normalized`) is `mlp_in` only where the norm's gain is folded into the weights that
follow or is 1; a dictionary trained on an unfolded model with gains needs them multiplied into its encoder.
"""


def load_foreign(folder: str | Path, *, model: str, layer: int | None = None) -> Dictionary:
    """Load a dictionary that another library wrote into a local folder.

    model: the name under which `Model.load` knows the model, for the provenance (their names differ). layer: which
    layer of a folder that holds several, and for files that do not name theirs. Raises `ClearheadError` for a folder
    that no supported library writes, pickled weights included, and for forms that have no exact counterpart here;
    `CorruptFileError` for files that do not fit together.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ClearheadError(f"there is no folder {folder}; download the repository first and give its folder")
    refuse_pickles(folder)
    library = _library(folder)
    load = importlib.import_module(f"clearhead.dictionaries.interop_{library}").load
    try:
        module: Dictionary = load(folder, layer)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"the files in {folder} are not what {library} writes ({type(error).__name__}: {error}); download "
            f"them again"
        ) from error
    module.provenance |= {"model": model, "library": library, "source": folder.name}
    return module.eval()


def save_foreign(module: Lorsa, folder: str | Path, library: str, *, context: int | None = None) -> Path:
    """Write a Lorsa into `folder` in the layout of another library, `llamascopium`; returns the folder.

    context: the longest text it is meant for, by default that of its training. Raises `UnknownNameError` for another
    library, and `ClearheadError` for what that library's layout cannot hold.
    """
    if library != "llamascopium":
        raise UnknownNameError("library to write for", library, ("llamascopium",))
    if not isinstance(module, Lorsa):
        raise ClearheadError(f"only a Lorsa is written in llamascopium's layout, and this is a {type(module).__name__}")
    context = context or int(module.provenance.get("training", {}).get("context", 256))
    return importlib.import_module(f"clearhead.dictionaries.interop_{library}").save(module, Path(folder), context)


def _library(folder: Path) -> str:
    names = {path.name for path in folder.iterdir()}
    circuit_tracer = re.compile(r"layer_\d+\.safetensors|W_enc_\d+\.safetensors")
    if any(circuit_tracer.fullmatch(name) for name in names):
        return "circuit_tracer"
    if {"cfg.json", "sae.safetensors"} <= names:
        return "sparsify"
    if {"cfg.json", "sae_weights.safetensors"} <= names:
        return "saelens"
    if {"config.json", "sae_weights.safetensors"} <= names:
        return "llamascopium"
    if {"config.json", "final.safetensors"} <= names:
        return "openmoss_lorsa"
    raise ClearheadError(
        f"{folder} holds no dictionary of a known layout: expected layer_N.safetensors or W_enc_N.safetensors "
        f"(circuit-tracer), cfg.json with sae.safetensors (sparsify) or sae_weights.safetensors (SAELens), or "
        f"config.json with sae_weights.safetensors (llamascopium) or final.safetensors (OpenMOSS/Lorsa); it holds "
        f"{', '.join(sorted(names)) or 'nothing'}"
    )


def refuse_pickles(folder: Path) -> None:
    """Raise `ClearheadError` where weights are there as a pickle only."""
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED)
    if pickled and not any(path.suffix == ".safetensors" for path in folder.iterdir()):
        raise ClearheadError(
            f"{folder / pickled[0]} is a pickle, and opening it can run code of whoever wrote it; it is not read. Ask "
            f"for safetensors, or convert it in a place you can throw away"
        )


def read_settings(path: Path) -> dict[str, Any]:
    """A JSON object; raises `CorruptFileError` when it is something else."""
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise CorruptFileError(f"{path} holds no JSON object; download it again")
    return settings


def read_weights(path: Path, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Tensors of these names in float32; raises `CorruptFileError` for one that is missing, unknown or not finite."""
    tensors = load_tensors(path)
    missing = [name for name in names if name not in tensors]
    if missing:
        raise CorruptFileError(f"{path} lacks {', '.join(missing)}; it holds {', '.join(sorted(tensors))}")
    for name, tensor in tensors.items():
        if name not in (*names, *optional):
            raise UnknownNameError("tensor", name, (*names, *optional), f"({path})")
        if not bool(torch.isfinite(tensor).all()):
            raise CorruptFileError(f"{name} in {path} holds NaN or infinity; download it again")
    return {name: tensor.float() for name, tensor in tensors.items()}


def log_threshold_of(threshold: Tensor, where: Path) -> Tensor:
    """Logarithms of thresholds; 0 becomes the smallest positive number, and negative ones are refused."""
    if bool((threshold < 0).any()):
        raise ClearheadError(
            f"{where} has a JumpReLU threshold of {float(threshold.min()):.3g}; only thresholds from 0 on are supported"
        )
    return threshold.clamp_min(torch.finfo(torch.float32).tiny).log()


def build(
    cls: type[Transcoder],
    where: Path,
    *,
    W_enc: Tensor,
    b_enc: Tensor,
    W_dec: Tensor,
    b_dec: Tensor,
    activation: str,
    k: int = 1,
    W_skip: Tensor | None = None,
    log_threshold: Tensor | None = None,
) -> Transcoder:
    """A module of class `cls` with these weights, in our orientation: W_enc [n, d_in], W_dec [n, d_out]."""
    shape = TranscoderConfig(
        d_in=W_enc.shape[1],
        d_out=W_dec.shape[1],
        n_features=len(W_enc),
        k=k,
        activation=activation,  # pyright: ignore[reportArgumentType]  # checked by TranscoderConfig itself
        skip=W_skip is not None,
        unit_norm=False,
    )
    module = cls(shape)
    given = {"W_enc": W_enc, "b_enc": b_enc, "W_dec": W_dec, "b_dec": b_dec}
    given |= {} if W_skip is None else {"W_skip": W_skip}
    given |= {} if log_threshold is None else {"log_threshold": log_threshold}
    for name, tensor in given.items():
        own = getattr(module, name)
        if own.shape != tensor.shape:
            raise CorruptFileError(f"{name} in {where} has shape {tuple(tensor.shape)}, expected {tuple(own.shape)}")
        own.data.copy_(tensor)
    return module


def place(module: Placed, layer: int | None, told: tuple[int | None, ...], reads: str, writes: str) -> Placed:
    """Note layer and sites in the provenance.

    layer: as given; told: what the files say of it. Raises `ClearheadError` when neither is known, or they differ.
    """
    found = sorted({one for one in told if one is not None})
    if len(found) > 1:
        raise ClearheadError(f"this dictionary reads and writes the layers {found}; only those of one layer are read")
    if found and layer not in (None, *found):
        raise ClearheadError(f"its files say that it is of layer {found[0]}, not of {layer}; leave that out")
    layer = found[0] if found else layer
    if layer is None:
        raise ClearheadError(
            "the files do not name the layer of this dictionary; give it: --layer N, or load_foreign(..., layer=N)"
        )
    module.provenance = {"layer": layer, "input_site": f"{reads}.{layer}", "output_site": f"{writes}.{layer}"}
    return module


def site_of(hook: str) -> tuple[str, int | None]:
    """The site and layer of a TransformerLens hook name (`blocks.3.hook_mlp_out`, or without its block)."""
    match = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)", hook)
    assert match is not None
    if match[2] not in HOOKS:
        raise UnknownNameError("hook", hook, HOOKS)
    return HOOKS[match[2]], None if match[1] is None else int(match[1])


def class_of(reads: str, writes: str) -> type[Transcoder]:
    """A dictionary from a site to itself is an SAE, any other a transcoder."""
    return Sae if reads == writes else Transcoder
