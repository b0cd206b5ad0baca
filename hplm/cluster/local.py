"""One replica on this machine: a server that reads the cluster's registry."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
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


class LocalReplica(Process):
    def __init__(self, plan: PlannedReplica, folder: Path, state: Place, ports: Ports) -> None:
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
        self.wait_until(lambda: self.pid is not None and _READY.search(self.said()), START_SECONDS, meanwhile)

    def replace(self, meanwhile: Callable[[], None]) -> None:
        """Stops the server, and starts it again."""
        self.stop(SERVER_SECONDS, meanwhile=meanwhile)
        self.start()
        self.until_ready(meanwhile)
