"""Runs a module in a process of its own, because a client in Python would delay whoever else is in its process."""

from __future__ import annotations

import subprocess
import sys

from hplm.errors import HplmError


def run_module(name: str, *arguments: object, given: str, limit: float) -> str:
    """Returns what the module prints. `given`: its standard input; `limit`: the seconds that it may take."""
    command = [sys.executable, "-m", name, *map(str, arguments)]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise HplmError(f"{name} did not end within {limit:g} s and was stopped: try again") from error
    if done.returncode:
        last = "".join(done.stderr.strip().splitlines()[-1:])
        raise HplmError(f"{name} ended with code {done.returncode}: {last or 'it said nothing'}")
    return done.stdout
