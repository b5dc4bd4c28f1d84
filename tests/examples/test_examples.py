"""Every example runs as a user would run it, at toy size, and prints what it says it prints."""

import json
import runpy
import sys
from pathlib import Path

import plotly.graph_objects as go
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_script_runs(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) >= 4 and "nan" not in printed


@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(notebook):
    cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells), "outputs are not committed"
    names: dict = {}
    shown = []
    for cell in cells:
        *body, last = "".join(cell["source"]).splitlines()
        code = "\n".join(body)
        try:
            value = compile(last, str(notebook), "eval")
        except SyntaxError:  # the cell's last line is no expression: nothing is displayed
            exec("\n".join([code, last]), names)
            continue
        exec(code, names)
        shown.append(eval(value, names))
    assert sum(isinstance(value, go.Figure) for value in shown) == 3
    assert shown[-1] < 1e-4  # contributions sum to the score
