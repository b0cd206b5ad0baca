"""A placement: groups of devices, and the units that each one serves. It is `placement.json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from hplm.errors import InvalidInput
from hplm.placement.cluster import Cluster, Machine, check_kind
from hplm.placement.files import Positive, Word, read, refuse_twice, write
from hplm.placement.profile import Cut, Profile
from hplm.placement.units import Unit, machine_bytes, stages_bytes, units_of

KIND, FORMAT = "hplm placement", 1
WAY_OUT = "search it with `hplm place search`"


@dataclass(frozen=True)
class Group:
    """A replica: one server on these devices."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]  # it becomes the name of a folder
    machine: Word
    devices: Annotated[tuple[str, ...], Meta(min_length=1)]  # the first `intra` are the first stage's, and so on
    intra: Positive  # devices a stage
    cuts: Mapping[str, Cut]  # of each backbone that has units here
    units: tuple[str, ...]

    @property
    def stages(self) -> int:
        return len(self.devices) // self.intra

    def devices_of(self, stage: int) -> tuple[str, ...]:
        return self.devices[stage * self.intra : (stage + 1) * self.intra]


@dataclass(frozen=True)
class Placement:
    groups: tuple[Group, ...]
    units: tuple[Unit, ...]  # all that there are; one that is in no group is not served
    precisions: Mapping[str, Word]  # of each backbone, as it was measured
    exports: Mapping[str, Word]  # the measured export of each backbone
    cluster: Word  # digest
    profile: Word  # digest

    @classmethod
    def of(cls, groups: tuple[Group, ...], units: tuple[Unit, ...], cluster: Cluster, profile: Profile) -> Placement:
        return cls(
            groups=groups,
            units=units,
            precisions={name: own.precision for name, own in profile.backbones.items()},
            exports={name: own.export for name, own in profile.backbones.items()},
            cluster=cluster.digest,
            profile=profile.digest,
        )

    @cached_property
    def unit(self) -> dict[str, Unit]:
        """The units by name."""
        return {unit.name: unit for unit in self.units}

    @property
    def hot(self) -> list[str]:
        """The tenants that are units of their own, as backbone/tenant."""
        return [f"{unit.backbone}/{unit.tenant}" for unit in self.units if unit.tenant is not None]

    @property
    def unplaced(self) -> tuple[Unit, ...]:
        """The units that no group serves."""
        placed = {name for group in self.groups for name in group.units}
        return tuple(unit for unit in self.units if unit.name not in placed)

    @classmethod
    def read(cls, path: Path) -> Placement:
        placement = read(path, KIND, FORMAT, cls, WAY_OUT)
        if not placement.groups:
            raise InvalidInput(f"{path} has no groups: {WAY_OUT}")
        refuse_twice(path, "group", [group.name for group in placement.groups], WAY_OUT)
        _check_devices(path, placement.groups)
        for group in placement.groups:
            _check_group(str(path), group, placement)
        return placement

    def write(self, path: Path) -> None:
        write(path, KIND, FORMAT, asdict(self))

    def check(self, cluster: Cluster, profile: Profile) -> None:
        """Refuses a placement that is stale, that uses another machine's devices, or that needs too much memory."""
        for what, made_for, found in (("cluster", self.cluster, cluster.digest), ("profile", self.profile, profile.digest)):
            if made_for != found:
                raise InvalidInput(
                    f"the placement is stale: it was made for another {what} ({made_for}, not {found}): {WAY_OUT}"
                )
        missing = sorted(unit.name for unit in set(self.units) ^ set(units_of(profile, self.hot)))
        if missing:
            raise InvalidInput(f"the placement's unit {missing[0]!r} is not as in the profile: {WAY_OUT}")
        for group in self.groups:
            _check_stages(group, _machine_of(group, cluster), profile)
        for machine in cluster.machines:
            self._check_machine(machine, profile)

    def _check_machine(self, machine: Machine, profile: Profile) -> None:
        here = {self.unit[name] for group in self.groups if group.machine == machine.name for name in group.units}
        needed = machine_bytes(profile, here)
        if needed > machine.memory:
            raise InvalidInput(
                f"machine {machine.name!r} has {machine.memory:,} bytes for tables and records, but its {len(here)} units need "
                f"{needed:,}: move units to another machine"
            )


def _check_devices(path: Path, groups: Iterable[Group]) -> None:
    """Refuses a device of two groups, and a group whose devices are not of one kind."""
    taken: dict[tuple[str, str], str] = {}
    for group in groups:
        check_kind(f"{path}: group {group.name!r}", group.devices)
        for device in group.devices:
            other = taken.setdefault((group.machine, device), group.name)
            if other != group.name or group.devices.count(device) > 1:
                raise InvalidInput(
                    f"{path}: groups {other!r} and {group.name!r} both have device {device!r} of machine {group.machine!r}: "
                    "give each device to one group, once"
                )


def _machine_of(group: Group, cluster: Cluster) -> Machine:
    machine = cluster.by_name.get(group.machine)
    if machine is None:
        raise InvalidInput(f"group {group.name!r} is on machine {group.machine!r}, which the cluster does not have: {WAY_OUT}")
    for device in group.devices:
        if device not in machine.memory_of:
            raise InvalidInput(
                f"group {group.name!r} is on machine {machine.name!r}, which has no device {device!r}: all devices of a group "
                "are on one machine"
            )
    return machine


def _check_stages(group: Group, machine: Machine, profile: Profile) -> None:
    for backbone, cut in group.cuts.items():
        if backbone not in profile.backbones:
            raise InvalidInput(f"group {group.name!r} has backbone {backbone!r}, which the profile does not have: {WAY_OUT}")
        layers = profile.backbones[backbone].layers
        if cut[-1][1] != layers - 1:
            raise InvalidInput(
                f"group {group.name!r} cuts {backbone!r} after layer {cut[-1][1]}, but it has {layers}: {WAY_OUT}"
            )
    for stage, needed in enumerate(stages_bytes(profile, group.cuts)):
        devices = group.devices_of(stage)
        room = sum(machine.memory_of[device] for device in devices)
        if needed > room:
            raise InvalidInput(
                f"stage {stage} of group {group.name!r} needs {needed:,} bytes for layers and slots of "
                f"{', '.join(group.cuts)}, but {', '.join(devices)} of machine {machine.name!r} have {room:,}: cut into more "
                "stages, give fewer backbones to the group, or fewer slots"
            )


def _check_group(where: str, group: Group, placement: Placement) -> None:
    named = f"{where}: group {group.name!r}"
    if len(group.devices) % group.intra:
        raise InvalidInput(f"{named} has {len(group.devices)} devices, which do not make stages of {group.intra}: {WAY_OUT}")
    if not group.units:
        raise InvalidInput(f"{named} has no units: {WAY_OUT}")
    refuse_twice(named, "unit", group.units, WAY_OUT)
    for unit in group.units:
        if unit not in placement.unit:
            raise InvalidInput(f"{named} has unit {unit!r}, which is not among the units: {WAY_OUT}")
        if placement.unit[unit].backbone not in group.cuts:
            raise InvalidInput(f"{named} has unit {unit!r}, but no cut of its backbone: {WAY_OUT}")
    for backbone, cut in group.cuts.items():
        follow = all(one[1] + 1 == after[0] for one, after in pairwise(cut))
        if not cut or cut[0][0] or not follow or any(first > last for first, last in cut):
            raise InvalidInput(f"{named}: the cuts of {backbone!r} are not stages of layers that follow each other: {WAY_OUT}")
        if not any(placement.unit[unit].backbone == backbone for unit in group.units):
            raise InvalidInput(f"{named} cuts {backbone!r}, of which it has no unit: {WAY_OUT}")
        if len(cut) != group.stages:
            raise InvalidInput(f"{named} has {group.stages} stages, but {backbone!r} is cut into {len(cut)}: {WAY_OUT}")
        if backbone not in placement.exports or backbone not in placement.precisions:
            raise InvalidInput(f"{named} has backbone {backbone!r} without its export and precision: {WAY_OUT}")
