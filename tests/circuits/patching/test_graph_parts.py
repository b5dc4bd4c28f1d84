"""Writers, readers and edges of a model; models that have no such graph."""

import pytest

from clearhead.circuits.patching.graph_parts import GraphParts
from clearhead.errors import ClearheadError
from tests.circuits.masked_graphs import ROWS
from tests.circuits.random_rows import double_model
from tests.model import tiny_configs


def test_edges_go_from_what_writes_below_to_what_reads_above():
    parts = GraphParts(double_model("llama"))
    assert parts.names[:2] == ["input->a0.h0<q>", "input->a0.h1<q>"]
    assert parts.names[-2:] == ["a1.h3->logits", "m1->logits"]
    assert [name for name in parts.names if name.endswith("->a1.kv1<v>")] == [
        f"{writer}->a1.kv1<v>" for writer in ("input", "a0.h0", "a0.h1", "a0.h2", "a0.h3", "m0")
    ]
    writer, reader = parts.ends
    ends = zip(writer.tolist(), reader.tolist(), strict=True)
    assert [f"{parts.writers[u]}->{parts.reader_names[r]}" for u, r in ends] == parts.names
    parallel = GraphParts(double_model("gpt_neox"))
    assert "a1.h0->m1" in parts.names
    assert "a1.h0->m1" not in parallel.names


def test_gpt2_small_has_the_published_number_of_edges(monkeypatch):
    """EAP-IG and MIB count 158 nodes and 32,491 edges."""
    shape = tiny_configs.GPT2 | {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 24}
    monkeypatch.setitem(tiny_configs.CONFIGS, "gpt2_small", shape)
    parts = GraphParts(double_model("gpt2_small"))
    assert len(parts.writers) + 1 == 158
    assert parts.n_edges == len(set(parts.names)) == 32_491


def test_models_without_such_a_graph_are_refused_with_the_reason():
    with pytest.raises(ClearheadError, match="normalises its values"):
        GraphParts(double_model("gemma4_text"))
    with pytest.raises(ClearheadError, match="no softmax attention"):
        GraphParts(double_model("qwen3_next"))
    with pytest.raises(ClearheadError, match="low-rank latents"):
        GraphParts(double_model("deepseek_v3"))


def test_a_layer_that_writes_more_than_its_heads_and_mlp_is_refused():
    model = double_model("gpt2")
    parts = GraphParts(model)
    read = [*parts.read(), "resid_post.1"]
    run = model.run(ROWS.clean, read=read)
    parts.check(run)
    more = model.run(ROWS.clean, read=read, edit={"resid_post.1": lambda x, _run: x + 0.1})
    with pytest.raises(ClearheadError, match="layer 1 of gpt2 writes more"):
        parts.check(more)
    other = model.run(ROWS.clean, read=read, edit={"attn_out.0": lambda x, _run: x + 0.1})
    with pytest.raises(ClearheadError, match="layer 0 of gpt2 writes more"):
        parts.check(other)
