"""Stages of an engine: consecutive layers of the upper stack, each stage on a device of its own.

They are written as `0-1@cpu:0 2-3@cpu:1`: the first and the last layer of each stage, and its device. `cpu:1` is a core, to
which the stage's thread is pinned. A batch passes all stages, and the next batch may begin when the first one is free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from hplm.errors import InvalidInput

STAGE = re.compile(r"(\d+)-(\d+)@(cpu|cuda):(\d+)")
WAY_OUT = "name each layer once and in order, such as '0-1@cpu:0 2-3@cpu:1'"


@dataclass(frozen=True)
class Stage:
    first: int  # layer
    last: int  # layer, included
    device: torch.device
    core: int | None = None  # to which its thread is pinned; None: to none

    def __str__(self) -> str:
        return f"{self.first}-{self.last}@{self.device if self.core is None else f'cpu:{self.core}'}"

    def pin(self) -> None:
        """Pins the calling thread."""
        if self.core is not None:
            os.sched_setaffinity(0, {self.core})


def read_stages(written: str) -> tuple[Stage, ...]:
    """Reads a model's parameter `stages`. Returns none if it is empty: then the engine has one stage, on its device."""
    stages: list[Stage] = []
    devices: set[str] = set()
    for one in written.split():
        found = STAGE.fullmatch(one)
        if found is None:
            raise InvalidInput(f"parameter 'stages' has {one!r}, but a stage is FIRST-LAST@cpu:N or @cuda:N: {WAY_OUT}")
        first, last, kind, number = found.groups()
        stages.append(_stage(one, int(first), int(last), kind, int(number)))
        device = f"{kind}:{int(number)}"
        if device in devices:
            raise InvalidInput(f"parameter 'stages' has device {device!r} twice: give each stage a device of its own")
        devices.add(device)
    if len({stage.device.type for stage in stages}) > 1:
        raise InvalidInput(f"parameter 'stages' has cores and GPUs ({written!r}): give stages of one kind")
    if stages and stages[0].first:
        raise InvalidInput(f"parameter 'stages' lacks the layers before {stages[0].first}: {WAY_OUT}")
    for before, after in pairwise(stages):
        if after.first != before.last + 1:
            wrong = "lacks the layers between" if after.first > before.last + 1 else "has layers twice or out of order at"
            raise InvalidInput(f"parameter 'stages' {wrong} {before.last} and {after.first}: {WAY_OUT}")
    return tuple(stages)


def _stage(written: str, first: int, last: int, kind: str, number: int) -> Stage:
    if first > last:
        raise InvalidInput(f"parameter 'stages' has {written!r}, whose last layer is before its first one: {WAY_OUT}")
    if kind == "cpu":
        mine = sorted(os.sched_getaffinity(0))
        if number not in mine:
            raise InvalidInput(
                f"parameter 'stages' has device 'cpu:{number}', but this process may use {len(mine)} cores, from {mine[0]} to "
                f"{mine[-1]}: name one of them, or start the server with more"
            )
        return Stage(first, last, torch.device("cpu"), number)
    if number >= torch.cuda.device_count():
        raise InvalidInput(f"parameter 'stages' has device 'cuda:{number}', but torch finds {torch.cuda.device_count()} GPUs")
    return Stage(first, last, torch.device("cuda", number))


def check_layers(stages: Sequence[Stage], layers: int) -> None:
    """Refuses stages that do not have the layers of a stack."""
    if stages and stages[-1].last != layers - 1:
        raise InvalidInput(
            f"parameter 'stages' ends with layer {stages[-1].last}, but the upper stack has {layers} layers, from 0 to "
            f"{layers - 1}: cut it into 1 to {layers} stages"
        )
