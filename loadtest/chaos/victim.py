"""The served copy of a repository that is harmed: `hplm serve` as a process, with a state of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from hplm.errors import HplmError
from hplm.server import process_group
from hplm.server.stubs import Stub, stubs
from hplm.tenants.manager import Manager

SERVER, ENGINE = "tritonserver", "engine"
_END_SECONDS = 60.0


class Victim:
    def __init__(self, repository: Path, state: Path, backbone: str, log: Path) -> None:
        self.repository, self.state, self.backbone = repository, state, backbone
        self._log = log
        ports = [option for service in ("http", "grpc", "metrics") for option in (f"--{service}-port", "0")]
        command = [sys.executable, "-m", "hplm.cli.main", "serve", "--repository", str(repository), "--state", str(state)]
        self._output = log.with_suffix(".out").open("w+")
        self._process = subprocess.Popen(
            [*command, *ports, "--log-file", str(log)], stdout=self._output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            self.address = self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def folder(self) -> Path:
        return self.repository / self.backbone / "1"

    def manager(self) -> Manager:
        return Manager(self.folder, self.state)

    def pid(self, part: str) -> int | None:
        """Returns the process of the server, the engine or a model, or None while there is none."""
        server = self._server()
        if part == SERVER or server is None:
            return server
        if part == ENGINE:
            return next((pid for pid in process_group.members(server) if _is_engine(pid)), None)
        return next((stub.pid for stub in self._stubs(server) if stub.model == part), None)

    def said(self) -> str:
        """Returns what `hplm serve` has printed."""
        return Path(self._output.name).read_text(errors="replace")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _server(self) -> int | None:
        """Returns the process of tritonserver: the child of `hplm serve` that leads the group of its model processes."""
        try:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        except OSError as error:
            raise HplmError(f"`hplm serve` has ended: read {self._output.name}") from error
        for child in map(int, children):
            if self._stubs(child) or b"--model-repository" in _arguments(child):
                return child
        return None

    def _stubs(self, group: int) -> list[Stub]:
        return stubs(group)

    def _wait_until_ready(self) -> str:
        while self._process.poll() is None:
            said = self.said()
            if "\nReady" in said and (found := re.search(r"^HTTP +(\S+)$", said, re.MULTILINE)):
                return found[1]
            time.sleep(0.1)
        raise HplmError(f"`hplm serve` does not start: {self.said()}")


def _is_engine(pid: int) -> bool:
    return b"hplm.engine.child" in _arguments(pid)


def _arguments(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""
