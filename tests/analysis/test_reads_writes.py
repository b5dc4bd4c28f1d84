import numpy as np
import pyarrow as pa
import pytest
import torch

from clearhead.analysis.neighbours import DirectPath, Neighbourhood
from clearhead.analysis.reads_writes import largest_products, meet_neighbours, normed_embeddings, read_embeddings
from clearhead.dictionaries.init import from_attention
from clearhead.dictionaries.sae import Sae
from clearhead.dictionaries.transcoder import Transcoder, TranscoderConfig
from clearhead.model.access import Model
from clearhead.model.weights import attention_norm
from clearhead.spectral.nearest import chance_cosine
from clearhead.spectral.writes import Parts
from tests.model.tiny_configs import build

LAYER, N = 1, 24


@pytest.fixture(scope="module", params=["gpt2", "gemma2"])
def model(request):
    return Model(build(request.param).requires_grad_(False), None, name=request.param, self_test=False)


@pytest.fixture(scope="module")
def tokens(model):
    return torch.randint(model.d_vocab, (2, 10), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def lorsa(model):
    return from_attention(model.weights(LAYER), model.geometry(LAYER)).requires_grad_(False)


def dictionary(model, kind, reads, writes, seed=0):
    d = model.d_model
    module = kind(
        TranscoderConfig(d_in=d, d_out=d, n_features=N, k=2),
        {"model": model.name, "input_site": reads, "output_site": writes},
    ).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for weight in (module.W_enc, module.W_dec):
        weight.copy_(torch.randn(weight.shape, generator=generator))
    return module


def test_a_planted_feature_is_read_and_written_as_the_model_does(model, lorsa, tokens):
    """The number is what adding the unit's write to the stream changes downstream, norms at their mean scale."""
    below = dictionary(model, Transcoder, "mlp_in.0", "mlp_out.0")
    above = dictionary(model, Transcoder, f"mlp_in.{LAYER}", f"mlp_out.{LAYER}", 1)
    neighbourhood = Neighbourhood(model, LAYER, {"below": below, "above": above})
    path = DirectPath(model, tokens, 1, neighbourhood.places)
    parts = Parts(model).layers
    head = 3
    norm = attention_norm(model, LAYER)
    # a feature that writes what head 3 reads, and one that reads what head 3 writes
    behind = parts[0].behind_mlp
    below.W_dec[5] = 9 * norm.gain * lorsa.W_V[head] / (1 if behind is None else behind.gain)
    behind = parts[LAYER].behind_attention
    above.W_enc[7] = 9 * lorsa.W_O[head] * (1 if behind is None else behind.gain) / parts[LAYER].mlp_norm.gain
    found = meet_neighbours(lorsa, neighbourhood, path)
    reads = {(u, o): v for u, o, v in zip(found[0].unit, found[0].other, found[0].value, strict=True)}
    writes = {(u, o): v for u, o, v in zip(found[1].unit, found[1].other, found[1].value, strict=True)}

    def scale(norm, site):
        return norm.frozen_scale(model.run(tokens, read=[site])[site][:, 1:]).mean()

    write = below.W_dec[5]
    if parts[0].behind_mlp is not None:
        write = parts[0].behind_mlp.gain * write * scale(parts[0].behind_mlp, "mlp_out.0")
    expected = lorsa.W_V[head] @ (norm.gain * norm.centre(write)) * scale(norm, f"resid_pre.{LAYER}")
    assert reads[head, "feature.0.5"] == pytest.approx(float(expected), rel=1e-4)
    write, behind, before = lorsa.W_O[head], parts[LAYER].behind_attention, parts[LAYER].mlp_norm
    if behind is not None:
        write = behind.gain * write * scale(behind, f"attn_out.{LAYER}")
    expected = above.W_enc[7] @ (before.gain * before.centre(write)) * scale(before, f"resid_mid.{LAYER}")
    assert writes[head, f"feature.{LAYER}.7"] == pytest.approx(float(expected), rel=1e-4)
    assert found[0].label.to_pylist()[0] == "transcoder of mlp_in.0"


def test_an_sae_of_the_same_output_is_compared_by_cosine(model, lorsa, tokens):
    sae = dictionary(model, Sae, f"attn_out.{LAYER}", f"attn_out.{LAYER}")
    sae.W_dec[2] = -3 * lorsa.W_O[4]
    neighbourhood = Neighbourhood(model, LAYER, {"sae": sae})
    (found,) = meet_neighbours(lorsa, neighbourhood, DirectPath(model, tokens, 1, neighbourhood.places))
    values = {(u, o): v for u, o, v in zip(found.unit, found.other, found.value, strict=True)}
    assert found.relation == "writes"
    assert values[4, f"feature.{LAYER}.2"] == pytest.approx(-1)


def test_only_what_beats_chance_is_kept():
    generator = torch.Generator().manual_seed(0)
    rows, others = torch.randn(20, 64, generator=generator), torch.randn(50, 64, generator=generator)
    others[3] = 2 * rows[1]
    found = largest_products(rows, others)
    cosine = found.value / (rows[found.row].norm(dim=-1) * others[found.other].norm(dim=-1)).numpy()
    assert (np.abs(cosine) > chance_cosine(50, 64)).all()
    assert len(found.row) < 30  # half of random rows have one by definition of the median
    assert len(largest_products(rows, others[:0]).row) == 0
    assert found.value[(found.row == 1) & (found.other == 3)] == pytest.approx(2 * float(rows[1] @ rows[1]))


def test_embeddings_are_read_through_the_norm(model, lorsa):
    gain, norm = attention_norm(model, LAYER).gain, attention_norm(model, LAYER)
    embeddings = normed_embeddings(model, LAYER)
    lorsa = from_attention(model.weights(LAYER), model.geometry(LAYER)).requires_grad_(False)
    lorsa.W_V[0] = embeddings[11] / gain
    strings = pa.array([f"t{i}" for i in range(model.d_vocab)]).take
    found = read_embeddings(lorsa, model, LAYER, strings)
    mine = found.unit == 0
    assert found.other[mine][np.argmax(found.value[mine])] == "embedding.11"
    assert found.label.to_pylist()[int(np.flatnonzero(mine)[np.argmax(found.value[mine])])] == "t11"
    table = model.places.embedding.weight
    v = torch.stack([norm(table[i]) @ lorsa.W_V[0] for i in range(model.d_vocab)])
    assert found.value[mine].max() == pytest.approx(float(v[11] - v.mean()), rel=1e-3)
