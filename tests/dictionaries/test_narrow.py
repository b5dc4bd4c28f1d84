"""A narrower QK: exactly the coordinates that are kept, those that move scores most, the best product of its rank."""

import dataclasses

import pytest
import torch

from clearhead.dictionaries.init import from_attention
from clearhead.dictionaries.lorsa import coordinates
from clearhead.dictionaries.narrow import narrow, score_variance
from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.geometry import attention_geometry
from clearhead.model.weights import attention_weights
from tests.model.tiny_configs import build


def layer_of(family):
    model = Model(build(family), self_test=False)
    weights = attention_weights(model, 1).to(torch.float32, "cpu").per_head()
    x = torch.randn(3, 9, model.d_model, generator=torch.Generator().manual_seed(2))
    return weights, attention_geometry(model, 1), x


def at(weights, kept):
    """The weights with all other components of queries and keys at 0."""
    mask = torch.zeros(weights.W_Q.shape[-1]).index_fill(0, kept, 1.0)
    parts = {name: getattr(weights, name) * mask for name in ("W_Q", "W_K")}
    parts |= {name: getattr(weights, name) * mask for name in ("b_Q", "b_K") if getattr(weights, name) is not None}
    return dataclasses.replace(weights, **parts)


@torch.no_grad()
@pytest.mark.parametrize(("family", "width"), [("llama", 4), ("cohere", 4), ("gpt_neox", 5), ("mistral", 2)])
def test_the_kept_planes_score_as_they_did(family, width):
    weights, geometry, x = layer_of(family)
    where = torch.tensor(coordinates(geometry.d_head, geometry.rope.rotary_dim, geometry.rope.interleaved))
    share = score_variance(weights, geometry, x).sum(0) / torch.bincount(where)
    kept, left = torch.zeros(0, dtype=torch.int64), width
    for coordinate in share.argsort(descending=True).tolist():
        mine = (where == coordinate).nonzero()[:, 0]
        if len(mine) <= left:
            kept, left = torch.cat([kept, mine]), left - len(mine)
    slim = from_attention(*narrow(weights, geometry, width, x))
    assert slim.config.d_qk == width
    whole = from_attention(at(weights, kept), geometry)
    torch.testing.assert_close(slim.patterns(x), whole.patterns(x), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(slim(x).y, whole(x).y, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_the_variance_of_a_plane_by_loops():
    weights, geometry, x = layer_of("llama")
    found = score_variance(weights, geometry, x[:1])
    where = torch.tensor(coordinates(geometry.d_head, geometry.rope.rotary_dim, geometry.rope.interleaved))
    plane = (where == 1).nonzero()[:, 0]
    q, k = from_attention(at(weights, plane), geometry).queries_keys(x[:1])
    spread = [
        torch.stack([geometry.scale * q[0, 2, i] @ k[0, 2, j] for j in range(1, i + 1)]).var(unbiased=False)
        for i in range(2, 9)
    ]
    assert float(found[2, 1]) == pytest.approx(float(torch.stack(spread).mean()), rel=1e-4)


@torch.no_grad()
def test_without_a_rotation_the_product_is_the_best_of_its_rank():
    weights, geometry, x = layer_of("gpt2")
    weights.b_Q.normal_()
    slim, shape = narrow(weights, geometry, 3, x)
    full = torch.cat([weights.W_Q, weights.b_Q[:, None]], 1) @ torch.cat([weights.W_K, weights.b_K[:, None]], 1).mT
    own = torch.cat([slim.W_Q, slim.b_Q[:, None]], 1) @ torch.cat([slim.W_K, slim.b_K[:, None]], 1).mT
    U, S, Vh = torch.linalg.svd(full)
    torch.testing.assert_close(own, (U[..., :3] * S[:, None, :3]) @ Vh[:, :3], atol=1e-5, rtol=1e-4)
    assert shape.d_head == 3 and from_attention(slim, shape)(x).y.isfinite().all()


@pytest.mark.parametrize(
    ("family", "width", "message"),
    [("llama", 8, "has 1 to 7"), ("llama", 3, "give an even one"), ("qwen3", 4, "norms queries and keys")],
)
def test_widths_that_do_not_exist_are_refused(family, width, message):
    weights, geometry, x = layer_of(family)
    with pytest.raises(ClearheadError, match=message):
        narrow(weights, geometry, width, x)
