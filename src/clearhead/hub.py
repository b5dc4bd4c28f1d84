"""Where clearhead keeps what it downloads and builds, and whether it may use the network."""

import os
from pathlib import Path


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
