"""Removes a secret from the command line of a process of ours, which every user of the machine can read.

Triton takes the secret of its restricted APIs only there. It copies its arguments when it starts, so they can be overwritten as
soon as it has written the first line of its log.
"""

from __future__ import annotations

import logging
from pathlib import Path

from hplm.server.process_group import facts

log = logging.getLogger(__name__)
_ARGUMENTS = slice(45, 47)  # where they begin and end: fields 48 and 49 of /proc/PID/stat, counted behind the command


def hide(pid: int, secret: str) -> None:
    """Overwrites the secret. If the system does not allow that, logs so."""
    try:
        begin, end = map(int, facts(pid)[_ARGUMENTS])
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(begin)
            arguments = memory.read(end - begin)
            memory.seek(begin)
            memory.write(arguments.replace(secret.encode(), b"*" * len(secret)))
    except (OSError, ValueError) as error:  # ValueError: it has ended
        log.warning(
            "other users can read the admin secret in the server's command line (%s): mount /proc with hidepid=2", error
        )
