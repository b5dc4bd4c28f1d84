import pytest
import torch

from clearhead.data import hidden_fact, needle, passkey
from clearhead.data.retrieval import measure_retrieval, read_answers
from clearhead.errors import ClearheadError, NonFiniteError, UnknownNameError
from clearhead.model.access import Model
from tests.data.word_model import word_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))


def test_exact_is_what_greedy_generation_prints():
    """Rows that the model itself wrote are exact, and one other token anywhere in the answer is enough not to be."""
    model = word_model()
    rows = torch.randint(3, 60, (4, 10), generator=torch.Generator().manual_seed(0))
    for _ in range(4):
        rows = torch.cat([rows, model.run(rows).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert read_answers(model, rows, [4, 3, 2, 1])[0].tolist() == [True] * 4
    for place in range(4):
        changed = rows.clone()
        changed[:, -1 - place] = (changed[:, -1 - place] + 1) % model.d_vocab
        right, _ = read_answers(model, changed, [4, 4, 4, 4])
        assert not right.any()
    changed = rows.clone()
    changed[:, -4] = (changed[:, -4] + 1) % model.d_vocab  # before the answer of one token, which it may change
    logits = model.run(changed).logits
    assert torch.equal(read_answers(model, changed, [1] * 4)[0], logits[:, -2].argmax(-1) == changed[:, -1])


def test_the_log_probability_is_that_of_the_whole_answer():
    model = word_model()
    rows = torch.randint(3, 60, (3, 12), generator=torch.Generator().manual_seed(1))
    _, found = read_answers(model, rows, [5, 3, 1])
    for row, count, log in zip(rows, [5, 3, 1], found, strict=True):
        expected = 0.0
        for place in range(12 - count, 12):
            logits = model.run(row[None, :place]).logits[0, -1]
            expected += float(logits.log_softmax(-1)[row[place]])
        assert float(log) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", ["passkey", "needle"])
def test_a_cell_is_the_mean_over_prompts_measured_alone(kind, model, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(60):
        (tmp_path / "text" / f"{number}.txt").write_text(f"Page {number} tells of the sea. It was a long day. " * 40)
    text = str(tmp_path / "text")
    found = measure_retrieval(model, (110, 128), (0, 0.5, 1), 5, 7, kind=kind, text=text, batch=2)
    if kind == "passkey":
        facts, rows = passkey.passkeys(5, 7), passkey.filler(model, 5, 128)
    else:
        facts, rows = needle.needles(5, 7), needle.haystacks(model, 5, 128, text)
    assert found.exact.shape == found.log_probability.shape == (2, 3)
    assert (found.kind, found.lengths, found.depths, found.n) == (kind, (110, 128), (0, 0.5, 1), 5)
    for i, length in enumerate(found.lengths):
        for j, depth in enumerate(found.depths):
            right, logs = [], []
            for fact, row in zip(facts, rows, strict=True):
                tokens, answer = hidden_fact.prompt(model, fact, row, length, depth)
                assert len(tokens) == length
                one, log = read_answers(model, tokens[None], [answer])
                right.append(float(one))
                logs.append(float(log))
            assert float(found.exact[i, j]) == sum(right) / 5
            assert float(found.log_probability[i, j]) == pytest.approx(sum(logs) / 5, abs=1e-3)
    assert len({round(float(log), 3) for log in found.log_probability.flatten()}) == 6  # no cell is another's


def test_a_model_that_knows_the_answer_has_every_cell_right(model):
    """Raises the logit of the token that comes next, which only a model that is given the answer can know."""

    class Knows(Model):
        def run(self, tokens, **options):
            def edit(logits, run):
                return logits.scatter(-1, tokens.roll(-1, 1)[..., None], 100.0)

            return super().run(tokens, edit={"logits": edit}, **options)

    found = measure_retrieval(Knows(model.hf, model.tokenizer, name="knows", self_test=False), (128,), (0, 1), 3)
    assert found.exact.tolist() == [[1.0, 1.0]]
    assert float(found.log_probability.min()) > -1e-3


def test_bad_cells_are_refused(model):
    with pytest.raises(UnknownNameError, match="did you mean 'passkey'"):
        measure_retrieval(model, (100,), kind="passkeys")
    with pytest.raises(ClearheadError, match="context of clearhead-tiny is 128 tokens, got 200"):
        measure_retrieval(model, (100, 200))
    with pytest.raises(ClearheadError, match="20 tokens cannot hold the fact"):
        measure_retrieval(model, (20,))
    with pytest.raises(ClearheadError, match="fractions of the text from 0 to 1"):
        measure_retrieval(model, (100,), (0, 50, 100))
    with pytest.raises(ClearheadError, match="at least 1 prompt"):
        measure_retrieval(model, (100,), n=0)
    with pytest.raises(ClearheadError, match="at least one of each"):
        measure_retrieval(model, ())


def test_logits_that_are_not_finite_are_an_error():
    broken = word_model()
    with torch.no_grad():
        broken.hf.lm_head.weight[0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match="logits of words at the answer of a prompt of 9 tokens"):
        read_answers(broken, torch.full((1, 9), 5), [2])
