"""The faults that are made in a server. A fault begins, may last some seconds, and is undone if it does not undo itself.

A process that was killed stays dead: the server must mend that.
"""

from __future__ import annotations

import contextlib
import http.client
import mmap
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

from hplm.errors import HplmError
from hplm.location import local_folder
from hplm.model.config import BackboneConfig
from hplm.registry.folder import Folder
from hplm.server.process_group import SHARED_MEMORY
from hplm.tenants.models import upper_of
from hplm.tenants.state_folder import EXPORTED_CONFIG, EXPORTED_RECORDS, EXPORTED_TABLES
from loadtest.chaos.history import FAILED, OK, REFUSED, Asker, Observation, TenantText
from loadtest.server import DECODER, ENGINE, GUEST, SERVER, ServedCopy

BROKEN_SECONDS = 5.0  # how long a file stays broken and a disk full
TABLES = f"{EXPORTED_TABLES}/*/*/values"
FLOOD = 300  # connections
CHANGE_SECONDS = 4.0  # longer than a command takes that changes a tenant
LEAVERS = 50
WITHIN_SECONDS = 30.0  # a server of a bucket must have a change; with a folder, managers wait until it has
SPARE = 1 << 20  # bytes that a full disk still has
FULL_AT_MOST = 1 << 30  # larger disks are not filled


Begin = Callable[[ServedCopy, random.Random], AbstractContextManager[None]]


class Fault(NamedTuple):
    name: str
    begin: Begin
    seconds: tuple[float, float] = (0.0, 0.0)  # how long it lasts before it is undone


class WrongAnswer(Exception):
    """The server gave an answer that it must not give, or none."""


class Unable(Exception):
    """The fault cannot be made now or on this machine."""


def faults(victim: ServedCopy) -> list[Fault]:
    models = [f"{victim.backbone}-lookup", upper_of(victim.backbone)]
    decoders = [path for path in victim.repository.glob(f"*/1/{EXPORTED_CONFIG}") if BackboneConfig.load(path).is_decoder]
    parts = [*models, *victim.models[1:], ENGINE, *[DECODER] * bool(decoders), SERVER]
    kill = [Fault(f"kill {part}", _signalled(part, signal.SIGKILL)) for part in parts]
    stop = [Fault(f"stop {part}", _signalled(part, signal.SIGSTOP, signal.SIGCONT), (0.5, 5.0)) for part in parts]
    lasting = (BROKEN_SECONDS, BROKEN_SECONDS)
    return [
        *kill,
        *stop,
        *([Fault("registry locked", _registry_locked, lasting)] if isinstance(victim.state, Path) else []),
        Fault("table replaced by garbage", _broken(TABLES, _replace), lasting),
        Fault("table truncated", _broken(TABLES, lambda path, _: os.truncate(path, path.stat().st_size // 3)), lasting),
        Fault("record flipped", _record_flipped, lasting),
        Fault("state's disk full", _disk_full, lasting),
        Fault("/dev/shm full", lambda *_: _full(SHARED_MEMORY), lasting),
        Fault("flood of half requests", _flood, (2.0, 2.0)),
        Fault("clients that leave", _leavers),
        Fault("tenant added and deleted", _tenant_comes_and_goes),
        Fault("manager killed", _manager_killed),
    ]


def _signalled(part: str, begin: signal.Signals, end: signal.Signals | None = None) -> Begin:
    @contextmanager
    def fault(victim: ServedCopy, chance: random.Random) -> Generator[None]:
        pid = victim.processes().get(part)
        if pid is None:
            raise Unable(f"{part} does not run at the moment")
        os.kill(pid, begin)
        yield
        if end is not None:
            with contextlib.suppress(ProcessLookupError):  # the server has already ended it
                os.kill(pid, end)

    return fault


@contextmanager
def _registry_locked(victim: ServedCopy, chance: random.Random) -> Generator[None]:
    registry = victim.state / victim.folder.parent.name
    assert isinstance(registry, Path)  # `faults` has this one only for a folder
    with Folder(registry).alone():
        yield


def _broken(pattern: str, damage: Callable[[Path, random.Random], None]) -> Begin:
    """Damages one of the files. Afterwards a copy gets its place."""

    @contextmanager
    def fault(victim: ServedCopy, chance: random.Random) -> Generator[None]:
        path = chance.choice(sorted(victim.folder.glob(pattern)))
        copy = Path(shutil.copyfile(path, path.with_name(f"{path.name}.copy")))
        try:
            damage(path, chance)
            yield
        finally:
            copy.replace(path)

    return fault


def _replace(path: Path, chance: random.Random) -> None:
    """Puts garbage in the file's place, as a failed copy does. Processes that have it open keep the old one."""
    garbage = path.with_name(f"{path.name}.garbage")
    garbage.write_bytes(chance.randbytes(min(path.stat().st_size, 1 << 20)))
    garbage.replace(path)


@contextmanager
def _record_flipped(victim: ServedCopy, chance: random.Random) -> Generator[None]:
    """Flips a byte and flips it back."""
    path = chance.choice(sorted(victim.folder.glob(f"{EXPORTED_RECORDS}/*")))
    at = chance.randrange(path.stat().st_size // 2, path.stat().st_size)

    def flip() -> None:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
            content[at] ^= 0xFF

    flip()
    try:
        yield
    finally:
        flip()


@contextmanager
def _disk_full(victim: ServedCopy, chance: random.Random) -> Generator[None]:
    with _full(local_folder(victim.state)):
        with contextlib.suppress(HplmError, OSError):  # a change must be refused, and nothing lost
            victim.add_guest()
        yield
    with contextlib.suppress(HplmError):
        victim.delete_guest()


@contextmanager
def _full(folder: Path) -> Generator[None]:
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    if free > FULL_AT_MOST:
        raise Unable(f"{folder} has {free / 1e9:,.0f} GB free: only small disks are filled (run as root, with `unshare`)")
    filler = folder / "chaos-filler"
    try:
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, free - SPARE))
        yield
    finally:
        filler.unlink(missing_ok=True)


@contextmanager
def _flood(victim: ServedCopy, chance: random.Random) -> Generator[None]:
    """Connections that begin a request and never end it."""
    host, _, port = victim.address.rpartition(":")
    with contextlib.ExitStack() as open_connections:
        for _ in range(FLOOD):
            with contextlib.suppress(OSError):
                connection = socket.create_connection((host, int(port)), timeout=5)
                open_connections.enter_context(connection)
                connection.sendall(b"POST /v2/models/x/infer HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{")
        yield


@contextmanager
def _leavers(victim: ServedCopy, chance: random.Random) -> Generator[None]:
    """Clients that send a request and close their connection at once."""
    (tenant, *_) = victim.open_tenants()
    for _ in range(LEAVERS):
        connection = http.client.HTTPConnection(victim.address, timeout=5)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", f"/v2/models/{victim.backbone}/infer", TenantText(tenant, "left " * 9).body())
        connection.close()
    yield


@contextmanager
def _manager_killed(victim: ServedCopy, chance: random.Random) -> Generator[None]:
    """A change that was acknowledged is never lost, and one that was interrupted hinders no other."""
    manager = victim.manager()
    tenant, before = manager.current().tenants[0], len(manager.registry.audit())
    place = ["--repository", victim.repository, "--state", victim.state, "--backbone", victim.backbone]
    words = ["tenant", "limit", tenant.id, "--in-flight", tenant.in_flight, *place, "--json"]
    with subprocess.Popen([*victim.PROGRAM, *map(str, words)], stdout=subprocess.PIPE, text=True) as process:
        time.sleep(chance.uniform(0, CHANGE_SECONDS))
        process.kill()
        said, _ = process.communicate()
    if said and len(manager.registry.audit()) == before:
        raise WrongAnswer(f"a change of {tenant.id} was acknowledged ({said.strip()}), and the registry does not have it")
    victim.add_guest()
    yield
    victim.delete_guest()


@contextmanager
def _tenant_comes_and_goes(victim: ServedCopy, chance: random.Random) -> Generator[None]:
    source = victim.add_guest()
    expected, answer = (asked(victim, TenantText(tenant, "the same text for both"), True) for tenant in (source, GUEST))
    if expected.logits is None:
        raise WrongAnswer(f"{source} was not answered: {expected.reason}")
    if answer.logits is None:
        raise WrongAnswer(f"{GUEST} was not answered: {answer.reason}")
    if not answer.agrees_with(expected.logits):
        raise WrongAnswer(f"{GUEST} is a copy of {source}, and its answer differs")
    victim.delete_guest()
    if asked(victim, TenantText(GUEST, "nobody"), False).outcome not in (REFUSED, FAILED):
        raise WrongAnswer(f"{GUEST} was deleted and is answered")
    yield


def asked(victim: ServedCopy, question: TenantText, is_answered: bool) -> Observation:
    """Returns the answer that a server gives when it has had the time to take a change. `is_answered`: what it must be."""
    until = time.monotonic() + (0.0 if isinstance(victim.state, Path) else WITHIN_SECONDS)
    with Asker(victim.address, victim.backbone) as asker:
        while ((answer := asker.ask(question)).outcome == OK) != is_answered and time.monotonic() < until:
            time.sleep(0.1)
    return answer
