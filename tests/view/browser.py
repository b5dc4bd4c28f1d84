"""Finds a Chrome or Chromium that is already installed; the tests never download one."""

import os
import shutil
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PLACES = (
    "/usr/lib/chromium/chromium",
    "/snap/bin/chromium",
    "/opt/google/chrome/chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
QUIET = (
    "--no-sandbox",  # a container's root cannot use the sandbox; the pages are our own files
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
ADVICE = (
    "install one (Debian, Ubuntu: `apt install chromium`; macOS: `brew install --cask chromium`) or set "
    "CLEARHEAD_BROWSER to its path, then `make test`"
)


def installed_browser() -> Path | None:
    """The path in CLEARHEAD_BROWSER, else a known name in PATH, else a usual place; None without any."""
    named = os.environ.get("CLEARHEAD_BROWSER")
    if named:
        return Path(named) if Path(named).is_file() else None
    found = [path for name in NAMES if (path := shutil.which(name))]
    found += [place for place in PLACES if Path(place).is_file()]
    return Path(found[0]) if found else None
