"""Files of other libraries, written here in their layouts, against each library's formula written out independently."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from clearhead.dictionaries.clt import Clt
from clearhead.dictionaries.interop import load_foreign
from clearhead.dictionaries.interop_circuit_tracer import save_circuit_tracer
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.dictionaries.sae import Sae
from clearhead.dictionaries.transcoder import Transcoder, TranscoderConfig
from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError

D, N, K, T = 6, 20, 3, 9


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = draw(2, T, D, seed=100)


def keep_largest(pre: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest of each row where they are positive."""
    positive = pre.clamp_min(0)
    return torch.zeros_like(positive).scatter(-1, positive.topk(k).indices, positive.topk(k).values)


@torch.no_grad()
def same(module, expected: torch.Tensor, atol: float = 2e-5) -> None:
    torch.testing.assert_close(module(X).y, expected, atol=atol, rtol=1e-5)


def test_circuit_tracer_transcoders(tmp_path):
    w = {"W_enc": draw(N, D, seed=1), "b_enc": draw(N, seed=2), "W_dec": draw(N, D, seed=3), "b_dec": draw(D, seed=4)}
    threshold, skip = draw(N, seed=5).abs(), draw(D, D, seed=6)
    (tmp_path / "config.yaml").write_text(
        'model_name: "org/m"\nmodel_kind: transcoder_set\nfeature_input_hook: "mlp.hook_in"  # normalised\n'
        "feature_output_hook: mlp.hook_out\ntranscoders:\n- hf://somewhere\n"
    )
    save_file(w, tmp_path / "layer_0.safetensors")
    save_file(w | {"activation_function.threshold": threshold, "W_skip": skip}, tmp_path / "layer_1.safetensors")
    save_file(w | {"k": torch.tensor(K)}, tmp_path / "layer_2.safetensors")
    pre = X @ w["W_enc"].T + w["b_enc"]
    relu = load_foreign(tmp_path, model="m", layer=0)
    same(relu, pre.clamp_min(0) @ w["W_dec"] + w["b_dec"])
    jump = load_foreign(tmp_path, model="m", layer=1)
    same(jump, (pre * (pre > threshold)) @ w["W_dec"] + w["b_dec"] + X @ skip.T)
    same(load_foreign(tmp_path, model="m", layer=2), keep_largest(pre, K) @ w["W_dec"] + w["b_dec"])
    assert type(jump) is Transcoder
    assert jump.provenance == {
        "layer": 1, "input_site": "mlp_in.1", "output_site": "mlp_out.1", "model": "m", "library": "circuit_tracer",
        "source": tmp_path.name,
    }  # fmt: skip
    with pytest.raises(ClearheadError, match=r"layers \[0, 1, 2\]; say which"):
        load_foreign(tmp_path, model="m")
    save_file(w | {"activation_function.threshold": -threshold}, tmp_path / "layer_3.safetensors")
    with pytest.raises(ClearheadError, match="only thresholds from 0 on"):
        load_foreign(tmp_path, model="m", layer=3)


def test_circuit_tracer_cross_layer_transcoders(tmp_path):
    layers, y = 3, torch.zeros(2, T, 3, D)
    x = draw(2, T, layers, D, seed=7)
    for layer in range(layers):
        enc, bias, out = draw(N, D, seed=10 + layer), draw(N, seed=20 + layer), draw(D, seed=30 + layer)
        dec, threshold = draw(N, layers - layer, D, seed=40 + layer), draw(N, seed=50 + layer).abs()
        threshold[0] = 0.0
        save_file(
            {f"W_enc_{layer}": enc, f"b_enc_{layer}": bias, f"b_dec_{layer}": out, f"threshold_{layer}": threshold},
            tmp_path / f"W_enc_{layer}.safetensors",
        )
        save_file({f"W_dec_{layer}": dec}, tmp_path / f"W_dec_{layer}.safetensors")
        pre = x[:, :, layer] @ enc.T + bias
        y[:, :, layer:] += torch.einsum("btn,nld->btld", pre * (pre > threshold), dec)
        y[:, :, layer] += out
    clt = load_foreign(tmp_path, model="m")
    assert type(clt) is Clt and clt.provenance["input_site"] == "resid_mid.*"
    with torch.no_grad():
        torch.testing.assert_close(clt(x).y, y, atol=2e-5, rtol=1e-5)
    with pytest.raises(ClearheadError, match="of all layers; leave the layer out"):
        load_foreign(tmp_path, model="m", layer=1)
    (tmp_path / "W_dec_1.safetensors").unlink()
    with pytest.raises(ClearheadError, match="there is no file"):
        load_foreign(tmp_path, model="m")


@pytest.mark.parametrize("activation", ["topk", "jumprelu", "relu"])
def test_what_circuit_tracer_would_read_comes_back_as_it_was(activation, tmp_path):
    module = Transcoder(TranscoderConfig(d_in=D, d_out=D, n_features=N, k=K, activation=activation, skip=True))
    for number, parameter in enumerate(module.parameters()):
        parameter.data = draw(*parameter.shape, seed=number)
    module.provenance = {"model": "m", "layer": 0, "input_site": "mlp_in.0", "output_site": "mlp_out.0"}
    again = load_foreign(save_circuit_tracer([module], tmp_path), model="m")
    with torch.no_grad():
        same(again, module(X).y)
    assert again.provenance["input_site"] == "mlp_in.0"
    with pytest.raises(ClearheadError, match="one for every layer, in order from 0"):
        save_circuit_tracer([module, module], tmp_path / "two")
    module.provenance |= {"input_site": "attn_in.0", "output_site": "attn_out.0"}
    with pytest.raises(ClearheadError, match="goes from attn_in to attn_out; circuit-tracer takes those of MLPs"):
        save_circuit_tracer([module], tmp_path / "two")
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize("transcode", [False, True])
def test_sparsify(transcode, tmp_path):
    folder = tmp_path / "layers.12.mlp"
    folder.mkdir()
    w = {
        "encoder.weight": draw(N, D, seed=1), "encoder.bias": draw(N, seed=2), "W_dec": draw(N, D, seed=3),
        "b_dec": draw(D, seed=4), "W_skip": draw(D, D, seed=5),
    }  # fmt: skip
    save_file(w, folder / "sae.safetensors")
    settings = {"activation": "topk", "k": K, "transcode": transcode, "skip_connection": True, "d_in": D}
    (folder / "cfg.json").write_text(json.dumps(settings))
    module = load_foreign(folder, model="m")
    read = X if transcode else X - w["b_dec"]
    pre = read @ w["encoder.weight"].T + w["encoder.bias"]
    same(module, keep_largest(pre, K) @ w["W_dec"] + w["b_dec"] + X @ w["W_skip"].T)
    assert type(module) is (Transcoder if transcode else Sae)
    assert module.provenance["input_site"] == ("mlp_in.12" if transcode else "mlp_out.12")
    (folder / "cfg.json").write_text(json.dumps(settings | {"activation": "groupmax"}))
    with pytest.raises(ClearheadError, match="only topk is supported"):
        load_foreign(folder, model="m")
    (folder / "cfg.json").write_text(json.dumps(settings))
    with pytest.raises(ClearheadError, match="not named after a hook point"):
        load_foreign(folder.rename(tmp_path / "download"), model="m")


SAELENS = {
    "standard": {"apply_b_dec_to_input": True},
    "topk": {"k": K, "rescale_acts_by_decoder_norm": True, "apply_b_dec_to_input": False},
    "jumprelu": {"apply_b_dec_to_input": False},
    "jumprelu_transcoder": {"apply_b_dec_to_input": False},
    "skip_transcoder": {"apply_b_dec_to_input": False},
}


@pytest.mark.parametrize("architecture", SAELENS)
def test_saelens(architecture, tmp_path):
    w = {"W_enc": draw(D, N, seed=1), "b_enc": draw(N, seed=2), "W_dec": draw(N, D, seed=3), "b_dec": draw(D, seed=4)}
    threshold, skip, options = draw(N, seed=5).abs(), draw(D, D, seed=6), SAELENS[architecture]
    extra = {"threshold": threshold} if "jumprelu" in architecture else {}
    extra |= {"W_skip": skip} if "skip" in architecture else {}
    save_file(w | extra, tmp_path / "sae_weights.safetensors")
    hooks = {"hook_name": "blocks.4.hook_resid_post"}
    if "transcoder" in architecture:
        hooks = {"hook_name": "blocks.4.ln2.hook_normalized", "hook_name_out": "blocks.4.hook_mlp_out"}
    settings = {"architecture": architecture, "d_in": D, "d_sae": N, "metadata": hooks, **options}
    (tmp_path / "cfg.json").write_text(json.dumps(settings))
    pre = (X - w["b_dec"] if options["apply_b_dec_to_input"] else X) @ w["W_enc"] + w["b_enc"]
    if architecture == "topk":
        norm = w["W_dec"].norm(dim=-1)
        acts = keep_largest(pre * norm, K) / norm
    else:
        acts = pre.clamp_min(0) * (pre > threshold if "jumprelu" in architecture else 1)
    y = acts @ w["W_dec"] + w["b_dec"] + (X @ skip.T if "skip" in architecture else 0)
    module = load_foreign(tmp_path, model="m")
    same(module, y)
    sites = ("mlp_in.4", "mlp_out.4") if "transcoder" in architecture else ("resid_post.4",) * 2
    assert (module.provenance["input_site"], module.provenance["output_site"]) == sites
    assert type(module) is (Transcoder if "transcoder" in architecture else Sae)
    for change, message in {
        "normalize_activations": ("layer_norm", "only 'none' is supported"),
        "architecture": ("gated", "unknown SAELens architecture 'gated'"),
        "metadata": ({"hook_name": "blocks.4.attn.hook_z"}, "unknown hook"),
    }.items():
        (tmp_path / "cfg.json").write_text(json.dumps(settings | {change: message[0]}))
        with pytest.raises(ClearheadError, match=message[1]):
            load_foreign(tmp_path, model="m")


def test_saelens_before_version_6(tmp_path):
    w = {"W_enc": draw(D, N, seed=1), "b_enc": draw(N, seed=2), "W_dec": draw(N, D, seed=3), "b_dec": draw(D, seed=4)}
    save_file(w, tmp_path / "sae_weights.safetensors")
    old = {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}, "hook_name": "blocks.2.hook_mlp_out"}
    (tmp_path / "cfg.json").write_text(json.dumps(old))
    module = load_foreign(tmp_path, model="m")
    same(module, keep_largest((X - w["b_dec"]) @ w["W_enc"] + w["b_enc"], K) @ w["W_dec"] + w["b_dec"])
    assert module.provenance["input_site"] == "mlp_out.2"


@pytest.mark.parametrize("act_fn", ["topk", "jumprelu"])
def test_llamascopium_transcoders(act_fn, tmp_path):
    w = {"W_E": draw(D, N, seed=1), "b_E": draw(N, seed=2), "W_D": draw(N, D, seed=3), "b_D": draw(D, seed=4)}
    log_threshold = 0.3 * draw(N, seed=5)
    norms = {"blocks.3.ln2.hook_normalized": 5.0, "blocks.3.hook_mlp_out": 0.7}
    extra = {"activation_function.log_jumprelu_threshold": log_threshold} if act_fn == "jumprelu" else {}
    extra |= {f"dataset_average_activation_norm.{hook}": torch.tensor(value) for hook, value in norms.items()}
    save_file(w | extra, tmp_path / "sae_weights.safetensors")
    reads, writes = norms
    settings = {
        "sae_type": "sae", "d_model": D, "expansion_factor": N / D, "act_fn": act_fn, "top_k": K,
        "norm_activation": "dataset-wise", "sparsity_include_decoder_norm": True,
        "hook_point_in": reads, "hook_point_out": writes,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    norm, root = w["W_D"].norm(dim=-1), math.sqrt(D)
    gate = ((X * root / norms[reads]) @ w["W_E"] + w["b_E"]) * norm
    kept = keep_largest(gate, K) if act_fn == "topk" else gate * (gate > log_threshold.exp())
    module = load_foreign(tmp_path, model="m")
    same(module, ((kept / norm) @ w["W_D"] + w["b_D"]) * norms[writes] / root)
    assert module.provenance["layer"] == 3 and type(module) is Transcoder
    (tmp_path / "config.json").write_text(json.dumps(settings | {"norm_activation": "token-wise"}))
    with pytest.raises(ClearheadError, match="only dataset-wise and inference"):
        load_foreign(tmp_path, model="m")
    (tmp_path / "config.json").write_text(json.dumps(settings | {"sae_type": "molt"}))
    with pytest.raises(UnknownNameError, match="molt"):
        load_foreign(tmp_path, model="m")


@pytest.mark.parametrize("interleaved", [True, False])
def test_llamascopium_lorsa(interleaved, tmp_path):
    groups, dh, rotary, base = 2, 4, 4, 100
    w = {
        "W_Q": draw(groups, D, dh, seed=1), "W_K": draw(groups, D, dh, seed=2), "W_V": draw(N, D, seed=3),
        "W_O": draw(N, D, seed=4), "b_Q": draw(groups, dh, seed=5), "b_K": draw(groups, dh, seed=6),
        "b_V": draw(N, seed=7), "b_D": draw(D, seed=8),
        "ln_q.w": 1 + 0.2 * draw(groups, dh, seed=9), "ln_k.w": 1 + 0.2 * draw(groups, dh, seed=10),
    }  # fmt: skip
    hooks = ("blocks.1.ln1.hook_normalized", "blocks.1.hook_attn_out")
    norms = {f"dataset_average_activation_norm.{hooks[0]}": torch.tensor(3.0)}
    norms[f"dataset_average_activation_norm.{hooks[1]}"] = torch.tensor(0.4)
    buffers = {"mask": torch.ones(T, T).tril().bool(), "IGNORE": torch.tensor(-torch.inf)}
    save_file(w | norms | buffers, tmp_path / "sae_weights.safetensors")
    settings = {
        "sae_type": "lorsa", "d_model": D, "expansion_factor": N / D, "act_fn": "topk", "top_k": K,
        "norm_activation": "dataset-wise", "hook_point_in": hooks[0], "hook_point_out": hooks[1], "n_qk_heads": groups,
        "d_qk_head": dh, "rotary_dim": rotary, "rotary_base": base, "rotary_adjacent_pairs": interleaved, "n_ctx": T,
        "attn_scale": 1.7, "use_post_qk_ln": True, "normalization_type": "RMS", "eps": 1e-6,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))

    x = X * math.sqrt(D) / 3.0

    def turned(vectors: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(T)[:, None] / base ** (torch.arange(rotary // 2) / (rotary / 2))
        parts = vectors.unflatten(-1, (-1, 2)) if interleaved else vectors.unflatten(-1, (2, -1)).mT
        first, second = parts.unbind(-1)
        pair = (first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos())
        return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)

    def side(name: str) -> torch.Tensor:
        raw = torch.einsum("btd,gdh->bgth", x, w[f"W_{name}"]) + w[f"b_{name}"][:, None]
        normed = raw / (raw.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return turned(normed * w[f"ln_{name.lower()}.w"][:, None])

    scores = side("Q") @ side("K").mT / 1.7
    pattern = scores.masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf).softmax(-1)
    value = (x @ w["W_V"].T + w["b_V"]).unflatten(-1, (groups, -1))
    z = torch.einsum("bgqk,bkgn->bqgn", pattern, value).flatten(-2)
    norm = w["W_O"].norm(dim=-1)
    kept = keep_largest(z * norm, K) / norm
    module = load_foreign(tmp_path, model="m")
    assert type(module) is Lorsa and module.provenance["input_site"] == "attn_in.1"
    same(module, (kept @ w["W_O"] + w["b_D"]) * 0.4 / math.sqrt(D), atol=5e-5)


def test_pickles_and_unknown_folders_are_refused(tmp_path):
    with pytest.raises(ClearheadError, match="holds no dictionary of a known layout"):
        load_foreign(tmp_path, model="m")
    (tmp_path / "layer_0.pt").write_bytes(b"\x80\x04.")
    with pytest.raises(ClearheadError, match="is a pickle, and opening it can run code"):
        load_foreign(tmp_path, model="m")
    with pytest.raises(ClearheadError, match="there is no folder"):
        load_foreign(tmp_path / "nowhere", model="m")


def test_damaged_files_are_named(tmp_path):
    w = {"W_enc": draw(N, D, seed=1), "b_enc": draw(N, seed=2), "W_dec": draw(N, D, seed=3), "b_dec": draw(D, seed=4)}
    save_file({name: w[name] for name in ("W_enc", "b_enc", "W_dec")}, tmp_path / "layer_0.safetensors")
    with pytest.raises(CorruptFileError, match="lacks b_dec"):
        load_foreign(tmp_path, model="m")
    save_file(w | {"b_enc": torch.full((N,), torch.nan)}, tmp_path / "layer_0.safetensors")
    with pytest.raises(CorruptFileError, match="b_enc in .* holds NaN"):
        load_foreign(tmp_path, model="m")
    save_file(w | {"b_enc": draw(N + 1, seed=2)}, tmp_path / "layer_0.safetensors")
    with pytest.raises(CorruptFileError, match=r"b_enc in .* has shape \(21,\), expected \(20,\)"):
        load_foreign(tmp_path, model="m")
