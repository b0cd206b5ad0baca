"""Commands that add to a trained tenant of a store: `hplm calibrate`, `hplm tenant exits` and `hplm tenant students`.

`hplm tenant export` writes it as a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.cli.options import ColumnNames, check_picture, open_store
from builder.students.options import StudentOptions
from builder.tasks.columns import AS_TRAINED
from hplm.cli.options import Device, Picture, Seed, ServedDtype, StoreFolder, device_of
from hplm.cli.show import columns
from hplm.cli.tenant import Id

if TYPE_CHECKING:
    from hplm.calibration import Calibration


def calibrate(
    *, store: StoreFolder, id: str, texts: Path, dtype: ServedDtype = "auto", device: Device = "auto",
    columns: ColumnNames = AS_TRAINED,
) -> dict[str, Any]:  # fmt: skip
    """Make the confidence of a tenant's answers true, by how often they are right on labelled texts.

    The tenant gets a next version. One that is trained later has no calibration until it is calibrated too.

    :param id: name of the tenant
    :param texts: labelled texts in the form of the tenant's training data; those that its training has seen are left out
    """
    from builder.evaluation.calibration import calibrate_tenant
    from builder.publish.precision import served_precision

    opened, on = open_store(store), device_of(device)
    opened.known_tenant(id)  # refuses an unknown one before the precision is measured
    report, is_new = calibrate_tenant(opened, id, texts, served_precision(opened, dtype, on), on, columns)
    calibration = opened.knowledge(opened.known_tenant(id)).calibration
    assert calibration is not None  # it was made
    print(_calibration_text(report, calibration))
    print("next: `hplm export`, or `hplm tenant update` where it is served" if is_new else "nothing has changed")
    return {**report, "kind": calibration.kind, "changed": is_new}


def _calibration_text(report: dict[str, Any], calibration: Calibration) -> str:
    from hplm.calibration import Calibration

    lines = [
        f"{report['tenant']} version {report['version']} in {report['precision']}: {calibration.kind}, from "
        f"{report['texts']:,} texts of {report['file']}; {report['left_out']:,} more were left out, because the training has "
        "seen them",
        f"{report['right']:.1%} of the answers are right",
        columns(("", "ECE", "NLL"), [
            (side, f"{report[side]['ece']:.4f}", f"{report[side]['nll']:.4f}") for side in ("before", "after")
        ]),
    ]  # fmt: skip
    if calibration == Calibration():
        lines.append("no temperature is better on texts that it was not fitted to, so the confidences are those of softmax")
    return "\n".join(lines)


def exits(
    id: Id, /, *, store: StoreFolder, texts: Path, drop: tuple[float, ...] = (1.0, 2.0, 4.0), dtype: ServedDtype = "auto",
    seed: Seed = 0, device: Device = "auto", picture: Picture = None, columns: ColumnNames = AS_TRAINED,
) -> dict[str, Any]:  # fmt: skip
    """Let easy texts leave between the layers, where an answer is sure enough.

    The exits of a tenant's newest version learn the full stack's answers to the texts of its training; other texts, which need
    no labels, choose how sure an answer must be, so that the plan loses no more points than allowed. The tenant gets a next
    version. One that is trained later has no exits until they are made for it too.

    :param texts: texts like those to come: one a line, or JSONL with `text` and what else the tenant reads; with labels, the
        plans' losses by them are printed too
    :param drop: points that a plan may lose; more of them, the smallest first, make cheaper plans for times of load
    :param picture: draw loss against work into a .png, .svg or .pdf file
    """
    from builder.exits.build import build_exits
    from builder.publish.precision import served_precision

    opened, on = open_store(store), device_of(device)
    check_picture(picture)
    opened.known_tenant(id)  # refuses an unknown one before the precision is measured
    report, is_new = build_exits(opened, id, texts, served_precision(opened, dtype, on), on, drop, seed, columns)
    print(_exits_text(report))
    print("next: `hplm export`, or `hplm tenant update` where it is served" if is_new else "nothing has changed")
    if picture is not None:
        from builder.pictures import draw_exits

        draw_exits(report, picture)
    return {**report, "changed": is_new}


def _exits_text(report: dict[str, Any]) -> str:
    rows = list[tuple[str, ...]]()
    for number, plan in enumerate(report["plans"], start=1):
        expected = f"{plan['expected_loss']:.2f} +- {plan['expected_loss_off']:.2f}"
        lost = plan.get("lost")
        by_labels = f"{lost['points']:.2f} +- {lost['off']:.2f}" if lost else "-"
        leaves = f"{plan['leaves']:.0%} at exit {plan['exit']}" if plan["exit"] is not None else "none"
        rows.append((str(number), f"{plan['cost']:.3f}", expected, f"{plan['agrees']:.1%}", by_labels, leaves))
    return (
        f"{report['tenant']} version {report['version']} in {report['precision']}: exits learned from "
        f"{report['learned_texts']:,} texts, thresholds chosen by {report['texts']:,} of {report['file']}\n"
        + columns(("PLAN", "WORK OF LAYERS", "EXPECTED LOSS", "SAME ANSWER", "LOSS BY LABELS", "LEAVE"), rows)
    )


def students(
    id: Id, /, *, store: StoreFolder, options: StudentOptions, seen: tuple[Path, ...] = (),
    unlabelled: Path | None = None, device: Device = "auto",
) -> dict[str, Any]:  # fmt: skip
    """Make a shallow student that answers like the tenant, or several, of which a busy server asks fewer.

    Each student passes only the first upper layers, through an adapter of its own, and learns what those before it have not
    learned of the tenant's full stack. Then all learn the tenant's texts together, so that any number of them answers. The
    number that is best on dev stays. The tenant gets a next version; one that is trained later has no students until they are
    made anew.

    :param seen: files of its training that were moved
    :param unlabelled: further texts, one a line or JSONL, of which students learn what the full stack says (classify, tag)
    """
    from builder.students.build import build_students

    report, is_new = build_students(open_store(store), id, options, device_of(device), seen, unlabelled)
    print(_students_text(report))
    print("next: `hplm export`, or `hplm tenant update` where it is served" if is_new else "nothing has changed")
    return {**report, "changed": is_new}


def _students_text(report: dict[str, Any]) -> str:
    """Returns the scores of each number of students, beside the full stack's."""
    layers, kept = report["of_layers"], report["kept"]
    lines = [
        f"{report['tenant']} version {report['version']}: {kept} student{'s' * (kept > 1)} of {report['depth']} of "
        f"{layers} layers, {report['bytes'] / 1e6:.2f} MB; the full stack has {report['metric']} "
        f"{report['teacher_score']:.3f} on dev",
        columns(("STUDENTS", "WORK OF LAYERS", report["metric"].upper(), "ALPHA", ""), [
            (str(number), f"{number * report['depth'] / layers:.2f}", f"{score:.3f}", f"{own['alpha']:.2f}",
             "" if number <= kept else "dropped")
            for number, (score, own) in enumerate(zip(report["scores"], report["boosting"], strict=True), start=1)
        ]),
    ]  # fmt: skip
    if left_out := report["left_out"]:
        lines.append(f"{left_out:,} texts of --unlabelled were left out: the training or dev data have them")
    return "\n".join(lines)


def export(id: Id, /, *, store: StoreFolder, to: Path, texts: Path | None = None, device: Device = "auto") -> dict[str, Any]:
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
