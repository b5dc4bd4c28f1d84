import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.model.access import Model
from clearhead.model.norms import final_norm, unembedding
from clearhead.spectral import nearest
from clearhead.spectral.nearest import chance_cosine, nearest_rows, nearest_tokens
from tests.model.tiny_configs import build


def brute_force(directions: torch.Tensor, rows: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    cosines = torch.nn.functional.normalize(directions.mT, dim=1) @ torch.nn.functional.normalize(rows, dim=1).mT
    ids = cosines.abs().argsort(dim=1, descending=True)[:, :top]
    return cosines.gather(1, ids), ids


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_streaming_over_rows_is_brute_force(chunk, monkeypatch):
    monkeypatch.setattr(nearest, "ROWS_AT_ONCE", chunk)
    generator = torch.Generator().manual_seed(0)
    directions, rows = torch.randn(12, 5, generator=generator), torch.randn(200, 12, generator=generator)
    found = nearest_rows(directions, rows, 9)
    cosines, ids = brute_force(directions, rows, 9)
    assert torch.equal(found.ids, ids) and bool((cosines < 0).any())
    torch.testing.assert_close(found.cosines, cosines)


def test_signs_are_kept_and_the_mean_is_taken_off():
    rows = torch.eye(3) + 5
    found = nearest_rows(torch.tensor([[0.0], [-1.0], [0.0]]), rows, 1, mean=rows.mean(0))
    assert found.ids.tolist() == [[1]] and float(found.cosines) < -0.8


def test_zero_rows_and_zero_directions_have_cosine_zero():
    rows = torch.tensor([[0.0, 0.0], [0.0, 2.0]])
    found = nearest_rows(torch.tensor([[0.0, 0.0], [1.0, 0.0]]), rows, 2)
    assert found.ids[0].tolist() == [1, 0]
    torch.testing.assert_close(found.cosines, torch.tensor([[1.0, 0.0], [0.0, 0.0]]))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma"])
def test_a_direction_made_of_an_embedding_finds_its_token(family):
    model = Model(build(family), self_test=False)
    weight = model.places.embedding.get_parameter("weight").detach()
    token = 17
    # as the layer sees the token alone, relative to the mean token: centred for LayerNorm
    direction = weight[token] - weight.mean(0)
    direction = direction - direction.mean() if family == "gpt2" else direction
    found = nearest_tokens(model, 0, torch.stack([direction, -direction], 1), 3).embedding
    assert found.ids[:, 0].tolist() == [token, token]
    torch.testing.assert_close(found.cosines[:, 0], torch.tensor([1.0, -1.0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma", "cohere"])
def test_the_nearest_unembedding_is_the_token_whose_logit_rises_most_for_its_length(family):
    model = Model(build(family), self_test=False)
    readers = unembedding(model)[0].detach()
    direction = torch.randn(model.d_model, 1, generator=torch.Generator().manual_seed(2))
    found = nearest_tokens(model, 1, direction, 4).unembedding
    relative = readers - readers.mean(1, keepdim=True)
    effect = (direction.mT @ relative)[0] / relative.norm(dim=0) / direction.norm()
    torch.testing.assert_close(found.cosines[0], effect[found.ids[0]], atol=1e-5, rtol=1e-4)
    assert float(effect.abs().max()) == pytest.approx(float(found.cosines[0, 0].abs()), abs=1e-5)
    # and a step of that direction in the final norm's output moves the logits by what the cosines say
    norm = final_norm(model)
    x = torch.randn(model.d_model, generator=torch.Generator().manual_seed(3))
    moved = (norm.normalise(x) + direction[:, 0]) @ readers - norm.normalise(x) @ readers
    moved = moved - moved.mean()
    torch.testing.assert_close(moved / relative.norm(dim=0) / direction.norm(), effect, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("n", "d"), [(1, 3), (50, 8), (2000, 40)])
def test_chance_is_the_median_over_random_directions(n, d):
    generator = torch.Generator().manual_seed(0)
    largest = []
    for _ in range(200):
        rows = torch.randn(n, d, generator=generator)
        largest.append(float(nearest_rows(torch.randn(d, 1, generator=generator), rows, 1).cosines.abs()))
    below = sum(value < chance_cosine(n, d) for value in largest)
    assert 75 <= below <= 125


def test_other_widths_and_too_many_neighbours_are_refused():
    with pytest.raises(ClearheadError, match="width 3, the elements 4"):
        nearest_rows(torch.zeros(3, 1), torch.zeros(5, 4), 1)
    for top in (0, 6):
        with pytest.raises(ClearheadError, match=f"expected 1 to 5, got {top}"):
            nearest_rows(torch.zeros(4, 1), torch.zeros(5, 4), top)
