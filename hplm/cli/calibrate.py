"""`hplm calibrate`: makes the confidence of a tenant's answers true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hplm.cli.options import Device, Json, Picture, Seen, ServedDtype, StoreFolder, check_picture, device_of, open_store


def calibrate(
    *, store: StoreFolder, id: str, texts: Path, seen: Seen = (), dtype: ServedDtype = "auto", delta: float | None = None,
    picture: Picture = None, device: Device = "auto", json: Json = False,
) -> dict[str, Any]:  # fmt: skip
    """Make the confidence of a tenant's answers true, by how often they are right on labelled texts.

    The tenant gets a next version. One that is trained later has no calibration until it is calibrated too.

    :param id: name of the tenant
    :param texts: labelled texts, JSONL in the form of the tenant's training data; those that its training has seen are left out
    :param delta: for numbers: the largest error of a right one (default: half the standard deviation)
    """
    from builder.evaluation.calibration import calibrate_tenant
    from builder.publish.precision import served_precision

    opened, on = open_store(store), device_of(device)
    check_picture(picture)
    opened.known_tenant(id)  # refuses an unknown one before the precision is measured
    report, is_new = calibrate_tenant(opened, id, texts, served_precision(opened, dtype, on), on, delta, seen)
    calibration = opened.knowledge(opened.known_tenant(id)).calibration
    assert calibration is not None  # it was made
    if picture is not None:
        from builder.pictures import draw_reliability

        draw_reliability(report, picture)
    print(described(report, calibration.kind))
    print("next: `hplm export`, or `hplm tenant update` where it is served" if is_new else "nothing has changed")
    rest = {name: value for name, value in report.items() if name not in ("before", "after")}
    scores = {side: {name: report[side][name] for name in ("ece", "nll")} for side in ("before", "after") if report[side]}
    return {**rest, "kind": calibration.kind, **scores, "changed": is_new}


def described(report: dict[str, Any], kind: str) -> str:
    lines = [
        f"{report['tenant']} version {report['version']} in {report['precision']}: {kind}, from {report['texts']:,} texts of "
        f"{report['file']}; {report['left_out']:,} more were left out, because the training has seen them",
        f"{report['right']:.1%} of the answers are right" + (f" within {report['delta']:g}" if report["delta"] else ""),
        f"{'':<8}{'ECE':>10}{'NLL':>10}",
    ]
    for side in ("before", "after"):
        if (scores := report[side]) is not None:
            lines.append(f"{side:<8}{scores['ece']:>10.4f}{scores['nll']:>10.4f}")
    return "\n".join(lines)
