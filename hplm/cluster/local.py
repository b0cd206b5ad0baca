"""One replica on this machine: a server that reads the cluster's registry."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from hplm.cluster.pools import LocalPool, PlannedReplica
from hplm.registry.store import Place
from hplm.server.ports import LOOPBACK, Ports
from hplm.server.process import Process
from hplm.tenants.state import READER

HPLM = (sys.executable, "-m", "hplm.cli.main")
START_SECONDS = 300.0
SERVER_SECONDS = 25.0  # `hplm serve` gives its models ten to drain
_READY = re.compile(r"^Ready", re.MULTILINE)


class LocalReplica(Process):
    def __init__(self, pool: LocalPool, replica: PlannedReplica, folder: Path, state: Place, ports: Ports) -> None:
        self.pool, self.id, self.cores, self.repository = pool, replica.id, replica.cores, replica.repository
        logs = folder / "logs"
        serve = ["env", f"{READER}={replica.name}", *HPLM, "serve"]
        serve += ["--repository", str(self.repository), "--state", str(state)]
        serve += ["--state-must-exist", "--log-file", str(logs / f"{replica.name}-triton.log")]
        for flag, port in ports.items():
            serve += [flag, str(port)]
        super().__init__(replica.name, serve, logs / f"{replica.name}.log", self.cores)
        self.http, self.grpc, self.metrics = (f"{LOOPBACK}:{port}" for _, port in ports.items())

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Returns when the server, which was started, is ready."""
        self.wait_until(lambda: self.pid is not None and _READY.search(self.said()), START_SECONDS, meanwhile)

    def replace(self, meanwhile: Callable[[], None]) -> None:
        """Stops the server, and starts it again."""
        self.ask_to_end()
        self.wait_for_end(SERVER_SECONDS, meanwhile)
        self.stop(0)
        self.start()
        self.wait(meanwhile)
