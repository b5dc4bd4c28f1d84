import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.sparsify.edge_maps import TILES, first_token_shares, map_edges
from tests.sparsify.gated_models import LENGTH, dense_model, edges_of, gated_model, layers_of, random_tokens


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_maps_by_loops(family):
    (model, gates), tokens = gated_model(family), random_tokens()
    found = map_edges(model, tokens, batch=2)
    for place, scores, bias, first in layers_of(model, gates, tokens):
        edges = edges_of(scores, bias, first)
        later = {key: row for key, row in edges.items() if key[2] > 0}
        before = [row[0][2] if 0 in row else 0.0 for row in later.values()]
        after = []
        for row in later.values():
            carried = {j: p for j, (opens, _, p) in row.items() if opens}
            if carried:
                after.append(carried.get(0, 0.0) / sum(carried.values()))
        tokens_first = found["first_token"]
        assert tokens_first["before_gates"][place] == pytest.approx(sum(before) / len(before))
        assert tokens_first["after_gates"][place] == pytest.approx(sum(after) / len(after))
        assert tokens_first["empty_rows"][place] == pytest.approx(1 - len(after) / len(later))
        every = []
        for head in range(model.n_heads):
            lengths = [
                i - j for (_, h, i), row in edges.items() if h == head for j, (opens, _, _) in row.items() if opens
            ]
            every += lengths
            mean = found["distance"]["by_head"][place][head]
            assert mean == (pytest.approx(sum(lengths) / len(lengths)) if lengths else None)
        assert found["distance"]["by_layer"][place] == pytest.approx(sum(every) / len(every))
        for size in TILES:
            held: dict[tuple, bool] = {}
            for (n, head, i), row in edges.items():
                for j, (opens, _, _) in row.items():
                    tile = (n, head, i // size, j // size)
                    held[tile] = held.get(tile, False) or opens
            share = sum(not opens for opens in held.values()) / len(held)
            assert found["empty_tiles"][str(size)][place] == pytest.approx(share)
    assert found["distance"]["by_head"][1][2] is None


def test_tiles_of_several_sizes_differ():
    """With 40 tokens there are tiles of 16 and 32 that hold no visible pair, and windows that leave more."""
    (model, gates), tokens = gated_model("mistral"), random_tokens(2, 40)
    found = map_edges(model, tokens)["empty_tiles"]
    for place, scores, bias, first in layers_of(model, gates, tokens):
        edges = edges_of(scores, bias, first)
        visible = {(i // 16, j // 16) for (_, _, i), row in edges.items() for j in row}
        assert len(visible) == 5  # a window of 4 reaches one tile back; 6 tiles lie on or below the diagonal
        held = {(n, h, i // 16, j // 16) for (n, h, i), row in edges.items() for j, edge in row.items() if edge[0]}
        assert found["16"][place] == pytest.approx(1 - len(held) / (len(visible) * 2 * 4))


def test_with_a_sink_the_share_is_of_what_edges_carry():
    tokens = random_tokens()
    mine, theirs = (map_edges(gated_model("llama", sink)[0], tokens)["first_token"] for sink in (None, 1.5))
    # layer 0 sees the same, and A_i0 / Σ A does not depend on the denominator
    assert theirs["after_gates"][0] == pytest.approx(mine["after_gates"][0])
    assert theirs["before_gates"][0] == pytest.approx(mine["before_gates"][0])


def test_first_token_of_a_dense_model_by_loops():
    model, tokens = dense_model("llama"), random_tokens()
    found = first_token_shares(model, [0, 1], tokens, batch=2)
    for layer in (0, 1):
        pattern = model.run(tokens, read=[f"pattern.{layer}"])[f"pattern.{layer}"]
        values = [float(pattern[n, h, i, 0]) for n in range(3) for h in range(4) for i in range(1, LENGTH)]
        assert found[layer] == pytest.approx(sum(values) / len(values))


def test_open_gates_look_at_the_first_token_as_the_dense_model_does():
    (model, gates), tokens = gated_model("gpt2"), random_tokens()
    with gates.opened():
        dense = first_token_shares(model, [0, 1], tokens)
    gates.set_bias(torch.full((2, 4), 1e4, dtype=torch.float64))
    found = map_edges(model, tokens)
    for name in ("before_gates", "after_gates"):
        assert found["first_token"][name] == pytest.approx(dense)
    assert found["first_token"]["empty_rows"] == [0.0, 0.0]
    assert found["empty_tiles"]["16"] == [0.0, 0.0]
    assert found["distance"]["by_layer"] == pytest.approx([(LENGTH - 1) / 3] * 2)


def test_no_open_edge_at_all():
    model, gates = gated_model("gpt2")
    gates.set_bias(torch.full((2, 4), -1e4, dtype=torch.float64))
    found = map_edges(model, random_tokens())
    assert found["first_token"]["after_gates"] == [None, None]
    assert found["first_token"]["empty_rows"] == [1.0, 1.0]
    assert found["empty_tiles"]["128"] == [1.0, 1.0]
    assert found["distance"]["by_layer"] == [None, None]


def test_a_dense_model_is_refused():
    with pytest.raises(ClearheadError, match="dense gpt2"):
        map_edges(dense_model("gpt2"), random_tokens())
