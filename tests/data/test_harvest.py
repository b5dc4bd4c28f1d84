import pytest
import torch

from clearhead.data.harvest import MLP, LiveActivations, layers_with
from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.model.access import Model


def test_a_batch_is_what_the_model_reads_at_its_sites(model, make_blocks):
    blocks = make_blocks(6)
    source = LiveActivations(model, blocks, 1)
    batch = source.batch([4, 0, 4])
    run = model.run(blocks.tokens[[4, 0, 4]], read=["attn_in.1", "attn_out.1"])
    assert torch.equal(batch.tokens, blocks.tokens[[4, 0, 4]])
    assert torch.equal(batch.x, run["attn_in.1"])
    assert torch.equal(batch.y, run["attn_out.1"])
    assert (len(source), source.context, source.d) == (6, 16, 128)


def test_the_micro_batch_changes_speed_alone(model, make_blocks):
    blocks = make_blocks(5)
    together = LiveActivations(model, blocks, 0, micro_batch=8).batch(range(5))
    apart = LiveActivations(model, blocks, 0, micro_batch=2).batch(torch.arange(5))
    torch.testing.assert_close(together.x, apart.x)
    torch.testing.assert_close(together.y, apart.y)


def test_negative_layers_count_from_the_end(model, make_blocks):
    assert LiveActivations(model, make_blocks(2), -1).sites == ("attn_in.1", "attn_out.1")


def test_layers_above_the_site_are_not_run(model, make_blocks, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("the layer above was run")

    monkeypatch.setattr(model.hf.transformer.h[1], "forward", refuse)
    LiveActivations(model, make_blocks(2), 0).batch([0])


def test_sixteen_bit_models_yield_float32(make_blocks):
    half = Model.load("clearhead-tiny", dtype="bfloat16", self_test=False)
    batch = LiveActivations(half, make_blocks(2), 0).batch([0])
    assert batch.x.dtype == batch.y.dtype == torch.float32


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("site", ["attn_in.1", "attn_out.1"])
def test_numbers_that_are_not_finite_are_named(model, make_blocks, monkeypatch, site, value):
    source = LiveActivations(model, make_blocks(6), 1, micro_batch=2)
    read = model.run

    def spoil(tokens, *, read: tuple[str, ...], run=read):
        result = run(tokens, read=read)
        # block 3 is the third of this batch, so it comes in the second micro-batch
        result[site][torch.nonzero((tokens == source.blocks.tokens[3]).all(1)).flatten(), 5, 7] = value
        return result

    monkeypatch.setattr(model, "run", spoil)
    words = rf"{site} is {value} in block 3 \(entry 2 of the batch\) at position 5, dimension 7.*float32"
    with pytest.raises(NonFiniteError, match=words):
        source.batch([0, 1, 3])
    source.batch([0, 1, 2])


@pytest.mark.parametrize("chosen", [[6], [-1], []])
def test_blocks_that_do_not_exist_are_refused(model, make_blocks, chosen):
    with pytest.raises(ClearheadError, match="block indices must be 0 to 5"):
        LiveActivations(model, make_blocks(6), 0).batch(chosen)


def test_layers_that_do_not_exist_are_refused(model, make_blocks):
    with pytest.raises(ClearheadError, match="the model has layers 0 to 1"):
        LiveActivations(model, make_blocks(2), 9)
    with pytest.raises(ClearheadError, match="at least 1 block"):
        LiveActivations(model, make_blocks(2), 0, micro_batch=0)


def test_layers_without_softmax_attention_are_refused(make_blocks):
    from tests.model.tiny_configs import build

    hybrid = Model(build("qwen3_next"), name="hybrid", self_test=False)
    with pytest.raises(ClearheadError, match="attn_in.0: layer 0 of this qwen3_next model has no softmax attention"):
        LiveActivations(hybrid, make_blocks(2), 0)
    assert LiveActivations(hybrid, make_blocks(2), 1).layer == 1
    having, refused = layers_with(hybrid, [0, 1])
    assert having == [1] and "no softmax attention" in refused[0]
    assert layers_with(hybrid, [0, 1], MLP) == ([0, 1], {})
