"""How long the path of a socket may be."""

import os
from pathlib import Path

from hplm.errors import InvalidInput

LONGEST = 107  # bytes that Linux takes


def check_socket_path(path: Path, option: str, longest: int = LONGEST) -> None:
    """Refuses a path that is too long. `option`: it names the folder of the socket."""
    if len(os.fsencode(path)) > longest:
        raise InvalidInput(f"{path} is too long for a socket ({longest} bytes at most): give {option} a shorter path")
