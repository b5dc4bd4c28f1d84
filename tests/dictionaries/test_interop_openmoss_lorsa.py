"""The layout of the paper's own code: its formula by hand, signed and not; what has no counterpart is refused."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from clearhead.dictionaries.interop import load_foreign
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError

D, N, G, DH, K, T, BASE = 6, 12, 3, 4, 5, 9, 50
NORMS = {"in": 3.0, "out": 0.4}


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def write(folder, **changes) -> dict[str, torch.Tensor]:
    w = {
        "W_Q": draw(G, D, DH, seed=1), "W_K": draw(G, D, DH, seed=2), "W_V": draw(N, D, 1, seed=3),
        "W_O": draw(N, 1, D, seed=4), "b_Q": draw(G, DH, seed=5), "b_K": draw(G, DH, seed=6),
        "b_V": draw(N, 1, seed=7), "b_O": draw(D, seed=8),
    }  # fmt: skip
    buffers = {
        "mask": torch.ones(T, T).tril().bool(),
        "rotary_sin": torch.zeros(T, DH),
        "rotary_cos": torch.ones(T, DH),
    }
    save_file(w | buffers, folder / "final.safetensors")
    settings = {
        "d_qk_head": DH, "d_ov_head": 1, "n_qk_heads": G, "n_ov_heads": N, "device": "cuda", "dtype": "torch.float32",
        "virtual_kv_num": 0, "use_z_relu": False, "n_ctx": T, "layer": 2, "model_name": "EleutherAI/pythia-160m",
        "mode": "top_k", "top_k": K, "avg_norm": NORMS, "d_model": D, "attn_scale": None, "rotary_scale": 1,
        "positional_embedding_type": "rotary", "rotary_dim": DH, "rotary_base": BASE, "rotary_adjacent_pairs": False,
        "use_NTK_by_parts_rope": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings | changes))
    return w


def pre_activations(w, x) -> torch.Tensor:
    """z by the paper's formula, with the half layout of the rotation."""

    def side(name: str) -> torch.Tensor:
        vectors = torch.einsum("btd,gdh->bgth", x, w[f"W_{name}"]) + w[f"b_{name}"][:, None]
        angles = torch.arange(T)[:, None] / BASE ** (torch.arange(DH // 2) / (DH / 2))
        first, second = vectors.split(DH // 2, -1)
        turned = (first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos())
        return torch.cat(turned, -1)

    scores = side("Q") @ side("K").mT / math.sqrt(DH)
    pattern = scores.masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf).softmax(-1)
    value = torch.einsum("btd,nd->btn", x, w["W_V"][..., 0]) + w["b_V"][:, 0]
    return torch.einsum("bgqk,bkgn->bqgn", pattern, value.unflatten(-1, (G, -1))).flatten(-2)


@torch.no_grad()
@pytest.mark.parametrize(
    ("changes", "activation"),
    [({}, "signed-topk"), ({"use_z_relu": True}, "topk"), ({"mode": "jumprelu"}, "signed-topk")],
)
def test_the_formula_by_hand(changes, activation, tmp_path):
    w = write(tmp_path, **changes)
    x = draw(2, T, D, seed=9)
    z = pre_activations(w, x * math.sqrt(D) / NORMS["in"])
    gate = z * w["W_O"][:, 0].norm(dim=-1)
    gate = gate.clamp_min(0) if activation == "topk" else gate.abs()
    keep = torch.zeros_like(z).scatter(-1, gate.topk(N if "mode" in changes else K).indices, 1.0)
    if activation == "topk":
        keep = keep * (z > 0)
    module = load_foreign(tmp_path, model="m")
    assert type(module) is Lorsa and module.config.activation == activation
    assert module.provenance["input_site"] == "attn_in.2" and module.provenance["library"] == "openmoss_lorsa"
    expected = ((z * keep) @ w["W_O"][:, 0] + w["b_O"]) * NORMS["out"] / math.sqrt(D)
    torch.testing.assert_close(module(x).y, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"virtual_kv_num": 2}, ClearheadError, "2 virtual keys"),
        ({"d_ov_head": 2}, ClearheadError, "value heads 2 wide"),
        ({"rotary_scale": 2}, ClearheadError, "rotary_scale 2"),
        ({"mode": "top"}, UnknownNameError, "did you mean 'top_k'"),
        ({"avg_norm": {"in": 0.0, "out": 1.0}}, CorruptFileError, "two positive numbers"),
        ({"avg_norm": {"in": 1.0}}, CorruptFileError, "lacks 'out'"),
        ({"n_qk_heads": 6}, CorruptFileError, "has shape"),
    ],
    ids=str,
)
def test_what_has_no_counterpart_is_refused(changes, error, reason, tmp_path):
    write(tmp_path, **changes)
    with pytest.raises(error, match=reason):
        load_foreign(tmp_path, model="m")


def test_the_pickle_itself_is_refused(tmp_path):
    write(tmp_path)
    (tmp_path / "final.safetensors").rename(tmp_path / "final.pth")
    with pytest.raises(ClearheadError, match="is a pickle"):
        load_foreign(tmp_path, model="m")
