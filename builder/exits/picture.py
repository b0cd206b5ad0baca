"""Draws what the plans of a tenant's exits lose, against the work that they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builder.pictures import INK, OTHERS, OWN, panels, save


def draw_exits(report: dict[str, Any], path: Path) -> None:
    plans, (figure, (axes,)) = report["plans"], panels(5.2, 4.2)
    cost = [plan["cost"] for plan in plans]
    expected, off = ([plan[name] for plan in plans] for name in ("expected_loss", "expected_loss_off"))
    axes.errorbar(cost, expected, off, fmt="o-", color=OWN, label=f"expected, from {report['texts']:,} texts")
    if all(plan.get("lost") for plan in plans):
        lost = [plan["lost"] for plan in plans]
        points, off = ([one[name] for one in lost] for name in ("points", "off"))
        axes.errorbar(cost, points, off, fmt="s--", color=OTHERS[0], label="by their labels")
    axes.set(xlim=(0, 1), xlabel="work of the layers, share of the full stack's", ylabel="points lost")
    axes.legend()
    axes.set_title(f"{report['tenant']} version {report['version']}: exits", loc="left", color=INK)
    save(figure, path)
