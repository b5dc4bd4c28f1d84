import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import ClearheadError, UnknownNameError
from clearhead.units import KINDS, Unit

numbers = st.integers(min_value=0, max_value=10**6)


@st.composite
def units(draw):
    kind = draw(st.sampled_from(sorted(KINDS)))
    place = {name: draw(numbers) for name in KINDS[kind]}
    return Unit(kind, **place, position=draw(st.none() | numbers))


@given(units())
def test_name_round_trip(unit):
    assert Unit.parse(unit.id) == unit
    assert hash(Unit.parse(unit.id)) == hash(unit)
    assert str(unit) == unit.id


def test_names_as_documented():
    assert Unit("lorsa", 12, 345).id == "lorsa.12.345"
    assert Unit("lorsa", 12, 345, 7).id == "lorsa.12.345@7"
    assert Unit("edge", 5, 3, position=7, part=2).id == "edge.5.3.2@7"
    assert Unit("logit", index=42, position=7).id == "logit.42@7"
    assert Unit("mlp", 5).id == "mlp.5"


def test_vectors_and_activation_are_not_identity():
    plain, heavy = Unit("head", 5, 3), Unit("head", 5, 3, read=np.ones(4), write=np.ones(4), activation=2.0)
    assert plain == heavy
    assert hash(plain) == hash(heavy)
    assert plain != Unit("head", 5, 4)
    assert plain != Unit("lorsa", 5, 3)
    assert plain != Unit("head", 5, 3, position=0)


@pytest.mark.parametrize(
    "text", ["", "lorsa", "lorsa.12", "lorsa.12.3.4", "lorsa.12.-3", "lorsa.12.3@", "12.3", "LORSA.1.2"]
)
def test_bad_names_are_refused(text):
    with pytest.raises(ClearheadError):
        Unit.parse(text)


def test_unknown_kind_names_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'lorsa'"):
        Unit.parse("lorsas.1.2")
    with pytest.raises(UnknownNameError, match="did you mean 'head'"):
        Unit("heads", 1, 2)


def test_numbers_a_kind_lacks_or_needs():
    with pytest.raises(ClearheadError, match="layer and index; got index=None"):
        Unit("head", 5)
    with pytest.raises(ClearheadError, match="got layer=3"):
        Unit("logit", 3, 4)
    with pytest.raises(ClearheadError, match="got part=1"):
        Unit("head", 5, 3, part=1)
    with pytest.raises(ClearheadError, match="counts from 0"):
        Unit("head", -1, 3)
