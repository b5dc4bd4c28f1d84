"""`clearhead view` chooses the page by what the run holds."""

import pytest

from clearhead import cli
from clearhead.runs import write_json
from clearhead.units.bundle import save_graph
from tests.view.synthetic_atlas import write_synthetic_atlas
from tests.view.synthetic_graph import synthetic_graph
from tests.view.synthetic_spectral_atlas import write_synthetic_spectral_atlas


@pytest.mark.parametrize(
    ("write", "held", "items"),
    [
        (lambda path: write_synthetic_spectral_atlas(path, layers=1, prompts=1, firings=2), "heads", "Heads"),
        (lambda path: write_synthetic_atlas(path, heads=12, groups=2, blocks=2), "units", "Units"),
    ],
)
def test_page_follows_the_atlas(tmp_path, capsys, write, held, items):
    write(tmp_path / "run" / "atlas")
    assert cli.main(["view", str(tmp_path / "run"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert held in shown and str(tmp_path / "run" / "page.html") in shown
    assert not (tmp_path / "run" / "page.html").exists()
    assert cli.main(["view", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"page: {tmp_path / 'run' / 'page.html'}\n"
    assert f'aria-label="{items}"' in (tmp_path / "run" / "page.html").read_text()


@pytest.mark.parametrize("folder", [".", "graph"])
def test_a_graph_has_a_page_beside_it(tmp_path, capsys, folder):
    run = tmp_path / "run"
    save_graph(synthetic_graph(n_features=20, n_edges=40), run / folder)
    assert cli.main(["view", str(run), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "graph" in shown and not (run / "page.html").exists()
    assert cli.main(["view", str(run)]) == 0
    assert capsys.readouterr().out == f"page: {run / 'page.html'}\n"
    assert "graph of 33 units and 40 edges" in (run / "page.html").read_text()


def test_a_graph_in_one_file_has_a_page_of_its_name(tmp_path, capsys):
    write_json(tmp_path / "ioi.json", synthetic_graph(n_features=20, n_edges=40).to_dict())
    assert cli.main(["view", str(tmp_path / "ioi.json")]) == 0
    assert (tmp_path / "ioi.html").exists()
    (tmp_path / "bad.json").write_text('{"format": 2}')
    assert cli.main(["view", str(tmp_path / "bad.json")]) != 0
    assert "bad.json" in capsys.readouterr().err


def test_two_graphs_share_a_page_and_other_runs_do_not(tmp_path, capsys):
    for name, seed in (("dense", 0), ("sparse", 1)):
        save_graph(synthetic_graph(n_features=20, n_edges=40, seed=seed), tmp_path / name)
    page = tmp_path / "both.html"
    assert cli.main(["view", str(tmp_path / "dense"), "--against", str(tmp_path / "sparse"), "--out", str(page)]) == 0
    assert '"names":["dense","sparse"]' in page.read_text()
    (tmp_path / "empty").mkdir()
    assert cli.main(["view", str(tmp_path / "dense"), "--against", str(tmp_path / "empty")]) != 0
    assert "holds no graph" in capsys.readouterr().err
    write_synthetic_atlas(tmp_path / "run" / "atlas", heads=12, groups=2, blocks=2)
    assert cli.main(["view", str(tmp_path / "run"), "--against", str(tmp_path / "dense")]) != 0
    assert "Leave out --against" in capsys.readouterr().err
