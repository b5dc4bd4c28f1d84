"""Dictionaries in place, whole and with units silent."""

import torch

from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.circuits.replacement.edits import in_place, losses
from clearhead.units import Unit
from tests.circuits.induction import induction_model
from tests.circuits.replacement.replaced import copies, prompts


@torch.no_grad()
def test_what_silent_heads_write_is_left_out_but_at_position_0():
    model = induction_model()
    held = Dictionaries(model, copies(model))
    lorsa, silent = held.attention[0], [Unit("lorsa", 0, 3), Unit("lorsa", 0, 40), Unit("lorsa", 1, 5)]
    reads = ["attn_in.0", "attn_in.1", "attn_out.0"]
    whole, without = (model.run(prompts()[:4], read=reads, edit=in_place(held, units)) for units in ((), silent))
    values, heads = lorsa.encode(whole["attn_in.0"])
    written = sum((values * (heads == n)).sum(-1, keepdim=True) * lorsa.W_O[n] for n in (3, 40))
    gone = whole["attn_out.0"] - without["attn_out.0"]
    assert torch.allclose(gone[:, 1:], written[:, 1:], atol=1e-6) and written[:, 1:].abs().max() > 0.1
    assert not gone[:, 0].any()


def test_exact_copies_lose_nothing_and_batches_do_not_matter():
    model = induction_model()
    clean = losses(model, prompts(), {})
    assert clean.shape == (40, 7)
    assert torch.allclose(losses(model, prompts(), in_place(Dictionaries(model, copies(model)))), clean, atol=1e-4)
    log_p = model.run(prompts(), read=["logits"])["logits"][:, :-1].float().log_softmax(-1)
    assert torch.allclose(clean, -log_p.gather(-1, prompts()[:, 1:, None])[..., 0], atol=1e-5)
