"""One replica on this machine: a server that reads the cluster's registry."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from hplm.cluster.pools import PlannedReplica
from hplm.registry.store import Place
from hplm.server.ports import LOOPBACK, Ports
from hplm.server.process import Process
from hplm.tenants.state import READER

HPLM = (sys.executable, "-m", "hplm.cli.main")
START_SECONDS = 300.0
SERVER_SECONDS = 25.0  # `hplm serve` gives its models ten to drain
_READY = re.compile(r"^Ready", re.MULTILINE)


class LocalReplica:
    def __init__(
        self, replica: PlannedReplica, folder: Path, state: Place, ports: Ports, variables: Mapping[str, str] | None = None
    ) -> None:
        """`variables`: of its environment, besides ours."""
        self.name, self.cores, self.repository = replica.name, replica.cores, replica.repository
        self.id = replica.id
        self.ports = ports
        logs = folder / "logs"
        environment = {**(variables or {}), READER: self.name}
        serve = ["env", *map("=".join, environment.items()), *HPLM, "serve"]
        serve += ["--repository", str(self.repository), "--state", str(state)]
        serve += ["--state-must-exist", "--log-file", str(logs / f"{self.name}-triton.log")]
        for flag, port in self.ports.items():
            serve += [flag, str(port)]
        self.server = Process(self.name, serve, logs / f"{self.name}.log", self.cores)

    @property
    def http(self) -> str:
        return f"{LOOPBACK}:{self.ports.http}"

    @property
    def grpc(self) -> str:
        return f"{LOOPBACK}:{self.ports.grpc}"

    @property
    def metrics(self) -> str:
        return f"{LOOPBACK}:{self.ports.metrics}"

    def start(self) -> None:
        """Call `wait` then."""
        self.server.start()

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Returns when the server is ready."""
        self.server.wait_until(self.is_ready, START_SECONDS, meanwhile)

    def is_ready(self) -> bool:
        return self.server.pid is not None and _READY.search(self.server.said()) is not None

    def look(self, say: Callable[[str], None]) -> None:
        self.server.look(say)

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
        self.server.stop(SERVER_SECONDS)
