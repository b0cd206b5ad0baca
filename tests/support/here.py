"""Workers that are no other processes, so that tests can change what they do."""

import pickle
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import pytest


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
