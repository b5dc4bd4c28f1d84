import pytest
import torch

from clearhead.model import Model
from clearhead.model.gates import install
from clearhead.sparsify.sentences import LEAST, LONGEST, SHORTEST, find_sentence, read_sentences
from tests.training.conftest import TINY

WORDS = ["w"] * SHORTEST


@pytest.mark.parametrize(
    ("words", "span"),
    [
        ([*WORDS, ".", *WORDS, "."], (SHORTEST + 1, 2 * SHORTEST + 2)),  # the first may have begun before
        (["a", ".", "b", "!", *WORDS, '."', "c"], (4, SHORTEST + 5)),
        (["a\n", *WORDS, "\n", "c"], (1, SHORTEST + 2)),
        ([".", *WORDS], None),  # not ended
        ([".", *["w"] * LONGEST, "."], None),
        (["w"] * 5, None),
        ([], None),
    ],
)
def test_a_sentence_lies_between_tokens_that_end_one(words, span):
    assert find_sentence(words) == span


@pytest.fixture(scope="module")
def models():
    """A model with gates that close what is below a score of 0, and its base."""
    model, base = (Model.load(str(TINY), self_test=False) for _ in range(2))
    install(model, bias=0.0)
    return model, base


def test_listed_are_the_weights_that_multiply_the_values(models):
    model, base = models
    plain = torch.tensor([i for i, text in enumerate(model.token_strings(range(1000))) if text.strip().isalpha()])
    blocks = plain[torch.randint(len(plain), (4, 48), generator=torch.Generator().manual_seed(1))]
    blocks[2, [10, 26]] = model.tokenize(".")[0, -1]
    (first,) = read_sentences(model, base, blocks, prefix=1, count=1)  # block 2 is the first with a whole sentence
    assert first["tokens"] == model.token_strings([blocks[2, 0], *blocks[2, 11:27]])
    tokens = blocks[:1, : 1 + LONGEST]
    found = read_sentences(model, base, blocks[:1], prefix=1, count=2)
    assert len(found) == 1 and found[0]["tokens"] == model.token_strings(tokens[0])
    for layer in (0, 1):
        listed = found[0]["layers"][layer]
        assert listed["layer"] == layer
        for name, runner, least in (("model", model, 0.0), ("base", base, LEAST)):
            pattern = runner.run(tokens, read=[f"pattern.{layer}"])[f"pattern.{layer}"][0]
            for head, rows in enumerate(listed[name]):
                for query, row in enumerate(rows):
                    pairs = {int(key): int(weight) for key, _, weight in (edge.partition(":") for edge in row.split())}
                    kept = (pattern[head, query] > 0) & (pattern[head, query] >= least)
                    assert sorted(pairs) == torch.nonzero(kept)[:, 0].tolist()
                    assert all(
                        abs(weight / 1000 - float(pattern[head, query, key])) <= 6e-4 for key, weight in pairs.items()
                    )
    opened = sum(len(row.split()) for layer in found[0]["layers"] for rows in layer["model"] for row in rows)
    assert 0 < opened < 8 * 41 * 42 / 2


def test_without_a_base_there_is_none(models):
    found = read_sentences(models[0], None, torch.full((1, 20), 7), count=2)
    assert len(found) == 1 and found[0]["layers"][0]["base"] is None and len(found[0]["tokens"]) == 20
