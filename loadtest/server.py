"""Servers for tests that harm or change them: `hplm serve` on a copy of a repository."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from typing_extensions import Self

from hplm.adapters.records import RecordFile
from hplm.errors import HplmError
from hplm.location import Location
from hplm.server import process_group
from hplm.server.process import Process
from hplm.server.stubs import stubs
from hplm.tenants.knowledge import TenantKnowledge
from hplm.tenants.manager import Manager, exported_folder
from hplm.tenants.state_folder import EXPORTED_RECORDS

SERVER, ENGINE, DECODER = "tritonserver", "engine", "decoder"
ENGINES = {"hplm.engine.service": ENGINE, "hplm.generation.service": DECODER}
GUEST = "guest-of-a-test"
READY = r"^HTTP +(\S+)$.^gRPC +(\S+)$.^metrics +(\S+)/metrics$.*^Ready"
QUICK_HELP = "measure little on a toy that is made for it: the figures mean nothing, and no target is judged"
START_S, END_S = 900.0, 120.0  # seconds that a command may take to start and to end


def command(
    name: str,
    about: str | None,
    options: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace, Path, dict[str, Any]], None],
    small: str,
    arguments: Sequence[str] | None = None,
) -> int:
    """Runs a test on a copy of a repository, and prints its figures, also those from before a failure. Returns the exit status.

    `options`: adds those of the test. `run`: adds the figures, and raises if they are bad; in a folder that is removed
    afterwards. `small`: what --quick stands for, beside a toy repository that is made for it.
    """
    words, found, error = sys.argv[1:] if arguments is None else [*arguments], dict[str, Any](), ""
    parser = argparse.ArgumentParser(f"loadtest.{name}", None, about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--repository", type=Path, default=Path("model_repository"), help="repository to serve (default: %(default)s)")
    add("--backbone", help="name of the backbone (default: the repository's only one)")
    options(parser)
    add("--quick", action="store_true", help=QUICK_HELP)
    add("--json", action="store_true", help="print one line of JSON at the end")
    with TemporaryDirectory(prefix=f"hplm-{name}-") as folder:
        if "--quick" in words:
            from testing.random_repository import ServingOptions, write
            from testing.random_store import TOY

            write(toy := Path(folder, "toy"), TOY, 2, ServingOptions(dtype="fp32"))
            words = ["--repository", str(toy), *shlex.split(small), *words]
        given = parser.parse_args(words)
        try:
            run(given, Path(folder), found)
        except (HplmError, OSError) as failed:
            error = str(failed)
    if found:
        print(json.dumps(found, indent=None if given.json else 1))
    if error:
        print(f"{name}: {error}", file=sys.stderr)
    return int(bool(error))


def above_zero(word: str, kind: Callable[[str], float] = float) -> float:
    """Reads the value of an option."""
    if not 0 < (value := kind(word)) < math.inf:
        raise argparse.ArgumentTypeError(f"{word}: give a number above 0")
    return value


def at_least_one(word: str) -> int:
    return int(above_zero(word, int))


class RunningCommand:
    """An `hplm` command that serves until it is stopped. Start it from the main thread."""

    PROGRAM = (sys.executable, "-m", "hplm.cli.main")

    def __init__(self, command: Sequence[object], output: Path, ready: str, variables: Mapping[str, str] | None = None) -> None:
        """`ready`: a pattern of its output when it serves; the groups are its addresses. `variables`: of its environment."""
        given = ["env", *map("=".join, variables.items())] if variables else []
        self.process = Process(f"`hplm {command[0]}`", [*given, *self.PROGRAM, *map(str, command)], output)
        self.process.start()
        pattern = re.compile(ready, re.MULTILINE | re.DOTALL)
        try:
            self.process.wait_until(lambda: pattern.search(self.output()), START_S)
        except BaseException:
            self.process.stop(END_S)
            raise
        (self.address, *self._others), *_ = (found.groups() for found in pattern.finditer(self.output()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.stop(END_S)

    def output(self) -> str:
        """Returns what the command has printed."""
        return self.process.output()

    @property
    def pid_of_command(self) -> int:
        if self.process.pid is None:
            raise HplmError(f"{self.process.name} has ended: {self.output()}")
        return self.process.pid


class ServedCopy(RunningCommand):
    """A copy of a repository with a state of its own, served by `hplm serve`."""

    def __init__(
        self,
        original: Path,
        folder: Path,
        state: Location,
        backbone: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`folder`: where the copy and the logs are written. `backbone`: its name, if the repository has several."""
        self.repository, self.state = folder / "repository", state
        shutil.copytree(original, self.repository)
        self.folder = exported_folder(self.repository, backbone)
        self.backbone, self.log = self.folder.parent.name, folder / "serve.log"
        ports = [word for service in ("http", "grpc", "metrics") for word in (f"--{service}-port", 0)]
        command = ["serve", "--repository", self.repository, "--state", state, *ports, "--log-file", self.log]
        super().__init__(command, folder / "serve.out", READY, variables)
        self.grpc, self.metrics = self._others

    @property
    def models(self) -> list[str]:
        """The models to which clients send."""
        return [self.backbone, "hplm"] if (self.repository / "hplm").is_dir() else [self.backbone]

    def manager(self) -> Manager:
        return Manager(self.folder, self.state)

    def open_tenants(self) -> list[str]:
        """Returns the tenants that answer without a key."""
        found = sorted(tenant.id for tenant in self.manager().current().tenants if not tenant.keys)
        if not found:
            raise HplmError("every tenant of the repository has a key: export tenants without keys for this test")
        return found

    def processes(self) -> dict[str, int]:
        """Returns the server, its models and their engine by their names."""
        return processes_of(self.pid_of_command)

    def shared_memory(self) -> Callable[[], int]:
        """Returns a function that returns the bytes of the server's files in /dev/shm."""
        if (server := self.processes().get(SERVER)) is None:
            raise HplmError(f"the server has ended: {self.output()}")
        words = process_group.arguments(server)
        (own,) = (word.removeprefix("--id=") for word in words if word.startswith("--id="))
        return lambda: sum(map(_size_of, process_group.SHARED_MEMORY.glob(f"{own}*")))

    def add_guest(self) -> str:
        """Adds a copy of a tenant that answers without a key, as `GUEST`. Returns that tenant's name."""
        manager = self.manager()
        tenant = manager.current().find(self.open_tenants()[0])
        (file,) = {record.file for record in tenant.records()}
        packed = RecordFile((self.folder / EXPORTED_RECORDS / file).read_bytes())
        manager.add(GUEST, TenantKnowledge.read(packed, tenant.version))
        manager.settle()
        return tenant.id

    def delete_guest(self) -> None:
        manager = self.manager()
        manager.delete(GUEST)
        manager.settle()


def processes_of(serve: int) -> dict[str, int]:
    """Returns the server that `hplm serve` runs, its models and their engines by their names; none while it starts."""
    server = triton_of(serve)
    if server is None:
        return {}
    members = {pid: process_group.arguments(pid) for pid in process_group.members(server)}
    engines = {name: pid for pid, words in members.items() for module, name in ENGINES.items() if module in words}
    return {SERVER: server, **{stub.model: stub.pid for stub in stubs(server)}, **engines}


def triton_of(serve: int) -> int | None:
    """Returns the child of `hplm serve` that leads the group of its model processes."""
    starts = ((pid, process_group.arguments(pid)) for pid in children(serve))
    return next((pid for pid, words in starts if any(word.startswith("--model-repository") for word in words)), None)


def children(pid: int) -> Iterator[int]:
    """Yields the children of all threads of a process; none if it has ended."""
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (thread / "children").read_text().split())


def _size_of(region: Path) -> int:
    """Returns the memory that a file in /dev/shm takes, or 0 if it has just gone."""
    try:
        return region.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
