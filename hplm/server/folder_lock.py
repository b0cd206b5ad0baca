"""The lock of a backbone's model folder: the models that serve it share the lock, an export takes it alone.

It is a lock of the kernel on the folder itself. So it needs no file, works where the folder is mounted read-only, also between
the containers of a machine, and ends with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from hplm.errors import InvalidInput
from hplm.server.process_group import arguments, parent

log = logging.getLogger(__name__)
PATIENCE = 30.0  # seconds that a model waits for an export; most take less
SECONDS_BETWEEN_ATTEMPTS = 0.1


def share(folder: Path) -> int | None:
    """Takes a share of the lock until this process ends, or closes the descriptor that is returned. None: there is no lock.

    Waits while an export is being written, but not for ever: any user who may read the folder can lock it.
    """
    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        until = time.monotonic() + PATIENCE
        while not _taken(descriptor, fcntl.LOCK_SH):
            if time.monotonic() > until:
                raise TimeoutError(f"another process has locked it for {PATIENCE:g} s")
            time.sleep(SECONDS_BETWEEN_ATTEMPTS)
    except OSError as error:
        log.warning("cannot lock %s, so `hplm export` will not notice that it is served: %s", folder, error)
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


@contextmanager
def alone(folder: Path, while_served: bool = False) -> Generator[None, None, None]:
    """Keeps models from starting with the folder meanwhile. Raises if one serves it, unless `while_served`."""
    if not folder.exists():  # nobody serves it
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not _taken_if_possible(descriptor, folder) and not while_served:
            raise InvalidInput(
                f"{folder} is in use by {_users_of(folder)}. A running server keeps the old export, but an engine that it "
                "starts again would take the new one, and refuse all requests. Stop the server first, or export into another "
                "--repository and change over (docs/operating.md, 'A changed backbone'), or give --while-served and restart "
                "the server at once"
            )
        yield
    finally:
        os.close(descriptor)


def _taken_if_possible(descriptor: int, folder: Path) -> bool:
    """Returns False if another process has the lock. Some network file systems have no such locks."""
    try:
        return _taken(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        log.warning("cannot tell whether a server serves %s, because it cannot be locked (%s): make sure of it", folder, error)
        return True


def _taken(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _users_of(folder: Path) -> str:
    """Names the processes that have the lock, as far as they can be seen, by those that an operator ends."""
    return (
        ", ".join(sorted({_name(pid) for pid in _holders(folder)})) or "a process that is not seen from here (in a container?)"
    )


def _holders(folder: Path) -> list[int]:
    status = folder.stat()
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError):  # some containers have no such list
        for line in Path("/proc/locks").read_text("utf-8").splitlines():
            _, kind, _, _, pid, file = line.split()[:6]
            if kind == "FLOCK" and file == wanted:
                found.append(int(pid))
    return found


def _name(pid: int) -> str:
    server = parent(pid)
    if not any(Path(program).name == "tritonserver" for program in arguments(server)[:1]):
        return f"process {pid}"  # such as another export
    supervisor = parent(server)
    if "serve" in arguments(supervisor):
        return f"`hplm serve`, process {supervisor}"
    return f"tritonserver, process {server}"
