"""The settings of a served decoder, and the times by which its answers must be there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hplm.engine.engine import resolve_device, resolve_dtype
from hplm.errors import InvalidInput
from hplm.parameters import LONGEST_MS, Parameters, asked_timeout_us, milliseconds, whole_number, yes_or_no
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import DEFAULT

NO_BOUND = "0 for no bound"
LEAST = "least_token_ms"


class Promise(NamedTuple):
    """Nanoseconds from the request's arrival, or between two tokens. 0: no bound."""

    whole_ns: int = 0
    first_token_ns: int = 0
    token_ns: int = 0

    def or_else(self, other: Promise) -> Promise:
        """Returns these bounds, and the other's where this one has none: a request's come before its tenant's."""
        return Promise(*(own or its for own, its in zip(self, other, strict=True)))


NO_PROMISE = Promise()


@dataclass(frozen=True)
class Settings:
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    max_sequences: int = 32  # the most sequences that run together
    step_tokens: int = 256  # the most tokens of a step
    cache_tokens: int = 16_384
    policy: str = DEFAULT
    admission: bool = True
    limits: Limits = field(default_factory=lambda: Limits(8192, 10**9))  # of prompts that wait, and of sequences
    promise: Promise = NO_PROMISE  # for requests whose tenant has none
    least_token_ns: int = 0  # that a request may allow between two tokens
    resident_rows: int = 0  # of each table, on the device
    threads: int = 0  # that compute, on a CPU; 0: as many as torch takes


def read_settings(given: Mapping[str, str], device: torch.device | None = None) -> Settings:
    """Reads the parameters of a `config.pbtxt`. `device`: instead of what the parameter of this name means on this machine."""
    parameters = Parameters(given)
    device, dtype = device or resolve_device(parameters["device"]), parameters["dtype"]
    least, token_ns = _nanoseconds({LEAST: "0", **parameters}, LEAST), _nanoseconds(parameters, "token_ms")
    if 0 < token_ns < least:
        raise InvalidInput(f"parameter 'token_ms' is {parameters['token_ms']!r}, less than '{LEAST}': raise it, or give 0")
    return Settings(
        device=device,
        dtype=resolve_dtype("fp32" if dtype == "auto" and device.type == "cpu" else dtype, device),  # fp32 has a kernel there
        max_sequences=whole_number(parameters, "max_sequences"),
        step_tokens=whole_number(parameters, "step_tokens"),
        cache_tokens=whole_number(parameters, "cache_tokens"),
        policy=parameters["policy"],
        admission=yes_or_no(parameters, "admission"),
        limits=Limits(whole_number(parameters, "queue_texts"), whole_number(parameters, "queue_mb") * 10**6),
        promise=Promise(
            whole_ns=_nanoseconds(parameters, "deadline_ms"),
            first_token_ns=_nanoseconds(parameters, "first_token_ms"),
            token_ns=token_ns,
        ),
        least_token_ns=least,
        resident_rows=whole_number(parameters, "plot_hot", least=0) if device.type != "cpu" else 0,
        threads=whole_number(parameters, "threads", least=0),
    )


def _nanoseconds(parameters: Mapping[str, str], name: str) -> int:
    return round(1e6 * milliseconds(parameters, name, NO_BOUND))


def promise_of(parameters: Mapping[str, Any], timeout_us: int) -> Promise:
    """Returns by when the answer must come. `timeout_us`: what Triton has read of `timeout` itself; 0: nothing."""
    return Promise(
        1000 * asked_timeout_us(parameters, timeout_us),
        _asked_ns(parameters, "first_token_ms"),
        _asked_ns(parameters, "token_ms"),
    )


def _asked_ns(parameters: Mapping[str, Any], name: str) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, str):  # Triton forwards no fractions between models
        try:
            value = float(value)
        except ValueError:
            value = math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST_MS:
        raise InvalidInput(f"parameter {name!r} is {parameters[name]!r}: send milliseconds, {LONGEST_MS:,} at most")
    return round(1e6 * value)
