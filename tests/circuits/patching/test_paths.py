"""Path patches against weights and streams put together by hand."""

import pytest
import torch
from torch import Tensor

from clearhead.circuits.patching.paths import patch_paths
from clearhead.data.tasks import TaskBatch, logit_difference
from clearhead.errors import ClearheadError
from clearhead.model import Model
from tests.circuits.patching.test_nodes import random_rows, tiny
from tests.circuits.planted import planted_model, planted_rows


def change_of(model: Model, rows: TaskBatch, sender: str) -> Tensor:
    """What the stream gains when the sender's output is the corrupt one's."""
    kind, layer, *head = sender.split(".")
    site = f"head_out.{layer}" if kind == "head" else f"mlp_out.{layer}"
    clean, corrupt = (model.run(tokens, read=[site])[site] for tokens in (rows.clean, rows.corrupt))
    change = corrupt - clean
    return change[:, :, int(head[0])] if kind == "head" else change


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("sender", ["head.0.1", "mlp.0"])
def test_receivers_read_the_clean_stream_and_the_senders_change(name: str, sender: str):
    model, rows = tiny(name), random_rows()
    change = change_of(model, rows, sender)
    seen = {}
    moved = model.run(  # what layer 1 receives is exactly that, however little of it the receivers then pass on
        rows.clean, edit={"resid_pre.1": lambda x, _: x + change}, read=["q.1", "k.1", "v.1", "resid_pre.1"]
    )
    for receivers, sites in (
        (["head_q.1.2"], {"q.1": [2]}),
        (["head_k.1.0", "head_v.1.1"], {"k.1": [0], "v.1": [1]}),
    ):

        def take(x: Tensor, run, sites: dict[str, list[int]] = sites) -> Tensor:
            x = x.clone()
            heads = sites[str(run.site)]
            x[:, heads] = moved[str(run.site)][:, heads]
            return x

        expected = model.run(rows.clean, edit=dict.fromkeys(sites, take)).logits[:, -1]
        seen[receivers[0]] = patch_paths(model, rows, [sender], receivers).patched[0, :, 0]
        torch.testing.assert_close(seen[receivers[0]], logit_difference(expected, rows), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(*seen.values())


def test_an_mlp_receives_and_passes_nothing_on_to_later_receivers():
    model, rows = tiny("gpt2"), random_rows()
    change = change_of(model, rows, "head.0.1")
    middle = model.run(rows.clean, read=["resid_mid.0"])["resid_mid.0"]
    received = model.run(rows.clean, edit={"resid_mid.0": middle + change}, read=["mlp_out.0"])["mlp_out.0"]
    only = model.run(rows.clean, edit={"mlp_out.0": received}).logits[:, -1]
    found = patch_paths(model, rows, ["head.0.1"], ["mlp.0"]).patched[0, :, 0]
    torch.testing.assert_close(found, logit_difference(only, rows))
    # with q of the next layer receiving too, it reads the sender and the clean MLP
    queries = model.run(rows.clean, edit={"resid_pre.1": lambda x, _: x + change}, read=["q.1"])["q.1"]

    def take(q: Tensor, _run) -> Tensor:
        q = q.clone()
        q[:, 3] = queries[:, 3]
        return q

    both = model.run(rows.clean, edit={"mlp_out.0": received, "q.1": take}).logits[:, -1]
    found = patch_paths(model, rows, ["head.0.1"], ["mlp.0", "head_q.1.3"]).patched[0, :, 0]
    torch.testing.assert_close(found, logit_difference(both, rows))


def test_without_receivers_the_effect_is_the_direct_one():
    model, rows = tiny("gpt2"), random_rows()
    last = model.run(rows.clean, read=["resid_post.1"])["resid_post.1"]
    senders = ["head.0.2", "head.1.0", "mlp.1"]
    found = patch_paths(model, rows, senders)
    for row, sender in enumerate(senders):
        moved = model.run(rows.clean, edit={"resid_post.1": last + change_of(model, rows, sender)})
        torch.testing.assert_close(found.patched[row, :, 0], logit_difference(moved.logits[:, -1], rows))


def test_the_planted_path_is_the_only_one():
    model, rows = planted_model(), planted_rows()
    through = {
        receiver: patch_paths(model, rows, ["head.0.1"], [receiver]).effects
        for receiver in ("head_q.1.2", "head_k.1.2", "head_v.1.2", "head_v.1.1", "mlp.1")
    }
    assert float(through.pop("head_v.1.2").max()) < -15
    assert all(float(effect.abs().max()) < 1 for effect in through.values())
    direct = patch_paths(model, rows, ["head.0.1", "head.1.2"]).effects
    assert float(direct[0].abs().max()) < 0.1
    assert float(direct[1].max()) < -15


def test_what_cannot_send_or_receive_is_refused():
    model, rows = tiny("llama"), random_rows()
    for senders, receivers, message in (
        (["attn.0"], [], "attn.0 does not send"),
        (["head.0.1"], ["head.1.2"], "head.1.2 does not receive"),
        (["head.1.1"], ["head_q.1.2"], "head_q.1.2 reads nothing of head.1.1"),
        (["mlp.0"], ["mlp.0"], "mlp.0 reads nothing of mlp.0"),
        (["head.0.1"], ["head_k.1.2"], "layer 1 has 2 of these"),
        (["head.0.1@3"], [], "at all positions together"),
        ([], [], "at least one head or MLP"),
    ):
        with pytest.raises(ClearheadError, match=message):
            patch_paths(model, rows, senders, receivers)
    parallel = tiny("gptj")
    with pytest.raises(ClearheadError, match="mlp.0 reads nothing of head.0.1"):
        patch_paths(parallel, rows, ["head.0.1"], ["mlp.0"])
