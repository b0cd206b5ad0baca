import pytest

from hplm.model.checkpoint import load_checkpoint
from tests.builder.adaptation.models import save


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"), "without")


@pytest.fixture(scope="session")
def checkpoint(folder):
    return load_checkpoint(str(folder))
