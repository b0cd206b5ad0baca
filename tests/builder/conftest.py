"""Stores that are built, and tenants that are trained, once for all tests. The tests of a room have one thread."""

import pickle
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from builder.store.store import Store
from hplm.model.checkpoint import load_checkpoint
from testing.toy import CONFIG
from tests.builder.checkpoints import save_bert
from tests.builder.importing.stores import make_imported_store
from tests.builder.stores import build, light, make_store, some_lines
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
def no_pictures(monkeypatch):
    """Drawing how a tenant has learned takes longer than tiny trainings do. `training/test_tenant.py` looks at pictures."""
    drawings = ("training.tenant.draw_learning", "tables.root.draw_learning", "importing.matching.draw_learning")
    for drawing in drawings:
        monkeypatch.setattr(f"builder.{drawing}", lambda *given: given[-1].write_bytes(b"a picture"))


class Here(Executor):
    """Stands for a pool of threads. It does each job when it is submitted."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, job: Callable[..., Any], *given: object) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(job(*given))
        except Exception as error:
            done.set_exception(error)
        return done


class CopiedWork(Here):
    """Stands for a process. It does each job here, from a copy as a process gets it."""

    def submit(self, job: Callable[..., Any], *given: object) -> Future[Any]:
        return super().submit(pickle.loads(pickle.dumps(partial(job, *given))))


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr("builder.worker_processes.ProcessPoolExecutor", CopiedWork)
    monkeypatch.setattr("builder.worker_processes.ThreadPoolExecutor", Here)


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
