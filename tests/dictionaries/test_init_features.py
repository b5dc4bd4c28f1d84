"""Initial weights of features: what one token's input and output make of them, and why the inputs are whitened."""

import torch

from clearhead.dictionaries.init_features import initialise_features
from clearhead.dictionaries.transcoder import Transcoder, TranscoderConfig


def pairs(rows: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs with a mean and one loud direction, and outputs of a ReLU layer."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=generator) * torch.tensor([30.0, *[1.0] * 7]) + 2
    y = (x @ torch.randn(8, 16, generator=generator)).relu() @ torch.randn(16, 6, generator=generator) + 5
    return x, y


def started(features: int = 40, k: int = 4, rows: int = 500) -> Transcoder:
    module = Transcoder(TranscoderConfig(d_in=8, d_out=6, n_features=features, k=k)).eval()
    initialise_features(module, *pairs(rows), seed=0)
    return module


@torch.no_grad()
def test_features_are_tokens_and_their_common_scale_is_the_best():
    module, (x, y) = started(), pairs()
    torch.testing.assert_close(module.decoder_norms(), torch.ones(40))
    norms = module.W_enc.norm(dim=-1)
    torch.testing.assert_close(norms, norms[:1].expand(40))
    torch.testing.assert_close(module.b_dec, y.mean(0))
    torch.testing.assert_close(module.b_enc, -module.W_enc @ x.mean(0))
    outputs = torch.nn.functional.normalize(y - y.mean(0), dim=-1)
    assert float((outputs @ module.W_dec.T).amax(0).min()) > 0.9999
    errors = []
    for factor in (0.9, 1.0, 1.1):
        changed = started()
        changed.W_enc *= factor
        changed.b_enc *= factor
        errors.append(float((changed(x).y - y).square().sum()))
    assert errors[1] < min(errors[0], errors[2])


@torch.no_grad()
def test_a_loud_direction_does_not_win_every_token():
    """Unwhitened, nearly all encoders would lie along the first input and fire on its sign."""
    module, (x, _) = started(), pairs()
    directions = torch.nn.functional.normalize(module.W_enc, dim=-1)
    assert float(directions[:, 0].abs().mean()) < 0.1
    assert len(module.encode(x).features.unique()) > 30


@torch.no_grad()
def test_few_rows_start_several_features_and_the_seed_decides():
    assert torch.isfinite(started(features=40, rows=10).W_enc).all()
    assert torch.equal(started().W_enc, started().W_enc)
    other = Transcoder(TranscoderConfig(d_in=8, d_out=6, n_features=40, k=4))
    initialise_features(other, *pairs(), seed=1)
    assert not torch.equal(other.W_enc, started().W_enc)


def test_the_first_error_is_below_that_of_the_mean():
    module, (x, y) = started(features=200, k=8), pairs()
    with torch.no_grad():
        fvu = float((module(x).y - y).square().sum() / (y - y.mean(0)).square().sum())
    assert fvu < 0.95, fvu
