"""One thread for all tests of the builder, and stores that are built, and tenants that are trained, once for all of them."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from builder.store.store import Store
from hplm.model.checkpoint import load_checkpoint
from testing.toy import CONFIG
from tests.builder.checkpoints import save_bert
from tests.builder.stores import build, make_store, some_lines
from tests.tasks import make_tasks


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Products are tiny, and more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """A kill takes nothing that was written. `store/test_store.py` looks at what is synced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="package")
def bert(tmp_path_factory):
    """The folder of a tiny BERT whose neighbours matter."""
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="package")
def checkpoint(bert):
    return load_checkpoint(str(bert))


@pytest.fixture(scope="package")
def learnable(one_thread, tmp_path_factory):
    """A store with a root, whose backbone can learn."""
    folder = tmp_path_factory.mktemp("learnable")
    store = make_store(folder / "store", replace(CONFIG, upper_layers=3), scale=8)  # or tokens would not influence each other
    build(store, folder, "root", some_lines(200, seed=1))
    return store


@pytest.fixture(scope="package")
def tasks(tmp_path_factory):
    """A repository and its store, with untrained tenants of all tasks."""
    return make_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture
def tasks_store(tasks, tmp_path):
    """A copy of that store, which a test may change."""
    return Store(shutil.copytree(tasks.store.folder, tmp_path / "tasks"))


@pytest.fixture
def store(learnable, tmp_path):
    """A copy of it, which a test may change."""
    return Store(shutil.copytree(learnable.folder, tmp_path / "store"))


@pytest.fixture(scope="package")
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
