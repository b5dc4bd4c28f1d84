"""Transcoders and cross-layer transcoders in the layout of circuit-tracer.

A per-layer set has `layer_N.safetensors` with W_enc [n, d], b_enc, W_dec [n, d], b_dec, optionally
`activation_function.threshold` [n] (JumpReLU), `k` (TopK) and W_skip, applied as x W_skip^T. A cross-layer transcoder
has for every layer N `W_enc_N.safetensors` (W_enc_N [n, d], b_enc_N, b_dec_N, optionally threshold_N) and
`W_dec_N.safetensors` (W_dec_N [n, L - N, d]). `config.yaml` names the hooks (`feature_input_hook`,
`feature_output_hook`); its top-level scalars are all that is read of it. Without one they are hook_resid_mid and
hook_mlp_out, as circuit-tracer assumes.

Differences: their TopK keeps the k largest values even where they are negative, ours only positive ones. Refused: the
skip connection of a cross-layer transcoder, and repositories of Google's own layouts.

`save_circuit_tracer` writes the same layout.
"""

import re
from pathlib import Path

import torch

from clearhead.dictionaries.clt import Clt, CltConfig
from clearhead.dictionaries.dictionary import save_tensors
from clearhead.dictionaries.interop import build, log_threshold_of, place, read_weights, site_of
from clearhead.dictionaries.transcoder import Transcoder
from clearhead.errors import ClearheadError
from clearhead.runs import written_aside

THRESHOLD = "activation_function.threshold"


def load(folder: Path, layer: int | None) -> Transcoder | Clt:
    """The transcoder of `layer`, or the cross-layer transcoder, in a folder of circuit-tracer's layout."""
    settings = _settings(folder / "config.yaml")
    reads, _ = site_of(settings.get("feature_input_hook", "hook_resid_mid"))
    writes, _ = site_of(settings.get("feature_output_hook", "hook_mlp_out"))
    if list(folder.glob("W_enc_*.safetensors")):
        if layer is not None:
            raise ClearheadError(f"{folder} holds a cross-layer transcoder, of all layers; leave the layer out")
        return _load_clt(folder, reads, writes)
    return _load_layer(folder, layer, reads, writes, settings)


def _settings(path: Path) -> dict[str, str]:
    """Top-level `key: scalar` lines; lists and nested values are passed over."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    found = (re.fullmatch(r"(\w+):\s*(['\"]?)([^'\"#]+?)\2\s*(?:#.*)?", line) for line in lines)
    return {match[1]: match[3] for match in found if match is not None}


def _load_layer(folder: Path, layer: int | None, reads: str, writes: str, settings: dict[str, str]) -> Transcoder:
    present = sorted(int(path.stem.removeprefix("layer_")) for path in folder.glob("layer_*.safetensors"))
    if layer is None and len(present) == 1:
        layer = present[0]
    if layer not in present:
        raise ClearheadError(f"{folder} holds transcoders for the layers {present}; say which: --layer N, or layer=N")
    path = folder / f"layer_{layer}.safetensors"
    w = read_weights(path, ("W_enc", "b_enc", "W_dec", "b_dec"), (THRESHOLD, "k", "W_skip"))
    k = int(w["k"]) if "k" in w else int(settings.get("k", 0))
    activation = "jumprelu" if THRESHOLD in w else "topk" if k else "relu"
    module = build(
        Transcoder,
        path,
        W_enc=w["W_enc"],
        b_enc=w["b_enc"],
        W_dec=w["W_dec"],
        b_dec=w["b_dec"],
        activation=activation,
        k=k or 1,
        W_skip=w["W_skip"].T if "W_skip" in w else None,
        log_threshold=log_threshold_of(w[THRESHOLD].flatten(), path) if THRESHOLD in w else None,
    )
    return place(module, layer, (), reads, writes)


def _load_clt(folder: Path, reads: str, writes: str) -> Clt:
    n_layers = len(list(folder.glob("W_enc_*.safetensors")))
    encoders = []
    for layer in range(n_layers):
        names = tuple(f"{name}_{layer}" for name in ("W_enc", "b_enc", "b_dec"))
        w = read_weights(folder / f"W_enc_{layer}.safetensors", names, (f"threshold_{layer}",))
        w |= read_weights(folder / f"W_dec_{layer}.safetensors", (f"W_dec_{layer}",))
        encoders.append({name.rsplit("_", 1)[0]: tensor for name, tensor in w.items()})
    n, d = encoders[0]["W_enc"].shape
    jumps = "threshold" in encoders[0]
    config = CltConfig(
        d_model=d,
        n_layers=n_layers,
        n_features=n,
        k=1,
        activation="jumprelu" if jumps else "relu",
        unit_norm=False,
    )
    clt = Clt(config, {"layer": None, "layers": n_layers, "input_site": f"{reads}.*", "output_site": f"{writes}.*"})
    with torch.no_grad():
        for layer, w in enumerate(encoders):
            shapes = {"W_enc": (n, d), "b_enc": (n,), "b_dec": (d,), "W_dec": (n, n_layers - layer, d)}
            wrong = [name for name, shape in shapes.items() if tuple(w[name].shape) != shape]
            if wrong:
                raise ClearheadError(
                    f"{wrong[0]}_{layer} in {folder} has shape {tuple(w[wrong[0]].shape)}, expected {shapes[wrong[0]]}"
                )
            clt.W_enc[layer].copy_(w["W_enc"])
            clt.b_enc[layer].copy_(w["b_enc"])
            clt.b_dec[layer].copy_(w["b_dec"])
            clt.W_dec[layer].copy_(w["W_dec"])
            if jumps:
                clt.log_threshold[layer].copy_(log_threshold_of(w["threshold"].flatten(), folder))
    return clt


def save_circuit_tracer(modules: list[Transcoder], folder: str | Path) -> Path:
    """Write one transcoder per layer, in order from layer 0, as circuit-tracer reads them.

    Raises `ClearheadError` for batchtopk, which circuit-tracer does not know, for layers out of order, and for sites
    other than the MLP's; nothing is written then.
    """
    folder = Path(folder)
    hooks = {"mlp_in": "mlp.hook_in", "resid_mid": "hook_resid_mid"}
    for layer, module in enumerate(modules):
        if module.provenance.get("layer") != layer:
            raise ClearheadError(
                f"transcoder {layer} is for layer {module.provenance.get('layer')}; circuit-tracer needs one for every "
                f"layer, in order from 0"
            )
        if module.config.activation == "batchtopk":
            raise ClearheadError("circuit-tracer has no batchtopk; train with --activation topk or jumprelu")
        first, (reads, writes) = _sites(modules[0]), _sites(module)
        if reads not in hooks or writes != "mlp_out" or (reads, writes) != first:
            raise ClearheadError(
                f"transcoder {layer} goes from {reads} to {writes}; circuit-tracer takes those of MLPs, from "
                f"{' or '.join(hooks)} to mlp_out, of all layers alike"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for layer, module in enumerate(modules):
        tensors = {name: getattr(module, name) for name in ("W_enc", "b_enc", "W_dec", "b_dec")}
        if module.W_skip is not None:
            tensors["W_skip"] = module.W_skip.T
        if module.config.activation == "jumprelu":
            tensors[THRESHOLD] = module.log_threshold.exp()
        if module.config.activation == "topk":
            tensors["k"] = torch.tensor(module.config.k)
        save_tensors(folder / f"layer_{layer}.safetensors", tensors)
    reads, _ = _sites(modules[0])
    with written_aside(folder / "config.yaml") as aside:
        aside.write_text(
            f"model_kind: transcoder_set\nfeature_input_hook: {hooks[reads]}\nfeature_output_hook: hook_mlp_out\n"
            f"model_name: {modules[0].provenance['model']}\n",
            encoding="utf-8",
        )
    return folder


def _sites(module: Transcoder) -> tuple[str, str]:
    """What it reads and writes, without the layer."""
    reads, writes = (str(module.provenance.get(f"{side}_site")).split(".")[0] for side in ("input", "output"))
    return reads, writes
