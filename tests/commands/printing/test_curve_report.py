"""`clearhead view` of circuit curves: the page of one run, and errors that name the file."""

import pytest

from clearhead import cli
from clearhead.commands.printing.curve_report import write_page
from clearhead.errors import ClearheadError
from clearhead.runs import write_json
from tests.view.synthetic_curves import synthetic_run


def write_run(path, model="dense", **changed):
    run = synthetic_run(model)
    path.mkdir()
    write_json(path / "config.json", {"schema": 1, "verb": "circuit curve"})
    each = {"name": model, "protocol": {**run.protocol, **changed}, "curves": run.curves, "scores": run.scores}
    write_json(path / "summary.json", {"model": model, "runs": [each], "overlap": {}})
    return path


def test_view_writes_the_page_of_curves(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert cli.main(["view", str(run)]) == 0
    assert capsys.readouterr().out == f"page: {run / 'page.html'}\n"
    assert 'aria-label="Curves"' in (run / "page.html").read_text()


def test_several_runs_are_named_on_one_page_and_must_be_of_one_task(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", "sparse")]
    text = write_page(runs, tmp_path / "page.html").read_text()
    assert "a, dense: exact, signed" in text and "b, sparse: exact, signed" in text
    with pytest.raises(ClearheadError, match="differ in their task: ioi and copy"):
        write_page([*runs, write_run(tmp_path / "c", task="copy")], tmp_path / "page.html")


def test_unfinished_and_damaged_runs_say_what_to_do(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    write_json(run / "summary.json", {"runs": [{"name": "x", "protocol": {}}]})
    assert cli.main(["view", str(run)]) != 0
    assert "lacks curves, scores" in capsys.readouterr().err
    (run / "summary.json").unlink()
    assert cli.main(["view", str(run)]) != 0
    assert "circuit curve --from" in capsys.readouterr().err
