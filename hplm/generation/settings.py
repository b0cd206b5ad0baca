"""Reads the settings of a served decoder: the parameters of its `config.pbtxt`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hplm.errors import InvalidInput
from hplm.generation.cache import CLEANING
from hplm.generation.promise import Promise
from hplm.generation.service import Settings
from hplm.options import CACHES
from hplm.parameters import Parameters, milliseconds, whole_number, yes_or_no

NO_BOUND = "0 for no bound"


def read_settings(given: Mapping[str, str], device: torch.device, dtype: torch.dtype) -> Settings:
    """`device` and `dtype` are what the parameters of these names mean on this machine."""
    parameters = Parameters(given)
    cleaning = parameters["cleaning"]
    if cleaning not in CLEANING:
        raise InvalidInput(f"parameter 'cleaning' is {cleaning!r}: choose {' or '.join(CLEANING)}")
    cache = parameters["cache"]
    if cache not in CACHES:
        raise InvalidInput(f"parameter 'cache' is {cache!r}: choose {', '.join(CACHES)}")
    return Settings(
        device=device,
        dtype=dtype,
        seats=whole_number(parameters, "seats"),
        step_tokens=whole_number(parameters, "step_tokens"),
        cache_tokens=whole_number(parameters, "cache_tokens"),
        cache=cache,
        cleaning=cleaning,
        policy=parameters["policy"],
        admission=yes_or_no(parameters, "admission"),
        queue_texts=whole_number(parameters, "queue_texts"),
        queue_bytes=whole_number(parameters, "queue_mb") * 10**6,
        promise=Promise(
            whole_ns=_nanoseconds(parameters, "deadline_ms"),
            first_token_ns=_nanoseconds(parameters, "first_token_ms"),
            token_ns=_nanoseconds(parameters, "token_ms"),
        ),
        resident_rows=whole_number(parameters, "plot_hot", least=0) if device.type != "cpu" else 0,
        threads=whole_number(parameters, "threads", least=0),
    )


def _nanoseconds(parameters: Mapping[str, str], name: str) -> int:
    return round(1e6 * milliseconds(parameters, name, NO_BOUND))
