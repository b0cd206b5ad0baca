"""Several servers on this machine behind HAProxy, as docs/cluster.md starts them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from typing_extensions import Self

from hplm.cluster.router import SOCKET, start_command
from hplm.errors import HplmError
from hplm.server import process_group
from hplm.server.ports import free_ports, listens
from hplm.server.process import Process
from hplm.tenants.manager import Manager
from hplm.tenants.registry_writer import registries_of
from loadtest.proxy import AdminSocket
from loadtest.server import READY, triton_of

HPLM = (sys.executable, "-m", "hplm.cli.main")
HOST = "127.0.0.1"
FIRST, STEP = 8000, 10  # the first HTTP port, and how far that of the next server is
ROUTER = 8080
START_S, END_S = 300.0, 60.0


def serve_commands(count: int) -> list[list[str]]:
    """Returns the commands that start so many servers at ports of their own."""
    services = ("http", "grpc", "metrics")
    ports = [{f"--{name}-port": FIRST + STEP * at + n for n, name in enumerate(services)} for at in range(count)]
    return [["serve", *(word for option in own.items() for word in map(str, option)), "--state", "state"] for own in ports]


def description(count: int) -> dict[str, Any]:
    """Returns the content of cluster.json for these servers."""
    places = [(f"{HOST}:{FIRST + STEP * at}", f"{HOST}:{FIRST + STEP * at + 1}") for at in range(count)]
    replicas = [{"id": n, "name": f"replica-{n}", "http": http, "grpc": grpc} for n, (http, grpc) in enumerate(places, start=1)]
    return {"kind": "hplm replicas", "format": 1, "repository": "model_repository", "replicas": replicas}


class ServedCluster:
    """Servers that read one state, and a router before them. All ports are others, which are free."""

    def __init__(
        self,
        repository: Path,
        folder: Path,
        cores: Sequence[Sequence[int]] = ((), ()),
        serves: Sequence[Sequence[str]] = (),
        described: dict[str, Any] | None = None,
    ) -> None:
        """`folder`: for files; its path is short. `cores`: of each server. `serves`, `described`: commands and cluster.json."""
        self.repository, self.folder, self.state = repository, folder, folder / "state"
        serves = serves or serve_commands(len(cores))
        known = sorted({word for words in serves for word in words if word.isdigit()} | {str(ROUTER)})
        ports = dict(zip(known, map(str, free_ports(len(known))), strict=True))
        content = re.sub(r":(\d{4,5})\b", lambda port: f":{ports[port[1]]}", json.dumps(described or description(len(cores))))
        self._described = json.loads(content) | {"repository": str(repository)}
        self.port = int(ports[str(ROUTER)])
        self.address = f"{HOST}:{self.port}"
        self.socket = AdminSocket(folder / "router" / SOCKET)
        self.replicas = {one["name"]: str(one["http"]) for one in self._described["replicas"]}
        self._servers: dict[str, Process] = {}
        for name, words, own in zip(self.replicas, serves, cores, strict=True):
            here = {**ports, "state": str(self.state)}
            command = [*HPLM, *(here.get(word, word) for word in words), "--repository", str(repository)]
            command += ["--log-file", str(folder / f"{name}-triton.log")]
            self._servers[name] = Process(name, command, folder / f"{name}.log", own)
        self._router = Process("HAProxy", start_command(folder / "router"), folder / "haproxy.log")
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for registry in registries_of(self.repository, self.state).values():
                registry.begin()
            for server in self._servers.values():
                server.start()
                stack.callback(server.stop, END_S)
            cluster = self.folder / "cluster.json"
            cluster.write_text(json.dumps(self._described), "utf-8")
            route = ["route", "--cluster", str(cluster), "--to", str(self.folder / "router")]
            route += ["--port", str(self.port), "--stats", "none"]
            done = subprocess.run([*HPLM, *route], capture_output=True, text=True)
            if done.returncode:
                raise HplmError(f"`hplm route` failed: {done.stderr}")
            self._router.start()
            stack.callback(self._router.stop, END_S)
            self._router.wait_until(lambda: listens(self.port) and self.socket.answers(), START_S)
            for name in self.replicas:
                self.until_up(name)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def manager(self) -> Manager:
        return Manager.open(self.repository, self.state)

    def requests(self) -> dict[str, int]:
        """Returns how many requests each replica has got."""
        return {name: int(row["stot"]) for name, row in self.socket.servers().items()}

    def start(self, replica: str, repository: Path | None = None, state: Path | None = None) -> None:
        """Starts a replica again, from now on with another export and its registry if they are given."""
        server = self._servers[replica]
        for option, place in (("--repository", repository), ("--state", state)):
            if place is not None:
                at = server.command.index(option) + 1
                server.command = [*server.command[:at], str(place), *server.command[at + 1 :]]
        server.start()

    def until_up(self, replica: str) -> None:
        """Waits until a replica, which was started, gets requests."""
        server = self._servers[replica]
        server.wait_until(lambda: re.search(READY, server.output(), re.MULTILINE | re.DOTALL), START_S)
        self._router.wait_until(lambda: self.socket.servers()[replica]["status"].startswith("UP"), START_S)

    def terminate(self, replica: str) -> None:
        """Ends a replica by SIGTERM, as an orchestrator does. Returns when it has ended."""
        self._servers[replica].ask_to_end()
        self._servers[replica].finish(END_S)

    def kill(self, replica: str) -> None:
        """Kills all processes of a replica at once, as if its machine had ended."""
        serve = self._servers[replica].pid
        triton = triton_of(serve) if serve is not None else None
        if serve is None or triton is None:
            raise HplmError(f"{replica} does not run: {self._servers[replica].output()}")
        os.kill(serve, signal.SIGKILL)  # first, so that it does not start the other one again
        process_group.kill(triton)
        self._servers[replica].wait(END_S)
