"""Reads and checks the parameters of an upper model's `config.pbtxt`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from hplm.engine.engine import Precision, resolve_device, resolve_precision
from hplm.engine.packing import read_packing
from hplm.engine.stages import Stage, read_stages
from hplm.errors import InvalidInput
from hplm.parameters import Parameters, deadline_us, milliseconds, whole_number, yes_or_no

EARLIEST = "earliest"
LOG, NONE = "log", ""  # no file of a journal: the server's log, or no journal at all
AUTO_ON_CPU = "auto_on_cpu"  # a parameter that is only there where 8 bits were measured
STAGES = "stages"  # a parameter that is only there where an engine has several


@dataclass(frozen=True)
class EncoderSettings:
    device: torch.device
    precision: Precision
    threads: int
    policy: str
    admission: bool
    packing: str
    batch_tokens: int
    queue_texts: int
    queue_bytes: int
    commit_ns: int | None  # how long before the engine is free a batch is chosen; None: when the batch before it starts
    batch_ns: int  # how long the tokens of a batch may take by prediction; 0: any time
    slots: int
    plot_hot: int
    plot_preload: bool
    journal: str
    stages: tuple[Stage, ...] = ()  # none: one stage on `device`

    @property
    def in_flight(self) -> int:
        """The most batches that are chosen and not finished: one in each stage, and the next one."""
        return max(1, len(self.stages)) + 1

    @property
    def on_accelerator(self) -> bool:
        return self.device.type != "cpu"

    @classmethod
    def read(cls, parameters: Mapping[str, str]) -> EncoderSettings:
        """Reads the parameters of a `config.pbtxt`."""
        parameters = Parameters(parameters)
        stages = read_stages(parameters.get(STAGES, ""))
        device = stages[0].device if stages else resolve_device(parameters["device"])
        _check_stages(stages, parameters)
        check_in_flight(len(stages), parameters)
        return cls(
            device=device,
            precision=resolve_precision(parameters["dtype"], device, parameters.get(AUTO_ON_CPU, "auto")),
            threads=whole_number(parameters, "threads", least=0),
            policy=parameters["policy"],
            admission=yes_or_no(parameters, "admission"),
            packing=parameters["packing"],
            batch_tokens=whole_number(parameters, "batch_tokens"),
            queue_texts=whole_number(parameters, "queue_texts"),
            queue_bytes=whole_number(parameters, "queue_mb") * 10**6,
            commit_ns=_commit_ns(parameters),
            batch_ns=round(1e6 * milliseconds(parameters, "batch_ms", "0 for no bound")),
            slots=whole_number(parameters, "slots"),
            plot_hot=whole_number(parameters, "plot_hot", least=0),
            plot_preload=yes_or_no(parameters, "plot_preload"),
            journal=_journal(parameters["journal"]),
            stages=stages,
        )


def check(parameters: Mapping[str, str]) -> None:
    """Refuses parameters that a server would refuse. Only the server knows its CUDA devices and its policies."""
    device = "cpu" if parameters["device"].startswith("cuda") else parameters["device"]
    settings = EncoderSettings.read({**parameters, "device": device})
    read_packing(settings.packing, lambda texts, tokens: 0.0)
    deadline_us(parameters)


def check_in_flight(stages: int, parameters: Mapping[str, str]) -> None:
    """Refuses parameters with which so many stages would not have a batch each, and another one that is next."""
    whole_number(parameters, "slots", least=max(1, stages) + 1)


def _check_stages(stages: tuple[Stage, ...], parameters: Parameters) -> None:
    """Refuses other parameters that contradict the stages."""
    if not stages:
        return
    kind, given = stages[0].device.type, parameters["device"]
    if given != "auto" and given.partition(":")[0] != kind:
        raise InvalidInput(f"parameter 'device' is {given!r}, but the parameter 'stages' names devices {kind}:N: give auto")
    if kind == "cpu" and whole_number(parameters, "threads", least=0) > 1:
        raise InvalidInput(f"parameter 'threads' is {parameters['threads']!r}, but each of the stages has one core: give 1")


def _commit_ns(parameters: Mapping[str, str]) -> int | None:
    if parameters["commit_ms"] == EARLIEST:
        return None
    return round(1e6 * milliseconds(parameters, "commit_ms", EARLIEST))


def _journal(given: str) -> str:
    """Refuses relative paths: the server runs in a temporary folder of its own, which is deleted when it ends."""
    if given not in (NONE, LOG) and not Path(given).is_absolute():
        raise InvalidInput(f"parameter 'journal' is {given!r}: give the absolute path of a file, or {LOG!r}")
    return given
