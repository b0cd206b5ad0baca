"""Emits a placement: a model repository for each group, which serves the tenants of the group's units alone.

A group's repository is the export, with a filter and with configurations for the group's devices. All groups read one registry:
a change reaches the group that serves its tenant. Files that never change are hard links, so groups of one machine share them
in memory, as placement assumes.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from builder.publish.export import check_copies, copy_file
from builder.publish.model_configs import ALIAS, write_upper
from builder.store.store import written_folder
from hplm.engine.settings import check_in_flight
from hplm.errors import InvalidInput
from hplm.location import Location
from hplm.model.config import BackboneConfig
from hplm.parameters import Parameters, parameters_of
from hplm.placement.measuring import cores_of, device_parameters
from hplm.placement.placement import Group, Placement
from hplm.placement.units import Unit
from hplm.tenants.filter import FILE, Filter
from hplm.tenants.listing import served_branches, served_tenants
from hplm.tenants.models import upper_config
from hplm.tenants.snapshot import Snapshot, Tenant
from hplm.tenants.state_folder import EXPORTED_CONFIG, EXPORTED_TENANTS

STALE = "the placement is stale: run `hplm place profile` and `hplm place search` again"
CONFIG = "config.pbtxt"
FIRST_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}
PORTS = 10  # from one group of a machine to the next


@dataclass(frozen=True)
class Emitted:
    group: Group
    repository: Path
    state: Location | None
    tenants: int  # that it serves now
    place: int  # among the groups of its machine

    @property
    def command(self) -> str:
        """The command that starts its server, on its own cores and ports."""
        cores = ",".join(map(str, cores_of(self.group.devices)))
        state = f" --state {shlex.quote(str(self.state))}" if self.state is not None else ""
        ports = " ".join(f"--{name}-port {port + PORTS * self.place}" for name, port in FIRST_PORTS.items())
        serve = f"hplm serve --repository {shlex.quote(str(self.repository))}{state} {ports}"
        return f"taskset -c {cores} {serve}" if cores else serve


def emit(placement: Placement, repository: Path, folder: Path, state: Location | None = None) -> list[Emitted]:
    """Writes the repositories of all groups into a new folder, each under its group's name. `state`: the live registry."""
    if folder.exists():
        raise InvalidInput(f"{folder} exists already: name a new folder, and change the servers over to its repositories")
    for group in placement.groups:
        for backbone in group.cuts:
            _check_backbone(placement, group, repository, backbone)
        _check_runs(group)
    emitted: list[Emitted] = []
    with written_folder(folder) as writing:
        for group in placement.groups:
            tenants = 0
            for backbone in group.cuts:
                chosen = _filter(placement, group, repository, backbone, state)
                tenants += _check_tenants(placement, group, backbone, chosen, served_tenants(repository, state, backbone))
                _emit_backbone(group, repository, backbone, writing / group.name, chosen)
                parameters = _parameters(placement, group, repository, backbone)
                write_upper(writing / group.name, backbone, parameters, _stages(group, backbone))
            if (repository / ALIAS).is_dir():
                _copy_model(repository / ALIAS, writing / group.name / ALIAS)
            place = sum(other.group.machine == group.machine for other in emitted)
            emitted.append(Emitted(group, folder / group.name, state, tenants, place))
    return emitted


def _filter(placement: Placement, group: Group, repository: Path, backbone: str, state: Location | None) -> Filter:
    """Returns what a group's server takes of a backbone: also the domains that those of its units fall back to."""
    units = [unit for unit in placement.units if unit.backbone == backbone]
    own = [unit for unit in units if unit.name in group.units]
    parents = {branch["domain"]: branch["parent"] for branch in served_branches(repository, state, backbone)}
    domains: set[str] = set()
    for unit in own:
        step: str | None = unit.domain
        while step is not None:
            domains.add(step)
            step = parents.get(step)
    hot = [unit for unit in units if unit.tenant is not None]
    return Filter(frozenset(map(_short, own)), frozenset(map(_short, hot)), frozenset(domains))


def _short(unit: Unit) -> str:
    """Returns a unit's name as filters have it, without its backbone."""
    return unit.name.removeprefix(f"{unit.backbone}/")


def _check_runs(group: Group) -> None:
    """Refuses groups that no server can run yet."""
    if group.stages > 1 and group.intra > 1:
        raise InvalidInput(
            f"group {group.name!r} has {group.stages} stages of {group.intra} devices, but this version runs several stages "
            "of one device each: search again with `hplm place search`"
        )
    if group.intra > 1 and not cores_of(group.devices):
        raise InvalidInput(
            f"group {group.name!r} has {group.intra} GPUs a stage, but this version takes one: profile with --intra 1"
        )


def _check_backbone(placement: Placement, group: Group, repository: Path, backbone: str) -> None:
    """Refuses a backbone that is no encoder of the repository, or that is not as the placement says."""
    source = repository / backbone / "1"
    if not (source / EXPORTED_TENANTS).is_file():
        raise InvalidInput(f"{repository} does not have the backbone {backbone!r} of group {group.name!r}: {STALE}")
    config, cut = BackboneConfig.load(source / EXPORTED_CONFIG), group.cuts[backbone][-1][1] + 1
    if config.is_decoder:
        raise InvalidInput(
            f"backbone {backbone!r} of group {group.name!r} is a decoder, which placement does not support yet: profile and "
            f"search again with encoders only, and serve {backbone!r} from {repository} itself"
        )
    if config.upper_layers != cut:
        raise InvalidInput(f"group {group.name!r} cuts {cut} layers of {backbone!r}, which has {config.upper_layers}: {STALE}")
    if Snapshot.load(source / EXPORTED_TENANTS).export != placement.exports[backbone]:
        raise InvalidInput(f"{source} is another export than the one that was profiled: {STALE}")


def _check_tenants(
    placement: Placement, group: Group, backbone: str, chosen: Filter, served: Sequence[tuple[str, Tenant]]
) -> int:
    """Refuses tenants without a unit, and units without tenants. Returns the number of tenants that the group serves."""
    found: set[str] = set()
    for _, tenant in served:
        found.add(unit := chosen.unit_of(tenant))
        if f"{backbone}/{unit}" not in placement.unit:
            raise InvalidInput(
                f"tenant {tenant.id!r} of backbone {backbone!r} and domain {tenant.domain!r} has no unit: {STALE}"
            )
    empty = next(iter(chosen.units - found), None)
    if empty is not None:
        raise InvalidInput(f"unit '{backbone}/{empty}' of group {group.name!r} has no tenants in the repository: {STALE}")
    return sum(chosen.takes(tenant) for _, tenant in served)


def _emit_backbone(group: Group, repository: Path, backbone: str, target: Path, chosen: Filter) -> None:
    """Writes the model folders of a backbone."""
    source, to = repository / backbone / "1", target / backbone / "1"
    to.mkdir(parents=True)
    check_copies([source], to)
    for file in sorted(source.rglob("*")):
        if file.is_file() and file.name != FILE:
            copy_file(file, to / file.relative_to(source))
    chosen.write(to)
    _copy_model(repository / f"{backbone}-lookup", target / f"{backbone}-lookup")


def _parameters(placement: Placement, group: Group, repository: Path, backbone: str) -> Parameters:
    """Returns the parameters of a backbone's engine: the export's, on the group's devices and in the profiled precision.

    The engines of a group divide the cores of a stage: threads that outnumber the cores wait for each other.
    """
    parameters, precision = parameters_of(_config(upper_config(repository, backbone))), placement.precisions[backbone]
    found = parameters["dtype"]
    if found not in ("auto", precision):
        raise InvalidInput(f"group {group.name!r} serves in {found!r}, but was profiled in {precision!r}: {STALE}")
    try:
        check_in_flight(group.stages, parameters)
    except InvalidInput as error:
        raise InvalidInput(f"group {group.name!r} has {group.stages} stages, but for {backbone!r} {error}") from error
    devices = device_parameters(group.devices_of(0), engines=len(group.cuts))
    return Parameters({**parameters, **devices, "dtype": precision})


def _copy_model(source: Path, target: Path) -> None:
    """Copies a model's configuration: it may be edited in place, so it is not linked."""
    (target / "1").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_config(source / CONFIG), target / CONFIG)


def _config(path: Path) -> Path:
    """Returns the path of a configuration, which must be there."""
    if not path.is_file():
        raise InvalidInput(f"{path} is missing: write the repository again with `hplm export` or `hplm place emit`")
    return path


def _stages(group: Group, backbone: str) -> str:
    """Returns the parameter `stages` of a backbone's engine: nothing if it has one stage, on its device or all of its cores."""
    if group.stages == 1:
        return ""
    cut = zip(group.devices, group.cuts[backbone], strict=True)
    return " ".join(f"{first}-{last}@{device}" for device, (first, last) in cut)
