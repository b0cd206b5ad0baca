"""A copy of a repository with a state of its own, served by `hplm serve` as users run it: for tests that harm or change it."""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from hplm.adapters.bank import Bank
from hplm.errors import HplmError
from hplm.server import process_group
from hplm.server.stubs import stubs
from hplm.tenants.knowledge import Knowledge
from hplm.tenants.manager import Manager
from hplm.tenants.state import EXPORTED_BANKS, EXPORTED_TENANTS

SERVER, ENGINE = "tritonserver", "engine"
GUEST = "guest-of-a-test"
_END_SECONDS = 60.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repository", type=Path, required=True, metavar="DIR", help="model repository to copy and serve")
    parser.add_argument("--backbone", help="name of the backbone (default: the repository's only one)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")


class ServedCopy:
    def __init__(self, original: Path, folder: Path, state: Path, backbone: str | None = None) -> None:
        """`folder`: where the copy and the log are written. `backbone`: its name, if the repository has several."""
        self.repository, self.state = folder / "repository", state
        shutil.copytree(original, self.repository)
        self.backbone = backbone or _only_backbone(self.repository)
        log = folder / "serve.log"
        ports = [option for service in ("http", "grpc", "metrics") for option in (f"--{service}-port", "0")]
        command = [sys.executable, "-m", "hplm.cli.main", "serve", "--repository", str(self.repository), "--state", str(state)]
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

    @property
    def models(self) -> list[str]:
        """The models that clients ask."""
        return [self.backbone, "hplm"] if (self.repository / "hplm").is_dir() else [self.backbone]

    def open_tenants(self) -> list[str]:
        """Returns the tenants that answer without a key."""
        found = [tenant.id for tenant in self.manager().current().tenants if not tenant.keys]
        if not found:
            raise HplmError("every tenant of the repository has a key: export tenants without keys for this test")
        return found

    def manager(self) -> Manager:
        return Manager(self.folder, self.state)

    def pid(self, part: str) -> int | None:
        """Returns the process of the server, the engine or a model, or None while there is none."""
        server = self._server()
        if part == SERVER or server is None:
            return server
        if part == ENGINE:
            return next((pid for pid in process_group.members(server) if _is_engine(pid)), None)
        return next((stub.pid for stub in stubs(server) if stub.model == part), None)

    def processes(self) -> dict[str, int]:
        """Returns the server, its models and their engine by their names."""
        server = self._server()
        if server is None:
            return {}
        found = {SERVER: server, **{stub.model: stub.pid for stub in stubs(server)}}
        engine = self.pid(ENGINE)
        return found | ({ENGINE: engine} if engine is not None else {})

    def add_guest(self) -> str:
        """Adds a copy of a tenant, as `GUEST`. Returns that tenant's name."""
        manager = self.manager()
        tenant = manager.current().tenants[0]
        folder = self.folder / EXPORTED_BANKS
        head = Bank(folder / tenant.head_record.bank)
        adapter = None
        if tenant.adapter is not None:
            bank = Bank(folder / tenant.adapter.bank)
            adapter = bank.layout, bank.weights(tenant.adapter)
        # The record has room for more labels than the tenant has.
        layout = replace(head.layout, size=len(tenant.labels))
        tensors = {name: tensor[: len(tenant.labels)] for name, tensor in head.weights(tenant.head_record)[0].items()}
        knowledge = Knowledge(
            domain=tenant.domain,
            domain_version=tenant.domain_version,
            task=tenant.task,
            labels=tuple(tenant.labels),
            head=(layout, tensors),
            adapter=adapter,
        )
        manager.add(GUEST, knowledge)
        manager.settle_now()
        return tenant.id

    def delete_guest(self) -> None:
        manager = self.manager()
        manager.delete(GUEST)
        manager.settle_now()

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
            if b"--model-repository" in _arguments(child):
                return child
        return None

    def _wait_until_ready(self) -> str:
        while self._process.poll() is None:
            said = self.said()
            if "\nReady" in said and (found := re.search(r"^HTTP +(\S+)$", said, re.MULTILINE)):
                return found[1]
            time.sleep(0.1)
        raise HplmError(f"`hplm serve` does not start: {self.said()}")


def _only_backbone(repository: Path) -> str:
    found = sorted(path.parent.parent.name for path in repository.glob(f"*/1/{EXPORTED_TENANTS}"))
    if len(found) != 1:
        raise HplmError(f"{repository} has {len(found)} backbones ({', '.join(found)}): name one with --backbone")
    return found[0]


def _is_engine(pid: int) -> bool:
    return b"hplm.engine.child" in _arguments(pid)


def _arguments(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""
