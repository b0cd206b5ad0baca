"""Draws placements: which units are on which devices."""

from __future__ import annotations

from pathlib import Path

from builder.pictures import INK, OTHERS, OWN, panels, save
from hplm.placement.attained import Attained
from hplm.placement.cluster import Cluster
from hplm.placement.placement import Placement

MOST_NAMED = 6  # units of a group


def draw_placement(placement: Placement, cluster: Cluster, attained: Attained, path: Path) -> None:
    """Draws a row for each machine and a box for each device; the devices of a group have one colour and one text."""
    rows = max(1, len(cluster.machines))
    figure, (axes,) = panels(12, 1.6 + 1.3 * rows)
    colors = (OWN, *OTHERS)
    for row, machine in enumerate(cluster.machines):
        column = {device.name: i for i, device in enumerate(machine.devices)}
        axes.text(-0.2, row + 0.45, machine.name, ha="right", va="center", color=INK)
        for i, group in enumerate(placement.groups):
            if group.machine != machine.name:
                continue
            for stage in range(group.stages):
                for device in group.devices_of(stage):
                    faded = 1 - 0.6 * stage / group.stages
                    axes.bar(column[device] + 0.5, 0.9, 0.94, row, color=colors[i % len(colors)], alpha=faded)
            busy = attained.busy_ns[i] / attained.trace.seconds / 1e9 if i < len(attained.busy_ns) else 0.0
            named = ", ".join(group.units[:MOST_NAMED]) + (" ..." if len(group.units) > MOST_NAMED else "")
            label = f"{group.name}, {group.stages} x {group.intra}, {busy:.0%} busy\n{named}"
            axes.text(column[group.devices[0]] + 0.1, row + 0.45, label, va="center", fontsize=7, color="white", clip_on=True)
    axes.set_title(f"{attained.share:.1%} of {len(attained.trace):,} requests in time ({attained.trace.source})", loc="left")
    axes.set_xlim(-1.5, max(len(machine.devices) for machine in cluster.machines))
    axes.set_ylim(rows, 0)
    axes.axis("off")
    save(figure, path)
