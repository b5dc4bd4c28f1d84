"""The page of a fidelity report."""

from pathlib import Path
from typing import Any


def write_fidelity_page(out: Path, report: dict[str, Any]) -> Path:
    return out
