"""The errors users see: what was given, what was expected, what to type instead.

Every error a caller can cause derives from `ClearheadError`, so the command line prints its message and no
traceback; anything else that escapes is a defect of ours and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class ClearheadError(Exception):
    """An error caused by input: its text alone must tell the user what to change."""


class UnknownNameError(ClearheadError):
    """A name that does not exist, with the nearest names that do."""

    def __init__(self, what: str, given: str, valid: Iterable[str], hint: str = ""):
        valid = sorted(valid)
        near = nearest(given, valid)
        text = f"unknown {what} {given!r}"
        text += f"; did you mean {near!r}?" if near else "."
        shown = ", ".join(valid[:12]) + (", ..." if len(valid) > 12 else "")
        text += f" Valid: {shown}." if valid else " There are none."
        super().__init__(text + (f" {hint}" if hint else ""))


class CorruptFileError(ClearheadError):
    """A file on disk that is truncated, altered, or not what its name says."""


class NonFiniteError(ClearheadError):
    """NaN or infinity where numbers were expected; names the site, the batch and the position."""


def nearest(given: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to `given` by edit similarity, or None when nothing is close."""
    matches = difflib.get_close_matches(given, list(valid), n=1, cutoff=0.5)
    return matches[0] if matches else None
