"""The training objective: its loss by hand, planted heads recovered, thresholds, schedules, dead heads."""

import dataclasses

import pytest
import torch
from accelerate import Accelerator

from clearhead.data.harvest import Activations
from clearhead.dictionaries.lorsa import Lorsa, LorsaConfig
from clearhead.errors import ClearheadError
from clearhead.training.dead import DeadUnits, aux_loss
from clearhead.training.dictionary_task import Scales, measure_scales
from clearhead.training.lorsa import LorsaTask
from clearhead.training.optim import Schedule, adam, set_lr

D, T = 16, 12
SCHEDULE = Schedule(steps=1, peak_lr=1e-3, warmup=0, decay=0, k=4, k_start=4, k_anneal=0)


def small(activation="topk", k=4, heads=24) -> Lorsa:
    torch.manual_seed(0)
    lorsa = Lorsa(LorsaConfig(d_model=D, n_heads=heads, n_groups=4, d_qk=8, k=k, activation=activation, scale=0.35))
    for parameter in lorsa.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    lorsa.b_V.data.zero_()
    lorsa.normalise_decoder()
    return lorsa


def batch(blocks=3, seed=1) -> Activations:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(blocks, T, D, generator=generator)
    return Activations(torch.zeros(blocks, T, dtype=torch.int64), x, torch.randn(blocks, T, D, generator=generator))


def test_scales_bring_mean_norms_to_the_root_of_the_width():
    data = batch()
    scales = measure_scales(data.x, data.y)
    assert float((data.x * scales.input)[:, 1:].norm(dim=-1).mean()) == pytest.approx(D**0.5, rel=1e-5)
    assert float((data.y * scales.output)[:, 1:].norm(dim=-1).mean()) == pytest.approx(D**0.5, rel=1e-5)
    with pytest.raises(ClearheadError, match="zero everywhere"):
        measure_scales(data.x, torch.zeros_like(data.y))


def test_loss_is_the_mean_squared_error_of_scaled_targets_without_position_0():
    lorsa, data = small(), batch()
    task = LorsaTask(lorsa, Scales(2.0, 0.5), aux_k=0, dead_after_tokens=100)
    loss, metrics = task.loss(lorsa, data, SCHEDULE, 0)
    error = (0.5 * data.y - lorsa(2.0 * data.x).y)[:, 1:]
    assert float(loss.detach()) == pytest.approx(float(error.detach().square().sum(-1).mean()), rel=1e-6)
    target = 0.5 * data.y[:, 1:].reshape(-1, D)
    fvu = error.detach().square().sum() / (target - target.mean(0)).square().sum()
    assert float(metrics["batch_fvu"]) == pytest.approx(float(fvu), rel=1e-5)
    assert float(metrics["l0"]) <= 4


def test_auxiliary_loss_by_hand_and_its_gradient_reaches_only_the_dead():
    generator = torch.Generator().manual_seed(0)
    residual = torch.randn(5, D, generator=generator)
    pre = torch.randn(5, 10, generator=generator, requires_grad=True)
    W_O = torch.randn(10, D, generator=generator, requires_grad=True)
    dead = torch.tensor([1, 4, 7])
    loss = aux_loss(residual, pre, W_O[dead], dead, 2)
    want = 0.0
    for i in range(5):
        kept = sorted(dead.tolist(), key=lambda n, i=i: float(pre[i, n].detach()), reverse=True)[:2]
        guess = sum(max(0.0, float(pre[i, n].detach())) * W_O[n].detach() for n in kept)
        want += float((residual[i] - guess).square().sum()) / 5
    assert float(loss.detach()) == pytest.approx(want, rel=1e-5)
    loss.backward()
    alive = [n for n in range(10) if n not in dead]
    assert float(W_O.grad[alive].abs().max()) == float(pre.grad[:, alive].abs().max()) == 0
    assert float(W_O.grad[dead].abs().max()) > 0
    assert float(aux_loss(residual, pre, W_O[:0], dead[:0], 2)) == 0


def test_silent_heads_are_counted_in_tokens():
    dead = DeadUnits(4, after_tokens=25)
    dead.update(torch.tensor([True, True, False, False]), 20)
    dead.update(torch.tensor([True, False, True, False]), 20)
    assert dead.silent_for.tolist() == [0, 20, 0, 40]
    assert dead.units.tolist() == [3]


def test_batchtopk_learns_the_threshold_that_encode_uses():
    lorsa = small("batchtopk").train()
    task = LorsaTask(lorsa, Scales(1.0, 1.0), aux_k=0, dead_after_tokens=100)
    for seed in range(60):
        task.loss(lorsa, batch(seed=seed), SCHEDULE, 0)
    lorsa.eval()
    codes = lorsa.encode(batch(blocks=40, seed=99).x)
    assert float((codes.values != 0).sum(-1).float().mean()) == pytest.approx(4, rel=0.25)


@pytest.mark.parametrize("activation", ["jumprelu", "relu"])
def test_the_sparsity_term_lowers_l0(activation):
    counts = {}
    for weight in (0.0, 5.0):
        lorsa = small(activation).train()
        task = LorsaTask(lorsa, Scales(1.0, 1.0), aux_k=0, dead_after_tokens=10_000, l0_weight=weight)
        optimizer = adam(task.groups(), 0.05, (0.9, 0.999))
        for seed in range(100):
            loss, _ = task.loss(lorsa, batch(seed=seed), SCHEDULE, 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        counts[weight] = float((lorsa.encode(batch(seed=99).x).values != 0).sum(-1).float().mean())
    assert counts[5.0] < 0.7 * counts[0.0]


def test_planted_heads_are_recovered():
    """Heads that write orthogonal directions and fire sparsely are found again from the layer's outputs alone."""
    torch.manual_seed(2)
    planted = Lorsa(LorsaConfig(d_model=D, n_heads=8, n_groups=1, d_qk=8, k=2, scale=0.35))
    with torch.no_grad():
        planted.W_Q.normal_(std=0.6)
        planted.W_K.normal_(std=0.6)
        planted.W_V.copy_(torch.linalg.qr(torch.randn(D, D))[0][:8] * 2)
        planted.W_O.copy_(torch.linalg.qr(torch.randn(D, D))[0][:8])
    lorsa = Lorsa(dataclasses.replace(planted.config, n_heads=12))
    with torch.no_grad():
        lorsa.W_Q.copy_(planted.W_Q + 0.1 * torch.randn_like(planted.W_Q))
        lorsa.W_K.copy_(planted.W_K + 0.1 * torch.randn_like(planted.W_K))
        lorsa.W_V.normal_(std=0.3)
        lorsa.W_O.normal_()
        lorsa.normalise_decoder()
    accelerator = Accelerator(cpu=True)
    task = LorsaTask(lorsa, Scales(1.0, 1.0), aux_k=4, dead_after_tokens=2_000)
    steps = 1500
    schedule = Schedule(steps=steps, peak_lr=0.01, warmup=20, decay=500, k=2, k_start=6, k_anneal=500)
    optimizer = adam(task.groups(), schedule.peak_lr, (0.9, 0.999))
    for step in range(steps):
        x = torch.randn(16, T, D)
        with torch.no_grad():
            y = planted(x).y
        set_lr(optimizer, schedule.peak_lr * schedule.lr_factor(step))
        data = Activations(torch.zeros(16, T, dtype=torch.int64), x, y)
        loss, metrics = task.loss(lorsa, data, schedule, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        task.finish_step(accelerator)
    cosines = (planted.W_O @ lorsa.W_O.T).detach().amax(1)
    assert float(cosines.min()) > 0.95, cosines
    assert float(metrics["batch_fvu"]) < 0.05


def fit_planted(student: Lorsa, planted: Lorsa, steps: int = 80) -> float:
    """The FVU at the end of a training on what `planted` computes."""
    generator = torch.Generator().manual_seed(4)
    task = LorsaTask(student.train(), Scales(1.0, 1.0), aux_k=0, dead_after_tokens=10_000, qk_lr_factor=0.3)
    optimizer, accelerator = adam(task.groups(), 0.01, (0.9, 0.999)), Accelerator(cpu=True)
    for step in range(steps):
        x = torch.randn(8, T, D, generator=generator)
        with torch.no_grad():
            y = planted(x).y
        loss, metrics = task.loss(student, Activations(torch.zeros(8, T, dtype=torch.int64), x, y), SCHEDULE, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        task.finish_step(accelerator)
    return float(metrics["batch_fvu"])


def test_heads_of_one_group_find_their_own_patterns():
    """Four heads that look along different coordinates of one QK: a shared pattern cannot follow, gates can."""
    torch.manual_seed(2)
    shape = LorsaConfig(d_model=D, n_heads=4, n_groups=1, d_qk=8, k=4, activation="signed-topk", patterns_per_group=4)
    planted = Lorsa(shape)
    with torch.no_grad():
        for weight in (planted.W_Q, planted.W_K):
            weight.normal_(std=0.4)
        planted.W_V.copy_(torch.linalg.qr(torch.randn(D, D))[0][:4])
        planted.W_O.copy_(torch.linalg.qr(torch.randn(D, D))[0][:4])
        planted.qk_gate.copy_(2 * torch.eye(4).repeat_interleave(2, 1))
    own, shared = Lorsa(shape), Lorsa(dataclasses.replace(shape, patterns_per_group=1))
    start = {name: tensor for name, tensor in planted.state_dict().items() if name != "qk_gate"}
    shared.load_state_dict(start)
    own.load_state_dict(start | {"qk_gate": torch.ones(4, 8)})
    assert fit_planted(own, planted) < 0.3 * fit_planted(shared, planted)
    gates = own.qk_gate.detach().view(4, 4, 2).mean(-1)  # by head and pair of coordinates
    assert gates.argmax(1).tolist() == [0, 1, 2, 3]


def test_queries_and_keys_can_be_frozen_and_gates_step_further():
    lorsa = small()
    lorsa = Lorsa(dataclasses.replace(lorsa.config, patterns_per_group=2, sinks=True))
    sizes = {}
    for factor in (0.0, 0.5):
        task = LorsaTask(lorsa, Scales(1.0, 1.0), aux_k=0, dead_after_tokens=100, qk_lr_factor=factor, added_sinks=True)
        rates = {id(p): rate for parameters, rate in task.groups() for p in parameters}
        sizes[factor] = {name: rates[id(p)] for name, p in lorsa.named_parameters()}
    assert {name for name, rate in sizes[0.0].items() if rate == 0} == {
        *("W_Q", "W_K", "b_Q", "b_K", "qk_gate", "sink")
    }
    assert sizes[0.5]["W_Q"] == 0.5 and sizes[0.5]["qk_gate"] == sizes[0.5]["sink"] == 5.0 and sizes[0.5]["W_V"] == 1
    own = LorsaTask(lorsa, Scales(1.0, 1.0), aux_k=0, dead_after_tokens=100, qk_lr_factor=0.5)
    assert {rate for parameters, rate in own.groups() if any(p is lorsa.sink for p in parameters)} == {0.5}


def test_schedules():
    schedule = Schedule(steps=100, peak_lr=1.0, warmup=10, decay=20, k=8, k_start=32, k_anneal=50)
    assert schedule.lr_factor(0) == pytest.approx(0.1)
    assert schedule.lr_factor(9) == schedule.lr_factor(79) == 1.0
    assert schedule.lr_factor(90) == pytest.approx(0.5)
    assert schedule.lr_factor(99) == pytest.approx(0.05)
    assert [schedule.active(step) for step in (0, 25, 50, 99)] == [32, 20, 8, 8]
    flat = Schedule(steps=10, peak_lr=1.0, warmup=0, decay=0, k=8, k_start=32, k_anneal=0)
    assert {flat.lr_factor(step) for step in range(10)} == {1.0}
    assert {flat.active(step) for step in range(10)} == {8}
