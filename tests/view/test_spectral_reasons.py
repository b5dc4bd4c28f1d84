import pytest

from clearhead.spectral import verdicts
from clearhead.view.spectral_explanations import (
    CONTROLS,
    EXPLANATIONS,
    JUDGED,
    JUDGED_BY,
    TOO_FEW,
    VERDICTS,
    order_controls,
)
from clearhead.view.spectral_reasons import give_reasons

HEAD = {
    "verdict": "sparse, separated",
    "n_firings": 1200,
    "n_sink": 30,
    "sparsity": 0.1812,
    "n_recon": 3.0,
    "cancellation": 1.234,
    "degenerate": 0,
    "rank": 4,
    "sigma": [4.0, 3.0, 2.0, 1.0],
}


def control(name, *, effect=0.2, low=0.1, q=0.001):
    return {"control": name, "sparsity": 0.1812 + effect, "effect": effect, "low": low, "high": effect + 0.1, "q": q}


def test_reasons_name_what_is_separated_and_what_is_not():
    controls = [control("gauge"), control("span", effect=0.01, low=-0.02, q=0.4), control("untrained", q=None)]
    counted, separation, made_of = give_reasons(HEAD, controls)
    assert counted == "1,200 firings measured; 30 more on the first token left out."
    assert separation == (
        "S is 0.18 on average, clearly lower than under gauge (0.38) and untrained (0.38), not clearly lower than "
        "under span (0.19)."
    )
    assert made_of == "The typical firing is reached with 3 modes, and Σ|c| is 1.23 times |Σc|."


def test_a_large_q_is_not_separated():
    assert "not clearly lower than under gauge" in give_reasons(HEAD, [control("gauge", q=0.06)])[1]


@pytest.mark.parametrize("name", ["gauge", "span", "shuffle"])
def test_a_missing_q_is_no_test(name):
    controls = [control("gauge"), control("span"), control("shuffle")]
    controls = [row | {"q": None} if row["control"] == name else row for row in controls]
    said = give_reasons(HEAD, controls)[1]
    assert said.endswith(f", not tested against {name} (0.38).")
    assert name not in said.split("not tested")[0]


@pytest.mark.parametrize("name", ["subspace", "untrained"])
def test_few_draws_are_judged_by_their_interval(name):
    bases = [control("gauge"), control("span")]
    assert (
        f"clearly lower than under gauge (0.38), span (0.38) and {name} (0.38)."
        in give_reasons(HEAD, [*bases, control(name, q=None)])[1]
    )
    assert f"not clearly lower than under {name}" in give_reasons(HEAD, [*bases, control(name, low=-0.1, q=None)])[1]


def test_controls_that_were_not_run_are_named():
    assert give_reasons(HEAD, [])[1] == "S is 0.18 on average, not tested against gauge and span."
    assert give_reasons(HEAD, [control("gauge"), control("untrained", q=None)])[1] == (
        "S is 0.18 on average, clearly lower than under gauge (0.38) and untrained (0.38), not tested against span."
    )


def test_few_firings_are_not_compared():
    assert give_reasons(HEAD | {"verdict": TOO_FEW}, [control("gauge")])[1] == "S is 0.18 on average."


def test_heads_without_firings_say_why_there_are_no_numbers():
    nothing = HEAD | dict.fromkeys(("sparsity", "n_recon", "cancellation"))
    assert give_reasons(nothing | {"n_firings": 0, "n_sink": 1}, []) == [
        "1 firing, all on the first token and left out, so no number is given."
    ]
    assert give_reasons(nothing | {"n_firings": 0, "n_sink": 0}, []) == [
        "No query gave one key more than the threshold of its attention, so there is nothing to decompose."
    ]


def test_damaged_spectra_are_named():
    said = give_reasons(HEAD | {"degenerate": 2, "rank": 3}, [])[-2:]
    assert said == [
        "2 of 4 modes are too close to a neighbour to tell apart.",
        "The query–key product has rank 3 of 4.",
    ]


def test_every_verdict_of_the_lens_is_drawn_and_explained():
    assert set(VERDICTS) == set(verdicts.VERDICTS)
    assert TOO_FEW in VERDICTS and set(JUDGED) < set(VERDICTS)
    assert JUDGED_BY == verdicts.JUDGED_BY
    assert len({style.mark for style in VERDICTS.values()}) == len(VERDICTS)
    assert all(len(style.meaning) > 20 for style in VERDICTS.values())


def test_controls_keep_their_order_and_unknown_ones_follow():
    assert order_controls({"untrained", "zeta", "gauge", "alpha"}) == ["gauge", "untrained", "alpha", "zeta"]
    assert list(CONTROLS) == ["gauge", "span", "subspace", "shuffle", "untrained"]


@pytest.mark.parametrize("words", ["1/r for one mode", "0.41 with a flat spectrum, less", "does not start near 1"])
def test_the_range_of_s_is_explained(words):
    assert words in EXPLANATIONS["sparsity"]
