"""Drives a server with wrk, so that a figure does not rest on our own generator alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hplm.errors import HplmError

_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 60e3}  # milliseconds
_SCRIPT = """\
local requests = {
%s
}
local number = 0
function request()
  number = number %% #requests + 1
  return requests[number]
end
"""


@dataclass(frozen=True)
class Wrk:
    req_per_s: float
    p50_ms: float


def expect_wrk() -> None:
    if shutil.which("wrk") is None:
        raise HplmError("wrk is not installed: run `apt-get install wrk`, or leave out --wrk")


def load_by_wrk(url: str, requests: Sequence[bytes], connections: int, seconds: float) -> Wrk:
    """Sends whole HTTP requests in turn over so many connections."""
    with tempfile.TemporaryDirectory(prefix="hplm-wrk-") as folder:
        script = Path(folder) / "requests.lua"
        script.write_text(script_of(requests), "ascii")
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "30s", "--latency"]
        print(f"measuring {connections} connections of wrk", file=sys.stderr, flush=True)
        ended = subprocess.run([*command, "-s", script, f"http://{url}"], capture_output=True, text=True)
    if ended.returncode:
        raise HplmError(f"wrk ended with code {ended.returncode}: {ended.stderr.strip()}")
    return read_report(ended.stdout)


def script_of(requests: Sequence[bytes]) -> str:
    """Returns a script for wrk. Each byte is written as a number, because requests are no text."""
    return _SCRIPT % "\n".join('"' + "".join(f"\\{byte:03d}" for byte in request) + '",' for request in requests)


def read_report(report: str) -> Wrk:
    """Raises if a request failed."""
    failed = re.search(r"Non-2xx.*|Socket errors.*", report)
    rate, half = re.search(r"Requests/sec:\s+([\d.]+)", report), re.search(r"50%\s+([\d.]+)(us|ms|s|m)\b", report)
    if failed or not rate or not half:
        raise HplmError(f"wrk reports failures: {failed.group() if failed else report}")
    return Wrk(float(rate[1]), round(float(half[1]) * _UNITS[half[2]], 3))
