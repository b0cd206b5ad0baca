"""Five trained tenants. Modules that use them name one group of pytest-xdist, so that one process trains."""

import shutil

import pytest

from builder.store.store import Store


@pytest.fixture(scope="session")
def trained(learnable, tmp_path_factory):
    """A store with a tenant of each entry of TASKS, and the folder of their data: a test changes only copies of it."""
    from tests.builder.training.small_tenants import TASKS, learn, made

    folder = tmp_path_factory.mktemp("trained")
    store = Store(shutil.copytree(learnable.folder, folder / "store"))
    for name, (task, texts, *_, options) in TASKS.items():
        train, dev, _ = (made(folder, name, *part) for part in ((texts, "train"), (60, "dev"), (150, "test")))
        learn(store, task, train, dev, tenant=name, epochs=6, batch_texts=32, **(options or {"learning_rate": 1e-2}))
    return store, folder


@pytest.fixture
def trained_store(trained, tmp_path):
    """A copy of it, which a test may change."""
    return Store(shutil.copytree(trained[0].folder, tmp_path / "trained"))
