import shutil

import pytest

from builder.store.store import Store


@pytest.fixture
def store(learnable, tmp_path):
    return Store(shutil.copytree(learnable.folder, tmp_path / "store"))
