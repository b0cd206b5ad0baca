"""By when an answer must be there: a bound on the whole, on its first token, and on every token after that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hplm.errors import InvalidInput
from hplm.parameters import LONGEST_MS, asked_number


@dataclass(frozen=True)
class Promise:
    """Nanoseconds from the request's arrival, or between two tokens. 0: no bound."""

    whole_ns: int = 0
    first_token_ns: int = 0
    token_ns: int = 0

    def or_else(self, other: Promise) -> Promise:
        """Returns these bounds, and the other's where this one has none: a request's come before its tenant's."""
        return Promise(
            self.whole_ns or other.whole_ns, self.first_token_ns or other.first_token_ns, self.token_ns or other.token_ns
        )


NO_PROMISE = Promise()


def promise_of(parameters: Mapping[str, Any], timeout_us: int) -> Promise:
    """Returns by when the answer must come. `timeout_us`: what Triton has read of `timeout` itself; 0: nothing."""
    timeout_us = min(timeout_us or asked_number(parameters, "timeout", 0, 2**63 - 1), 1000 * LONGEST_MS)
    return Promise(1000 * timeout_us, _nanoseconds(parameters, "first_token_ms"), _nanoseconds(parameters, "token_ms"))


def _nanoseconds(parameters: Mapping[str, Any], name: str) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, str):  # Triton forwards no fractions between models
        try:
            value = float(value)
        except ValueError:
            value = math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST_MS:
        raise InvalidInput(f"parameter {name!r} is {parameters[name]!r}: send milliseconds, {LONGEST_MS:,} at most")
    return round(1e6 * value)
