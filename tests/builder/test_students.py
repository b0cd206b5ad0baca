"""Students of a tenant: what they learn, how many stay, and that they are stored as they were judged."""

import pytest
import torch

from builder.evaluation.calibration import calibrate_tenant
from builder.evaluation.tenant import evaluate_tenant
from builder.students.boosting import StudentOptions
from builder.students.build import build_students
from hplm.engine.engine import resolve_precision
from hplm.errors import InvalidInput
from tests.support.message import refusing

CPU = torch.device("cpu")
OPTIONS = StudentOptions(depth=2, students=3, rank=4, epochs=2, learning_rate=3e-3)
TENANTS = ("bio", "cut", "multilabel", "regress")  # of all tasks that students can answer


@pytest.mark.parametrize("tenant", TENANTS)
def test_each_student_learns_what_those_before_it_have_not_and_the_best_number_is_stored(trained, trained_store, tenant):
    _, folder = trained
    report, _ = build_students(trained_store, tenant, OPTIONS, CPU, show_progress=False)
    missing = [own["residual"] for own in report["boosting"]]
    assert missing == sorted(missing, reverse=True) and missing[0] < 1 and all(own["alpha"] > 0 for own in report["boosting"])
    scores, kept = report["scores"], report["kept"]
    assert len(scores) == len(missing) and scores[kept - 1] == max(scores)
    found = trained_store.knowledge(trained_store.tenant(tenant)).students
    assert [team.members for team in found.students.teams] == [*range(kept, 0, -1)] and found.students.depth == 2
    assert len(found.members) == kept
    served = evaluate_tenant(trained_store, tenant, folder / f"{tenant}-dev.jsonl", CPU, show_progress=False)
    assert served.scores.main == pytest.approx(scores[kept - 1], abs=1e-5)


def test_students_are_better_than_no_training_and_the_same_call_changes_nothing(trained_store):
    report, is_new = build_students(trained_store, "cut", OPTIONS, CPU, show_progress=False)
    assert is_new and report["scores"][report["kept"] - 1] > 0.8 * report["teacher_score"] > 0
    again, is_new = build_students(trained_store, "cut", OPTIONS, CPU, show_progress=False)
    assert again == report and not is_new and trained_store.tenant("cut").version == report["version"]


def test_what_students_cannot_do_is_refused(trained, trained_store):
    for tenant, options, named in (
        ("span-or-none", OPTIONS, ["span"]),
        ("cut", StudentOptions(depth=4), ["--layers 4", "1 to 3"]),
        ("cut", StudentOptions(depth=1, students=17), ["--students 17"]),
        ("cut", StudentOptions(depth=1, rank=0), ["--rank 0"]),
        ("cut", StudentOptions(depth=1, learning_rate=0), ["--learning-rate 0"]),
    ):
        with refusing(InvalidInput, *named):
            build_students(trained_store, tenant, options, CPU, show_progress=False)
    with refusing(InvalidInput, "--teacher mine"):
        build_students(trained_store, "cut", OPTIONS, CPU, teacher="mine")
    build_students(trained_store, "cut", StudentOptions(1, 1, rank=2, epochs=1), CPU, show_progress=False)
    (texts,) = trained[1].glob("cut-test.jsonl")
    with refusing(InvalidInput, "students"):
        calibrate_tenant(trained_store, "cut", texts, resolve_precision("fp32", CPU), CPU, show_progress=False)
