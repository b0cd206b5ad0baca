"""The console in Chromium, before a real Triton: by mouse, by keyboard alone, and without JavaScript; axe finds nothing.

HPLM_PICTURES=docs/pictures writes the picture of docs/manager.md.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

from manager.models import Base
from manager.pages import ROOT
from tests.manager.serving import managing
from tests.manager.test_served import LABELS, lines
from tests.support.wait import PATIENCE

BROWSER = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow, pytest.mark.server("toy"),
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium: Debian, Ubuntu: apt-get install chromium"),
]  # fmt: skip
OWNERS = {"mouse": "acme", "keyboard": "keys", "no script": "plain"}
TEXT = " ".join(LABELS["fruit"][:4])
PICTURES = os.environ.get("HPLM_PICTURES")


@pytest.fixture
def chromium(managed):
    """Begins last and ends first: while it is there, this thread has a running event loop."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER)
        yield browser
        browser.close()


@pytest.fixture
def managed(server, tmp_path):
    """A manager of a copy of the server's store, whose tenants go in the end."""
    store = shutil.copytree(server.built.stores["toy"].folder, tmp_path / "store")
    base = Base.open(store, server.repository, server.state)
    with managing(tmp_path / "manager", [base], server.grpc_url) as managed:
        yield managed
        for owner in OWNERS.values():
            managed.site.models._remove(base, [one.tenant.id for one in managed.site.models.served(owner)])


class Mouse:
    """Uses a page as somebody does with a mouse."""

    def __init__(self, page):
        self.page = page

    def press(self, role, name):
        self._at(self.page.get_by_role(role, name=name, exact=True)).click()

    def write(self, label, text):
        self._at(self.page.get_by_label(label)).fill(text)

    def choose(self, label, option):
        self.page.get_by_label(label).select_option(option)

    def give(self, label, file):
        """The dialog for files is the browser's own. It does not always open where a machine is busy."""
        self._at(self.page.get_by_label(label)).set_input_files(file)

    def open(self, summary):
        self.page.get_by_text(summary, exact=True).click()

    def _at(self, one):
        return one


class Keyboard(Mouse):
    """Has no mouse: goes to everything with the key Tab."""

    def press(self, role, name):
        self._to(self.page.get_by_role(role, name=name, exact=True))
        self.page.keyboard.press("Enter")

    def write(self, label, text):
        self._to(self.page.get_by_label(label))
        self.page.keyboard.type(text)

    def choose(self, label, option):
        self._to(self.page.get_by_label(label))
        self.page.keyboard.type(option)

    def give(self, label, file):
        self._to(self.page.get_by_label(label))
        super().give(label, file)

    def open(self, summary):
        self._to(self.page.get_by_text(summary, exact=True))
        self.page.keyboard.press("Enter")

    def _to(self, one):
        expect(one).to_have_count(1)
        for _ in range(80):
            if one.evaluate("element => element === document.activeElement"):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"the key Tab does not reach {one}")


def opened(chromium, managed, **options):
    page = chromium.new_page(base_url=f"http://{managed.url}", viewport={"width": 1000, "height": 760}, **options)
    page.set_default_timeout(1000 * PATIENCE)
    expect.set_options(1000 * PATIENCE)
    return page


def signed_in(hand, managed, owner):
    hand.page.goto("/")
    hand.write("Key", managed.secret(owner))
    hand.press("button", "Sign in")
    expect(hand.page.get_by_role("heading", name="Models", exact=True)).to_be_visible()


def trained(hand, file, name="tickets"):
    """Begins a job of a new model, or on the page of a form for a next version, and returns on its page."""
    if name:
        hand.press("link", "New model")
        hand.write("Name", name)
        hand.choose("Base", "toy")
    hand.give("Data to learn", file)
    hand.open("More")
    hand.write("Epochs", "4")
    if not name:
        hand.choose("Serve the new version", "later, by hand")
    hand.press("button", "Train")
    expect(hand.page).to_have_url(re.compile(rf"{ROOT}/jobs/ftjob-\w+$"))


def asked(hand, model):
    hand.press("link", f"Try {model}")
    hand.write("Text", TEXT)
    hand.press("button", "Ask")


def check_accessible(page):
    found = Axe().run(page)
    assert not found.violations_count, f"{page.url}\n{found.generate_report()}"


@pytest.fixture
def data(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(lines(1))
    return tmp_path / "train.jsonl"


def test_by_mouse_from_an_empty_manager_to_two_versions_side_by_side(chromium, managed, data):
    page = opened(chromium, managed)
    wrong = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    hand = Mouse(page)
    page.goto("/")
    check_accessible(page)
    signed_in(hand, managed, "acme")
    check_accessible(page)
    page.goto(f"{ROOT}/new")
    check_accessible(page)
    page.goto(ROOT)
    trained(hand, data)
    page.evaluate("window.kept = true")
    check_accessible(page)
    expect(page.locator("#said")).to_contain_text("succeeded")
    assert page.evaluate("window.kept"), "not only a part of the page was swapped"
    check_accessible(page)
    assert page.locator("polyline").count() == 3
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / "console.png")

    asked(hand, "acme.tickets")
    answer = page.get_by_role("article", name="Answer of acme.tickets", exact=True)
    expect(answer).to_contain_text("fruit")
    check_accessible(page)
    page.goto(f"{ROOT}/models/acme.tickets")
    check_accessible(page)
    hand.press("link", "Train on")
    data.write_bytes(lines(2))
    trained(hand, data, name="")
    expect(page.locator("#said")).to_contain_text("succeeded")
    page.goto(f"{ROOT}/models/acme.tickets")
    hand.press("link", "Try")
    hand.write("Text", TEXT)
    hand.press("button", "Ask")
    for model in ("acme.tickets", "acme.tickets.v2"):
        expect(page.get_by_role("article", name=f"Answer of {model}", exact=True)).to_contain_text("metal")
    check_accessible(page)
    page.goto(f"{ROOT}/models/acme.tickets")
    hand.press("button", "Promote version 2")
    expect(page.get_by_role("row", name=re.compile("^2 .*live"))).to_be_visible()
    hand.press("button", "Roll back to the version served before")
    expect(page.get_by_role("row", name=re.compile("^1 .*live"))).to_be_visible()
    hand.press("link", "Keys and limits")
    check_accessible(page)
    hand.press("button", "Make a key")
    expect(page.get_by_label("The secret of")).to_have_value(re.compile("^hplm_"))
    check_accessible(page)
    page.goto(f"{ROOT}/models/none.such")
    check_accessible(page)
    wrong = [one for one in wrong if "status of 40" not in one]  # 401 before the key, and 404
    assert not wrong, "the page's own policy forbids nothing that it does"
    page.close()


def test_by_keyboard_alone_from_an_empty_manager_to_an_answer(chromium, managed, data):
    page = opened(chromium, managed)
    hand = Keyboard(page)
    signed_in(hand, managed, "keys")
    trained(hand, data)
    expect(page.locator("#said")).to_contain_text("succeeded")
    asked(hand, "keys.tickets")
    expect(page.get_by_role("article", name="Answer of keys.tickets")).to_contain_text("fruit")
    hand.press("button", "Sign out")
    expect(page.get_by_label("Key")).to_be_visible()
    page.close()


def test_without_javascript_from_an_empty_manager_to_an_answer(chromium, managed, data):
    page = opened(chromium, managed, java_script_enabled=False)
    hand = Mouse(page)
    signed_in(hand, managed, "plain")
    trained(hand, data)
    while not page.get_by_text("succeeded", exact=True).count():
        hand.press("link", "Look again")
    asked(hand, "plain.tickets")
    expect(page.get_by_role("article", name="Answer of plain.tickets")).to_contain_text("fruit")
    page.close()
