"""The command line: finds the verb, fills its configuration from `--from` and the options, runs it or prints its plan.

`clearhead VERB [options]`, where a verb is one or two words (`view`, `train lorsa`). The list of verbs and the help of
each verb need neither torch nor transformers; a verb's module under `clearhead.commands` is imported when it runs.
Exit status: 0 done, 2 an error of input (its message is on stderr), 130 interrupted.
"""

import dataclasses
import difflib
import errno
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

import clearhead
from clearhead.config import VERBS, Verb
from clearhead.configfile import from_file
from clearhead.errors import ClearheadError, UnknownNameError

UNUSABLE = (errno.EROFS, errno.ENAMETOOLONG)
"""Besides what has an exception of its own: a read-only file system, a name too long."""
FROM_HELP = "Start from the config.json of an earlier run (or its directory), all but --out; other options override it."
DRY_RUN_HELP = (
    "Print what would be done (derived values, parameters, memory, tokens, time) and write nothing. The time of a "
    "training is measured on a few steps, which are thrown away."
)


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit status."""
    try:
        return _run(list(sys.argv[1:] if args is None else args))
    except ClearheadError as error:
        sys.stderr.write(f"clearhead: {error}\n")
        return 2
    except (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        if error.filename is None:
            raise
        sys.stderr.write(f"clearhead: cannot use {str(error.filename)!r}: {error.strerror}; give another path\n")
        return 2
    except OSError as error:
        if error.errno not in UNUSABLE or error.filename is None:
            raise
        sys.stderr.write(f"clearhead: cannot use {str(error.filename)!r}: {error.strerror}; give another path\n")
        return 2
    except KeyboardInterrupt as stop:
        sys.stderr.write(f"\nclearhead: {str(stop) or 'interrupted; no file was left half-written'}\n")
        return 130


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        sys.stdout.write(overview())
        return 0
    if args[0] == "--version":
        sys.stdout.write(f"clearhead {clearhead.__version__}\n")
        return 0
    cls, rest = find_verb(args)
    if cls is None:
        sys.stdout.write(overview(args[0]))
        return 0
    config, dry_run = parse(cls, rest)
    command = importlib.import_module(f"clearhead.commands.{cls.verb.replace(' ', '_')}")
    if dry_run:
        from clearhead.commands.printing.table import show

        show(command.plan(config))
    else:
        command.run(config)
    return 0


def find_verb(args: Sequence[str]) -> tuple[type[Verb] | None, list[str]]:
    """The verb that `args` begins with, and what follows it; None for a bare group such as `train` or `train --help`.

    Raises `UnknownNameError`, naming the nearest verb.
    """
    for words in (2, 1):
        cls = VERBS.get(" ".join(args[:words]))
        if cls is not None:
            return cls, list(args[words:])
    group = [verb for verb in VERBS if verb.startswith(f"{args[0]} ")]
    if group and (len(args) == 1 or args[1] in ("-h", "--help")):
        return None, []
    given = " ".join(args[:2]) if group else max(" ".join(args[:2]), args[0], key=_likeness)
    raise UnknownNameError("verb", given, group or VERBS, "See `clearhead --help`.")


def _likeness(words: str) -> float:
    """How much `words` look like the verb they look most like."""
    return max(difflib.SequenceMatcher(None, words, verb).ratio() for verb in VERBS)


def parse(cls: type[Verb], args: list[str]) -> tuple[Verb, bool]:
    """The configuration that `args` describe, and whether only its plan is wanted.

    Raises `ClearheadError` when the file of `--from` belongs to another verb; exits with status 2 on unknown options,
    as tyro does.
    """
    source = _from_path(args)
    invocation = dataclasses.make_dataclass(
        cls.__name__,
        [
            ("source", Annotated[Path | None, tyro.conf.arg(name="from", help=FROM_HELP)], None),
            ("dry_run", Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help=DRY_RUN_HELP)], False),
        ],
        bases=(cls,),
        frozen=True,
        kw_only=True,
    )
    default: Any = tyro.MISSING_NONPROP
    if source is not None:
        earlier = from_file(source)
        if type(earlier) is not cls:
            raise ClearheadError(
                f"{source} configures `clearhead {earlier.verb}`, not `clearhead {cls.verb}`; "
                f"type: clearhead {earlier.verb} --from {source}"
            )
        # where the earlier run lies is no part of what it was
        elsewhere = {field.name: field.default for field in dataclasses.fields(cls) if field.name == "out"}
        default = invocation(**_fields(earlier, cls) | elsewhere)
    given = tyro.cli(invocation, prog=f"clearhead {cls.verb}", description=cls.__doc__, args=args, default=default)
    return cls(**_fields(given, cls)), given.dry_run


def _fields(config: Verb, cls: type[Verb]) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(cls)}


def overview(group: str = "") -> str:
    """The text of `clearhead --help`, or of one group of verbs."""
    shown = [cls for verb, cls in VERBS.items() if not group or verb.startswith(f"{group} ")]
    width = max(len(cls.verb) for cls in shown)
    lines = [f"  {cls.verb:<{width}}  {(cls.__doc__ or '').splitlines()[0]}" for cls in shown]
    return "\n".join(
        [
            f"usage: clearhead {group or 'VERB'}{' VERB' if group else ''} [options]",
            "",
            "Makes the attention of a pretrained causal language model readable.",
            "",
            *lines,
            "",
            "Every verb takes --help, --from CONFIG (an earlier run's config.json) and --dry-run.",
            "New here? `clearhead demo` trains, measures and shows a decomposition of one layer of a real model.",
            "",
        ]
    )


def _from_path(args: Sequence[str]) -> Path | None:
    """The value of `--from`, read before the options because it provides their defaults."""
    for index, word in enumerate(args):
        if word.startswith("--from="):
            return Path(word.removeprefix("--from="))
        if word == "--from" and index + 1 < len(args):
            return Path(args[index + 1])
    return None
