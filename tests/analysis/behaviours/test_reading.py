import dataclasses

import pytest
import torch

from clearhead.analysis.behaviours.reading import LorsaHeads, OriginalHeads, SharedRun
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from tests.model.tiny_configs import build


@pytest.fixture(scope="module")
def tiny():
    return Model(build("gpt2"), name="tiny", self_test=False)


@pytest.fixture(scope="module")
def lorsa(tiny, make_lorsa):
    lorsa = make_lorsa(d_model=tiny.d_model)
    lorsa.provenance |= {"model": "tiny", "layer": 1}
    return lorsa


def assert_same_inner_products(reading):
    for unit in reading.unit.unique().tolist():
        rows = (reading.unit == unit).nonzero()[:, 0]
        writes, along_axes = reading.writes(rows), reading.coordinates(rows)
        assert along_axes.shape[1] <= writes.shape[1]
        assert torch.allclose(along_axes @ along_axes.T, writes @ writes.T, atol=1e-5)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(1000, (2, 9), generator=torch.Generator().manual_seed(0))


def test_parts_of_a_lorsa_head_add_up_to_its_activation(tiny, lorsa, tokens):
    reading = LorsaHeads(tiny, 1, lorsa).read(tokens % tiny.d_vocab)
    assert torch.allclose(reading.parts.sum(-1), reading.activation, atol=1e-5)
    assert int(reading.query.min()) == 1 and reading.n_units == lorsa.n_heads
    assert not reading.parts[torch.arange(9) > reading.query[:, None]].any()
    rows = torch.tensor([0, 5])
    assert torch.allclose(reading.writes(rows), reading.activation[rows, None] * lorsa.W_O[reading.unit[rows]])
    assert_same_inner_products(reading)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_original_heads_write_their_output(family, tokens):
    model = Model(build(family), self_test=False)
    tokens = tokens % model.d_vocab
    reading = OriginalHeads(model, 1).read(tokens)
    run = model.run(tokens, read=["head_out.1", "pattern.1"])
    every = torch.arange(len(reading.unit))
    out = run["head_out.1"][reading.block, reading.query, reading.unit]
    assert torch.allclose(reading.writes(every), out, atol=1e-5)
    assert_same_inner_products(reading)
    assert torch.allclose(reading.activation, out.norm(dim=-1), rtol=1e-3, atol=1e-5)
    assert len(every) == 2 * 8 * model.n_heads
    # the triangle inequality between parts and output, with equality for a single source
    assert (reading.parts.sum(-1) >= reading.activation * (1 - 1e-4)).all()


def test_layers_share_one_forward(tiny, lorsa, tokens, monkeypatch):
    tokens, runs = tokens % tiny.d_vocab, []
    run = tiny.run
    monkeypatch.setattr(tiny, "run", lambda *given, **options: runs.append(options["read"]) or run(*given, **options))
    shared = SharedRun(tiny)
    populations = [OriginalHeads(tiny, 0, shared), LorsaHeads(tiny, 1, lorsa, shared), OriginalHeads(tiny, 1, shared)]
    apart = [OriginalHeads(tiny, 0), LorsaHeads(tiny, 1, lorsa)]
    for one, other in zip(populations, apart, strict=False):
        assert torch.allclose(one.read(tokens).parts, other.read(tokens).parts, atol=1e-5)
    populations[2].read(tokens)
    assert len([sites for sites in runs if len(sites) > 3]) == 1


def test_a_lorsa_of_another_place_is_refused(tiny, lorsa):
    with pytest.raises(ClearheadError, match="layer 1, not 0"):
        LorsaHeads(tiny, 0, lorsa)
    other = type(lorsa)(dataclasses.replace(lorsa.config, d_model=8))
    with pytest.raises(ClearheadError, match="8 dimensions"):
        LorsaHeads(tiny, 1, other)
