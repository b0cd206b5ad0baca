"""Students get texts to learn and a depth. Here their tenants are not trained, and they learn in one step."""

import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from builder.evaluation.calibration import calibrate_tenant
from builder.evaluation.evaluation import evaluate_tenant
from builder.exits.build import build_exits
from builder.store.store import Store
from builder.students import boosting
from builder.students.boosting import Seen, boosted
from builder.students.build import build_students
from builder.students.options import StudentOptions
from builder.students.team import StudentTeam
from builder.tasks.examples import Example, hash_of
from hplm.engine.engine import resolve_precision
from hplm.errors import InvalidInput
from testing.random_store import random_students
from tests.builder.stores import nothing_looked_up, some_lines
from tests.builder.training.small_tenants import made, pretend, write
from tests.cli.commands import run
from tests.support.device import DEVICE
from tests.support.learning import by_one_step
from tests.support.message import refusing

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_pictures")]

OPTIONS = StudentOptions(1, 2, rank=2, epochs=1, learning_rate=0.1)
TEXTS = 40


@pytest.fixture
def store(learnable, tmp_path):
    """A store with two tenants, and their data beside it."""
    store = Store(shutil.copytree(learnable.folder, tmp_path / "store"))
    for task in ("classify", "multilabel"):
        pretend(store, task, made(tmp_path, task, TEXTS, 1), made(tmp_path, task, 20, 2), tenant=task)
    return store


def test_all_numbers_of_students_learn_in_one_backward_pass_as_each_by_itself(store):
    found, of_all = {}, StudentTeam.prefixes
    with by_one_step(), pytest.MonkeyPatch.context() as patch:
        one_step = boosting.train

        def noting(training, *given):
            parameters = [own for group in training.groups for own in group.parameters.values()]
            for number in (None, 0, 1) if training.title == "students together" else ():
                at = slice(None) if number is None else slice(number, number + 1)
                patch.setattr(StudentTeam, "prefixes", lambda *given, at=at: of_all(*given)[at])
                found[number] = torch.autograd.grad(training.loss(np.arange(8))[0], parameters)
            patch.setattr(StudentTeam, "prefixes", of_all)
            return one_step(training, *given)

        patch.setattr(boosting, "train", noting)
        build_students(store, "classify", OPTIONS, DEVICE)
    for whole, first, both in zip(found[None], found[0], found[1], strict=True):
        torch.testing.assert_close(whole, (first + both) / 2)
    assert any((first != both).any() for first, both in zip(found[0], found[1], strict=True))


class Sizes(TorchDispatchMode):
    """Notes the size of each tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, given=(), options=None):
        found = function(*given, **(options or {}))
        self.sizes += [found.numel()] if isinstance(found, torch.Tensor) else []
        return found


@pytest.mark.parametrize(
    "useless", [{"train": 0.0, "dev": 0.0}, {"train": -1.0, "dev": -1.0}, {"train": 1.0, "dev": -1.0}], ids=str
)
def test_a_student_without_gain_is_dropped_and_no_more_are_made(useless):
    """The first one says half of each number of the rows; the next one as many times what is missing."""
    wanted = {part: [torch.randn(1, 8) for _ in range(6)] for part in ("train", "dev")}
    learned, team = [], SimpleNamespace(members=[], rows=max)
    team.add = lambda: team.members.append(SimpleNamespace(head={"weight": torch.ones(2), "bias": torch.ones(2)}))
    half = torch.arange(8) < 4

    def said(part, compute):
        first = compute.keywords["number"] == start
        return [0.5 * own * half if first else useless[part] * own * ~half for own in wanted[part]]

    data = SimpleNamespace(train="train", dev="dev", by_text=said)

    def learn(*given):
        learned.append(given[5])

    teacher = [Seen(wanted[part], []) for part in wanted]
    start = 0
    with Sizes() as made:
        (told,) = boosted(None, team, data, teacher, replace(OPTIONS, students=3), None, learn)
    assert max(made.sizes) == 8, "a copy of the rows of all texts may take gigabytes"
    assert told["alpha"] == 2 and 0 < told["residual"] < 1 and learned == [0, 1]
    assert [member.head["weight"].tolist() for member in team.members] == [[2.0, 2.0]]
    start, team.members[:] = 1, []
    with refusing(InvalidInput, "learns nothing"):
        boosted(None, team, data, teacher, OPTIONS, None, learn)


def test_students_learn_what_the_teacher_says_of_texts_without_labels(store, tmp_path):
    """They are left out where they stand in train or dev, and counted where they are judged."""
    known = [json.loads(line)["text"] for part in (1, 2) for line in (tmp_path / f"classify-{part}.jsonl").open()]
    fresh, options = some_lines(60, 5), replace(OPTIONS, students=1)
    (file := tmp_path / "further.txt").write_text("\n".join([*fresh, *known[-7:]]))
    (seen := tmp_path / "seen.txt").write_text("\n".join(known))
    with by_one_step():
        labelled, _ = build_students(store, "classify", options, DEVICE)
        report, is_new = build_students(store, "classify", options, DEVICE, unlabelled=file)
    assert is_new and (report["unlabelled_texts"], report["left_out"]) == (len(set(fresh)), len(set(known[-7:])))
    assert report["learned_texts"] == labelled["learned_texts"] and report["boosting"] != labelled["boosting"]
    assert build_students(store, "classify", options, DEVICE, unlabelled=file) == (report, False)
    for tenant, texts, named in (("multilabel", file, ["multilabel"]), ("classify", seen, [seen])):
        with refusing(InvalidInput, "--unlabelled", *named), nothing_looked_up():
            build_students(store, tenant, replace(options, seed=1), DEVICE, unlabelled=texts)
        assert not store.tenant_work_folder(tenant).exists(), "it has begun before it refused"
    with refusing(InvalidInput, "students"):
        calibrate_tenant(store, "classify", seen, resolve_precision("fp32", DEVICE), DEVICE)
    tests = [Example(tmp_path / "test.jsonl", 1, text) for text in (fresh[0], fresh[1], "a text of no file")]
    judging = write(tmp_path / "judging.jsonl", ({"text": line} for line in some_lines(120, 6)))
    learned = store.tenant("classify")
    with by_one_step():
        build_exits(store, "classify", judging, resolve_precision("fp32", DEVICE), DEVICE)
    hashes = {*map(hash_of, tests)}
    assert [len(hashes & store.seen(tenant).all) for tenant in (learned, store.tenant("classify"))] == [2, 0]
    assert not hashes & store.seen(learned).learned, "who trains it on has its full stack, which learned none"


def test_the_command_scores_each_number_of_students_and_the_full_stack_also_from_a_pipe(store, tmp_path, capsys):
    random_students(store, store.tenant("classify"), (3,))
    test = made(tmp_path, "classify", 30, 3)
    reading, writing = os.pipe()
    os.write(writing, test.read_bytes())
    os.close(writing)
    command = ["evaluate", "--id", "classify", "--store", store.folder, "--device", DEVICE, "--int8"]
    told = run(capsys, *command, "--test", f"/dev/fd/{reading}")
    os.close(reading)
    for name, members in {"hplm": None, "students 2": 2, "students 1": 1, "full stack": 0}.items():
        assert told[name] == round(evaluate_tenant(store, "classify", test, DEVICE, members=members).scores.main, 4)
    assert "students 3" not in told and told["int8"] > 0


@pytest.mark.parametrize("dev", [4, 3], ids=["a dev file", "the training file as dev"])
def test_students_need_the_files_of_the_last_training_alone(store, tmp_path, dev):
    (first := tmp_path / "classify-1.jsonl").rename(moved := first.with_name("moved.jsonl"))
    with refusing(InvalidInput, first, "--seen"):
        build_students(store, "classify", OPTIONS, DEVICE)
    moved.rename(first)
    train, judged = (made(tmp_path, "classify", TEXTS, seed) for seed in (3, dev))
    assert store.report(pretend(store, "classify", train, judged, tenant="classify"))["from_version"] == 1
    first.unlink()
    with by_one_step():
        report, is_new = build_students(store, "classify", replace(OPTIONS, students=1), DEVICE)
    assert is_new and (report["learned_texts"], report["dev_texts"]) == (TEXTS, TEXTS)
