"""The spectral page in a real browser: it opens without a sound, shows tokens as text, and works by keyboard."""

import pytest

from clearhead.atlas.read import Atlas
from clearhead.atlas.write import AtlasWriter
from clearhead.view.page import write_page
from clearhead.view.spectral_figures import gaussian_sparsity
from clearhead.view.visible import visible
from tests.view.conftest import Visit
from tests.view.synthetic_spectral_atlas import make_hostile, write_synthetic_spectral_atlas
from tests.view.test_page import PAST_THE_EDGE

pytestmark = pytest.mark.browser

LAYERS, HEADS, FIRINGS = 4, 6, 20


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    where = tmp_path_factory.mktemp("spectral") / "atlas"
    return write_synthetic_spectral_atlas(where, layers=LAYERS, heads=HEADS, firings=FIRINGS)


@pytest.fixture(scope="module")
def atlas(path):
    return Atlas(path)


@pytest.fixture(scope="module")
def page(path):
    return write_page(path, path.parent / "page.html")


@pytest.fixture(scope="module")
def visit(browser, page):
    opened = Visit(browser, page)
    yield opened
    opened.context.close()


def head(visit, layer, number):
    visit.go(f"head.{layer}.{number}", f".head h1 code:text-is('{layer}.{number}')")
    visit.tab.wait_for_selector(".firings header")


def count(visit):
    return int(visit.tab.locator(".found [role=status]").text_content().split()[0])


def firings_of(atlas, layer, number, *, sink=False):
    return atlas.sql(
        "select f.*, p.tokens from firings f join prompts p using (prompt) "
        "where layer = ? and head = ? and sink = ? order by attention desc",
        [layer, number, sink],
    )


def test_opens_quietly_in_every_view(visit):
    for address, selector in (
        ("head.0.0", ".aside .js-plotly-plot .main-svg"),
        ("mode.0.0.3", ".mode-bar.chosen"),
        ("layer.2", ".layer .grid"),
        ("summary", ".summary .js-plotly-plot .main-svg"),
    ):
        visit.go(address, selector)
        assert visit.troubles == []
    assert visit.tab.title() == "synthetic-spectral · clearhead"
    assert "ioi" in visit.texts("#provenance")[0] and "</script><b>note</b>" in visit.texts("#provenance")[0]


def test_map_has_a_cell_per_head_and_is_walked_by_keys(visit):
    visit.go("summary", ".map .grid")
    cells = visit.tab.locator(".map .cell")
    assert cells.count() == LAYERS * HEADS
    assert visit.texts(".map .cell")[:5] == ["●", "◐", "○", "▾", ""]
    assert visit.tab.locator(".map .cell[tabindex='0']").count() == 1
    cells.first.focus()
    for key in ("ArrowRight", "ArrowDown", "End", "ArrowLeft"):
        visit.tab.keyboard.press(key)
    label = visit.tab.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label.startswith("head 1.4: sparse, separated, S 0.")
    visit.tab.keyboard.press("Enter")
    visit.tab.wait_for_selector(".head h1 code:text-is('1.4')")


def test_map_can_be_coloured_by_a_number(visit, atlas):
    visit.go("summary", ".map .grid")
    visit.tab.select_option("#map-by", "under_gauge")
    rows = atlas.sql("select sparsity from controls where control = 'gauge' and layer = 0 order by head")
    shown = [text for text in visit.texts(".map .cell")[:HEADS] if text]
    assert shown == [f"{row['sparsity']:.2f}".lstrip("0") for row in rows]
    assert visit.tab.locator(".map .scale").count() == 1
    visit.tab.select_option("#map-by", "verdict")


def test_verdicts_of_the_map_lead_to_the_list(visit, atlas):
    visit.go("summary", ".map .grid")
    visit.tab.locator(".legend.verdicts button", has_text="not separated").click()
    expected = atlas.sql("select count(*) as n from spectra where verdict = 'not separated'")[0]["n"]
    assert count(visit) == expected > 0
    assert set(visit.texts(".row .tag.verdict")) == {"○not separated"}
    visit.tab.click("#reset")


def test_list_sorts_filters_and_finds(visit, atlas):
    def names(n):
        rows = visit.tab.locator(".rows .row .name").evaluate_all("rows => rows.map(row => row.firstChild.textContent)")
        return rows[:n]

    def ordered(by):
        rows = atlas.sql(f"select layer, head from spectra order by {by}, layer, head limit 5")
        return [f"{row['layer']}.{row['head']}" for row in rows]

    assert names(5) == ordered("sparsity nulls last")
    visit.tab.select_option("#sort", "induction")
    assert names(5) == ordered("induction desc")
    visit.tab.select_option("#sort", "sparsity")
    visit.tab.select_option("#fires", "no")
    assert count(visit) == atlas.sql("select count(*) as n from spectra where n_firings = 0")[0]["n"] > 0
    visit.tab.click("#reset")
    visit.tab.fill("#search", "2.3")
    assert names(3) == ["2.3"]
    token = atlas.sql("select query_tokens from modes where layer = 0 and head = 0 order by share desc limit 1")
    visit.tab.fill("#search", visible(token[0]["query_tokens"][0]["token"]).strip() or " ")
    assert "0.0" in names(24)
    visit.tab.click("#reset")


def test_head_says_its_verdict_and_stands_beside_its_controls(visit, atlas):
    head(visit, 0, 0)
    (row,) = atlas.sql("select * from spectra where layer = 0 and head = 0")
    controls = atlas.sql("select * from controls where layer = 0 and head = 0")
    assert visit.texts(".reasons")[0].startswith("Sparse, separated. S is below both rotated bases")
    assert f"S is {row['sparsity']:.2f} on average, clearly lower than under gauge" in visit.texts(".reasons")[0]
    table = visit.tab.locator(".controls-table tbody tr")
    assert table.first.locator("td").first.text_content() == f"{row['sparsity']:.2f}"
    assert table.count() == 1 + len(controls)
    for control in controls:
        line = table.filter(has=visit.tab.locator(f"th:text-is('{control['control']}')"))
        assert line.locator("td").first.text_content() == f"{control['sparsity']:.2f}"
        assert line.locator("td").nth(1).text_content().startswith(f"+{control['effect']:.2f} (")
    assert visit.texts(".modes .nothing") == ["no token nearer than chance"]
    visit.wait("document.querySelector('.aside .js-plotly-plot .legendtext') !== null")
    assert visit.texts(".aside .js-plotly-plot .legendtext") == ["products of Gaussians with this spectrum"]
    points = visit.tab.locator(".aside .js-plotly-plot .scatterlayer .point")
    visit.wait("document.querySelector('.aside .js-plotly-plot .scatterlayer .point') !== null")
    assert points.count() > len(controls)


def test_the_dotted_line_stands_at_the_head_s_own_reference(visit, atlas):
    places = []
    for number in (0, 1):
        head(visit, 0, number)
        visit.wait("document.querySelector('.aside .js-plotly-plot')?.layout?.shapes?.length === 2")
        places.append(visit.tab.evaluate("document.querySelector('.aside .js-plotly-plot').layout.shapes[1].x0"))
    rows = atlas.sql("select sigma from spectra where layer = 0 and head < 2 order by head")
    assert places == pytest.approx([gaussian_sparsity(row["sigma"]) for row in rows], rel=1e-3)


def test_a_head_of_few_controls_shows_those(browser, tmp_path):
    path = write_synthetic_spectral_atlas(tmp_path / "atlas", layers=1, controls=("gauge", "shuffle", "untrained"))
    opened = Visit(browser, write_page(path, tmp_path / "page.html"), ready=".map .grid")
    assert not any("span" in text for text in opened.texts(".row .does"))
    head(opened, 0, 0)
    assert opened.texts(".reasons")[0].startswith("Not compared. Sparsity cannot be judged")
    assert opened.texts(".controls-table tbody th") == ["this head", "gauge", "shuffle", "untrained"]
    assert opened.troubles == []
    opened.context.close()


def test_a_basis_by_offset_says_so_and_gives_no_sides(browser, path, tmp_path):
    turned = write_synthetic_spectral_atlas(tmp_path / "atlas", layers=1, basis="offset")
    opened = Visit(browser, write_page(turned, tmp_path / "page.html"), ready=".map .grid")
    head(opened, 0, 0)
    assert "basis by offset" in opened.texts(".head .tag")
    assert set(opened.texts(".modes .nothing")) == {"differs with the offset"}
    assert not any("along" in text or "against" in text for text in opened.texts(".modes"))
    assert opened.troubles == []
    opened.context.close()


def test_a_firing_shows_its_text_its_key_and_its_signed_bars(visit, atlas):
    head(visit, 0, 1)
    visit.tab.check("#whole")
    visit.tab.wait_for_selector(".firing .arcs path")
    for number, row in enumerate(firings_of(atlas, 0, 1)[:4]):
        card = visit.tab.locator(".firing").nth(number)
        tokens = [visible(token) for token in row["tokens"]]
        assert card.locator(".token").all_text_contents() == tokens
        assert card.locator(".token.query").all_text_contents() == [tokens[row["query"]]]
        if row["key"] != row["query"]:
            assert card.locator(".token.key").all_text_contents() == [tokens[row["key"]]]
        assert card.locator(".arcs path").count() == 1
        bars = card.locator(".mode-bar")
        signs = [value < 0 for value in row["contributions"]]
        assert bars.count() == len(signs) + 1
        assert [("subtracts" in bars.nth(at).get_attribute("class")) for at in range(len(signs))] == signs
        written = [bars.nth(at).locator("button").inner_text().split("\n")[0] for at in range(len(signs))]
        assert [text[0] for text in written] == ["−" if sign else "+" for sign in signs]
        assert f"N_recon {row['n_recon']}" in card.locator(".facts").text_content()
    visit.tab.uncheck("#whole")


def test_a_mode_picks_out_its_firings(visit, atlas):
    head(visit, 0, 0)
    rows = [row for row in firings_of(atlas, 0, 0) if 3 in row["modes"]]
    visit.tab.locator(".modes button[data-mode='3']").click()
    visit.tab.wait_for_selector(".mode-bar.chosen")
    assert visit.tab.locator(".firing").count() == min(len(rows), 16)
    assert f"{len(rows)} firings with mode 3 among the largest." in visit.texts(".firings .shown")[0]
    strongest = max(rows, key=lambda row: abs(row["contributions"][row["modes"].index(3)]))
    first = visit.tab.locator(".firing").first
    assert first.locator(".place").text_content().startswith(f"{strongest['query']} ← {strongest['key']}")
    visit.tab.locator(".mode-bar.chosen button").first.click()
    visit.tab.wait_for_selector(".firings:not(:has(.mode-bar.chosen))")
    visit.tab.locator(".firing [data-mode='0']").first.click()
    visit.tab.wait_for_selector(".mode-bar.chosen [data-mode='0']")
    assert visit.tab.locator("#by-mode").input_value() == "0"


def test_sink_firings_are_shown_apart(visit, atlas):
    head(visit, 0, 2)
    sinks = firings_of(atlas, 0, 2, sink=True)
    places = visit.texts(".firing .place")
    assert places and not any(" ← 0," in place for place in places)
    visit.tab.locator(".tabs button", has_text="On the first token").click()
    visit.tab.wait_for_selector(".firing:nth-child(1) .place:has-text('← 0,')")
    assert visit.tab.locator(".firing").count() == len(sinks) > 0
    visit.tab.locator(".tabs button", has_text="Firings").click()
    # a head that looks at the first token only opens there
    head(visit, 0, 3)
    assert visit.tab.locator(".tabs button").first.is_disabled()
    assert all(" ← 0," in place for place in visit.texts(".firing .place"))
    assert visit.texts(".figures .value")[0].strip() == "–"


def test_a_silent_head_says_so(visit):
    head(visit, 0, 4)
    assert visit.texts(".firings .none") == ["No query gave one key more than the threshold of its attention."]
    assert visit.tab.locator(".controls-table").count() == 0
    assert visit.troubles == []


def test_hostile_tokens_are_text(visit, atlas):
    (row,) = atlas.sql("select layer, head from firings where prompt = 0 and not sink order by attention desc limit 1")
    head(visit, row["layer"], row["head"])
    visit.tab.check("#whole")
    visit.tab.wait_for_selector(".firing .arcs path")
    shown = set(visit.tab.locator(".firing .token").all_text_contents())
    assert {visible(token) for token in make_hostile()} <= shown
    assert visit.tab.locator("#view :is(script, img, b.note, iframe), #list :is(script, img)").count() == 0
    assert any("</script>" in name for name in visit.texts(".firing .from"))
    visit.tab.uncheck("#whole")
    assert visit.troubles == []


def test_a_layer_shows_what_its_heads_share(visit, atlas):
    visit.go("layer.1", ".layer .grid")
    assert visit.texts(".layer h3")[1:] == ["What they read: query side?", "What they read: key side?"]
    pairs = atlas.sql("select count(*) as n from shared_modes where layer = 1 and side = 'key'")[0]["n"]
    key = visit.tab.locator(".layer .grid").nth(1)
    assert key.locator("button").count() == 2 * pairs
    assert key.locator("button").filter(has_text="1.00").count() == 12
    assert "8 modes of this layer read nearly the same pair" in visit.texts(".reasons")[0]
    visit.tab.locator(".moves button").nth(1).click()
    visit.tab.wait_for_selector(".layer h1:text-is('Layer 2')")


def test_unknown_addresses_say_so(visit):
    for address in ("head.9.9", "layer.77", "mode.0.0", "layer.x"):
        visit.go(address, ".notice")
        assert f"There is no head ‘{address}’ on this page" in visit.texts(".notice")[0]
        visit.go("head.0.0", ".head")


def test_explanations_give_the_range_of_s(visit):
    head(visit, 0, 0)
    visit.tab.locator(".figures .help").first.focus()
    said = visit.tab.locator("#tip").text_content()
    assert "1/r for one mode" in said and "0.41 with a flat spectrum" in said and "does not start near 1" in said
    visit.tab.keyboard.press("Escape")


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (420, 900), (330, 700)])
@pytest.mark.parametrize("place", ["head.0.1", "layer.0", "summary"])
def test_nothing_overflows_sideways(visit, width, height, place):
    visit.tab.set_viewport_size({"width": width, "height": height})
    visit.tab.evaluate("document.body.dataset.panel = 'view'")
    visit.go(place, {"head.0.1": ".firing", "layer.0": ".layer .grid", "summary": ".map .grid"}[place])
    fits = "['html', '#view', '#list'].map(s => document.querySelector(s)).every(e => e.scrollWidth <= e.clientWidth)"
    visit.wait(fits)
    past = PAST_THE_EDGE.replace("'svg, ", "'svg, .grid-frame, .wide-table, ")
    assert visit.tab.evaluate(past) == []
    visit.tab.set_viewport_size({"width": 1400, "height": 900})


def test_a_thinned_page_says_so(browser, path, tmp_path):
    whole = path.parent / "page.html"
    small = write_page(path, tmp_path / "small.html", max_megabytes=(whole.stat().st_size - 4_000) / 1e6)
    opened = Visit(browser, small)
    said = opened.texts(".notice")[0]
    assert said.startswith("To stay small this page holds at most 8 firings of each head, evenly from the strongest")
    opened.go("head.0.0", ".firings .shown")
    assert "firings are held here." in opened.texts(".firings .shown")[0]
    assert opened.troubles == []
    opened.context.close()


def test_heads_alone_open_quietly(browser, atlas, tmp_path):
    rows = atlas.sql("select * from spectra where layer = 0 order by head")
    with AtlasWriter(tmp_path / "atlas", about={}) as writer:
        writer.append("spectra", {name: [row[name] for row in rows] for name in rows[0]})
    opened = Visit(browser, write_page(tmp_path / "atlas", tmp_path / "page.html"), ready=".map .grid")
    opened.go("head.0.0", ".firings header")
    assert opened.texts(".firings .none") == ["The atlas holds no firing of this head."]
    opened.go("layer.0", ".layer .notice")
    assert not any("NaN" in text or "undefined" in text for text in opened.texts("#view, #list"))
    assert opened.troubles == []
    opened.context.close()
