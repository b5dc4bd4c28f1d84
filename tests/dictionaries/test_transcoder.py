"""Transcoders and SAEs: the forward pass by hand for every activation, exact rewritings, files, bad input."""

import dataclasses
import json

import pytest
import torch

from clearhead.dictionaries.sae import Sae
from clearhead.dictionaries.transcoder import ACTIVATIONS, Transcoder, TranscoderConfig
from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError


def small(activation="topk", *, skip=False, k=3, cls=Transcoder) -> Transcoder:
    generator = torch.Generator().manual_seed(0)
    config = TranscoderConfig(d_in=6, d_out=5 if cls is Transcoder else 6, n_features=20, k=k, activation=activation)
    module = cls(dataclasses.replace(config, skip=skip)).double().eval()
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    if activation == "batchtopk":
        module.threshold.fill_(1.5)
    return module


def inputs() -> torch.Tensor:
    return torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@torch.no_grad()
def by_hand(module: Transcoder, x: torch.Tensor) -> torch.Tensor:
    pre = torch.einsum("btd,nd->btn", x, module.W_enc) + module.b_enc
    kind = module.config.activation
    if kind == "topk":
        smallest = pre.clamp_min(0).sort(-1, descending=True).values[..., module.config.k - 1]
        keep = pre >= smallest[..., None]
    elif kind == "batchtopk":
        keep = pre >= module.threshold
    elif kind == "jumprelu":
        keep = pre > module.log_threshold.exp()
    else:
        keep = pre > 0
    values = torch.where(keep & (pre > 0), pre, 0.0)
    y = torch.einsum("btn,ne->bte", values, module.W_dec) + module.b_dec
    return y if module.W_skip is None else y + x @ module.W_skip


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_is_the_formula_and_decode_inverts_encode(activation, skip):
    module, x = small(activation, skip=skip), inputs()
    output = module(x)
    torch.testing.assert_close(output.y, by_hand(module, x), atol=1e-12, rtol=0)
    codes = module.encode(x)
    torch.testing.assert_close(module.decode(codes) + module.linear(x), output.y, atol=1e-12, rtol=0)
    active = (codes.values != 0).sum(-1)
    assert codes.values.shape[-1] == (3 if activation == "topk" else int(active.max()))
    assert torch.equal(active, (output.codes.values != 0).sum(-1))


@pytest.mark.parametrize("activation", ["relu", "jumprelu"])
def test_unit_decoder_norms_leave_the_function_as_it_is(activation):
    module, x = small(activation), inputs()
    before = module(x).y
    module.normalise_decoder()
    torch.testing.assert_close(module.decoder_norms(), torch.ones(20, dtype=torch.float64))
    torch.testing.assert_close(module(x).y, before, atol=1e-12, rtol=0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_folded_scales_are_exact(activation):
    module, x = small(activation, skip=True), inputs()
    scaled = module(0.3 * x).y / 7.0
    torch.testing.assert_close(module.fold_scales(0.3, 7.0)(x).y, scaled, atol=1e-12, rtol=0)


def test_an_untrained_batchtopk_ranks_the_batch():
    module = small("batchtopk").train()
    values = module(inputs()).codes.values
    assert int((values != 0).sum()) == 3 * 14


@pytest.mark.parametrize("cls", [Transcoder, Sae])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_files_hold_everything(cls, activation, tmp_path):
    module = small(activation, cls=cls).float()
    module.provenance = {"model": "tiny", "layer": 1, "input_site": "mlp_in.1", "output_site": "mlp_out.1"}
    module.metrics = {"fvu": 0.25}
    again = cls.from_pretrained(module.save_pretrained(tmp_path / "x"))
    x = inputs().float()
    assert torch.equal(again(x).y, module(x).y)
    assert (again.provenance, again.metrics, again.config) == (module.provenance, module.metrics, module.config)
    assert "from clearhead import" in (tmp_path / "x" / "README.md").read_text()


def test_another_kind_and_damaged_files_are_refused(tmp_path):
    folder = small().save_pretrained(tmp_path)
    with pytest.raises(ClearheadError, match="holds a 'transcoder', and a 'sae' was asked for"):
        Sae.from_pretrained(folder)
    record = json.loads((folder / "config.json").read_text())
    record["config"]["n_features"] = 21
    (folder / "config.json").write_text(json.dumps(record))
    with pytest.raises(CorruptFileError, match="do not fit"):
        Transcoder.from_pretrained(folder)
    record["config"]["expansion"] = 4
    (folder / "config.json").write_text(json.dumps(record))
    with pytest.raises(UnknownNameError, match="expansion"):
        Transcoder.from_pretrained(folder)


def test_impossible_shapes_are_refused():
    valid = TranscoderConfig(d_in=4, d_out=4, n_features=8, k=2)
    with pytest.raises(ClearheadError, match="n_features must be at least 1 and is 0"):
        dataclasses.replace(valid, n_features=0)
    with pytest.raises(ClearheadError, match="k = 9 exceeds the number of features, 8"):
        dataclasses.replace(valid, k=9)
    with pytest.raises(UnknownNameError, match="batchtopk"):
        dataclasses.replace(valid, activation="batch-topk")
