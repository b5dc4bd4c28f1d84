"""Leaves out the browser tests where no Chrome or Chromium is installed, and says so in the very last line."""

import pytest

from tests.view.browser import ADVICE, installed_browser

LEFT_OUT = pytest.StashKey[int]()


def pytest_configure(config):
    config.stash[LEFT_OUT] = 0


def pytest_collection_modifyitems(config, items):
    if installed_browser() is not None:
        return
    left_out = [item for item in items if item.get_closest_marker("browser")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("browser")]
        config.stash[LEFT_OUT] = len(left_out)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    config = session.config
    if hasattr(config, "workeroutput"):  # a worker of pytest-xdist: only its controller may print
        config.workeroutput["left_out"] = config.stash[LEFT_OUT]
    result = yield
    if config.stash[LEFT_OUT]:
        terminal = config.pluginmanager.get_plugin("terminalreporter")
        terminal.write_line(
            f"{config.stash[LEFT_OUT]} browser tests were left out: no Chrome or Chromium found; {ADVICE}", yellow=True
        )
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    # every worker collects everything, so each reports the same number
    node.config.stash[LEFT_OUT] = max(node.config.stash[LEFT_OUT], node.workeroutput.get("left_out", 0))
