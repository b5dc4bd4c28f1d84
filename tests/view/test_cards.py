"""Cards: what stands in the tables stands on the page, and what does not is left out."""

import pytest

from clearhead.atlas.read import Atlas
from clearhead.view.card_payload import PER_RELATION
from clearhead.view.packing import unpack
from clearhead.view.payload import build_payload
from clearhead.view.visible import visible
from tests.view.synthetic_atlas import HOSTILE


@pytest.fixture(scope="module")
def atlas(atlas_path):
    return Atlas(atlas_path)


@pytest.fixture(scope="module")
def payload(atlas):
    return build_payload(atlas, 1)


def card(payload, unit_id):
    place = payload.index["units"]["id"].index(unit_id)
    return [unit for part in payload.units for unit in unpack(part)][place]


def test_a_card_holds_what_the_tables_hold(atlas, payload):
    vocab, own = payload.index["vocab"], card(payload, "lorsa.12.4")
    rows = atlas.sql("select * from behaviours where unit_id = 'lorsa.12.4' order by score desc")
    named = [(payload.index["cards"]["behaviours"][b["name"]], b["found"]) for b in own["behaviours"]]
    assert named == [(row["behaviour"], row["found"]) for row in rows]
    reads = atlas.sql("select * from relations where unit_id = 'lorsa.12.4' and relation = 'reads' order by rank")
    assert len(reads) > PER_RELATION == len(own["relations"]["reads"])
    assert own["relations"]["reads"][2][0] == reads[2]["other"]
    assert vocab[own["relations"]["reads"][0][1]] == visible(HOSTILE[0])
    (trust,) = atlas.sql("select * from trust where unit_id = 'lorsa.12.4' and measure = 'host_share'")
    assert own["trust"]["host_share"] == pytest.approx(
        [trust["value"], trust["low"], trust["high"], trust["cases"]], rel=1e-3
    )
    assert [row[0] for row in own["interventions"]] == ["0", "2", "10", "mean"]
    assert own["interventions"][1] == ["2", 1.0, 0.9, 1.1, 1.5, -0.5, 0.25, 0.01]
    assert card(payload, "lorsa.12.9")["interventions"] == []
    assert list(payload.index["cards"]["families"][0]["trust"]) == ["causal_effect"]
    said = [(vocab[e["text"]], len(e["scores"])) for e in own["explanations"]]
    assert ("fires on ' said' and reads the name before it", 3) in said


def test_columns_of_the_list(atlas, payload):
    units, names = payload.index["units"], payload.index["cards"]["behaviours"]
    for row in atlas.sql("select unit_id, behaviour, found from behaviours")[::7]:
        place = units["id"].index(row["unit_id"])
        assert (names.index(row["behaviour"]) in units["behaves"][place]) == row["found"]
    (stable,) = atlas.sql("select value from trust where unit_id = 'lorsa.12.4' and measure = 'seed_stability'")
    assert units["stability"][units["id"].index("lorsa.12.4")] == pytest.approx(stable["value"], rel=1e-3)
    bare = units["id"].index("lorsa.12.1")
    assert (units["behaves"][bare], units["family"][bare], units["effect"][bare]) == ([], None, None)
    assert sum(count for *_, count, _ in payload.index["cards"]["found"]) == len(
        atlas.sql("select 1 from behaviours where found")
    )


@pytest.mark.browser
def test_a_card_is_drawn_and_hostile_words_are_text(desk, atlas):
    desk.open("lorsa.12.0")
    tested = atlas.sql("select score from behaviours where unit_id = 'lorsa.12.0' and score > 0.005")
    assert desk.tab.locator(".behaviours li").count() == len(tested) > 1
    found = atlas.sql("select behaviour from behaviours where unit_id = 'lorsa.12.0' and found")
    assert desk.tab.locator(".title .tag.behaviour").count() == len(found)
    assert desk.tab.locator(".relations").count() == 5
    assert any("<script>alert(1)</script>" in text for text in desk.texts(".explained .said"))
    assert desk.tab.locator(".trust [data-measure]").count() == 6
    assert "a new measure" in desk.texts(".trust")[0]
    assert desk.tab.locator("#view :is(script, img)").count() == 0
    assert desk.troubles == []


@pytest.mark.browser
def test_a_case_shows_its_query_and_its_key_and_the_rest_when_asked(desk, atlas):
    (longest, *_) = atlas.sql(
        "select unit_id from behaviours where found and len(tokens) > 200 and unit_id like 'lorsa%'"
    )
    desk.open(longest["unit_id"])
    case = desk.tab.locator(".behaviours .case").first
    assert case.locator(".key").count() == 1 and case.locator(".query").count() == 1
    shown = case.locator(".token").count()
    assert shown < 25 and case.evaluate("e => e.scrollHeight <= e.clientHeight")
    case.locator(".gap").first.click()
    assert case.locator(".token").count() == 206
    assert desk.troubles == []


@pytest.mark.browser
def test_interventions_stand_behind_the_line_of_trust(desk):
    desk.open("lorsa.12.4")
    desk.tab.locator(".trust .interventions summary").click()
    rows = desk.texts(".interventions tbody tr")
    assert len(rows) == 4 and rows[0].startswith("removed") and "−0.5" in rows[0]
    desk.open("lorsa.12.1")
    assert desk.tab.locator(".interventions").count() == 0
    assert desk.troubles == []


@pytest.mark.browser
def test_what_a_unit_lacks_is_left_out(desk):
    desk.open("lorsa.12.1")
    assert desk.tab.locator(".behaviours, .relations, .trust, .explained").count() == 0
    assert desk.troubles == []


@pytest.mark.browser
def test_the_summary_leads_from_a_behaviour_to_its_units(desk, atlas):
    desk.go("summary", ".summary .numbers")
    found = atlas.sql(
        "select behaviour, count(*) as n from behaviours where found and unit_id like 'lorsa%' "
        "group by behaviour order by n desc, behaviour"
    )
    desk.tab.locator(".summary .numbers button.link").filter(has_text=str(found[0]["n"])).first.click()
    shown = int(desk.tab.locator(".found [role=status]").text_content().split()[0])
    assert shown == found[0]["n"]
    desk.tab.evaluate("document.getElementById('reset').click()")
    desk.go("lorsa.12.0", ".family .siblings a")
    assert "1 token back" in desk.texts(".panel.family")[0]
