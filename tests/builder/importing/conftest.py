"""A store of the fixtures' BERT, of which each test changes a copy."""

import shutil

import pytest

from builder.store.store import Store


@pytest.fixture
def store(imported, tmp_path):
    return Store(shutil.copytree(imported, tmp_path / "store"))
