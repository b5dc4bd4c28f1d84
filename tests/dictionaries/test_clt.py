"""Cross-layer transcoders: the forward pass by hand, the per-layer interface, rows and norms, files, bad input."""

import pytest
import torch

from clearhead.dictionaries.clt import Clt, CltConfig
from clearhead.dictionaries.transcoder import ACTIVATIONS
from clearhead.errors import ClearheadError

L, N, D = 3, 10, 6


def small(activation="topk", k=2) -> Clt:
    generator = torch.Generator().manual_seed(0)
    module = Clt(CltConfig(d_model=D, n_layers=L, n_features=N, k=k, activation=activation)).double().eval()
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    if activation == "batchtopk":
        module.threshold.fill_(1.5)
    return module


def inputs() -> torch.Tensor:
    return torch.randn(2, 5, L, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@torch.no_grad()
def by_hand(module: Clt, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    for target in range(L):
        y[:, :, target] += module.b_dec[target]
        for source in range(target + 1):
            pre = x[:, :, source] @ module.W_enc[source].T + module.b_enc[source]
            kind = module.config.activation
            if kind == "topk":
                keep = (
                    pre >= pre.clamp_min(0).sort(-1, descending=True).values[..., module.config.k - 1 : module.config.k]
                )
            elif kind == "jumprelu":
                keep = pre > module.log_threshold[source].exp()
            else:
                keep = pre >= (module.threshold if kind == "batchtopk" else 0.0)
            values = torch.where(keep & (pre > 0), pre, 0.0)
            y[:, :, target] += values @ module.W_dec[source][:, target - source]
    return y


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_is_the_formula_and_the_layers_add_up(activation):
    module, x = small(activation), inputs()
    output = module(x)
    torch.testing.assert_close(output.y, by_hand(module, x), atol=1e-12, rtol=0)
    total = module.b_dec.expand(2, 5, -1, -1).clone()
    for layer in range(L):
        codes = module.encode(layer, x[:, :, layer])
        total[:, :, layer:] += module.writes(layer, codes)
        torch.testing.assert_close(
            module.pre(layer, x[:, :, layer]), output.pre[..., layer * N : (layer + 1) * N], atol=1e-12, rtol=0
        )
    torch.testing.assert_close(total, output.y, atol=1e-12, rtol=0)


@torch.no_grad()
def test_rows_of_units_are_their_concatenated_decoders():
    module = small()
    units = torch.tensor([25, 3, 11, 0])
    rows = module.decoder_rows(units).view(4, L, D)
    assert torch.equal(rows[0], torch.cat([torch.zeros(2, D), module.W_dec[2][5]]))
    assert torch.equal(rows[1], module.W_dec[0][3])
    assert torch.equal(rows[2, 1:], module.W_dec[1][1]) and float(rows[2, 0].abs().max()) == 0
    torch.testing.assert_close(module.decoder_norms()[units], module.decoder_rows(units).norm(dim=-1))


def test_an_untrained_batchtopk_ranks_all_layers_of_the_batch_together():
    values = small("batchtopk").train()(inputs()).codes.values
    assert int((values != 0).sum()) == 2 * L * 10


@pytest.mark.parametrize("activation", ["relu", "jumprelu"])
def test_unit_norms_leave_the_function_as_it_is(activation):
    module, x = small(activation), inputs()
    before = module(x).y
    module.normalise_decoder()
    torch.testing.assert_close(module.decoder_norms(), torch.ones(L * N, dtype=torch.float64))
    torch.testing.assert_close(module(x).y, before, atol=1e-12, rtol=0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_folded_scales_are_exact_for_every_layer(activation):
    module, x = small(activation), inputs()
    reads, writes = torch.tensor([[0.3], [2.0], [1.1]]).double(), torch.tensor([[7.0], [0.2], [1.5]]).double()
    scaled = module(reads * x).y / writes
    torch.testing.assert_close(module.fold_scales(reads, writes)(x).y, scaled, atol=1e-12, rtol=0)


def test_files_hold_everything(tmp_path):
    module = small("jumprelu").float()
    module.provenance = {"model": "tiny", "layer": None}
    again = Clt.from_pretrained(module.save_pretrained(tmp_path))
    x = inputs().float()
    assert torch.equal(again(x).y, module(x).y)
    assert again.provenance == module.provenance


def test_layers_that_do_not_exist_are_refused():
    module, x = small(), inputs()
    with pytest.raises(ClearheadError, match="there is no layer 3: the dictionary has layers 0 to 2"):
        module.encode(3, x[:, :, 0])
    with pytest.raises(ClearheadError, match="n_layers must be at least 1"):
        CltConfig(d_model=4, n_layers=0, n_features=4, k=1)
