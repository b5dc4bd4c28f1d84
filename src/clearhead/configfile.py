"""Reads a configuration back from what `Verb.to_dict` wrote, and compares it with that of a new run.

Nothing is dropped or guessed: an unknown key, a value of the wrong type and a newer schema are errors that name the
file, the nearest valid name, and the version of clearhead that wrote it. When `config.SCHEMA` is raised, the function
that carries an older file over belongs here, one per step.
"""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from clearhead.config import SCHEMA, VERBS, Verb
from clearhead.errors import ClearheadError, CorruptFileError, UnknownNameError, nearest
from clearhead.runs import read_json

BEGUN = {"config.json", "env.json", ".lock"}
"""What a run writes before it computes; a directory that holds no more than this has nothing to lose."""
STAMPS = ("schema", "verb", "clearhead")


def from_file(path: Path) -> Verb:
    """The configuration in `path`, which is a config.json or the run directory that holds one."""
    path = path / "config.json" if path.is_dir() else path
    return from_dict(read_json(path), path)


def from_dict(value: Any, source: str | Path = "the configuration") -> Verb:
    """The configuration that `Verb.to_dict` wrote; `source` names it in errors.

    Raises `UnknownNameError` for a key or a verb that does not exist, naming the nearest one and the version that
    wrote the file; `CorruptFileError` for a value of the wrong type, a missing one or a newer schema; and whatever
    `Verb.validate` raises.
    """
    if not isinstance(value, dict) or not isinstance(value.get("schema"), int):
        raise CorruptFileError(f"{source} is no clearhead configuration: it has no integer `schema`")
    wrote = f"{source} was written by clearhead {value.get('clearhead', 'of unknown version')}."
    if value["schema"] > SCHEMA:
        raise CorruptFileError(f"{wrote} It has schema {value['schema']}, this version reads up to {SCHEMA}.")
    name = value.get("verb")
    if name not in VERBS:
        raise UnknownNameError("verb", str(name), VERBS, wrote)
    cls = VERBS[name]
    hints = get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    given = {}
    for key, item in value.items():
        if key in STAMPS:
            continue
        if key not in fields:
            raise UnknownNameError("key", key, fields, wrote)
        given[key] = _checked(item, hints[key], f"{key} in {source}")
    missing = [key for key, field in fields.items() if key not in given and field.default is dataclasses.MISSING]
    if missing:
        raise CorruptFileError(f"{source} lacks {', '.join(missing)}. {wrote}")
    return cls(**given)


def differences(old: Verb, new: Verb, *, ignore: tuple[str, ...] = ()) -> list[str]:
    """The fields in which two configurations differ, each as `k: 64 -> 32`; fields named in `ignore` do not count."""
    before, after = old.to_dict(), new.to_dict()
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in before | after
        if key not in ("clearhead", *ignore) and before.get(key) != after.get(key)
    ]


def refuse_other_run(path: Path, config: Verb, ignore: tuple[str, ...] = ("out", "device")) -> None:
    """Raise `ClearheadError` where the config.json in `path` is that of another run; the same run may be made again.

    Fields named in `ignore` do not change what the run finds and may differ. A run that failed before it left anything
    is none.
    """
    if not (path / "config.json").exists() or {file.name for file in path.iterdir()} <= BEGUN:
        return
    earlier = from_file(path)
    if earlier.verb != config.verb:
        changed = [f"it is of `clearhead {earlier.verb}`"]
    else:
        changed = differences(earlier, config, ignore=ignore)
    if changed:
        raise ClearheadError(
            f"{path} holds another run ({'; '.join(changed)}); choose another directory with --out, or repeat the "
            f"settings of that run, which `--from {path}` reads"
        )


def refuse_other_verb(path: Path, config: Verb) -> None:
    """Raise `ClearheadError` where `path` holds a run of another verb, whose files this one's would replace.

    For verbs that may be repeated with other settings in the same directory.
    """
    if not (path / "config.json").exists():
        return
    earlier = from_file(path)
    if earlier.verb != config.verb:
        raise ClearheadError(f"{path} holds a run of `clearhead {earlier.verb}`; choose another directory with --out")


def _checked(value: Any, hint: Any, place: str) -> Any:
    """`value`, read from JSON, as the annotation `hint` wants it; raises `CorruptFileError` naming `place`."""
    options = _alternatives(hint)
    for option in options:
        if get_origin(option) is Literal and value in get_args(option):
            return value
        if option is Path and isinstance(value, str):
            return Path(value)
        if get_origin(option) is tuple and isinstance(value, list):  # of any number of one kind
            return tuple(_checked(item, get_args(option)[0], place) for item in value)
        if option is float and type(value) is int:
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
    names = [name for option in options for name in _names(option)]
    near = nearest(str(value), names)
    suggestion = f"; did you mean {near!r}?" if near else ""
    raise CorruptFileError(f"{place} is {value!r}, expected {' or '.join(names)}{suggestion}")


def _alternatives(hint: Any) -> list[Any]:
    if get_origin(hint) is Annotated:
        return _alternatives(get_args(hint)[0])
    if get_origin(hint) in (typing.Union, types.UnionType):
        return [option for part in get_args(hint) for option in _alternatives(part)]
    return [hint]


def _names(option: Any) -> list[str]:
    if get_origin(option) is Literal:
        return [str(name) for name in get_args(option)]
    return ["null" if option is types.NoneType else option.__name__]
