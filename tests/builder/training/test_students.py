"""Students of a tenant: what they learn, how many stay, and that they are stored as they were judged."""

import json
from dataclasses import replace

import pytest

from builder.evaluation.calibration import calibrate_tenant
from builder.evaluation.tenant import evaluate_tenant
from builder.store.resumable import begun_plan
from builder.students.boosting import StudentOptions
from builder.students.build import build_students
from builder.tables.root import RootOptions, build_root
from hplm.engine.engine import resolve_precision
from hplm.errors import InvalidInput
from tests.builder.stores import NO_TIME, some_lines
from tests.builder.training.small_tenants import learn, made
from tests.support.device import DEVICE
from tests.support.message import refusing

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("trained")]
OPTIONS = StudentOptions(depth=2, students=2, rank=4, epochs=2, learning_rate=3e-3, stacking=0.5)


@pytest.mark.parametrize("tenant", ["bio", "regress", "cut"])
def test_each_student_learns_what_those_before_it_have_not_and_the_best_number_is_stored(trained, trained_store, tenant):
    _, folder = trained
    report, is_new = build_students(trained_store, tenant, OPTIONS, DEVICE, show_progress=False)
    missing, scores, kept = [own["residual"] for own in report["boosting"]], report["scores"], report["kept"]
    assert is_new and missing == sorted(missing, reverse=True) and missing[0] < 1
    assert len(scores) == len(missing) and scores[kept - 1] == max(scores) > 0.7 * report["teacher_score"] > 0
    found = trained_store.knowledge(trained_store.tenant(tenant)).students
    assert [team.members for team in found.students.teams] == [*range(kept, 0, -1)] and found.students.depth == 2
    assert len(found.members) == kept
    for members, score in {None: scores[kept - 1], 0: report["teacher_score"], 1: scores[0]}.items():
        judged = evaluate_tenant(trained_store, tenant, folder / f"{tenant}-dev.jsonl", DEVICE, False, members=members)
        assert judged.scores.main == pytest.approx(score, abs=1e-5)
    assert build_students(trained_store, tenant, OPTIONS, DEVICE, show_progress=False) == (report, False)
    assert trained_store.tenant(tenant).version == report["version"]


def test_students_learn_what_the_teacher_says_of_texts_without_labels(trained, trained_store):
    data = trained[1] / "cut-dev.jsonl"
    known = [json.loads(line)["text"] for line in data.read_text("utf-8").splitlines()]
    (further := trained[1] / "further.txt").write_text("\n".join([*known, *some_lines(60, 5)]), "utf-8")
    options = replace(OPTIONS, students=1)
    labelled, _ = build_students(trained_store, "cut", options, DEVICE, show_progress=False)
    given = {"unlabelled": further, "show_progress": False}
    report, is_new = build_students(trained_store, "cut", options, DEVICE, **given)
    assert is_new and report["unlabelled_texts"] == 60, "texts of dev would judge what they taught"
    assert report["learned_texts"] == labelled["learned_texts"]
    assert report["boosting"] != labelled["boosting"]
    assert build_students(trained_store, "cut", options, DEVICE, **given) == (report, False)
    (seen := trained[1] / "seen.txt").write_text("\n".join(known * 2), "utf-8")
    for tenant, file, named in (("regress", further, ["regress"]), ("cut", seen, [seen])):
        with refusing(InvalidInput, "--unlabelled", *named):
            build_students(trained_store, tenant, replace(options, seed=1), DEVICE, unlabelled=file, show_progress=False)
        assert begun_plan(trained_store.tenant_work_folder(tenant)) is None, "it has begun before it refused"


def test_what_students_cannot_do_is_refused(trained, trained_store):
    for tenant, depth, named in (("span-or-none", 2, ["span"]), ("cut", 4, ["--layers 4", "1 to 3"])):
        with refusing(InvalidInput, *named):
            build_students(trained_store, tenant, StudentOptions(depth), DEVICE, show_progress=False)
    for option, value in {"students": 17, "rank": 0, "learning_rate": 0, "stacking": -1}.items():
        with refusing(InvalidInput, f"--{option.replace('_', '-')} {value}"):
            StudentOptions(1, **{option: value})
    with refusing(InvalidInput, "--teacher mine"):
        build_students(trained_store, "cut", OPTIONS, DEVICE, teacher="mine")
    build_students(trained_store, "cut", StudentOptions(1, 1, rank=2, epochs=1), DEVICE, show_progress=False)
    (texts,) = trained[1].glob("cut-test.jsonl")
    with refusing(InvalidInput, "students"):
        calibrate_tenant(trained_store, "cut", texts, resolve_precision("fp32", DEVICE), DEVICE, show_progress=False)


def test_a_teacher_may_be_a_model_that_is_fine_tuned_in_full(bert, tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(some_lines(60, 1)), "utf-8")
    store, _ = build_root(str(bert), [tmp_path / "corpus.txt"], tmp_path / "store", RootOptions(name="tiny"), NO_TIME, DEVICE)
    learn(store, "classify", made(tmp_path, "classify", 80, 1), rank=2, epochs=1)
    options = StudentOptions(depth=1, students=1, rank=2, epochs=1)
    scores = {}
    for teacher in ("own", "dedicated"):
        report, is_new = build_students(store, "acme", options, DEVICE, teacher=teacher, show_progress=False)
        assert is_new and report["teacher"] == teacher
        scores[teacher] = report["boosting"]
    assert scores["own"] != scores["dedicated"]
