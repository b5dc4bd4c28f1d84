import pytest
import torch
from torch import Tensor

from clearhead.data.generators import copy_tokens
from clearhead.data.tasks import measure, task
from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.access import Model
from tests.data.word_model import word_model


@pytest.fixture(scope="module")
def beginning():
    return word_model(begin=True)


def split(model: Model, text: str, period: int) -> tuple[list[str], list[str]]:
    """The tokens of the first and of the second half, behind the full stop."""
    strings = model.token_strings(model.tokenize(text)[0])
    body = strings[strings.index(".") + 1 :]
    return body[:period], body[period:]


@pytest.mark.parametrize("kind", ["clearhead-tiny", "with a beginning token"])
@pytest.mark.parametrize("corrupt", copy_tokens.CORRUPTIONS)
def test_the_answer_is_what_followed_the_last_token_before(kind, corrupt, model, beginning):
    model = model if kind == "clearhead-tiny" else beginning
    made = task("copy", model, 60, seed=2, corrupt=corrupt)
    assert len(made) == 60 and not made.refused
    for item in made.items:
        period = int(item.template.split()[1])
        first, again = split(model, item.clean, period)
        assert len(set(first)) == period and len(first) + len(again) == copy_tokens.LENGTH
        assert again == first[: len(again)] and item.answers == (first[len(again)],)
        strings = model.token_strings(model.tokenize(item.clean)[0])
        labels = item.labels
        assert strings[labels["A"]] == strings[labels["end"]] == again[-1] and labels["end"] == len(strings) - 1
        assert (labels["B"], strings[labels["B"]]) == (labels["A"] + 1, item.answers[0])
        changed_first, changed_again = split(model, item.corrupt, period)
        (wrong,) = item.wrong_answers
        if corrupt == "last":
            assert changed_first == first and changed_again[:-1] == again[:-1]
            assert first[first.index(changed_again[-1]) + 1] == wrong and changed_again[-1] != item.answers[0]
            assert changed_again[-1] not in again
        else:
            assert changed_again == again and wrong not in first
            assert changed_first == [wrong if piece == item.answers[0] else piece for piece in first]


def test_prompts_have_one_length_and_several_distances(model):
    made = task("copy", model, 120)
    (rows,) = made.batches(120)
    distances = rows.labels["end"] - rows.labels["A"]
    assert set(distances.tolist()) == set(copy_tokens.PERIODS)


def test_the_induction_heads_of_the_tiny_model_solve_it_and_a_shuffled_first_half_is_not_solved(model):
    made = task("copy", model, 100)
    found = measure(model, made)
    assert found.accuracy > 0.9 and found.top1 > 0.65  # 0.96 and 0.76 when written

    class Forgetful(Model):
        """Sees the first half in another order, so that other tokens follow."""

        def run(self, tokens: Tensor, **options):
            order = torch.cat([torch.tensor([0]), 1 + torch.randperm(16, generator=torch.Generator().manual_seed(0))])
            return super().run(torch.cat([tokens[:, order], tokens[:, 17:]], dim=1), **options)

    shuffled = measure(Forgetful(model.hf, model.tokenizer, name="shuffled", self_test=False), made)
    assert shuffled.top1 < 0.35


def test_prompts_depend_on_seed_and_index_alone(model):
    few, many, other = (task("copy", model, n, seed=seed) for n, seed in ((8, 5), (20, 5), (20, 6)))
    assert few.items == many.items[:8]
    assert all(a != b for a, b in zip(many.items, other.items, strict=True))


def test_unusable_vocabularies_and_corruptions_are_refused(model, monkeypatch):
    with pytest.raises(UnknownNameError, match="did you mean 'earlier'"):
        task("copy", model, 4, corrupt="earlie")
    monkeypatch.setattr(copy_tokens, "MOST_PIECES", 22)
    with pytest.raises(ClearheadError, match="has 22 tokens of a space and letters.*more than 22"):
        task("copy", model, 4)
