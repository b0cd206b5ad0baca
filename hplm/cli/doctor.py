"""`hplm doctor`: checks an installation and says what to do."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

from hplm.cli.served import StateLocation, checked_state
from hplm.memory import machine_memory

SHARED_MEMORY = Path("/dev/shm")


def doctor(
    *, repository: Path | None = None, state: StateLocation = None, address: str = "127.0.0.1", server: str | None = None,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """Check an installation: known holes, limits, tenants without keys, memory of decoders. Exit with 1 if there is a problem.

    Run it on the server's machine and as the server's user.

    :param repository: the served model repository
    :param address: the address that clients reach; holes are problems on every other than loopback
    :param server: HOST:PORT of a running server's HTTP: its version, and what it restricts
    """
    from hplm.doctor import checks, memory
    from hplm.server import inherited

    state = checked_state(state)
    is_open = checks.is_open_address(address)
    findings = [
        checks.triton(_version(server), is_open),
        checks.open_files(resource.getrlimit(resource.RLIMIT_NOFILE)),
        checks.shared_memory(SHARED_MEMORY, os.statvfs(SHARED_MEMORY)),
        checks.draining(inherited.draining()),
        checks.number_format(),
    ]
    if server:
        findings.append(checks.restricted(server))
    if repository:
        from hplm.server.repository import model_names

        model_names(repository)
        findings.append(checks.tenants(repository, state, is_open))
        findings += memory.decoders(repository, state, machine_memory()[0])
    problems = [finding.check for finding in findings if finding.status == checks.PROBLEM]
    for finding in findings:
        print(f"{finding.status:<8} {finding.check}: {finding.says}")
        if finding.do:
            print(f"{'':<8} -> {finding.do}")
    if problems:
        print(f"hplm doctor: problems with {', '.join(problems)}", file=sys.stderr)
    return {"ok": not problems, "checks": [vars(finding) for finding in findings]}, int(bool(problems))


def _version(server: str | None) -> str | None:
    """Returns the version of the running server, or of the one that `hplm serve` would start; None if neither tells it."""
    from hplm.doctor.checks import version_at
    from hplm.errors import HplmError
    from hplm.server.discovery import TRITON_VERSION, find_installation

    if server:
        return version_at(server)
    try:
        installation = find_installation()
    except HplmError:
        return None
    return TRITON_VERSION if installation.stub else os.environ.get("NVIDIA_TRITON_SERVER_VERSION")
