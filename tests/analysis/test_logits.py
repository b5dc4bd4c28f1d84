import pytest
import torch

from clearhead.analysis.logits import logit_effects
from clearhead.errors import ClearheadError
from clearhead.model.norms import unembedding


def test_equal_to_the_whole_matrix(monkeypatch):
    write, W_U = torch.randn(13, 6), torch.randn(6, 40)
    logits = write @ W_U
    logits -= logits.mean(-1, keepdim=True)
    expected, ids = logits.sort(-1)
    for at_once in (2**25, 40 * 4, 1):
        monkeypatch.setattr("clearhead.analysis.logits.LOGITS_AT_ONCE", at_once)
        effects = logit_effects(write, W_U, 5)
        torch.testing.assert_close(effects.lowered, expected[:, :5], atol=1e-5, rtol=0)
        torch.testing.assert_close(effects.raised, expected[:, -5:].flip(-1), atol=1e-5, rtol=0)
        assert torch.equal(effects.raised_ids, ids[:, -5:].flip(-1))
        assert torch.equal(effects.lowered_ids, ids[:, :5])


def test_direct_effect_is_the_change_of_the_models_own_logits(model):
    """Writing ε·w_o into the last residual moves the logits as predicted, the final norm's scale held fixed."""
    tokens = torch.arange(8)[None]
    last = f"resid_post.{model.n_layers - 1}"
    run = model.run(tokens, read=[last, "logits"])
    write, step = torch.nn.functional.normalize(torch.randn(1, model.d_model), dim=-1), 1e-2
    # a write orthogonal to the residual and to the mean direction leaves LayerNorm's scale fixed to first order
    resid = run[last][0, -1]
    for fixed in (torch.ones_like(resid), resid - resid.mean()):
        write = write - (write @ fixed)[:, None] * fixed / (fixed @ fixed)
    moved = model.run(tokens, read=["logits"], edit={last: lambda x, run: x + step * write})["logits"]
    scale = (resid - resid.mean()).square().mean().add(1e-5).rsqrt()
    W_U, _ = unembedding(model)
    effects = logit_effects(write, W_U.detach(), 10)
    change = (moved - run["logits"])[0, -1]
    change = (change - change.mean()) / (step * scale)
    torch.testing.assert_close(change[effects.raised_ids[0]], effects.raised[0], atol=2e-3, rtol=1e-2)
    torch.testing.assert_close(change[effects.lowered_ids[0]], effects.lowered[0], atol=2e-3, rtol=1e-2)


def test_bad_input():
    with pytest.raises(ClearheadError, match="between 1 and the vocabulary's 40"):
        logit_effects(torch.randn(2, 6), torch.randn(6, 40), 41)
    with pytest.raises(ClearheadError, match="width 5"):
        logit_effects(torch.randn(2, 5), torch.randn(6, 40), 3)
    assert logit_effects(torch.randn(0, 6), torch.randn(6, 40), 3).raised.shape == (0, 3)
