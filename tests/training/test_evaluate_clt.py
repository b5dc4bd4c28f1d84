"""Evaluating feature dictionaries: losses against hooks on the plain model, FVU by layer, an SAE replacing its site."""

import pytest
import torch
import torch.nn.functional as F

from clearhead.data.harvest import MLP, LayeredActivations
from clearhead.data.text import token_blocks
from clearhead.dictionaries.clt import Clt, CltConfig
from clearhead.dictionaries.sae import Sae
from clearhead.dictionaries.transcoder import Transcoder, TranscoderConfig
from clearhead.training.evaluate import evaluate
from clearhead.training.evaluate_clt import evaluate_clt


@pytest.fixture(scope="module")
def blocks(tiny, books):
    return token_blocks(tiny, str(books), split="held_out", n_tokens=320, context=32)


def filled(module):
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return module.eval()


@torch.no_grad()
def loss_with(tiny, tokens, hooks) -> float:
    """Next-token loss from position 1 on, with module outputs changed from position 1 on."""

    def changed(replace):
        def hook(_, args, output):
            whole = output[0] if isinstance(output, tuple) else output
            y = torch.cat([whole[:, :1], replace(args[0], whole)[:, 1:]], 1)
            return (y, *output[1:]) if isinstance(output, tuple) else y

        return hook

    handles = [module.register_forward_hook(changed(replace)) for module, replace in hooks]
    logits = tiny.hf(tokens).logits[:, 1:-1]
    for handle in handles:
        handle.remove()
    return float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten()))


@torch.no_grad()
def test_a_cross_layer_transcoder_replaces_all_mlps_at_once(tiny, blocks):
    clt = filled(Clt(CltConfig(d_model=tiny.d_model, n_layers=2, n_features=30, k=5)))
    metrics = evaluate_clt(clt, tiny, blocks, downstream_tokens=320)
    batch = LayeredActivations(tiny, blocks).batch(range(len(blocks)))
    y, guess = (part[:, 1:].flatten(0, 1).double() for part in (batch.y, clt(batch.x).y))
    fvu = ((y - guess).square().sum((0, 2)) / (y - y.mean(0)).square().sum((0, 2))).tolist()
    assert metrics["fvu_by_layer"] == pytest.approx(fvu, rel=1e-5)
    assert metrics["fvu"] == pytest.approx(sum(fvu) / 2, rel=1e-6)
    assert metrics["l0"] == pytest.approx(10, abs=0.5)
    seen = {}

    def first(x, _):
        seen[0] = x
        return clt(torch.stack([x, x], 2)).y[:, :, 0]

    def second(x, _):
        return clt(torch.stack([seen[0], x], 2)).y[:, :, 1]

    layers = tiny.hf.transformer.h
    want = loss_with(tiny, blocks.tokens, [(layers[0].mlp, first), (layers[1].mlp, second)])
    assert metrics["ce_replaced"] == pytest.approx(want, abs=2e-5)
    zero = loss_with(tiny, blocks.tokens, [(layer.mlp, lambda x, y: torch.zeros_like(y)) for layer in layers])
    assert metrics["ce_zero"] == pytest.approx(zero, abs=2e-5)


@torch.no_grad()
def test_a_transcoder_replaces_one_mlp_and_an_sae_its_site(tiny, blocks):
    shape = TranscoderConfig(d_in=tiny.d_model, d_out=tiny.d_model, n_features=30, k=5, skip=True)
    transcoder, layer = filled(Transcoder(shape)), tiny.hf.transformer.h[0]
    metrics = evaluate(transcoder, tiny, 0, blocks, sites=MLP, downstream_tokens=320)
    want = loss_with(tiny, blocks.tokens, [(layer.mlp, lambda x, _: transcoder(x).y)])
    assert metrics["ce_replaced"] == pytest.approx(want, abs=2e-5)
    sae = filled(Sae(shape))
    metrics = evaluate(sae, tiny, 0, blocks, sites=("resid_post", "resid_post"), downstream_tokens=320)
    want = loss_with(tiny, blocks.tokens, [(layer, lambda _, y: sae(y).y)])
    assert metrics["ce_replaced"] == pytest.approx(want, abs=2e-5)
