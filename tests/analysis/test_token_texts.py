"""Texts of tokens, as columns hold them."""

import numpy as np

from clearhead.analysis.token_texts import TokenTexts
from clearhead.model.access import Model


def test_texts_are_those_of_the_vocabulary_and_numbers_without_a_tokenizer(model):
    ids = np.array([5, 900, 5])
    assert TokenTexts(model)(ids).to_pylist() == model.token_strings(ids)
    bare = Model(model.hf, None, name=model.name, self_test=False)
    assert TokenTexts(bare)(ids).to_pylist() == ["<5>", "<900>", "<5>"]
