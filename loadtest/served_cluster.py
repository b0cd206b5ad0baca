"""A cluster that `hplm cluster up` runs, as users do: for tests and measurements that harm or change it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hplm.cluster.control import ask
from hplm.cluster.running import CLUSTER
from hplm.errors import HplmError
from hplm.server import process_group
from hplm.tenants.manager import Manager

END_SECONDS = 120.0
START_SECONDS = 900.0  # of all replicas


class ServedCluster:
    def __init__(
        self,
        repository: Path,
        folder: Path,
        replicas: int | None = 2,
        cores: Sequence[int] = (),
        more: Sequence[str] = (),
    ) -> None:
        """`folder`: where the cluster keeps its files; its path is short. `replicas`: None if `more` says it."""
        self.repository, self.folder, self.state = repository, folder, folder / "state"
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "hplm.cli.main", "cluster", "up", "--repository", str(repository), *more]
        command += ["--folder", str(folder), "--state", str(self.state), "--port", "0"]
        command += ["--replicas", str(replicas)] if replicas is not None else []
        command += ["--cores", ",".join(map(str, cores))] if cores else []
        self._output = (folder / "up.out").open("w+")
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT)
        try:
            self.address = self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> ServedCluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def replicas(self) -> dict[str, str]:
        """The address of each replica's HTTP service, by its name."""
        pools = json.loads((self.folder / CLUSTER).read_bytes())["pools"]
        return {replica["name"]: replica["http"] for pool in pools for replica in pool["replicas"]}

    @property
    def metrics(self) -> dict[str, str]:
        """The address of each replica's metrics, by its name."""
        return {name: own["metrics"] for name, own in self.status().items()}

    def manager(self, backbone: str | None = None) -> Manager:
        return Manager.open(self.repository, self.state, backbone)

    def said(self) -> str:
        """Returns what `hplm cluster up` has printed."""
        return Path(self._output.name).read_text(errors="replace")

    def roll(self, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
        return ask(self.folder, "roll", say)

    def status(self) -> dict[str, Any]:
        return ask(self.folder, "status", lambda _: None)

    def kill(self, replica: str) -> tuple[int, int]:
        """Kills all processes of a replica at once, as if its machine had ended. Returns the main ones."""
        serve, triton = self.pids(replica)
        os.kill(serve, signal.SIGKILL)  # first, so that it does not start the other one again
        os.killpg(triton, signal.SIGKILL)
        return serve, triton

    def is_back(self, replica: str, killed: tuple[int, int]) -> bool:
        """Whether the replica has been started again and gets requests."""
        try:
            return self.pids(replica) != killed and self.status()[replica]["is"] == "up"
        except HplmError:
            return False

    def pids(self, replica: str) -> tuple[int, int]:
        """Returns the processes of `hplm serve` and of its tritonserver."""
        for pid in _children(self.process.pid):
            given = process_group.arguments(pid)
            if "serve" in given and str(self.folder.resolve() / replica) in given:
                for child in _children(pid):
                    if any(argument.startswith("--model-repository") for argument in process_group.arguments(child)):
                        return pid, child
        raise HplmError(f"{replica} does not run: {self.said()}")

    @property
    def router(self) -> int:
        """The main process of HAProxy."""
        for pid in _children(self.process.pid):
            if any(word.endswith("haproxy") for word in process_group.arguments(pid)[:1]):
                return pid
        raise HplmError(f"the router does not run: {self.said()}")

    def processes(self) -> list[int]:
        """Returns all living processes that the cluster has started, and itself."""
        found, looked_at = [self.process.pid], 0
        while looked_at < len(found):
            found += _children(found[looked_at])
            looked_at += 1
        return found

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._output.close()

    def _wait_until_ready(self) -> str:
        """Returns the address of the router."""
        end = time.monotonic() + START_SECONDS
        while self.process.poll() is None and time.monotonic() < end:
            if found := re.search(r"^Ready at (\S+), ", self.said(), re.MULTILINE):
                return found[1]
            time.sleep(0.1)
        raise HplmError(f"`hplm cluster up` does not start: {self.said()}")


def _children(pid: int) -> list[int]:
    """Returns the children of all threads of a process; none if it has ended."""
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found
