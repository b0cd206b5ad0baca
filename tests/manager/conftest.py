"""A manager whose commands only seem to train, and its backbone `toy`. Files with a real server have others of these names."""

import pytest

from tests.manager.serving import NOWHERE, fake_base, faked, managing


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return fake_base(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def managed(base, tmp_path_factory):
    with faked(), managing(tmp_path_factory.mktemp("manager"), [base], servers=[NOWHERE]) as managed:
        yield managed


@pytest.fixture
def chromium(managed):
    """Begins last and ends first: while it is there, this thread has a running event loop."""
    from playwright.sync_api import sync_playwright

    from tests.manager.chromium import BROWSER

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER)
        yield browser
        browser.close()
