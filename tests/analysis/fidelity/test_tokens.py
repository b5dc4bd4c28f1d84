"""Errors by position, repeat, class and token: planted failures are found where they are."""

import numpy as np
import pytest
import torch

from clearhead.analysis.fidelity.tokens import by_position, class_of, describe_tokens, repeats


def test_repeats_are_later_occurrences_in_the_same_block():
    tokens = torch.tensor([[5, 6, 5, 5], [6, 7, 8, 7]])
    assert repeats(tokens).tolist() == [[False, False, True, True], [False, False, False, True]]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" the", "word start"),
        ("ing", "word inside or without space"),
        ("7", "number"),
        (" 7", "number"),
        (").", "punctuation"),
        ("\n\n", "line break"),
        ("   ", "space"),
        ("été", "word inside or without space"),
        ("", "space"),
    ],
)
def test_classes_go_by_the_text(text, kind):
    assert class_of(text, special=False) == kind
    assert class_of(text, special=True) == "control token"


def test_rows_by_position_are_powers_of_two_and_hold_their_own_tokens():
    position = np.array([1, 2, 3, 4, 5, 6])
    rows = by_position(position, np.array([1.0, 4.0, 4.0, 0.0, 0.0, 9.0]), np.ones(6))
    assert [row["name"] for row in rows] == ["1", "2–3", "4–6"]
    assert [row["relative_error"] for row in rows] == pytest.approx([1.0, 2.0, 3**0.5])
    assert sum(row["share_of_error"] for row in rows) == pytest.approx(1.0)


def test_the_token_that_is_mispredicted_comes_first():
    tokens = np.array([0, 1, 2] * 20 + [3] * 5)
    square_e = np.where(tokens == 1, 4.0, 1.0) * np.where(tokens == 3, 99.0, 1.0)
    repeated = np.arange(len(tokens)) >= 3
    found = describe_tokens(
        tokens,
        np.ones_like(tokens),
        repeated,
        square_e,
        np.full(len(tokens), 4.0),
        [" a", "b", "1", "<s>"],
        frozenset([3]),
    )
    assert [row["name"] for row in found["worst"]] == ["b", " a", "1"]  # the fourth is too rare to be named
    assert found["worst"][0]["relative_error"] == pytest.approx(1.0)
    classes = {row["name"]: row for row in found["classes"]}
    assert classes["control token"]["tokens"] == 5 and classes["number"]["relative_error"] == pytest.approx(0.5)
    assert [row["name"] for row in found["repeats"]] == ["first occurrence", "repeat"]
