"""A small decoder as it is served, the same for all tests of this room."""

import pytest

from tests.generation.small import Small


@pytest.fixture(scope="package")
def small(tmp_path_factory):
    return Small(tmp_path_factory.mktemp("small"))
