"""The figures that benchmarks compute from reports, journals and simulations, by hand where nothing needs to run."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from bench import infinity, overload, sizing
from bench.rows import Row, rows_of, rows_of_rounds
from bench.run import apart, nested, table_of
from bench.simulated import simulate
from hplm.engine.settings import EncoderSettings
from hplm.simulate.arrivals import Arrivals
from loadtest.load import Report
from tests.engine.asker import PARAMETERS


def report(numbers: list[int], statuses: list[int], latencies: list[float], **more: object) -> Report:
    found = np.array(numbers), np.array(statuses), np.array(latencies)
    return Report(2.0, 0.1, *found, lag_s=0.0, errors=Counter(timeout=1), **more)


def offered(at: list[float], allowed: list[float], tokens: int | list[int] = 4) -> Arrivals:
    zeros = np.zeros(len(at))
    return Arrivals(1e9 * np.array(at), np.broadcast_to(tokens, len(at)), 1e9 * np.array(allowed), zeros, zeros)


def test_the_rate_of_a_core_at_a_p99_lies_between_the_measured_ones() -> None:
    points = [(1.0, 50.0), (2.0, 60.0), (4.0, 160.0), (5.0, 90.0)]
    found = [sizing.within(points, limit) for limit in (40, 50, 60, 110, 159, 160)]
    assert found == [None, 1.0, 2.0, 3.0, 3.98, 5.0]


def test_utility_is_that_of_texts_started_in_time_and_on_time_is_what_the_client_saw() -> None:
    entries = [
        {"request": "", "tokens": 4, "started": 10.1, "deadline": 10.5},  # answered in time
        {"request": "", "tokens": 2, "started": 11.4, "deadline": 11.5},  # started in time and answered late
        {"request": "", "tokens": 4, "started": 0, "deadline": 10.7},  # expired
        {"request": "", "tokens": 4, "started": 12.1, "deadline": 12.0},  # started too late
        {"request": "", "tokens": 4, "started": 5.0, "deadline": 0},  # of the closed loop
        {"batch": 1, "tokens": 6},
    ]
    seen = report([0, 2, 1], [200, 200, 503], [0.4, 0.6, 0.1])  # the fourth has no answer
    found = overload.compared_figures(seen, entries, offered([0.0, 0.5, 1.0, 1.5], [0.5, 0.2, 0.5, 0.5], [4, 4, 2, 4]))
    assert found == pytest.approx({"texts_per_s": 1.0, "on_time": 0.25, "utility": 0.6})
    around = [{"texts_per_s": 0.5, "on_time": on_time, "utility": 0.4} for on_time in (0.4, 0.6)]
    assert overload.ratios(found, around) == pytest.approx({"texts_per_s": 2.0, "on_time": 0.5, "utility": 1.5})


def test_refused_late_and_timely_answers_are_counted_separately() -> None:
    said = f"[deadline] {overload.REFUSED} 900 ms".encode()
    #           in time, late, refused at once, dropped later
    bodies = [b"fine", b"fine", said, b"[deadline] not started within the 100 ms"]
    seen = report([0, 2, 1, 3], [200, 200, 503, 503], [0.4, 0.3, 0.005, 0.2], bodies=bodies)
    load = offered([0.0, 0.5, 1.0, 1.5, 2.0], [0.5, 0.5, 0.2, 0.2, 0.2])
    found = {row.name: row.value for row in overload.figures(seen, load, capacity=1.0, batch=4, by_server=3)}
    assert (found["refused"], found["dropped_later"], found["late"], found["unanswered"]) == (1, 1, 1, 1)
    assert found["on_time_of_admitted"] == 0.25  # of four: the one without an answer counts against the server
    assert (found["goodput_of_capacity"], found["on_time_of_offered"], found["refusal_p99_ms"]) == (0.5, 0.2, 5.0)
    assert (found["on_time"], found["on_time_by_server"], found["server_counts_more"]) == (1, 3, 2.0)


def batch_entry(number: int, ready: float, start: float, end: float, computing: float = 0.1) -> dict[str, Any]:
    stages = {"prepare": [ready - 0.02, ready - 0.01], "swap": [ready - 0.01] * 2, "retrieve": [ready - 0.01, ready]}
    counts = {"batch": number, "texts": 1, "tokens": 128, "brought": 0, "computing": computing}
    return {**counts, "stages": {**stages, "compute": [start, end]}}


def request_entry(arrived: float, batch: int, computed: float, answered: float) -> dict[str, Any]:
    times = {"arrived": arrived, "taken": arrived + 0.01, "computed": computed, "answered": answered, "deadline": 99.0}
    return {"request": "", "batch": batch, **times}


# On their way are 10 ms to the engine, 20 of staging, 100 of computing, 10 until the answer and 50 outside of the server.
@pytest.mark.parametrize(("allowed", "in_time"), [([0.1895], 0), ([0.1905], 1), ([0.3095, 0.3095], 0.5), ([0.3105, 0.3105], 1)])
def test_the_simulated_server_is_charged_with_each_time_of_the_measured_one(allowed: list[float], in_time: float) -> None:
    entries = [
        {"request": "", "deadline": 0, "batch": 1},  # of the closed loop, whose batches are faster
        batch_entry(1, 1.0, 1.0, 1.01, 0.01),
        batch_entry(2, 10.0, 10.0, 10.1),
        batch_entry(3, 10.05, 10.13, 10.23),  # ready before the second one ends: 30 ms go by between them
        batch_entry(4, 10.28, 10.31, 10.41),  # ready after the third one has ended
        batch_entry(5, 10.3, 10.37, 10.53),  # begins before the fourth one ends
        request_entry(9.9, 2, 10.1, 10.11),
        request_entry(9.9, 5, 10.53, 10.54),
        request_entry(9.9, 0, 0, 9.93),  # refused
        {"request": "", "deadline": 0, "batch": 6},
        batch_entry(6, 20.0, 20.0, 20.01, 0.01),
    ]
    seen = report([0, 1, 2], [200, 200, 503], [0.26, 0.69, 0.08])
    settings = EncoderSettings.read({**PARAMETERS, "policy": "fcfs", "admission": "false", "batch_tokens": "128"})
    assert simulate(offered([0.0] * len(allowed), allowed, 128), seen, entries, settings) == in_time


def test_rows_nest_by_slashes_share_a_line_by_their_number_and_miss_targets() -> None:
    rows = [
        *rows_of({"rates": {"0.5": {"das": 1.0}, "2": {"das": 0.25}}, "cut": [1, 2]}, {"rates/2/das": (">=", 0.5)}),
        Row("p99", None, "ms", most=3.0),
        Row("slow", 4.0, most=3.0),
        Row("fast", 2.0, most=3.0),
    ]
    found = nested(rows)
    assert found["rates"] == {"0.5": {"das": 1.0}, "2": {"das": 0.25}} and found["cut"] == "1, 2" and found["p99"] is None
    assert found["targets"]["rates/2/das"] == "at least 0.5"
    assert [row.name for row in rows if row.missed] == ["rates/2/das", "p99", "slow"]
    shown = table_of(rows).splitlines()
    assert shown[0].split(maxsplit=1) == ["rates/das", "0.5: 1   2: 0.25 (at least 0.5: MISSED)"] and "met" in shown[-1]


def test_several_values_may_stand_between_commas_if_they_are_names_or_numbers() -> None:
    assert apart(["--studies", "root,tenants-10", "1,2.5"]) == ["--studies", "root", "tenants-10", "1", "2.5"]
    assert apart(kept := ["das:rows=1,row_tokens=2", "normal:20,20", "a,b/c"]) == kept


def test_a_figure_of_several_rounds_is_their_median_beside_the_least_and_the_most() -> None:
    rows = list(rows_of_rounds([{"over/b": 0.4}, {"over/b": 1.1}, {"over/b": 0.9}], {"over/b": (">=", 1.0)}))
    assert nested(rows) == {"over": {"b": 0.9}, "spread": {"over/b": [0.4, 1.1]}, "targets": {"over/b": "at least 1"}}
    assert table_of(rows).split(maxsplit=1)[1] == "0.9, 0.4 to 1.1 (at least 1: MISSED)"
    assert "spread" not in nested(list(rows_of_rounds([{"over": 0.4}])))


@pytest.mark.parametrize(("vectors", "target"), [(True, 2.5), (False, 3.0)])
def test_vectors_and_labels_are_compared_with_the_mean_rate_of_infinity(vectors: bool, target: float, monkeypatch) -> None:
    theirs = [(report([0], [200], [0.2]), report([0, 1], [200, 200], [0.2, 0.2])), (report([0], [200], [0.4]),) * 2]
    asked: list[Any] = []

    def tenants_served(*given: Any) -> list[Row]:
        asked.append(given)
        return [
            Row(f"tenants/{count}/{name}", value) for count in (1, 32) for name, value in (("p50_ms", 60.0), ("req_per_s", 1.5))
        ]

    for name, fake in {
        "make_environment": lambda folder: folder, "save_whole": lambda folder: folder, "_serving": lambda *_: nullcontext(""),
        "one_and_many": lambda *_: theirs.pop(0), "tenants_served": tenants_served,
    }.items():  # fmt: skip
        monkeypatch.setattr(infinity, name, fake)
    rows = {row.name: row for row in infinity.infinity(dtype="fp32", tenants=(32, 1), vectors=vectors)}
    assert asked == [("minilm", 128, [1, 32], 10.0, infinity.CLIENTS, "fp32", vectors)]
    assert rows["hplm_over_infinity/32/c1"].value == pytest.approx(5.0) and rows["infinity_drift"].value == 0.5
    assert (rows["hplm_over_infinity/1/c32"].value, rows["hplm_over_infinity/1/c32"].least) == (2.0, target)
