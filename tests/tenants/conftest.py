import pytest

from hplm.tenants.manager import Manager
from tests.places import make_place
from tests.tenants.truth import Export


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    return Export(tmp_path_factory.mktemp("export"))


@pytest.fixture
def place(tmp_path):
    """A backbone that is served with a live state, and a store with more tenants than were exported."""
    return make_place(tmp_path)


@pytest.fixture
def live(place):
    """The manager of that state."""
    return Manager.open(*place[1:])
