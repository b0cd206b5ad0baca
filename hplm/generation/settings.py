"""Reads the settings of a served decoder: the parameters of its `config.pbtxt`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hplm.errors import InvalidInput
from hplm.generation.promise import Promise
from hplm.generation.service import Settings
from hplm.options import CACHES
from hplm.parameters import Parameters, milliseconds, whole_number, yes_or_no

NO_BOUND = "0 for no bound"
LEAST = "least_token_ms"


def read_settings(given: Mapping[str, str], device: torch.device, dtype: torch.dtype) -> Settings:
    """`device` and `dtype` are what the parameters of these names mean on this machine."""
    parameters = Parameters({"max_sequences" if name == "seats" else name: value for name, value in given.items()})
    if (cleaning := given.get("cleaning", "early")) != "early":
        raise InvalidInput(f"parameter 'cleaning' is {cleaning!r}, which is no longer served: leave it out, or export again")
    cache = parameters["cache"]
    if cache not in CACHES:
        raise InvalidInput(f"parameter 'cache' is {cache!r}: choose {', '.join(CACHES)}")
    least, token_ns = _nanoseconds({LEAST: "0", **parameters}, LEAST), _nanoseconds(parameters, "token_ms")
    if 0 < token_ns < least:
        raise InvalidInput(f"parameter 'token_ms' is {parameters['token_ms']!r}, less than '{LEAST}': raise it, or give 0")
    return Settings(
        device=device,
        dtype=dtype,
        max_sequences=whole_number(parameters, "max_sequences"),
        step_tokens=whole_number(parameters, "step_tokens"),
        cache_tokens=whole_number(parameters, "cache_tokens"),
        cache=cache,
        policy=parameters["policy"],
        admission=yes_or_no(parameters, "admission"),
        queue_texts=whole_number(parameters, "queue_texts"),
        queue_bytes=whole_number(parameters, "queue_mb") * 10**6,
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
