"""The page in a real browser: it opens without a sound, shows tokens as text, and does what a reader asks of it."""

import pytest

from clearhead.atlas.read import Atlas
from clearhead.view.visible import visible
from tests.view.conftest import HEADS, Visit
from tests.view.synthetic_atlas import HOSTILE

pytestmark = pytest.mark.browser


def listed(desk):
    return desk.tab.locator(".rows .row .name").evaluate_all("rows => rows.map(row => row.firstChild.textContent)")


def count(desk):
    return int(desk.tab.locator(".found [role=status]").text_content().split()[0].replace(",", ""))


@pytest.fixture
def fresh_list(desk):
    desk.tab.evaluate("document.getElementById('reset').click()")
    desk.tab.select_option("#sort", "max_activation")
    return desk


def test_opens_quietly_and_asks_nobody(desk, phone):
    for visit in (desk, phone):
        visit.open("lorsa.12.3")
        visit.tab.wait_for_selector(".aside .js-plotly-plot .main-svg", state="attached")
        assert visit.troubles == []
        assert visit.tab.title() == "synthetic-135m · clearhead"
    phone.open("lorsa.12.8")


def test_says_where_the_numbers_come_from(desk):
    assert "Synthetic numbers for tests" in desk.texts("#provenance")[0]
    assert "</script><b>note</b>" in desk.texts("#provenance")[0]
    desk.tab.click("#to-about")
    assert "3f8e1c5a9b7d2e4f60718293a4b5c6d7e8f90123456789abcdef0123456789ab" in desk.texts("#about dl")[0]
    desk.tab.click("#about button")
    assert not desk.tab.locator("#about").is_visible()


def test_hostile_tokens_are_text(desk):
    desk.open("lorsa.12.0")
    desk.tab.check("#whole")
    shown = desk.tab.locator(".example").first.locator(".token").all_text_contents()
    assert {visible(token) for token in HOSTILE} <= set(shown)
    inside = "#view :is(script, img, b.note, iframe, object), #list :is(script, img)"
    assert desk.tab.locator(inside).count() == 0
    assert desk.troubles == []
    desk.tab.uncheck("#whole")


def test_an_example_shows_its_tokens_in_order(desk, atlas_path):
    rows = Atlas(atlas_path).sql(
        "select * from examples where unit_id = 'lorsa.12.4' and category = 'quantile' order by rank"
    )
    desk.open("lorsa.12.4")
    desk.tab.click("[data-category=quantile]")
    desk.tab.check("#whole")
    for number, row in enumerate(rows):
        card = desk.tab.locator(".example").nth(number)
        inside = card.locator(".token:not(.elsewhere)").all_text_contents()
        assert inside == [visible(token) for token in row["tokens"]]
    desk.tab.uncheck("#whole")
    desk.tab.click("[data-category=top]")


def test_hover_draws_one_arc_per_source(desk, atlas_path):
    atlas = Atlas(atlas_path)
    desk.open("lorsa.12.7")
    rows = atlas.sql(
        "select p.keys, p.weights from patterns p join examples e using (example_id) "
        "where e.unit_id = 'lorsa.12.7' and category = 'top' order by rank"
    )
    for number in (0, 2, 1):
        desk.tab.locator(".example").nth(number).hover()
        card = desk.tab.locator(".example").nth(number)
        assert "active" in card.get_attribute("class")
        assert card.locator(".arcs path").count() == len(rows[number]["keys"])
        assert card.locator(".arcs path.subtracts").count() == sum(weight < 0 for weight in rows[number]["weights"])
        assert card.locator(".token:is(.adds, .subtracts)").count() == len(rows[number]["keys"])
        assert card.locator(".token.query").count() == 1
    assert desk.tab.locator(".arcs path").count() == len(rows[1]["keys"])


def test_first_example_is_drawn_without_hover(phone, atlas_path):
    phone.open("lorsa.12.8")
    keys = Atlas(atlas_path).sql(
        "select p.keys from patterns p join examples e using (example_id) "
        "where e.unit_id = 'lorsa.12.8' and category = 'top' and rank = 0"
    )[0]["keys"]
    assert phone.tab.locator(".example").first.locator(".arcs path").count() == len(keys)


def test_sources_carry_their_sign_in_text(desk):
    desk.open("lorsa.12.7")
    for colour, sign in (("adds", "+"), ("subtracts", "−")):
        written = desk.texts(f".source .{colour}")
        assert written and all(text.startswith(sign) and text.endswith("%") for text in written)
    assert all(text.startswith("+") for text in desk.texts(".logits .raised li > span:last-child"))
    assert all(text.startswith("−") for text in desk.texts(".logits .lowered li > span:last-child"))


def test_gap_opens_the_whole_context(desk):
    desk.open("lorsa.12.9")
    desk.tab.locator(".gap").first.click()
    opened = desk.tab.locator(".example.active")
    assert opened.locator(".token:not(.elsewhere)").count() == 64
    assert opened.locator(".gap").count() == 0
    assert opened.locator(".arcs path").count() > 0
    assert desk.tab.locator(".gap").count() > 0


@pytest.mark.parametrize("column", ["rate", "participation_routing", "logit", "index"])
def test_sorting(fresh_list, atlas_path, column):
    fresh_list.tab.select_option("#sort", column)
    order = "asc" if column == "index" else "desc"
    by = "(select max(e.logit) from (select unnest(raised) as e))" if column == "logit" else column
    rows = Atlas(atlas_path).sql(
        f"select index from units where kind = 'lorsa' order by {by} {order} nulls last, index limit 8"
    )
    assert listed(fresh_list)[:8] == [f"12.{row['index']}" for row in rows]
    fresh_list.tab.click("#direction")
    assert listed(fresh_list)[:8] != [f"12.{row['index']}" for row in rows]


def test_filters(fresh_list, atlas_path):
    atlas, tab = Atlas(atlas_path), fresh_list.tab
    tab.select_option("#state", "dead")
    assert count(fresh_list) == atlas.sql("select count(*) as n from units where dead")[0]["n"] > 0
    tab.select_option("#state", "alive")
    tab.select_option("#group", "3")
    assert count(fresh_list) == atlas.sql('select count(*) as n from units where not dead and "group" = 3')[0]["n"] > 0
    tab.select_option("#group", "")
    total = 0
    for spread in ("spanning", "single"):
        tab.select_option("#spread", spread)
        total += count(fresh_list)
    assert total == atlas.sql("select count(*) as n from units where not dead")[0]["n"]
    tab.select_option("#spread", "")
    tab.select_option("#host", "4")
    hosted = (
        "select count(*) as n from units where not dead and list_position(share_output, list_max(share_output)) = 5"
    )
    assert count(fresh_list) == atlas.sql(hosted)[0]["n"] > 0
    tab.click("#reset")
    assert count(fresh_list) == HEADS


def test_search(fresh_list, atlas_path):
    tab = fresh_list.tab
    tab.fill("#search", "ORCHARD")
    rows = Atlas(atlas_path).sql(
        "select distinct unit_id from (select unit_id, unnest(raised).token as token from units union all select "
        "unit_id, tokens[position - start + 1] from examples where category = 'top') where token ilike '%orchard%'"
    )
    assert count(fresh_list) == len(rows) > 0
    tab.fill("#search", "lorsa.12.7")
    assert listed(fresh_list) == ["12.7"]
    tab.fill("#search", "12.7")
    assert count(fresh_list) > 1
    tab.fill("#search", "<img")
    assert 0 < count(fresh_list) < HEADS
    tab.fill("#search", "no such token anywhere")
    assert count(fresh_list) == 0
    assert fresh_list.texts(".rows .none") == ["No head fits. Clear the filters or search for part of a token."]
    tab.fill("#search", "")


def test_original_heads_are_a_kind_of_their_own(fresh_list):
    fresh_list.tab.select_option("#kind", "head")
    assert listed(fresh_list) == [f"12.{head}" for head in range(9)]
    assert fresh_list.texts(".found [role=status]") == ["9 Attention heads"]
    fresh_list.open("head.12.4")
    assert fresh_list.texts(".unit h1") == ["Attention head 12.4"]
    assert fresh_list.troubles == []
    fresh_list.tab.click("#reset")
    assert fresh_list.texts(".found [role=status]") == [f"{HEADS} Lorsa heads"]


def test_only_rows_in_sight_exist(fresh_list):
    assert 8 < fresh_list.tab.locator(".row").count() < 40 < HEADS
    fresh_list.tab.evaluate("document.querySelector('.rows').scrollTop = 1e6")
    fresh_list.tab.wait_for_selector(f".row[aria-posinset='{HEADS}']")


def test_deep_link_opens_the_head(browser, page_path):
    opened = Visit(browser, page_path, at="lorsa.12.23")
    opened.tab.wait_for_selector(".example.active")
    assert opened.texts(".unit h1") == ["Lorsa head 12.23"]
    assert opened.texts(".row.chosen .name")[0].startswith("12.23")
    opened.tab.locator(".siblings a").first.click()
    opened.wait("document.querySelector('.unit h1').textContent !== 'Lorsa head 12.23'")
    opened.tab.go_back()
    opened.tab.wait_for_selector(".unit h1 code:text-is('12.23')")
    assert opened.troubles == []
    opened.context.close()


def test_unknown_link_says_so(desk):
    desk.tab.evaluate("location.hash = 'lorsa.99.1'")
    desk.tab.wait_for_selector(".summary")
    assert "There is no head ‘lorsa.99.1’ on this page" in desk.texts(".notice")[0]


def test_qk_group_lists_the_siblings(desk, atlas_path):
    desk.open("lorsa.12.11")
    siblings = Atlas(atlas_path).sql(
        'select index from units where "group" = (select "group" from units where unit_id = \'lorsa.12.11\') '
        "and unit_id <> 'lorsa.12.11'"
    )
    links = desk.tab.locator(".panel:not(.family) .siblings a").evaluate_all("links => links.map(link => link.hash)")
    assert sorted(links) == sorted(f"#lorsa.12.{row['index']}" for row in siblings)


def test_dead_head_says_that_there_is_nothing(desk):
    desk.open("lorsa.12.20")
    assert desk.texts(".examples .none") == [
        "This head was never active on the tokens analysed, so there is nothing to show."
    ]
    assert "dead" in desk.texts(".title .tags")[0]


def test_summary_charts_lead_to_the_list(desk):
    desk.tab.evaluate("location.hash = 'summary'")
    desk.tab.wait_for_selector(".charts .js-plotly-plot .main-svg", state="attached")
    assert desk.texts(".charts h3") == [
        "Loss when the layer is replaced?",
        "Error by position?",
        "How often units are active?",
        "Units by original head?",
        "Live and dead units by QK group?",
        "All live units?",
        "All metrics",
    ]
    assert "20.8 %" in desk.texts(".figures")[0]


def test_keyboard(desk):
    tab = desk.tab
    desk.open("lorsa.12.3")
    tab.evaluate("document.activeElement.blur()")
    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.id") == "search"
    tab.keyboard.press("Escape")
    tab.keyboard.press("j")
    desk.wait("location.hash !== '#lorsa.12.3'")
    tab.keyboard.press("k")
    tab.wait_for_selector(".unit h1 code:text-is('12.3')")
    tab.wait_for_selector(".example.active")
    tab.locator(".example").first.focus()
    tab.keyboard.press("ArrowDown")
    assert tab.evaluate("[...document.querySelectorAll('.example')].indexOf(document.activeElement)") == 1
    second = tab.locator(".example").nth(1)
    assert second.locator(".arcs path").count() > 0
    tab.keyboard.press("ArrowRight")
    assert second.locator(".arcs path:not(.faded)").count() == 1
    assert tab.locator("#spoken").text_content().endswith("%")
    tab.locator(".rows").focus()
    tab.keyboard.press("End")
    tab.wait_for_selector(f".row.chosen[aria-posinset='{HEADS}']")


def test_explanations_open_on_hover_and_on_focus(desk):
    desk.open("lorsa.12.3")
    for act in ("hover", "focus"):
        getattr(desk.tab.locator(".figures .help").first, act)()
        assert desk.tab.locator("#tip").text_content().startswith("Share of the held-out tokens analysed")
        assert desk.tab.locator("#tip").is_visible()
        desk.tab.keyboard.press("Escape")
        assert not desk.tab.locator("#tip").is_visible()


# tables in a region that scrolls by itself (.scroll) may be wider than the screen
PAST_THE_EDGE = """
    [...document.querySelectorAll('#view *')]
        .filter(node => !node.closest('svg, .siblings, .list-of, .token-pill, .token.long, .scroll'))
        .filter(node => node.getBoundingClientRect().right > innerWidth + 1)
        .map(node => node.className)
"""


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (420, 900), (330, 700)])
@pytest.mark.parametrize("place", ["lorsa.12.0", "summary"])
def test_nothing_overflows_sideways(phone, width, height, place):
    phone.tab.set_viewport_size({"width": width, "height": height})
    phone.tab.evaluate("place => { location.hash = place; }", place)
    phone.tab.wait_for_selector(".summary" if place == "summary" else ".example.active")
    phone.tab.wait_for_selector(".js-plotly-plot .main-svg", state="attached")
    # charts follow a new width a moment later
    fits = "['html', '#view', '#list'].map(s => document.querySelector(s)).every(e => e.scrollWidth <= e.clientWidth)"
    phone.wait(fits)
    assert phone.tab.evaluate(PAST_THE_EDGE) == []
    assert phone.troubles == []
    phone.tab.set_viewport_size({"width": 420, "height": 900})


def test_narrow_screen_shows_list_or_view(phone):
    assert not phone.tab.locator("#list").is_visible()
    phone.tab.click("#to-list")
    assert phone.tab.locator("#list").is_visible() and not phone.tab.locator("#view").is_visible()
    phone.tab.locator(".row").nth(2).click()
    phone.tab.wait_for_selector(".example.active")
    assert not phone.tab.locator("#list").is_visible()


def luminance(colour):
    red, green, blue = (int(part) / 255 for part in colour.strip("rgb()").split(","))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


COLOUR = """
    name => {
        const probe = document.createElement("i");
        probe.style.color = `var(${name})`;
        document.body.append(probe);
        const value = getComputedStyle(probe).color;
        probe.remove();
        return value;
    }
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_schemes(desk, scheme):
    desk.tab.emulate_media(color_scheme=scheme)
    desk.open("lorsa.12.7")
    panel = luminance(desk.tab.evaluate(COLOUR, "--panel"))
    assert (panel > 0.5) == (scheme == "light")
    for name in ("--ink", "--muted", "--accent", "--plus", "--minus"):
        text = luminance(desk.tab.evaluate(COLOUR, name))
        assert (max(text, panel) + 0.05) / (min(text, panel) + 0.05) >= 4.5, name
    muted = desk.tab.evaluate(COLOUR, "--muted")
    desk.wait(f"getComputedStyle(document.querySelector('.js-plotly-plot text')).fill === '{muted}'")
    desk.tab.emulate_media(color_scheme="light")


def test_scheme_can_be_chosen(phone):
    for expected in ("rgb(244, 246, 249)", "rgb(14, 18, 24)"):
        phone.tab.click("#theme")
        assert phone.tab.evaluate("getComputedStyle(document.body).backgroundColor") == expected
