"""A store of the fixtures' BERT, of which each test changes a copy."""

import shutil
from pathlib import Path

import pytest

from builder.store.store import Store
from tests.builder.importing.stores import make_imported_store


@pytest.fixture(scope="package")
def stored(tmp_path_factory) -> Path:
    return make_imported_store(tmp_path_factory.mktemp("imported"))


@pytest.fixture
def store(stored, tmp_path) -> Store:
    return Store(shutil.copytree(stored, tmp_path / "store"))
