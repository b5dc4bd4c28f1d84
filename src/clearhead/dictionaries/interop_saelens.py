"""SAEs and transcoders in the layout of SAELens.

`cfg.json` and `sae_weights.safetensors` with W_enc [d_in, n], b_enc, W_dec [n, d_out], b_dec, and `threshold`
(JumpReLU) or W_skip [d_out, d_in]. Architectures: standard, topk, jumprelu, and of transcoders the plain (transcoder),
skip_transcoder and jumprelu_transcoder.
With `apply_b_dec_to_input` (the default of SAEs) the decoder bias is subtracted from the input, which becomes part of
b_enc; with `rescale_acts_by_decoder_norm` features are ranked by value times decoder norm, which becomes part of the
encoder, after which decoder rows have norm 1. Both forms of cfg.json are read: hooks under `metadata` (version 6) and
at the top (before).

Refused, as they have no exact counterpart here: other architectures, normalised activations, `hook_z`.
"""

from pathlib import Path
from typing import Any

from clearhead.dictionaries.interop import (
    build,
    class_of,
    log_threshold_of,
    place,
    read_settings,
    read_weights,
    site_of,
)
from clearhead.dictionaries.transcoder import Transcoder
from clearhead.errors import ClearheadError, UnknownNameError

ACTIVATIONS = {
    "standard": "relu",
    "topk": "topk",
    "jumprelu": "jumprelu",
    "transcoder": "relu",
    "skip_transcoder": "relu",
    "jumprelu_transcoder": "jumprelu",
}


def load(folder: Path, layer: int | None) -> Transcoder:
    """The dictionary in a folder of SAELens' layout."""
    settings, path = read_settings(folder / "cfg.json"), folder / "sae_weights.safetensors"
    architecture = _architecture(settings)
    if architecture not in ACTIVATIONS:
        raise UnknownNameError("SAELens architecture", architecture, ACTIVATIONS)
    if settings.get("normalize_activations", "none") not in ("none", None, False):
        raise ClearheadError(
            f"{folder / 'cfg.json'} normalises activations ({settings['normalize_activations']}); only 'none' is "
            f"supported: fold the factor into the weights first (SAE.fold_activation_norm_scaling_factor)"
        )
    w = read_weights(path, ("W_enc", "b_enc", "W_dec", "b_dec"), ("threshold", "W_skip"))
    encoder, bias, decoder = w["W_enc"].T, w["b_enc"], w["W_dec"]
    hooks = settings.get("metadata", settings)
    reads, found = site_of(str(hooks.get("hook_name", settings.get("hook_point"))))
    is_transcoder = "transcoder" in architecture
    if is_transcoder and not hooks.get("hook_name_out"):
        raise ClearheadError(f"{folder / 'cfg.json'} does not name the transcoder's output; add hook_name_out to it")
    writes, other = site_of(str(hooks["hook_name_out"])) if is_transcoder else (reads, found)
    if not is_transcoder and settings.get("apply_b_dec_to_input", True):
        bias = bias - encoder @ w["b_dec"]
    if settings.get("rescale_acts_by_decoder_norm", False):
        norm = decoder.norm(dim=-1)
        encoder, bias, decoder = encoder * norm[:, None], bias * norm, decoder / norm[:, None]
    module = build(
        class_of(reads, writes),
        path,
        W_enc=encoder,
        b_enc=bias,
        W_dec=decoder,
        b_dec=w["b_dec"],
        activation=ACTIVATIONS[architecture],
        k=_k(settings) if architecture == "topk" else 1,
        W_skip=w["W_skip"].T if "W_skip" in w else None,
        log_threshold=log_threshold_of(w["threshold"], path) if "threshold" in w else None,
    )
    return place(module, layer, (found, other), reads, writes)


def _architecture(settings: dict[str, Any]) -> str:
    """The architecture; before version 6 topk was a standard SAE with another activation function."""
    if settings.get("activation_fn_str", settings.get("activation_fn")) == "topk":
        return "topk"
    return str(settings.get("architecture", "standard"))


def _k(settings: dict[str, Any]) -> int:
    return int(settings["k"] if "k" in settings else settings["activation_fn_kwargs"]["k"])
