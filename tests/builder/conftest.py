"""One thread for all tests of the builder, and stores that are built, and tenants that are trained, once for all of them."""

import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from builder.store.store import Store
from testing.toy import CONFIG


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Products are tiny, and more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def learnable(one_thread, tmp_path_factory):
    """A store with a root, whose backbone can learn."""
    from tests.builder.training.small_tenants import make_store

    return make_store(tmp_path_factory.mktemp("learnable") / "store", replace(CONFIG, upper_layers=3))


@pytest.fixture
def store(learnable, tmp_path):
    """A copy of it, which a test may change."""
    return Store(shutil.copytree(learnable.folder, tmp_path / "store"))


@pytest.fixture(scope="package")
def trained(learnable, tmp_path_factory):
    """A store with a tenant of each entry of TASKS, and the folder of their data: a test changes only copies of it."""
    from tests.builder.training.small_tenants import TASKS, examples, learn

    folder = tmp_path_factory.mktemp("trained")
    store = Store(shutil.copytree(learnable.folder, folder / "store"))
    for name, (task, *_, options) in TASKS.items():
        train, dev = examples(folder, name, 360, "train"), examples(folder, name, 60, "dev")
        learn(store, task, train, dev, tenant=name, epochs=6, **options)
        examples(folder, name, 150, "test")
    return store, folder


@pytest.fixture
def trained_store(trained, tmp_path):
    """A copy of it, which a test may change."""
    return Store(shutil.copytree(trained[0].folder, tmp_path / "trained"))
