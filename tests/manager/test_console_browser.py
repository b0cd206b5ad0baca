"""The console in Chromium, before a real Triton: by mouse, by keyboard alone, and without JavaScript; axe finds nothing.

HPLM_PICTURES=docs/pictures writes the pictures of docs/manager.md.
"""

import re
import shutil

import pytest
from playwright.sync_api import expect

from manager.models import Base
from manager.rendering import ROOT
from tests.manager.chromium import MARKS, Keyboard, Mouse, Plain, check_accessible, opened, pictured, signed_in
from tests.manager.serving import managing
from tests.manager.test_served import LABELS, lines

pytestmark = [*MARKS, pytest.mark.server("toy")]
OWNERS = ("acme", "keys", "plain")
TEXT = " ".join(LABELS["fruit"][:4])


@pytest.fixture
def managed(server, tmp_path):
    """A manager of a copy of the server's store, whose tenants go in the end."""
    store = shutil.copytree(server.built.stores["toy"].folder, tmp_path / "store")
    base = Base.open(store, server.repository, server.state)
    with managing(tmp_path / "manager", [base], server.grpc_url) as managed:
        yield managed
        for owner in OWNERS:
            managed.site.models._remove(base, [one.tenant.id for one in managed.site.models.served(owner)])


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
    expect(hand.page.get_by_role("article", name=f"Answer of {model}", exact=True)).to_contain_text("fruit")
    expect(hand.page.get_by_role("region", name="Words in the tables of toy/root")).to_contain_text("known ")


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
    pictured(page, "console.png")

    asked(hand, "acme.tickets")
    check_accessible(page)
    pictured(page, "console-try.png")
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
    check_accessible(page)
    hand.press("button", "Sign out")
    expect(page.get_by_label("Key")).to_be_visible()
    page.close()


def test_without_javascript_from_an_empty_manager_to_an_answer(chromium, managed, data):
    page = opened(chromium, managed, java_script_enabled=False)
    hand = Plain(page)
    signed_in(hand, managed, "plain")
    trained(hand, data)
    while not page.get_by_text("succeeded", exact=True).count():
        hand.press("link", "Look again")
    asked(hand, "plain.tickets")
    page.close()
