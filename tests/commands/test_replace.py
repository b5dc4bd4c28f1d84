"""`clearhead replace` at toy size."""

import json

import pytest

from clearhead import cli
from clearhead.config import Replace
from clearhead.errors import ClearheadError
from tests.commands.test_trace import SMALL, transcoder

__all__ = ["transcoder"]


def test_replacing_leaves_a_curve_and_scores(transcoder, tmp_path, capsys):
    out = tmp_path / "run"
    sizes = ["--tokens", "64", "--context", "32", "--prompts", "1", "--prompt-tokens", "8", "--units", "4"]
    assert cli.main(["replace", *SMALL, "--dictionaries", str(transcoder), *sizes, "--out", str(out)]) == 0
    summary, curve = (json.loads((out / name).read_text()) for name in ("summary.json", "curve.json"))
    assert [point["last"] for point in curve["curve"]] == ["", "mlp.0"]
    assert summary["ce_replaced"] == curve["curve"][1]["ce"] > summary["ce_clean"]
    assert 0 < summary["replacement_score"] < 1 and summary["prompts"] == 1
    printed = capsys.readouterr().out
    assert "mlp.0" in printed and "ce recovered" in printed


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, "name at least one"),
        ({"dictionaries": ("a",), "context": 2}, "at least 3"),
        ({"dictionaries": ("a",), "tokens": 5}, "at least one block"),
        ({"dictionaries": ("a",), "prompt_tokens": 500}, "the tokens of a block"),
    ],
)
def test_options_that_mean_nothing_are_refused(changed, says):
    with pytest.raises(ClearheadError, match=says):
        Replace(**changed)


def test_a_dry_run_says_how_many_forwards_it_takes(tmp_path, capsys):
    assert cli.main(["replace", *SMALL, "--dictionaries", str(tmp_path), "--dry-run"]) == 0
    assert "1 + 3" in capsys.readouterr().out
