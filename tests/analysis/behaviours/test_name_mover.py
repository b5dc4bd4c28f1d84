import pytest
import torch

from clearhead.analysis.behaviours.behaviour import Probe
from clearhead.analysis.behaviours.direct_effect import logit_directions
from clearhead.analysis.behaviours.name_mover import NAME_MOVER
from clearhead.analysis.behaviours.reading import Reading
from clearhead.analysis.behaviours.token_lists import name_tokens
from clearhead.analysis.behaviours.word_model import word_model
from clearhead.model.access import Model


@pytest.mark.parametrize(
    ("written", "source", "moved"),
    [
        ((" Clara",), 2, True),
        ((" Martin",), 2, False),
        ((" Clara", " Martin", " Martin"), 2, False),
        ((" Clara",), 3, False),
    ],
)
def test_only_the_name_that_is_read_counts(written, source, moved):
    model = word_model()
    directions, names = logit_directions(model), torch.tensor(sorted(name_tokens(model).values()))
    tokens = model.tokenize("When Clara and Martin came to")[:, -6:]
    tokens = torch.cat([tokens[:, :1], tokens], 1)  # position 0, Clara at 2
    held = tokens.masked_fill(~torch.isin(tokens, names), -1)
    expected = torch.zeros(1, 7, 7, dtype=torch.bool)
    expected[:, -1] = held >= 0
    probe = Probe("one", (tokens,), (expected,), marks={"name": (held,), "all names": (names,)}, unembedding=directions)
    write = sum(directions[name_tokens(model)[word.strip()]] - directions.mean(0) for word in written)
    parts = torch.zeros(1, 7)
    parts[0, source] = 1.0
    zero, last = torch.tensor([0]), torch.tensor([6])
    reading = Reading(tokens, zero, zero, last, parts, torch.ones(1), lambda rows: write.expand(len(rows), -1), 1)
    scores = NAME_MOVER.score(probe, [reading])
    assert scores.cases.tolist() == [1]
    assert scores.score.tolist() == pytest.approx([float(moved)])


def test_a_tokenizer_without_names_gives_no_cases():
    tiny = Model.load("clearhead-tiny")
    assert not name_tokens(tiny)
    probe = NAME_MOVER.probe(tiny, 0)
    assert len(probe.batches) and not any(bool(expected.any()) for expected in probe.expected)
    tokens = probe.batches[0]
    rows = torch.zeros(3, dtype=torch.int64)
    write = torch.zeros(3, tiny.d_model)
    reading = Reading(
        tokens, rows, rows, rows + 1, torch.ones(3, tokens.shape[1]), torch.ones(3), lambda r: write[r], 2
    )
    scores = NAME_MOVER.score(probe, [reading])
    assert scores.cases.tolist() == [0, 0] and scores.score.tolist() == [0, 0] and scores.best == [None, None]
