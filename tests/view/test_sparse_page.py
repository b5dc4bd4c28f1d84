"""The pages of a sparse model and of several: what they hold, what they say, and that a browser takes them."""

import json
from typing import Any

import pytest

from clearhead.view import sparse_figures, sparse_words
from clearhead.view.packing import unpack
from clearhead.view.sparse_frontier import HELP as FRONTIER_HELP
from clearhead.view.sparse_frontier import Point, sentences, write_frontier_page
from clearhead.view.sparse_page import telling_head, write_sparse_page
from clearhead.view.sparse_words import CONTROLS, HELP, outcome, verdict
from tests.view.conftest import Visit

HOSTILE = ["<script>alert(1)</script>", "</script><b>", "\u202eabc", "\u200b", " ", "\n", "x" * 90, "good"]
HEADS, LAYERS = 3, [0, 2]


def forms(hard, opened=None, base=None):
    return {"hard": hard, "opened": opened, "base": base}


@pytest.fixture
def numbers():
    """An evaluation with made-up numbers: layer 2 (the second of two with gates), head 1 is closed."""
    per_query = [[4.0, 2.0, 9.0], [1.0, 0.0, 0.25]]
    task = {"accuracy": 0.75, "mean_difference": -1.5, "top1": 0.5}
    return {
        "model": "runs/x/model",
        "base": "<b>base",
        "tokens": 640,
        "context": 64,
        "ce": {**forms(3.02, 3.05, 3.0), "sampled": 3.03, "sampled_by_seed": [3.03]},
        "ce_by_position": [
            {"first": 1, "last": 1, **forms(4.1, 4.2, 4.0)},
            {"first": 2, "last": 3, **forms(3.0, 3.1, 3.05)},
        ],
        "edges": {
            "share": 0.0833,
            "expected_share": 0.1,
            "per_query": 2.708,
            "expected_per_query": 3.0,
            "empty_rows": 0.3,
            "leak": 0.12,
        },
        "lengths": [
            {"length": n, "share": s, "per_query": e, "expected_per_query": e}
            for n, s, e in ((32, 0.1, 1.7), (64, 0.08, 2.7))
        ],
        "layers": LAYERS,
        "by_layer": {
            "share": [0.15, 0.01],
            "per_query": [5.0, 0.4],
            "empty_rows": [0.1, 0.5],
            "leak": [0.04, 0.2],
            "distance": [3.0, 8.0],
        },
        "by_head": {
            "share": [[value / 32.5 for value in row] for row in per_query],
            "per_query": per_query,
            "distance": [[1.0, 2.0, 3.0], [4.0, None, 6.0]],
        },
        "first_token": {
            "base": [0.5, 0.7],
            "opened": [0.5, 0.6],
            "before_gates": [0.5, 0.6],
            "after_gates": [0.1, None],
            "empty_rows": [0.1, 1.0],
        },
        "empty_tiles": {"16": [0.2, 0.9], "32": [0.0, 0.5]},
        "controls": {**dict.fromkeys(CONTROLS, 3.5), "hard": 3.1, "base": 3.08},
        "laid_out_tokens": 128,
        "induction": {"hard": {"first_half": 7.0, "second_half": 0.2}, "opened": None, "base": None},
        "tasks": {
            "copy": {"prompts": 8, "refused_prompts": {}, **forms(task, task, task)},
            "ioi": {"refused": "no <i>names</i>"},
        },
        "retrieval": {
            "passkey": [
                {"length": 1024, "refused": "too long"},
                {"length": 512, "depths": [0.0, 1.0], "prompts": 8, **forms({"exact": [1.0, 0.5]})},
            ],
            "needle": [],
        },
        "training": {
            "base": "<b>base",
            "tolerance": 0.03,
            "target": None,
            "control": "none",
            "seed": 0,
            "hard_from_tokens": 300,
            "constraint": "kl",
        },
        "model_note": "a model",
        "text": "books",
        "text_sha256": "0" * 64,
        "split": "held_out",
        "config": {},
        "environment": {},
    }


@pytest.fixture
def read():
    """One sentence of hostile tokens; heads read the first token, their own, all before them, or nothing."""
    size = len(HOSTILE)
    first, own, none = (["0:1000"] * size, [f"{i}:1000" for i in range(size)], [""] * size)
    dense = [" ".join(f"{key}:{1000 // (query + 1)}" for key in range(query + 1)) for query in range(size)]
    layers = [
        {"layer": 0, "model": [first, own, dense], "base": [dense] * HEADS},
        {"layer": 2, "model": [own, none, own[:3] + none[3:]], "base": [dense] * HEADS},
    ]
    return [{"tokens": HOSTILE, "layers": layers}]


METRICS = [
    {"step": 0, "tokens": 0, "base_ce": 3.0, "held_out_ce": 3.0, "held_out_edges": 0.99},
    {"step": 1, "tokens": 100, "ce": 3.1, "edges": 0.9, "open_edges": 0.91, "violation": -0.02, "multiplier": 10.0},
    {"step": 2, "tokens": 200, "ce": 3.1, "edges": 0.02, "open_edges": 0.03, "violation": 0.01, "multiplier": 1.0}
    | {"held_out_ce": 3.02, "held_out_edges": 0.02},
]


def index_of(page):
    text = page.read_text()
    start = text.index('id="index">') + len('id="index">')
    return json.loads(text[start : text.index("</script>", start)])


def part_of(page, name):
    text = page.read_text()
    start = text.index(f'id="{name}">') + len(f'id="{name}">')
    return unpack(text[start : text.index("</script>", start)])


def sections_of(page):
    return {section["title"]: section for section in index_of(page)["sections"]}


def test_every_number_is_explained_and_every_section_is_there(numbers, read, tmp_path):
    page = write_sparse_page(tmp_path / "page.html", numbers, read, METRICS)
    index = index_of(page)
    assert [tile["value"] for tile in index["tiles"]] == ["2.71", "8.3 %", "+0.0200", "30 %", "1", "12 %", "10 %"]
    assert all(HELP[tile["name"]] for tile in index["tiles"])
    sections = sections_of(page)
    assert [chart["name"] for chart in sections["Training"]["charts"]] == [
        "training_edges",
        "training_rise",
        "multiplier",
    ]
    assert [chart["name"] for chart in sections["How few edges"]["charts"]] == [
        "heads", "lengths", "by_layer", "distances", "empty_tiles",
    ]  # fmt: skip
    for section in sections.values():
        for chart in section["charts"]:
            assert chart["help"] == HELP[chart["name"]] and chart["data"]
    (controls,) = sections["Do these edges matter?"]["tables"]
    assert [row[0] for row in controls["rows"]] == ["hard gates", "dense base", *(w.label for w in CONTROLS.values())]
    assert controls["rows"][1][2] == "−0.0200" and controls["rows"][2][2] == "+0.4000"
    tasks, _, retrieval = sections["What it can still do"]["tables"]
    assert tasks["rows"][0][1:5] == ["8", "75 %", "75 %", "75 %"] and "no <i>names</i>" in tasks["rows"][1][5]
    assert retrieval["rows"][1][:5] == ["passkey", "512", "–", "75 %", "–"] and "too long" in retrieval["rows"][0][5]


def test_heads_and_edges_are_those_that_were_measured(numbers, read, tmp_path):
    page = write_sparse_page(tmp_path / "page.html", numbers, read, METRICS)
    heads = index_of(page)["heads"]
    assert heads["id"] == [f"head.{layer}.{head}" for layer in LAYERS for head in range(HEADS)]
    assert heads["per_query"][4] == 0 and heads["distance"][4] is None
    first = part_of(page, "layers-0")
    assert first[0][0]["model"] == [number for query in range(len(HOSTILE)) for number in (query, 0, 1000)]
    assert part_of(page, "layers-1")[1][0]["model"] == []


def test_the_head_shown_first_reads_with_the_fewest_of_its_edges_and_not_the_first_token_alone(numbers, read):
    assert telling_head(numbers, read) == [0, 1]  # not 0.0, whose edges all go to the first token
    layer = read[0]["layers"][1]
    layer["model"][2] = [f"{max(0, query - 1)}:500" if query < 5 else "" for query in range(len(HOSTILE))]
    assert telling_head(numbers, read) == [1, 2]  # five rows of eight read
    layer["model"][2][4] = ""
    assert telling_head(numbers, read) == [0, 1]
    assert telling_head(numbers, []) == [1, 1]  # without a sentence the sparsest


def test_words_follow_the_numbers(numbers):
    assert outcome(numbers) == ("within the tolerance", True)
    said = verdict(numbers)
    assert "2.71 of the 32.5 keys" in said[0] and "30 % of the rows" in said[0]
    assert "+0.0200 beside the dense base's; a rise of 0.03 was allowed" in said[1]
    assert "+0.0200, less than each of these" in said[2] and "12 %" in said[3]
    numbers["controls"]["top_probability_base"] = 3.09
    assert "training gains nothing over leaving edges out" in verdict(numbers)[2]
    numbers["ce"]["hard"] = 3.2
    assert outcome(numbers) == ("over the tolerance", False)
    numbers["training"] |= {"target": 3.19, "tolerance": 0.0}
    assert outcome(numbers) == ("over the allowed loss", False)
    assert "it was to reach 3.190" in verdict(numbers)[1]
    numbers["edges"]["leak"] = 0.0
    assert len(verdict(numbers)) == 3


def test_a_model_without_base_and_run_has_a_page_of_what_is_known(numbers, read, tmp_path):
    """What a folder gives that names no base: no comparison is drawn and none is made up."""
    numbers |= {"base": None}
    numbers["ce"]["base"] = numbers["controls"]["base"] = numbers["first_token"]["base"] = None
    numbers["controls"] |= {name: None for name in CONTROLS if name.endswith(("base", "renormalised"))}
    numbers["training"] |= {"tolerance": None, "hard_from_tokens": None}
    for layer in read[0]["layers"]:
        layer["base"] = None
    page = write_sparse_page(tmp_path / "page.html", numbers, read, [])
    index = index_of(page)
    assert index["outcome"]["text"] == "no tolerance known" and index["title"] == "runs/x/model, sparse"
    assert "rise" not in [tile["name"] for tile in index["tiles"]] and len(index["verdict"]) == 2
    sections = sections_of(page)
    assert "Training" not in sections and sections["What it costs"]["charts"] == []
    assert part_of(page, "layers-0")[0][0]["base"] is None


def test_a_training_to_a_fixed_loss_shows_losses_and_not_rises(numbers, read, tmp_path):
    numbers["training"] |= {"target": 3.1, "tolerance": 0.0, "constraint": "ce"}
    page = write_sparse_page(tmp_path / "page.html", numbers, read, METRICS)
    rise = sections_of(page)["Training"]["charts"][1]
    batch, held_out = rise["data"]
    assert batch["y"] == pytest.approx([3.08, 3.11]) and held_out["y"] == [3.0, 3.02]
    assert rise["title"] == "Loss and its limit" and rise["layout"]["shapes"][0]["y0"] == 3.1


def test_heads_are_coloured_by_logarithm_and_closed_ones_are_at_the_bottom():
    figure: Any = sparse_figures.heads([0, 1], [[100.0, 1.0], [0.0, 0.5]])
    (heat,) = figure.data
    assert (
        heat.z == ([2.0, 0.0], [-2.0, pytest.approx(-0.301, abs=1e-3)]) or [list(row) for row in heat.z][1][0] == -2.0
    )
    assert [list(row) for row in heat.text] == [["100", "1.0"], ["0", "0.5"]]


def test_a_few_outliers_leave_the_chart_and_the_limit_stays_in_it():
    values = [0.01] * 300 + [5.0]
    places = list(range(301))
    figure: Any = sparse_figures.training_rise((places, values), ([0], [0.0]), 0.03, None, "nats")
    low, high = figure.layout.yaxis.range
    assert low < 0.0 + 0.01 and 0.03 < high < 0.1


def test_shares_and_differences_are_written_for_a_reader():
    assert [sparse_words.share(value) for value in (0.5, 0.0123, 0.0, None)] == ["50 %", "1.2 %", "0 %", "–"]
    assert sparse_words.signed(-0.01234) == "−0.0123"


def point(run, kind="none", **values):
    known: dict[str, Any] = dict(
        zip(Point._fields, (run, kind, 0.03, 0, 1000, 4.0, 0.1, 0.02, 0.03, 0.1, 0.2, 0.05, 0.04), strict=True)
    )
    if kind != "none":
        known |= dict.fromkeys(("sampled_rise", "empty_rows", "leak", "top_in_row_base", "top_probability_base"))
    return Point(**known | values)


@pytest.fixture
def frontier_page(tmp_path):
    runs = [point("</script>a"), point("b", seed=1, per_query=6.0, rise=0.01), point("c", tolerance=0.1, per_query=1.0)]
    controls = [point("d", "dense", per_query=32.5, share=1.0, rise=-0.01), point("e", "random", rise=0.4)]
    shared = {
        "base": "tiny",
        "context": 64,
        "tokens": 640,
        "text": "books",
        "text_sha256": "0" * 64,
        "split": "held_out",
    }
    return write_frontier_page(tmp_path / "frontier.html", [*runs, *controls], shared)


def test_the_frontier_joins_means_and_marks_controls(frontier_page):
    index = index_of(frontier_page)
    assert [chart["name"] for chart in index["charts"]] == ["frontier", "controls", "tolerance", "held"]
    assert all(chart["help"] == FRONTIER_HELP[chart["name"]] for chart in index["charts"])
    first, second = index["charts"][:2]
    line = first["data"][0]
    assert (line["x"], line["y"]) == ([1.0, 5.0], [0.02, pytest.approx(0.015)])
    assert "random edges" not in [trace.get("name") for trace in first["data"]]
    assert {"sparse", "dense", "random edges", "base, top of row"} <= {trace.get("name") for trace in second["data"]}
    assert index["runs"]["kind"] == ["sparse"] * 3 + ["dense", "random"]


def test_the_frontier_says_a_line_per_tolerance():
    said = sentences([point("a"), point("b", per_query=6.0), point("c", "random", rise=0.4)])
    assert said[0] == "Tolerance 0.03 (2 runs): 5 ± 1.41 edges per query (10 %), rise +0.0200 ± 0.0000 nats."
    assert said[1] == "Trained under random edges, 4 per query: rise +0.4000 nats."


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (420, "dark")])
def test_the_page_opens_without_a_network_and_tokens_are_text(browser, numbers, read, tmp_path, width, scheme):
    page = write_sparse_page(tmp_path / "page.html", numbers, read, METRICS)
    visit = Visit(browser, page, width=width, scheme=scheme)
    tab = visit.tab
    assert visit.texts(".summary h1") == ["<b>base, sparse"]
    tab.wait_for_selector(".butterfly path")
    assert visit.texts(".chip") == [
        "<script>alert(1)</script>", "</script><b>", "⟨RLO⟩abc", "⟨ZWSP⟩", "␣", "↵", "x" * 90, "good",
    ]  # fmt: skip
    assert tab.locator(".butterfly .up path").count() == 8 and tab.locator(".pairs .pair").count() == 6
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.locator(".chip").last.focus()
    assert "‘good’ reads ‘good’ (itself) 100 %" in tab.locator(".tip").text_content()
    assert tab.locator(".butterfly.alone path.of").count() == 9
    visit.go("head.2.1", "h1:text-is('head 2.1')")
    assert tab.locator(".chip.silent").count() == 8 and tab.locator(".butterfly .up path").count() == 0
    visit.go("head.9.9", ".notice")
    assert visit.troubles == []
    visit.context.close()


@pytest.mark.browser
def test_a_head_of_the_map_opens_and_the_frontier_opens(browser, numbers, read, frontier_page, tmp_path):
    visit = Visit(browser, write_sparse_page(tmp_path / "page.html", numbers, read, METRICS))
    box = visit.tab.locator(".chart").filter(has=visit.tab.locator(".heatmaplayer .hm")).first
    box.scroll_into_view_if_needed()
    area = box.locator(".nsewdrag").bounding_box()
    visit.tab.mouse.move(area["x"] + area["width"] / 6, area["y"] + area["height"] / 4)
    visit.tab.mouse.click(area["x"] + area["width"] / 6, area["y"] + area["height"] / 4)
    visit.tab.wait_for_selector("h1:text-is('head 0.0')")
    assert visit.troubles == []
    visit.context.close()
    visit = Visit(browser, frontier_page)
    assert visit.tab.locator(".numbers tbody tr").count() == 5
    visit.go("run.0", ".title h1")
    assert visit.texts(".title h1") == ["</script>a"] and visit.troubles == []
    visit.context.close()
