"""A router before fakes: the real HAProxy with the files of `hplm route`."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hplm.cli.main import main
from hplm.cluster.admin_socket import SERVERS, AdminSocket
from hplm.cluster.router import SOCKET, start_command
from hplm.registry.folder import Folder
from hplm.registry.pointer import Pointer, begin
from hplm.server.ports import free_ports, listens
from hplm.server.process import Process
from hplm.tenants.snapshot import Snapshot, Tenant
from tests.cluster.fake_server import FakeServer
from tests.cluster.front import INFER, Front
from tests.deploy.door import require_haproxy
from tests.support.wait import PATIENCE, eventually


def tenant(name: str, **limits: Any) -> Tenant:
    return Tenant(name, 1, 1, "root", 1, "classify", ("no", "yes"), None, None, **limits)


NAMES = [f"tenant-{number}" for number in range(200)]
LIMITED = [f"limited-{number}" for number in range(60)]
TENANTS = [*map(tenant, NAMES), *(tenant(name, rate=5.0) for name in LIMITED)]


class Served:
    """A pool's repository with a state, as far as the router reads them."""

    def __init__(self, folder: Path, name: str, tenants: list[Tenant], models: tuple[str, ...] = ("toy",)) -> None:
        self.name = name
        self.repository, self.state = folder / name / "repository", folder / name / "state"
        for model in (*models, "hplm"):
            (self.repository / model).mkdir(parents=True)
            (self.repository / model / "config.pbtxt").write_text(f'name: "{model}"')
        self._export = Snapshot(0, [], tenants, f"export of {name}")
        (self.repository / models[0] / "1").mkdir()
        self._export.save(self.repository / models[0] / "1" / "tenants.json")
        self._live = Folder(self.state / models[0])
        begin(self._live)

    def publish(self, tenants: list[Tenant]) -> None:
        """Changes the tenants as managers do: first a snapshot, then CURRENT."""
        content = self._live.get("CURRENT")
        pointer = Pointer.read(content, self._live)
        snapshot = Snapshot(pointer.generation + 1, [], tenants, self._export.export)
        self._live.put(f"snapshots/{snapshot.generation}", snapshot.written())
        self._live.swap(pointer.then(snapshot.generation, str(snapshot.generation)).written(), content)


class Router(Front):
    """HAProxy before replicas. It may be started again, with other replicas."""

    def __init__(self, folder: Path, pools: dict[str, list[FakeServer]], served: dict[str, Served], **own: Any) -> None:
        require_haproxy()
        self.folder = folder
        self.cluster = folder / "cluster.json"
        self.to = Path(tempfile.mkdtemp(prefix="hplm-"))  # the folders of pytest are too long for a socket
        self.socket = AdminSocket(self.to / SOCKET)
        port, self.stats = free_ports(2)
        super().__init__(port)
        self.process: Process | None = None
        self.served = served
        self.describe(pools, **own)

    def describe(self, pools: dict[str, list[FakeServer]], **own: Any) -> None:
        """`own`: more fields, by pool; None leaves one out."""
        described: list[dict[str, Any]] = [
            {
                "name": name,
                "repository": str(self.served[name].repository),
                "state": str(self.served[name].state),
                "replicas": [
                    {"id": number, "name": one.name, "http": one.http_url, "grpc": one.grpc_url}
                    for number, one in enumerate(replicas, start=1)
                ],
                **own.get(name, {}),
            }
            for name, replicas in pools.items()
        ]
        given = [{name: value for name, value in pool.items() if value is not None} for pool in described]
        self.cluster.write_text(json.dumps({"kind": "hplm replicas", "format": 1, "pools": given}))

    @property
    def arguments(self) -> list[str]:
        return ["route", "--cluster", str(self.cluster), "--to", str(self.to)]

    def write(self, *more: str) -> int:
        return main([*self.arguments, "--port", str(self.port), "--stats-port", str(self.stats), *more])

    def start(self) -> None:
        self.process = Process("HAProxy", start_command(self.to), self.folder / "haproxy.log")
        self.process.start()
        self.process.wait_until(lambda: listens(self.port) and self.socket.takes_commands(), PATIENCE)

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop(PATIENCE)

    def reload(self) -> None:
        """Has HAProxy read its files again. A signal that comes too early in its life is lost, so others follow."""
        assert self.process is not None and self.process.pid is not None
        before, master, looks = self.socket.pid(), self.process.pid, itertools.count()

        def reloaded() -> bool:
            if next(looks) % 100 == 0:
                os.kill(master, signal.SIGUSR2)
            return self.socket.pid() != before

        eventually(reloaded)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.to)

    def states(self, pool: str = "all") -> dict[str, str]:
        """Returns what HAProxy thinks of each replica of a pool."""
        return {row["svname"]: row["status"] for row in self.socket.statistics(SERVERS) if row["pxname"] == pool}

    def until_idle(self) -> None:
        """Waits until HAProxy counts no request in progress: only then a tenant's next request does not overflow."""
        eventually(lambda: all(row["scur"] == "0" for row in self.socket.statistics(SERVERS)))

    def until_up(self, pool: str = "all", but: tuple[str, ...] = ()) -> None:
        eventually(lambda: all(state.startswith("UP") != (name in but) for name, state in self.states(pool).items()))

    def replica_of(self, name: str) -> str:
        """Returns the replica that answers a tenant who has no other requests."""
        self.until_idle()
        return self.post(INFER, b"{}", hplm_tenant=name).replica


@contextmanager
def fake_servers(count: int, prefix: str = "replica-") -> Iterator[list[FakeServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeServer(f"{prefix}{number}")) for number in range(1, count + 1)]


@contextmanager
def started(router: Router, *more: str, away: tuple[str, ...] = ()) -> Iterator[Router]:
    """Starts a router, and waits until it has found all replicas but those that are away."""
    try:
        assert router.write(*more) == 0
        router.start()
        for pool in router.served:
            router.until_up(pool, away)
        yield router
    finally:
        router.close()


@contextmanager
def routing(folder: Path, replicas: list[Any], tenants: list[Tenant], *more: str, **waits: Any) -> Iterator[Router]:
    """Starts a router before one pool."""
    with started(Router(folder, {"all": replicas}, {"all": Served(folder, "all", tenants)}), *more, **waits) as router:
        yield router
