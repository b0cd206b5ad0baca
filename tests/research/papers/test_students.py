"""The study of students: each way is scored once, and the table compares them. Figures of toys mean nothing."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch

from builder.tasks.tasks import training_task
from demo.data import DemoData, stored, write_tenant
from demo.tasks import Classified, Tagged
from research.papers import __main__ as papers
from research.papers import students
from research.papers.student_ways import elected
from testing.random_store import TOY, random_store, words
from tests.support.learning import by_one_step

WORDS = words(TOY.vocabulary)
VARIANTS = {"team", "no together", "vote", "stacking", "bagging", "bagging, no together", "bagging, vote"}


def classified(rng: random.Random) -> Classified:
    side = rng.randrange(2)
    return Classified(" ".join([WORDS[side], *rng.choices(WORDS[20:], k=5)]), ("left", "right")[side])


def tagged(rng: random.Random) -> Tagged:
    tokens = tuple(rng.choices(WORDS[:8], k=5))
    return Tagged(tokens, tuple("first" if token in WORDS[:4] else "other" for token in tokens))


@pytest.mark.slow
def test_every_way_is_scored_once_and_the_table_has_all(tmp_path, monkeypatch, capsys) -> None:
    """Each trains in one step. The ways are in two files, as of two processes. Of `classify` nothing is finished."""
    rng, sizes = random.Random(0), {"train": 80, "dev": 30, "test": 40}
    random_store(tmp_path / "store", replace(TOY, upper_layers=3), [], ["toys"], corpus_tokens=2000)

    def written() -> DemoData:
        made = {"classify": classified, "tag": tagged}
        parts = {task: {part: [one(rng) for _ in range(size)] for part, size in sizes.items()} for task, one in made.items()}
        return DemoData((), tuple(write_tenant(tmp_path / "data", task, "toys", task, "?", own) for task, own in parts.items()))

    stored(tmp_path / "data", {}, written)
    given = ["students", "--data", str(tmp_path / "data"), "--store", str(tmp_path / "store"), "--quick", "--json"]
    given += ["--learning-rate", "0.1"]
    files = [str(tmp_path / f"{name}.jsonl") for name in ("some", "others")]

    def printed(results: str, *words: str) -> dict:
        with by_one_step():
            assert papers.main([*given, "--results", results, *words]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    assert printed(files[0], "--tasks", "tag", "--ways", "team", "stacking")["members"].keys() == {"team", "stacking"}
    found = printed(files[1], "--tasks", "tag", "--also", files[0])
    monkeypatch.setattr(students, "WAYS", {})  # nothing is missing
    again = printed(str(tmp_path / "none.jsonl"), "--finished", "--also", *files)
    assert again["cases"] == 1 and all(again[part] == found[part] for part in ("of_teacher", "members", "differences"))
    assert {path.suffix for path in tmp_path.glob("*.*")} <= {".jsonl", ".unfinished"}
    assert found["of_teacher"].keys() == {*VARIANTS, "team, all", "teacher", "plain", "equal", "exit"}
    assert all(found["of_teacher"][name].keys() == {"1", "2", "pruned"} for name in VARIANTS)
    assert found["differences"].keys() == {f"{first} - {second}" for first, second in students.PAIRS}


def test_seeds_of_a_task_count_once_and_differences_within_two_errors_are_named() -> None:
    scores = {"a": (0.5, 0.7), "b": (0.7, 0.7)}  # of the team
    cases = [
        (task, {"teacher": {"dev": [1], "test": [0.8]}, "plain": {"dev": [1], "test": [0.4]},
                "team": {"dev": [0.2, 0.1], "test": [score, 0.4]}})
        for task, own in scores.items() for score in own
    ]  # fmt: skip
    found = {row.name: row.value for row in students.table(cases, 3)}
    own = "differences/team - plain"
    assert found["of_teacher/team/1"] == found["of_teacher/team/pruned"] == pytest.approx(0.65 / 0.8)
    assert found["of_teacher/team/3"] == found["of_teacher/team/2"] == pytest.approx(0.5)  # it ended early
    assert found["members/team"] == 2
    assert (found[f"{own}/1/points"], found[f"{own}/1/error"]) == (pytest.approx(100 * 0.25 / 0.8), pytest.approx(6.25))
    assert found[f"{own}/within_two_errors"] == "2, 3"


@pytest.mark.parametrize(
    ("task", "logits", "wanted"),
    [
        ("classify", [[9.0, 0, 0], [0, 1, 0], [0, 1, 0]], [1]),
        ("classify", [[9.0, 0, 0], [0, 1, 0]], [0]),  # the surer one decides
        ("multilabel", [[9.0, -1], [1, -1], [-9, 2]], [0]),
        ("regress", [[1.0], [2], [90]], 2),
    ],
)
def test_most_members_decide(task: str, logits: list, wanted: object) -> None:
    (found,) = elected(training_task(task), torch.tensor([logits]))
    chosen = {"classify": [int(found.argmax())], "multilabel": (found > 0).nonzero()[:, 0].tolist(), "regress": float(found[0])}
    assert chosen[task] == wanted
