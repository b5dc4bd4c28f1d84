"""Interventions: exact limits, predicted equals measured, norm-matched controls, closed-form summaries."""

import dataclasses

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.spectral.interventions import (
    SCOPES,
    Change,
    Effect,
    Removal,
    Shift,
    global_edits,
    intervene,
    local_edits,
    observe,
    random_modes,
    summarise,
)
from clearhead.spectral.signals import SIDES, Firing, attribute, strip
from clearhead.spectral.tracing import Target
from clearhead.spectral.writes import Component
from tests.model.test_weights import TOKENS
from tests.spectral.test_signals import stream_of, strongest

TARGET = Target((3,), (7,))
EDITS = {"local": local_edits, "global": global_edits}


def signal_of(name, side, firing=None, share=0.5):
    stream = stream_of(name)
    found = attribute(stream, firing or strongest(stream), side)
    return stream, strip(found, below=share * found.weight)


def everything(name, side, firing=None):
    """All components and all modes of one side, what the head adds itself included."""
    stream = stream_of(name)
    found = attribute(stream, firing or strongest(stream), side)
    signal = strip(found)
    ones = torch.ones_like(found.pieces)
    return stream, dataclasses.replace(
        signal, components=found.components, pieces=found.pieces, mask=ones.bool(), drop=ones
    )


def run_with(stream, edits, sites):
    return stream.parts.model.run(TOKENS[:1], read=sites, edit=edits, path="eager")


def set_to_zero(head, position):
    def edit(x, _run):
        x = x.clone()
        x[:, head, position] = 0
        return x

    return edit


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gemma2"])
def test_an_empty_signal_changes_nothing(name, side, scope):
    stream, signal = signal_of(name, side)
    none = dataclasses.replace(signal, mask=torch.zeros_like(signal.mask))
    edits = EDITS[scope](stream, Removal.of(none, draws=2), torch.full((3,), -1.0))
    assert edits
    found = stream.parts.model.run(TOKENS[:1].repeat(3, 1), read=["logits"], edit=edits, path="eager").logits
    plain = stream.parts.model.run(TOKENS[:1].repeat(3, 1), read=["logits"], path="eager").logits
    assert torch.equal(found, plain)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_neox"])
def test_everything_on_the_query_side_is_the_querys_ablation(name):
    stream, signal = everything(name, "query")
    layer, head, query, _ = signal.firing
    edits = local_edits(stream, Removal.of(signal), torch.tensor([-1.0], dtype=torch.float64))
    sites = [f"pattern.{layer}", "logits"]
    found = run_with(stream, edits, sites)
    expected = run_with(stream, {f"q.{layer}": set_to_zero(head, query)}, sites)
    for site in sites:
        assert (found[site] - expected[site]).abs().max() < 1e-10 * expected[site].abs().max()


@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_neox"])
def test_everything_on_the_key_side_is_the_keys_ablation(name):
    stream, signal = everything(name, "key")
    layer, head, _, key = signal.firing
    edits = local_edits(stream, Removal.of(signal), torch.tensor([-1.0], dtype=torch.float64))
    sites = [f"pattern.{layer}", "logits"]
    found = run_with(stream, edits, sites)
    expected = run_with(stream, {f"k.{layer}": set_to_zero(head, key)}, sites)
    for site in sites:
        assert (found[site] - expected[site]).abs().max() < 1e-10 * expected[site].abs().max()


def test_a_shared_key_is_taken_from_one_query_head_only():
    stream, signal = everything("gemma2", "key", Firing(1, 1, 9, 8))  # soft-cap, four query heads on two keys
    edits = local_edits(stream, Removal.of(signal), torch.tensor([-1.0], dtype=torch.float64))
    found = run_with(stream, edits, ["pattern.1"])["pattern.1"][0]
    ablated = run_with(stream, {"k.1": set_to_zero(0, 8)}, ["pattern.1"])["pattern.1"][0]
    plain = stream.run["pattern.1"][0]
    assert torch.allclose(found[1], ablated[1], atol=1e-6) and not torch.allclose(found[1], plain[1], atol=1e-3)
    assert torch.equal(found[[0, 2, 3]], plain[[0, 2, 3]]) and not torch.allclose(ablated[0], plain[0], atol=1e-3)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma2", "phi_qk_norm", "bloom", "gpt_oss"])
def test_the_predicted_weight_is_the_measured_one(name, side):
    stream, signal = signal_of(name, side, Firing(1, 1, 9, 8))
    effect = intervene(stream, signal, TARGET, "local", draws=0)
    assert signal.components and effect.weight.changed == pytest.approx(signal.remaining, abs=1e-6)
    assert effect.weight.clean == pytest.approx(float(stream.run["pattern.1"][0, 1, 9, 8]), abs=1e-6)
    plain = stream.run.logits[0, -1]
    if stream.parts.model.hf.config.model_type != "gemma2":  # differences are those before the soft-cap of logits
        assert effect.difference.clean == pytest.approx(float(plain[3] - plain[7]), rel=1e-4, abs=1e-5)


def test_doubling_adds_what_removing_takes():
    stream, signal = signal_of("gpt2", "query")
    head, query = signal.firing.head, signal.firing.query
    site = f"q.{signal.firing.layer}"
    plain = stream.run[site]
    moved = [
        run_with(stream, local_edits(stream, Removal.of(signal), torch.tensor([a], dtype=torch.float64)), [site])[site]
        for a in (-1.0, 1.0)
    ]
    assert torch.allclose(moved[0] + moved[1], 2 * plain, atol=1e-12) and not torch.equal(moved[0], plain)
    changed = (moved[0] != plain).any(-1)[0]
    assert changed.nonzero().tolist() == [[head, query]]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "qwen3"])
def test_what_the_stream_loses_is_read_as_the_signal_and_nothing_else(name, side):
    stream, signal = signal_of(name, side)
    lifted = Removal.of(signal).lifted()[0]
    wanted = signal.pieces * signal.mask
    assert (lifted @ signal.reader.map - wanted).abs().max() < 1e-9 * wanted.abs().max()
    # the smallest such vector has nothing that the head does not read
    basis = torch.linalg.qr(signal.reader.map).Q
    assert (lifted - lifted @ basis @ basis.T).abs().max() < 1e-9 * lifted.abs().max()
    if stream.parts.layers[1].norm.kind == "layer":
        assert lifted.sum(-1).abs().max() < 1e-9  # centred, as the norm centres


@pytest.mark.parametrize("side", SIDES)
def test_where_a_qk_norm_centres_the_stream_loses_what_comes_closest(side):
    _, signal = signal_of("stablelm_qk_norm", side)
    lifted, wanted = Removal.of(signal).lifted()[0], signal.pieces * signal.mask
    left = lifted @ signal.reader.map - wanted
    assert left.abs().max() > 1e-3 and (left @ signal.reader.map.T).abs().max() < 1e-9


@pytest.mark.parametrize("side", SIDES)
def test_without_rotation_it_is_the_projection_onto_singular_vectors(side):
    stream, signal = signal_of("gpt2", side)
    svd = stream.parts.modes(signal.firing.layer).svd
    vectors = (svd.U if side == "query" else svd.V)[signal.firing.head]
    lifted = Removal.of(signal).lifted()[0]
    layer, position = signal.firing.layer, signal.firing.position(side)
    vectors_written = stream.read(layer, position, torch.eye(len(vectors), dtype=torch.float64))
    written = dict(zip(stream.components(layer, position), vectors_written, strict=True))
    for number, component in enumerate(signal.components):
        if component.kind != "offset":
            P = vectors[:, signal.mask[number]] @ vectors[:, signal.mask[number]].T
            expected = written[component] @ P
            assert (lifted[number] - expected).abs().max() < 1e-9


def test_editing_the_stream_is_editing_the_heads_output():
    stream, signal = everything("gpt2", "query", Firing(1, 1, 9, 8))
    own = [n for n, c in enumerate(signal.components) if c.kind == "head" and c.head == 2 and c.layer == 0]
    heads = dataclasses.replace(
        signal, components=[signal.components[n] for n in own], pieces=signal.pieces[own], mask=signal.mask[own]
    )
    removal = Removal.of(heads)
    lost = removal.lifted()[0].sum(0)

    def edit(written, _run):
        written = written.clone()
        written[:, 9, 2] -= lost
        return written

    edits = global_edits(stream, removal, torch.tensor([-1.0], dtype=torch.float64))
    assert list(edits) == ["resid_mid.0"]
    found, expected = (run_with(stream, some, ["logits"]).logits for some in (edits, {"head_out.0": edit}))
    assert torch.allclose(found, expected, atol=1e-10)
    assert not torch.allclose(found, stream.run.logits, atol=1e-3)


def test_a_head_reads_nothing_from_components_that_are_removed_whole():
    stream, signal = everything("gpt_neox", "query", Firing(1, 1, 9, 8))  # a parallel block: one layer above embeddings
    upstream = [n for n, c in enumerate(signal.components) if c.kind not in ("offset", "embedding")]
    some = dataclasses.replace(
        signal,
        components=[signal.components[n] for n in upstream],
        pieces=signal.pieces[upstream],
        mask=signal.mask[upstream],
    )
    edits = global_edits(stream, Removal.of(some), torch.tensor([-1.0], dtype=torch.float64))
    run = run_with(stream, edits, ["resid_pre.1", "q.1", "k.1"])
    A, _ = stream.parts.modes(1).project(run["q.1"], run["k.1"])
    norm = stream.parts.layers[1].norm
    scale = norm.frozen_scale(run["resid_pre.1"][0, 9]) / norm.frozen_scale(stream.state(1, 9))
    left = signal.pieces[0] * scale + signal.pieces[-1]  # the embedding under the new scale, and the head's biases
    assert (A[0, 1, 9] - left).abs().max() < 1e-6 * signal.pieces.abs().max()  # the model rotates by float32 tables


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_controls_are_as_many_other_modes_of_the_same_norm(name):
    stream, signal = signal_of(name, "query", share=0.7)
    assert signal.testable and len(signal.modes) * 2 <= signal.mask.shape[1]
    masks = random_modes(signal, 30, 0)
    assert not (masks & signal.mask.any(0)).any()
    assert (masks.any(1).sum(-1) == len(signal.modes)).all() and torch.equal(
        masks.sum((1, 2)), signal.mask.sum().expand(30)
    )
    assert len({tuple(row.any(0).nonzero()[:, 0].tolist()) for row in masks}) > 1
    assert torch.equal(masks, random_modes(signal, 30, 0)) and not torch.equal(masks, random_modes(signal, 30, 1))
    removal = Removal.of(signal, 30)
    for lost in removal.in_stream(stream).values():
        assert torch.allclose(lost.norm(dim=-1), lost[0].norm(), rtol=1e-9)
    inverse = torch.linalg.pinv(signal.reader.map)
    assert torch.allclose(
        (removal.in_head() @ inverse).norm(dim=-1), (removal.in_head()[0] @ inverse).norm(), rtol=1e-6
    )
    assert torch.equal(removal.in_head()[0], (signal.pieces * signal.mask).sum(0))


def test_controls_repeat_modes_where_too_few_are_left_and_none_is_refused():
    _, signal = everything("gpt2", "query")
    with pytest.raises(ClearheadError, match="all 8 modes of head"):
        random_modes(signal, 20, 0)
    most = signal.mask.clone()
    most[:, 5:7] = False
    masks = random_modes(dataclasses.replace(signal, mask=most), 20, 0)
    assert masks[:, :, [0, 1, 2, 3, 4, 7]].sum() == 0 and masks.any() and not signal.testable


@pytest.mark.parametrize("scope", SCOPES)
def test_every_row_of_a_forward_is_its_own_variant(scope):
    stream, signal = signal_of("gpt2", "query", share=0.7)
    effect = intervene(stream, signal, TARGET, scope, draws=3)
    removal = Removal.of(signal, 3)
    for row in range(4):
        alone = Removal(signal, torch.stack([removal.read[0], removal.read[row]]))
        edits = EDITS[scope](stream, alone, torch.tensor([-1.0, -1.0], dtype=torch.float64))
        weights, differences, _ = observe(stream, signal.firing, "query", TARGET, edits, 2)
        expected = (effect.weight.changed, *effect.weight.controls)[row]
        assert weights[1] == pytest.approx(expected, abs=1e-12)
        assert differences[1] == pytest.approx((effect.difference.changed, *effect.difference.controls)[row], abs=1e-10)
    assert effect.weight.clean == signal.weight and effect.weight.effect != effect.weight.control


@pytest.mark.parametrize("amount", [-1, 1])
def test_a_global_edit_says_how_far_it_moved_what_the_head_receives(amount):
    stream, signal = everything("gpt2", "query", Firing(1, 1, 9, 8))
    own = [number for number, component in enumerate(signal.components) if component.kind == "mlp"]
    mask = torch.zeros_like(signal.mask[own])
    mask[:, :3] = True
    signal = dataclasses.replace(signal, components=[Component("mlp", 0)], pieces=signal.pieces[own], mask=mask)
    found = intervene(stream, signal, TARGET, "global", amount=amount, draws=3).state
    (lost,) = Removal.of(signal, 3).in_stream(stream).values()
    before = stream.state(1, 9)
    for row, after in enumerate(before + amount * lost):  # nothing lies between this MLP and the reader
        cosine = float(after @ before / (after.norm() * before.norm()))
        assert (found.cosine.changed, *found.cosine.controls)[row] == pytest.approx(cosine, abs=1e-12)
        ratio = float(after.norm() / before.norm())
        assert (found.norm.changed, *found.norm.controls)[row] == pytest.approx(ratio, abs=1e-12)
    assert 0 < found.cosine.changed < 1 == found.cosine.clean == found.norm.clean
    assert intervene(stream, signal, TARGET, "local", amount=amount, draws=3).state is None


def effect_of(clean, changed, controls, amount=-1):
    change = Change(clean, changed, controls)
    state = Shift(Change(1.0, changed, controls), Change(1.0, 2 * changed, controls)) if amount < 0 else None
    return Effect(Firing(1, 0, 5, 2), "query", "global", amount, 2, 3, change, change, state)


def test_summaries_average_firings_within_prompts_and_prompts_with_an_interval():
    effects = [
        (0, effect_of(0.8, 0.2, (0.8, 0.6))),  # effect −0.6, control −0.1
        (0, effect_of(0.6, 0.4, (0.6, 0.3))),  # −0.2, −0.15; one control goes further
        (1, effect_of(0.9, 0.1, (0.9, 0.7))),  # −0.8, −0.1
        (1, effect_of(0.5, 0.9, (0.5, 0.6), amount=1)),
    ]
    removed, doubled = summarise(effects)
    assert (removed.prompts, removed.firings, removed.modes) == (2, 3, 3.0)
    assert removed.weight.mean == pytest.approx((-0.4 - 0.8) / 2)
    assert removed.weight_control.mean == pytest.approx((-0.125 - 0.1) / 2)
    assert removed.weight_excess.mean == pytest.approx((-0.275 - 0.7) / 2)
    assert removed.weight.low <= removed.weight.mean <= removed.weight.high and removed.weight.low < removed.weight.high
    assert removed.weight_d == pytest.approx(-0.4875 / (0.425 / 2**0.5))
    assert removed.weight_beyond == pytest.approx(2 / 3)
    assert removed.state_cosine == pytest.approx(0.7 / 3) and removed.state_norm == pytest.approx(1.4 / 3)
    assert removed.state_cosine_control == removed.state_norm_control == pytest.approx((0.7 + 0.45 + 0.8) / 3)
    assert doubled.state_cosine is doubled.state_norm_control is None
    assert doubled.weight_beyond == 1.0 and doubled.weight.low is None and doubled.weight_d is None
    assert summarise([]) == []
