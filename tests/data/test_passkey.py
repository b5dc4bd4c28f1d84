import re

import torch

from clearhead.data import passkey
from clearhead.data.hidden_fact import prompt


def test_a_key_has_five_digits_and_is_in_the_fact_twice():
    facts = passkey.passkeys(2000, seed=1)
    keys = [int(fact.answer) for fact in facts]
    assert all(fact.fact.count(fact.answer) == 2 and fact.answer not in fact.question for fact in facts)
    assert min(keys) >= 10_000 and max(keys) <= 99_999
    assert {str(key)[0] for key in keys} == set("123456789") and len(set(keys)) > 1900


def test_keys_depend_on_seed_and_index_alone():
    assert passkey.passkeys(5, 3) == passkey.passkeys(50, 3)[:5]
    assert not {fact.answer for fact in passkey.passkeys(5, 3)} & {fact.answer for fact in passkey.passkeys(5, 4)}


def test_the_filler_says_the_same_again_and_again_without_a_digit(model):
    rows = passkey.filler(model, 3, 100)
    assert rows.shape[0] == 3 and rows.shape[1] >= 100
    assert torch.equal(rows[0], rows[2])
    text = "".join(model.token_strings(rows[0]))
    assert text == passkey.FILLER * text.count(passkey.FILLER)
    assert not re.search(r"\d", passkey.FILLER + passkey.INTRO + passkey.QUESTION)


def test_a_prompt_has_the_key_at_its_depth_and_at_the_end(model):
    (fact,) = passkey.passkeys(1, 0)
    row = passkey.filler(model, 1, 128)[0]
    places = []
    for depth in (0, 0.5, 1):
        tokens, _ = prompt(model, fact, row, 128, depth)
        text = "".join(model.token_strings(tokens))
        assert text.startswith(passkey.INTRO) and text.endswith(passkey.QUESTION + fact.answer)
        assert text.count(fact.answer) == 3
        places.append(text.index(fact.fact))
    assert places[0] == len(passkey.INTRO) < places[1] < places[2]
    assert text.endswith(fact.fact + fact.question + fact.answer)
