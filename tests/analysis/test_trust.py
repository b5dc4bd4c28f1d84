"""Trust of heads: each measure by its definition on a small case, controls where they must fall."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from clearhead.analysis.own_patterns import head_ranks
from clearhead.analysis.trust import RANK_TOKENS, measure_trust
from clearhead.data.text import TokenBlocks
from clearhead.dictionaries.init import from_attention
from clearhead.dictionaries.lorsa import Lorsa
from clearhead.errors import ClearheadError

B, T, LAYER, K = 6, 24, 1, 8


@pytest.fixture(scope="module")
def blocks(model):
    tokens = torch.randint(0, model.d_vocab, (B, T), generator=torch.Generator().manual_seed(3))
    nothing = torch.zeros(0, dtype=torch.int64)
    return TokenBlocks(tokens, torch.zeros(B, dtype=torch.int64), nothing, [], "random", "held_out", 0, "")


@pytest.fixture(scope="module")
def lorsa(model):
    """The layer's own heads, of which the 8 largest count."""
    exact = from_attention(model.weights(LAYER), model.geometry(LAYER))
    lorsa = Lorsa(replace(exact.config, k=K), {"model": model.name, "layer": LAYER})
    lorsa.load_state_dict(exact.state_dict())
    return lorsa.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def heads(lorsa, model, blocks):
    """Two that are often active."""
    codes = lorsa(model.run(blocks.tokens, read=["attn_in.1"])["attn_in.1"]).codes
    return codes.heads[:, 1:].flatten().bincount().topk(2).indices.tolist()


@pytest.fixture(scope="module")
def trust(lorsa, model, blocks, heads):
    return measure_trust(
        lorsa, model, LAYER, blocks, others=[lorsa], heads=heads, families={"family.1.0": heads}, cases=5
    )


def value_of(trust, unit, measure):
    rows = trust.rows
    found = [
        tuple(rows[name][place] for name in ("value", "low", "high", "cases"))
        for place in range(len(rows["value"]))
        if rows["unit_id"][place] == unit and rows["measure"][place] == measure
    ]
    assert len(found) == 1
    return found[0]


def test_what_the_output_has_along_a_head(trust, lorsa, model, blocks, heads):
    sites = [f"{name}.{LAYER}" for name in ("attn_in", "attn_out", "z")]
    x, y, z = (model.run(blocks.tokens, read=sites)[site] for site in sites)
    output = lorsa(x)
    W_O = model.weights(LAYER).W_O.detach()
    hosted = 0
    for head in heads:
        here = (output.codes.heads == head) & (output.codes.values != 0)
        here[:, 0] = False
        a = output.codes.values[here]
        at = here.any(-1)
        direction = lorsa.W_O[head]
        pairs = {"explained": y[at] @ direction, "explained_alone": a + (y - output.y)[at] @ direction}
        for name, projected in pairs.items():
            expected = max(0.0, float(np.corrcoef(a.numpy(), projected.numpy())[0, 1])) ** 2
            found, low, high, cases = value_of(trust, f"lorsa.1.{head}", name)
            assert found == pytest.approx(expected, abs=1e-4) and cases == len(a) and low <= high
        host = (torch.einsum("nhv,hvd->nhd", z[at], W_O) @ direction).mean(0).clamp_min(0)
        if host.max() > 0:  # signed heads may write against their hosts
            found, *_ = value_of(trust, f"lorsa.1.{head}", "host_share")
            assert found == pytest.approx(float(host.max() / host.sum()), abs=1e-4)
            hosted += 1
    assert hosted


def test_the_same_lorsa_is_stable(trust, heads):
    assert value_of(trust, f"lorsa.1.{heads[0]}", "seed_stability")[0] == pytest.approx(1)
    assert trust.summary["stable (likeness ≥ 0.5)"][0] == 1
    assert trust.summary["stable (likeness ≥ 0.5), write vectors exchanged"][0] < 0.5


def test_effects_of_heads_and_families(trust, heads):
    for unit in (*(f"lorsa.1.{head}" for head in heads), "family.1.0"):
        effect, low, high, cases = value_of(trust, unit, "causal_effect")
        assert low <= effect <= high and cases == 5
        assert value_of(trust, unit, "causal_kl")[0] > 0 and value_of(trust, unit, "control_kl")[0] > 0
        predicted, linear = (value_of(trust, unit, f"{name}_effect")[0] for name in ("predicted", "linear"))
        assert predicted == linear != 0  # no attention above the last layer
        assert value_of(trust, unit, "effect_slope")[3] == 5
        assert np.sign(value_of(trust, unit, "gradient_effect")[0]) == np.sign(effect)
    assert trust.interventions["unit_id"][::3] == [*(f"lorsa.1.{head}" for head in heads), "family.1.0"]
    assert trust.summary["cases"] == 10
    value, low, high = trust.summary["correlation of effect with direct"]
    assert -1 <= low <= value <= high <= 1
    assert {"effect_correlation", "control_effect", "control_loss"} <= set(trust.rows["measure"])


def test_ranks_of_the_patterns_of_heads_with_effects(trust, lorsa, model, blocks, heads):
    inputs = model.run(blocks.tokens, read=["attn_in.1"])["attn_in.1"]
    ranks = head_ranks(lorsa, lambda: [inputs], tokens_per_head=RANK_TOKENS).rank
    for head in heads:
        assert value_of(trust, f"lorsa.1.{head}", "pattern_rank")[0] == int(ranks[head]) > 0
        assert value_of(trust, f"lorsa.1.{head}", "pattern_coordinates")[0] == 32
    assert trust.rows["measure"].count("pattern_rank") == 2 and "pattern_overlap" not in trust.rows["measure"]
    assert trust.summary["rank of a head's pattern, of 32 coordinates, median"][0] == np.median(ranks[heads])


def test_rows_are_numbers_and_dead_heads_have_none(trust, lorsa):
    rows = trust.rows
    numbers = [value for name in ("value", "low", "high") for value in rows[name] if value is not None]
    assert np.isfinite(numbers).all()
    measured = [unit for unit, name in zip(rows["unit_id"], rows["measure"], strict=True) if name == "seed_stability"]
    assert len(measured) == lorsa.n_heads - trust.summary["dead"] and trust.summary["dead"] > 0


def test_one_block_has_no_interval_of_text(lorsa, model, blocks):
    one = replace(blocks, tokens=blocks.tokens[:1])
    found = measure_trust(lorsa, model, LAYER, one, n_effects=1, cases=1)
    head = found.rows["unit_id"][found.rows["measure"].index("host_share")]
    assert value_of(found, head, "host_share")[1:3] == (None, None)
    assert all(np.isfinite(value).all() for value in found.summary.values())  # one case has a mean, and no more
    assert "effect, logits" in found.summary and "correlation of effect with gradient" not in found.summary
    with pytest.raises(ClearheadError, match="no token blocks"):
        measure_trust(lorsa, model, LAYER, replace(blocks, tokens=blocks.tokens[:0]))
    with pytest.raises(ClearheadError, match=f"no head {lorsa.n_heads}: the Lorsa has {lorsa.n_heads}"):
        measure_trust(lorsa, model, LAYER, one, heads=[lorsa.n_heads])
