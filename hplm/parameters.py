"""Reads parameters: those of a `config.pbtxt`, which are strings, and those of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hplm.errors import InvalidInput

LONGEST_MS = 10**9  # longer times could overflow a deadline in nanoseconds


class Parameters(dict[str, str]):
    """The parameters of a `config.pbtxt`."""

    def __missing__(self, name: str) -> str:
        raise InvalidInput(f"parameter {name!r} is missing in config.pbtxt: export the repository again")


def parameters_of(config: Path) -> Parameters:
    """Reads the parameters of a `config.pbtxt` that an export wrote, whatever has been edited in their values."""
    found = re.findall(r'key:\s*"(\w+)"\s*value\s*{\s*string_value:\s*"([^"]*)"', config.read_text("utf-8"))
    return Parameters(found)


def milliseconds(parameters: Mapping[str, str], name: str, otherwise: str) -> float:
    """`otherwise` says what else a user may give."""
    try:
        value = float(parameters[name])
    except ValueError:
        value = -1.0
    if not 0 <= value <= LONGEST_MS:
        raise InvalidInput(
            f"parameter {name!r} is {parameters[name]!r}: give milliseconds, {LONGEST_MS:,} at most, or {otherwise}"
        )
    return value


def deadline_us(parameters: Mapping[str, str]) -> int:
    """Returns the deadline of requests that set none, in microseconds; 0: no deadline."""
    return round(1000 * milliseconds(Parameters(parameters), "deadline_ms", "0 for no deadline"))


def yes_or_no(parameters: Mapping[str, str], name: str) -> bool:
    value = parameters[name].lower()
    if value not in ("true", "false"):
        raise InvalidInput(f"parameter {name!r} is {parameters[name]!r}: give true or false")
    return value == "true"


def whole_number(parameters: Mapping[str, str], name: str, least: int = 1) -> int:
    try:
        value = int(parameters[name])
    except ValueError:
        value = least - 1
    if value < least:
        raise InvalidInput(f"parameter {name!r} is {parameters[name]!r}: give a whole number of at least {least}")
    return value


def request_flag(parameters: Mapping[str, Any], name: str) -> bool:
    """Reads a parameter of a request; False if it is missing."""
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise InvalidInput(f"parameter {name!r} is {value!r}: send true or false")
    return value


def request_name(parameters: Mapping[str, Any], name: str) -> str | None:
    """Reads a parameter of a request that names something; None if it is missing."""
    value = parameters.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidInput(f"parameter {name!r} is {value!r}: send a name as text")
    return value


def request_timeout_us(parameters: Mapping[str, Any], read: int) -> int:
    """Returns the timeout of a request, LONGEST_MS at most; 0: none.

    `read`: what Triton has read of it; it leaves that of `generate` here.
    """
    return min(request_number({"timeout": read} if read else parameters, "timeout", 0, 2**63 - 1), 1000 * LONGEST_MS)


def request_number(parameters: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Reads a parameter of a request; 0 if it is missing."""
    if name not in parameters:
        return 0
    value = parameters[name]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidInput(f"parameter {name!r} is {value!r}: send a whole number from {low} to {high}")
    return value
