"""What a tritonserver's log says of a failure, without the noise around it."""

from __future__ import annotations

import re
from pathlib import Path

_GLOG = re.compile(r'^E\d{4} \S+\s+\d+ \S+:\d+\] +"?(?P<said>.*?)"?\s*$')
_PLAIN = re.compile(r"^(?P<said>error: .*|\[libprotobuf ERROR .*|Traceback .*)$")
_NOISE = (
    # every start without a GPU
    "CudaDriverHelper has not been initialized",
    "Failed to initialize NVML",
    # what was said before, said again
    "failed to load all models",
    "which has no loaded version",
)
_MOST_LINES = 30


def read(path: Path, offset: int = 0) -> str:
    with path.open("rb") as log:
        log.seek(offset)
        return log.read().decode(errors="replace")


def complaints(text: str) -> list[str]:
    """The errors, each once, Triton's own escapes undone; the last lines where nothing calls itself an error."""
    said: list[str] = []
    for line in text.splitlines():
        match = _GLOG.match(line) or _PLAIN.match(line)
        if match and not any(noise in line for noise in _NOISE):
            said.append(match["said"].replace("\\n", "\n").strip())
    # One failing model is told three times, by the backend, the lifecycle and the server: the fullest telling stays.
    fullest = [one for one in dict.fromkeys(said) if not any(_within(one, other) for other in said)]
    return _lines(fullest) or tail(text)


def tail(text: str, count: int = 15) -> list[str]:
    """The last lines that say something: Triton frames its settings in tables."""
    return [line for line in text.splitlines() if line.strip() and line[0] not in "|+"][-count:]


def _within(one: str, other: str) -> bool:
    return one != other and one.removeprefix("ERROR: Failed to create instance: ") in other


def _lines(messages: list[str]) -> list[str]:
    lines = [line for message in messages for line in message.splitlines() if line.strip()]
    return lines[-_MOST_LINES:]
