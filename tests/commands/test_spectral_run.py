"""`clearhead spectral run` from texts to page, its plan, and what it refuses."""

import json
from pathlib import Path

import pytest

from clearhead import cli
from clearhead.atlas import Atlas
from clearhead.config import SpectralRun
from clearhead.runs import write_json


def run(*words):
    return cli.main(["spectral", "run", "--model", "clearhead-tiny", "--device", "cpu", *map(str, words)])


def test_a_prompt_becomes_an_atlas_numbers_and_a_page(tmp_path, capsys):
    out = tmp_path / "run"
    assert run("--prompt", "the old man and the sea and the old man and the sea", "--draws", 20, "--out", out) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["heads"] == 8 and sum(summary["verdicts"].values()) == 8
    assert {path.name for path in out.iterdir()} >= {"atlas", "config.json", "env.json", "summary.json", "page.html"}
    about = Atlas(out / "atlas").about
    assert about["lens"] == "spectral" and about["basis"] == "offset" and about["tokens"] == summary_tokens(out)
    printed = capsys.readouterr().out
    assert "heads by verdict" in printed and "against gauge" in printed and "page:" in printed
    assert cli.main(["view", str(out), "--out", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").stat().st_size > 1e6


def summary_tokens(out):
    return sum(len(row["tokens"]) for row in Atlas(out / "atlas").sql("select tokens from prompts"))


def test_a_text_without_controls(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("It was a bright cold day and the clocks were striking. " * 60)
    out = tmp_path / "run"
    assert run("--text", text, "--tokens", 256, "--context", 32, "--no-controls", "--out", out) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert "separated_share" not in summary and not any(name.startswith("control_") for name in summary)
    assert Atlas(out / "atlas").sql("select * from controls") == []
    assert "against" not in capsys.readouterr().out


def test_a_task_from_a_file(tmp_path):
    item = {
        "clean": "the old man and the old",
        "corrupt": "the old man and the new",
        "answers": [" man"],
        "wrong_answers": [" sea"],
        "template": "one",
        "labels": {"end": 3},
    }
    path = tmp_path / "mine.jsonl"
    rows = [item | {"answers": ["m"], "wrong_answers": ["s"], "corrupt": item["clean"], "labels": {}}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("--task", path, "--no-controls", "--out", tmp_path / "run") == 0


def test_a_plan_loads_no_weights_and_writes_nothing(tmp_path, capsys):
    assert run("--task", "ioi", "--out", tmp_path / "run", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "firings kept, at most  1,024" in printed and not (tmp_path / "run").exists()


def test_two_prompts_have_two_directories_and_another_run_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    one, two = (SpectralRun(model="clearhead-tiny", prompt=prompt) for prompt in ("The sea, again!", "The old sea"))
    assert one.directory() == Path("runs/spectral-clearhead-tiny-the-sea-again") != two.directory()
    one.directory().mkdir(parents=True)
    write_json(one.directory() / "config.json", two.to_dict())
    write_json(one.directory() / "summary.json", {})
    assert run("--prompt", "The sea, again!") == 2
    error = capsys.readouterr().err
    assert "holds another run (prompt: The old sea -> The sea, again!)" in error and "--out" in error
    assert {path.name for path in one.directory().iterdir()} == {"config.json", "summary.json"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "a", "--text", "b"], "--prompt and --text exclude each other"),
        (["--prompt", "a", "--tokens", "9"], "--tokens means nothing here: --prompt is one text and is read whole"),
        (["--prompt", "a", "--context", "9"], "leave out --context"),
        (["--prompt", "a", "--prompts", "9"], "leave out --prompts"),
        (["--task", "ioi", "--tokens", "9"], "the prompts of --task are read whole; leave out --tokens"),
        (["--task", "a.jsonl", "--prompts", "9"], "all prompts of the file are read; leave out --prompts"),
        (["--text", "b", "--prompts", "9"], "it is for a built-in --task; leave out --prompts"),
        (["--prompts", "9"], "it is for a built-in --task"),
        (["--no-controls", "--draws", "9"], "--no-controls compares with nothing; leave out --draws"),
        (["--no-controls", "--no-untrained"], "leave out --no-untrained"),
        (["--prompt", " "], "--prompt   is not possible: give a text"),
        (["--threshold", "0.4"], "give a share from 0.5"),
        (["--context", "1"], "needs at least 2 keys"),
        (["--context", "500"], "--context 500 is more than clearhead-tiny can see"),
        (["--draws", "0"], "--draws 0 is not possible"),
        (["--task", "nothing"], "task"),
        (["--prompt", "a"], "needs at least two keys"),
    ],
)
def test_what_cannot_be_done_is_said(words, message, tmp_path, capsys):
    assert run(*words, "--out", tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
