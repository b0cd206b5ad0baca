"""A whole cluster on this machine: replicas that read one registry, and the router before them."""

from __future__ import annotations

import fcntl
import itertools
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from hplm.cluster.admin_socket import AdminSocket
from hplm.cluster.control import Listener, Say
from hplm.cluster.description import FORMAT, KIND
from hplm.cluster.pools import PlannedReplica
from hplm.cluster.router import SOCKET, haproxy, start_command
from hplm.errors import HplmError
from hplm.placement.files import write
from hplm.server.ports import LOOPBACK, Ports, free_ports, listen, listens
from hplm.server.process import Process
from hplm.server.triton import DRAIN_SECONDS
from hplm.tenants.registry import registries_of
from hplm.tenants.state import READER, State

HPLM = (sys.executable, "-m", "hplm.cli.main")
CLUSTER, LOCK, ROUTER = "cluster.json", "lock", "router"
START_SECONDS = 300.0  # for a server
SERVER_SECONDS = 25.0  # for it to end: `hplm serve` gives its models ten to drain
PLAIN_SECONDS = 300.0  # for HAProxy to start, on a machine that is busy with other things too
UP_SECONDS = 300.0  # for the router to find a ready replica healthy
IDLE_SECONDS = 30.0  # for the requests of a replica that is replaced
END_SECONDS = 5.0  # for processes that hold no requests
LOOK_SECONDS = 0.5
SHORT_SECONDS = 0.05
PORTS = 3  # of a server
READY = re.compile(r"^Ready", re.MULTILINE)


class LocalReplica(Process):
    """One server, which reads the cluster's registry."""

    def __init__(self, plan: PlannedReplica, folder: Path, state: Path, ports: Ports) -> None:
        self.plan = plan
        logs = folder / "logs"
        serve = ["env", f"{READER}={plan.name}", *HPLM, "serve"]
        serve += ["--repository", str(plan.repository), "--state", str(state)]
        serve += ["--state-must-exist", "--log-file", str(logs / f"{plan.name}-triton.log")]
        for flag, port in ports.items():
            serve += [flag, str(port)]
        super().__init__(plan.name, serve, logs / f"{plan.name}.log", plan.cores)
        self.http, self.grpc, self.metrics = (f"{LOOPBACK}:{port}" for _, port in ports.items())

    def until_ready(self, meanwhile: Callable[[], None]) -> None:
        """Returns when the server, which was started, is ready."""
        self.wait_until(lambda: self.pid is not None and READY.search(self.said()), START_SECONDS, meanwhile)


class Cluster:
    """Use it in a `with` statement: at its end all processes end in order, so that each request in flight is answered."""

    def __init__(self, pools: Sequence[Sequence[PlannedReplica]], state: Path, folder: Path, port: int, say: Say) -> None:
        self._planned = pools
        self._state = state.resolve()
        self._folder = folder.resolve()
        self._port = port
        self._say = say
        haproxy()  # a missing one is an error before anything has started
        self._ending = ExitStack()
        self._pools: list[list[LocalReplica]] = []
        self._router: Process | None = None
        self._others: list[Process] = []
        self._haproxy = AdminSocket(self._folder / ROUTER / SOCKET)
        self._replacing: LocalReplica | None = None

    def __enter__(self) -> Cluster:
        with ExitStack() as ending:
            self._lock(ending)
            self._listener = Listener(self._folder)
            ending.callback(self._listener.close)
            with listen(LOOPBACK, self._port, "--port"):  # a clear error before anything has started
                self._free = iter(free_ports(PORTS * sum(map(len, self._planned)) + 1))
            self._port = self._port or next(self._free)
            ending.callback(self._stop)
            self._start()
            self._ending = ending.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending.close()

    @property
    def _replicas(self) -> list[LocalReplica]:
        return [replica for pool in self._pools for replica in pool]

    @property
    def address(self) -> str:
        """The address of the router."""
        return f"{LOOPBACK}:{self._port}"

    def run(self) -> None:
        """Serves until an interrupt."""
        while True:
            self._look()
            self._listener.serve({"roll": self.roll, "status": self.status}, LOOK_SECONDS)

    def roll(self, say: Say) -> dict[str, Any]:
        """Replaces one replica after the other. Requests go to the others meanwhile."""
        for first, *others in self._pools:
            if not others:
                name = first.plan.pool
                raise HplmError(f"pool {name!r} has a single replica, so nobody would serve meanwhile: give --replicas 2")
        for pool in self._pools:
            for replica in pool:
                self._replace(replica, pool, say)
        return {"rolled": [replica.name for replica in self._replicas]}

    def status(self, say: Say) -> dict[str, Any]:
        """Says a line for each replica."""
        found: dict[str, Any] = {}
        for replica in self._replicas:
            share, taken = self._haproxy.share(replica.name), self._taken(replica)
            word = "replaced" if replica is self._replacing else share.state
            found[replica.name] = {
                "is": word,
                "requests": share.requests,
                "in_flight": share.in_flight,
                "http": replica.http,
                "metrics": replica.metrics,
                "generations": taken,
            }
            generations = ", ".join(f"{backbone} {own[0]} of {own[1]}" for backbone, own in taken.items())
            requests = f"{share.requests:,} requests, {share.in_flight} in flight"
            say(f"{replica.name:<13} {word:<9} {requests}, {f'generation of {generations}, ' if taken else ''}{replica.http}")
        return found

    def _taken(self, replica: LocalReplica) -> dict[str, tuple[int, int]]:
        """Returns the generation of each backbone that a replica serves, and the newest one. Without changes: nothing."""
        found: dict[str, tuple[int, int]] = {}
        for file in sorted(self._state.glob("*/CURRENT")):
            if not (replica.plan.repository / file.parent.name).is_dir():
                continue  # its group has no tenants of this backbone
            state = State(file.parent)
            own = [taken for taken in state.taken(state.clock()) if taken.name.startswith(f"{replica.name}-")]
            served = min((taken.generation for taken in own if not taken.is_silent), default=0)
            found[file.parent.name] = (served, state.current())
        return found

    def _start(self) -> None:
        for pool in self._planned:
            for registry in registries_of(pool[0].repository, self._state).values():
                if registry.begin():
                    self._say(f"{'state':<13} {registry.store} is new: nothing was changed since the export")
            self._pools.append(
                [LocalReplica(plan, self._folder, self._state, Ports(*itertools.islice(self._free, PORTS))) for plan in pool]
            )
        for replica in self._replicas:
            replica.start()
            cores = f"cores {','.join(map(str, replica.plan.cores))}, " if replica.plan.cores else ""
            self._say(f"{replica.name:<13} {cores}HTTP {replica.http}, log {replica.log_file}: loading")
        for replica in self._replicas:
            replica.until_ready(self._look)
        self._start_router()

    def _start_router(self) -> None:
        described, to = self._folder / CLUSTER, self._folder / ROUTER
        content = {"state": str(self._state), "pools": [_described(pool) for pool in self._pools]}
        write(described, KIND, FORMAT, content)
        route = [*HPLM, "route", "--cluster", str(described), "--to", str(to), "--port", str(self._port), "--stats-port", "0"]
        first = Process("hplm route", route, self._log("route"))
        first.start()
        first.finish(PLAIN_SECONDS)
        self._router = Process("HAProxy", start_command(to), self._log("haproxy"))
        watch = Process("hplm route --watch", [*route, "--watch"], self._log("route"))
        self._others += [self._router, watch]
        self._router.start()
        self._router.wait_until(lambda: listens(self._port) and self._haproxy.takes_commands(), PLAIN_SECONDS)
        watch.start()
        for replica in self._replicas:
            self._until_up(replica)
        self._say(f"{'router':<13} {self.address} (HAProxy), for HTTP and gRPC")

    def _replace(self, replica: LocalReplica, pool: Sequence[LocalReplica], say: Say) -> None:
        for other in pool:
            if other is not replica:
                self._until_up(other)
        self._replacing = replica
        try:
            say(f"{replica.name:<13} gets no new requests")
            self._haproxy.set_state(replica.name, "drain")
            self._until(lambda: self._haproxy.share(replica.name).in_flight == 0, IDLE_SECONDS)
            say(f"{replica.name:<13} is stopped and started again")
            replica.stop(SERVER_SECONDS, meanwhile=self._meanwhile)
            replica.start()
            replica.until_ready(self._meanwhile)
        finally:  # also where it has failed: it is started again, and only then found healthy
            self._replacing = None
            with suppress(HplmError):  # HAProxy is away; a new one knows of no drain
                self._haproxy.set_state(replica.name, "ready")
        self._until_up(replica)
        say(f"{replica.name:<13} is back")

    def _until_up(self, replica: LocalReplica) -> None:
        if not self._until(lambda: self._haproxy.share(replica.name).state == "up", UP_SECONDS):
            raise HplmError(
                f"HAProxy does not find {replica.name} healthy within {UP_SECONDS:g} s: read {self._log('haproxy')}"
            )

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits for a condition while the cluster is looked after. Returns whether it came true."""
        deadline = time.monotonic() + seconds
        while not (came := condition()) and time.monotonic() < deadline:
            self._meanwhile()
        return came

    def _meanwhile(self) -> None:
        """Does what is due while a command waits, and answers other questions."""

        def refuse(_: Say) -> dict[str, Any]:
            raise HplmError("the cluster is busy with starting, or with another `hplm cluster roll`: wait until that has ended")

        self._look()
        self._listener.serve({"roll": refuse, "status": self.status}, SHORT_SECONDS)

    def _look(self) -> None:
        """Starts again what has ended by itself."""
        for process in (*self._others, *self._replicas):
            process.look(self._say)

    def _stop(self) -> None:
        """Ends the router first, which answers the requests that it has; then the servers, and then what they followed."""
        if self._router is not None:
            self._router.stop(DRAIN_SECONDS, signal.SIGUSR1)  # no new connections
        for replica in self._replicas:
            replica.ask_to_end()
        for replica in self._replicas:
            replica.stop(SERVER_SECONDS)
        for process in reversed(self._others):
            process.stop(END_SECONDS)

    def _lock(self, ending: ExitStack) -> None:
        """Keeps the folder for this cluster until it ends."""
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = ending.enter_context((self._folder / LOCK).open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HplmError(f"a cluster runs in {self._folder} already: stop it, or name another --folder") from None

    def _log(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.log"


def _described(pool: Sequence[LocalReplica]) -> dict[str, Any]:
    """Returns a pool as `hplm route` reads it."""
    plan = pool[0].plan
    return {
        "name": plan.pool,
        "repository": str(plan.repository.resolve()),
        "replicas": [{"id": own.plan.id, "name": own.name, "http": own.http, "grpc": own.grpc} for own in pool],
    }
