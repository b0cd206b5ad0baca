"""Reads the parameters of a request for generated text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hplm.errors import InvalidInput
from hplm.generation.promise import Promise
from hplm.generation.sampling import READERS, Sampling, read_sampling
from hplm.parameters import LONGEST_MS, asked_number


def sampling_of(parameters: Mapping[str, Any], json: str | None) -> Sampling:
    """Returns how tokens are chosen: as the JSON text says or, without one, parameters with the names of the settings."""
    named = {name: value for name, value in parameters.items() if name in READERS}
    if json is None:
        return read_sampling(named)
    if named:
        raise InvalidInput(f"parameter {next(iter(named))!r} stands beside 'sampling_parameters': put it in there")
    return read_sampling(json)


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
