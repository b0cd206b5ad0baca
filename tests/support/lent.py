"""Shared servers in the place of those that measuring commands start, and threads in the place of their processes.

Only the starts are saved: of Triton, and of a process for each load.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from builder.publish.model_configs import ALIAS
from hplm.server import TritonServer
from hplm.server.repository import model_names
from hplm.server.stubs import stubs
from hplm.tenants.registry_writer import registries_of
from loadtest import load
from loadtest.server import ServedCopy
from tests.support.servers import Lease
from tests.support.wait import PATIENCE, eventually

LOST = "StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED"


class LoadThread(threading.Thread):
    """Takes the place of a process of `loadtest.load.send`. A load and its report are pickled here too."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> None:
        sendable, all_there, its, start_s = args
        own = Connection(os.dup(its.fileno()), readable=False)  # `send` closes the other one
        super().__init__(target=target, args=(pickle.loads(pickle.dumps(sendable)), all_there, own, start_s), daemon=daemon)

    def kill(self) -> None:
        """It ends when its load does."""


@contextmanager
def loads_in_threads() -> Iterator[None]:
    threads = SimpleNamespace(Barrier=threading.Barrier, Pipe=multiprocessing.Pipe, Process=LoadThread)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "multiprocessing", SimpleNamespace(get_context=lambda method: threads))
        yield


@contextmanager
def loading(lease: Lease, repository: Path, with_alias: bool = True) -> Iterator[TritonServer]:
    """Takes the place of `TritonServer(repository)`: the server `bare` loads the models, and unloads them at the end.

    Its state gets a registry for each backbone. If it has models with these names already, these answer for the others: a
    command compares two servers of one store. `with_alias`: not where nobody asks it, because it takes seconds.
    """
    known = {path.name for path in lease.repository.iterdir()}
    models = [model for model in model_names(repository) if model != ALIAS or with_alias]
    if known.intersection(models):
        yield lease.server
        return
    _until_gone(lease, models)
    for registry in registries_of(repository, lease.state).values():
        registry.begin()
    for model in models:
        (lease.repository / model).symlink_to(repository.resolve() / model)
    try:
        _load(lease, models)
        yield lease.server
    finally:
        _unload(lease, models)


def _until_gone(lease: Lease, models: Sequence[str]) -> None:
    """Waits for the end of processes of earlier models with these names, which takes seconds, and removes their state."""
    try:
        eventually(lambda: not any(stub.model in models for stub in stubs(lease.server.pid)))
    except AssertionError as error:
        _start_again(lease, "ends", str(error))
    for model in models:
        shutil.rmtree(lease.state / model, ignore_errors=True)


def _load(lease: Lease, models: Sequence[str]) -> None:
    """Loads models. On a busy machine Triton may end or hang then, as at its start. If so, it is started again with them."""
    client = lease.stock("grpc").client
    try:
        for model in models:
            client.load_model(model, headers=_opened(lease), client_timeout=PATIENCE)
    except InferenceServerException as error:
        if error.status() not in LOST:
            raise
        _start_again(lease, "loads", str(error))


def _unload(lease: Lease, models: Sequence[str]) -> None:
    """Unloads models. Starts the server again without them if it has ended or hangs."""
    client, lost = lease.stock("grpc").client, ""
    try:
        for model in models:
            eventually(lambda model=model: _is_unloaded(lease, client, model))
    except (AssertionError, InferenceServerException) as error:
        lost = str(error)
    for model in models:
        (lease.repository / model).unlink()
    if lost:
        _start_again(lease, "unloads", lost)


def _is_unloaded(lease: Lease, client: Any, model: str) -> bool:
    """Unloads a model, or loses a connection that stood idle for as long as the command took. Then it may be asked again."""
    try:
        client.unload_model(model, headers=_opened(lease), client_timeout=PATIENCE)
    except InferenceServerException as error:
        if error.status() != LOST[0] or lease.server.pid is None:
            raise
        return False
    return True


def _start_again(lease: Lease, doing: str, why: str) -> None:
    said = f"{why}\n{lease.server.last_words()}"
    warnings.warn(f"the server {lease.name!r} is started again, because it {doing} no model: {said}", stacklevel=3)
    lease.server.start_again()


def _opened(lease: Lease) -> dict[str, str]:
    """Returns the header that opens the server's restricted APIs."""
    name, secret = lease.server.admin_header
    return {f"triton-grpc-protocol-{name}": secret}


class LentCopy(ServedCopy):
    """The server `toy` in the place of a copy that is served for a load test. What harms a server needs a real one."""

    pid_of_command = os.getpid()  # this process has started the server
    models = ("toy",)  # `hplm` cannot tell its backbone from `tasks` by a tenant that both have

    def __init__(self, lease: Lease) -> None:
        self.repository, self.state, self.log = lease.repository, lease.state, lease.folder / "triton.log"
        self.folder, self.backbone = lease.model_folder(), "toy"
        self.address, self.grpc, self.metrics = lease.http_url, lease.grpc_url, lease.metrics_url

    def output(self) -> str:
        return ""  # it is no command

    def __exit__(self, *exception: object) -> None:
        """The server goes on."""
