import torch

from clearhead.analysis.behaviours import matching


def pairs(mask):
    return [tuple(entry) for entry in mask[0].nonzero().tolist()]


def test_keys_by_position_are_single_and_leave_out_the_first():
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    assert pairs(matching.previous(tokens)) == [(2, 1), (3, 2), (4, 3)]
    assert pairs(matching.previous(tokens, 2)) == [(3, 1), (4, 2)]
    assert pairs(matching.first(tokens)) == [(2, 0), (3, 0), (4, 0)]
    assert matching.previous(tokens).shape == (2, 5, 5)


def test_duplicates_and_what_followed_them():
    tokens = torch.tensor([[9, 5, 6, 7, 5, 6, 5]])
    assert pairs(matching.duplicate(tokens)) == [(4, 1), (5, 2), (6, 1), (6, 4)]
    assert pairs(matching.induction(tokens)) == [(4, 2), (5, 3), (6, 2), (6, 5)]


def test_what_follows_the_first_token_is_induction_but_the_first_token_is_no_key():
    tokens = torch.tensor([[5, 6, 5, 5]])
    assert pairs(matching.induction(tokens)) == [(2, 1), (3, 1)]
    assert pairs(matching.duplicate(tokens)) == [(3, 2)]


def test_a_word_is_continued_whatever_its_pieces():
    strings = [".", " Mar", "ion", " and", " M", "arion", ",", " marion", " m", "ar", "ial"]
    found = matching._word_pairs(strings)
    assert (4, 1) in found  # behind M comes the a of " Mar"
    assert (4, 5) not in found and (8, 7) not in found  # "marial" is another word
    assert not [pair for pair in found if pair[0] in (1, 3, 7)]


def test_bytes_are_no_letters():
    assert matching._word_pairs(["ab\\xe2", "cd", " x", "e2"]) == []
    assert matching._word_pairs(["b", "e", " ", "b", "e"]) == [(3, 1)]


def test_the_control_is_another_blocks_keys():
    mask = torch.zeros(2, 3, 3, dtype=torch.bool)
    mask[0, 2, 1] = mask[1, 2, 0] = mask[1, 2, 1] = True
    assert pairs(matching.elsewhere(mask)) == [(2, 0)]
    assert not matching.elsewhere(mask)[1].any()
