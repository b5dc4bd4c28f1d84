"""Tracing: the dense graph by small steps, budgets, starts of all sorts."""

import numpy as np
import pytest
import torch

from clearhead.circuits.tracing import trace as module
from clearhead.circuits.tracing.readers import EXPLAINED, read_difference, read_probe, read_units
from clearhead.circuits.tracing.trace import likely_logits, trace
from clearhead.errors import ClearheadError
from clearhead.spectral.tracing import Target
from tests.circuits.opened_prompts import KINDS, LAST, TOKENS, model_of, opened


@pytest.mark.parametrize("kind", KINDS)
def test_influence_ends_somewhere_and_rows_add_up(kind):
    traced = trace(opened("llama", kind), likely_logits(opened("llama", kind)))
    scores = traced.scores()
    assert scores.tokens + scores.errors + scores.biases + scores.unexplained == pytest.approx(1)
    assert scores.unexplained < 1e-9
    assert max(traced.rows.error) < 1e-12
    assert (scores.replacement > 0) and (0 < scores.completeness < 1)


def test_a_full_trace_is_the_dense_graph(monkeypatch):
    monkeypatch.setattr(module, "BATCH", 7)
    prompt = opened("gemma2", "all")
    start = likely_logits(prompt)
    traced = trace(prompt, start)
    n = len(prompt.sources)
    units = [unit for unit in prompt.sources.units if unit.kind in EXPLAINED]
    dense = torch.zeros(n + len(start.share), n + len(start.share), dtype=torch.float64)
    dense[[prompt.sources.place[unit] for unit in units], :n] = read_units(prompt, units).edges_forward(prompt)
    dense[n:, :n] = start.reads.edges_forward(prompt)
    A = dense.abs()
    A = A / A.sum(1, keepdim=True).clamp_min(1e-300)
    eye = torch.eye(len(A), dtype=torch.float64)
    expected = torch.as_tensor(traced.weights) @ (torch.linalg.inv(eye - A) - eye)
    assert np.allclose(traced.influence(), expected.numpy(), atol=1e-12)
    matters = expected[:n][[prompt.sources.place[unit] for unit in units]] > 0
    assert len(traced.rows) == len(start.share) + int(matters.sum())
    found = torch.zeros_like(dense)
    found[traced.rows.entries.target, traced.rows.entries.source] = torch.as_tensor(traced.rows.entries.weight)
    assert torch.allclose(found[traced.rows.target], dense[traced.rows.target], atol=1e-12)


def test_a_budget_takes_the_units_of_most_influence():
    prompt = opened("llama", "transcoder")
    whole, few = trace(prompt, likely_logits(prompt)), trace(prompt, likely_logits(prompt), units=5)
    starts = len(whole.start.share)
    assert len(few.rows) == starts + 5
    assert few.rows.target[: starts + 5] == whole.rows.target[: starts + 5]
    first = whole.rows.by_node(np.ones(len(whole.rows)))
    assert first[few.rows.target].all()
    assert few.scores().unexplained > whole.scores().unexplained
    assert few.scores().replacement < whole.scores().replacement


def test_what_is_not_stored_is_said():
    prompt = opened("llama", "all")
    traced = trace(prompt, likely_logits(prompt), kept=4)
    starts = len(traced.start.share)
    counts = np.bincount(traced.rows.entries.target)
    assert counts[: traced.rows.n_sources].max() == 4 and sum(traced.rows.dropped[:starts]) == 0
    stored = np.bincount(traced.rows.entries.target, np.abs(traced.rows.entries.weight), len(traced.rows.units))
    assert np.allclose(stored[traced.rows.target] + traced.rows.dropped, traced.rows.total)
    scores = traced.scores()
    assert scores.tokens + scores.errors + scores.biases + scores.unexplained == pytest.approx(1)
    assert scores.unexplained > 1e-3 > trace(prompt, likely_logits(prompt)).scores().unexplained


def test_likely_logits_are_the_fewest_that_reach_the_probability(monkeypatch):
    prompt = opened("gpt2", "none")
    start = likely_logits(prompt)
    expected = model_of("gpt2").run(TOKENS)["logits"][0, -1].softmax(-1).sort(descending=True)
    count = int((expected.values.cumsum(0) < module.PROBABILITY).sum()) + 1
    assert len(start.share) == min(count, module.LOGITS)
    assert [unit.index for unit in start.reads.targets] == expected.indices[: len(start.share)].tolist()
    assert np.allclose(start.share, expected.values[: len(start.share)])
    monkeypatch.setattr(module, "PROBABILITY", 1e-9)
    assert len(likely_logits(prompt).share) == 1


def test_other_starts():
    prompt = opened("llama", "all")
    feature = next(unit for unit in prompt.sources.units if unit.kind == "feature" and unit.layer == 1)
    vector = torch.linspace(-1, 1, 32)
    for start in (
        read_difference(prompt, Target((3,), (5,))),
        read_probe(prompt, "resid_post.0", vector, LAST),
        read_units(prompt, [feature]),
    ):
        traced = trace(prompt, start)
        assert traced.weights.sum() == 1 and traced.rows.units[-1] == start.targets[0]
        assert float(start.value[0]) == traced.rows.units[-1].activation


def test_bad_numbers_and_empty_starts_are_refused():
    prompt = opened("llama", "transcoder")
    with pytest.raises(ClearheadError, match="count from 1"):
        trace(prompt, likely_logits(prompt), units=0)
    with pytest.raises(ClearheadError, match="nothing in the prompt writes"):
        trace(prompt, read_probe(prompt, "resid_pre.1", torch.zeros(32), 0))
