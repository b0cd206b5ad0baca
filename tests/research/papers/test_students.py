"""The study of students: each way is scored once, and the table compares them. Figures of toys mean nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from builder.learning.masked import MaskedHead
from demo.data import stored
from research.papers import __main__ as papers
from research.papers import students
from testing.random_store import TOY, random_store
from tests.research.toys import toy_data
from tests.support.learning import by_one_step

SMALL = {"train": 80, "dev": 30, "test": 40}
VARIANTS = {
    *("team", "no together", "vote", "stacking", "hardest", "augmented", "longer", "bagging", "bagging, no together"),
    "bagging, vote",
}


def on_toys(folder: Path) -> list[str]:
    """Returns the words of the command, for a store and data that it makes."""
    store = random_store(folder / "store", replace(TOY, upper_layers=3), [], ["toys"], corpus_tokens=2000)
    store.save_masked_head("root", 1, MaskedHead(store.config).state_dict())
    (folder / "data").mkdir()
    stored(folder / "data", {}, lambda: toy_data(folder / "data", SMALL))
    return ["students", "--data", str(folder / "data"), "--store", str(folder / "store"), "--quick", "--json"]


@pytest.mark.slow
def test_every_way_is_scored_once_and_the_table_has_all(tmp_path, capsys) -> None:
    """Of the other task nothing is finished."""
    given = [*on_toys(tmp_path), "--learning-rate", "0.1", "--results", str(tmp_path / "results.jsonl")]

    def printed(*words: str) -> dict:
        with by_one_step():
            assert papers.main([*given, *words]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    assert printed("--tasks", "toy-classify", "--ways", "team", "stacking")["members"].keys() == {"team", "stacking"}
    found = printed("--tasks", "toy-classify")
    assert printed("--tasks", "toy-classify")["of_teacher"] == found["of_teacher"]
    again = printed("--finished")
    assert again["cases"] == 1 and all(again[part] == found[part] for part in ("of_teacher", "members", "differences"))
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
