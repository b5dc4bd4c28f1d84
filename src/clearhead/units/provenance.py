"""Provenance: where a graph's numbers come from, enough to compute them again.

It names and carries; nothing here looks up a version or reads a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from clearhead.errors import CorruptFileError, UnknownNameError


@dataclass(frozen=True)
class Provenance:
    """Where a graph's numbers come from: enough to compute them again."""

    model: str
    protocol: str
    """What a weight means and how it was measured."""
    prompt: str = ""
    token_ids: tuple[int, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    parents: tuple["Provenance", ...] = ()
    """Provenance of the graphs this one was computed from."""

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`; raises `UnknownNameError` for an entry that does not exist."""
        if not isinstance(entries, Mapping):
            raise CorruptFileError(f"provenance is a table of names and values; got {type(entries).__name__}")
        known = {f.name for f in fields(cls)}
        for name in entries:
            if name not in known:
                raise UnknownNameError("provenance entry", name, known)
        for name in ("model", "protocol"):
            if name not in entries:
                raise CorruptFileError(f"provenance without {name!r}; has {', '.join(sorted(entries)) or 'nothing'}")
        types = {"model": str, "protocol": str, "prompt": str, "token_ids": list | tuple, "versions": Mapping}
        for name, kind in {**types, "seed": int | None, "parents": list | tuple}.items():
            if name in entries and not isinstance(entries[name], kind):
                raise CorruptFileError(f"provenance has {name} = {entries[name]!r}, which is of another type")
        return cls(
            **{
                **entries,
                "token_ids": tuple(entries.get("token_ids", ())),
                "parents": tuple(cls.from_dict(parent) for parent in entries.get("parents", ())),
            }
        )
