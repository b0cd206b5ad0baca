"""The checks of `hplm doctor`. Each returns a finding: what it saw, and what to do if that is not well."""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hplm.errors import MISFITS, HplmError, some
from hplm.location import Location
from hplm.model.fastest import fastest
from hplm.tenants.directory import Directory

OK, WARNING, PROBLEM, UNKNOWN = "ok", "warning", "problem", "unknown"

SAFE_RELEASE, SAFE_VERSION = (26, 6), (2, 70)  # NVIDIA's name of a release, and the version that `GET /v2` tells
SAFE = "{}.{:02}".format(*SAFE_RELEASE)
NEWEST_BULLETIN = "2026-08-18"  # NVIDIA's bulletins until this day are all about releases before this one
OPEN_FILES = 8192  # two for each connection, and some for tables
SHARED_MEMORY = 1 << 30
FREE_SHARED_MEMORY = 1 << 28


@dataclass(frozen=True)
class Finding:
    check: str
    status: str
    says: str
    do: str = ""


def triton(version: str | None, is_open: bool) -> Finding:
    """`version`: of Triton, as 2.51.0, or the name of its release, as 25.07-py3; None if it was not found."""
    safe = _is_safe(version) if version else None
    if safe is None:
        seen = f"{version!r} is no version of Triton that is known here" if version else "no version of Triton was found"
        return Finding("triton", UNKNOWN, seen, f"name a running server with --server, or the release with --triton {SAFE}")
    if safe:
        return Finding("triton", OK, f"{version} fixes all known CVEs, to {NEWEST_BULLETIN}")
    return Finding(
        "triton",
        PROBLEM if is_open else WARNING,
        f"{version} has known CVEs, of which some are critical",
        f"run release {SAFE} or later, behind the front door (docs/security.md)",
    )


def _is_safe(version: str) -> bool | None:
    """Whether a version has all known fixes; None if it is no version."""
    try:
        numbers = tuple(int(part) for part in version.strip().partition("-")[0].split("."))
    except ValueError:
        return None
    if numbers[0] == SAFE_VERSION[0]:
        return numbers >= SAFE_VERSION
    return numbers >= SAFE_RELEASE if len(numbers) == 2 and numbers[0] > SAFE_VERSION[0] else None


def open_files(limits: tuple[int, int]) -> Finding:
    soft, hard = (float("inf") if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if soft >= OPEN_FILES:
        return Finding("open files", OK, f"this process may open {soft:,} files")
    return Finding(
        "open files",
        WARNING if hard >= OPEN_FILES else PROBLEM,
        f"this process may open {soft:,} files, at most {hard:,}: more connections than that, and nobody is served",
        "start the server after `ulimit -n 65536`, or with `docker run --ulimit nofile=65536` or LimitNOFILE=65536 of systemd",
    )


def shared_memory(folder: Path, space: os.statvfs_result) -> Finding:
    size, free = space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail
    seen = f"{folder} has {_mb(size)}, of which {_mb(free)} are free"
    if size < SHARED_MEMORY:
        way_out = "make it larger: `docker run --shm-size 1g`, or `mount -o remount,size=1g` as root"
        return Finding("shared memory", PROBLEM, f"{seen}; large requests and answers need {_mb(SHARED_MEMORY)}", way_out)
    if free < FREE_SHARED_MEMORY:
        return Finding("shared memory", PROBLEM, seen, f"stop what fills it; `ls -l {folder}` shows the files of ended servers")
    return Finding("shared memory", OK, seen)


def draining(servers: Sequence[str]) -> Finding:
    """`servers`: of this machine, that drain."""
    if servers:
        says = f"{some(servers)} refuses all requests, because of `hplm drain` or a stop that has begun"
        return Finding("draining", PROBLEM, says, "start the server again: only a new one takes requests")
    return Finding("draining", OK, "no server here refuses requests because it is to be stopped")


def number_format() -> Finding:
    return Finding("number format", OK, f"by `--dtype auto`, {fastest()}")


def tenants(repository: Path, state: Location | None, is_open: bool) -> Finding:
    snapshots = Directory(repository, state).snapshots()
    source = " as exported" if state is None else ""
    everybody = [tenant.id for snapshot in snapshots for tenant in snapshot.tenants if not tenant.keys]
    total = sum(len(snapshot.tenants) for snapshot in snapshots)
    if not everybody:
        return Finding("tenants", OK, f"{total:,} tenants{source}, all with keys")
    return Finding(
        "tenants",
        PROBLEM if is_open else WARNING,
        f"{len(everybody):,} of {total:,} tenants{source} have no key and answer everybody: {some(sorted(everybody))}",
        "`hplm tenant key add TENANT` for each; it prints the key once",
    )


def restricted(server: str) -> Finding:
    """Asks a running server for what only its administrator may do."""
    open_paths = [path for method, path in _RESTRICTED if _ask(server, method, path)[0] == 200]
    if open_paths:
        way_out = "start it with the restricted APIs of deploy/README.md: whoever reaches them may run code"
        return Finding("restricted", PROBLEM, f"{server} answers {some(open_paths)} without a secret", way_out)
    return Finding("restricted", OK, f"{server} refuses model control, shared memory, logging and trace without its secret")


_RESTRICTED = (
    ("POST", "/v2/repository/index"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("GET", "/v2/logging"),
    ("GET", "/v2/trace/setting"),
)


def version_at(server: str) -> str:
    """Returns the version that a running server tells."""
    try:
        return json.loads(_ask(server, "GET", "/v2")[1])["version"]
    except (OSError, http.client.HTTPException, *MISFITS) as error:
        raise HplmError(f"no Triton answers at {server} ({error}): give --server the HOST:PORT of its HTTP") from None


def is_open_address(address: str) -> bool:
    try:
        return not ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address != "localhost"


def _ask(server: str, method: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server, timeout=10)
    try:
        connection.request(method, path, "{}" if method == "POST" else None)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _mb(size: float) -> str:
    return f"{size / (1 << 20):,.0f} MB"
