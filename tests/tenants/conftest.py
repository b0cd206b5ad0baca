import pytest

from tests.places import make_place


@pytest.fixture
def place(tmp_path):
    """A backbone that is served with a live state, and a store with more tenants than were exported."""
    return make_place(tmp_path)
