"""`clearhead steer` at toy size: predictions and measurements of a traced prompt, and what it refuses."""

import json

import pytest

from clearhead import cli
from clearhead.config import Steer
from clearhead.errors import ClearheadError
from clearhead.units.bundle import load_graph

TEXT = "Once upon a time there was a little girl"


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    out = tmp_path_factory.mktemp("trace") / "run"
    options = ["--model", "clearhead-tiny", "--device", "cpu", "--tables", "0", "--units", "1", "--out", str(out)]
    assert cli.main(["trace", TEXT, *options]) == 0
    return out


def test_units_of_a_graph_are_turned(traced, capsys):
    graph = load_graph(traced / "graph")
    mlp = next(unit for unit in graph.units if unit.kind == "mlp" and unit.layer == 1)
    assert cli.main(["steer", str(traced), "--turn", f"{mlp.id}=0", "--device", "cpu"]) == 0
    targets = json.loads((traced / "steered" / "summary.json").read_text())["targets"]
    assert set(targets) == {unit.id for unit in graph.units if unit.kind == "logit"}
    for name, row in targets.items():
        # what the last MLP writes is read by the final norm alone
        assert row["measured, everything held"] == pytest.approx(row["predicted"], abs=1e-3)
        assert row["measured, attention held"] == pytest.approx(row["predicted"], abs=1e-3)
        assert row["predicted"] == pytest.approx(-graph.weights_between(mlp, name), abs=1e-3)
    assert any(abs(row["measured, nothing held"] - row["predicted"]) > 1e-2 for row in targets.values())
    assert "predicted" in capsys.readouterr().out
    assert cli.main(["steer", str(traced), "--turn", f"{mlp.id}=0", "--dry-run"]) == 0


def test_bad_requests_are_refused(traced, capsys):
    for turn, message in ((["mlp.1@2"], "no unit with a factor"), (["mlp.1@2=nan"], "no unit with a factor")):
        with pytest.raises(ClearheadError, match=message):
            Steer(traced=traced, turn=tuple(turn))
    with pytest.raises(ClearheadError, match="names mlp.1@2 twice"):
        Steer(traced=traced, turn=("mlp.1@2=0", "mlp.1@2=1"))
    with pytest.raises(ClearheadError, match="give a unit and a factor"):
        Steer(traced=traced)
    assert cli.main(["steer", str(traced), "--turn", "mlp.7@2=0", "--device", "cpu"]) != 0
    assert "mlp.7@2" in capsys.readouterr().err
