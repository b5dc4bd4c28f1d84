import pytest

from clearhead.errors import ClearheadError
from clearhead.explain.evidence import AFTER, BEFORE, divide, explainable, read_evidence

SIZE = BEFORE + AFTER + 1


@pytest.fixture(scope="module")
def evidence(planted):
    return list(read_evidence(planted, explainable(planted)))


def test_every_unit_with_examples_is_there_in_order(planted, evidence):
    assert [one.unit_id for one in evidence] == [f"lorsa.3.{i}" for i in range(5)]
    assert explainable(planted, "lorsa") == explainable(planted)
    with pytest.raises(ClearheadError, match="no unit of kind 'sae'"):
        explainable(planted, "sae")


def test_no_document_is_on_both_sides_and_no_example_is_lost(planted, evidence):
    for one in evidence:
        assert one.divided_by == "document"
        written, judged = (
            {example.document for example in side.active} | {example.document for example, _ in side.inactive}
            for side in (one.written, one.judged)
        )
        assert not written & judged
        numbers = [example.number for side in (one.written, one.judged) for example in side.active]
        rows = planted.examples(one.unit_id, "top")
        assert sorted(numbers) == sorted(row["example_id"] for row in rows)
        assert abs(len(one.written.active) - len(one.judged.active)) <= 3


def test_where_one_document_holds_most_blocks_divide(planted):
    rows = [dict(row, keys=None, weights=None, rest=None) for row in planted.examples("lorsa.3.0")]
    one = divide("lorsa.3.0", [row | {"document": "all"} for row in rows])
    assert one.divided_by == "block"
    assert not {e.block for e in one.written.active} & {e.block for e in one.judged.active}
    assert divide("lorsa.3.0", [row | {"document": "all", "block": 0} for row in rows]) is None
    assert divide("lorsa.3.0", rows[:3]) is None


def test_silent_texts_are_silent_and_no_longer_than_active_ones(evidence):
    for one in evidence:
        for side in (one.written, one.judged):
            assert side.inactive
            for _, text in side.inactive:
                assert not any(text.activations) and len(text.tokens) <= SIZE
            for example in side.active:
                text, at = example.cut()
                assert text.activations[at] == example.activation and len(text.tokens) <= SIZE


def test_shares_are_those_of_the_pattern(planted, evidence):
    example = evidence[1].written.active[0]
    pattern = next(row for row in planted.patterns("lorsa.3.1") if row["example_id"] == example.number)
    (source,) = example.sources
    assert source.place == pattern["keys"][0] - example.text.start == example.at - 1
    assert source.share == pytest.approx(2.0 / 2.5)


def test_a_source_against_the_activation_has_a_negative_share(planted):
    rows = [dict(row, keys=[row["position"]], weights=[1.0], rest=1.0) for row in planted.examples("lorsa.3.0")]
    one = divide("lorsa.3.0", [row | {"activation": -abs(row["activation"])} for row in rows])
    assert one.written.active[0].sources[0].share == -0.5
