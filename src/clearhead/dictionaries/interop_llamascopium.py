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
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.dictionaries.dictionary import load_tensors
from clearhead.dictionaries.interop import build, class_of, place, read_settings, site_of
from clearhead.dictionaries.lorsa import Lorsa, LorsaConfig
from clearhead.dictionaries.transcoder import Transcoder
from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError

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
    (reads, found), (writes, _) = site_of(settings["hook_point_in"]), site_of(settings["hook_point_out"])
    if "b_D" not in tensors:
        tensors["b_D"] = torch.zeros(settings["d_model"])
    try:
        module = _sae(settings, tensors, path, reads, writes) if kind == "sae" else _lorsa(settings, tensors, path)
        scales = _scales(settings, tensors, path)
    except KeyError as missing:
        raise CorruptFileError(f"{folder} lacks {missing}; expected what llamascopium saves as a {kind}") from missing
    module.fold_scales(*scales)
    return place(module, found if layer is None else layer, reads, writes)


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
        rope=_rope(settings, path),
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


def _rope(settings: dict[str, Any], path: Path) -> dict[str, Any] | None:
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
