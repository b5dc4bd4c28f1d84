"""Lorsa, SAEs and transcoders in the layout of OpenMOSS' llamascopium.

`config.json` (key `sae_type`: sae or lorsa; a transcoder is an sae with two hook points) and `sae_weights.safetensors`.

    sae     W_E [d, n], b_E [n], W_D [n, d], b_D [d]
    lorsa   W_Q, W_K [g, d, dh], W_V, W_O [n, d], b_Q, b_K [g, dh], b_V [n], b_D [d], ln_q.w and ln_k.w [g, dh] (RMS
            norm of queries and keys); buffers for masks and rotations, which are computed here

JumpReLU thresholds are `activation_function.log_jumprelu_threshold`. With `sparsity_include_decoder_norm` features are
gated by value times decoder norm: that norm goes into the encoder, after which decoder rows have norm 1. With
`norm_activation` dataset-wise their modules see activations times sqrt(d) / mean norm
(`dataset_average_activation_norm.HOOK`); the factors are folded, so ours takes and gives plain activations.

Refused, as they have no exact counterpart here: GLU encoders, normalisation of each token or batch, scaled rotations,
cross-layer transcoders, crosscoders, molt; for Lorsa, gating without the decoder norm.

`save` writes a Lorsa with plain activations (`norm_activation` inference), masks and rotations included, so that their
strict loading finds every name. Refused, as their layout has no place for it: patterns of their own, sinks, windows,
soft caps, LayerNorm of queries and keys, rotations whose frequencies are not b^(-i / half), signed-topk, and batchtopk,
which they rank over each batch where ours keeps a threshold.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.dictionaries.dictionary import load_tensors, save_tensors
from clearhead.dictionaries.interop import build, class_of, place, read_settings, site_of
from clearhead.dictionaries.lorsa import Lorsa, LorsaConfig
from clearhead.dictionaries.transcoder import Transcoder
from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError
from clearhead.runs import write_json

THRESHOLD = "activation_function.log_jumprelu_threshold"
NORM = "dataset_average_activation_norm."
BUFFERS = ("mask", "IGNORE", "rotary_sin", "rotary_cos")


def load(folder: Path, layer: int | None) -> Transcoder | Lorsa:
    """The dictionary in a folder of llamascopium's layout."""
    settings, path = read_settings(folder / "config.json"), folder / "sae_weights.safetensors"
    kind = settings.get("sae_type")
    if kind not in ("sae", "lorsa"):
        raise UnknownNameError("llamascopium sae_type", str(kind), ("sae", "lorsa"))
    tensors = {name: tensor.float() for name, tensor in load_tensors(path).items() if name not in BUFFERS}
    broken = [name for name, tensor in tensors.items() if not name.startswith(NORM) and not tensor.isfinite().all()]
    if broken:
        raise CorruptFileError(f"{broken[0]} in {path} holds NaN or infinity; download it again")
    (reads, found), (writes, other) = site_of(settings["hook_point_in"]), site_of(settings["hook_point_out"])
    if "b_D" not in tensors:
        tensors["b_D"] = torch.zeros(settings["d_model"])
    try:
        module = _sae(settings, tensors, path, reads, writes) if kind == "sae" else _lorsa(settings, tensors, path)
        scales = _scales(settings, tensors, path)
    except KeyError as missing:
        raise CorruptFileError(f"{folder} lacks {missing}; expected what llamascopium saves as a {kind}") from missing
    module.fold_scales(*scales)
    return place(module, layer, (found, other), reads, writes)


def _scales(settings: dict[str, Any], tensors: dict[str, Tensor], path: Path) -> tuple[float, float]:
    """Factors on input and output during their training."""
    mode = settings.get("norm_activation", "dataset-wise")
    if mode == "inference":
        return 1.0, 1.0
    if mode != "dataset-wise":
        raise ClearheadError(
            f"{path} was trained with norm_activation {mode!r}, which depends on the token or batch; "
            f"only dataset-wise and inference are supported"
        )
    norms = [float(tensors[NORM + settings[hook]]) for hook in ("hook_point_in", "hook_point_out")]
    if not all(math.isfinite(norm) and norm > 0 for norm in norms):
        raise CorruptFileError(f"{path} holds the dataset norms {norms}; expected two positive numbers")
    root = math.sqrt(settings["d_model"])
    return root / norms[0], root / norms[1]


def _sae(settings: dict[str, Any], w: dict[str, Tensor], path: Path, reads: str, writes: str) -> Transcoder:
    if settings.get("use_glu_encoder", False):
        raise ClearheadError(f"{path} has a GLU encoder, whose features are not linear in the input; not supported")
    encoder, bias, decoder = w["W_E"].T, w["b_E"], w["W_D"]
    if settings.get("sparsity_include_decoder_norm", True):
        norm = decoder.norm(dim=-1)
        encoder, bias, decoder = encoder * norm[:, None], bias * norm, decoder / norm[:, None]
    return build(
        class_of(reads, writes),
        path,
        W_enc=encoder,
        b_enc=bias,
        W_dec=decoder,
        b_dec=w["b_D"],
        activation=settings.get("act_fn", "relu"),
        k=int(settings.get("top_k", 50)) if "topk" in settings.get("act_fn", "relu") else 1,
        log_threshold=w.get(THRESHOLD),
    )


def _lorsa(settings: dict[str, Any], w: dict[str, Tensor], path: Path) -> Lorsa:
    if not settings.get("sparsity_include_decoder_norm", True):
        raise ClearheadError(f"{path} gates heads without their decoder norm, which our Lorsa does not")
    normed = bool(settings.get("use_post_qk_ln", False))
    config = LorsaConfig(
        d_model=settings["d_model"],
        n_heads=len(w["W_V"]),
        n_groups=settings["n_qk_heads"],
        d_qk=settings["d_qk_head"],
        k=int(settings.get("top_k", 50)) if "topk" in settings.get("act_fn", "relu") else 1,
        activation=settings.get("act_fn", "relu"),
        scale=1 / (settings.get("attn_scale") or math.sqrt(settings["d_qk_head"])),
        rope=rope_of(settings, path),
        qk_norm="rms" if normed else None,
        qk_norm_eps=settings.get("eps", 1e-6) if normed else 0.0,
        unit_norm=False,
    )
    lorsa = Lorsa(config)
    # a checkpoint may hold fewer query-key heads than it is configured with: each then serves several groups
    repeats = config.n_groups // len(w["W_Q"])
    given = {
        "W_Q": w["W_Q"].mT.repeat_interleave(repeats, 0),
        "W_K": w["W_K"].mT.repeat_interleave(repeats, 0),
        "b_Q": w["b_Q"].repeat_interleave(repeats, 0),
        "b_K": w["b_K"].repeat_interleave(repeats, 0),
        **{name: w[name] for name in ("W_V", "W_O", "b_V", "b_D")},
    }
    if normed:
        given["q_gain"] = w["ln_q.w"].repeat_interleave(config.n_groups // len(w["ln_q.w"]), 0)
        given["k_gain"] = w["ln_k.w"].repeat_interleave(config.n_groups // len(w["ln_k.w"]), 0)
    if config.activation == "jumprelu":
        given["log_threshold"] = w[THRESHOLD]
    for name, tensor in given.items():
        own = getattr(lorsa, name)
        if own.shape != tensor.shape:
            raise CorruptFileError(f"{name} in {path} has shape {tuple(tensor.shape)}, expected {tuple(own.shape)}")
        own.data.copy_(tensor)
    return lorsa.unit_normed()


def save(lorsa: Lorsa, folder: Path, context: int) -> Path:
    """Write a Lorsa in llamascopium's layout, for texts of up to `context` tokens; returns the folder.

    Raises `ClearheadError` for what that layout cannot hold; nothing is written then.
    """
    c, layer = lorsa.config, lorsa.provenance.get("layer")
    reasons = {
        "its groups form several patterns": c.patterns_per_group > 1,
        "its patterns have sinks": c.sinks,
        "its attention has a window": c.window is not None,
        "its scores are soft-capped": c.softcap is not None,
        "its queries and keys pass a LayerNorm": c.qk_norm == "layer",
        f"its activation is {c.activation}": c.activation in ("signed-topk", "batchtopk"),
        "its layer is not known (provenance)": layer is None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ClearheadError(f"llamascopium's layout cannot hold this Lorsa: {reason}")
    hooks = (f"blocks.{layer}.ln1.hook_normalized", f"blocks.{layer}.hook_attn_out")
    w = {name: tensor.detach() for name, tensor in lorsa.state_dict().items()}
    tensors = {name: w[name] for name in ("W_V", "W_O", "b_Q", "b_K", "b_V", "b_D")}
    tensors |= {name: w[name].mT for name in ("W_Q", "W_K")}
    if c.qk_norm:
        tensors |= {"ln_q.w": w["q_gain"], "ln_k.w": w["k_gain"]}
    if c.activation == "jumprelu":
        tensors[THRESHOLD] = w["log_threshold"]
    rotation, tables = _rotation(lorsa, context)
    tensors |= tables | {"mask": torch.ones(context, context).tril().bool(), "IGNORE": torch.tensor(-torch.inf)}
    tensors |= {NORM + hook: torch.tensor(1.0) for hook in hooks}
    settings = {
        "sae_type": "lorsa",
        "d_model": c.d_model,
        "expansion_factor": _factor(c.n_heads, c.d_model),
        "use_decoder_bias": True,
        "act_fn": c.activation,
        "top_k": c.k,
        "norm_activation": "inference",
        "sparsity_include_decoder_norm": True,
        "hook_point_in": hooks[0],
        "hook_point_out": hooks[1],
        "n_qk_heads": c.n_groups,
        "d_qk_head": c.d_qk,
        "n_ctx": context,
        "attn_scale": 1 / c.scale,
        "use_post_qk_ln": c.qk_norm is not None,
        "normalization_type": "RMS" if c.qk_norm else None,
        "eps": c.qk_norm_eps or 1e-6,
        **rotation,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "sae_weights.safetensors", tensors)
    write_json(folder / "config.json", settings)
    return folder


def _factor(heads: int, d_model: int) -> float:
    """The expansion factor of which their product with the width, rounded down, is the number of heads."""
    factor = heads / d_model
    return factor if int(d_model * factor) == heads else math.nextafter(factor, math.inf)


def _rotation(lorsa: Lorsa, context: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings of the rotation, and the tables that they keep as buffers."""
    rope = lorsa.rope
    if rope is None:
        return {"positional_embedding_type": "none", "rotary_dim": 0}, {}
    frequency, half = rope.inv_freq, len(rope.inv_freq)
    base = round(float(frequency[-1]) ** (-half / (half - 1))) if half > 1 else 10_000
    plain = base ** (-torch.arange(half, dtype=torch.float32) / half)
    if rope.scaling != 1 or not torch.allclose(frequency, plain, rtol=1e-5, atol=0):
        raise ClearheadError(
            "llamascopium's layout cannot hold this Lorsa: its rotation's frequencies are not powers of one whole base"
        )
    angles = torch.arange(context)[:, None] * plain
    both = angles.repeat_interleave(2, 1) if rope.interleaved else angles.repeat(1, 2)
    settings = {"rotary_dim": rope.rotary_dim, "rotary_base": base, "rotary_adjacent_pairs": rope.interleaved}
    return {"positional_embedding_type": "rotary"} | settings, {"rotary_sin": both.sin(), "rotary_cos": both.cos()}


def rope_of(settings: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """The rotation of queries and keys, as `RopeSpec.to_dict` writes it."""
    if settings.get("positional_embedding_type", "rotary") != "rotary":
        return None
    if settings.get("rotary_scale", 1) != 1:
        raise ClearheadError(f"{path} has rotary_scale {settings['rotary_scale']}; only 1 is supported")
    half = settings["rotary_dim"] // 2
    frequency = settings.get("rotary_base", 10_000) ** (-torch.arange(half, dtype=torch.float32) / half)
    if settings.get("use_NTK_by_parts_rope", False):
        frequency = _by_parts(frequency, settings)
    return {
        "inv_freq": frequency.tolist(),
        "scaling": 1.0,
        "interleaved": bool(settings.get("rotary_adjacent_pairs", True)),
        "rotary_dim": settings["rotary_dim"],
        "limit": None,
    }


def _by_parts(frequency: Tensor, settings: dict[str, Any]) -> Tensor:
    """Frequencies of Llama 3.1 (arXiv 2309.00071, section 3.2): long waves stretched, short ones kept."""
    factor, context = settings["NTK_by_parts_factor"], settings["old_context_len"]
    low, high = settings["NTK_by_parts_low_freq_factor"], settings["NTK_by_parts_high_freq_factor"]
    turns = context * frequency / (2 * math.pi)  # how often a plane turns within the old context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / factor)
