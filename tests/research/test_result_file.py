"""A file of results: each number has one line, and neither an interruption nor a second process loses one."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from research.result_file import ResultFile
from tests.support.killed import deaths_survived


def run_of(task: str, seed: int) -> dict:
    return {"task": task, "training": {"rank": 32, "places": None}, "seed": seed}


def put_all(folder: Path) -> ResultFile:
    results = ResultFile(folder / "results" / "numbers.jsonl")
    for task, seed, accuracy in (("b", 0, 0.5), ("a", 1, 0.7), ("b", 0, 0.8)):
        results.put(run_of(task, seed), {"accuracy": accuracy})
    return results


def test_a_number_is_found_by_its_run_and_an_interruption_loses_none(tmp_path: Path) -> None:
    results = put_all(tmp_path)
    assert results.get(run_of("b", 0)) == {"accuracy": 0.8} and results.get(run_of("a", 2)) is None
    assert list(results) == [(run_of("a", 1), {"accuracy": 0.7}), (run_of("b", 0), {"accuracy": 0.8})]
    assert deaths_survived(put_all, tmp_path) == 3


def _puts(results: ResultFile, task: str) -> None:
    for seed in range(10):
        results.put(run_of(task, seed), {"accuracy": seed / 10})


def test_processes_that_write_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    results = ResultFile(tmp_path / "numbers.jsonl")
    with ProcessPoolExecutor(3, get_context("fork")) as pool:
        list(pool.map(_puts, [results] * 3, "abc"))
    found = {(run["task"], run["seed"]): result["accuracy"] for run, result in results}
    assert found == {(task, seed): seed / 10 for task in "abc" for seed in range(10)}
