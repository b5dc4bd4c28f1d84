"""Gradients through reads and edits: against the plain model's, and against finite differences."""

import pytest
import torch
from torch import Tensor

from clearhead.model import Model, Run
from tests.model.conftest import WRITABLE, tiny_tokens
from tests.model.tiny_configs import VOCABULARY, build


def loss_of(run: Run) -> Tensor:
    weight = torch.linspace(-1, 1, run.logits.numel(), dtype=torch.float64).view_as(run.logits)
    return (run.logits.double() * weight).sum()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "gemma2", "gpt_neo"])
def test_reading_every_site_leaves_the_gradients_of_the_weights(name):
    """No path is counted twice or lost, though derived sites (head_out, q_pre, sink) are put back together."""
    hf = build(name).double()
    if name == "gpt_oss":
        hf.set_experts_implementation("eager")  # the fused one has no float64
    model, tokens = Model(hf), tiny_tokens()
    sites = [site for site in WRITABLE if not (name == "gpt_oss" and site == "sink.0")]
    weight = torch.linspace(-1, 1, 2 * 12 * VOCABULARY, dtype=torch.float64).view(2, 12, VOCABULARY)
    (model.hf(tokens, use_cache=False).logits * weight).sum().backward()
    plain = [parameter.grad.clone() for parameter in model.hf.parameters() if parameter.grad is not None]
    model.hf.zero_grad()
    loss_of(model.run(tokens, read=[*sites, *(["sink.0"] if name == "gpt_oss" else [])], grad=True)).backward()
    through = [parameter.grad for parameter in model.hf.parameters() if parameter.grad is not None]
    assert len(plain) == len(through)
    for expected, found in zip(plain, through, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("name", "site"),
    [
        *(("gpt2", site) for site in WRITABLE if site != "logits"),  # these two compute nothing in float32
        *(
            ("falcon", site)
            for site in ("q_pre.0", "k_pre.0", "scores.0", "pattern.0", "z.0", "head_out.0", "mlp_out.0")
        ),
    ],
)
def test_gradients_of_reads_and_edits_are_finite_differences(name, site):
    """Frozen weights, float64: d loss / d site by autograd, through a read and through an edit, and by differences."""
    model = Model(build(name).double())
    model.hf.requires_grad_(False)
    tokens = tiny_tokens()[:1, :6]
    run = model.run(tokens, read=[site, "logits"], grad=True, path="eager")
    (through_read,) = torch.autograd.grad(loss_of(run), run[site])
    value = run[site].detach().clone().requires_grad_()
    edited = model.run(tokens, edit={site: value}, read=["logits"], grad=True, path="eager")
    (through_edit,) = torch.autograd.grad(loss_of(edited), value)
    torch.testing.assert_close(through_edit, through_read, rtol=1e-9, atol=1e-12)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(value.shape, dtype=torch.float64, generator=generator)
    if site == "scores.0":  # masked entries are at the end of the number line; moving them there means nothing
        direction = direction * torch.ones(6, 6, dtype=torch.float64).tril()
    step = 1e-6

    def at(shift: float) -> float:
        with torch.no_grad():
            moved = value.detach() + shift * direction
        return float(loss_of(model.run(tokens, edit={site: moved}, read=["logits"], path="eager")))

    difference = (at(step) - at(-step)) / (2 * step)
    assert float((through_read * direction).sum()) == pytest.approx(difference, rel=1e-5, abs=1e-7)


def test_without_grad_nothing_is_kept():
    run = Model(build("llama")).run(tiny_tokens(), read=["attn_in.0", "pattern.0", "logits"])
    assert not any(value.requires_grad for value in run.values())
