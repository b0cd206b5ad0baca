"""The real Chromium, and hands that use it: with a mouse, or with the keyboard alone."""

import os
import shutil
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.support.wait import PATIENCE

BROWSER = shutil.which("chromium")
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium: Debian, Ubuntu: apt-get install chromium"),
]
PICTURES = os.environ.get("HPLM_PICTURES")


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

    def examine(self):
        check_accessible(self.page)

    def _at(self, one):
        return one


class Plain(Mouse):
    """Uses a browser that runs no JavaScript, and so no axe."""

    def examine(self):
        pass


class Keyboard(Mouse):
    """Has no mouse: goes to everything with the key Tab."""

    def press(self, role, name):
        self._to(self.page.get_by_role(role, name=name, exact=True))
        self.page.keyboard.press("Enter")

    def write(self, label, text):
        self._to(self.page.get_by_label(label))
        self.page.keyboard.type(text)

    def choose(self, label, option):
        self._to(one := self.page.get_by_label(label))
        self.page.keyboard.press("Home")
        for _ in range(one.locator("option").count()):
            if one.evaluate("element => element.selectedOptions[0].text.trim()") == option:
                return
            self.page.keyboard.press("ArrowDown")
        raise AssertionError(f"the arrows do not reach {option}")

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


def pictured(page, name):
    """Takes a picture for the docs, if there is a folder for them."""
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / name)


def check_accessible(page):
    found = Axe().run(page)
    assert not found.violations_count, f"{page.url}\n{found.generate_report()}"
