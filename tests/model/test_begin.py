"""Forwards that begin at a layer, and logits at some positions: the same numbers as the whole forward."""

import pytest
import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.model import Model
from clearhead.model.gates import install
from tests.model.conftest import tiny_model, tiny_tokens
from tests.model.tiny_configs import CONFIGS, OFF_INTERFACE, build


@pytest.mark.parametrize("name", [*CONFIGS, *OFF_INTERFACE])
def test_a_forward_from_a_layer_is_bitwise_the_whole_one(name: str):
    model, tokens = tiny_model(name), tiny_tokens()
    whole = model.run(tokens, read=["resid_pre.*", "resid_post.*", "logits"])
    for layer in range(model.n_layers):
        run = model.run(tokens, read=["resid_post.1", "logits"], begin=(layer, whole[f"resid_pre.{layer}"]))
        assert torch.equal(run["resid_post.1"], whole["resid_post.1"])
        assert torch.equal(run.logits, whole.logits)
    some = model.run(tokens, begin=(1, whole["resid_pre.1"]), positions=[-1, 3]).logits
    torch.testing.assert_close(some, whole.logits[:, [-1, 3]], rtol=1e-5, atol=1e-5)


def test_layers_below_are_not_run_and_stay_as_they_are():
    model, tokens = tiny_model("llama"), tiny_tokens()
    ran: list[int] = []
    handles = [
        attention.register_forward_pre_hook(lambda *_, n=n: ran.append(n))
        for n, attention in enumerate(model.places.attentions)
        if attention is not None
    ]
    stream = model.run(tokens[:1], read=["resid_pre.1"])["resid_pre.1"]
    ran.clear()
    model.run(tokens[:1].expand(5, -1), begin=(-1, stream))
    assert ran == [1]
    for handle in handles:
        handle.remove()
    assert all("forward" not in vars(layer) for layer in model.places.layers)


def test_a_forward_found_on_the_layer_is_put_back_and_an_error_changes_nothing():
    model, tokens = Model(build("gpt2")), tiny_tokens()
    whole = model.run(tokens, read=["resid_pre.1", "logits"])
    layer = model.places.layers[0]
    own = layer.forward

    def wrapped(*args: object, **kwargs: object) -> object:
        return own(*args, **kwargs)

    layer.forward = wrapped

    def fail(_value: Tensor, _run: object) -> Tensor:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        model.run(tokens, edit={"z.1": fail}, begin=(1, whole["resid_pre.1"]), positions=[-1])
    assert layer.forward is wrapped
    assert torch.equal(model.run(tokens).logits, whole.logits)


def test_a_nested_forward_runs_all_layers():
    model, tokens = tiny_model("gpt2"), tiny_tokens()
    whole = model.run(tokens, read=["resid_pre.1", "logits"])
    inner = []

    def run_again(value: Tensor, _run: object) -> Tensor:
        inner.append(model.run(tokens).logits)
        return value

    model.run(tokens, edit={"z.1": run_again}, begin=(1, whole["resid_pre.1"]), positions=[-1])
    assert torch.equal(inner[0], whole.logits)


def test_edits_gradients_and_gates_work_from_a_layer():
    model, tokens = Model(build("llama", attn="sdpa")), tiny_tokens()
    install(model, bias=0.5)
    for path in ("sdpa", "eager"):
        whole = model.run(tokens, read=["resid_pre.1", "logits"], edit={"z.1": lambda z, _: z / 2}, path=path)
        run = model.run(tokens, edit={"z.1": lambda z, _: z / 2}, begin=(1, whole["resid_pre.1"]), grad=True, path=path)
        assert torch.equal(run.logits, whole.logits)
    stream = whole["resid_pre.1"].clone().requires_grad_()
    model.run(tokens, begin=(1, stream), positions=[-1], grad=True).logits.sum().backward()
    assert stream.grad is not None
    assert float(stream.grad.abs().sum()) > 0


def test_what_cannot_begin_is_refused():
    model, tokens = tiny_model("llama"), tiny_tokens()
    stream = model.run(tokens, read=["resid_pre.1"])["resid_pre.1"]
    with pytest.raises(ClearheadError, match=r"site z.0 lies below layer 1"):
        model.run(tokens, read=["z.0"], begin=(1, stream))
    with pytest.raises(ClearheadError, match=r"got \[2, 11, 32\]; read it with read=\['resid_pre.1'\]"):
        model.run(tokens, begin=(1, stream[:, 1:]))
    with pytest.raises(ClearheadError, match="layers 0 to 1"):
        model.run(tokens, begin=(2, stream))
    for wrong in ([], [12], [-13]):
        with pytest.raises(ClearheadError, match="positions: expected"):
            model.run(tokens, positions=wrong)
    borrowing = tiny_model("gemma4_text")
    borrowing.hf.config.num_kv_shared_layers = 1
    with pytest.raises(ClearheadError, match="keys and values of earlier layers"):
        borrowing.run(tokens, begin=(1, stream))
    borrowing.hf.config.num_kv_shared_layers = 0
