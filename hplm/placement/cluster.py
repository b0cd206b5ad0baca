"""A cluster: machines with their devices, and the memory of each. An operator writes it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from hplm.errors import InvalidInput
from hplm.placement.files import Positive, Whole, Word, digest, read, refuse_twice

KIND, FORMAT = "hplm cluster", 1
WAY_OUT = "write it as docs/placement.md shows"
CORE = "cpu:"  # begins the names of devices that are cores
DEVICE = re.compile(r"(cpu|cuda):(0|[1-9][0-9]*)")  # so that each device has one name


@dataclass(frozen=True)
class Device:
    name: Word  # as torch names it: `cuda:1`; `cpu:3` is a core
    memory: Positive  # bytes for layers and slots


@dataclass(frozen=True)
class Machine:
    name: Word
    devices: Annotated[tuple[Device, ...], Meta(min_length=1)]
    memory: Whole  # bytes for tables and records, which all groups of the machine share

    @cached_property
    def memory_of(self) -> dict[str, int]:
        """The memory of each device, by its name."""
        return {device.name: device.memory for device in self.devices}


@dataclass(frozen=True)
class Cluster:
    machines: Annotated[tuple[Machine, ...], Meta(min_length=1)]

    @cached_property
    def by_name(self) -> dict[str, Machine]:
        return {machine.name: machine for machine in self.machines}

    @property
    def devices(self) -> int:
        return sum(len(machine.devices) for machine in self.machines)

    @property
    def room(self) -> int:
        """The bytes that the devices of the largest machine have together."""
        return max(sum(machine.memory_of.values()) for machine in self.machines)

    @cached_property
    def digest(self) -> str:
        return digest(asdict(self))

    @classmethod
    def read(cls, path: Path) -> Cluster:
        cluster = read(path, KIND, FORMAT, cls, WAY_OUT)
        refuse_twice(path, "machine", [machine.name for machine in cluster.machines])
        for machine in cluster.machines:
            refuse_twice(path, f"machine {machine.name!r}: device", [device.name for device in machine.devices])
            check_kind(f"{path}: machine {machine.name!r}", machine.memory_of)
        return cluster


def check_kind(where: str, devices: Collection[str]) -> None:
    """Refuses devices that torch does not know, and cores beside GPUs: a profile has the times of one kind."""
    wrong = next((name for name in devices if not DEVICE.fullmatch(name)), None)
    if wrong is not None:
        raise InvalidInput(f"{where} has device {wrong!r}: name devices cpu:0 (a core) or cuda:0, with their numbers")
    if len({name.partition(":")[0] for name in devices}) > 1:
        raise InvalidInput(f"{where} has devices of different kinds ({', '.join(devices)}): give it one kind")


def cores_of(devices: Collection[str]) -> tuple[int, ...]:
    """Returns the cores that these devices are; of GPUs none."""
    return tuple(int(name.removeprefix(CORE)) for name in devices if name.startswith(CORE))


def check_cores(cores: Collection[int]) -> None:
    """Refuses cores that this machine does not have."""
    mine = os.sched_getaffinity(0)
    missing = next((core for core in cores if core not in mine), None)
    if missing is not None:
        raise InvalidInput(f"core {missing} is not one of this machine's: name some of {', '.join(map(str, sorted(mine)))}")
