"""Removes a secret from the command line of a process of ours, which every user of the machine can read.

Triton takes the secret of its restricted APIs only there. It copies its arguments when it starts, so they can be overwritten as
soon as it has written the first line of its log.
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46  # fields 48 and 49 of /proc/PID/stat, counted behind the command


def hide(pid: int, secret: str) -> None:
    """Overwrites the secret. If the system does not allow that, logs so."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(begin)
            arguments = memory.read(end - begin)
            at = arguments.find(secret.encode())
            while at >= 0:
                memory.seek(begin + at)
                memory.write(b"*" * len(secret))
                at = arguments.find(secret.encode(), at + 1)
    except OSError as error:
        log.warning(
            "other users can read the admin secret in the server's command line (%s): mount /proc with hidepid=2", error
        )
