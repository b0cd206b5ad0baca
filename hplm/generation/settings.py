"""The settings of a served decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hplm.engine.engine import resolve_device, resolve_dtype
from hplm.parameters import Parameters, deadline_us, whole_number
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import DEFAULT


@dataclass(frozen=True)
class DecoderSettings:
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    max_sequences: int = 32  # the most sequences that run together
    step_tokens: int = 256  # the most tokens of a step
    cache_tokens: int = 16_384
    policy: str = DEFAULT
    limits: Limits = field(default_factory=lambda: Limits(8192, 10**9))  # of prompts that wait, and of sequences
    deadline_us: int = 0  # of requests that name none, and whose tenant has none; 0: no deadline
    resident_rows: int = 0  # of each table, on the device
    kept_bytes: int = 256 * 10**6  # of rows that no table has, on the device
    threads: int = 0  # that compute, on a CPU; 0: as many as torch takes


def read_settings(given: Mapping[str, str], device: torch.device | None = None) -> DecoderSettings:
    """Reads the parameters of a `config.pbtxt`. `device`: instead of what the parameter of this name means on this machine."""
    parameters = Parameters(given)
    device, dtype = device or resolve_device(parameters["device"]), parameters["dtype"]
    return DecoderSettings(
        device=device,
        dtype=resolve_dtype("fp32" if dtype == "auto" and device.type == "cpu" else dtype, device),  # fp32 has a kernel there
        max_sequences=whole_number(parameters, "max_sequences"),
        step_tokens=whole_number(parameters, "step_tokens"),
        cache_tokens=whole_number(parameters, "cache_tokens"),
        policy=parameters["policy"],
        limits=Limits(whole_number(parameters, "queue_texts"), whole_number(parameters, "queue_mb") * 10**6),
        deadline_us=deadline_us(parameters),
        kept_bytes=whole_number(parameters, "kept_mb", least=0) * 10**6,
        resident_rows=whole_number(parameters, "plot_hot", least=0) if device.type != "cpu" else 0,
        threads=whole_number(parameters, "threads", least=0),
    )
