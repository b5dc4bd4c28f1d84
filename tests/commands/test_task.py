"""`clearhead task` at toy size: what it prints, writes and refuses."""

import pytest

from clearhead import cli
from clearhead.config import DescribeTask
from clearhead.errors import ClearheadError

SMALL = ["--model", "clearhead-tiny", "--device", "cpu"]


def test_a_task_is_measured_and_written_and_the_file_gives_the_same(tmp_path, capsys):
    file = tmp_path / "passkey.jsonl"
    assert cli.main(["task", "passkey", *SMALL, "--prompts", "8", "--out", str(file)]) == 0
    first = capsys.readouterr().out
    assert "mean corrupt difference" in first and "  passkey 3  2, " in first and "a prompt:" in first
    assert len(file.read_text().splitlines()) == 8 and str(file) in first
    assert cli.main(["task", str(file), *SMALL]) == 0
    assert capsys.readouterr().out == first.replace(f"prompts: {file}\n", "")


def test_refused_prompts_are_counted(tmp_path, capsys):
    file = tmp_path / "mine.csv"
    file.write_text("clean,corrupted,label\nfrom 1632 to 16,from 1601 to 16,32\nfrom 1695 to 16,from 1601 to 16,95\n")
    assert cli.main(["task", str(file), *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "a year that no greater or no smaller one can follow  1" in shown


def test_dry_runs_and_options(tmp_path, capsys):
    assert cli.main(["task", "pronoun", *SMALL, "--dry-run"]) == 0
    assert "64" in capsys.readouterr().out
    assert cli.main(["task", "pronouns", *SMALL, "--dry-run"]) == 2
    assert "did you mean 'pronoun'" in capsys.readouterr().err
    with pytest.raises(ClearheadError, match="--prompts means nothing here: all prompts of the file"):
        DescribeTask(task="x.csv", prompts=3)
    with pytest.raises(ClearheadError, match="ends in .jsonl"):
        DescribeTask(task="ioi", out=tmp_path / "x.json")
