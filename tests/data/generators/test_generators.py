"""The generators of templates.py's kind: every item is taken, and says what it claims to say."""

import re

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from clearhead.data.generators import agreement, antonym, capitals, docstring, pronoun, sums, told_key
from clearhead.data.tasks import task
from clearhead.data.templates import single_tokens
from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.model.access import Model
from tests.data.word_model import SPACE

MODULES = {
    "pronoun": pronoun,
    "docstring": docstring,
    "capitals": capitals,
    "agreement": agreement,
    "antonym": antonym,
    "passkey": told_key,
    "addition": sums,
}


@pytest.fixture(scope="module")
def pieces():
    """A model whose tokens are words with the space in front, numbers, and single other characters."""
    texts = [*capitals.TEMPLATES, *antonym.TEMPLATES, *sums.TEMPLATES, antonym.PAIRS, *map(str, range(200))]
    texts += [name for pair in capitals.CAPITALS.items() for name in pair]
    found = dict.fromkeys(re.findall(r"\w+|[^\w ]", " ".join(texts)))
    vocabulary = ["<unk>", SPACE, *found, *(SPACE + piece for piece in found)]
    tokenizer = Tokenizer(models.WordLevel({piece: n for n, piece in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{SPACE}?\\w+|{SPACE}?[^\\w{SPACE}]"), "isolated")
    tokenizer.decoder = decoders.Replace(SPACE, " ")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<unk>")
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=64, vocab_size=len(fast))
    return Model(GPT2LMHeadModel(config), fast, name="pieces", self_test=False)


def taken(name: str, model: Model, n: int = 24, **options: str):
    """The items of a task, all usable, the templates in turn and the labels where they say they are."""
    made = task(name, model, n, seed=1, **options)
    assert len(made) == n and not made.refused
    assert len({item.template.split()[1] for item in made.items}) >= 4 and len(MODULES[name].TEMPLATES) >= 4
    for index, item in enumerate(made.items):
        assert item.clean != item.corrupt
        strings = model.token_strings(made.tokens[index].clean)
        assert {label: strings[place] for label, place in item.labels.items()} == item.label_tokens
        assert item.labels["end"] == len(strings) - 1
    return made.items


def same_but(item, word: str, other: str) -> bool:
    """Whether the corrupt prompt is the clean one with one word for another."""
    return re.sub(rf"\b{word}\b", other, item.clean) == item.corrupt


def test_pronouns_follow_the_name_and_change_sides_with_it(model):
    men, women = pronoun.MEN.split(), pronoun.WOMEN.split()
    for item in taken("pronoun", model):
        (name,), (other,) = ([w for w in re.findall(r"\w+", t) if w in men + women] for t in (item.clean, item.corrupt))
        expected = (" he", " she") if name in men else (" she", " he")
        assert (*item.answers, *item.wrong_answers) == expected
        assert (name in men) != (other in men) and same_but(item, name, other)
        assert name.endswith(item.label_tokens["name"].strip())


@pytest.mark.parametrize("corruption", docstring.CORRUPTIONS)
def test_the_third_described_argument_is_due(model, corruption):
    for item in taken("docstring", model, 10, corrupt=corruption):
        arguments = [[a.strip() for a in re.search(r"\((.*)\)", t)[1].split(",")] for t in (item.clean, item.corrupt)]
        described = [re.findall(r"(\w+): \w+ \w+$", t, re.MULTILINE) for t in (item.clean, item.corrupt)]
        a, b, c = arguments[0][3:6]
        assert described[0] == [a, b] and item.answers == (f" {c}",)
        others = {f" {name}" for name in arguments[0] if name not in (c, "self")}
        assert set(item.wrong_answers) == others and len(others) == len(item.wrong_answers)
        new = [set(arguments[1][3:6]), set(described[1])]
        assert new[0].isdisjoint((a, b, c)) == (corruption != "docstring")
        assert new[1].isdisjoint((a, b, c)) == (corruption != "definition")
        assert new[0].isdisjoint(new[1])
        assert item.label_tokens["C_def"] == f" {c}" and item.label_tokens["B_doc"] == f" {b}"


def test_capitals_belong_to_their_countries(pieces):
    for item in taken("capitals", pieces):
        capital, other = item.answers[0].strip(), item.wrong_answers[0].strip()
        (country,) = (name for name, city in capitals.CAPITALS.items() if city == capital)
        (changed,) = (name for name, city in capitals.CAPITALS.items() if city == other)
        assert same_but(item, country, changed)
        assert country.split()[-1] == item.label_tokens["country"].strip()
    assert len(set(capitals.CAPITALS.values())) == len(capitals.CAPITALS)


@pytest.mark.parametrize("corruption", agreement.CORRUPTIONS)
def test_verbs_agree_with_the_subject_whatever_is_nearer(model, corruption):
    plurals = {agreement._numbers(noun)[1] for noun in (agreement.SUBJECTS + " " + agreement.ATTRACTORS).split()}
    nouns = plurals | set((agreement.SUBJECTS + " " + agreement.ATTRACTORS).split())
    cases = []
    for item in taken("agreement", model, corrupt=corruption):
        (subject, near), (changed, mirrored) = (
            [w in plurals for w in re.findall(r"\w+", text) if w in nouns] for text in (item.clean, item.corrupt)
        )
        assert item.answers == agreement.VERBS[subject] and item.wrong_answers == agreement.VERBS[not subject]
        assert changed == (not subject) and (mirrored == near) == (corruption == "subject")
        assert item.template.endswith("equal" if subject == near else "different")
        cases.append((subject, near))
    assert {cases.count(case) for case in set(cases)} == {6} and len(set(cases)) == 4


def test_opposites_are_pairs(pieces):
    pairs = {frozenset(pair.split()) for pair in antonym.PAIRS.split(", ")}
    for item in taken("antonym", pieces):
        word = item.label_tokens["word"].strip()
        assert frozenset((word, item.answers[0].strip())) in pairs
        (other,) = (
            set(pair) - {item.wrong_answers[0].strip()} for pair in pairs if item.wrong_answers[0].strip() in pair
        )
        assert same_but(item, word, *other)
        assert item.answers[0].startswith(" ") != item.clean.endswith('"')
    words = antonym.PAIRS.replace(",", "").split()
    assert len(set(words)) == len(words)


def test_the_key_is_told_once_and_asked_for(model):
    distances = set()
    for item in taken("passkey", model):
        key, other = item.answers[0].strip(), item.wrong_answers[0].strip()
        assert re.findall(r"\w+", item.clean).count(key) == 1 and same_but(item, key, other)
        assert item.label_tokens["key"] == f" {key}"
        distances.add(item.labels["end"] - item.labels["key"])
    assert len(distances) > 8


def test_sums_are_asked_whole_or_by_their_first_digit(model, pieces):
    for tokenizer, kind in ((pieces, "whole"), (model, "first digit")):
        for item in taken("addition", tokenizer, 20):
            sides = []
            for text in (item.clean, item.corrupt):
                a, b = map(int, re.findall(r"\d+", text)[-2 if "plus" not in text else 0 :][:2])
                sides.append(str(a + b) if kind == "whole" else str(a + b)[0])
            assert [item.answers[0].strip(), item.wrong_answers[0].strip()] == sides
            assert item.template.endswith(kind)


@pytest.mark.parametrize("name", MODULES)
def test_items_depend_on_seed_and_index_alone_and_corruptions_are_known(name, model, pieces):
    subject = pieces if name in ("capitals", "antonym") else model
    few, many, other = (task(name, subject, n, seed=seed) for n, seed in ((3, 5), (6, 5), (6, 6)))
    assert few.items == many.items[:3] and many.items != other.items
    with pytest.raises(UnknownNameError, match=f"corruption of {name} 'x'.*{MODULES[name].CORRUPTIONS[0]}"):
        task(name, subject, 3, corrupt="x")


def test_a_tokenizer_that_takes_nothing_is_told_what_it_splits(model, pieces):
    with pytest.raises(ClearheadError, match=r"none of 200 prompts like 'The capital.*; it splits ' \w+' into ' .*\|"):
        task("capitals", model, 2)
    with pytest.raises(ClearheadError, match="200 × an answer that is also a wrong answer. Take a model"):
        task("pronoun", pieces, 2)
    with pytest.raises(ClearheadError, match=r"0 of 1 words as single tokens, 1 are needed; it splits ' Nairobi' into"):
        single_tokens(model, ["Nairobi"], at_least=1, task="x")
