"""Readers: incoming edges and the constant are the value; both directions give the same edges."""

import pytest
import torch

from clearhead.circuits.tracing.readers import EXPLAINED, read_difference, read_probe, read_units
from clearhead.errors import ClearheadError, NonFiniteError
from clearhead.spectral.tracing import Target
from clearhead.units import Unit
from tests.circuits.opened_prompts import CONFIGURED, KINDS, LAST, TOKENS, model_of, opened

FAMILIES = ("gpt2", "gpt_neox", "gemma2", "olmo2", "cohere", *CONFIGURED)


def assert_conserved(prompt, reads, tolerance=1e-12):
    edges = reads.edges(prompt)
    error = (edges.sum(1) + reads.constant - reads.value).abs() / edges.abs().sum(1)
    assert float(error.max()) < tolerance
    forward = reads.edges_forward(prompt)
    assert float((edges - forward).abs().max()) < tolerance * float(edges.abs().max())


def everything(prompt):
    active = [unit for unit in prompt.sources.units if unit.kind in EXPLAINED]
    return [*active, Unit("logit", index=3, position=LAST), Unit("logit", index=9, position=5)]


@pytest.mark.parametrize("kind", KINDS)
def test_edges_add_up_and_agree_for_all_kinds_of_dictionaries(kind):
    prompt = opened("llama", kind)
    assert_conserved(prompt, read_units(prompt, everything(prompt)))


@pytest.mark.parametrize("family", FAMILIES)
def test_edges_add_up_and_agree_for_all_families(family):
    prompt = opened(family, "all")
    assert_conserved(prompt, read_units(prompt, everything(prompt)))


def test_edges_of_a_bfloat16_model_add_up_in_float32():
    prompt = opened("llama", "transcoder", torch.bfloat16)
    assert_conserved(prompt, read_units(prompt, everything(prompt)), 1e-5)


def test_values_are_those_of_the_dictionaries_and_of_the_model():
    prompt = opened("llama", "all")
    units = everything(prompt)[::-1]
    reads = read_units(prompt, units)
    assert reads.targets == tuple(units)
    logits = model_of("llama").run(TOKENS)["logits"][0]
    for unit, value in zip(units, reads.value.tolist(), strict=True):
        if unit.kind == "logit":
            expected = float(logits[unit.position, unit.index] - logits[unit.position].mean())
            assert value == pytest.approx(expected, rel=1e-5)
        else:
            # whatever fires at random weights with topk fires with its pre-activation
            assert value == pytest.approx(unit.activation, rel=1e-9)


def test_a_lorsa_head_reads_through_its_own_pattern():
    prompt = opened("llama", "lorsa")
    unit = next(u for u in prompt.sources.units if u.kind == "lorsa" and u.position == 7)
    reads = read_units(prompt, [unit])
    assert reads.position.tolist() == list(range(8)) and set(reads.depth.tolist()) == {2}
    dictionary, code = prompt.dictionaries.attention[1], prompt.attention[1]
    pattern = dictionary.patterns(code.x[None])[0, unit.index // 8, 7]
    assert float(reads.value) == pytest.approx(float(pattern @ dictionary.values(code.x[None])[0, :, unit.index]))


def test_a_difference_of_logits_and_probes_add_up():
    prompt = opened("gemma2", "all")
    for target in (Target((3,), (9, 11)), Target((3, 5))):
        assert_conserved(prompt, read_difference(prompt, target))
    reads = read_difference(prompt, Target((3,), (9,)))
    two = read_units(prompt, [Unit("logit", index=index, position=LAST) for index in (3, 9)])
    assert float(reads.value) == pytest.approx(float(two.value[0] - two.value[1]))
    vector = torch.linspace(-1, 1, 32, dtype=torch.float64)
    run = model_of("gemma2").run(TOKENS, read=["resid_mid.1", "mlp_in.1", "resid_post.0", "attn_in.1"])
    for site in run:
        reads = read_probe(prompt, site, vector, -3)
        assert_conserved(prompt, reads)
        assert float(reads.value) == pytest.approx(float(run[site][0, -3] @ vector), rel=1e-5)
        assert reads.targets[0].id == f"target.0@{LAST - 2}"


def test_bad_targets_are_refused():
    prompt = opened("llama", "transcoder")
    for unit, reason in (
        (Unit("mlp", 0, position=1), "reads nothing"),
        (Unit("logit", index=3), "not bound"),
        (Unit("logit", index=3, position=40), "not bound"),
        (Unit("logit", index=4000, position=3), "outside the vocabulary"),
        (Unit("feature", 0, 4000, 3), "not active"),
    ):
        with pytest.raises(ClearheadError, match=reason):
            read_units(prompt, [unit])
    with pytest.raises(ClearheadError, match="at least one unit"):
        read_units(prompt, [])
    vector = torch.ones(32)
    with pytest.raises(NonFiniteError):
        read_probe(prompt, "resid_pre.1", vector / 0, 0)
    for site, given, position, reason in (
        ("pattern.1", vector, 0, "reads the stream"),
        ("resid_pre.1", vector[:5], 0, "shape"),
        ("resid_pre.1", vector, 12, "outside of the prompt"),
    ):
        with pytest.raises(ClearheadError, match=reason):
            read_probe(prompt, site, given, position)
    with pytest.raises(ClearheadError, match="in parallel"):
        read_probe(opened("gpt_neox", "none"), "resid_mid.0", vector, 0)
