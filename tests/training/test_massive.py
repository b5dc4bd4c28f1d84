"""Massive outputs at a few tokens do not decide what a dictionary is trained on, nor what its FVU says."""

import math

import pytest
import torch

from clearhead.data.harvest import Activations
from clearhead.dictionaries.transcoder import Transcoder, TranscoderConfig
from clearhead.training.dictionary_task import DictionaryTask, Scales, measure_scales, ordinary
from clearhead.training.evaluate import FidelityMeter
from clearhead.training.optim import Schedule


def activations(massive: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, 20, 8, generator=generator) for _ in range(2))
    if massive:
        y[1, 7] *= 500
        y[:, 0] *= 1000
    return x, y


def test_only_massive_tokens_are_left_out():
    found = ordinary(activations(massive=True)[1][:, 1:])
    assert (~found).nonzero().tolist() == [[1, 6]]
    layered = torch.stack([activations(massive=False)[1], activations(massive=True)[1]], 2)[:, 1:]
    assert (~ordinary(layered)).nonzero().tolist() == [[1, 6, 1]]
    sparse = torch.zeros(2, 9, 4)
    sparse[0, 3] = 1.0
    assert ordinary(sparse).all()


def test_scales_are_those_of_all_other_tokens():
    x, y = activations(massive=True)
    kept = ordinary(y[:, 1:])
    scales = measure_scales(x, y)
    assert scales.output == pytest.approx(math.sqrt(8) / float(y[:, 1:][kept].norm(dim=-1).mean()), rel=1e-5)
    assert scales.input == pytest.approx(math.sqrt(8) / float(x[:, 1:].norm(dim=-1).mean()), rel=1e-5)
    layered = measure_scales(torch.stack([x, x], 2), torch.stack([y, y], 2))
    assert torch.allclose(layered.output, torch.full((2, 1), scales.output))


def test_the_loss_is_that_of_all_other_tokens():
    torch.manual_seed(0)
    module = Transcoder(TranscoderConfig(d_in=8, d_out=8, n_features=12, k=3))
    for weight in (module.W_enc, module.W_dec):
        torch.nn.init.normal_(weight)
    task = DictionaryTask(module, Scales(1.0, 1.0), aux_k=4, dead_after_tokens=10**9)
    x, y = activations(massive=True)
    schedule = Schedule(steps=10, peak_lr=1e-3, warmup=1, decay=5, k=3, k_start=3, k_anneal=0)
    with torch.no_grad():
        loss, metrics = task.loss(module, Activations(torch.zeros(3, 20), x, y), schedule, 0)
    kept = ordinary(y[:, 1:])
    expected = (y - module(x).y.detach())[:, 1:][kept].square().sum(-1)
    assert len(expected) == 56 and float(loss) == pytest.approx(float(expected.mean()), rel=1e-5)
    target = y[:, 1:][kept]
    spread = (target - target.mean(0)).square().sum(-1).mean()
    assert float(metrics["batch_fvu"]) == pytest.approx(float(expected.mean() / spread), rel=1e-5)


def test_evaluation_tells_them_apart():
    _, y = activations(massive=True)
    guess = y.clone()
    guess[:, 1:] *= ordinary(y[:, 1:])[..., None] * 0.0 + (~ordinary(y[:, 1:]))[..., None] * 1.0
    meter = FidelityMeter(8, 5, 20)
    nothing = torch.zeros(3, 20, 1)
    meter.add(y, guess, nothing, nothing.long())
    result = meter.result()
    assert result["massive_tokens"] == 1 and result["fvu"] < 0.01 and result["fvu_ordinary"] > 0.9
    plain = FidelityMeter(8, 5, 20)
    plain.add(activations(massive=False)[1], guess, nothing, nothing.long())
    assert "massive_tokens" not in plain.result()
