"""`clearhead explain` on planted atlases: results, a dry run, limits, comparison, refusals."""

import json

import pytest

from clearhead import cli
from clearhead.atlas import Atlas
from clearhead.config import Explain
from clearhead.errors import ClearheadError
from tests.explain.conftest import PLANTED, at_random, on_token
from tests.explain.server import Server


@pytest.fixture(scope="module")
def folder(write_planted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("verb")
    write_planted(folder / "heads" / "atlas", [on_token] * 6, seed=1)
    write_planted(folder / "features" / "atlas", [at_random] * 8, kind="sae", seed=2)
    write_planted(folder / "mixed" / "atlas", PLANTED)
    return folder


def summary_of(run):
    return json.loads((run / "explain" / "summary.json").read_text())


def test_heads_that_can_be_told_win_against_features_that_cannot(folder, capsys):
    heads, features = folder / "heads", folder / "features"
    assert cli.main(["explain", str(heads), "--against", str(features)]) == 2
    assert "holds no scores" in capsys.readouterr().err
    assert cli.main(["explain", str(features)]) == 0
    assert cli.main(["explain", str(heads), "--against", str(features)]) == 0
    summary = summary_of(heads)
    assert (summary["win"], summary["loss"], summary["tie"]) == (3, 0, 0)
    assert summary["explained"] == 6 and summary["detection_mean"] > 0.95 and summary["requests"] == 0
    assert "layer 3, detection: win (6 units a side" in capsys.readouterr().out
    rows = Atlas(heads / "atlas").sql("select * from explanations")
    assert len(rows) == 18 and {row["explanation"] for row in rows if "“the”" in row["explanation"]}


def test_units_are_drawn_or_named(folder):
    run = folder / "mixed"
    assert cli.main(["explain", str(run), "--unit", "lorsa.3.1", "lorsa.3.0", "--judge", "none"]) == 0
    rows = Atlas(run / "atlas").sql("select * from explanations order by unit_id")
    assert [(row["unit_id"], row["scorer"]) for row in rows] == [("lorsa.3.0", None), ("lorsa.3.1", None)]
    assert cli.main(["explain", str(run), "--units", "2", "--scorers", "fuzzing"]) == 0
    assert summary_of(run)["units"] == 2
    assert cli.main(["explain", str(run), "--unit", "lorsa.3.77"]) == 2


def test_a_model_at_an_endpoint_the_plan_the_limit_and_the_rest(folder, capsys, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_API_KEY", "secret")
    run = folder / "mixed"
    with Server() as server:
        words = [
            "explain",
            str(run),
            "--endpoint",
            server.url,
            "--explainer",
            "gpt",
            "--unit",
            "lorsa.3.0",
            "lorsa.3.1",
        ]
        words += ["--price-in", "1", "--price-out", "2", "--parallel", "1"]
        assert cli.main([*words, "--dry-run"]) == 0
        out = capsys.readouterr().out
        assert "estimated at 3.50 bytes per token" in out and not server.seen
        planned = int(next(line for line in out.splitlines() if line.startswith("  requests")).split()[1])
        assert cli.main([*words, "--max-requests", str(planned - 1)]) == 0
        assert "ended early: --max-requests" in capsys.readouterr().out
        assert len(server.seen) == planned - 1 and summary_of(run)["explained"] == 1
        assert cli.main(words) == 0
        summary = summary_of(run)
        assert len(server.seen) == planned and summary["answered_already"] == planned - 1
        assert summary["explained"] == 2 and summary["stopped"] is None and summary["failed"] == 0
        assert summary["cost"] == pytest.approx((100 * 1 + 10 * 2) / 1e6)
    files = "".join(path.read_text() for path in (run / "explain").glob("*.json*"))
    assert "secret" not in files


def test_ctrl_c_says_how_to_go_on(folder, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("clearhead.commands.explain.explain_units", interrupt)
    assert cli.main(["explain", str(folder / "mixed")]) == 130
    assert "the same command goes on from there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"judge": "gpt"}, "give --endpoint"),
        ({"endpoint": "http://a"}, "name its model"),
        ({"judge": "local"}, "give the model with --local"),
        ({"local": "smollm2"}, "add --judge local"),
        ({"explainer": "gpt", "endpoint": "http://a", "judge": "template"}, "the rule of its own"),
        ({"explainer": "none"}, "the name of a model"),
        ({"scorers": ("detection", "bogus")}, "give one or more of"),
        ({"judge": "gpt", "endpoint": "http://a", "max_cost": 1.0}, "give --price-in"),
        ({"max_requests": 3}, "costs nothing"),
        ({"parallel": 2}, "nothing is asked of an endpoint"),
        ({"judge": "none", "against": "x"}, "no scores to compare"),
        ({"unit": ("lorsa.1.2",), "units": 5}, "--unit names the units"),
        ({"units": 0}, "above 0"),
    ],
)
def test_what_no_run_could_mean_is_refused(options, said):
    with pytest.raises(ClearheadError, match=said):
        Explain(run="x", **options)
