import pytest

from clearhead.errors import ClearheadError, CorruptFileError, NonFiniteError, UnknownNameError, nearest


def test_unknown_name_says_what_was_given_and_the_nearest_valid_name():
    error = UnknownNameError("site", "patern.3", ["pattern.3", "z.3", "q.3"], "Layers count from 0.")
    text = str(error)
    assert text.startswith("unknown site 'patern.3'; did you mean 'pattern.3'?")
    assert "pattern.3, q.3, z.3" in text
    assert text.endswith("Layers count from 0.")


def test_unknown_name_guesses_nothing_when_nothing_is_close():
    text = str(UnknownNameError("model", "xyzzy", ["smollm2"]))
    assert "did you mean" not in text
    assert "Valid: smollm2." in text


def test_unknown_name_lists_at_most_twelve_and_admits_to_none():
    assert str(UnknownNameError("head", "q", [f"n{i:02d}" for i in range(40)])).endswith("n11, ....")
    assert str(UnknownNameError("head", "q", [])) == "unknown head 'q'. There are none."


def test_nearest():
    assert nearest("trian lorsa", ["train lorsa", "view"]) == "train lorsa"
    assert nearest("q", ["train lorsa"]) is None


@pytest.mark.parametrize("kind", [UnknownNameError, CorruptFileError, NonFiniteError])
def test_every_error_of_input_is_a_clearhead_error(kind):
    assert issubclass(kind, ClearheadError)
