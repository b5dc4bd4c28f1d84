"""Where clearhead keeps what it downloads and builds, and whether it may use the network.

What is built in the cache is a folder that appears whole or not at all: `build_once` makes it beside its final name
and renames it, and one process builds while the others wait. Nothing here downloads: the builders do.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from clearhead.errors import ClearheadError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the operating system answers when a disk, a quota or a file is full."""


def cache_dir() -> Path:
    """The user's cache: $CLEARHEAD_CACHE, else $XDG_CACHE_HOME/clearhead, else ~/.cache/clearhead."""
    given = os.environ.get("CLEARHEAD_CACHE")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "clearhead"


def offline() -> bool:
    """True when CLEARHEAD_OFFLINE or HF_HUB_OFFLINE is set to anything but 0 or the empty string."""
    return any(os.environ.get(name, "") not in ("", "0") for name in ("CLEARHEAD_OFFLINE", "HF_HUB_OFFLINE"))


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return the folder `target`, calling `build(folder)` to fill it when it does not exist yet.

    `build` gets an empty folder beside `target`, renamed to `target` when it returns; whatever it raises leaves no
    trace. A second process that asks for the same folder waits for the first. Raises `ClearheadError` when the disk
    is full.
    """
    if target.is_dir():
        return target
    with _locked(target):
        if target.is_dir():
            return target
        # the lock is ours, so an unfinished folder belongs to a process that died
        aside = target.with_name(f".{target.name}.part")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        try:
            build(aside)
            aside.rename(target)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise ClearheadError(
                f"no space left on the disk that holds {target.parent}; {target.name} was not built. "
                f"Free some space, or point CLEARHEAD_CACHE at another disk, then repeat the command."
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return target


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the operating system's lock for `target`; it is released when the process ends, however it ends."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(target.with_name(f".{target.name}.lock"), os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
