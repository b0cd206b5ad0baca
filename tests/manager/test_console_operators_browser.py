"""The operators' pages in Chromium, before a real Triton: by mouse, by keyboard alone, and without JavaScript."""

import random
import re
import shutil

import pytest
from playwright.sync_api import expect

from manager.models import Base
from manager.rendering import ROOT
from manager.rights import COMMAND_LINE, OPERATOR
from testing.toy import WORDS
from tests.manager.chromium import MARKS, Keyboard, Mouse, Plain, check_accessible, opened, pictured
from tests.manager.serving import managing

LINES = 5000  # of a corpus, with more tokens than the least that a build takes
pytestmark = [*MARKS, pytest.mark.server("toy")]


@pytest.fixture
def managed(server, tmp_path):
    store = shutil.copytree(server.built.stores["toy"].folder, tmp_path / "store")
    base = Base.open(store, server.repository, server.state)
    with managing(tmp_path / "manager", [base], server.grpc_url, servers=[server.metrics_url, "127.0.0.1:1"]) as managed:
        yield managed
        site = managed.site
        site.models._remove(base, [one.tenant.id for one in site.models.served("acme")])
        if "shop" in base.domains():
            site.domains.delete("toy/shop", COMMAND_LINE, lambda job: site.running.cancel(job.owner, job.id, COMMAND_LINE))


def limited(hand, managed):
    """Serves a finished record as a model of acme, and limits it."""
    (record,) = (managed.site.models.bases["toy"].store / "tenants/echo/1").glob("*.safetensors")
    page = hand.page
    hand.press("link", "Owners")
    hand.write(re.compile("^Model"), "acme.brought")
    hand.give(re.compile("^Record"), record)
    hand.press("button", "Serve")
    expect(page.get_by_role("row", name=re.compile("^acme 1 of"))).to_be_visible()
    hand.press("button", "Act as acme")
    expect(page.get_by_role("heading", name="Models", exact=True)).to_be_visible()
    hand.examine()
    hand.press("link", "acme.brought")
    hand.open("Limits")
    hand.write("burst", "5")
    hand.examine()
    hand.press("button", "Set")
    expect(page.get_by_text("Limits: burst 5")).to_be_visible()
    hand.examine()
    hand.press("button", "Stop acting for acme")
    expect(page).to_have_url(re.compile(f"{ROOT}/operate$"))


def built(hand, corpus):
    """Builds a domain, and looks at the page of its job while it runs and in the end."""
    corpus.write_text("".join(f"{' '.join(random.Random(line).choices(WORDS, k=12))}\n" for line in range(LINES)))
    hand.press("link", "Domains")
    hand.write(re.compile("^Domain"), "toy/shop")
    hand.give(re.compile("^Corpus"), corpus)
    hand.open("More")
    hand.write("Minutes to learn", "0")
    hand.press("button", "Build")
    expect(hand.page.get_by_role("heading", name="Training of toy/shop")).to_be_visible()
    hand.examine()
    while isinstance(hand, Plain) and hand.page.get_by_role("link", name="Look again").count():
        hand.press("link", "Look again")
    expect(hand.page.locator("#said")).to_contain_text("succeeded")
    hand.examine()


def operated(hand, managed, corpus):
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
    built(hand, corpus)
    limited(hand, managed)


def test_by_mouse(chromium, managed, tmp_path):
    page = opened(chromium, managed)
    operated(Mouse(page), managed, tmp_path / "corpus.txt")
    rate = page.get_by_role("row", name=re.compile(r"^127.0.0.1:\d+ yes \d+\.\d "))
    expect(rate).to_be_visible()  # after a look of htmx
    check_accessible(page)
    pictured(page, "console-operate.png")
    page.close()


def test_by_keyboard_alone(chromium, managed, tmp_path):
    page = opened(chromium, managed)
    operated(Keyboard(page), managed, tmp_path / "corpus.txt")
    check_accessible(page)
    page.close()


def test_without_javascript(chromium, managed, tmp_path):
    page = opened(chromium, managed, java_script_enabled=False)
    operated(Plain(page), managed, tmp_path / "corpus.txt")
    page.close()
