"""`hplm place emit`: writes a model repository for each group of devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hplm.cli.place import Repository
from hplm.cli.served import StateLocation, checked_state
from hplm.errors import some


def emit(*, placement: Path, repository: Repository, to: Path, state: StateLocation = None) -> dict[str, Any]:
    """Write a model repository for each group of a placement, which serves the tenants of the group's units alone.

    The files are hard links where the file system allows it. All groups read one state.

    :param placement: what `hplm place search` wrote
    :param to: new folder for the repositories
    """
    from builder.publish.groups import emit
    from hplm.placement.placement import Placement

    state = checked_state(state)
    placed = Placement.read(placement)
    groups: list[dict[str, Any]] = []
    for one in emit(placed, repository, to, state):
        group = one.group
        print(
            f"{group.name} on {', '.join(group.devices)} of {group.machine}: {one.tenants} tenants of {some(group.units)}\n"
            f"  {one.command}"
        )
        own = {"name": group.name, "machine": group.machine, "devices": group.devices}
        groups.append({**own, "repository": str(one.repository), "tenants": one.tenants, "command": one.command})
    for unit in placed.unplaced:
        print(f"note: no group serves {unit.name} ({unit.tenants} tenants)")
    return {"groups": groups, "unplaced": [unit.name for unit in placed.unplaced]}
