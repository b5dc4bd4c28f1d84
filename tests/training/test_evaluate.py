"""Evaluation: FVU against brute force, the exact copy loses nothing, ablations against independent hooks."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from clearhead.data.harvest import LiveActivations
from clearhead.data.text import token_blocks
from clearhead.dictionaries.init import from_attention
from clearhead.dictionaries.lorsa import Lorsa, LorsaConfig
from clearhead.model.geometry import attention_geometry
from clearhead.model.weights import attention_weights
from clearhead.training.evaluate import FidelityMeter, evaluate, measure_downstream, measure_fidelity


def random_lorsa(d: int, k: int = 6) -> Lorsa:
    torch.manual_seed(0)
    lorsa = Lorsa(LorsaConfig(d_model=d, n_heads=40, n_groups=4, d_qk=8, k=k, scale=0.35))
    for parameter in lorsa.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    lorsa.normalise_decoder()
    return lorsa.eval()


@pytest.fixture(scope="module")
def blocks(tiny, books):
    return token_blocks(tiny, str(books), split="held_out", n_tokens=640, context=32)


@torch.no_grad()
def test_fvu_and_companions_equal_brute_force(tiny, blocks):
    lorsa = random_lorsa(tiny.d_model)
    source = LiveActivations(tiny, blocks, 1)
    metrics, mean_y = measure_fidelity(lorsa, source, batch_blocks=3)
    whole = source.batch(range(len(blocks)))
    y = whole.y[:, 1:].flatten(0, 1).double()
    guess = lorsa(whole.x).y[:, 1:].flatten(0, 1).double()
    torch.testing.assert_close(mean_y, y.mean(0), atol=1e-9, rtol=0)
    total = (y - y.mean(0)).square().sum()
    assert metrics["fvu"] == pytest.approx(float((y - guess).square().sum() / total), rel=1e-6)
    e = y - guess
    assert metrics["explained_variance"] == pytest.approx(1 - float((e - e.mean(0)).square().sum() / total), rel=1e-5)
    active = lorsa.encode(whole.x)
    used = active.heads[:, 1:][active.values[:, 1:] != 0]
    assert metrics["l0"] == pytest.approx(len(used) / len(y))
    assert metrics["dead_heads"] == 40 - len(used.unique())
    rate = torch.bincount(used, minlength=40) / len(y)
    assert metrics["over_dense_heads"] == int((rate > 0.1).sum())
    assert metrics["tokens"] == len(y) == len(blocks) * 31
    norm = (whole.y - lorsa(whole.x).y).square().sum((0, 2)) / whole.y.square().sum((0, 2))
    torch.testing.assert_close(torch.tensor(metrics["relative_error_by_position"]), norm.sqrt(), atol=2e-6, rtol=1e-4)
    assert metrics["relative_error_position_0"] == pytest.approx(float(norm[0].sqrt()), rel=1e-4)


def test_the_mean_as_prediction_leaves_all_variance_unexplained():
    y = torch.randn(5, 9, 4, generator=torch.Generator().manual_seed(0))
    guess = y[:, 1:].mean((0, 1)).expand_as(y)
    meter = FidelityMeter(4, 3, 9)
    nothing = torch.zeros(5, 9, 1)
    meter.add(y[:2], guess[:2], nothing[:2], nothing[:2].long())
    meter.add(y[2:], guess[2:], nothing[2:], nothing[2:].long())
    result = meter.result()
    assert result["fvu"] == pytest.approx(1.0, rel=1e-6)
    assert result["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert result["dead_share"] == 1.0


def test_the_exact_copy_recovers_all_of_the_loss(tiny, blocks):
    # repeated random tokens, which the model's induction heads in this layer predict
    half = torch.randint(5, 1000, (10, 16), generator=torch.Generator().manual_seed(2))
    blocks = dataclasses.replace(blocks, tokens=torch.cat([half, half], 1), documents=blocks.documents[:10])
    copy = from_attention(attention_weights(tiny, 1), attention_geometry(tiny, 1))
    metrics = evaluate(copy, tiny, 1, blocks, downstream_tokens=320)
    assert metrics["fvu"] < 1e-9
    assert metrics["ce_replaced"] == pytest.approx(metrics["ce_clean"], abs=1e-5)
    assert metrics["kl_replaced"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["ce_recovered"] == pytest.approx(1.0, abs=1e-3)


@torch.no_grad()
def test_losses_equal_those_of_hooks_on_the_plain_model(tiny, blocks):
    lorsa, tokens = random_lorsa(tiny.d_model), blocks.tokens[:6]
    mean_y = torch.randn(tiny.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    metrics = measure_downstream(lorsa, tiny, 1, tokens, mean_y, batch_blocks=4)
    attention = tiny.hf.transformer.h[1].attn

    def loss_with(change) -> float:
        def hook(module, args, kwargs, output):
            y = change(args[0] if args else kwargs["hidden_states"], output[0])
            return (torch.cat([output[0][:, :1], y[:, 1:]], 1), *output[1:])

        handle = attention.register_forward_hook(hook, with_kwargs=True)
        logits = tiny.hf(tokens).logits[:, 1:-1]
        handle.remove()
        return float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten()))

    expected = {
        "ce_clean": loss_with(lambda x, y: y),
        "ce_zero": loss_with(lambda x, y: torch.zeros_like(y)),
        "ce_mean": loss_with(lambda x, y: mean_y.float().expand_as(y)),
        "ce_replaced": loss_with(lambda x, y: lorsa(x).y),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=2e-5), name
    assert len(set(expected.values())) == 4
    recovered = (metrics["ce_zero"] - metrics["ce_replaced"]) / (metrics["ce_zero"] - metrics["ce_clean"])
    if metrics["ce_zero"] > metrics["ce_clean"]:
        assert metrics["ce_recovered"] == pytest.approx(recovered)
    else:
        assert metrics["ce_recovered"] is None
