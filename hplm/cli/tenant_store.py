"""`hplm tenant exits` and `export`: let a tenant's easy texts leave between the upper layers, and save it as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hplm.cli.options import Device, Json, Picture, Seed, Seen, ServedDtype, StoreFolder, check_picture, device_of, open_store
from hplm.cli.tenant import Id

if TYPE_CHECKING:
    from builder.store.store import Store


def exits(
    id: Id, /, *, store: StoreFolder, texts: Path, drop: tuple[float, ...] = (1.0, 2.0, 4.0), delta: float | None = None,
    seen: Seen = (), dtype: ServedDtype = "auto", seed: Seed = 0, device: Device = "auto", picture: Picture = None,
    json: Json = False,
) -> dict[str, Any]:  # fmt: skip
    """Let easy texts leave between the layers, where an answer is sure enough.

    The exits of a tenant's newest version learn the full stack's answers to the texts of its training; other texts, which need
    no labels, choose how sure an answer must be, so that the plan loses no more points than allowed. The tenant gets a next
    version. One that is trained later has no exits until they are made for it too.

    :param texts: texts like those to come, JSONL with `text` and what else the tenant reads; with labels, the plans' losses by
        them are printed too
    :param drop: points that a plan may lose; more of them, the smallest first, make cheaper plans for times of load
    :param delta: for numbers: how far an exit's may be from the full stack's (default: a tenth of their standard deviation)
    :param picture: draw loss against work into a .png, .svg or .pdf file
    """
    opened = open_store(store)
    check_picture(picture)
    opened.known_tenant(id)  # refuses an unknown one before the precision is measured
    options = {"drops": drop, "delta": delta, "seen": seen, "seed": seed}
    report = make_exits(opened, id, texts, device, dtype, **options)
    if picture is not None:
        from builder.pictures import draw_exits

        draw_exits(report, picture)
    return report


def make_exits(
    store: Store, tenant_id: str, texts: Path, device_name: str, dtype: str = "auto", **options: Any
) -> dict[str, Any]:
    """Makes a tenant's exits, prints what they lose and spare, and returns it. `options`: of `build_exits`."""
    from builder.exits.build import build_exits
    from builder.publish.precision import served_precision

    device = device_of(device_name)
    report, is_new = build_exits(store, tenant_id, texts, served_precision(store, dtype, device), device, **options)
    print(described(report))
    print("next: `hplm export`, or `hplm tenant update` where it is served" if is_new else "nothing has changed")
    return {**report, "changed": is_new}


def described(report: dict[str, Any]) -> str:
    lines = [
        f"{report['tenant']} version {report['version']} in {report['precision']}: exits learned from "
        f"{report['learned_texts']:,} texts, thresholds chosen by {report['texts']:,} of {report['file']}",
        f"{'plan':<6}{'work of layers':>14}{'expected loss':>18}{'same answer':>14}{'loss by labels':>18}   leave",
    ]
    for number, plan in enumerate(report["plans"], start=1):
        expected = f"{plan['expected_loss']:.2f} +- {plan['expected_loss_off']:.2f}"
        lost = plan.get("lost")
        by_labels = f"{lost['points']:.2f} +- {lost['off']:.2f}" if lost else "-"
        leaves = f"{plan['leaves']:.0%} at exit {plan['exit']}" if plan["exit"] is not None else "none"
        lines.append(f"{number:<6}{plan['cost']:>14.3f}{expected:>18}{plan['agrees']:>14.1%}{by_labels:>18}   {leaves}")
    return "\n".join(lines)


def export(
    id: Id, /, *, store: StoreFolder, to: Path, texts: Path | None = None, device: Device = "auto", json: Json = False
) -> dict[str, Any]:
    """Save a tenant of the store that has a LoRA, or a head alone, as a plain checkpoint of transformers.

    The original's lower layers stand in place of the tables and see whole texts, so some answers differ; --texts says how many.

    :param to: folder for the checkpoint, which must not exist
    :param texts: texts on which to compare: JSONL, or one a line
    """
    from builder.importing.plain import save_checkpoint

    report = save_checkpoint(open_store(store), id, to, texts, device_of(device))
    print(f"tenant {report['tenant']} version {report['version']}: {to}")
    if "lost" in report:
        print(f"lost: {report['lost']}")
    if "agreement" in report:
        print(f"{report['agreement']:.1%} of {report['answers']:,} answers are those of the tenant")
    return report
