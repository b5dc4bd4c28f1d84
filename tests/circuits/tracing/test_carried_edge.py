"""One edge over heads: several sources together are the sum of their edges, and knocking heads out takes their part."""

import pytest
import torch

from clearhead.circuits.tracing.carried_edge import carry_edge, sources_named
from clearhead.circuits.tracing.loadings import split_edges
from clearhead.circuits.tracing.trace import likely_logits
from clearhead.errors import ClearheadError
from tests.circuits.opened_prompts import LAST, opened


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_a_token_is_all_that_is_written_there(family):
    prompt = opened(family, "transcoder")
    reads = likely_logits(prompt).reads
    places = sources_named(prompt, "@4")
    assert {prompt.sources.units[p].kind for p in places} == {"embedding", "feature", "error"}
    found = carry_edge(prompt, reads, places, 1)
    assert found.weight == pytest.approx(float(reads.edges(prompt)[1, places].sum()))
    # what stands at another position reaches the last one through heads alone
    assert found.direct == 0 and sum(found.heads.values()) == pytest.approx(found.weight)
    sizes = [abs(weight) for weight in found.heads.values()]
    assert sizes == sorted(sizes, reverse=True)
    count = found.count(0.8)
    assert sum(sizes[:count]) >= 0.8 * sum(sizes) * (1 - 1e-9) > sum(sizes[: count - 1])
    assert count <= found.count(0.9) <= len(sizes)


def test_one_unit_is_its_own_edge_and_may_pass_no_head():
    prompt = opened("llama", "transcoder")
    reads = likely_logits(prompt).reads
    name = next(u.id for u in prompt.sources.units if u.kind == "feature" and u.layer == 0 and u.position == LAST)
    (place,) = sources_named(prompt, name)
    found = carry_edge(prompt, reads, [place], 0)
    weight = reads.edges(prompt)[0, place][None]
    split = split_edges(prompt, reads, torch.tensor([place]), torch.tensor([0]), weight, "last")
    assert found.direct == pytest.approx(float(split.direct)) and found.direct != 0
    assert len(found.heads) > 1
    for (layer, head), carried in found.heads.items():
        assert carried == pytest.approx(float(split.weight[0, layer, head]))
    assert found.direct + sum(found.heads.values()) == pytest.approx(found.weight)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("@12", "none of the prompt's tokens @0 to @11"),
        ("@x", "none of"),
        ("@", "none of"),
        ("mlp.7@1", "writes nothing"),
    ],
)
def test_sources_that_are_not_there_are_refused(name, says):
    with pytest.raises(ClearheadError, match=says):
        sources_named(opened("llama", "none"), name)


def test_an_edge_without_sources_is_refused():
    prompt = opened("llama", "none")
    with pytest.raises(ClearheadError, match="at least one source"):
        carry_edge(prompt, likely_logits(prompt).reads, [], 0)
