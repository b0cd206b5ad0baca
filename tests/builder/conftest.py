"""Stores that are built, and tenants that are trained, once for all tests. The tests of a room have one thread."""

import shutil
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace

import pytest

from builder.store.store import Store
from hplm.model.checkpoint import load_checkpoint
from testing.toy import CONFIG
from tests.builder.checkpoints import save_bert
from tests.builder.importing.stores import make_imported_store
from tests.builder.stores import build, light, make_store, some_lines
from tests.support.here import in_this_process  # noqa: F401
from tests.support.learning import by_one_step
from tests.tasks import make_tasks


@pytest.fixture(scope="package", autouse=True)
def light_work() -> Iterator[None]:
    with light():
        yield


@pytest.fixture
def one_step():
    """Lets all that trains take one step, where a test looks at what stands around a training."""
    with by_one_step():
        yield


@pytest.fixture
def with_bars(monkeypatch):
    monkeypatch.setattr("builder.console._is_silent", ContextVar("is_silent", default=False))


@pytest.fixture
def no_pictures(monkeypatch):
    """Drawing how a tenant has learned takes longer than tiny trainings do. `training/test_build.py` looks at pictures."""
    drawings = ("training.build.draw_learning", "tables.root.draw_learning", "importing.matching.draw_learning")
    for drawing in drawings:
        monkeypatch.setattr(f"builder.{drawing}", lambda *given: given[-1].write_bytes(b"a picture"))


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    """The folder of a tiny BERT whose neighbours matter."""
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def checkpoint(bert):
    return load_checkpoint(str(bert))


@pytest.fixture(scope="session")
def learnable(tmp_path_factory):
    """A store with a root, whose backbone can learn."""
    folder = tmp_path_factory.mktemp("learnable")
    with light():
        # With usual weights tokens would not influence each other.
        store = make_store(folder / "store", replace(CONFIG, upper_layers=3), scale=8)
        build(store, folder, "root", some_lines(200, seed=1))
    return store


@pytest.fixture(scope="session")
def tasks(tmp_path_factory):
    """A repository and its store, with untrained tenants of all tasks."""
    with light():
        return make_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture
def tasks_store(tasks, tmp_path):
    """A copy of that store, which a test may change."""
    return Store(shutil.copytree(tasks.store.folder, tmp_path / "tasks"))


@pytest.fixture
def store(learnable, tmp_path):
    """A copy of it, which a test may change."""
    return Store(shutil.copytree(learnable.folder, tmp_path / "store"))


@pytest.fixture(scope="session")
def imported(tmp_path_factory):
    """The folder of a store of the BERT that the fixtures of imports were trained on."""
    with light():
        return make_imported_store(tmp_path_factory.mktemp("imported"))
