import pytest
import torch

from clearhead.analysis.behaviours.direct_effect import logit_directions
from clearhead.analysis.behaviours.reading import Reading
from clearhead.analysis.behaviours.shown import visible_keys
from clearhead.analysis.behaviours.successor import SUCCESSOR
from clearhead.analysis.behaviours.token_lists import Successors, ordinal_sequences
from clearhead.analysis.behaviours.word_model import word_model


def one_unit(model, text, source, write):
    tokens = model.tokenize(text)
    parts = torch.zeros(1, tokens.shape[1])
    parts[0, source] = 1.0
    last = torch.tensor([tokens.shape[1] - 1])
    zero = torch.tensor([0])
    return Reading(tokens, zero, zero, last, parts, torch.ones(1), lambda rows: write.expand(len(rows), -1), 1)


@pytest.mark.parametrize(
    ("written", "source", "score"),
    [(" Thursday", 4, 1.0), (" Wednesday", 4, 0.0), (" Friday", 4, 0.0), (" Thursday", 3, 0.0)],
)
def test_the_score_of_one_row(written, source, score):
    model = word_model()
    tables, directions = Successors.of_sequences(ordinal_sequences(model), model.d_vocab), logit_directions(model)
    text = "He was there on Wednesday and"
    probe = SUCCESSOR.probe(model, 0)
    tokens = model.tokenize(text)
    after = tables.following[tokens]
    probe = type(probe)(
        "one",
        (tokens,),
        (visible_keys(after >= 0),),
        marks={"following": (after,), "sequence": (tables.sequence[tokens],), "elements": (tables.sequence,)},
        unembedding=directions,
    )
    write = directions[model.tokenize(written)[0, -1]] - directions.mean(0)
    scores = SUCCESSOR.score(probe, [one_unit(model, text, source, write)])
    assert scores.score.tolist() == pytest.approx([score])
    assert scores.cases.tolist() == [1]
    assert (scores.best[0] is not None) == (score > 0)


def test_a_tokenizer_without_the_words_gives_no_cases():
    from clearhead.model.access import Model

    tiny = Model.load("clearhead-tiny")
    probe = SUCCESSOR.probe(tiny, 0)
    held = {text for s in ordinal_sequences(tiny) for text in tiny.token_strings(s.tokens)}
    assert " Monday" not in held and "3" in held
    for tokens, expected in zip(probe.batches, probe.expected, strict=True):
        keys = tokens[expected.any(1)]
        assert set(tiny.token_strings(keys)) <= held
