"""Modes that heads of a layer share: planted ones are found, shared keys are known for what they are."""

import torch

from clearhead.model import Model
from clearhead.spectral.attention_modes import head_modes
from clearhead.spectral.shared import find_shared, overlaps, random_overlap
from tests.model.tiny_configs import build


def planted():
    """GPT-2 layer in which heads 1 and 3 hold the same strong pair of directions among others of their own."""
    hf = build("gpt2").double()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 32, generator=generator, dtype=torch.float64)
    x, y = x - x.mean(), y - y.mean()
    norm, attention = hf.transformer.h[0].ln_1, hf.transformer.h[0].attn.c_attn
    with torch.no_grad():
        norm.weight.fill_(1)
        attention.weight.mul_(0.1)
        for head in (1, 3):
            attention.weight[:, 8 * head], attention.weight[:, 32 + 8 * head] = x, y
    return head_modes(Model(hf, self_test=False), 0)


def test_a_planted_pair_is_the_cluster_that_rotated_bases_do_not_have():
    found = find_shared(planted(), torch.Generator().manual_seed(0), cosine=0.9)
    assert found.clusters == [[(1, 0), (3, 0)]] and found.n_modes == 2
    assert found.in_rotated < 0.5


def test_overlap_is_one_for_the_same_space_and_as_expected_for_random_ones():
    modes = planted()
    found = overlaps(modes)
    for side in ("query", "key"):
        assert torch.allclose(found[side].diagonal(), torch.ones(4, dtype=torch.float64))
        assert torch.allclose(found[side], found[side].T, rtol=0, atol=1e-12)
        apart = found[side][0, [1, 2, 3]]
        assert (apart - random_overlap(modes)[0, 1]).abs().max() < 0.15  # 8 of 32 dimensions each
        assert found[side][1, 3] > apart.max()


def test_heads_that_share_keys_read_one_key_space():
    modes = head_modes(Model(build("llama").double(), self_test=False), 0)  # 4 query heads, 2 kv heads
    found = overlaps(modes)
    assert abs(float(found["key"][0, 1]) - 1) < 1e-12 and abs(float(found["key"][2, 3]) - 1) < 1e-12
    assert float(found["key"][0, 2]) < 0.9 and float(found["query"][0, 1]) < 0.9


def test_a_dead_head_overlaps_with_nothing():
    hf = build("gpt2").double()
    with torch.no_grad():
        hf.transformer.h[0].attn.c_attn.weight[:, :8] = 0
    modes = head_modes(Model(hf, self_test=False), 0)
    assert overlaps(modes)["query"][0].abs().max() == 0
    assert all(
        head != 0 for cluster in find_shared(modes, torch.Generator().manual_seed(0)).clusters for head, _ in cluster
    )
