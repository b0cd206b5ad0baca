"""`python -m research.papers students`: the score that each part of Student Parallelism's training adds, on unseen texts.

`student_ways.py` has the ways. Each is scored on the task's test file, whose texts nothing has seen.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

import numpy as np

from bench.rows import Device, Positive, Row, Rows, Whole, benchmark, say
from builder.store.resumable import digest_of
from builder.store.store import Store
from builder.students.build import check
from builder.students.options import StudentOptions
from builder.tasks.lookup import Texts
from builder.training.data import Data
from builder.training.finetuning import TrainingOptions
from demo.data import DemoTenant, data_of
from hplm.engine.engine import resolve_device
from hplm.errors import InvalidInput
from research.papers.student_ways import WAYS, StudentCase, Variants, Way
from research.result_file import ResultFile
from research.result_file import digest_of as digest_of_run
from research.schemes.teachers import BODY_RATE, DEDICATED, HEAD_RATE
from research.schemes.trained import read_task

ALL, BEST = "all", "pruned"  # students; the number that scores best on dev
ALONE = ("teacher", "plain", "equal", "exit")  # variants without a number of students
PAIRS = (
    ("stacking", "team"), ("hardest", "team"), ("augmented", "longer"), ("longer", "team"), ("team", "no together"),
    ("team", "bagging"), ("no together", "bagging, no together"),
    ("team", "team, all"), ("team", "vote"), ("bagging", "bagging, vote"), ("team", "plain"), ("team", "equal"),
    ("team", "exit"),
)  # fmt: skip


@benchmark(students=2, epochs=2, rank=16, learning_rate=3e-3, seeds=(0,), texts=160)
def students(
    *,
    data: Path,
    store: Path,
    results: Path = Path(".hplm/students/results.jsonl"),
    tasks: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (0, 1, 2),
    ways: tuple[Way, ...] = tuple(WAYS),
    layers: Whole = 2,
    students: Whole = 3,
    rank: Whole = 48,
    epochs: Whole = 9,
    learning_rate: Positive = 3e-3,
    teacher: Literal["own", "dedicated"] = "own",
    adapter: Literal["bottleneck", "lora"] = "bottleneck",
    texts: int = 0,
    finished: bool = False,
    device: Device = "auto",
) -> Rows:
    """Computes the scores that are missing. Prints their means over tasks and seeds, divided by those of the teacher.

    A difference is in points of the teacher's score, with its standard error over tasks; of one task, over seeds.

    :param data: a folder of the demo's data
    :param store: with tables of their domains
    :param results: file of finished scores
    :param tasks: tenants of the data; default: all that may have students
    :param ways: teacher, team, stacking, hardest, augmented (where the domain has a masked head), longer, bagging, plain,
        equal, exit; default: all
    :param layers: upper layers of a student
    :param students: of a team
    :param rank: of each student's LoRA
    :param epochs: passes over the texts, of each student and then of all together
    :param learning_rate: of students
    :param teacher: own: the tenant's full stack; dedicated: a BERT that is fine-tuned in full
    :param adapter: of the tenant
    :param texts: of train and of dev, at most; 0: all
    :param finished: compute nothing, and show the tasks and seeds of which all ways are finished
    """
    opened, on, folder = Store(store), resolve_device(device), results.with_suffix(".unfinished")
    options = StudentOptions(layers, students, rank, epochs, learning_rate)
    training = TrainingOptions(adapter=adapter)
    if teacher == DEDICATED:
        training = TrainingOptions(rank=0, learning_rate=HEAD_RATE, body_rate=BODY_RATE)
    shared = {"upper": digest_of(opened.folder / "upper.safetensors"), "texts": texts}
    kept = ResultFile(results)
    asked: list[Way] = ["teacher", *(way for way in ways if way != "teacher")]
    cases: list[tuple[str, Variants]] = []
    for task in _tasks(data, tasks, opened, options):
        place = task.domain, opened.latest(task.domain)
        own = {"task": task.id, "data": digest_of(task.train, task.dev, task.test), "tables": opened.chain_digest(*place)}
        read: tuple[Data, Texts] | None = None
        for seed in seeds:
            both = replace(options, seed=seed), replace(training, seed=seed)
            told = {**shared, **own, "students": asdict(both[0]), "teacher": asdict(both[1])}
            stored = kept.of({**told, "way": way} for way in asked)
            found = {way: result and result["scores"] for way, result in zip(asked, stored, strict=True)}
            missing: list[Way] = [way for way in asked if found[way] is None]
            if missing and not finished:
                read = read or read_task(opened, task, place, on, texts)
                case = StudentCase(*read, *both, folder / f"{task.id}-{seed}-{digest_of_run(told)}")
                case.folder.mkdir(parents=True, exist_ok=True)
                for way in missing:
                    say(f"{task.id}, seed {seed}: {way}")
                    try:
                        found[way] = WAYS[way](case)
                    except InvalidInput as error:  # such as a first student that learns nothing
                        say(f"{task.id}, seed {seed}: left out of the figures, without {way}: {error}")
                        continue
                    kept.put({**told, "way": way}, {"scores": found[way], "device": on.type})
                shutil.rmtree(case.folder)
            if None not in found.values():
                cases.append((task.id, {name: own for scores in found.values() if scores for name, own in scores.items()}))
    if not cases:
        way_out = "leave out --finished" if finished else "give other --tasks, --layers or --epochs"
        raise InvalidInput(f"{results}: no task is finished with any of these seeds: {way_out}")
    yield from table(cases, students)


def _tasks(folder: Path, named: Sequence[str], store: Store, options: StudentOptions) -> list[DemoTenant]:
    known = {task.id: task for task in data_of(folder).tenants}
    if unknown := [task for task in named if task not in known]:
        raise InvalidInput(f"--tasks {unknown[0]}: choose from {', '.join(known)}")
    found = [known[task] for task in named or known if named or known[task].task != "span"]
    for task in found:
        check(store, task.id, task.task, options)
    return found


def table(cases: Sequence[tuple[str, Variants]], students: int) -> Rows:
    """Yields means over cases, each a task and what was found. A team that ended early counts with all that it has."""
    shares = [(task, shares_of(variants, students)) for task, variants in cases]
    yield Row("cases", len(cases))
    yield Row("teacher_score", estimated([(task, own["teacher"]["test"][0]) for task, own in cases])[0])
    known = {name: numbers for name, numbers in shares[0][1].items() if all(name in own for _, own in shares)}
    for name in (name for name in ("team", "stacking") if name in known):
        yield Row(f"members/{name}", fmean(len(own[name]["test"]) for _, own in cases))
    for name, numbers in known.items():
        for number in numbers:
            yield Row(f"of_teacher/{name}/{number}", estimated([(task, own[name][number]) for task, own in shares])[0])
    for first, second in (pair for pair in PAIRS if known.keys() >= set(pair)):
        alike, at = list[str](), f"differences/{first} - {second}"
        for number in known[first]:
            against = number if number in known[second] else ALL
            gap, error = estimated([(task, 100 * (own[first][number] - own[second][against])) for task, own in shares])
            yield Row(f"{at}/{number}/points", gap)
            yield Row(f"{at}/{number}/error", error)
            if error is None or abs(gap) <= 2 * error:
                alike.append(number)
        yield Row(f"{at}/within_two_errors", ", ".join(alike) or "none")


def shares_of(variants: Variants, students: int) -> dict[str, dict[str, float]]:
    """Returns scores on test, divided by the teacher's, by variant and number of students."""
    found: dict[str, dict[str, float]] = {}
    for name, scored in variants.items():
        test = [score / variants["teacher"]["test"][0] for score in scored["test"]]
        if name in ALONE:
            found[name] = {ALL: test[-1]}
            continue
        each = [*test, *test[-1:] * (students - len(test))]
        found[name] = {str(number): share for number, share in enumerate(each, 1)}
        found[name][BEST] = test[int(np.argmax(scored["dev"]))]
        if name == "team":
            found["team, all"] = {ALL: test[-1]}
    return found


def estimated(cases: Sequence[tuple[str, float]]) -> tuple[float, float | None]:
    """Returns the mean over tasks and its standard error: None for a single number.

    The seeds of a task share its texts, so its mean counts once. Only if there is one task, its seeds count.
    """
    by_task: dict[str, list[float]] = {}
    for task, value in cases:
        by_task.setdefault(task, []).append(value)
    means = [fmean(own) for own in by_task.values()]
    each = means if len(means) > 1 else next(iter(by_task.values()))
    return fmean(means), stdev(each) / sqrt(len(each)) if len(each) > 1 else None
