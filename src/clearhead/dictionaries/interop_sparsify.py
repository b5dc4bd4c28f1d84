"""TopK SAEs and transcoders in the layout of EleutherAI's sparsify (eai-sparsify).

`cfg.json` (k, transcode, skip_connection, activation, d_in) and `sae.safetensors` with encoder.weight [n, d],
encoder.bias [n], W_dec [n, d], b_dec [d] and W_skip [d, d], applied as x W_skip^T. Without `transcode` the decoder bias
is subtracted from the input before encoding, which becomes part of our b_enc:

    w . (x - b_dec) + b = w . x + (b - w . b_dec)

Layer and site come from the folder's name (`layers.12.mlp`, `h.3`). Refused: the activation groupmax.
"""

import re
from pathlib import Path

from clearhead.dictionaries.interop import build, class_of, place, read_settings, read_weights
from clearhead.dictionaries.transcoder import Transcoder
from clearhead.errors import ClearheadError

MODULES = {"mlp": "mlp", "attn": "attn", "self_attn": "attn", "attention": "attn", "": "resid"}


def load(folder: Path, layer: int | None) -> Transcoder:
    """The dictionary in a folder of sparsify's layout."""
    settings, path = read_settings(folder / "cfg.json"), folder / "sae.safetensors"
    if settings.get("activation", "topk") != "topk":
        raise ClearheadError(f"{folder / 'cfg.json'} has activation {settings['activation']!r}; only topk is supported")
    w = read_weights(path, ("encoder.weight", "encoder.bias", "W_dec", "b_dec"), ("W_skip",))
    transcode = bool(settings.get("transcode", False))
    found, part = _hookpoint(folder.name)
    reads = {"mlp": "mlp_in", "attn": "attn_in", "resid": "resid_pre"}[part]
    writes = {"mlp": "mlp_out", "attn": "attn_out", "resid": "resid_post"}[part]
    reads = reads if transcode else writes
    bias = w["encoder.bias"] if transcode else w["encoder.bias"] - w["encoder.weight"] @ w["b_dec"]
    module = build(
        class_of(reads, writes),
        path,
        W_enc=w["encoder.weight"],
        b_enc=bias,
        W_dec=w["W_dec"],
        b_dec=w["b_dec"],
        activation="topk",
        k=int(settings["k"]),
        W_skip=w["W_skip"].T if "W_skip" in w else None,
    )
    return place(module, layer, (found,), reads, writes)


def _hookpoint(name: str) -> tuple[int, str]:
    """Layer and module of a hook point such as `layers.12.mlp`."""
    match = re.fullmatch(r"(?:\w+\.)*(\d+)(?:\.(\w+))?", name)
    if match is None or (match[2] or "") not in MODULES:
        raise ClearheadError(
            f"the folder {name} is not named after a hook point, as sparsify names it; call it layers.N or layers.N.mlp"
        )
    return int(match[1]), MODULES[match[2] or ""]
