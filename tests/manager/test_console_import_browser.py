"""A checkpoint comes by the console in Chromium: by mouse, by keyboard alone, and without JavaScript."""

import re

import pytest
from playwright.sync_api import expect

from manager.rendering import ROOT
from tests.manager.chromium import MARKS, Keyboard, Mouse, Plain, opened, signed_in

pytestmark = MARKS


@pytest.mark.parametrize("kind", [Mouse, Keyboard, Plain])
def test_a_checkpoint_without_weights_says_so_on_the_page_of_its_job(chromium, managed, tmp_path, kind):
    files = [tmp_path / name for name in ("config.json", "tokenizer.json")]
    for file in files:
        file.write_text("{}")
    page = opened(chromium, managed, java_script_enabled=kind is not Plain)
    hand = kind(page)
    signed_in(hand, managed, kind.__name__.lower())
    hand.press("link", "Bring a checkpoint")
    expect(page.get_by_role("heading", name="Bring a checkpoint")).to_be_visible()
    hand.examine()
    hand.write("Name", "brought")
    hand.give("Files of the checkpoint", files)
    hand.open("More")
    hand.write("Share of answers", "0.5")
    hand.examine()
    hand.press("button", "Import")
    expect(page).to_have_url(re.compile(rf"{ROOT}/jobs/ftjob-\w+$"))
    while kind is Plain and page.get_by_role("link", name="Look again").count():
        hand.press("link", "Look again")
    expect(page.locator("#said")).to_contain_text("failed")
    expect(page.get_by_role("alert")).to_contain_text("the checkpoint has no weights")
    hand.examine()
    page.close()
