import json

import pytest
import torch

from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError
from clearhead.model import Model
from clearhead.model.gates import install
from clearhead.sparsify.evaluate import evaluate, load_base
from clearhead.sparsify.measures import measure_losses
from tests.sparsify.gated_models import LENGTH, break_embedding, dense_model, gated_model, random_tokens


@pytest.fixture(scope="module")
def found():
    """The bundled model, with gates that are all but open, its base, and what was measured on them."""
    model = Model.load("clearhead-tiny")
    install(model, bias=200.0, settings={"base": "clearhead-tiny"})
    base = load_base(model)
    assert base is not None and base.gates is None
    tokens = torch.randint(5, 1000, (3, 32), generator=torch.Generator().manual_seed(0))
    options = {"prompts": 8, "seeds": (0,), "tasks": ("ioi", "copy"), "retrieval_lengths": (64, 128)}
    options |= {"retrieval_prompts": 1}
    return evaluate(model, tokens, base=base, lengths=(8, 16, 999), **options)


def test_open_gates_are_the_base(found):
    assert found["ce"]["hard"] == pytest.approx(found["ce"]["base"], rel=1e-5)
    assert found["ce"]["sampled"] == pytest.approx(found["ce"]["base"], rel=1e-5)
    assert found["edges"]["share"] == 1.0 and found["edges"]["leak"] == 0.0
    assert [row["length"] for row in found["lengths"]] == [8, 16, 32]
    assert [row["per_query"] for row in found["lengths"]] == pytest.approx([4.5, 8.5, 16.5])
    assert found["induction"]["hard"] == pytest.approx(found["induction"]["base"], rel=1e-4)
    for name in ("opened", "before_gates", "after_gates"):
        assert found["first_token"][name] == pytest.approx(found["first_token"]["base"], rel=1e-4)
    assert all(value == pytest.approx(found["ce"]["base"], rel=1e-4) for value in found["controls"].values())


def test_result_is_json_and_says_what_it_was_measured_on(found):
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["model"], found["base"], found["tokens"], found["context"]) == ("clearhead-tiny",) * 2 + (96, 32)
    assert found["laid_out_tokens"] == 96


def test_tasks_are_measured_on_all_forms_or_refused_with_a_reason(found):
    assert "clearhead-tiny" in found["tasks"]["ioi"]["refused"]
    copy = found["tasks"]["copy"]
    assert copy["prompts"] == 8 and copy["refused_prompts"] == {}
    assert copy["hard"] == pytest.approx(copy["base"], rel=1e-3)
    for kind in ("passkey", "needle"):
        short, long = found["retrieval"][kind]
        assert short["length"] == 64 and "cannot hold" in short["refused"]
        assert long["hard"]["log_probability"] == pytest.approx(long["base"]["log_probability"], rel=1e-3)
        assert len(long["depths"]) == len(long["hard"]["exact"]) == len(long["opened"]["exact"])


def test_without_base_and_tokenizer_the_keys_are_the_same():
    """Random models: no tokenizer, so tasks are refused; every number of a base is None."""
    (model, _), base, tokens = gated_model("llama"), dense_model("llama"), random_tokens()
    options = {"seeds": (0, 1), "tasks": ("ioi",), "laid_out_tokens": 40, "retrieval_lengths": (16,)}
    alone, both = (evaluate(model, tokens, base=given, **options) for given in (None, base))
    assert set(alone) == set(both)
    for name in ("ce", "edges", "by_layer", "by_head", "first_token", "empty_tiles", "controls", "induction"):
        assert set(alone[name]) == set(both[name]), name
    assert alone["ce"]["base"] is None and alone["induction"]["base"] is None and alone["base"] is None
    assert alone["ce"]["hard"] == both["ce"]["hard"] and both["ce"]["base"] is not None
    assert "tokenizer" in both["tasks"]["ioi"]["refused"]
    assert "tokenizer" in both["retrieval"]["passkey"][0]["refused"]
    assert both["laid_out_tokens"] == 40
    json.dumps(both, allow_nan=False)


def test_numbers_agree_with_what_they_are_made_of():
    (model, gates), base, tokens = gated_model("gpt2"), dense_model("gpt2"), random_tokens()
    found = evaluate(model, tokens, base=base, seeds=(3, 4), tasks=(), lengths=(5,))
    hard, edges = measure_losses(model, tokens, lambda _: gates.hard())
    assert found["ce"]["hard"] == pytest.approx(float(hard.mean()))
    assert found["edges"] == pytest.approx(edges.summary())
    assert found["lengths"][0] == pytest.approx({"length": 5, **edges.summary(5)})
    for seed, value in zip((3, 4), found["ce"]["sampled_by_seed"], strict=True):
        sampled, _ = measure_losses(model, tokens, lambda first, seed=seed: gates.sampled(seed, first))
        assert value == pytest.approx(float(sampled.mean()))
    assert found["ce"]["sampled"] == pytest.approx(sum(found["ce"]["sampled_by_seed"]) / 2)
    assert sum(found["by_layer"]["share"]) / 2 == pytest.approx(found["edges"]["share"])
    flat = [share for layer in found["by_head"]["share"] for share in layer]
    assert sum(flat) / 8 == pytest.approx(found["edges"]["share"])
    assert found["by_head"]["distance"][1][2] is None and found["by_head"]["per_query"][1][2] == 0.0
    assert found["controls"]["hard"] == pytest.approx(found["ce"]["hard"])
    weights = [row["last"] - row["first"] + 1 for row in found["ce_by_position"]]
    for form in ("hard", "opened", "base"):
        total = sum(w * row[form] for w, row in zip(weights, found["ce_by_position"], strict=True))
        assert total / (LENGTH - 1) == pytest.approx(found["ce"][form])


def test_a_model_that_names_no_base_has_none():
    assert load_base(gated_model("gpt2")[0]) is None
    assert load_base(dense_model("gpt2")) is None


def test_the_model_is_left_as_it_was():
    model, gates = gated_model("gpt2")
    model.hf.train()
    before, mode = model.run(random_tokens()).logits, gates.control.mode
    evaluate(model, random_tokens(), tasks=(), seeds=(0,))
    assert model.hf.training and gates.control.mode == mode
    assert torch.equal(model.run(random_tokens()).logits, before)


def test_bad_input_is_refused():
    (model, _), tokens = gated_model("gpt2"), random_tokens()
    with pytest.raises(ClearheadError, match="dense gpt2 is a dense model"):
        evaluate(dense_model("gpt2"), tokens)
    with pytest.raises(UnknownNameError, match="ioi"):
        evaluate(model, tokens, tasks=("iio",))
    with pytest.raises(ClearheadError, match="context"):
        evaluate(model, random_tokens(1, 65))
    with pytest.raises(ClearheadError, match="at least 4 tokens"):
        evaluate(model, tokens[:, :3])
    with pytest.raises(ClearheadError, match="seed"):
        evaluate(model, tokens, seeds=())
    with pytest.raises(ClearheadError, match=r"trained from"):
        evaluate(model, tokens, base=Model.load("clearhead-tiny", self_test=False))


def test_a_damaged_model_is_refused():
    model, _ = gated_model("gpt2")
    break_embedding(model, 3)
    with pytest.raises(NonFiniteError, match="hard loss"):
        evaluate(model, random_tokens(), tasks=())
