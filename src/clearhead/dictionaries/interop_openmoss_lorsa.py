"""Lorsas in the layout of the paper's own code (the repository OpenMOSS/Lorsa of 2025).

`config.json` (keys `n_ov_heads`, `n_qk_heads`, …; no `sae_type`) and the tensors of `final.pth`, which is a pickle:
convert it to `final.safetensors` in a place you can throw away, names unchanged.

    W_Q, W_K [g, d, dh], b_Q, b_K [g, dh], W_V [n, d, 1], b_V [n, 1], W_O [n, 1, d], b_O [d]; masks and rotations

Heads are ranked by |z| |w_o| and keep their sign (`signed-topk`); with `use_z_relu` by max(z, 0) |w_o| (`topk`). There
a token with fewer than K positive heads fills up with arbitrary others at their negative z; ours leaves those at 0. The
mode `jumprelu` of that code has no threshold: all heads stay (`signed-topk` with K = n). Activations were scaled by
sqrt(d) / mean norm (`avg_norm`); the factors are folded, so ours takes and gives plain activations.

Refused: virtual keys (`virtual_kv_num`). They are not sink logits: their scores depend on the query, unrotated, and the
mask that came with them lets queries see as many future keys. Scaled rotations, value heads wider than 1.
"""

import math
from pathlib import Path
from typing import Any

from clearhead.dictionaries.interop import place, read_settings, read_weights
from clearhead.dictionaries.interop_llamascopium import rope_of
from clearhead.dictionaries.lorsa import Lorsa, LorsaConfig
from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError

WEIGHTS = "final.safetensors"
TENSORS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
BUFFERS = ("mask", "IGNORE", "rotary_sin", "rotary_cos")


def load(folder: Path, layer: int | None) -> Lorsa:
    """The Lorsa in a folder of the 2025 layout."""
    settings, path = read_settings(folder / "config.json"), folder / WEIGHTS
    if settings.get("virtual_kv_num", 0):
        raise ClearheadError(
            f"{folder} has {settings['virtual_kv_num']} virtual keys, whose scores depend on the query and whose mask "
            f"is not causal; no Lorsa of ours computes that"
        )
    if settings.get("d_ov_head", 1) != 1:
        raise ClearheadError(f"{folder} has value heads {settings['d_ov_head']} wide; a Lorsa's heads are 1 wide")
    w = read_weights(path, TENSORS, BUFFERS)
    try:
        lorsa = Lorsa(_config(settings, folder))
        norms = [float(settings["avg_norm"][side]) for side in ("in", "out")]
        found = int(settings["layer"])
    except KeyError as missing:
        raise CorruptFileError(f"{folder} lacks {missing}; expected what OpenMOSS/Lorsa saves") from missing
    if not all(math.isfinite(norm) and norm > 0 for norm in norms):
        raise CorruptFileError(f"{folder} holds the mean norms {norms}; expected two positive numbers")
    given = {
        **{name: w[name].mT for name in ("W_Q", "W_K")},
        **{name: w[name] for name in ("b_Q", "b_K")},
        **{"W_V": w["W_V"].squeeze(-1), "W_O": w["W_O"].squeeze(1), "b_V": w["b_V"].squeeze(-1), "b_D": w["b_O"]},
    }
    for name, tensor in given.items():
        own = lorsa.get_parameter(name)
        if own.shape != tensor.shape:
            raise CorruptFileError(f"{name} in {path} has shape {tuple(tensor.shape)}, expected {tuple(own.shape)}")
        own.data.copy_(tensor)
    root = math.sqrt(settings["d_model"])
    lorsa = lorsa.unit_normed().fold_scales(root / norms[0], root / norms[1])
    return place(lorsa, layer, (found,), "attn_in", "attn_out")


def _config(settings: dict[str, Any], folder: Path) -> LorsaConfig:
    mode = settings.get("mode", "top_k")
    if mode not in ("top_k", "jumprelu"):
        raise UnknownNameError("mode", str(mode), ("top_k", "jumprelu"), f"({folder}/config.json)")
    everything = mode == "jumprelu"
    return LorsaConfig(
        d_model=settings["d_model"],
        n_heads=settings["n_ov_heads"],
        n_groups=settings["n_qk_heads"],
        d_qk=settings["d_qk_head"],
        k=settings["n_ov_heads"] if everything else settings["top_k"],
        activation="topk" if settings.get("use_z_relu", False) and not everything else "signed-topk",
        scale=1 / (settings.get("attn_scale") or math.sqrt(settings["d_qk_head"])),
        rope=rope_of(settings, folder),
        unit_norm=False,
    )
