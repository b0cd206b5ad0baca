"""A router before fakes: the real HAProxy with the files of `hplm route`."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hplm.cli.main import main
from hplm.cluster.router import SOCKET, start_command
from hplm.server.ports import free_ports, listens
from hplm.server.process import Process
from hplm.tenants.snapshot import Snapshot
from loadtest.proxy import AdminSocket
from tests.cluster.fake_server import FakeServer
from tests.cluster.front import INFER, Front
from tests.deploy.door import require_haproxy
from tests.support.wait import PATIENCE, eventually

NAMES = [f"tenant-{number}" for number in range(200)]
BIG = "big"  # goes to all replicas


def repository(folder: Path, *models: str) -> Path:
    """Makes a repository, as far as the router reads it."""
    for model in (*models, "hplm"):
        (folder / model / "1").mkdir(parents=True)
        (folder / model / "config.pbtxt").write_text(f'name: "{model}"')
    for model in models:
        Snapshot(0, [], [], "an export").save(folder / model / "1" / "tenants.json")
    return folder


class Router(Front):
    """HAProxy before replicas. It may be started again, with other replicas."""

    def __init__(self, folder: Path, replicas: Sequence[FakeServer]) -> None:
        require_haproxy()
        self.folder = folder
        self.cluster = folder / "cluster.json"
        self.repository = repository(folder / "repository", "toy")
        self.to = Path(tempfile.mkdtemp(prefix="hplm-"))  # the folders of pytest are too long for a socket
        self.socket = AdminSocket(self.to / SOCKET)
        port, self.stats = free_ports(2)
        super().__init__(port)
        self.process: Process | None = None
        self.describe(replicas)

    def describe(self, replicas: Sequence[FakeServer], **own: Any) -> None:
        """`own`: other fields."""
        described = [
            {"id": number, "name": one.name, "http": one.http_url, "grpc": one.grpc_url}
            for number, one in enumerate(replicas, start=1)
        ]
        fields = {"repository": "repository", "replicas": described, "spread": [BIG], **own}
        self.cluster.write_text(json.dumps({"kind": "hplm replicas", "format": 1, **fields}))

    @property
    def arguments(self) -> list[str]:
        return ["route", "--cluster", str(self.cluster), "--to", str(self.to)]

    def write(self, *more: str) -> int:
        return main([*self.arguments, "--port", str(self.port), "--stats", f"127.0.0.1:{self.stats}", *more])

    def start(self) -> None:
        self.process = Process("HAProxy", start_command(self.to), self.folder / "haproxy.log")
        self.process.start()
        self.process.wait_until(lambda: listens(self.port) and self.socket.answers(), PATIENCE)

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop(PATIENCE)

    def reload(self) -> None:
        """Has HAProxy read its files again. A signal that comes too early in its life is lost, so others follow."""
        assert self.process is not None and self.process.pid is not None
        before, master, looks = self.socket.ask("show info"), self.process.pid, itertools.count()
        own = re.compile(r"^Pid: \d+$", re.MULTILINE)

        def reloaded() -> bool:
            if next(looks) % 100 == 0:
                os.kill(master, signal.SIGUSR2)
            return self.socket.answers() and own.findall(self.socket.ask("show info")) != own.findall(before)

        eventually(reloaded)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.to)

    def states(self) -> dict[str, str]:
        """Returns what HAProxy thinks of each replica."""
        return {name: row["status"] for name, row in self.socket.servers().items()}

    def until_up(self, but: tuple[str, ...] = ()) -> None:
        eventually(lambda: all(state.startswith("UP") != (name in but) for name, state in self.states().items()))

    def replica_of(self, name: str) -> str:
        """Returns the replica that answers a tenant."""
        return self.post(INFER, b"{}", hplm_tenant=name).replica


@contextmanager
def fake_servers(count: int, prefix: str = "replica-") -> Iterator[list[FakeServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeServer(f"{prefix}{number}")) for number in range(1, count + 1)]


@contextmanager
def routing(folder: Path, replicas: Sequence[FakeServer], *more: str) -> Iterator[Router]:
    """Starts a router, and waits until it has found all replicas."""
    router = Router(folder, replicas)
    try:
        assert router.write(*more) == 0
        router.start()
        router.until_up()
        yield router
    finally:
        router.close()
