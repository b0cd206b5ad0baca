"""One replica on this machine: a server with a state of its own, and the follower that keeps this state equal to the truth."""

from __future__ import annotations

import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from hplm.cluster.pools import PlannedReplica
from hplm.server.ports import LOOPBACK, Ports
from hplm.server.process import Process
from hplm.tenants.state import State

HPLM = (sys.executable, "-m", "hplm.cli.main")
START_SECONDS = 300.0
COPY_SECONDS = 3600.0  # of all tables
SERVER_SECONDS = 25.0  # `hplm serve` gives its models ten to drain
FOLLOWER_SECONDS = 5.0
_READY = re.compile(r"^Ready", re.MULTILINE)


class LocalReplica:
    def __init__(self, replica: PlannedReplica, folder: Path, source: str, token_file: Path, ports: Ports) -> None:
        """`source`: the address of the file server, and `token_file` the secret that it wants."""
        self.name, self.cores, self.repository = replica.name, replica.cores, replica.repository
        self.id = replica.id
        self.state = folder / self.name
        self.ports = ports
        logs = folder / "logs"
        serve = [*HPLM, "serve", *self._served(), "--log-file", str(logs / f"{self.name}-triton.log")]
        for flag, port in self.ports.items():
            serve += [flag, str(port)]
        follow = [*HPLM, "follow", *self._served(), "--from", source, "--token-file", str(token_file), "--name", self.name]
        self.server = Process(self.name, serve, logs / f"{self.name}.log", self.cores)
        self.follower = Process(f"the follower of {self.name}", follow, logs / f"{self.name}-follow.log")
        self._first_copy = Process(f"the first copy of {self.name}", [*follow, "--once"], logs / f"{self.name}-follow.log")

    @property
    def http(self) -> str:
        return f"{LOOPBACK}:{self.ports.http}"

    @property
    def grpc(self) -> str:
        return f"{LOOPBACK}:{self.ports.grpc}"

    @property
    def metrics(self) -> str:
        return f"{LOOPBACK}:{self.ports.metrics}"

    def copy(self) -> None:
        """Begins to copy the newest generation, so that the server never serves an older one.

        The copy is begun anew, because the file server has another address at each start, and a copy has one source.
        """
        for folder in self.state.glob("*"):
            if State(folder).followed.exists():
                shutil.rmtree(folder)
        self._first_copy.start()

    def start(self, meanwhile: Callable[[], None]) -> None:
        """Starts both processes when the copy is complete. Call `wait` then."""
        self._first_copy.finish(COPY_SECONDS, meanwhile)
        self.follower.start()
        self.server.start()

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Returns when the server is ready."""
        self.server.wait_until(self.is_ready, START_SECONDS, meanwhile)

    def is_ready(self) -> bool:
        return self.server.pid is not None and _READY.search(self.server.said()) is not None

    def look(self, say: Callable[[str], None]) -> None:
        self.server.look(say)
        self.follower.look(say)

    def replace(self, meanwhile: Callable[[], None]) -> None:
        """Stops the server, and starts it again."""
        self.server.ask_to_end()
        self.server.wait_for_end(SERVER_SECONDS, meanwhile)
        self.server.stop(0)
        self.server.start()
        self.wait(meanwhile)

    def ask_to_end(self) -> None:
        self.server.ask_to_end(signal.SIGTERM)

    def stop(self) -> None:
        self._first_copy.stop(FOLLOWER_SECONDS)
        self.server.stop(SERVER_SECONDS)
        self.follower.stop(FOLLOWER_SECONDS)

    def _served(self) -> tuple[str, ...]:
        return "--repository", str(self.repository), "--state", str(self.state)
