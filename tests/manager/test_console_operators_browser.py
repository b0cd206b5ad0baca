"""The operators' pages in Chromium, before a real Triton: by mouse, by keyboard alone, and without JavaScript."""

import re
import shutil

import pytest
from playwright.sync_api import expect

from manager.models import Base
from manager.pages import ROOT
from manager.rights import COMMAND_LINE, OPERATOR
from tests.manager.chromium import MARKS, Keyboard, Mouse, Plain, check_accessible, opened, pictured
from tests.manager.serving import managing

pytestmark = [*MARKS, pytest.mark.server("toy")]


@pytest.fixture
def managed(server, tmp_path):
    store = shutil.copytree(server.built.stores["toy"].folder, tmp_path / "store")
    base = Base.open(store, server.repository, server.state)
    with managing(tmp_path / "manager", [base], server.grpc_url, servers=[server.metrics_url, "127.0.0.1:1"]) as managed:
        yield managed


def operated(hand, managed):
    """Goes through all pages of an operator, with a look at each by axe."""
    page = hand.page
    page.goto("/")
    hand.write("Key", managed.site.rights.add_key(None, OPERATOR, 0, COMMAND_LINE)[0])
    hand.press("button", "Sign in")
    expect(page.get_by_role("row", name=re.compile("^127.0.0.1:1 no: it gives no metrics"))).to_be_visible()
    expect(page.get_by_role("row", name=re.compile(r"^127.0.0.1:\d+ yes"))).to_be_visible()
    hand.examine()
    hand.press("link", "Owners")
    hand.write("Name", "acme")
    hand.press("button", "Add")
    expect(page.get_by_label("The first key of acme")).to_have_value(re.compile("^hplm_"))
    hand.examine()
    hand.press("link", "acme")
    expect(page.get_by_role("heading", name="Limits of acme")).to_be_visible()
    hand.examine()
    page.get_by_label("jobs a day").fill("")
    hand.write("jobs a day", "7")
    hand.press("button", "Set limits")
    expect(page.get_by_role("row", name=re.compile("^acme .*0 of 7"))).to_be_visible()
    for name, words in (("Domains", "toy/root"), ("Log", "owner limits")):
        hand.press("link", name)
        expect(page.get_by_role("table")).to_contain_text(words)
        hand.examine()
    hand.press("link", "Owners")
    hand.press("button", "Act as acme")
    expect(page.get_by_role("heading", name="Models", exact=True)).to_be_visible()
    hand.examine()
    hand.press("button", "Stop acting for acme")
    expect(page).to_have_url(re.compile(f"{ROOT}/operate$"))


def test_by_mouse(chromium, managed):
    page = opened(chromium, managed)
    operated(Mouse(page), managed)
    rate = page.get_by_role("row", name=re.compile(r"^127.0.0.1:\d+ yes \d+\.\d "))
    expect(rate).to_be_visible()  # after a look of htmx
    check_accessible(page)
    pictured(page, "console-operate.png")
    page.close()


def test_by_keyboard_alone(chromium, managed):
    page = opened(chromium, managed)
    operated(Keyboard(page), managed)
    check_accessible(page)
    page.close()


def test_without_javascript(chromium, managed):
    page = opened(chromium, managed, java_script_enabled=False)
    operated(Plain(page), managed)
    page.close()
