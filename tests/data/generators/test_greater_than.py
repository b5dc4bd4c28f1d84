import re

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from clearhead.data.generators import greater_than
from clearhead.data.tasks import Measurement, measure, task
from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.access import Model
from tests.data.word_model import SPACE, word_model

PROMPT = re.compile(r"The (\w+) lasted from the year (\d\d)(\d\d) to the year (\d\d)")


@pytest.fixture(scope="module")
def pairs():
    """A model whose tokenizer cuts years in two, but for 1600 and all of the 18th hundred, which are one token."""
    digits = [f"{number:02}" for number in range(100)]
    words = ["The", *(SPACE + word for word in ("lasted from the year to " + greater_than.NOUNS).split())]
    whole = [f"{SPACE}1600", *(f"{SPACE}18{year}" for year in digits)]
    pieces = ["<unk>", *digits, *(SPACE + pair for pair in digits), *dict.fromkeys(words), *whole]
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    cut = Regex(f"{SPACE}1600|{SPACE}18\\d\\d|{SPACE}?\\d\\d|{SPACE}?[a-zA-Z]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(cut, "isolated")
    tokenizer.decoder = decoders.Replace(SPACE, " ")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<unk>")
    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=2, n_positions=16, vocab_size=len(fast), bos_token_id=0, eos_token_id=0
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(GPT2LMHeadModel(config), fast, name="pairs", self_test=False)


def test_where_a_year_is_two_tokens_every_later_year_is_an_answer(pairs):
    made = task("greater_than", pairs, 60, seed=1)
    assert len(made) == 60 and not made.refused
    centuries = set()
    for item in made.items:
        noun, century, year, again = PROMPT.fullmatch(item.clean).groups()
        centuries.add(century)
        asked = [f"{y:02}" for y in range(100) if (century, y) != ("16", 0)]
        assert noun in greater_than.NOUNS.split() and century == again and year not in ("00", "01", "99")
        assert list(item.answers) == [y for y in asked if y > year]
        assert list(item.wrong_answers) == [y for y in asked if y <= year]
        assert item.corrupt == item.clean.replace(f"{century}{year}", f"{century}01")
        assert item.template == "greater_than two digits"
        assert item.label_tokens == {"noun": f" {noun}", "century": f" {century}", "YY": year, "end": f" {century}"}
        assert item.labels["end"] == len(pairs.tokenize(item.clean)[0]) - 1
    assert centuries == {"11", "12", "13", "14", "15", "16", "17"}  # of 18 no year is two tokens


def test_where_digits_are_tokens_the_tens_are_asked_for(model):
    made = task("greater_than", model, 60, seed=1)
    assert len(made) == 60 and not made.refused
    for item in made.items:
        _, century, year, again = PROMPT.fullmatch(item.clean).groups()
        ten = int(year[0])
        assert century == again and 1 <= ten <= 8
        assert [int(text) for text in item.answers] == list(range(ten + 1, 10))
        assert [int(text) for text in item.wrong_answers] == list(range(ten))
        assert item.corrupt == item.clean.replace(century + year, f"{century}01")
        strings = model.token_strings(model.tokenize(item.clean)[0])
        place = item.labels["YY"]
        assert strings[place : place + 2] == list(year)
        assert strings[place - 1] == strings[item.labels["century"]] == strings[-1] == century[1]
    assert {item.template for item in made.items} == {"greater_than one digit"}


def test_a_model_that_prefers_later_years_is_right_and_one_that_prefers_earlier_years_is_wrong(pairs):
    def measured(sign: int) -> Measurement:
        def ramp(logits: torch.Tensor, run: object) -> torch.Tensor:
            change = torch.zeros(pairs.d_vocab)
            change[1:101] = sign * torch.arange(100.0)  # the tokens 00 to 99
            return torch.zeros_like(logits) + change

        class Ramp(Model):
            def run(self, tokens, **options):
                return super().run(tokens, edit={"logits": ramp}, **options)

        return measure(Ramp(pairs.hf, pairs.tokenizer, name="ramp", self_test=False), task("greater_than", pairs, 10))

    later, earlier = measured(1), measured(-1)
    assert later.accuracy == 1.0 and earlier.accuracy == 0.0
    assert torch.equal(later.difference, -earlier.difference) and bool((later.difference > 0).all())


def test_prompts_depend_on_seed_and_index_alone(model):
    few, many, other = (task("greater_than", model, n, seed=seed) for n, seed in ((4, 5), (9, 5), (9, 6)))
    assert few.items == many.items[:4]
    assert many.items != other.items


def test_other_tokenizers_and_corruptions_are_refused(model):
    with pytest.raises(ClearheadError, match="tokenizer of words cuts years neither"):
        task("greater_than", word_model(), 4)
    with pytest.raises(UnknownNameError, match="year_01"):
        task("greater_than", model, 4, corrupt="year_1")
