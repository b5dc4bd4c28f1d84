"""`clearhead spectral trace` at toy size: what it writes, what it prints, what it refuses."""

import dataclasses
import json

import pytest

from clearhead import cli
from clearhead.config import SpectralTrace
from clearhead.configfile import from_file
from clearhead.errors import ClearheadError
from clearhead.units import Graph

TEXT = "Once upon a time there was a little girl named Lily. She"
SMALL = ["spectral", "trace", "--model", "clearhead-tiny", "--device", "cpu"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("trace")


@pytest.fixture(scope="module")
def traced(place):
    out = place / "prompt"
    command = [*SMALL, "--prompt", TEXT, "--answer", " was", "--wrong", " and", "--depth", "2", "--out", str(out)]
    assert cli.main(command) == 0
    return out


def test_a_prompt_leaves_a_graph_and_its_numbers(traced):
    assert {path.name for path in traced.iterdir() if not path.name.startswith(".")} == {
        "config.json",
        "env.json",
        "graph.json",
        "interventions.json",
        "summary.json",
    }
    graph = Graph.from_dict(json.loads((traced / "graph.json").read_text()))
    assert graph.provenance.prompt == TEXT and graph.provenance.model == "clearhead-tiny"
    assert {"edge", "mode", "logit"} <= {unit.kind for unit in graph.units}
    summary = json.loads((traced / "summary.json").read_text())
    assert summary["prompts_traced"] == 1 and summary["logit_difference"] > 0
    assert sum(summary["carried_by"].values()) == pytest.approx(summary["logit_difference"], rel=1e-3)
    assert from_file(traced) == SpectralTrace(
        model="clearhead-tiny", device="cpu", prompt=TEXT, answer=" was", wrong=" and", depth=2, out=traced
    )


def test_interventions_have_their_controls_beside_them(traced):
    written = json.loads((traced / "interventions.json").read_text())
    kinds = {(effect["side"], effect["scope"], effect["amount"]) for effect in written["effects"]}
    assert kinds == {(s, c, a) for s in ("query", "key") for c in ("local", "global") for a in (-1, 1)}
    for effect in written["effects"]:
        assert len(effect["weight"]["controls"]) == len(effect["difference"]["controls"]) == 20
    local = [effect for effect in written["effects"] if effect["scope"] == "local" and effect["amount"] < 0]
    threshold = 2.5 / 20
    assert all(effect["weight"]["changed"] < threshold <= effect["weight"]["clean"] for effect in local)
    assert len(written["summary"]) == 8 and all(part["prompts"] == 1 for part in written["summary"])


def test_the_table_names_readers_writers_and_effects(place, capsys):
    assert cli.main([*SMALL, "--prompt", TEXT, "--no-boost", "--out", str(place / "again")]) == 0
    shown = capsys.readouterr().out
    assert "' She'→" in shown and " query ← " in shown and "modes " in shown
    assert "query side, local, removed" in shown and "doubled" not in shown
    rows = [line for line in shown.splitlines() if "side, " in line]
    assert [", global," in row for row in rows] == ["stream: cosine 0." in row for row in rows]
    assert "beyond every control" in shown and str(place / "again") in shown


def test_a_firing_can_be_the_start(place, traced):
    seed = json.loads((traced / "interventions.json").read_text())["effects"][0]["firing"]
    out = place / "firing"
    command = [*SMALL, "--prompt", TEXT, "--firing", ".".join(map(str, seed)), "--firings", "0", "--out", str(out)]
    assert cli.main(command) == 0
    graph = Graph.from_dict(json.loads((out / "graph.json").read_text()))
    assert graph.units[0].id == f"edge.{seed[0]}.{seed[1]}.{seed[3]}@{seed[2]}"
    assert not any(unit.kind == "logit" for unit in graph.units)
    assert json.loads((out / "summary.json").read_text())["logit_difference"] is None


def test_a_task_leaves_one_graph_per_prompt_and_counts_what_it_left_out(place, capsys):
    file = place / "girls.jsonl"
    base = {"corrupt": TEXT, "template": "girl", "labels": {}}
    items = [
        base | {"clean": TEXT, "answers": [" was"], "wrong_answers": [" and"]},
        base | {"clean": TEXT, "answers": [" and"], "wrong_answers": [" was"]},
        base | {"clean": TEXT, "answers": [" was"], "wrong_answers": [" the"]},
        base | {"clean": TEXT, "answers": [" the"], "wrong_answers": [" was"]},
        base | {"clean": TEXT, "answers": [" antidisestablishment"], "wrong_answers": [" and"]},
    ]
    file.write_text("".join(json.dumps(item) + "\n" for item in items))
    out = place / "task"
    command = [*SMALL, "--task", str(file), "--no-boost", "--depth", "1", "--out", str(out)]
    assert cli.main([*command, "--firings", "0"]) == 0
    assert cli.main(command) == 2
    assert "(firings: 0 -> 1)" in capsys.readouterr().err
    (out / "config.json").unlink()
    (out / "graphs" / "0009.json").write_text("{}")  # of an earlier run
    assert cli.main(command) == 0
    assert sorted(path.name for path in (out / "graphs").iterdir()) == ["0000.json", "0002.json"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["prompts_traced"] == 2
    assert summary["prompts_left_out"] == {
        "the model does not prefer the answer": 2,
        "an answer of several tokens": 1,
    }
    assert all(part["weight"]["low"] is not None for part in summary["interventions"])
    assert "in 2 of 2" in capsys.readouterr().out


def test_dry_runs_say_how_much_work_it_is_and_write_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*SMALL, "--prompt", "a b", "--dry-run"]) == 0
    assert "runs/trace-clearhead-tiny-a-b\n" in capsys.readouterr().out
    assert cli.main([*SMALL, "--prompts", "5", "--firings", "2", "--no-boost", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "runs/trace-clearhead-tiny-ioi" in shown and "169" in shown  # 1 + 2 firings, 2 sides, 2 scopes, 21 rows
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt": "a", "task": "ioi"}, "exclude each other"),
        ({"prompt": " "}, "give a text"),
        ({"answer": " b"}, "it belongs to a --prompt"),
        ({"firing": "1.2.3.0"}, "it belongs to a --prompt"),
        ({"prompt": "a", "wrong": " b"}, "give --answer too"),
        ({"prompt": "a", "prompts": 3}, "--prompts means nothing here: --prompt is one text; leave out --prompts"),
        ({"task": "x.jsonl", "prompts": 3}, "all prompts of the file are traced"),
        ({"depth": 0}, "above 0"),
        ({"draws": 19}, "noise"),
        ({"firings": -1}, "0 or a positive"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, says):
    with pytest.raises(ClearheadError, match=says):
        dataclasses.replace(SpectralTrace(), **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--answer", " and", "--wrong", " was"], "does not prefer the answer"),
        (["--answer", " antidisestablishment"], "an answer of several tokens"),
        (["--firing", "1.0.40.2"], "there is no firing"),
        (["--firing", "1.2.17.1"], "take a stronger one"),
        (["--firing", "one"], "give layer.head.query.key"),
    ],
)
def test_prompts_that_lead_nowhere_are_one_message(options, says, tmp_path, capsys):
    assert cli.main([*SMALL, "--prompt", TEXT, *options, "--out", str(tmp_path / "x")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "x" / "summary.json").exists()


def test_after_a_prompt_that_leads_nowhere_the_directory_is_free(tmp_path, capsys):
    command = [*SMALL, "--prompt", TEXT, "--firings", "0", "--depth", "1", "--out", str(tmp_path / "x")]
    assert cli.main([*command, "--answer", " and", "--wrong", " was"]) == 2
    assert cli.main([*command, "--answer", " was", "--wrong", " and"]) == 0
    assert cli.main([*command, "--answer", " was", "--wrong", " the"]) == 2
    assert "(wrong:  and ->  the)" in capsys.readouterr().err
