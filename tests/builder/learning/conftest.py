import pytest

from hplm.model.checkpoint import load_checkpoint
from tests.builder.checkpoints import save_bert


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def checkpoint(folder):
    return load_checkpoint(str(folder))
