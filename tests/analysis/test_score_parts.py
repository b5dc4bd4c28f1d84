import numpy as np
import pyarrow as pa
import pytest
import torch

from clearhead.analysis.examples import Chosen
from clearhead.analysis.neighbours import Neighbourhood
from clearhead.analysis.score_parts import EXAMPLES, explain_heads, heads_named, mean_parts, split_scores
from clearhead.circuits.replacement.dictionaries_in_place import Dictionaries
from clearhead.errors import ClearheadError
from tests.circuits.opened_prompts import TOKENS, lorsa, parts_of, transcoder

LAYER = 1


@pytest.fixture(scope="module")
def parts():
    return parts_of("llama")


@pytest.fixture(scope="module")
def heads(parts):
    return lorsa(parts.model, LAYER).double().requires_grad_(False)


@pytest.fixture(scope="module")
def tokens():
    return TOKENS.repeat(4, 1).numpy()


@pytest.fixture(scope="module")
def chosen(parts, heads, tokens):
    """Every activation of two heads in the blocks, as their strongest examples."""
    x = parts.model.run(torch.from_numpy(tokens), read=[f"attn_in.{LAYER}"])[f"attn_in.{LAYER}"]
    codes = heads.encode(x)
    busiest = np.bincount(codes.heads[codes.values != 0].numpy(), minlength=heads.n_heads).argsort()[-2:]
    rows = []
    for head in sorted(busiest.tolist()):
        b, t = ((codes.heads == head) & (codes.values != 0)).any(-1).nonzero(as_tuple=True)
        rows += [(head, int(token)) for token in b * tokens.shape[1] + t if token % tokens.shape[1] > 1]
    unit, token = (np.array(column) for column in zip(*rows, strict=True))
    nothing = np.zeros(len(unit))
    return Chosen(unit, token, nothing.astype(np.float32), nothing.astype(np.int64), np.arange(len(unit)))


def test_the_parts_sum_to_the_contrastive_score_at_the_key_that_matters(parts, heads, chosen, tokens):
    dictionaries = Dictionaries(parts.model, [heads, transcoder(parts.model, 0)])
    named = sorted(set(chosen.unit.tolist()))
    found = split_scores(parts, dictionaries, LAYER, chosen, tokens, named)
    for head in named:
        splits = found[head]
        own = chosen.token[chosen.unit == head] % tokens.shape[1]
        assert [split.query for split in splits] == sorted(own.tolist())[:EXAMPLES]
        scores = []
        for split in splits:
            at = chosen.token[(chosen.unit == head) & (chosen.token % tokens.shape[1] == split.query)][0]
            prompt = torch.from_numpy(tokens[at // tokens.shape[1]])[None]
            x = parts.model.run(prompt, read=[f"attn_in.{LAYER}"])[f"attn_in.{LAYER}"]
            q, k = (side[0, head // heads.config.pattern_size] for side in heads.queries_keys(x))
            seen = (k[: split.query + 1] @ q[split.query]) * heads.config.scale
            pattern = heads.patterns(x)[0, head // heads.config.pattern_size, split.query]
            moved = (pattern * heads.values(x)[0, :, head]).abs()
            assert split.key == int(moved.argmax())
            scores.append(float(seen[split.key] - seen.mean()))
        for side in ("query", "key"):
            assert sum(mean_parts(splits, side).values()) == pytest.approx(np.mean(scores), rel=1e-6, abs=1e-9)


def test_rows_name_the_largest_parts(parts, heads, chosen, tokens):
    neighbourhood = Neighbourhood(parts.model, LAYER, {"below": transcoder(parts.model, 0)})
    strings = pa.array([f"t{i}" for i in range(parts.model.d_vocab)]).take
    head = int(chosen.unit[0])
    found = explain_heads(heads, neighbourhood, chosen, tokens, [head], strings)
    assert [related.relation for related in found] == ["query", "query", "key", "key"]
    for related in found:
        assert set(related.unit.tolist()) == {head}
        assert np.all(np.diff(np.abs(related.value)) <= 0)
    _, _, key, rest = found
    assert {name.split(".")[0] for name in key.other.tolist()} == {"embedding", "feature"}
    assert {name.split(".")[0] for name in rest.other.tolist()} <= {"bias", "error", "mlp"}
    for name, label in zip(key.other.tolist(), key.label.to_pylist(), strict=True):
        assert label == (f"t{name.split('.')[1]}" if name.startswith("embedding.") else "")


def test_heads_are_named_by_number_or_by_activity():
    count = np.array([3, 0, 9, 3])
    assert heads_named("3,1,3", 4, count) == [1, 3]
    assert heads_named("top3", 4, count) == [2, 0, 3]
    assert heads_named("top9", 4, count) == [2, 0, 3]
    with pytest.raises(ClearheadError, match="no Lorsa head 4 to explain: there are 4"):
        heads_named("1,4", 4, count)
