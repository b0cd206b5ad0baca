import pytest

from tests.builder.training.small_tenants import make_store


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "store")
