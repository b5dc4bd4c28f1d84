"""`clearhead view` chooses the page by what the atlas holds."""

import pytest

from clearhead import cli
from tests.view.synthetic_atlas import write_synthetic_atlas
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
