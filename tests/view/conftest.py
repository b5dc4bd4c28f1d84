import time

import pytest

from clearhead.view.page import write_page
from tests.view.browser import QUIET, installed_browser
from tests.view.synthetic_atlas import write_synthetic_atlas
from tests.view.synthetic_cards import add_cards

HEADS = 80


@pytest.fixture(scope="session")
def atlas_path(tmp_path_factory):
    path = write_synthetic_atlas(tmp_path_factory.mktemp("view") / "atlas", heads=HEADS, blocks=8)
    add_cards(path)
    return path


@pytest.fixture(scope="session")
def page_path(atlas_path):
    return write_page(atlas_path, atlas_path.parent / "page.html")


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=installed_browser(), args=list(QUIET))
        yield chromium
        chromium.close()


class Visit:
    """A tab on the page, with what went wrong in it: console errors, exceptions and requests beyond the file."""

    def __init__(
        self, browser, path, *, width=1400, height=900, scheme="light", at="", ready=".js-plotly-plot .main-svg"
    ):
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.tab = self.context.new_page()
        self.tab.set_default_timeout(60_000)
        self.troubles = []
        self.tab.on("console", lambda message: self.troubles.append(f"console {message.type}: {message.text}"))
        self.tab.on("pageerror", lambda error: self.troubles.append(f"exception: {error}"))
        self.tab.on("dialog", lambda dialog: (self.troubles.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.url = path.as_uri()
        self.tab.on("request", self._note_request)
        self.tab.goto(f"{self.url}#{at}")
        self.tab.wait_for_selector(ready, state="attached")

    def _note_request(self, request):
        if request.url.split("#")[0] != self.url:
            self.troubles.append(f"request: {request.url[:120]}")

    def open(self, unit):
        """Go to a unit by its address and wait for its examples."""
        self.tab.evaluate("unit => { location.hash = unit; }", unit)
        self.tab.wait_for_selector(f".unit h1 code:text-is('{unit.partition('.')[2]}')")
        self.tab.wait_for_selector(".example.active, .examples .none")

    def go(self, address, selector):
        """Go to an address within the page and wait for what it shows."""
        self.tab.evaluate("address => { location.hash = address; }", address)
        self.tab.wait_for_selector(selector)

    def wait(self, expression):
        """Until a JavaScript expression is true; asked from outside, for the page's policy forbids `eval`."""
        deadline = time.monotonic() + 60
        while not self.tab.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            self.tab.wait_for_timeout(30)

    def texts(self, selector):
        return self.tab.locator(selector).all_text_contents()


@pytest.fixture(scope="session")
def desk(browser, page_path):
    """A tab at 1400 × 900, shared by tests that leave no filter set."""
    visit = Visit(browser, page_path)
    yield visit
    visit.context.close()


@pytest.fixture(scope="session")
def phone(browser, page_path):
    """A tab at 420 × 900 that came in through the address of a unit."""
    visit = Visit(browser, page_path, width=420, at="lorsa.12.8")
    yield visit
    visit.context.close()
