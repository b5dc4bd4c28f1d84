"""Lorsas written in llamascopium's layout come back equal; what that layout cannot hold is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file

from clearhead.dictionaries.interop import load_foreign, save_foreign
from clearhead.dictionaries.lorsa import Lorsa, LorsaConfig
from clearhead.dictionaries.sae import Sae
from clearhead.dictionaries.transcoder import TranscoderConfig
from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.rope import RopeSpec

ROPE = RopeSpec(100.0 ** (-torch.arange(3) / 3), 1.0, False, 6).to_dict()


def make(**options) -> Lorsa:
    settings = {"d_model": 7, "n_heads": 12, "n_groups": 3, "d_qk": 8, "k": 4, "scale": 0.3, "rope": ROPE} | options
    lorsa = Lorsa(LorsaConfig(**settings), {"layer": 3, "training": {"context": 16}}).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in lorsa.parameters():
            parameter.normal_(generator=generator)
        if lorsa.config.unit_norm:
            lorsa.normalise_decoder()
    return lorsa


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk_norm": "rms", "qk_norm_eps": 1e-5},
        {"rope": None, "activation": "relu"},
        {"rope": ROPE | {"interleaved": True}, "activation": "jumprelu"},
        {"unit_norm": False},
    ],
    ids=str,
)
def test_a_round_trip_keeps_every_tensor(options, tmp_path):
    lorsa = make(**options)
    save_foreign(lorsa, tmp_path, "llamascopium")
    back = load_foreign(tmp_path, model="m")
    assert back.provenance["input_site"] == "attn_in.3" and back.provenance["output_site"] == "attn_out.3"
    unit = lorsa if lorsa.config.unit_norm else lorsa.unit_normed()
    for name, tensor in unit.state_dict().items():
        torch.testing.assert_close(back.state_dict()[name], tensor, rtol=1e-6, atol=1e-7)
    x = torch.randn(2, 16, 7, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(back(x).y, lorsa(x).y, atol=1e-5, rtol=1e-4)


def test_the_files_hold_what_strict_loading_expects(tmp_path):
    save_foreign(make(), tmp_path, "llamascopium", context=9)
    settings, tensors = (
        json.loads((tmp_path / "config.json").read_text()),
        load_file(tmp_path / "sae_weights.safetensors"),
    )
    hooks = ("blocks.3.ln1.hook_normalized", "blocks.3.hook_attn_out")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        **{"W_Q": (3, 7, 8), "W_K": (3, 7, 8), "b_Q": (3, 8), "b_K": (3, 8), "W_V": (12, 7), "W_O": (12, 7)},
        **{"b_V": (12,), "b_D": (7,), "mask": (9, 9), "IGNORE": (), "rotary_sin": (9, 6), "rotary_cos": (9, 6)},
        **{f"dataset_average_activation_norm.{hook}": () for hook in hooks},
    }
    assert int(settings["d_model"] * settings["expansion_factor"]) == 12 and settings["rotary_base"] == 100
    # the half layout turns components i and i + 3 alike
    torch.testing.assert_close(tensors["rotary_sin"][:, :3], tensors["rotary_sin"][:, 3:])
    torch.testing.assert_close(tensors["rotary_cos"][4, 1], torch.tensor(4 * 100 ** (-1 / 3)).cos())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"patterns_per_group": 2}, "several patterns"),
        ({"sinks": True}, "sinks"),
        ({"window": 5}, "window"),
        ({"softcap": 5.0}, "soft-capped"),
        ({"qk_norm": "layer"}, "LayerNorm"),
        ({"activation": "signed-topk"}, "signed-topk"),
        ({"activation": "batchtopk"}, "batchtopk"),
        ({"rope": ROPE | {"scaling": 1.2}}, "powers of one whole base"),
        ({"rope": ROPE | {"inv_freq": [1.0, 0.5, 0.1]}}, "powers of one whole base"),
    ],
    ids=str,
)
def test_what_the_layout_cannot_hold_is_refused(options, reason, tmp_path):
    with pytest.raises(ClearheadError, match=reason):
        save_foreign(make(**options), tmp_path / "out", "llamascopium")
    assert not (tmp_path / "out").exists()


def test_other_libraries_and_modules_are_refused(tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean 'llamascopium'"):
        save_foreign(make(), tmp_path, "lamascopium")
    with pytest.raises(ClearheadError, match="this is a Sae"):
        save_foreign(Sae(TranscoderConfig(d_in=4, d_out=4, n_features=8, k=2)), tmp_path, "llamascopium")
