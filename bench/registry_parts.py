"""The parts of a registry that is harmed: a bucket, ways to it, machines with a server, and managers."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from socket import create_connection
from typing import Any, NamedTuple

import testing.bucket
from builder.store.store import Store
from hplm.cluster.local import LocalReplica
from hplm.cluster.pools import PlannedReplica
from hplm.errors import HplmError
from hplm.registry.store import place_of
from hplm.server import process_group
from hplm.server.ports import LOOPBACK, Ports, free_ports
from hplm.server.process import Process
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import Snapshot
from loadtest.server import SERVER, processes_of

STATE = place_of("s3://bucket/hplm")
START_SECONDS, END_SECONDS, LOOK_SECONDS = 300.0, 25.0, 0.05
OPEN, CLOSED, SILENT = "open", "closed", "silent"
KEPT = "kept"  # a tenant with two keys, which only the benchmark itself changes
WHOLE = "machine"  # all processes of a server at once


@contextmanager
def bucket(folder: Path) -> Iterator[int]:
    """Runs an S3 server on this machine, with an empty bucket. Gives its port."""
    (port,) = free_ports(1)
    server = Process("the bucket", [sys.executable, "-m", testing.bucket.__name__, str(port)], folder / "bucket.log")
    server.start()
    try:
        server.wait_until(lambda: "ready" in server.said(), START_SECONDS)
        yield port
    finally:
        server.stop(END_SECONDS)


class Link(socketserver.ThreadingTCPServer):
    """A way to the bucket. Once silent, a connection says nothing any more, as where a firewall has forgotten it."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__((LOOPBACK, 0), _Relay)
        self.bucket, self.state = (LOOPBACK, port), OPEN
        self.environment = {**testing.bucket.RIGHTS, "AWS_ENDPOINT": f"http://{LOOPBACK}:{self.server_address[1]}"}
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Relay(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        link: Any = self.server
        with suppress(OSError), create_connection(link.bucket) as there:
            to, is_lost = {self.request: there, there: self.request}, False
            while link.state != CLOSED:
                is_lost |= link.state == SILENT
                for one in select.select([] if is_lost else list(to), [], [], LOOK_SECONDS)[0]:
                    if not (data := one.recv(1 << 16)):
                        return
                    to[one].sendall(data)


class Machine(LocalReplica):
    """A server with a copy of the registry, and its way to the bucket."""

    def __init__(self, number: int, folder: Path, repository: Path, link: Link) -> None:
        variables = {**link.environment, "HPLM_MIRROR": str(folder / f"mirror-{number}")}
        super().__init__(PlannedReplica(number, repository), folder, STATE, Ports(*free_ports(3)), variables)
        self._link = link
        self.blind: list[tuple[float, float]] = []  # when it could not see the bucket: from and until

    def cut(self, state: str) -> float:
        """Returns when its way to the bucket was cut."""
        self._link.state = state
        self.blind.append((time.monotonic(), float("inf")))
        return self.blind[-1][0]

    def mend(self) -> float:
        self.blind[-1] = self.blind[-1][0], time.monotonic()
        self._link.state = OPEN
        return self.blind[-1][1]

    def kill(self, part: str) -> bool:
        """Returns whether there was such a part."""
        serve = self.server.pid
        processes = processes_of(serve) if serve is not None else {}
        if part == WHOLE and serve is not None and SERVER in processes:
            os.kill(serve, signal.SIGKILL)  # first, so that it does not start the other one again
            process_group.kill(processes[SERVER])
        elif part in processes:
            os.kill(processes[part], signal.SIGKILL)
        else:
            return False
        return True


class State(NamedTuple):
    """Holds what a manager knows of a tenant."""

    now: int | None = None  # the number of its knowledge; None: it is not served
    before: int | None = None  # to which it can be rolled back
    keys: tuple[str, ...] = ()


class ManagerProcess:
    """A manager in a process of its own. It is started again when it was killed."""

    def __init__(self, repository: Path, store: Path, link: Link) -> None:
        self._given = repository, store, link.environment
        self._asking = threading.Lock()
        self._start()

    def ask(self, action: str, *given: Any) -> Any:
        """Returns what the action returns. After an error the change may have been made, unless it says otherwise."""
        with self._asking:
            try:
                self._pipe.send((action, *given))
                found, refused = self._pipe.recv()
            except (EOFError, OSError):
                self._process.join()
                self._start()
                raise HplmError("killed") from None
        if refused:
            raise HplmError(refused)
        return found

    def kill(self) -> None:
        self._process.kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_manage, args=(theirs, *self._given), daemon=True)
        self._process.start()
        theirs.close()


def _manage(pipe: Connection, repository: Path, folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    store, manager = Store(folder), Manager.open(repository, STATE)
    knowledge = [store.knowledge(tenant) for tenant in store.tenants()]
    contents = {one.packed().name: number for number, one in enumerate(knowledge)}

    def state(snapshot: Snapshot, name: str) -> State:
        now, before = ([one for one in tenants if one.id == name] for tenants in (snapshot.tenants, snapshot.ledger.before))
        numbers = [contents[one.head.file.rpartition("-")[2]] for one in (*now, *before) if one.head is not None]
        return State(numbers[0], (*numbers, None)[1], tuple(key.id for key in now[0].keys)) if now else State()

    def states(names: list[str]) -> list[State]:
        snapshot = manager.current()
        return [state(snapshot, name) for name in names]

    def add_key(tenant: str) -> tuple[str, str]:
        secret, key = manager.add_key(tenant)
        return key.id, secret

    actions: dict[str, Callable[..., Any]] = {
        "begin": manager.registry.begin,
        "add": lambda tenant, number: manager.add(tenant, knowledge[number]),
        "update": lambda tenant, number: manager.update(tenant, knowledge[number]),
        "rollback": manager.roll_back,
        "delete": manager.delete,
        "key add": add_key,
        "key revoke": manager.revoke_key,
        "states": states,
        "fence": lambda: manager.limit(KEPT, in_flight=0),  # what a killed manager has sent before comes too late then
        "audit": manager.registry.audit,
    }
    with suppress(EOFError):  # the benchmark has ended
        while True:
            action, *given = pipe.recv()
            try:
                pipe.send(((actions[action](*given), manager.registry.decided), ""))
            except HplmError as error:
                pipe.send((None, error.wire()))
