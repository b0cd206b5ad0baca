"""A tritonserver's log: the form of our lines in it, and its errors."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

_LINE = "%(levelname).1s%(asctime)s.%(msecs)03d000 %(process)d %(name)s:%(lineno)d] %(message)s"  # as Triton's
_GLOG = re.compile(r'^E\d{4} \S+\s+\d+ \S+:\d+\] +"?(?P<said>.*?)"?\s*$')
_PLAIN = re.compile(r"^(?P<said>error: .*|\[libprotobuf ERROR .*|Traceback .*)$")
_NOISE = (
    # at every start without a GPU
    "CudaDriverHelper has not been initialized",
    "Failed to initialize NVML",
    # repetitions of earlier errors
    "failed to load all models",
    "which has no loaded version",
)
_MOST_LINES = 30


def formatter() -> logging.Formatter:
    made = logging.Formatter(_LINE, "%m%d %H:%M:%S")
    made.converter = time.gmtime  # Triton's times are in UTC
    return made


def begin_log() -> None:
    """Lets this process write its log to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def read(path: Path, offset: int = 0) -> str:
    with path.open("rb") as log:
        log.seek(offset)
        return log.read().decode(errors="replace")


def complaints(text: str) -> list[str]:
    """Returns each error once, without Triton's escapes. If there is no error, returns the last lines."""
    said: list[str] = []
    for line in text.splitlines():
        match = _GLOG.match(line) or _PLAIN.match(line)
        if match and not any(noise in line for noise in _NOISE):
            said.append(match["said"].replace("\\n", "\n").strip())
    # The backend, the lifecycle and the server each report a failing model. Only the fullest report is kept.
    bare = {one: one.removeprefix("ERROR: Failed to create instance: ") for one in said}
    fullest = [one for one in bare if not any(one != other and bare[one] in other for other in said)]
    lines = [line for one in fullest for line in one.splitlines() if line.strip()]
    return lines[-_MOST_LINES:] or tail(text)


def tail(text: str, count: int = 15) -> list[str]:
    """Returns the last lines, without Triton's tables of settings."""
    return [line for line in text.splitlines() if line.strip() and line[0] not in "|+"][-count:]
