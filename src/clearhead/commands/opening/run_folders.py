"""Which runs a directory holds: one per layer, or any."""

from pathlib import Path

from clearhead.errors import ClearheadError

DEPTH = 3
"""Folders that are looked through below one that holds runs."""


def run_folders(path: Path) -> list[Path]:
    """The directories of runs at a path, by name: itself and those in the folders below it.

    The folder of a dictionary or model has a config.json too, but no env.json.
    """
    below = [file.parent for depth in range(1, DEPTH + 1) for file in path.glob("*/" * depth + "config.json")]
    return [run for run in (path, *sorted(below)) if (run / "config.json").exists() and (run / "env.json").exists()]


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
