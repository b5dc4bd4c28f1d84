"""The objective of feature dictionaries: sparsity terms by hand, and planted features recovered by every kind."""

import pytest
import torch
from accelerate import Accelerator

from clearhead.data.harvest import Activations
from clearhead.dictionaries.clt import Clt, CltConfig
from clearhead.dictionaries.init_features import initialise_features
from clearhead.dictionaries.sae import Sae
from clearhead.dictionaries.transcoder import Transcoder, TranscoderConfig
from clearhead.training.dictionary_task import DictionaryTask, Scales, measure_scales
from clearhead.training.optim import Schedule, adam, set_lr

D, N, ACTIVE = 16, 12, 2


def directions(seed: int) -> torch.Tensor:
    """Unit vectors in general position."""
    rows = torch.randn(N, D, generator=torch.Generator().manual_seed(seed))
    mixed = torch.linalg.qr(rows.T)[0].T + 0.15 * rows
    return torch.nn.functional.normalize(mixed, dim=-1)


READS, WRITES = directions(1), directions(2)


def draw(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Strengths of planted features: one or two of them at a time, between 1 and 2."""
    chosen = torch.rand(rows, N, generator=generator).topk(ACTIVE).indices
    strengths = 1 + torch.rand(rows, ACTIVE, generator=generator)
    strengths[:, 1] *= torch.rand(rows, generator=generator) < 0.5
    return torch.zeros(rows, N).scatter(1, chosen, strengths)


def train(module, batch, steps: int, lr: float = 0.02, **options) -> dict[str, torch.Tensor]:
    """`steps` steps on batches of 8 blocks of 9 tokens, in which x and y come from `batch(strengths)`."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    task = DictionaryTask(module.train(), Scales(1.0, 1.0), aux_k=8, dead_after_tokens=3_000, **options)
    k = module.config.k
    schedule = Schedule(steps=steps, peak_lr=lr, warmup=10, decay=steps // 2, k=k, k_start=2 * k, k_anneal=steps // 3)
    optimizer, accelerator, metrics = adam(task.groups(), lr, (0.9, 0.999)), Accelerator(cpu=True), {}
    for step in range(steps):
        x, y = batch(draw(8 * 9, generator))
        data = Activations(torch.zeros(8, 9, dtype=torch.int64), x.unflatten(0, (8, 9)), y.unflatten(0, (8, 9)))
        set_lr(optimizer, lr * schedule.lr_factor(step))
        loss, metrics = task.loss(module, data, schedule, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        task.finish_step(accelerator)
    module.eval()
    return metrics


def found(planted: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """For each planted direction the cosine with the nearest of `rows`."""
    return (torch.nn.functional.normalize(rows, dim=-1) @ planted.T).detach().amax(0)


def config(activation: str, n: int = 20) -> TranscoderConfig:
    unit_norm = activation in ("topk", "batchtopk")
    return TranscoderConfig(d_in=D, d_out=D, n_features=n, k=ACTIVE, activation=activation, unit_norm=unit_norm)


def started(module, seed: int = 3):
    """The module with the weights that training starts from, by planted strengths of another seed."""
    strengths = draw(2_000, torch.Generator().manual_seed(seed))
    initialise_features(module, strengths @ READS, strengths @ WRITES, seed)
    return module


@pytest.mark.parametrize(
    ("activation", "options"),
    [("topk", {}), ("batchtopk", {}), ("jumprelu", {"sparsity": 1.0, "pre_weight": 3e-6}), ("relu", {"sparsity": 0.5})],
)
def test_a_transcoder_finds_planted_features(activation, options):
    module = started(Transcoder(config(activation)))
    train(module, lambda s: (s @ READS, s @ WRITES), 250, **options)
    strengths = draw(1_000, torch.Generator().manual_seed(9))
    y = strengths @ WRITES
    with torch.no_grad():
        output = module(strengths @ READS)
        fvu = float((output.y - y).square().sum() / (y - y.mean(0)).square().sum())
    l0 = float((output.codes.values != 0).sum(-1).float().mean())
    # batchtopk keeps 2 on average where 1.5 are planted, and spends what is left on two of the pairs
    missing = 2 if activation == "batchtopk" else 0
    assert float(found(WRITES, module.W_dec).sort().values[missing]) > 0.95
    assert fvu < (0.06 if activation == "relu" else 0.01), fvu
    assert l0 < {"relu": 3.0, "jumprelu": 1.6}.get(activation, 2.01), l0


@pytest.mark.parametrize(("activation", "options"), [("topk", {}), ("jumprelu", {"sparsity": 1.0})])
def test_an_sae_finds_planted_features(activation, options):
    module = Sae(config(activation))
    strengths = draw(2_000, torch.Generator().manual_seed(3))
    initialise_features(module, strengths @ READS, strengths @ READS, 3)
    train(module, lambda s: (s @ READS, s @ READS), 250, **options)
    assert float(found(READS, module.W_dec).min()) > 0.95


@pytest.mark.parametrize(("activation", "options"), [("topk", {}), ("jumprelu", {"sparsity": 2.0})])
def test_a_cross_layer_transcoder_finds_what_features_write_above(activation, options):
    """Planted features of layer 0 write to both layers; layer 1 has no features of its own and reads nothing new."""
    module = Clt(
        CltConfig(d_model=D, n_layers=2, n_features=20, k=ACTIVE, activation=activation, unit_norm=activation == "topk")
    )
    above = directions(5)
    own = started(Transcoder(config("topk")))
    with torch.no_grad():
        module.W_enc[0].copy_(own.W_enc)
        module.b_enc[0].copy_(own.b_enc)
        module.W_dec[0][:, 0].copy_(own.W_dec)
        module.W_dec[1].normal_(std=0.1, generator=torch.Generator().manual_seed(0))

    def batch(s):
        nothing = torch.zeros(len(s), D)
        return torch.stack([s @ READS, nothing], 1), torch.stack([s @ WRITES, s @ above], 1)

    train(module, batch, 250, **options)
    nearest = (torch.nn.functional.normalize(module.W_dec[0][:, 0], dim=-1) @ WRITES.T).argmax(0)
    assert float(found(WRITES, module.W_dec[0][:, 0]).min()) > 0.95
    cosines = torch.nn.functional.cosine_similarity(module.W_dec[0][nearest, 1].detach(), above, dim=-1)
    assert float(cosines.min()) > 0.95, cosines


def test_sparsity_terms_by_hand():
    module = Transcoder(config("jumprelu"))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(3, 5, D, generator=generator), torch.randn(3, 5, D, generator=generator)
    task = DictionaryTask(module, Scales(1.0, 1.0), aux_k=0, dead_after_tokens=9, sparsity=2.0, pre_weight=0.1)
    schedule = Schedule(steps=10, peak_lr=1.0, warmup=0, decay=0, k=1, k_start=1, k_anneal=0)
    loss, _ = task.loss(module, Activations(torch.zeros(3, 5, dtype=torch.int64), x, y), schedule, 4)
    with torch.no_grad():
        pre = (x[:, 1:] @ module.W_enc.T + module.b_enc).flatten(0, 1)
        threshold, norm = module.log_threshold.exp(), module.W_dec.norm(dim=-1)
        values = torch.where(pre > threshold, pre, 0.0)
        error = (values @ module.W_dec + module.b_dec - y[:, 1:].flatten(0, 1)).square().sum(-1)
        # step 4 of 10 is the fifth: half of the weight of the tanh term is reached
        sparse = 2.0 * 0.5 * torch.tanh(4.0 * norm * values).sum(-1)
        want = error + sparse + 0.1 * ((threshold - pre).clamp_min(0) * norm).sum(-1)
    assert float(loss.detach()) == pytest.approx(float(want.mean()), rel=1e-5)


def test_scales_of_layers_are_measured_apart():
    x = torch.randn(2, 5, 3, D, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5.0, 0.1])[:, None]
    scales = measure_scales(x, x)
    assert scales.input.shape == (3, 1)
    norms = (x * scales.input)[:, 1:].norm(dim=-1).mean((0, 1))
    torch.testing.assert_close(norms, torch.full((3,), D**0.5))
