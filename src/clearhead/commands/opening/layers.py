"""A directory with one run per layer: which runs it holds."""

from pathlib import Path

from clearhead.errors import ClearheadError


def runs_in(path: Path) -> list[Path]:
    """The runs in a directory of several layers, by layer; the path itself where it is a run, or holds none."""
    if (path / "config.json").exists():
        return [path]
    numbered = [folder for folder in path.glob("*") if folder.name.isdecimal() and (folder / "config.json").exists()]
    return sorted(numbered, key=lambda folder: int(folder.name)) or [path]


def refuse_several(path: Path) -> None:
    """Raise `ClearheadError` for a directory of several layers, where a verb takes the run of one."""
    runs = runs_in(path)
    if runs != [path]:
        raise ClearheadError(f"{path} holds a run for each of {len(runs)} layers; name one, as {runs[0]}")
