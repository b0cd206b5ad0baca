"""`hplm tenant students`: shallow members that answer in place of a tenant's full stack, fewer of them when it is crowded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from hplm.cli.options import Device, Json, Seed, StoreFolder, device_of, open_store
from hplm.cli.tenant import Id


def students(
    id: Id, /, *, store: StoreFolder, layers: int, students: int = 6, teacher: Literal["own", "dedicated"] = "own",
    rank: int = 16, epochs: int = 3, learning_rate: float = 1e-3, stacking: float = 0.0, seen: tuple[Path, ...] = (),
    unlabelled: Path | None = None, seed: Seed = 0, device: Device = "auto", json: Json = False,
) -> dict[str, Any]:  # fmt: skip
    """Make shallow students that together answer like the tenant, and of which a busy server asks fewer.

    Each student passes only the first upper layers, through an adapter of its own, and learns what those before it have not
    learned of the teacher. Then all learn the tenant's texts together, so that any number of them answers. The number that is
    best on dev stays. The tenant gets a next version; one that is trained later has no students until they are made anew.

    :param layers: upper layers that each student passes
    :param students: most students to try
    :param teacher: own: the tenant's full stack; dedicated: a BERT that is fine-tuned in full on the same data, for this
    :param rank: of each student's LoRA
    :param epochs: passes over the texts, of each student and then of all together
    :param learning_rate: learning rate
    :param seen: files of its training that were moved
    :param unlabelled: further texts, one a line or JSONL, of which students learn what the teacher says (classify, tag)
    :param stacking: weight of the loss by which the middle of a student also learns the sum of those before it
    """
    from builder.students.boosting import StudentOptions
    from builder.students.build import build_students

    options = StudentOptions(layers, students, rank, epochs, learning_rate, stacking, seed=seed)
    report, is_new = build_students(open_store(store), id, options, device_of(device), teacher, seen, unlabelled)
    print(described(report))
    print("next: `hplm export`, or `hplm tenant update` where it is served" if is_new else "nothing has changed")
    return {**report, "changed": is_new}


def described(report: dict[str, Any]) -> str:
    """Returns the scores of each number of students, beside their teacher's."""
    layers, kept = report["of_layers"], report["kept"]
    lines = [
        f"{report['tenant']} version {report['version']}: {kept} student{'s' * (kept > 1)} of {report['depth']} of "
        f"{layers} layers, {report['bytes'] / 1e6:.2f} MB; the teacher ({report['teacher']}) has {report['metric']} "
        f"{report['teacher_score']:.3f} on dev",
        f"{'students':<10}{'work of layers':>14}{report['metric']:>12}{'alpha':>8}",
    ]
    for number, (score, own) in enumerate(zip(report["scores"], report["boosting"], strict=True), start=1):
        work, dropped = number * report["depth"] / layers, "" if number <= kept else "  dropped"
        lines.append(f"{number:<10}{work:>14.2f}{score:>12.3f}{own['alpha']:>8.2f}{dropped}")
    return "\n".join(lines)
