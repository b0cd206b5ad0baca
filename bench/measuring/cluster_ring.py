"""Measures how many tenants a third replica takes from two, with the router and with stand-ins for replicas."""

from __future__ import annotations

from pathlib import Path

from bench.measuring.cluster_material import Material, say
from bench.measuring.cluster_stand_ins import StandIn, places, routed

TENANTS = [f"tenant-{number}" for number in range(1000)]


def ring_figures(folder: Path, material: Material) -> dict[str, float]:
    say("tenants that a third replica takes")
    two, three = (_places(folder / str(count), material, count) for count in (2, 3))
    moved = [tenant for tenant in two if two[tenant] != three[tenant]]
    strayed = [tenant for tenant in moved if three[tenant] != "replica-3"]  # from one old replica to the other
    return {"moved_share": round(len(moved) / len(two), 4), "strayed_share": round(len(strayed) / len(two), 4)}


def _places(folder: Path, material: Material, count: int) -> dict[str, str]:
    with routed(folder, material, [StandIn(f"replica-{number}") for number in range(1, count + 1)]) as port:
        return places(port, material.backbone, TENANTS)
