"""Students get texts to learn and a depth. Here their tenants are not trained, and they learn in one step."""

import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from builder.evaluation.calibration import calibrate_tenant
from builder.evaluation.tenant import evaluate_tenant
from builder.evaluation.unseen import PARTS, count_learned
from builder.exits.build import build_exits
from builder.learning.bodies import PlotBody
from builder.learning.masked import MaskedHead
from builder.store.store import Store
from builder.students import boosting, build
from builder.students.augmentation import GUESSES, augmented
from builder.students.boosting import LearnsNothing, Seen, StudentOptions, boosted, lesson_of
from builder.students.build import build_students, most_layers
from builder.students.team import StudentTeam, asked_first
from builder.tasks.examples import Example
from builder.tasks.lookup import Reader
from builder.tasks.losses import UNREAD
from builder.training.data import read_data
from hplm.cli.main import main
from hplm.cli.tenant_store import _students_text
from hplm.engine.engine import resolve_precision
from hplm.errors import InvalidInput
from testing.random_store import random_students
from tests.builder.stores import interrupted, nothing_looked_up, some_lines
from tests.builder.training.small_tenants import made, pretend, write
from tests.cli.commands import run
from tests.support.device import DEVICE
from tests.support.learning import by_one_step
from tests.support.message import mentions, refusing

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_pictures")]

OPTIONS = StudentOptions(1, 2, rank=2, epochs=1, learning_rate=0.1)
TEXTS, WORDS = 40, range(30, 30 + GUESSES)


@pytest.fixture
def store(learnable, tmp_path):
    """A store with two tenants, and their data beside it."""
    store = Store(shutil.copytree(learnable.folder, tmp_path / "store"))
    for task in ("classify", "multilabel"):
        pretend(store, task, made(tmp_path, task, TEXTS, 1), made(tmp_path, task, 20, 2), tenant=task)
    return store


def give_head(store):
    """Saves a masked head that guesses the same words everywhere."""
    head = MaskedHead(store.config)
    with torch.no_grad():
        head.bias[list(WORDS)] = 1000.0
    store.save_masked_head("root", 1, head.state_dict())


def test_the_first_student_learns_all_texts_and_others_the_hardest_and_some_at_random():
    left = [torch.full((1 + number % 2, 3), size) for number, size in enumerate([0.1, -5.0, 0.2, 3.0, 0.3, 0.4, 0.5, -4.0])]
    options = replace(OPTIONS, hardest=0.25, drawn=0.25)
    assert lesson_of(left, 0, options) is None and lesson_of(left, 1, OPTIONS) is None
    chosen = [lesson_of(left, number, options).tolist() for number in range(1, 9)]
    assert all({1, 7} <= set(own) and 2 <= len(own) == len(set(own)) <= 4 for own in chosen)
    assert chosen == [lesson_of(left, number, options).tolist() for number in range(1, 9)]
    assert len(set(map(tuple, chosen))) > 1, "each draws the same texts"
    assert lesson_of(left, 1, replace(options, hardest=0.01, drawn=0.0)).tolist() == [1], "it would learn nothing"


def test_each_student_learns_the_texts_of_its_lesson_and_all_together_learn_all(store):
    learned = {}
    with by_one_step(), pytest.MonkeyPatch.context() as patch:  # which is undone before the other
        one_step = boosting.train

        def noting(training, *given):
            learned[training.title] = Counter(np.concatenate(list(training.batches(0))).tolist())
            return one_step(training, *given)

        patch.setattr(boosting, "train", noting)
        build_students(store, "classify", replace(OPTIONS, hardest=0.25, drawn=0.1), DEVICE)
    all_texts = Counter(range(TEXTS))
    assert learned["student 1 of 2"] == learned["students together"] == all_texts
    assert set(learned["student 2 of 2"].values()) == {1} and 10 <= len(learned["student 2 of 2"]) <= 14


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
def test_a_student_without_gain_is_dropped_and_no_more_are_made(monkeypatch, useless):
    """The first one says half of each number of the rows; the next one as many times what is missing."""
    wanted = {part: [torch.randn(1, 8) for _ in range(6)] for part in ("train", "dev")}
    learned, team = [], SimpleNamespace(members=[], rows=max)
    team.add = lambda: team.members.append(SimpleNamespace(head={"weight": torch.ones(2), "bias": torch.ones(2)}))
    half = torch.arange(8) < 4

    def said(part, compute):
        first = compute.keywords["number"] == start
        return [0.5 * own * half if first else useless[part] * own * ~half for own in wanted[part]]

    data = SimpleNamespace(train="train", dev="dev", by_text=said)
    monkeypatch.setattr(boosting, "learn_member", lambda *given: learned.append(given[5]))
    teacher = [Seen(wanted[part], []) for part in wanted]
    start = 0
    with Sizes() as made:
        (told,) = boosted(None, team, data, teacher, replace(OPTIONS, students=3), None)
    assert max(made.sizes) == 8, "a copy of the rows of all texts may take gigabytes"
    assert told["alpha"] == 2 and 0 < told["residual"] < 1 and learned == [0, 1]
    assert [member.head["weight"].tolist() for member in team.members] == [[2.0, 2.0]]
    start, team.members[:] = 1, []
    with refusing(LearnsNothing):
        boosted(None, team, data, teacher, OPTIONS, None)


def test_augmented_texts_have_some_guessed_words_and_no_label(store, tmp_path):
    files = [tmp_path / f"classify-{part}.jsonl" for part in (1, 2)]
    data = read_data(Reader(store, "root", 1), "classify", *files, DEVICE)
    body = PlotBody.of(store).to(DEVICE)
    assert augmented(body, data, 2, seed=0) == []
    give_head(store)
    found, again = (augmented(body, data, 2, seed=0) for _ in range(2))
    assert [text.tokens.tolist() for text in found] == [text.tokens.tolist() for text in again]
    assert Counter(id(text.example) for text in found) == Counter({id(one.example): 2 for one in data.train.texts})
    own = {id(text.example): text for text in data.train.texts}
    changed = []
    for text in found:
        before = own[id(text.example)]
        differs = text.tokens != before.tokens
        assert not differs[[0, -1]].any() and set(text.tokens[differs].tolist()) <= set(WORDS)
        assert (text.targets == UNREAD).all() and not (before.targets == UNREAD).any()
        assert (text.addresses == data.reader.with_tokens(before, text.tokens).addresses).all()
        assert differs.any() == (text.addresses != before.addresses).any()
        changed.append(differs[1:-1].mean())
    assert 0.05 < np.mean(changed) < 0.5


def test_a_domain_without_a_masked_head_augments_nothing_and_the_command_says_so(store, capsys):
    command = "tenant students classify --layers auto --students 1 --rank 2 --epochs 1 --learning-rate 0.1 --augmented 1"
    said, found = [], []
    with by_one_step():
        for seed in ("0", "1"):
            assert main([*command.split(), "--seed", seed, "--store", str(store.folder), "--device", str(DEVICE)]) == 0
            said.append(capsys.readouterr().out)
            found.append(store.report(store.tenant("classify"))["students"]["report"])
            give_head(store)
    assert [one["augmented_texts"] for one in found] == [0, TEXTS] and found[1]["learned_texts"] == TEXTS
    assert [mentions(one, "augmented") for one in said] == [True, False]
    assert found[0]["depth"] == 1 and mentions(said[0], "95 %")  # a quarter of three layers


@pytest.mark.parametrize(
    ("scores", "tried", "kept"),
    [((1.0, 0.0, 0.0), 1, 1), ((0.0, 1.0, 0.0), 2, 2), ((0.0, 0.1, 0.1), 3, 2)],
    ids=["the first is good enough", "the second is", "none is: the best one, and the shallower of two"],
)
def test_a_search_keeps_the_fewest_layers_that_are_good_enough(store, monkeypatch, scores, tried, kept):
    learned, options = build._of_depth, replace(OPTIONS, depth=3, students=1, search=True)

    def scored(*given):
        found, told = learned(*given)
        return found, {**told, "scores": [scores[told["depth"] - 1]], "kept": 1}

    monkeypatch.setattr(build, "_of_depth", scored)
    with by_one_step() as anew:
        report, _ = build_students(store, "classify", options, DEVICE)
        assert report["teacher_score"] > 0.2 and report["depths"] == {str(n + 1): scores[n] for n in range(tried)}
        assert anew == [True] * 2 * tried  # each student, and its classifier
        assert report["depth"] == store.knowledge(store.tenant("classify")).students.students.depth == kept
        assert build_students(store, "classify", options, DEVICE) == (report, False)


@pytest.mark.parametrize("wrong", [(1, 3), (3,), (1, 2, 3)], ids=str)
def test_a_search_passes_over_layers_with_which_the_first_student_learns_nothing(store, monkeypatch, wrong):
    learned, options = build.boosted, replace(OPTIONS, depth=3, students=1, search=True)

    def boosted(*given):
        if given[4].depth in wrong:
            raise LearnsNothing("nothing")
        return learned(*given)

    monkeypatch.setattr(build, "boosted", boosted)
    monkeypatch.setattr(build, "ENOUGH", 2.0)  # so that it tries all depths
    with by_one_step():
        if len(wrong) == 3:
            with refusing(LearnsNothing):
                build_students(store, "classify", options, DEVICE)
            return
        report, _ = build_students(store, "classify", options, DEVICE)
    assert {int(depth) for depth in report["depths"]} == {1, 2, 3} - {*wrong}


@pytest.mark.parametrize(
    ("teacher", "lower", "upper", "most"),
    [("own", 2, 4, 1), ("own", 8, 8, 2), ("own", 1, 1, 1), ("dedicated", 4, 8, 3), ("dedicated", 11, 1, 1)],
)
def test_a_search_tries_at_most_a_quarter_of_the_teachers_layers(teacher, lower, upper, most):
    assert most_layers(SimpleNamespace(config=SimpleNamespace(lower_layers=lower, upper_layers=upper)), teacher) == most


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
    assert [count_learned(store, tenant, tests) for tenant in (learned, store.tenant("classify"))] == [2, 0]
    assert count_learned(store, learned, tests, PARTS[:1]) == 0, "who trains it on has its full stack, which learned none"
    file.write_text("other texts")
    assert count_learned(store, learned, tests) == 0
    file.unlink()
    assert count_learned(store, learned, tests) == 0


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


def test_the_seed_is_that_of_a_dedicated_teacher_too(store, monkeypatch):
    seeds = []
    monkeypatch.setattr(build, "dedicated", lambda data, options, saved: seeds.append(options.seed) or interrupted())
    with pytest.raises(KeyboardInterrupt):
        build_students(store, "classify", replace(OPTIONS, seed=7), DEVICE, "dedicated")
    assert seeds == [7]


def test_dev_says_which_students_are_asked_first(store, monkeypatch):
    given, options = [], replace(OPTIONS, drop=1.5)

    def noting(teams, logits, lengths, drop):
        given.append((len(teams), *[own.shape for own in logits[: len(teams)]], len(lengths), drop))
        return asked_first(teams, logits, lengths, drop)

    monkeypatch.setattr(build, "asked_first", noting)
    with by_one_step():
        report, _ = build_students(store, "classify", options, DEVICE)
    kept = report["kept"]
    assert given == [(kept, *[(20, 2)] * kept, 20, 1.5)]
    stored = store.knowledge(store.tenant("classify")).students.students.teams
    assert [(rung["students"], rung.get("first")) for rung in report["rungs"]] == [
        (team.members, team.first and team.first.members) for team in stored
    ]
    rungs = [{"students": 5, "cost": 0.4, "first": 2, "threshold": 0.9, "leaves": 0.75}]
    assert mentions(_students_text({**report, "rungs": rungs}), "2 of 5", "75%", "90.0%", "0.40")


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
