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
