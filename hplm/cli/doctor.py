"""`hplm doctor`: checks an installation and says what to do."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hplm.doctor.checks import Finding

SHARED_MEMORY = Path("/dev/shm")


def register(commands: argparse._SubParsersAction) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check an installation: known holes, limits, readable secrets",
        description="Check what may stop a server or let somebody in. Run it on the server's machine and as the server's user. "
        "Exit with 1 if there is a problem.",
    )
    doctor.add_argument("--repository", type=Path, metavar="DIR", help="the served model repository: tenants and `--hot`")
    doctor.add_argument("--state", type=Path, metavar="DIR", help="the folder of `hplm serve --state`, which holds changes")
    doctor.add_argument(
        "--address",
        default="127.0.0.1",
        help="the address that clients reach (default: %(default)s); holes are problems on every other than loopback",
    )
    doctor.add_argument(
        "--server", metavar="HOST:PORT", help="a running server's HTTP port: its version, and what it restricts"
    )
    doctor.add_argument("--triton", metavar="RELEASE", help="Triton's release, such as 26.06, if it is not on this machine")
    doctor.add_argument(
        "--secrets", type=Path, nargs="+", default=[], metavar="FILE", help="files with secrets, such as hplm.env"
    )
    doctor.add_argument("--json", action="store_true", help="print one line of JSON")
    doctor.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from hplm.doctor.checks import PROBLEM
    from hplm.errors import HplmError

    findings = _findings(args)
    problems = [finding.check for finding in findings if finding.status == PROBLEM]
    if args.json:
        print(json.dumps({"ok": not problems, "checks": [vars(finding) for finding in findings]}))
    else:
        for finding in findings:
            print(f"{finding.status:<8} {finding.check}: {finding.says}")
            if finding.do:
                print(f"{'':<8} -> {finding.do}")
    if problems:
        raise HplmError(f"problems with {', '.join(problems)}")


def _findings(args: argparse.Namespace) -> list[Finding]:
    import resource

    from hplm.cli.served import check_state
    from hplm.doctor import checks
    from hplm.server import reply_sockets

    check_state(args.state)
    is_open = checks.is_open_address(args.address)
    findings = [
        checks.triton(args.triton or _version(args.server), is_open),
        checks.open_files(resource.getrlimit(resource.RLIMIT_NOFILE)),
        checks.reply_buffers(reply_sockets.usual(), reply_sockets.ROOM, reply_sockets.ANSWER),
        checks.shared_memory(SHARED_MEMORY),
        checks.regions(SHARED_MEMORY),
        checks.command_lines(Path("/proc")),
        checks.secret_files(args.secrets),
        checks.admin_keys(os.environ, args.secrets),
    ]
    if args.server:
        findings.append(checks.restricted(args.server))
    if args.repository:
        from hplm.server.repository import model_names

        model_names(args.repository)
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        findings.append(checks.locked_memory(args.repository, args.state, limit, checks.capabilities()))
        findings.append(checks.tenants(args.repository, args.state, is_open))
    return findings


def _version(server: str | None) -> str | None:
    """Returns the version of the running server, or of the one that `hplm serve` would start; None if neither tells it."""
    from hplm.doctor.checks import version_at
    from hplm.errors import HplmError
    from hplm.server.discovery import find_installation
    from hplm.server.embedded import TRITON_VERSION

    if server:
        return version_at(server)
    try:
        installation = find_installation()
    except HplmError:
        return None
    return TRITON_VERSION if installation.stub else os.environ.get("NVIDIA_TRITON_SERVER_VERSION")
